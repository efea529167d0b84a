"""Numbers of a run as a flat dict of floats, and the page whose recipes hand them to writers."""

import itertools
import time

import jax
import jax.numpy as jnp
import pytest
from conftest import mesh_on, normal
from pages import block

import lioncub_jax as lc

PAGE = "how_to/logging.md"
ROWS = 64


def loss_fn(params, x, rng):
    loss = jnp.mean((x @ params["w"] - 1) ** 2)
    return loss, {"fit": {"best": -loss, "steps": jnp.int32(1)}, "each": x[:, 0]}


@pytest.fixture
def names(tmp_path):
    """What the blocks of the page take as given."""
    workers = lc.Workers(mesh_on("data=4"), "data")
    tx = lc.lion_cub(1e-2, workers=workers, sync=lc.sync.every(50))
    params = {"w": jnp.zeros((16, 40))}
    return {
        "lc": lc, "jax": jax, "tx": tx, "params": params, "workers": workers,
        "state": lc.init_state(tx, params, workers),
        "step": lc.make_train_step(loss_fn, tx, workers),
        "batches": [*normal(100, ROWS, 16)],
        "folder": str(tmp_path),
    }  # fmt: skip


def test_a_row_has_floats_alone_and_all_that_the_state_and_the_step_say(names):
    exec(block(PAGE, "run: logging"), names)
    row, state, metrics = (names[name] for name in ("row", "state", "metrics"))
    assert {type(x) for x in row.values()} == {float}
    of_step = {"loss", "fit/best", "fit/steps"}  # and not the array that each worker has
    assert set(row) == of_step | {"sent_bytes", "tokens_per_second"} | set(lc.metrics(state))
    assert row["loss"] == float(metrics["loss"]) == -row["fit/best"] and row["fit/steps"] == 4
    assert 0 < row["votes/ties"] < 1 and row["votes/abstained"] == 0 and row["sync/syncs"] > 0
    compiled = names["step"].lower(state, names["batch"]).compile()
    found = lc.audit.collectives(compiled, names["workers"].mesh)
    votes = [one for one in found if one.payload_bytes > 8]  # and not the mean of the loss
    assert row["sent_bytes"] == lc.audit.sent_bytes(votes)[("data",)]


def test_tokens_a_second_are_those_since_the_row_before(monkeypatch):
    clock = itertools.count(0, 2.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    meter = lc.training.Meter(tokens=100)
    rows = [meter(step, ()) for step in (10, 20, 50)]
    assert rows == [{}, {"tokens_per_second": 500.0}, {"tokens_per_second": 1500.0}]


@pytest.mark.long
@pytest.mark.parametrize("writer", ["run: clu", "run: tensorboardX", "run: wandb"])
def test_recipes_write_what_their_writers_keep(writer, names, tmp_path):
    """`make test-long` has these packages in an environment of their own."""
    pytest.importorskip(writer.removeprefix("run: "))
    exec(block(PAGE, "run: logging"), names)
    exec(block(PAGE, writer), names)
    # Protocol buffers, of which text is kept as it is.
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert all(name.encode() in kept for name in names["row"])
