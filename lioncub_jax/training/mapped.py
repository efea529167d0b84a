"""A transform mapped over the workers, on global arrays: state where it belongs, and updates that agree.

`on_mesh` is what users call. `make_train_step` and `init_state` take a `MappedUpdate` as it is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import checks, scopes
from lioncub_jax.exchange.holder import Holder
from lioncub_jax.exchange.holders import OWN, StateLayout, layout_on_worker
from lioncub_jax.exchange.mapped import MappedTransform, placing
from lioncub_jax.mesh import axes, boxes
from lioncub_jax.mesh.placement import Workers, check_devices, check_workers
from lioncub_jax.mesh.specs import Specs, stacked
from lioncub_jax.training import control_flow
from lioncub_jax.training.state import check_layout


class MappedUpdate(MappedTransform):
    """A mapped transform with its ``update``, on global arrays."""

    def update(
        self,
        param_specs: Specs,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        per_worker: dict[str, jax.Array],
        extra: dict[str, Any],
    ) -> tuple[optax.Updates, optax.OptState]:
        """Updates of gradients ``[workers, ...]``, and the new state.

        Args:
          param_specs: the spec of each parameter.
          grads: ``[workers, ...]``.
          state: as `jitted_init` makes it.
          params: global.
          per_worker: extra arguments ``[workers, ...]``.
          extra: other extra arguments, the same for all workers.
        """
        workers, layout = self.workers, self.layout(params, param_specs)
        check_layout(state, layout.specs, workers)
        arrays, static = _split_static(extra)

        def update(
            grads: optax.Updates,
            per_worker: dict[str, jax.Array],
            state: optax.OptState,
            params: optax.Params,
            arrays: dict[str, Any],
        ) -> tuple[optax.Updates, optax.OptState]:
            grads, flags = jax.tree.map(lambda x: x[0], (grads, per_worker))
            return self.update_on_worker(layout, grads, state, params, static | arrays | flags)

        in_specs = (
            stacked(param_specs, workers.axes),
            P(workers.axes),
            layout.specs,
            param_specs,
            P(),
        )
        out_specs = param_specs, layout.specs
        run = workers.map(update, in_specs, out_specs, typed=True)
        return workers.constrain(run(grads, per_worker, state, params, arrays), out_specs)

    def update_on_worker(
        self,
        layout: StateLayout,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        extra: dict[str, Any],
    ) -> tuple[optax.Updates, optax.OptState]:
        """One worker's update of its gradients, and of its entries ``[1, ...]`` of the state.

        Raises:
          ValueError: for an update that differs between workers, or state that all hold and that does.
        """
        before = self.workers.stack(state, layout.specs, undo=True)
        arrays, static = _split_static(extra)
        refused = checks.refused_functions(self.tx)

        def update(
            grads: optax.Updates,
            state: optax.OptState,
            params: optax.Params,
            arrays: dict[str, Any],
        ) -> tuple[optax.Updates, optax.OptState]:
            given = {"grad": grads} | arrays | static | refused
            return self.tx.update(grads, state, params, **given)

        # Traced once: the jaxpr that is checked is the one that is called.
        update, given = jax.jit(update), (grads, before, params, arrays)
        traced = update.trace(*given).jaxpr
        with jax.named_scope(scopes.DECIDED):
            results = update(*given)
        updates, after = self._agreed(traced, given, results, layout.holders)
        after = _kept_if_not_finite(layout.holders, grads, before, after)
        return updates, self.workers.stack(after, layout.specs)

    def _agreed(self, traced: ClosedJaxpr, given: Any, results: Any, holders: Any) -> Any:
        """Updates and state, each typed as those who hold it need it.

        A result may vary by its type only and be the same on all workers, such as the update of a frozen
        leaf: it is computed again without the cast that made it so.
        """
        over = frozenset(self.workers.axes)
        leaves, structure = jax.tree.flatten(results)
        # The workers' axes over which each result is to vary: none for an update.
        wanted = [frozenset[str]() for _ in jax.tree.leaves(results[0])]
        for holder, x in zip(jax.tree.leaves(holders), jax.tree.leaves(given[1]), strict=True):
            wanted.append(over if holder in OWN else axes.varying_axes(x) & over)
        vary = [axes.varying_axes(x).intersection(over) for x in leaves]
        loose = [i for i, x in enumerate(vary) if x.difference(wanted[i])]
        if loose or control_flow.has_branches(traced.jaxpr):
            jaxpr, own = traced.jaxpr, self.workers.axes
            known = [control_flow.varies(x, own) for x in jaxpr.invars]
            differ = control_flow.differing(jaxpr, own, known)
            wrong = [i for i, x in enumerate(differ) if x and (i in loose or not wanted[i])]
            if wrong:
                sent = control_flow.communicates(jaxpr, own)
                raise ValueError(_difference(results, wrong, self.workers, sent))
            again = control_flow.without_casts(traced, jax.tree.leaves(given), loose)
            for i, x in zip(loose, again, strict=True):
                leaves[i], vary[i] = x, axes.varying_axes(x)
        for i, x in enumerate(vary):
            if not x.issuperset(wanted[i]):
                leaves[i] = axes.varying(leaves[i], tuple(wanted[i]))
        return jax.tree.unflatten(structure, leaves)


def _kept_if_not_finite(
    holders: Any, grads: optax.Updates, before: optax.OptState, after: optax.OptState
) -> optax.OptState:
    """The new state; where this worker's gradient is not finite, floating arrays in front are the old ones.

    In front of the exchange, that is; counters, flags and keys there are the new ones.
    """
    if Holder.FRONT not in jax.tree.leaves(holders):
        return after
    finite = axes.all_finite(grads)

    def kept(holder: Holder, old: jax.Array, new: jax.Array) -> jax.Array:
        if holder is not Holder.FRONT or not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        return jnp.where(finite, new, old)

    return jax.tree.map(kept, holders, before, after)


def _split_static(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments that are trees of arrays or numbers, and the others."""
    arrays, static = dict[str, Any](), dict[str, Any]()
    for name, tree in extra.items():
        leaves = jax.tree.leaves(tree)
        is_array = all(isinstance(x, (jax.Array, np.ndarray, int, float)) for x in leaves)
        (arrays if is_array else static)[name] = tree
    return arrays, static


