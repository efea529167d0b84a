"""Selective momentum sync on one page, in the manner of `reference`: workers are a leading array axis.

The oracle of the tests of `sync`, and a part of simulations. Code is shared with `reference` only, whose
rules hold for the buffer, the codes, and who takes part. After step ``t`` (from 1) at which a sync is
due, for the leaves in ``where``:

* **In full precision** ``mu_i = sum_j mu_j / W``.
* **In codes** worker i says ``Q(mu_i)``, one bit with ``mean|mu_i|`` of each block of 128. The owner adds
  its error ``e`` to the mean of those who take part, and answers ``u``: ``+-mean|x|`` of each row, padding
  left out, rounded to bfloat16, a zero as positive. ``e = x - u``, and ``mu_i = u + (mu_i - Q(mu_i))``. A
  worker that does not take part, for a momentum that is not finite, keeps it. One alone does nothing.
* **Adaptive**: with ``d = 1 - |mean_i mu_i|^2 / mean_i |mu_i|^2`` of all leaves together, before the sync,
  the next gap is half of the last where ``W (1 - d) < threshold``, else twice, between ``shortest`` and
  ``longest``; the first is ``shortest``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax.reference import lion as reference
from lioncub_jax.reference.lion import ROW, Buffer, Simulator

BLOCK = 128


class Synced(NamedTuple):
    """State of `synced`."""

    inner: Any  # of the simulator
    syncs: jax.Array  # int32[]: syncs done; each sends every chosen element once
    owner: jax.Array | None  # of the owners, one buffer float32[rows, 64]; None without codes
    gap: jax.Array  # int32[]: of an adaptive sync, steps from the last to the next
    next: jax.Array  # int32[]: of an adaptive sync, the step of the next

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
    due: Callable[[jax.Array], jax.Array] | None = None,
    where: Any = None,
    coded: bool | int = False,
    adaptive: tuple[int, int, float] | None = None,
) -> Simulator:
    """Makes the momenta of a simulator alike at times; fits ``reference.optimizer``.

    Args:
      simulator: with ``t`` and local momentum ``mu`` in its state, such as ``reference.local_momentum()``.
      due: whether there is a sync after a step, which counts from 1; None for never, or as ``adaptive``.
      where: a tree of bools like the parameters, the leaves that are synced; None for all.
      coded: False for full precision, True or 1 for codes of one bit, or how many bits.
      adaptive: ``(shortest, longest, threshold)`` in place of ``due``.
    """
    codes = reference.midrise(int(coded), BLOCK) if coded else None
    shortest = adaptive[0] if adaptive else 0
    if adaptive and (due or coded):
        raise ValueError(
            "adaptive=...: the drift says when, in full precision; leave out due and coded"
        )

    def init(params: Any, workers: int) -> Any:
        rows = _buffer([p.shape for p in _chosen(params, where)]).real.shape
        owner = jnp.zeros(rows) if coded else None
        gap = jnp.int32(shortest)
        return Synced(simulator.init(params, workers), jnp.int32(0), owner, gap, gap)

    def update(grads: Any, state: Synced, params: Any = None, abstain: Any = None) -> Any:
        updates, inner = simulator.update(grads, state.inner, params, abstain)
        state = state._replace(inner=inner)
        if due is None and adaptive is None:
            return updates, state
        now = due(inner.t) if due else inner.t >= state.next
        return updates, lax.cond(now, sync, lambda state: state, state)

    def sync(state: Synced) -> Synced:
        mu, tree = jax.tree.flatten(state.mu)
        picked = _chosen(state.mu, where)
        owner, gap = state.owner, state.gap
        if adaptive:
            half, twice = jnp.maximum(gap // 2, adaptive[0]), jnp.minimum(gap * 2, adaptive[1])
            gap = jnp.where(_alike(picked) < adaptive[2], half, twice)
        if codes is None:
            alike = iter(jax.tree.leaves(reference.sync(picked)))
        else:
            new, owner = _in_codes(codes, picked, state)
            alike = iter(new)
        picks = [True] * len(mu) if where is None else jax.tree.leaves(where)
        mu = [next(alike) if pick else m for m, pick in zip(mu, picks, strict=True)]
        inner = state.inner._replace(mu=jax.tree.unflatten(tree, mu))
        return Synced(inner, state.syncs + 1, owner, gap, state.t + gap)

    return Simulator(init, update)


def _chosen(tree: Any, where: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    picks = [True] * len(leaves) if where is None else jax.tree.leaves(where)
    return [x for x, pick in zip(leaves, picks, strict=True) if pick]


def _buffer(shapes: list[tuple[int, ...]]) -> Buffer:
    return reference.buffer_of(shapes, BLOCK)


def _alike(mu: list[jax.Array]) -> jax.Array:
    """``W (1 - drift)`` of all leaves ``[W, ...]`` together."""
    wide = [m.astype(jnp.float32) for m in mu]
    common = sum((jnp.sum(jnp.mean(m, axis=0) ** 2) for m in wide), jnp.zeros(()))
    total = sum((jnp.sum(m**2) / len(m) for m in wide), jnp.zeros(()))
    drift = jnp.where(total > 0, 1 - common / jnp.where(total > 0, total, 1), 0)
    return len(mu[0]) * (1 - drift) if mu else jnp.zeros(())


def _in_codes(
    codes: reference.Codes, mu: list[jax.Array], state: Synced
) -> tuple[list[jax.Array], jax.Array]:
    """Momenta and the owners' errors after a sync in codes."""
    assert state.owner is not None
    if len(mu[0]) == 1:
        return mu, state.owner
    buffer = _buffer([m.shape[1:] for m in mu])
    x = buffer.join(mu)
    said = codes.encode(x, buffer, state.t)
    top = codes.top(len(x))
    present = reference.takes_part(codes, x, said, None)
    wanted = reference.bounded_mean(said, present, top, jnp.inf) + state.owner
    wanted = jnp.where(buffer.real, wanted, 0)
    u = jnp.where(wanted >= 0, 1, -1) * _scale(wanted, buffer)
    owner = jnp.where(buffer.real, wanted - u, 0)
    heard = u + (x - reference.decode(said, top))
    new = buffer.split(heard, [m.dtype for m in mu])
    here = [present.reshape(-1, *[1] * (m.ndim - 1)) for m in mu]
    new = [jnp.where(h, n, m) for h, n, m in zip(here, new, mu, strict=True)]
    return new, jnp.where(jnp.any(present), owner, state.owner)


def _scale(x: jax.Array, buffer: Buffer) -> jax.Array:
    """``mean|x|`` of each row without its padding, as a bfloat16: ``float32[rows, 1]``."""
    real = np.maximum(buffer.real.sum(axis=1, keepdims=True), 1).astype(np.float32)
    total = jnp.sum(jnp.abs(x).reshape(-1, ROW), axis=1, keepdims=True)
    return lax.reduce_precision(total / real, exponent_bits=8, mantissa_bits=7)
