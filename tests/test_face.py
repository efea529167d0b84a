"""The names at the top, what they load, and the workers that everything is given."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.training.state import check_same_sums

MOST_NAMES = 25
NAMESPACES = {
    "baselines", "checkpoint", "decide", "elastic", "faults", "kernels", "lab", "mesh", "momentum",
    "planner", "quantize", "reference", "sync", "traffic", "training", "watch", "wires",
}  # fmt: skip
TYPES = [
    "quantize.Quantizer", "wires.Wire", "sync.Schedule", "decide.Owner", "decide.Down", "momentum.Memory",
    "mesh.Workers", "training.TrainState", "training.TrainStep", "training.StatefulLoss", "training.Kind",
    "training.DriftStats", "checkpoint.Checkpoints", "checkpoint.Restored", "TrainState", "TrainStep",
    "StatefulLoss", "Workers", "training.VoteStats",
]  # fmt: skip
PARAMS = {"w": jnp.arange(6.0).reshape(3, 2) / 8, "b": jnp.float32(0.5)}


def make_mesh(*sizes, names=("data", "batch")):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(
        sizes, names[: len(sizes)], axis_types=kinds, devices=jax.devices()[: np.prod(sizes)]
    )


@pytest.fixture(scope="module")
def workers():
    return lc.Workers(make_mesh(4), "data")


def refused(error, *parts):
    """Matches a message that has all of the parts, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(parts))


def assert_same(a, b):
    """To the bit, and of the same tree."""
    (a, of_a), (b, of_b) = map(jax.tree.flatten, (a, b))
    assert of_a == of_b
    for x, y in zip(a, b, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def loss(params, batch, rng):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


# --- Names


def test_the_top_has_few_names_beside_its_namespaces():
    names = set(lc.__all__)
    assert names > NAMESPACES and len(names - NAMESPACES) <= MOST_NAMES
    assert list(lc.__all__) == sorted(lc.__all__) and names <= set(dir(lc))
    for name in lc.__all__:
        assert getattr(lc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'adam'"):
        _ = lc.adam


def test_types_that_users_annotate_are_public():
    for name in TYPES:
        value = lc
        for part in name.split("."):
            value = getattr(value, part)
        assert isinstance(value, type), name


def test_the_import_loads_nothing_heavy():
    heavy = ["orbax", "flax", "rich", "matplotlib"]
    program = (
        "import sys, lioncub_jax as lc\n"
        f"heavy = {heavy}\n"
        "print(*[name for name in heavy if name in sys.modules], sep=',')\n"
        "lc.checkpoint, lc.traffic, lc.Checkpoints\n"
        "print(*[name for name in heavy if name in sys.modules], sep=',')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    before, after = done.stdout.split("\n")[:2]
    assert before == "" and "orbax" in after.split(",")


def test_a_step_without_flax_does_not_load_it():
    program = (
        "import sys, jax, jax.numpy as jnp, lioncub_jax as lc\n"
        "mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "workers = lc.Workers(mesh, 'data')\n"
        "tx = lc.lion_cub(1e-3, axis_name=workers)\n"
        "state = lc.init_state(tx, {'w': jnp.ones(3)}, workers)\n"
        "step = lc.make_train_step(lambda p, b, r: jnp.sum(p['w'] * b), tx, workers)\n"
        "print(step(state, jnp.ones((1, 3)))[1]['loss'], 'flax' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3.0", "False"]


# --- Workers


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ((None, "data"), TypeError, ("None is no mesh", "jax.make_mesh")),
        (("data", "data"), TypeError, ("'data' is no mesh", "jax.make_mesh")),
        (("mesh", None), TypeError, ("axis_name=None", "name of a mesh axis")),
        (("mesh", 3), TypeError, ("axis_name=3", "name of a mesh axis")),
        (("mesh", ()), ValueError, (r"axis_name=\(\)", "axis of the workers")),
        (("mesh", "rows"), ValueError, (r"axes \('data', 'batch'\)", "axis_name='rows'")),
        (("mesh", "data", "gpu"), ValueError, (r"axes \('data', 'batch'\)", "group_axis='gpu'")),
        (("mesh", "data", "data"), ValueError, ("name an axis twice",)),
    ],
)
def test_workers_that_cannot_be(arguments, error, parts):
    arguments = [make_mesh(2, 2) if x == "mesh" else x for x in arguments]
    with refused(error, *parts):
        lc.Workers(*arguments)


def test_workers_are_values():
    mesh = make_mesh(2, 2)
    one, other = lc.Workers(mesh, "data"), lc.Workers(mesh, "data", "batch")
    assert one == lc.Workers(mesh, "data") != other and hash(one) == hash(lc.Workers(mesh, "data"))
    assert (one.axes, one.count, one.group_axis) == (("data",), 2, None)
    assert (other.axes, other.count) == (("data", "batch"), 4)


@pytest.mark.parametrize(("make", "group"), [(lc.lion_cub, None), (lc.owner_lion, "batch")])
def test_workers_and_names_make_the_same_step(make, group):
    mesh = make_mesh(2, 2)
    workers = lc.Workers(mesh, "data", group)
    names = {"axis_name": "data", "group_axis": group}
    ends = []
    for tx, where, rest in [
        (make(0.1, **names), mesh, names),
        (make(0.1, axis_name=workers), workers, {}),
    ]:
        state = lc.init_state(tx, PARAMS, where, **rest)
        step = lc.make_train_step(loss, tx, where, **rest)
        ends.append(step(state, np.arange(24, dtype=np.float32).reshape(8, 3)))
    assert_same(*ends)


def test_a_mean_over_a_group_comes_from_the_workers_too():
    workers = lc.Workers(make_mesh(2, 2), "data", "batch")
    tx = lc.global_gradients(optax.sgd(1.0), workers)
    state = lc.init_state(tx, PARAMS, workers)
    state, _ = lc.make_train_step(loss, tx, workers)(state, np.ones((4, 3), np.float32))
    full = jax.grad(loss)(PARAMS, np.ones((4, 3), np.float32), None)
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] - full["w"], rtol=1e-5)


