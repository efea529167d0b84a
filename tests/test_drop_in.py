"""The lines that trainer.md and pipeline.md show, applied to the usual trainers that they show them for."""

import itertools
import os
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import ROOT, applied
from test_pages import WORLD

from lioncub_jax.programs.compiled import collectives

os.environ.setdefault("KERAS_BACKEND", "jax")  # before anything imports keras
TRAINERS = ROOT / "examples" / "trainers"
PAGES = ROOT / "docs/how_to"
DOCUMENT = (PAGES / "trainer.md").read_text() + (PAGES / "pipeline.md").read_text()
SHOWN = dict(re.findall(r"<!-- drop-in: (\w+) -->\n```diff\n(.*?)```", DOCUMENT, re.DOTALL))
INNER = ROOT / "examples" / "inner_axes"
PROGRAMS = sorted(path.stem for path in INNER.glob("*.py") if path.stem != "common")
STYLES = sorted(path.stem for path in TRAINERS.glob("*.py") if path.stem != "common")
NEEDS = {"equinox_filter": "equinox", "haiku_rnn": "haiku", "keras_stateless": "keras"}
WORKERS = {"data", "batch"}  # what the trainers call their axis
STEPS, LEARNING_RATE = 20, 3e-3
NOISE = 0.1  # in a loss; seeds of Lion's differ by as much
OF_CHANCE = {"keras_stateless"}  # each worker draws its own units to drop


def usual(style):
    return (TRAINERS / f"{style}.py").read_text()


def changed(style):
    return applied(SHOWN[style], usual(style))


def trained(mesh, state, step, batches):
    """Losses of a step for each batch, what travels in the compiled step, and the state."""
    compiled, losses = step.lower(state, batches[0]).compile(), []
    for batch in batches:
        state, metrics = jax.block_until_ready(step(state, batch))
        losses.append(np.mean(metrics["loss"] if isinstance(metrics, dict) else metrics))
    return losses, collectives(getattr(compiled, "compiled", compiled), mesh), state  # equinox's


def run(source, steps):
    """A trainer for some steps."""
    names = {"__name__": "trainer"}
    exec(compile(source, "trainer.py", "exec"), names)
    mesh = names["common"].make_mesh(**names["AXES"])
    state, step = names["build"](mesh, LEARNING_RATE)
    return trained(mesh, state, step, [*itertools.islice(names["batches"](mesh), steps)])


def crossing(found):
    """What goes from worker to worker, but for numbers."""
    workers = [one for one in found if one.axes is None or WORKERS & set(one.axes)]
    return [one for one in workers if one.payload_bytes > 8]


def bytes_within(found):
    """What the devices of a worker exchange, over an axis of theirs alone or over all axes."""
    return sum(one.payload_bytes for one in found if set(one.axes or ()) - WORKERS)


def dtypes(sent):
    return {operand.dtype for one in sent for operand in one.operands}


# Bytes of batch statistics, which are averaged with the loss and beside a few numbers.
STATISTICS = {"keras_stateless": 4 * 2 * (16 + 32)}


def is_packed(found, name):
    """Whether integers alone go from worker to worker, but for the statistics of such a model."""
    floats = [one for one in crossing(found) if dtypes([one]) != {"u32"}]
    sent = sum(one.payload_bytes for one in floats)
    expected = STATISTICS.get(name, 0)
    return len(crossing(found)) > len(floats) and expected <= sent <= expected + 32 * bool(expected)


def test_every_trainer_is_shown():
    assert sorted(SHOWN) == STYLES and len(STYLES) >= 6 and len(PROGRAMS) >= 5


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
    losses, after, _ = run(changed(style), STEPS if whole else 2)
    votes = crossing(after)
    assert np.isfinite(losses).all() and is_packed(after, style)
    if not whole:
        return
    (first,), before, _ = run(usual(style), steps=1)
    floats = crossing(before)
    assert dtypes(floats) == {"f32"}
    sent, full = (sum(one.sent_bytes for one in each) for each in (votes, floats))
    assert sent < full / 10 and bytes_within(after) <= 1.02 * bytes_within(before)
    assert abs(losses[0] - first) < (NOISE if style in OF_CHANCE else 1e-3)
    assert np.mean(losses[-3:]) < losses[0] - NOISE


def run_program(name, changes):
    """A program with inner axes, for some steps on windows of nine bytes."""
    text = np.frombuffer(Path(re.__file__).read_bytes(), np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(text, 9)[:128]
    names = {"windows": windows}
    source = (INNER / f"{name}.py").read_text()
    for old, new in changes.items():
        source = re.sub(old, new, source)
    exec(WORLD, names)
    exec(source, names)
    mesh = names["mesh"]
    with jax.set_mesh(mesh), nn.logical_axis_rules(names.get("RULES", ())):
        rows = jax.device_put(windows, NamedSharding(mesh, names.get("rows", P("data"))))
        return trained(mesh, names["state"], names["train_step"], [rows] * STEPS)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("explicit", "owner_adamw"), *((x, "lion_cub") for x in PROGRAMS)],
)
def test_a_program_learns_and_integers_alone_cross_the_workers_axis(name, optimizer, monkeypatch):
    monkeypatch.syspath_prepend(str(INNER))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    losses, found, state = run_program(name, {"lion_cub": optimizer})
    assert is_packed(found, name) and losses[-1] < losses[0] - NOISE
    if (
        name == "linen_fsdp"
    ):  # momentum lies with its worker, cut as the parameters, and so does all else
        momenta, params = jax.tree.leaves(state.opt_state[0].mu), jax.tree.leaves(state.params)
        for mu, p in zip(momenta, params, strict=True):
            lies = NamedSharding(p.sharding.mesh, P("data", *p.sharding.spec))
            assert mu.shape == (4, *p.shape) and mu.sharding.is_equivalent_to(lies, mu.ndim)
        usual = {
            r"lc\.lion_cub\(.*\)": "optax.lion(1e-3)",
            r"train_step = lc\.map_step.*": "",
        }
        _, before, _ = run_program(name, usual)
        assert dtypes(crossing(before)) == {"f32"}
        assert bytes_within(found) <= 1.02 * bytes_within(before)
