"""Wires: the collectives of codes between workers.

| wire | messages | replies | bytes each worker sends, d parameters, p bits up, q down |
|---|---|---|---|
| ``two_phase()`` | all-to-all of packed codes | all-gather of packed replies | (W-1)/W (p + q) d/8 |
| ``gathered()`` | all-gather of packed codes | | (W-1) p d/8 |
| ``counts(dtype)`` | all-reduce of integers | | 2 (W-1)/W d sizeof(dtype) |
| ``all_reduce()`` | all-reduce of values | | 2 (W-1)/W d * 4 (bfloat16: 2) |

The rows of a bucket are cut into as many chunks as there are workers. About one chunk a worker sends a
message, and the chunk's owner sends a reply; both are words of 32 bits:

    message    planes of codes | 1: participates | of each row: voted on (1 bit), or its scale (bfloat16)
    reply      planes of the decision | ties | workers that participated | pairs of votes | data of the rows

Row j of a packed message, ``uint32[chunks, words]``, goes to the owner of chunk j. What arrives is bounded:
a worker may send any words, and has one vote.

In the order of the file: messages and replies; wires; and the collectives in full precision, which are
means and sums over the workers, and the gradients' and replies' way inside a group of devices. What crosses
the shards of a leaf is in `mesh.axes`. Names by which `programs.watch` finds what is sent are those of
`programs.scopes`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from lioncub_jax.exchange import bits, layout
from lioncub_jax.exchange.bits import (
    ROW,
    WORDS_PER_ROW,
    common_dtype,
    high_and_low,
    of_high_and_low,
)
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes
from lioncub_jax.programs.compilations import mark_vote
from lioncub_jax.programs.scopes import floats, sent_by_workers

__all__ = ["Format", "Wire", "all_reduce", "counts", "gathered", "two_phase"]

# --- Messages and replies

CACHE_LINE, VECTOR = 32, 128  # words
LARGEST_BFLOAT16 = float(jnp.finfo(jnp.bfloat16).max)


class Coded(NamedTuple):
    """Codes of one worker about a bucket, as `Codec.finish` makes them.

    Attributes:
      planes: ``uint32[words]`` each: plane k has bit k of every code.
      scales: ``float32[rows]``, the scale of each row, or None for codes without.
      voted: ``uint32[blocks]``, a bit for each row, set where the worker votes; None for codes with a zero,
        and for dense values.
      finite: ``bool[]``: all values are.
      halves: the codes half packed, from which the worker decodes its own; () where none are.
    """

    planes: list[jax.Array]
    scales: jax.Array | None
    voted: jax.Array | None
    finite: jax.Array
    halves: Any = ()


class Message(NamedTuple):
    """What one worker sends about a bucket, padded to W chunks.

    Attributes:
      planes: ``uint32[words]`` each, plane k with bit k of every code; of dense values their own bits.
      voted: ``uint32[blocks]``, one bit for each row on which the worker votes; None for codes with a
        zero, or that are decoded.
      scales: ``bfloat16[rows]``, the scale of each row, or None where it stays at the worker.
      participates: ``bool[]``: the worker does.
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


class Reply(NamedTuple):
    """A decision on some chunks, and statistics of the votes on them.

    Attributes:
      planes: ``uint32[chunks, words]`` each.
      row_data: ``uint32[chunks, words]``, packed numbers of the rows; None without.
      ties: ``uint32[chunks]``, elements with votes that cancel, in rows that move; or ``uint32[]``, 0,
        where none are counted.
      pairs: ``float32[chunks]`` each, pairs of votes that differ, and all pairs; () but for votes of one
        bit.
      present: ``uint32[]``, how many workers participate.
    """

    planes: Sequence[jax.Array]
    row_data: jax.Array | None
    ties: jax.Array
    pairs: Sequence[jax.Array]
    present: jax.Array


