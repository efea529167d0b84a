"""Local steps: each worker trains on its own for a while, and what travels is how far it came."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.reference import baselines as reference_baselines
from lioncub_jax.reference import simulate

WORKERS, H = 4, 3
LOCAL = optax.adamw(2.0**-4)


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 33), "b": (33,), "out": (33, 2)}
    return {n: jnp.asarray(rng.normal(size=s) / 4, dtype) for n, s in shapes.items()}


def loss(params, batch, rng):
    x = jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["out"]
    return jnp.mean((x - batch["y"]) ** 2).astype(jnp.float32)


def batches(count, rows, workers=WORKERS, dtype=np.float32):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.normal(size=(workers * rows, 8)).astype(dtype)
        yield {"x": x, "y": np.stack([np.sin(x[:, 0]), x[:, 1]], 1).astype(dtype)}


def by_worker(batch, workers=WORKERS):
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(workers, -1, *x.shape[1:]), batch)


def simulated(simulator, given, local=LOCAL, local_steps=H, params=None, workers=WORKERS):
    params = params_of() if params is None else params
    run = simulate.start(simulator, params, workers, local=local)
    step = jax.jit(lambda r, b: simulate.step(loss, simulator, r, b, local_steps, local))
    losses = []
    for batch in given:
        run, of_workers = step(run, by_worker(batch, workers))
        losses.append(of_workers)
    return run, np.array(losses)


def assert_close(got, want, **tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), **tolerance)


AVERAGE = reference_baselines.averaged(optax.sgd(1.0))


def test_simulated_averaging_of_one_worker_is_plain_training():
    given = list(batches(3, 4 * H, workers=1))
    run, _ = simulated(AVERAGE, given, workers=1)
    params, state = params_of(), LOCAL.init(params_of())
    for batch in given:
        for part in range(H):
            own = jax.tree.map(lambda x, part=part: x[4 * part : 4 * part + 4], batch)
            grads = jax.grad(loss)(params, own, None)
            updates, state = LOCAL.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    assert_close(run.params, params, rtol=1e-3, atol=1e-4)
    assert run.local_state[0].count.tolist() == [3 * H]


@pytest.mark.parametrize("bits", [None, 1, 8])
def test_simulated_diloco_learns(bits):
    run, losses = simulated(reference_baselines.diloco(0.7, 0.5, bits), batches(30, 4 * H))
    assert losses[-3:].mean() < 0.7 * losses[:3].mean()
    assert run.local_state[0].mu["w"].shape == (WORKERS, 8, 33)


@pytest.mark.parametrize("bits", [1, 4])
def test_simulated_feedback_both_ways_conserves_sums(bits):
    tx = reference_baselines.diloco(1.0, 0.0, bits)  # what is applied is what is agreed on
    rng, zeros = np.random.default_rng(0), {"a": jnp.zeros((5, 77))}
    state, sent, applied = tx.init(zeros, WORKERS), 0.0, 0.0
    for _ in range(6):
        grads = {"a": jnp.asarray(rng.normal(size=(WORKERS, 5, 77)), jnp.float32)}
        updates, state = tx.update(grads, state, zeros)
        sent, applied = sent + np.mean(grads["a"], 0), applied - np.asarray(updates["a"])
    owner = np.asarray(state.owner).reshape(-1)[: 5 * 77].reshape(5, 77)
    left = np.mean(state.error["a"], 0) + owner
    np.testing.assert_allclose(applied + left, sent, atol=1e-5)


def test_simulated_more_bits_miss_less():
    rng, zeros, missed = np.random.default_rng(0), {"a": jnp.zeros(640)}, []
    grads = {"a": jnp.asarray(rng.normal(size=(WORKERS, 640)), jnp.float32)}
    for bits in range(1, 9):
        tx = reference_baselines.diloco(1.0, 0.0, bits)
        updates, _ = tx.update(grads, tx.init(zeros, WORKERS), zeros)
        missed.append(float(np.std(np.mean(grads["a"], 0) + updates["a"])))
    assert np.all(np.diff(missed) < 0), missed


def test_a_simulated_worker_with_a_loss_that_is_not_finite_keeps_its_own_state():
    given = list(batches(2, 4 * H))
    given[1]["x"][4 * H] = np.inf  # of the second worker
    given[1]["y"][4 * H] = np.nan
    run, losses = simulated(reference_baselines.diloco(0.7, 0.9, 1), given)
    assert np.flatnonzero(~np.isfinite(losses[1])).tolist() == [1]
    assert run.local_state[0].count.tolist() == [2 * H, H, 2 * H, 2 * H]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((run.params, run.local_state)))


def test_simulated_votes_on_differences():
    lion = reference.optimizer(reference.local_momentum(), 2.0**-7, 0.0)
    _, losses = simulated(lion, batches(20, 4 * H), optax.sgd(0.1))
    assert losses[-2:].mean() < losses[:2].mean()


# --- The step


def workers_of(count=WORKERS, kind=AxisType.Auto, **inner):
    sizes = {AXIS: count, **inner}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    kinds = (kind,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
    return lc.Workers(mesh, AXIS)


def start(tx, workers, local=LOCAL, local_steps=H, *, of=loss, params=None, specs=None, **rest):
    """The first state and the step."""
    params = params_of() if params is None else params
    made = {n: rest.pop(n) for n in ("model_state", "rng") if n in rest}
    state = lc.init_state(tx, params, workers, specs=specs, local=local, **made)
    return state, lc.make_train_step(of, tx, workers, local_steps=local_steps, local=local, **rest)


def trained(tx, given, workers, *args, **options):
    state, step = start(tx, workers, *args, **options)
    losses = []
    for batch in given:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert step.traces == 1
    return state, losses


def average(learning_rate=1.0):
    return lc.global_gradients(optax.sgd(learning_rate), AXIS)


# Gradients that are small integers whatever the parameters are, and rates that are powers of two.
SHAPES = {"matrix": (5, 27), "scalar": (), "row": (129,)}
EXACT_LOCAL = optax.sgd(2.0**-4, 0.5)
EXACT = {
    "average": (average(0.5), reference_baselines.averaged(optax.sgd(0.5))),
    "float32": (
        baselines.diloco(0.5, 0.5, axis_name=AXIS),
        reference_baselines.diloco(0.5, 0.5),
    ),
    "1 bit": (
        baselines.diloco(0.5, 0.5, 1, axis_name=AXIS),
        reference_baselines.diloco(0.5, 0.5, 1),
    ),
    "4 bits": (
        baselines.diloco(0.5, 0.5, 4, axis_name=AXIS),
        reference_baselines.diloco(0.5, 0.5, 4),
    ),
    "vote": (
        lc.lion_cub(2.0**-4, 0.75, 0.5, weight_decay=0.0, axis_name=AXIS),
        reference.optimizer(reference.local_momentum(0.75, 0.5), 2.0**-4, 0.0),
    ),
}


def pulled(params, batch, rng):
    """Its gradient is the sum of the examples; one of more than 50 spoils the loss."""
    parts = jax.tree.map(lambda p, x: jnp.sum(p * jnp.sum(x, axis=0)), params, batch)
    return sum(jax.tree.leaves(parts)) + jnp.where(jnp.any(batch["scalar"] > 50), jnp.nan, 0)


def integer_batches(count, rows, workers=8):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {
            n: rng.integers(-2, 3, (workers * rows, *s)).astype(np.float32)
            for n, s in SHAPES.items()
        }


@pytest.mark.parametrize("method", EXACT)
def test_on_eight_devices_it_is_the_simulator_bit_for_bit(method):
    tx, simulator = EXACT[method]
    zeros, given = {n: jnp.zeros(s) for n, s in SHAPES.items()}, list(integer_batches(4, 2 * H))
    if method in ("1 bit", "4 bits", "vote"):
        given[2]["scalar"][3 * 2 * H + 1] = 100.0  # of the fourth worker
    run = simulate.start(simulator, zeros, 8, local=EXACT_LOCAL)
    step = jax.jit(lambda r, b: simulate.step(pulled, simulator, r, b, H, EXACT_LOCAL))
    for batch in given:
        run, _ = step(run, by_worker(batch, 8))
    state, _ = trained(tx, given, workers_of(8), EXACT_LOCAL, of=pulled, params=zeros)
    assert np.abs(state.params["row"]).max() > 0
    for got, want in ((state.params, run.params), (state.local_state, run.local_state)):
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
        ):
            np.testing.assert_array_equal(a, b, err_msg=str(path))


def test_with_gradients_of_a_model_it_follows_the_simulator():
    given = list(batches(3, 4 * H))
    run, losses = simulated(reference_baselines.diloco(0.7, 0.9, 4), given)
    state, means = trained(baselines.diloco(bits=4, axis_name=AXIS), given, workers_of())
    # Codes of values at the border of two levels may differ, and feedback makes up for it.
    assert_close(state.params, run.params, rtol=0, atol=0.05)
    np.testing.assert_allclose(means, losses.mean(axis=1), rtol=0.02)


def test_one_local_step_of_sgd_is_data_parallel_sgd():
    given = list(batches(3, 4))
    local, _ = trained(average(), given, workers_of(), optax.sgd(0.125), 1)
    plain, _ = trained(average(0.125), given, workers_of(), None, 1)
    assert_close(local.params, plain.params, rtol=1e-5, atol=1e-6)


def test_one_worker_with_an_outer_step_of_1_trains_as_its_local_optimizer():
    given = list(batches(2, 4 * H, workers=1))
    # Its rate falls from local step to local step, which the state counts.
    local = optax.sgd(optax.linear_schedule(0.25, 0.0, 2 * H), 0.5)
    state, losses = trained(average(), given, workers_of(1), local)
    parts = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], b) for b in given for i in range(H)]
    plain, each = trained(lc.global_gradients(local, AXIS), parts, workers_of(1), None, 1)
    assert_close(state.params, plain.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses, np.reshape(each, (2, H)).mean(axis=1), rtol=1e-5)


def test_an_average_does_not_care_which_worker_is_which():
    zeros, given = {n: jnp.zeros(s) for n, s in SHAPES.items()}, list(integer_batches(2, H, 4))
    ends = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        rows = np.arange(4 * H).reshape(4, H)[order].reshape(-1)
        moved = [jax.tree.map(lambda x, rows=rows: x[rows], b) for b in given]
        state, _ = trained(average(), moved, workers_of(), EXACT_LOCAL, of=pulled, params=zeros)
        ends.append(state)
    for name in SHAPES:
        np.testing.assert_array_equal(ends[0].params[name], ends[1].params[name])
    momenta = [state.local_state[0].trace["row"] for state in ends]
    np.testing.assert_array_equal(momenta[0][jnp.array([2, 0, 3, 1])], momenta[1])


def test_votes_on_differences_learn():
    tx = lc.lion_cub(2.0**-7, weight_decay=0.0, axis_name=AXIS)
    _, losses = trained(tx, batches(20, 4 * H), workers_of(), optax.sgd(0.1))
    assert np.mean(losses[-2:]) < np.mean(losses[:2])


@pytest.mark.parametrize("bits", [None, 4])
def test_only_the_differences_travel_however_many_local_steps_there_are(bits):
    tx, workers = baselines.diloco(bits=bits, axis_name=AXIS), workers_of()
    predicted = lc.traffic.of(tx, params_of(), WORKERS, platform="cpu").sent_bytes
    programs = []
    for local_steps in (2, 8):
        state, step = start(tx, workers, local_steps=local_steps)
        (batch,) = batches(1, 2 * local_steps)
        found = lc.traffic.collectives(step.lower(state, batch).compile(), workers.mesh)
        assert all(one.times == 1 and not one.looped for one in found)
        programs.append(found)
    assert programs[0] == programs[1]
    # Beside what is predicted: the mean loss, a float32.
    loss_bytes = 2 * (WORKERS - 1) / WORKERS * 4
    assert sum(one.sent_bytes for one in programs[0]) == predicted + loss_bytes


CUT = {"w": P("tensor", "fsdp"), "b": P("fsdp"), "out": P(None, "tensor")}


def wide():
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 32), "b": (32,), "out": (32, 2)}
    return {n: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for n, s in shapes.items()}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_parameters_that_are_cut_train_as_whole_ones(kind):
    # The norm is that of all shards together.
    local = optax.chain(optax.clip_by_global_norm(0.125), optax.sgd(0.5, 0.5))
    given = list(batches(3, 4 * H, workers=2))
    tx = baselines.diloco(0.5, 0.5, axis_name=AXIS)
    whole, losses = trained(tx, given, workers_of(2), local, params=wide())
    cut, others = trained(
        tx, given, workers_of(2, kind, fsdp=2, tensor=2), local, params=wide(), specs=CUT
    )
    assert_close(cut.params, whole.params, rtol=1e-4, atol=1e-5)
    assert_close(cut.local_state, whole.local_state, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(losses, others, rtol=1e-4)
    trace = cut.local_state[1][0].trace
    assert [trace[n].sharding.spec for n in ("w", "b")] == [
        P(AXIS, "tensor", "fsdp"),
        P(AXIS, "fsdp"),
    ]


def test_a_batch_that_is_cut_over_explicit_axes_too():
    workers = workers_of(2, AxisType.Explicit, fsdp=2)
    (batch,), ends = batches(1, 2 * 2 * H, workers=2), []
    for batch_spec in (P(AXIS), P((AXIS, "fsdp"))):
        state, step = start(average(), workers, accumulate=2, batch_spec=batch_spec)
        ends.append(step(state, batch))
    assert_close(ends[0][0].params, ends[1][0].params, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ends[0][1]["loss"], ends[1][1]["loss"], rtol=1e-5)


@pytest.mark.parametrize("bits", [None, 4])
def test_bfloat16_parameters(bits):
    tx = baselines.diloco(0.7, 0.5, bits, axis_name=AXIS)
    given = batches(12, 4 * H)
    params = params_of(jnp.bfloat16)
    state, losses = trained(tx, given, workers_of(), optax.sgd(0.1), params=params)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert np.mean(losses[-2:]) < 0.8 * np.mean(losses[:2])


def test_model_state_random_numbers_and_aux_go_through_the_steps():
    def count(params, model_state, batch, rng):
        aux = {"bits": jax.random.bits(rng, (2,)), "first": batch[:1], "rows": batch.shape[0]}
        folded = 2 * model_state["folded"] + jnp.sum(batch)
        return jnp.mean(params["w"]) * jnp.mean(batch), aux, {"folded": folded}

    options = {"of": lc.StatefulLoss(count), "model_state": {"folded": jnp.float32(0)}}
    local = optax.sgd(0.5)
    given = np.arange(8.0 * WORKERS, dtype=np.float32)
    state, step = start(average(), workers_of(), local, 4, params={"w": jnp.ones(2)}, **options)
    state, metrics = step(state, given)
    sums = given.reshape(WORKERS, 4, 2).sum(-1)
    np.testing.assert_array_equal(state.model_state["folded"], sums @ [8, 4, 2, 1])
    np.testing.assert_array_equal(metrics["first"], given.reshape(WORKERS, 4, 2)[..., :1])
    assert len(np.unique(metrics["bits"])) == metrics["bits"].size == WORKERS * 4 * 2
    assert int(metrics["rows"]) == 8 * WORKERS
    # The same in parts of one row, whose gradients are averaged.
    parts, cut = start(
        average(), workers_of(), local, 4, params={"w": jnp.ones(2)}, accumulate=2, **options
    )
    parts, more = cut(parts, given)
    assert_close(parts.params, state.params, rtol=1e-6)
    assert more["first"].shape == (WORKERS, 4, 2, 1) and more["bits"].shape == (WORKERS, 4, 2, 2)


def test_a_worker_that_abstains_keeps_what_is_its_own():
    def loss_of(params, model_state, batch, rng):
        spoiled = jnp.where(jnp.any(batch["x"] > 50), jnp.nan, 0)
        return loss(params, batch, rng) + spoiled, {}, {"seen": model_state["seen"] + 1}

    tx = baselines.diloco(bits=1, axis_name=AXIS)
    options = {"of": lc.StatefulLoss(loss_of), "model_state": {"seen": jnp.int32(0)}}
    state, step = start(tx, workers_of(), donate=False, **options)
    first, second = batches(2, 4 * H)
    before, _ = step(state, first)
    second["x"][2 * 4 * H + 5] = 100.0  # of the third worker, in its second local step
    after, metrics = step(before, second)
    assert not np.isfinite(metrics["loss"]) and int(lc.vote_stats(after.opt_state).abstained) == 1
    assert after.model_state["seen"].tolist() == [2 * H, 2 * H, H, 2 * H]
    for x, y in zip(*map(jax.tree.leaves, (before.local_state, after.local_state)), strict=True):
        np.testing.assert_array_equal(x[2], y[2])
        assert not np.array_equal(x[1], y[1])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))


def test_a_difference_that_is_not_finite_is_left_out_although_the_loss_is():
    def of(params, batch, rng):
        return jnp.sum(jnp.sqrt(params["w"])) * jnp.mean(batch)  # its slope at 0 is infinite

    tx, params = baselines.diloco(bits=1, axis_name=AXIS), {"w": jnp.zeros(3)}
    state, step = start(tx, workers_of(), optax.sgd(0.5, 0.5), 1, of=of, params=params)
    state, metrics = step(state, np.ones((WORKERS, 2), np.float32))
    assert float(metrics["loss"]) == 0
    assert int(lc.vote_stats(state.opt_state).abstained) == WORKERS
    assert not any(x.any() for x in jax.tree.leaves((state.params, state.local_state)))


# --- Checkpoints


@pytest.mark.parametrize("bits", [None, 4])
def test_a_restored_run_goes_on_to_the_bit(bits, tmp_path):
    tx, given = baselines.diloco(bits=bits, axis_name=AXIS), list(batches(4, 4 * H))
    workers = workers_of()
    state, step = start(tx, workers)
    for batch in given[:2]:
        state, _ = step(state, batch)
    like = lc.training.abstract_state(tx, params_of(), workers, local=LOCAL)
    with lc.Checkpoints(tmp_path, axis_name=AXIS) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = checkpoints.restore(like).state
    for batch in given[2:]:
        state, metrics = step(state, batch)
        restored, others = step(restored, batch)
        assert float(metrics["loss"]) == float(others["loss"])
    assert jax.tree.structure(state) == jax.tree.structure(restored)
    drop = lambda s: jax.tree.leaves(s._replace(rng=()))  # noqa: E731
    for x, y in zip(drop(state), drop(restored), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_checkpoints_of_other_workers_and_of_a_run_without_local_steps(tmp_path):
    tx = average()
    state, step = start(tx, workers_of())
    (batch,) = batches(1, 4 * H)
    state, _ = step(state, batch)
    with lc.Checkpoints(tmp_path / "new", axis_name=AXIS) as checkpoints:
        checkpoints.save(state, wait=True)
        fewer = checkpoints.restore(lc.init_state(tx, params_of(), workers_of(2), local=LOCAL))
    assert fewer.state.local_state[0].count.tolist() == [H, H]
    means = [np.mean(s.local_state[0].mu["b"], 0) for s in (fewer.state, state)]
    np.testing.assert_allclose(*means, rtol=1e-5)
    plain = lc.init_state(tx, params_of(), workers_of())
    with lc.Checkpoints(tmp_path / "old", axis_name=AXIS) as checkpoints:
        checkpoints.save(plain, wait=True)
        assert checkpoints.restore(plain).state.local_state == ()
        with pytest.raises(ValueError, match=r"another optimizer: it lacks state\.local_state\["):
            checkpoints.restore(state)


# --- What is refused

BAD = [
    ({"local_steps": 0}, ValueError, r"local_steps=0: give a whole number of at least 1"),
    ({"local_steps": 2.0}, ValueError, r"local_steps=2\.0: give a whole number"),
    ({"local_steps": True}, ValueError, r"local_steps=True: give a whole number"),
    ({"local_steps": 4, "local": None}, ValueError, r"local_steps=4 without local.*optax\.adamw"),
    ({"local": optax.adamw}, TypeError, r"is no optimizer: give a plain optax transform.*, called"),
    ({"local": 0.1}, TypeError, r"local=0\.1 is no optimizer: give a plain optax transform"),
    (
        {"local": lc.lion_cub(1e-3, axis_name=AXIS)},
        ValueError,
        r"in which workers talk \(sign.* as tx",
    ),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD)
def test_bad_local_steps_are_refused(options, kind, message):
    given = {"local_steps": H, "local": LOCAL} | options
    with pytest.raises(kind, match=message):
        lc.make_train_step(loss, average(), workers_of(), **given)
    if given["local"] is not LOCAL and given["local"] is not None:
        with pytest.raises(kind, match=message):
            lc.init_state(average(), params_of(), workers_of(), local=given["local"])


def test_a_chain_in_which_workers_talk_is_no_local_optimizer():
    for talks in (lc.lion_cub(1e-3, axis_name=AXIS), average()):
        local = optax.chain(optax.clip_by_global_norm(1.0), talks)
        with pytest.raises(ValueError, match=r"workers talk \((Communicate|Global)State\)"):
            lc.init_state(average(), params_of(), workers_of(), local=local)


def test_two_levels_have_no_local_steps():
    mesh = lc.mesh.two_level_mesh(2, devices=jax.devices()[:4])
    workers = lc.Workers(mesh, "node", "device")
    with pytest.raises(
        ValueError, match=r"group_axis='device': the devices of a group .* inner mesh"
    ):
        lc.make_train_step(loss, average(), workers, local_steps=2, local=LOCAL)


def test_a_state_and_a_step_that_were_made_differently():
    tx, workers, (batch,) = average(), workers_of(), batches(1, 4 * H)
    with_local, local_step = start(tx, workers)
    without, step = start(tx, workers, None, 1)
    with pytest.raises(ValueError, match=r"the step takes no local steps: give make_train_step"):
        step(with_local, batch)
    with pytest.raises(
        ValueError, match=r"has no local_state: make it by init_state\(\.\.\., local"
    ):
        local_step(without, batch)
    other, _ = start(tx, workers, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"the local_state is not one of this optimizer: make the"):
        local_step(other, batch)
    stateless, own = start(tx, workers, optax.scale(-0.1))
    own(stateless, batch)  # nothing in it, and made all the same


def test_a_batch_that_local_steps_do_not_divide():
    state, step = start(average(), workers_of(), accumulate=2)
    wrong = {"x": np.zeros((WORKERS * H, 8)), "y": np.zeros((WORKERS * H * 2, 2))}
    with pytest.raises(
        ValueError,
        match=r"batch\['x'\] has shape \(12, 8\).* multiple of 24 \(4 workers, 3 local steps, 2 ",
    ):
        step(state, wrong)
