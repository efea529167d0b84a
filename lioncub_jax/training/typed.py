"""A transform among workers, on global arrays: state where it belongs, and updates on which all agree."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import checks
from lioncub_jax.mesh import axes, kernels
from lioncub_jax.mesh.placement import Static, Workers
from lioncub_jax.mesh.specs import axes_of, product, stacked
from lioncub_jax.training.control_flow import communicates, differing, varies, without_casts
from lioncub_jax.training.holders import OWN, StateLayout, keep_if_not_finite, layout_here


class Among(NamedTuple):
    """A transform among workers, on global arrays; of parameters that lie as ``cut`` says.

    Attributes:
      tx: takes extra arguments.
      workers: who votes.
    """

    tx: Any
    workers: Workers

    def specs(self, params: Any, cut: Any) -> Any:
        """A spec for each array of the state: over the workers' axes, where it is each worker's own."""
        return self.layout(params, cut).specs

    def layout(self, params: Any, cut: Any) -> StateLayout:
        """Of the state of global parameters."""
        shapes, tree = jax.tree.flatten(jax.tree.map(self.workers.shape, cut, params))
        return _layout(self, tree, tuple(shapes), kernels.for_tpu(self.workers.mesh))

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
        workers, layout = self.workers, self.layout(params, cut)
        held = layout.specs
        check_state(state, held, workers)
        alike = {name: x for name, x in extra.items() if _are_arrays(x)}

        def worker(grads: Any, own: Any, state: Any, params: Any, alike: Any) -> Any:
            grads, own = jax.tree.map(lambda x: x[0], (grads, own))
            return self.update_here(layout, grads, state, params, extra | alike | own)

        in_specs = stacked(cut, workers.axes), P(workers.axes), held, cut, P()
        run = workers.map(worker, in_specs, (cut, held), typed=True)
        return workers.hold(run(grads, own, state, params, alike), (cut, held))

    def update_here(
        self, layout: StateLayout, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """What one worker makes of its gradients, and of its entries ``[1, ...]`` of the state."""
        before = self.workers.stack(state, layout.specs, undo=True)
        arrays = {name: x for name, x in extra.items() if _are_arrays(x)}
        others = {name: x for name, x in extra.items() if name not in arrays}

        def update(grads: Any, state: Any, params: Any, arrays: dict[str, Any]) -> Any:
            return self.tx.update(grads, state, params, **arrays, **others)

        # Traced once: the program that is checked is the one that is called.
        update, given = jax.jit(update), (grads, before, params, arrays)
        program = update.trace(*given).jaxpr
        with jax.named_scope(checks.DECIDED):
            results = update(*given)
        updates, after = self._agreed(program, given, results, layout.holders)
        after = keep_if_not_finite(layout.holders, grads, before, after)
        return updates, self.workers.stack(after, layout.specs)

    def _agreed(self, program: Any, given: Any, results: Any, holders: Any) -> Any:
        """Updates and state, typed by who holds them.

        What is made of nothing of one worker, such as updates of a frozen leaf, may vary by its type alone.

        Raises:
          ValueError: for an update that differs between workers, or state that all hold.
        """
        over, before = self.workers.axes, jax.tree.leaves(given[1])
        paths, structure = jax.tree_util.tree_flatten_with_path(results)
        each = zip(jax.tree.leaves(holders), before, strict=True)
        types = [over if h in OWN else axes.varying_axes(x).intersection(over) for h, x in each]
        types = [()] * (len(paths) - len(types)) + types
        differ = differing(program.jaxpr, over, [varies(x, over) for x in program.jaxpr.invars])
        leaves, wrong, cast = [x for _, x in paths], [], list[int]()
        for i, wanted in enumerate(types):
            more = axes.varying_axes(leaves[i]).intersection(over).difference(wanted)
            if differ[i] and (more or not wanted):
                wrong.append(paths[i])
            elif more:
                cast.append(i)
        if wrong:
            count, sent = len(jax.tree.leaves(results[0])), communicates(program.jaxpr, over)
            raise ValueError(_difference(wrong, count, self.workers, sent))
        again = without_casts(program, jax.tree.leaves(given), cast)
        for i, x in zip(cast, again, strict=True):
            leaves[i] = x
        leaves = [axes.varying(x, tuple(wanted)) for x, wanted in zip(leaves, types, strict=True)]
        return jax.tree.unflatten(structure, leaves)


@functools.lru_cache(maxsize=16)  # the first state asks, and then each step that is traced
def _layout(among: Among, tree: Any, shapes: Any, of_tiles: bool) -> StateLayout:
    """`Among.layout` of parameters of these shapes; on a TPU owners' slices lie in the order of tiles."""
    del of_tiles
    cut = tree.unflatten(x.sharding.spec for x in shapes)

    def probe(params: Any) -> Static:
        return Static(layout_here(among.tx, params, among.workers.axes))

    run = among.workers.map(probe, (cut,), P(), typed=True)
    return jax.eval_shape(run, tree.unflatten(shapes)).value


def _are_arrays(tree: Any) -> bool:
    return all(isinstance(x, (jax.Array, np.ndarray, int, float)) for x in jax.tree.leaves(tree))


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


def _difference(wrong: list[Any], leaves: int, workers: Workers, sent: bool) -> str:
    """What to say of updates, or of state that all hold, that differ between workers."""
    updates = [(tuple(path), x) for (which, *path), x in wrong if which.idx == 0]
    if not updates:
        (_, *path), _ = wrong[0]
        return (
            f"the state's {jax.tree_util.keystr(tuple(path))} differs between workers, and stands behind "
            "or around the transform in which they communicate, where all hold the same. Put its transform "
            "in front of that one, in the chain; or let the class of the state say that each worker has "
            "its own: def holders(self): return {'name of the field': 'worker'}. If workers communicate in "
            "a transform of yours, let the class of its state say so: def exchanges(self): return True"
        )
    differs = (
        "the optimizer's update differs between workers, so their parameters would drift apart"
    )
    typed = [(path, axes.varying_axes(x)) for path, x in updates if axes.varying_axes(x)]
    if not typed:
        return (
            f"{differs}: a cond, switch or while chooses it by a predicate that differs between workers, "
            "such as the norm of a worker's own gradient. Decide by what all agree on: a count of steps, "
            "or a psum over the workers"
        )
    over = frozenset[str]().union(*[names for _, names in typed])
    if agreed := tuple(n for n in workers.axes if n not in over):
        return (
            f"{differs}: it is the same over {agreed} and not over "
            f"{tuple(n for n in workers.axes if n in over)}. The step has "
            f"{workers}; give the optimizer the same lioncub_jax.Workers: lion_cub(..., workers=workers), "
            "make_train_step(loss, tx, workers)"
        )
    mean = f"global_gradients(tx, workers={workers.axis!r})"
    if len(typed) < leaves:
        named = ", ".join(jax.tree_util.keystr(path) for path, _ in typed[:3])
        return (
            f"{differs}: the leaves {named} do, which a mask or label keeps from the transform that "
            "communicates, or which pass state between two such transforms. Give them "
            f"optax.set_to_zero() to freeze them, or {mean} to train them in full precision; put what "
            "keeps state in front of both transforms, or behind both"
        )
    if sent:
        return (
            f"{differs}: workers communicate, and behind it the update is changed by what each has for "
            "itself, such as the norm of its own gradient or lax.axis_index. Change it by what all agree "
            "on, such as the norm of the update, or a psum over the workers"
        )
    return (
        f"{differs}: put a transform that communicates in the chain, such as "
        f"lion_cub(..., workers={workers.axis!r}), or wrap yours in {mean}"
    )
