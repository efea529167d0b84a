"""Deep Gradient Compression: a baseline that sends the few largest values of what a worker has gathered.

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
4. Workers that abstain, and one worker alone, see `dgc`: both are ours.

Source: Lin et al., "Deep Gradient Compression" (arXiv 1712.01887).
"""

import math
import operator
from collections.abc import Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax import checks, wires
from lioncub_jax.arguments import check_number
from lioncub_jax.baselines.levels import one_level
from lioncub_jax.exchange import Asked, Sending
from lioncub_jax.layout import Holder
from lioncub_jax.mesh import placement
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import cut_of
from lioncub_jax.optimizer import descending
from lioncub_jax.wires import AxisName, Sent, varying_axes


class DGCState(NamedTuple):
    """What `dgc` keeps from step to step; the first state of its chain.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
      velocity: ``u``, float32, shaped like the parameters, each worker's own. It is not averaged
        anywhere, and so is not called ``mu``.
      residual: ``v``, float32, shaped like the parameters, each worker's own.
      abstained: ``int32[]``, workers that abstained from the last step; same on every worker.
      abstentions: ``int32[]``, their sum over all steps; same on every worker.
    """

    count: jax.Array  # type: ignore[assignment]
    velocity: Any
    residual: Any
    abstained: jax.Array
    abstentions: jax.Array

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Whose the fields are, for checkpoints."""
        return {"velocity": Holder.WORKER, "residual": Holder.FEEDBACK}


class Stage(NamedTuple):
    """A time of constant density.

    Attributes:
      first_step: how many steps were taken before it begins.
      density: the share of each leaf that is sent.
    """

    first_step: int
    density: float


class _Plan(NamedTuple):
    axis: AxisName
    momentum: Any
    stages: tuple[Stage, ...]


def dgc(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Any = 0.9,
    density: float = 0.001,
    warmup: int = 0,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
) -> Sending:
    """Deep Gradient Compression: momentum SGD in which a worker sends a thousandth of its values a step.

    ``u = m u + g``, ``v = v + u``; the ``ceil(density n)`` largest ``|v|`` of each leaf are sent, and
    there ``u = v = 0``; ``p -= lr (sum of all that was sent / workers that took part + wd p)``. Of
    equal magnitudes the lower index goes first.

    A worker with a gradient that is not finite anywhere, or asked to by ``abstain``, abstains from the
    step: what it sends counts for nothing, and its state stays as it is. One worker alone sends nothing, so
    nothing is left out either: its update is that of plain momentum SGD, and the residual that several
    workers left comes with the first.

    What is sent loses its velocity too (momentum factor masking). So ``density=1`` has no momentum: it is
    plain SGD on the mean gradient.

    Args:
      learning_rate: a number or an optax schedule.
      momentum: ``m``, in [0, 1).
      density: the share of each leaf that a worker sends, in (0, 1]; at least one value of each.
      warmup: steps in which the density comes down from 25 % by factors of four: 25 %, 6.25 %, 1.5625 %
        and so on, all above ``density`` for equally long. The paper takes four epochs.
      weight_decay: decoupled, multiplied with the learning rate.
      mask: which leaves decay, a tree of bools or a function of the parameters.
      axis_name: the workers: a `Workers` in one level, or the name of their mesh axis, or several as a
        tuple.

    Returns:
      A chain whose first state is a `DGCState`; `traffic.of` can ask what it sends. ``update(updates,
      state, params, abstain=None)`` takes gradients that vary over ``axis_name``, floating leaves of any
      shape, and returns updates of the same shapes and dtypes that are the same on every worker.
      ``abstain``: ``bool[]`` of this worker. Leaves that are cut over other mesh axes are sent shard by
      shard: the k largest of each.

    Raises:
      ValueError: for a density outside (0, 1], a momentum outside [0, 1), a ``warmup`` below 0 or with
        a density of at least 25 %, or workers in two levels; when traced,
        for an axis that is not bound, gradients that were already reduced, or a leaf of which a device
        holds 2**31 elements or more.
      TypeError: for a mask that is not of bools; when traced, for integer or complex leaves.

    Example:
      >>> from lioncub_jax.baselines.dgc import dgc
      >>> tx = dgc(0.1, density=0.001, warmup=4 * 391, axis_name="data")

    Source: Lin et al., "Deep Gradient Compression" (arXiv 1712.01887).
    """
    axis = one_level("dgc", axis_name)
    checks.check_axis(axis)
    checks.check_betas(momentum=momentum)
    plan = _Plan(axis, momentum, stages(density, warmup))
    chain = descending(_sparse_mean(plan), learning_rate, weight_decay, mask)
    return Sending.like(chain, f"dgc({density:g})", partial(_sent, plan))


def stages(density: float, warmup: int = 0) -> tuple[Stage, ...]:
    """The densities of a warm-up and the last one, each with the step from which it holds.

    Args:
      density: the last one, in (0, 1].
      warmup: steps before it, cut as equally as whole steps allow.

    Raises:
      ValueError: as `dgc`.

    Example:
      >>> from lioncub_jax.baselines.dgc import stages
      >>> [(s.first_step, s.density) for s in stages(0.01, warmup=12)]
      [(0, 0.25), (4, 0.0625), (8, 0.015625), (12, 0.01)]
    """
    _check_density(density, warmup)
    falling: list[float] = []
    while warmup and 0.25 ** (len(falling) + 1) > density:
        falling.append(0.25 ** (len(falling) + 1))
    count = len(falling)
    begins = [-(-warmup * n // max(count, 1)) for n in range(count + 1)]
    times = zip(pairwise(begins), falling, strict=True)
    # More stages than steps: those without a step are left out, as each is compiled.
    warm = [Stage(begin, share) for (begin, end), share in times if begin < end]
    return (*warm, Stage(warmup, density))


def _sent(plan: _Plan, asked: Asked) -> tuple[Sent, ...]:
    """An all-gather of sparse messages for the leaves that are cut over the same axes.

    ``(W - 1) (8 K + 4)`` bytes, with K the values sent of all leaves: an index and a value each, and one
    word that says whether the worker takes part. Messages of 51 kB and more are padded to 512 bytes.
    """
    held = [stage for stage in plan.stages if asked.step is None or stage.first_step <= asked.step]
    entries: dict[frozenset, int] = {}
    for leaf, axes in zip(asked.leaves, asked.axes, strict=True):
        count = _entries(math.prod(leaf.shape), held[-1].density)
        entries[axes] = entries.get(axes, 0) + count
    return tuple(
        Sent("all-gather", False, wires.words_bytes(2 * count + 1, asked.workers))
        for count in entries.values()
        if count and asked.workers > 1
    )


def _sparse_mean(plan: _Plan) -> optax.GradientTransformationExtraArgs:
    """Local gradients in, the mean of what the workers sent out."""

    def init(params: optax.Params) -> DGCState:
        checks.check_leaves(params)
        zeros = [jax.tree.map(_float32_zeros, params) for _ in range(2)]
        counts = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return DGCState(counts[0], *zeros, *counts[1:])

    def update(
        updates: optax.Updates,
        state: DGCState,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, DGCState]:
        del params, extra
        workers = wires.workers_on(plan.axis)
        checks.check_leaves(updates)
        checks.check_local(updates, plan.axis)
        checks.check_state(updates, state.velocity, state.residual)
        told = jnp.zeros((), bool) if abstain is None else abstain
        on_device = partial(_worker_step, plan, workers)
        # Results lie as what they replace.
        return placement.on_shards(on_device, (updates, state, told), cut_of((updates, state)))

    return optax.GradientTransformationExtraArgs(init, update)


def _float32_zeros(p: jax.Array) -> jax.Array:
    return jnp.zeros_like(p, dtype=jnp.float32)


def _worker_step(
    plan: _Plan, workers: int, updates: Any, state: DGCState, told: jax.Array
) -> tuple[Any, DGCState]:
    """What one worker does in a step, on each of its devices."""
    _check_sizes(updates)
    leaves, tree = jax.tree.flatten(updates)
    before = _Gathered(*map(jax.tree.leaves, (state.velocity, state.residual)))
    grads = [g.astype(jnp.float32) for g in leaves]
    momentum = jnp.asarray(plan.momentum, jnp.float32)
    velocity = [momentum * u + g for u, g in zip(before.velocity, grads, strict=True)]
    residual = [v + u for v, u in zip(before.residual, velocity, strict=True)]
    # All that is not finite ends up in the residual.
    abstains = abstains_of(plan.axis, told, residual)
    means, present, now = (
        _alone(plan.axis, ~abstains, velocity, residual)
        if workers == 1
        else _exchanged(plan, ~abstains, state.count, _Gathered(velocity, residual))
    )
    now = jax.tree.map(partial(jnp.where, abstains), before, now)
    away = None if present is None else workers - present.astype(jnp.int32)
    new_state = DGCState(
        optax.safe_increment(state.count),
        jax.tree.unflatten(tree, now.velocity),
        jax.tree.unflatten(tree, now.residual),
        state.abstained if away is None else away,
        state.abstentions if away is None else state.abstentions + away,
    )
    means = [mean.astype(g.dtype) for mean, g in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(tree, means), new_state


class _Gathered(NamedTuple):
    """A worker's ``u`` and ``v``, ``float32[...]`` of each leaf."""

    velocity: list[jax.Array]
    residual: list[jax.Array]


