"""How workers agree: every collective of the library is in this file.

| wire | up | down | bytes each worker sends, d parameters, p bits up, q down |
|---|---|---|---|
| ``two_phase()`` | all-to-all of packed codes | all-gather of the answer | (W-1)/W (p + q) d/8 |
| ``gathered()`` | all-gather of packed codes | nothing | (W-1) p d/8 |
| ``counts(dtype)`` | all-reduce of integers | nothing | 2 (W-1)/W d sizeof(dtype) |
| ``lanes()`` | all-reduce of fields in words | nothing | 2 (W-1)/W d * 4/floor(32/field) |
| ``all_reduce()`` | all-reduce of values | nothing | 2 (W-1)/W d * 4 (bfloat16: 2) |

A message is one flat uint32 array: the planes of the codes, a bit for each row that says whether the
worker votes on it (or the steps of the blocks), and one word that says whether it takes part at all.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lioncub_jax import bits
from lioncub_jax.bits import ROW, WORDS_PER_ROW
from lioncub_jax.decide import Answer, Down, Tally
from lioncub_jax.layout import Bucket, varying_axes
from lioncub_jax.quantize import Ballot, Quantizer

AxisName = Hashable


class Inbox(NamedTuple):
    """Packed codes of all workers for the rows that this worker owns.

    Attributes:
      payload: ``uint32[W, planes, words]``.
      voted: ``uint32[W, ceil(rows / 32)]``, a bit for each row, or None.
      steps: ``float32[W, blocks]``, or None.
      taking_part: ``uint32[W]``, 1 for workers that take part.
    """

    payload: jax.Array
    voted: jax.Array | None
    steps: jax.Array | None
    taking_part: jax.Array

    @property
    def present(self) -> jax.Array:
        """``uint32[]``: how many workers take part."""
        return jnp.sum(self.taking_part)

    def tally(self, quantizer: Quantizer, workers: int) -> Tally:
        """Adds the codes on packed words."""
        rows = self.payload.shape[-1] // WORDS_PER_ROW
        if self.voted is None:
            votes = jnp.full((rows,), workers, jnp.uint32)
        else:
            votes = bits.unpack(bits.tally(self.voted[:, None])).reshape(-1)[:rows]
        return Tally(bits.tally(self.payload), votes, quantizer.top(workers))

    def mean(self, quantizer: Quantizer, workers: int, dominance: float) -> jax.Array:
        """Decodes and averages, worker by worker in order: ``float32[words, 32]``."""
        steps = None if self.steps is None else _bounded(self.steps, dominance)

        def decoded(w: int | jax.Array) -> jax.Array:
            values = quantizer.values(self.payload[w], None if steps is None else steps[w], workers)
            return jnp.where(self.taking_part[w] > 0, values, 0) if quantizer.dense else values

        # A loop and not a sum: its result is kept, where the compiler would make a sum of so many terms
        # anew for each use of the mean.
        total = lax.fori_loop(1, workers, lambda w, total: total + decoded(w), decoded(0))
        return total / jnp.maximum(self.present, 1).astype(jnp.float32)


def _bounded(steps: jax.Array, dominance: float) -> jax.Array:
    """Cuts the largest step on a block to ``dominance`` times the next largest, if there is one."""
    largest = jnp.argmax(steps, axis=0)
    others = jnp.where(jnp.arange(steps.shape[0])[:, None] == largest, 0, steps)
    next_largest = jnp.max(others, axis=0)
    limit = jnp.where(next_largest > 0, dominance * next_largest, jnp.inf)
    return jnp.minimum(steps, limit)


class Sums(NamedTuple):
    """Sums over the workers, on every worker.

    Attributes:
      sums: ``int32[elements]`` of codes, or ``float32[elements]`` of values.
      votes: ``uint32[rows]``, workers that voted on the row.
      present: ``uint32[]``, workers that take part.
    """

    sums: jax.Array
    votes: jax.Array
    present: jax.Array

    def tally(self, quantizer: Quantizer, workers: int) -> Tally:
        """Packs the sums, so that from here on every wire is alike."""
        top = quantizer.top(workers)
        planes = bits.planes_of(self.sums.astype(jnp.uint32), (workers * top).bit_length())
        return Tally(planes, self.votes, top)

    def mean(self, quantizer: Quantizer, workers: int, dominance: float) -> jax.Array:
        """Divides by the workers that take part."""
        mean = self.sums / jnp.maximum(self.present, 1).astype(jnp.float32)
        return mean.reshape(-1, bits.WORD)


class Wire(NamedTuple):
    """How ballots reach the owner and answers come back; built by the functions of this module.

    Attributes:
      name: for people.
      carries: what goes up: "codes", "values" or "both".
      owns_slice: True if each worker owns ``1/W`` of the rows, False if everybody owns all.
      collect: ``(Ballot, takes_part bool[], quantizer, needs_values, Bucket, axis) -> Received``.
      publish: ``(uint32[n], axis) -> uint32[owners, n]``, the same on every worker.
      sent: ``(quantizer, needs_values, down, Bucket, workers) -> bytes`` that each worker sends.
    """

    name: str
    carries: str
    owns_slice: bool
    collect: Callable[..., Any]
    publish: Callable[[jax.Array, AxisName], jax.Array]
    sent: Callable[..., float]

    def owned_rows(self, bucket: Bucket, workers: int) -> int:
        """Rows that one worker owns, padding included."""
        return bucket.chunk if self.owns_slice else workers * bucket.chunk


def two_phase() -> Wire:
    """All-to-all of packed codes, a tally at the owner of each slice, all-gather of packed answers.

    Traffic does not grow with the number of workers. The default.

    Source: Lion Cub (arXiv 2411.16462), "1-bit all-reduce"; p bits up and 1 down are ours.
    """

    def collect(
        ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool,
        bucket: Bucket, axis: AxisName,
    ) -> Inbox:  # fmt: skip
        message = outbox(ballot, takes_part, quantizer, needs_values, lax.axis_size(axis))
        message = lax.all_to_all(message, axis, split_axis=0, concat_axis=0, tiled=True)
        return open_inbox(message, quantizer, needs_values, bucket.chunk, lax.axis_size(axis))

    def publish(answer: jax.Array, axis: AxisName) -> jax.Array:
        padded = jnp.pad(answer, (0, _lane_padding(answer.size)))
        return lax.all_gather(padded, axis, to="invarying")[:, : answer.size]

    def sent(
        quantizer: Quantizer, needs_values: bool, down: Down, bucket: Bucket, workers: int
    ) -> float:
        up = _message_words(quantizer, needs_values, bucket.chunk, workers)
        back = _answer_words(down, quantizer, bucket.chunk, workers)
        return 4.0 * (workers - 1) * (up + back + _lane_padding(back))

    return Wire("two-phase", "both", True, collect, publish, sent)


def gathered() -> Wire:
    """All-gather of everybody's packed codes; every worker counts for itself. For two workers."""

    def collect(
        ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool,
        bucket: Bucket, axis: AxisName,
    ) -> Inbox:  # fmt: skip
        workers = lax.axis_size(axis)
        message = outbox(ballot, takes_part, quantizer, needs_values, 1)[0]
        messages = lax.all_gather(message, axis, to="invarying")
        return open_inbox(messages, quantizer, needs_values, workers * bucket.chunk, workers)

    def sent(
        quantizer: Quantizer, needs_values: bool, down: Down, bucket: Bucket, workers: int
    ) -> float:
        rows = workers * bucket.chunk
        return 4.0 * (workers - 1) * _message_words(quantizer, needs_values, rows, workers)

    return Wire("gathered", "both", False, collect, _keep, sent)