CALLS = {
    "init_state": lambda *where, **names: lc.init_state(cub("data"), PARAMS, *where, **names),
    "abstract_state": lambda *where, **names: lc.training.abstract_state(
        cub("data"), PARAMS, *where, **names
    ),
    "make_train_step": lambda *where, **names: lc.make_train_step(
        loss, cub("data"), *where, **names
    ),
    "on_mesh": lambda *where, **names: lc.on_mesh(cub("data"), *where, **names),
    "worker_value_and_grad": lambda *where, **names: lc.worker_value_and_grad(
        loss, *where, **names
    ),
}


def cub(axis_name, **options):
    return lc.lion_cub(0.1, axis_name=axis_name, **options)


@pytest.mark.parametrize("call", CALLS)
def test_where_the_workers_are_is_given_once(call, workers):
    with refused(TypeError, "None is no mesh", r"lioncub_jax\.Workers"):
        CALLS[call](None, axis_name="data")
    with refused(TypeError, "'data' is no mesh", r"lioncub_jax\.Workers"):
        CALLS[call]("data")
    with refused(ValueError, r"axes \('data',\)", r"Workers\(mesh, 'data'\)"):
        CALLS[call](workers.mesh)
    with refused(
        ValueError, "workers of axis_name='data'", "axis_name='data'", "leave the names out"
    ):
        CALLS[call](workers, axis_name="data")


def test_an_optimizer_of_workers_takes_no_other_group():
    workers = lc.Workers(make_mesh(2, 2), "data")
    with refused(ValueError, "group_axis='batch'", "axis_name='data'", "leave it out"):
        lc.lion_cub(0.1, axis_name=workers, group_axis="batch")


def run(tx, workers, params=PARAMS):
    state = lc.init_state(tx, params, workers)
    return lc.make_train_step(loss, tx, workers)(state, np.ones((8, 3), np.float32))


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [(("batch", None), ("data", None)), (("data", "batch"), ("data", None))],
    ids=["another axis", "a group that the step has not"],
)
def test_an_optimizer_over_an_axis_that_the_step_does_not_map(optimizer, step):
    axis, group = optimizer
    with refused(ValueError, "'batch'", "'data'", "different axes", "Workers"):
        run(cub(axis, group_axis=group), lc.Workers(make_mesh(2, 2), *step))


def test_a_step_over_an_axis_that_the_optimizer_does_not_vote_over():
    mesh = make_mesh(2, 2)
    with refused(
        ValueError,
        r"same over \('data',\) and not over \('batch',\)",
        "axis_name='data', group_axis='batch'",
    ):
        run(cub("data"), lc.Workers(mesh, "data", "batch"))
    with refused(
        ValueError, r"same over \('data',\)", r"axis_name=\('data', 'batch'\)", "Workers to both"
    ):
        run(cub("data"), lc.Workers(mesh, ("data", "batch")))


