"""Decisions: their contract, and those on votes, which are counted on packed words.

Codes ``q_i`` in ``0..max_code`` stand for signed votes ``v_i = 2 q_i - max_code``, so ``sum_i v_i > 0`` is
``sum_i q_i > n max_code / 2``. `majority` breaks ties by ``bits.tie_bits``: fair, and the same on every
worker. A row of 128 elements on which no worker votes gets update 0.
"""

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import bits
from lioncub_jax.exchange.bits import BLOCK, ROW
from lioncub_jax.exchange.matrices import Deal, Matrices
from lioncub_jax.exchange.quantize import Codec, Context, Quantizer
from lioncub_jax.exchange.wires import (
    Format,
    Inbox,
    Reply,
    Sums,
    zero_unless,
)

Planes: TypeAlias = Sequence[jax.Array]


def scaled(numbers: jax.Array, scales: jax.Array | None, fmt: Format) -> jax.Array:
    """Numbers in float32, times the scale of their row if it has one."""
    u = numbers.astype(jnp.float32)
    return u if scales is None else u * scales[..., None]


class ReplyCodec(NamedTuple):
    """The codec of a reply; built by the functions of `decide`.

    Attributes:
      name: for errors and reports.
      encode: of votes ``(Tally, Context) -> (planes, row_data)``; of an owner's result ``(u, Context,
        error) -> (planes, row_data, ties, error)``, ``float32[rows, 128]``, NaN where nothing is known.
      decode: ``(planes, row_data, num_rows, Format) -> (numbers [chunks, rows, 128], scales [chunks, rows]
        or None)``, as small as they can be stored.
      format: the `Format` of messages to that of replies; a reply of another size is an error.
      local_update: the update of a single worker, which needs no codes, of its direction or the owner's
        result.
      value: ``(numbers, scales, Format) -> [chunks, rows, 128]``, int32 or float32, of what `decode` gives;
        whatever an owner sends, finite.
      init: ``float[rows, 128] -> error`` before the first step; ``()`` for none.
    """

    name: str
    encode: Callable[..., Any]
    decode: Callable[[Planes, jax.Array | None, int, Format], tuple[jax.Array, jax.Array | None]]
    format: Callable[[Format], Format]
    local_update: Callable[[jax.Array], jax.Array]
    value: Callable[[jax.Array, Any, Format], jax.Array] = scaled
    init: Callable[[jax.Array], Any] = lambda rows: ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Decision(NamedTuple):
    """The decision on a chunk of rows: pure functions of what workers sent, and of the owner's state.

    Built by the functions of `decide`. It talks to no other worker, because the wire does; of whole
    matrices it talks to the other devices of its worker. A number that may be traced is an argument of a
    ``jax.tree_util.Partial``, and so a leaf.

    Attributes:
      name: for errors and reports.
      reply_codec: encodes the reply, and decodes it to ``u``.
      codec_of: the `Codec` of a `Quantizer` whose codes it takes; ``ValueError`` for one that has none.
      decide: ``(received, Context, state) -> (Reply, state)`` about the chunks of the context: one, or all
        W if the wire is not ``sharded``. Received is an `Inbox` of all workers' messages, or `Sums` from
        a wire that adds. The reply is in the format of ``reply_codec``, with ``received.present``. If no
        worker is present, the state stays, but for counters.
      init: ``(float[rows, 128], deal) -> state`` of the owner of a chunk; ``deal`` of its leaves, if they
        are dealt. None for a decision whose state is always ().
      decide_locally: with ``init``, ``(mean, present, Context, state) -> (u, state)`` of a single worker:
        ``mean`` is ``c + e`` of a bucket, ``float32[rows, 128]`` as ``u``; ``present`` is ``uint32[]``, 1,
        or 0 if the worker abstains.
      matrices_of: ``(params, specs) -> Matrices`` of each leaf, where a chunk is whole ones; else None.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import decide
      >>> votes = decide.majority()
      >>> def counted(received, context, state):  # the owner counts its steps
      ...     return votes.decide(received, context, ())[0], state + 1
      >>> counting = votes._replace(
      ...     decide=counted,
      ...     init=lambda rows, deal: jnp.zeros((), jnp.int32),
      ...     decide_locally=lambda mean, present, context, state: (mean, state + 1),
      ... )
    """

    name: str
    reply_codec: ReplyCodec
    codec_of: Callable[[Quantizer], Codec]
    decide: Callable[[Inbox | Sums, Context, Any], tuple[Reply, Any]]
    init: Callable[[jax.Array, Deal | None], Any] | None = None
    decide_locally: Callable[[jax.Array, jax.Array, Context, Any], tuple[jax.Array, Any]] | None = (
        None
    )
    matrices_of: Callable[[optax.Params, Sequence[P] | None], tuple[Matrices, ...]] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Tally(NamedTuple):
    """Counted votes.

    Attributes:
      planes: of the sum of codes, least significant first, ``uint32[chunks, words]`` each.
      voters: planes of the number of workers that vote on each row, ``uint32[chunks, blocks]`` each; None
        for codes with a zero, where all that participate do.
      present: ``uint32[]``, how many workers participate. The others sent codes for zero, or no vote.
      positive: ``uint32[chunks, words]``, where the sum of votes is above 0.
      tied: ``uint32[chunks, words]``, where it is 0.
      moved: ``uint32[chunks, blocks]``, rows that may get an update; None for all.
    """

    planes: list[jax.Array]
    voters: list[jax.Array] | None
    present: jax.Array
    positive: jax.Array
    tied: jax.Array
    moved: jax.Array | None


