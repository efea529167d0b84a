"""The contract of a decision: what an owner is given about a chunk of rows, and what it returns."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import layout
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.dealing import Deal, Matrices
from lioncub_jax.exchange.message import (
    Format,
    Inbox,
    Reply,
    Size,
    Sums,
)
from lioncub_jax.exchange.quantize import Codec, Quantizer

Planes: TypeAlias = Sequence[jax.Array]


class Place(NamedTuple):
    """Where the rows are on which a worker decides.

    Attributes:
      worker: ``int32[]``, its index.
      deal: of their leaves, if whole matrices were dealt; else None.
    """

    worker: jax.Array
    deal: Deal | None


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
    (`arguments.part`), since they may be traced arrays.

    Example:
      >>> from lioncub_jax import decide, quantize
      >>> decide.majority().codec_of(quantize.midrise(3)).max_code(8)
      7
    """

    name = ""
    has_state = False  # whether the owner of a chunk keeps a state
    of_matrices = False  # whether a chunk is whole matrices, see `dealing`

    def matrices_of(
        self, params: optax.Params, specs: Sequence[P] | None = None
    ) -> tuple[Matrices, ...] | None:
        """The matrices of each leaf, if ``of_matrices``; see `dealing.matrices_of`."""
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
