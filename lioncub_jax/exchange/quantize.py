"""Quantizers: codecs from values to codes, and from codes to values.

A *code* ``q`` in ``0..max_code`` stands for the integer ``2q - max_code`` in units of ``scale / 2``:

* *mid-rise*, ``max_code`` odd: no code is zero, ``p`` bits have ``2**p`` codes, and ``p = 1`` is the sign.
  A worker does not vote on a row of 128 elements that are all exactly zero, and a single zero in another
  row gets a random sign (``bits.random_signs``), so that zeros on different workers cancel in pairs.
* *mid-tread*, ``max_code`` even: the middle code is zero. The paper's integer codes and the exact ternary
  codes are of this kind.

A row of 128 elements has one scale, from its mean magnitude (the papers' L1 scale; no square is taken, so
nothing over- or underflows). Votes are counted, and their scales stay at the worker. Values are decoded at
the owner of a chunk, and their scales travel as bfloat16.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from lioncub_jax.exchange import bits, layout, xla
from lioncub_jax.exchange.bits import ROW, WORDS_PER_ROW, Halves
from lioncub_jax.exchange.checks import check_floating, check_number
from lioncub_jax.exchange.matrices import Deal
from lioncub_jax.exchange.wires import LARGEST_BFLOAT16, Coded, Format

__all__ = [
    "Codec",
    "Coded",
    "Context",
    "Quantizer",
    "dense",
    "error_feedback",
    "integer",
    "midrise",
    "sign",
    "ternary",
]

# Uniform quantization steps that are best for a Gaussian, by bits (J. Max, "Quantizing for minimum
# distortion", 1960), in units of the mean magnitude, which is sqrt(2/pi) of its deviation. For one bit a
# step of 2 is the least-squares fit of +-step/2 to any values, whatever their distribution.
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


# Numbers of each row, which the `rows` of a codec gives, and its own functions alone read.
ByRow: TypeAlias = Any


class Codec(NamedTuple):
    """A map from values to codes: of votes, which are counted, or of values, which are decoded.

    Attributes:
      max_code: ``num_workers -> largest code``; raises ``ValueError`` if the sum over so many workers does
        not fit.
      encode: ``(float32[rows, 128], ByRow, Context) -> uint32[rows, 128]``, of a piece: codes, and above
        them one bit, which for mid-rise codes is 1 where a value is not zero (a zero has the lower one of
        the two codes in the middle), and for others where it is not finite. Of dense values their words.
      finish: ``(Halves, ByRow, Context) -> Coded``, of a whole bucket, whose codes are half packed: what
        takes a pass over words or numbers of rows takes little time for all pieces at once, and a
        compiler's time for each of them.
      measure: ``float32[rows, 128] -> arrays [rows]``, of a piece.
      rows: ``(arrays [rows], Context) -> ByRow``, of a whole bucket, of what `measure` gives: a tree of
        arrays ``[rows]`` by which this codec encodes, and which is cut for each piece; () for none.
      decode: ``(codes, scales) -> float32[..., rows, 128]`` of codes, or dense values, of that shape, and
        scales ``[..., rows]``. None for votes.
      midtread: the middle code is zero.
      dense: dtype of values that travel as they are, without codes; else None.
      uses_leaf_mean: ``rows`` needs the mean magnitude of whole leaves.
      error_dtype: dtype of the error that a worker keeps (error feedback), or None.
    """

    max_code: Callable[[int], int]
    encode: Callable[[jax.Array, ByRow, "Context"], jax.Array]
    finish: Callable[[Any, ByRow, "Context"], Coded]
    measure: Callable[[jax.Array], Sequence[jax.Array]] = lambda x: ()
    rows: Callable[[Sequence[jax.Array], "Context"], ByRow] = lambda measured, context: ()
    decode: Callable[..., jax.Array] | None = None
    midtread: bool = False
    dense: np.dtype | None = None
    uses_leaf_mean: bool = False
    error_dtype: np.dtype | None = None

    @property
    def marks_rows(self) -> bool:
        """True where a bit for each row marks those that are voted on."""
        return self.decode is None and not self.midtread

    @property
    def counts_pairs(self) -> bool:
        """True for votes of one bit, of which replies have the pairs that differ."""
        return self.marks_rows and self.max_code(1) == 1

    @property
    def sends_scales(self) -> bool:
        """True where the scale of each row travels."""
        return self.decode is not None and self.dense is None

    def unpack_each(self, planes: Sequence[jax.Array], num_rows: int) -> Callable[[Any], jax.Array]:
        """`bits.unpack_each`; of dense values, which travel as they are, these."""
        if self.dense is None:
            return bits.unpack_each(planes)
        words = planes[0].reshape(*planes[0].shape[:-1], num_rows, -1)
        return words.view(self.dense).__getitem__

    def format(self, num_workers: int, num_rows: int) -> Format:
        """The format of messages about a chunk of so many rows."""
        max_code, row_words = self.max_code(num_workers), 0
        if self.marks_rows:
            row_words = bits.row_words(num_rows)
        if self.sends_scales:
            row_words = num_rows // 2
        words_per_row = WORDS_PER_ROW if self.dense is None else ROW * self.dense.itemsize // 4
        return Format(
            num_workers=num_workers,
            num_rows=num_rows,
            max_code=max_code,
            midtread=self.midtread,
            dense=self.dense,
            marks_rows=self.marks_rows,
            sends_scales=self.sends_scales,
            counts_pairs=self.counts_pairs,
            planes=max(max_code.bit_length(), 1),
            plane_words=num_rows * words_per_row,
            row_words=row_words,
        )


class Context(NamedTuple):
    """Some rows, besides their values: of a bucket that a worker encodes, or of what it decides on.

    Codecs of messages alone have ``zero_signs`` and ``leaf_mean``, and decisions alone a ``deal``.

    Attributes:
      codec: of the codes.
      format: of messages about a chunk: W, the largest code.
      num_chunks: equal runs of rows, each packed by itself: of a bucket as many as it has chunks, or 1; of
        a decision 1 if each worker owns a chunk, W if every worker decides on all.
      row_sizes: ``int32[rows]``, elements of each row that are no padding; None where all are, or where
        padding cannot count.
      first_word: ``uint32[]``, the word of all buckets where the rows begin.
      worker: ``int32[]``, index of the worker; for coins, with ``num_steps`` and ``first_word``.
      num_steps: ``int32[]``, steps taken before; the same on every worker.
      zero_signs: ``uint32[words]``, a random sign of each element of the bucket, for those that are 0.
      leaf_mean: ``float32[rows]``, mean magnitude of the leaf of each row, if the codec uses it.
      deal: of the leaves, if whole matrices were dealt.
    """

    codec: Codec
    format: Format
    num_chunks: int
    row_sizes: jax.Array | None
    first_word: jax.Array
    worker: jax.Array
    num_steps: jax.Array
    zero_signs: jax.Array | None = None
    leaf_mean: jax.Array | None = None
    deal: Deal | None = None

    def in_chunks(self, x: Any) -> jax.Array:
        """``[chunks rows, ...]`` as ``[chunks, rows, ...]``."""
        return x.reshape(self.num_chunks, -1, *x.shape[1:])

    def real(self) -> jax.Array:
        """``bool[chunks, rows, 128]``: elements that are no padding, where there are row sizes."""
        assert self.row_sizes is not None
        return self.in_chunks(layout.real_elements(self.row_sizes))

    def tie_bits(self, words: int) -> jax.Array:
        """``uint32[chunks, words]``, fair bits for ties, the same on every worker: see `bits.tie_bits`."""
        drawn = bits.tie_bits(self.first_word, self.num_chunks * words, self.num_steps)
        return self.in_chunks(drawn)


class Quantizer(NamedTuple):
    """A quantizer; built by the functions of this module.

    Attributes:
      name: for errors and reports.
      vote: its codec for votes, or None where it has none.
      value: its codec for values that an owner decodes, or None where it has none.
    """

    name: str
    vote: Codec | None = None
    value: Codec | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def sign() -> Quantizer:
    """One bit: the sign. Distributed Lion (arXiv 2404.00438) and 1-bit Lion Cub (2411.16462).

    ``q = 1 if x > 0 else 0``; zeros get a random sign, see ``bits.random_signs``.

    Returns:
      A mid-rise ``Quantizer`` of one bit.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.sign().vote.max_code(1000)
      1
    """
    return midrise(1)._replace(name="sign")


def midrise(p: int) -> Quantizer:
    """``p`` bits: ``2**p`` evenly spaced levels, none of them zero.

    ``q = 2**(p-1) + floor(x / scale)`` of a positive x, at most ``2**p - 1``; -x has the mirrored code,
    ``2**p - 1 - q``. The value of a code is ``(2q - (2**p - 1)) scale / 2``, with ``scale =
    GAUSSIAN_STEP[p] mean|x|`` of the row, best for a Gaussian.

    Args:
      p: bits per element, 1 to 8.

    Returns:
      A ``Quantizer``, for votes (the scale stays at the worker) and for momentum at the owner (it travels:
      1/8 bit per element).

    Raises:
      ValueError: if ``p`` is out of range.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.midrise(3).vote.max_code(1000)
      7
    """
    check_bits("midrise", p, 1)
    max_code = 2**p - 1

    def rows(measured: Sequence[jax.Array], context: Context) -> ByRow:
        mean, finite = mean_of_sums(measured, context.row_sizes)
        scale, inverse = _with_inverse(to_bfloat16(GAUSSIAN_STEP[p] * mean))
        return scale, inverse, mean > 0, finite

    def encode(x: jax.Array, by_row: ByRow, context: Context) -> jax.Array:
        _, inverse, *_ = by_row
        q = midrise_codes(x, x > 0, inverse, p)
        return q | ((x != 0).astype(jnp.uint32) << p)

    def finish(halves: Halves, by_row: ByRow, context: Context) -> Coded:
        assert context.zero_signs is not None
        scale, _, is_voted, finite = by_row
        halves = bits.half_with_zero_signs(halves, p, context.in_chunks(context.zero_signs))
        voted = bits.pack_rows(context.in_chunks(is_voted)).reshape(-1)
        return Coded(_planes(halves, p), scale, voted, jnp.all(finite), halves)

    def decode(codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        assert scales is not None
        return dequantized(codes, max_code, scales.astype(jnp.float32) / 2)

    values = Codec(lambda num_workers: max_code, encode, finish, sums_of_rows, rows, decode)
    votes = values._replace(decode=None)
    if p == 1:  # needs no scale
        votes = Codec(values.max_code, _signs, _voted_signs)
    return Quantizer(f"midrise({p})", votes, values)


def integer(p: int = 8) -> Quantizer:
    """Lion Cub's ``p``-bit codes, scaled so that their sum over the workers fits in ``p`` bits.

    Signed codes ``q - s = clip(round(x / mean|x| * s / 2), -s, s)`` with ``s = floor((2**(p-1) -
    1) / W)``; the mean is the leaf's own and never travels. Twice the mean is the largest code. Precision
    shrinks as one over the workers.

    Args:
      p: bits of the sum, 2 to 8.

    Returns:
      A mid-tread ``Quantizer``, for wires that sum too; ties and zeros stay zero.

    Raises:
      ValueError: if ``p`` is out of range; when traced with so many workers that ``s`` would be 0.

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce", L1 scale.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.integer(8).vote.max_code(4)  # s = 127 // 4 = 31, codes -31..31
      62
    """
    check_bits("integer", p, 2)

    def max_code(num_workers: int) -> int:
        s = (2 ** (p - 1) - 1) // num_workers
        if s == 0:
            raise ValueError(
                f"integer({p}): the sum of {num_workers} workers' codes does not fit in {p} bits; it holds "
                f"at most {2 ** (p - 1) - 1} workers. Use more bits, or midrise({p}), whose precision "
                "does not depend on the number of workers"
            )
        return 2 * s

    def rows(measured: Sequence[jax.Array], context: Context) -> ByRow:
        assert context.leaf_mean is not None
        return _with_inverse(context.leaf_mean)

    def encode(x: jax.Array, by_row: ByRow, context: Context) -> jax.Array:
        _, inverse = by_row
        s = max_code(context.format.num_workers) // 2
        level = jnp.round(x * inverse[:, None] * (s / 2))
        q = (jnp.clip(level, -s, s) + s).astype(jnp.uint32)
        return _with_flaws(q, x, (2 * s).bit_length())

    codec = Codec(max_code, encode, _finite, rows=rows, midtread=True, uses_leaf_mean=True)
    return Quantizer(f"integer({p})", codec)


def ternary() -> Quantizer:
    """The exact sign: -1, 0 or +1 in two bits, so that a zero is a zero vote and a tie stays a tie.

    Returns:
      A mid-tread ``Quantizer``.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.ternary().vote.max_code(1000)
      2
    """

    def encode(x: jax.Array, by_row: ByRow, context: Context) -> jax.Array:
        q = jnp.where(x > 0, 2, jnp.where(x < 0, 0, 1)).astype(jnp.uint32)
        return _with_flaws(q, x, 2)

    return Quantizer("ternary", Codec(lambda num_workers: 2, encode, _finite, midtread=True))


def dense(dtype: DTypeLike = jnp.float32) -> Quantizer:
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

    def measure(x: jax.Array) -> Sequence[jax.Array]:
        return [jnp.all(jnp.isfinite(x), axis=1)]

    def encode(x: jax.Array, by_row: ByRow, context: Context) -> jax.Array:
        return bits.saturated(x, dtype).view(jnp.uint32).reshape(-1)

    def finish(words: jax.Array, by_row: ByRow, context: Context) -> Coded:
        return Coded([words], None, None, jnp.all(by_row[0]))

    def decode(values: jax.Array, scales: jax.Array | None) -> jax.Array:
        values = values.astype(jnp.float32)
        return jnp.where(jnp.isfinite(values), values, 0)  # whatever a worker sends

    codec = Codec(
        lambda num_workers: 0, encode, finish, measure,
        rows=lambda measured, context: measured, decode=decode, dense=dtype,
    )  # fmt: skip
    return Quantizer(f"dense({dtype.name})", value=codec)


def error_feedback(quantizer: Quantizer, dtype: DTypeLike = jnp.bfloat16) -> Quantizer:
    """Adds the error of the last code to the next value, so that nothing is lost, only late.

    ``x = g + e``, send ``q = Q(x)``; then ``e = x - dequantize(q)``. The error stays with the worker; one
    that the dtype cannot hold is kept as the largest that it can.

    Args:
      quantizer: one with scales that can travel, such as ``midrise(3)``.
      dtype: in which the error is kept; one array of this dtype per worker and leaf.

    Returns:
      The ``Quantizer`` with feedback; it has no votes, which are not decoded and so have no error.

    Raises:
      ValueError: if the quantizer's values cannot be decoded, or the dtype is not floating.

    Source: Seide et al. 2014; Karimireddy et al., "Error feedback fixes SignSGD" (arXiv 1901.09847).

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.error_feedback(lc.quantize.midrise(3)).name
      'midrise(3) + error feedback'
    """
    codec = quantizer.value
    if codec is None or not codec.sends_scales:
        raise ValueError(
            f"error_feedback({quantizer.name}): the error is measured against what the owner decodes, "
            "so codes must have scales that travel; use midrise(p)"
        )
    check_floating("dtype", dtype)
    name = f"{quantizer.name} + error feedback"
    return Quantizer(name, value=codec._replace(error_dtype=jnp.dtype(dtype)))


def to_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds magnitudes to bfloat16 and keeps them finite, as float32."""
    # A plain cast there and back is "excess precision" that the compiler may remove.
    near = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return jnp.minimum(near, LARGEST_BFLOAT16)


