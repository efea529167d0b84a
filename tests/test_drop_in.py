"""The lines that docs/drop_in.md shows, applied to the trainer it shows them for."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.traffic.compiled import collectives

ROOT = Path(__file__).parents[1]
TRAINER = ROOT / "examples" / "flax_trainer.py"


def hunks():
    """What the document shows, as (old lines, new lines)."""
    shown = re.search(
        r"<!-- drop-in -->\n```diff\n(.*?)```", (ROOT / "docs/drop_in.md").read_text(), re.DOTALL
    )
    for hunk in shown.group(1).split("@@\n")[1:]:
        lines = hunk.splitlines()
        yield (
            [line[1:] for line in lines if line[0] in " -"],
            [line[1:] for line in lines if line[0] in " +"],
        )


def applied(source):
    for old, new in hunks():
        old, new = "\n".join(old) + "\n", "\n".join(new) + "\n"
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def run(source, monkeypatch, steps=12):
    """The losses of a trainer, what its step sends, and its last state."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names = {"__name__": "trainer"}
    exec(compile(source, "trainer.py", "exec"), names)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    state, step = names["build"](mesh, 1e-3)
    text = names["corpus"].from_files([TRAINER, Path(__file__)])
    rows = NamedSharding(mesh, P(("data", "fsdp")))

    def batch(i):
        windows = names["corpus"].draw(text.train, 32, names["CONTEXT"], (0, i))
        return jax.device_put(windows.astype(np.int32), rows)

    found = collectives(step.lower(state, batch(0)).compile(), mesh)
    losses = []
    for i in range(steps):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return losses, found, state


def test_five_lines_at_most_change():
    old, new = zip(*hunks(), strict=True)
    gone = [line for a, b in zip(old, new, strict=True) for line in a if line not in b]
    come = [line for a, b in zip(old, new, strict=True) for line in b if line not in a]
    assert 1 <= len(gone) <= len(come) <= 5


@pytest.fixture(scope="module")
def trainers():
    with pytest.MonkeyPatch.context() as monkeypatch:
        source = TRAINER.read_text()
        yield run(source, monkeypatch), run(applied(source), monkeypatch)
    for name in [name for name in sys.modules if name.split(".")[0] == "gpt"]:
        del sys.modules[name]


def over_data(found):
    return [one for one in found if "data" in one.axes and sum(o.bytes for o in one.operands) > 8]


def test_the_usual_trainer_sums_gradients_in_float32(trainers):
    (losses, found, _), _ = trainers
    assert {o.dtype for one in over_data(found) for o in one.operands} == {"f32"}
    assert np.mean(losses[-3:]) < losses[0] - 0.5


def test_after_the_change_only_packed_votes_cross_the_workers_axis(trainers):
    (usual, before, _), (losses, found, state) = trainers
    assert {one.axes for one in over_data(found)} == {("data",)}
    assert {o.dtype for one in over_data(found) for o in one.operands} == {"u32"}
    assert np.mean(losses[-3:]) < losses[0] - 0.5
    assert abs(losses[0] - usual[0]) < 1e-4
    sent, full = (sum(one.sent_bytes for one in over_data(x)) for x in (found, before))
    assert sent < full / 16
    momenta = jax.tree.leaves(state.opt_state[0].mu)
    params = jax.tree.leaves(state.params)
    for mu, p in zip(momenta, params, strict=True):
        assert mu.shape == (4, *p.shape)
        assert mu.sharding.is_equivalent_to(
            NamedSharding(p.sharding.mesh, P("data", *p.sharding.spec)), mu.ndim
        )
