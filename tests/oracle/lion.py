"""Lion of many workers on one page: who votes, what is decided, and where the momentum is.

This is the oracle of the tests, and a simulator of many workers on one device. It shares no code with
the package. Workers ``i = 0 .. W-1`` are the leading axis of arrays; `coding` has rows, codes and means.

* **Who votes.** A worker with a value that is not finite abstains from the step, and so does one that
  is asked to; its momentum and error stay. With mid-rise codes a worker does not vote on a row whose
  values are all exactly zero. With mid-tread codes all who take part vote, and an abstainer sends zero.
* **Decision.** With ``S`` the sum of the levels of the ``N`` workers that vote on a row, the update is the
  sign of ``S``; a tie takes the coin (``majority``) or is 0 (``ternary_sum``); ``average`` is ``S`` over N
  times the largest level. Where nobody votes it is 0. Updates have the dtype of the gradient.
* **Agreement** of votes of one bit, +1 and -1 with the sum ``S``: pairs of votes alike, less those
  unlike, are ``(S**2 - n) / 2`` of the ``n (n - 1) / 2`` on an element; padding is left out.
* **Local momentum.** Worker i encodes ``b1 mu_i + (1-b1) g_i`` and keeps ``b2 mu_i + (1-b2) g_i``.
* **Momentum at the owner.** Worker i encodes ``g_i``, with error feedback ``x_i = g_i + e_i``, and keeps
  ``e_i = x_i - decoded``. The mean of what is decoded goes into one Lion for all.
  Its sign is the update; a zero takes the coin, unless the row is all zeros, padding left out, whose
  momentum stays 0. With nobody there, nothing changes; an element whose mean is not finite keeps its
  momentum, and its update is that of a zero.
* **One worker** sends nothing: its update is the exact sign, and nothing is quantized.

Sources: Lion (arXiv 2302.06675), Distributed Lion (2404.00438), Lion Cub (2411.16462). The rules for
zeros, ties and abstention, mid-rise codes of more than one bit, and momentum at the owner are ours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from oracle.coding import (
    Votes,
    answer,
    both_ways,
    buffer_of,
    coin,
    decoded_mean,
    dense,
    midrise,
    saturate,
    sign,
    total,
    words,
)


class State(dict):
    """What is remembered, by name: of workers leaves ``[W, ...]``, of owners one buffer ``[rows, 128]``."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


jax.tree_util.register_pytree_with_keys(
    State,
    lambda state: ([(jax.tree_util.GetAttrKey(n), x) for n, x in state.items()], tuple(state)),
    lambda names, x: State(zip(names, x, strict=True)),
)


class Simulator(NamedTuple):
    """All workers at once; updates are what they agreed on, shaped like the parameters."""

    init: Callable[..., State]  # (params, W)
    update: Callable[..., Any]  # (grads [W, ...], state, params=None, abstain bool[W]=None)


def simulator(memory, step):
    """Of a method's own memory, and of a step of it.

    Args:
      memory: ``(params, W)`` to what the method remembers, by name.
      step: ``(grads, state, params, abstain)`` to updates, who took part, and what changed in the memory.
    """

    def init(params, workers):
        zero = jnp.int32(0)
        return State(t=zero, abstained=zero, abstentions=zero, **memory(params, workers))

    def update(grads, state, params=None, abstain=None, **how):
        if abstain is None:
            abstain = np.zeros(len(jax.tree.leaves(grads)[0]), bool)
        updates, present, changed = step(grads, state, params, abstain, **how)
        away = jnp.sum(~present, dtype=jnp.int32)
        counted = {"t": state.t + 1, "abstained": away, "abstentions": state.abstentions + away}
        return updates, State(state | counted | changed)

    return Simulator(init, update)


def takes_part(x, abstain):
    """``bool[W, 1, 1]``: workers that are not asked to abstain and whose values are finite."""
    return jnp.all(jnp.isfinite(x), axis=(1, 2), keepdims=True) & ~abstain[:, None, None]


