"""PowerSGD: a baseline that sends two thin factors of each matrix of the mean gradient.

For a leaf that is a matrix of m x n, on worker i, with factors of rank r::

    M_i = g_i + e_i
    P   = orthonormal(mean_i M_i Q)   # m x r, the first all-reduce
    Q   = mean_i M_i^T P              # n x r, the second; where the next step begins
    M'  = P Q^T                       # what the optimizer sees, the same on every worker
    e_i = M_i - M'

Where this differs from the paper:

1. P is made orthonormal by Householder's QR, and not by Gram and Schmidt, of columns scaled to a largest
   magnitude of 1. So columns of zeros, or of very small numbers, give no NaN.
2. Of Q, too, only the directions are kept: columns are scaled so. One that came out as zeros, as where a
   gradient has a lower rank, stays what it was: it would be zeros for ever.
3. A leaf of more than two dimensions is the matrix of leading x trailing dimensions with the smallest
   m + n. A leaf whose factors would be no smaller than it is averaged whole, as vectors are.
4. The optimizer is any transform, and not SGD with momentum after the decompression (algorithm 2) alone.
5. Workers that abstain, and one worker alone, see `powersgd`: both are ours, as are factors in codes.

Source: Vogels et al., "PowerSGD" (arXiv 1905.13727).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax import checks, rotation, wires
from lioncub_jax.arguments import check_number
from lioncub_jax.baselines.dgc import abstains_of, groups_of
from lioncub_jax.baselines.levels import one_level
from lioncub_jax.bits import ROW
from lioncub_jax.exchange import Asked, Sending
from lioncub_jax.layout import Holder
from lioncub_jax.mesh import placement
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import cut_of
from lioncub_jax.optimizer import coded_mean
from lioncub_jax.wires import AxisName, Sent, varying_axes


class PowerSGDState(NamedTuple):
    """What `powersgd` keeps from step to step.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
      q: for each leaf ``Q``, ``float32[n, r]``, same on every worker, or None where it is not compressed.
        Of a leaf that is cut over inner axes those of all shards, ``[shards n, r]``.
      error: ``e``, shaped like the parameters, each worker's own, or None where a leaf is not compressed.
      inner: state of the transform, same on every worker.
      abstained: ``int32[]``, workers that abstained from the last step; same on every worker.
      abstentions: ``int32[]``, their sum over all steps; same on every worker.
    """

    count: jax.Array  # type: ignore[assignment]
    q: Any
    error: Any
    inner: Any
    abstained: jax.Array
    abstentions: jax.Array

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Whose the fields are, for checkpoints."""
        return {"error": Holder.FEEDBACK}


class _Plan(NamedTuple):
    axis: AxisName
    rank: int
    seed: int
    codes: (
        Sending | None
    )  # by which means travel, of what workers owe no more than the feedback holds


