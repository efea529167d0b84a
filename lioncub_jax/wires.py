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
rows, where values are decoded). A *reply* is the planes, the ties, how many workers took part, and the
numbers of the rows. A `Format` knows both.
"""

import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax import axes, bits, kernels, layout, means, xla
from lioncub_jax.axes import Axes
from lioncub_jax.bits import ROW
from lioncub_jax.decide import Decision, Reply, Slice, Tally
from lioncub_jax.layout import Bucket
from lioncub_jax.quantize import Message, Quantizer

# What begins with the first vote that is traced: from then on compiled programs are read.
before_first_vote: list[Callable[[], None]] = []


class _Trace(threading.local):
    """What this thread traces: whether it votes, and the types of the leaves that workers reduce."""

    votes = False
    reduced: tuple[Any, ...] = ()


trace = _Trace()


def voting(axis: Axes) -> Any:
    """A named scope for what workers send, by which a compiled program tells who its workers are.

    Also notes that this thread traces a vote (see `watch`).
    """
    sizes = ",".join(f"{n}:{k}" for n, k in jax.sharding.get_abstract_mesh().shape.items())
    if sizes:  # workers of a vmap are on no mesh
        trace.votes = True
        while before_first_vote:
            before_first_vote.pop()()
    return jax.named_scope(f"workers({','.join(axis)})of({sizes})")


def by_count() -> Any:
    """A named scope for a branch that depends on a replicated count only."""
    return jax.named_scope("lioncub.by_count")


def _floats(tree: Any) -> Any:
    """A named scope for floats that are meant to travel between workers, with the sizes of the arrays."""
    sizes = sorted({x.size for x in jax.tree.leaves(tree)})
    return jax.named_scope("".join(["lioncub.floats", *[f".{n}" for n in sizes]]))


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
      planes: how many a message has, and words of one of them for one chunk.
      reply_planes: how many a reply has, and words of one of them for one chunk.
      row_words: words of a reply that are numbers for the rows of one chunk.
      message_words: words of a message about one chunk, rounded up to whole cache lines.
      reply_words: words of a reply about one chunk, rounded up to whole vectors of a TPU.
    """

    bucket: Bucket
    up: Quantizer
    workers: int
    rows: int
    top: int
    sends_scales: bool
    sends_votes: bool
    planes: tuple[int, int]
    reply_planes: tuple[int, int]
    row_words: int
    message_words: int
    reply_words: int

    @classmethod
    def of(cls, bucket: Bucket, up: Quantizer, decision: Decision) -> "Format":
        """The format of a bucket's messages and replies."""
        workers, rows, coder = bucket.workers, bucket.chunk, decision.coder
        steps, votes = decision.decodes and not up.dense, not (decision.decodes or up.has_zero)
        top = up.top(workers)
        planes = 1 if up.dense else top.bit_length(), rows * up.words_per_row
        replies = coder.planes(top, workers), rows * coder.words_per_row
        numbers, each_row = coder.row_words(rows, workers), bits.row_words(rows) if votes else 0
        words = math.prod(planes) + 1 + (rows // 2 if steps else each_row)
        back = math.prod(replies) + 2 + numbers
        words, back = words + _padding(words, _LINE), back + _padding(back, _LANES)
        return cls(
            bucket, up, workers, rows, top, steps, votes, planes, replies, numbers, words, back
        )  # fmt: skip

    def joined(self, codes: Sequence[Message], abstains: jax.Array) -> Message:
        """The message about a whole bucket, padded to its chunks; without votes if the worker abstains."""
        voted, scales = None, None
        mask: Any = True
        if self.sends_votes:
            words = self.workers * bits.row_words(self.rows)
            voted = jnp.where(abstains, 0, _padded([x.voted for x in codes], words))
            mask = bits.over_rows(voted.reshape(self.workers, -1), self.rows).reshape(-1)
        zero, (number, size) = self.top // 2 if self.up.has_zero else 0, self.planes
        planes = [_padded([x.planes[k] for x in codes], self.workers * size) for k in range(number)]
        for k, plane in enumerate(planes):
            if self.up.has_zero:
                plane = jnp.where(abstains, jnp.uint32(0xFFFFFFFF * (zero >> k & 1)), plane)
            planes[k] = plane & mask if self.sends_votes else plane
        if self.sends_scales:
            rows = self.workers * self.rows
            scales = jnp.where(abstains, 0, _padded([x.scales for x in codes], rows))
        return Message(planes, voted, scales, ~abstains)

    def pack(self, message: Message) -> jax.Array:
        """A message about all chunks: ``uint32[W, message_words]``."""
        takes_part = message.valid.astype(jnp.uint32)
        numbers = [jnp.broadcast_to(takes_part, (self.workers,))]
        if message.scales is not None:
            numbers.append(lax.bitcast_convert_type(message.scales.reshape(-1, 2), jnp.uint32))
        if message.voted is not None:
            numbers.append(message.voted)
        return _side_by_side([*message.planes, *numbers], self.workers, self.message_words)

    def unpack(self, messages: jax.Array) -> "Inbox":
        """Undoes ``pack`` for all workers: ``uint32[W, chunks, message_words]``."""
        planes, rest = _split_planes(messages, *self.planes)
        voted, steps, takes_part = None, None, rest[:, 0, 0]
        if self.sends_scales:
            halves = lax.bitcast_convert_type(rest[..., 1 : 1 + self.rows // 2], jnp.bfloat16)
            steps = halves.reshape(*messages.shape[:2], self.rows).astype(jnp.float32)
        if self.sends_votes:
            voted = rest[..., 1 : 1 + bits.row_words(self.rows)]
        return Inbox(planes, voted, steps, takes_part, jnp.sum(takes_part, dtype=jnp.uint32))

    def pack_reply(self, reply: Reply, present: jax.Array) -> jax.Array:
        """Replies about some chunks: ``uint32[chunks, reply_words]``."""
        chunks = reply.ties.shape[0]
        present = jnp.broadcast_to(present, (chunks,))
        parts = [*reply.planes, reply.ties, present]
        parts += [] if reply.rows is None else [reply.rows]
        return _side_by_side(parts, chunks, self.reply_words)

    def unpack_reply(self, replies: jax.Array) -> tuple[Reply, jax.Array]:
        """Undoes ``pack_reply``; and how many workers took part."""
        planes, rest = _split_planes(replies, *self.reply_planes)
        rows = rest[:, 2 : 2 + self.row_words] if self.row_words else None
        return Reply(planes, rows, rest[:, 0]), rest[0, 1]


def _side_by_side(parts: list[jax.Array], chunks: int, words: int) -> jax.Array:
    """Joins the parts of each chunk, then zeros: ``uint32[chunks, words]``."""
    for k, part in enumerate(parts):
        parts[k] = part.reshape(chunks, -1)
    joined = jnp.concatenate(parts, axis=1)
    return jnp.pad(joined, ((0, 0), (0, words - joined.shape[1])))


def _padded(parts: Sequence[Any], size: int) -> jax.Array:
    """The parts one after the other, then zeros."""
    return layout.pad_rows(jnp.concatenate(parts) if len(parts) > 1 else parts[0], size)


def _split_planes(words: jax.Array, planes: int, size: int) -> tuple[list[jax.Array], jax.Array]:
    """Cuts planes of so many words from the last axis, and gives the rest."""
    *found, rest = jnp.split(words, list(range(size, planes * size + 1, size)), axis=-1)
    return found, rest


class Inbox(NamedTuple):
    """Packed codes of all workers for the chunks that this worker owns.

    Attributes:
      planes: ``uint32[W, chunks, words]`` each.
      voted: row words, ``uint32[W, chunks, blocks]``, or None.
      steps: ``float32[W, chunks, rows]``, or None.
      taking_part: ``uint32[W]``, 1 for workers that take part.
      present: ``uint32[]``, how many they are.
    """

    planes: list[jax.Array]
    voted: jax.Array | None
    steps: jax.Array | None
    taking_part: jax.Array
    present: jax.Array

    def tally(self, where: Slice) -> Tally:
        """Adds the codes on packed words."""
        votes = None if self.voted is None else bits.tally([self.voted])
        width = (where.workers * where.up.top(where.workers)).bit_length()
        return Tally(bits.tally(self.planes)[:width], votes, where)

    def mean(self, where: Slice, dominance: float | None, trim: int) -> jax.Array:
        """Decodes and averages over the workers that take part: ``float32[chunks rows, 128]``."""
        steps = self.steps
        if steps is not None and dominance is not None:
            steps = means.bounded(steps, dominance)
        values = where.up.values(self.planes, steps, where.rows, where.workers)
        takes_part = self.taking_part[:, None, None, None]
        if trim:
            return where.restored(means.trimmed(values, takes_part > 0, trim).reshape(-1, ROW))
        values = jnp.where(takes_part > 0, values, 0)
        if kernels.for_tpu():  # where XLA fuses what is computed with a reduction of one array only
            return where.restored((jnp.sum(values, 0) * means.share(self.present)).reshape(-1, ROW))
        counted = jnp.broadcast_to(takes_part, values.shape)
        # One reduction of both: nothing is decoded twice, and no decoded array is kept, as XLA for CPU
        # keeps what it only adds.
        total, present = xla.reduced([operator.add] * 2, [values, counted], 0)
        mean = jnp.where(present > 0, total * means.share(self.present), 0)
        return where.restored(mean.reshape(-1, ROW))


class Sums(NamedTuple):
    """Sums over the workers, on every worker.

    Attributes:
      sums: of codes ``int32[chunks, rows, 128]``, or of values ``float32[chunks, rows, 128]``.
      votes: ``uint32[chunks, rows]``, workers that voted on each row; None where all did.
      present: ``uint32[]``, workers that take part.
    """

    sums: jax.Array
    votes: jax.Array | None
    present: jax.Array

    def tally(self, where: Slice) -> Tally:
        """Packs the sums, so that from here on every wire is alike."""
        width = (where.workers * where.up.top(where.workers)).bit_length()
        planes, votes = bits.pack(self.sums.astype(jnp.uint32), width), None
        if self.votes is not None:
            each = range(bits.sum_bits(where.workers, 1))
            votes = [bits.pack_rows((self.votes >> k) & 1 > 0) for k in each]
        return Tally(planes, votes, where)

    def mean(self, where: Slice, dominance: float | None, trim: int) -> jax.Array:
        """Divides by the workers that take part; nothing is left out, see `Decision.check`."""
        return (self.sums * means.share(self.present)).reshape(-1, ROW)


class Wire(NamedTuple):
    """How messages reach the owner and replies come back; built by the functions of this module.

    Attributes:
      name: for people.
      carries: what goes up: "codes", "values" or "both".
      owns_slice: True if each worker owns one chunk, False if everybody owns all.
      collect: ``(Message, Format, axis) -> Inbox or Sums``; ``valid`` of the message: the worker
        takes part. `two_phase` and `gathered` give an Inbox, all others Sums.
      publish: ``(uint32[chunks, reply_words], axis) -> uint32[W, reply_words]``, same on every worker.
    """

    name: str
    carries: str
    owns_slice: bool
    collect: Callable[[Message, Format, Axes], Any]
    publish: Callable[[jax.Array, Axes], jax.Array]


def two_phase() -> Wire:
    """All-to-all of packed codes, a tally at the owner of each slice, all-gather of packed replies.

    Traffic does not grow with the number of workers. The default.

    Source: Lion Cub (arXiv 2411.16462), "1-bit all-reduce"; p bits up and 1 down are ours.
    """

    def collect(message: Message, form: Format, axis: Axes) -> Inbox:
        packed = form.pack(message)
        received = lax.all_to_all(packed, axis, split_axis=0, concat_axis=0, tiled=True)
        return form.unpack(received[:, None])

    def publish(replies: jax.Array, axis: Axes) -> jax.Array:
        return gather_words(replies[0], axis)

    return Wire("two-phase", "both", True, collect, publish)


def gathered() -> Wire:
    """All-gather of everybody's packed codes; every worker counts for itself. For two workers.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, workers="data", wire=lc.wires.gathered())
    """

    def collect(message: Message, form: Format, axis: Axes) -> Inbox:
        packed = form.pack(message)
        received = gather_words(packed.reshape(-1), axis)
        return form.unpack(received.reshape(form.workers, form.workers, -1))

    return Wire("gathered", "both", False, collect, _keep)


def counts(dtype: Any = jnp.int8) -> Wire:
    """All-reduce of codes as small integers: ``sum_i q_i = (unit sum_i signed_i + W top) / 2``.

    Args:
      dtype: ``int8``, ``int16`` or ``int32``; a sum that could exceed it is refused when traced.

    Raises:
      ValueError: for another dtype.

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce" with int8.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in [jnp.dtype(t) for t in (jnp.int8, jnp.int16, jnp.int32)]:
        raise ValueError(f"counts({dtype.name}): give int8, int16 or int32")

    def check(form: Format) -> None:
        reach = form.workers * form.top // (2 if form.up.has_zero else 1)
        _check_countable("counts", form.workers, reach, int(jnp.iinfo(dtype).max))

    def collect(message: Message, form: Format, axis: Axes) -> Sums:
        check(form)
        top, unit = form.top, 2 if form.up.has_zero else 1
        codes, voted = _unpacked(message, form)
        signed = (2 * codes.astype(jnp.int32) - top) // unit
        if voted is not None:
            signed = signed * voted.astype(jnp.int32)[..., None]

        def add(numbers: jax.Array) -> jax.Array:
            return lax.psum(numbers, axis).astype(jnp.int32)

        sums, votes, present = _added(signed.astype(dtype), voted, message.valid, add)
        reach: Any = form.workers * top
        if votes is not None:
            reach = votes.astype(jnp.int32)[..., None] * top
        return Sums((unit * sums + reach) // 2, votes, present)

    return Wire(f"counts({dtype.name})", "codes", False, collect, _keep)


def lanes() -> Wire:
    """All-reduce of words whose fields are wide enough that no sum carries into the next.

    An ordinary integer all-reduce adds them. With ``integer(p)`` a field has ``p`` bits.

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce" for p below 8.
    """

    def collect(message: Message, form: Format, axis: Axes) -> Sums:
        field = _field_bits(form)
        codes, voted = _unpacked(message, form)  # 0 where there is no vote

        def add(numbers: jax.Array) -> jax.Array:
            return _split_fields(lax.psum(_join_fields(numbers, field), axis), field, numbers.size)

        return Sums(*_added(codes, voted, message.valid, add))

    return Wire("lanes", "codes", False, collect, _keep)


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
        return Sums(sums.astype(jnp.float32), None, present)

    return Wire("all-reduce", "values", False, collect, _keep)


def _keep(replies: jax.Array, axis: Axes) -> jax.Array:
    return replies


_LINE, _LANES = 32, 128  # words


def _padding(words: int, to: int) -> int:
    """Words of padding to a multiple of ``to``; none for short messages, where it would add more than 1 %.

    A CPU unpacks messages that do not begin at a cache line five times slower. XLA for TPU replaces an
    all-gather whose size is no multiple of 128 by an all-reduce of twice the bytes.
    """
    return -words % to if words >= 100 * _LANES else 0


def _unpacked(message: Message, form: Format) -> tuple[jax.Array, jax.Array | None]:
    """Codes ``uint32[W, rows, 128]``, and the rows that are voted on, ``uint32[W, rows]``."""
    codes = bits.unpack([x.reshape(form.workers, -1) for x in message.planes], form.rows)
    if message.voted is None:
        return codes, None
    voted = message.voted.reshape(form.workers, -1)
    return codes, bits.unpack_rows(voted, form.rows)


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


def _field_bits(form: Format) -> int:
    reach = form.workers * form.top
    _check_countable("lanes", form.workers, reach, 2**16 - 1)
    return reach.bit_length()


def _check_countable(wire: str, workers: int, reach: int, most: int) -> None:
    if reach > most:
        raise ValueError(
            f"{wire}: the sum over {workers} workers can reach {reach}, but the wire counts to {most}; "
            "use a wider dtype, fewer bits, or the two_phase wire, which has no such bound"
        )


def _join_fields(numbers: jax.Array, field: int) -> jax.Array:
    per_word = 32 // field
    padded = jnp.pad(numbers, (0, -numbers.size % per_word)).reshape(-1, per_word)
    return jnp.sum(padded << (field * jnp.arange(per_word, dtype=jnp.uint32)), -1, dtype=jnp.uint32)


def _split_fields(words: jax.Array, field: int, size: int) -> jax.Array:
    fields = words[:, None] >> (field * jnp.arange(32 // field, dtype=jnp.uint32))
    return (fields & jnp.uint32(2**field - 1)).reshape(-1)[:size]


def mean_over_workers(tree: Any, axis: Axes, dtype: Any = jnp.float32) -> Any:
    """Averages every leaf: one all-reduce with as many operands as leaves.

    Args:
      tree: of arrays that vary over ``axis``.
      axis: the mesh axis of the workers.
      dtype: what travels, and in what is added.

    Returns:
      The same tree, the same on every worker, in that dtype and then the leaf's own.
    """
    sent = jax.tree.map(lambda x: x.astype(dtype), tree)
    with _floats(sent):
        means = lax.pmean(sent, axis) if jax.tree.leaves(tree) else tree
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, tree)


def sum_over_workers(tree: Any, axis: Axes) -> Any:
    """Adds every leaf over the workers: for counts."""
    return lax.psum(tree, axis) if jax.tree.leaves(tree) else tree


def sum_of_floats(x: jax.Array, axis: Axes) -> jax.Array:
    """Adds floats over the workers."""
    with _floats(x):
        return lax.psum(x, axis)


def max_over_workers(x: jax.Array, axis: Axes) -> jax.Array:
    """The largest of a number over the workers: for scales that all of them share."""
    with _floats(x):
        return lax.pmax(x, axis)


def agreed(tree: Any, axis: Axes) -> Any:
    """Averages the leaves whose type varies over ``axis``; leaves all others alone."""

    def agree(x: jax.Array) -> jax.Array:
        differs = tuple(sorted(axes.varying_axes(x).intersection(axis)))
        return lax.pmean(x, differs) if differs else x

    with _floats(tree):
        return jax.tree.map(agree, tree)


def gather_words(words: jax.Array, axis: Axes) -> jax.Array:
    """``uint32[n]`` of each worker to ``uint32[W, n]``, the same on every worker.

    One all-gather, or two of as many bytes together where XLA would make an all-reduce of one.
    """
    padded = jnp.pad(words, (0, _padding(words.size, _LANES)))
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
    """The words ``uint32`` that one device of an axis holds, on all of them: a sum of them and zeros."""
    return lax.psum(jnp.where(source, words, 0), axis)
