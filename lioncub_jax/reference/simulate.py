"""Many workers on one device: a study of methods needs no mesh.

Each worker's gradient is computed by ``vmap`` over a leading axis of workers, and `reference` does the
rest: what a step of `make_train_step` would do on as many devices, with the same keys and the same rule
for a loss that is not finite. Where the gradients are the same, so are the parameters, bit for bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lioncub_jax import checks
from lioncub_jax.reference.lion import Simulator


class Simulated(NamedTuple):
    """All workers of a run.

    Attributes:
      step: ``int32[]``, steps taken.
      params: one copy, for all workers hold the same.
      opt_state: of the simulator; what differs between workers has a leading axis of workers.
      rng: the typed key from which each step and worker derives its own.
      local_state: of the workers' own optimizers, leaves ``[W, ...]``; empty without local steps.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array
    local_state: Any = ()


def start(
    simulator: Simulator,
    params: Any,
    workers: int,
    rng: jax.Array | None = None,
    local: optax.GradientTransformation | None = None,
    *,
    late: bool = False,
) -> Simulated:
    """The first state of ``workers`` workers.

    Args:
      simulator: what they do in a step, such as ``reference.optimizer(reference.local_momentum(), 1e-3)``.
      params: tree of floating arrays.
      workers: how many.
      rng: a typed key; ``jax.random.key(0)`` by default, as in ``init_state``.
      local: each worker's own optimizer, for local steps; the one that `step` is given.
      late: whether workers may be late; there is room for what misses a step then.

    Raises:
      ValueError: for fewer than one worker, and for ``late`` with a simulator that has no rule for it.
      TypeError: for a leaf that is not floating.

    Example:
      See `step`.
    """
    checks.check_count(f"workers={workers!r}", workers)
    checks.check_leaves(params)
    if late:
        _check_late(simulator)
    rng = jax.random.key(0) if rng is None else rng
    own = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (workers, *jnp.shape(x))), local.init(params) if local else ()
    )
    state = simulator.init(params, workers, **({"late": True} if late else {}))
    return Simulated(jnp.zeros((), jnp.int32), params, state, rng, own)


def local_gradients(
    loss_fn: Callable[..., jax.Array], run: Simulated, batch: Any
) -> tuple[jax.Array, Any]:
    """Each worker's loss and gradient: ``float32[W]`` and a tree of ``[W, ...]``.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` of one worker, as `make_train_step` takes it.
      run: the workers.
      batch: tree of arrays ``[W, ...]``, a part for each worker.
    """
    of_worker = jax.value_and_grad(loss_fn)
    return jax.vmap(of_worker, in_axes=(None, 0, 0))(run.params, batch, _keys(run, batch))


def local_differences(
    loss_fn: Callable[..., jax.Array],
    run: Simulated,
    batch: Any,
    local_steps: int,
    local: optax.GradientTransformation,
) -> tuple[jax.Array, Any, Any]:
    """What each worker hands over after some steps of its own: ``(losses, differences, local states)``.

    Losses ``float32[W]`` are means over the steps. A difference ``[W, ...]`` is the parameters before minus
    those after.

    Args:
      loss_fn: as `local_gradients`.
      run: the workers.
      batch: tree of arrays ``[W, rows, ...]``, of whose rows each local step takes the next
        ``rows / local_steps``.
      local_steps: how many.
      local: each worker's own optimizer.
    """

    def of_worker(state: Any, batch: Any, key: jax.Array) -> Any:
        def one(carry: Any, now: Any) -> Any:
            (params, state), (index, part) = carry, now
            own = jax.random.fold_in(key, index)
            loss, grads = jax.value_and_grad(loss_fn)(params, part, own)
            updates, state = local.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        parts = jax.tree.map(lambda x: x.reshape(local_steps, -1, *x.shape[1:]), batch)
        start = run.params, state
        (after, state), losses = lax.scan(one, start, (jnp.arange(local_steps), parts))
        return jnp.mean(losses), jax.tree.map(jnp.subtract, run.params, after), state

    return jax.vmap(of_worker)(run.local_state, batch, _keys(run, batch))


