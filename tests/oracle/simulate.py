"""Many workers on one device: a study of methods needs no mesh.

Workers compute their gradients one after the other, each within the caches, and `lion` does the rest: what
a step of `make_train_step` would do on as many devices, with the same keys and the same rule for a loss
that is not finite. Where the gradients are the same, so are the parameters, bit for bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax


class Simulated(NamedTuple):
    """All workers of a run."""

    step: jax.Array  # int32[], steps taken
    params: Any  # one copy, for all workers hold the same
    opt_state: Any  # of the simulator; what differs between workers has a leading axis of workers
    rng: jax.Array  # the typed key from which each step and worker derives its own
    local_state: Any = ()  # of the workers' own optimizers, leaves [W, ...]; empty without local steps


def start(simulator, params, workers, rng=None, local=None):
    """The first state of ``workers`` workers.

    Args:
      simulator: what they do in a step, such as ``lion.optimizer(lion.local_momentum(), 1e-3)``.
      params: tree of floating arrays.
      workers: how many.
      rng: a typed key; ``jax.random.key(0)`` by default, as in ``init_state``.
      local: each worker's own optimizer, for local steps; the one that `step` is given.
    """
    own = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (workers, *jnp.shape(x))), local.init(params) if local else ()
    )
    state = simulator.init(params, workers)
    rng = jax.random.key(0) if rng is None else rng
    return Simulated(jnp.zeros((), jnp.int32), params, state, rng, own)


def step(loss_fn, simulator, run, batch, local_steps=1, local=None):
    """One step of all workers: ``(run, losses float32[W])``; a pure function, for ``jit`` and ``scan``.

    With ``local`` each worker first takes ``local_steps`` steps of its own, and the simulator gets, in
    place of gradients, the parameters before minus those after; losses are means over the steps.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` of one worker; where it is not finite, the worker abstains.
      simulator: as `start`.
      run: the workers before the step.
      batch: tree of arrays ``[W, ...]``, a part for each worker; its rows are cut over the local steps.
      local_steps: steps of each worker's own.
      local: the optimizer that takes them, any optax transform; None for none. A worker that
        abstains keeps its state.
    """
    workers = len(jax.tree.leaves(batch)[0])
    key = jax.random.fold_in(run.rng, run.step)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(workers))
    grad = jax.value_and_grad(loss_fn)

    def differences(state, batch, key):
        def one(carry, now):
            (params, state), (index, part) = carry, now
            loss, grads = grad(params, part, jax.random.fold_in(key, index))
            updates, state = local.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        parts = jax.tree.map(lambda x: x.reshape(local_steps, -1, *x.shape[1:]), batch)
        (after, state), losses = lax.scan(
            one, (run.params, state), (jnp.arange(local_steps), parts)
        )
        return jnp.mean(losses), jax.tree.map(jnp.subtract, run.params, after), state

    if local is None:
        losses, grads = lax.map(lambda own: grad(run.params, *own), (batch, keys))
        abstain, own = ~jnp.isfinite(losses), run.local_state
    else:
        losses, grads, own = lax.map(lambda own: differences(*own), (run.local_state, batch, keys))
        abstain = ~jnp.isfinite(losses)
        for x in jax.tree.leaves(grads):
            abstain |= ~jnp.all(jnp.isfinite(x), axis=range(1, x.ndim))
        own = jax.tree.map(
            lambda new, old: jnp.where(abstain.reshape(-1, *[1] * (new.ndim - 1)), old, new),
            own, run.local_state,
        )  # fmt: skip
    updates, state = simulator.update(grads, run.opt_state, run.params, abstain)
    return Simulated(
        run.step + 1, optax.apply_updates(run.params, updates), state, run.rng, own
    ), losses
