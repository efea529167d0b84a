"""All that travels between workers, and how many words of 32 bits it takes.

The rows of a bucket are cut into as many chunks as there are workers. About one chunk a worker sends a
message, and the chunk's owner sends a reply:

    message    planes of codes | 1: participates | of each row: voted on (1 bit), or its scale (bfloat16)
    reply      planes of the decision | ties | workers that participated | pairs of votes | data of the rows

Row j of a packed message, ``uint32[chunks, words]``, goes to the owner of chunk j. What arrives is bounded:
a worker may send any words, and has one vote.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lioncub_jax.exchange import bits, layout
from lioncub_jax.exchange.bits import ROW

CACHE_LINE, VECTOR = 32, 128  # words
LARGEST_BFLOAT16 = float(jnp.finfo(jnp.bfloat16).max)


class Message(NamedTuple):
    """Codes of one worker about a piece; joined, about a whole bucket.

    Attributes:
      planes: ``uint32[words]`` each, plane k with bit k of every code; of dense values their own bits.
      voted: ``uint32[blocks]``, one bit for each row on which the worker votes; None for codes with a
        zero. Of codes that are decoded it does not travel.
      scales: ``bfloat16[rows]``, the scale of each row, or None where it stays at the worker.
      participates: ``bool[]``: all values are finite; of a bucket: the worker participates.
    """

    planes: list[jax.Array]
    voted: jax.Array | None
    scales: jax.Array | None
    participates: jax.Array


class Inbox(NamedTuple):
    """Messages of all workers about the chunks on which this worker decides.

    Attributes:
      planes: ``uint32[workers, chunks, words]`` each.
      voted: ``uint32[workers, chunks, blocks]``, or None.
      scales: ``float32[workers, chunks, rows]``, or None.
      participates: ``uint32[workers]``, 1 for a worker that participates, 0 for one that abstains.
      present: ``uint32[]``, the sum of ``participates``.
    """

    planes: list[jax.Array]
    voted: jax.Array | None
    scales: jax.Array | None
    participates: jax.Array
    present: jax.Array


class Sums(NamedTuple):
    """Sums over the workers, the same on every worker.

    Attributes:
      sums: of codes ``int32[chunks, rows, 128]``, or of values ``float32[chunks, rows, 128]``.
      voters: ``uint32[chunks, rows]``, how many workers vote on each row; None where all do.
      present: ``uint32[]``, how many workers participate.
    """

    sums: jax.Array
    voters: jax.Array | None
    present: jax.Array


class BucketStats(NamedTuple):
    """Statistics of the votes on a bucket, chunk by chunk.

    Attributes:
      ties: ``uint32[chunks]``, elements with votes that cancel, in rows that move; or ``uint32[]``, 0,
        where none are counted.
      pairs: ``float32[chunks]`` each, pairs of votes that differ, and all pairs; () but for votes of one
        bit.
      present: ``uint32[]``, how many workers participate.
    """

    ties: jax.Array
    pairs: Sequence[jax.Array]
    present: jax.Array


class Reply(NamedTuple):
    """A decision on some chunks.

    Attributes:
      planes: ``uint32[chunks, words]`` each.
      row_data: ``uint32[chunks, words]``, packed numbers of the rows; None without.
      stats: statistics of the votes.
    """

    planes: Sequence[jax.Array]
    row_data: jax.Array | None
    stats: BucketStats


class Size(NamedTuple):
    """Words of a message or a reply about one chunk.

    Attributes:
      planes: number of planes.
      plane_words: words of each.
      numbers: single numbers.
      row_words: words of the rows' data.
      multiple: long messages are padded to a multiple of it.
    """

    planes: int
    plane_words: int
    numbers: int
    row_words: int
    multiple: int

    @property
    def words(self) -> int:
        """All words, padding included."""
        words = self.planes * self.plane_words + self.numbers + self.row_words
        return padded_size(words, self.multiple)


def message_size(planes: int, plane_words: int, row_words: int) -> Size:
    """Size of a message about one chunk, in whole cache lines."""
    return Size(planes, plane_words, numbers=1, row_words=row_words, multiple=CACHE_LINE)


def reply_size(planes: int, plane_words: int, row_words: int, pairs: bool = False) -> Size:
    """Size of a reply about one chunk, in whole vectors of a TPU; ``pairs``: with the pairs of votes."""
    numbers = 4 if pairs else 2
    return Size(planes, plane_words, numbers=numbers, row_words=row_words, multiple=VECTOR)


def padded_size(words: int, multiple: int) -> int:
    """Words up to a multiple; short messages are not padded, since that would add more than 1 %.

    A CPU unpacks messages that do not begin at a cache line five times slower. XLA for TPU replaces an
    all-gather of a size that is no multiple of 128 by an all-reduce of twice the bytes.
    """
    return bits.round_up(words, multiple) if words >= 100 * VECTOR else words


class Format(NamedTuple):
    """Contents and sizes of the messages and replies of one bucket.

    Attributes:
      num_workers: W.
      num_rows: rows of one chunk.
      max_code: the largest code; 0 for dense values.
      midtread: a code means zero.
      dense: dtype of values that travel as they are, or None.
      marks_rows: the message has a bit for each row, set where the worker votes on it.
      sends_scales: the message has the scale of each row.
      message: size of a message about one chunk.
      reply: size of a reply about one chunk.
    """

    num_workers: int
    num_rows: int
    max_code: int
    midtread: bool
    dense: np.dtype | None
    marks_rows: bool
    sends_scales: bool
    message: Size
    reply: Size

    @property
    def max_sum(self) -> int:
        """The largest sum of codes, ``W max_code``."""
        return self.num_workers * self.max_code


def join(pieces: Sequence[Message], fmt: Format, participates: jax.Array) -> Message:
    """Joins the messages about the pieces of a bucket, padded to W chunks.

    A worker that does not participate sends nothing that counts: codes for zero, no row with a vote, or
    scales of 0. Dense values stay as they are, and the owner leaves them out by ``participates``.
    """
    planes, voted, scales = [], None, None
    for k in range(fmt.message.planes):
        planes.append(_padded([x.planes[k] for x in pieces], fmt, fmt.message.plane_words))
    if fmt.marks_rows:
        voted = _padded([x.voted for x in pieces], fmt, fmt.message.row_words)
    if fmt.sends_scales:
        scales = _padded([x.scales for x in pieces], fmt, fmt.num_rows)
    if fmt.midtread:
        planes = zero_unless(participates, planes, fmt)
    if voted is not None:
        voted = jnp.where(participates, voted, 0)
    if scales is not None:
        scales = jnp.where(participates, scales, 0)
    return Message(planes, voted, scales, participates)


def zero_unless(
    participates: jax.Array, planes: Sequence[jax.Array], fmt: Format
) -> list[jax.Array]:
    """Planes ``uint32[...]`` of codes with a zero, with codes for zero where ``participates`` is False."""
    zeros = bits.constant(fmt.max_code // 2, len(planes), planes[0])
    return [jnp.where(participates, x, zero) for x, zero in zip(planes, zeros, strict=True)]


def _padded(parts: Sequence[Any], fmt: Format, words: int) -> jax.Array:
    return layout.pad_rows(jnp.concatenate(parts), fmt.num_workers * words)


def pack_message(message: Message, fmt: Format) -> jax.Array:
    """Packs a message about all chunks: ``uint32[chunks, words]``."""
    row_data = message.voted
    if message.scales is not None:
        row_data = message.scales.view(jnp.uint32)
    numbers = [message.participates.astype(jnp.uint32)]
    return concatenate(fmt.message, fmt.num_workers, message.planes, numbers, row_data)


def unpack_message(words: jax.Array, fmt: Format) -> Inbox:
    """Unpacks the messages of all workers, ``uint32[workers, chunks, words]``.

    Codes above the largest count as the largest, and only on rows that are voted on; scales that are no
    positive number count as 0.
    """
    planes, numbers, row_data = split(fmt.message, words)
    participates, voted, scales = numbers[:, 0, 0] & 1, None, None
    if fmt.midtread:
        planes = bits.at_most(planes, fmt.max_code)
    if fmt.marks_rows:
        voted = row_data
        planes = voted_planes(planes, voted, fmt)
    if fmt.sends_scales:
        scales = unpack_scales(row_data)
    present = jnp.sum(participates, dtype=jnp.uint32)
    return Inbox(planes, voted, scales, participates, present)


def unpack_scales(row_data: jax.Array, largest: float = LARGEST_BFLOAT16) -> jax.Array:
    """``float32[..., rows]`` of bfloat16 in words; 0 for what is no positive number up to ``largest``."""
    scales = row_data.view(jnp.bfloat16).astype(jnp.float32)
    return jnp.where((scales > 0) & (scales <= largest), scales, 0)


def voted_planes(planes: Sequence[jax.Array], voted: jax.Array, fmt: Format) -> list[jax.Array]:
    """Planes ``uint32[..., words]`` with zeros on rows that are not voted on."""
    mask = bits.over_rows(voted, fmt.num_rows)
    return [plane & mask for plane in planes]


def pack_reply(reply: Reply, fmt: Format) -> jax.Array:
    """Packs a reply about some chunks: ``uint32[chunks, words]``."""
    ties, pairs, present = reply.stats
    numbers = [ties, present, *[x.view(jnp.uint32) for x in pairs]]
    return concatenate(fmt.reply, len(reply.planes[0]), reply.planes, numbers, reply.row_data)


def unpack_reply(words: jax.Array, fmt: Format) -> Reply:
    """Unpacks the replies of all owners, ``uint32[chunks, words]``; present is the median of theirs."""
    planes, numbers, row_data = split(fmt.reply, words)
    ties, present, *pairs = [numbers[:, k] for k in range(fmt.reply.numbers)]
    elements = fmt.num_rows * ROW
    ties = jnp.minimum(ties, np.uint32(min(elements, 2**32 - 1)))
    if pairs:
        unlike, total = [x.view(jnp.float32) for x in pairs]
        largest = float(elements * fmt.num_workers**2 // 2)
        total = jnp.where(total >= 0, jnp.minimum(total, largest), 0)
        unlike = jnp.where(unlike >= 0, jnp.minimum(unlike, total), 0)
        pairs = [unlike, total]
    present = jnp.minimum(jnp.sort(present)[len(present) // 2], fmt.num_workers)
    return Reply(planes, row_data, BucketStats(ties, pairs, present))


def concatenate(
    size: Size,
    chunks: int,
    planes: Sequence[jax.Array],
    numbers: Sequence[jax.Array],
    row_data: jax.Array | None,
) -> jax.Array:
    """Concatenates parts to ``uint32[chunks, words]``; a single number may be the same for all chunks."""
    row_words = 0 if row_data is None else row_data.size // chunks
    if (len(planes), len(numbers), row_words) != (size.planes, size.numbers, size.row_words):
        raise ValueError(
            f"a message or reply has {len(planes)} planes, {len(numbers)} numbers and {row_words} words of "
            f"rows, and its size says {size.planes}, {size.numbers} and {size.row_words}: give what "
            "Decision.reply_size or the Codec says (numbers of a reply: ties, present, and two for pairs)"
        )
    parts = [*planes]
    for x in numbers:
        parts.append(jnp.broadcast_to(x, (chunks,)))
    if row_data is not None:
        parts.append(row_data)
    words = jnp.concatenate([x.reshape(chunks, -1) for x in parts], axis=1)
    return jnp.pad(words, ((0, 0), (0, size.words - words.shape[1])))


def split(size: Size, words: jax.Array) -> tuple[list[jax.Array], jax.Array, Any]:
    """Undoes `concatenate`, of ``uint32[..., words]``: planes, single numbers, and data of rows or None."""
    ends = [size.plane_words * (k + 1) for k in range(size.planes)]
    *planes, rest = jnp.split(words, ends, axis=-1)
    row_data = None
    if size.row_words:
        row_data = rest[..., size.numbers : size.numbers + size.row_words]
    return planes, rest[..., : size.numbers], row_data
