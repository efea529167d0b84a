"""The Python of the pages, run as it stands there: block after block of a page, in one small world.

A block that cannot run here has ``<!-- not run: why -->`` above it.
"""

import os
import re
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import optax
import pages
import pytest

DOCS = pages.ROOT / "docs"

# What a reader has already.
WORLD = """
import flax.linen as nn
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import lioncub_jax as lc

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
workers = lc.Workers(mesh, "data")
params = {"w": jnp.ones((16, 24))}
loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
batch = np.ones((128, 16), np.float32)
batches = [batch, batch]
tx = lc.owner_adamw(1e-3, workers=workers)
"""
STEP = """
state = lc.init_state(tx, params, workers)
step = lc.make_train_step(loss, tx, workers)
"""
# What a page has besides, before the first block with these words, or around it: [block].
BEFORE = {
    "../README.md": {
        "map_step(train_step, workers)": "train_step = lambda params, batch: loss(params, batch, None)",
    },
    "start/coming_from.md": {},
    "explain/votes.md": {"lc.owner(": ""},
    "explain/sync.md": {"sync=": ""},
    "explain/muon.md": {},
    "how_to/checkpoints.md": {
        "batches(position)": STEP + "batches = lambda position: [batch] * 2",
        "restore_with_my_own_code()": """
            def restore_with_my_own_code():
                return params, optax.adamw(1e-3).init(params)[0]
            kept = tx, state
        """,
        "nnx.state(model": """
            (tx, state), checkpoints, n = kept, lc.Checkpoints("runs/b", workers=workers), 3
            model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
            model.norm = nnx.BatchNorm(24, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        """,
    },
    "how_to/faults.md": {
        "Replicas(": STEP + "batches = batches * 2",
    },
    "how_to/meshes.md": {
        '"fsdp"), axis_types': """
            loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
            spec = {"w": P(None, "fsdp")}
            inner = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
            shardings = jax.tree.map(lambda x: NamedSharding(inner, x), spec)
        """,
        "two_level_mesh": "params = jax.tree.map(np.asarray, params)",
        "nnx.Optimizer(model": """
            workers = lc.Workers(inner, "data")
            with jax.set_mesh(inner):
                boxed = nnx.with_partitioning(nnx.initializers.ones, (None, "fsdp"))
                model = nnx.Linear(16, 24, use_bias=False, kernel_init=boxed, rngs=nnx.Rngs(0))
            boxed_params = {"kernel": nn.Partitioned(jnp.ones((16, 24)), (None, "fsdp"))}
            model.apply = None
        """,
    },
    "how_to/lab.md": {"lab.run(": ""},
    "how_to/evaluate.md": {
        "train_step(model": """
            class Model(nnx.Module):
                def __init__(self, rngs):
                    self.linear = nnx.Linear(16, 4, rngs=rngs)
                    self.norm = nnx.BatchNorm(4, rngs=rngs)
                def __call__(self, x):
                    return self.norm(self.linear(x))
            model, images, labels = Model(nnx.Rngs(0)), batch, np.zeros(len(batch), int)
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            @lambda step: lc.map_step(step, workers)
            def train_step(model, optimizer, batch):
                loss = lambda model: jnp.mean((model(batch) - batch[:, :4]) ** 2)
                value, grads = nnx.value_and_grad(loss)(model)
                optimizer.update(model, grads)
                return {"loss": value}
            @nnx.jit
            def right(model, images, labels):
                return (model(images).argmax(-1) == labels).sum()
            def whole(model, optimizer):
                params, rest = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
                return {"params": params, "rest": rest, "optimizer": optimizer}
        """,
    },
    "how_to/trainer.md": {
        "one_per_device": """
            loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
            def step_with(tx, loss_fn=loss_fn):
                def one_step(state, batch):
                    params, opt_state = state
                    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
                    updates, opt_state = tx.update(grads, opt_state, params)
                    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}
                return one_step
            one_step = step_with(tx)
        """,
        "with_ema(": "tx = lc.owner_adamw(1e-3, workers=workers)",
        'Workers(mesh, "batch")': """
            of_step, state, folder = state, {"mu": np.ones((8, 3))}, "saved"
        """,
        "def steps(": "state = of_step",
        '"frozen": optax': "plain = params",
        "sharpness_aware": "params = plain",
    },
    "how_to/mixed_precision.md": {"class Master(": "from typing import NamedTuple"},
    "how_to/profile.md": {},
    "how_to/spot.md": {},
    "reports/accelerators.md": {},
}


