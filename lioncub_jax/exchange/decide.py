"""Decisions of an owner: from the codes of all workers about a chunk of rows to one reply.

Each worker is the *owner* of one chunk of the rows, as it is of a shard of the optimizer's state in ZeRO-1.

| decision | formula, over the n workers that vote | reply | source |
|---|---|---|---|
| ``majority()`` | ``u = sign(sum_i v_i)``, a tie is a fair coin | 1 bit | "MaVo", Distributed Lion |
| ``ternary()`` | ``u = sign(sum_i v_i)``, a tie is 0 | 2 bits | the same, to the letter |
| ``average()`` | ``u = sum_i v_i / (n max_code)`` | planes of the sum | "Avg", Distributed Lion |
| ``total()`` | ``u = sum_i v_i / 2`` | planes of the sum | TernGrad |
| ``at_owner(tx)`` | ``u, s = tx(mean_i dequantize(q_i), s)`` | ``u`` as sign, float32 or codes | ours |

Codes ``q_i`` in ``0..max_code`` stand for signed votes ``v_i = 2 q_i - max_code``, so ``sum_i v_i > 0`` is
``sum_i q_i > n max_code / 2``. Ties are broken by ``bits.tie_bits``: fair, and the same on every worker. A
row of 128 elements on which no worker votes gets update 0.
"""

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from lioncub_jax.exchange import bits, layout, quantize, rotation, traced, xla
from lioncub_jax.exchange.arguments import check_floating, check_kinds, part
from lioncub_jax.exchange.bits import BLOCK, ROW
from lioncub_jax.exchange.message import (
    BucketStats,
    Format,
    Inbox,
    Reply,
    Size,
    Sums,
    reply_size,
)
from lioncub_jax.exchange.quantize import Code, Quantizer
from lioncub_jax.mesh import kernels

__all__ = [
    "BucketStats",
    "Coder",
    "DecideContext",
    "Decision",
    "Inbox",
    "OwnerState",
    "Reply",
    "Signs",
    "Size",
    "Sums",
    "Tally",
    "at_owner",
    "average",
    "codes",
    "majority",
    "sign",
    "ternary",
    "total",
    "values",
]

Planes: TypeAlias = Sequence[jax.Array]


class DecideContext(NamedTuple):
    """The rows on which a worker decides: one chunk of a bucket, or all of them.

    Attributes:
      code: of the codes that arrive.
      format: W, the rows of a chunk, the largest code.
      num_chunks: 1 if each worker owns a chunk, W if every worker decides on all.
      dtype: of the leaves.
      row_sizes: ``int32[chunks rows]``, elements of each row that are no padding; None where all are, or
        where padding cannot count.
      tie_bits: ``uint32[chunks, words]``, fair bits for ties, the same on every worker.
      count: ``int32[]``, steps taken before.
    """

    code: Code
    format: Format
    num_chunks: int
    dtype: DTypeLike
    row_sizes: jax.Array | None
    tie_bits: jax.Array
    count: jax.Array  # type: ignore[assignment]

    def real(self) -> jax.Array:
        """``bool[chunks, rows, 128]``: elements that are no padding, where there are row sizes."""
        assert self.row_sizes is not None
        return self.in_chunks(layout.real_elements(self.row_sizes))

    def in_chunks(self, rows: jax.Array) -> jax.Array:
        """``[chunks rows, 128]`` as ``[chunks, rows, 128]``."""
        return rows.reshape(self.num_chunks, -1, ROW)


