"""The baselines on one page, in the manner of `reference`: workers are a leading array axis.

The oracle of the tests of `baselines`, and a simulator of many workers on one device. Code is shared
with `reference` only, whose rules hold for the buffer, the codes, and who takes part. In addition:

* **Mean.** SGD, AdamW and Lion see ``sum_i g_i / W`` in float32; nobody abstains.
* **signSGD and SIGNUM** are ``reference.local_momentum(b, b)`` with ``b`` 0, or the momentum.
* **EF-signSGD.** Worker i encodes ``x_i = e_i - lr g_i`` as ``+-mean|x_i|`` of each row. The owner adds
  its own error to the mean of those who take part, and answers ``+-mean|x|`` of each row, padding left
  out, a zero as positive. Scales are rounded to bfloat16; both sides keep their error, saturated in its
  dtype. An element whose mean is not finite counts as
  0, and the owner's error stays there.
* **DiLoCo.** Nesterov SGD of the mean of what workers hand over: in float32; or in codes both ways as
  EF-signSGD, of one bit or more. The owner's codes are those of the workers, but a zero counts as positive.
  With nobody there the mean is 0.
* **TernGrad.** Each leaf is clipped at ``clip`` root mean squares, divided by the largest magnitude of
  all who take part, and rounded at random to -1, 0 or 1; the sum of these times the scale, over the
  workers that take part, comes back.
* **QSGD.** ``q = floor(x / step + noise)``, clipped at ``s = 2**(bits-1) - 1``, with the step ``norm / s``
  of each row rounded up to bfloat16, 0 if below 2**-126, and at most the largest bfloat16. The norm is
  the largest magnitude or the root of the sum of squares, which are taken of values over a power of
  two, so that none overflows. The mean of what is decoded goes into a trace; an element where it is
  not finite is as with nobody there.
* **One worker** quantises nothing.

Each function returns a ``reference.Simulator``; all but `ef_signsgd` and `diloco`, which need the
learning rate themselves, fit ``reference.optimizer(simulator, learning_rate, weight_decay, mask)``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lioncub_jax.reference import lion as reference
from lioncub_jax.reference.lion import Buffer, Codes, Message, Simulator
from lioncub_jax.reference.sync import answer


class Averaged(NamedTuple):
    """State of `averaged`."""

    t: jax.Array  # int32[]: steps taken
    inner: Any  # of the transform, one for all


class Fed(NamedTuple):
    """State of `ef_signsgd` and `diloco`."""

    t: jax.Array  # int32[]: steps taken
    error: Any  # of the workers, leaves [W, ...]
    owner: jax.Array  # of the owners, one buffer [rows, 128]
    inner: Any = ()  # of the transform of the mean, one for all


class Traced(NamedTuple):
    """State of `terngrad` and `qsgd`."""

    t: jax.Array  # int32[]: steps taken
    mu: Any  # momentum of the mean, one for all: leaves, or one buffer [rows, 128]


def averaged(tx: optax.GradientTransformation) -> Simulator:
    """Any optax transform of the mean gradient: ``optax.trace(0.9)``, ``optax.adamw(1e-3)``."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Any, workers: int) -> Any:
        return Averaged(jnp.int32(0), tx.init(params))

    def update(grads: Any, state: Any, params: Any = None, abstain: Any = None) -> Any:
        mean = jax.tree.map(_mean_of_workers, grads)
        updates, inner = tx.update(mean, state.inner, params)
        return updates, Averaged(state.t + 1, inner)

    return Simulator(init, update)


def ef_signsgd(
    learning_rate: Any,
    weight_decay: float = 0.0,
    mask: Any = None,
    error_dtype: Any = jnp.float32,
) -> Simulator:
    """EF-signSGD both ways; updates have their learning rate, a number or a function of ``t``."""
    codes = reference.midrise(1)

    def init(params: Any, workers: int) -> Any:
        leaves = jax.tree.leaves(params)
        buffer = reference.buffer_of([p.shape for p in leaves], workers)
        error = reference.per_worker(params, workers, error_dtype)
        return Fed(jnp.int32(0), error, jnp.zeros(buffer.real.shape, error_dtype))

    def update(grads: Any, state: Any, params: Any = None, abstain: Any = None) -> Any:
        lr = learning_rate(state.t) if callable(learning_rate) else learning_rate
        g, tree = jax.tree.flatten(grads)
        errors = jax.tree.leaves(state.error)
        buffer = reference.buffer_of([leaf.shape[1:] for leaf in g], len(g[0]))
        x = buffer.join([jnp.asarray(-lr, leaf.dtype) * leaf for leaf in g]) + buffer.join(errors)
        u, error, owner = _fed_back(codes, buffer, x, state, abstain, errors)
        error = jax.tree.unflatten(tree, error)
        updates = jax.tree.unflatten(tree, buffer.split(u, [leaf.dtype for leaf in g]))
        if weight_decay:
            decays = jax.tree.map(lambda p: True, params) if mask is None else mask
            updates = jax.tree.map(
                lambda u, p, yes: u - (lr * weight_decay) * p if yes else u, updates, params, decays
            )
        return updates, Fed(state.t + 1, error, owner)

    return Simulator(init, update)