def run_here(page):
    """Its blocks of Python that can run."""
    each = [one for one in pages.blocks(page) if one.language == "python"]
    elsewhere = "not run: ", "quickstart"
    return [one.code for one in each if not one.mark.startswith(elsewhere)]


@pytest.mark.parametrize("page", BEFORE)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    (tmp_path / "train.py").write_text("print('a worker')")
    names, before = {}, dict(BEFORE[page])
    exec(WORLD, names)
    for block in run_here(page):
        code = block
        for words in [words for words in before if words in block]:
            around = textwrap.dedent(before.pop(words))
            if "[block]" in around:
                code = around.replace("[block]", textwrap.indent(code, " " * 4).lstrip())
            else:
                exec(around, names)
        exec(compile(code, page, "exec"), names)
    assert not before, "the page has lost a block"
    if "metrics" in names:
        assert np.isfinite(names["metrics"]["loss"])


def test_each_optimizer_that_the_page_writes_for_another_library_sends_what_is_counted(tmp_path):
    names = {"folder": tmp_path / "saved"}
    exec(WORLD, names)
    page = (DOCS / "start/coming_from.md").read_text()
    cells = re.findall(r"^\|.*\| ?(.*) \|$", page, re.M)
    found = [
        code for cell in cells for code in re.findall(r"`((?:lc|optax)\.[\w.]+\(.*?\))`", cell)
    ]
    shapes, sent = jax.eval_shape(lambda: names["params"]), {}
    for code in found:
        if not re.search(r"\.\.\.|diloco|_step\(|\bjoin\(", code):
            tx = eval(code, names)
            if isinstance(tx, optax.GradientTransformation):
                sent[code] = names["lc"].audit.of(tx, shapes, names["workers"]).sent_bytes
    assert len(sent) >= 7 and all(sent.values())


COMMANDS = [
    pytest.param(one.code, id=f"{page}: {one.code.splitlines()[0]}", marks=marks)
    for page, mark, marks in [
        ("how_to/planner.md", "run: here", ()),
        ("how_to/spot.md", "run: here", ()),
    ]
    for one in pages.blocks(page)
    if one.mark == mark
]


@pytest.mark.parametrize("code", COMMANDS)
def test_the_commands_of_a_page_run(code, tmp_path):
    assert all(pages.run_commands(code, tmp_path))


def test_the_readme_shows_the_core_of_the_quickstart():
    source = (pages.ROOT / "examples/quickstart.py").read_text()
    (core,) = re.findall(r"# \[quickstart\]\n(.*?)# \[/quickstart\]", source, re.S)
    assert pages.block("../README.md", "quickstart") == core and core.count("\n") <= 14


def test_every_block_of_code_is_run_or_says_why_not():
    """Python without a comment runs above; a comment names who runs it, in words that a test has."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    makefile = (pages.ROOT / "Makefile").read_text()
    files = [
        *DOCS.glob("**/*.md"),
        *(pages.ROOT / "examples").glob("*.md"),
        *pages.ROOT.glob("*.md"),
    ]
    for page in (os.path.relpath(path, DOCS) for path in files):
        for mark, language, code in pages.blocks(page):
            known = [
                mark.startswith("not run: ") and len(mark) > 15,
                mark.startswith("run: make ") and f"\n{mark[10:]}:" in makefile,
                mark and (mark in tests or mark.startswith(("drop-in: ", "example: ", "recipe: "))),
                language == "python" and not mark and page in BEFORE,
                language.startswith("{"),  # what Sphinx runs
            ]
            assert any(known), f"{page}: nobody runs, or says why not: {mark!r}\n{code}"
