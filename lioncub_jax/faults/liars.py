"""Workers that lie: what an attacker makes of its gradients before it takes part as everybody does.

An attack changes what a worker's transform is given, so it is one for every method: of votes, codes
and means alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lioncub_jax import axes
from lioncub_jax.axes import AxisName
from lioncub_jax.mesh.placement import Workers, names_of

# What a liar does: ``(gradients, key) -> gradients``. The key is of its step and worker; gradients are a
# tree of floating arrays, the same shapes and dtypes back.
Attack = Callable[[Any, jax.Array], Any]


def sign_flip(grads: Any, key: jax.Array) -> Any:
    """Every gradient with the other sign, so that all the votes of the liar are wrong where it knows.

    Args:
      grads: a tree of floating arrays.
      key: not used.

    Returns:
      A tree of the same shapes and dtypes.

    Example:
      >>> sign_flip(jnp.ones(2), jax.random.key(0)).tolist()
      [-1.0, -1.0]

    Source: Bernstein et al., signSGD with majority vote (arXiv 1810.05291), their worst adversary.
    """
    del key
    return optax.tree.scale(-1, grads)


def random_votes(grads: Any, key: jax.Array) -> Any:
    """Gaussian noise as large as the gradient of each leaf, drawn anew in each step.

    The arguments and what is returned are those of `sign_flip`; the key is that of the noise.

    Example:
      >>> random_votes({"w": jnp.ones(2)}, jax.random.key(0))["w"].shape
      (2,)

    Source: the random adversary of Bernstein et al. (arXiv 1810.05291).
    """

    def drawn(x: jax.Array, noise: jax.Array) -> jax.Array:
        mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)))
        return (jnp.sqrt(mean_square) * noise).astype(x.dtype)

    return jax.tree.map(drawn, grads, optax.tree.random_like(key, grads, dtype=jnp.float32))


def scaled(factor: float = 1e6) -> Attack:
    """The gradient times a number; below 0 it is the strongest flip.

    Example:
      >>> scaled(-10.0)(jnp.ones(2), jax.random.key(0)).tolist()
      [-10.0, -10.0]
    """
    return lambda grads, key: optax.tree.scale(factor, grads)


def not_finite(grads: Any, key: jax.Array) -> Any:
    """NaN everywhere: here a worker abstains.

    The arguments and what is returned are those of `sign_flip`.

    Example:
      >>> not_finite(jnp.ones(2), jax.random.key(0)).tolist()
      [nan, nan]
    """
    del key
    return optax.tree.full_like(grads, jnp.nan)


def collusion(grads: Any, key: jax.Array) -> Any:
    """All liars push the largest leaf one way, as hard as its largest gradient; else they are honest.

    The arguments and what is returned are those of `sign_flip`.

    Example:
      >>> lies = collusion({"a": jnp.ones(1), "b": jnp.array([-1.0, 3.0])}, jax.random.key(0))
      >>> lies["a"].tolist(), lies["b"].tolist()
      ([1.0], [3.0, 3.0])
    """
    del key
    largest = max(jax.tree.leaves(grads), key=jnp.size)
    pushed = jnp.full_like(largest, jnp.max(jnp.abs(largest)))
    return jax.tree.map(lambda x: pushed if x is largest else x, grads)


def liars(
    attack: Attack, who: Sequence[int], *, workers: AxisName | Workers, seed: int = 0
) -> optax.GradientTransformation:
    """Makes liars of some workers: stands before the transform that votes in a chain.

    Args:
      attack: what they do: `sign_flip`, `random_votes`, `scaled` by a number, `not_finite`, `collusion`, or
        a function ``(gradients, key) -> gradients``.
      who: the numbers of the workers on the axis.
      workers: a `Workers`, or the name of their mesh axis, or several.
      seed: of what the attack draws.

    Returns:
      A transform: gradients of honest workers pass as they are. Its state is how many steps were taken.

    Raises:
      ValueError: when traced, for a worker that is not there.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> three = lc.faults.liars(lc.faults.sign_flip, range(3), workers="data")
      >>> tx = optax.chain(three, lc.lion_cub(1e-4, workers="data"))

    Source: this library.
    """
    axis, _ = names_of(workers)

    def init(params: optax.Params) -> jax.Array:
        del params
        return jnp.zeros((), jnp.int32)

    def update(updates: Any, state: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        del params
        count, worker = axes.workers_on(axis), axes.worker_index(axis)
        if not set(who) <= set(range(count)):
            raise ValueError(f"who={who!r}: there are {count} workers, 0 to {count - 1}")
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), state), worker)
        lies = jnp.isin(worker, jnp.asarray(who, jnp.int32))
        return optax.tree.where(lies, attack(updates, key), updates), optax.safe_increment(state)

    return optax.GradientTransformation(init, update)