def _keys(run: Simulated, batch: Any) -> jax.Array:
    """A key for each worker, of this step."""
    workers = len(jax.tree.leaves(batch)[0])
    now = jax.random.fold_in(run.rng, run.step)
    return jax.vmap(lambda i: jax.random.fold_in(now, i))(jnp.arange(workers))


def step(
    loss_fn: Callable[..., jax.Array],
    simulator: Simulator,
    run: Simulated,
    batch: Any,
    local_steps: int = 1,
    local: optax.GradientTransformation | None = None,
    *,
    tamper: Callable[[Any, jax.Array], Any] | None = None,
    absent: jax.Array | None = None,
    late: jax.Array | None = None,
) -> tuple[Simulated, jax.Array]:
    """One step of all workers: ``(run, losses float32[W])``; a pure function, for ``jit`` and ``scan``.

    With ``local`` each worker first takes ``local_steps`` steps of its own, and the simulator gets, in
    place of gradients, the parameters before minus those after.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` of one worker; where it is not finite, the worker abstains.
      simulator: as `start`.
      run: the workers before the step.
      batch: tree of arrays ``[W, ...]``, a part for each worker; its rows are cut over the local steps.
      local_steps: steps of each worker's own.
      local: the optimizer that takes them, any optax transform; None for none. A worker that
        abstains keeps its state.
      tamper: ``(gradients, step) -> gradients``, leaves ``[W, ...]``: what liars make of theirs.
      absent: ``bool[W]``, workers that miss the step: they abstain, and keep what they had.
      late: ``bool[W]``, workers whose message misses the step, of a run started with ``late=True``. They
        keep their momentum and error, and the message counts in the next step. Who is absent too has
        nothing to send.

    Raises:
      ValueError: for ``late`` that is not ``bool[W]``, with a run or a simulator that has no place for it.

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
    away: Any = False if absent is None else absent
    more = {} if late is None else {"late": _checked(late, simulator, batch)}
    if local is None:
        losses, grads = local_gradients(loss_fn, run, batch)
        abstain, own = ~jnp.isfinite(losses) | away, run.local_state
    else:
        losses, grads, after = local_differences(loss_fn, run, batch, local_steps, local)
        abstain = ~jnp.isfinite(losses) | ~_finite(grads) | away
        own = jax.tree.map(partial(_unless, abstain), after, run.local_state)
    grads = grads if tamper is None else tamper(grads, run.step)
    updates, opt_state = simulator.update(grads, run.opt_state, run.params, abstain, **more)
    params = optax.apply_updates(run.params, updates)
    return Simulated(run.step + 1, params, opt_state, run.rng, own), losses


def _check_late(simulator: Simulator) -> None:
    if not simulator.late:
        raise ValueError(
            "late: this method has no rule for a message that misses its step; give local_momentum or "
            "momentum_at_owner, or let workers be absent"
        )


def _checked(late: Any, simulator: Simulator, batch: Any) -> jax.Array:
    _check_late(simulator)
    late, workers = jnp.asarray(late), len(jax.tree.leaves(batch)[0])
    if late.shape != (workers,) or late.dtype != bool:
        given = f"late is {late.dtype}{list(late.shape)}"
        raise ValueError(f"{given}: give bool[{workers}], True for each worker that is late")
    return late


def _finite(tree: Any) -> jax.Array:
    """``bool[W]``: whose leaves ``[W, ...]`` have finite values only."""
    each = [jnp.all(jnp.isfinite(x.reshape(len(x), -1)), axis=1) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(each), axis=0)


def _unless(abstain: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(abstain.reshape(-1, *[1] * (new.ndim - 1)), old, new)
