"""Decisions on votes, which are counted on packed words.

Codes ``q_i`` in ``0..max_code`` stand for signed votes ``v_i = 2 q_i - max_code``, so ``sum_i v_i > 0`` is
``sum_i q_i > n max_code / 2``. `majority` breaks ties by ``bits.tie_bits``: fair, and the same on every
worker. A row of 128 elements on which no worker votes gets update 0.
"""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import bits, layout
from lioncub_jax.exchange.bits import BLOCK, ROW
from lioncub_jax.exchange.checks import part
from lioncub_jax.exchange.matrices import Deal, Matrices, Place
from lioncub_jax.exchange.quantize import Codec, Quantizer
from lioncub_jax.exchange.wires import (
    BucketStats,
    Format,
    Inbox,
    Reply,
    Size,
    Sums,
    reply_size,
    zero_unless,
)

Planes: TypeAlias = Sequence[jax.Array]


class DecideContext(NamedTuple):
    """The rows on which a worker decides: one chunk of a bucket, or all of them.

    Attributes:
      codec: that of the codes that arrive.
      format: W, the rows of a chunk, the largest code.
      num_chunks: 1 if each worker owns a chunk, W if every worker decides on all.
      row_sizes: ``int32[chunks rows]``, elements of each row that are no padding; None where all are, or
        where padding cannot count.
      tie_bits: ``uint32[chunks, words]``, fair bits for ties, the same on every worker.
      num_steps: ``int32[]``, steps taken before.
      place: of the rows.
    """

    codec: Codec
    format: Format
    num_chunks: int
    row_sizes: jax.Array | None
    tie_bits: jax.Array
    num_steps: jax.Array
    place: Place

    def real(self) -> jax.Array:
        """``bool[chunks, rows, 128]``: elements that are no padding, where there are row sizes."""
        assert self.row_sizes is not None
        return self.in_chunks(layout.real_elements(self.row_sizes))

    def in_chunks(self, rows: jax.Array) -> jax.Array:
        """``[chunks rows, 128]`` as ``[chunks, rows, 128]``."""
        return rows.reshape(self.num_chunks, -1, ROW)


class Decision:
    """The decision on a chunk of rows: pure functions of what workers sent, and of the owner's state.

    A subclass has `codec_of`, `decide`, `decode`, `reply_size` and `local_update`; with ``has_state`` also
    `init` and `decide_locally`. It has no collectives: the wire has them. It is a pytree of its numbers
    (`checks.part`), since they may be traced arrays.

    Example:
      >>> from lioncub_jax import decide, quantize
      >>> decide.majority().codec_of(quantize.midrise(3)).max_code(8)
      7
    """

    name = ""
    has_state = False  # whether the owner of a chunk keeps a state
    of_matrices = False  # whether a chunk is whole matrices, see `matrices`

    def matrices_of(
        self, params: optax.Params, specs: Sequence[P] | None = None
    ) -> tuple[Matrices, ...] | None:
        """The matrices of each leaf, if ``of_matrices``; see `matrices.matrices_of`."""
        return None

    def codec_of(self, quantizer: Quantizer) -> Codec:
        """The codec of a quantizer whose codes it takes; ``ValueError`` where the quantizer has none."""
        raise NotImplementedError

    def init(self, rows: jax.Array, deal: Deal | None) -> optax.OptState:
        """The owner's state of a chunk ``float[rows, 128]``, if ``has_state``; of a deal, see `Place`."""
        raise NotImplementedError

    def decide(
        self, received: Inbox | Sums, context: DecideContext, state: optax.OptState
    ) -> tuple[Reply, optax.OptState]:
        """The reply about the chunks of ``context``, and the next state.

        Args:
          received: messages of all workers; ``Sums`` from a wire that adds.
          context: the chunks: one, or all W if the wire is not ``sharded``.
          state: the owner's, as `init` makes it; () without ``has_state``.

        Returns:
          A reply of the size that `reply_size` says, whose ``stats`` have ``received.present``; the next
          state, unchanged if no worker is present, but for counters.
        """
        raise NotImplementedError

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """The update ``[chunks, rows, 128]`` of a reply; whatever an owner sends, finite."""
        raise NotImplementedError

    def reply_size(self, codec: Codec, num_rows: int, num_workers: int) -> Size:
        """Size of what `decide` returns about one chunk of ``num_rows``; another reply is an error."""
        raise NotImplementedError

    def counts_pairs(self, codec: Codec) -> bool:
        """True where replies have pairs of votes among their statistics."""
        return False

    def local_update(self, x: jax.Array) -> jax.Array:
        """The update of a single worker, without codes, from its direction or the owner's result."""
        raise NotImplementedError

    def decide_locally(
        self,
        mean: jax.Array,
        present: jax.Array,
        row_sizes: jax.Array | None,
        place: Place,
        state: optax.OptState,
    ) -> tuple[jax.Array, optax.OptState]:
        """The result ``float32[rows, 128]`` of a single worker, if ``has_state``, and the next state.

        Args:
          mean: ``c + e`` of a bucket, ``float32[rows, 128]``.
          present: ``uint32[]``, 1; 0 if the worker abstains.
          row_sizes: as in `DecideContext`.
          place: likewise.
          state: the owner's.
        """
        raise NotImplementedError


