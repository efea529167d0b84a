"""The workers that everything is given, what is refused at the door, and what comes out of a step."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import absent, assert_same, mesh_on, on_both_kinds, update_of, workers_on
from flax import nnx, serialization
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

PARAMS = {"w": np.arange(6, dtype="f").reshape(3, 2) / 8, "b": np.float32(0.5)}
ONES = np.ones((8, 3), np.float32)


def four(*names):
    """Four workers; with a second name two of two devices each."""
    return lc.Workers(mesh_on("data=2 batch=2"), *names) if names else workers_on("data=4")


def cub(workers="data", **options):
    return lc.lion_cub(0.1, workers=workers, **options)


def loss(params, batch, rng=None):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def first(tx, workers=None, params=PARAMS, **options):
    return lc.init_state(tx, params, workers or four(), **options)


def run(tx, workers=None, loss=loss):
    workers = workers or four()
    return lc.make_train_step(loss, tx, workers)(first(tx, workers), ONES)


def grads_for(count):
    return jax.tree.map(lambda p: np.ones((count, *np.shape(p)), "f"), PARAMS)


# --- One device


def test_one_device_needs_no_mesh_for_gradients():
    found = lc.local_value_and_grad(loss, workers=None)(PARAMS, ONES)
    assert_same(found, jax.value_and_grad(loss)(PARAMS, ONES))


# --- What is refused


def taken_over(read=None):
    state, step = first(cub()), lc.make_train_step(loss, cub(), four())
    step(state, ONES)
    read(state) if read else step(state, ONES)


def of_loss(loss, params=PARAMS, model_state=(), workers=None, tx=None):
    state = first(tx or cub(), params=params, model_state=model_state)
    return lc.make_train_step(loss, tx or cub(), workers or four())(state, ONES)


class Sows(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return jnp.mean(self.norm(x) ** 2)


def of_module():
    return of_loss(*lc.from_nnx(Sows(), Sows.__call__))


def closes_over(kind):
    rows = jax.device_put(ONES, NamedSharding(mesh_on("data=4", kind), P("data")))
    step = lc.make_train_step(
        lambda params, batch, rng: loss(params, rows[:2] * batch), cub(), four()
    )
    step(first(cub()), ONES)


ELSEWHERE = lc.Workers(jax.make_mesh((4,), ("data",), devices=jax.devices()[4:]), "data")
RETURNED = {
    "three values": (lambda x: (x, x, 1), "returned 3 value.*(loss, aux).*entries of aux"),
    "a named tuple": (
        lambda x: optax.ScaleByAdamState(x, x, 1),
        "returned 3 value.*entries of aux",
    ),
    "rows": (lambda x: x * ONES[0], r"the loss is float32\[3\].*mean over the rows"),
}
REFUSED = {
    **{
        f"a loss that returns {name}": (
            lambda found=found: of_loss(lambda *given: found(loss(*given))), TypeError, words,
        )
        for name, (found, words) in RETURNED.items()
    },
    "a key from the loss": (
        lambda: of_loss(lambda *given: (loss(*given[:2]), {"key": given[2]})), TypeError,
        r"the loss returns \['key'\], key.*give numbers",
    ),
    "no model state back": (
        lambda: of_loss(lambda *given: (0.0, {}), model_state=jnp.ones(3)), TypeError,
        r"returned 2 value.*\(loss, aux, model_state\)",
    ),
    "a module": (
        lambda: first(cub(), params=nnx.Linear(3, 2, rngs=nnx.Rngs(0))), TypeError,
        "params is a module, Linear.*lioncub_jax.from_nnx",
    ),
    "the bytes of a module": (
        lambda: lc.audit.of(cub(), nnx.Linear(3, 2, rngs=nnx.Rngs(0)), four()), TypeError,
        r"params is a module, Linear.*the parameters are nnx.state\(model, nnx.Param\)",
    ),
    "what sow keeps": (
        of_module, ValueError, r"model_state\['seen'\].* was nothing.*nnx.Intermediate",
    ),
    "a state on another mesh": (
        lambda: of_loss(loss, workers=ELSEWHERE), ValueError,
        r"state\.step is on a mesh of devices \[0, 1, 2, 3\].*on one of \[4, 5, 6, 7\].*device_put",
    ),
    "a step in scan": (
        lambda: jax.lax.scan(lc.make_train_step(loss, cub(), four()), first(cub()), ONES[None]),
        TypeError, "inside jit, scan.*a step of your own in lioncub_jax.map_step",
    ),
    **{
        f"arrays by closure, axes {kind.name}": (
            functools.partial(closes_over, kind), ValueError,
            "should match the mesh.*An array on the mesh that the step closes over is to be an argument",
        )
        for kind in (AxisType.Auto, AxisType.Explicit)
    },
    "sharpness": (
        lambda: run(optax.contrib.sam(cub(), optax.sgd(0.1), opaque_mode=True)), ValueError,
        "asks for grad_fn.*value, as",
    ),
    "a line search": (
        lambda: run(lc.global_gradients(optax.lbfgs(), workers=four())), ValueError,
        "asks for value_fn.*value, as",
    ),
    # Workers
    "a mesh without devices": (
        lambda: first(cub(), absent(4)), ValueError, "is an AbstractMesh, without devices.*abstract_state",
    ),
    "no name": (lambda: four(None), ValueError, "axis=None, group=None: the mesh has"),
    "another group": (lambda: four("data", "gpu"), ValueError, "group='gpu': the mesh has axes"),
    "an axis twice": (lambda: four("data", "data"), ValueError, "give names of them, each once"),
    "a step in groups": (
        lambda: run(cub(), four("data", "batch")), ValueError,
        "differs between workers over batch .* give the optimizer the same lioncub_jax.Workers",
    ),
    # States
    "a state of another kind": (
        lambda: lc.make_train_step(loss, cub(), four())(tuple(first(cub())), ONES), TypeError,
        "the state is a tuple, and the StepState of init_state",
    ),
    "a key of words": (
        lambda: first(cub(), rng=jnp.zeros(3, jnp.uint32)), TypeError,
        r"rng is .* of shape \(3,\).*jax\.random\.key\(seed\)",
    ),
    "a state that was given away": (
        taken_over, ValueError, r"state\.step was given to an earlier step.*jax\.tree\.map\(jnp\.copy",
    ),
    "old parameters": (
        lambda: taken_over(lambda state: first(cub(), params=state.params)), ValueError,
        r"params\['b'\] was given to an earlier step",
    ),
    "the state of another optimizer": (
        lambda: lc.make_train_step(loss, cub(), four())(
            first(lc.global_gradients(optax.adamw(0.1), workers=four())), ONES
        ), ValueError, "state is not one of this optimizer.*init_state",
    ),
    "the state of two workers": (
        lambda: update_of(cub(four()), four())(
            grads_for(4), cub(workers_on("data=2")).init(PARAMS), PARAMS
        ), ValueError, r"has shape \(2,.*each worker's own, \[4, ...\]: make the state by init",
    ),
    "a dict as a model": (
        lambda: lc.from_nnx({"w": jnp.ones(3)}, loss), TypeError,
        "is given a dict.*flax.nnx.Module.*init_state",
    ),
    "a loss with its state": (
        lambda: lc.make_train_step((loss, {}, ()), cub(), four()), TypeError,
        "the loss is.*model_state.*from_nnx",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    build, error, words = REFUSED[name]
    with pytest.raises(error, match=f"(?s){words}"):
        build()


@on_both_kinds
def test_an_optimizer_without_workers_on_several_devices_is_warned_of(kind):
    mesh, tx = mesh_on("data=8", kind), lc.lion_cub(0.1, workers=None)
    update = jax.jit(lambda *given: tx.update(*given))

    def on(params):
        return update(params, tx.init(params), params)[0]

    with pytest.warns(UserWarning, match=r"workers=None.*on several, \{'data': 8\}"):
        on(jax.device_put(PARAMS, NamedSharding(mesh, P())))
    with warnings.catch_warnings(action="error"):
        on(jax.device_put(PARAMS, jax.devices()[3]))  # one of eight
        alone = jax.shard_map(on, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        jax.jit(alone)(PARAMS)  # the local optimizer of a worker


def test_masks_may_be_of_numpys_bools():
    cub(mask={"w": np.bool_(True), "b": jnp.zeros((), bool)}).init(PARAMS)


CALLS = {
    "init_state": functools.partial(lc.init_state, cub(), PARAMS),
    "abstract_state": functools.partial(lc.training.abstract_state, cub(), PARAMS),
    "make_train_step": functools.partial(lc.make_train_step, loss, cub()),
    "map_step": functools.partial(lc.map_step, loss),
    "own": functools.partial(lc.training.own, PARAMS),
    "mean_over_workers": functools.partial(lc.mean_over_workers, PARAMS),
    "Replicas": lc.audit.Replicas,
}


@pytest.mark.parametrize("call", CALLS)
def test_where_a_mesh_is_needed_only_workers_will_do(call):
    for given in ("data", mesh_on("data=4"), None):
        words = re.escape(f"workers={given!r}: ") + r".*lioncub_jax\.Workers\(mesh, 'data'\)"
        with pytest.raises(TypeError, match=words):
            CALLS[call](given)


# --- What comes out


@pytest.mark.parametrize(
    "make", [functools.partial(lc.lion_cub, mu_dtype="bfloat16"), lc.owner_adamw]
)
def test_parameters_of_eight_bits_move(make):
    """JAX adds such a float to no other."""
    step = lambda p, x, rng: loss(jax.tree.map(jnp.float32, p), x) / 8  # noqa: E731
    params = jax.tree.map(lambda x: jnp.asarray(x, "float8_e4m3fn"), PARAMS)
    state = of_loss(step, params, tx=make(0.1, workers="data"))[0]
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state.params, params)
    assert moved == {"w": True, "b": True}


def test_model_state_stays_in_its_containers():
    """Linen's apply returns a dict for a FrozenDict."""
    counted = lambda p, state, *x: (loss(p, *x), {}, {"n": state["n"] + 1})  # noqa: E731
    state, _ = of_loss(counted, model_state=FrozenDict(n=jnp.int32(0)))
    assert_same(state.model_state, FrozenDict(n=np.ones(4, "i")))


