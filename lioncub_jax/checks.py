"""What is refused when a transform is built or traced, and what the error advises."""

import contextlib
import contextvars
import difflib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lioncub_jax import wires
from lioncub_jax.arguments import check_floating, check_number
from lioncub_jax.decide import Down, Owner
from lioncub_jax.mesh.placement import check_arrays
from lioncub_jax.quantize import Quantizer
from lioncub_jax.wires import AxisName, Wire

mode = "raise"  # what is done with what was found: see lioncub_jax.watch.mode
# Whether the caller has a worker abstain, or a training step of itself, from those transforms that let it.
asked = contextvars.ContextVar("asked", default=True)
# Whether a transform is traced for the types of its results alone: nothing is voted on.
only_types = contextvars.ContextVar("only types", default=False)


@contextlib.contextmanager
def during(flag: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Where a flag has another value."""
    token = flag.set(value)
    try:
        yield
    finally:
        flag.reset(token)


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
    if only_types.get():
        return
    apart = (*wires.names(axis_name), *wires.names(group_axis or ()))
    shared = wires.sharing(jax.tree.leaves(updates), apart)
    if shared:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(updates)]
        raise ValueError(
            f"the gradient of {jax.tree_util.keystr(paths[shared[0]]) or 'the parameters'} is the same "
            f"on every worker of {' and '.join(map(repr, apart))}: it was already reduced in full "
            "precision, or comes from a vote before this one, and there is nothing left to vote on. "
            "jax.grad reduces it for parameters that do not vary over the axis; take local gradients with "
            "lioncub_jax.local_value_and_grad. And in one chain workers vote or average once: leave the "
            "others out, or give them other leaves with optax.partition"
        )


def check_state(updates: Any, *kept: Any) -> None:
    """Raises ``ValueError`` for what is kept of other parameters than the gradients are of."""

    def shapes(tree: Any) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
        return {jax.tree_util.keystr(path): getattr(x, "shape", None) for path, x in leaves}

    given = shapes(updates)
    for held in map(shapes, kept):
        both = {**given, **held}
        wrong = [x for x in both if x not in held or held[x] not in (None, given.get(x))]
        if wrong:
            raise ValueError(
                f"the state is of other parameters than the gradients, as {wrong[0]} shows: make it with "
                "init of those that are trained"
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


def warn_of_masked(given: Sequence[Any]) -> None:
    """Warns of leaves that no transform of a program, compiled by now, has reduced over the workers.

    Args:
      given: for each transform that sends, in order, the types of the leaves that it was given.
    """
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    optimizers = [(set[Any](), set[Any]())]
    for tree in given:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked)
        types = {path: x for path, x in leaves if not is_masked(x)}
        if not types or any(x.manual_axis_type.varying for x in types.values()):
            continue  # types tell what becomes of the others
        if optimizers[-1][0] & types.keys():  # no leaf is for two transforms of one optimizer
            optimizers.append((set(), set()))
        optimizers[-1][0].update(types)
        optimizers[-1][1].update(path for path, x in leaves if is_masked(x))
    hidden: set[str] = set()
    for reached, masked in optimizers:  # a label may be of a whole subtree
        above = {path[:k] for path in reached for k in range(len(path))}
        hidden |= {jax.tree_util.keystr(path) for path in masked - reached - above}
    if hidden:
        warnings.warn(
            f"the leaves {', '.join(sorted(hidden)[:3])} are masked from the vote, and here (pmap, or "
            "check_vma=False) types do not tell whether their updates are the same for all workers: "
            "optax.masked gives each worker its own gradient, and parameters drift apart. Train them by "
            "global_gradients(tx, axis_name) in optax.partition; frozen by optax.set_to_zero() all is well",
            stacklevel=4,
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
    check_number(given, n, lambda n: n >= 1, f"give {wanted}", int)


def check_betas(**betas: Any) -> None:
    """Raises ``ValueError`` for a beta or momentum outside [0, 1), where its value is known."""
    for name, beta in betas.items():
        said = "give a number in [0, 1), such as 0.9"
        check_number(f"{name}={beta!r}", beta, lambda beta: 0 <= beta < 1, said)


def check_mu_dtype(dtype: Any) -> None:
    """Raises ``ValueError`` for a momentum that would not be floating."""
    if dtype is not None:
        check_floating("mu_dtype", dtype)


def taken(extra: dict[str, Any]) -> dict[str, Any]:
    """What ``update`` is given beside gradients; all but ``abstain`` is for others in the chain.

    Raises:
      TypeError: for a word that is nearly ours: no transform of a chain takes it, and none says so.
      ValueError: for an ``abstain`` that is no flag of one worker.
    """
    for name in extra:
        if name != "abstain" and difflib.get_close_matches(name, ["abstain"], cutoff=0.7):
            raise TypeError(f"update has no argument {name!r}: give abstain, or leave it out")
    if extra.get("abstain") is None:
        return extra
    flag = jnp.asarray(extra["abstain"])
    if flag.shape != () or flag.dtype != bool:
        wanted = "give each worker one bool of shape (), its own"
        raise ValueError(f"abstain has shape {flag.shape} and dtype {flag.dtype}: {wanted}")
    return {**extra, "abstain": flag}


def callers_line() -> tuple[str, int, list[str]]:
    """File and line of the caller's own program, and the functions on the way here."""
    frame, passed = inspect.currentframe(), list[str]()
    theirs = "lioncub_jax", "optax", "jax"
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in theirs:
        passed.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno, passed) if frame else ("", 0, passed)


