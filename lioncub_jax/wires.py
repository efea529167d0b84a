"""How workers agree: every collective of the library is in this file.

| wire | up | down | bytes each worker sends, d parameters, p bits up, q down |
|---|---|---|---|
| ``two_phase()`` | all-to-all of packed codes | all-gather of the answer | (W-1)/W (p + q) d/8 |
| ``gathered()`` | all-gather of packed codes | nothing | (W-1) p d/8 |
| ``counts(dtype)`` | all-reduce of integers | nothing | 2 (W-1)/W d sizeof(dtype) |
| ``lanes()`` | all-reduce of fields in words | nothing | 2 (W-1)/W d * 4/floor(32/field) |
| ``all_reduce()`` | all-reduce of values | nothing | 2 (W-1)/W d * 4 (bfloat16: 2) |
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lioncub_jax import bits
from lioncub_jax.ballots import Ballot, Quantizer
from lioncub_jax.bits import ROW
from lioncub_jax.decide import Down
from lioncub_jax.layout import Bucket, filled, varying_axes
from lioncub_jax.messages import Inbox, Sums, answer_words, message_words, open_inbox, outbox

AxisName = str | tuple[str, ...]


def names(axis: AxisName) -> tuple[str, ...]:
    """The mesh axes of the workers: one, or several that are one group of voters."""
    return (axis,) if isinstance(axis, str) else axis


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
        inbox = open_inbox(message, quantizer, needs_values, bucket.chunk, lax.axis_size(axis))
        return inbox._replace(filled=lambda: filled(bucket, lax.axis_index(axis)))

    def sent(
        quantizer: Quantizer, needs_values: bool, down: Down, bucket: Bucket, workers: int
    ) -> float:
        up = message_words(quantizer, needs_values, bucket.chunk, workers)
        back = answer_words(down, quantizer, bucket.chunk, workers)
        return 4.0 * (workers - 1) * up + words_bytes(back, workers)

    return Wire("two-phase", "both", True, collect, gather_words, sent)


def gathered() -> Wire:
    """All-gather of everybody's packed codes; every worker counts for itself. For two workers.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, axis_name="data", wire=lc.wires.gathered())
    """

    def collect(
        ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool,
        bucket: Bucket, axis: AxisName,
    ) -> Inbox:  # fmt: skip
        workers = lax.axis_size(axis)
        message = outbox(ballot, takes_part, quantizer, needs_values, 1)[0]
        messages = lax.all_gather(message, axis, to="invarying")
        whole = bucket._replace(chunk=workers * bucket.chunk)
        inbox = open_inbox(messages, quantizer, needs_values, whole.chunk, workers)
        return inbox._replace(filled=lambda: filled(whole, jnp.int32(0)))

    def sent(
        quantizer: Quantizer, needs_values: bool, down: Down, bucket: Bucket, workers: int
    ) -> float:
        rows = workers * bucket.chunk
        return 4.0 * (workers - 1) * message_words(quantizer, needs_values, rows, workers)

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

    def check(quantizer: Quantizer, workers: int) -> None:
        reach = workers * quantizer.top(workers) // (2 if quantizer.has_zero else 1)
        _check_countable("counts", workers, reach, int(jnp.iinfo(dtype).max))

    def collect(
        ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool,
        bucket: Bucket, axis: AxisName,
    ) -> Sums:  # fmt: skip
        workers, top = lax.axis_size(axis), quantizer.top(lax.axis_size(axis))
        check(quantizer, workers)
        unit = 2 if quantizer.has_zero else 1
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
        check(quantizer, workers)
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
        codes = bits.unpack(ballot.payload).reshape(-1)  # 0 where there is no vote
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
    """All-reduce of the values of a ``dense`` quantiser, in its dtype: what others do. The baseline.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.owner_lion(1e-4, axis_name="data", quantizer=lc.quantize.dense(), wire=lc.wires.all_reduce())
    """

    def collect(
        ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool,
        bucket: Bucket, axis: AxisName,
    ) -> Sums:  # fmt: skip
        values = quantizer.values(ballot.payload, None, 1).reshape(-1)
        values = jnp.where(takes_part, values, 0).astype(quantizer.dense)
        # Apart from the values, because bfloat16 cannot count beyond 256 workers.
        sums, present = lax.psum((values, takes_part.astype(jnp.uint32)), axis)
        return Sums(sums.astype(jnp.float32), ballot.voted.astype(jnp.uint32), present)

    def sent(
        quantizer: Quantizer, needs_values: bool, down: Down, bucket: Bucket, workers: int
    ) -> float:
        itemsize = _all_reduced_itemsize(quantizer.dense)
        return _all_reduce_bytes(workers * bucket.chunk * ROW * itemsize + 4, workers)

    return Wire("all-reduce", "values", False, collect, _keep, sent)


def _keep(answer: jax.Array, axis: AxisName) -> jax.Array:
    return answer[None]


def _lane_padding(words: int) -> int:
    """Words to the next multiple of 128, where that adds at most 1 %.

    XLA for TPU turns an all-gather of any other length into an all-reduce of twice the bytes.
    """
    return -words % 128 if words >= 12_800 else 0


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
    return sums.astype(jnp.int32), votes, present


def _summed_numbers(bucket: Bucket, workers: int) -> int:
    return workers * bucket.chunk * (ROW + 1) + 1


def _all_reduced_itemsize(dtype: Any) -> int:
    """Bytes of an element on the way: XLA's CPU backend all-reduces bfloat16 as float32."""
    return 4 if jax.default_backend() == "cpu" else jnp.dtype(dtype).itemsize


