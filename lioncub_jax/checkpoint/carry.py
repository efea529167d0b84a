"""Going on with another optimizer: fields of its state from those of the one before."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from lioncub_jax.checkpoint.convert import entries, joined, leaves_in, named, types_in
from lioncub_jax.exchange.mapped import Holder
from lioncub_jax.mesh.placement import Workers

# The step of a trainer's state, or of an nnx.Optimizer in a dict.
_STEP = re.compile(r"(\w+\.)?step")


def carry_over(state: Any, workers: Workers, **fields: Any) -> Any:
    """Replaces fields of a new optimizer's state by those of an old one, such as the moments of AdamW.

    A field has its name wherever the state has one: ``mu`` of `lion_cub` is that of each worker, ``mu`` and
    ``nu`` of `owner_adamw` are those of the owners, and ``count`` is every counter, schedules' too, and the
    step of the state.

    Args:
      state: a new state with its parameters: a ``StepState``, a ``TrainState`` of flax, or a dict with
        ``"params"``, such as ``{"params": nnx.state(model, nnx.Param), "optimizer": optimizer}``.
      workers: the workers, on the mesh of the state.
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
    found = entries(state, workers)
    leaves, types = leaves_in(found), types_in(found)

    def put(name: str, value: Any) -> None:
        leaf, entry = types[name]
        shape = leaf.shape[entry.holder is Holder.WORKER :]
        if jnp.shape(value) not in (shape, leaf.shape):
            raise ValueError(f"{name} has shape {list(shape)}: {list(jnp.shape(value))} was given")
        whole = jnp.broadcast_to(jnp.asarray(value, leaf.dtype), leaf.shape)
        leaves[name] = jax.device_put(whole, leaf.sharding)

    for field, tree in fields.items():
        without = {name for name in leaves if f".{field}." in f".{name}."}
        for path, value in named(tree, name=field):
            matches = [name for name in leaves if f".{name}".endswith(f".{path}")]
            if not matches:
                raise ValueError(
                    f"carry_over({field}=...): the state has no {path}. Give fields of its optimizer, "
                    "trees like the parameters, and a state with the parameters in it, such as "
                    '{"params": params, "opt_state": opt_state}'
                )
            for name in matches:
                put(name, value)
            without -= set(matches)
        if without:
            raise ValueError(
                f"carry_over({field}=...) has nothing for {', '.join(sorted(without)[:4])}, {len(without)} "
                "in all, which would begin at 0 beside an old count: give a tree with all parameters. Of "
                "optax.partition put the moments of all its parts together"
            )
    parts = {part for name in leaves for part in name.split(".")}
    wanted = [x for x in ("mu", "nu", "trace", "count") if x in parts]
    missing = [x for x in wanted if x not in fields]
    if missing and len(missing) < len(wanted):  # moments without their counter, or one of two
        raise ValueError(
            f"carry_over got {', '.join(fields)}, and the new state has {', '.join(wanted)}: give "
            f"{', '.join(f'{x}=' for x in missing)} of the same old state too. Moments and counters belong "
            "together: without one of them the first updates are far too large or too small. If the old "
            "optimizer has none, begin with the new state as it is"
        )
    for name in leaves:
        if "count" in fields and _STEP.fullmatch(name):
            put(name, jax.tree.leaves(fields["count"])[0])

    # Copies: a training step donates its state, and neither the old one nor one array twice.
    return jax.tree.map(jnp.copy, joined(state, found, leaves))