class Decision:
    """The decision on a chunk of rows: pure functions of what workers sent, and of the owner's state.

    A subclass is a pytree of its numbers (`arguments.part`), since they may be traced arrays.

    Example:
      >>> from lioncub_jax import decide, quantize
      >>> decide.majority().code_of(quantize.midrise(3)).max_code(8)
      7
    """

    name = ""

    def code_of(self, quantizer: Quantizer) -> Code:
        """The code of a quantizer on which it decides; ``ValueError`` where the quantizer has none."""
        raise NotImplementedError

    def init(self, rows: jax.Array) -> optax.OptState:
        """The owner's state of a chunk ``float[rows, 128]``; () without."""
        return ()

    def decide(
        self, received: Inbox | Sums, context: DecideContext, state: optax.OptState
    ) -> tuple[Reply, optax.OptState]:
        """The reply about some chunks, and the next state."""
        raise NotImplementedError

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """The update ``[chunks, rows, 128]`` of a reply."""
        raise NotImplementedError

    def reply_size(self, num_rows: int, max_code: int, num_workers: int) -> Size:
        """Size of a reply about one chunk."""
        raise NotImplementedError

    def local_update(self, x: jax.Array) -> jax.Array:
        """The update of a single worker, without codes, from its direction or the owner's result."""
        return jnp.sign(x)


# --- Votes, counted on packed words


class Tally(NamedTuple):
    """Counted votes.

    Attributes:
      planes: of the sum of codes, least significant first, ``uint32[chunks, words]`` each.
      voters: planes of the number of workers that vote on each row, ``uint32[chunks, blocks]`` each; None
        where all do.
    """

    planes: list[jax.Array]
    voters: list[jax.Array] | None


class Signs(NamedTuple):
    """Signs of a result, in words.

    Attributes:
      positive: ``uint32[chunks, words]``.
      tied: ``uint32[chunks, words]``, neither positive nor negative.
      moved: ``uint32[chunks, blocks]``, rows that may get an update; None for all.
    """

    positive: jax.Array
    tied: jax.Array
    moved: jax.Array | None


def tally(received: Inbox | Sums, context: DecideContext) -> Tally:
    """Adds the codes of all workers: by adders on packed words, or their sums packed again."""
    fmt = context.format
    width = fmt.max_sum.bit_length()
    if isinstance(received, Inbox):
        voters = None if received.voted is None else bits.tally([received.voted])
        return Tally(bits.tally(received.planes)[:width], voters)
    planes, voters = bits.pack(received.sums.astype(jnp.uint32), width), None
    if received.voters is not None:
        voters = []
        for k in range(bits.sum_bits(fmt.num_workers, 1)):
            voters.append(bits.pack_rows((received.voters >> k) & 1 > 0))
    return Tally(planes, voters)


def signs_of_sum(counted: Tally, fmt: Format) -> Signs:
    """``sign(2 sum - voters max_code)``: compares the sum of codes with half of its largest value."""
    width, moved = fmt.max_sum.bit_length(), None
    if counted.voters is None:
        largest = bits.constant(fmt.max_sum, width, counted.planes[0])
    else:
        moved = reduce(operator.or_, counted.voters)
        by_row = bits.times(counted.voters, fmt.max_code, width)
        largest = [bits.over_rows(words, fmt.num_rows) for words in by_row]
    # Without plane 0 the number is halved and rounded down. If it was odd there is no tie.
    greater, equal = bits.compare(counted.planes, largest[1:])
    return Signs(greater, equal & ~largest[0], moved)


def number_of_ties(signs: Signs, context: DecideContext) -> jax.Array:
    """``uint32[chunks]``: elements without a sign, in rows that move, padding left out."""
    tied = signs.tied
    if signs.moved is not None:
        tied &= bits.over_rows(signs.moved, context.format.num_rows)
    if context.row_sizes is not None:
        tied &= bits.pack(context.real())[0]
    return jnp.sum(lax.population_count(tied), axis=-1, dtype=jnp.uint32)


