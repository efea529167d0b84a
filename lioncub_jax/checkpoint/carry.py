"""Going on with another optimizer: fields of its state from those of the one before."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from lioncub_jax.checkpoint import leaves, states
from lioncub_jax.checkpoint.layout import paths_of
from lioncub_jax.mesh import boxes
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers

# The step of a trainer's state, or of an nnx.Optimizer in a dict.
_STEP = re.compile(r"(\['\w+'\])?\.step|\['step'\]")


def carry_over(state: Any, workers: AxisName | Workers, **fields: Any) -> Any:
    """Replaces fields of a new optimizer's state by those of an old one, such as the moments of AdamW.

    A field has its name wherever the state has one: ``mu`` of `lion_cub` is that of each worker, ``mu`` and
    ``nu`` of `owner_adamw` are those of the owners, and ``count`` is every counter, schedules' too, and the
    step of the state.

    Args:
      state: a new state with its parameters: a ``StepState``, a ``TrainState`` of flax, or a dict with
        ``"params"``, such as ``{"params": nnx.state(model, nnx.Param), "optimizer": optimizer}``.
      workers: as the optimizer's.
      **fields: by name a tree like the parameters, or a number. An owner gets its slice, and each worker
        all of it. It is cast to the dtype of the field.

    Returns:
      The state with these fields, its arrays placed as before.

    Raises:
      ValueError: for a field that the state does not have, or that has another shape there; for a tree
        without some parameters, such as one part of ``optax.partition``; for some of
        ``mu``, ``nu``, ``trace`` and ``count`` where the state has more of them; for a state on no mesh.

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
    # Flax's variables, of the state or of a field, have their array in ``.value``.
    names = {name: name.replace(".value", "") for name in arrays}
    for field, tree in fields.items():
        without = {name for name, short in names.items() if re.search(rf"\.{field}\b", short)}
        for path, value in paths_of(boxes.opened(tree)).items():
            end = f".{field}{path}".replace(".value", "")
            matches = [name for name, short in names.items() if short.endswith(end)]
            if not matches:
                raise ValueError(
                    f"carry_over({field}=...): the state has no {end[1:]}. Give fields of its optimizer, "
                    "trees like the parameters, and a state with the parameters in it, such as "
                    '{"params": params, "opt_state": opt_state}'
                )
            for name in matches:
                arrays[name] = _as_leaf(target, name, value)
            without -= set(matches)
        if without:
            first = ", ".join(sorted(names[name] for name in without)[:4])
            raise ValueError(
                f"carry_over({field}=...) has nothing for {first}, {len(without)} in all, which would "
                "begin at 0 beside an old count: give a tree with all parameters. Of optax.partition put "
                "the moments of all its parts together"
            )
    text = " ".join(names.values())
    wanted = [x for x in ("mu", "nu", "trace", "count") if re.search(rf"\.{x}\b", text)]
    missing = [x for x in wanted if x not in fields]
    if missing and len(missing) < len(wanted):  # moments without their counter, or one of two
        raise ValueError(
            f"carry_over got {', '.join(fields)}, and the new state has {', '.join(wanted)}: give "
            f"{', '.join(f'{x}=' for x in missing)} of the same old state too. Moments and counters belong "
            "together: without one of them the first updates are far too large or too small. If the old "
            "optimizer has none, begin with the new state as it is"
        )
    for name, short in names.items():
        if "count" in fields and _STEP.fullmatch(short):
            arrays[name] = _as_leaf(target, name, jax.tree.leaves(fields["count"])[0])
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
