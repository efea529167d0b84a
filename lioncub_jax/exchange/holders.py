"""Holders of the arrays in an optimizer's state, by what states declare and by their place in a chain.

A transform in front of an exchange sees the gradients of one worker, so its state is that worker's.
A transform behind the exchange sees the agreed update, and a wrapper around it (masks, labels, injected
hyperparameters) sees no gradient, so their state is the same on all workers. The class of a state declares
more: ``exchanges = True`` where workers communicate in the transform, and ``holders()``, see `Holder`.
Nothing is read off `update`.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import optax

from lioncub_jax.exchange.holder import Holder
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes
from lioncub_jax.mesh.boxes import find_nodes
from lioncub_jax.mesh.specs import Specs, by_type, spec_of

OWN = {Holder.WORKER, Holder.FEEDBACK, Holder.FRONT}
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


class StateLayout(NamedTuple):
    """Layout of a state: trees like it.

    Attributes:
      specs: how each array lies on the mesh.
      holders: who holds it, a `Holder`.
    """

    specs: Specs
    holders: Any


def layout_on_worker(state: optax.OptState, params: optax.Params, over: Axes) -> StateLayout:
    """Layout of a first state, inside a ``shard_map`` over the workers' axes ``over``.

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
    return StateLayout(by_type(typed, over), holders)


def find_holders(state: optax.OptState, *, in_front: bool = False) -> Any:
    """Holder of each array of a state, a tree like it.

    Args:
      state: as ``init`` returned it: a mapped or restored one may have lost its tuples.
      in_front: True for state in front of an exchange.

    Raises:
      ValueError: for a transform of optax around an exchange that cannot be there.
    """
    parts, structure = jax.tree_util.tree_flatten_with_path(state, lambda x: x is not state)
    if parts and not parts[0][0]:  # an array has no path
        return Holder.FRONT if in_front else Holder.ALL
    inside = [exchanging_part(part) is not None for _, part in parts]
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
    for i, ((key,), part) in enumerate(parts):
        front = in_front or (type(state) in _SEQUENCES and i < last and not inside[i])
        holder = declared.get(getattr(key, "name", ""))
        holders.append(
            find_holders(part, in_front=front) if holder is None
            else jax.tree.map(lambda _, holder=holder: holder, part)
        )  # fmt: skip
    return jax.tree.unflatten(structure, holders)


def exchanging_part(state: optax.OptState) -> Any:
    """The first part of a state of a transform in which workers communicate, or None.

    Its class says ``exchanges = True``.
    """

    def declares(part: object) -> bool:
        return bool(getattr(part, "exchanges", False))

    return next(filter(declares, jax.tree.leaves(state, is_leaf=declares)), None)
