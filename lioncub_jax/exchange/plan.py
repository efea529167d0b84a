"""The plan of a step: the parts of an exchange, and which rows of which leaf travel where."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax

from lioncub_jax.exchange import bits, layout, matrices
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.layout import BucketLayout, Piece
from lioncub_jax.exchange.matrices import Deal, Matrices
from lioncub_jax.exchange.momentum import MomentumRule
from lioncub_jax.exchange.quantize import Codec
from lioncub_jax.exchange.votes import Decision
from lioncub_jax.exchange.wires import Format, Wire
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes


class Exchange(NamedTuple):
    """The parts of an exchange. Numbers in ``momentum_rule`` and ``decision`` may be traced arrays.

    Attributes:
      axis: mesh axes of the workers.
      group: mesh axes of the devices of one worker; () for one device each.
      momentum_rule: computes ``c`` and the next ``mu`` from ``g`` and ``mu``.
      codec: encodes ``c + e``: votes, which are counted, or values, which are decoded.
      decision: its ``decide`` maps the codes of all workers to a reply, its ``decode`` a reply to ``u``.
      wire: the collectives; if ``wire.sharded`` each worker decides on its chunk, else all on all chunks.
      bucket_size: elements after which a new bucket begins; None for no limit. The plan follows it.
      matrices: of each leaf, where the decision is about whole ones; else None.
    """

    axis: Axes
    group: Axes
    momentum_rule: MomentumRule
    codec: Codec
    decision: Decision
    wire: Wire
    bucket_size: int | None = None
    matrices: tuple[Matrices, ...] | None = None

    @property
    def shares(self) -> bool:
        """True where leaves are joined to rows first: of a group, or of whole matrices."""
        return bool(self.group) or self.matrices is not None


class BucketPlan(NamedTuple):
    """A bucket of this worker, in this step.

    Attributes:
      layout: places of its leaves; static.
      pieces: those of ``layout``, with starts that are known at run time only, see `layout.pieces`.
      message: format of messages about a chunk.
      reply: format of replies.
      row_sizes: ``int32[rows]``, elements of each row that are no padding; None where all are, or where
        padding cannot count.
      shard: ``uint32[]``, index of the shard of the leaves on this device; 0 for whole leaves.
      num_shards: shards of each leaf.
      deal: of its rows, if whole matrices were dealt; else None.
    """

    layout: BucketLayout
    pieces: Sequence[Piece]
    message: Format
    reply: Format
    row_sizes: jax.Array | None
    shard: jax.Array | int
    num_shards: int
    deal: Deal | None = None


class WorkerPlan(NamedTuple):
    """The index of this device's worker, and the places of its leaves in buckets.

    Attributes:
      axis: mesh axes of the workers.
      worker: ``int32[]``, index of the worker; varies over the workers.
      num_workers: W.
      num_steps: ``int32[]``, steps taken before.
      buckets: in which its leaves travel.
      group_buckets: in a group of devices, the buckets of whole leaves that the group shares; this device's
        part of each is a leaf of ``buckets``. Likewise deals of whole matrices. () without either.
      row_sizes: for each part of a group bucket ``int32[rows]``, elements that are no padding; None for a
        leaf that is whole.
      abstains_per_bucket: the worker abstains only from buckets with a value that is not finite.
    """

    axis: Axes
    worker: jax.Array
    num_workers: int
    num_steps: jax.Array
    buckets: Sequence[BucketPlan]
    group_buckets: Sequence[BucketLayout | Deal]
    row_sizes: Sequence[jax.Array | None]
    abstains_per_bucket: bool


def plan_worker(
    exchange: Exchange,
    leaves: Sequence[Any],
    num_steps: jax.Array,
    row_sizes: Sequence[jax.Array | None] | None = None,
) -> WorkerPlan:
    """The plan of this device's worker; its gradients are ``leaves``, or have their shapes and types.

    ``row_sizes``: of leaves that are parts of a group's buckets already.
    """
    num_workers, devices = axes.workers_on(exchange.axis), axes.workers_on(exchange.group)
    over = [axes.varying_axes(x) for x in leaves]
    group_buckets, buckets = bucket_leaves(exchange, leaves, over, num_workers, devices)
    if row_sizes is None:
        row_sizes = [None] * len(leaves)
    # Rows of nothing but padding have votes, or an owner's state.
    codec = exchange.codec
    padding_counts = codec.midtread or exchange.decision.has_state
    device = axes.worker_index(exchange.group)
    if exchange.shares:
        row_sizes = [sizes_of_part(x, device, padding_counts) for x in group_buckets]
    bucket_plans = []
    for bucket in buckets:
        shard, num_shards = axes.shard_of(bucket.axes, exchange.axis)
        message = message_format(codec, bucket)
        bucket_plan = BucketPlan(
            bucket,
            pieces=layout.pieces(bucket, num_steps),
            message=message,
            reply=exchange.decision.reply_codec.format(message),
            row_sizes=layout.row_sizes(bucket, row_sizes, padding_counts),
            shard=shard,
            num_shards=num_shards,
            deal=deal_of(bucket, group_buckets),
        )
        bucket_plans.append(bucket_plan)
    return WorkerPlan(
        exchange.axis,
        worker=axes.worker_index(exchange.axis),
        num_workers=num_workers,
        num_steps=num_steps,
        buckets=bucket_plans,
        group_buckets=group_buckets,
        row_sizes=row_sizes,
        abstains_per_bucket=exchange.bucket_size is not None,
    )


def bucket_leaves(
    exchange: Exchange,
    leaves: Sequence[Any],
    over: Sequence[Collection[str]],
    num_workers: int,
    devices: int,
) -> tuple[Sequence[BucketLayout | Deal], tuple[BucketLayout, ...]]:
    """Buckets that a group of devices shares, and deals, () without; and those that travel between workers.

    ``over``: for each leaf the mesh axes over which it varies.
    """
    limit = exchange.bucket_size
    if not exchange.shares:
        return (), layout.buckets(leaves, num_workers, limit, over)
    shared: Sequence[BucketLayout | Deal]
    if exchange.matrices is None:
        shared = layout.buckets(leaves, devices, limit, over)
        limit = None if limit is None else max(limit // devices, 1)
    else:
        check_dealt(exchange, over, num_workers)
        whole, group = exchange.matrices, exchange.group
        shared = matrices.deals(leaves, over, whole, num_workers, group, devices)
        limit = 1  # each travels by itself
    parts = [jax.ShapeDtypeStruct((x.rows_per_chunk, ROW), x.dtype) for x in shared]
    over = [x.axes for x in shared]
    return shared, layout.buckets(parts, num_workers, limit, over)


def sizes_of_part(
    bucket: BucketLayout | Deal, device: jax.Array, padding_counts: bool
) -> jax.Array | None:
    """Elements of each row of a device's part that are no padding; None where none can be mistaken."""
    if isinstance(bucket, Deal):
        return matrices.row_sizes(bucket, device)
    return layout.row_sizes_of_part(bucket, device, padding_counts)


