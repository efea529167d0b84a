"""What of an optimizer differs between workers, as its types say once gradients do.

State that a transform makes of gradients is each worker's own; state that it makes of agreed updates is the
same for all. Updates must be agreed, or parameters would drift apart.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Var
from jax.sharding import PartitionSpec as P

from lioncub_jax import checks, exchange, wires
from lioncub_jax.mesh.placement import Static, Workers
from lioncub_jax.mesh.specs import axes_of, by_type, spec_of
from lioncub_jax.optimizer import GlobalState

_VALUE = {"value": 0.0}  # of the loss, which some transforms ask for


def state_specs(tx: Any, workers: Workers, params: Any, cut: Any) -> Any:
    """A spec for each leaf of the optimizer state: over the workers' axes, where theirs differ."""

    def probe(params: Any) -> Static:
        leaves, structure = jax.tree.flatten(specs_here(tx, workers, params))
        return Static((structure, tuple(leaves)))

    structure, specs = jax.eval_shape(workers.map(probe, (cut,), P(), explicit=True), params).value
    return jax.tree.unflatten(structure, specs)


def specs_here(tx: Any, workers: Workers, params: Any) -> Any:
    """As `state_specs`, inside a ``shard_map`` over the workers."""
    leaves, structure = jax.tree.flatten(_typed_state(tx, workers, params))
    return jax.tree.unflatten(structure, by_type(leaves, workers.axes))


def _typed_state(tx: Any, workers: Workers, params: Any) -> Any:
    """A state whose types vary over the workers where it will, once there were gradients.

    Only the update tells, so it is traced until no more of the state varies.
    """
    state = _known_own(tx.init(params), workers)
    _check_fits(state, params)
    grads = wires.varying(jax.tree.map(jnp.zeros_like, params), workers.axes)
    while True:
        with checks.during(checks.only_types, True):
            _, after = tx.update(grads, state, params, **_VALUE)
        structure: Any
        before, structure = jax.tree.flatten(state)
        for i, (x, y) in enumerate(zip(before, structure.flatten_up_to(after), strict=True)):
            before[i] = wires.varying(x, tuple(wires.varying_axes(y)))
        varied = jax.tree.unflatten(structure, before)
        if jax.tree.map(wires.varying_axes, varied) == jax.tree.map(wires.varying_axes, state):
            return state
        state = varied


def _known_own(state: Any, workers: Workers) -> Any:
    """A state in which what is known to be each worker's own varies: a ``cond`` wants it from the start."""
    vary = partial(wires.varying, axis=workers.axes)

    def own(part: Any) -> Any:
        if isinstance(part, exchange.CommunicateState):
            return part._replace(mu=vary(part.mu), error=vary(part.error))
        if isinstance(part, optax.MultiStepsState):
            inner = _known_own(part.inner_opt_state, workers)
            return part._replace(acc_grads=vary(part.acc_grads), inner_opt_state=inner)
        return part

    kinds = exchange.CommunicateState, optax.MultiStepsState
    return jax.tree.map(own, state, is_leaf=lambda x: isinstance(x, kinds))


def agreed(tx: Any, workers: Workers, updates: Any, grads: Any, state: Any, params: Any) -> Any:
    """Updates, those that no gradient has touched typed as the same for all, such as a frozen leaf's."""
    leaves, structure = jax.tree.flatten(updates)
    if not any(_varies(x, workers) for x in leaves):
        return updates

    def types_of(own: Any, params: Any) -> list[Any]:
        with checks.during(checks.only_types, True):
            updates, _ = tx.update(*own, params, **_VALUE)
        return jax.tree.leaves(updates)

    traced = jax.make_jaxpr(types_of)((grads, state), params).jaxpr
    touched = set(traced.invars[: len(jax.tree.leaves((grads, state)))])
    for step in traced.eqns:
        if any(isinstance(x, Var) and x in touched for x in step.invars):
            touched.update(step.outvars)
    alike = types_of((jax.tree.map(jnp.zeros_like, params), state), params)
    for i, (x, out) in enumerate(zip(leaves, traced.outvars, strict=True)):
        if _varies(x, workers) and not (isinstance(out, Var) and out in touched):
            leaves[i] = alike[i]
    return jax.tree.unflatten(structure, leaves)


def _varies(x: jax.Array, workers: Workers) -> bool:
    return not wires.varying_axes(x).isdisjoint(workers.axes)


def _check_fits(state: Any, params: Any) -> None:
    """Raises ``ValueError`` for transforms of optax in which votes, or cut parameters, cannot be."""
    cut = any(axes_of(entry) for spec in map(spec_of, jax.tree.leaves(params)) for entry in spec)
    for part in states_of(state, optax.ApplyIfFiniteState):
        if states_of(part.inner_state, exchange.CommunicateState, GlobalState):
            raise ValueError(
                "optax.apply_if_finite is around a transform whose workers talk: a worker with a NaN "
                "would skip the vote that the others wait in. Leave it out: a worker whose gradient is not "
                "finite abstains by itself"
            )
    for part in states_of(state, optax.MultiStepsState):
        if cut:
            raise ValueError(
                "optax.MultiSteps forgets how parameters are cut (fsdp, tensor), so it cannot run here: "
                "accumulate inside the worker, make_train_step(..., accumulate=k), which also votes once "
                "for k batches"
            )
        _check_fits(part.inner_opt_state, params)


def states_of(state: Any, *kinds: type) -> list[Any]:
    """The states of some kinds in a tree of states, the outermost ones."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in leaves if isinstance(x, kinds)]


def check_agreed(updates: Any, workers: Workers) -> None:
    """Raises ``ValueError`` for an update that differs between workers, by its type."""
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    differing = [(path, x) for path, x in leaves if _varies(x, workers)]
    if not differing:
        return
    varies = frozenset().union(*[wires.varying_axes(x) for _, x in differing])
    over = tuple(n for n in workers.axes if n in varies)
    alike = tuple(n for n in workers.axes if n not in varies)
    differs = (
        "the optimizer's update differs between workers, so their parameters would drift apart"
    )
    if alike:
        raise ValueError(
            f"{differs}: it is the same over {alike} and not over {over}. The step has "
            f"{workers}; give the optimizer the same (a group_axis must be given to both; global_gradients "
            f"takes all in one, axis_name={workers.axes}), or a lioncub_jax.Workers to both: "
            "lion_cub(..., axis_name=workers), make_train_step(loss, tx, workers)"
        )
    if len(differing) < len(leaves):
        named = ", ".join(jax.tree_util.keystr(path) for path, _ in differing[:3])
        raise ValueError(
            f"{differs}: the leaves {named} do, which a mask or label keeps from the transform that "
            "communicates. Give them optax.set_to_zero() to freeze them, or "
            f"global_gradients(tx, {workers.axis_name!r}) to train them in full precision"
        )
    raise ValueError(
        f"{differs}: put a transform that communicates in the chain, such as "
        f"lion_cub(..., axis_name={workers.axis_name!r}), or wrap yours in "
        f"global_gradients(tx, {workers.axis_name!r})"
    )
