"""What baselines share: means in codes, and steps of their own, where every axis of the mesh is manual."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from lioncub_jax.exchange import bits, checks, decide, quantize, wires
from lioncub_jax.mesh import axes, placement
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.placement import Workers, names_of
from lioncub_jax.optimizers import owner

Leaves = list[jax.Array]
# What a method makes of a step: means, two trees of what is kept, and how many workers took part.
Done = tuple[Leaves, Leaves, Leaves, jax.Array]


def one_level(method: str, workers: AxisName | Workers) -> Any:
    """The axis of workers that are one device each, or shards of one.

    Raises:
      ValueError: for workers in two levels.
    """
    axis, group = names_of(workers)
    if group:
        raise ValueError(
            f"{method} has no two levels, but the workers have {workers}: it would have to send what a "
            "group has in common. Give Workers without a group; with the names of both axes in "
            "their axis each device is a worker"
        )
    return axis


def coded_mean(
    bits: int, workers: AxisName | Workers | None
) -> optax.GradientTransformationExtraArgs:
    """The mean in codes of so many bits up and down, with feedback in float32 at both ends."""
    up = quantize.error_feedback(quantize.midrise(bits), "float32")
    return owner(optax.identity(), workers=workers, quantizer=up, reply=decide.codes(bits))


def behind(
    mean: optax.GradientTransformation,
    tx: optax.GradientTransformation,
    workers: AxisName | Workers | None,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transform of what workers agree on, from state that is the same on all of them."""
    axis, tx = names_of(workers)[0], optax.with_extra_args_support(tx)
    alike = optax.GradientTransformationExtraArgs(
        lambda params: tx.init(wires.agreed(params, axis)), tx.update
    )
    return optax.chain(mean, alike)


def on_devices(
    axis: Axes, init: Callable[..., Any], step: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """A transform by ``(updates, state, told) -> (updates, state)``, on each device of a worker.

    ``told``: ``bool[]``, whether the worker is told to abstain.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, abstain: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        del params
        axes.workers_on(axis)
        abstain = checks.check_abstain(abstain, extra)
        updates = checks.check_leaves(updates)
        checks.check_local(updates, axis)
        given = updates, state, jnp.zeros((), bool) if abstain is None else abstain
        # Results lie as what they replace.
        return placement.on_shards(step, given, given[:2])

    return optax.GradientTransformationExtraArgs(init, update)


def compressed_mean(
    axis: Axes, kind: Any, first: Callable[[Any], Any], step: Callable[..., Done]
) -> optax.GradientTransformationExtraArgs:
    """Local gradients in, the mean that a method makes of them out.

    Args:
      axis: of the workers.
      kind: of state: ``count``, two trees like the parameters, the second of what is owed, in float32,
        ``abstained`` and ``abstentions``.
      first: ``params -> tree``, the first of the two; nothing is owed at first.
      step: ``(leaves, told, count, first tree, second tree) -> Done``, of trees as lists.
    """

    def init(params: Any) -> Any:
        params = checks.check_leaves(params)
        count, *counts = jnp.zeros(3, jnp.int32)
        owed = optax.tree.zeros_like(params, dtype=jnp.float32)
        return kind(count, first(params), owed, *counts)

    def on_device(updates: Any, state: Any, told: jax.Array) -> tuple[Any, Any]:
        checks.check_state(updates, state[2])
        tree: Any
        leaves, tree = jax.tree.flatten(updates)
        before = map(tree.flatten_up_to, state[1:3])
        means, *after, present = step(leaves, told, state.count, *before)
        means = optax.tree.cast_like(means, leaves)
        means, *after = map(tree.unflatten, (means, *after))
        away = axes.workers_on(axis) - present.astype(jnp.int32)
        counts = away, bits.add_count(state.abstentions, away)
        return means, kind(optax.safe_increment(state.count), *after, *counts)

    return on_devices(axis, init, on_device)


def takes_part(axis: Axes, told: jax.Array, values: Leaves) -> jax.Array:
    """``bool[]``, of a worker's devices as one: not if told to abstain, or for a value not finite."""
    finite = jnp.array([jnp.all(jnp.isfinite(v)) for v in values])
    return ~axes.any_over_shards(told | ~jnp.all(finite), axis)


def in_messages(send: Callable[[jax.Array], jax.Array], arrays: Leaves) -> Leaves:
    """Arrays as they are received: a flat message for all that vary over the same mesh axes.

    ``send`` takes ``[n]`` and returns ``[n]``, or ``[W, n]`` of all workers.
    """
    groups: dict[frozenset, dict[int, jax.Array]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault(axes.varying_axes(x), {})[i] = x
    found: dict[int, jax.Array] = {}
    for over in sorted(groups, key=sorted):
        message, apart = ravel_pytree(groups[over])
        received = send(message)
        found |= apart(received) if received.ndim == 1 else jax.vmap(apart)(received)
    return [found[i] for i in range(len(arrays))]
