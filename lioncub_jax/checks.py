"""What is refused when a transform is built or traced, and what the error advises."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lioncub_jax import wires
from lioncub_jax.decide import Down, Owner
from lioncub_jax.quantize import Quantizer
from lioncub_jax.wires import AxisName, Wire


def check_parts(up: Quantizer, owner: Owner, down: Down, wire: Wire) -> None:
    """Raises ``ValueError`` for parts of a `communicate` that do not fit together."""
    _check_decoded(up, owner)
    if wire.carries == "codes" and owner.needs_values:
        raise ValueError(
            f"the {wire.name} wire adds codes: give owner=count(), or the two_phase wire"
        )
    if wire.carries == "values" and not up.dense:
        raise ValueError(
            f"the {wire.name} wire adds values: give up=dense(), or the two_phase wire"
        )
    if up.has_zero and not down.has_zero and not down.scaled:
        raise ValueError(
            f"{up.name} has a code for zero and its ties are zeros: give down=ternary_sum() or average()"
        )
    if down.scaled != owner.feedback:
        raise ValueError(
            f"down={down.name} does not fit owner={owner.name}: scaled_signs() carries what "
            "feedback_at_owner() answers, and nothing else does"
        )
    if not (down.of_values if owner.needs_values else down.of_votes):
        fitting = "majority() or floats()" if owner.needs_values else "majority() or average()"
        fitting = "scaled_signs()" if owner.feedback else fitting
        raise ValueError(
            f"down={down.name} does not fit owner={owner.name}: give one that codes what it answers, such "
            f"as {fitting}"
        )
    if down.needs_zero and not up.has_zero:
        raise ValueError(
            f"{up.name} has no code for zero, so a sum says nothing without the votes: give down=average()"
        )
    if down.scaled and up.dense:
        raise ValueError(f"{up.name} does not fit {owner.name}: give midrise(p)")


def _check_decoded(up: Quantizer, owner: Owner) -> None:
    if not owner.needs_values and up.dense:
        raise ValueError(
            f"{up.name} has no codes to count: give owner=momentum_at_owner(tx), or a quantiser of codes"
        )
    if owner.needs_values and not up.decodes:
        raise ValueError(
            f"{owner.name} decodes values, but {up.name} sends codes without steps: give midrise(p) or "
            "dense()"
        )
    if up.feedback is not None and not owner.needs_values:
        raise ValueError(
            f"{up.name}: votes are counted, not decoded, so there is no error to feed back; give "
            "owner=momentum_at_owner(tx), or the quantiser without error_feedback"
        )


def check_leaves(tree: Any) -> None:
    """Raises ``TypeError`` for a leaf that is not floating."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            raise TypeError(
                f"leaf {jax.tree_util.keystr(path) or '(root)'} is {jnp.asarray(leaf).dtype}: only "
                "floating leaves can vote; leave others out with optax.masked or optax.multi_transform"
            )


def check_local(updates: Any, axis_name: AxisName, group_axis: AxisName | None = None) -> None:
    """Raises ``ValueError`` for gradients that are, by their type, the same on every worker."""
    apart = (*wires.names(axis_name), *wires.names(group_axis or ()))
    shared = wires.sharing(jax.tree.leaves(updates), apart)
    if shared:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(updates)]
        raise ValueError(
            f"the gradient of {jax.tree_util.keystr(paths[shared[0]]) or 'the parameters'} is the same "
            f"on every worker of {' and '.join(map(repr, apart))}: it was already reduced in full "
            "precision, and there is nothing left to vote on. jax.grad does that for parameters that do "
            "not vary over the axis; take local gradients with lioncub_jax.local_value_and_grad"
        )


def check_kinds(**parts: tuple[Any, type]) -> None:
    """Raises ``TypeError`` for a part that is not what its name says."""
    for name, (part, kind) in parts.items():
        if not isinstance(part, kind):
            raise TypeError(
                f"{name}={part!r} is not a {kind.__name__}: give what one of the functions that build "
                f"one returns (called, such as sign() and not sign)"
            )


def check_axis(axis_name: Any) -> None:
    """Raises ``ValueError`` for anything but the name of a mesh axis, a tuple of names, or None."""
    if axis_name is None:
        return
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name={axis_name!r}: give the name of a mesh axis, a string, a tuple of names, or "
            "None for one device without a mesh"
        )


def check_group(group_axis: Any, axis_name: AxisName, up: Quantizer) -> None:
    """Raises ``ValueError`` for a group axis that is none, or that the quantiser cannot serve."""
    if group_axis is None:
        return
    names = group_axis if isinstance(group_axis, tuple) else (group_axis,)
    if not names or not all(isinstance(n, str) for n in names):
        raise ValueError(
            f"group_axis={group_axis!r}: give the name of a mesh axis, a tuple of names, or None"
        )
    if set(names) & set(wires.names(axis_name)):
        raise ValueError(
            f"group_axis={group_axis!r} is an axis of the workers ({axis_name!r}): a group is the "
            "devices of one worker, on an axis of their own"
        )
    if up.measure is not None:
        raise ValueError(
            f"{up.name} has one scale for a whole leaf, and a device of a group votes on a slice of many "
            "leaves: give sign(), ternary() or midrise(p)"
        )


def check_count(given: str, n: Any, wanted: str = "a whole number of at least 1") -> None:
    """Raises ``ValueError`` for anything but a whole number of at least 1; ``given`` is how it came."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"{given}: give {wanted}")


def check_betas(b1: Any, b2: Any) -> None:
    """Raises ``ValueError`` for a beta outside [0, 1), where its value is known."""
    for name, beta in (("b1", b1), ("b2", b2)):
        if isinstance(beta, jax.core.Tracer):
            continue
        if (
            not isinstance(beta, (int, float, np.number, np.ndarray, jax.Array))
            or not 0 <= beta < 1
        ):
            raise ValueError(f"{name}={beta!r}: give a number in [0, 1), such as 0.9")


def check_momentum(momentum: Any) -> None:
    """Raises ``ValueError`` for a momentum outside [0, 1), where its value is known."""
    if isinstance(momentum, jax.core.Tracer):
        return
    known = isinstance(momentum, (int, float, np.number, np.ndarray, jax.Array))
    if not known or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r}: give a number in [0, 1), such as 0.9")


def check_mu_dtype(dtype: Any) -> None:
    """Raises ``TypeError`` for a momentum that would not be floating."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"mu_dtype={jnp.dtype(dtype).name}: momentum is floating; give float32 or bfloat16, or None"
        )


def as_flag(abstain: Any) -> jax.Array:
    """A flag of one worker, or ``ValueError`` for an array of another shape."""
    flag = jnp.asarray(abstain)
    if flag.shape != ():
        raise ValueError(
            f"abstain has shape {flag.shape}: give each worker one bool of shape (), its own"
        )
    return flag.astype(bool)
