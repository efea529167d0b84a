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
    "start/coming_from.md": {},
    "explain/votes.md": {"lc.owner(": ""},
    "explain/sync.md": {"sync=": ""},
    "how_to/checkpoints.md": {
        "batches(position)": STEP + "batches = lambda position: [batch] * 2",
        "nnx.state(model": """
            checkpoints, n = lc.Checkpoints("runs/b", workers=workers), 3
            model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, lc.on_mesh(tx, workers), wrt=nnx.Param)
        """,
    },
    "how_to/faults.md": {
        "elastic.memory()": """
            shapes, first = jax.eval_shape(lambda: params), params
            params = lambda: first
        """,
        "Replicas(": "batches = batches * 2",
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
    "how_to/trainer.md": {
        "nnx.merge(graph, params, rest": """
            from lioncub_jax.training import batch, own
            class Model(nnx.Module):
                def __init__(self, rngs):
                    self.linear = nnx.Linear(16, 4, rngs=rngs)
                    self.norm = nnx.BatchNorm(4, rngs=rngs)
                def __call__(self, x):
                    return self.norm(self.linear(x))
            loss_fn = lambda model, images, labels: jnp.mean((model(images) - labels) ** 2)
            model, images, labels = Model(nnx.Rngs(0)), np.ones((16, 16), np.float32), np.ones((16, 4))
            optimizer = nnx.Optimizer(model, lc.on_mesh(tx, workers), wrt=nnx.Param)
            nnx.update(model, lc.training.own_state(nnx.state(model, nnx.BatchStat), workers))

            @nnx.jit
            def step(model, optimizer, images, labels):
                [block]

            step(model, optimizer, images, labels)
        """,
        'Workers(mesh, "batch")': 'state, folder = {"mu": np.ones((8, 3))}, "saved"',
        "class_weights": "workers = lc.Workers(jax.make_mesh((8,), ('data',)), 'data')",
    },
    "how_to/large_trainers.md": {},
    "reports/accelerators.md": {},
}


def run_here(page):
    """Its blocks of Python that can run."""
    each = [one for one in pages.blocks(page) if one.language == "python"]
    return [one.code for one in each if not one.mark.startswith("not run: ")]


@pytest.mark.parametrize("page", BEFORE)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIONCUB_MEMORY", str(tmp_path))
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
        if not re.search(r"\.\.\.|diloco|on_mesh|_step\(", code):
            tx = eval(code, names)
            if isinstance(tx, optax.GradientTransformation):
                sent[code] = names["lc"].traffic.of(tx, shapes, names["workers"]).sent_bytes
    assert len(sent) >= 7 and all(sent.values())


def test_every_page_with_python_is_run_or_says_why_not():
    """Here, or by a test of its own that names it."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in DOCS.glob("**/*.md"):
        page = str(path.relative_to(DOCS))
        if run_here(page):
            assert page in BEFORE or f"/{path.name}" in tests, page