class Format(NamedTuple):
    """Contents of the messages, or of the replies, about one chunk of a bucket, and their words.

    Attributes:
      num_workers: W.
      num_rows: rows of one chunk.
      max_code: the largest code; 0 for dense values.
      midtread: a code means zero.
      dense: dtype of values that travel as they are, or None.
      marks_rows: the message has a bit for each row, set where the worker votes on it.
      sends_scales: the message has the scale of each row.
      counts_pairs: the reply has pairs of votes among its statistics.
      planes: number of planes.
      plane_words: words of each.
      row_words: words of the rows' data.
      numbers: single numbers.
      multiple: a long one is padded to a multiple of so many words: whole cache lines.
    """

    num_workers: int
    num_rows: int
    max_code: int
    midtread: bool
    dense: np.dtype | None
    marks_rows: bool
    sends_scales: bool
    counts_pairs: bool
    planes: int
    plane_words: int
    row_words: int
    numbers: int = 1
    multiple: int = CACHE_LINE

    @property
    def max_sum(self) -> int:
        """The largest sum of codes, ``W max_code``."""
        return self.num_workers * self.max_code

    @property
    def words(self) -> int:
        """All words, padding included."""
        words = self.planes * self.plane_words + self.numbers + self.row_words
        return padded_size(words, self.multiple)

    def reply(self, planes: int, row_words: int, words_per_row: int = WORDS_PER_ROW) -> "Format":
        """That of replies to such messages, in whole vectors of a TPU."""
        return self._replace(
            planes=planes,
            plane_words=self.num_rows * words_per_row,
            row_words=row_words,
            numbers=4 if self.counts_pairs else 2,
            multiple=VECTOR,
        )


def padded_size(words: int, multiple: int) -> int:
    """Words up to a multiple; short messages are not padded, since that would add more than 1 %.

    A CPU unpacks messages that do not begin at a cache line five times slower. XLA for TPU replaces an
    all-gather of a size that is no multiple of 128 by an all-reduce of twice the bytes.
    """
    return bits.round_up(words, multiple) if words >= 100 * VECTOR else words


def addressed(codes: Coded, fmt: Format, participates: jax.Array) -> Message:
    """The message about a bucket, padded to W chunks.

    A worker that does not participate sends nothing that counts: codes for zero, no row with a vote, or
    scales of 0. Dense values stay as they are, and the owner leaves them out by ``participates``.
    """
    planes = [_padded(x, fmt, fmt.plane_words) for x in codes.planes]
    voted, scales = None, None
    if fmt.midtread:
        planes = zero_unless(participates, planes, fmt)
    if fmt.marks_rows:
        voted = jnp.where(participates, _padded(codes.voted, fmt, fmt.row_words), 0)
    if fmt.sends_scales:
        scales = jnp.where(participates, _padded(codes.scales, fmt, fmt.num_rows), 0)
        scales = scales.astype(jnp.bfloat16)
    return Message(planes, voted, scales, participates)


