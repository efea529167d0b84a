"""What the owner of a slice makes of the workers' codes, and how the answer travels back.

An *owner* turns what arrived into a result: ``count()`` adds the votes, ``momentum_at_owner(tx)``
decodes and averages them and runs an optax transform on its slice. A *down coder* turns the result
into the planes that travel back: ``majority()`` one bit, ``ternary_sum()`` the exact sign of the sum
with zeros, ``average()`` and ``total()`` the planes of the sum, ``floats()`` the values,
``scaled_signs()`` one bit and a scale for each row.

Ties (``majority``) are broken by ``bits.coin``: fair, and the same on every worker. A row of 64
elements on which nobody votes gets update 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lioncub_jax import bits
from lioncub_jax.ballots import Quantizer
from lioncub_jax.bits import ROW, WORDS_PER_ROW


class Signs(NamedTuple):
    """The sign of a result, in words.

    Attributes:
      positive: ``uint32[words]``.
      tied: ``uint32[words]``, where there is no sign.
      moved: ``bool[rows]``, rows that may get an update.
    """

    positive: jax.Array
    tied: jax.Array
    moved: jax.Array


class Tally(NamedTuple):
    """Counted votes.

    Attributes:
      planes: of the sum of codes, least significant first, ``uint32[words]`` each.
      votes: ``uint32[rows]``, how many workers voted on the row.
      top: the largest code.
    """

    planes: list[jax.Array]
    votes: jax.Array
    top: int

    def signs(self) -> Signs:
        """Compares the sum with half of what the votes cast could reach."""
        reach = jnp.repeat(self.votes * self.top, WORDS_PER_ROW)
        greater, equal = bits.compare(self.planes, reach >> 1)
        return Signs(greater, equal & bits.as_mask(1 - (reach & 1)), self.votes > 0)


class Values(NamedTuple):
    """What a transform at the owner answered, ``float32[words, 32]``."""

    values: jax.Array

    def signs(self) -> Signs:
        """Signs of the values; a row of zeros does not move."""
        positive = bits.pack_bits(self.values > 0).reshape(-1)
        tied = bits.pack_bits(self.values == 0).reshape(-1)
        moved = jnp.any(~tied.reshape(-1, WORDS_PER_ROW) != 0, axis=-1)
        return Signs(positive, tied, moved)


class Received(Protocol):
    """What a wire hands to the owner; ``present`` says how many workers took part."""

    present: jax.Array

    def tally(self, quantizer: Quantizer, workers: int) -> Tally:
        """Adds the codes."""
        ...

    def mean(self, quantizer: Quantizer, workers: int, dominance: float) -> jax.Array:
        """Averages the decoded values over the workers that took part."""
        ...

    def filled(self) -> jax.Array:
        """``int32[rows]``: how many elements of each row here are no padding."""
        ...


class Owner(NamedTuple):
    """What is done on a slice by the worker that owns it.

    Attributes:
      name: for people.
      needs_values: whether codes must be decoded (then steps travel), or counting them is enough.
      init: ``float[words, 32] -> state`` for one slice.
      decide: ``(Received, quantizer, workers, dtype, state) -> (result, state)``.
      alone: ``(float[words, 32], state) -> (update, state)``: one worker, whose values never travelled.
    """

    name: str
    needs_values: bool
    init: Callable[[jax.Array], Any]
    decide: Callable[..., tuple[Any, Any]]
    alone: Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def count() -> Owner:
    """Counts the votes; nothing is remembered.

    Returns:
      An ``Owner`` for votes on codes: Distributed Lion and Lion Cub.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.decide.count().needs_values
      False
    """

    def decide(
        received: Received, quantizer: Quantizer, workers: int, dtype: Any, state: Any
    ) -> tuple[Tally, Any]:
        return received.tally(quantizer, workers), state

    return Owner("count", False, lambda x: (), decide, lambda x, state: (jnp.sign(x), state))


def momentum_at_owner(tx: optax.GradientTransformation, *, dominance: float = 16.0) -> Owner:
    """Averages decoded gradients and runs ``tx`` on the owner's slice of one global state.

    ``g = mean_i decode(q_i)`` over the workers that took part, then ``u, state = tx.update(g, state)``.
    If nobody took part the state stays as it is and the update is zero.

    Args:
      tx: elementwise, such as ``optax.scale_by_lion(b1, b2)``. If its update is a sign, one bit down
        carries it exactly.
      dominance: no worker's step may exceed this many times the next largest step on its block, so that
        one worker with a huge gradient cannot outshout the others. It does not bound dense values.

    Raises:
      ValueError: if ``dominance`` is below 1.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> owner = lc.decide.momentum_at_owner(optax.scale_by_lion(0.9, 0.99))

    Source: this library; ZeRO (arXiv 1910.02054) shards optimizer state in the same way.
    """
    if not isinstance(dominance, jax.core.Tracer) and not dominance >= 1:
        raise ValueError(f"dominance={dominance!r}: a factor of at least 1 (inf for no bound)")

    def decide(
        received: Received, quantizer: Quantizer, workers: int, dtype: Any, state: Any
    ) -> tuple[Values, Any]:
        mean = received.mean(quantizer, workers, dominance).astype(dtype)
        update, new_state = tx.update(mean, state)
        some = received.present > 0
        return Values(jnp.where(some, update, 0).astype(jnp.float32)), keep_unless(
            some, new_state, state
        )

    return Owner("momentum at the owner", True, tx.init, decide, tx.update)


class OwnerError(NamedTuple):
    """State of ``feedback_at_owner``.

    Attributes:
      error: ``float[words, 32]``, what answers missed so far; the owner's own, 0 in the padding.
    """

    error: jax.Array


def feedback_at_owner(dtype: Any = jnp.float32) -> Owner:
    """Averages decoded values and answers with signs and one scale per row; the rest is said later.

    ``x = mean_i decode(q_i) + e`` over the workers that took part; ``u = sign(x) mean|x|`` with the mean
    over a row of 64, padding left out, rounded to bfloat16; ``e = x - u``. A zero counts as positive. If
    nobody took part, ``e`` stays as it is and the update is zero. In two levels (``group_axis``)
    padding inside a device's slice counts as values.

    Args:
      dtype: in which the error is kept; one array of d/W elements per worker.

    Raises:
      ValueError: if the dtype is not floating.

    Example:
      >>> from lioncub_jax import decide
      >>> decide.feedback_at_owner().needs_values
      True

    Source: Zheng et al., dist-EF-blockSGD (arXiv 1905.10936), the server's half.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"feedback_at_owner(dtype={jnp.dtype(dtype).name}): give a floating dtype")

    def decide(
        received: Received, quantizer: Quantizer, workers: int, _: Any, state: OwnerError
    ) -> tuple[Values, OwnerError]:
        filled = received.filled()[:, None]
        mean = received.mean(quantizer, workers, jnp.inf)
        x = (mean + state.error.astype(jnp.float32)).reshape(-1, ROW)
        real = jnp.arange(ROW) < filled
        x = jnp.where(real, x, 0)
        scale = jnp.sum(jnp.abs(x), axis=1, keepdims=True) / jnp.maximum(filled, 1)
        scale = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
        u = jnp.where(x >= 0, scale, -scale)
        missed = jnp.where(real, x - u, 0).reshape(mean.shape).astype(state.error.dtype)
        some = received.present > 0
        error = jnp.where(some, missed, state.error)
        return Values(jnp.where(some, u, 0).reshape(mean.shape)), OwnerError(error)

    def init(slice_: jax.Array) -> OwnerError:
        return OwnerError(jnp.zeros_like(slice_, dtype=dtype))

    return Owner("feedback at the owner", True, init, decide, lambda x, state: (x, state))


