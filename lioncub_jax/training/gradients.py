"""Each worker's own gradient, and what a loss says besides.

``jax.grad`` with respect to replicated parameters returns the gradient already summed over the workers in
full precision: training works, and nothing is saved. Here parameters are cast to *varying* over the
workers first, so that gradients stay local.
"""

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lioncub_jax import wires
from lioncub_jax.mesh.inner import of_model
from lioncub_jax.mesh.keys import is_key
from lioncub_jax.mesh.placement import Static, Workers, workers_of
from lioncub_jax.mesh.specs import spec_of, stacked
from lioncub_jax.training import kinds, modules
from lioncub_jax.training.modules import StatefulLoss
from lioncub_jax.wires import AxisName


def local_value_and_grad(
    loss_fn: Callable[..., Any], axis_name: AxisName | Workers | None, has_aux: bool = False
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` for the first argument, with each worker's own gradient.

    ``jax.grad`` with respect to replicated parameters inside ``shard_map`` returns the gradient
    already summed over the workers in full precision. Casting the parameters to varying first keeps
    it local.

    Args:
      loss_fn: ``(params, ...) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
      axis_name: the workers: a `Workers`, or the name of their mesh axis; None for one device alone.
      has_aux: as in ``jax.value_and_grad``.

    Returns:
      A function with the arguments of ``loss_fn`` that returns ``(value, grads)``; both vary over
      the workers. For use where their axis is bound.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> grad_fn = lc.local_value_and_grad(lambda w, x: jnp.sum(w * x), "data")
    """
    axis = axis_name.axes if isinstance(axis_name, Workers) else axis_name
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)
    if axis is None:
        return of_model(value_and_grad)

    def local(params: Any, *args: Any, **kwargs: Any) -> Any:
        return value_and_grad(wires.varying(params, axis), *args, **kwargs)

    return of_model(local)


def worker_value_and_grad(
    loss_fn: Callable[..., Any],
    workers: Workers | Mesh,
    *,
    axis_name: AxisName | None = None,
    group_axis: AxisName | None = None,
    in_kinds: Any = None,
    aux_kinds: Any = None,
    has_aux: bool = False,
    specs: Any = None,
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` on global arrays under ``jax.jit``, with a gradient for each worker.

    Args:
      loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``; the loss is a mean.
      workers: a `Workers`; or a mesh, axes Auto or Explicit, with ``axis_name``.
      axis_name: beside a mesh, the axis of the workers, or several as a tuple.
      group_axis: beside a mesh, the axis of the devices of one worker, in two levels.
      in_kinds: what the arguments behind the parameters are, a tuple with an entry for each, or for the
        parts of its tree: ``training.batch`` (cut along the first dimension over the workers),
        ``training.same`` (whole to each worker) or ``training.own`` (``[workers, ...]``, an entry to each
        worker, such as model state); None for numbers, which all workers get, for typed keys, into
        which each folds its number, and for ``nnx.Rngs``, which go on. Needed unless only the first of them
        has arrays: the batch.
      aux_kinds: what becomes of ``aux``, for all of it or for its parts. Of arrays ``training.batch``
        (joined along their first dimension) or ``training.own`` (stacked, ``[workers, ...]``). Of numbers
        ``training.same``, as without a kind (floating ones are averaged over the workers, whole ones and
        bools added), or ``training.own`` (``[workers]``).
      has_aux: as in ``jax.value_and_grad``.
      specs: as in `on_mesh`, for gradients that lie as the parameters do; by default, where parameters do
        not say it themselves, as the compiler likes.

    Returns:
      A function ``(params, *args) -> (value, grads)``. ``grads`` have a leading ``[workers]`` axis, for
      `on_mesh`. The loss is averaged over the workers, ``aux`` is treated as ``aux_kinds`` say. Over
      Explicit inner axes arguments and results stay cut as their types say. An ``nnx.Module`` may stand
      for the parameters, as with ``nnx.value_and_grad``: gradients are those of its ``nnx.Param``, and its
      random streams go on, each worker's its own.

    Raises:
      TypeError, ValueError: as `on_mesh`; when traced, for an array whose kind is not given, or that the
        workers do not divide, and for an ``nnx.Module`` with batch statistics.

    Warns:
      UserWarning: for a loss that closes over a random key, which all workers would share; when traced,
        for a floating number without a kind beside a whole one in ``aux``: a ratio of the two is too small
        by the number of workers.

    Example:
      Class weights go whole to each worker:

      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> loss = lambda params, x, weights: jnp.mean(x @ params["w"] * weights)
      >>> kinds = (lc.training.batch, lc.training.same)
      >>> grad_fn = lc.worker_value_and_grad(loss, lc.Workers(mesh, "data"), in_kinds=kinds)
      >>> value, grads = jax.jit(grad_fn)({"w": jnp.ones((3, 2))}, jnp.ones((4, 3)), jnp.ones(2))
      >>> float(value), grads["w"].shape
      (3.0, (1, 3, 2))

    Source: this library.
    """
    workers = workers_of(workers, axis_name, group_axis)
    _warn_of_keys(loss_fn)
    loss_of = modules.counting(loss_fn, has_aux)
    value_and_grad = local_value_and_grad(loss_of, workers, has_aux=True)
    inner = set(workers.mesh.explicit_axes) - set(workers.axes)

    def of_all(params: Any, *args: Any, **named: Any) -> Any:
        if named:
            raise TypeError(
                f"arguments {sorted(named)} are given by name: give them by place, as their kinds are"
            )
        if modules.is_module(params):
            given = {"aux_kinds": aux_kinds, "has_aux": has_aux, "specs": specs}
            of_params = functools.partial(worker_value_and_grad, workers=workers, **given)
            return modules.value_and_grad(of_params, loss_fn, params, args, in_kinds)
        cut = workers.cut(params, specs, needed=False)
        each = kinds.of_arguments(loss_fn, args, in_kinds)
        leaves, tree = jax.tree.flatten(args)
        lie = [kinds.lies(kind, workers, x) for kind, x in zip(each, leaves, strict=True)]
        kinds.check_shapes(loss_fn, args, each, lie, workers)
        streams = jax.tree.leaves(modules.counts_of(jax.tree.unflatten(tree, each)))
        outputs: list[kinds.Kind] = []

        def outputs_of(aux: Any) -> list[kinds.Kind]:
            if not outputs:  # once, for it warns; the loss is a number
                outputs.extend([kinds.same, *kinds.of_outputs(aux, aux_kinds)])
            return outputs

        def own(leaves: list[Any]) -> Any:
            found = [kinds.of_worker(k, workers, x) for k, x in zip(each, leaves, strict=True)]
            return jax.tree.unflatten(tree, found)

        def lies(params: Any, leaves: list[Any]) -> Static:
            loss, (aux, _) = of_model(loss_of)(params, *own(leaves))
            specs = map(spec_of, jax.tree.leaves((loss, aux)))
            found = map(kinds.over, outputs_of(aux), itertools.repeat(workers), specs)
            return Static(tuple(found))

        def of_worker(params: Any, leaves: list[Any]) -> Any:
            (loss, (aux, counts)), grads = value_and_grad(params, *own(leaves))
            grads = jax.tree.map(lambda g: g[None], wires.varying(grads, workers.axes))
            counts = [
                x[None] if k is kinds.own else x for k, x in zip(streams, counts, strict=True)
            ]
            return grads, counts, *reduced((loss, aux), outputs_of(aux), workers.axes)

        over = functools.partial(workers.map, in_specs=(cut, lie), explicit=False, typed=False)
        laid: Any = P(workers.axes)
        if has_aux and inner:  # only the types that it has in a worker say how a result lies
            found = jax.eval_shape(over(lies, out_specs=P()), params, leaves).value
            laid = {i: s for i, s in enumerate(found) if outputs[i] is not kinds.same}
        # Whose streams begin alike draw as often, so nothing is sent to agree on it.
        drawn = [kinds.over(kind, workers, P()) for kind in streams]
        run = over(of_worker, out_specs=(stacked(cut, workers.axes), drawn, laid, P(), P()))
        grads, counts, arrays, numbers, structure = run(params, leaves)
        for count, after in zip(modules.counts_of(args), counts, strict=True):
            count[...] = after
        value, aux = joined(arrays, numbers, structure)
        return ((value, aux) if has_aux else value), grads

    return of_all


def _warn_of_keys(loss_fn: Callable[..., Any]) -> None:
    """Warns of random keys that all workers would share."""
    for name, key in _closed_over(loss_fn).items():
        if is_key(key) or kinds.is_raw_key(key):
            warnings.warn(
                f"the loss closes over the random key {name!r}, so all workers draw the same, such as one "
                "dropout mask: give it as an argument of the loss, into which each worker folds its number",
                stacklevel=3,
            )


def _closed_over(loss_fn: Callable[..., Any]) -> dict[str, Any]:
    """What a function has from around it, by name."""
    if isinstance(loss_fn, functools.partial):
        given = {f"argument {i}": x for i, x in enumerate(loss_fn.args)} | loss_fn.keywords
        return given | _closed_over(loss_fn.func)
    function = inspect.unwrap(loss_fn)
    found = {}
    if inspect.isfunction(function):
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # assigned later
                found[name] = cell.cell_contents
    return found


def reduced(
    values: Any, each: Sequence[kinds.Kind], axis: AxisName
) -> tuple[dict[int, jax.Array], dict[int, jax.Array], Static]:
    """What a loss returns, by place: arrays over the workers, numbers on which they agree; and its tree.

    Floating numbers are averaged over the workers, whole ones added, in an all-reduce for each kind.
    """
    leaves, structure = jax.tree.flatten(values)
    leaves = wires.varying(list(map(jnp.asarray, leaves)), axis)
    arrays, means, counts = {}, {}, {}
    for i, (x, kind) in enumerate(zip(leaves, each, strict=True)):
        if kind is not kinds.same:
            arrays[i] = x[None] if kind is kinds.own else x
        elif jnp.issubdtype(x.dtype, jnp.floating):
            means[i] = x
        else:
            counts[i] = _as_count(x)
    numbers = wires.mean_over_workers(means, axis) | wires.sum_over_workers(counts, axis)
    return arrays, numbers, Static(structure)


def _as_count(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32) if x.dtype == bool else x


def joined(arrays: dict[int, jax.Array], numbers: dict[int, jax.Array], structure: Static) -> Any:
    """Undoes `reduced`."""
    return jax.tree.unflatten(structure.value, jax.tree.leaves(arrays | numbers))  # sorted by place


def local_gradients(
    loss_fn: Callable[..., Any] | StatefulLoss, axis: AxisName, accumulate: int
) -> Callable[..., Any]:
    """``(params, model_state, batch, rng) -> ((loss, (aux, model_state)), grads)`` of one worker."""

    def loss_of(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        if isinstance(loss_fn, StatefulLoss):
            loss, aux, model_state = loss_fn.fn(params, model_state, batch, rng)
        else:
            loss, aux = modules.with_aux(loss_fn(params, batch, rng))
        return loss, (aux, model_state)

    value_and_grad = local_value_and_grad(loss_of, axis, has_aux=True)

    def in_parts(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        parts = jax.tree.map(functools.partial(cut_in_parts, count=accumulate), batch)

        def add(carry: Any, part: Any) -> Any:
            total, model_state = carry
            index, batch = part
            own_rng = jax.random.fold_in(rng, index)
            (loss, (aux, model_state)), grads = value_and_grad(params, model_state, batch, own_rng)
            total = jax.tree.map(jnp.add, total, grads)
            return (total, wires.varying(model_state, axis)), (loss, aux)

        zeros = jax.tree.map(jnp.zeros_like, wires.varying(params, axis))
        carry = (zeros, wires.varying(model_state, axis))
        (total, model_state), (losses, auxes) = lax.scan(
            add, carry, (jnp.arange(accumulate), parts)
        )
        grads = jax.tree.map(lambda g: g / accumulate, total)
        return (jnp.mean(losses), (jax.tree.map(over_parts, auxes), model_state)), grads

    return value_and_grad if accumulate == 1 else in_parts


def cut_in_parts(x: jax.Array, count: int) -> jax.Array:
    """``[count, rows, ...]`` of a batch, whose rows lie over explicit axes as those of the batch do."""
    spec = jax.typeof(x).sharding.spec
    shape = (count, x.shape[0] // count, *x.shape[1:])
    return lax.reshape(x, shape, out_sharding=P(None, *spec) if any(spec) else None)


def over_parts(x: jax.Array) -> jax.Array:
    """A metric of all parts of a batch: floating numbers averaged, whole ones added, arrays stacked."""
    if x.ndim > 1:
        return x
    return jnp.mean(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.sum(_as_count(x))


def reduce_metrics(
    loss: jax.Array, aux: Any, axis: AxisName
) -> tuple[dict[int, jax.Array], dict[int, jax.Array], Static]:
    """The loss and what is in ``aux`` by name, as `reduced`; arrays come back from each worker."""
    named = {**aux} if isinstance(aux, dict) else {"aux": aux}
    if "loss" in named:
        raise ValueError("the aux dict has a key 'loss', which is taken; give it another name")
    metrics = {"loss": loss, **named}
    each = [kinds.own if jnp.ndim(x) else kinds.same for x in jax.tree.leaves(metrics)]
    return reduced(metrics, each, axis)
