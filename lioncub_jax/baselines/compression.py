"""Parts that baselines share: means in codes, and steps that run on each device of a worker."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from lioncub_jax.exchange import checks, decide, quantize, wires
from lioncub_jax.exchange.bits import at_least_float32
from lioncub_jax.exchange.mapped import on_workers
from lioncub_jax.mesh import axes, placement
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers, worker_axes
from lioncub_jax.mesh.specs import specs_in_step
from lioncub_jax.optimizers import owner


def coded_mean(
    num_bits: int, workers: AxisName | Workers | None
) -> optax.GradientTransformationExtraArgs:
    """The mean in codes of so many bits up and down, with feedback in float32 at both ends."""
    quantizer = quantize.error_feedback(quantize.midrise(num_bits), "float32")
    reply = decide.codes(num_bits)
    return owner(optax.identity(), workers=workers, quantizer=quantizer, reply=reply)


def behind(
    mean: optax.GradientTransformation,
    tx: optax.GradientTransformation,
    workers: AxisName | Workers | None,
) -> optax.GradientTransformationExtraArgs:
    """A mean, and behind it a transform with a state in float32 at least, the same on all workers."""
    axis, tx = worker_axes(workers)[0], optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> optax.OptState:
        return tx.init(jax.tree.map(at_least_float32, wires.agreed(params, axis)))

    def update(updates: optax.Updates, *given: Any, **extra: Any) -> Any:
        new, state = tx.update(jax.tree.map(at_least_float32, updates), *given, **extra)
        return optax.tree.cast_like(new, updates), state

    return optax.chain(mean, optax.GradientTransformationExtraArgs(init, update))


def on_devices(
    workers: AxisName | Workers,
    init: Callable[[optax.Params], Any],
    step: Callable[..., tuple[optax.Updates, Any]],
    *numbers: ArrayLike,
) -> optax.GradientTransformationExtraArgs:
    """A transform whose step runs on each device: ``(updates, state, abstain, *numbers)`` to the first two.

    ``abstain``: ``bool[]``, whether the worker is asked to leave this step out. Numbers of the method are
    arguments: a traced one may lie on other axes, where no closure takes it.
    """
    axis = sum(worker_axes(workers), ())

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        del params
        axes.check_bound(axis)
        abstain = checks.check_abstain(abstain, extra)
        updates = checks.check_leaves(updates)
        checks.check_local(updates, axis)
        given = updates, state, jnp.zeros((), bool) if abstain is None else abstain, *numbers
        specs = specs_in_step(axis, updates, state)
        # Results lie as the arguments that they replace.
        return placement.on_shards(
            step, given, given[:2], specs and (*specs, *[P()] * len(numbers))
        )

    return on_workers(optax.GradientTransformationExtraArgs(init, update), workers)
