"""What was tried to close the gap of one bit at many workers: ablations, which the library does not offer.

All are momentum at the owner, as `reference.momentum_at_owner` without a bound on steps, but for how an
error is fed back, when there are more bits, or what the codes are of. For worker i, with ``Q`` the codes
of a row::

    x_i = g_i + e_i;  send Q(x_i);  e_i = keep e_i + gain (x_i - Q(x_i))

``keep = 0, gain = 1`` is error feedback, a gain below 1 feedback that decays, ``keep = 1 - gain`` feedback
that is spread over later steps. EF21 (arXiv 2106.05203) has an estimate ``h_i`` in place of the error: it
sends ``Q(g_i - h_i)``, both sides add that to ``h_i``, and the owner goes by the mean of all ``h_i``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lioncub_jax import reference
from lioncub_jax.reference import lion
from lioncub_jax.reference.lion import Codes, Message, Simulator


class State(NamedTuple):
    """What is remembered."""

    t: jax.Array  # int32[]: steps taken
    mu: jax.Array  # the owner's, [rows, 128]
    error: jax.Array  # of the workers, or their estimates, [W, rows, 128]


def at_owner(b1: float, b2: float, codes: Codes, gain: float = 1.0, keep: float = 0.0,
             estimates: bool = False) -> Simulator:  # fmt: skip
    """Lion at the owner of what workers send."""

    def init(params: Any, workers: int) -> State:
        buffer = lion.buffer_of([p.shape for p in jax.tree.leaves(params)], workers)
        mu = jnp.zeros(buffer.real.shape)
        return State(jnp.int32(0), mu, jnp.zeros((workers, *mu.shape)))

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        g, tree = jax.tree.flatten(grads)
        buffer = lion.buffer_of([leaf.shape[1:] for leaf in g], len(g[0]))
        x = buffer.join(g) + (-state.error if estimates else state.error)
        sent = decoded(codes, x, buffer, state.t)
        if estimates:
            error = state.error + sent
            mean = jnp.mean(error, axis=0)
        else:
            error = keep * state.error + gain * (x - sent)
            mean = jnp.mean(sent, axis=0)
        c = (1 - b1) * mean + b1 * state.mu
        moves = jnp.any(c != 0, axis=-1, keepdims=True)
        u = lion.majority(c, moves, lion.coin(buffer, state.t))
        state = State(state.t + 1, b2 * state.mu + (1 - b2) * mean, error)
        return jax.tree.unflatten(tree, buffer.split(u, [leaf.dtype for leaf in g])), state

    return Simulator(init, update)


def decoded(codes: Codes, x: jax.Array, buffer: lion.Buffer, t: jax.Array) -> jax.Array:
    """What the owner makes of the messages, ``float32[W, rows, 128]``."""
    message = codes.encode(x, buffer, t)
    return codes.back(lion.decode(message, codes.top(len(x))), buffer, t) * buffer.real


def signs() -> Codes:
    """Signs alone, without a step: the owner adds votes up, and its momentum is of their means."""
    codes = reference.midrise(1)

    def encode(x: jax.Array, buffer: lion.Buffer, t: Any) -> Message:
        message = codes.encode(x, buffer, t)
        votes = jnp.any(x != 0, axis=-1, keepdims=True)
        return message._replace(step=jnp.where(votes, 2.0, 0.0))

    return Codes(codes.top, encode)


def ternary() -> Codes:
    """-1, 0 or 1 times a step for each row, all that is within half a step being 0: 1.6 bits."""

    def encode(x: jax.Array, buffer: lion.Buffer, t: Any) -> Message:
        # For a Gaussian the best of three levels are 0 and 1.224 deviations (Max 1960).
        step = lion.to_bfloat16(1.534 * lion.row_mean(x, buffer))
        level = jnp.clip(jnp.round(lion.quotient(x, step)), -1, 1)
        return Message(level.astype(jnp.int32) + 1, step)

    return Codes(lambda workers: 2, encode)


def finer(codes: Codes, fine: Codes, due: Callable[[Any], Any]) -> Codes:
    """Other codes at the steps at which they are due."""

    def encode(x: jax.Array, buffer: lion.Buffer, t: Any) -> Message:
        few, many = codes.encode(x, buffer, t), fine.encode(x, buffer, t)
        q = many.q - (fine.top(len(x)) - codes.top(len(x))) / 2  # in half steps from the middle
        return Message(jnp.where(due(t), q, few.q), jnp.where(due(t), many.step, few.step))

    return Codes(codes.top, encode, codes.back)


def finer_rows(codes: Codes, fine: Codes, share: float) -> Codes:
    """Other codes for a share of the rows, drawn anew in each step."""

    def encode(x: jax.Array, buffer: lion.Buffer, t: Any) -> Message:
        drawn = jax.random.uniform(jax.random.fold_in(jax.random.key(0), t), (x.shape[1], 1))
        return finer(codes, fine, lambda t: drawn < share).encode(x, buffer, t)

    return Codes(codes.top, encode, codes.back)