def tally(received: Inbox | Sums, fmt: Format) -> Tally:
    """Adds the codes of all workers: by adders on packed words, or their sums packed again.

    The sign of a sum of votes is ``sign(2 sum - voters max_code)``: compares the sum of codes with half of
    its largest value.
    """
    width, voters, moved = fmt.max_sum.bit_length(), None, None
    if isinstance(received, Inbox):
        voters = None if received.voted is None else bits.add_codes([received.voted])
        planes = bits.add_codes(received.planes)[:width]
    else:
        planes = bits.pack(received.sums.astype(jnp.uint32), width)
        if received.voters is not None:
            voters = []
            for k in range(bits.sum_bits(fmt.num_workers, 1)):
                voters.append(bits.pack_rows((received.voters >> k) & 1 > 0))
    if voters is None:
        largest = bits.constant(fmt.max_sum, width, planes[0])
    else:
        moved = reduce(operator.or_, voters)
        by_row = bits.times(voters, fmt.max_code, width)
        largest = [bits.over_rows(words, fmt.num_rows) for words in by_row]
    # Without plane 0 the number is halved and rounded down. If it was odd there is no tie.
    greater, equal = bits.compare(planes, largest[1:])
    return Tally(planes, voters, received.present, greater, equal & ~largest[0], moved)


def number_of_ties(tied: jax.Array, moved: jax.Array | None, context: Context) -> jax.Array:
    """``uint32[chunks]``: elements without a sign, in rows that move, padding left out."""
    if moved is not None:
        tied &= bits.over_rows(moved, context.format.num_rows)
    if context.row_sizes is not None:
        tied &= bits.pack(context.real())[0]
    return jnp.sum(lax.population_count(tied), axis=-1, dtype=jnp.uint32)


def pairs_of_votes(counted: Tally, context: Context) -> tuple[jax.Array, jax.Array]:
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


def vote(
    reply_codec: ReplyCodec, *, takes_zero: bool = True, divides_by_present: bool = False
) -> Decision:
    """A decision on counted votes: `majority`, `ternary`, `average`.

    Args:
      reply_codec: encodes what was counted.
      takes_zero: False where codes with a zero are refused.
      divides_by_present: the sum is divided by the number of workers that say they participate. Then codes
        with a zero of the others are made zeros, whatever they sent.

    Example:
      >>> from lioncub_jax import decide
      >>> decide.vote(decide.average().reply_codec).name
      'average'
    """

    def codec_of(quantizer: Quantizer) -> Codec:
        given, codec = f"decision={reply_codec.name}: {quantizer.name}", quantizer.vote
        if codec is None:
            raise ValueError(
                f"{given} has no codes to count, for values that travel as they are and error feedback are "
                "of values that an owner decodes: give decision=at_owner(tx), or a quantizer without them, "
                "such as sign()"
            )
        if codec.midtread and not takes_zero:
            raise ValueError(
                f"{given} has a code for zero, and its ties are zeros: give ternary() or average()"
            )
        return codec

    def decide(
        received: Inbox | Sums, context: Context, state: tuple[()]
    ) -> tuple[Reply, tuple[()]]:
        fmt = context.format
        if divides_by_present and fmt.midtread and isinstance(received, Inbox):
            participates = received.participates[:, None, None] > 0
            sent = zero_unless(participates, received.planes, fmt)
            received = received._replace(planes=sent)
        counted = tally(received, fmt)
        planes, row_data = reply_codec.encode(counted, context)
        pairs = pairs_of_votes(counted, context) if fmt.counts_pairs else ()
        ties = number_of_ties(counted.tied, counted.moved, context)
        return Reply(planes, row_data, ties, pairs, received.present), state

    return Decision(reply_codec.name, reply_codec, codec_of, decide)


