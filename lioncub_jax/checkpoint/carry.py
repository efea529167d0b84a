"""Going on with another optimizer: fields of its state from those of the one before."""

from typing import Any

import jax
import jax.numpy as jnp

from lioncub_jax.checkpoint import leaves, states
from lioncub_jax.checkpoint.layout import paths_of
from lioncub_jax.mesh import boxes
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers


def carry_over(state: Any, workers: AxisName | Workers, **fields: Any) -> Any:
    """Replaces fields of a new optimizer's state by those of an old one, such as the moments of AdamW.

    A field has its name wherever the state has one: ``mu`` of `lion_cub` is that of each worker, ``mu`` and
    ``nu`` of `owner_adamw` are those of the owners, and ``count`` is every counter, schedules' too.

    Args:
      state: a new state with its parameters: a ``StepState``, a ``TrainState`` of flax, or a dict with
        ``"params"``.
      workers: as the optimizer's.
      **fields: by name a tree like the parameters, or a number. An owner gets its slice, and each worker
        all of it. It is cast to the dtype of the field.

    Returns:
      The state with these fields, its arrays placed as before.

    Raises:
      ValueError: for a field that the state does not have, or that has another shape there; for a state
        on no mesh.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc, optax
      >>> workers = lc.Workers.one_per_device()
      >>> params = {"w": jnp.ones((2, 3))}
      >>> adam = optax.adamw(1e-3).init(params)[0]
      >>> state = lc.init_state(lc.owner_adamw(1e-3, workers=workers), params, workers)
      >>> state = lc.checkpoint.carry_over(state, workers, mu=adam.mu, nu=adam.nu, count=adam.count)
    """
    placed, on_mesh = states.on_workers("carry_over(state)", state, workers)
    target = leaves.Target(state, placed, on_mesh)
    arrays = leaves.leaves_of(target.layout, target.mesh, leaves.arrays_of(placed))
    for field, tree in fields.items():
        for path, value in paths_of(boxes.opened(tree)).items():
            names = [name for name in arrays if name.endswith(f".{field}{path}")]
            if not names:
                raise ValueError(
                    f"{field}={type(tree).__name__}: the state has no {field}{path}: give fields of it, "
                    "with trees like the parameters"
                )
            for name in names:
                arrays[name] = _as_leaf(target, name, value)
    # Copies: a training step donates its state, and neither the old one nor one array twice.
    return jax.tree.map(jnp.copy, target.build(target.leaves, arrays, keep=False))


def _as_leaf(target: leaves.Target, name: str, value: Any) -> jax.Array:
    """A leaf of the state, ``[workers, *shape]`` where each worker has its own."""
    wanted = target.place(name, target.leaves[name])
    shape = wanted.shape[target.leaves[name].per_worker :]
    if jnp.shape(value) not in (shape, wanted.shape):
        raise ValueError(f"state{name} has shape {list(shape)}: {list(jnp.shape(value))} was given")
    whole = jnp.broadcast_to(jnp.asarray(value, wanted.dtype), wanted.shape)
    return jax.device_put(whole, wanted.sharding)