def diloco(
    learning_rate: Any = 0.7,
    momentum: float = 0.9,
    bits: int | None = None,
    error_dtype: Any = jnp.float32,
) -> Simulator:
    """The outer optimizer of DiLoCo, of differences; updates have their learning rate."""
    outer = optax.sgd(learning_rate, momentum, nesterov=True)
    if bits is None:
        return averaged(outer)
    codes = reference.midrise(bits)

    def init(params: Any, workers: int) -> Any:
        buffer = reference.buffer_of([p.shape for p in jax.tree.leaves(params)], workers)
        error = reference.per_worker(params, workers, error_dtype)
        owner = jnp.zeros(buffer.real.shape, error_dtype)
        return Fed(jnp.int32(0), error, owner, outer.init(params))

    def update(grads: Any, state: Any, params: Any = None, abstain: Any = None) -> Any:
        g, tree = jax.tree.flatten(grads)
        errors = jax.tree.leaves(state.error)
        buffer = reference.buffer_of([leaf.shape[1:] for leaf in g], len(g[0]))
        x = buffer.join(g) + buffer.join(errors)
        u, error, owner = _fed_back(codes, buffer, x, state, abstain, errors, bits)
        mean = jax.tree.unflatten(tree, buffer.split(u, [leaf.dtype for leaf in g]))
        updates, inner = outer.update(mean, state.inner, params)
        return updates, Fed(state.t + 1, jax.tree.unflatten(tree, error), owner, inner)

    return Simulator(init, update)


