"""The optimizers against optax, wherever they run, and what their compiled programs hold.

That votes are those of the reference, with ties, zeros and workers that abstain, is proved elsewhere.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    AXIS,
    assert_same,
    mesh_on,
    normal,
    run_workers,
    scanned,
    update_of,
    workers_on,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.exchange import layout, xla
from lioncub_jax.programs.compiled import collectives

# Options under which nothing is rounded if gradients are small whole numbers, and at most the sum of
# exact products otherwise. So it does not matter whether XLA contracts a multiplication and an addition
# to a fused one, in which it differs from program to program.
EXACT = {"learning_rate": 2**-6, "b1": 0.75, "b2": 0.5, "weight_decay": 0.125}
SMALL = {"w": (9, 15), "b": (70,)}


def cub(**options):
    return lc.lion_cub(**{"workers": AXIS} | EXACT | options)


def owner_lion(**options):
    return lc.owner_lion(**{"workers": AXIS} | EXACT | options)


def of_shapes(shapes, *lead):
    return {name: normal(*lead, *shape, seed=len(name)) for name, shape in shapes.items()}


def by_optax(tx, params, grads):
    """Plain optax on gradients ``[steps, ...]``: updates and states, with the parameters as they were."""

    @jax.jit
    def steps(params, grads):
        return scanned({0: tx}, {0: tx.init(params)}, params, grads)[0]

    return jax.tree.map(np.asarray, steps(params, grads))


def assert_equal(got, want):
    """Exactly, bit patterns included: -0 is not 0 and dtypes count."""

    def same(path, x, y):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert x.tobytes() == y.tobytes(), (path, np.argwhere(x != y)[:4])

    jax.tree_util.tree_map_with_path(same, got, want)


# --- The plain optimizer ----------------------------------------------------------------------------


def test_one_worker_is_optax_lion_bit_for_bit():
    """With a schedule, betas and decay of some leaves."""
    options = {
        "learning_rate": optax.linear_schedule(0.1, 0.01, 8), "b1": 0.8, "b2": 0.95,
        "weight_decay": 0.3, "mask": {"w": True, "b": False},
    }  # fmt: skip
    params, grads = of_shapes(SMALL), of_shapes(SMALL, 10, 1)
    grads["w"][:, :, 4:] = 0  # sign(0) is 0, in all of Lion
    grads["b"][::3] = 0
    txs = {
        "lion_cub": lc.lion_cub(**options, workers=AXIS),
        "average": lc.distributed_lion(**options, average=True, workers=AXIS),
        "owner": lc.owner_lion(**options, workers=AXIS),
    }
    alone = jax.tree.map(lambda g: g[:, 0], grads)
    updates, (lion, *_) = by_optax(optax.lion(**options), params, alone)
    for name, (got, state) in run_workers(txs, params, grads).items():
        assert_equal(got, updates)
        if name != "owner":
            assert_equal(jax.tree.map(lambda x: x[:, 0], state[0].mu), lion.mu)


def test_one_infinite_gradient_is_left_out_where_optax_lion_moves_for_ever():
    grads = {"w": np.full((40, 1, 130), -1, np.float32)}
    grads["w"][3, :, 7] = np.inf
    params, options = {"w": np.zeros(130, np.float32)}, {"weight_decay": 0.0, "b2": 0.5}
    by_lion, _ = by_optax(
        optax.lion(1.0, **options), params, jax.tree.map(lambda g: g[:, 0], grads)
    )
    assert (by_lion["w"][3:, 7] == -1).all()
    makers = {"vote": lc.lion_cub, "owner": lc.owner_lion}
    txs = {name: make(1.0, workers=AXIS, **options) for name, make in makers.items()}
    for updates, _ in run_workers(txs, params, grads).values():
        assert not updates["w"][3].any() and (updates["w"][4:] == 1).all()


def test_without_decay_no_parameters_are_needed():
    """As trainers that call ``update(grads, state)``."""
    params, grads = of_shapes(SMALL), jax.tree.map(np.ones_like, of_shapes(SMALL))
    for make in (lc.lion_cub, lc.distributed_lion, lc.owner_lion, lc.owner_adamw):
        tx = make(0.1, weight_decay=0.0, mask={"w": True, "b": False}, workers=None)
        updates, _ = tx.update(grads, tx.init(params))
        assert_equal(updates, tx.update(grads, tx.init(params), params)[0])
        with pytest.raises(ValueError, match="params"):
            make(0.1, workers=None).update(grads, tx.init(params))


def test_one_worker_with_several_buckets_is_the_one_with_one():
    """Owners' states of each bucket move, and their counters stay where the worker abstains."""
    params, grads = of_shapes(SMALL), of_shapes(SMALL, 4, 1)
    abstain = np.array([[False], [True], [False], [False]])
    txs = {
        name: lc.owner_adamw(0.1, weight_decay=0.0, bucket_size=size, workers=AXIS)
        for name, size in {"one": None, "several": 1}.items()
    }
    done = run_workers(txs, params, grads, abstain)
    (one, _), (several, (state, *_)) = done["one"], done["several"]
    assert_equal(several, one)
    assert len(state.owner) == sum(p.size > 0 for p in params.values()) > 1
    for owned in state.owner:
        assert owned.value.inner.count[:, 0].tolist() == [1, 1, 2, 3]
    assert state.votes.abstained[:, 0].tolist() == [0, 1, 0, 0]


