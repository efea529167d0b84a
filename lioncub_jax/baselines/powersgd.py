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
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lioncub_jax.baselines import compression
from lioncub_jax.baselines.compression import Done, Leaves
from lioncub_jax.exchange import decide, quantize, rotation, wires
from lioncub_jax.exchange.arguments import check_count, check_kinds
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.layout import Holder
from lioncub_jax.mesh import axes, placement
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.optimizers import owner


class PowerSGDState(NamedTuple):
    """What `powersgd` keeps from step to step.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
      q: for each leaf ``Q``, ``float32[n, r]``, same on every worker, or None where it is not compressed.
        Of a leaf that is cut over inner axes those of all shards, ``[shards n, r]``.
      error: ``e``, shaped like the parameters, each worker's own; zeros where a leaf is not compressed.
      abstained: ``int32[]``, workers that abstained from the last step; same on every worker.
      abstentions: ``int32[]``, their sum over all steps; same on every worker.
    """

    count: jax.Array  # type: ignore[assignment]
    q: Any
    error: Any
    abstained: jax.Array
    abstentions: jax.Array

    def exchanges(self) -> bool:
        """Whether workers communicate in the transform of this state."""
        return True

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Whose the fields are, for checkpoints."""
        return {"error": Holder.FEEDBACK}


def powersgd(
    tx: optax.GradientTransformation,
    rank: int = 4,
    bits: int | None = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """PowerSGD: any optax transform, of an approximation of the mean gradient by matrices of low rank.

    A leaf of ``m x n`` travels as ``rank (m + n)`` float32 where that is less than ``m n``; all others,
    such as vectors, as they are, in float32. A step has two all-reduces: one of all ``P``, of what is not
    compressed and of the number of those who take part, and one of all ``Q``. What the approximation
    leaves out a worker adds to its next gradient. A step begins with the ``Q`` of the one before, so that
    of a mean that stays the same the approximation becomes the best one of that rank.

    With ``bits`` both factors travel in codes, up and down, in rows of 128 elements that are rotated,
    so that none stands out, with a scale for each:
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
      workers: the workers: a `Workers` in one level, or the name of their mesh axis, or several as a
        tuple.

    Returns:
      A chain of a `PowerSGDState` and that of ``tx``; `traffic.of` says what it sends. ``update(updates,
      state, params, abstain=None)`` takes gradients that vary over ``workers``, floating leaves of any
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
      >>> tx = baselines.powersgd(optax.sgd(0.1, momentum=0.9), rank=2, workers="data")

    Source: Vogels et al., "PowerSGD" (arXiv 1905.13727), algorithms 1 and 2; ``bits`` are ours.
    """
    axis = compression.one_level("powersgd", workers)
    check_kinds(tx=(tx, optax.GradientTransformation))
    check_count(f"rank={rank!r}", rank)
    codes = None
    if bits is not None:  # begun anew each step: the workers keep what they miss
        up, reply = quantize.midrise(bits), decide.codes(bits)
        codes = owner(optax.identity(), workers=axis, quantizer=up, reply=reply)
    method = _PowerSGD(axis, rank, codes)
    mean = compression.compressed_mean(axis, PowerSGDState, method.first, method.step)
    return compression.behind(mean, tx, axis)


class _PowerSGD(NamedTuple):
    axis: Axes
    rank: int
    codes: optax.GradientTransformationExtraArgs | None  # by which means travel

    def sides(self, leaves: Sequence[Any]) -> list[Any]:
        """Rows and columns of each leaf that is compressed, by its shape here; None of all others.

        Raises:
          ValueError: where none is.
        """
        found = [as_matrix(x.shape) for x in leaves]
        # The last rank with ``rank (m + n) < m n``.
        highest = [max(m * n - 1, 0) // max(m + n, 1) for m, n in found]
        most = max(highest, default=0)
        if self.rank > most:
            raise ValueError(
                f"rank={self.rank}: none of the {len(found)} leaves would be compressed, as for that rank "
                f"(m + n) must be less than m n. The highest rank here is {most}; "
                "lioncub_jax.global_gradients(tx) averages leaves as they are"
            )
        return [s if self.rank <= n else None for s, n in zip(found, highest, strict=True)]

    def first(self, params: Any) -> Any:
        """The first ``Q``, normal and the same on all workers."""
        return placement.on_shards(self._first_q, (params,))

    def _first_q(self, params: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        first = self.sides(leaves)
        for i, leaf in enumerate(leaves):
            if first[i] is not None:
                key = jax.random.fold_in(jax.random.key(0), i)
                normal = jax.random.normal(key, (first[i][1], self.rank), jnp.float32)
                # All shards begin with the same, and come to differ.
                inner = axes.varying_axes(leaf) - set(self.axis)
                first[i] = axes.varying(normal, tuple(inner))
        return jax.tree.unflatten(tree, first)

    def step(
        self, leaves: Leaves, told: jax.Array, _: jax.Array, bases: Leaves, errors: Leaves
    ) -> Done:
        """What one worker does in a step; it keeps ``Q`` and errors."""
        low = [i for i, base in enumerate(bases) if base is not None]
        inexact = low if self.codes is None else range(len(leaves))
        if axes.workers_on(self.axis) == 1:
            low = []
        owed = optax.tree.add(optax.tree.cast(leaves, jnp.float32), errors)
        rows, first = {i: owed[i].reshape(-1, len(bases[i])) for i in low}, list(owed)
        for i in low:
            # Without a barrier the transposition is done by the product: six times as slow on a CPU.
            first[i] = lax.optimization_barrier(_product(rows[i], bases[i])).T
        # All that is not finite shows in the products with Q.
        here = compression.takes_part(self.axis, told, first)
        means, present = self.mean(here, first)
        sides = {i: jnp.linalg.qr(_scaled(means[i].T, means[i].T))[0] for i in low}
        others, _ = self.mean(here, [_product(sides[i].T, rows[i]) for i in low])
        for i, q in zip(low, others, strict=True):
            # What is no number, or not of any after the product, is not learned from.
            known = jnp.all(jnp.abs(q) < 2.0**127 / self.rank)
            bases[i] = jnp.where(known, _scaled(q.T, bases[i]), bases[i])
            means[i] = jnp.where(known, _product(sides[i], q), 0).reshape(owed[i].shape)
        means = [_fitting(mean, g.dtype) for mean, g in zip(means, leaves, strict=True)]
        for i, e in enumerate(errors):
            missed = _fitting(owed[i] - means[i], jnp.float32) if i in inexact else e
            errors[i] = jnp.where(here, missed, e)
        return means, bases, errors, present

    def mean(self, here: jax.Array, arrays: Leaves) -> tuple[Leaves, jax.Array]:
        """Of those who take part, and how many they are."""
        workers = axes.workers_on(self.axis)
        if self.codes is not None and workers > 1:
            rows = [_rotated(x) for x in arrays]
            coded, state = self.codes.update(rows, self.codes.init(rows), abstain=~here)
            return [*map(_rotated_back, coded, arrays)], workers - state.votes.abstained
        counted = [jnp.where(here, x, 0) for x in (*arrays, jnp.float32(1))]
        add = partial(wires.sum_of_floats, axis=self.axis)
        *sums, present = compression.in_messages(add, counted)
        return [x / jnp.maximum(present, 1) for x in sums], present


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns, of which a vector has one."""
    splits = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, max(len(shape), 2))]
    return min(splits, key=sum)