def abstains_of(axis: AxisName, told: jax.Array, values: list[jax.Array]) -> jax.Array:
    """``bool[]``: whether this worker abstains, its devices as one: told to, or for a value not finite."""
    strange = reduce(operator.or_, [told, *[~jnp.all(jnp.isfinite(v)) for v in values]])
    return wires.any_over_shards(strange, axis)


def _alone(
    axis: AxisName, takes_part: jax.Array, velocity: list[jax.Array], residual: list[jax.Array]
) -> tuple[list[jax.Array], jax.Array, _Gathered]:
    """One worker's update: all that is gathered, its velocity if no others left more; nothing stays."""
    means = [wires.same_everywhere(jnp.where(takes_part, v, 0), axis) for v in residual]
    present = wires.same_everywhere(takes_part.astype(jnp.uint32), axis)
    return means, present, _Gathered(velocity, list(map(jnp.zeros_like, residual)))


def _exchanged(
    plan: _Plan, takes_part: jax.Array, count: jax.Array, gathered: _Gathered
) -> tuple[list[jax.Array], jax.Array | None, _Gathered]:
    """The mean of what all send, how many take part, and what this worker is left with."""
    if not any(v.size for v in gathered.residual):
        return [_float32_zeros(v) for v in gathered.residual], None, gathered
    # Each stage has messages of its own length, so it is a branch with an all-gather of its own; all
    # workers take the same one, as they count the same steps.
    branches = [partial(_send, plan, stage.density) for stage in plan.stages]
    begins = np.array([stage.first_step for stage in plan.stages[1:]], np.int32)
    stage = jnp.sum(count >= begins, dtype=jnp.int32)
    return lax.switch(stage, branches, takes_part, gathered)