class Tally(NamedTuple):
    """Counted votes.

    Attributes:
      planes: of the sum of codes, least significant first, ``uint32[chunks, words]`` each.
      voters: planes of the number of workers that vote on each row, ``uint32[chunks, blocks]`` each; None
        for codes with a zero, where all that participate do.
      present: ``uint32[]``, how many workers participate. The others sent codes for zero, or no vote.
    """

    planes: list[jax.Array]
    voters: list[jax.Array] | None
    present: jax.Array


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
        voters = None if received.voted is None else bits.add_codes([received.voted])
        return Tally(bits.add_codes(received.planes)[:width], voters, received.present)
    planes, voters = bits.pack(received.sums.astype(jnp.uint32), width), None
    if received.voters is not None:
        voters = []
        for k in range(bits.sum_bits(fmt.num_workers, 1)):
            voters.append(bits.pack_rows((received.voters >> k) & 1 > 0))
    return Tally(planes, voters, received.present)


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
    return bits.add_numbers(unlike, largest), jnp.sum(in_row, axis=-1)


class Vote(Decision):
    """A decision on counted votes; a subclass has `encode_reply`, `decode` and `reply_words`.

    With ``divides_by_present`` the sum is divided by the number of workers that say they participate. Then
    codes with a zero of the others are made zeros, whatever they sent.

    Example:
      >>> from lioncub_jax import decide
      >>> isinstance(decide.average(), decide.Vote)
      True
    """

    divides_by_present = False

    def codec_of(self, quantizer: Quantizer) -> Codec:
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
        fmt = context.format
        if self.divides_by_present and fmt.midtread and isinstance(received, Inbox):
            participates = received.participates[:, None, None] > 0
            sent = zero_unless(participates, received.planes, fmt)
            received = received._replace(planes=sent)
        counted = tally(received, context)
        planes, row_data, signs = self.encode_reply(counted, context)
        pairs: Sequence[jax.Array] = ()
        if self.counts_pairs(context.codec):
            pairs = pairs_of_votes(counted, context)
        stats = BucketStats(number_of_ties(signs, context), pairs, received.present)
        return Reply(planes, row_data, stats), state

    def encode_reply(
        self, counted: Tally, context: DecideContext
    ) -> tuple[Planes, jax.Array | None, Signs]:
        """Planes of the reply, data of its rows or None, and the signs of the sums."""
        raise NotImplementedError

    def reply_size(self, codec: Codec, num_rows: int, num_workers: int) -> Size:
        """Planes and data of rows of `reply_words`, and the statistics."""
        planes, row_words = self.reply_words(codec.max_code(num_workers), num_rows, num_workers)
        plane_words = num_rows * bits.WORDS_PER_ROW
        return reply_size(planes, plane_words, row_words, pairs=self.counts_pairs(codec))

    def reply_words(self, max_code: int, num_rows: int, num_workers: int) -> tuple[int, int]:
        """Number of planes of a reply about one chunk, and words of its rows' data."""
        raise NotImplementedError

    def counts_pairs(self, codec: Codec) -> bool:
        """True for votes of one bit."""
        return codec.marks_rows and codec.max_code(1) == 1

    def local_update(self, x: jax.Array) -> jax.Array:
        """The sign: the result of one vote."""
        return jnp.sign(x)


@part
class Majority(Vote):
    """``u = sign(sum_i v_i)`` in one bit, see `majority`."""

    name = "majority"

    def codec_of(self, quantizer: Quantizer) -> Codec:
        """Votes without a zero."""
        codec = super().codec_of(quantizer)
        if codec.midtread:
            raise ValueError(
                f"decision={self.name}: {quantizer.name} has a code for zero, and its ties are zeros: give "
                "ternary() or average()"
            )
        return codec

    def encode_reply(
        self, counted: Tally, context: DecideContext
    ) -> tuple[Planes, jax.Array | None, Signs]:
        """A plane of signs, with fair bits for ties, and the rows that move."""
        signs = signs_of_sum(counted, context.format)
        return [with_tie_bits(signs, context)], signs.moved, signs

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """-1 or 1; 0 in rows that do not move."""
        return decode_signs(planes, row_data, num_rows)

    def reply_words(self, max_code: int, num_rows: int, num_workers: int) -> tuple[int, int]:
        """One bit, and one for each row."""
        return 1, bits.row_words(num_rows)


