"""A transform in which workers talk, seen from outside: its ``init`` makes the state of all of them.

So ``optax.chain``, ``nnx.Optimizer`` and ``TrainState`` call ``init`` as they do for any optimizer.
``update`` runs in one worker.

Which copies of an array of the state differ is said by what states declare and by their place in a chain.
A transform in front of an exchange sees the gradients of one worker, so its state is that worker's. A
transform behind the exchange sees the agreed update, and a wrapper around it (masks, labels, injected
hyperparameters) sees no gradient, so their state is the same on all workers. The class of a state
declares more: ``exchanges = True`` where workers communicate in the transform, and ``holders()``, see
`Holder`. Nothing is read off `update`.
"""

import contextlib
import contextvars
import enum
import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import checks
from lioncub_jax.exchange.layout import register_with_flax
from lioncub_jax.mesh import axes, boxes, hosts
from lioncub_jax.mesh.axes import Axes
from lioncub_jax.mesh.boxes import find_nodes
from lioncub_jax.mesh.placement import Static, Workers
from lioncub_jax.mesh.specs import Specs, StateSpecs, by_type, spec_of
from lioncub_jax.programs import compilations


class Holder(enum.StrEnum):
    """Holders of the values of a field of a state.

    A state class declares them by a method ``holders() -> dict[field, Holder]``. Other fields have those of
    their place, see `find_holders`, and in a checkpoint those of their sharding.
    """

    ALL = "all"  # one value, the same everywhere
    WORKER = "worker"  # each worker its own
    FRONT = "front"  # likewise, by its place in front of an exchange
    OWNER = "owner"  # the owner of each chunk of a bucket its own
    MEASURED = "measured"  # one value, the same everywhere, which the next measurement replaces


OWN = {Holder.WORKER, Holder.FRONT}
_SEQUENCES = tuple, list, OrderedDict  # the states of optax.chain and named_chain, in order
# Of optax's own wrappers, those with arrays of which their place does not say enough.
_DECLARED = {
    optax.MultiStepsState: {"acc_grads": Holder.FRONT},
    optax.schedules.InjectStatefulHyperparamsState: dict.fromkeys(
        ("count", "hyperparams", "hyperparams_states"), Holder.ALL
    ),
}
_REFUSED = {  # around an exchange
    optax.ApplyIfFiniteState: (
        "in its other branch a worker skips the exchange that the others wait in. Leave it out: a worker "
        "whose gradient is not finite abstains by itself"
    ),
    **dict.fromkeys(
        (optax.ConditionallyMaskState, optax.ConditionallyTransformState),
        "in its other branch a worker keeps a gradient of its own. Put it behind the exchange, around "
        "optax.identity() or what else is there, where all workers agree on a count of steps",
    ),
    optax.LookaheadState: (
        "it updates pairs of parameters, and workers train one tree. Leave it out, and move the slow "
        "parameters in your own loop"
    ),
}


def specs_on_worker(state: optax.OptState, params: optax.Params, over: Axes) -> Specs:
    """How a first state lies on the mesh, inside a ``shard_map`` over the workers' axes ``over``.

    An array of one worker varies over them; any other lies as ``init`` has typed it, such as the slice of
    an owner.
    """
    holders = find_holders(state)
    is_cut = any(len(spec_of(x)) for x in jax.tree.leaves(params))
    if is_cut and find_nodes(state, optax.MultiStepsState):
        raise ValueError(
            "optax.MultiSteps forgets how parameters are cut (fsdp, tensor), so it cannot run here: "
            "accumulate inside the worker, make_train_step(..., accumulate=k), which also votes once for k "
            "batches"
        )
    typed = jax.tree.map(lambda h, x: axes.varying(x, over) if h in OWN else x, holders, state)
    return by_type(typed, over)


def find_holders(state: optax.OptState, *, in_front: bool = False) -> Any:
    """Holder of each array of a state, a tree like it.

    Args:
      state: as ``init`` returned it: a mapped or restored one may have lost its tuples.
      in_front: True for state in front of an exchange.

    Raises:
      ValueError: for a transform of optax around an exchange that cannot be there.
    """
    children, structure = jax.tree_util.tree_flatten_with_path(state, lambda x: x is not state)
    if children and not children[0][0]:  # an array has no path
        return Holder.FRONT if in_front else Holder.ALL
    inside = [exchanging_state(child) is not None for _, child in children]
    last = max((i for i, x in enumerate(inside) if x), default=-1)
    if last >= 0 and type(state) in _REFUSED:
        name = type(state).__name__.removesuffix("State")
        raise ValueError(
            f"optax's {name} is around a transform in which workers communicate: {_REFUSED[type(state)]}"
        )
    if in_front and isinstance(state, optax.contrib.DifferentiallyPrivateAggregateState):
        raise ValueError(
            "differentially_private_aggregate takes a gradient for each row, and in front of an exchange "
            "draws the same noise on all workers: clip and add noise inside the loss, as "
            "docs/how_to/trainer.md shows"
        )
    declared = _DECLARED.get(type(state), {}) if in_front or last >= 0 else {}
    if hasattr(state, "holders"):
        declared = {name: Holder(x) for name, x in state.holders().items()}
    holders = []
    for i, ((key,), child) in enumerate(children):
        front = in_front or (type(state) in _SEQUENCES and i < last and not inside[i])
        holder = declared.get(getattr(key, "name", ""))
        holders.append(
            find_holders(child, in_front=front) if holder is None
            else jax.tree.map(lambda _, holder=holder: holder, child)
        )  # fmt: skip
    return jax.tree.unflatten(structure, holders)