def kept(present, new, old):
    """Leaves ``[W, ...]``, in their dtypes: new ones of workers that take part, old ones of the others."""

    def leaf(new, old):
        here = present.reshape(-1, *[1] * (new.ndim - 1))
        return jnp.where(here, saturate(new, old.dtype), old)

    return jax.tree.map(leaf, new, old)


def per_worker(params, workers, dtype=None):
    """Zeros, leaves ``[W, ...]``."""
    return jax.tree.map(lambda p: jnp.zeros((workers, *p.shape), dtype or p.dtype), params)


def blend(b, new, old):
    """``(1-b) new + b old``, in float32."""
    return jax.tree.map(
        lambda new, old: (1 - b) * new + b * old, *optax.tree.cast((new, old), jnp.float32)
    )


# --- The decision, by the margin; `reach` is the largest it could be, or says whether a row moves at all


def counted(votes, most, present):
    """The sum of the levels of each element, and of each row the largest that it could be."""
    margin = total(jnp.where(votes.here, votes.level, 0))
    # Whole levels have a zero, so whoever takes part votes on all rows.
    voters = votes.here if most % 1 else jnp.broadcast_to(present, votes.here.shape)
    return margin, most * jnp.sum(voters, axis=0)


def majority(margin, reach, coins):
    """The sign; a tie takes the coin. Distributed Lion "MaVo", Lion Cub."""
    return jnp.where(margin == 0, 2 * coins - 1, jnp.sign(margin)) * (reach > 0)


def ternary_sum(margin, reach, coins):
    """The sign; a tie is 0."""
    return jnp.sign(margin)


def average(margin, reach, coins):
    """The mean vote, in [-1, 1]. Distributed Lion "Avg"."""
    return margin / jnp.where(reach > 0, reach, 1)


def agreement(votes, real):
    """The share of pairs of two workers' votes that are alike, and how many pairs there are; 0 of 0."""
    n = jnp.sum(votes.here, axis=0) * real
    sums = total(jnp.where(votes.here, jnp.sign(votes.level), 0)) * real
    pairs = jnp.sum(n * (n - 1.0))
    return (jnp.sum(sums**2 - n) / jnp.maximum(pairs, 1) + 1) / 2 * (pairs > 0), pairs / 2


# --- One step of all workers


def local_momentum(b1=0.9, b2=0.99, mu_dtype=None, codes=None, decide=None):
    """Every worker votes with its own blend and has its own momentum: Distributed Lion, Lion Cub."""
    codes = codes or sign()
    decide = decide or (majority if codes.most(1) % 1 else ternary_sum)

    def memory(params, workers):
        mu = per_worker(params, workers, mu_dtype)
        counts = {"ties": jnp.float32(0), "agreement": jnp.float32(0), "pairs": jnp.float32(0)}
        return {"mu": mu, **counts}

    def step(g, state, params, abstain, places=words):
        buffer, mu, workers = buffer_of(g, places), state.mu, len(abstain)
        # One worker codes nothing: the optimizer's own arithmetic.
        many = workers > 1
        coded, rule = (codes, decide) if many else (dense(), ternary_sum)
        x = blend(b1, buffer.join(g), buffer.join(mu)) if many else buffer.join(blend(b1, g, mu))
        present = takes_part(x, abstain)
        votes = Votes(*coded.encode(x, buffer, state.t), (x != 0).any(-1, keepdims=True) & present)
        most = coded.most(workers)
        margin, reach = counted(votes, most, present)
        u = rule(margin, reach, coin(buffer, state.t))
        moves = (reach > 0) | (most > 0 and most % 1 == 0)
        ties = jnp.sum((margin == 0) & moves & buffer.real, dtype=jnp.float32)
        changed = {"mu": kept(present, blend(b2, g, mu), mu), "ties": ties}
        if most == 0.5:
            changed["agreement"], changed["pairs"] = agreement(votes, buffer.real)
        return buffer.split(u, g), present, changed

    return simulator(memory, step)


def momentum_at_owner(b1=0.9, b2=0.99, codes=None, **how):
    """Lion at the owner, whose sign is the whole update."""
    return at_owner(optax.scale_by_lion(b1, b2), codes or midrise(3), **how)