@part
class Ternary(Vote):
    """``u = sign(sum_i v_i)`` in two bits, see `ternary`."""

    name = "ternary"

    def encode_reply(
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

    def reply_words(self, max_code: int, num_rows: int, num_workers: int) -> tuple[int, int]:
        """Two bits."""
        return 2, 0


@part
class Average(Vote):
    """``u = sum_i v_i / (n max_code)``, see `average`."""

    name = "average"
    divides_by_present = True

    def encode_reply(
        self, counted: Tally, context: DecideContext
    ) -> tuple[Planes, jax.Array | None, Signs]:
        """Planes of the sum, and the number of voters of each row."""
        voters, fmt = counted.voters, context.format
        if voters is None:
            shape = len(counted.planes[0]), bits.row_words(fmt.num_rows)
            voters = []
            for k in range(bits.sum_bits(fmt.num_workers, 1)):
                all_ones = jnp.uint32(0) - ((counted.present >> k) & 1)
                voters.append(jnp.broadcast_to(all_ones, shape))
        row_data = jnp.stack(voters, -1)
        signs = signs_of_sum(counted, fmt)
        return counted.planes, row_data.reshape(len(row_data), -1), signs

    def decode(
        self, planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> jax.Array:
        """``(2 sum - n max_code) / (n max_code)``; codes for zero in the sum are left out of it."""
        assert row_data is not None
        sums = bits.unpack_stored(planes, num_rows).astype(jnp.int32)
        words = row_data.reshape(len(row_data), bits.row_words(num_rows), -1)
        voters = bits.unpack_rows(words[..., 0], num_rows)
        for k in range(1, words.shape[2]):
            voters += bits.unpack_rows(words[..., k], num_rows) << k
        largest = voters.astype(jnp.int32)[..., None] * fmt.max_code
        # Of codes with a zero, those of workers that abstain are in the sum.
        zero = fmt.max_sum if fmt.midtread else largest
        signed = jnp.clip(2 * sums - zero, -largest, largest)  # whatever an owner sends
        return signed.astype(jnp.float32) / jnp.maximum(largest, 1).astype(jnp.float32)

    def reply_words(self, max_code: int, num_rows: int, num_workers: int) -> tuple[int, int]:
        """Bits of the sum, and of the number of voters of each row."""
        row_words = bits.sum_bits(num_workers, 1) * bits.row_words(num_rows)
        return (num_workers * max_code).bit_length(), row_words


def majority() -> Decision:
    """``u = sign(sum_i v_i)`` in one bit, ties broken by a fair bit; one more bit for each row of 128.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"momentum": lc.momentum.blend(), "decision": lc.decide.majority()}
      >>> tx = lc.communicate(workers="data", **parts)

    Source: Distributed Lion (arXiv 2404.00438), "MaVo"; the rule for ties and zeros is ours.
    """
    return Majority()


def ternary() -> Decision:
    """``u = sign(sum_i v_i)`` in two bits: -1, 0 or +1. A tie is a zero, to the letter of both papers.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"quantizer": lc.quantize.ternary(), "decision": lc.decide.ternary()}
      >>> tx = lc.communicate(workers="data", momentum=lc.momentum.blend(), **parts)

    Source: Distributed Lion (arXiv 2404.00438) and Lion Cub (arXiv 2411.16462), where votes cancel.
    """
    return Ternary()


def average() -> Decision:
    """``u = sum_i v_i / (n max_code)``, in ``[-1, 1]``: the planes of the sum. n workers vote on the row.

    Of codes with a zero, all workers that participate vote on each row. For signs the update is ``sum_i
    sign_i / n``. Of the sum of the n codes: ``(2 sum - n max_code) / (n max_code)``.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"momentum": lc.momentum.blend(), "decision": lc.decide.average()}
      >>> tx = lc.communicate(workers="data", **parts)

    Source: Distributed Lion (arXiv 2404.00438), "Avg".
    """
    return Average()


def with_tie_bits(signs: Signs, context: DecideContext) -> jax.Array:
    """One bit for each element: its sign, or a fair bit."""
    return signs.positive | (signs.tied & context.tie_bits)


def decode_signs(planes: Planes, moved: jax.Array | None, num_rows: int) -> jax.Array:
    """-1 or 1; 0 in rows that do not move."""
    assert moved is not None
    codes = bits.unpack_stored([*planes, bits.over_rows(moved, num_rows)], num_rows)
    return jnp.where(codes >= 2, 2 * (codes & 1).astype(jnp.int32) - 1, 0)