def _send(
    plan: _Plan, density: float, takes_part: jax.Array, gathered: _Gathered
) -> tuple[list[jax.Array], jax.Array, _Gathered]:
    """One exchange at a density: a message for all leaves that vary over the same mesh axes."""
    velocity, residual = list(gathered.velocity), list(gathered.residual)
    means, counted = [jnp.zeros(v.shape, jnp.float32) for v in residual], []
    for group in groups_of(residual):
        flat = [residual[i].reshape(-1) for i in group]
        with jax.named_scope("lioncub.pack"):
            at = [_largest(x, _entries(x.size, density)) for x in flat]
            values = [jnp.where(takes_part, x[i], 0) for x, i in zip(flat, at, strict=True)]
        with jax.named_scope("lioncub.up"):
            received = wires.gather_words(_message(at, values, takes_part), plan.axis)
        with jax.named_scope("lioncub.unpack"):
            sums, present = _added(received, flat, [i.size for i in at])
        share = 1 / jnp.maximum(present, 1).astype(jnp.float32)
        counted.append(wires.same_over_shards(present, plan.axis))
        for i, sent, total in zip(group, at, sums, strict=True):
            means[i] = (total * share).reshape(means[i].shape)
            residual[i] = _without(residual[i], sent)
            velocity[i] = _without(velocity[i], sent)
    return means, counted[0], _Gathered(velocity, residual)