# --- One device, no mesh


@pytest.mark.parametrize(
    "make",
    [
        lc.lion_cub,
        lc.distributed_lion,
        lc.owner_lion,
        functools.partial(lc.lion_cub, sync=lc.sync.every(2)),
    ],
    ids=["lion_cub", "distributed_lion", "owner_lion", "with syncs"],
)
def test_one_device_without_a_mesh_is_lion(make):
    ours, lions = make(0.1, weight_decay=0.01, axis_name=None), optax.lion(0.1, weight_decay=0.01)
    mine, state = jax.jit(ours.init)(PARAMS), lions.init(PARAMS)
    rng = np.random.default_rng(0)
    for _ in range(4):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), PARAMS)
        update, mine = jax.jit(ours.update)(grads, mine, PARAMS)
        wanted, state = jax.jit(lions.update)(grads, state, PARAMS)
        assert_same(update, wanted)


def test_one_device_needs_no_mesh_for_the_baseline_and_gradients():
    tx = lc.global_gradients(optax.adamw(0.1), None)
    value, grads = lc.local_value_and_grad(loss, None)(PARAMS, jnp.ones((4, 3)), None)
    assert value == loss(PARAMS, jnp.ones((4, 3)), None)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS, abstain=False)
    wanted, _ = optax.adamw(0.1).update(grads, optax.adamw(0.1).init(PARAMS), PARAMS)
    assert_same(updates, wanted)


def test_the_axis_cannot_be_forgotten():
    for make in (lc.lion_cub, lc.distributed_lion, lc.owner_lion, lc.scale_by_lion_cub):
        with pytest.raises(TypeError, match="axis_name"):
            make(0.1)


# --- Directions


@pytest.mark.parametrize("name", ["lion_cub", "distributed_lion", "owner_lion"])
def test_an_alias_is_its_direction_then_decay_then_the_rate(name, workers):
    direction = getattr(lc, f"scale_by_{name}")(axis_name=workers)
    chain = optax.chain(
        direction, optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.01)
    )
    alias = getattr(lc, name)(0.01, weight_decay=0.1, axis_name=workers)
    ends = [run(tx, workers)[0] for tx in (chain, alias)]
    assert_same(*ends)


def test_a_direction_is_signs_that_an_average_softens(workers):
    state, _ = run(optax.chain(lc.scale_by_lion_cub(axis_name=workers)), workers)
    moved = np.abs(np.asarray(state.params["w"]) - PARAMS["w"])
    np.testing.assert_allclose(moved, 1, rtol=1e-6)


# --- What is refused


@pytest.mark.parametrize("make", [lc.lion_cub, lc.owner_lion, lc.scale_by_lion_cub])
def test_a_quantizer_that_was_not_called_is_named_as_what_it_is(make):
    rate = () if make is lc.scale_by_lion_cub else (0.1,)
    with refused(TypeError, "^quantizer=", r"called, such as quantize\.sign\(\)"):
        make(*rate, axis_name="data", quantizer=lc.quantize.sign)


def test_a_mask_is_of_bools():
    with refused(TypeError, r"mask\['w'\] is 'yes'", "True or False"):
        cub("data", mask={"w": "yes", "b": False})
    with refused(TypeError, r"mask\['w'\] is 1\.0"):
        cub("data", mask=lambda params: {"w": 1.0, "b": False}).init(PARAMS)
    with refused(TypeError, r"sync_where\['w'\] is 'no'"):
        cub("data", sync=lc.sync.every(2), sync_where={"w": "no", "b": True})
    cub("data", mask={"w": np.bool_(True), "b": jnp.zeros((), bool)}).init(PARAMS)
    vote, every = lc.communicate(axis_name="data", memory=lc.momentum.blend()), lc.sync.every(2)
    sentence = (
        r"where\['w'\] is 'no': a mask has a bool for each leaf of the parameters; give True or"
    )
    with refused(TypeError, sentence):
        lc.sync_momentum(vote, "data", every, where={"w": "no", "b": True})
    with refused(TypeError, sentence):
        lc.sync_momentum(vote, "data", every, where=lambda mu: {"w": "no", "b": True}).init(PARAMS)
    lc.sync_momentum(vote, "data", every, where={"w": np.bool_(True), "b": False}).init(PARAMS)