def counted_votes():
    """The majority, and at the owner the number of votes on each element of its chunk."""
    votes = lc.decide.majority()

    def decide(received, context, state):
        reply, _ = votes.decide(received, context, ())
        return reply, state + 1

    def decide_locally(mean, present, context, state):
        return mean, state + present

    first = lambda rows, deal: jnp.zeros_like(rows)  # noqa: E731
    return votes._replace(decide=decide, init=first, decide_locally=decide_locally)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_decision_of_votes_may_keep_a_state(workers):
    params, grads = of_shapes(SMALL), of_shapes(SMALL, 3, workers)
    parts = {"momentum": lc.momentum.nothing(), "workers": AXIS}
    txs = {
        "plain": lc.communicate(decision=lc.decide.majority(), **parts),
        "counted": lc.communicate(decision=counted_votes(), **parts),
    }
    done = run_workers(txs, params, grads)
    (plain, _), (counted, state) = done["plain"], done["counted"]
    assert_equal(counted, plain)
    for step, votes in enumerate(state.owner[0].value):
        assert (votes == step + 1).all()


def test_a_mean_in_full_precision_goes_into_the_plain_optimizer():
    """Of an owner, the reference says the same."""
    rng, params = np.random.default_rng(0), of_shapes(SMALL)
    # Whole numbers of bfloat16 whose mean is exact, and never zero.
    grads = {k: 8 * rng.integers(-15, 16, (6, 4, *p.shape)) for k, p in params.items()}
    grads = jax.tree.map(np.float32, grads)
    for g in grads.values():
        g[:, 0] += 4
    lion = optax.lion(**EXACT)
    txs = {
        "float32": lc.global_gradients(lion, workers=AXIS),
        "bfloat16": lc.global_gradients(lion, jnp.bfloat16, workers=AXIS),
    }
    want, _ = by_optax(lion, params, {k: g.mean(1) for k, g in grads.items()})
    for got, _ in run_workers(txs, params, grads).values():
        assert_equal(got, want)
    sgd = {"mean": lc.global_gradients(optax.sgd(1.0), jnp.bfloat16, workers=AXIS)}
    fine = {"w": np.full((1, 2, 3), 1.00390625, np.float32)}  # between two numbers of bfloat16
    got = run_workers(sgd, {"w": jnp.zeros(3)}, fine)["mean"][0]["w"]
    assert got.dtype == np.float32 and set(-got.ravel()) <= {1.0, 1.0078125}


def test_the_first_state_of_a_mean_is_of_the_parameters_to_the_bit():
    """What varies by type alone is not added up: it could overflow, or be rounded."""
    params = {"w": np.float16(6e4), "c": np.complex64(1 + 2j), "n": np.int32(2**30 + 1)}
    tx = lc.global_gradients(optax.GradientTransformation(lambda x: x, None), workers=AXIS)
    first = lambda x: tx.init(jax.lax.pcast(x, AXIS, to="varying")).inner  # noqa: E731
    run = jax.shard_map(first, mesh=mesh_on("data=3"), in_specs=P(), out_specs=P())
    assert_equal(jax.jit(run)(params), params)


def test_what_is_at_the_owner_takes_one_eighth_of_the_memory_on_each_of_8_devices():
    params, workers = {"w": jnp.ones(8 * 64 * 256)}, workers_on("data=8")

    def momentum(tx):
        state = lc.training.abstract_state(tx, params, workers)
        leaves = jax.tree.leaves(state.opt_state)
        return sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves if x.ndim)

    assert momentum(lc.global_gradients(optax.lion(0.1), workers=AXIS)) == 8 * 64 * 256
    assert momentum(cub()) == 8 * 64 * 256
    exact = {"quantizer": lc.quantize.dense()}
    assert momentum(owner_lion(**exact)) == 64 * 256
    # Two moments, and what replies in codes still owe.
    assert momentum(lc.owner_adamw(0.1, **exact, workers=AXIS)) == 3 * 64 * 256


