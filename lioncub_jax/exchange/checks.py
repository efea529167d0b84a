"""Errors and warnings when a transform is built or traced; each has what to do instead.

In the order of the file: single arguments; what ``init`` and ``update`` are given; and the jaxpr of a
transform that shall run on a chunk of the rows.
"""

import contextvars
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr, Var, jaxprs_in_params
from jax.typing import DTypeLike

from lioncub_jax.exchange import wires
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes
from lioncub_jax.mesh.checksum import checksum
from lioncub_jax.mesh.placement import check_arrays
from lioncub_jax.programs import compilations

# --- Single arguments


def check_number(
    given: str, x: Any, fits: Callable[[Any], bool], allowed: str, static: type | None = None
) -> None:
    """Raises ``ValueError`` for what is no number, or for one that does not fit.

    Args:
      given: how it came, such as "b1=2".
      x: a number, or an array of one.
      fits: ``x -> bool``, not called where only a run knows the number.
      allowed: what is allowed, and what to do.
      static: int or float, if the number must be known at compile time and so cannot be an array.
    """
    if static and isinstance(x, jax.Array):
        raise ValueError(
            f"{given}: this decides what is compiled, and optax.inject_hyperparams made an array of it; "
            'name the argument in its static_args, as "workers" is'
        )
    if isinstance(x, jax.core.Tracer):
        return
    if isinstance(x, jax.Array):
        x = np.asarray(x)  # what JAX compares inside of a trace is a tracer
    kinds = (int, np.integer) if static is int else (int, float, np.number)
    number = isinstance(x, kinds if static else (*kinds, np.ndarray))
    if isinstance(x, bool) or not number or np.shape(x) or not fits(x):
        raise ValueError(f"{given}: {allowed}")


def check_rates(**rates: Any) -> None:
    """Raises ``ValueError`` for a rate that is neither a finite number nor a schedule."""
    for name, rate in rates.items():
        if not callable(rate):
            allowed = "give a finite number, such as 1e-3, or an optax schedule"
            check_number(f"{name}={rate!r}", rate, np.isfinite, allowed)


def check_floating(argument: str, dtype: DTypeLike | None) -> None:
    """Raises ``ValueError`` for a dtype that is not floating."""
    if isinstance(dtype, jax.Array):
        raise ValueError(
            f"{argument} is an array: optax.inject_hyperparams takes a dtype that can be called for a "
            'schedule; give its name, such as "float32"'
        )
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        name = None if dtype is None else jnp.dtype(dtype).name
        raise ValueError(f"{argument}={name}: give a floating dtype, such as float32 or bfloat16")


def check_count(given: str, n: Any, wanted: str = "a whole number of at least 1") -> None:
    """Raises ``ValueError`` for anything but a whole number of at least 1; ``given`` is how it came."""
    check_number(given, n, lambda n: n >= 1, f"give {wanted}", int)


def check_betas(**betas: Any) -> None:
    """Raises ``ValueError`` for a beta or momentum outside [0, 1), where its value is known."""
    for name, beta in betas.items():
        allowed = "give a number in [0, 1), such as 0.9"
        check_number(f"{name}={beta!r}", beta, lambda beta: 0 <= beta < 1, allowed)


def check_eps(eps: Any) -> None:
    """Raises ``ValueError`` unless it is above 0 in float32."""
    allowed = "give a number above 0 in float32, such as 1e-8"
    check_number(f"eps={eps!r}", eps, lambda eps: bool(0 < np.float32(eps) < np.inf), allowed)


def check_decay(b2: Any, mu_dtype: DTypeLike | None) -> None:
    """Raises ``ValueError`` for a dtype of momentum that is not floating, or cannot keep its decay.

    ``b2 mu`` is no ``mu`` where ``1 - b2`` is at least half a unit in the last place of a number above 1.
    """
    if mu_dtype is None:
        return
    check_floating("mu_dtype", mu_dtype)
    dtype = jnp.dtype(mu_dtype).name
    most = 1 - float(jnp.finfo(dtype).eps) / 2
    allowed = (
        f"momentum in {dtype} would stay as it is and never decay, for b2 mu is rounded to mu: give b2 of "
        f'at most {most:.5g} or mu_dtype="float32"'
    )
    check_number(f"b2={b2!r}", b2, lambda b2: b2 <= most, allowed)