def powersgd(
    tx: optax.GradientTransformation,
    rank: int = 4,
    bits: int | None = None,
    *,
    axis_name: AxisName | Workers,
    seed: int = 0,
) -> Sending:
    """PowerSGD: any optax transform, of an approximation of the mean gradient by matrices of low rank.

    A leaf of ``m x n`` travels as ``rank (m + n)`` float32 where that is less than ``m n``; all others,
    such as vectors, as they are, in float32. A step has two all-reduces: one of all ``P``, of what is not
    compressed and of the number of those who take part, and one of all ``Q``. What the approximation
    leaves out a worker adds to its next gradient. A step begins with the ``Q`` of the one before, so that
    of a mean that stays the same the approximation becomes the best one of that rank.

    With ``bits`` both factors travel in codes, up and down, in rows of 128 elements that are turned by a
    rotation, so that none stands out, with a scale for each:
    ``rank (m + n) (bits + 1/8)`` bits a matrix each way. What codes miss is in the errors of the workers
    with all else that was not said, so a rank of 16 in 6 bits costs less than one of 4 in float32.
    Leaves that are not compressed travel in codes too, and have errors then.

    A worker with a gradient that is not finite anywhere, or asked to by ``abstain``, abstains from the
    step: it counts for nothing in the means, and its error stays as it is. With nobody there the
    transform sees zeros: momentum goes on, weights decay. One worker alone sends nothing and compresses
    nothing: the transform sees its gradient, or zeros if that is not finite.

    PyTorch's ``powerSGD_hook`` differs in this. By default it has rank 1, sends whole gradients for the
    first 1000 steps, and compresses what becomes less than half. Its matrices are a tensor's first
    dimension x all others, its factors have the gradient's dtype, and ``Q`` is orthonormalised before it is
    used. It knows no abstention: a NaN of one worker stays in the errors of all.

    Args:
      tx: such as ``optax.sgd(0.1, momentum=0.9)``, ``optax.adamw(3e-3)`` or ``optax.lion(1e-4)``.
      rank: of the approximation, at least 1. The paper has 1, 2 and 4.
      bits: of a code, 1 to 8; None for float32, as in the paper.
      axis_name: the workers: a `Workers` in one level, or the name of their mesh axis, or several as a
        tuple.
      seed: of the first ``Q``, which is normal and the same on all workers.

    Returns:
      A transform with state `PowerSGDState`; `traffic.of` can ask what it sends. ``update(updates,
      state, params, abstain=None)`` takes gradients that vary over ``axis_name``, floating leaves of any
      shape, and returns updates of the same shapes that are the same on every worker. ``abstain``:
      ``bool[]`` of this worker. Leaves that are cut over other mesh axes are compressed shard by shard,
      each a matrix of its own; a checkpoint of them is restored where they are cut the same way.

    Raises:
      ValueError: for a rank below 1, bits out of range, or workers in two levels; from ``init`` and
        ``traffic.of``, for leaves without a matrix, or a rank with which none would be compressed; when
        traced, for an axis that is not bound, or gradients that were already reduced.
      TypeError: for a ``tx`` that is no transform; from ``init``, for integer or complex leaves.

    Example:
      >>> import optax
      >>> from lioncub_jax import baselines
      >>> tx = baselines.powersgd(optax.sgd(0.1, momentum=0.9), rank=2, axis_name="data")

    Source: Vogels et al., "PowerSGD" (arXiv 1905.13727), algorithms 1 and 2; ``bits`` are ours.
    """
    axis = one_level("powersgd", axis_name)
    checks.check_axis(axis)
    checks.check_kinds(tx=(tx, optax.GradientTransformation))
    checks.check_count(f"rank={rank!r}", rank)
    check_number(f"seed={seed!r}", seed, lambda seed: True, "give a whole number", int)
    tx = optax.with_extra_args_support(tx)
    # Codes begin anew each step: the workers keep what they miss.
    codes = None if bits is None else coded_mean(bits, axis, None, None)
    plan = _Plan(axis, rank, seed, codes)

    def init(params: optax.Params) -> PowerSGDState:
        checks.check_leaves(params)
        q = placement.on_shards(partial(_first_q, plan), (params,))
        error = jax.tree.map(partial(_no_error, plan), params, q)
        counts = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return PowerSGDState(counts[0], q, error, tx.init(wires.agreed(params, axis)), *counts[1:])

    def update(
        updates: optax.Updates,
        state: PowerSGDState,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, PowerSGDState]:
        workers = wires.workers_on(axis)
        checks.check_leaves(updates)
        checks.check_local(updates, axis)
        checks.check_state(updates, state.error)
        told = jnp.zeros((), bool) if abstain is None else abstain
        given = updates, state.q, state.error, told
        # Results lie as what they replace.
        means, q, error, away = placement.on_shards(
            partial(_worker_step, plan, workers), given, cut_of(given)
        )
        updates, inner = tx.update(means, state.inner, params, **extra)
        count = optax.safe_increment(state.count)
        return updates, PowerSGDState(count, q, error, inner, away, state.abstentions + away)

    mean = optax.GradientTransformationExtraArgs(init, update)
    how = f"powersgd({rank})" + ("" if bits is None else f" in {bits} bits")
    return Sending.like(
        mean, f"{how}, {'all-reduce' if bits is None else 'two-phase'}, mean", partial(_sent, plan)
    )


def _sent(plan: _Plan, asked: Asked) -> tuple[Sent, ...]:
    """Two messages for the leaves that are cut over the same axes; the count is with the uncut ones."""
    if asked.workers == 1:
        return ()
    # The count of those who take part is a number more among floats.
    first: list[Any] = [] if plan.codes else [((), frozenset())]
    second: list[Any] = []
    matrices = _matrices(plan.rank, asked.tree)
    for leaf, axes, matrix in zip(asked.leaves, asked.axes, matrices, strict=True):
        m, n = (None, None) if matrix is None else matrix
        first.append((leaf.shape if m is None else (plan.rank, m), axes))
        if n is not None:
            second.append(((plan.rank, n), axes))
    return tuple(sent for each in (first, second) for sent in _sent_of(plan, asked, each))