def deal_of(bucket: BucketLayout, shared: Sequence[BucketLayout | Deal]) -> Deal | None:
    """The deal that a bucket carries, or None."""
    deal = shared[bucket.segments[0].leaf] if shared else None
    return deal if isinstance(deal, Deal) else None


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
        if one.rows and inner != {name for cut in one.cuts for name, _ in cut}:
            raise ValueError(
                f"matrices are cut over {sorted(inner)}, and here types do not say along which of their "
                "dimensions: run the optimizer in lioncub_jax.map_step or make_train_step"
            )


def message_format(codec: Codec, bucket: BucketLayout) -> Format:
    """The format of messages about a chunk of a bucket."""
    num_rows, num_workers = bucket.rows_per_chunk, bucket.num_chunks
    max_code = codec.max_code(num_workers)
    row_words = 0
    if codec.marks_rows:
        row_words = bits.row_words(num_rows)
    if codec.sends_scales:
        row_words = num_rows // 2
    return Format(
        num_workers=num_workers,
        num_rows=num_rows,
        max_code=max_code,
        midtread=codec.midtread,
        dense=codec.dense,
        marks_rows=codec.marks_rows,
        sends_scales=codec.sends_scales,
        counts_pairs=codec.counts_pairs,
        planes=max(max_code.bit_length(), 1),
        plane_words=num_rows * codec.words_per_row,
        row_words=row_words,
    )
