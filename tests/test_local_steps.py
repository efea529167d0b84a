"""Local steps: each worker trains on its own for a while, and what travels is how far it came.

That parameters are those of the simulator is in test_simulate.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, workers_on
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_baselines import refused
from test_training import draw, linear_loss, linear_params
from test_training import start as trainer

import lioncub_jax as lc
from lioncub_jax import baselines

WORKERS, H = 4, 3
ON_FOUR = workers_on(f"data={WORKERS}")
LOCAL = optax.adamw(2.0**-4)


def start(tx, workers=ON_FOUR, local=LOCAL, local_steps=H, of=linear_loss, params=None, **how):
    """The first state and the step."""
    params = params or linear_params()
    return trainer(of, tx, params, workers, local=local, local_steps=local_steps, **how)


def average():
    return lc.global_gradients(optax.sgd(1.0), workers=AXIS)


# --- The step


def test_only_the_differences_travel_however_many_local_steps_there_are():
    tx, programs = baselines.diloco(bits=4, workers=AXIS), []
    for local_steps in (2, 8):
        state, step = start(tx, local_steps=local_steps)
        batch = draw(rows=2 * WORKERS * local_steps)
        found = lc.audit.collectives(step.lower(state, batch).compile(), ON_FOUR.mesh)
        assert all(one.times == 1 and not one.looped for one in found)
        programs.append(found)
    assert programs[0] == programs[1]
    # Beside what is predicted: the mean loss, a float32.
    predicted = lc.audit.of(tx, linear_params(), ON_FOUR).sent_bytes
    loss_bytes = 2 * (WORKERS - 1) / WORKERS * 4
    assert sum(one.sent_bytes for one in programs[0]) == predicted + loss_bytes


def test_parameters_and_batches_that_are_cut_train_as_whole_ones():
    # The norm is that of all shards together.
    local = optax.chain(optax.clip_by_global_norm(0.125), optax.sgd(0.5, 0.5))
    tx, ends = baselines.diloco(0.5, 0.5, workers=AXIS), []
    inner = workers_on("data=2 fsdp=2 rows=2", kind=AxisType.Explicit)
    cut = {"specs": {"w": P("fsdp"), "b": P()}, "batch_spec": P((AXIS, "rows")), "accumulate": 2}
    for workers, how in ((workers_on("data=2"), {}), (inner, cut)):
        state, step = start(tx, workers, local, **how)
        losses = []
        for seed in range(3):
            state, metrics = step(state, draw(seed, 8 * H))
            losses.append(metrics["loss"])
        assert step.traces == 1
        ends.append((state.params, state.local_state, losses))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, *ends)
    assert state.local_state[1][0].trace["w"].sharding.spec == P(AXIS, "fsdp")


def test_model_state_random_numbers_and_aux_go_through_steps_and_their_parts():
    def count(params, model_state, batch, rng):
        aux = {"bits": jax.random.bits(rng, (2,)), "first": batch[:1], "rows": batch.shape[0]}
        folded = 2 * model_state["folded"] + jnp.sum(batch)
        return jnp.mean(params["w"]) * jnp.mean(batch), aux, {"folded": folded}

    given = np.arange(8.0 * WORKERS, dtype=np.float32)
    parts = given.reshape(WORKERS, 8)  # of one row each
    state, step = start(
        average(), ON_FOUR, optax.sgd(0.5), 4, of=count,
        params={"w": jnp.ones(2)}, model_state={"folded": jnp.float32(0)}, accumulate=2,
    )  # fmt: skip
    state, first = step(state, given)
    state, metrics = step(state, given)
    once = parts @ 2.0 ** np.arange(7, -1, -1)
    np.testing.assert_array_equal(state.model_state["folded"], 2**8 * once + once)
    np.testing.assert_array_equal(metrics["first"].reshape(WORKERS, 8), parts)
    assert metrics["first"].shape == (WORKERS, 4, 2, 1)
    assert int(metrics["rows"]) == 8 * WORKERS
    bits = np.stack([first["bits"], metrics["bits"]])
    assert bits.shape == (2, WORKERS, 4, 2, 2) and len(np.unique(bits)) == bits.size


def test_a_worker_that_abstains_keeps_what_is_its_own():
    """Also for a difference that is not finite, although the loss is."""

    def of(params, model_state, batch, rng):
        # Where a row is 2 the slope of the root is infinite.
        root = jnp.sqrt(jnp.where(jnp.any(batch == 2), 0 * params["w"], 1 + params["w"] ** 2))
        return jnp.sum(root), 1.0, {"seen": model_state["seen"] + 1}

    tx = baselines.diloco(bits=1, workers=AXIS)
    made = {"params": {"w": jnp.ones(3)}, "model_state": {"seen": jnp.int32(0)}}
    state, step = start(tx, ON_FOUR, optax.sgd(0.5, 0.5), 2, of=of, **made)
    batch = np.zeros((WORKERS, 2), np.float32)
    batch[1, 1] = 2  # in its second local step
    state, metrics = step(state, batch.reshape(-1))
    trace = np.asarray(state.local_state[0].trace["w"])
    assert [*metrics] == ["loss", "aux"] and np.isfinite(metrics["loss"])
    assert int(lc.metrics(state)["votes/abstained"]) == 1
    assert not trace[1].any() and trace[[0, 2, 3]].all()
    assert state.model_state["seen"].tolist() == [2, 0, 2, 2]


# --- What is refused

PLAIN = "is no optimizer: give a plain optax transform"
TALKS = [
    optax.chain(optax.clip_by_global_norm(1.0), lc.lion_cub(1e-3, workers=AXIS)),
    average(),
]
BAD = [
    ({"local_steps": 0}, ValueError, "local_steps=0: give a whole number of at least 1"),
    ({"local_steps": 4, "local": None}, ValueError, "local_steps=4 without local", "optax.adamw"),
    ({"local": optax.adamw}, TypeError, PLAIN, ", called"),
    ({"local": 0.1}, TypeError, "local=0.1", PLAIN),
    ({"local": TALKS[0]}, ValueError, "workers talk (CommunicateState)", " as tx"),
    ({"local": TALKS[1]}, ValueError, "workers talk (GlobalState)"),
    (
        {"workers": workers_on("data=2 gpu=2", "gpu")}, ValueError,
        "group='gpu'", "the devices of a group", "inner mesh",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "words"), [(*x[:2], x[2:]) for x in BAD])
def test_bad_local_steps_are_refused(options, kind, words):
    how = {"workers": workers_on("data=2"), "local_steps": H, "local": LOCAL, **options}
    local, workers = how["local"], how["workers"]
    if local not in TALKS:  # which only their state gives away
        with refused(*words, kind=kind):
            lc.make_train_step(linear_loss, average(), **how)
    if "local" in options and local is not None:
        with refused(*words, kind=kind):
            lc.init_state(average(), linear_params(), workers, local=local)


def test_a_state_a_step_or_a_batch_that_were_made_differently():
    tx, batch = average(), draw(rows=4 * H * WORKERS)
    with_local, local_step = start(tx, ON_FOUR, accumulate=2)
    without, step = start(tx, ON_FOUR, None, 1)
    other, _ = start(tx, ON_FOUR, optax.sgd(0.1))
    for one, state in ((step, with_local), (local_step, without), (local_step, other)):
        with refused("the local_state is not one of this optimizer: make", "the same local"):
            one(state, batch)
    wrong = {"x": np.zeros((WORKERS * H, 8)), "y": np.zeros((WORKERS * H * 2, 2))}
    with refused(
        "batch['x'] has shape (12, 8)", "multiple of 24 (4 workers, ", ", 3 local steps, 2 "
    ):
        local_step(with_local, wrong)
    stateless, own = start(tx, ON_FOUR, optax.scale(-0.1))
    own(stateless, batch)  # nothing in it, and made all the same
