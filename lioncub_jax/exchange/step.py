"""One worker's step. Read this file first. It runs inside ``shard_map``, once on each device.

Worker i of W holds a gradient ``g_i``, a momentum ``mu_i`` and, with error feedback, the error ``e_i`` of
its earlier codes. Its leaves lie in rows of 128 elements, and the rows are cut into W *chunks*. Worker j is
the *owner* of chunk j, as of a shard of the optimizer's state in ZeRO-1. It may hold a state ``s_j`` and
the error ``f_j`` of its earlier replies. ``Q`` is the worker's code, and ``R`` the code of the replies.

    interpolate  c_i = b1 mu_i + (1 - b1) g_i              worker i            momentum.py
    encode       q_i = Q(c_i + e_i)                                            quantize.py
    collect      all-to-all: chunk j of q_i to owner j                         wires.py
    decide       u_j, s_j = decide(q_1, ..., q_W; s_j)     owner j             votes.py, at_owner.py
                 r_j = R(u_j + f_j)                                            votes.py, at_owner.py
                 f_j = u_j + f_j - dequantize(r_j)                             at_owner.py
    publish      all-gather of r_j                                             wires.py
    decode       u = dequantize(r_1, ..., r_W)             every worker        votes.py, at_owner.py
    remember     e_i = keep (c_i + e_i - dequantize(q_i))  worker i            pieces.py
                 mu_i = b2 mu_i + (1 - b2) g_i                                 momentum.py

Codes lie in ``0..max_code``, and ``keep`` is at most 1. A majority of votes: ``u_j = sign(sum_i v_i)`` of
signed codes ``v_i = 2 q_i - max_code``; r_j is this sign, and there is no f_j. An optimizer ``tx`` at the
owners: ``u_j, s_j = tx(mean_i dequantize(q_i); s_j)``, and R has two bits by default. A later transform of
the chain multiplies ``u`` by the negative learning rate, as after ``optax.scale_by_lion``.

Arrays for a bucket of n rows, padding included, with the two-phase wire; a word has a bit of 32 elements:

                 each bit of the codes    of each row
    message      uint32[4 n]              scale, bfloat16[n]; of votes one bit, 1 where the worker votes
    received     uint32[W, 1, 4 n / W]    the same of all workers; scales as float32[W, 1, n / W]
    reply        uint32[1, 4 n / W]       scale, or one bit: 0 where the row does not move; packed
    replies      uint32[W, 4 n / W]       the same of all owners
    decoded      for each piece of the bucket ``u``, int32 or float32[1, rows, 128]

With other wires every worker decides on all chunks: ``received`` has W in place of 1, or is a sum.

Leaves travel in *buckets*: in one, or with ``bucket_size`` in several. Each *piece* of a bucket has codes
of its own: a large leaf, or all small leaves joined. A worker with a value that is not finite abstains: it
casts no vote, and its mu_i and e_i stay. It abstains from all buckets; with ``bucket_size`` only from those
with such a value.

A worker may be sharded over inner mesh axes: each device takes this step with its shards of the leaves, and
`encode` and `participation` also communicate inside the worker. A worker may be a group of devices: each
was given the group's mean gradient of one part of the parameters by a reduce-scatter, this part is its
leaves here, and `publish` gathers the replies of the whole group. A worker alone sends nothing:
`transform.take_step` runs `single.single_worker_step` instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import optax

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
)
from lioncub_jax.exchange.quantize import Code
from lioncub_jax.exchange.wires import Wire, collect, publish
from lioncub_jax.mesh.axes import Axes


class Exchange(NamedTuple):
    """The parts of an exchange. Numbers in ``momentum_rule`` and ``decision`` may be traced arrays.

    Attributes:
      axis: mesh axes of the workers.
      group: mesh axes of the devices of one worker; () for one device each.
      momentum_rule: computes ``c`` and the next ``mu`` from ``g`` and ``mu``.
      code: encodes ``c + e``: votes that are counted, or values that are decoded.
      decision: codes of all workers about a chunk to the owner's reply, and the reply to ``u``.
      wire: the collectives.
      bucket_size: elements after which a new bucket begins; None for no limit. The plan follows it.
    """

    axis: Axes
    group: Axes
    momentum_rule: MomentumRule
    code: Code
    decision: Decision
    wire: Wire
    bucket_size: int | None = None


class StepResult(NamedTuple):
    """Result of a step; lists have one entry for each bucket.

    Attributes:
      updates: ``u`` of each leaf by index, the same on every worker; in a group ``[devices, chunk, 128]``,
        the chunks of all of its devices. A leaf without elements has none.
      state: the next ``mu`` and ``e``.
      owner_states: the next ``s`` and ``f`` of the chunk that this worker owns; () for decisions without
        state. Counters have moved even if no worker participates: `transform.next_state` sets them back.
      stats: ties, pairs of votes that differ, and workers present.
      participates: ``bool[]``, False if this worker abstained.
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
      owner_states: for each bucket ``s`` and ``f`` of the chunk that this worker owns; () without state.
      abstain: ``bool[]``, True to abstain; or None.
    """
    rule, code, decision, wire = (
        exchange.momentum_rule, exchange.code, exchange.decision, exchange.wire,
    )  # fmt: skip

    # All buckets are encoded before one is sent: a NaN in the last may keep this worker out of the first.
    inputs, piece_messages = [], []  # of each bucket, for each piece
    for bucket in plan.buckets:
        inputs.append([interpolate(rule, piece, grads, state) for piece in bucket.pieces])
        piece_messages.append(encode(code, plan, bucket, inputs[-1]))
    participates = participation(plan, piece_messages, abstain)

    updates: dict[int, jax.Array] = {}
    mu: dict[int, jax.Array] = {}
    error: dict[int, jax.Array] = {}
    new_owner_states, stats = [], []
    for k, bucket in enumerate(plan.buckets):
        message = join(piece_messages[k], bucket.format, participates[k])
        received = collect(wire, message, bucket.format, exchange.axis)
        with jax.named_scope("lioncub.decide"):
            context = decide_context(code, plan, bucket, wire.sharded)
            reply, s = decision.decide(received, context, owner_states[k])
        replies = publish(wire, reply, bucket.format, exchange.axis, exchange.group)
        new_owner_states.append(s)
        stats.append(replies.stats)

        decoded = decode(decision, plan, bucket, replies)
        for x, piece_message, u in zip(inputs[k], piece_messages[k], decoded, strict=True):
            updates |= split_update(plan, x.piece, u)
            with jax.named_scope("lioncub.remember"):
                new_error = next_error(code, plan, bucket, x, piece_message)
                # A sync in codes keeps no error apart from mu, which becomes u + e.
                if x.error is not None and new_error is not None:
                    error |= store(plan, x.piece, x.error, new_error, state.error, participates[k])
                if x.momentum is not None:
                    new_mu = next_momentum(rule, x, u, new_error)
                    mu |= store(plan, x.piece, x.momentum, new_mu, state.mu, participates[k])

    # A leaf without elements is in no bucket, and stays.
    all_mu = [mu.get(i, x) for i, x in enumerate(state.mu)]
    all_errors = [error.get(i, x) for i, x in enumerate(state.error)]
    new_state = WorkerState(all_mu, all_errors)
    return StepResult(updates, new_state, new_owner_states, stats, participates)