def counts(dtype: Any = jnp.int8) -> Wire:
    """All-reduce of codes as small integers.

    Args:
      dtype: ``int8``, ``int16`` or ``int32``; a sum that could exceed it is refused when traced.

    Raises:
      ValueError: for another dtype.

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce" with int8.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in [jnp.dtype(t) for t in (jnp.int8, jnp.int16, jnp.int32)]:
        raise ValueError(f"counts({dtype.name}): give int8, int16 or int32")

    def collect(
        ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool,
        bucket: Bucket, axis: AxisName,
    ) -> Sums:  # fmt: skip
        workers, top = lax.axis_size(axis), quantizer.top(lax.axis_size(axis))
        unit = 2 if quantizer.has_zero else 1
        _check_countable("counts", workers, workers * top // unit, int(jnp.iinfo(dtype).max))
        codes = bits.unpack(ballot.payload).reshape(-1).astype(jnp.int32)
        signed = (2 * codes - top) // unit
        if not quantizer.has_zero:
            signed = signed * jnp.repeat(ballot.voted, ROW)
        sums, votes, present = _sum(signed, ballot.voted, takes_part, dtype, axis)
        votes = jnp.full_like(votes, workers) if quantizer.has_zero else votes
        reach = jnp.repeat(votes.astype(jnp.int32) * top, ROW)
        return Sums((unit * sums + reach) // 2, votes, present)

    def sent(
        quantizer: Quantizer, needs_values: bool, down: Down, bucket: Bucket, workers: int
    ) -> float:
        return _all_reduce_bytes(_summed_numbers(bucket, workers) * dtype.itemsize, workers)

    return Wire(f"counts({dtype.name})", "codes", False, collect, _keep, sent)


def lanes() -> Wire:
    """All-reduce of words whose fields are wide enough that no sum carries into the next.

    An ordinary integer all-reduce adds them. With ``integer(p)`` a field has ``p`` bits.

    Source: Lion Cub (arXiv 2411.16462), "p-bit all-reduce" for p below 8.
    """

    def collect(
        ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool,
        bucket: Bucket, axis: AxisName,
    ) -> Sums:  # fmt: skip
        workers = lax.axis_size(axis)
        field = _field_bits(quantizer, workers)
        codes = bits.unpack(ballot.payload).reshape(-1)
        if not quantizer.has_zero:
            codes = codes * jnp.repeat(ballot.voted, ROW).astype(jnp.uint32)
        numbers = _numbers(codes, ballot.voted, takes_part, jnp.uint32)
        summed = _split_fields(lax.psum(_join_fields(numbers, field), axis), field, numbers.size)
        sums, votes, present = _split_numbers(summed, ballot.voted.shape[0])
        votes = jnp.full_like(votes, workers) if quantizer.has_zero else votes
        return Sums(sums.astype(jnp.int32), votes, present)

    def sent(
        quantizer: Quantizer, needs_values: bool, down: Down, bucket: Bucket, workers: int
    ) -> float:
        per_word = 32 // _field_bits(quantizer, workers)
        words = -(-_summed_numbers(bucket, workers) // per_word)
        return _all_reduce_bytes(4 * words, workers)

    return Wire("lanes", "codes", False, collect, _keep, sent)


def all_reduce() -> Wire:
    """All-reduce of the values of a ``dense`` quantiser, in its dtype: what others do. The baseline."""

    def collect(
        ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool,
        bucket: Bucket, axis: AxisName,
    ) -> Sums:  # fmt: skip
        values = quantizer.values(ballot.payload, None, 1).reshape(-1)
        values = jnp.where(takes_part, values, 0)
        numbers = jnp.append(values, takes_part.astype(jnp.float32)).astype(quantizer.dense)
        summed = lax.psum(numbers, axis).astype(jnp.float32)
        return Sums(summed[:-1], ballot.voted.astype(jnp.uint32), summed[-1].astype(jnp.uint32))

    def sent(
        quantizer: Quantizer, needs_values: bool, down: Down, bucket: Bucket, workers: int
    ) -> float:
        numbers = workers * bucket.chunk * ROW + 1
        return _all_reduce_bytes(numbers * _all_reduced_itemsize(quantizer.dense), workers)

    return Wire("all-reduce", "values", False, collect, _keep, sent)


def _keep(answer: jax.Array, axis: AxisName) -> jax.Array:
    return answer[None]


def outbox(
    ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool, owners: int
) -> jax.Array:
    """``uint32[owners, message]``: to each owner what concerns its slice."""
    planes = ballot.payload.reshape(ballot.payload.shape[0], owners, -1)
    parts = [jnp.moveaxis(planes, 1, 0).reshape(owners, -1)]
    if _sends_steps(quantizer, needs_values):
        steps = ballot.steps.reshape(owners, -1)
        steps = jnp.pad(steps, ((0, 0), (0, steps.shape[1] % 2)))
        parts.append(lax.bitcast_convert_type(steps.reshape(owners, -1, 2), jnp.uint32))
    if _sends_votes(quantizer, needs_values):
        parts.append(bits.pack_bits(ballot.voted.reshape(owners, -1)))
    parts.append(jnp.broadcast_to(takes_part.astype(jnp.uint32), (owners, 1)))
    return jnp.concatenate(parts, axis=1)


def open_inbox(
    messages: jax.Array, quantizer: Quantizer, needs_values: bool, rows: int, workers: int
) -> Inbox:
    """Undoes ``outbox``: ``uint32[W, message]`` to an ``Inbox`` for ``rows`` rows."""
    planes = quantizer.planes(workers)
    end = planes * rows * quantizer.words_per_row
    payload = messages[:, :end].reshape(workers, planes, -1)
    extra, voted, steps = messages[:, end:-1], None, None
    if _sends_steps(quantizer, needs_values):
        halves = lax.bitcast_convert_type(extra, jnp.bfloat16).reshape(workers, -1)
        steps = halves[:, : rows // quantizer.rows_per_step].astype(jnp.float32)
    if _sends_votes(quantizer, needs_values):
        voted = extra
    return Inbox(payload, voted, steps, messages[:, -1])


def _message_words(quantizer: Quantizer, needs_values: bool, rows: int, workers: int) -> int:
    """Words of one worker's message about ``rows`` rows."""
    words = quantizer.planes(workers) * rows * quantizer.words_per_row
    if _sends_steps(quantizer, needs_values):
        words += math.ceil(rows / quantizer.rows_per_step / 2)
    if _sends_votes(quantizer, needs_values):
        words += math.ceil(rows / bits.WORD)
    return words + 1


