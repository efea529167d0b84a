"""What is refused when a transform is built or traced, and what the error advises."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lioncub_jax import wires
from lioncub_jax.decide import Down, Owner
from lioncub_jax.mesh.placement import check_arrays
from lioncub_jax.quantize import Quantizer
from lioncub_jax.wires import AxisName, Wire

mode = "raise"  # what is done with what was found: see lioncub_jax.watch.mode


def check_parts(up: Quantizer, owner: Owner, down: Down, wire: Wire) -> None:
    """Raises ``ValueError`` for parts of a `communicate` that do not fit together."""
    if wrong := _misfit(up, owner, down, wire):
        raise ValueError(wrong)


def _misfit(up: Quantizer, owner: Owner, down: Down, wire: Wire) -> str | None:
    """What is wrong with them, in the order in which they act."""
    of_votes = not owner.needs_values
    if of_votes and up.dense:
        wanted = "give owner=momentum_at_owner(tx), or a quantiser of codes"
        return f"{up.name} has no codes to count: {wanted}"
    if of_votes and up.feedback is not None:
        wanted = "give owner=momentum_at_owner(tx), or the quantiser without error_feedback"
        return f"{up.name}: votes are counted, not decoded, so there is no error to feed back; {wanted}"
    if of_votes and up.turns:
        wanted = "give owner=momentum_at_owner(tx), or the quantiser without rotated"
        return (
            f"{up.name}: a vote is on each parameter, and these codes are of all of a row; {wanted}"
        )
    if not of_votes and not up.decodes:
        wanted = "give midrise(p) or dense()"
        return f"{owner.name} decodes values, but {up.name} sends codes without steps: {wanted}"
    if wire.carries == "codes" and not of_votes:
        return f"the {wire.name} wire adds codes: give owner=count(), or the two_phase wire"
    if wire.carries == "values" and not up.dense:
        return f"the {wire.name} wire adds values: give up=dense(), or the two_phase wire"
    if owner.trims and wire.carries != "both":
        wanted = "give the two_phase or the gathered wire, or trim=0"
        return f"{owner.name} sorts what each worker sent, and the {wire.name} wire only adds: {wanted}"
    if up.has_zero and not down.has_zero and not down.scaled:
        wanted = "give down=ternary_sum() or average()"
        return f"{up.name} has a code for zero and its ties are zeros: {wanted}"
    misfit = f"down={down.name} does not fit owner={owner.name}"
    if down.scaled != owner.feedback:
        answers = "what feedback_at_owner() of as many bits answers, scaled_signs() that of one bit"
        return f"{misfit}: scaled(p) carries {answers}, and nothing else does"
    if not (down.of_votes if of_votes else down.of_values):
        fitting = "majority() or average()" if of_votes else "majority() or floats()"
        return f"{misfit}: give one that codes what it answers, such as {fitting}"
    if down.needs_zero and not up.has_zero:
        wanted = "give down=average()"
        return f"{up.name} has no code for zero, so a sum says nothing without the votes: {wanted}"
    if down.scaled and up.dense:
        return f"{up.name} does not fit {owner.name}: give midrise(p)"
    return None


def check_leaves(tree: Any) -> None:
    """Raises ``TypeError`` for a leaf that is not floating."""
    check_arrays(tree, int, float, complex)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            given = f"leaf {jax.tree_util.keystr(path) or '(root)'} is {jnp.asarray(leaf).dtype}"
            wanted = "leave others out with optax.masked or optax.multi_transform"
            raise TypeError(f"{given}: only floating leaves can vote; {wanted}")


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


def watch_workers(updates: Any, params: Any, count: jax.Array, axis: AxisName) -> None:
    """Raises, at run time, for gradients that all workers have alike, and parameters that they have not.

    For ``pmap`` and ``shard_map(check_vma=False)``, where types do not tell: gradients of the first three
    steps, parameters at steps that are a power of two or a multiple of 128, a word from each worker.
    """
    if mode == "allow" or wires.tracked(axis) or wires.workers_on(axis) == 1:
        return
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"the count of the state is {count.dtype}: the state was averaged, as lax.pmean(opt_state) "
            "does; it is each worker's own, so leave that out"
        )
    early = count < 3
    due = early | (count & (count - 1) == 0) | (count % 128 == 0)

    def look() -> None:
        grads, parameters = _checksum(updates), _checksum(params)
        sums = wires.gather_words(jnp.stack([grads, parameters]), axis)
        alike, apart = jnp.all(sums == sums[0], axis=0), jnp.any(sums != sums[0], axis=0)
        finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(updates)]
        averaged = early & alike[0] & (grads != 0) & jnp.all(jnp.stack(finite or [jnp.bool_(True)]))
        wrong = averaged | apart[1]
        tell = partial(jax.debug.callback, _tell_workers, sums, averaged, count)
        jax.lax.cond(wrong, tell, lambda: None)

    jax.lax.cond(due, look, lambda: None)


# Leaves that a transform which communicates was given, and leaves that were kept from one, where types do
# not tell what becomes of them.
_reached: set[str] = set()
_masked: set[str] = set()


def note_leaves(updates: Any, axis: AxisName | None) -> None:
    """Remembers which leaves a transform reduces over the workers, and which it is not given."""
    if wires.tracked(axis):
        return
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    for path, x in jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_masked):
        (_masked if is_masked(x) else _reached).add(jax.tree_util.keystr(path))


def warn_of_masked() -> None:
    """Warns of leaves that no transform of a program, compiled by now, has reduced over the workers."""
    hidden = sorted(_masked - _reached)
    _masked.clear()
    _reached.clear()
    if hidden:
        warnings.warn(
            f"the leaves {', '.join(hidden[:3])} are masked from the vote, and here (pmap, or "
            "check_vma=False) types do not tell whether their updates are the same for all workers: "
            "optax.masked gives each worker its own gradient, and parameters drift apart. Train them by "
            "global_gradients(tx, axis_name) in optax.partition; frozen by optax.set_to_zero() all is well",
            stacklevel=3,
        )


def _checksum(tree: Any) -> jax.Array:
    """``uint32[]``: a sum of the bits of all floating leaves, each weighed by its place."""
    total = jnp.zeros((), jnp.uint32)
    for x in jax.tree.leaves(tree):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).reshape(-1)
        place = jnp.arange(bits.size, dtype=jnp.uint32)
        total = total * jnp.uint32(31) + jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
    return total


def _tell_workers(sums: Any, averaged: Any, step: Any) -> None:
    other = int(np.argmax(sums[:, 1] != sums[0, 1]))
    wrong = (
        f"step {step}: the parameters of workers 0 and {other} differ, so replicas drift apart. Updates "
        "must be the same for all: a leaf that optax.masked keeps from the vote gets each worker's own "
        "gradient (give it optax.set_to_zero() or global_gradients(tx, axis_name)); and all workers must "
        "start from the same parameters"
    )
    if averaged:
        wrong = (
            f"step {step}: the gradients of all {len(sums)} workers are the same to the bit, so there is "
            "nothing to vote on. Either they are averaged before the vote: leave lax.pmean(grads) out, and "
            "take gradients with lioncub_jax.local_value_and_grad. Or all workers have the same batch: "
            "give each its own part of it"
        )
    if mode == "raise":
        raise ValueError(wrong)
    warnings.warn(wrong, stacklevel=2)


def check_kinds(**parts: tuple[Any, type]) -> None:
    """Raises ``TypeError`` for a part that is not what its name says."""
    for name, (part, kind) in parts.items():
        if not isinstance(part, kind):
            built = "what a function that builds one returns, called, such as quantize.sign() and not sign"
            raise TypeError(f"{name}={part!r} is not a {kind.__name__}: give {built}")


def check_axis(
    axis: Any, argument: str = "axis_name", none: str = "one device without a mesh"
) -> None:
    """Raises ``ValueError`` for anything but the name of a mesh axis, a tuple of names, or None."""
    names = axis if isinstance(axis, tuple) else (axis,)
    known = names and all(isinstance(n, str) for n in names) and len(set(names)) == len(names)
    if axis is not None and not known:
        wanted = "give the name of a mesh axis, a string, a tuple of names"
        raise ValueError(f"{argument}={axis!r}: {wanted}, or None for {none}")


def check_group(group_axis: Any, axis_name: AxisName, up: Quantizer) -> None:
    """Raises ``ValueError`` for a group axis that is none, or that the quantiser cannot serve."""
    check_axis(group_axis, "group_axis", "workers of one level")
    if set(wires.names(group_axis or ())) & set(wires.names(axis_name)):
        group = "a group is the devices of one worker, on an axis of their own"
        raise ValueError(
            f"group_axis={group_axis!r} is an axis of the workers ({axis_name!r}): {group}"
        )
    if group_axis is not None and up.measure is not None:
        raise ValueError(
            f"{up.name} has one scale for a whole leaf, and a device of a group votes on a slice of many "
            "leaves: give sign(), ternary() or midrise(p)"
        )


def check_count(given: str, n: Any, wanted: str = "a whole number of at least 1") -> None:
    """Raises ``ValueError`` for anything but a whole number of at least 1; ``given`` is how it came."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"{given}: give {wanted}")