def warn_alone(updates: Any, built: tuple[str, int, list[str]]) -> None:
    """Warns where a transform without an axis has arrays of several devices, at the line that built it."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(updates)]
    mesh = max([jax.sharding.get_abstract_mesh(), *meshes], key=lambda mesh: mesh.size)
    if mode != "allow" and mesh.size > 1 and not mesh.manual_axes:
        warnings.warn_explicit(
            f"axis_name=None is for one device, and the gradients are on several, {dict(mesh.shape)}: "
            "nobody votes, and the compiler averages gradients in full precision. Give "
            "lioncub_jax.Workers as axis_name, and run the optimizer through lioncub_jax.on_mesh; one "
            "worker of several devices is an axis of size 1",
            UserWarning, *built[:2],
        )  # fmt: skip


def warn_if_chained() -> None:
    """Warns where a transform of the gradients of all workers is called by ``optax.chain``."""
    file, line, passed = callers_line()
    if mode != "allow" and "chain.<locals>.update_fn" in passed:
        warnings.warn_explicit(
            "on_mesh is in a chain: what stands before it has the gradients of all workers as one, so "
            "optax.clip_by_global_norm clips by the norm over all of them. Put the chain inside: "
            "lioncub_jax.on_mesh(optax.chain(optax.clip_by_global_norm(1.0), tx), workers)",
            UserWarning, file, line,
        )  # fmt: skip


def as_mask(argument: str, mask: Any) -> Any:
    """A mask of leaves, or ``TypeError`` for one that is not of bools; a function once it is called."""
    if callable(mask):
        return lambda tree: as_mask(argument, mask(tree))
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        if not isinstance(leaf, bool) and getattr(leaf, "dtype", None) != jnp.bool_:
            wanted = "a mask has a bool for each leaf of the parameters; give True or False"
            raise TypeError(f"{argument}{jax.tree_util.keystr(path)} is {leaf!r}: {wanted}")
    return mask


def decay_mask(mask: Any) -> Any:
    """As `as_mask`, of leaves or of whole subtrees that decay; ``ValueError`` where it does not fit."""
    mask = as_mask("mask", mask)

    def fitted(tree: Any) -> Any:
        own = mask(tree) if callable(mask) else mask
        try:
            jax.tree.broadcast(own, tree)
        except ValueError as error:
            wanted = "give a bool for each leaf of them, or for a whole subtree"
            raise ValueError(f"mask={own!r} does not fit the parameters: {wanted}") from error
        return own

    return None if mask is None else fitted