def pairs_of_votes(counted: Tally, context: DecideContext) -> tuple[jax.Array, jax.Array]:
    """Pairs of two workers' votes of one bit on an element: those that differ, and all of them.

    ``float32[chunks]`` each, padding left out. Of n votes, c of them for the upper code, c (n - c)
    pairs differ, of n (n - 1) / 2.
    """
    assert counted.voters is not None  # as all votes of one bit have them
    num_rows, upper = context.format.num_rows, counted.planes
    votes = [bits.over_rows(words, num_rows) for words in counted.voters]
    n = sum(bits.unpack_rows(x, num_rows) << k for k, x in enumerate(counted.voters))
    in_row = (n * (jnp.maximum(n, 1) - 1) // 2).astype(jnp.float32)
    if context.row_sizes is None:
        in_row *= ROW
    else:
        real = bits.pack(context.real())[0]
        upper = [plane & real for plane in upper]
        in_row *= context.row_sizes.reshape(in_row.shape).astype(jnp.float32)
    unlike = bits.products(upper, bits.difference(votes, upper))
    largest = BLOCK * context.format.num_workers**2 // 4
    return bits.total(unlike, largest), jnp.sum(in_row, axis=-1)


class Vote(Decision):
    """A decision on counted votes; a subclass has the reply to a tally."""

    def code_of(self, quantizer: Quantizer) -> Code:
        """The votes of a quantizer."""
        if quantizer.vote is None:
            raise ValueError(
                f"decision={self.name}: {quantizer.name} has no codes to count, for values that travel as "
                "they are, error feedback and rotation are of values that an owner decodes: give "
                "decision=at_owner(tx), or a quantizer without them, such as sign()"
            )
        return quantizer.vote

    def decide(
        self, received: Inbox | Sums, context: DecideContext, state: optax.OptState
    ) -> tuple[Reply, optax.OptState]:
        """Counts the votes, and replies."""
        counted = tally(received, context)
        planes, row_data, signs = self.reply(counted, context)
        pairs: Sequence[jax.Array] = ()
        if context.format.counts_pairs:
            pairs = pairs_of_votes(counted, context)
        stats = BucketStats(number_of_ties(signs, context), pairs, received.present)
        return Reply(planes, row_data, stats), state

    def reply(
        self, counted: Tally, context: DecideContext
    ) -> tuple[Planes, jax.Array | None, Signs]:
        """Planes of the reply, data of its rows or None, and the signs of the sums."""
        raise NotImplementedError


@part
class Majority(Vote):
    """``u = sign(sum_i v_i)`` in one bit, see `majority`."""

    name = "majority"

    def code_of(self, quantizer: Quantizer) -> Code:
        """Votes without a zero."""
        code = super().code_of(quantizer)
        if code.midtread:
            raise ValueError(
                f"decision={self.name}: {quantizer.name} has a code for zero, and its ties are zeros: give "
                "ternary() or average()"
            )
        return code

    def reply(
        self, counted: Tally, context: DecideContext
    ) -> tuple[Planes, jax.Array | None, Signs]:
        """A plane of signs, of which ties are a coin, and the rows that move."""
        signs = signs_of_sum(counted, context.format)
        return [_with_coins(signs, context)], signs.moved, signs

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """-1 or 1; 0 in rows that do not move."""
        return _decode_signs(planes, row_data, num_rows)

    def reply_size(self, num_rows: int, max_code: int, num_workers: int) -> Size:
        """One bit, and one for each row."""
        return _size_of_signs(num_rows)


@part
class Ternary(Vote):
    """``u = sign(sum_i v_i)`` in two bits, see `ternary`."""

    name = "ternary"

    def reply(
        self, counted: Tally, context: DecideContext
    ) -> tuple[Planes, jax.Array | None, Signs]:
        """A plane of signs and a plane of ties."""
        signs = signs_of_sum(counted, context.format)
        return [signs.positive, signs.tied], None, signs

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """-1, 0 or 1."""
        codes = bits.unpack_stored(planes, num_rows)
        return jnp.where(codes >= 2, 0, 2 * (codes & 1).astype(jnp.int32) - 1)

    def reply_size(self, num_rows: int, max_code: int, num_workers: int) -> Size:
        """Two bits."""
        return reply_size(2, num_rows * bits.WORDS_PER_ROW, 0)


@part
class Average(Vote):
    """``u = sum_i v_i / (n max_code)``, see `average`."""

    name = "average"

    def reply(
        self, counted: Tally, context: DecideContext
    ) -> tuple[Planes, jax.Array | None, Signs]:
        """Planes of the sum, and the number of voters of each row."""
        voters, fmt = counted.voters, context.format
        if voters is None:
            like = counted.planes[0][:, : bits.row_words(fmt.num_rows)]
            voters = bits.constant(fmt.num_workers, bits.sum_bits(fmt.num_workers, 1), like)
        row_data = jnp.stack(voters, -1)
        signs = signs_of_sum(counted, fmt)
        return counted.planes, row_data.reshape(len(row_data), -1), signs

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """``(2 sum - n max_code) / (n max_code)``."""
        assert row_data is not None
        sums = bits.unpack_stored(planes, num_rows).astype(jnp.int32)
        words = row_data.reshape(len(row_data), bits.row_words(num_rows), -1)
        voters = bits.unpack_rows(words[..., 0], num_rows)
        for k in range(1, words.shape[2]):
            voters += bits.unpack_rows(words[..., k], num_rows) << k
        largest = voters.astype(jnp.int32)[..., None] * fmt.max_code
        sums = jnp.minimum(sums, largest)  # whatever an owner sends
        divisor = jnp.maximum(largest, 1).astype(jnp.float32)
        return (2 * sums - largest).astype(jnp.float32) / divisor

    def reply_size(self, num_rows: int, max_code: int, num_workers: int) -> Size:
        """Bits of the sum, and of the number of voters of each row."""
        row_words = bits.sum_bits(num_workers, 1) * bits.row_words(num_rows)
        return _size_of_sum(num_rows, max_code, num_workers, row_words)


@part
class Total(Vote):
    """``u = sum_i v_i / 2``, see `total`."""

    name = "total"

    def code_of(self, quantizer: Quantizer) -> Code:
        """Votes with a zero."""
        code = super().code_of(quantizer)
        if not code.midtread:
            raise ValueError(
                f"decision={self.name}: {quantizer.name} has no code for zero, so a sum without "
                "the number of votes is no result: give average()"
            )
        return code

    def reply(
        self, counted: Tally, context: DecideContext
    ) -> tuple[Planes, jax.Array | None, Signs]:
        """Planes of the sum."""
        return counted.planes, None, signs_of_sum(counted, context.format)

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """``sum - W max_code / 2``."""
        sums = bits.unpack_stored(planes, num_rows).astype(jnp.int32)
        return jnp.minimum(sums, fmt.max_sum) - fmt.max_sum // 2

    def reply_size(self, num_rows: int, max_code: int, num_workers: int) -> Size:
        """Bits of the sum."""
        return _size_of_sum(num_rows, max_code, num_workers, 0)

    def local_update(self, x: jax.Array) -> jax.Array:
        """``x`` itself: a single worker's values need no codes."""
        return x


def majority() -> Decision:
    """``u = sign(sum_i v_i)`` in one bit, ties broken by a fair coin; one more bit for each row of 128.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"memory": lc.momentum.blend(), "decision": lc.decide.majority()}
      >>> tx = lc.communicate(workers="data", **parts)

    Source: Distributed Lion (arXiv 2404.00438), "MaVo"; the rule for ties and zeros is ours.
    """
    return Majority()


def ternary() -> Decision:
    """``u = sign(sum_i v_i)`` in two bits: -1, 0 or +1. A tie is a zero, to the letter of both papers.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"quantizer": lc.quantize.ternary(), "decision": lc.decide.ternary()}
      >>> tx = lc.communicate(workers="data", memory=lc.momentum.blend(), **parts)

    Source: Distributed Lion (arXiv 2404.00438) and Lion Cub (arXiv 2411.16462), where votes cancel.
    """
    return Ternary()


def average() -> Decision:
    """``u = sum_i v_i / (n max_code)``, in ``[-1, 1]``: the planes of the sum. n workers vote on the row.

    For signs that is ``sum_i sign_i / n``. Of the sum of codes: ``(2 sum - n max_code) / (n max_code)``.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"memory": lc.momentum.blend(), "decision": lc.decide.average()}
      >>> tx = lc.communicate(workers="data", **parts)

    Source: Distributed Lion (arXiv 2404.00438), "Avg".
    """
    return Average()


def total() -> Decision:
    """``u = sum_i v_i / 2``, in whole numbers of codes: the planes of the sum.

    For codes with a zero, where abstainers add nothing and the number of votes need not travel.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"quantizer": lc.quantize.ternary(), "decision": lc.decide.total()}
      >>> tx = lc.communicate(workers="data", memory=lc.momentum.nothing(), **parts)

    Source: TernGrad (arXiv 1705.07878): all workers share one scale.
    """
    return Total()


def default_for(quantizer: Quantizer) -> Decision:
    """The default decision on votes: `ternary` for codes with a zero, else `majority`."""
    with_zero = quantizer.vote is not None and quantizer.vote.midtread
    return ternary() if with_zero else majority()


def _size_of_sum(num_rows: int, max_code: int, num_workers: int, row_words: int) -> Size:
    planes = (num_workers * max_code).bit_length()
    return reply_size(planes, num_rows * bits.WORDS_PER_ROW, row_words)


def _with_coins(signs: Signs, context: DecideContext) -> jax.Array:
    """One bit for each element: its sign, or a fair coin."""
    return signs.positive | (signs.tied & context.tie_bits)


def _decode_signs(planes: Planes, moved: jax.Array | None, num_rows: int) -> jax.Array:
    assert moved is not None
    codes = bits.unpack_stored([*planes, bits.over_rows(moved, num_rows)], num_rows)
    return jnp.where(codes >= 2, 2 * (codes & 1).astype(jnp.int32) - 1, 0)


def _size_of_signs(num_rows: int) -> Size:
    return reply_size(1, num_rows * bits.WORDS_PER_ROW, bits.row_words(num_rows))


# --- Values, decoded


class OwnerState(NamedTuple):
    """State of `at_owner` for a chunk.

    Attributes:
      inner: of the transform, arrays ``[rows, 128]``, as its ``init`` made them in the padding.
      error: ``float[rows, 128]``, the error of earlier replies in codes, 0 in the padding; else ``()``.
    """

    inner: optax.OptState
    error: Any


class Coder(NamedTuple):
    """The code of an owner's reply; built by the functions of this module.

    Attributes:
      name: for errors and reports.
      encode: ``(u, valid, DecideContext, BucketStats, error) -> (Reply, error)`` of ``float32[rows, 128]``,
        which mean nothing where they are not ``valid``.
      decode: ``(planes, row_data, num_rows) -> [chunks, rows, 128]``, int32 or float32.
      size: ``num_rows -> Size`` of a reply about one chunk.
      local_update: the update of a single worker, which needs no code: the sign, or the value itself.
      init: ``float[rows, 128] -> error`` before the first step; ``()`` for none.
    """

    name: str
    encode: Callable[..., tuple[Reply, jax.Array | tuple[()]]]
    decode: Callable[[Planes, jax.Array | None, int], jax.Array]
    size: Callable[[int], Size]
    local_update: Callable[[jax.Array], jax.Array] = lambda u: u
    init: Callable[[jax.Array], jax.Array | tuple[()]] = lambda rows: ()


@part
class AtOwner(Decision):
    """``u, s = tx(mean_i dequantize(q_i), s)``, see `at_owner`.

    Attributes:
      tx: a pytree of its numbers.
      reply: the code of ``u``.
    """

    tx: optax.GradientTransformation
    reply: Coder

    @property
    def name(self) -> str:  # type: ignore[override]
        """For errors and reports."""
        return f"at the owner, {self.reply.name}"

    def code_of(self, quantizer: Quantizer) -> Code:
        """The values of a quantizer."""
        if quantizer.value is None:
            raise ValueError(
                f"decision={self.name}: it decodes values, and {quantizer.name} sends codes without "
                "scales: give midrise(p)"
            )
        return quantizer.value

    def init(self, rows: jax.Array) -> OwnerState:
        """State of ``tx`` and the error of replies; ``ValueError`` if ``tx`` needs more than a chunk."""
        inner = self.tx.init(rows)
        traced.check_elementwise(self.tx, rows, inner)
        return OwnerState(inner, self.reply.init(rows))

    def decide(
        self, received: Inbox | Sums, context: DecideContext, state: OwnerState
    ) -> tuple[Reply, OwnerState]:
        """Averages, runs the transform, encodes its result."""
        mean = mean_of_values(received, context).reshape(-1, ROW)
        if context.code.rotates:
            mean = rotation.undone(mean, context.count)
        u, valid, inner = self.run(
            mean, received.present, context.dtype, context.row_sizes, state.inner
        )
        stats = BucketStats(jnp.uint32(0), (), received.present)
        reply, error = self.reply.encode(u, valid, context, stats, state.error)
        return reply, OwnerState(inner, error)

    def run(
        self,
        mean: jax.Array,
        present: jax.Array,
        dtype: DTypeLike,
        row_sizes: jax.Array | None,
        state: optax.OptState,
    ) -> tuple[jax.Array, jax.Array, optax.OptState]:
        """``u`` in float32, the elements where it is valid, and the next state of ``tx``."""
        valid = jnp.isfinite(mean) & (present > 0)
        if row_sizes is not None:  # else padding moves its row, and a checkpoint loses it
            valid &= layout.real_elements(row_sizes)
        # Cast finite, so that no dtype of the leaves makes an infinity of it.
        mean = quantize.saturated(jnp.where(valid, mean, 0), dtype)
        u, new = self.tx.update(mean, state)
        return u.astype(jnp.float32), valid, _where_valid(valid, new, state)

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """The decoded reply."""
        return self.reply.decode(planes, row_data, num_rows)

    def reply_size(self, num_rows: int, max_code: int, num_workers: int) -> Size:
        """Size of the coded reply."""
        return self.reply.size(num_rows)

    def local_update(self, x: jax.Array) -> jax.Array:
        """The sign, or ``x`` itself."""
        return self.reply.local_update(x)

    def decide_locally(
        self,
        mean: jax.Array,
        present: jax.Array,
        dtype: DTypeLike,
        row_sizes: jax.Array | None,
        state: OwnerState,
    ) -> tuple[jax.Array, OwnerState]:
        """``u`` of a single worker, ``float32[rows, 128]``, plus the error of earlier replies."""
        u, valid, inner = self.run(mean * share(present), present, dtype, row_sizes, state.inner)
        if not jax.tree.leaves(state.error):
            return jnp.where(valid, u, 0), OwnerState(inner, ())
        u = jnp.where(valid, u + state.error.astype(jnp.float32), 0)
        return u, OwnerState(inner, jnp.where(valid, 0, state.error))


def mean_of_values(received: Inbox | Sums, context: DecideContext) -> jax.Array:
    """``mean_i dequantize(q_i)`` over the workers that take part: ``float32[chunks, rows, 128]``."""
    if isinstance(received, Sums):
        return received.sums * share(received.present)
    assert context.code.decode is not None
    values = context.code.decode(received.planes, received.scales, context.format.num_rows, False)
    participates = received.participates[:, None, None, None]
    values = jnp.where(participates > 0, values, 0)
    if kernels.for_tpu():  # XLA for TPU fuses what it computes with a reduction of one array only
        return jnp.sum(values, 0) * share(received.present)
    counted = jnp.broadcast_to(participates, values.shape)
    # One reduction of both: nothing is decoded twice, and no decoded array is kept, as XLA for CPU keeps
    # what it only adds.
    sums, present = xla.reduced([operator.add] * 2, [values, counted], 0)
    return jnp.where(present > 0, sums * share(received.present), 0)


def share(present: jax.Array) -> jax.Array:
    """``1 / n``: the weight of one worker in a mean over the n that are present."""
    # 1/n once: XLA rewrites x / n to x * (1/n) only sometimes, and the bits would depend on the rest of the
    # program.
    return 1 / jnp.maximum(present, 1).astype(jnp.float32)


def _where_valid(valid: jax.Array, new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """The new state where means are valid, the old one elsewhere; counters are left to the step.

    An infinity is stored as the largest finite number: it would stay forever.
    """

    def leaf(n: jax.Array, o: jax.Array) -> jax.Array:
        if jnp.issubdtype(n.dtype, jnp.floating):
            largest = jnp.finfo(n.dtype).max
            n = jnp.clip(n, -largest, largest)
        return jnp.where(valid, n, o) if n.shape == valid.shape else n

    return jax.tree.map(leaf, new, old)


def at_owner(tx: optax.GradientTransformation, reply: Coder | None = None) -> Decision:
    """Averages decoded gradients and runs ``tx`` on the owner's chunk of one global state.

    ``g = mean_i dequantize(q_i)`` over the workers that took part, then ``u, state = tx.update(g,
    state)``. If no worker takes part the state stays as it is, counters too, and the update is zero. An
    element with a mean that is not finite (finite values can have a sum that is not) keeps its state, and
    its update is zero: for ``sign()``, which has no zero within a row that moves, the coin of a tie. A
    mean has no bound: where workers may lie, vote.

    Args:
      tx: elementwise, such as ``optax.scale_by_lion(b1, b2)``; ``optax.identity()`` for the mean itself.
        It is given no parameters.
      reply: the code of an update: ``codes(2)`` by default; ``sign()`` where ``tx`` ends in a sign, which
        is then the whole update in one bit; ``values()`` for float32.

    Raises:
      ValueError: from ``init``, for a ``tx`` that mixes elements, uses parameters, or keeps arrays of
        another shape: an owner has a chunk of each.
      TypeError: for a reply or a ``tx`` that is none.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> lion = lc.decide.at_owner(optax.scale_by_lion(0.9, 0.99), lc.decide.sign())

    Source: this library; ZeRO (arXiv 1910.02054) shards optimizer state in the same way.
    """
    reply = codes(2) if reply is None else reply
    check_kinds(tx=(tx, optax.GradientTransformation), reply=(reply, Coder))
    return AtOwner(tx, reply)


def sign() -> Coder:
    """One bit: the sign, which of Lion is the whole update; where it is 0, the coin of a tie.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> lion = lc.decide.at_owner(optax.scale_by_lion(), lc.decide.sign())
    """

    def encode(
        u: jax.Array, valid: jax.Array, context: DecideContext, stats: BucketStats, error: tuple[()]
    ) -> tuple[Reply, tuple[()]]:
        u = context.in_chunks(jnp.where(valid, u, 0))
        fields = (u > 0).astype(jnp.uint32) | ((u != 0).astype(jnp.uint32) << 1)
        positive, marks = bits.pack(fields, 2)
        moved = bits.any_in_rows(marks, context.format.num_rows)
        signs = Signs(positive, ~marks, moved)
        stats = stats._replace(ties=number_of_ties(signs, context))
        return Reply([_with_coins(signs, context)], moved, stats), error

    return Coder("sign", encode, _decode_signs, _size_of_signs, local_update=jnp.sign)


def values() -> Coder:
    """The values as float32: for transforms that do not end in a sign.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> adam = lc.decide.at_owner(optax.scale_by_adam(), lc.decide.values())
      >>> parts = {"memory": lc.momentum.nothing(), "quantizer": lc.quantize.dense(), "decision": adam}
      >>> tx = lc.communicate(workers="data", **parts)
    """

    def encode(
        u: jax.Array, valid: jax.Array, context: DecideContext, stats: BucketStats, error: tuple[()]
    ) -> tuple[Reply, tuple[()]]:
        words = jnp.where(valid, u, 0).view(jnp.uint32)
        return Reply([words.reshape(context.num_chunks, -1)], None, stats), error

    def decode(planes: Planes, row_data: jax.Array | None, num_rows: int) -> jax.Array:
        decoded = planes[0].view(jnp.float32).reshape(-1, num_rows, ROW)
        return jnp.where(jnp.isfinite(decoded), decoded, 0)  # whatever an owner sends

    def size(num_rows: int) -> Size:
        return reply_size(1, num_rows * ROW, 0)

    return Coder("floats", encode, decode, size)


def codes(p: int, dtype: DTypeLike = jnp.float32) -> Coder:
    """``p`` bits, and a bfloat16 for each row of 128; the quantization error is added to the next reply.

    ``x = u + e``, ``reply = Q(x)``, ``e = x - dequantize(reply)``. Codes are mid-rise, with a scale for
    each row of 128 from its mean magnitude, padding left out; half of it is rounded to bfloat16. A zero
    counts as positive. Of one bit that is ``sign(x) mean|x|``. If no worker takes part, ``e`` stays as it
    is and the update is zero. The update of a single worker is ``x``.

    Args:
      p: bits of a code, 1 to 8.
      dtype: in which the error is kept; one array of d/W elements per worker.

    Raises:
      ValueError: if the dtype is not floating, or ``p`` is out of range.

    Example:
      >>> from lioncub_jax import decide
      >>> decide.codes(4).name
      'codes(4)'

    Source: Zheng et al., dist-EF-blockSGD (arXiv 1905.10936), the owner's half; more bits are ours.
    """
    quantize.check_bits("codes", p, 1)
    check_floating("dtype", dtype)
    # All multiples of half a scale are finite: the largest bfloat16 is 255 times this power of two.
    largest = 255 // (2**p - 1) * 2.0**120

    def values_of(q: jax.Array, half: jax.Array) -> jax.Array:  # exact products
        return (2 * q.astype(jnp.int32) - (2**p - 1)).astype(jnp.float32) * half[..., None]

    def encode(
        u: jax.Array, valid: jax.Array, context: DecideContext, stats: BucketStats, error: jax.Array
    ) -> tuple[Reply, jax.Array]:
        x = jnp.where(valid, u + error.astype(jnp.float32), 0)
        mean, _ = quantize.row_scale(x, context.row_sizes)
        half = quantize.to_bfloat16(quantize.GAUSSIAN_STEP[p] / 2 * mean)
        half = jnp.minimum(half, largest)
        q = quantize.midrise_codes(x, x >= 0, 2 * half, p)
        new_error = quantize.saturated(x - values_of(q, half), error.dtype)
        new_error = jnp.where(valid, new_error, error)
        # If no worker takes part no element is valid, so the scale is 0.
        row_data = half.astype(jnp.bfloat16).reshape(context.num_chunks, -1).view(jnp.uint32)
        return Reply(bits.pack(context.in_chunks(q), p), row_data, stats), new_error

    def decode(planes: Planes, row_data: jax.Array | None, num_rows: int) -> jax.Array:
        assert row_data is not None
        half = row_data.view(jnp.bfloat16).reshape(-1, num_rows).astype(jnp.float32)
        half = jnp.where((half >= 0) & (half <= largest), half, 0)  # whatever an owner sends
        return values_of(bits.unpack(planes, num_rows), half)

    def size(num_rows: int) -> Size:
        return reply_size(p, num_rows * bits.WORDS_PER_ROW, num_rows // 2)

    def init(rows: jax.Array) -> jax.Array:
        return jnp.zeros_like(rows, dtype=dtype)

    return Coder(f"codes({p})", encode, decode, size, init=init)
