"""One worker's step. Read this file first. It runs inside ``shard_map``, once on each device.

Worker i of W holds a gradient ``g_i``, a momentum ``mu_i`` and, with error feedback, the error ``e_i`` of
its earlier codes. Its leaves lie in rows of 128 elements, and the rows are cut into W *chunks*. Worker j is
the *owner* of chunk j, as of a shard of the optimizer's state in ZeRO-1; it may hold a state ``s_j``.

    interpolate   c_i = b1 mu_i + (1 - b1) g_i               at worker i               momentum.py
    encode        q_i = Q(c_i + e_i)                                                   quantize.py
    collect       all-to-all: chunk j of q_i to worker j                               wires.py
    decide        u_j, s_j = decide(q_1, ..., q_W; s_j)      at the owner j            decide.py
    publish       all-gather of u_j                                                    wires.py
    decode        u = (u_1, ..., u_W)                        the same on all workers   decide.py
    remember      mu_i = b2 mu_i + (1 - b2) g_i              at worker i               momentum.py
                  e_i = keep * (c_i + e_i - dequantize(q_i))                           quantize.py

Codes lie in ``0..max_code``, and ``keep`` is a number of the code, at most 1. Votes: ``u_j = sign(sum_i
v_i)``, of signed codes ``v_i = 2 q_i - max_code``. An optimizer ``tx`` at the owners: ``u_j, s_j =
tx(mean_i dequantize(q_i); s_j)``. A later transform of the chain multiplies ``u`` by the negative learning
rate, as after ``optax.scale_by_lion``. These are the collectives of the two-phase wire. With other wires
every worker decides on all chunks.

Leaves travel in *buckets*: in one, or with ``bucket_size`` in several. Each *piece* of a bucket has codes
of its own: a large leaf, or all small leaves joined. A worker with a value that is not finite abstains: it
casts no vote, and its mu_i and e_i stay. It abstains from all buckets; with ``bucket_size`` only from those
with such a value. `pieces` has the functions that take leaves apart and put them together.

A worker may be a group of devices. Then a reduce-scatter has given each device the group's mean gradient of
one part of the parameters. That part is what this step calls leaves. ``publish`` also gathers the replies
of all devices of the group, still packed. A worker alone sends nothing: `transform.take_step` runs
`single.single_worker_step` instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import optax

from lioncub_jax.exchange.decision import Decision
from lioncub_jax.exchange.message import BucketStats, join
from lioncub_jax.exchange.momentum import Memory
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
    """The parts of an exchange. Numbers in ``memory`` and ``decision`` may be traced arrays.

    Attributes:
      axis: mesh axes of the workers.
      group: mesh axes of the devices of one worker; () for one device each.
      memory: computes ``c`` and the next ``mu`` from ``g`` and ``mu``.
      code: encodes ``c + e``: votes that are counted, or values that are decoded.
      decision: codes of all workers about a chunk to the owner's reply, and the reply to ``u``.
      wire: the collectives.
      bucket_size: elements after which a new bucket begins; None for no limit. The plan follows it.
    """

    axis: Axes
    group: Axes
    memory: Memory
    code: Code
    decision: Decision
    wire: Wire
    bucket_size: int | None = None


class StepResult(NamedTuple):
    """Result of a step; lists have one entry for each bucket.

    Attributes:
      updates: ``u`` of each leaf by index, the same on every worker.
      state: the next ``mu`` and ``e``.
      owner_states: the next state ``s`` of the chunk that this worker owns; () for decisions without state.
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
      owner_states: for each bucket ``s`` of the chunk that this worker owns; () without state.
      abstain: ``bool[]``, True to abstain; or None.
    """
    memory, code, decision, wire = exchange.memory, exchange.code, exchange.decision, exchange.wire

    # All buckets are encoded before one is sent: a NaN in the last may keep this worker out of the first.
    inputs, codes = [], []  # of each bucket, for each piece
    for bucket in plan.buckets:
        pieces = [interpolate(memory, piece, grads, state) for piece in bucket.pieces]
        inputs.append(pieces)
        codes.append(encode(code, plan, bucket, pieces))
    participates = participation(plan, codes, abstain)

    updates: dict[int, jax.Array] = {}
    mu: dict[int, jax.Array] = {}
    error: dict[int, jax.Array] = {}
    new_owner_states, stats = [], []
    for k, bucket in enumerate(plan.buckets):
        message = join(codes[k], bucket.format, participates[k])
        received = collect(wire, message, bucket.format, exchange.axis)
        with jax.named_scope("lioncub.decide"):
            context = decide_context(code, plan, bucket, wire.sharded)
            reply, s = decision.decide(received, context, owner_states[k])
        reply = publish(wire, reply, bucket.format, exchange.axis, exchange.group)
        new_owner_states.append(s)
        stats.append(reply.stats)

        decoded = decode(decision, plan, bucket, reply)
        for p, q, u in zip(inputs[k], codes[k], decoded, strict=True):
            updates |= split_update(plan, p.piece, u)
            with jax.named_scope("lioncub.remember"):
                if p.momentum is not None:
                    new = next_momentum(memory, p)
                    mu |= store(plan, p.piece, p.momentum, new, state.mu, participates[k])
                if code.error_dtype is not None:
                    new = next_error(code, plan, bucket, p, q)
                    error |= store(plan, p.piece, p.error, new, state.error, participates[k])

    # A leaf without elements is in no bucket, and stays.
    new_mu = [mu.get(i, x) for i, x in enumerate(state.mu)]
    new_error = [error.get(i, x) for i, x in enumerate(state.error)]
    new_state = WorkerState(new_mu, new_error)
    return StepResult(updates, new_state, new_owner_states, stats, participates)
