"""Values to codes: what a worker says about its gradient, and in how many bits.

A code ``q`` in ``0..top`` stands for the integer ``2q - top`` in units of half a step. Two families:

* *mid-rise*, ``top`` odd: every code leans to one side, ``p`` bits have ``2**p`` of them, and ``p = 1``
  is the sign. There is no code for zero, so a worker whose 64 elements of a row are all exactly zero
  does not vote on that row at all, and a single zero in a row that does vote takes a side by a fair
  bit (``bits.coin``), half of the workers the one and half the other, so that zeros cancel in pairs.
* *mid-tread*, ``top`` even: the middle code is zero and means it. The paper's integer codes and the
  exact ternary codes are of this kind.

A step is one for a leaf, or one for a block of 64 or 128 elements. In a vote the step stays at home:
only the integers are counted. Where the owner needs values it travels beside the codes, as bfloat16.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lioncub_jax import bits
from lioncub_jax.ballots import Ballot, Place, Quantizer, fill_padding
from lioncub_jax.bits import ROW, WORD

# The uniform steps that are best for a Gaussian, in units of its standard deviation, by bits (J. Max,
# "Quantizing for minimum distortion", 1960). One bit is in units of the mean magnitude, where a step of
# 2 is the least-squares fit of +-step/2 to any values, whatever their distribution.
STEP = {1: 2.0, 2: 0.9957, 3: 0.586, 4: 0.335, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308}


class Rounding(NamedTuple):
    """Nearest level, or the two neighbours at random so that the mean is right.

    Attributes:
      name: for people.
      noise: ``(shape, Place) -> float32[shape]``, what is added before rounding down.
    """

    name: str
    noise: Callable[[tuple[int, ...], Place], jax.Array] | None


def nearest() -> Rounding:
    """Rounds to the nearest level; the same values always give the same codes.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.midrise(2, rounding=lc.quantize.nearest()).name
      'midrise(2)'
    """
    return Rounding("nearest", None)


def stochastic(seed: int = 0) -> Rounding:
    """Rounds up or down at random, right on average where nothing is clipped.

    The random key is derived from the seed, the step, the worker and the leaf, so workers err
    independently of each other and a run repeats exactly.

    Args:
      seed: of the key, an int.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.midrise(4, block=64, rounding=lc.quantize.stochastic(7)).name
      'midrise(4, block=64, stochastic)'
    """

    def noise(shape: tuple[int, ...], place: Place) -> jax.Array:
        key = jax.random.key(seed)
        sharded = (place.shard,) if place.shards > 1 else ()
        for part in (place.step, place.worker, place.leaf, *sharded):
            key = jax.random.fold_in(key, part)
        return jax.random.uniform(key, shape)

    return Rounding("stochastic", noise)


def sign() -> Quantizer:
    """One bit: the sign. Distributed Lion (arXiv 2404.00438) and 1-bit Lion Cub (2411.16462).

    Returns:
      A mid-rise ``Quantizer`` of one bit without a step.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.sign().bits
      1
    """
    return midrise(1)._replace(name="sign")


def midrise(p: int, *, block: int | None = None, rounding: Rounding | None = None) -> Quantizer:
    """``p`` bits: ``2**p`` evenly spaced levels, none of them zero.

    ``q = floor(x / step) + 2**(p-1)``, clipped, with the step that is best for a Gaussian of the
    measured scale: the root mean square, of the leaf or of each block (for one bit the mean magnitude).

    Args:
      p: bits per element, 1 to 8.
      block: 64 or 128 elements share a step; None: one step for the leaf, which never travels and so
        serves votes only.
      rounding: ``nearest()`` (default) or ``stochastic(seed)``.

    Returns:
      A ``Quantizer``.

    Raises:
      ValueError: if ``p`` or ``block`` is out of range.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.midrise(3, block=128).name
      'midrise(3, block=128)'
    """
    _check_bits("midrise", p, 1)
    if block is not None and (not isinstance(block, int) or block not in (64, 128)):
        raise ValueError(
            f"midrise(block={block!r}): a step is shared by 64 or 128 elements, or by a leaf (None)"
        )
    rounding = rounding or nearest()
    scaleless = block is None and p == 1 and rounding.noise is None

    def encode(x: jax.Array, place: Place) -> Ballot:
        steps = None
        if scaleless:
            scaled = x
        else:
            step = _round_to_bfloat16(STEP[p] * _scale(x, place, block, p == 1))
            steps = step if block else None
            scaled = x * _inverse_by_row(step, x.shape[0])
        codes = _midrise_codes(x, scaled, p, rounding, place)
        innermost = _innermost(p, x.size // WORD, place)
        packed = bits.pack(codes, p, x != 0, ~jnp.isfinite(x), innermost)
        planes = fill_padding(packed.planes, place.size, 2**p - 1, place.filled)
        flagged = (
            packed.flagged if steps is None else packed.flagged | ~jnp.all(jnp.isfinite(steps))
        )
        voted = jnp.any(packed.marks.reshape(-1, 2) != 0, axis=-1)
        return Ballot(planes, voted, None if steps is None else steps.astype(jnp.bfloat16), flagged)

    name = f"midrise({p}{f', block={block}' if block else ''}"
    name += f", {rounding.name})" if rounding.noise else ")"
    measure = None if block or scaleless else partial(_sum, magnitude=p == 1)
    return Quantizer(name, p, lambda workers: 2**p - 1, False, block, None, encode, measure)


def integer(p: int = 8, *, rounding: Rounding | None = None) -> Quantizer:
    """Lion Cub's ``p``-bit codes, scaled so that their sum over the workers fits in ``p`` bits.

    ``q = clip(round(x / mean|x| * s / 2), -s, s)`` with ``s = floor((2**(p-1) - 1) / workers)``; the
    mean is the leaf's own and never travels. Precision shrinks as one over the workers.

    Args:
      p: bits of the sum, 2 to 8.
      rounding: ``nearest()`` (the paper's, default) or ``stochastic(seed)``.

    Returns:
      A mid-tread ``Quantizer`` for wires that sum; ties and zeros stay zero.

    Raises:
      ValueError: if ``p`` is out of range; when traced with so many workers that ``s`` would be 0.

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce", L1 scale.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.integer(8).top(4)  # s = 127 // 4 = 31, codes -31..31
      62
    """
    _check_bits("integer", p, 2)
    rounding = rounding or nearest()

    def top(workers: int) -> int:
        s = (2 ** (p - 1) - 1) // workers
        if s == 0:
            raise ValueError(
                f"integer({p}): the sum of {workers} workers' codes does not fit in {p} bits; it holds "
                f"at most {2 ** (p - 1) - 1} workers. Use more bits, or midrise({p}), whose precision "
                "does not depend on the number of workers"
            )
        return 2 * s

    def encode(x: jax.Array, place: Place) -> Ballot:
        s = top(place.workers) // 2
        scale = _scale(x, place, None, True)
        t = x * (_inverse_by_row(scale, x.shape[0]) * (s / 2))
        if rounding.noise:
            t = jnp.floor(t + rounding.noise(x.shape, place))
        codes = (jnp.clip(jnp.round(t), -s, s) + s).astype(jnp.uint32)
        return _midtread_ballot(codes, x, (2 * s).bit_length(), 2 * s, place)

    name = f"integer({p}{', stochastic' if rounding.noise else ''})"
    return Quantizer(name, p, top, True, None, None, encode, partial(_sum, magnitude=True))


def ternary(*, rounding: Rounding | None = None) -> Quantizer:
    """The exact sign: -1, 0 or +1 in two bits, so that a zero is a zero vote and a tie stays a tie.

    Args:
      rounding: ``nearest()`` (default): the sign. ``stochastic(seed)``: the sign with probability
        ``|x|``, else 0, so that values in [-1, 1] are right on average; others are clipped.

    Returns:
      A mid-tread ``Quantizer``.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.ternary().top(1000)
      2
    """
    rounding = rounding or nearest()

    def encode(x: jax.Array, place: Place) -> Ballot:
        if rounding.noise:
            level = jnp.clip(jnp.floor(x + rounding.noise(x.shape, place)), -1, 1)
            codes = (level + 1).astype(jnp.uint32)
        else:
            codes = jnp.where(x > 0, 2, jnp.where(x < 0, 0, 1)).astype(jnp.uint32)
        return _midtread_ballot(codes, x, 2, 2, place)

    name = f"ternary({rounding.name})" if rounding.noise else "ternary"
    return Quantizer(name, 2, lambda workers: 2, True, None, None, encode)


def levels(
    p: int, *, block: int = 128, norm: str = "max", rounding: Rounding | None = None
) -> Quantizer:
    """QSGD's ``p``-bit codes: a sign and ``s = 2**(p-1) - 1`` levels of the norm of each block.

    ``q = clip(round(x / step), -s, s)`` with ``step = norm / s``, rounded up to a bfloat16, which
    travels: so nothing is clipped, and with ``stochastic`` rounding codes are right on average. Steps
    below 2**-120 are 0.

    Args:
      p: bits per element, 2 to 8.
      block: 64 or 128 elements share a norm.
      norm: ``"max"``, the largest magnitude, or ``"l2"``, the root of the sum of squares.
      rounding: ``nearest()`` (default) or ``stochastic(seed)`` (the paper's).

    Returns:
      A mid-tread ``Quantizer`` whose steps travel, for momentum at the owner.

    Raises:
      ValueError: if an argument is out of range.

    Source: Alistarh et al., "QSGD" (arXiv 1610.02132); bfloat16 norms of small blocks are ours.

    Example:
      >>> from lioncub_jax import quantize
      >>> quantize.levels(4).top(1000)  # codes -7..7
      14
    """
    _check_bits("levels", p, 2)
    if not isinstance(block, int) or block not in (64, 128):
        raise ValueError(f"levels(block={block!r}): a norm is shared by 64 or 128 elements")
    if norm not in _NORMS:
        raise ValueError(f"levels(norm={norm!r}): give one of {', '.join(map(repr, _NORMS))}")
    rounding = rounding or nearest()
    s, norm_of = 2 ** (p - 1) - 1, _NORMS[norm]

    def encode(x: jax.Array, place: Place) -> Ballot:
        step = _round_up_to_bfloat16(norm_of(x, block) / s)
        step = jnp.where(step < _LEAST_STEP, 0, step)
        t = x * _inverse_by_row(step, x.shape[0])
        if rounding.noise:
            t = jnp.floor(t + rounding.noise(x.shape, place))
        codes = (jnp.clip(jnp.round(t), -s, s) + s).astype(jnp.uint32)
        ballot = _midtread_ballot(codes, x, p, 2 * s, place)
        flagged = ballot.flagged | ~jnp.all(jnp.isfinite(step))
        return ballot._replace(steps=step.astype(jnp.bfloat16), flagged=flagged)

    how = f", {rounding.name}" if rounding.noise else ""
    name = f"levels({p}, {norm} of {block}{how})"
    return Quantizer(name, p, lambda workers: 2 * s, True, block, None, encode)


def dense(dtype: Any = jnp.float32) -> Quantizer:
    """No quantisation: the values themselves, in float32 or bfloat16. The baseline.

    Args:
      dtype: ``jnp.float32`` or ``jnp.bfloat16``.

    Raises:
      ValueError: for any other dtype.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.dense().bits
      32
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dense({dtype.name}): values travel as float32 or bfloat16")

    def encode(x: jax.Array, place: Place) -> Ballot:
        payload = _float_words(x.reshape(-1), dtype)[None]
        voted = jnp.any(x != 0, axis=-1)
        return Ballot(payload, voted, None, ~jnp.all(jnp.isfinite(x)))

    bits_ = 8 * dtype.itemsize
    return Quantizer(f"dense({dtype.name})", bits_, lambda workers: 0, False, None, dtype, encode)


def error_feedback(quantizer: Quantizer, dtype: Any = jnp.bfloat16) -> Quantizer:
    """Adds what the last code missed to the next value, so that nothing is lost, only late.

    ``x = g + e``, send ``encode(x)``, keep ``e = x - decoded``. The error stays with the worker.

    Args:
      quantizer: one whose steps travel, such as ``midrise(3, block=128)``.
      dtype: in which the error is kept; one array of this dtype per worker and leaf.

    Returns:
      The ``Quantizer`` with feedback.

    Raises:
      ValueError: if the quantiser's values cannot be decoded, or the dtype is not floating.

    Source: Seide et al. 2014; Karimireddy et al., "Error feedback fixes SignSGD" (arXiv 1901.09847).

    Example:
      >>> import lioncub_jax as lc
      >>> lc.quantize.error_feedback(lc.quantize.midrise(3, block=128)).name
      'midrise(3, block=128) + error feedback'
    """
    if quantizer.block is None:
        raise ValueError(
            f"error_feedback({quantizer.name}): the error is measured against what the owner decodes, "
            "so steps must travel; use midrise(p, block=64) or midrise(p, block=128)"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"error_feedback(dtype={jnp.dtype(dtype).name}): give a floating dtype")
    return quantizer._replace(name=f"{quantizer.name} + error feedback", feedback=jnp.dtype(dtype))


def _check_bits(who: str, p: int, least: int) -> None:
    if not isinstance(p, int) or isinstance(p, bool) or not least <= p <= 8:
        raise ValueError(f"{who}({p!r}): a code has {least} to 8 bits; give an int in that range")


def _midrise_codes(
    x: jax.Array, scaled: jax.Array, p: int, rounding: Rounding, place: Place
) -> jax.Array:
    """``uint32[rows, 64]``. Magnitude and side apart, so that -x gets the mirrored code of x."""
    half = 2 ** (p - 1)
    if rounding.noise:
        level = jnp.floor(scaled + (half - 0.5) + rounding.noise(x.shape, place))
        return jnp.clip(level, 0, 2 * half - 1).astype(jnp.uint32)
    if p == 1:
        return (x > 0).astype(jnp.uint32)
    magnitude = jnp.minimum(jnp.abs(scaled), half - 1).astype(jnp.uint32)
    return jnp.where(x > 0, half + magnitude, half - 1 - magnitude)


def _innermost(p: int, words: int, place: Place) -> list[jax.Array]:
    """The codes of exact zeros: next to zero, on opposite sides on even and odd workers."""
    side = bits.coin(place.first_word, words, place.step) ^ bits.as_mask(place.worker & 1)
    return [~side] * (p - 1) + [side]


def _midtread_ballot(codes: jax.Array, x: jax.Array, p: int, top: int, place: Place) -> Ballot:
    packed = bits.pack(codes, p, jnp.ones_like(x, bool), ~jnp.isfinite(x), [0] * p)
    planes = fill_padding(packed.planes, place.size, top, place.filled)
    return Ballot(planes, jnp.ones(x.shape[:1], bool), None, packed.flagged)


def _scale(x: jax.Array, place: Place, block: int | None, magnitude: bool) -> jax.Array:
    """Mean magnitude or root mean square, ``float32[blocks]`` or ``float32[1]`` for the leaf."""
    if block is None:
        assert place.total is not None
        mean = place.total[None] / (place.size * place.shards)
    else:
        sums = _sum_by_block(jnp.abs(x) if magnitude else x * x, block)
        mean = sums / jnp.maximum(_elements(place, block, sums.shape[0]), 1).astype(jnp.float32)
    return mean if magnitude else jnp.sqrt(mean)


def _elements(place: Place, block: int, blocks: int) -> jax.Array:
    """``int32[blocks]``: how many elements of each block are no padding."""
    if place.filled is not None:
        return jnp.sum(place.filled.reshape(blocks, block // ROW), axis=1)
    left = place.size - block * jnp.arange(blocks, dtype=jnp.int32)
    return jnp.clip(left, 0, block)


def _sum(x: jax.Array, magnitude: bool) -> jax.Array:
    return jnp.sum(_sum_by_block(jnp.abs(x) if magnitude else x * x, ROW))


def _sum_by_block(x: jax.Array, span: int) -> jax.Array:
    """``float32[rows, 64]`` to ``float32[blocks]``; four running sums hide the latency of adding."""
    quarters = x.reshape(-1, 4, span // 4)
    sums = lax.reduce(
        [quarters[:, i] for i in range(4)],
        [jnp.float32(0)] * 4,
        lambda a, b: [u + v for u, v in zip(a, b, strict=True)],
        (1,),
    )
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


def _largest(x: jax.Array, block: int) -> jax.Array:
    return jnp.max(jnp.abs(x.reshape(-1, block)), axis=1)


def _length(x: jax.Array, block: int) -> jax.Array:
    return jnp.sqrt(_sum_by_block(x * x, block))


_NORMS = {"max": _largest, "l2": _length}
_LEAST_STEP = 2.0**-120  # of smaller ones the inverse is no float32


def _round_up_to_bfloat16(x: jax.Array) -> jax.Array:
    """The next bfloat16 that is no smaller, of numbers that are not negative."""
    words = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type((words + 0xFFFF) & jnp.uint32(0xFFFF0000), jnp.float32)


def _round_to_bfloat16(x: jax.Array) -> jax.Array:
    # A plain cast there and back is "excess precision" that the compiler may remove.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _inverse_by_row(scale: jax.Array, rows: int) -> jax.Array:
    """One over the scale, ``float32[rows, 1]``, and 0 for a scale of 0.

    As an array of its own, or the compiler divides again for every element, and (for a single scale)
    writes out all of ``x`` instead of computing it a second time from what is in the cache.
    """
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    by_row = jnp.repeat(inverse, rows // scale.shape[0])
    return lax.optimization_barrier(by_row)[:, None]


def _float_words(x: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.dtype(jnp.float32):
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x.astype(dtype).reshape(-1, 2), jnp.uint32)
