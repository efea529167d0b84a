"""One worker's gradient of its rows, or the difference that its local steps make; and its metrics."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import wires
from lioncub_jax.exchange.arguments import check_count
from lioncub_jax.exchange.holders import exchanging_part
from lioncub_jax.exchange.means import common_dtype, halves, of_halves
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Static, Workers
from lioncub_jax.training import loss as losses
from lioncub_jax.training.kinds import Kind, Loss, Rows

_NO_NUMBER = (
    "the loss returns {}, {}: what it returns beside the loss is averaged, added or stacked over the "
    "workers; give numbers"
)
_PLAIN = "give a plain optax transform, such as optax.adamw(1e-3)"


def make_gradient(
    loss_fn: Loss, accumulate: int, batch_of: Callable[[Rows], Any]
) -> Callable[..., Any]:
    """``(params, states, rows, rng) -> (grads, states, (loss, aux))`` of one worker.

    States are the model's, and that of local steps, which stays as it is. Of several parts of the rows the
    gradients are averaged; ``batch_of`` makes of rows what the loss takes.
    """

    def loss_of(params: optax.Params, states: optax.OptState, rows: Rows, rng: jax.Array) -> Any:
        batch = batch_of(rows)
        model_state, local_state = states
        if type(model_state) is tuple and not model_state:  # there is none
            out = losses.call(loss_fn, params=params, batch=batch, rng=rng)
            loss, aux = losses.returned(out, "loss", aux={})
        else:
            out = losses.call(loss_fn, params=params, model_state=model_state, batch=batch, rng=rng)
            loss, aux, after = losses.returned(out, "loss", "aux", "model_state")
            model_state = losses.like_given(model_state, after)
        return loss, (aux, (model_state, local_state))

    value_and_grad = losses.in_worker(jax.value_and_grad(loss_of, has_aux=True))

    def whole(params: optax.Params, states: optax.OptState, rows: Rows, rng: jax.Array) -> Any:
        (loss, (aux, states)), grads = value_and_grad(params, states, rows, rng)
        return grads, states, (loss, aux)

    def accumulated(
        params: optax.Params, states: optax.OptState, rows: Rows, rng: jax.Array
    ) -> Any:
        def add(carry: Any, rows: Rows, rng: jax.Array) -> Any:
            grads, states, metrics = whole(params, carry[1], rows, rng)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), carry[0], grads)
            return (total, states), metrics

        # In float32 at least: a sum of many short floats loses digits, or has no end.
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, common_dtype(p, jnp.float32)), params)
        (total, states), metrics = _in_parts(add, (zeros, states), rows, rng, accumulate)
        mean = jax.tree.map(lambda t, p: (t / accumulate).astype(p.dtype), total, params)
        return mean, states, metrics

    return whole if accumulate == 1 else accumulated


def make_difference(
    gradient: Callable[..., Any], local: optax.GradientTransformation, local_steps: int
) -> Callable[..., Any]:
    """`make_gradient` with ``params - params after local steps`` in place of the gradient."""
    optimizer = optax.with_extra_args_support(local)

    def one(carry: Any, rows: Rows, rng: jax.Array) -> Any:
        params, states = carry
        grads, (model_state, state), metrics = gradient(params, states, rows, rng)
        updates, state = optimizer.update(grads, state, params, value=metrics[0])
        return (optax.apply_updates(params, updates), (model_state, state)), metrics

    def difference(params: optax.Params, states: optax.OptState, rows: Rows, rng: jax.Array) -> Any:
        # XLA copies what a loop carries at each turn: parameters and states, so two steps make one turn.
        carry = params, states
        (after, states), metrics = _in_parts(one, carry, rows, rng, local_steps, unroll=2)
        return jax.tree.map(jnp.subtract, params, after), states, metrics

    return difference


def _in_parts(
    one: Callable[..., Any], carry: Any, rows: Any, rng: jax.Array, count: int, unroll: int = 1
) -> Any:
    """``one(carry, rows, rng) -> (carry, (loss, aux))`` on each part of the rows; metrics of all parts."""

    def on(carry: Any, part: Any) -> Any:
        index, rows = part
        return one(carry, rows, jax.random.fold_in(rng, index))

    parts = jnp.arange(count), jax.tree.map(partial(_cut, count=count), rows)
    carry, (loss_of_parts, aux) = lax.scan(on, carry, parts, unroll=unroll)
    return carry, (jnp.mean(loss_of_parts), jax.tree.map(_merge_parts, aux))


def _cut(x: jax.Array, count: int) -> jax.Array:
    """``[count, rows, ...]`` of a batch, whose rows lie over explicit axes as those of the batch do."""
    spec = jax.typeof(x).sharding.spec
    shape = (count, x.shape[0] // count, *x.shape[1:])
    return lax.reshape(x, shape, out_sharding=P(None, *spec) if any(spec) else None)


def _merge_parts(x: jax.Array) -> jax.Array:
    """A metric of all parts of a batch: inexact numbers averaged, whole ones added, arrays stacked."""
    if x.ndim > 1:
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.mean(x)
    x = as_count(x)
    return of_halves(jnp.sum(halves(x), 0, x.dtype), x.dtype)


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


def as_count(x: jax.Array) -> jax.Array:
    """A number, or a bool as one, to be added: in 32 bits at least."""
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32
    return x if x.dtype.itemsize >= 4 else x.astype(wide)


def join_results(
    arrays: dict[int, jax.Array], numbers: dict[int, jax.Array], structure: Static
) -> Any:
    """Undoes `reduce_results`."""
    return jax.tree.unflatten(structure.value, jax.tree.leaves(arrays | numbers))  # sorted by place


# --- The optimizer of local steps, and its state


def check_local_steps(local: Any, local_steps: Any, workers: Workers) -> None:
    """Raises for local steps without an optimizer for them, or with one that cannot be a worker's own."""
    check_count(f"local_steps={local_steps!r}", local_steps)
    if local is None:
        if local_steps > 1:
            raise ValueError(
                f"local_steps={local_steps} without local, the optimizer of a worker's own steps: give "
                "local=optax.adamw(...), and the same to init_state; or leave local_steps out"
            )
        return
    if not isinstance(local, optax.GradientTransformation):
        raise TypeError(f"local={local!r} is no optimizer: {_PLAIN}, called")
    if workers.group is not None:
        raise ValueError(
            f"local steps with workers of {workers}: the devices of a group would each train on their own, "
            "and part. Give Workers without a group; devices that share a worker are those of an "
            "inner mesh axis, over which parameters or the batch are cut (specs, batch_spec)"
        )


def per_worker_state(
    local: optax.GradientTransformation | None, workers: Workers
) -> optax.GradientTransformationExtraArgs:
    """A transform that leaves updates as they are, with the state of the local one, each worker's own."""

    def init(params: optax.Params) -> optax.OptState:
        state = () if local is None else local.init(params)
        if (part := exchanging_part(state)) is not None:
            raise ValueError(
                f"local is a transform in which workers talk ({type(part).__name__}), and local steps "
                f"are each worker's own: {_PLAIN}, as local, and the transform in which they talk as tx"
            )
        return axes.varying(state, workers.axes)

    transform = optax.GradientTransformation(init, optax.identity().update)
    return optax.with_extra_args_support(transform)