def check_bits(name: str, p: int, least: int) -> None:
    """Raises ``ValueError`` for anything but a number of bits that codes have."""
    allowed = f"a code has {least} to 8 bits; give an int in that range"
    check_number(f"{name}({p!r})", p, lambda p: least <= p <= 8, allowed, int)


def midrise_codes(x: jax.Array, positive: jax.Array, inverse: Any, p: int) -> jax.Array:
    """``uint32[rows, 128]`` of ``p`` bits, by the inverse scale of each row; ``positive``: signs.

    Magnitude and sign are coded separately, so that -x gets the mirrored code of x.
    """
    if p == 1:
        return positive.astype(jnp.uint32)
    half = 2 ** (p - 1)
    # By int32: few CPUs convert to uint32 in one instruction.
    magnitude = jnp.minimum(jnp.abs(x * inverse[:, None]), half - 1).astype(jnp.int32)
    return jnp.where(positive, half + magnitude, half - 1 - magnitude).astype(jnp.uint32)


def dequantized(q: jax.Array, max_code: int, half: jax.Array) -> jax.Array:
    """``(2 q - max_code) scale / 2``, from half the scale of each row.

    These are exact products of short integers and bfloat16.
    """
    return odd_numbers(q, max_code).astype(jnp.float32) * half[..., None]