def at_owner(tx, codes, reply=None, *, decide=majority):
    """Workers send gradients, with the feedback of their codes, to one state of ``tx``.

    Its update comes back as a sign, or in codes of ``reply`` bits with the owners' own feedback.
    """

    def memory(params, workers):
        error = per_worker(params, workers, codes.feedback)
        rows = jnp.zeros(buffer_of(error).real.shape)
        return {
            "inner": tx.init(rows), "error": error if codes.feedback else None,
            "owner": jnp.zeros(rows.shape) if reply else None,
            "ties": jnp.float32(0),
        }  # fmt: skip

    def step(g, state, params, abstain, places=words):
        buffer, t, workers = buffer_of(g, places), state.t, len(abstain)
        coded, rule = (codes, decide) if workers > 1 else (dense(), ternary_sum)
        x, error = buffer.join(g), state.error
        x = x if error is None else x + buffer.join(error)
        level, unit = coded.encode(x, buffer, t)
        present = takes_part(x, abstain)
        mean = decoded_mean(Votes(level, unit, present))
        some = jnp.any(present)
        known = some & jnp.isfinite(mean) & buffer.real
        update, inner = tx.update(jnp.where(known, mean, 0), state.inner)
        c = jnp.where(known, update, 0)
        inner = jax.tree.map(partial(stays, known, some), inner, state.inner)
        if error is not None:
            error = kept(present, buffer.split(x - level * unit, error), error)
        moves = jnp.any(c != 0, axis=-1, keepdims=True)
        ties = jnp.sum((c == 0) & moves & buffer.real & (workers > 1), dtype=jnp.float32)
        changed = {"inner": inner, "error": error, "ties": ties}
        if reply is None:
            u = rule(c, moves, coin(buffer, t))
        else:
            said = jnp.where(known, c, jnp.nan)
            alone = workers == 1
            u, owner = (c, state.owner) if alone else answer(said, state.owner, buffer, reply)
            u, changed["owner"] = jnp.where(known, u, 0), owner
        return buffer.split(u, g), present, changed

    return simulator(memory, step)


def stays(known, some, new, old):
    """What a state at the owner becomes: rows where the mean is known, counters if somebody spoke."""
    new = saturate(new, new.dtype) if jnp.issubdtype(new.dtype, jnp.floating) else new
    return jnp.where(known if new.shape == known.shape else some, new, old)


# --- Codes both ways, with the errors of both sides


def in_float32(tx):
    """A transform whose state and arithmetic are float32, whatever it is given."""

    def update(updates, state, params=None):
        new, state = tx.update(optax.tree.cast(updates, jnp.float32), state, params)
        return optax.tree.cast_like(new, updates), state

    return optax.GradientTransformation(
        lambda params: tx.init(optax.tree.cast(params, jnp.float32)), update
    )


def errors(params, workers):
    """The memory of `fed_back`."""
    error = per_worker(params, workers, jnp.float32)
    return {"error": error, "owner": jnp.zeros(buffer_of(error).real.shape)}


def fed_back(p, buffer, x, state, abstain):
    """What comes back of ``x`` in codes of ``p`` bits each way, who took part, and both sides' errors."""
    x = x + buffer.join(state.error)
    present = takes_part(x, abstain)
    u, rest, owner = both_ways(p, buffer, x, present, state.owner, state.t)
    error = kept(present, buffer.split(rest, state.error), state.error)
    return u, present, {"error": error, "owner": owner}


# --- And at last, the optimizers


def optimizer(votes, learning_rate, weight_decay=1e-3):
    """Makes of votes ``u`` the updates ``-lr (u + wd p)``.

    Args:
      votes: a simulator.
      learning_rate: a number, or a function of the steps taken before.
      weight_decay: decoupled, as in Lion.
    """

    def update(grads, state, params, abstain=None, **how):
        lr = learning_rate(state.t) if callable(learning_rate) else learning_rate
        u, state = votes.update(grads, state, params, abstain, **how)

        def step(u, p):
            return (-lr * (u + weight_decay * p)).astype(u.dtype)

        return jax.tree.map(step, u, params), state

    return Simulator(votes.init, update)
