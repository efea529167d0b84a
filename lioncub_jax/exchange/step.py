"""One worker's step. Read this file first.

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
                  e_i = keep (c_i + e_i - dequantize(q_i))                             quantize.py

Votes: ``u_j = sign(sum_i v_i)``, of signed codes ``v_i = 2 q_i - max_code``. An optimizer at the owners:
``u_j, s_j = tx(mean_i dequantize(q_i); s_j)``.

Leaves travel in one *bucket*, or with ``bucket_size`` in several. A *piece* of a bucket is encoded by
itself: a large leaf, or all small leaves joined. A worker with a value that is not finite abstains: it
casts no vote, and its mu_i and e_i stay. With several buckets it abstains from each by itself.

A worker may be a group of devices. Then, before the step, a reduce-scatter gives each device the mean
gradient of its chunk of all rows. Such chunks are the leaves here, and ``publish`` also gathers the packed
replies inside the group. With one worker there is nothing to send, and `single.single_worker_step` runs
instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import optax

from lioncub_jax.exchange.decide import Decision
from lioncub_jax.exchange.message import BucketStats, blank_if_abstaining, join
from lioncub_jax.exchange.momentum import Memory
from lioncub_jax.exchange.pieces import (
    PieceState,
    Worker,
    WorkerState,
    arrays_of,
    at_least_float32,
    decide_context,
    decode,
    encode,
    new_leaves,
    participation,
    quantization_error,
    update_leaves,
)
from lioncub_jax.exchange.quantize import Code
from lioncub_jax.exchange.wires import Wire, collect, publish
from lioncub_jax.mesh.axes import Axes


class Exchange(NamedTuple):
    """The parts of an exchange; numbers in them may be traced arrays.

    Attributes:
      axis: mesh axes of the workers.
      group: mesh axes of the devices of one worker; () for one device each.
      memory: computes ``c`` and the next ``mu`` from ``g`` and ``mu``.
      code: encodes ``c + e``: votes that are counted, or values that are decoded.
      decision: codes of all workers about a chunk to the owner's reply, and the reply to ``u``.
      wire: the collectives.
      bucket_size: elements after which a new bucket begins; None for one bucket.
    """

    axis: Axes
    group: Axes
    memory: Memory
    code: Code
    decision: Decision
    wire: Wire
    bucket_size: int | None = None


class StepResult(NamedTuple):
    """Result of a step.

    Attributes:
      updates: ``u`` of each leaf by index, the same on every worker.
      state: the next ``mu`` and ``e``.
      owner_states: for each bucket the next state ``s`` of the chunk that this worker owns.
      stats: for each bucket its ties, unlike pairs of votes, and workers present.
      participates: for each bucket ``bool[]``, False if this worker abstained.
    """

    updates: dict[int, jax.Array]
    state: WorkerState
    owner_states: list[optax.OptState]
    stats: list[BucketStats]
    participates: list[jax.Array]


def step(
    exchange: Exchange,
    worker: Worker,
    grads: Sequence[jax.Array],
    state: WorkerState,
    owner_states: Sequence[optax.OptState],
    abstain: jax.Array | None,
) -> StepResult:
    """Takes one step of this worker, which meets the others in ``collect`` and ``publish`` only.

    Args:
      exchange: the parts.
      worker: this worker's index, and the places of its leaves in buckets.
      grads: ``g`` of each leaf; varies over the workers.
      state: ``mu`` and ``e`` of each leaf, None where there is none yet; varies over the workers.
      owner_states: for each bucket ``s`` of the chunk that this worker owns; () for decisions without.
      abstain: ``bool[]``, True to abstain; or None.
    """
    memory, code, decision, wire = exchange.memory, exchange.code, exchange.decision, exchange.wire

    # All buckets are encoded before one is sent: a value that is not finite keeps this worker from voting.
    pieces, messages = [], []
    for bucket in worker.buckets:
        states = []
        for piece in bucket.pieces:
            g, m, e = arrays_of(piece, grads, state)
            c = memory.interpolate(at_least_float32(g), at_least_float32(m))
            states.append(PieceState(piece, gradient=g, momentum=m, error=e, direction=c))
        pieces.append(states)
        messages.append(encode(memory, code, worker, bucket, states))
    participates = participation(worker, messages, abstain)

    updates: dict[int, jax.Array] = {}
    mu: dict[int, jax.Array] = {}
    error: dict[int, jax.Array] = {}
    new_owner_states, stats = [], []
    for k, bucket in enumerate(worker.buckets):
        message = join(messages[k], bucket.format, participates[k])
        message = blank_if_abstaining(message, bucket.format)
        received = collect(wire, message, bucket.format, exchange.axis)
        with jax.named_scope("lioncub.decide"):
            context = decide_context(code, worker, bucket, wire.sharded)
            s = owner_states[k] if owner_states else ()
            reply, s = decision.decide(received, context, s)
        reply = publish(wire, reply, bucket.format, exchange.axis, exchange.group)
        new_owner_states.append(s)
        stats.append(reply.stats)

        decoded = decode(decision, worker, bucket, reply)
        for p, q, u in zip(pieces[k], messages[k], decoded, strict=True):
            updates |= update_leaves(worker, p.piece, u)
            with jax.named_scope("lioncub.remember"):
                if p.momentum is not None:
                    g, m = at_least_float32(p.gradient), at_least_float32(p.momentum)
                    new = memory.update(g, m)
                    mu |= new_leaves(worker, p.piece, p.momentum, new, state.mu, participates[k])
                if code.error_dtype is not None:
                    new = quantization_error(code, worker, bucket, p, q)
                    error |= new_leaves(worker, p.piece, p.error, new, state.error, participates[k])

    state = WorkerState(replaced(state.mu, mu), replaced(state.error, error))
    return StepResult(updates, state, new_owner_states, stats, participates)


def replaced(
    leaves: Sequence[jax.Array | None], new: dict[int, jax.Array]
) -> list[jax.Array | None]:
    """Leaves, with new ones in place of those that are in a bucket; leaves without elements are in none."""
    return [new.get(i, x) for i, x in enumerate(leaves)]
