"""Each worker's own gradient, and what a loss says besides.

``jax.grad`` with respect to replicated parameters returns the gradient already summed over the workers in
full precision: training works, and nothing is saved. Here parameters are cast to *varying* over the
workers first, so that gradients stay local.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lioncub_jax import wires
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import parts, stacked
from lioncub_jax.wires import AxisName


class StatefulLoss(NamedTuple):
    """A loss of a model with state of its own.

    Attributes:
      fn: ``(params, model_state, batch, rng) -> (loss, aux, model_state)``.

    Example:
      A flax linen model with batch statistics:

      >>> import lioncub_jax as lc
      >>> def fn(params, model_state, batch, rng):
      ...     variables = {"params": params, **model_state}
      ...     out, new = model.apply(variables, batch, mutable=["batch_stats"], rngs={"dropout": rng})
      ...     return (out**2).mean(), {}, new
      >>> loss = lc.StatefulLoss(fn)
    """

    fn: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, Any, Any]]


def local_value_and_grad(
    loss_fn: Callable[..., Any], axis_name: AxisName, has_aux: bool = False
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` for the first argument, with each worker's own gradient.

    ``jax.grad`` with respect to replicated parameters inside ``shard_map`` returns the gradient
    already summed over the workers in full precision. Casting the parameters to varying first keeps
    it local.

    Args:
      loss_fn: ``(params, ...) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
      axis_name: mesh axis of the workers.
      has_aux: as in ``jax.value_and_grad``.

    Returns:
      A function with the arguments of ``loss_fn`` that returns ``(value, grads)``; both vary over
      ``axis_name``. For use where the axis is bound.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> grad_fn = lc.local_value_and_grad(lambda w, x: jnp.sum(w * x), "data")
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def local(params: Any, *args: Any, **kwargs: Any) -> Any:
        return value_and_grad(wires.varying(params, axis_name), *args, **kwargs)

    return local


def worker_value_and_grad(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    *,
    axis_name: AxisName,
    group_axis: AxisName | None = None,
    has_aux: bool = False,
    specs: Any = None,
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` on global arrays under ``jax.jit``, with a gradient for each worker.

    Args:
      loss_fn: ``(params, *batch) -> loss`` or, with ``has_aux``, ``(loss, aux)``; the loss is a mean.
      mesh: the devices, axes Auto or Explicit.
      axis_name: mesh axis of the workers, or several as a tuple.
      group_axis: mesh axis of the devices of one worker, in two levels.
      has_aux: as in ``jax.value_and_grad``.
      specs: as in ``on_mesh``.

    Returns:
      A function ``(params, *batch) -> (value, grads)``. Arrays after the parameters are cut along their
      first dimension over the workers; numbers go to all of them; of a random key each worker folds its
      own. ``grads`` have a leading ``[workers]`` axis, for `on_mesh`. The loss and other floating numbers
      are averaged over the workers, whole numbers are added, arrays joined along their first dimension.

    Raises:
      ValueError: as ``on_mesh``; when traced, for an array that the workers do not divide.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> loss = lambda params, x: jnp.mean(x @ params["w"])
      >>> grad_fn = jax.jit(lc.worker_value_and_grad(loss, mesh, axis_name="data"))
      >>> value, grads = grad_fn({"w": jnp.ones(3)}, jnp.ones((4, 3)))
      >>> float(value), grads["w"].shape
      (3.0, (1, 3))
    """
    workers = Workers.on(mesh, axis_name, group_axis)
    value_and_grad = local_value_and_grad(loss_fn, workers.axes, has_aux)

    def of_all(params: Any, *batch: Any) -> Any:
        cut = workers.cut(params, specs)
        _check_batch(batch, workers)
        tree: list[Any] = []

        def of_worker(params: Any, batch: Any) -> Any:
            value, grads = value_and_grad(params, *jax.tree.map(partial(own_key, workers), batch))
            leaves, structure = jax.tree.flatten(value)
            tree[:] = [structure]
            joined, agreed = _split_by_rank([jnp.asarray(x) for x in leaves], workers)
            return jax.tree.map(lambda g: g[None], workers.vary(grads)), joined, agreed

        batch_specs = jax.tree.map(lambda x: P(workers.axes) if jnp.ndim(x) else P(), batch)
        out_specs = stacked(cut, workers.axes), P(workers.axes), P()
        run = workers.map(of_worker, (cut, batch_specs), out_specs, explicit=False)
        grads, joined, agreed = run(params, batch)
        values = joined | agreed
        return jax.tree.unflatten(tree[0], [values[i] for i in sorted(values)]), grads

    return of_all


def _split_by_rank(values: list[jax.Array], workers: Workers) -> tuple[dict[int, jax.Array], Any]:
    """Arrays, to be joined, and numbers on which the workers agree; by their place."""
    joined = {i: workers.vary(x) for i, x in enumerate(values) if x.ndim}
    numbers = {i: workers.vary(x) for i, x in enumerate(values) if not x.ndim}
    means = {i: x for i, x in numbers.items() if _is_mean(x)}
    counts = {i: x for i, x in numbers.items() if i not in means}
    agreed = wires.mean_over_workers(means, workers.axes) | wires.sum_over_workers(
        counts, workers.axes
    )
    return joined, agreed


def own_key(workers: Workers, x: Any) -> Any:
    """Gives each worker random keys of its own, and leaves anything else alone."""
    if not jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
        return x
    worker = wires.worker_index(workers.axes)
    return jax.vmap(lambda k: jax.random.fold_in(k, worker))(x.reshape(-1)).reshape(x.shape)