def _sends_steps(quantizer: Quantizer, needs_values: bool) -> bool:
    return needs_values and quantizer.block is not None


def _sends_votes(quantizer: Quantizer, needs_values: bool) -> bool:
    """A code that means zero says "no vote" itself, and values need none."""
    return not needs_values and not quantizer.has_zero


def pack_answer(answer: Answer, present: jax.Array, down: Down, workers: int) -> jax.Array:
    """An answer as one flat ``uint32[n]``: planes, bits of the rows, ties, presence."""
    parts = [answer.planes.reshape(-1)]
    if answer.per_row is not None:
        parts += bits.planes_of(_padded_to_words(answer.per_row), down.row_bits(workers))
    ties = lax.bitcast_convert_type(answer.ties, jnp.uint32)
    return jnp.concatenate([*parts, jnp.stack([ties, present.astype(jnp.uint32)])])


def open_answers(
    answers: jax.Array, down: Down, quantizer: Quantizer, rows: int, workers: int
) -> tuple[Answer, jax.Array]:
    """Undoes ``pack_answer`` for all owners: ``uint32[owners, n]`` to the whole bucket's answer."""
    planes = down.planes(quantizer.top(workers), workers)
    end = planes * rows * down.words_per_row
    payload = answers[:, :end].reshape(answers.shape[0], planes, -1)
    payload = jnp.moveaxis(payload, 0, 1).reshape(planes, -1)
    per_row = None
    if row_bits := down.row_bits(workers):
        row_planes = jnp.moveaxis(answers[:, end:-2].reshape(answers.shape[0], row_bits, -1), 1, 0)
        codes = [bits.unpack_bits(p, rows).reshape(-1) << k for k, p in enumerate(row_planes)]
        per_row = sum(codes[1:], codes[0])
    ties = jnp.sum(lax.bitcast_convert_type(answers[:, -2], jnp.float32))
    return Answer(payload, per_row, ties), answers[0, -1]


