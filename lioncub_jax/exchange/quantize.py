"""Values to codes, and the message that they make: what a worker sends, and in how many bits.

A code ``q`` in ``0..top`` stands for the integer ``2q - top`` in units of half a step. Two families:

* *mid-rise*, ``top`` odd: no code is zero, ``p`` bits have ``2**p`` of them, and ``p = 1``
  is the sign. There is no code for zero, so a worker whose 128 elements of a row are all exactly zero
  does not vote on that row at all, and a single zero in a row that does vote gets a random
  sign (``bits.zero_side``), so that zeros on different workers cancel in pairs.
* *mid-tread*, ``top`` even: the middle code is zero and means it. The paper's integer codes and the
  exact ternary codes are of this kind.

A row of 128 elements has one step, in units of its mean magnitude (the papers' L1 scale; no square is
taken, so nothing over- or underflows). In a vote the step stays at the worker: only the integers are
counted. Where the server decodes values it travels beside the codes, as bfloat16.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax.exchange import bits, rotation, xla
from lioncub_jax.exchange.arguments import check_floating, check_number
from lioncub_jax.exchange.bits import BLOCK, ROW, unpack, unpack_stored
from lioncub_jax.exchange.layout import Bucket, Piece, pad_rows

__all__ = [
    "EncodeContext",
    "Message",
    "Quantizer",
    "dense",
    "error_feedback",
    "integer",
    "levels",
    "midrise",
    "rotated",
    "rotated_sign",
    "sign",
    "stochastic",
    "ternary",
]

# The uniform steps that are best for a Gaussian, by bits (J. Max, "Quantizing for minimum distortion",
# 1960), in units of the mean magnitude, which is sqrt(2/pi) of its deviation. For one bit a step of 2 is
# the least-squares fit of +-step/2 to any values, whatever their distribution.
GAUSSIAN_STEP = {
    1: 2.0,
    2: 1.2479,
    3: 0.7344,
    4: 0.4199,
    5: 0.2357,
    6: 0.1305,
    7: 0.0713,
    8: 0.0386,
}

LEAST = 2.0**-126  # of what is above 0: CPUs take smaller numbers for 0
LARGEST_BFLOAT16 = float(jnp.finfo(jnp.bfloat16).max)


class EncodeContext(NamedTuple):
    """All that encode must know besides the values: the piece, the step, the worker, the other shards.

    Attributes:
      bucket: the flat buffer.
      piece: the rows of it that are encoded.
      first_word: word of the whole message where the piece begins, an int or ``uint32[]``.
      step: ``int32[]``, steps taken before this one; same on every worker.
      worker: ``int32[]``, the worker's index; varies over the workers.
      workers: how many there are.
      zero_signs: signs for exact zeros, see ``bits.zero_side``.
      counts: ``int32[rows]``, how many elements of each row are no padding; None where all are.
      send_scales: whether the scale of each row travels.
      shard: ``uint32[]``, which of the worker's shards this is, or 0 for leaves in one piece.
      shards: how many shards a leaf has.
      total: ``float32[segments, 2]``, what the quantizer's ``measure`` gives for all shards together.
    """

    bucket: Bucket
    piece: Piece
    first_word: Any
    step: jax.Array
    worker: jax.Array
    workers: int
    zero_signs: bits.Draw
    counts: jax.Array | None
    send_scales: bool
    shard: Any = 0
    shards: int = 1
    total: jax.Array | None = None


class Message(NamedTuple):
    """What one worker sends about the rows of a piece (or, joined, of a bucket).

    Attributes:
      planes: ``uint32[words]`` each, the codes; of a dense quantizer the values' own bits.
      voted: row words, ``uint32[blocks]``, the rows that the worker votes on; None for codes with a zero
        and for values, which say so themselves.
      scales: ``bfloat16[rows]``, the step of each row's codes, or None if it does not travel.
      valid: ``bool[]``. Of a piece: all values are finite. Of a joined message: the worker takes part.
    """

    planes: list[jax.Array]
    voted: jax.Array | None
    scales: jax.Array | None
    valid: jax.Array


class Quantizer(NamedTuple):
    """Pure functions that turn values into codes; built by the functions of this module.

    Attributes:
      name: for people.
      top: ``workers -> largest code``; raises ``ValueError`` if the sum over so many workers does not fit.
      encode: ``(float32[rows, 128], EncodeContext) -> Message``.
      has_zero: whether a code means exactly zero (``top`` is even).
      has_steps: whether its codes have steps that can travel, so that a server can decode them.
      dense: dtype of the values if they travel as they are, else None.
      measure: ``(float32[rows, 128], Piece) -> float32[segments, 2]``, what ``encode`` must know of whole
        leaves as a sum over their shards, or None.
      feedback: dtype in which a worker keeps its quantization error, or None.
      keep: the share of that error that is kept.
      rotates: whether codes are of rotated rows, see `rotated`.
    """

    name: str
    top: Callable[[int], int]
    encode: Callable[[jax.Array, EncodeContext], Message]
    has_zero: bool = False
    has_steps: bool = False
    dense: Any = None
    measure: Callable[[jax.Array, Piece], jax.Array] | None = None
    feedback: Any = None
    keep: float = 1.0
    rotates: bool = False

    @property
    def words_per_row(self) -> int:
        """Words that a plane takes for one row."""
        return ROW * jnp.dtype(self.dense).itemsize // 4 if self.dense else bits.WORDS_PER_ROW

    def values(
        self,
        planes: Sequence[jax.Array],
        steps: jax.Array | None,
        rows: int,
        workers: int,
        *,
        stored: bool = False,
    ) -> jax.Array:
        """Decodes planes ``[..., words]`` and steps ``[..., rows]`` to ``float32[..., rows, 128]``.

        Products of short integers and bfloat16 steps are exact: no rounding. ``stored`` is for results that
        are reshaped to leaves, see `unpack_stored`.
        """
        if self.dense:
            words = planes[0].reshape(*planes[0].shape[:-1], rows, -1)
            values = words.view(self.dense).astype(jnp.float32)
            return jnp.where(jnp.isfinite(values), values, 0)  # whatever a worker says
        assert steps is not None
        top = self.top(workers)
        # signed = 2 codes - top, written in two ways.
        if stored:  # two uses of the codes, so XLA stores them
            codes = unpack_stored(planes, rows)
            upper = codes > top // 2
            odd = 2 * jnp.where(upper, codes, top - codes).astype(jnp.int32) - top
            signed = jnp.where(upper, odd, -odd)
        else:  # one use of the codes, so a GPU fuses them
            signed = 2 * unpack(planes, rows).astype(jnp.int32) - top
        return signed.astype(jnp.float32) * (steps.astype(jnp.float32) / 2)[..., None]


# Noise ``float32[rows, 128]`` in [0, 1), which is added before rounding down, so that the mean is right.
Rounding: TypeAlias = Callable[[EncodeContext], jax.Array]


def stochastic(seed: int = 0) -> Rounding:
    """Rounds up or down at random, right on average where nothing is clipped.

    The random key is derived from the seed, the step, the worker and the leaf, so workers err
    independently of each other and a run repeats exactly.

    Args:
      seed: of the key, an int.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.midrise(4, rounding=lc.quantize.stochastic(7)).name
      'midrise(4, stochastic)'
    """
    check_number(f"seed={seed!r}", seed, lambda seed: True, "give a whole number", int)

    def noise(context: EncodeContext) -> jax.Array:
        key = jax.random.key(seed)
        for part in (context.step, context.worker):
            key = jax.random.fold_in(key, part)
        drawn = []
        for segment in context.piece.segments:
            own = jax.random.fold_in(key, segment.leaf)
            own = jax.random.fold_in(own, context.shard) if context.shards > 1 else own
            drawn.append(jax.random.uniform(own, (segment.rows, ROW), jnp.float32))
        return pad_rows(jnp.concatenate(drawn), context.piece.rows)

    return noise


def sign() -> Quantizer:
    """One bit: the sign. Distributed Lion (arXiv 2404.00438) and 1-bit Lion Cub (2411.16462).

    ``q = 1 if x > 0 else -1``; zeros get a random sign, see ``bits.zero_side``.

    Returns:
      A mid-rise ``Quantizer`` of one bit.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.sign().top(1000)
      1
    """
    return midrise(1)._replace(name="sign")


def midrise(p: int, *, rounding: Rounding | None = None) -> Quantizer:
    """``p`` bits: ``2**p`` evenly spaced levels, none of them zero.

    ``q = floor(x / step) + 2**(p-1)``, clipped to ``0..2**p - 1``; its value is
    ``(2q - (2**p - 1)) step / 2``; ``step = GAUSSIAN_STEP[p] mean|x|`` of the row, best for a Gaussian.

    Args:
      p: bits per element, 1 to 8.
      rounding: None for the nearest level, or ``stochastic(seed)``.

    Returns:
      A ``Quantizer``, for votes (the step stays at the worker) and for momentum at the owner (it travels:
      1/8 bit per element).

    Raises:
      ValueError: if ``p`` is out of range.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.midrise(3).top(1000)
      7
    """
    check_bits("midrise", p, 1)
    top = 2**p - 1

    def encode(x: jax.Array, context: EncodeContext) -> Message:
        if p == 1 and not context.send_scales and rounding is None:
            return _signs(x, context)
        mean, finite = row_scale(x, context.counts)
        step = to_bfloat16(GAUSSIAN_STEP[p] * mean)
        if rounding:
            middle = 2 ** (p - 1)
            level = jnp.floor(_in_units(x, step) + (middle - 0.5) + rounding(context))
            level = jnp.where(x == 0, middle - 1, jnp.clip(level, 0, top))
            codes = level.astype(jnp.uint32)
        else:
            codes = midrise_codes(x, x > 0, step, p)
        *planes, _ = _packed(codes | ((x != 0).astype(jnp.uint32) << p), p + 1, context, zeros=True)
        voted = bits.pack_rows(context.bucket.by_chunk(mean > 0)).reshape(-1)
        steps = step.astype(jnp.bfloat16) if context.send_scales else None
        return Message(planes, voted, steps, jnp.all(finite))

    return Quantizer(_name("midrise", p, rounding), lambda workers: top, encode, has_steps=True)


def integer(p: int = 8, *, rounding: Rounding | None = None) -> Quantizer:
    """Lion Cub's ``p``-bit codes, scaled so that their sum over the workers fits in ``p`` bits.

    ``q = clip(round(x / mean|x| * s / 2), -s, s)`` with ``s = floor((2**(p-1) - 1) / workers)``; the
    mean is the leaf's own and never travels. Twice the mean is the largest code. Precision shrinks as one
    over the workers.

    Args:
      p: bits of the sum, 2 to 8.
      rounding: None for the nearest level (the paper's), or ``stochastic(seed)``.

    Returns:
      A mid-tread ``Quantizer``, for wires that sum too; ties and zeros stay zero.

    Raises:
      ValueError: if ``p`` is out of range; when traced with so many workers that ``s`` would be 0.

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce", L1 scale.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.integer(8).top(4)  # s = 127 // 4 = 31, codes -31..31
      62
    """
    check_bits("integer", p, 2)

    def top(workers: int) -> int:
        s = (2 ** (p - 1) - 1) // workers
        if s == 0:
            raise ValueError(
                f"integer({p}): the sum of {workers} workers' codes does not fit in {p} bits; it holds "
                f"at most {2 ** (p - 1) - 1} workers. Use more bits, or midrise({p}), whose precision "
                "does not depend on the number of workers"
            )
        return 2 * s

    def encode(x: jax.Array, context: EncodeContext) -> Message:
        s = top(context.workers) // 2
        t = _in_units(x, _leaf_scale(context)) * (s / 2)
        if rounding:
            t = jnp.floor(t + rounding(context))
        codes = (jnp.clip(jnp.round(t), -s, s) + s).astype(jnp.uint32)
        return _midtread(codes, x, (2 * s).bit_length(), context)

    return Quantizer(_name("integer", p, rounding), top, encode, has_zero=True, measure=_leaf_sums)


def ternary(*, rounding: Rounding | None = None) -> Quantizer:
    """The exact sign: -1, 0 or +1 in two bits, so that a zero is a zero vote and a tie stays a tie.

    Args:
      rounding: None for the sign. ``stochastic(seed)``: the sign with probability
        ``|x|``, else 0, so that values in [-1, 1] are right on average; others are clipped.

    Returns:
      A mid-tread ``Quantizer``.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.ternary().top(1000)
      2
    """

    def encode(x: jax.Array, context: EncodeContext) -> Message:
        if rounding:
            level = jnp.clip(jnp.floor(x + rounding(context)), -1, 1)
            codes = (level + 1).astype(jnp.uint32)
        else:
            codes = jnp.where(x > 0, 2, jnp.where(x < 0, 0, 1)).astype(jnp.uint32)
        return _midtread(codes, x, 2, context)

    name = "ternary(stochastic)" if rounding else "ternary"
    return Quantizer(name, lambda workers: 2, encode, has_zero=True)


def levels(p: int, *, rounding: Rounding | None = None) -> Quantizer:
    """QSGD's ``p``-bit codes: a sign and ``s = 2**(p-1) - 1`` levels of the largest of each row.

    ``q = clip(round(x / step), -s, s)`` with ``step = max|x| / s``, rounded up to bfloat16, which travels.
    So no value is clipped, and with ``stochastic`` rounding codes are right on average. Steps below 2**-126
    are 0.

    Args:
      p: bits per element, 2 to 8.
      rounding: None for the nearest level, or ``stochastic(seed)`` (the paper's).

    Returns:
      A mid-tread ``Quantizer`` whose steps travel, for momentum at the owner.

    Raises:
      ValueError: if an argument is out of range.

    Source: Alistarh et al., "QSGD" (arXiv 1610.02132); bfloat16 norms of rows are ours.

    Example:
      >>> from lioncub_jax import quantize
      >>> quantize.levels(4).top(1000)  # codes -7..7
      14
    """
    check_bits("levels", p, 2)
    s = 2 ** (p - 1) - 1

    def encode(x: jax.Array, context: EncodeContext) -> Message:
        step = _up_to_bfloat16(jnp.max(jnp.abs(x), axis=1) / s)
        step = jnp.where(step < LEAST, 0, step)
        t = _in_units(x, step)
        if rounding:
            t = jnp.floor(t + rounding(context))
        # Of the largest steps not every multiple is a float32.
        most = jnp.minimum(s, jnp.floor(LARGEST_BFLOAT16 / jnp.where(step > 0, step, 1)))
        most = most[:, None]
        codes = (jnp.clip(jnp.round(t), -most, most) + s).astype(jnp.uint32)
        message = _midtread(codes, x, p, context)
        return message._replace(scales=step.astype(jnp.bfloat16))

    return Quantizer(
        _name("levels", p, rounding), lambda workers: 2 * s, encode, has_zero=True, has_steps=True
    )


def dense(dtype: Any = jnp.float32) -> Quantizer:
    """No quantization: the values themselves, in float32 or bfloat16. The baseline.

    Args:
      dtype: ``jnp.float32`` or ``jnp.bfloat16``.

    Raises:
      ValueError: for any other dtype.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> lc.quantize.dense(jnp.bfloat16).name
      'dense(bfloat16)'
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in ("float32", "bfloat16"):
        raise ValueError(f"dense({dtype.name}): values travel as float32 or bfloat16")

    def encode(x: jax.Array, context: EncodeContext) -> Message:
        words = saturated(x, dtype).view(jnp.uint32).reshape(-1)
        return Message([words], None, None, jnp.all(jnp.isfinite(x)))

    return Quantizer(f"dense({dtype.name})", lambda workers: 0, encode, dense=dtype)


def error_feedback(
    quantizer: Quantizer, dtype: Any = jnp.bfloat16, *, keep: float = 1.0
) -> Quantizer:
    """Adds the error of the last code to the next value, so that nothing is lost, only late.

    ``x = g + e``, send ``encode(x)``, keep ``e = keep (x - decoded)``. The error stays with the worker; one
    that the dtype cannot hold is kept as the largest that it can.

    Args:
      quantizer: one whose steps can travel, such as ``midrise(3)``.
      dtype: in which the error is kept; one array of this dtype per worker and leaf.
      keep: the share of the error that is fed back, in (0, 1]. With one bit the error is as large as the
        gradient, and the full error adds noise: 0.7 is best for ``rotated(midrise(1))``. With more bits
        use 1.

    Returns:
      The ``Quantizer`` with feedback.

    Raises:
      ValueError: if the quantizer's values cannot be decoded, the dtype is not floating, or ``keep`` is out
        of range.

    Source: Seide et al. 2014; Karimireddy et al., "Error feedback fixes SignSGD" (arXiv 1901.09847).

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.error_feedback(lc.quantize.midrise(3)).name
      'midrise(3) + error feedback'
    """
    if not quantizer.has_steps:
        raise ValueError(
            f"error_feedback({quantizer.name}): the error is measured against what the owner decodes, "
            "so codes must have steps that travel; use midrise(p)"
        )
    check_floating("dtype", dtype)
    said = "give a share above 0 and at most 1"
    check_number(f"error_feedback(keep={keep!r})", keep, lambda x: 0 < x <= 1, said, float)
    share = f" of {keep:g}" if keep < 1 else ""
    name = f"{quantizer.name} + error feedback{share}"
    return quantizer._replace(name=name, feedback=jnp.dtype(dtype), keep=float(keep))


def rotated(quantizer: Quantizer) -> Quantizer:
    """Codes of rows after a random rotation, which the owner undoes: good codes of one bit.

    One bit and a scale are a poor code for a row with a few large values, as gradients of embeddings
    are. All workers rotate their rows of 128 alike, in each step by another rotation; the owner averages
    what arrives and rotates the mean back. It costs no bits, and products of a row with a matrix of 128 x
    128: two at a worker, one at an owner.

    Args:
      quantizer: ``midrise(p)``; of one bit it gains most.

    Returns:
      The ``Quantizer``, for momentum at the owner, where it goes inside of ``error_feedback``.

    Raises:
      ValueError: if the quantizer's values cannot be decoded, travel as they are, or are rotated or fed
        back already.

    Example:
      >>> import lioncub_jax as lc
      >>> one = lc.quantize.error_feedback(lc.quantize.rotated(lc.quantize.midrise(1)))
      >>> tx = lc.owner_lion(1e-4, workers="data", quantizer=one)

    Source: Vargaftik et al., DRIVE (arXiv 2105.08339), for means of codes of one bit; a rotation of a row
    and not of a whole tensor, error feedback and Lion at the owner are ours.
    """
    if not quantizer.has_steps or quantizer.rotates or quantizer.feedback:
        raise ValueError(
            f"rotated({quantizer.name}): only codes with steps can be rotated back, once, and feedback "
            "goes around it; give midrise(p), as in error_feedback(rotated(midrise(1)))"
        )

    def encode(x: jax.Array, context: EncodeContext) -> Message:
        # After the rotation the padding is not zero any more, so all 128 elements count.
        return quantizer.encode(rotation.rotated(x, context.step), context._replace(counts=None))

    return quantizer._replace(name=f"rotated({quantizer.name})", encode=encode, rotates=True)


def rotated_sign(dtype: Any = jnp.bfloat16) -> Quantizer:
    """One bit for momentum at the owner, where there are many workers: 2.13 bits up and down together.

    Signs of rotated rows, of whose error 0.7 comes back: ``error_feedback(rotated(midrise(1)), keep=0.7)``.

    Args:
      dtype: in which the error is kept.

    Raises:
      ValueError: if the dtype is not floating.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.owner_lion(1e-4, workers="data", quantizer=lc.quantize.rotated_sign())

    Source: this library; docs/reports/convergence.md has what it loses.
    """
    return error_feedback(rotated(midrise(1)), dtype, keep=0.7)


def saturated(x: jax.Array, dtype: Any) -> jax.Array:
    """A cast that keeps finite values finite: those that the dtype cannot hold become its largest."""
    most = float(jnp.finfo(dtype).max)
    if most < float(jnp.finfo(x.dtype).max):
        x = jnp.clip(x, -most, most)
    return x.astype(dtype)


def to_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds magnitudes to bfloat16 and keeps them finite, as float32."""
    # A plain cast there and back is "excess precision" that the compiler may remove.
    near = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return jnp.minimum(near, LARGEST_BFLOAT16)


def check_bits(name: str, p: int, least: int) -> None:
    """Raises ``ValueError`` for anything but a number of bits that codes have."""
    said = f"a code has {least} to 8 bits; give an int in that range"
    check_number(f"{name}({p!r})", p, lambda p: least <= p <= 8, said, int)


def midrise_codes(x: jax.Array, positive: jax.Array, step: jax.Array, p: int) -> jax.Array:
    """``uint32[rows, 128]`` of ``p`` bits, by the step of each row; ``positive``: also of zeros.

    Magnitude and side apart, so that -x gets the mirrored code of x.
    """
    if p == 1:
        return positive.astype(jnp.uint32)
    half = 2 ** (p - 1)
    magnitude = jnp.minimum(jnp.abs(_in_units(x, step)), half - 1).astype(jnp.uint32)
    return jnp.where(positive, half + magnitude, half - 1 - magnitude)


def row_scale(x: jax.Array, counts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The mean magnitude of each row (the largest, if the sum overflows), and whether all is finite."""
    magnitude = jnp.abs(x)
    # By bits, because the largest of numbers and a NaN may be a number.
    words = magnitude.view(jnp.uint32)
    total, largest = xla.reduced([operator.add, jnp.maximum], [magnitude, words], 1)
    most = largest.view(jnp.float32)
    count = ROW if counts is None else jnp.maximum(counts, 1).astype(jnp.float32)
    mean = jnp.where(jnp.isfinite(total), total / count, most)
    return mean, jnp.isfinite(most)


# --- Helpers


def _name(make: str, p: int, rounding: Rounding | None) -> str:
    return f"{make}({p}, stochastic)" if rounding else f"{make}({p})"


def _packed(codes: jax.Array, p: int, context: EncodeContext, zeros: bool) -> list[jax.Array]:
    """Codes ``[rows, 128]`` of a piece to planes ``uint32[4 rows]``, by the chunks they travel in."""
    cut, sides = context.bucket.by_chunk(codes), None
    if zeros:
        words = codes.size // BLOCK
        sides = bits.zero_side(context.first_word, words, context.zero_signs).reshape(len(cut), -1)
    return [plane.reshape(-1) for plane in bits.pack(cut, p, sides)]


def _signs(x: jax.Array, context: EncodeContext) -> Message:
    fields = (~jnp.isfinite(x)).astype(jnp.uint32) | ((x > 0).astype(jnp.uint32) << 1)
    fields |= (x != 0).astype(jnp.uint32) << 2
    strange, positive, marks = _packed(fields, 3, context, zeros=True)
    rows = x.shape[0] if context.bucket.large else context.bucket.chunk
    voted = bits.any_in_rows(marks.reshape(-1, rows * bits.WORDS_PER_ROW), rows)
    return Message([positive], voted.reshape(-1), None, jnp.all(strange == 0))


def _midtread(codes: jax.Array, x: jax.Array, p: int, context: EncodeContext) -> Message:
    fields = codes | ((~jnp.isfinite(x)).astype(jnp.uint32) << p)
    *planes, strange = _packed(fields, p + 1, context, zeros=False)
    return Message(planes, None, None, jnp.all(strange == 0))


def _leaf_sums(x: jax.Array, piece: Piece) -> jax.Array:
    """Sums of magnitudes of each leaf, plain and times 2**-64, which does not overflow."""
    magnitude = jnp.abs(x)
    rows = jnp.stack(xla.reduced([operator.add] * 2, [magnitude, magnitude * 2.0**-64], 1), -1)
    found = []
    for s in piece.segments:
        first = s.first_row - piece.first_row
        found.append(jnp.sum(rows[first : first + s.rows], axis=0))
    return jnp.stack(found)


def _leaf_scale(context: EncodeContext) -> jax.Array:
    """``float32[rows]``: for each row the mean magnitude of its leaf, all shards together."""
    assert context.total is not None
    sizes = np.array([float(s.size) * context.shards for s in context.piece.segments], np.float32)
    low, high = context.total[:, 0] / sizes, context.total[:, 1] / sizes
    means = jnp.where(jnp.isfinite(low), low, high * 2.0**64)
    by_row = [jnp.full(s.rows, means[i]) for i, s in enumerate(context.piece.segments)]
    return jnp.pad(jnp.concatenate(by_row), (0, context.piece.idle))


def _in_units(x: jax.Array, unit: jax.Array) -> jax.Array:
    """``x / unit`` for each row, and 0 where the unit is 0."""
    # XLA stores the result of a division and reuses it for the row; a cheaper operation it would repeat
    # for each element. The inverse of 2**126 is the last normal number.
    unit = unit[:, None]
    is_unit = (unit > 0).astype(jnp.float32)
    return x * (is_unit / jnp.where(unit > 0, jnp.minimum(unit, 2.0**126), 1))


def _up_to_bfloat16(x: jax.Array) -> jax.Array:
    """The next bfloat16 that is no smaller, of numbers that are not negative; the largest at most."""
    up = (x.view(jnp.uint32) + 0xFFFF) & jnp.uint32(0xFFFF0000)
    return jnp.minimum(up.view(jnp.float32), LARGEST_BFLOAT16)
