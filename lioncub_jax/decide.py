"""What the owner of a slice makes of the workers' messages, and how its reply is coded.

An *owner* (the server of a slice of the parameters) turns what arrived into a result: ``count()`` adds the
votes, ``momentum_at_owner(tx)`` decodes and averages them and runs an optax transform on its slice. A
*down coder* turns the result into the planes that travel back: ``majority()`` one bit, ``ternary_sum()``
the exact sign of the sum with zeros, ``average()`` and ``total()`` the planes of the sum, ``floats()``
the values, ``scaled(p)`` codes of ``p`` bits and a scale for each row.

Ties (``majority``) are broken by ``bits.coin``: fair, and the same on every worker. A row of 128 elements
on which nobody votes gets update 0.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lioncub_jax import bits, quantize, rotation
from lioncub_jax.arguments import check_floating, check_number
from lioncub_jax.bits import ROW
from lioncub_jax.quantize import Quantizer

Planes = Sequence[jax.Array]


class Slice(NamedTuple):
    """The rows that one owner decides on: ``chunks`` of so many rows.

    Attributes:
      chunks: 1 where each worker owns a chunk, all where everybody owns everything.
      rows: of a chunk.
      workers: how many workers there are.
      up: the codes that arrive.
      dtype: of the leaves.
      counts: ``int32[chunks rows]``, elements of each row that are no padding; None where all are.
      step: ``int32[]``, steps taken before; only codes of turned rows need it.
    """

    chunks: int
    rows: int
    workers: int
    up: Quantizer
    dtype: Any
    counts: jax.Array | None
    step: jax.Array | None = None

    def real(self) -> jax.Array:
        """``bool[chunks, rows, 128]``: which elements are no padding, if there are counts."""
        assert self.counts is not None
        real = jnp.arange(ROW, dtype=jnp.int32) < self.counts[:, None]
        return real.reshape(self.chunks, self.rows, ROW)

    def restored(self, rows: jax.Array) -> jax.Array:
        """Means of what was decoded as means of values, ``float32[chunks rows, 128]``: turned back."""
        if not self.up.turns:
            return rows
        assert self.step is not None
        rows = rotation.turned_back(rows, self.step)
        return rows if self.counts is None else jnp.where(self.real().reshape(rows.shape), rows, 0)


class Signs(NamedTuple):
    """The sign of a result, in words.

    Attributes:
      positive: ``uint32[chunks, words]``.
      tied: ``uint32[chunks, words]``, where there is no sign.
      moved: row words ``uint32[chunks, blocks]``, rows that may get an update; None for all.
    """

    positive: jax.Array
    tied: jax.Array
    moved: jax.Array | None


class Tally(NamedTuple):
    """Counted votes.

    Attributes:
      planes: of the sum of codes, least significant first, ``uint32[chunks, words]`` each.
      votes: planes of row words, ``uint32[chunks, blocks]`` each: how many workers voted on each row; None
        where all did.
      where: the rows.
    """

    planes: list[jax.Array]
    votes: list[jax.Array] | None
    where: Slice

    def signs(self) -> Signs:
        """Compares the sum with half of what the votes cast could reach."""
        workers, rows = self.where.workers, self.where.rows
        top = self.where.up.top(workers)
        width = max((workers * top).bit_length(), 1)
        if self.votes is None:
            wide = _constant(workers * top, width, self.planes[0])
        else:
            reach = self.votes if top == 1 else bits.times(self.votes, top, width)
            wide = list(map(partial(bits.over_rows, rows=rows), reach))
        greater, equal = bits.compare(self.planes, wide[1:])
        moved = None if self.votes is None else reduce(operator.or_, self.votes)
        return Signs(greater, equal & ~wide[0], moved)


class Values(NamedTuple):
    """What a transform at the owner answered, ``float32[chunks, rows, 128]``."""

    values: jax.Array
    where: Slice

    def signs(self) -> Signs:
        """Signs of the values; a row of zeros does not move."""
        signs = (self.values > 0) | ((self.values != 0).astype(jnp.uint32) << 1)
        positive, marks = bits.pack(signs, 2)
        return Signs(positive, ~marks, bits.any_in_rows(marks, self.where.rows))


class Coded(NamedTuple):
    """What an owner that feeds back its errors answered: odd multiples ``2q - top`` of a unit.

    Attributes:
      codes: ``uint32[chunks, rows, 128]``, in ``0..top``.
      units: ``float32[chunks, rows]``, bfloat16 numbers; 0 where nobody took part.
    """

    codes: jax.Array
    units: jax.Array

    def values(self, p: int) -> jax.Array:
        """``float32[chunks, rows, 128]`` of codes of ``p`` bits: exact products."""
        odd = 2 * self.codes.astype(jnp.int32) - (2**p - 1)
        return odd.astype(jnp.float32) * self.units[..., None]


class Received(Protocol):
    """What a wire hands to the owner; ``present`` says how many workers took part."""

    present: jax.Array

    def tally(self, where: Slice) -> Tally:
        """Adds the codes."""
        ...

    def mean(self, where: Slice, dominance: float | None, trim: int = 0) -> jax.Array:
        """Averages the decoded values over the workers that took part, without the outermost.

        Of steps of a row cut to ``dominance`` times their median; None for no cut.
        """
        ...


class Owner(NamedTuple):
    """What is done on a slice by the worker that owns it.

    Attributes:
      name: for people.
      needs_values: whether codes must be decoded (then steps travel), or counting them is enough.
      init: ``float[rows, 128] -> state`` for one slice.
      decide: ``(Received, Slice, state) -> (result, state)``.
      trims: outermost values that it leaves out on each side of a mean, which wires that only add cannot.
      bounds: whether a step is bounded by those of others on the row. Then a worker says nothing about a
        row on which it has no message: its error alone, which waits, would pass for a small gradient.
      feedback: bits of the coded replies whose error it feeds back, if that is all it does, so that it goes
        with ``scaled(p)``; else 0.
      numbers: betas and the like; arrays where ``optax.inject_hyperparams`` gives them.
      with_numbers: the same owner with other numbers.
    """

    name: str
    needs_values: bool
    init: Callable[[jax.Array], Any]
    decide: Callable[[Any, Slice, Any], tuple[Any, Any]]
    trims: int = 0
    bounds: bool = False
    feedback: int = 0
    numbers: tuple[Any, ...] = ()
    with_numbers: "Callable[..., Owner] | None" = None


def count() -> Owner:
    """Counts the votes; nothing is remembered.

    Returns:
      An ``Owner`` for votes on codes: Distributed Lion and Lion Cub.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.decide.count().needs_values
      False
    """

    def decide(received: Received, where: Slice, state: Any) -> tuple[Tally, Any]:
        return received.tally(where), state

    return Owner("count", False, lambda x: (), decide)


def momentum_at_owner(
    tx: optax.GradientTransformation, *, dominance: float | None = None, trim: int = 0
) -> Owner:
    """Averages decoded gradients and runs ``tx`` on the owner's slice of one global state.

    ``g = mean_i decode(q_i)`` over the workers that took part, then ``u, state = tx.update(g, state)``.
    If nobody took part the state stays as it is, counters too, and the update is zero. An element whose
    mean is not finite (finite values can have a sum that is not) keeps its state, and its update is zero:
    for ``majority()``, whose reply has no zero within a row that moves, the coin of a tie.

    Args:
      tx: elementwise, such as ``optax.scale_by_lion(b1, b2)``. If its update is a sign, one bit down
        carries it exactly.
      dominance: no worker's step may exceed this many times the median of the steps on its row (the lower
        one of two, of workers that have a gradient there), so that f of W workers cannot outweigh the
        others, however loud, while ``dominance f < W - f``; on a row on which they are most they do. None
        for a quarter of the workers, at least 2: where more workers see less each, honest steps differ
        more. 1 cuts half of the honest steps too. inf for no bound, and a number, for an array is a bound.
        Dense values are not bounded.
      trim: workers that may lie. Of each element so many of the largest and of the smallest values are
        left out of the mean: with ``(workers - 1) // 2`` it is the median. With N that take part at most
        ``(N - 1) // 2`` are left out on a side. The owner sorts what all sent of its slice: temporaries
        of d floats at most, and of more than 32 workers a slow sort. 0 for the mean of all.

    Raises:
      ValueError: if ``dominance`` is below 1 or ``trim`` below 0; when traced, where ``trim`` leaves
        nobody, or on a wire that only adds.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> owner = lc.decide.momentum_at_owner(optax.scale_by_lion(0.9, 0.99))

    Source: this library; ZeRO (arXiv 1910.02054) shards optimizer state in the same way. ``trim`` is the
    coordinate-wise trimmed mean of Yin et al. (arXiv 1803.01498).
    """
    said = "give the number of workers that may lie, 0 or more"
    check_number(f"trim={trim!r}", trim, lambda n: n >= 0, said, int)
    if dominance is not None:
        said = "give a factor of at least 1 (inf for no bound)"
        check_number(f"dominance={dominance!r}", dominance, lambda x: x >= 1, said)
    bounds = isinstance(dominance, jax.Array) or dominance != jnp.inf

    def decide(received: Received, where: Slice, state: Any) -> tuple[Values, Any]:
        most = max(2.0, where.workers / 4) if dominance is None else dominance
        mean = received.mean(where, most if bounds else None, trim)
        valid = jnp.isfinite(mean) & (received.present > 0)
        # Cast finite, so that no dtype of the leaves makes an infinity of it.
        mean = quantize.saturated(jnp.where(valid, mean, 0), where.dtype)
        update, new_state = tx.update(mean, state)
        values = jnp.where(valid, update, 0).astype(jnp.float32)
        state = _valid_only(valid, new_state, state)
        return Values(values.reshape(where.chunks, where.rows, ROW), where), state

    name = f"momentum at the owner{f', trim {trim}' if trim else ''}"
    return Owner(name, True, tx.init, decide, trims=trim, bounds=bounds)


def _valid_only(valid: jax.Array, new: Any, old: Any) -> Any:
    """The new state where means are valid, the old one elsewhere; counters are the exchange's to stop.

    What became infinite of finite means is stored as the largest number: an infinity would stay for ever.
    """

    def leaf(n: jax.Array, o: jax.Array) -> jax.Array:
        if jnp.issubdtype(n.dtype, jnp.floating):
            most = jnp.finfo(n.dtype).max
            n = jnp.clip(n, -most, most)
        return jnp.where(valid, n, o) if n.shape == valid.shape else n

    return jax.tree.map(leaf, new, old)


class OwnerError(NamedTuple):
    """State of ``feedback_at_owner``.

    Attributes:
      error: ``float[rows, 128]``, the error of the replies so far; the owner's own, 0 in the padding.
    """

    error: jax.Array


def feedback_at_owner(dtype: Any = jnp.float32, p: int = 1) -> Owner:
    """Averages decoded values and replies with codes and one scale per row; the rest goes into the next.

    ``x = mean_i decode(q_i) + e`` over the workers that took part; ``u = code(x)``; ``e = x - u``. Codes
    are mid-rise, with a step for each row of 128 from its mean magnitude, padding left out; half of it is
    rounded to bfloat16. A zero counts as positive. Of one bit that is ``u = sign(x) mean|x|``. If nobody
    took part, ``e`` stays as it is and the update is zero. Of one worker alone ``u = x``.

    Args:
      dtype: in which the error is kept; one array of d/W elements per worker.
      p: bits of a code, 1 to 8, as those of ``scaled(p)``.

    Raises:
      ValueError: if the dtype is not floating, or ``p`` is out of range.

    Example:
      >>> from lioncub_jax import decide
      >>> decide.feedback_at_owner().needs_values
      True

    Source: Zheng et al., dist-EF-blockSGD (arXiv 1905.10936), the server's half; more bits are ours.
    """
    check_floating("dtype", dtype)
    quantize.check_bits("feedback_at_owner", p, 1)
    # All multiples of a unit are finite: the largest bfloat16 is 255 times this power of two.
    most = 255 // (2**p - 1) * 2.0**120

    def decide(received: Received, where: Slice, state: OwnerError) -> tuple[Any, OwnerError]:
        mean = received.mean(where, None)
        valid = jnp.isfinite(mean) & (received.present > 0)
        if where.counts is not None:
            valid &= where.real().reshape(mean.shape)
        x = jnp.where(valid, mean + state.error.astype(jnp.float32), 0)
        if where.workers == 1:
            left = OwnerError(jnp.where(valid, 0, state.error))
            return Values(x.reshape(where.chunks, where.rows, ROW), where), left
        count = ROW if where.counts is None else jnp.maximum(where.counts, 1).astype(jnp.float32)
        unit = quantize.to_bfloat16(quantize.STEP[p] / 2 * quantize.mean_magnitude(x, count))
        unit = jnp.minimum(unit, most)
        coded = Coded(quantize.midrise_codes(x, x >= 0, 2 * unit, p), unit)
        missed = quantize.saturated(x - coded.values(p), state.error.dtype)
        error = jnp.where(valid, missed, state.error)
        unit = jnp.where(received.present > 0, unit, 0).reshape(where.chunks, where.rows)
        return Coded(coded.codes.reshape(*unit.shape, ROW), unit), OwnerError(error)

    def init(rows: jax.Array) -> OwnerError:
        return OwnerError(jnp.zeros_like(rows, dtype=dtype))

    return Owner("feedback at the owner", True, init, decide, feedback=p)


class Reply(NamedTuple):
    """A result on its way down.

    Attributes:
      planes: ``uint32[chunks, words]`` each.
      rows: ``uint32[chunks, words]``, numbers for the rows, packed; None without.
      ties: ``uint32[chunks]``, elements without a sign in rows that move.
    """

    planes: Planes
    rows: jax.Array | None
    ties: jax.Array


class Down(NamedTuple):
    """How a result travels back; built by the functions of this module.

    Attributes:
      name: for people.
      encode: ``(result, coin uint32[chunks, words]) -> Reply``.
      decode: ``(planes, rows, Slice) -> [chunks, rows, 128]``, int32 or float32.
      planes: ``(top, workers) -> planes`` of a reply; None for one.
      row_words: ``(rows, workers) -> words`` of the numbers for the rows, block after block; None without.
      words_per_row: words that a plane takes for one row.
      exact: what becomes of values that never travelled: one worker's update.
      of_votes: whether it codes counted votes.
      of_values: whether it codes what a transform at the owner answered.
      has_zero: whether it can reply a zero within a row that moves; without, ties are broken by a coin.
      needs_zero: whether it only goes with codes that have a zero.
      scaled: bits of the codes of ``feedback_at_owner``, if it carries those and nothing else; else 0.
    """

    name: str
    encode: Callable[[Any, jax.Array], Reply]
    decode: Callable[[Planes, jax.Array | None, Slice], jax.Array]
    planes: Callable[[int, int], int] | None = None
    row_words: Callable[[int, int], int] | None = None
    words_per_row: int = bits.WORDS_PER_ROW
    exact: Callable[[jax.Array], jax.Array] = lambda x: x
    of_votes: bool = False
    of_values: bool = False
    has_zero: bool = False
    needs_zero: bool = False
    scaled: int = 0


def majority() -> Down:
    """One bit: the sign of the sum, ties broken by a fair coin; one more bit for each row of 128.

    Source: Distributed Lion (arXiv 2404.00438), "MaVo"; the rule for ties and zeros is ours.
    """

    def encode(result: Tally | Values, coin: jax.Array) -> Reply:
        signs = result.signs()
        assert signs.moved is not None
        side = signs.positive | (signs.tied & coin)
        return Reply([side], signs.moved, _ties(result, signs))

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        moved = bits.over_rows(rows, where.rows)
        codes = bits.unpack_once([*planes, moved], where.rows)
        return jnp.where(codes >= 2, 2 * (codes & 1).astype(jnp.int32) - 1, 0)

    row_words = lambda rows, workers: bits.row_words(rows)  # noqa: E731
    return Down(
        "majority", encode, decode, row_words=row_words, exact=jnp.sign, of_votes=True, of_values=True
    )  # fmt: skip


def ternary_sum() -> Down:
    """Two bits: -1, 0 or +1; a tie is a zero, to the letter of ``sign(sum)``.

    Source: the ``sign(sum)`` of both papers, taken to the letter.
    """

    def encode(result: Tally | Values, coin: jax.Array) -> Reply:
        signs = result.signs()
        return Reply([signs.positive, signs.tied], None, _ties(result, signs))

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        codes = bits.unpack_once(planes, where.rows)
        return jnp.where(codes >= 2, 0, 2 * (codes & 1).astype(jnp.int32) - 1)

    return Down(
        "ternary sum", encode, decode, lambda top, workers: 2, exact=jnp.sign, of_votes=True,
        of_values=True, has_zero=True,
    )  # fmt: skip


def average() -> Down:
    """The planes of the sum: every worker divides by the votes cast. In ``[-1, 1]``.

    Source: Distributed Lion (arXiv 2404.00438), "Avg".
    """

    def encode(result: Tally, coin: jax.Array) -> Reply:
        votes = result.votes
        if votes is None:
            like = result.planes[0][:, : bits.row_words(result.where.rows)]
            workers = result.where.workers
            votes = _constant(workers, bits.sum_bits(workers, 1), like)
        ties = _ties(result, result.signs())
        numbers = jnp.stack(votes, -1)
        return Reply(result.planes, numbers.reshape(len(numbers), -1), ties)

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        top = where.up.top(where.workers)
        sums = bits.unpack_once(planes, where.rows).astype(jnp.int32)
        each = rows.reshape(len(rows), bits.row_words(where.rows), -1)
        votes = [bits.unpack_rows(each[..., k], where.rows) << k for k in range(each.shape[2])]
        reach = sum(votes[1:], votes[0]).astype(jnp.int32)[..., None] * top
        return (2 * sums - reach) / jnp.maximum(reach, 1).astype(jnp.float32)

    def row_words(rows: int, workers: int) -> int:
        return bits.sum_bits(workers, 1) * bits.row_words(rows)

    return Down(
        "average", encode, decode, _sum_planes, row_words, exact=jnp.sign, of_votes=True, has_zero=True
    )  # fmt: skip


def total() -> Down:
    """The planes of the sum, and the sum itself as the update: whole numbers of steps.

    For codes with a zero, where abstainers add nothing and the number of votes need not travel.
    """

    def encode(result: Tally, coin: jax.Array) -> Reply:
        return Reply(result.planes, None, _ties(result, result.signs()))

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        middle = where.workers * where.up.top(where.workers) // 2
        return bits.unpack_once(planes, where.rows).astype(jnp.int32) - middle

    return Down("total", encode, decode, _sum_planes, of_votes=True, has_zero=True, needs_zero=True)


def scaled(p: int) -> Down:
    """``p`` bits, and a bfloat16 for each row of 128: what ``feedback_at_owner(p=p)`` answers, exactly.

    Args:
      p: bits of a code, 1 to 8.

    Raises:
      ValueError: if ``p`` is out of range.

    Example:
      >>> from lioncub_jax import decide
      >>> decide.scaled(4).name
      'scaled(4)'

    Source: Zheng et al., dist-EF-blockSGD (arXiv 1905.10936), of one bit; more bits are ours.
    """
    quantize.check_bits("scaled", p, 1)

    def encode(result: Coded, coin: jax.Array) -> Reply:
        pairs = result.units.astype(jnp.bfloat16).reshape(len(result.units), -1, 2)
        ties = jnp.zeros(len(pairs), jnp.uint32)
        return Reply(bits.pack(result.codes, p), lax.bitcast_convert_type(pairs, jnp.uint32), ties)

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        pairs = lax.bitcast_convert_type(rows, jnp.bfloat16)
        units = pairs.reshape(-1, where.rows).astype(jnp.float32)
        return Coded(bits.unpack(planes, where.rows), units).values(p)

    return Down(
        f"scaled({p})", encode, decode, lambda top, workers: p, lambda rows, workers: rows // 2,
        of_values=True, scaled=p,
    )  # fmt: skip


def scaled_signs() -> Down:
    """``scaled(1)``: a sign, and the mean magnitude of each row of 128."""
    return scaled(1)._replace(name="scaled signs")


def floats() -> Down:
    """The values as float32: for transforms at the owner that do not end in a sign.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> parts = {"owner": lc.decide.momentum_at_owner(optax.scale_by_adam())}
      >>> parts |= {"up": lc.quantize.dense(), "down": lc.decide.floats()}
      >>> parts |= {"memory": lc.momentum.nothing()}
      >>> tx = lc.communicate(axis_name="data", **parts)
    """

    def encode(result: Values, coin: jax.Array) -> Reply:
        words = lax.bitcast_convert_type(result.values, jnp.uint32)
        chunks = words.shape[0]
        return Reply([words.reshape(chunks, -1)], None, jnp.zeros((chunks,), jnp.uint32))

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        values = lax.bitcast_convert_type(planes[0], jnp.float32)
        return values.reshape(-1, where.rows, ROW)

    return Down("floats", encode, decode, words_per_row=ROW, of_values=True, has_zero=True)


def fitting(up: Quantizer) -> Down:
    """The down coder of votes in such codes: zeros come back if there are any, else one bit."""
    return ternary_sum() if up.has_zero else majority()


def _sum_planes(top: int, workers: int) -> int:
    return (workers * top).bit_length()


def _constant(number: int, width: int, like: jax.Array) -> list[jax.Array]:
    """A number as planes, the same in all places."""
    return [jnp.full_like(like, 0xFFFFFFFF if number >> k & 1 else 0) for k in range(width)]


def _ties(result: Tally | Values, signs: Signs) -> jax.Array:
    """``uint32[chunks]``: elements without a sign, in rows that move, padding left out."""
    tied, where = signs.tied, result.where
    if signs.moved is not None:
        tied &= bits.over_rows(signs.moved, where.rows)
    if where.counts is not None:
        tied &= bits.pack(where.real())[0]
    return jnp.sum(lax.population_count(tied), axis=-1, dtype=jnp.uint32)