def check_kinds(**components: tuple[Any, type]) -> None:
    """Raises ``TypeError`` for a component of another kind than its argument's."""
    for name, (given, kind) in components.items():
        if not isinstance(given, kind):
            built = "what a function that builds one returns, called, such as quantize.sign() and not sign"
            raise TypeError(f"{name}={given!r} is not a {kind.__name__}: give {built}")


# --- What ``init`` and ``update`` are given

# Set while a whole step is traced and then read, which proves what these look for; see `training.differ`.
proven = contextvars.ContextVar("proven", default=False)


def check_leaves(tree: optax.Params) -> optax.Params:
    """The tree, Python's numbers in it as arrays; raises ``TypeError`` for a leaf that is not floating."""
    check_arrays(tree, int, float, complex)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_trained(path)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            given = f"leaf {jax.tree_util.keystr(path) or '(root)'} is {jnp.result_type(leaf)}"
            wanted = (
                "give what is trained alone, and counters and random streams as model_state (lioncub_jax."
                "from_nnx splits a module of flax so)"
            )
            raise TypeError(f"{given}: only floating leaves can vote; {wanted}")
    return jax.tree.map(lambda x: x if hasattr(x, "shape") else jnp.asarray(x), tree)


def check_trained(path: Sequence[Any]) -> None:
    """Raises ``ValueError`` for what flax does not train, among the parameters of an optimizer."""
    if any(getattr(key, "key", None) == "_overwrite_with_gradient" for key in path):
        raise ValueError(
            f"the optimizer is given {jax.tree_util.keystr(tuple(path))}, which fp8 layers keep, and whose "
            "gradient is its next value: give it variables['params'] alone, as TrainState of flax does, "
            "in a step that lioncub_jax.map_step maps over the workers, which has that value of all of them"
        )


def stands_in(params: optax.Params) -> bool:
    """True for what ``optax.tree.map_params`` gives to ``init`` in place of parameters.

    State built of it has it where parameters' arrays are, and 0 in place of a tree of other arrays.
    """
    return isinstance(params, _stand_in())


@functools.cache
def _stand_in() -> type:
    given = []
    optax.tree.map_params(lambda params: given.append(type(params)), lambda x: x, None)
    return given[0]


def check_update(
    updates: optax.Updates,
    params: optax.Params | None,
    count: jax.Array,
    kept: Sequence[optax.Updates],
    axis: Axes,
    group: Axes,
) -> optax.Updates:
    """The gradients as arrays; raises for what cannot be voted on.

    Args:
      updates: gradients of one worker.
      params: the parameters, where ``update`` is given them.
      count: ``int32[]``, steps taken before.
      kept: trees like the gradients in the state, or with None in place of arrays.
      axis: mesh axes of the workers.
      group: mesh axes of the devices of one worker.
    """
    everyone = (*axis, *group)
    axes.workers_on(everyone)
    updates = check_leaves(updates)
    check_local(updates, everyone)
    check_state(updates, *kept)
    if not axis:
        warn_if_on_several_devices(updates)
    watch_workers(updates, params, count, axis)
    return updates


def check_local(updates: optax.Updates, axis: Axes) -> None:
    """Raises ``ValueError`` for gradients that are, by their type, the same on every worker.

    Warns of leaves that a mask or label leaves out, where types do not tell what becomes of them.
    """
    masked = masked_leaves(updates)
    if masked and not (proven.get() or compilations.mode() == "allow" or axes.tracked(axis)):
        warnings.warn(
            f"the leaves {', '.join(masked[:3])} are masked from the vote, and here (pmap, or "
            "check_vma=False) types do not tell whether their updates are the same for all workers. "
            "optax.masked gives each worker its own gradient, and parameters drift apart: use map_step, or "
            "check_vma=True, where that is an error. If optax.partition gives them to global_gradients or "
            "optax.set_to_zero, all is well: filter this warning out",
            stacklevel=2,
        )
    shared = axes.shared(jax.tree.leaves(updates), axis)
    if shared is not None:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(updates)]
        raise ValueError(
            f"the gradient of {jax.tree_util.keystr(paths[shared]) or 'the parameters'} is the same "
            f"on every worker of {' and '.join(map(repr, axis))}: it was already reduced in full "
            "precision, or comes from a vote before this one, and there is nothing left to vote on. "
            "In one chain workers vote or average once: leave the others out, or give them other leaves "
            "with optax.partition. If this is the only one, jax.grad has added the gradients of parameters "
            "that do not vary over the axis: take them with lioncub_jax.local_value_and_grad, or map the "
            "whole step, lioncub_jax.map_step(step, workers), where optax.MultiSteps runs too"
        )