def test_a_first_state_is_of_arrays_and_a_key(workers):
    tx = cub(workers)
    with refused(TypeError, r"params\['w'\] is 1\.0, a float", "jnp.asarray"):
        lc.init_state(tx, {"w": 1.0}, workers)
    with refused(TypeError, r"rng is .* of shape \(3,\)", r"jax\.random\.key\(seed\)"):
        lc.init_state(tx, PARAMS, workers, rng=jnp.zeros(3, jnp.uint32))
    with refused(TypeError, "rng is int", r"jax\.random\.key\(seed\)"):
        lc.init_state(tx, PARAMS, workers, rng=0)


def test_parameters_that_differ_between_processes_are_named():
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path({"params": PARAMS})]
    check_same_sums(paths, np.uint32([[1, 2], [1, 2], [1, 2]]))
    with refused(ValueError, r"\['params'\]\['w'\] differs between processes 0 and 2", "same seed"):
        check_same_sums(paths, np.uint32([[1, 2], [1, 2], [1, 3]]))


def test_a_dict_is_no_nnx_model():
    with refused(TypeError, "is given a dict", "flax.nnx.Module", "init_state"):
        lc.from_nnx({"w": jnp.ones(3)}, loss)


def test_the_loss_comes_first(workers):
    with refused(TypeError, "the loss is", "StatefulLoss", "from_nnx"):
        lc.make_train_step((loss, {}, ()), cub(workers), workers)


def test_the_state_of_another_optimizer_is_refused(workers):
    adam = lc.init_state(lc.global_gradients(optax.adamw(0.1), workers), PARAMS, workers)
    with refused(ValueError, "state is not one of this optimizer", "init_state"):
        lc.make_train_step(loss, cub(workers), workers)(adam, np.ones((8, 3)))
    two = lc.Workers(make_mesh(2), "data")
    tx = lc.on_mesh(cub(workers), workers)
    grads = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), PARAMS)
    with refused(ValueError, r"array of shape \(2,", "4 workers have one"):
        tx.update(grads, lc.on_mesh(cub(two), two).init(PARAMS), PARAMS)


def grads_for(count, params=PARAMS):
    return jax.tree.map(lambda p: jnp.ones((count, *p.shape)), params)


@pytest.mark.parametrize("make", [cub, lambda axis: lc.global_gradients(optax.sgd(0.1), axis)])
def test_gradients_without_an_entry_for_each_worker_are_refused(make, workers):
    tx = lc.on_mesh(make(workers), workers)
    state = tx.init(PARAMS)
    for grads, shape in [(PARAMS, r"\(\)"), (grads_for(8), r"\(8,\)"), (grads_for(2), r"\(2,\)")]:
        with refused(
            ValueError, rf"\['b'\] has shape {shape}", r"not \(4,\)", "worker_value_and_grad"
        ):
            tx.update(grads, state, PARAMS)
    with refused(ValueError, "the gradients are", "but the parameters", "worker_value_and_grad"):
        tx.update({"w": grads_for(4)["w"]}, state, PARAMS)


def test_a_flag_for_each_worker(workers):
    tx = lc.on_mesh(cub(workers), workers)
    for abstain in (True, jnp.zeros(3, bool), jnp.zeros((4, 1), bool)):
        with refused(ValueError, "abstain has shape", r"bool\[4\]"):
            tx.update(grads_for(4), tx.init(PARAMS), PARAMS, abstain=abstain)


# --- Readers


def test_drift_is_read_by_leaf_and_in_all(workers):
    def apart(params, batch, rng):
        """Workers agree on the gradient of b, and not on that of w."""
        return jnp.sum(params["w"] * batch[0, 0]) + jnp.sum(params["b"])

    tx = optax.chain(optax.identity(), cub(workers, sync=lc.sync.every(2)))
    state = lc.init_state(tx, PARAMS, workers)
    assert float(lc.drift_stats(state.opt_state).drift) == 0
    step = lc.make_train_step(apart, tx, workers)
    batch = np.array([-1, 1, -1, 1], np.float32)[:, None]
    for _ in range(2):
        state, _ = step(state, batch)
    found = lc.drift_stats(state.opt_state)
    assert int(found.syncs) == 1
    assert float(found.by_leaf["w"]) == pytest.approx(1) and float(found.by_leaf["b"]) == 0
    assert float(found.drift) == pytest.approx(1)  # of the leaf that drifts at all
    assert lc.drift_stats(cub("data").init(PARAMS)) is None