def keep_unless(condition: jax.Array, new: Any, old: Any) -> Any:
    """The new arrays of an owner's state where the condition holds, else the old; counters go on."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o) if n.ndim else n, new, old)


class Answer(NamedTuple):
    """A result on its way down.

    Attributes:
      planes: ``uint32[planes, words]``.
      per_row: ``uint32[rows]``, a small number for each row, or None.
      ties: ``float32[]``, elements without a sign in rows that move.
    """

    planes: jax.Array
    per_row: jax.Array | None
    ties: jax.Array


class Down(NamedTuple):
    """How a result travels back; built by the functions of this module.

    Attributes:
      name: for people.
      planes: ``(top, workers) -> planes`` of an answer.
      row_bits: ``workers -> bits`` of the number for each row.
      words_per_row: words that a plane takes for one row.
      encode: ``(result, coin uint32[words]) -> Answer``.
      decode: ``(planes, per_row, top, workers) -> [words, 32]``, int32 or float32.
    """

    name: str
    planes: Callable[[int, int], int]
    row_bits: Callable[[int], int]
    words_per_row: int
    encode: Callable[[Any, jax.Array], Answer]
    decode: Callable[[jax.Array, jax.Array | None, int, int], jax.Array]


def majority() -> Down:
    """One bit: the sign of the sum, ties broken by a fair coin; one more bit for each row of 64.

    Source: Distributed Lion (arXiv 2404.00438), "MaVo"; the rule for ties and zeros is ours.
    """

    def encode(result: Tally | Values, coin: jax.Array) -> Answer:
        positive, tied, moved = result.signs()
        return Answer(
            (positive | (tied & coin))[None], moved.astype(jnp.uint32), _ties(tied, moved)
        )

    def decode(planes: jax.Array, per_row: Any, top: int, workers: int) -> jax.Array:
        side = 2 * bits.unpack(planes).astype(jnp.int32) - 1
        return side * jnp.repeat(per_row.astype(jnp.int32), WORDS_PER_ROW)[:, None]

    return Down("majority", lambda top, workers: 1, lambda workers: 1, 2, encode, decode)


def ternary_sum() -> Down:
    """Two bits: -1, 0 or +1; a tie is a zero, to the letter of ``sign(sum)``.

    Source: the ``sign(sum)`` of both papers, taken to the letter.
    """

    def encode(result: Tally | Values, coin: jax.Array) -> Answer:
        positive, tied, moved = result.signs()
        return Answer(jnp.stack([positive, tied]), None, _ties(tied, moved))

    def decode(planes: jax.Array, per_row: Any, top: int, workers: int) -> jax.Array:
        positive, tied = (bits.unpack([plane]).astype(jnp.int32) for plane in planes)
        return (2 * positive - 1) * (1 - tied)

    return Down("ternary sum", lambda top, workers: 2, lambda workers: 0, 2, encode, decode)


def average() -> Down:
    """The planes of the sum: every worker divides by the votes cast. In ``[-1, 1]``.

    Source: Distributed Lion (arXiv 2404.00438), "Avg".
    """

    def encode(result: Tally, coin: jax.Array) -> Answer:
        _, tied, moved = result.signs()
        return Answer(jnp.stack(result.planes), result.votes, _ties(tied, moved))

    def decode(planes: jax.Array, per_row: Any, top: int, workers: int) -> jax.Array:
        sums = bits.unpack(planes).astype(jnp.int32)
        reach = jnp.repeat(per_row.astype(jnp.int32) * top, WORDS_PER_ROW)[:, None]
        return (2 * sums - reach) / jnp.maximum(reach, 1).astype(jnp.float32)

    return Down(
        "average",
        lambda top, workers: (workers * top).bit_length(),
        lambda workers: bits.sum_bits(workers, 1),
        2,
        encode,
        decode,
    )


def total() -> Down:
    """The planes of the sum, and the sum itself as the update: whole numbers of steps.

    For codes with a zero, where abstainers add nothing and the number of votes need not travel.
    """

    def encode(result: Tally, coin: jax.Array) -> Answer:
        _, tied, moved = result.signs()
        return Answer(jnp.stack(result.planes), None, _ties(tied, moved))

    def decode(planes: jax.Array, per_row: Any, top: int, workers: int) -> jax.Array:
        return bits.unpack(planes).astype(jnp.int32) - workers * top // 2

    return average()._replace(name="total", row_bits=lambda _: 0, encode=encode, decode=decode)


def scaled_signs() -> Down:
    """One bit, and a bfloat16 for each row of 64: what ``feedback_at_owner`` answers, exactly.

    Source: Zheng et al., dist-EF-blockSGD (arXiv 1905.10936).
    """

    def encode(result: Values, coin: jax.Array) -> Answer:
        positive = bits.pack_bits(result.values > 0).reshape(1, -1)
        scale = jnp.max(jnp.abs(result.values.reshape(-1, ROW)), axis=1)
        half = lax.bitcast_convert_type(scale, jnp.uint32) >> 16
        return Answer(positive, half, jnp.float32(0))

    def decode(planes: jax.Array, per_row: Any, top: int, workers: int) -> jax.Array:
        scale = lax.bitcast_convert_type(per_row << 16, jnp.float32)
        side = 2 * bits.unpack(planes).astype(jnp.float32) - 1
        return side * jnp.repeat(scale, WORDS_PER_ROW)[:, None]

    return Down("scaled signs", lambda top, workers: 1, lambda _: 16, 2, encode, decode)


def fitting(up: Quantizer) -> Down:
    """The down coder of votes in such codes: zeros come back if there are any, else one bit."""
    return ternary_sum() if up.has_zero else majority()


def floats() -> Down:
    """The values as float32: for transforms at the owner that do not end in a sign.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> owner = lc.decide.momentum_at_owner(optax.scale_by_adam())
      >>> tx = lc.communicate(axis_name="data", up=lc.quantize.dense(), owner=owner, down=lc.decide.floats())
    """

    def encode(result: Values, coin: jax.Array) -> Answer:
        words = lax.bitcast_convert_type(result.values, jnp.uint32)
        return Answer(words.reshape(1, -1), None, jnp.float32(0))

    def decode(planes: jax.Array, per_row: Any, top: int, workers: int) -> jax.Array:
        return lax.bitcast_convert_type(planes[0], jnp.float32).reshape(-1, bits.WORD)

    return Down("floats", lambda top, workers: 1, lambda workers: 0, ROW, encode, decode)


def _ties(tied: jax.Array, moved: jax.Array) -> jax.Array:
    return bits.count_ones(tied & jnp.repeat(bits.as_mask(moved), WORDS_PER_ROW))
