"""How workers agree: every collective of the library is in this file, each with what travels on it.

| wire | up | down | bytes each worker sends, d parameters, p bits up, q down |
|---|---|---|---|
| ``two_phase()`` | all-to-all of packed codes | all-gather of the reply | (W-1)/W (p + q) d/8 |
| ``gathered()`` | all-gather of packed codes | nothing | (W-1) p d/8 |
| ``counts(dtype)`` | all-reduce of integers | nothing | 2 (W-1)/W d sizeof(dtype) |
| ``lanes()`` | all-reduce of fields in words | nothing | 2 (W-1)/W d * 4/floor(32/field) |
| ``all_reduce()`` | all-reduce of values | nothing | 2 (W-1)/W d * 4 (bfloat16: 2) |

A *message* about a chunk of rows is the planes of the codes, then one word that says whether the worker
takes part at all, then a row word for each block that says on which rows it votes (or the steps of the
rows, where values are decoded). A *reply* is the planes, the ties, how many workers took part, of votes
of one bit the pairs of votes, and the numbers of the rows. A `Format` knows both.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax.exchange import bits, layout
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.decide import Decision, Inbox, Reply, Sums
from lioncub_jax.exchange.layout import Bucket
from lioncub_jax.exchange.means import common_dtype
from lioncub_jax.exchange.quantize import Message, Quantizer
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes

__all__ = ["Format", "Wire", "Words", "all_reduce", "counts", "gathered", "lanes", "two_phase"]


def voting(axis: Axes) -> Any:
    """A named scope for what workers send, by which a compiled program tells who its workers are."""
    sizes = ",".join(f"{n}:{k}" for n, k in jax.sharding.get_abstract_mesh().shape.items())
    return jax.named_scope(f"workers({','.join(axis)})of({sizes})")


def by_count() -> Any:
    """A named scope for a branch that depends on a replicated count only."""
    return jax.named_scope("lioncub.by_count")


def _floats(tree: Any) -> Any:
    """A named scope for floats that are meant to travel between workers, with the sizes of the arrays."""
    sizes = sorted({x.size for x in jax.tree.leaves(tree)})
    return jax.named_scope(".".join(["lioncub.floats", *map(str, sizes)]))


class Words(NamedTuple):
    """Words about one chunk: planes, some single numbers, the numbers of its rows, and padding.

    Attributes:
      planes: how many.
      of_plane: words of each.
      numbers: how many single numbers.
      of_rows: words of the numbers of the rows.
      to: their sum is rounded up to a multiple of it, see `_rounded_up`.
    """

    planes: int
    of_plane: int
    numbers: int
    of_rows: int
    to: int

    @property
    def size(self) -> int:
        """How many words."""
        return _rounded_up(self.planes * self.of_plane + self.numbers + self.of_rows, self.to)

    def join(self, chunks: int, planes: Sequence[Any], numbers: Sequence[Any], rows: Any) -> Any:
        """Of so many chunks, ``uint32[chunks, size]``; single numbers may be the same in all."""
        parts = [*planes, *[jnp.broadcast_to(x, (chunks,)) for x in numbers]]
        parts += [] if rows is None else [rows]
        joined = jnp.concatenate([x.reshape(chunks, -1) for x in parts], axis=1)
        return jnp.pad(joined, ((0, 0), (0, self.size - joined.shape[1])))

    def split(self, words: jax.Array) -> tuple[list[jax.Array], jax.Array, Any]:
        """Undoes ``join``, ``uint32[..., size]``: planes, single numbers, and those of rows or None."""
        ends = range(self.of_plane, self.planes * self.of_plane + 1, self.of_plane)
        *planes, rest = jnp.split(words, list(ends), axis=-1)
        rows = rest[..., self.numbers : self.numbers + self.of_rows] if self.of_rows else None
        return planes, rest[..., : self.numbers], rows


class Format(NamedTuple):
    """What travels for one bucket, both ways.

    Attributes:
      bucket: the flat buffer.
      up: the codes that go up.
      workers: how many workers there are.
      rows: rows of the chunk that each of them owns.
      top: the largest code.
      sends_scales: whether each row's scale travels, because the owner decodes values.
      sends_votes: whether a bit says on which rows a worker votes; codes with a zero say so themselves.
      message: words about one chunk that go up, in whole cache lines.
      reply: words about one chunk that come back, in whole vectors of a TPU.
    """

    bucket: Bucket
    up: Quantizer
    workers: int
    rows: int
    top: int
    sends_scales: bool
    sends_votes: bool
    message: Words
    reply: Words

    @classmethod
    def of(cls, bucket: Bucket, up: Quantizer, decision: Decision) -> "Format":
        """The format of a bucket's messages and replies."""
        workers, rows, coder = bucket.workers, bucket.chunk, decision.coder
        scales, votes = decision.decodes and not up.dense, not (decision.decodes or up.has_zero)
        top = up.top(workers)
        planes = 1 if up.dense else top.bit_length()
        of_rows = rows // 2 if scales else bits.row_words(rows) if votes else 0
        message = Words(planes, rows * up.words_per_row, 1, of_rows, _LINE)
        of_rows = coder.row_words(rows, workers)
        numbers, planes = 4 if decision.counts_pairs(up) else 2, coder.planes(top, workers)
        reply = Words(planes, rows * coder.words_per_row, numbers, of_rows, _LANES)
        return cls(bucket, up, workers, rows, top, scales, votes, message, reply)

    def joined(self, codes: Sequence[Message], abstains: jax.Array) -> Message:
        """The message about a whole bucket, padded to its chunks; without votes if the worker abstains."""

        def whole(parts: Sequence[Any], each: int) -> jax.Array:
            return layout.pad_rows(jnp.concatenate(parts), self.workers * each)

        voted, scales = None, None
        planes = [
            whole(parts, self.message.of_plane)
            for parts in zip(*[x.planes for x in codes], strict=True)
        ]
        if self.up.has_zero:
            for k, plane in enumerate(planes):
                zero = jnp.uint32(0xFFFFFFFF * (self.top // 2 >> k & 1))
                planes[k] = jnp.where(abstains, zero, plane)
        if self.sends_votes:
            voted = whole([x.voted for x in codes], self.message.of_rows)
            voted = jnp.where(abstains, 0, voted)
        if self.sends_scales:
            scales = jnp.where(abstains, 0, whole([x.scales for x in codes], self.rows))
        return Message(planes, voted, scales, ~abstains)

    def pack(self, message: Message) -> jax.Array:
        """A message about all chunks: ``uint32[W, words]``."""
        rows = message.voted if message.scales is None else message.scales.view(jnp.uint32)
        takes_part = message.valid.astype(jnp.uint32)
        return self.message.join(self.workers, message.planes, [takes_part], rows)

    def unpack(self, messages: jax.Array) -> Inbox:
        """Undoes ``pack`` for all workers: ``uint32[W, chunks, words]``.

        A worker may send any words, and has one vote: codes that are none are the largest, and count only
        on rows that it votes on; steps that are none are 0; it takes part or does not.
        """
        planes, numbers, rows = self.message.split(messages)
        voted, steps, takes_part = rows, None, numbers[:, 0, 0] & 1
        if self.up.has_zero:
            planes = bits.at_most(planes, self.top)
        if self.sends_votes:
            planes = self.voted(planes, voted)
        if self.sends_scales:
            voted, steps = None, rows.view(jnp.bfloat16).astype(jnp.float32)
            steps = jnp.where((steps > 0) & (steps < jnp.inf), steps, 0)
        return Inbox(planes, voted, steps, takes_part, jnp.sum(takes_part, dtype=jnp.uint32))

    def voted(self, planes: Sequence[jax.Array], voted: jax.Array) -> list[jax.Array]:
        """Planes ``uint32[..., words]`` with zeros on rows without a vote."""
        mask = bits.over_rows(voted, self.rows)
        return [plane & mask for plane in planes]

    def pack_reply(self, reply: Reply, present: jax.Array) -> jax.Array:
        """Replies about some chunks: ``uint32[chunks, words]``."""
        numbers = jnp.uint32(reply.ties), present, *(x.view(jnp.uint32) for x in reply.pairs)
        return self.reply.join(len(reply.planes[0]), reply.planes, numbers, reply.rows)

    def unpack_reply(self, replies: jax.Array) -> tuple[Reply, jax.Array]:
        """Undoes ``pack_reply``; and how many workers took part, as most owners say."""
        planes, numbers, rows = self.reply.split(replies)
        ties, present, *pairs = (numbers[:, k] for k in range(self.reply.numbers))
        most = self.rows * ROW
        ties = jnp.minimum(ties, np.uint32(min(most, 2**32 - 1)))
        bound: Any = float(most * self.workers**2 // 2)
        for k, x in reversed([*enumerate(x.view(jnp.float32) for x in pairs)]):
            pairs[k] = bound = jnp.where(x >= 0, jnp.minimum(x, bound), 0)
        present = jnp.minimum(jnp.sort(present)[len(present) // 2], self.workers)
        return Reply(planes, rows, ties, pairs), present


class Wire(NamedTuple):
    """How messages reach the owner and replies come back; built by the functions of this module.

    Attributes:
      name: for people.
      carries: what goes up: "codes", "values" or "both".
      collect: ``(Message, Format, axis) -> Inbox or Sums``; ``valid`` of the message: the worker
        takes part. `two_phase` and `gathered` give an Inbox, all others Sums.
      owns_slice: True if each worker owns one chunk, False if everybody owns all.
      publish: ``(uint32[chunks, words], axis) -> uint32[W, words]``, same on every worker. As they are, if
        everybody owns all.
    """

    name: str
    carries: str
    collect: Callable[[Message, Format, Axes], Inbox | Sums]
    owns_slice: bool = False
    publish: Callable[[jax.Array, Axes], jax.Array] = lambda replies, axis: replies


def two_phase() -> Wire:
    """All-to-all of packed codes, a tally at the owner of each slice, all-gather of packed replies.

    Traffic does not grow with the number of workers. The default.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, workers="data", wire=lc.wires.two_phase())

    Source: Lion Cub (arXiv 2411.16462), "1-bit all-reduce"; p bits up and 1 down are ours.
    """

    def collect(message: Message, form: Format, axis: Axes) -> Inbox:
        packed = form.pack(message)
        received = lax.all_to_all(packed, axis, split_axis=0, concat_axis=0, tiled=True)
        return form.unpack(received[:, None])

    def publish(replies: jax.Array, axis: Axes) -> jax.Array:
        return gather_words(replies[0], axis)

    return Wire("two-phase", "both", collect, True, publish)


def gathered() -> Wire:
    """All-gather of everybody's packed codes; every worker counts for itself. For two workers.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, workers="data", wire=lc.wires.gathered())
    """

    def collect(message: Message, form: Format, axis: Axes) -> Inbox:
        received = gather_words(form.pack(message).reshape(-1), axis)
        return form.unpack(received.reshape(form.workers, form.workers, -1))

    return Wire("gathered", "both", collect)


def counts(dtype: Any = jnp.int8) -> Wire:
    """All-reduce of codes as small integers: ``sum_i q_i = (unit sum_i signed_i + W top) / 2``.

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

    def collect(message: Message, form: Format, axis: Axes) -> Sums:
        top, unit = form.top, 2 if form.up.has_zero else 1
        most = int(jnp.iinfo(dtype).max)
        _check_countable("counts", form.workers, form.workers * top // unit, most)
        codes, voted = _unpacked(message, form)
        signed = (2 * codes.astype(jnp.int32) - top) // unit
        if voted is not None:
            signed = signed * voted.astype(jnp.int32)[..., None]

        def add(numbers: jax.Array) -> jax.Array:
            return lax.psum(numbers, axis).astype(jnp.int32)

        sums, votes, present = _added(signed.astype(dtype), voted, message.valid, add)
        votes, present, reach = _reach(votes, present, form)
        return Sums(jnp.clip((unit * sums + reach) // 2, 0, reach), votes, present)

    return Wire(f"counts({dtype.name})", "codes", collect)


def lanes() -> Wire:
    """All-reduce of words whose fields are wide enough that no sum carries into the next.

    An ordinary integer all-reduce adds them. With ``integer(p)`` a field has ``p`` bits.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"quantizer": lc.quantize.integer(4), "wire": lc.wires.lanes()}
      >>> tx = lc.lion_cub(1e-4, workers="data", **parts)

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce" for p below 8.
    """

    def collect(message: Message, form: Format, axis: Axes) -> Sums:
        reach = form.workers * form.top
        _check_countable("lanes", form.workers, reach, 2**16 - 1)
        field = reach.bit_length()
        per_word = 32 // field
        at = bits.counted(per_word, -1, 2, field)
        codes, voted = _unpacked(message, form)

        def add(numbers: jax.Array) -> jax.Array:
            fields = jnp.pad(numbers, (0, -numbers.size % per_word)).reshape(-1, per_word)
            words = lax.psum(jnp.sum(fields << at, -1, dtype=jnp.uint32), axis)
            sums = (words[:, None] >> at) & jnp.uint32(2**field - 1)
            return sums.reshape(-1)[: numbers.size]

        sums, votes, present = _added(codes, voted, message.valid, add)
        votes, present, reach = _reach(votes, present, form)
        return Sums(jnp.minimum(sums.astype(jnp.int32), reach), votes, present)

    return Wire("lanes", "codes", collect)


def all_reduce() -> Wire:
    """All-reduce of the values of a ``dense`` quantizer, in its dtype: what others do. The baseline.

    Example:
      >>> import lioncub_jax as lc
      >>> exact = {"quantizer": lc.quantize.dense(), "wire": lc.wires.all_reduce()}
      >>> tx = lc.owner_lion(1e-4, workers="data", **exact)
    """

    def collect(message: Message, form: Format, axis: Axes) -> Sums:
        planes = [x.reshape(form.workers, -1) for x in message.planes]
        values = form.up.values(planes, None, form.rows, 1)
        values = jnp.where(message.valid, values, 0).astype(form.up.dense)
        # Apart from the values, because bfloat16 cannot count beyond 256 workers.
        with _floats(values):
            sums, present = lax.psum((values, message.valid.astype(jnp.uint32)), axis)
        return Sums(sums.astype(jnp.float32), None, jnp.minimum(present, form.workers))

    return Wire("all-reduce", "values", collect)


_LINE, _LANES = 32, 128  # words


def _rounded_up(words: int, to: int) -> int:
    """To a multiple of ``to``, but not of short messages, where it would add more than 1 %.

    A CPU unpacks messages that do not begin at a cache line five times slower. XLA for TPU replaces an
    all-gather whose size is no multiple of 128 by an all-reduce of twice the bytes.
    """
    return words + -words % to if words >= 100 * _LANES else words


def _unpacked(message: Message, form: Format) -> tuple[jax.Array, jax.Array | None]:
    """Codes ``uint32[W, rows, 128]``, 0 without a vote, and the rows with one, ``uint32[W, rows]``."""
    planes = [x.reshape(form.workers, -1) for x in message.planes]
    if message.voted is None:
        return bits.unpack(planes, form.rows), None
    voted = message.voted.reshape(form.workers, -1)
    codes = bits.unpack(form.voted(planes, voted), form.rows)
    return codes, bits.unpack_rows(voted, form.rows)


def _reach(votes: Any, present: jax.Array, form: Format) -> tuple[Any, jax.Array, Any]:
    """Votes of a row and workers that take part, no more than there are, and the largest sum of theirs.

    Nobody can tell which worker sent what of a sum, so one that lies decides all of it; but it stays a sum.
    """
    present, reach = jnp.minimum(present, form.workers), jnp.int32(form.workers * form.top)
    if votes is not None:
        votes = jnp.minimum(votes, form.workers)
        reach = votes.astype(jnp.int32)[..., None] * form.top
    return votes, present, reach


def _added(
    codes: jax.Array, voted: jax.Array | None, takes_part: jax.Array, add: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Sums of codes, votes for each row, and how many take part, in one all-reduce of them all."""
    votes = codes.reshape(-1)[:0] if voted is None else voted.reshape(-1)
    parts = codes.reshape(-1), votes.astype(codes.dtype), takes_part[None].astype(codes.dtype)
    sums, votes, present = jnp.split(
        add(jnp.concatenate(parts)), [codes.size, codes.size + votes.size]
    )
    counted = None if voted is None else votes.reshape(voted.shape).astype(jnp.uint32)
    return sums.reshape(codes.shape), counted, present[0].astype(jnp.uint32)


def _check_countable(wire: str, workers: int, reach: int, most: int) -> None:
    if reach > most:
        raise ValueError(
            f"{wire}: the sum over {workers} workers can reach {reach}, but the wire counts to {most}; "
            "use a wider dtype, fewer bits, or the two_phase wire, which has no such bound"
        )


def mean_over_workers(tree: Any, axis: Axes, dtype: Any = None) -> Any:
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
    with _floats(sent):
        means = lax.pmean(sent, axis)
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, tree)


def sum_over_workers(tree: Any, axis: Axes) -> Any:
    """Adds every leaf over the workers: for counts."""
    return lax.psum(tree, axis)


def sum_of_floats(x: jax.Array, axis: Axes) -> jax.Array:
    """Adds floats over the workers."""
    with _floats(x):
        return lax.psum(x, axis)


def max_over_workers(x: jax.Array, axis: Axes) -> jax.Array:
    """The largest of a number over the workers: for scales that all of them share."""
    with _floats(x):
        return lax.pmax(x, axis)


def agreed(tree: Any, axis: Axes) -> Any:
    """The first worker's leaves, of those whose type varies over ``axis``; leaves all others alone."""

    def agree(x: jax.Array) -> jax.Array:
        differs = tuple(sorted(axes.varying_axes(x).intersection(axis)))
        return from_one(x, axes.worker_index(differs) == 0, differs) if differs else x

    with _floats(tree):
        return jax.tree.map(agree, tree)


def gather_words(words: jax.Array, axis: Axes) -> jax.Array:
    """``uint32[n]`` of each worker to ``uint32[W, n]``, the same on every worker.

    One all-gather, or two of as many bytes together where XLA would make an all-reduce of one.
    """
    padded = jnp.pad(words, (0, _rounded_up(words.size, _LANES) - words.size))
    row = _row(padded.size, lax.axis_size(axis))
    if row == 1:
        return lax.all_gather(padded, axis, to="invarying")[:, : words.size]
    return _gather_in_two(padded, axis, row)[:, : words.size]


_MOST_REDUCED = 2**24  # bytes


def _row(words: int, workers: int) -> int:
    """Workers of a row, where words are gathered along columns and then along rows; 1 for one all-gather.

    XLA for TPU makes an all-reduce, of twice the bytes, of an all-gather that joins all chips of a slice of
    64 or more: in a torus of two dimensions (the kinds called "lite") up to a size of the result, in one of
    three always. It does not change an all-gather over a part of the slice. Seen in compiled programs of
    jax 0.10.2.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if device is None or device.platform != "tpu" or not 64 <= workers == mesh.size:
        return 1
    if "lite" in device.device_kind and 4 * workers * words > _MOST_REDUCED:
        return 1
    return max(k for k in range(1, math.isqrt(workers) + 1) if workers % k == 0)


def _gather_in_two(words: jax.Array, axis: Axes, row: int) -> jax.Array:
    """What one all-gather gives. Columns first: that sends least between the slices of a larger mesh."""
    workers = np.arange(lax.axis_size(axis)).reshape(-1, row)
    column = lax.all_gather(words, axis, axis_index_groups=workers.T.tolist())
    every = lax.all_gather(column, axis, axis_index_groups=workers.tolist())
    if axes.tracked(axis):
        # all_gather in groups gives a varying type. A pmax over groups of one worker only changes the type:
        # nothing is sent, and XLA for TPU removes it.
        every = lax.pmax(every, axis, axis_index_groups=workers.reshape(-1, 1).tolist())
    return every.swapaxes(0, 1).reshape(workers.size, -1)


def mean_slice(rows: jax.Array, group: Axes) -> jax.Array:
    """Averages ``float32[rows, 128]`` over the devices of a group and keeps this device's slice of it.

    One reduce-scatter in full precision over the fast links inside a group.
    """
    summed = lax.psum_scatter(rows, group, scatter_dimension=0, tiled=True)
    return summed / lax.axis_size(group)


def from_group(answers: jax.Array, group: Axes) -> jax.Array:
    """``uint32[...]`` of each device's slice to ``uint32[group, ...]``, the same on the whole group."""
    return lax.all_gather(answers, group, to="invarying")


def from_one(words: jax.Array, source: jax.Array, axis: Axes) -> jax.Array:
    """The array that one device of an axis holds, on all of them: a sum of it and zeros."""
    return lax.psum(jnp.where(source, words, 0), axis)