def _sent_of(plan: _Plan, asked: Asked, arrays: list[tuple[Any, frozenset]]) -> tuple[Sent, ...]:
    if plan.codes is not None:
        rows = [-(-math.prod(shape) // ROW) for shape, _ in arrays]
        leaves = [jax.ShapeDtypeStruct((n, ROW), jnp.float32) for n in rows]
        return plan.codes.sends(asked._replace(tree=leaves, axes=[axes for _, axes in arrays]))
    sizes: dict[frozenset, int] = {}
    for shape, axes in arrays:
        sizes[axes] = sizes.get(axes, 0) + math.prod(shape)
    return tuple(
        Sent("all-reduce", False, wires.mean_bytes(n, asked.workers)) for n in sizes.values() if n
    )


# --- Which leaves are compressed


def _matrices(rank: int, tree: Any) -> list[tuple[int, int] | None]:
    """Rows and columns of each leaf that is compressed, by its shape here; None of all others.

    Raises:
      ValueError: where none is.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shapes = [_as_matrix(x.shape) for _, x in leaves]
    found = [s if s is not None and rank <= _highest_rank(*s) else None for s in shapes]
    if any(s is not None for s in found):
        return found
    known = [(_highest_rank(*s), s, i) for i, s in enumerate(shapes) if s is not None]
    if not known:
        raise ValueError(
            f"powersgd compresses matrices, and none of the {len(leaves)} leaves has two dimensions: give "
            "lioncub_jax.global_gradients(tx, axis_name), which averages them as they are"
        )
    highest, (m, n), at = max(known)
    name = jax.tree_util.keystr(leaves[at][0])
    advice = (
        f"give a rank of at most {highest}" if highest else "give global_gradients(tx, axis_name)"
    )
    raise ValueError(
        f"rank={rank}: no leaf would be compressed, because rank (m + n) must be less than m n. The "
        f"largest matrix, {name}, is {m} x {n} on each device, with a smaller side of {min(m, n)}: {advice}"
    )


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns; None of what has fewer than two dimensions, or no elements."""
    splits = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    return min(splits, key=sum) if splits and 0 not in shape else None


def _highest_rank(m: int, n: int) -> int:
    """The last one with ``rank (m + n) < m n``."""
    return (m * n - 1) // (m + n)


def _first_q(plan: _Plan, params: Any) -> Any:
    leaves, tree = jax.tree.flatten(params)
    key = jax.random.key(plan.seed)
    first: list[jax.Array | None] = []
    for i, matrix in enumerate(_matrices(plan.rank, params)):
        if matrix is None:
            first.append(None)
            continue
        normal = jax.random.normal(jax.random.fold_in(key, i), (matrix[1], plan.rank), jnp.float32)
        # All shards begin with the same, and come to differ.
        inner = varying_axes(leaves[i]) - set(wires.names(plan.axis))
        first.append(wires.varying(normal, tuple(sorted(inner))))
    return jax.tree.unflatten(tree, first)


def _no_error(plan: _Plan, p: jax.Array, q: jax.Array | None) -> jax.Array | None:
    exact = q is None and plan.codes is None
    return None if exact else jnp.zeros_like(p, dtype=jnp.float32)


# --- A step


def _worker_step(
    plan: _Plan, workers: int, updates: Any, q: Any, error: Any, told: jax.Array
) -> tuple[Any, Any, Any, jax.Array]:
    """What one worker does in a step, on each of its devices: ``(means, q, error, how many abstain)``."""
    tree: Any
    leaves, tree = jax.tree.flatten(updates)
    bases, errors = tree.flatten_up_to(q), tree.flatten_up_to(error)
    with jax.named_scope("lioncub.pack"):
        owed = [_owed(g, e) for g, e in zip(leaves, errors, strict=True)]
        of_one = [None] * len(owed) if workers == 1 else bases
        # Without a barrier the transposition is done by the product: six times as slow on a CPU.
        first = [
            x if b is None else lax.optimization_barrier(_product(_rows(x, b), b)).T
            for x, b in zip(owed, of_one, strict=True)
        ]
        # All that is not finite shows in the products with Q.
        takes_part = ~abstains_of(plan.axis, told, first)
    if workers == 1:
        means = [_own(plan.axis, takes_part, x) for x in first]
        present = wires.same_everywhere(takes_part.astype(jnp.float32), plan.axis)
    else:
        means, bases, present = _exchanged(plan, takes_part, owed, first, bases)
    with jax.named_scope("lioncub.remember"):
        seen = [_fitting(mean, g.dtype) for mean, g in zip(means, leaves, strict=True)]
        kept = [
            None if e is None else jnp.where(takes_part, _fitting(x - mean, e.dtype), e)
            for x, mean, e in zip(owed, seen, errors, strict=True)
        ]
    means = [mean.astype(g.dtype) for mean, g in zip(seen, leaves, strict=True)]
    found = [jax.tree.unflatten(tree, each) for each in (means, bases, kept)]
    return found[0], found[1], found[2], workers - present.astype(jnp.int32)


def _owed(g: jax.Array, e: jax.Array | None) -> jax.Array:
    g = g.astype(jnp.float32)
    return g if e is None else g + e


def _rows(x: jax.Array, base: jax.Array) -> jax.Array:
    """A leaf as the matrix with as many columns as ``Q`` has rows."""
    return x.reshape(-1, base.shape[0])


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """In full float32, on chips too that round before they multiply."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _own(axis: AxisName, takes_part: jax.Array, x: jax.Array) -> jax.Array:
    return wires.same_everywhere(jnp.where(takes_part, x, 0), axis)


def _exchanged(
    plan: _Plan,
    takes_part: jax.Array,
    owed: list[jax.Array],
    first: list[jax.Array],
    bases: list[Any],
) -> tuple[list[jax.Array], list[Any], jax.Array]:
    """Means as the leaves are shaped, the next ``Q``, and how many take part."""
    with jax.named_scope("lioncub.up"):
        means, present = _mean(plan, takes_part, first)
    low = [i for i, base in enumerate(bases) if base is not None]
    with jax.named_scope("lioncub.decide"):
        sides = [jnp.linalg.qr(_scaled(means[i].T)[0])[0] for i in low]
    with jax.named_scope("lioncub.down"):
        mine = [
            _product(side.T, _rows(owed[i], bases[i])) for i, side in zip(low, sides, strict=True)
        ]
        others, _ = _mean(plan, takes_part, mine, present)
    new = list(bases)
    with jax.named_scope("lioncub.unpack"):
        for i, side, q in zip(low, sides, others, strict=True):
            # What is no number, or not of any after the product, is not learned from.
            known = jnp.all(jnp.abs(q) < 2.0**127 / plan.rank)
            scaled, moves = _scaled(q.T)
            new[i] = jnp.where(known & moves, scaled, bases[i])
            means[i] = jnp.where(known, _product(side, q), 0).reshape(owed[i].shape)
    return means, new, present


def _mean(
    plan: _Plan, takes_part: jax.Array, arrays: list[jax.Array], present: Any = None
) -> tuple[list[jax.Array], jax.Array]:
    """Of those who take part, and how many they are, if that is not known yet."""
    if plan.codes is not None:
        tree = {"factors": [_turned(x) for x in arrays]}
        mean, state = plan.codes.update(tree, plan.codes.init(tree), abstain=~takes_part)
        back = [_turned_back(x, a.shape) for x, a in zip(mean["factors"], arrays, strict=True)]
        return back, wires.workers_on(plan.axis) - state.abstained
    mine = [jnp.where(takes_part, x, 0) for x in arrays]
    if present is None:
        *mine, present = _summed([*mine, takes_part.astype(jnp.float32)], plan.axis)
    else:
        mine = _summed(mine, plan.axis)
    return [x / jnp.maximum(present, 1) for x in mine], present


def _turned(x: jax.Array) -> jax.Array:
    """As rows of 128, turned: what stands out, as frequent words do, would be cut off by a code.

    Columns of a factor are its rows here, as they differ in size. A 128th, for sums that stay finite.
    """
    flat = x.reshape(-1)
    rows = jnp.pad(flat, (0, -flat.size % ROW)).reshape(-1, ROW)
    return rotation.turned(rows * (1 / ROW), jnp.int32(0))


def _turned_back(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    flat = (rotation.turned_back(rows, jnp.int32(0)) * ROW).reshape(-1)
    return flat[: math.prod(shape)].reshape(shape)


def _scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Columns with a largest magnitude of 1, and ``bool[r]``: which of them are not all zeros."""
    largest = jnp.max(jnp.abs(x), axis=0)
    return x / jnp.where(largest > 0, largest, 1), largest > 0


def _summed(arrays: list[jax.Array], axis: AxisName) -> list[jax.Array]:
    """Sums over the workers: one all-reduce of all arrays that vary over the same mesh axes."""
    groups = groups_of(arrays)
    joined = [jnp.concatenate([arrays[i].reshape(-1) for i in group]) for group in groups]
    sums = [jnp.zeros(x.shape, jnp.float32) for x in arrays]
    for group, total in zip(groups, wires.sum_of_floats(joined, axis), strict=True):
        ends = np.cumsum([arrays[i].size for i in group])[:-1]
        for i, part in zip(group, jnp.split(total, ends), strict=True):
            sums[i] = part.reshape(arrays[i].shape)
    return sums


def _fitting(x: jax.Array, dtype: Any) -> jax.Array:
    """Float32 that a dtype holds exactly: rounded, and clipped to its range."""
    kind = jnp.finfo(dtype)
    most = min(float(kind.max), float(jnp.finfo(x.dtype).max))
    # A cast there and back is "excess precision" that the compiler may remove.
    return lax.reduce_precision(jnp.clip(x, -most, most), min(kind.nexp, 8), min(kind.nmant, 23))