@pytest.mark.parametrize("make", [lc.lion_cub, lc.owner_lion])
def test_one_device_alone_updates_a_large_leaf_before_small_ones(make):
    """And takes a number of Python's, and shapes for the first state, as optax does.

    A state may be donated: no two arrays of it are one, which XLA would refuse.
    """
    grads = {"large": jnp.ones((600, 128)), "small": -jnp.ones(3), "tiny": 1.0}
    tx = make(0.5, workers=None, weight_decay=0.0)
    shapes = {**grads, "small": jax.ShapeDtypeStruct((3,), jnp.float32)}
    updates, _ = tx.update(grads, tx.init(shapes), grads)
    jax.tree.map(lambda u, g: np.testing.assert_array_equal(u, -0.5 * g), updates, grads)
    _, state = jax.jit(tx.update, donate_argnums=1)(grads, tx.init(grads), grads)
    assert int(state[0].count) == 1


# --- Where it runs ----------------------------------------------------------------------------------


class Layer(NamedTuple):
    kernel: Any
    bias: Any


NESTED = {
    "layers": [Layer(normal(3, 5, 7), None), Layer(normal(65), normal())],
    "owner": Layer(jnp.ones((2, 33), jnp.float16), {}),
    "empty": jnp.zeros((0, 4), jnp.bfloat16),
}
STEPS, WORKERS = 5, 4


def steps_of_a_worker(params, grads):
    """Updates ``[steps, ...]`` of a vote with a sync and a momentum at the owner, on leaves each."""
    vote = cub(sync=lc.sync.every(2), quantizer=lc.quantize.midrise(2))
    labels = jax.tree.map(lambda p: "owner" if p.dtype == jnp.float16 else "vote", params)
    tx = optax.partition({"vote": vote, "owner": owner_lion()}, labels)
    return scanned({0: tx}, {0: tx.init(params)}, params, grads)[0][0]


@pytest.fixture(scope="module")
def nested():
    """Gradients ``[W, steps, ...]``, and what all workers do in a ``shard_map`` of checked types."""
    grads = jax.tree.map(lambda p: normal(WORKERS, STEPS, *p.shape).astype(p.dtype), NESTED)
    updates = mapped(grads)
    assert all(np.any(u) for u in jax.tree.leaves(updates) if u.size)
    return grads, updates


def mapped(grads, check_vma=True, kind=AxisType.Auto):
    mesh = mesh_on(f"{AXIS}={WORKERS}", kind)

    def worker(params, grads):
        if check_vma:
            params = jax.lax.pcast(params, AXIS, to="varying")
        own = jax.tree.map(lambda g: g[0], grads)
        return jax.tree.map(lambda u: u[None], steps_of_a_worker(params, own))

    run = jax.shard_map(
        worker, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=check_vma
    )
    lie = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    return jax.jit(run)(*jax.device_put((NESTED, grads), lie))


@pytest.mark.filterwarnings("ignore:the leaves .* are masked from the vote")  # others vote on them
@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
@pytest.mark.parametrize(
    "run",
    [
        functools.partial(mapped, kind=AxisType.Explicit),
        functools.partial(mapped, check_vma=False),
        lambda grads: jax.pmap(steps_of_a_worker, AXIS, in_axes=(None, 0))(NESTED, grads),
    ],
    ids=["explicit axes", "unchecked types", "pmap"],
)
def test_wherever_it_runs_the_updates_are_the_same(nested, run):
    grads, updates = nested
    assert_equal(run(grads), updates)


# --- What the compiled program holds ----------------------------------------------------------------


def compiled_update(tx, params, workers):
    """The compiled update, of gradients ``[W, ...]``."""
    state = lc.training.abstract_state(tx, params, workers).opt_state
    grads = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct((workers.num_gradients, *p.shape), p.dtype), params
    )
    return update_of(tx, workers).lower(grads, state, params).compile()


def test_each_bucket_is_a_pair_of_collectives_with_coins_of_its_own():
    shapes = {k: (n,) for k, n in zip("abcdef", (100, 100, 50, 300, 64, 64), strict=True)}
    params, workers = of_shapes(shapes), workers_on("data=2")
    tx = cub(bucket_size=200, weight_decay=0.0, workers=workers)
    compiled = compiled_update(tx, params, workers)
    ops = sorted(c.op for c in collectives(compiled, workers.mesh))
    assert ops == ["all-gather"] * 4 + ["all-to-all"] * 4  # a b | c | d | e f
    tied = jax.tree.map(lambda p: jnp.stack([jnp.ones(p.shape), -jnp.ones(p.shape)]), params)
    updates, _ = update_of(tx, workers)(tied, tx.init(params), params)
    assert not np.array_equal(updates["a"][:50], updates["c"])
    assert not np.array_equal(updates["c"], updates["d"][:50])


