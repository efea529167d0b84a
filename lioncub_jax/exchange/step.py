"""One worker's step. Read this file first. It runs inside ``shard_map``, once on each device.

Worker i of W holds a gradient ``g_i``, a momentum ``mu_i`` and, with error feedback, the error ``e_i`` of
its earlier codes. Its leaves lie in rows of 128 elements, and the rows are cut into W *chunks*. Worker j is
the *owner* of chunk j, as of a shard of the optimizer's state in ZeRO-1. It may hold a state ``s_j`` and
the error ``f_j`` of its earlier replies. A *codec* maps values to *codes*, integers from 0 to max_code:
``Q`` is that of the messages, and ``R`` that of the replies. The functions called here are in `pieces`,
`message` and `wires`; the last column has the file of each formula.

    interpolate  c_i = b1 mu_i + (1 - b1) g_i                worker i            momentum.py
    encode       q_i = Q(c_i + e_i)                                              quantize.py
    collect      all-to-all: chunk j of q_i to owner j                           wires.py
    decide       u_j, s_j = decide(q_1, ..., q_W; s_j)       owner j             votes.py, at_owner.py
                 r_j = R(u_j + f_j)                                              votes.py, at_owner.py
                 f_j = u_j + f_j - dequantize(r_j)                               at_owner.py
    publish      all-gather of r_j                                               wires.py
    decode       u = dequantize(r_1, ..., r_W)               every worker        votes.py, at_owner.py
    remember     e_i = keep * (c_i + e_i - dequantize(q_i))  worker i            pieces.py
                 mu_i = b2 mu_i + (1 - b2) g_i                                   momentum.py
                 (after a coded sync mu_i = u + e_i, see `sync.coded`)

The factor ``keep`` is at most 1. Votes are signed codes ``v_i = 2 q_i - max_code``, without scales or f_j.
`majority` replies with ``sign(sum_i v_i)`` in one bit: a tie is a fair bit, the same everywhere. `ternary`
replies in two bits: a tie is 0. `average` replies with the sum: ``u = sum_i v_i / (n max_code)`` of n
voters. An optimizer ``tx`` at the owners: ``u_j, s_j = tx(mean_i dequantize(q_i); s_j)``, and R has two
bits by default. A later transform of the chain multiplies ``u`` by the negative learning rate.

Arrays of a bucket with the two-phase wire: N rows, padding included, of which a chunk has m = N / W.

                 each plane                          row data of votes      row data of values
    message      uint32[4 N]                         uint32[N / 32]         scales bfloat16[N]
    received     uint32[workers W, chunks 1, 4 m]    uint32[W, 1, m / 32]   scales float32[W, 1, m]
    reply        uint32[chunks 1, words 4 m]         uint32[1, m / 32]      uint32[1, m / 2]
    replies      uint32[chunks W, words 4 m]         uint32[W, m / 32]      uint32[W, m / 2]
    decoded      ``u`` of each piece, int32 or float32[devices 1, rows, 128]

Plane k has bit k of each code, and a word has the bits of 32 elements. The bit of a row is 1 where the
worker votes on it; in a reply where the row moves. Replies of `codes(p)` have half of each row's scale, two
bfloat16 in a word. With other wires every worker decides on all W chunks, and ``received`` may be a sum.

Leaves travel in *buckets*: one for each set of mesh axes over which leaves vary; ``bucket_size`` splits
them. Each *piece* of a bucket is encoded by itself: a large leaf, or all small leaves joined. A worker with
a NaN or infinity in any leaf abstains: it casts no vote, and its mu_i and e_i stay. It abstains from all
buckets; with ``bucket_size`` only from those with such a value.

A worker may be sharded over inner mesh axes: each device takes this step with its shards of the leaves, and
`encode` and `participation` also communicate inside the worker. A worker may be a group of devices. Each
device has the group's mean gradient of one *part* of the parameters, by a reduce-scatter. This part is its
leaves here, and `publish` gathers the replies of the whole group. A worker alone sends nothing to other
workers: `single.run_step` gives it a step of its own.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import optax

from lioncub_jax.exchange.dealing import Matrices
from lioncub_jax.exchange.decision import Decision
from lioncub_jax.exchange.message import BucketStats, join
from lioncub_jax.exchange.momentum import MomentumRule
from lioncub_jax.exchange.pieces import (
    WorkerPlan,
    WorkerState,
    decide_context,
    decode,
    encode,
    interpolate,
    next_error,
    next_momentum,
    participation,
    split_update,
    store,
    store_error,
)
from lioncub_jax.exchange.quantize import Codec
from lioncub_jax.exchange.wires import Wire, collect, publish
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


class StepResult(NamedTuple):
    """Result of a step.

    Attributes:
      updates: ``u`` of each leaf by index, the same on every worker; in a group ``[devices, rows, 128]``,
        the parts of all of its devices. A leaf without elements has none.
      state: the next ``mu`` and ``e`` of each leaf.
      owner_states: for each bucket the next ``s`` and ``f`` of the rows on which this worker decides: of
        its chunk; of all rows if the wire is not ``sharded``. () for decisions without state. Counters
        have moved even if no worker participates. `transform.next_state` sets them back, since only its
        sum over devices gives the number of workers the type of a replicated value, as counters have.
      stats: for each bucket ties, pairs of votes that differ, and workers present, as its owners say.
      participates: for each bucket ``bool[]``, False if this worker abstained.
    """

    updates: dict[int, jax.Array]
    state: WorkerState
    owner_states: list[optax.OptState]
    stats: list[BucketStats]
    participates: list[jax.Array]


def step(
    exchange: Exchange,
    plan: WorkerPlan,
    grads: Sequence[jax.Array],
    state: WorkerState,
    owner_states: Sequence[optax.OptState],
    abstain: jax.Array | None,
) -> StepResult:
    """Takes one step of this worker, which meets the others in ``collect`` and ``publish`` only.

    Args:
      exchange: the parts.
      plan: this worker's index, and the places of its leaves in buckets.
      grads: ``g`` of each leaf; varies over the workers.
      state: ``mu`` and ``e`` of each leaf, None where there is none; varies over the workers.
      owner_states: for each bucket ``s`` and ``f`` of the rows on which this worker decides; () for
        decisions without state.
      abstain: ``bool[]``, True to abstain; or None.
    """
    rule, codec, decision, wire = (
        exchange.momentum_rule, exchange.codec, exchange.decision, exchange.wire,
    )  # fmt: skip

    # All buckets are encoded before one is sent: a NaN in the last may keep this worker out of the first.
    inputs, piece_messages = [], []  # of each bucket, for each piece
    for bucket in plan.buckets:
        inputs.append([interpolate(rule, piece, grads, state) for piece in bucket.pieces])
        piece_messages.append(encode(codec, plan, bucket, inputs[-1]))
    participates = participation(plan, piece_messages, abstain)

    updates: dict[int, jax.Array] = {}
    mu: dict[int, jax.Array] = {}
    error: dict[int, jax.Array] = {}
    new_owner_states, stats = [], []
    for k, bucket in enumerate(plan.buckets):
        message = join(piece_messages[k], bucket.format, participates[k])
        received = collect(wire, message, bucket.format, exchange.axis)
        with jax.named_scope("lioncub.decide"):
            context = decide_context(codec, plan, bucket, wire.sharded)
            reply, owner_state = decision.decide(received, context, owner_states[k])
        replies = publish(wire, reply, bucket.format, exchange.axis, exchange.group)
        new_owner_states.append(owner_state)
        stats.append(replies.stats)

        decoded = decode(decision, plan, bucket, replies)
        for own, piece_message, u in zip(inputs[k], piece_messages[k], decoded, strict=True):
            piece = own.piece
            updates |= split_update(plan, piece, u)
            with jax.named_scope("lioncub.remember"):
                kept = codec, plan, bucket, piece_message
                # A coded sync keeps no error apart from mu, which becomes u + e.
                if own.error is not None:
                    error |= store_error(own, *kept, state.error, participates[k])
                if own.momentum is not None:
                    new_mu = next_momentum(rule, own, u, partial(next_error, *kept))
                    mu |= store(plan, piece, own.momentum, new_mu, state.mu, participates[k])

    # A leaf without elements is in no bucket, and stays.
    all_mu = [mu.get(i, old) for i, old in enumerate(state.mu)]
    all_errors = [error.get(i, old) for i, old in enumerate(state.error)]
    new_state = WorkerState(all_mu, all_errors)
    return StepResult(updates, new_state, new_owner_states, stats, participates)