def check_state(updates: optax.Updates, *kept: optax.Updates) -> None:
    """Raises ``ValueError`` for a state of other parameters than those of the gradients."""
    given = shapes(updates)
    for held in map(shapes, kept):
        # A state that keeps nothing has None in place of arrays.
        if held and held != given:
            wrong = [x for x in {**given, **held} if held.get(x) != given.get(x)]
            if held == shapes(updates, 1):
                cure = (
                    "nothing of it says so any more, as in a dict of pure values: give map_step the state "
                    "that init made, or an nnx.State or nnx.Optimizer that holds it"
                    if proven.get()
                    else "a shard_map of yours has one worker's, x[0]. lioncub_jax.map_step does that by "
                    "itself"
                )
                raise ValueError(
                    f"the state has shape {held[wrong[0]]} for {wrong[0]}, and the gradient "
                    f"{given[wrong[0]]}: it is that of all workers, with their axis in front, and {cure}"
                )
            raise ValueError(
                f"the state is of other parameters than the gradients, as {wrong[0]} shows: make it with "
                "init of those that are trained"
            )


def shapes(tree: optax.Params, *lead: int) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf by its path, behind leading dimensions."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (*lead, *jnp.shape(x)) for path, x in leaves}


def watch_workers(
    updates: optax.Updates, params: optax.Params | None, count: jax.Array, axis: Axes
) -> None:
    """Raises at run time if the gradients of all workers are equal, or the parameters are not.

    For ``pmap`` and ``shard_map(check_vma=False)``, where types do not show it. It compares one checksum
    per worker: gradients in the first three steps, parameters at powers of two and multiples of 128.
    """
    if proven.get() or compilations.mode() == "allow":
        return
    if axes.tracked(axis) or axes.workers_on(axis) == 1:
        return
    if not any(x.size for x in jax.tree.leaves(updates)):
        return
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"the count of the state is {count.dtype}: the state was averaged, as lax.pmean(opt_state) "
            "does; it is each worker's own, so leave that out"
        )
    early = count < 3
    due = early | (count & (count - 1) == 0) | (count % 128 == 0)

    def look() -> None:
        own = jnp.stack([_checksum(updates), _checksum(params)])
        sums = wires.gather_words(own, axis)
        equal = jnp.all(sums == sums[:1], axis=0)  # checksums of gradients, of parameters
        moves = jnp.any(jnp.array([jnp.any(x != 0) for x in jax.tree.leaves(updates)]))
        averaged = early & equal[0] & moves & axes.all_finite(updates)
        wrong = averaged | ~equal[1]
        report = partial(jax.debug.callback, _report_workers, sums, averaged, count)
        jax.lax.cond(wrong, report, lambda: None)

    jax.lax.cond(due, look, lambda: None)


def _checksum(tree: optax.Params) -> jax.Array:
    """``uint32[]``, of all leaves."""
    each = [jnp.zeros(2, jnp.uint32), *map(checksum, jax.tree.leaves(tree))]
    return checksum(jnp.stack(each))[0]


def masked_leaves(tree: optax.Params) -> list[str]:
    """Paths of the leaves that a mask or label leaves out."""

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked)
    return [jax.tree_util.keystr(path) for path, x in leaves if is_masked(x)]