def majority() -> Decision:
    """``u = sign(sum_i v_i)`` in one bit, ties broken by a fair bit; one more bit for each row of 128.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"momentum": lc.momentum.blend(), "decision": lc.decide.majority()}
      >>> tx = lc.communicate(workers="data", **parts)

    Source: Distributed Lion (arXiv 2404.00438), "MaVo"; the rule for ties and zeros is ours.
    """

    def encode(counted: Tally, context: Context) -> tuple[Planes, jax.Array | None]:
        return [with_tie_bits(counted.positive, counted.tied, context)], counted.moved

    return vote(
        ReplyCodec("majority", encode, decode_signs, signs_format, jnp.sign), takes_zero=False
    )


def ternary() -> Decision:
    """``u = sign(sum_i v_i)`` in two bits: -1, 0 or +1. A tie is a zero, to the letter of both papers.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"quantizer": lc.quantize.ternary(), "decision": lc.decide.ternary()}
      >>> tx = lc.communicate(workers="data", momentum=lc.momentum.blend(), **parts)

    Source: Distributed Lion (arXiv 2404.00438) and Lion Cub (arXiv 2411.16462), where votes cancel.
    """

    def encode(counted: Tally, context: Context) -> tuple[Planes, jax.Array | None]:
        return [counted.positive, counted.tied], None

    def decode(
        planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> tuple[jax.Array, None]:
        return bits.unpack_short(planes), None

    def value(codes: jax.Array, scales: None, fmt: Format) -> jax.Array:
        return jnp.where(codes >= 2, 0, 2 * (codes & 1).astype(jnp.int32) - 1)

    return vote(ReplyCodec("ternary", encode, decode, lambda fmt: fmt.reply(2, 0), jnp.sign, value))


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

    def encode(counted: Tally, context: Context) -> tuple[Planes, jax.Array | None]:
        """Planes of the sum, and the number of voters of each row."""
        voters, fmt = counted.voters, context.format
        if voters is None:
            shape = len(counted.planes[0]), bits.row_words(fmt.num_rows)
            voters = []
            for k in range(bits.sum_bits(fmt.num_workers, 1)):
                all_ones = jnp.uint32(0) - ((counted.present >> k) & 1)
                voters.append(jnp.broadcast_to(all_ones, shape))
        row_data = jnp.stack(voters, -1)
        return counted.planes, row_data.reshape(len(row_data), -1)

    def decode(
        planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of each element, and ``n`` of each row."""
        assert row_data is not None
        words = row_data.reshape(len(row_data), bits.row_words(num_rows), -1)
        voters = bits.unpack_rows(words[..., 0], num_rows)
        for k in range(1, words.shape[2]):
            voters += bits.unpack_rows(words[..., k], num_rows) << k
        return bits.unpack_short(planes), voters

    def value(sums: jax.Array, voters: jax.Array, fmt: Format) -> jax.Array:
        """``(2 sum - n max_code) / (n max_code)``; codes for zero in the sum are left out of it."""
        sums = sums.astype(jnp.int32)
        largest = voters.astype(jnp.int32)[..., None] * fmt.max_code
        # Of codes with a zero, those of workers that abstain are in the sum.
        zero = fmt.max_sum if fmt.midtread else largest
        signed = jnp.clip(2 * sums - zero, -largest, largest)  # whatever an owner sends
        return signed.astype(jnp.float32) / jnp.maximum(largest, 1).astype(jnp.float32)

    def reply_format(fmt: Format) -> Format:
        row_words = bits.sum_bits(fmt.num_workers, 1) * bits.row_words(fmt.num_rows)
        return fmt.reply(fmt.max_sum.bit_length(), row_words)

    codec = ReplyCodec("average", encode, decode, reply_format, jnp.sign, value)
    return vote(codec, divides_by_present=True)


# --- Signs in one bit, and the rows that move


def with_tie_bits(positive: jax.Array, tied: jax.Array, context: Context) -> jax.Array:
    """One bit for each element: its sign, or a fair bit."""
    return positive | (tied & context.tie_bits(positive.shape[-1]))


def decode_signs(
    planes: Planes, moved: jax.Array | None, num_rows: int, fmt: Format
) -> tuple[jax.Array, None]:
    """-1 or 1; 0 in rows that do not move."""
    assert moved is not None
    [positive] = planes
    return bits.unpack_signs(positive, moved), None


def signs_format(fmt: Format) -> Format:
    """One bit for each element, and one for each row."""
    return fmt.reply(1, bits.row_words(fmt.num_rows))