@pytest.mark.parametrize(
    ("make", "size", "few"), [(cub, 128 * layout.SMALL, 3), (owner_lion, 1000, 8)]
)
def test_the_program_grows_with_the_number_of_leaves_and_no_faster(make, size, few):
    """Flags of all leaves that were found anew for each leaf made it grow with the square."""
    lines, workers = [], workers_on("data=2")
    for leaves in (few, 2 * few, 4 * few):
        params = [jax.ShapeDtypeStruct((size,), jnp.float32)] * leaves
        program = compiled_update(make(workers=workers), params, workers).as_text()
        lines.append(len(program.splitlines()))
    assert lines[2] - lines[1] < 2.4 * (lines[1] - lines[0]), lines


def test_numbers_that_xla_does_not_know_are_the_numbers():
    for numbers in ([7], [0, 5, 2**31], list(range(0, 90, 2))):
        found = jax.jit(lambda step, numbers=numbers: xla.runtime_constants(numbers, step))
        assert list(map(int, found(jnp.int32(2**31 - 1)))) == numbers


# --- Statistics -------------------------------------------------------------------------------------


def tied(size, ties):
    """Of 2 steps and 4 workers: the first ``ties`` elements two against two, the others unanimous."""
    g = np.ones((2, 4, size), np.float32)
    g[:, :2, :ties] = -1
    return g


def test_ties_and_agreement_are_those_of_all_parameters():
    grads = {"a": tied(10, 3), "b": tied(30, 1)}
    grads["b"][1, 2, 5] = np.nan  # sits out of one vote only: two against one where it was a tie
    several = optax.partition({"a": cub(), "b": cub()}, {"a": "a", "b": "b"})
    params = {"a": jnp.zeros(10), "b": jnp.zeros(30)}
    _, states = run_workers({0: several}, params, grads)[0]
    # Ties, who abstains, and the share of unlike pairs: two against two are 4 of 6, two against one 2 of 3.
    healthy = [4, 0, 0, 4 * 4 / (6 * 40)]
    later = [3, 1, 1, (3 * 4 + 2) / (6 * 10 + 3 * 30)]
    for step, want in enumerate([healthy, later]):
        found = lc.metrics(jax.tree.map(lambda x, t=step: x[t, 0], states))
        kinds = [np.float32, np.float32, np.int32, np.int32]
        assert [x.dtype for x in found.values()] == kinds
        ties, agreement, *others = found.values()
        assert [float(ties * 40), *others] == want[:3], step
        assert float(agreement) == pytest.approx(1 - want[3]), step
    assert lc.metrics(optax.lion(0.1).init(params)) == {}
    state = cub().init(params)
    with jax.debug_nans(True), jax.transfer_guard("disallow"):
        first = lc.metrics(state)
    assert np.isnan(first.pop("votes/agreement"))
    assert first == {f"votes/{name}": 0 for name in ("ties", "abstained", "abstentions")}


def pulled(params, batch, rng):
    """Its gradient is what the batch has."""
    return sum(jnp.sum(params[k] * batch[k]) for k in params)


def test_padding_is_zero_counters_stay_at_the_largest_and_a_restored_run_is_equal(tmp_path):
    """A scalar whose gradients cancel stays where it is, whatever the padding of its row is coded as."""
    workers, most = workers_on("data=3"), jnp.iinfo(jnp.int32).max
    tx = lc.owner_lion(0.01, quantizer=lc.quantize.midrise(3), weight_decay=0.0, workers=workers)
    step = lc.make_train_step(pulled, tx, workers)
    batch = {"scalar": np.float32([1, -1, 0]), "ragged": normal(3, 130)}
    state = lc.init_state(tx, {"scalar": jnp.float32(0.25), "ragged": jnp.ones(130)}, workers)
    state, _ = step(state, batch)
    votes = state.opt_state[0].votes._replace(abstentions=most + 0 * state.step - 1)
    first = state.opt_state[0]._replace(count=state.step * 0 + most - 2, votes=votes)
    state = state._replace(step=state.step + most - 3, opt_state=(first, *state.opt_state[1:]))
    with lc.Checkpoints(tmp_path, workers=workers) as saved:
        saved.save(state, wait=True)
        again = saved.restore(state).state
    poisoned = batch | {"scalar": np.float32([1, -1, np.nan])}
    for given in (poisoned, poisoned, batch, batch):
        (state, _), (again, _) = step(state, given), step(again, given)
    assert_same(*((s.params, s.opt_state) for s in (state, again)))
    assert state.params["scalar"] == 0.25
    first = state.opt_state[0]
    assert state.step == first.count == first.votes.abstentions == most
    momentum = np.asarray(first.owner[0].value.inner.mu)
    assert np.count_nonzero(momentum) == 130  # and not the scalar, nor what is behind it