def check_betas(**betas: Any) -> None:
    """Raises ``ValueError`` for a beta or momentum outside [0, 1), where its value is known."""
    for name, beta in betas.items():
        number = isinstance(beta, (int, float, np.number, np.ndarray, jax.Array))
        if not isinstance(beta, jax.core.Tracer) and not (number and 0 <= beta < 1):
            raise ValueError(f"{name}={beta!r}: give a number in [0, 1), such as 0.9")


def check_mu_dtype(dtype: Any) -> None:
    """Raises ``TypeError`` for a momentum that would not be floating."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        wanted = "give float32 or bfloat16, or None"
        raise TypeError(f"mu_dtype={jnp.dtype(dtype).name}: momentum is floating; {wanted}")


def as_flag(abstain: Any) -> jax.Array:
    """A flag of one worker, or ``ValueError`` for an array of another shape."""
    flag = jnp.asarray(abstain)
    if flag.shape != ():
        wanted = "give each worker one bool of shape (), its own"
        raise ValueError(f"abstain has shape {flag.shape}: {wanted}")
    return flag.astype(bool)


def as_mask(argument: str, mask: Any) -> Any:
    """A mask of leaves, or ``TypeError`` for one that is not of bools; a function once it is called."""
    if callable(mask):
        return lambda tree: as_mask(argument, mask(tree))
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        if not isinstance(leaf, bool) and getattr(leaf, "dtype", None) != jnp.bool_:
            wanted = "a mask has a bool for each leaf of the parameters; give True or False"
            raise TypeError(f"{argument}{jax.tree_util.keystr(path)} is {leaf!r}: {wanted}")
    return mask
