"""Deep Gradient Compression: a worker sends the few largest values of all that it has not sent yet.

For worker i, leaf by leaf::

    u_i = m u_i + g_i           # momentum correction: momentum comes before what is left out
    v_i = v_i + u_i             # the residual: all that was not sent yet
    send v_i at its k largest magnitudes, k = ceil(density n);  there u_i = v_i = 0
    p   = p - lr (sum_i sent_i / W + wd p)

Where this differs from the paper:

1. The k largest are exact, and always k of a leaf (of a device's shard of one): a compiled program
   sends messages of a fixed length. The paper samples 0.1 to 1 % of a leaf, takes the threshold that
   would send the wanted share of the sample, and sends what passes it, so that its messages vary.
2. An entry is a 32-bit index and a 32-bit value; the paper has 16-bit run lengths of zeros. A device
   holds fewer than 2**31 elements of a leaf.
3. Weight decay is decoupled, and there is no Nesterov momentum. Local gradient clipping is
   ``optax.clip_by_global_norm(c / sqrt(W))`` in front of it.
4. Workers that abstain, and a single worker, see `dgc`: both are ours.

Source: Lin et al., "Deep Gradient Compression" (arXiv 1712.01887).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from lioncub_jax.baselines import compression
from lioncub_jax.baselines.compression import Leaves
from lioncub_jax.exchange import checks, decide, wires
from lioncub_jax.exchange.checks import check_betas, check_number
from lioncub_jax.exchange.mapped import Holder
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import StateSpecs
from lioncub_jax.optimizers import Mask, descending


class DGCState(NamedTuple):
    """State of `dgc`, the first of its chain.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
      velocity: ``u``, float32, shaped like the parameters, each worker's own. It is not averaged
        anywhere, and so is not called ``mu``.
      residual: ``v``, float32, shaped like the parameters, each worker's own.
      abstained: ``int32[]``, workers that abstained from the last step; same on every worker.
      abstentions: ``int32[]``, their sum over all steps; same on every worker.
      specs: how the parameters and this state lie on the mesh, where that is known; no array.
    """

    count: jax.Array  # type: ignore[assignment]
    velocity: optax.Updates
    residual: optax.Updates
    abstained: jax.Array
    abstentions: jax.Array
    specs: StateSpecs | tuple[()] = ()

    @property
    def exchanges(self) -> bool:
        """True: workers communicate in the transform of this state."""
        return True

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Names the holders of the fields, for checkpoints."""
        return {"velocity": Holder.WORKER, "residual": Holder.WORKER}