def _answer_words(down: Down, quantizer: Quantizer, rows: int, workers: int) -> int:
    """Words of an owner's answer about ``rows`` rows."""
    planes = down.planes(quantizer.top(workers), workers)
    per_row = down.row_bits(workers) * math.ceil(rows / 32)
    return planes * rows * down.words_per_row + per_row + 2


def _lane_padding(words: int) -> int:
    """Words to the next multiple of 128, where that adds at most 1 %.

    XLA for TPU turns an all-gather of any other length into an all-reduce of twice the bytes.
    """
    return -words % 128 if words >= 12_800 else 0


def _padded_to_words(per_row: jax.Array) -> jax.Array:
    return jnp.pad(per_row, (0, -per_row.shape[0] % bits.WORD))


def _numbers(x: jax.Array, voted: jax.Array, takes_part: jax.Array, dtype: Any) -> jax.Array:
    """What an all-reduce adds: elements, then a vote for each row, then a one for taking part."""
    parts = [x, voted, takes_part[None]]
    return jnp.concatenate([part.astype(dtype) for part in parts])


def _split_numbers(numbers: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    votes = numbers[rows * ROW : rows * ROW + rows].astype(jnp.uint32)
    return numbers[: rows * ROW], votes, numbers[-1].astype(jnp.uint32)


def _sum(
    x: jax.Array, voted: jax.Array, takes_part: jax.Array, dtype: Any, axis: AxisName
) -> tuple[jax.Array, jax.Array, jax.Array]:
    summed = lax.psum(_numbers(x, voted, takes_part, dtype), axis)
    sums, votes, present = _split_numbers(summed, voted.shape[0])
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    return sums.astype(wide), votes, present


def _summed_numbers(bucket: Bucket, workers: int) -> int:
    return workers * bucket.chunk * (ROW + 1) + 1


def _all_reduced_itemsize(dtype: Any) -> int:
    """Bytes of an element on the way: XLA's CPU backend all-reduces bfloat16 as float32."""
    return 4 if jax.default_backend() == "cpu" else jnp.dtype(dtype).itemsize


def _all_reduce_bytes(size: int, workers: int) -> float:
    return 2 * (workers - 1) / workers * size


def _field_bits(quantizer: Quantizer, workers: int) -> int:
    reach = workers * quantizer.top(workers)
    _check_countable("lanes", workers, reach, 2**16 - 1)
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


def mean_over_workers(tree: Any, axis: AxisName) -> Any:
    """Averages every leaf in full precision: one all-reduce with as many operands as leaves.

    Args:
      tree: of arrays that vary over ``axis``.
      axis: the mesh axis of the workers.

    Returns:
      The same tree, the same on every worker, in float32 and then the leaf's own dtype.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    means = lax.pmean(wide, axis) if jax.tree.leaves(tree) else tree
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, tree)


def agreed(tree: Any, axis: AxisName) -> Any:
    """Averages the leaves whose type varies over ``axis``; leaves all others alone."""
    return jax.tree.map(lambda x: lax.pmean(x, axis) if axis in varying_axes(x) else x, tree)


def same_everywhere(x: jax.Array, axis: AxisName) -> jax.Array:
    """Gives a value of a mesh axis of one worker the type of a value that does not vary over it."""
    return lax.psum(x, axis) if tracked(axis) and axis in varying_axes(x) else x


def varying(tree: Any, axis: AxisName) -> Any:
    """Gives every leaf the type of a value that varies over ``axis``, where it has not got it."""

    def cast(x: jax.Array) -> jax.Array:
        return x if axis in varying_axes(x) else lax.pcast(x, axis, to="varying")

    return jax.tree.map(cast, tree)


def tracked(axis: AxisName) -> bool:
    """Whether types tell what varies over ``axis`` here: ``shard_map`` with ``check_vma=True``."""
    return axis in varying_axes(lax.axis_index(axis))


def workers_on(axis: AxisName) -> int:
    """The number of workers on a mesh axis.

    Raises:
      ValueError: where the axis is not bound.
    """
    try:
        return lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"axis_name={axis!r} is not a mesh axis here: update (and, for state that is sharded over "
            "the workers, init) must run inside jax.shard_map or jax.pmap with that axis; "
            "lioncub_jax.init_state and make_train_step do so"
        ) from error


def worker_index(axis: AxisName) -> jax.Array:
    """``int32[]``: which worker this is; varies over ``axis``."""
    return lax.axis_index(axis)


def sharing(tree: Sequence[jax.Array], axis: AxisName) -> list[int]:
    """Indices of the leaves that are, by their type, the same on every worker."""
    if not tracked(axis):
        return []
    return [i for i, x in enumerate(tree) if axis not in varying_axes(x)]