def test_a_state_is_made_where_no_transfer_is_implicit():
    with jax.transfer_guard("disallow"):
        state = lc.init_state(cub(), PARAMS, four(), model_state={"n": np.float32(1)})
    assert_same(jax.random.key_data(state.rng), jax.random.key_data(jax.random.key(0)))


def test_a_leaf_without_elements_needs_no_second_program():
    params, tx = {**PARAMS, "none": jnp.zeros((0, 4))}, cub()
    state, step = lc.init_state(tx, params, four()), lc.make_train_step(loss, tx, four())
    states = [lc.training.abstract_state(tx, params, four()), state, step(state, ONES)[0]]
    lie, *others = [[x.sharding.spec for x in jax.tree.leaves(one)] for one in states]
    step(states[-1], ONES)
    assert others == [lie, lie] and P("data") in lie and step.traces == 1


# --- What users of flax and optax do with a state


@pytest.mark.parametrize("make", [lc.lion_cub, lc.owner_adamw])
def test_optax_maps_what_lies_as_parameters_and_flax_writes_a_state_of_votes(make):
    tx = make(0.1, workers=four())
    state = tx.init(PARAMS)
    grads = jax.tree.map(lambda x: 0.3 * x, grads_for(4))
    _, after = update_of(tx, four())(grads, state, jax.tree.map(jnp.asarray, PARAMS))
    written = serialization.to_bytes(after)
    restored = serialization.from_bytes(state, written)
    assert_same(restored, after)
    assert jax.tree.structure(restored) == jax.tree.structure(after)
    if make is lc.owner_adamw:
        two = make(0.1, workers=workers_on("data=2")).init(PARAMS)
        with pytest.raises(ValueError, match="saved chunks are others or lie in another order"):
            serialization.from_bytes(two, written)
    for one in (tx, make(0.1, workers="data")):
        mapped = optax.tree.map_params(one, lambda x, p: p, state, PARAMS)[0]
        assert (mapped.mu if make is lc.lion_cub else mapped.error) == PARAMS
        assert_same(mapped.owner, state[0].owner)