def dgc(
    learning_rate: optax.ScalarOrSchedule,
    momentum: ArrayLike = 0.9,
    density: float = 0.001,
    warmup: int = 0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """Deep Gradient Compression: momentum SGD in which a worker sends a thousandth of its values a step.

    ``u = m u + g``, ``v = v + u``; the ``ceil(density n)`` largest ``|v|`` of each leaf are sent, and
    there ``u = v = 0``; ``p -= lr (sum of all that was sent / workers that took part + wd p)``. Of equal
    magnitudes the lower index goes first.

    A worker with a NaN or infinity in any gradient, or asked to by ``abstain``, abstains. A single worker
    sends nothing: its update is that of plain momentum SGD.

    Args:
      learning_rate: a number or an optax schedule.
      momentum: ``m``, in [0, 1).
      density: the share of each leaf that a worker sends, in (0, 1]; at least one value of each.
      warmup: steps in which the density comes down from 25 % by factors of four. The paper takes four
        epochs.
      weight_decay: decoupled.
      mask: the leaves that decay.
      workers: a `Workers` in one level, or the name of their mesh axis, or several.

    Returns:
      A chain; its first state is a `DGCState`. ``update(updates, state, params, abstain=None)`` takes
      gradients that vary over ``workers``, floating leaves of any shape, and returns updates of the same
      shapes and dtypes that are the same on all. Leaves that are cut over other mesh axes are sent shard
      by shard.

    Raises:
      ValueError: for a density outside (0, 1], a momentum outside [0, 1), a ``warmup`` that does not fit,
        or workers in two levels; when traced, for gradients that were already reduced.
      TypeError: for a mask that is not of bools; when traced, for integer or complex leaves.

    Example:
      >>> from lioncub_jax.baselines.dgc import dgc
      >>> tx = dgc(0.1, density=0.001, warmup=4 * 391, workers="data")

    References:
      Lin et al., "Deep Gradient Compression" (arXiv 1712.01887).
    """
    axis = compression.one_level("dgc", workers)
    check_betas(momentum=momentum)
    densities = stages(density, warmup)

    def init(params: optax.Params) -> DGCState:
        zeros = optax.tree.zeros_like(checks.check_leaves(params), dtype=jnp.float32)
        count, abstained, abstentions = jnp.zeros(3, jnp.int32)
        return DGCState(count, zeros, zeros, abstained, abstentions)

    def step(
        updates: optax.Updates, state: DGCState, abstain: jax.Array
    ) -> tuple[optax.Updates, DGCState]:
        checks.check_state(updates, state.residual)
        for x in jax.tree.leaves(updates):
            if x.size >= 2**31:  # JAX counts along an axis in int32
                raise ValueError(
                    f"a leaf of shape {x.shape} on each device: dgc sorts and indexes leaves of fewer than "
                    "2**31 elements; cut it over inner mesh axes (specs), or into several leaves"
                )
        tree: Any
        grads, tree = jax.tree.flatten(updates)
        before = tree.flatten_up_to(state.velocity), tree.flatten_up_to(state.residual)
        velocity = optax.tree.add_scale(
            optax.tree.cast(grads, jnp.float32), jnp.float32(momentum), before[0]
        )
        residual = optax.tree.add(before[1], velocity)
        # A value that is not finite ends up in the residual.
        here = compression.takes_part(axis, abstain, residual)
        if axes.workers_on(axis) == 1:
            # The whole residual is applied, and the velocity goes on.
            counted = [jnp.where(here, x, 0) for x in (*residual, jnp.int32(1))]
            *means, present = [axes.same_everywhere(x, axis) for x in counted]
            residual = optax.tree.zeros_like(residual)
        else:
            # Messages of each stage have a length of their own, so each is a branch; all workers take
            # the same one, as they count the same steps.
            branches = [partial(_send, axis, density) for density in densities.values()]
            begun = state.count >= np.array([*densities], np.int32)
            stage = jnp.sum(begun, dtype=jnp.int32) - 1
            means, velocity, residual, present = lax.switch(
                stage, branches, here, velocity, residual
            )
        velocity, residual = optax.tree.where(here, (velocity, residual), before)
        return tree.unflatten(optax.tree.cast_like(means, grads)), state._replace(
            velocity=tree.unflatten(velocity),
            residual=tree.unflatten(residual),
            **compression.next_counts(state, axis, present),
        )

    mean = compression.on_devices(workers, init, step)
    return descending(mean, learning_rate, weight_decay, mask)


def stages(density: float, warmup: int = 0) -> dict[int, float]:
    """The densities of a warm-up and the last one, by the step from which each holds.

    Args:
      density: the last one, in (0, 1].
      warmup: steps before it, cut as equally as whole steps allow.

    Raises:
      ValueError: as `dgc`.

    Example:
      >>> from lioncub_jax.baselines.dgc import stages
      >>> stages(0.01, warmup=12)
      {0: 0.25, 4: 0.0625, 8: 0.015625, 12: 0.01}
    """
    wanted = "give the share of values to send, in (0, 1], such as 0.001"
    check_number(f"density={density!r}", density, lambda x: 0 < x <= 1, wanted, float)
    wanted = (
        "give a whole number of steps, or 0 for no warm-up; above 0 a density below 0.25, where it comes "
        "down from 25 %"
    )

    def fits(n: int) -> bool:
        return n == 0 or (n > 0 and density < 0.25)

    check_number(f"warmup={warmup!r} with density={density!r}", warmup, fits, wanted, int)
    falling, share = [], 0.25
    while share > density:
        falling.append(share)
        share /= 4
    begins = [-(-warmup * n // len(falling)) for n in range(len(falling))]
    # Of those that begin at the same step the last: more stages than steps are not all compiled.
    return dict(zip([*begins, warmup], [*falling, density], strict=True))


def _send(
    axis: Axes, density: float, here: jax.Array, velocity: Leaves, residual: Leaves
) -> tuple[Leaves, Leaves, Leaves, jax.Array]:
    """One exchange at a density: means, the next velocity and residual, and the workers that took part."""
    indices, messages = [], []
    for v in residual:
        count = min(v.size, max(1, math.ceil(density * v.size)))
        _, index = lax.top_k(jnp.abs(v.ravel()), count)  # of equal magnitudes the first ones
        values = jnp.where(here, v.ravel()[index], 0)
        indices.append(index)
        messages.append(jnp.stack([index.view(jnp.uint32), values.view(jnp.uint32)]))
    gather = partial(wires.gather_words, axis=axis)
    *received, flags = compression.in_messages(gather, [*messages, here.astype(jnp.uint32)])
    present = jnp.sum(flags & 1)

    def add(worker: jax.Array | int, totals: Leaves) -> Leaves:
        added = []
        for total, messages in zip(totals, received, strict=True):
            index, words = messages[worker]  # uint32[k] each
            added.append(total.at[index].add(words.view(jnp.float32), unique_indices=True))
        return added

    # Worker by worker: one scatter of everything would add equal indices in any order, and a GPU does not
    # choose the same order twice, so that replicas would drift.
    first = add(0, [jnp.zeros(v.size, jnp.float32) for v in residual])
    sums = lax.fori_loop(1, len(flags), add, first)
    share = decide.share(present)
    means = [(x * share).reshape(v.shape) for x, v in zip(sums, residual, strict=True)]
    velocity = [_without(x, sent) for x, sent in zip(velocity, indices, strict=True)]
    residual = [_without(x, sent) for x, sent in zip(residual, indices, strict=True)]
    return means, velocity, residual, present


def _without(x: jax.Array, sent: jax.Array) -> jax.Array:
    """An array with zeros at the flat indices that were sent."""
    return x.ravel().at[sent].set(0, unique_indices=True).reshape(x.shape)