def _difference(results: Any, wrong: list[int], workers: Workers, sent: bool) -> str:
    """An error's text for updates, or for state that all hold, that differ between workers.

    Args:
      results: ``(updates, state)``.
      wrong: places of leaves that differ.
      workers: the workers.
      sent: True where workers communicate at all.
    """
    num_updates = len(jax.tree.leaves(results[0]))
    paths = jax.tree_util.tree_leaves_with_path(results)
    updates = [
        (tuple(path), x) for (which, *path), x in [paths[i] for i in wrong] if which.idx == 0
    ]
    if not updates:
        (_, *path), _ = paths[wrong[0]]
        return (
            f"the state's {jax.tree_util.keystr(tuple(path))} differs between workers, and stands behind "
            "or around the transform in which they communicate, where all hold the same. Put its transform "
            "in front of that one, in the chain; or let the class of the state say that each worker has "
            "its own: def holders(self): return {'name of the field': 'worker'}. If workers communicate in "
            "a transform of yours, let the class of its state say so: exchanges = True"
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
    if len(typed) < num_updates:
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


# --- on_mesh


def on_mesh(
    tx: optax.GradientTransformation,
    workers: Workers,
    *,
    specs: Specs = None,
) -> "OnMesh":
    """Runs a transform of this library on global arrays, so that it drops into a trainer under ``jax.jit``.

    Parameters, state and updates are ordinary global arrays, each with a ``NamedSharding``. Only gradients
    have a leading axis, one entry for each worker, as `worker_value_and_grad` returns them.

    Args:
      tx: such as ``lion_cub(1e-4, workers="data")``, alone or in a chain. Transforms in the chain see
        one worker's whole gradients, however they are cut: ``optax.clip_by_global_norm`` is right. In a
        chain around `on_mesh` it would see those of all workers as one gradient.
      workers: a `Workers`, on a mesh with Auto or Explicit axes.
      specs: a tree of ``PartitionSpec`` like the parameters, such as ``specs_of(params)``; None reads
        them off the parameters: concrete arrays and Explicit axes know them.

    Returns:
      A transform. ``init(params)`` returns state whose leaves are ``[workers, ...]`` where workers
      differ; flax's boxes around them, such as ``nn.Partitioned`` and those of ``nnx.Optimizer``, have
      the workers' axis in front of the names of the parameters. ``update(updates, state, params,
      abstain=None)`` takes gradients ``[workers, ...]`` and ``abstain`` ``bool[workers]``; parameters
      are required. ``shardings(params)`` says where the state lies, for a step with ``in_shardings`` or
      ``out_shardings``. Inside a ``shard_map`` over the workers ``update`` takes what is there: this
      worker's gradients, and its entry ``[1, ...]`` of the state.

    Raises:
      TypeError: for no `Workers`.
      ValueError: for specs that cut parameters over the workers or do not
        divide them, gradients or ``abstain`` without the leading axis, the state of another optimizer, an
        update that differs between workers, Auto axes without ``specs`` in a trace, and ``init`` inside
        of a ``shard_map`` over the workers, as where `init_state` is given what this returns.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.on_mesh(lc.lion_cub(1e-4, workers=workers), workers)
      >>> state = tx.init({"w": jnp.ones((2, 3))})
      >>> state[0].mu["w"].shape
      (1, 2, 3)
    """
    check_workers(workers)
    transform = _GlobalTransform(MappedUpdate(optax.with_extra_args_support(tx), workers), specs)
    return OnMesh(transform, transform.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _GlobalTransform:
    """A mapped transform with the parameters' specs; calling it makes the first state.

    It is the ``init`` of an `OnMesh`, because that stays in the ``_replace`` of a named tuple.

    Attributes:
      mapped: the transform, and the workers.
      specs: of the parameters, as users give them.
    """

    mapped: MappedUpdate
    specs: Specs

    def __call__(self, params: optax.Params) -> optax.OptState:
        """The first state of these parameters."""
        if self._in_worker():
            raise ValueError(
                "on_mesh(tx).init is called for one worker, and it makes the states of all: call on_mesh "
                "once, in a loop of your own. To init_state, make_train_step and audit.of give tx itself, "
                "which they run on each worker. For the bytes of a trainer of your own: "
                "audit.collectives(step.lower(...).compile(), workers.mesh)"
            )
        if checks.stands_in(params):
            return self.mapped.tx.init(params)
        checks.check_unmasked(params)
        param_specs = self._param_specs(params)
        return self._boxed(
            self.mapped.jitted_init(params, param_specs)(params), params, param_specs
        )

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Updates of gradients ``[workers, ...]``, or inside a worker of its own."""
        if params is None:
            raise ValueError("on_mesh(tx).update needs params: give update(grads, state, params)")
        mapped, workers = self.mapped, self.mapped.workers
        checks.check_unmasked(params)
        check_devices(workers, grads=updates, params=params)
        per_worker = {} if abstain is None else {"abstain": abstain}
        if self._in_worker():
            if not axes.tracked(workers.axes):
                raise ValueError(
                    "on_mesh(tx).update is called in a shard_map with check_vma=False, or in a pmap, where "
                    "types do not say what differs between workers: give jax.shard_map(..., "
                    "check_vma=True); or call tx.update itself, with a state that tx.init made in the same "
                    "shard_map or pmap"
                )
            with placing(workers.axes):
                first = mapped.tx.init(params)
            layout = layout_on_worker(first, params, workers.axes)
            check_layout(state, layout.specs, workers, in_worker=True)
            return mapped.update_on_worker(layout, updates, state, params, extra | per_worker)
        param_specs = self._param_specs(params)
        given, wanted = checks.shapes(updates), checks.shapes(params, workers.count)
        for path in {**wanted, **given}:
            shape, right = given.get(path), wanted.get(path)
            if shape and right and shape[1:] == right[1:] and shape != right:
                raise ValueError(
                    f"the gradient of {path or 'the parameters'} has shape {shape}, of {shape[0]} workers, "
                    f"and on_mesh was given {workers.count}: give one lioncub_jax.Workers to the "
                    "optimizer, on_mesh and worker_value_and_grad. Gradients of single rows are joined "
                    "inside of the loss, as docs/how_to/trainer.md shows"
                )
            if shape != right:
                raise ValueError(
                    f"the gradient of {path or 'the parameters'} has shape {shape}, and not {right}, a "
                    f"gradient for each of {workers.count} workers: take gradients "
                    "with lioncub_jax.worker_value_and_grad(loss, workers), which returns one for each "
                    "worker, and hand them to update as they are. Of other transforms on_mesh is the "
                    "outermost: chains, clipping and optax.MultiSteps go inside"
                )
        if abstain is not None and jnp.shape(abstain) != (workers.count,):
            raise ValueError(
                f"abstain has shape {jnp.shape(abstain)}: give bool[{workers.count}], a flag for each "
                "worker"
            )
        state_specs = mapped.layout(params, param_specs).specs
        if boxes.find_boxes(params):
            state = boxes.boxed_like(state_specs, state)
        check_layout(state, state_specs, workers)
        check_devices(workers, state=state)
        updates, state = mapped.update(param_specs, updates, state, params, per_worker, extra)
        return updates, self._boxed(state, params, param_specs)

    def shardings(self, params: optax.Params) -> Any:
        """Shardings of the state of these parameters."""
        param_specs = self._param_specs(params)
        shapes = self.mapped.jitted_init(params, param_specs).eval_shape(params)
        return jax.tree.map(lambda x: x.sharding, self._boxed(shapes, params, param_specs))

    def state_specs(self, params: optax.Params) -> Specs:
        """The specs of `shardings`."""
        specs = self.mapped.layout(params, self._param_specs(params)).specs
        return jax.tree.unflatten(
            jax.tree.structure(self.shardings(params)), jax.tree.leaves(specs)
        )

    def _in_worker(self) -> bool:
        taken = jax.sharding.get_abstract_mesh().manual_axes
        return set(self.mapped.workers.axes) <= set(taken)

    def _param_specs(self, params: optax.Params) -> Specs:
        return self.mapped.workers.param_specs(params, self.specs)

    def _boxed(
        self, state: optax.OptState, params: optax.Params, param_specs: Specs
    ) -> optax.OptState:
        """The state in flax's boxes, which have the workers' axes in front."""
        if not boxes.find_boxes(params):
            return state
        specs = self.mapped.layout(params, param_specs).specs
        return boxes.named(state, specs, params, self.mapped.workers)


class OnMesh(optax.GradientTransformationExtraArgs):
    """A transform on global arrays; see `on_mesh`.

    ``shardings(params)`` is the state with ``NamedSharding``s in place of arrays, for the ``in_shardings``
    and ``out_shardings`` of a step; shapes will do for the parameters. ``specs(params)`` is the same of
    ``PartitionSpec``s, for ``in_specs`` and ``out_specs``.

    Example:
      >>> import jax, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.on_mesh(lc.lion_cub(1e-4, workers="data"), lc.Workers(mesh, "data"))
      >>> tx.shardings({"w": jax.ShapeDtypeStruct((2, 3), "float32")})[0].mu["w"].spec == jax.P("data")
      True

    Source: this library.
    """

    def shardings(self, params: optax.Params) -> Any:
        """Shardings of the state of these parameters."""
        return self.init.shardings(params)  # type: ignore[attr-defined]

    def specs(self, params: optax.Params) -> Specs:
        """The specs of `shardings`."""
        return self.init.state_specs(params)  # type: ignore[attr-defined]
