"""What a worker says, and the contract of the quantisers that make it of values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax import bits
from lioncub_jax.bits import ROW, WORD


class Place(NamedTuple):
    """Where and when a leaf is quantised: what the tie rule and the random bits derive from.

    Attributes:
      first_word: word of the flat buffer where the leaf begins, an int or ``uint32[]``.
      size: elements of the leaf that are here; its rows may hold more.
      leaf: index of the leaf in the tree.
      step: ``int32[]``, steps taken before this one; same on every worker.
      worker: ``int32[]``, the worker's index; varies over the workers.
      workers: how many there are.
      shard: ``uint32[]``, which of the worker's shards this is, or 0 for a leaf in one piece.
      shards: how many shards the leaf has.
      total: ``float32[]``, what the quantiser's ``measure`` gives for all shards together, or None.
      filled: ``int32[rows]``, elements in each row, where padding is not only at the end; else None.
    """

    first_word: Any
    size: int
    leaf: int
    step: jax.Array
    worker: jax.Array
    workers: int
    shard: Any = 0
    shards: int = 1
    total: jax.Array | None = None
    filled: jax.Array | None = None


class Ballot(NamedTuple):
    """What one worker says about the rows of one leaf (or, joined, of a bucket).

    Attributes:
      payload: ``uint32[planes, words]``, the codes; of a dense quantiser the values' own bits.
      voted: ``bool[rows]``, rows that the worker votes on; a code for zero says so itself.
      steps: ``bfloat16[rows / rows_per_step]``, the size of a step, or None without blocks.
      flagged: ``bool[]``, whether the leaf holds a value that is not finite.
    """

    payload: jax.Array
    voted: jax.Array
    steps: jax.Array | None
    flagged: jax.Array


class Quantizer(NamedTuple):
    """Pure functions that turn values into codes; built by the functions of this module.

    Attributes:
      name: for people.
      bits: bits per element of a code.
      top: ``workers -> largest code``; raises ``ValueError`` where that many cannot be counted.
      has_zero: whether a code means exactly zero (``top`` is even).
      block: elements that share a travelling step, or None.
      dense: dtype of the values if they travel as they are, else None.
      encode: ``(float32[rows, 64], Place) -> Ballot``.
      measure: ``float32[rows, 64] -> float32[]``, what ``encode`` must know of the whole leaf as a sum
        over its shards, or None.
      feedback: dtype in which a worker keeps its quantisation error, or None.
    """

    name: str
    bits: int
    top: Callable[[int], int]
    has_zero: bool
    block: int | None
    dense: Any
    encode: Callable[[jax.Array, Place], Ballot]
    measure: Callable[[jax.Array], jax.Array] | None = None
    feedback: Any = None

    @property
    def rows_per_step(self) -> int:
        """Rows that share a step: leaves are padded to a multiple of it."""
        return (self.block or ROW) // ROW

    @property
    def words_per_row(self) -> int:
        """Words that a plane takes for one row."""
        return ROW * jnp.dtype(self.dense).itemsize // 4 if self.dense else bits.WORDS_PER_ROW

    def planes(self, workers: int) -> int:
        """Planes of the payload."""
        return 1 if self.dense else self.top(workers).bit_length()

    def values(self, payload: jax.Array, steps: jax.Array | None, workers: int) -> jax.Array:
        """Decodes one worker's payload to ``float32[words, 32]``; exact products, no rounding."""
        if self.dense:
            return _floats(payload[0], self.dense).reshape(-1, WORD)
        assert steps is not None and self.block
        doubled = (2 * bits.unpack(payload)).astype(jnp.int32)
        odd = (doubled - self.top(workers)).astype(jnp.float32)
        half_step = jnp.repeat(steps.astype(jnp.float32) / 2, self.block // WORD)
        return odd * half_step[:, None]


def fill_padding(
    planes: jax.Array, size: int, top: int, filled: jax.Array | None = None
) -> jax.Array:
    """Lets padding vote with one voice (the top code), so that it never counts as a tie."""
    words = planes.shape[-1]
    if filled is not None:
        real = bits.first_ones(filled)
        says = jnp.array([[top >> k & 1] for k in range(len(planes))], jnp.uint32)
        return (planes & real) | (bits.as_mask(says) & ~real)
    clean = size // WORD
    if clean == words:
        return planes
    padding = np.arange(clean * WORD, words * WORD) >= size
    ones = np.packbits(padding, bitorder="little").view("<u4").astype(np.uint32)
    code = np.array([[-(top >> k & 1) & 0xFFFFFFFF] for k in range(len(planes))], np.uint32)
    tail = (planes[:, clean:] & ~ones) | (ones & code)
    return jnp.concatenate([planes[:, :clean], tail], axis=1)


def _floats(words: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(words, dtype).reshape(-1).astype(jnp.float32)