def _report_workers(sums: np.ndarray, averaged: np.ndarray, step: np.ndarray) -> None:
    other = int(np.argmax(sums[:, 1] != sums[0, 1]))
    wrong = (
        f"step {step}: the parameters of workers 0 and {other} differ, so replicas drift apart. Updates "
        "must be the same for all: a leaf that optax.masked keeps from the vote gets each worker's own "
        "gradient (give it optax.set_to_zero() or global_gradients(tx, workers=...)); and all workers must "
        "start from the same parameters"
    )
    if averaged:
        wrong = (
            f"step {step}: the gradients of all {len(sums)} workers are the same to the bit, so there is "
            "nothing to vote on. Either they are averaged before the vote: leave lax.pmean(grads) out, and "
            "take gradients with lioncub_jax.local_value_and_grad. Or all workers have the same batch: "
            "give each its own part of it"
        )
    if compilations.mode() == "raise":
        raise ValueError(wrong)
    warnings.warn(wrong, stacklevel=2)


def check_abstain(abstain: Any, others: dict[str, Any]) -> jax.Array | None:
    """The flag of a worker, ``bool[]``, or None.

    Args:
      abstain: as ``update`` is given it.
      others: further arguments of ``update``, which are for other transforms of a chain. A trainer's step
        gives the flag as ``diverged``, so that a transform of optax is not given an ``abstain``.

    Raises:
      TypeError: for a misspelled "abstain", which optax.chain would ignore silently.
      ValueError: for an ``abstain`` that is no flag of one worker.
    """
    for name in others:
        if name.startswith("abst"):
            raise TypeError(f"update has no argument {name!r}: give abstain, or leave it out")
    abstain = others.get("diverged") if abstain is None else abstain
    if abstain is None:
        return None
    flag = jnp.asarray(abstain)
    if flag.shape != () or flag.dtype != bool:
        wanted = "give each worker one bool of shape (), its own"
        raise ValueError(f"abstain has shape {flag.shape} and dtype {flag.dtype}: {wanted}")
    return flag


def refused_functions(tx: optax.GradientTransformation) -> dict[str, partial[Any]]:
    """Extra arguments for transforms that call the loss: calling one of them raises ``ValueError``.

    The loss differs between workers, so each would take another step. A transform whose own ``update``
    names one is refused at once; one inside a chain when it calls what it is given.
    """

    # A line search of optax raises for extra arguments that are not in the signature of value_fn.
    def refuse(
        name: str, *args: Any, abstain: Any = None, diverged: Any = None,
        grad_fn: Any = None, obj_fn: Any = None,
    ) -> Any:  # fmt: skip
        raise ValueError(
            f"a transform of the optimizer asks for {name}, a function of the parameters, as line "
            "searches, lbfgs, sophia and sam do, or steps by one worker's gradient in front of the "
            "exchange, as sam does otherwise: workers have rows of their own, so each would take another "
            "step. Leave it out, and put sam into the loss, as docs/how_to/trainer.md shows; of the loss "
            "only its mean over the workers is given, value, as optax.contrib.reduce_on_plateau asks for"
        )

    functions = {name: partial(refuse, name) for name in ("value_fn", "obj_fn", "grad_fn")}
    for name in inspect.signature(tx.update).parameters:
        if name in functions:
            functions[name]()
    return functions


