"""The plan of a step: the components of an exchange, and where each leaf travels.

An `Exchange` has what a user has chosen. A `Plan` follows from it and from the types of the leaves:
buckets, their formats, shards, and the places of padding. It is made where a step is traced.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax

from lioncub_jax.exchange import layout, matrices, xla
from lioncub_jax.exchange.bits import BLOCK, ROW
from lioncub_jax.exchange.layout import BucketLayout, Piece
from lioncub_jax.exchange.matrices import Deal, Matrices
from lioncub_jax.exchange.momentum import MomentumRule
from lioncub_jax.exchange.quantize import Codec
from lioncub_jax.exchange.votes import Decision
from lioncub_jax.exchange.wires import Format, Wire
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes


class Exchange(NamedTuple):
    """The components of an exchange. Numbers in ``momentum_rule`` and ``decision`` may be traced arrays.

    Attributes:
      axis: mesh axes of the workers.
      group: mesh axes of the devices of one worker; () for one device each.
      momentum_rule: computes ``c`` and the next ``mu`` from ``g`` and ``mu``.
      message_codec: encodes ``c + e``: votes, which are counted, or values, which are decoded.
      decision: its ``decide`` maps the codes of all workers to a reply, which its ``reply_codec`` encodes
        and decodes to ``u``.
      wire: the collectives; if ``wire.sharded`` each worker decides on its chunk, else all on all chunks.
      bucket_size: elements after which a new bucket begins; None for no limit. The plan follows it.
      matrices: of each leaf, where the decision is about whole ones; else None.
    """

    axis: Axes
    group: Axes
    momentum_rule: MomentumRule
    message_codec: Codec
    decision: Decision
    wire: Wire
    bucket_size: int | None = None
    matrices: tuple[Matrices, ...] | None = None

    @property
    def joins_leaves(self) -> bool:
        """True where leaves are joined to rows first: of a group, or of whole matrices."""
        return bool(self.group) or self.decision.matrices_of is not None

    @property
    def abstains_per_bucket(self) -> bool:
        """True where a worker abstains only from buckets with a value that is not finite."""
        return self.bucket_size is not None


class BucketPlan(NamedTuple):
    """A bucket of this worker.

    Attributes:
      layout: places of its leaves.
      message: format of messages about a chunk.
      reply: format of replies.
      deal: of its rows, if whole matrices were dealt; else None.
      pieces: those of ``layout``, with starts that are known at run time only, see `layout.pieces`.
      row_sizes: ``int32[rows]``, elements of each row that are no padding; None where all are, or where
        padding cannot count.
      starts: ``uint32[]`` each, the block with which each piece begins, known at run time only.
      shard: ``uint32[]``, index of the shard of the leaves on this device; 0 for whole leaves.
      num_shards: shards of each leaf.
    """

    layout: BucketLayout
    message: Format
    reply: Format
    deal: Deal | None
    pieces: Sequence[Piece]
    row_sizes: jax.Array | None
    starts: Sequence[jax.Array]
    shard: Any
    num_shards: int


class Plan(NamedTuple):
    """Where the leaves of this device's worker lie, and what is sent of them.

    Attributes:
      exchange: the components.
      num_workers: W.
      buckets: in which its leaves travel; where ``shared`` is not empty, in which its parts of those
        buckets do: `step.step` is then given parts for leaves.
      shared: in a group of devices, the buckets of whole leaves that the group shares, a first stage; this
        device's part of number k is leaf k of ``buckets``, the second. Likewise deals of whole matrices,
        which are asked the same. () without either.
      row_sizes: None for each whole leaf; for each part of a shared bucket ``int32[rows]``, elements that
        are no padding.
      for_tpu: the program is one of TPUs, and leaves of whole tiles lie in their order.
      worker: ``int32[]``, index of the worker; varies over the workers.
      num_steps: ``int32[]``, steps taken before.
    """

    exchange: Exchange
    num_workers: int
    buckets: Sequence[BucketPlan]
    shared: Sequence[BucketLayout | Deal]
    row_sizes: Sequence[jax.Array | None]
    for_tpu: bool
    worker: jax.Array
    num_steps: jax.Array


def make_plan(
    exchange: Exchange,
    leaves: Sequence[Any],
    num_workers: int,
    group_size: int,
    worker: jax.Array,
    device: jax.Array,
    num_steps: jax.Array,
) -> Plan:
    """The plan of a step.

    Args:
      exchange: its components.
      leaves: gradients of this device, or what has their shapes and types.
      num_workers: W.
      group_size: devices of each worker, in a group.
      worker: ``int32[]``, index of the worker.
      device: ``int32[]``, its index in the group.
      num_steps: ``int32[]``, steps taken before.
    """
    codec, decision = exchange.message_codec, exchange.decision
    shared, layouts = bucket_leaves(exchange, leaves, num_workers, group_size)
    # Rows of nothing but padding have votes, or an owner's state.
    padding_counts = codec.midtread or decision.init is not None
    row_sizes: list[jax.Array | None] = [None] * len(leaves)
    if shared:
        row_sizes = [x.part_sizes(device, padding_counts) for x in shared]
    buckets = []
    for bucket in layouts:
        shard, num_shards = axes.shard_of(bucket.axes, exchange.axis)
        message = codec.format(num_workers, bucket.rows_per_chunk)
        own = BucketPlan(
            bucket,
            message,
            reply=decision.reply_codec.format(message),
            deal=deal_of(bucket, shared),
            pieces=layout.pieces(bucket, num_steps),
            row_sizes=layout.row_sizes(bucket, row_sizes, padding_counts),
            starts=xla.runtime_constants([x.first_row // BLOCK for x in bucket.pieces], num_steps),
            shard=shard,
            num_shards=num_shards,
        )
        buckets.append(own)
    return Plan(exchange, num_workers, buckets, shared, row_sizes, xla.for_tpu(), worker, num_steps)


def bucket_leaves(
    exchange: Exchange, leaves: Sequence[Any], num_workers: int, group_size: int
) -> tuple[Sequence[BucketLayout | Deal], Sequence[BucketLayout]]:
    """Buckets that a group shares, or deals, () without either; and those that travel between workers."""
    size, over = exchange.bucket_size, [axes.varying_axes(x) for x in leaves]
    if not exchange.joins_leaves:
        return (), layout.buckets(leaves, num_workers, size, over)
    shared: Sequence[BucketLayout | Deal]
    if exchange.matrices is None:
        shared = layout.buckets(leaves, group_size, size, over)
        part_size = None if size is None else max(size // group_size, 1)
    else:
        check_dealt(exchange, over, num_workers)
        whole, group = exchange.matrices, exchange.group
        shared = matrices.deals(leaves, over, whole, num_workers, group, group_size)
        part_size = 1  # so each travels by itself
    parts = [jax.ShapeDtypeStruct((x.rows_per_chunk, ROW), x.dtype) for x in shared]
    return shared, layout.buckets(parts, num_workers, part_size, [x.axes for x in shared])


def deal_of(bucket: BucketLayout, shared: Sequence[BucketLayout | Deal]) -> Deal | None:
    """The deal whose rows a bucket has, or None."""
    first = shared[bucket.segments[0].leaf] if shared else None
    return first if isinstance(first, Deal) else None


def check_dealt(exchange: Exchange, over: Sequence[Collection[str]], num_workers: int) -> None:
    """Raises ``ValueError`` where whole matrices cannot be dealt."""
    if num_workers > 1 and not exchange.wire.sharded:
        raise ValueError(
            f"the {exchange.wire.name} wire has every worker decide on all rows, and a matrix has one "
            "owner: give the two_phase wire"
        )
    assert exchange.matrices is not None
    sizes = jax.sharding.get_abstract_mesh().shape
    for varying, one in zip(over, exchange.matrices, strict=True):
        inner = {n for n in {*varying}.difference(exchange.axis, exchange.group) if sizes[n] > 1}
        if one.row_dims and inner != {name for cut in one.cuts for name, _ in cut}:
            raise ValueError(
                f"matrices are cut over {sorted(inner)}, and here types do not say along which of their "
                "dimensions: run the optimizer in lioncub_jax.map_step or make_train_step"
            )
