"""What travels: a worker's ballot and an owner's answer as flat uint32 arrays, and back.

A message is the planes of the codes, then a bit for each row that says whether the worker votes on it
(or the steps of the blocks, where values are decoded), then one word that says whether the worker takes
part at all. An answer is the planes, the numbers of the rows, the ties and how many took part.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lioncub_jax import bits
from lioncub_jax.ballots import Ballot, Quantizer
from lioncub_jax.bits import WORDS_PER_ROW
from lioncub_jax.decide import Answer, Down, Tally


class Inbox(NamedTuple):
    """Packed codes of all workers for the rows that this worker owns.

    Attributes:
      payload: ``uint32[W, planes, words]``.
      voted: ``uint32[W, ceil(rows / 32)]``, a bit for each row, or None.
      steps: ``float32[W, blocks]``, or None.
      taking_part: ``uint32[W]``, 1 for workers that take part.
      filled: gives ``int32[rows]``, how many elements of each row are no padding; set by the wire.
    """

    payload: jax.Array
    voted: jax.Array | None
    steps: jax.Array | None
    taking_part: jax.Array
    filled: Callable[[], jax.Array] | None = None  # a function, for few owners ask

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
        top = quantizer.top(workers)
        return Tally(bits.tally(self.payload)[: (workers * top).bit_length()], votes, top)

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


def outbox(
    ballot: Ballot, takes_part: jax.Array, quantizer: Quantizer, needs_values: bool, owners: int
) -> jax.Array:
    """``uint32[owners, message]``: to each owner what concerns its slice."""
    planes = ballot.payload.reshape(ballot.payload.shape[0], owners, -1)
    parts = [jnp.moveaxis(planes, 1, 0).reshape(owners, -1)]
    if _sends_steps(quantizer, needs_values):
        assert ballot.steps is not None
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


def message_words(quantizer: Quantizer, needs_values: bool, rows: int, workers: int) -> int:
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
        per_row = functools.reduce(operator.or_, codes)
    ties = jnp.sum(lax.bitcast_convert_type(answers[:, -2], jnp.float32))
    return Answer(payload, per_row, ties), answers[0, -1]


def answer_words(down: Down, quantizer: Quantizer, rows: int, workers: int) -> int:
    """Words of an owner's answer about ``rows`` rows."""
    planes = down.planes(quantizer.top(workers), workers)
    per_row = down.row_bits(workers) * math.ceil(rows / 32)
    return planes * rows * down.words_per_row + per_row + 2


def _padded_to_words(per_row: jax.Array) -> jax.Array:
    return jnp.pad(per_row, (0, -per_row.shape[0] % bits.WORD))
