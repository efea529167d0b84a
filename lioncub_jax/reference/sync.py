"""Selective momentum sync on one page, in the manner of `reference`: workers are a leading array axis.

The oracle of the tests of `sync`, and a part of simulations. Code is shared with `reference` only, whose
rules hold for the buffer, the codes, and who takes part. After step ``t`` (from 1) at which a sync is
due, for the leaves in ``where``:

* **In full precision** ``mu_i = sum_j mu_j / W``.
* **In codes** worker i sends ``Q(mu_i)``, one bit and ``mean|mu_i|`` of each row. The owner adds its
  error ``e`` to the mean of those who take part, and answers ``u``: ``+-mean|x|`` of each row, padding
  left out, rounded to bfloat16, a zero as positive. ``e = x - u``, and ``mu_i = u + (mu_i - Q(mu_i))``,
  saturated in their dtypes. An element whose mean is not finite counts as 0, and the owner's error
  stays there. A worker that does not take part, for a momentum that is not finite, keeps it. One worker
  alone does nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lioncub_jax.reference import lion as reference
from lioncub_jax.reference.lion import Buffer, Simulator


class Synced(NamedTuple):
    """State of `synced`."""

    inner: Any  # of the simulator
    syncs: jax.Array  # int32[]: syncs done; each sends every chosen element once
    owner: jax.Array | None  # of the owners, one buffer float32[rows, 128]; None without codes

    @property
    def t(self) -> jax.Array:
        """``int32[]``: steps taken."""
        return self.inner.t

    @property
    def mu(self) -> Any:
        """The workers' momenta, leaves ``[W, ...]``."""
        return self.inner.mu


def synced(
    simulator: Simulator,
    due: Callable[[jax.Array], jax.Array],
    where: Any = None,
    coded: bool | int = False,
) -> Simulator:
    """Makes the momenta of a simulator alike at times; fits ``reference.optimizer``.

    Args:
      simulator: with ``t`` and local momentum ``mu`` in its state, such as ``reference.local_momentum()``.
      due: whether there is a sync after a step, which counts from 1.
      where: a tree of bools like the parameters, the leaves that are synced; None for all.
      coded: False for full precision, True or 1 for codes of one bit, or how many bits.
    """
    codes = reference.midrise(int(coded)) if coded else None

    def init(params: Any, workers: int) -> Any:
        owner = None
        if codes:
            shapes = [p.shape for p in _chosen(params, where)]
            owner = jnp.zeros(reference.buffer_of(shapes, workers).real.shape, jnp.float32)
        return Synced(simulator.init(params, workers), jnp.int32(0), owner)

    def update(grads: Any, state: Synced, params: Any = None, abstain: Any = None) -> Any:
        updates, inner = simulator.update(grads, state.inner, params, abstain)
        state = state._replace(inner=inner)
        return updates, lax.cond(due(inner.t), sync, lambda state: state, state)

    def sync(state: Synced) -> Synced:
        mu, tree = jax.tree.flatten(state.mu)
        picked = _chosen(state.mu, where)
        new, owner = list(map(_mean, picked)), None
        if codes:
            new, owner = _in_codes(codes, picked, state)
        alike = iter(new)
        picks = [True] * len(mu) if where is None else jax.tree.leaves(where)
        mu = [next(alike) if pick else m for m, pick in zip(mu, picks, strict=True)]
        inner = state.inner._replace(mu=jax.tree.unflatten(tree, mu))
        return Synced(inner, state.syncs + 1, owner)

    return Simulator(init, update)


def _chosen(tree: Any, where: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    picks = [True] * len(leaves) if where is None else jax.tree.leaves(where)
    return [x for x, pick in zip(leaves, picks, strict=True) if pick]


def _mean(m: jax.Array) -> jax.Array:
    mean = jnp.mean(m.astype(jnp.float32), axis=0).astype(m.dtype)
    return jnp.broadcast_to(mean, m.shape)


def _in_codes(
    codes: reference.Codes, mu: list[jax.Array], state: Synced
) -> tuple[list[jax.Array], jax.Array]:
    """Momenta and the owners' errors after a sync in codes."""
    assert state.owner is not None
    if not mu or len(mu[0]) == 1:
        return mu, state.owner
    buffer = reference.buffer_of([m.shape[1:] for m in mu], len(mu[0]))
    x = buffer.join(mu)
    message, top = codes.encode(x, buffer, state.t), codes.top(len(x))
    present = reference.takes_part(x, None)
    mean = reference.bounded_mean(message, present, top, jnp.inf)
    u, owner = answer(mean, state.owner, buffer)
    replaced = buffer.split(u + (x - reference.decode(message, top)), [jnp.float32] * len(mu))
    new = [reference.saturate(r, m.dtype) for r, m in zip(replaced, mu, strict=True)]
    return (
        reference.unless_absent(present, new, mu),
        jnp.where(jnp.any(present), owner, state.owner),
    )


def answer(
    mean: jax.Array, error: jax.Array, buffer: Buffer, p: int = 1
) -> tuple[jax.Array, jax.Array]:
    """What the owners send back of a mean and their error, and the error that they keep.

    Levels are odd multiples of half a mid-rise step of ``p`` bits; half a step travels as bfloat16, and
    not so large that the outermost level is none.
    """
    known, half = buffer.real & jnp.isfinite(mean), 2 ** (p - 1)
    x = jnp.where(known, mean + error.astype(jnp.float32), 0)
    unit = reference.to_bfloat16(reference.GAUSSIAN_STEP[p] / 2 * reference.row_mean(x, buffer))
    unit = jnp.minimum(unit, 255 // (2 * half - 1) * 2.0**120)
    level = jnp.minimum(jnp.floor(jnp.abs(reference.quotient(x, 2 * unit))), half - 1)
    u = jnp.where(x >= 0, 1, -1) * (2 * level + 1) * unit
    return u, jnp.where(known, reference.saturate(x - u, error.dtype), error)