def _fed_back(
    codes: Codes,
    buffer: Buffer,
    x: jax.Array,
    state: Fed,
    abstain: Any,
    errors: list[jax.Array],
    back: int = 1,
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    present = reference.takes_part(x, abstain)
    if len(x) == 1:
        return jnp.where(present, x, 0)[0], errors, state.owner
    message, top = codes.encode(x, buffer, state.t), codes.top(len(x))
    mean = reference.bounded_mean(message, present, top, jnp.inf)
    u, owner = answer(mean, state.owner, buffer, back)
    some = jnp.any(present)
    rest = buffer.split(x - reference.decode(message, top), [jnp.float32] * len(errors))
    kept = [reference.saturate(r, e.dtype) for r, e in zip(rest, errors, strict=True)]
    kept = reference.unless_absent(present, kept, errors)
    return jnp.where(some, u, 0), kept, jnp.where(some, owner, state.owner)


def terngrad(clip: float | None = 2.5, seed: int = 0, momentum: float = 0.0) -> Simulator:
    """The mean of stochastic ternary codes in units that the workers share, and a trace of it."""

    def init(params: Any, workers: int) -> Any:
        return Traced(jnp.int32(0), jax.tree.map(jnp.zeros_like, params) if momentum else ())

    def update(grads: Any, state: Any, params: Any = None, abstain: Any = None) -> Any:
        g, tree = jax.tree.flatten(grads)
        mean = _ternary_mean(g, state.t, abstain, clip, seed)
        updates = jax.tree.unflatten(tree, mean)
        mu: Any = ()
        if momentum:
            updates = mu = jax.tree.map(lambda u, m: u + momentum * m, updates, state.mu)
        return updates, Traced(state.t + 1, mu)

    return Simulator(init, update)


def _ternary_mean(
    g: list[jax.Array], t: jax.Array, abstain: Any, clip: float | None, seed: int
) -> list[jax.Array]:
    largest = jnp.stack([_over(jnp.max, jnp.abs(leaf), initial=0.0) for leaf in g])
    finite = [_over(jnp.sum, ~jnp.isfinite(leaf)) == 0 for leaf in g]
    present = jnp.all(jnp.stack(finite), axis=0)
    present = present if abstain is None else present & ~abstain
    if len(present) == 1:
        return [jnp.where(present[0], leaf[0], 0) for leaf in g]
    limit = jnp.full_like(largest, jnp.inf)
    if clip is not None:
        squares = [_over(jnp.sum, leaf * leaf) / max(leaf[0].size, 1) for leaf in map(_f32, g)]
        limit = clip * jnp.sqrt(jnp.stack(squares))
    scale = jnp.max(jnp.where(present, jnp.minimum(largest, limit), 0), axis=1)
    units = jnp.where(scale > 0, scale, 1)
    bounds = [_beside(bound, leaf) for bound, leaf in zip(limit, g, strict=True)]
    shares = [
        jnp.clip(_f32(leaf), -bound, bound) / unit
        for leaf, bound, unit in zip(g, bounds, units, strict=True)
    ]
    buffer = reference.buffer_of([leaf.shape[1:] for leaf in g], len(g[0]))
    level = _rounded_at_random(buffer.join(shares), 1, buffer, t, seed)
    sums = jnp.sum(jnp.where(present[:, None, None], level, 0), axis=0, dtype=jnp.int32)
    parts = buffer.split(sums, [jnp.float32] * len(g))
    unit = scale / jnp.maximum(jnp.sum(present, dtype=jnp.int32), 1).astype(jnp.float32)
    return [(u * v).astype(leaf.dtype) for u, v, leaf in zip(parts, unit, g, strict=True)]


def qsgd(bits: int = 4, seed: int = 0, momentum: float = 0.0) -> Simulator:
    """The mean of stochastic levels of each row's norm, and a trace of it."""
    s = 2 ** (bits - 1) - 1

    def init(params: Any, workers: int) -> Any:
        leaves = jax.tree.leaves(params)
        rows = reference.buffer_of([p.shape for p in leaves], workers).real.shape
        return Traced(jnp.int32(0), jnp.zeros(rows, reference.widest(leaves)) if momentum else ())

    def update(grads: Any, state: Any, params: Any = None, abstain: Any = None) -> Any:
        g, tree = jax.tree.flatten(grads)
        buffer = reference.buffer_of([leaf.shape[1:] for leaf in g], len(g[0]))
        x = buffer.join(g)
        message = _levels(x, s, buffer, state.t, seed)
        present = reference.takes_part(x, abstain)
        mean = x[0] if len(x) == 1 else reference.bounded_mean(message, present, 2 * s, jnp.inf)
        known, mu = jnp.any(present) & jnp.isfinite(mean), state.mu
        mean = reference.saturate(jnp.where(known, mean, 0), reference.widest(g))
        if momentum:
            mean = mean + momentum * mu
            mean = reference.saturate(mean, mean.dtype)
            mu = jnp.where(known, reference.saturate(mean, mu.dtype), mu)
        u = buffer.split(jnp.where(known, mean, 0), [leaf.dtype for leaf in g])
        return jax.tree.unflatten(tree, u), Traced(state.t + 1, mu)

    return Simulator(init, update)


def _levels(x: jax.Array, s: int, buffer: Buffer, t: jax.Array, seed: int) -> Message:
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    most = float(jnp.finfo(jnp.bfloat16).max)
    step = _rounded_up(jnp.minimum(largest / s, most))
    step = jnp.where(step < 2.0**-126, 0, step)
    largest = jnp.minimum(s, jnp.floor(most / jnp.where(step > 0, step, 1)))
    q = _rounded_at_random(reference.quotient(x, step), largest, buffer, t, seed) + s
    return Message(q, step)


def _rounded_at_random(x: jax.Array, s: Any, buffer: Buffer, t: jax.Array, seed: int) -> jax.Array:
    """To one of the two whole numbers around it, right on average, and clipped at ``s``."""
    level = jnp.floor(x + reference.noise(buffer, len(x), t, seed))
    return jnp.clip(level, -s, s).astype(jnp.int32)


def _rounded_up(x: jax.Array) -> jax.Array:
    """To the next bfloat16 that is no smaller; ``x`` is not negative."""
    near = lax.reduce_precision(x, 8, 7)
    above = lax.bitcast_convert_type(near, jnp.uint32) + jnp.uint32(1 << 16)
    return jnp.where(near < x, lax.bitcast_convert_type(above, jnp.float32), near)


def _mean_of_workers(g: jax.Array) -> jax.Array:
    return (jnp.sum(_f32(g), axis=0) / len(g)).astype(g.dtype)


def _over(reduce: Callable[..., jax.Array], x: jax.Array, **options: Any) -> jax.Array:
    """Reduces each worker's leaf: ``[W, ...]`` to ``float32[W]``."""
    return reduce(_f32(x).reshape(len(x), -1), axis=1, **options)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _beside(flags: jax.Array, leaf: jax.Array) -> jax.Array:
    """One number for each worker, to broadcast with leaves ``[W, ...]``."""
    return flags.reshape(-1, *[1] * (leaf.ndim - 1))