def exchanging_state(state: optax.OptState) -> Any:
    """The first state, in a state, of a transform in which workers communicate, or None.

    Its class says ``exchanges = True``.
    """

    def declares(node: object) -> bool:
        return bool(getattr(type(node), "exchanges", False))

    return next(filter(declares, jax.tree.leaves(state, is_leaf=declares)), None)


GRADIENT = (
    "lioncub.gradient"  # the name of a gradient on its way into an exchange, in a traced step
)

# The axes of the workers while ``init`` makes the state of one of them.
_placing: contextvars.ContextVar[Axes] = contextvars.ContextVar("placing", default=())


# --- The state of all workers


def state_specs(
    tx: optax.GradientTransformation, workers: Workers, params: optax.Params, param_specs: Specs
) -> Specs:
    """How the state of global parameters lies on the mesh, which have these specs."""
    shapes, tree = jax.tree.flatten(jax.tree.map(workers.shape, param_specs, params))
    return _state_specs(tx, workers, tree, tuple(shapes))


@functools.lru_cache(maxsize=16)  # the first state asks, and then each step that is traced
def _state_specs(
    tx: optax.GradientTransformation, workers: Workers, tree: Any, shapes: Any
) -> Specs:
    """`state_specs` by shapes."""
    param_specs = tree.unflatten(x.sharding.spec for x in shapes)

    def probe(params: optax.Params) -> Static:
        with placing(workers.axes):
            state = tx.init(params)
        return Static(specs_on_worker(state, params, workers.axes))

    run = workers.map(probe, (param_specs,), P(), typed=True)
    return jax.eval_shape(run, tree.unflatten(shapes)).value


def jitted_init(
    tx: optax.GradientTransformation, workers: Workers, params: optax.Params, param_specs: Specs
) -> Any:
    """Jitted ``init`` for global parameters with these specs; the state lies where it belongs."""
    specs = state_specs(tx, workers, params, param_specs)
    if not jax.tree.leaves(specs):  # JAX would look in vain for an array that tells the mesh
        return jax.jit(lambda params: specs)

    def init(params: optax.Params) -> optax.OptState:
        with placing(workers.axes):
            return workers.stack(tx.init(params), specs)

    run = workers.map(init, (param_specs,), specs, typed=True)
    placed = specs
    if workers.mesh.auto_axes:  # else types hold it; XLA replicates what is empty
        state = jax.eval_shape(run, params)
        placed = jax.tree.map(lambda spec, x: spec if x.size else P(), specs, state)
    # Zeros need no input, and without one only this tells where they go.
    return jax.jit(run, out_shardings=workers.shardings(placed))


def on_workers(
    tx: optax.GradientTransformation, workers: Any
) -> optax.GradientTransformationExtraArgs:
    """A transform whose ``init``, outside of a worker, makes the state of all workers.

    Its ``update`` names the gradients that it is given, so that a traced step shows which they are. In
    a mapped step a worker whose ``value``, its loss, is not finite abstains.

    Args:
      tx: its state has a field ``specs``.
      workers: anything but `Workers`, such as the name of an axis, knows no mesh, and ``init`` makes the
        state of one worker.
    """
    tx = optax.with_extra_args_support(tx)
    compilations.listen()

    def init(params: optax.Params) -> optax.OptState:
        if checks.stands_in(params):
            return tx.init(params)._replace(specs=0)
        if over := _placing.get():
            return _with_specs(tx.init(params), params, over)
        if not isinstance(workers, Workers):
            return tx.init(params)
        if not set(workers.axes).isdisjoint(jax.sharding.get_abstract_mesh().manual_axes):
            state = tx.init(params)
            is_typed = axes.tracked(workers.axes)
            return _with_specs(state, params, workers.axes) if is_typed else state
        specs = workers.param_specs(params, None)
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
            params = jax.tree.map(hosts.put, params, workers.shardings(specs))
        state = jitted_init(everywhere, workers, params, specs)(params)
        if not boxes.find_boxes(params):
            return state
        lie = state_specs(everywhere, workers, params, specs)
        return boxes.named(state, lie, params, workers)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        if checks.proven.get() and "value" in extra and not {"abstain", "diverged"} & set(extra):
            extra["diverged"] = ~jnp.all(jnp.isfinite(extra["value"]))
        boxed: Any = jax.tree.structure((updates, state))
        # The state's boxes have names of workers in front, and here it is one worker's.
        updates, state, params = map(boxes.opened, (updates, state, params))
        results = tx.update(_marked(updates), state, params, **extra)
        return boxed.unflatten(jax.tree.leaves(results))  # type: ignore[no-any-return]

    everywhere = optax.GradientTransformationExtraArgs(init, update)
    return everywhere


@contextlib.contextmanager
def placing(over: Axes) -> Iterator[None]:
    """A context in which ``init`` makes the state of one of the workers, which says how it lies."""
    token = _placing.set(over)
    try:
        yield
    finally:
        _placing.reset(token)


def _with_specs(state: Any, params: optax.Params, over: Axes) -> Any:
    """The state of a worker, which says how it and the parameters lie."""
    register_with_flax()
    specs = specs_on_worker(state, params, over)
    of_params = by_type(params, ())
    return state._replace(
        specs=StateSpecs(*(tuple(jax.tree.leaves(x)) for x in (of_params, specs)))
    )


def _marked(updates: optax.Updates) -> optax.Updates:
    """The same gradients, each with its name in the trace."""
    tree: Any
    leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
    named = []
    for i, (path, x) in enumerate(leaves):
        name = f"{GRADIENT} {i} {jax.tree_util.keystr(path)}"
        named.append(checkpoint_name(x, name) if isinstance(x, jax.Array) else x)
    return tree.unflatten(named)
