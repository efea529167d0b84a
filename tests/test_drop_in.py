"""The lines that trainer.md and pipeline.md show, applied to the usual trainers that they show them for."""

import itertools
import os
import re
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest
from conftest import mesh_on
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import applied, block
from test_pages import WORLD

from lioncub_jax.audit.compiled import collectives
from lioncub_jax.training import mean_model_state

os.environ.setdefault("KERAS_BACKEND", "jax")  # before anything imports keras
ROOT = Path(__file__).parents[1]
TRAINERS = ROOT / "examples" / "trainers"
PAGES = ROOT / "docs/how_to"
DOCUMENT = (PAGES / "trainer.md").read_text() + (PAGES / "pipeline.md").read_text()
SHOWN = dict(re.findall(r"<!-- drop-in: (\w+) -->\n```diff\n(.*?)```", DOCUMENT, re.DOTALL))
SNIPPETS = re.findall(r"<!-- snippet: (\w+) -->", DOCUMENT)
STYLES = sorted(path.stem for path in TRAINERS.glob("*.py") if path.stem != "common")
NEEDS = {"equinox_filter": "equinox", "haiku_rnn": "haiku", "keras_stateless": "keras"}
WORKERS = {"data", "batch"}  # what the trainers call their axis
STEPS, LEARNING_RATE = 20, 3e-3
NOISE = 0.1  # in a loss; seeds of Lion's differ by as much
# Each worker draws its own units to drop, and has statistics of its own rows, from the first step on.
MODEL_STATES = {"keras_stateless": lambda x: x[1]}
OF_CHANCE = {"keras_stateless"}


def usual(style):
    return (TRAINERS / f"{style}.py").read_text()


def changed(style):
    return applied(SHOWN[style], usual(style))


def run(source, steps):
    """Trains for some steps: the losses, what travels in the compiled step, the state."""
    names = {"__name__": "trainer"}
    exec(compile(source, "trainer.py", "exec"), names)
    mesh = names["common"].make_mesh(**names["AXES"])
    state, step = names["build"](mesh, LEARNING_RATE)
    first, *rest = itertools.islice(names["batches"](mesh), steps)
    compiled = step.lower(state, first).compile()
    state, metrics = compiled(state, first)
    losses = [metrics["loss"]]
    for batch in rest:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    found = collectives(getattr(compiled, "compiled", compiled), mesh)  # equinox wraps it
    return np.reshape(losses, (steps, -1)).mean(1), found, state


def crossing(found):
    """What goes from worker to worker, but for numbers."""
    workers = [one for one in found if one.axes is None or WORKERS & set(one.axes)]
    return [one for one in workers if one.payload_bytes > 8]


def bytes_within(found):
    """What the devices of a worker exchange, over an axis of theirs alone or over all axes."""
    return sum(one.payload_bytes for one in found if set(one.axes or ()) - WORKERS)


def dtypes(sent):
    return {operand.dtype for one in sent for operand in one.operands}


def test_every_trainer_is_shown():
    assert sorted(SHOWN) == STYLES and len(STYLES) >= 6 and len(SNIPPETS) >= 5


# With statistics of a model; all others in whole for a release.
WHOLE = ("keras_stateless",)
CASES = [(style, style in WHOLE) for style in STYLES]
CASES += [pytest.param(x, True, marks=pytest.mark.long) for x in STYLES if x not in WHOLE]


@pytest.mark.parametrize(("style", "whole"), CASES)
def test_after_the_change_integers_alone_cross_the_workers_axis_and_it_learns(
    style, whole, monkeypatch
):
    if style in NEEDS:
        pytest.importorskip(NEEDS[style])
    monkeypatch.syspath_prepend(str(TRAINERS))
    losses, after, state = run(changed(style), STEPS if whole else 2)
    votes = crossing(after)
    assert np.isfinite(losses).all() and dtypes(votes) == {"u32"}
    if not whole:
        return
    (first,), before, _ = run(usual(style), steps=1)
    floats = crossing(before)
    assert dtypes(floats) == {"f32"}
    sent, full = (sum(one.sent_bytes for one in each) for each in (votes, floats))
    assert sent < full / 10 and bytes_within(after) <= 1.02 * bytes_within(before)
    assert abs(losses[0] - first) < (NOISE if style in OF_CHANCE else 1e-3)
    assert np.mean(losses[-3:]) < losses[0] - NOISE
    if style in MODEL_STATES:
        own = MODEL_STATES[style](state)
        for kind in (AxisType.Auto, AxisType.Explicit):
            lies = NamedSharding(mesh_on("data=8", kind), P("data"))
            one = jax.tree.leaves(mean_model_state(jax.device_put(own, lies)))
            for x, each in zip(
                one, jax.tree.leaves(own), strict=True
            ):  # counts are the same for all
                np.testing.assert_allclose(x, np.mean(each, 0), rtol=1e-5, atol=1e-6)


def following(windows):
    """The first of a text, of nine bytes each."""
    text = np.frombuffer(Path(re.__file__).read_bytes(), np.uint8).astype(np.int32)
    return np.lib.stride_tricks.sliding_window_view(text, 9)[:windows]


def run_snippet(name, steps, changes):
    """Losses, what travels in the compiled step, and the state."""
    names, source = {"windows": following(128)}, block("how_to/trainer.md", f"snippet: {name}")
    for old, new in changes.items():
        source = re.sub(old, new, source)
    exec(WORLD, names)
    exec(source, names)
    mesh, state, step = names["mesh"], names["state"], names["train_step"]
    with jax.set_mesh(mesh), nn.logical_axis_rules(names.get("RULES", ())):
        lies = NamedSharding(mesh, names.get("rows", P("data")))
        rows, losses = jax.device_put(names["windows"], lies), []
        compiled = step.lower(state, rows).compile()
        for _ in range(steps):
            state, loss = step(state, rows)
            losses.append(float(loss))
    return losses, collectives(getattr(compiled, "compiled", compiled), mesh), state


@pytest.mark.parametrize(
    ("name", "optimizer"), [("explicit", "owner_adamw"), *((x, "lion_cub") for x in SNIPPETS)]
)
def test_a_snippet_learns_and_integers_alone_cross_the_workers_axis(name, optimizer):
    losses, found, state = run_snippet(name, STEPS, {"lion_cub": optimizer})
    assert dtypes(crossing(found)) == {"u32"} and losses[-1] < losses[0] - NOISE
    if (
        name == "linen_fsdp"
    ):  # momentum lies with its worker, cut as the parameters, and so does all else
        momenta, params = jax.tree.leaves(state.opt_state[0].mu), jax.tree.leaves(state.params)
        for mu, p in zip(momenta, params, strict=True):
            lies = NamedSharding(p.sharding.mesh, P("data", *p.sharding.spec))
            assert mu.shape == (4, *p.shape) and mu.sharding.is_equivalent_to(lies, mu.ndim)
        usual = {
            r"lc\.on_mesh\(.*\)": "optax.lion(1e-3)",
            r"lc\.worker_value_and_grad\(loss_fn, workers, specs=specs,": "jax.value_and_grad(loss_fn,",
        }
        _, before, _ = run_snippet(name, 0, usual)
        assert dtypes(crossing(before)) == {"f32"}
        assert bytes_within(found) <= 1.02 * bytes_within(before)