def groups_of(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Leaves that may share a message, by index; empty ones are in none."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.size:
            groups.setdefault(tuple(sorted(varying_axes(leaf))), []).append(index)
    # What is cut over the fewest axes first: if over none, all devices already hold the same count.
    return [groups[axes] for axes in sorted(groups, key=lambda axes: (len(axes), axes))]


def _entries(size: int, density: float) -> int:
    """How many values of a leaf are sent."""
    return max(1, math.ceil(density * size)) if size else 0


def _message(at: list[jax.Array], values: list[jax.Array], takes_part: jax.Array) -> jax.Array:
    """``uint32[2 K + 1]``: indices, values, and a one for taking part."""
    bits = lax.bitcast_convert_type(jnp.concatenate(values), jnp.uint32)
    return jnp.concatenate([*at, bits, takes_part.astype(jnp.uint32)[None]])


def _added(
    received: jax.Array, like: list[jax.Array], entries: list[int]
) -> tuple[list[jax.Array], jax.Array]:
    """Sums of the messages ``uint32[W, 2 K + 1]`` of each flat leaf, and who took part."""
    ends = np.cumsum(entries)
    at = jnp.split(received[:, : ends[-1]], ends[:-1], axis=1)
    bits = lax.bitcast_convert_type(received[:, ends[-1] : -1], jnp.float32)
    values = jnp.split(bits, ends[:-1], axis=1)

    def add(worker: int | jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        return [
            total.at[i[worker]].add(x[worker], unique_indices=True)
            for total, i, x in zip(totals, at, values, strict=True)
        ]

    # Worker by worker: one scatter of everything would add what meets in any order, and a GPU does not
    # choose the same order twice, so that replicas would part.
    first = add(0, [jnp.zeros(x.shape, jnp.float32) for x in like])
    totals = lax.fori_loop(1, len(received), add, first)
    return totals, jnp.sum(received[:, -1], dtype=jnp.uint32)


def _largest(x: jax.Array, count: int) -> jax.Array:
    """``uint32[count]``: where the largest magnitudes of a leaf are, of equal ones the first."""
    return lax.top_k(jnp.abs(x.reshape(-1)), count)[1].astype(jnp.uint32)


def _without(x: jax.Array, sent: jax.Array) -> jax.Array:
    return x.reshape(-1).at[sent].set(0, unique_indices=True).reshape(x.shape)


def _check_sizes(leaves: Any) -> None:
    """What JAX, which counts along an axis in int32, can index."""
    for path, x in jax.tree_util.tree_leaves_with_path(leaves):
        if x.size >= 2**31:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path) or '(root)'} of {x.size} elements on each device: dgc "
                "sorts and indexes fewer than 2**31 of a leaf; cut it over inner mesh axes (specs), or "
                "into several leaves"
            )


def _check_density(density: Any, warmup: Any) -> None:
    said = "give the share of values to send, in (0, 1], such as 0.001"
    check_number(f"density={density!r}", density, lambda x: 0 < x <= 1, said, float)
    said = "give a whole number of steps, or 0 for no warm-up"
    check_number(f"warmup={warmup!r}", warmup, lambda n: n >= 0, said, int)
    if warmup and density >= 0.25:
        raise ValueError(
            f"warmup={warmup} with density={density}: a warm-up comes down from 25 %; give a density "
            "below 0.25, or warmup=0"
        )
