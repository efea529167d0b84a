"""What one worker makes of its rows: a gradient, or how far local steps took it; and what a loss says.

There the workers' axes are taken: a constraint, a rule or a ``shard_map`` of the model can name the inner
axes (fsdp, tensor, expert) only.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import wires
from lioncub_jax.exchange.arguments import check_count
from lioncub_jax.exchange.means import common_dtype
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Static, Workers
from lioncub_jax.mesh.specs import flax_in_use, without
from lioncub_jax.optimizers import GlobalState
from lioncub_jax.training import kinds
from lioncub_jax.training.kinds import Kind

_PLAIN = "give a plain optax transform, such as optax.adamw(1e-3)"


def gradient_of(
    loss_fn: Callable[..., Any], accumulate: int, batch_of: Callable[[Any], Any]
) -> Callable[..., Any]:
    """``(params, states, rows, rng) -> (grads, states, (loss, aux))`` of one worker.

    States are the model's, and that of local steps, which is left alone. Of several parts of the rows the
    gradients are averaged; ``batch_of`` makes of rows what the loss takes.
    """

    def loss_of(params: Any, states: Any, rows: Any, rng: jax.Array) -> Any:
        batch = batch_of(rows)
        model_state, local_state = states
        if type(model_state) is tuple and not model_state:  # there is none
            out = _called(loss_fn, params=params, batch=batch, rng=rng)
            loss, aux = kinds.returned(out, "loss", aux={})
        else:
            given = {"model_state": model_state}
            out = _called(loss_fn, params=params, **given, batch=batch, rng=rng)
            loss, aux, model_state = kinds.returned(out, "loss", "aux", "model_state")
            model_state = kinds.like_given(given["model_state"], model_state)
        return loss, (aux, (model_state, local_state))

    value_and_grad = of_model(jax.value_and_grad(loss_of, has_aux=True))

    def whole(params: Any, states: Any, batch: Any, rng: jax.Array) -> Any:
        (loss, (aux, states)), grads = value_and_grad(params, states, batch, rng)
        return grads, states, (loss, aux)

    def accumulated(params: Any, states: Any, batch: Any, rng: jax.Array) -> Any:
        def add(carry: Any, batch: Any, rng: jax.Array) -> Any:
            grads, states, said = whole(params, carry[1], batch, rng)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), carry[0], grads)
            return (total, states), said

        # In float32 at least: a sum of many short floats loses digits, or has no end.
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, common_dtype(p, jnp.float32)), params)
        (total, states), said = _in_parts(add, (zeros, states), batch, rng, accumulate)
        mean = jax.tree.map(lambda t, p: (t / accumulate).astype(p.dtype), total, params)
        return mean, states, said

    return whole if accumulate == 1 else accumulated


def _called(loss_fn: Callable[..., Any], **given: Any) -> Any:
    """What a loss returns, whatever its arguments are called; ``TypeError`` for other ones."""
    takes = inspect.signature(loss_fn)
    try:
        takes.bind(*given.values())
    except TypeError as error:
        raise TypeError(
            f"the loss takes {takes} and is called with ({', '.join(given)}): give it these arguments. "
            "Several arrays of a batch are one tree, such as a tuple; a loss that draws nothing leaves rng "
            "unused"
        ) from error
    return loss_fn(*given.values())


def difference_of(
    gradient: Callable[..., Any], local: optax.GradientTransformation, local_steps: int
) -> Callable[..., Any]:
    """As `gradient_of`; in place of a gradient parameters before local steps minus those after."""
    optimizer = optax.with_extra_args_support(local)

    def one(carry: Any, batch: Any, rng: jax.Array) -> Any:
        params, states = carry
        grads, (model_state, state), said = gradient(params, states, batch, rng)
        updates, state = optimizer.update(grads, state, params, value=said[0])
        return (optax.apply_updates(params, updates), (model_state, state)), said

    def stepped(params: Any, states: Any, batch: Any, rng: jax.Array) -> Any:
        # XLA copies what a loop carries at each turn: parameters and states, so two steps make one turn.
        carry = params, states
        (after, states), said = _in_parts(one, carry, batch, rng, local_steps, unroll=2)
        return jax.tree.map(jnp.subtract, params, after), states, said

    return stepped


def _in_parts(
    one: Callable[..., Any], carry: Any, batch: Any, rng: jax.Array, count: int, unroll: int = 1
) -> Any:
    """``one(carry, batch, rng) -> (carry, (loss, aux))`` on each part of a batch, and what all said."""

    def on(carry: Any, part: Any) -> Any:
        index, batch = part
        return one(carry, batch, jax.random.fold_in(rng, index))

    parts = jnp.arange(count), jax.tree.map(partial(_cut, count=count), batch)
    carry, (losses, auxes) = lax.scan(on, carry, parts, unroll=unroll)
    return carry, (jnp.mean(losses), jax.tree.map(_of_parts, auxes))


def _cut(x: jax.Array, count: int) -> jax.Array:
    """``[count, rows, ...]`` of a batch, whose rows lie over explicit axes as those of the batch do."""
    spec = jax.typeof(x).sharding.spec
    shape = (count, x.shape[0] // count, *x.shape[1:])
    return lax.reshape(x, shape, out_sharding=P(None, *spec) if any(spec) else None)


def _of_parts(x: jax.Array) -> jax.Array:
    """A metric of all parts of a batch: inexact numbers averaged, whole ones added, arrays stacked."""
    if x.ndim > 1:
        return x
    return jnp.mean(x) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.sum(as_count(x))


def reduced(
    values: Any, each: Sequence[kinds.Kind], axis: Axes
) -> tuple[dict[int, jax.Array], dict[int, jax.Array], Static]:
    """What a loss returns, by place: arrays over the workers, numbers on which they agree; and its tree.

    Floating and complex numbers are averaged over the workers, whole ones added, in an all-reduce for each.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(values)
    arrays, means, counts = {}, {}, {}
    for i, ((path, x), kind) in enumerate(zip(leaves, each, strict=True)):
        if isinstance(x, str) or (kind is Kind.SHARED and is_key(x)):
            raise TypeError(
                f"the loss returns {jax.tree_util.keystr(path)}, {getattr(x, 'dtype', 'text')}: what it "
                "returns beside the loss is averaged, added or stacked over the workers; give numbers"
            )
        x = jnp.asarray(x)
        if kind is not Kind.SHARED:
            arrays[i] = x[None] if kind is Kind.PER_WORKER else x
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            means[i] = x
        else:
            counts[i] = as_count(x)
    numbers = wires.mean_over_workers(means, axis) | wires.sum_over_workers(counts, axis)
    return arrays, numbers, Static(structure)


