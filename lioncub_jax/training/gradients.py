"""Each worker's own gradient, and what a loss says besides.

``jax.grad`` with respect to replicated parameters returns the gradient already summed over the workers in
full precision: training works, and nothing is saved. In a ``shard_map`` of ours no types tell what varies,
so gradients are local; in one of the caller's parameters are cast to *varying* over the workers first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import checks, wires
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Static, Workers, check_devices, check_workers, worker_axes
from lioncub_jax.mesh.specs import Specs, spec_of, stacked
from lioncub_jax.training import kinds, modules
from lioncub_jax.training.kinds import Kind, Kinds, Loss
from lioncub_jax.training.loss import check_closure, in_worker, loss_and_aux
from lioncub_jax.training.worker import as_count


def local_value_and_grad(
    loss_fn: Loss, has_aux: bool = False, *, workers: AxisName | Workers | None
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` for the first argument, with each worker's own gradient.

    ``jax.grad`` with respect to replicated parameters inside ``shard_map`` returns the gradient
    already summed over the workers in full precision. Casting the parameters to varying first keeps
    it local.

    Args:
      loss_fn: ``(params, ...) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
      has_aux: as in ``jax.value_and_grad``.
      workers: a `Workers`, or the name of the axis that your own ``shard_map`` or ``pmap`` binds; None for
        a single device.

    Returns:
      A function with the arguments of ``loss_fn`` that returns ``(value, grads)``; both vary over
      the workers. For use where their axis is bound.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> grad_fn = lc.local_value_and_grad(lambda w, x: jnp.sum(w * x), workers="data")
    """
    axis, group = worker_axes(workers)

    @functools.wraps(loss_fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        out = loss_fn(*args, **kwargs)
        loss_and_aux(out, has_aux)
        return out

    value_and_grad = jax.value_and_grad(checked, has_aux=has_aux)

    def local(params: optax.Params, *args: Any, **kwargs: Any) -> Any:
        return value_and_grad(axes.varying(params, (*axis, *group)), *args, **kwargs)

    return in_worker(local)


def worker_value_and_grad(
    loss_fn: Loss,
    workers: Workers,
    *,
    in_kinds: Kinds = None,
    aux_kinds: Kinds = None,
    has_aux: bool = False,
    specs: Specs = None,
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` on global arrays under ``jax.jit``, with a gradient for each worker.

    Args:
      loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``; the loss is a mean.
      workers: a `Workers`, on a mesh with Auto or Explicit axes.
      in_kinds: what the arguments behind the parameters are, a tuple with an entry for each, or for the
        parts of its tree: ``Kind.SPLIT`` (cut along the first dimension over the workers),
        ``Kind.SHARED`` (whole to each worker) or ``Kind.PER_WORKER`` (``[workers, ...]``, an entry to each
        worker, such as model state); None for numbers, which all workers get, for typed keys, into
        which each folds its number, and for ``nnx.Rngs``, which go on. Needed unless only the first of them
        has arrays: the batch.
      aux_kinds: what becomes of ``aux``, for all of it or for its parts. Arrays: ``Kind.SPLIT`` (joined
        along their first dimension) or ``Kind.PER_WORKER`` (stacked, ``[workers, ...]``). Numbers:
        ``Kind.SHARED``, as without a kind (floats are averaged over the workers, integers and bools
        added), or ``Kind.PER_WORKER`` (``[workers]``).
      has_aux: as in ``jax.value_and_grad``.
      specs: as in `on_mesh`, for gradients that lie as the parameters do; by default, where parameters do
        not say it themselves, as the compiler likes.

    Returns:
      A function ``(params, *args) -> (value, grads)``. ``grads`` have a leading ``[workers]`` axis, for
      `on_mesh`. The loss is averaged over the workers, ``aux`` is treated as ``aux_kinds`` say. Over
      Explicit inner axes arguments and results stay cut as their types say. An ``nnx.Module`` may stand
      for the parameters, as with ``nnx.value_and_grad``: gradients are those of its ``nnx.Param``, its
      random streams go on, each worker's its own, and so does other state, such as batch statistics, which
      it holds as ``[workers, ...]`` (`own_state`). Of ``_overwrite_with_gradient`` of flax, which fp8
      layers keep, ``grads`` have the next values, the largest of all workers, the same for all.

    Raises:
      TypeError, ValueError: as `on_mesh`; for a loss that closes over an array that lies on the mesh; when
        traced, for an array whose kind is not given, or that the workers do not divide, for leaves of a
        batch with unlike rows, and for an ``nnx.Module`` whose batch statistics are of one worker.

    Warns:
      UserWarning: for a loss that closes over a random key, which all workers would share; when traced, for
        a raw key that is ``SHARED``, and for a floating number without a kind beside a whole one in
        ``aux``: a ratio of the two is too small by the number of workers.

    Example:
      Class weights go whole to each worker:

      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> loss = lambda params, x, weights: jnp.mean(x @ params["w"] * weights)
      >>> kinds = (lc.Kind.SPLIT, lc.Kind.SHARED)
      >>> grad_fn = lc.worker_value_and_grad(loss, lc.Workers(mesh, "data"), in_kinds=kinds)
      >>> value, grads = jax.jit(grad_fn)({"w": jnp.ones((3, 2))}, jnp.ones((4, 3)), jnp.ones(2))
      >>> float(value), grads["w"].shape
      (3.0, (1, 3, 2))

    Source: this library.
    """
    check_workers(workers)
    check_closure(loss_fn, workers)

    def global_value_and_grad(params: optax.Params, *args: Any) -> Any:
        given = kinds.default_kinds(args) if in_kinds is None else in_kinds
        if modules.is_module(params):
            of_params = functools.partial(worker_value_and_grad, workers=workers, specs=specs)
            return modules.value_and_grad(
                of_params, loss_fn, (params, *args),
                in_kinds=given, aux_kinds=aux_kinds, has_aux=has_aux, workers=workers,
            )  # fmt: skip
        check_devices(workers, params=params)
        param_specs = workers.param_specs(params, specs, needed=False)
        arg_kinds, arg_specs = kinds.classify_arguments(loss_fn, args, given, workers)
        _check_on_mesh(workers, (params, args))
        structure: Any
        leaves, structure = jax.tree.flatten(args)
        # The kind of each random stream among the arguments.
        stream_kinds = modules.find_stream_counts(structure.unflatten(arg_kinds))
        stream_kinds = jax.tree.leaves(stream_kinds)

        def loss(params: optax.Params, leaves: list[Any]) -> Any:
            """``(loss, (aux, counts of random streams))`` of one worker, on its part of the arguments."""
            pairs = zip(arg_kinds, leaves, strict=True)
            parts = [kinds.take_part(kind, workers, x) for kind, x in pairs]
            # Made here, for nnx lets a variable be written only at the trace level where it was made.
            own = structure.unflatten(parts)
            value, aux = loss_and_aux(loss_fn(params, *own), has_aux)
            return value, (aux, jax.tree.leaves(modules.find_stream_counts(own)))

        def aux_specs_on_worker(params: optax.Params, leaves: list[Any]) -> Static:
            _, (aux, _) = in_worker(loss)(params, leaves)
            return _aux_specs(aux, aux_kinds, workers)

        def own_or_next(path: Any, g: jax.Array) -> jax.Array:
            """A worker's gradient ``[1, ...]``; of what is overwritten with it the largest of all."""
            return (
                wires.max_over_workers(g, workers.axes) if checks.is_overwritten(path) else g[None]
            )

        def on_worker(params: optax.Params, leaves: list[Any]) -> Any:
            """Gradients ``[1, ...]``, counts of random streams, loss and ``aux`` by `reduce_results`."""
            run = in_worker(jax.value_and_grad(loss, has_aux=True))
            (value, (aux, counts)), grads = run(params, leaves)
            kinds.warn_of_ratios(aux, aux_kinds)
            grads = jax.tree_util.tree_map_with_path(own_or_next, grads)
            for i, kind in enumerate(stream_kinds):
                counts[i] = counts[i][None] if kind is Kind.PER_WORKER else counts[i]
            each = [Kind.SHARED, *kinds.classify_outputs(aux, aux_kinds)]
            return grads, counts, *reduce_results((value, aux), each, workers.axes)

        map_workers = functools.partial(workers.map, in_specs=(param_specs, arg_specs), typed=False)
        aux_specs: Specs = P(workers.axes)
        if has_aux and set(workers.inner).intersection(workers.mesh.explicit_axes):
            probe = map_workers(aux_specs_on_worker, out_specs=P())
            aux_specs = jax.eval_shape(probe, params, leaves).value
        # Streams with one beginning draw as often, so nothing is sent to agree on it.
        count_specs = [kinds.spec_over_workers(kind, workers, P()) for kind in stream_kinds]
        grad_specs = jax.tree_util.tree_map_with_path(
            lambda path, spec, own: spec if checks.is_overwritten(path) else own,
            *(param_specs, stacked(param_specs, workers.axes)),
        )
        out_specs = grad_specs, count_specs, aux_specs, P(), P()
        grads, counts, *results = map_workers(on_worker, out_specs=out_specs)(params, leaves)
        for variable, count in zip(modules.find_stream_counts(args), counts, strict=True):
            variable[...] = count  # as transforms of nnx do
        value, aux = join_results(*results)
        return ((value, aux) if has_aux else value), grads

    return global_value_and_grad


def _aux_specs(aux: Any, aux_kinds: Kinds, workers: Workers) -> Static:
    """Specs of the arrays in ``aux`` by place, as types say them in a worker; see `reduce_results`."""
    specs = {}
    each = kinds.classify_outputs(aux, aux_kinds)
    for i, (x, kind) in enumerate(zip(jax.tree.leaves(aux), each, strict=True)):
        if kind is not Kind.SHARED:
            specs[i + 1] = kinds.spec_over_workers(kind, workers, spec_of(x))
    return Static(specs)


def _check_on_mesh(workers: Workers, given: Any) -> None:
    """Raises ``ValueError`` where no array tells an Explicit mesh, which JAX says in words of its own."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(given)]
    around = jax.sharding.get_abstract_mesh()
    if workers.mesh.explicit_axes and all(x.empty for x in (*meshes, around)):
        raise ValueError(
            "neither parameters nor rows lie on the mesh of the workers, whose axes are Explicit: params = "
            "jax.device_put(params, workers.shardings(P())), or call this within jax.set_mesh(mesh)"
        )


_NO_NUMBER = (
    "the loss returns {}, {}: what it returns beside the loss is averaged, added or stacked over the "
    "workers; give numbers"
)


def reduce_results(
    values: Any, kinds: Sequence[Kind], axis: Axes
) -> tuple[dict[int, jax.Array], dict[int, jax.Array], Static]:
    """Results of a loss by place: arrays over the workers, numbers on which they agree; and their tree.

    Floating and complex numbers are averaged over the workers, whole ones added, in an all-reduce for each.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(values)
    arrays, means, counts = {}, {}, {}
    for i, ((path, x), kind) in enumerate(zip(leaves, kinds, strict=True)):
        if isinstance(x, str):
            raise TypeError(_NO_NUMBER.format(jax.tree_util.keystr(path), "text"))
        x = jnp.asarray(x)
        if kind is not Kind.SHARED:
            arrays[i] = x[None] if kind is Kind.PER_WORKER else x
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            means[i] = x
        elif is_key(x):
            raise TypeError(_NO_NUMBER.format(jax.tree_util.keystr(path), x.dtype))
        else:
            counts[i] = as_count(x)
    numbers = wires.mean_over_workers(means, axis) | wires.sum_over_workers(counts, axis)
    return arrays, numbers, Static(structure)


def join_results(
    arrays: dict[int, jax.Array], numbers: dict[int, jax.Array], structure: Static
) -> Any:
    """Undoes `reduce_results`."""
    return jax.tree.unflatten(structure.value, jax.tree.leaves(arrays | numbers))  # sorted by place
