"""1-bit Adam and 0/1 Adam on one page: the workers are a leading array axis, and nothing is packed.

The oracle of the tests of `one_bit_adam`, and a simulator of many workers on one device, in the form of
`reference`, with which it shares the rules for the buffer, the codes, and who takes part. For workers
``i = 0 .. W-1``, and ``n`` steps before this one in which somebody took part:

* **In full precision**, at steps ``k_0 = 0, k_{j+1} = k_j + 2**floor(j / kappa)`` before ``freeze_after``:
  ``g = mean_i g_i`` in float32 over those who take part, ``m = b1 m + (1 - b1) g``,
  ``v = b2 v + (1 - b2) g**2``. The gaps of 1-bit Adam never grow: it is all steps before ``warmup``.
* **In codes**, at all other steps: worker i sends ``Q(m_i + e_i)`` of ``m_i = b1 m + (1 - b1) g_i``, one
  bit and the mean magnitude of each row, and keeps the error ``e_i``. The owner adds its own error to
  the mean of those who take part; what it answers, ``+-mean|x|`` of each row, padding left out, is ``m``.
* **Update**: ``m' / (sqrt(v') + eps)`` with ``m' = m / (1 - b1**(n+1))`` and ``v' = v / (1 - b2**k)``
  after k updates of v; 0 where v is 0.
* An element whose mean is not finite counts as 0, and the owner's error stays there. With nobody there
  all of this stays, and the update is 0. One worker sends nothing: its ``m_0`` is ``m``.

Source: Tang et al. (arXiv 2102.02888), Lu et al. (arXiv 2202.06009). Scales of rows, bias correction, the
rule for a v of 0, for abstention and for one worker are ours.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lioncub_jax.reference import lion as reference
from lioncub_jax.reference.lion import Simulator
from lioncub_jax.reference.sync import answer


class State(NamedTuple):
    """What is remembered."""

    t: jax.Array  # int32[]: steps taken
    count: jax.Array  # type: ignore[assignment]  # int32[]: of these, steps in which somebody took part
    next: jax.Array  # int32[]: the count at which v is updated next
    updates: jax.Array  # int32[]: how often it was
    mu: Any  # m, float32 leaves, one for all
    nu: Any  # v, float32 leaves, one for all
    error: Any  # of the workers, leaves [W, ...]
    owner: jax.Array  # of the owners, one buffer [rows, 128]
    abstained: jax.Array  # int32[]: workers that abstained from the last step
    abstentions: jax.Array  # int32[]: their sum over all steps


def one_bit_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, warmup: int
) -> Simulator:
    """Fits ``reference.optimizer(simulator, learning_rate, weight_decay, mask)``."""
    return zero_one_adam(b1, b2, eps, kappa=2**31 - 1, freeze_after=warmup)


def zero_one_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    kappa: int = 16,
    freeze_after: int = 100_000,
) -> Simulator:
    """Fits ``reference.optimizer(simulator, learning_rate, weight_decay, mask)``."""

    def init(params: Any, workers: int) -> Any:
        leaves = jax.tree.leaves(params)
        buffer = reference.buffer_of([p.shape for p in leaves], workers)
        mu, nu = (jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params) for _ in range(2))
        error = reference.per_worker(params, workers, jnp.float32)
        owner = jnp.zeros(buffer.real.shape, jnp.float32)
        zero = jnp.int32(0)
        return State(zero, zero, zero, zero, mu, nu, error, owner, zero, zero)

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        leaves, tree = jax.tree.flatten(grads)
        due = (state.count == state.next) & (state.count < freeze_after)
        ways = partial(in_floats, b1, b2, kappa), partial(in_codes, b1)
        state = lax.cond(due, *ways, leaves, state, abstain)
        n, k = jnp.maximum(state.count, 1), jnp.maximum(state.updates, 1)
        u = []
        for m, v, g in zip(*map(jax.tree.leaves, (state.mu, state.nu)), leaves, strict=True):
            x = (m / (1 - b1**n)) / (jnp.sqrt(v / (1 - b2**k)) + eps)
            u.append(jnp.where((v > 0) & (state.abstained < len(g)), x, 0).astype(g.dtype))
        return jax.tree.unflatten(tree, u), state

    return Simulator(init, update)


def in_floats(
    b1: float, b2: float, kappa: int, leaves: list[jax.Array], state: State, abstain: Any
) -> State:
    """A step that updates v, of gradients ``[W, ...]``, in float32."""
    buffer = reference.buffer_of([g.shape[1:] for g in leaves], len(leaves[0]))
    x = buffer.join(leaves)
    present = reference.takes_part(x, abstain)
    message = reference.dense().encode(x, buffer, state.t)
    mean = reference.bounded_mean(message, present, 0, jnp.inf)
    mean = jnp.where(jnp.isfinite(mean), mean, 0)
    some, g = jnp.any(present), _in_tree(buffer.split(mean, [jnp.float32] * len(leaves)), state)

    def blended(b: float, old: Any, new: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(some, b * x + (1 - b) * y, x), old, new)

    gap = jnp.int32(1) << jnp.minimum(state.updates // kappa, 30)
    return _after(state, present)._replace(
        next=jnp.where(some, state.next + gap, state.next),
        updates=state.updates + some,
        mu=blended(b1, state.mu, g),
        nu=blended(b2, state.nu, jax.tree.map(jnp.square, g)),
    )


def in_codes(b1: float, leaves: list[jax.Array], state: State, abstain: Any) -> State:
    """A step of one bit each way, of gradients ``[W, ...]``."""
    m = jax.tree.leaves(state.mu)
    buffer = reference.buffer_of([g.shape[1:] for g in leaves], len(leaves[0]))
    own = [b1 * x + (1 - b1) * g.astype(jnp.float32) for x, g in zip(m, leaves, strict=True)]
    u, present, state = agreed(buffer, own, state, abstain)
    parts, some = buffer.split(u, [jnp.float32] * len(leaves)), jnp.any(present)
    m = [jnp.where(some, new, old) for new, old in zip(parts, m, strict=True)]
    return _after(state, present)._replace(mu=_in_tree(m, state))


def agreed(
    buffer: reference.Buffer, own: list[jax.Array], state: State, abstain: Any
) -> tuple[jax.Array, jax.Array, State]:
    """What comes back of the workers' own values in one bit, who took part, and the errors left."""
    errors = jax.tree.leaves(state.error)
    x = buffer.join(own) + buffer.join(errors)
    present = reference.takes_part(x, abstain)
    u, owner, some = x[0], state.owner, jnp.any(present)
    if len(x) > 1:
        codes = reference.midrise(1)
        message, top = codes.encode(x, buffer, state.t), codes.top(len(x))
        mean = reference.bounded_mean(message, present, top, jnp.inf)
        u, owner = answer(mean, owner, buffer, 1)
        rest = buffer.split(x - reference.decode(message, top), [jnp.float32] * len(own))
        kept = [reference.saturate(r, e.dtype) for r, e in zip(rest, errors, strict=True)]
        errors = reference.unless_absent(present, kept, errors)
    owner = jnp.where(some, owner, state.owner)
    return u, present, state._replace(error=_in_tree(errors, state), owner=owner)


def _in_tree(leaves: list[jax.Array], state: State) -> Any:
    return jax.tree.unflatten(jax.tree.structure(state.mu), leaves)


def _after(state: State, present: jax.Array) -> State:
    away = jnp.sum(~present, dtype=jnp.int32)
    return state._replace(
        t=state.t + 1,
        count=state.count + jnp.any(present),
        abstained=away,
        abstentions=state.abstentions + away,
    )