def as_count(x: jax.Array) -> jax.Array:
    """A whole number, or a bool as one, to be added: in 32 bits at least."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)


def joined(arrays: dict[int, jax.Array], numbers: dict[int, jax.Array], structure: Static) -> Any:
    """Undoes `reduced`."""
    return jax.tree.unflatten(structure.value, jax.tree.leaves(arrays | numbers))  # sorted by place


def of_model(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose model may follow flax's logical rules, and whose errors about meshes say what to do."""

    @wraps(loss_fn)
    def hinted(*args: Any, **kwargs: Any) -> Any:
        taken = jax.sharding.get_abstract_mesh().manual_axes
        with _rules_without(taken):
            try:
                return loss_fn(*args, **kwargs)
            except Exception as error:
                told = [x for words, x in _ADVICE.items() if any(w in str(error) for w in words)]
                for advice in told[:1]:
                    error.add_note(f"lioncub_jax: {advice.format(taken)}")
                raise

    return hinted


_MESH = (
    "the loss runs for one worker, where the axes {} of the mesh are taken. Put what the model says of "
    "the mesh into lioncub_jax.mesh.inner, which takes a NamedSharding too: "
    "jax.lax.with_sharding_constraint(x, inner(P(...))), jax.shard_map(f, mesh=inner(mesh), "
    "in_specs=inner(P(...)), out_specs=inner(P(...))); give logical rules around the step, not in it. An "
    "array on the mesh that the loss closes over is to be an argument, lioncub_jax.Kind.SHARED"
)
_ADVICE = {  # by words of an error: the first that has one
    ("Going from `Manual`",): (
        "nnx.Embed(out_sharding=...) makes all axes Auto, and {} are taken: leave it out, and the type of "
        "the table says the rest, or look up by table.at[tokens].get(out_sharding=inner(P(...)))"
    ),
    ("Unhandled OpSharding",): (
        "jax.ensure_compile_time_eval computes at once, and JAX cannot where {} are taken: compute with "
        "NumPy, or before the loss"
    ),
    ("different trace level",): (
        "what the loss closes over cannot be written in it: give nnx.Rngs as an argument of the loss, and "
        "a module in place of the parameters"
    ),
    ("is only valid for values of rank",): (
        "a spec has more names than the array dimensions. flax makes the kernel of nn.DenseGeneral flat, "
        "and constrains it then by the names of nn.with_partitioning, under any mesh: leave these names "
        "out of its kernel_init, and give them as specs to init_state, on_mesh and worker_value_and_grad"
    ),
    ("anual", "ontext mesh", "Auto axes"): _MESH,
}


def _rules_without(taken: tuple[str, ...]) -> contextlib.AbstractContextManager[Any]:
    """The active logical rules of flax, without the axes that are taken."""
    if not flax_in_use():
        return contextlib.nullcontext()
    from flax import linen

    rules = [
        (name, next(iter(without(P(axes), taken)), None))
        for name, axes in linen.get_logical_axis_rules()
    ]
    return linen.logical_axis_rules(rules)  # type: ignore[no-any-return]


# --- The optimizer of local steps, and its state


def check_local(local: Any, local_steps: Any, workers: Workers) -> None:
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


def of_each(
    local: optax.GradientTransformation | None, workers: Workers
) -> optax.GradientTransformationExtraArgs:
    """A transform whose state is that of the local one, each worker's own to the last counter."""

    def init(params: optax.Params) -> Any:
        state = () if local is None else local.init(params)
        for part in jax.tree.leaves(state, is_leaf=_of_talk):
            if _of_talk(part):
                raise ValueError(
                    f"local is a transform in which workers talk ({type(part).__name__}), and local steps "
                    f"are each worker's own: {_PLAIN}, as local, and the transform in which they talk as tx"
                )
        return axes.varying(state, workers.axes)

    left_alone = optax.GradientTransformation(init, optax.identity().update)
    return optax.with_extra_args_support(left_alone)


def _of_talk(state: Any) -> bool:
    return isinstance(state, GlobalState) or hasattr(state, "holders")