def odd_numbers(q: jax.Array, max_code: int) -> jax.Array:
    """``2 q - max_code`` of codes, ``int32``."""
    return 2 * q.astype(jnp.int32) - max_code


def sums_of_rows(x: jax.Array) -> Sequence[jax.Array]:
    """Of each row the sum of magnitudes, and the bits of the largest, of which a NaN has larger ones."""
    magnitude = jnp.abs(x)
    # By bits, because the largest of numbers and a NaN may be a number.
    words = magnitude.view(jnp.uint32)
    return xla.reduced([operator.add, jnp.maximum], [magnitude, words], 1)


def mean_of_sums(
    sums: Sequence[jax.Array], row_sizes: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The mean magnitude of each row (the largest, if the sum overflows), and whether all is finite."""
    total, largest = sums
    maximum = largest.view(jnp.float32)
    size = ROW if row_sizes is None else jnp.maximum(row_sizes, 1).astype(jnp.float32)
    mean = jnp.where(jnp.isfinite(total), total / size, maximum)
    return mean, jnp.isfinite(maximum)


# --- Helpers


def _signs(x: jax.Array, by_row: ByRow, context: Context) -> jax.Array:
    # Of two bits, positive and not zero, a number has no (1, 0): it stands for what is not finite.
    fields = bits.sign_fields(x)
    return jnp.where(jnp.isfinite(x), fields, 1)


def _voted_signs(halves: Halves, by_row: ByRow, context: Context) -> Coded:
    positive, marks = _planes(halves, 2)
    assert context.zero_signs is not None
    finite = jnp.all(positive & ~marks == 0)
    positive |= context.zero_signs & ~marks
    voted = bits.any_in_rows(context.in_chunks(marks))
    return Coded([positive], None, voted.reshape(-1), finite)


def _with_flaws(codes: jax.Array, x: jax.Array, p: int) -> jax.Array:
    return codes | ((~jnp.isfinite(x)).astype(jnp.uint32) << p)


def _finite(halves: Halves, by_row: ByRow, context: Context) -> Coded:
    *codes, flaws = _planes(halves, context.format.planes + 1)
    return Coded(codes, None, None, jnp.all(flaws == 0))


def _planes(halves: Halves, p: int) -> list[jax.Array]:
    """Planes ``uint32[words]``, of all chunks."""
    return [plane.reshape(-1) for plane in bits.planes_of(halves, p)]


def _with_inverse(scale: jax.Array) -> list[jax.Array]:
    """Scales and their inverses, stored: what is computed of them is not, for each element anew."""
    return [xla.materialized(x) for x in (scale, inverted(scale))]


def inverted(scale: jax.Array) -> jax.Array:
    """``1 / scale`` of each row, and 0 where the scale is 0."""
    # The inverse of 2**126 is the last normal number.
    is_positive = (scale > 0).astype(jnp.float32)
    return is_positive / jnp.where(scale > 0, jnp.minimum(scale, 2.0**126), 1)
