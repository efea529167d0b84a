"""Many workers on one device: a study of methods needs no mesh.

Each worker's gradient is computed by ``vmap`` over a leading axis of workers, and `reference` does the
rest: what a step of `make_train_step` would do on as many devices, with the same keys and the same rule
for a loss that is not finite. Where the gradients are the same, so are the parameters, bit for bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lioncub_jax import checks
from lioncub_jax.reference.lion import Simulator


class Simulated(NamedTuple):
    """All workers of a run.

    Attributes:
      step: ``int32[]``, steps taken.
      params: one copy, for all workers hold the same.
      opt_state: of the simulator; what differs between workers has a leading axis of workers.
      rng: the typed key from which each step and worker derives its own.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array


def start(
    simulator: Simulator, params: Any, workers: int, rng: jax.Array | None = None
) -> Simulated:
    """The first state of ``workers`` workers.

    Args:
      simulator: what they do in a step, such as ``reference.optimizer(reference.local_momentum(), 1e-3)``.
      params: tree of floating arrays.
      workers: how many.
      rng: a typed key; ``jax.random.key(0)`` by default, as in ``init_state``.

    Raises:
      ValueError: for fewer than one worker.
      TypeError: for a leaf that is not floating.

    Example:
      See `step`.
    """
    checks.check_count(f"workers={workers!r}", workers)
    checks.check_leaves(params)
    rng = jax.random.key(0) if rng is None else rng
    return Simulated(jnp.zeros((), jnp.int32), params, simulator.init(params, workers), rng)


def local_gradients(
    loss_fn: Callable[..., jax.Array], run: Simulated, batch: Any
) -> tuple[jax.Array, Any]:
    """Each worker's loss and gradient: ``float32[W]`` and a tree of ``[W, ...]``.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` of one worker, as `make_train_step` takes it.
      run: the workers.
      batch: tree of arrays ``[W, ...]``, a part for each worker.
    """
    workers = len(jax.tree.leaves(batch)[0])
    now = jax.random.fold_in(run.rng, run.step)
    keys = jax.vmap(lambda i: jax.random.fold_in(now, i))(jnp.arange(workers))
    of_worker = jax.value_and_grad(loss_fn)
    return jax.vmap(of_worker, in_axes=(None, 0, 0))(run.params, batch, keys)


def step(
    loss_fn: Callable[..., jax.Array], simulator: Simulator, run: Simulated, batch: Any
) -> tuple[Simulated, jax.Array]:
    """One step of all workers: ``(run, losses float32[W])``; a pure function, for ``jit`` and ``scan``.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` of one worker; where it is not finite, the worker abstains.
      simulator: as `start`.
      run: the workers before the step.
      batch: tree of arrays ``[W, ...]``, a part for each worker.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import reference
      >>> from lioncub_jax.reference import simulate
      >>> lion = reference.optimizer(reference.local_momentum(), 0.5, weight_decay=0.0)
      >>> run = simulate.start(lion, {"w": jnp.ones(2)}, workers=3)
      >>> run, losses = simulate.step(lambda p, x, rng: jnp.sum(p["w"] * x), lion, run, jnp.ones((3, 2)))
      >>> run.params["w"].tolist(), losses.tolist()
      ([0.5, 0.5], [2.0, 2.0, 2.0])
    """
    losses, grads = local_gradients(loss_fn, run, batch)
    updates, opt_state = simulator.update(grads, run.opt_state, run.params, ~jnp.isfinite(losses))
    params = optax.apply_updates(run.params, updates)
    return Simulated(run.step + 1, params, opt_state, run.rng), losses
