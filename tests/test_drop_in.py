"""The lines that docs/drop_in.md shows, applied to the usual trainers that it shows them for."""

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.traffic.compiled import collectives

os.environ.setdefault("KERAS_BACKEND", "jax")  # before anything imports keras
ROOT = Path(__file__).parents[1]
TRAINERS = ROOT / "examples" / "trainers"
DOCUMENT = ROOT / "docs" / "drop_in.md"
STYLES = sorted(path.stem for path in TRAINERS.glob("*.py") if path.stem != "common")
NEEDS = {"equinox_filter": "equinox", "haiku_rnn": "haiku", "keras_stateless": "keras"}
WORKERS = {"data", "batch"}  # what the trainers call their axis
STEPS, LEARNING_RATE = 20, 3e-3
NOISE = 0.1  # in the mean loss of the last three steps; seeds of Lion's differ by as much
# Each worker draws its own units to drop, and has statistics of its own rows, from the first step on.
OF_CHANCE = {"keras_stateless", "linen_batch_stats", "nnx_optimizer"}


def shown():
    """What the document shows, by the trainer it shows it for."""
    marked = r"<!-- drop-in: (\w+) -->\n```diff\n(.*?)```"
    return dict(re.findall(marked, DOCUMENT.read_text(), re.DOTALL))


def hunks(style):
    """The diff of a style, as (old lines, new lines)."""
    for hunk in shown()[style].split("@@\n")[1:]:
        lines = hunk.splitlines()
        yield (
            [line[1:] for line in lines if line[0] in " -"],
            [line[1:] for line in lines if line[0] in " +"],
        )


def usual(style):
    return (TRAINERS / f"{style}.py").read_text()


def changed(style):
    source = usual(style)
    for old, new in hunks(style):
        old, new = "\n".join(old) + "\n", "\n".join(new) + "\n"
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


class Run(NamedTuple):
    losses: list[float]
    sent: list[Any]  # the collectives over the workers' axis, but for numbers
    state: Any


def run(source):
    """Trains for some steps and reads what the compiled step sends."""
    names = {"__name__": "trainer"}
    exec(compile(source, "trainer.py", "exec"), names)
    mesh = names["common"].make_mesh(**names["AXES"])
    with names.get("around", contextlib.nullcontext)(mesh):
        state, step = names["build"](mesh, LEARNING_RATE)
        losses, found = [], None
        for _, batch in zip(range(STEPS), names["batches"](mesh), strict=False):
            if found is None:
                compiled = step.lower(state, batch).compile()
                compiled = getattr(compiled, "compiled", compiled)  # equinox wraps it
                found = collectives(compiled, mesh)
            state, metrics = step(state, batch)
            losses.append(float(np.mean(metrics["loss"])))
    return Run(losses, [one for one in found if crosses(one)], state)


def crosses(one):
    """Whether more than a number goes from worker to worker."""
    workers = one.axes is None or WORKERS & set(one.axes)
    return workers and sum(operand.bytes for operand in one.operands) > 8


def dtypes(sent):
    return {operand.dtype for one in sent for operand in one.operands}


@functools.cache
def both(style):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(TRAINERS))
        return run(usual(style)), run(changed(style))


@pytest.fixture(params=STYLES)
def style(request):
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return request.param


@pytest.fixture
def trainers(style):
    return both(style)


def test_every_trainer_is_shown():
    assert sorted(shown()) == STYLES
    assert len(STYLES) >= 9


@pytest.mark.parametrize("style", STYLES)
def test_trainers_are_short_and_know_nothing_of_the_library(style):
    lines = usual(style).splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if re.search(r"\blc\b|import lioncub_jax", line)] == []


@pytest.mark.parametrize("style", STYLES)
def test_six_lines_at_most_come_and_go(style):
    changes = shown()[style].splitlines()
    come, go = (sum(line.startswith(sign) for line in changes) for sign in "+-")
    assert 1 <= go <= 6 and 1 <= come <= 6
    assert f"| `{style}` | +{come} \N{MINUS SIGN}{go} |" in DOCUMENT.read_text()


def test_the_usual_trainer_sums_gradients_in_float32_and_learns(trainers):
    lion, _ = trainers
    assert dtypes(lion.sent) == {"f32"}
    assert np.mean(lion.losses[-3:]) < lion.losses[0] - NOISE


def test_after_the_change_integers_alone_cross_the_workers_axis(trainers):
    lion, cub = trainers
    assert dtypes(cub.sent) == {"u32"}
    sent, full = (sum(one.sent_bytes for one in x.sent) for x in (cub, lion))
    assert sent < full / 10


def test_after_the_change_it_learns_as_before(style, trainers):
    lion, cub = trainers
    first = abs(cub.losses[0] - lion.losses[0])
    assert first < (NOISE if style in OF_CHANCE else 1e-3)
    assert abs(np.mean(cub.losses[-3:]) - np.mean(lion.losses[-3:])) < NOISE


def test_momentum_lies_with_its_worker_cut_as_the_parameters():
    with_workers = both("linen_fsdp")[1].state
    momenta = jax.tree.leaves(with_workers.opt_state[0].mu)
    params = jax.tree.leaves(with_workers.params)
    for mu, p in zip(momenta, params, strict=True):
        assert mu.shape == (4, *p.shape)
        assert mu.sharding.is_equivalent_to(
            NamedSharding(p.sharding.mesh, P("data", *p.sharding.spec)), mu.ndim
        )
