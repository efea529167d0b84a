"""The workers that everything is given, what is refused at the door, and what comes out of a step."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import absent, assert_same, mesh_on, on_both_kinds, workers_on
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


def on_mesh_update(grads, tx=None, state=None, **extra):
    tx = lc.on_mesh(tx or cub(), four())
    return tx.update(grads, tx.init(PARAMS) if state is None else state, PARAMS, **extra)


def in_shard_map(of):
    """An update without types, of a transform made of the one on the mesh, which makes the state."""
    tx = lc.on_mesh(cub(), four())
    state, specs = tx.init(PARAMS), tx.specs(PARAMS)

    def update(batch, state, params):
        grads = lc.local_value_and_grad(loss, workers="data")(params, batch)[1]
        return of(tx).update(grads, state, params)

    return jax.shard_map(
        update,
        mesh=four().mesh,
        check_vma=False,
        in_specs=(P("data"), specs, P()),
        out_specs=(P(), specs),
    )(ONES, state, jax.tree.map(jnp.asarray, PARAMS))


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


def of_module(evaluate):
    run, params, rest = lc.from_nnx(Sows(), Sows.__call__)
    if not evaluate:
        return of_loss(run, params, rest)
    state = first(cub(), params=params, model_state=rest)
    return run(state.params, state.model_state, ONES, None)


def of_other_axes():
    """An update of gradients by the workers of a mesh of the same devices, with another name."""
    workers = lc.Workers(jax.make_mesh((4,), ("batch",), devices=jax.devices()[:4]), "batch")
    params = jax.device_put(PARAMS, workers.shardings(P()))
    grad_fn = lc.worker_value_and_grad(loss, workers)
    jax.jit(lambda params: on_mesh_update(grad_fn(params, ONES)[1]))(params)


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
        lambda: of_module(False), ValueError, r"model_state\['seen'\].* was nothing.*nnx.Intermediate",
    ),
    "an evaluation of all workers": (
        lambda: of_module(True), ValueError,
        r"shape \(4, 3\), an entry for each.*\(3,\).*mean_model_state",
    ),
    "a state on another mesh": (
        lambda: of_loss(loss, workers=ELSEWHERE), ValueError,
        r"state\.step is on a mesh of devices \[0, 1, 2, 3\].*on one of \[4, 5, 6, 7\].*device_put",
    ),
    "parameters on another mesh": (
        lambda: lc.worker_value_and_grad(loss, ELSEWHERE)(first(cub()).params, ONES), ValueError,
        "params.* is on a mesh of devices",
    ),
    "a step in scan": (
        lambda: jax.lax.scan(lc.make_train_step(loss, cub(), four()), first(cub()), ONES[None]),
        TypeError, "inside jit, scan.*a step of your own in lioncub_jax.map_step",
    ),
    **{
        f"arrays by closure, axes {kind.name}": (
            functools.partial(closes_over, kind), ValueError,
            "should match the mesh.*An array on the mesh that the loss closes over is to be an argument",
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
    "nothing on Explicit axes": (
        lambda: lc.worker_value_and_grad(loss, workers_on("data=4", kind=AxisType.Explicit))(
            PARAMS, ONES
        ), ValueError, "neither parameters nor rows lie on the mesh.*Explicit: params = jax.device_put",
    ),
    "a mask around on_mesh": (
        lambda: optax.masked(lc.on_mesh(cub(), four()), {"w": True, "b": False}).init(PARAMS), ValueError,
        r"on_mesh is inside of optax.masked .*the leaf \['b'\].*outermost",
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
        lambda: on_mesh_update(
            grads_for(4), state=lc.on_mesh(cub(), workers_on("data=2")).init(PARAMS)
        ), ValueError, r"array of shape \(2,.*4 workers have one",
    ),
    "a dict as a model": (
        lambda: lc.from_nnx({"w": jnp.ones(3)}, loss), TypeError,
        "is given a dict.*flax.nnx.Module.*init_state",
    ),
    "a loss with its state": (
        lambda: lc.make_train_step((loss, {}, ()), cub(), four()), TypeError,
        "the loss is.*model_state.*from_nnx",
    ),
    "model state without workers": (
        lambda: lc.training.mean_model_state({"calls": jnp.int32(0)}), ValueError,
        r"is a number.*leading \[workers\]",
    ),
    # Gradients
    "gradients of nobody": (
        lambda: on_mesh_update(PARAMS), ValueError,
        r"\['b'\] has shape \(\).*not \(4,\).*worker_value_and_grad",
    ),
    "on_mesh where types say nothing": (
        lambda: in_shard_map(lambda tx: tx), ValueError,
        "check_vma=False, or in a pmap.*give jax.shard_map.*check_vma=True.*or call tx.update itself",
    ),
    "a state of on_mesh without it": (
        lambda: in_shard_map(lambda tx: cub()), ValueError,
        r"shape \(1,\) for \['b'\], and the gradient \(\).*call lioncub_jax.on_mesh\(tx, workers\).update",
    ),
    "gradients of some leaves": (
        lambda: on_mesh_update({"w": grads_for(4)["w"]}), ValueError,
        r"\['b'\] has shape None, and not \(4,\).*worker_value_and_grad",
    ),
    "gradients of two workers": (
        lambda: on_mesh_update(grads_for(2)), ValueError,
        r"\['b'\] has shape \(2,\), of 2 workers, and on_mesh was given 4: give one",
    ),
    "gradients of an axis of another name": (
        lambda: of_other_axes(), ValueError,
        r"grads\['b'\] is on a mesh with axes \('batch',\).*on one with \('data',\): give one",
    ),
    "on_mesh twice": (
        lambda: on_mesh_update(PARAMS, tx=lc.on_mesh(cub(), four())), ValueError,
        r"call on_mesh once, in a loop of your own. To init_state.*give tx itself",
    ),
    "an array of aux of a module": (
        lambda: lc.worker_value_and_grad(lambda model, x: (0.0, x), four(), has_aux=True)(
            nnx.Linear(3, 1, rngs=nnx.Rngs(0)), ONES
        ), ValueError, r"^aux is an array of shape \(2, 3\).*aux_kinds",
    ),
    "one flag for all": (
        lambda: on_mesh_update(grads_for(4), abstain=True), ValueError, r"abstain has shape.*bool\[4\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    build, error, words = REFUSED[name]
    with pytest.raises(error, match=f"(?s){words}"):
        build()


def elementwise(params, x):
    return jnp.mean(x * params["w"])


@on_both_kinds
@pytest.mark.parametrize("model", ["nnx", "dense", "elementwise"])
def test_an_optimizer_that_is_not_on_the_mesh(model, kind):
    """On Auto axes JAX tells nothing to an elementwise model, whose parameters grow: a page says so."""
    workers, loss_fn = workers_on("data=4", kind=kind), loss if model == "dense" else elementwise
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)} if model == "dense" else {"w": jnp.ones(3)}
    if model == "nnx":
        params, loss_fn = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), lambda model, x: model(x).mean()
        lc.training.place(params, workers)
    else:
        params = jax.device_put(params, workers.shardings(P()))
    grad_fn = lc.worker_value_and_grad(loss_fn, workers)

    @nnx.jit
    def step(params):
        _, grads = grad_fn(params, ONES)
        if not isinstance(params, nnx.Module):
            return optax.apply_updates(params, grads)
        nnx.update(params, optax.apply_updates(nnx.state(params, nnx.Param), grads))
        return params

    after = step(params)
    if kind is AxisType.Explicit:
        words = r"of shape \(4.*the same on all workers.*not in lioncub_jax.on_mesh\("
        with pytest.raises(ValueError, match=words):
            step(after)
    elif model != "elementwise":
        with pytest.raises((TypeError, ValueError)) as caught:
            step(after)
        assert "every parameter has 4 entries" in " ".join(caught.value.__notes__)


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
    "on_mesh": functools.partial(lc.on_mesh, cub()),
    "worker_value_and_grad": functools.partial(lc.worker_value_and_grad, loss),
    "Replicas": lc.audit.Replicas,
    "overlap_options": lc.training.overlap_options,
}


@pytest.mark.parametrize("call", CALLS)
def test_where_a_mesh_is_needed_only_workers_will_do(call):
    for given in ("data", mesh_on("data=4"), None):
        words = re.escape(f"workers={given!r}: ") + r".*lioncub_jax\.Workers\(mesh, 'data'\)"
        with pytest.raises(TypeError, match=words):
            CALLS[call](given)


# --- What comes out


@on_both_kinds
def test_model_state_of_every_dtype_is_averaged_on_every_mesh(kind):
    workers = workers_on("data=4", kind=kind)
    numbers = np.array([1, 2, 3, 4])[:, None] * np.ones((4, 2))
    dtypes = "float8_e5m2", "float16", "bfloat16", "float32", "complex64", "int32", "uint8", "bool"
    state = {dtype: jnp.asarray(numbers, dtype) for dtype in dtypes}
    keys = jax.random.split(jax.random.key(3, impl="rbg"), (4, 2))
    state |= {"half": jnp.full((4, 2), 5e4, "float16"), "keys": keys}
    placed = jax.device_put(state, NamedSharding(workers.mesh, P("data")))
    found = lc.training.mean_model_state(first(cub())._replace(model_state=placed))
    assert all(x.sharding.is_fully_replicated for x in found.values())
    wanted = dict.fromkeys(dtypes[:5], 2.5) | {"int32": 4, "uint8": 4, "bool": True, "half": 5e4}
    assert_same(*map(jax.random.key_data, (found.pop("keys"), keys[0])))
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], np.full(2, x, state[name].dtype))
        assert found[name].dtype == state[name].dtype


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
    tx = lc.on_mesh(make(0.1, workers=four()), four())
    state = tx.init(PARAMS)
    grads = jax.tree.map(lambda x: 0.3 * x, grads_for(4))
    _, after = tx.update(grads, state, jax.tree.map(jnp.asarray, PARAMS))
    written = serialization.to_bytes(after)
    restored = serialization.from_bytes(state, written)
    assert_same(restored, after)
    assert jax.tree.structure(restored) == jax.tree.structure(after)
    if make is lc.owner_adamw:
        two = lc.on_mesh(make(0.1, workers="data"), workers_on("data=2")).init(PARAMS)
        with pytest.raises(ValueError, match="saved chunks are others or lie in another order"):
            serialization.from_bytes(two, written)
    for one in (tx, make(0.1, workers="data")):
        mapped = optax.tree.map_params(one, lambda x, p: p, state, PARAMS)[0]
        assert (mapped.mu if make is lc.lion_cub else mapped.error) == PARAMS
        assert_same(mapped.owner, state[0].owner)
    assert tx._replace(update=None).specs(PARAMS)[0].count == P()
