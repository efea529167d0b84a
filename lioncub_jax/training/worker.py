"""One worker's gradient of its rows, or the difference that its local steps make; and its metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import wires
from lioncub_jax.exchange.bits import common_dtype, high_and_low, of_high_and_low
from lioncub_jax.exchange.checks import check_count
from lioncub_jax.exchange.mapped import exchanging_state
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.training import loss as losses
from lioncub_jax.training.arguments import Own
from lioncub_jax.training.loss import Loss

_PLAIN = "give a plain optax transform, such as optax.adamw(1e-3)"


def make_gradient(loss_fn: Loss, accumulate: int) -> Callable[..., Any]:
    """``(params, states, batch, rng) -> (grads, states, (loss, aux))`` of one worker.

    States are the model's, and that of local steps, which stays as it is. Of several parts of the rows the
    gradients are averaged.
    """

    def loss_of(params: optax.Params, states: optax.OptState, batch: Any, rng: jax.Array) -> Any:
        model_state, local_state = states
        if type(model_state) is tuple and not model_state:  # there is none
            out = losses.call(loss_fn, params=params, batch=batch, rng=rng)
            loss, aux = losses.returned(out, "loss", aux={})
        else:
            out = losses.call(loss_fn, params=params, model_state=model_state, batch=batch, rng=rng)
            loss, aux, after = losses.returned(out, "loss", "aux", "model_state")
            model_state = losses.like_given(model_state, after)
        return loss, (aux, (model_state, local_state))

    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)

    def whole(params: optax.Params, states: optax.OptState, batch: Any, rng: jax.Array) -> Any:
        (loss, (aux, states)), grads = value_and_grad(params, states, batch, rng)
        return grads, states, (loss, aux)

    def accumulated(
        params: optax.Params, states: optax.OptState, batch: Any, rng: jax.Array
    ) -> Any:
        def add(carry: Any, batch: Any, rng: jax.Array) -> Any:
            grads, states, metrics = whole(params, carry[1], batch, rng)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), carry[0], grads)
            return (total, states), metrics

        # In float32 at least: a sum of many short floats loses digits, or has no end.
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, common_dtype(p, jnp.float32)), params)
        (total, states), metrics = _in_parts(add, (zeros, states), batch, rng, accumulate)
        mean = jax.tree.map(lambda t, p: (t / accumulate).astype(p.dtype), total, params)
        return mean, states, metrics

    return whole if accumulate == 1 else accumulated


def make_difference(
    gradient: Callable[..., Any], local: optax.GradientTransformation, local_steps: int
) -> Callable[..., Any]:
    """`make_gradient` with ``params - params after local steps`` in place of the gradient."""
    optimizer = optax.with_extra_args_support(local)

    def one(carry: Any, batch: Any, rng: jax.Array) -> Any:
        params, states = carry
        grads, (model_state, state), metrics = gradient(params, states, batch, rng)
        updates, state = optimizer.update(grads, state, params, value=metrics[0])
        return (optax.apply_updates(params, updates), (model_state, state)), metrics

    def difference(params: optax.Params, states: optax.OptState, batch: Any, rng: jax.Array) -> Any:
        # XLA copies what a loop carries at each turn: parameters and states, so two steps make one turn.
        carry = params, states
        (after, states), metrics = _in_parts(one, carry, batch, rng, local_steps, unroll=2)
        return jax.tree.map(jnp.subtract, params, after), states, metrics

    return difference


def _in_parts(
    one: Callable[..., Any], carry: Any, batch: Any, rng: jax.Array, count: int, unroll: int = 1
) -> Any:
    """``one(carry, batch, rng) -> (carry, (loss, aux))`` on each part of the rows; metrics of all parts."""
    tree: Any
    whole, tree = jax.tree.flatten(batch)

    def on(carry: Any, part: Any) -> Any:
        index, rows = part
        each = [rows.get(i, x) for i, x in enumerate(whole)]
        return one(carry, tree.unflatten(each), jax.random.fold_in(rng, index))

    rows = {i: _cut(x, count) for i, x in enumerate(whole) if jnp.ndim(x)}
    carry, (loss_of_parts, aux) = lax.scan(on, carry, (jnp.arange(count), rows), unroll=unroll)
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
    return of_high_and_low(jnp.sum(high_and_low(x), 0, x.dtype), x.dtype)


def as_count(x: jax.Array) -> jax.Array:
    """A number, or a bool as one, to be added: in 32 bits at least."""
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32
    return x if x.dtype.itemsize >= 4 else x.astype(wide)


def metrics_of_all(loss: jax.Array, aux: Any, workers: Workers) -> dict[str, Any]:
    """The loss and what is in ``aux``, by name: numbers of all workers, and each worker's arrays.

    Floating and complex numbers are averaged over the workers, whole ones added, in an all-reduce for each.
    """
    named = aux if isinstance(aux, dict) else {"aux": aux}
    if "loss" in named:
        raise ValueError("the aux dict has a key 'loss', which is taken; give it another name")
    tree: Any
    leaves, tree = jax.tree_util.tree_flatten_with_path({"loss": loss, **named})
    found, means, counts = dict[int, Any](), dict[int, jax.Array](), dict[int, jax.Array]()
    for i, (path, x) in enumerate(leaves):
        if isinstance(x, str) or (is_key(x) and not jnp.ndim(x)):
            raise TypeError(
                f"the loss returns {jax.tree_util.keystr(path)}, {getattr(x, 'dtype', 'text')}: what it "
                "returns beside the loss is averaged, added or stacked over the workers; give numbers"
            )
        x = jnp.asarray(x)
        if x.ndim:
            found[i] = Own(x)
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            means[i] = x
        else:
            counts[i] = as_count(x)
    found |= wires.mean_over_workers(means, workers.axes)
    found |= wires.sum_over_workers(counts, workers.axes)
    return tree.unflatten([found[i] for i in range(len(leaves))])  # type: ignore[no-any-return]


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
    local: optax.GradientTransformation, workers: Workers
) -> optax.GradientTransformationExtraArgs:
    """A transform that leaves updates as they are, with the state of the local one, each worker's own."""

    def init(params: optax.Params) -> optax.OptState:
        state = local.init(params)
        if (part := exchanging_state(state)) is not None:
            raise ValueError(
                f"local is a transform in which workers talk ({type(part).__name__}), and local steps "
                f"are each worker's own: {_PLAIN}, as local, and the transform in which they talk as tx"
            )
        return axes.varying(state, workers.axes)

    transform = optax.GradientTransformation(init, optax.identity().update)
    return optax.with_extra_args_support(transform)
