"""What of a transform differs between workers, as its types say once gradients do.

State that a transform makes of gradients is each worker's own; state that it makes of agreed updates is the
same for all. Updates must be agreed, or parameters would drift apart.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Var
from jax.sharding import PartitionSpec as P

from lioncub_jax import axes, checks, exchange, kernels
from lioncub_jax.mesh.placement import Static, Workers
from lioncub_jax.mesh.specs import axes_of, by_type, product, spec_of, stacked
from lioncub_jax.optimizer import GlobalState

_VALUE = {"value": 0.0}  # of the loss, which some transforms ask for
_KNOWN = exchange.CommunicateState, optax.MultiStepsState, optax.ApplyIfFiniteState


class Among(NamedTuple):
    """A transform among workers, on global arrays; of parameters that lie as ``cut`` says.

    Attributes:
      tx: takes extra arguments.
      workers: who votes.
    """

    tx: Any
    workers: Workers

    def specs(self, params: Any, cut: Any) -> Any:
        """A spec for each leaf of the state: over the workers' axes, where theirs differ."""
        shapes, tree = jax.tree.flatten(jax.tree.map(self.workers.shape, cut, params))
        return _specs(self, tree, tuple(shapes), kernels.for_tpu(self.workers.mesh))

    def specs_here(self, params: Any) -> Any:
        """As `specs`, inside a ``shard_map`` over the workers."""
        return by_type(_typed_state(self.tx, self.workers, params), self.workers.axes)

    def first(self, params: Any, cut: Any) -> Any:
        """A jitted function from parameters to the first state, which lies where it belongs."""
        held = self.specs(params, cut)
        if not jax.tree.leaves(held):  # JAX would look in vain for an array that tells the mesh
            return jax.jit(lambda params: held)
        run = self.workers.map(
            lambda params: self.workers.stack(self.tx.init(params), held),
            (cut,),
            held,
            typed=True,
        )
        lie = held
        if self.workers.mesh.auto_axes:  # else types hold it; XLA replicates what is empty
            made = jax.eval_shape(run, params)
            lie = jax.tree.map(lambda spec, x: spec if x.size else P(), held, made)
        # Zeros need no input, and without one only this tells where they go.
        return jax.jit(run, out_shardings=self.workers.shardings(lie))

    def update(
        self,
        cut: Any,
        grads: Any,
        state: Any,
        params: Any,
        own: dict[str, Any],
        extra: dict[str, Any],
    ) -> tuple[Any, Any]:
        """Updates of gradients ``[workers, ...]``, and the state behind them.

        Of the arguments of a transform besides, ``own`` are ``[workers, ...]`` too.
        """
        workers, held = self.workers, self.specs(params, cut)
        check_state(state, held, workers)
        alike = {name: x for name, x in extra.items() if _are_arrays(x)}

        def worker(grads: Any, own: Any, state: Any, params: Any, alike: Any) -> Any:
            grads, own = jax.tree.map(lambda x: x[0], (grads, own))
            return self.update_here(held, grads, state, params, extra | alike | own)

        in_specs = stacked(cut, workers.axes), P(workers.axes), held, cut, P()
        run = workers.map(worker, in_specs, (cut, held), typed=True)
        return workers.hold(run(grads, own, state, params, alike), (cut, held))

    def update_here(
        self, held: Any, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """What one worker makes of its gradients, and of its entries ``[1, ...]`` of the state."""
        before = self.workers.stack(state, held, undo=True)
        updates, after = self.tx.update(grads, before, params, **extra)
        updates = self._agreed(updates, grads, before, params)
        return updates, self.workers.stack(after, held)

    def _agreed(self, updates: Any, grads: Any, state: Any, params: Any) -> Any:
        """Updates, those that no gradient has touched typed as the same for all, such as a frozen leaf's.

        Raises:
          ValueError: for an update that differs between workers, by its type.
        """
        leaves, structure = jax.tree.flatten(updates)
        own = self.workers.axes
        differ = [i for i, x in enumerate(leaves) if axes.varying_axes(x).intersection(own)]
        if not differ:
            return updates

        def updates_of(own: Any, params: Any) -> list[Any]:
            with checks.during(checks.only_types, True):
                updates, _ = self.tx.update(*own, params, **_VALUE)
            return jax.tree.leaves(updates)

        traced = jax.make_jaxpr(updates_of)((grads, state), params).jaxpr
        touched = set(traced.invars[: len(jax.tree.leaves((grads, state)))])
        for step in traced.eqns:
            if any(isinstance(x, Var) and x in touched for x in step.invars):
                touched.update(step.outvars)
        alike = updates_of((jax.tree.map(jnp.zeros_like, params), state), params)
        apart = []
        for i in differ:
            leaves[i], out = alike[i], traced.outvars[i]
            if isinstance(out, Var) and out in touched:
                apart.append(i)
        if apart:
            raise ValueError(_apart(updates, apart, self.workers))
        return jax.tree.unflatten(structure, leaves)


@functools.lru_cache(maxsize=16)  # the first state asks, and then each step that is traced
def _specs(among: Among, tree: Any, shapes: Any, of_tiles: bool) -> Any:
    """`Among.specs` of parameters of these shapes; on a TPU owners' slices lie in the order of tiles."""
    del of_tiles
    cut = tree.unflatten(x.sharding.spec for x in shapes)

    def probe(params: Any) -> Static:
        return Static(among.specs_here(params))

    run = among.workers.map(probe, (cut,), P(), typed=True)
    return jax.eval_shape(run, tree.unflatten(shapes)).value


def _are_arrays(tree: Any) -> bool:
    return all(isinstance(x, (jax.Array, np.ndarray, int, float)) for x in jax.tree.leaves(tree))


def _typed_state(tx: Any, workers: Workers, params: Any) -> Any:
    """A state whose types vary over the workers where it will, once there were gradients.

    Only the update tells, so it is traced until no more of the state varies.
    """
    state = _known_own(tx.init(params), params, workers)
    grads = axes.varying(jax.tree.map(jnp.zeros_like, params), workers.axes)
    while True:
        with checks.during(checks.only_types, True):
            _, after = tx.update(grads, state, params, **_VALUE)
        leaves, structure = jax.tree.flatten(state)
        both = zip(leaves, jax.tree.leaves(after), strict=True)
        more = [tuple(axes.varying_axes(y) - axes.varying_axes(x)) for x, y in both]
        if not any(more):
            return state
        state = jax.tree.unflatten(structure, map(axes.varying, leaves, more))


def _known_own(state: Any, params: Any, workers: Workers) -> Any:
    """A state in which what is known to be each worker's own varies: a ``cond`` wants it from the start.

    Raises:
      ValueError: for transforms of optax in which votes, or cut parameters, cannot be.
    """

    def own(part: Any) -> Any:
        if isinstance(part, exchange.CommunicateState):
            mu, error = axes.varying((part.mu, part.error), workers.axes)
            return part._replace(mu=mu, error=error)
        if isinstance(part, optax.ApplyIfFiniteState):
            if states_of(part.inner_state, exchange.CommunicateState, GlobalState):
                raise ValueError(
                    "optax.apply_if_finite is around a transform whose workers talk: a worker with a NaN "
                    "would skip the vote that the others wait in. Leave it out: a worker whose gradient is "
                    "not finite abstains by itself"
                )
            return part
        if isinstance(part, optax.MultiStepsState):
            if any(len(spec_of(x)) for x in jax.tree.leaves(params)):
                raise ValueError(
                    "optax.MultiSteps forgets how parameters are cut (fsdp, tensor), so it cannot run "
                    "here: accumulate inside the worker, make_train_step(..., accumulate=k), which also "
                    "votes once for k batches"
                )
            inner = _known_own(part.inner_opt_state, params, workers)
            grads = axes.varying(part.acc_grads, workers.axes)
            return part._replace(acc_grads=grads, inner_opt_state=inner)
        return part

    return jax.tree.map(own, state, is_leaf=lambda x: isinstance(x, _KNOWN))


def states_of(state: Any, *kinds: type) -> list[Any]:
    """The states of some kinds in a tree of states, the outermost ones."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in leaves if isinstance(x, kinds)]


def check_state(
    state: Any, specs: Any, workers: Workers, here: bool = False, name: str = "state"
) -> None:
    """Raises ``ValueError`` for a state that another optimizer made, or for other workers."""
    advice = (
        "make the state by init_state or init of this optimizer, with the same parameters and workers, and "
        "the same local optimizer or none"
    )
    structure: Any = jax.tree.structure(specs)
    try:
        parts = structure.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(f"the {name} is not one of this optimizer: {advice}") from error
    for spec, part in zip(jax.tree.leaves(specs), parts, strict=True):
        if not workers.stacks(spec):
            continue
        # A slice that all owners have alike differs over the devices of a group alone.
        holders = 1 if here else product(workers.mesh.shape, axes_of(spec[0]))
        for x in jax.tree.leaves(part):
            if jnp.shape(x)[:1] != (holders,):
                raise ValueError(
                    f"the {name} has an array of shape {jnp.shape(x)} where {holders} workers have "
                    f"one each: {advice}"
                )


def _apart(updates: Any, apart: list[int], workers: Workers) -> str:
    """What to say of updates that differ between workers."""
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    differing = [leaves[i] for i in apart]
    varies = frozenset().union(*[axes.varying_axes(x) for _, x in differing])
    alike = tuple(n for n in workers.axes if n not in varies)
    differs = (
        "the optimizer's update differs between workers, so their parameters would drift apart"
    )
    if alike:
        over = tuple(n for n in workers.axes if n in varies)
        return (
            f"{differs}: it is the same over {alike} and not over {over}. The step has "
            f"{workers}; give the optimizer the same lioncub_jax.Workers: lion_cub(..., workers=workers), "
            "make_train_step(loss, tx, workers)"
        )
    mean = f"global_gradients(tx, workers={workers.axis!r})"
    if len(differing) < len(leaves):
        named = ", ".join(jax.tree_util.keystr(path) for path, _ in differing[:3])
        return (
            f"{differs}: the leaves {named} do, which a mask or label keeps from the transform that "
            "communicates. Give them optax.set_to_zero() to freeze them, or "
            f"{mean} to train them in full precision"
        )
    return (
        f"{differs}: put a transform that communicates in the chain, such as "
        f"lion_cub(..., workers={workers.axis!r}), or wrap yours in {mean}"
    )