def zero_unless(
    participates: jax.Array, planes: Sequence[jax.Array], fmt: Format
) -> list[jax.Array]:
    """Planes ``uint32[...]`` of codes with a zero, with codes for zero where ``participates`` is False."""
    zeros = bits.constant(fmt.max_code // 2, len(planes), planes[0])
    return [jnp.where(participates, x, zero) for x, zero in zip(planes, zeros, strict=True)]


def _padded(x: Any, fmt: Format, words: int) -> jax.Array:
    return layout.pad_rows(x, fmt.num_workers * words)


def pack_message(message: Message, fmt: Format) -> jax.Array:
    """Packs a message about all chunks: ``uint32[chunks, words]``."""
    row_data = message.voted
    if message.scales is not None:
        row_data = message.scales.view(jnp.uint32)
    numbers = [message.participates.astype(jnp.uint32)]
    return concatenate(fmt, fmt.num_workers, message.planes, numbers, row_data)


def unpack_message(words: jax.Array, fmt: Format) -> Inbox:
    """Unpacks the messages of all workers, ``uint32[workers, chunks, words]``.

    Codes above the largest count as the largest, and only on rows that are voted on; scales that are no
    positive number count as 0.
    """
    planes, numbers, row_data = split(fmt, words)
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
    numbers = [reply.ties, reply.present, *[x.view(jnp.uint32) for x in reply.pairs]]
    return concatenate(fmt, len(reply.planes[0]), reply.planes, numbers, reply.row_data)


def unpack_reply(words: jax.Array, fmt: Format) -> Reply:
    """Unpacks the replies of all owners, ``uint32[chunks, words]``; present is the median of theirs."""
    planes, numbers, row_data = split(fmt, words)
    ties, present, *pairs = [numbers[:, k] for k in range(fmt.numbers)]
    elements = fmt.num_rows * ROW
    ties = jnp.minimum(ties, np.uint32(min(elements, 2**32 - 1)))
    if pairs:
        unlike, total = [x.view(jnp.float32) for x in pairs]
        largest = float(elements * fmt.num_workers**2 // 2)
        total = jnp.where(total >= 0, jnp.minimum(total, largest), 0)
        unlike = jnp.where(unlike >= 0, jnp.minimum(unlike, total), 0)
        pairs = [unlike, total]
    present = jnp.minimum(jnp.sort(present)[len(present) // 2], fmt.num_workers)
    return Reply(planes, row_data, ties, pairs, present)


def concatenate(
    fmt: Format,
    chunks: int,
    planes: Sequence[jax.Array],
    numbers: Sequence[jax.Array],
    row_data: jax.Array | None,
) -> jax.Array:
    """Concatenates fields to ``uint32[chunks, words]``; a single number may be the same for all chunks."""
    row_words = 0 if row_data is None else row_data.size // chunks
    if (len(planes), len(numbers), row_words) != (fmt.planes, fmt.numbers, fmt.row_words):
        raise ValueError(
            f"a message or reply has {len(planes)} planes, {len(numbers)} numbers and {row_words} words of "
            f"rows, and its format says {fmt.planes}, {fmt.numbers} and {fmt.row_words}: give what "
            "ReplyCodec.format or the Codec says (numbers of a reply: ties, present, and two for pairs)"
        )
    fields = [*planes]
    for x in numbers:
        fields.append(jnp.broadcast_to(x, (chunks,)))
    if row_data is not None:
        fields.append(row_data)
    words = jnp.concatenate([x.reshape(chunks, -1) for x in fields], axis=1)
    return jnp.pad(words, ((0, 0), (0, fmt.words - words.shape[1])))


def split(fmt: Format, words: jax.Array) -> tuple[list[jax.Array], jax.Array, Any]:
    """Undoes `concatenate`, of ``uint32[..., words]``: planes, single numbers, and data of rows or None."""
    ends = [fmt.plane_words * (k + 1) for k in range(fmt.planes)]
    *planes, rest = jnp.split(words, ends, axis=-1)
    row_data = None
    if fmt.row_words:
        row_data = rest[..., fmt.numbers : fmt.numbers + fmt.row_words]
    return planes, rest[..., : fmt.numbers], row_data


# --- Wires


class Wire(NamedTuple):
    """The collectives of an exchange; built by the functions of this module.

    Attributes:
      name: for errors and reports.
      collect: ``(Message, Format, axis) -> Inbox`` about the chunks on which this worker decides, or
        ``Sums`` about all chunks.
      gather: ``(uint32[chunks, words], axis) -> uint32[W, words]`` of packed replies, the same on every
        worker; as they are, if every worker decides on all chunks.
      sharded: each worker owns one chunk; else every worker decides on all.
      adds: "codes" or "values" where it adds those; None where it carries both to their owners.
    """

    name: str
    collect: Callable[[Message, Format, Axes], Inbox | Sums]
    gather: Callable[[jax.Array, Axes], jax.Array] = lambda replies, axis: replies
    sharded: bool = False
    adds: str | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


@jax.named_scope("lioncub.up")
def collect(wire: Wire, message: Message, fmt: Format, axis: Axes) -> Inbox | Sums:
    """Messages of all workers about the chunks on which this worker decides, or sums of all messages."""
    with sent_by_workers(axis):
        return wire.collect(mark_vote(message), fmt, axis)


@jax.named_scope("lioncub.down")
def publish(wire: Wire, reply: Reply, fmt: Format, axis: Axes, group: Axes) -> Reply:
    """Replies of all owners, the same on every worker: planes ``uint32[devices chunks, words]``.

    In a group, of the parts of all of its devices; else ``devices`` is 1.
    """
    words = wire.gather(pack_reply(reply, fmt), axis)
    words = from_group(words, group) if group else words[None]
    return unpack_reply(words.reshape(-1, words.shape[-1]), fmt)


def two_phase() -> Wire:
    """All-to-all of packed codes, a decision at the owner of each chunk, all-gather of packed replies.

    Traffic does not grow with the number of workers. The default.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, workers="data", wire=lc.wires.two_phase())

    Source: Lion Cub (arXiv 2411.16462), "1-bit all-reduce"; p bits up and 1 down are ours.
    """

    def collect(message: Message, fmt: Format, axis: Axes) -> Inbox:
        packed = pack_message(message, fmt)
        received = lax.all_to_all(packed, axis, split_axis=0, concat_axis=0, tiled=True)
        return unpack_message(received[:, None], fmt)

    def gather(replies: jax.Array, axis: Axes) -> jax.Array:
        return gather_words(replies[0], axis)

    return Wire("two-phase", collect, gather, sharded=True)


def gathered() -> Wire:
    """All-gather of the packed codes of all workers; every worker counts for itself. For two workers.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, workers="data", wire=lc.wires.gathered())
    """

    def collect(message: Message, fmt: Format, axis: Axes) -> Inbox:
        received = gather_words(pack_message(message, fmt).reshape(-1), axis)
        received = received.reshape(fmt.num_workers, fmt.num_workers, -1)
        return unpack_message(received, fmt)

    return Wire("gathered", collect)


def counts(dtype: DTypeLike = jnp.int8) -> Wire:
    """All-reduce of codes as small integers.

    Args:
      dtype: ``int8``, ``int16`` or ``int32``; a sum that could exceed it is refused when traced.

    Raises:
      ValueError: for another dtype.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"quantizer": lc.quantize.integer(8), "wire": lc.wires.counts()}
      >>> tx = lc.lion_cub(1e-4, workers="data", **parts)

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce" with int8.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in ("int8", "int16", "int32"):
        raise ValueError(f"counts({dtype.name}): give int8, int16 or int32")

    def collect(message: Message, fmt: Format, axis: Axes) -> Sums:
        unit = 2 if fmt.midtread else 1  # votes of codes with a zero are even
        _check_countable(fmt.num_workers, fmt.max_sum // unit, int(jnp.iinfo(dtype).max))
        codes, voted = _unpacked(message, fmt)
        signed = (2 * codes.astype(jnp.int32) - fmt.max_code) // unit
        voters = jnp.zeros(0, dtype)
        if voted is not None:
            signed = signed * voted.astype(jnp.int32)[..., None]
            voters = voted.reshape(-1).astype(dtype)
        # Votes, voters of each row, and workers that participate, in one all-reduce.
        sent = signed.astype(dtype).reshape(-1), voters, message.participates[None].astype(dtype)
        total = lax.psum(jnp.concatenate(sent), axis).astype(jnp.int32)
        sums, voters, present = jnp.split(total, [signed.size, signed.size + voters.size])
        # A sum does not show who sent what, so a worker that lies decides all of it; but it stays a sum.
        present = jnp.minimum(present[0].astype(jnp.uint32), fmt.num_workers)
        limit, counted = jnp.int32(fmt.max_sum), None
        if voted is not None:
            counted = voters.reshape(voted.shape).astype(jnp.uint32)
            counted = jnp.minimum(counted, fmt.num_workers)
            limit = counted.astype(jnp.int32)[..., None] * fmt.max_code
        sums = jnp.clip((unit * sums.reshape(codes.shape) + limit) // 2, 0, limit)
        return Sums(sums, counted, present)

    return Wire(f"counts({dtype.name})", collect, adds="codes")


def all_reduce() -> Wire:
    """All-reduce of the values of a ``dense`` quantizer, in its dtype: what others do. The baseline.

    Example:
      >>> import lioncub_jax as lc
      >>> exact = {"quantizer": lc.quantize.dense(), "wire": lc.wires.all_reduce()}
      >>> tx = lc.owner_lion(1e-4, workers="data", **exact)
    """

    def collect(message: Message, fmt: Format, axis: Axes) -> Sums:
        words = message.planes[0].reshape(fmt.num_workers, fmt.num_rows, -1)
        values = words.view(fmt.dense).astype(jnp.float32)
        values = jnp.where(jnp.isfinite(values) & message.participates, values, 0)
        values = values.astype(fmt.dense)
        # Apart from the values, because bfloat16 cannot count beyond 256 workers.
        with floats(values):
            sums, present = lax.psum((values, message.participates.astype(jnp.uint32)), axis)
        return Sums(sums.astype(jnp.float32), None, jnp.minimum(present, fmt.num_workers))

    return Wire("all-reduce", collect, adds="values")


def _unpacked(message: Message, fmt: Format) -> tuple[jax.Array, jax.Array | None]:
    """Codes ``uint32[chunks, rows, 128]``, 0 without a vote; ``uint32[chunks, rows]``, 1 with one."""
    planes = [x.reshape(fmt.num_workers, -1) for x in message.planes]
    if message.voted is None:
        return bits.unpack(planes), None
    voted = message.voted.reshape(fmt.num_workers, -1)
    codes = bits.unpack(voted_planes(planes, voted, fmt))
    return codes, bits.unpack_rows(voted, fmt.num_rows)


def _check_countable(num_workers: int, reach: int, largest: int) -> None:
    if reach > largest:
        raise ValueError(
            f"counts: the sum over {num_workers} workers can reach {reach}, but the wire counts to "
            f"{largest}; use a wider dtype, fewer bits, or the two_phase wire, which has no such bound"
        )


# --- In full precision


def mean_over_workers(
    tree: optax.Updates, axis: Axes, dtype: DTypeLike | None = None
) -> optax.Updates:
    """Averages every leaf: one all-reduce with as many operands as leaves.

    Args:
      tree: of arrays that vary over ``axis``.
      axis: the mesh axis of the workers.
      dtype: what travels of real leaves, and in what they are added; None for float32, or the leaf's own
        dtype where that is wider. Complex leaves travel as they are.

    Returns:
      The same tree, the same on every worker, in that dtype and then the leaf's own.
    """

    def as_sent(x: jax.Array) -> jax.Array:
        own = dtype is None or jnp.iscomplexobj(x)
        return x.astype(common_dtype(x, jnp.float32) if own else dtype)

    sent = jax.tree.map(as_sent, tree)
    with floats(sent):
        means = lax.pmean(sent, axis)
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, tree)


def sum_over_workers(tree: optax.Updates, axis: Axes) -> optax.Updates:
    """Adds every leaf over the workers, for counts; one beyond its dtype is the largest that this holds."""
    sums = lax.psum(jax.tree.map(high_and_low, tree), axis)
    return jax.tree.map(lambda total, x: of_high_and_low(total, x.dtype), sums, tree)


def sum_of_floats(tree: Any, axis: Axes) -> Any:
    """Adds every leaf, of floats, over the workers: one all-reduce with as many operands as leaves."""
    with floats(tree):
        return lax.psum(tree, axis)


def max_over_workers(x: jax.Array, axis: Axes) -> jax.Array:
    """The largest of a number over the workers: for results of a mapped step."""
    with floats(x):
        return lax.pmax(x, axis)


def min_over_workers(x: jax.Array, axis: Axes) -> jax.Array:
    """The smallest of a number over the workers."""
    with floats(x):
        return lax.pmin(x, axis)


def agreed(tree: optax.Params, axis: Axes) -> optax.Params:
    """The first worker's leaves, of those with a type that varies over ``axis``; all others as they are."""

    def agree(x: jax.Array) -> jax.Array:
        differs = tuple(sorted(axes.varying_axes(x).intersection(axis)))
        return from_one(x, axes.worker_index(differs) == 0, differs) if differs else x

    with floats(tree):
        return jax.tree.map(agree, tree)


def gather_words(words: jax.Array, axis: Axes) -> jax.Array:
    """``uint32[words]`` of each worker to ``uint32[workers, words]``, the same on every worker.

    One all-gather, or two of as many bytes together where XLA would make an all-reduce of one.
    """
    size = padded_size(words.size, VECTOR)
    padded = jnp.pad(words, (0, size - words.size))
    row = _grid_row(padded.size, lax.axis_size(axis))
    if row == 1:
        return lax.all_gather(padded, axis, to="invarying")[:, : words.size]
    return _gather_in_two(padded, axis, row)[:, : words.size]


_MOST_REDUCED = 2**24  # bytes


def _grid_row(words: int, workers: int) -> int:
    """Workers in a row of the grid that is gathered along columns, then rows; 1 for one all-gather.

    XLA for TPU makes an all-reduce, of twice the bytes, of an all-gather that joins all chips of a slice of
    64 or more: in a torus of two dimensions (the kinds called "lite") up to a size of the result, in one of
    three always. It does not change an all-gather over some chips of the slice. A vote on one matrix,
    compiled for 256 chips of v5e by jax 0.12.0, sends 2.1 MB in place of 3.2.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if device is None or device.platform != "tpu" or not 64 <= workers == mesh.size:
        return 1
    if "lite" in device.device_kind and 4 * workers * words > _MOST_REDUCED:
        return 1
    return max(k for k in range(1, math.isqrt(workers) + 1) if workers % k == 0)


def _gather_in_two(words: jax.Array, axis: Axes, row: int) -> jax.Array:
    """Gathers along columns, then rows: that order sends least between the slices of a larger mesh."""
    workers = np.arange(lax.axis_size(axis)).reshape(-1, row)
    column = lax.all_gather(words, axis, axis_index_groups=workers.T.tolist())
    every = lax.all_gather(column, axis, axis_index_groups=workers.tolist())
    if axes.tracked(axis):
        # all_gather in groups gives a varying type. A pmax over groups of one worker only changes the type:
        # nothing is sent, and XLA for TPU removes it.
        every = lax.pmax(every, axis, axis_index_groups=workers.reshape(-1, 1).tolist())
    return every.swapaxes(0, 1).reshape(workers.size, -1)


def gather_rows(rows: jax.Array, axis: Axes) -> jax.Array:
    """All rows of a bucket, of the chunks ``[rows, 128]`` along an axis, as they are: for checkpoints."""
    return lax.all_gather(rows, axis, tiled=True)


def mean_part(rows: jax.Array, group: Axes) -> jax.Array:
    """Averages ``float32[rows, 128]`` over the devices of a group and keeps this device's part of it.

    One reduce-scatter in full precision over the fast links inside a group.
    """
    summed = lax.psum_scatter(rows, group, scatter_dimension=0, tiled=True)
    return summed / lax.axis_size(group)


def swapped(parts: jax.Array, devices: Axes) -> jax.Array:
    """Part j of ``[devices, rows, 128]`` to device j of a worker, from each of them; undoes itself."""
    return lax.all_to_all(parts, devices, split_axis=0, concat_axis=0, tiled=True)


def gathered_parts(part: jax.Array, devices: Axes) -> jax.Array:
    """``[1, rows, 128]`` of each device of a worker, ``[devices, rows, 128]``."""
    return lax.all_gather(part, devices, tiled=True)


def from_group(part: jax.Array, group: Axes) -> jax.Array:
    """``[...]`` of each device's part to ``[group, ...]``, the same on the whole group."""
    return lax.all_gather(part, group, to="invarying")


def from_one(words: jax.Array, source: jax.Array, axis: Axes) -> jax.Array:
    """The array that one device of an axis holds, on all of them: a sum of it and zeros."""
    return lax.psum(jnp.where(source, words, 0), axis)
