"""The plan of a step: the components of an exchange, and where each leaf travels.

An `Exchange` has what a user has chosen. A `Plan` follows from it and from the types of the leaves:
buckets, their formats, shards, and the places of padding. It is made once for the same types; a step reads
its fields, and adds the arrays of this device's worker.
"""

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax

from lioncub_jax.exchange import bits, layout, matrices, xla
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.layout import BucketLayout, Piece
from lioncub_jax.exchange.matrices import Deal, Matrices
from lioncub_jax.exchange.momentum import MomentumRule
from lioncub_jax.exchange.quantize import Codec
from lioncub_jax.exchange.votes import Decision, ReplyCodec
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
        return bool(self.group) or self.matrices is not None


class BucketPlan(NamedTuple):
    """A bucket of this worker.

    Attributes:
      layout: places of its leaves.
      message: format of messages about a chunk.
      reply: format of replies.
      num_shards: shards of each leaf.
      deal: of its rows, if whole matrices were dealt; else None.
      pieces: those of ``layout``; in a step with starts that are known at run time only, see
        `layout.pieces`.
      row_sizes: in a step ``int32[rows]``, elements of each row that are no padding; None where all are, or
        where padding cannot count.
      shard: in a step ``uint32[]``, index of the shard of the leaves on this device; 0 for whole leaves.
    """

    layout: BucketLayout
    message: Format
    reply: Format
    num_shards: int
    deal: Deal | None
    pieces: Sequence[Piece]
    row_sizes: jax.Array | None = None
    shard: jax.Array | int = 0


class Plan(NamedTuple):
    """Where the leaves of a worker lie, and what is sent of them: all that types tell, made once.

    Attributes:
      axis: mesh axes of the workers.
      num_workers: W.
      buckets: in which its leaves travel; where ``shared`` is not empty, in which its parts of those
        buckets do: `step.step` is then given parts for leaves.
      shared: in a group of devices, the buckets of whole leaves that the group shares, a first stage; this
        device's part of number k is leaf k of ``buckets``, the second. Likewise deals of whole matrices. ()
        without either.
      for_tpu: the program is one of TPUs, and leaves of whole tiles lie in their order.
      padding_counts: rows of nothing but padding have votes, or an owner's state.
      abstains_per_bucket: the worker abstains only from buckets with a value that is not finite.
      worker: in a step ``int32[]``, index of the worker; varies over the workers.
      num_steps: in a step ``int32[]``, steps taken before.
      row_sizes: None for each whole leaf; in a step for each part of a shared bucket ``int32[rows]``,
        elements that are no padding.
    """

    axis: Axes
    num_workers: int
    buckets: tuple[BucketPlan, ...]
    shared: tuple[BucketLayout | Deal, ...]
    for_tpu: bool
    padding_counts: bool
    abstains_per_bucket: bool
    row_sizes: Sequence[jax.Array | None]
    worker: Any = None
    num_steps: Any = None

    def in_step(self, worker: jax.Array, num_steps: jax.Array, device: jax.Array) -> "Plan":
        """The plan with the arrays of a step, on one device.

        Args:
          worker: ``int32[]``, index of the worker.
          num_steps: ``int32[]``, steps taken before.
          device: ``int32[]``, its index in the group.
        """
        row_sizes = self.row_sizes
        if self.shared:
            row_sizes = [x.part_sizes(device, self.padding_counts) for x in self.shared]
        buckets = []
        for bucket in self.buckets:
            shard, _ = axes.shard_of(bucket.layout.axes, self.axis)
            own = bucket._replace(
                pieces=layout.pieces(bucket.layout, num_steps),
                row_sizes=layout.row_sizes(bucket.layout, row_sizes, self.padding_counts),
                shard=shard,
            )
            buckets.append(own)
        return self._replace(
            buckets=tuple(buckets), worker=worker, num_steps=num_steps, row_sizes=row_sizes
        )


def plan_on_device(exchange: Exchange, leaves: Sequence[Any]) -> Plan:
    """The plan of this device's worker, whose gradients are ``leaves``, or have their shapes and types."""
    num_workers, devices = axes.workers_on(exchange.axis), axes.workers_on(exchange.group)
    return make_plan(exchange, leaves, num_workers, devices)


def make_plan(exchange: Exchange, leaves: Sequence[Any], num_workers: int, devices: int) -> Plan:
    """The plan for leaves of these shapes and types: made once, and then remembered.

    Args:
      exchange: its components.
      leaves: arrays of a device.
      num_workers: W.
      devices: of each worker, in a group.
    """
    types = tuple([(x.shape, x.dtype, tuple(sorted(axes.varying_axes(x)))) for x in leaves])
    decision, mesh = exchange.decision, jax.sharding.get_abstract_mesh()
    # Numbers of an exchange may be traced, so the components without them are what is remembered.
    nothing: Any = None
    fixed = exchange._replace(momentum_rule=nothing, decision=nothing)
    facts = num_workers, devices, mesh, xla.for_tpu()
    return _planned(fixed, decision.reply_codec, decision.init is not None, types, *facts)


@functools.lru_cache(maxsize=64)
def _planned(
    exchange: Exchange, reply_codec: ReplyCodec, has_state: bool, types: tuple[Any, ...],
    num_workers: int, devices: int, mesh: Any, for_tpu: bool,
) -> Plan:  # fmt: skip
    """`make_plan` by types, and by the mesh, which has the sizes of axes."""
    codec = exchange.message_codec
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in types]
    shared, layouts = bucket_leaves(exchange, leaves, [x[2] for x in types], num_workers, devices)
    buckets = []
    for bucket in layouts:
        deal = shared[bucket.segments[0].leaf] if shared else None
        message = message_format(codec, bucket)
        own = BucketPlan(
            bucket,
            message,
            reply=reply_codec.format(message),
            num_shards=math.prod([mesh.shape[n] for n in bucket.axes if n not in exchange.axis]),
            deal=deal if isinstance(deal, Deal) else None,
            pieces=bucket.pieces,
        )
        buckets.append(own)
    return Plan(
        exchange.axis,
        num_workers,
        tuple(buckets),
        tuple(shared),
        for_tpu,
        padding_counts=codec.midtread or has_state,
        abstains_per_bucket=exchange.bucket_size is not None,
        row_sizes=(None,) * len(leaves),
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
    size = exchange.bucket_size
    if not exchange.joins_leaves:
        return (), layout.buckets(leaves, num_workers, size, over)
    shared: Sequence[BucketLayout | Deal]
    if exchange.matrices is None:
        shared = layout.buckets(leaves, devices, size, over)
        part_size = None if size is None else max(size // devices, 1)
    else:
        check_dealt(exchange, over, num_workers)
        whole, group = exchange.matrices, exchange.group
        shared = matrices.deals(leaves, over, whole, num_workers, group, devices)
        part_size = 1  # so each travels by itself
    parts = [jax.ShapeDtypeStruct((x.rows_per_chunk, ROW), x.dtype) for x in shared]
    over = [x.axes for x in shared]
    return shared, layout.buckets(parts, num_workers, part_size, over)


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