def _all_reduce_bytes(size: int, workers: int) -> float:
    return 2 * (workers - 1) * size / workers


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


def mean_over_workers(tree: Any, axis: AxisName, dtype: Any = jnp.float32) -> Any:
    """Averages every leaf: one all-reduce with as many operands as leaves.

    Args:
      tree: of arrays that vary over ``axis``.
      axis: the mesh axis of the workers.
      dtype: what travels, and in what is added.

    Returns:
      The same tree, the same on every worker, in that dtype and then the leaf's own.
    """
    sent = jax.tree.map(lambda x: x.astype(dtype), tree)
    means = lax.pmean(sent, axis) if jax.tree.leaves(tree) else tree
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, tree)


def mean_bytes(size: int, workers: int, dtype: Any = jnp.float32) -> float:
    """Bytes that each worker sends in ``mean_over_workers`` of so many elements."""
    return _all_reduce_bytes(size * _all_reduced_itemsize(dtype), workers)


def max_bytes(size: int, workers: int) -> float:
    """Bytes that each worker sends in ``max_over_workers`` of so many float32."""
    return _all_reduce_bytes(4 * size, workers)


def sum_over_workers(tree: Any, axis: AxisName) -> Any:
    """Adds every leaf over the workers: for counts."""
    return lax.psum(tree, axis) if jax.tree.leaves(tree) else tree


def max_over_workers(x: jax.Array, axis: AxisName) -> jax.Array:
    """The largest of a number over the workers: for scales that all of them share."""
    return lax.pmax(x, axis)


def agreed(tree: Any, axis: AxisName) -> Any:
    """Averages the leaves whose type varies over ``axis``; leaves all others alone."""

    def agree(x: jax.Array) -> jax.Array:
        differs = tuple(n for n in names(axis) if n in varying_axes(x))
        return lax.pmean(x, differs) if differs else x

    return jax.tree.map(agree, tree)


def same_everywhere(x: jax.Array, axis: AxisName) -> jax.Array:
    """Gives a value of one worker alone the type of a value that does not vary over its axis."""
    differs = tuple(n for n in names(axis) if n in varying_axes(x))
    return lax.psum(x, differs) if tracked(axis) and differs else x


def varying(tree: Any, axis: AxisName) -> Any:
    """Gives every leaf the type of a value that varies over ``axis``, where it has not got it."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(n for n in names(axis) if n not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def tracked(axis: AxisName) -> bool:
    """Whether types tell what varies over ``axis`` here: ``shard_map`` with ``check_vma=True``."""
    return set(names(axis)) <= varying_axes(lax.axis_index(axis))


def workers_on(axis: AxisName) -> int:
    """The number of workers on a mesh axis, or on several together.

    Raises:
      ValueError: where the axis is not bound.
    """
    try:
        return lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"axis_name={axis!r} is not a mesh axis here: update (and, for state that is sharded over "
            "the workers, init) must run inside jax.shard_map or jax.pmap with that axis; "
            "lioncub_jax.on_mesh, init_state and make_train_step do so"
        ) from error


def sum_over_shards(x: jax.Array, axis: AxisName) -> jax.Array:
    """Adds numbers over the devices that share one worker; ``axis`` itself is left alone."""
    others = _others(x, axis)
    return lax.psum(x, others) if others else x


def same_over_shards(x: jax.Array, axis: AxisName) -> jax.Array:
    """The largest of a number over the devices that share one worker."""
    others = _others(x, axis)
    return lax.pmax(x, others) if others else x


def shards_of(x: jax.Array, axis: AxisName) -> int:
    """Over how many devices of one worker an array is cut, by its type."""
    return math.prod(lax.axis_size(other) for other in _others(x, axis))


def shard_index(x: jax.Array, axis: AxisName) -> jax.Array | int:
    """``uint32[]``: which of a worker's shards of an array is here; 0 of an array in one piece."""
    others = _others(x, axis)
    return lax.axis_index(others).astype(jnp.uint32) if others else 0


def _others(x: jax.Array, axis: AxisName) -> tuple[str, ...]:
    return tuple(sorted(varying_axes(x) - set(names(axis))))


def gather_words(words: jax.Array, axis: AxisName) -> jax.Array:
    """``uint32[n]`` of each worker to ``uint32[W, n]``, the same on every worker: one all-gather."""
    padded = jnp.pad(words, (0, _lane_padding(words.size)))
    return lax.all_gather(padded, axis, to="invarying")[:, : words.size]


def words_bytes(words: int, workers: int) -> float:
    """Bytes that each worker sends for ``gather_words``."""
    return 4.0 * (workers - 1) * (words + _lane_padding(words))


def mean_slice(rows: jax.Array, group: AxisName) -> jax.Array:
    """Averages ``float32[rows, 64]`` over the devices of a group and keeps this device's slice of it.

    One reduce-scatter in full precision over the fast links inside a group.
    """
    summed = lax.psum_scatter(rows, group, scatter_dimension=0, tiled=True)
    return summed / lax.axis_size(group)


def from_group(answers: jax.Array, group: AxisName) -> jax.Array:
    """``uint32[...]`` of each device's slice to ``uint32[group, ...]``, the same on the whole group."""
    return lax.all_gather(answers, group, to="invarying")


def worker_index(axis: AxisName) -> jax.Array:
    """``int32[]``: which worker this is; varies over ``axis``."""
    return lax.axis_index(axis)


def sharing(tree: Sequence[jax.Array], axis: AxisName) -> list[int]:
    """Indices of the leaves that are, by their type, the same on all workers, or on some of them."""
    if not tracked(axis):
        return []
    return [i for i, x in enumerate(tree) if not set(names(axis)) <= varying_axes(x)]