def warn_if_on_several_devices(updates: optax.Updates) -> None:
    """Warns where a transform without an axis has arrays of several devices."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(updates)]
    mesh = max([jax.sharding.get_abstract_mesh(), *meshes], key=lambda mesh: mesh.size)
    if compilations.mode() != "allow" and mesh.size > 1 and not mesh.manual_axes:
        warnings.warn(
            f"workers=None is for one device, and the gradients are on several, {dict(mesh.shape)}: "
            "there is no vote, and the compiler averages gradients in full precision. Give "
            "lioncub_jax.Workers as workers, and map the step, lioncub_jax.map_step(step, workers); one "
            "worker of several devices is an axis of size 1",
            stacklevel=3,
        )


def is_function(mask: Any) -> bool:
    """True for a function that makes a mask; a tree of bools may have a ``__call__`` too, as a model."""
    leaves = jax.tree.leaves(mask)
    return bool(leaves) and all(map(callable, leaves))


def as_mask(argument: str, mask: Any) -> Any:
    """A mask of leaves, or ``TypeError`` for one that is not of bools; a function once it is called."""
    if is_function(mask):
        return lambda tree: as_mask(argument, mask(tree))
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        if not isinstance(leaf, bool) and getattr(leaf, "dtype", None) != jnp.bool_:
            wanted = "a mask has a bool for each leaf of the parameters; give True or False"
            raise TypeError(f"{argument}{jax.tree_util.keystr(path)} is {leaf!r}: {wanted}")
    return mask


def decay_mask(mask: Any) -> Any:
    """A mask of leaves or of whole subtrees that decay; ``ValueError`` where it does not fit."""
    mask = as_mask("mask", mask)

    def fitted(tree: optax.Params) -> optax.Params:
        own = mask(tree) if is_function(mask) else mask
        try:
            jax.tree.broadcast(own, tree)
        except ValueError as error:
            wanted = "give a bool for each leaf of them, or for a whole subtree"
            raise ValueError(f"mask={own!r} does not fit the parameters: {wanted}") from error
        return own

    return None if mask is None else fitted


# --- Jaxprs

# Operations with results of the shape of their operands that mix elements all the same.
_MIXING = re.compile(
    "cum|sort|rev$|transpose|dot|conv_|gather|scatter|dynamic_|reduce_window|fft|pad|concatenate|psum|pmax"
    "|pmin|ppermute|all_|triangular|cholesky|top_k|ffi_call|.*callback"
)


def check_elementwise(
    tx: optax.GradientTransformation, rows: jax.Array, state: Any, may_mix: bool = False
) -> None:
    """Raises ``ValueError`` for a transform that mixes elements, or needs more than a chunk of the rows.

    Args:
      tx: the transform.
      rows: a chunk of updates.
      state: of that chunk.
      may_mix: True for a transform of whole matrices.
    """
    behind = (
        "and an owner has only a chunk of each array. Give the owner what is elementwise, or nothing, and "
        "put the rest behind it: optax.chain(lioncub_jax.owner(optax.identity(), ...), tx)"
    )
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.shape not in ((), rows.shape):
            at = jax.tree_util.keystr(path)
            raise ValueError(
                f"at the owner: the state of tx has {at} of shape {x.shape}, which is neither a number nor "
                f"shaped like the updates {rows.shape}, {behind}"
            )
    tx = optax.with_extra_args_support(tx)

    # Parameters and the loss are given to the trace, to see whether they are used.
    def first_step(rows: jax.Array, params: jax.Array, value: jax.Array) -> Any:
        return tx.update(rows, tx.init(params), params, value=value)

    jaxpr = jax.make_jaxpr(first_step)(rows, rows, jnp.float32(0)).jaxpr
    used = {
        x for x in chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns)) if isinstance(x, Var)
    }
    _, params, value = jaxpr.invars
    if value in used:
        raise ValueError(
            "at the owner: tx asks for value, the loss, which an owner does not know: put it behind the "
            "owner, optax.chain(lioncub_jax.owner(...), optax.contrib.reduce_on_plateau())"
        )
    mixing = None if may_mix else _mixing_primitive(jaxpr, rows.shape)
    if mixing is not None:
        raise ValueError(f"at the owner: tx mixes elements, by {mixing}, {behind}")
    if params in used:
        raise ValueError(
            "at the owner: tx uses the parameters, which are not there. Weight decay goes behind the owner "
            "and before the learning rate: optax.chain(lioncub_jax.owner(...), "
            "optax.add_decayed_weights(...), optax.scale_by_learning_rate(...)); so does all else that "
            "needs parameters"
        )


def _mixing_primitive(jaxpr: Jaxpr, shape: tuple[int, ...]) -> str | None:
    """The primitive by which elements of arrays of that shape are mixed, if any is."""
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, [*jaxprs_in_params(eqn.params)]
        if shape not in _shapes(eqn.invars):
            continue
        if not inner and (_MIXING.match(name) or _shapes(eqn.outvars) != {shape}):
            return name
        for one in inner:
            # A loop over the rows takes one of them at a time.
            by_row = _shapes(one.invars) - {(), shape}
            mixing = name if by_row else _mixing_primitive(one, shape)
            if mixing is not None:
                return mixing
    return None


def _shapes(variables: Sequence[Any]) -> set[tuple[int, ...]]:
    return {getattr(x.aval, "shape", ()) for x in variables}
