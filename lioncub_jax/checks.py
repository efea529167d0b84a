"""What is refused when a transform is built or traced, and what the error tells to do."""

from typing import Any

import jax
import jax.numpy as jnp

from lioncub_jax import wires
from lioncub_jax.decide import Down, Owner
from lioncub_jax.quantize import Quantizer
from lioncub_jax.wires import AxisName, Wire


def check_parts(up: Quantizer, owner: Owner, down: Down, wire: Wire) -> None:
    """Raises ``ValueError`` for parts of a `communicate` that do not fit together."""
    counted, kind = not owner.needs_values, down.name
    if counted and up.dense:
        raise ValueError(
            f"{up.name} has no codes to count: give owner=momentum_at_owner(tx), or a quantiser of codes"
        )
    if not counted and not up.dense and up.block is None:
        raise ValueError(
            f"{owner.name} decodes values, but {up.name} sends codes without steps: give "
            "midrise(p, block=64), midrise(p, block=128) or dense()"
        )
    if up.feedback is not None and counted:
        raise ValueError(
            f"{up.name}: votes are counted, not decoded, so there is no error to feed back; give "
            "owner=momentum_at_owner(tx), or the quantiser without error_feedback"
        )
    if wire.carries == "codes" and not counted:
        raise ValueError(
            f"the {wire.name} wire adds codes: give owner=count(), or the two_phase wire"
        )
    if wire.carries == "values" and not up.dense:
        raise ValueError(
            f"the {wire.name} wire adds values: give up=dense(), or the two_phase wire"
        )
    if kind == "majority" and up.has_zero:
        raise ValueError(
            f"{up.name} has a code for zero and its ties are zeros: give down=ternary_sum() or average()"
        )
    if (kind == "average" and not counted) or (kind == "floats" and counted):
        raise ValueError(f"down={kind}() does not fit owner={owner.name}")


def check_leaves(tree: Any) -> None:
    """Raises ``TypeError`` for a leaf that is not floating."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            raise TypeError(
                f"leaf {jax.tree_util.keystr(path) or '(root)'} is {jnp.asarray(leaf).dtype}: only "
                "floating leaves can vote; leave others out with optax.masked or optax.multi_transform"
            )


def check_local(updates: Any, axis_name: AxisName) -> None:
    """Raises ``ValueError`` for gradients that are, by their type, the same on every worker."""
    shared = wires.sharing(jax.tree.leaves(updates), axis_name)
    if shared:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(updates)]
        raise ValueError(
            f"the gradient of {jax.tree_util.keystr(paths[shared[0]]) or 'the parameters'} is the same "
            f"on every worker of {axis_name!r}: it was already reduced in full precision, and there is "
            "nothing left to vote on. jax.grad does that for parameters that do not vary over the axis; "
            "take local gradients with lioncub_jax.local_value_and_grad"
        )
