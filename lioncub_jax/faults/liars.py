"""Workers that lie: what an attacker makes of its gradients before it takes part as everybody does.

An attack changes what a worker's transform is given, so it is one for every method: of votes, codes
and means alike. `liars` puts it into a chain on real devices, `tampered` does the same to all workers at
once, for ``lioncub_jax.reference.simulate.step(..., tamper=)``.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lioncub_jax import checks, wires
from lioncub_jax.wires import AxisName


class Attack(NamedTuple):
    """What a liar does.

    Attributes:
      name: for people.
      gradients: ``(gradients, key) -> gradients`` of one liar; the key is of its step and worker, and
        ``gradients`` a tree of floating arrays, the same shapes and dtypes back.

    Example:
      See `liars`.
    """

    name: str
    gradients: Callable[[Any, jax.Array], Any]


def sign_flip() -> Attack:
    """Every gradient with the other sign, so that all the votes of the liar are wrong where it knows.

    Source: Bernstein et al., signSGD with majority vote (arXiv 1810.05291), their worst adversary.
    """
    return Attack("sign flip", lambda grads, key: jax.tree.map(operator.neg, grads))


def random_votes() -> Attack:
    """Gaussian noise as large as the gradient of each leaf, drawn anew in each step.

    Source: the random adversary of Bernstein et al. (arXiv 1810.05291).
    """

    def drawn(grads: Any, key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(grads)
        keys = jax.random.split(key, len(leaves))
        noise = [
            (_size(x) * jax.random.normal(k, x.shape)).astype(x.dtype)
            for x, k in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(tree, noise)

    return Attack("random votes", drawn)


def _size(x: jax.Array) -> jax.Array:
    """The root mean square."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def scaled(factor: float = 1e6) -> Attack:
    """The gradient times a number; below 0 it is the strongest flip.

    Raises:
      ValueError: for a factor that is not finite, or 0.
    """
    if not np.isfinite(factor) or factor == 0:
        raise ValueError(f"scaled({factor!r}): give a finite factor, such as 1e6 or -1e6")
    return Attack(f"times {factor:g}", lambda grads, key: jax.tree.map(lambda x: factor * x, grads))


def not_finite() -> Attack:
    """NaN everywhere: here a worker abstains."""
    return Attack(
        "NaN", lambda grads, key: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), grads)
    )


def collusion(leaf: int | None = None) -> Attack:
    """All liars push one leaf the same way, as hard as its largest gradient; on the others they are honest.

    Args:
      leaf: its number in the order of ``jax.tree.leaves``; None for the one with the most elements.

    Raises:
      ValueError: when applied, for a leaf that is not there.
    """

    def pushed(grads: Any, key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(grads)
        at = max(range(len(leaves)), key=lambda i: leaves[i].size) if leaf is None else leaf
        if not 0 <= at < len(leaves):
            raise ValueError(f"collusion(leaf={at}): there are leaves 0 to {len(leaves) - 1}")
        leaves[at] = jnp.broadcast_to(jnp.max(jnp.abs(leaves[at])), leaves[at].shape)
        return jax.tree.unflatten(tree, leaves)

    return Attack("collusion on one leaf", pushed)


class LiarsState(NamedTuple):
    """State of `liars`.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
    """

    count: jax.Array  # type: ignore[assignment]


def liars(
    attack: Attack, who: int | Sequence[int], *, axis_name: AxisName, seed: int = 0
) -> optax.GradientTransformation:
    """Makes liars of some workers, on real devices: stands before the transform that votes in a chain.

    Args:
      attack: what they do.
      who: the numbers of the workers on the axis, or how many of the first.
      axis_name: mesh axis of the workers, or several.
      seed: of what the attack draws.

    Returns:
      A transform: gradients of honest workers pass as they are.

    Raises:
      TypeError: for another kind of attack.
      ValueError: for a worker named twice or below 0; when traced, for one that is not there.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> three = lc.faults.liars(lc.faults.sign_flip(), 3, axis_name="data")
      >>> tx = optax.chain(three, lc.lion_cub(1e-4, axis_name="data"))

    Source: this library.
    """
    numbers = _numbers(attack, who)

    def init(params: optax.Params) -> LiarsState:
        del params
        return LiarsState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: LiarsState, params: Any = None) -> tuple[Any, LiarsState]:
        del params
        _check_there(numbers, wires.workers_on(axis_name))
        worker = wires.worker_index(axis_name)
        lies = attack.gradients(updates, _key(seed, state.count, worker))
        lying = jnp.isin(worker, jnp.asarray(numbers, jnp.int32))
        chosen = jax.tree.map(lambda lie, x: jnp.where(lying, lie, x), lies, updates)
        return chosen, LiarsState(state.count + 1)

    return optax.GradientTransformation(init, update)


def tampered(
    attack: Attack, who: int | Sequence[int], *, seed: int = 0
) -> Callable[[Any, jax.Array], Any]:
    """What `liars` does, to the gradients of all workers at once.

    Args:
      attack: as `liars`.
      who: as `liars`.
      seed: as `liars`.

    Returns:
      ``(gradients, step) -> gradients``, leaves ``[W, ...]``.

    Raises:
      TypeError, ValueError: as `liars`.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> lc.faults.tampered(lc.faults.sign_flip(), [1])(jnp.ones((3, 1)), 0).tolist()
      [[1.0], [-1.0], [1.0]]

    Source: this library.
    """
    numbers = _numbers(attack, who)

    def of_all(grads: Any, step: Any) -> Any:
        workers = len(jax.tree.leaves(grads)[0])
        _check_there(numbers, workers)
        every = jnp.arange(workers, dtype=jnp.int32)
        lies = jax.vmap(lambda g, i: attack.gradients(g, _key(seed, step, i)))(grads, every)
        lying = jnp.isin(every, jnp.asarray(numbers, jnp.int32))

        def leaf(lie: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.where(lying.reshape(-1, *[1] * (x.ndim - 1)), lie, x)

        return jax.tree.map(leaf, lies, grads)

    return of_all


def _key(seed: int, step: Any, worker: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), worker)


def _numbers(attack: Attack, who: int | Sequence[int]) -> tuple[int, ...]:
    checks.check_kinds(attack=(attack, Attack))
    numbers = tuple(range(who)) if isinstance(who, int) else tuple(who)
    wrong = isinstance(who, bool) or (isinstance(who, int) and who < 0)
    if wrong or len(set(numbers)) < len(numbers) or any(n < 0 for n in numbers):
        raise ValueError(
            f"who={who!r}: give how many of the first workers, or their numbers, each once"
        )
    return numbers


def _check_there(numbers: tuple[int, ...], workers: int) -> None:
    if numbers and max(numbers) >= workers:
        raise ValueError(
            f"worker {max(numbers)} cannot lie: there are {workers} workers, 0 to {workers - 1}"
        )