def test_model_state_of_all_workers_is_one_for_evaluation(workers):
    start = {
        "mean": jnp.zeros(2),
        "half": jnp.zeros((), jnp.bfloat16),
        "calls": jnp.int32(0),
        "key": jax.random.key(5),
    }

    def stateful(params, model_state, batch, rng):
        x = jnp.mean(batch)
        new = {**model_state, "mean": model_state["mean"] + x, "half": x.astype(jnp.bfloat16)}
        return jnp.sum(params["w"]) * x, {}, {**new, "calls": jnp.int32(x)}

    tx = cub(workers)
    state = lc.init_state(tx, PARAMS, workers, model_state=start)
    first = jax.random.key_data(state.model_state["key"][0])
    state, _ = lc.make_train_step(lc.StatefulLoss(stateful), tx, workers)(state, np.arange(4.0))
    one = lc.training.mean_model_state(state)
    np.testing.assert_array_equal(one["mean"], [1.5, 1.5])
    assert (float(one["half"]), one["half"].dtype, int(one["calls"])) == (1.5, jnp.bfloat16, 3)
    np.testing.assert_array_equal(jax.random.key_data(one["key"]), first)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(one))
    with refused(ValueError, "is a number", r"leading \[workers\]"):
        lc.training.mean_model_state({"calls": jnp.int32(0)})


# --- State that is given away, and what is empty


def test_a_state_that_an_earlier_step_took_over_is_refused_by_name(workers):
    tx = cub(workers)
    first = lc.init_state(tx, PARAMS, workers)
    step = lc.make_train_step(loss, tx, workers)
    second, metrics = step(first, np.ones((8, 3), np.float32))
    with refused(ValueError, r"state\.step was given to an earlier step", "donate=False"):
        step(first, np.ones((8, 3), np.float32))
    assert np.isfinite(step(second, np.ones((8, 3), np.float32))[1]["loss"])

    keeping = lc.make_train_step(loss, tx, workers, donate=False)
    first = lc.init_state(tx, PARAMS, workers)
    ends = [keeping(first, np.ones((8, 3), np.float32)) for _ in range(2)]
    assert_same(*ends)
    assert metrics["loss"] == ends[0][1]["loss"]


@pytest.mark.parametrize("make", [lc.lion_cub, lc.owner_lion])
def test_a_leaf_without_elements_needs_no_second_program(make, workers):
    params = {**PARAMS, "none": jnp.zeros((0, 4))}
    tx = make(0.1, axis_name=workers)
    state = lc.init_state(tx, params, workers)
    shapes = lc.training.abstract_state(tx, params, workers)
    step = lc.make_train_step(loss, tx, workers)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **rest: (
            compiled.append(event) if "backend_compile" in event else None
        )
    )
    batch = jnp.ones((8, 3))
    lie = [[x.sharding.spec for x in jax.tree.leaves(tree)] for tree in (shapes, state)]
    state, _ = step(state, batch)
    before = len(compiled)
    lie.append([x.sharding.spec for x in jax.tree.leaves(state)])
    step(state, batch)
    assert before > 0 and len(compiled) == before and step.traces == 1
    assert lie[0] == lie[1] == lie[2]
    assert P("data") in lie[0]


# --- Metrics


def test_metrics_are_a_plain_dict_with_the_loss_first(workers):
    def with_aux(params, batch, rng):
        value = loss(params, batch, rng)
        return value, {
            "accuracy": value / 2,
            "right": jnp.sum(batch > 0),
            "any": jnp.any(batch > 5),
        }

    tx = cub(workers)
    state = lc.init_state(tx, PARAMS, workers)
    _, metrics = lc.make_train_step(with_aux, tx, workers)(state, np.arange(24.0).reshape(8, 3))
    assert type(metrics) is dict and list(metrics) == ["loss", "accuracy", "any", "right"]
    assert {x.shape for x in metrics.values()} == {()}
    # Worker 0 has 0 to 5, and so no entry above 5.
    assert (int(metrics["right"]), int(metrics["any"])) == (23, 3)
    assert all(isinstance(float(x), float) for x in metrics.values())


def test_a_name_that_stood_at_the_top_says_where_it_is_now():
    with pytest.raises(AttributeError, match=r"no midrise: it is lioncub_jax\.quantize\.midrise"):
        lc.midrise  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'jnp'"):
        lc.jnp  # noqa: B018