# In full float32, on chips too that round before they multiply.
_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _scaled(x: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Columns with a largest magnitude of 1; in place of zeros those of another array."""
    largest = jnp.max(jnp.abs(x), axis=0)
    moves = largest > 0
    return jnp.where(moves[None], x / jnp.where(moves, largest, 1)[None], otherwise)


def _rotated(x: jax.Array) -> jax.Array:
    """As rows of 128, rotated: what stands out, as frequent words do, would be cut off by a code.

    Columns of a factor are its rows here, as they differ in size. A 128th, for sums that stay finite.
    """
    rows = jnp.pad(x.ravel(), (0, -x.size % ROW)).reshape(-1, ROW)
    return rotation.rotated(rows / ROW, jnp.int32(0))


def _rotated_back(rows: jax.Array, like: jax.Array) -> jax.Array:
    flat = rotation.undone(rows, jnp.int32(0)).ravel()
    return ROW * flat[: like.size].reshape(like.shape)


def _fitting(x: jax.Array, dtype: Any) -> jax.Array:
    """Float32 that a dtype holds exactly: rounded, and clipped to its range."""
    kind = jnp.finfo(jnp.float32 if dtype == jnp.float64 else dtype)
    # A cast there and back is "excess precision" that the compiler may remove.
    most = float(kind.max)
    return lax.reduce_precision(jnp.clip(x, -most, most), kind.nexp, kind.nmant)