def _check_batch(batch: Any, workers: Workers) -> None:
    if not any(jnp.ndim(x) for x in jax.tree.leaves(batch)):
        raise ValueError(
            "no array follows the parameters: give the batch as an argument of the loss, so that it is cut "
            "over the workers; one that the loss closes over would go whole to each of them"
        )
    count = parts(P(workers.axes), workers.mesh)
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if jnp.shape(x) == (2,) and jnp.asarray(x).dtype == jnp.uint32:
            raise ValueError(
                f"argument {jax.tree_util.keystr(path)} looks like a raw random key, which would be cut "
                "like a batch: give a typed one, jax.random.key(seed)"
            )
        if jnp.ndim(x) and jnp.shape(x)[0] % count:
            raise ValueError(
                f"argument {jax.tree_util.keystr(path)} has shape {jnp.shape(x)}: its first dimension is "
                f"cut over {count} workers, which do not divide it"
            )


def from_nnx(
    model: nnx.Module, loss_fn: Callable[[Any, Any], Any]
) -> tuple[StatefulLoss, Any, Any]:
    """Splits a flax nnx model for ``init_state`` and ``make_train_step``.

    Args:
      model: any ``nnx.Module``. Its ``nnx.Param`` are trained; everything else (batch statistics,
        random streams) becomes each worker's own model state.
      loss_fn: ``(model, batch) -> loss`` or ``(loss, aux)``.

    Returns:
      ``(loss, params, model_state)``. ``nnx.update(model, state.params)`` puts trained parameters back.

    Example:
      >>> from flax import nnx
      >>> import lioncub_jax as lc
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> loss, params, model_state = lc.from_nnx(model, lambda m, x: (m(x) ** 2).mean())
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    def fn(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> tuple[Any, Any, Any]:
        del rng  # the model holds its own random streams
        # nnx lets a variable be written only at the trace level where it was made.
        own = jax.tree.map(lambda x: x, model_state)
        replica = nnx.merge(graph, params, own)
        loss, aux = _with_aux(loss_fn(replica, batch))
        _, _, model_state = nnx.split(replica, nnx.Param, ...)  # type: ignore[misc]
        return loss, aux, model_state

    return StatefulLoss(fn), params, rest


def local_gradients(stateful: StatefulLoss, axis: AxisName, accumulate: int) -> Callable[..., Any]:
    """``(params, model_state, batch, rng) -> (loss, aux, model_state, grads)`` of one worker."""

    def loss_of(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        loss, aux, model_state = stateful.fn(params, model_state, batch, rng)
        return loss, (aux, model_state)

    value_and_grad = local_value_and_grad(loss_of, axis, has_aux=True)

    def once(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        (loss, (aux, model_state)), grads = value_and_grad(params, model_state, batch, rng)
        return loss, aux, model_state, grads

    def in_parts(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)

        def add(carry: Any, part: Any) -> Any:
            total, model_state = carry
            index, batch = part
            loss, aux, model_state, grads = once(params, model_state, batch, fold(rng, index))
            total = jax.tree.map(jnp.add, total, grads)
            return (total, wires.varying(model_state, axis)), (loss, aux)

        zeros = jax.tree.map(jnp.zeros_like, wires.varying(params, axis))
        carry = (zeros, wires.varying(model_state, axis))
        (total, model_state), (losses, auxes) = lax.scan(
            add, carry, (jnp.arange(accumulate), parts)
        )
        grads = jax.tree.map(lambda g: g / accumulate, total)
        aux = jax.tree.map(lambda x: jnp.mean(x) if _is_mean(x[0]) else x, auxes)
        return jnp.mean(losses), aux, model_state, grads

    return once if accumulate == 1 else in_parts


def stateless(loss_fn: Callable[..., Any]) -> StatefulLoss:
    """A loss ``(params, batch, rng)`` as one that has state, but none."""

    def fn(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> tuple[Any, Any, Any]:
        loss, aux = _with_aux(loss_fn(params, batch, rng))
        return loss, aux, model_state

    return StatefulLoss(fn)


def _with_aux(out: Any) -> tuple[Any, Any]:
    return out if isinstance(out, tuple) else (out, {})


def _is_mean(x: jax.Array) -> bool:
    """Floating scalars are averaged over workers and parts; anything else is handed through."""
    return jnp.ndim(x) == 0 and jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)


def reduce_metrics(
    loss: jax.Array, aux: Any, axis: AxisName
) -> tuple[list[jax.Array], list[jax.Array], Callable[..., dict[str, Any]]]:
    """All scalars in one all-reduce; the rest stacked; and how to put them together again."""
    named = {**aux} if isinstance(aux, dict) else {"aux": aux}
    if "loss" in named:
        raise ValueError("the aux dict has a key 'loss', which is taken; give it another name")
    leaves, tree = jax.tree.flatten({"loss": loss, **named})
    leaves = wires.varying([jnp.asarray(x) for x in leaves], axis)
    averaged = [_is_mean(x) for x in leaves]
    means = wires.mean_over_workers([x for x, m in zip(leaves, averaged, strict=True) if m], axis)
    own = [x[None] for x, m in zip(leaves, averaged, strict=True) if not m]

    def rebuild(means: list[jax.Array], own: list[jax.Array]) -> dict[str, Any]:
        left, right = iter(means), iter(own)
        return jax.tree.unflatten(tree, [next(left) if m else next(right) for m in averaged])

    return means, own, rebuild


def fold(key: jax.Array, *parts: jax.Array) -> jax.Array:
    """Folds numbers into a key, one after the other."""
    for part in parts:
        key = jax.random.fold_in(key, part)
    return key
