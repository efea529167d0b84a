"""Kinds of the arguments and results of a loss: split over the workers, shared, or each worker's own.

An array does not tell: ``[1000]`` may be a thousand examples or a thousand class weights. So the caller
says it, an entry for each argument, as with ``in_axes`` of ``jax.vmap``.
"""

import enum
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh.axes import worker_index
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_of, product, shortened, spec_of

Loss: TypeAlias = Callable[..., Any]  # of users, with arguments that they choose
# A tree of `Kind`, or a prefix of one; None where an array says it itself.
Kinds: TypeAlias = Any
Rows: TypeAlias = list[jax.Array]  # leaves of a worker's batch that are split


class Kind(enum.Enum):
    """Kind of an array, for the workers.

    Attributes:
      SPLIT: each worker has its part of the first dimension.
      SHARED: all workers have the whole of it. Numbers are this unless the caller says otherwise; of those
        that a loss returns floating ones are then averaged over the workers, whole ones and bools added.
      PER_WORKER: each worker has its entry of a leading ``[workers]`` dimension.
      FOLDED_KEY: a random key, into which each worker folds its number. Typed keys are this unless the
        caller says otherwise; of a raw one, ``jax.random.PRNGKey``, the caller must say it.

    Example:
      >>> import lioncub_jax as lc
      >>> kinds = (lc.Kind.SPLIT, lc.Kind.SHARED)

    Source: this library.
    """

    SPLIT = enum.auto()
    SHARED = enum.auto()
    PER_WORKER = enum.auto()
    FOLDED_KEY = enum.auto()


_GIVE = (
    "lioncub_jax.Kind.SPLIT (cut over the workers), SHARED (whole to each) or "
    "PER_WORKER ([workers, ...])"
)


def is_raw_key(x: Any) -> bool:
    """True for what may be a key of ``jax.random.PRNGKey``, an array of words."""
    if getattr(x, "dtype", None) != np.uint32 or x.ndim != 1:
        return False  # in no time, for a step asks for each array of a batch
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return bool(x.shape == words.shape)


def default_kinds(args: tuple[Any, ...]) -> tuple[Kind | None, ...]:
    """Kinds of arguments where none are given: the first is split if no other has arrays but keys."""
    arrays = [any(jnp.ndim(x) and not is_raw_key(x) for x in jax.tree.leaves(arg)) for arg in args]
    return tuple(Kind.SPLIT if i == 0 and sum(arrays) == 1 else None for i in range(len(args)))


def classify_arguments(
    loss_fn: Loss, args: tuple[Any, ...], given: Kinds, workers: Workers
) -> tuple[list[Kind], list[P]]:
    """The `Kind` and the spec of each leaf of the arguments behind the parameters.

    Raises:
      TypeError: for kinds that are none, or that do not match the arguments.
      ValueError: for an array without a kind, raw random keys too, one that does not divide over the
        workers as its kind says, and a loss without a batch.
    """
    given = tuple(given)
    if len(given) != len(args):
        raise TypeError(
            f"in_kinds has {len(given)} entries for {len(args)}: give one for each argument behind the "
            "parameters"
        )
    names = [*inspect.signature(loss_fn).parameters]
    leaves = jax.tree_util.tree_leaves_with_path(args)
    kinds, specs, rows = [], [], []
    for (path, x), (kind, entry) in zip(leaves, _broadcast_kinds(given, args), strict=True):
        name = names[min(path[0].idx + 1, len(names) - 1)]
        where = f"argument {name!r}{jax.tree_util.keystr(path[1:])}"
        kind = _classify(where, x, kind)
        if kind is Kind.SPLIT:
            rows.append((where, jnp.shape(x)[0], entry))
        spec = shortened(spec_of(x), workers.inner)
        spec = spec_over_workers(kind, workers, P(*spec[1:]) if kind is Kind.PER_WORKER else spec)
        size = jnp.shape(x)[:1]
        if kind is Kind.SPLIT and size[0] % product(workers.mesh.shape, axes_of(spec[0])):
            raise ValueError(
                f"{where} has shape {jnp.shape(x)}: its first dimension is cut over {workers.count} "
                f"workers, {spec} in all, which do not divide it: drop or pad the last rows"
            )
        if kind is Kind.PER_WORKER and size != (workers.count,):
            raise ValueError(
                f"{where} has shape {jnp.shape(x)}: what is each worker's own has a leading dimension of "
                f"{workers.count}, one entry for each of them"
            )
        kinds.append(kind)
        specs.append(spec)
    check_rows(rows)
    if Kind.SPLIT not in kinds and Kind.PER_WORKER not in kinds:
        raise ValueError(
            "no array follows the parameters: give the batch as an argument of the loss, so that it is cut "
            "over the workers, and of lists np.asarray(...); one that the loss closes over would go whole "
            "to each of them"
        )
    return kinds, specs


class BatchLeaf(NamedTuple):
    """A leaf of a batch: its name, the array, its `Kind`, and the entry of the kinds that has it."""

    name: str
    array: Any
    kind: Kind
    entry: int


def classify_batch(batch: Any, given: Kinds) -> list[BatchLeaf]:
    """The leaves of a batch with their kinds; arrays are `SPLIT` by default.

    Raises:
      TypeError: for kinds that are none or do not match, `PER_WORKER`, and leaves that are no arrays.
      ValueError: as `classify_arguments`.
    """
    each = jax.tree_util.tree_leaves_with_path(batch)
    leaves = []
    for (path, x), (kind, entry) in zip(each, _broadcast_kinds(given, batch), strict=True):
        name = f"batch{jax.tree_util.keystr(path)}"
        if kind is Kind.PER_WORKER:
            raise TypeError(
                f"in_kinds of {name} is PER_WORKER: a batch has lioncub_jax.Kind.SPLIT (cut over the "
                "workers) and SHARED (whole to each); what each worker keeps of its own is "
                "the model_state of init_state"
            )
        if kind is None and jnp.ndim(checked_array(name, x)):
            kind = Kind.SPLIT
        leaves.append(BatchLeaf(name, x, _classify(name, x, kind), entry))
    if leaves and not any(leaf.kind is Kind.SPLIT for leaf in leaves):
        raise ValueError(
            f"nothing of the batch is cut over the workers, as {leaves[0].name} of shape "
            f"{jnp.shape(leaves[0].array)} shows: give arrays whose first dimension are rows, and of lists "
            "np.asarray(...)"
        )
    return leaves


def split_batch(
    batch: Any, kinds: Sequence[Kind], workers: Workers
) -> tuple[Rows, Callable[[Rows], Any]]:
    """The leaves of a worker's batch that are split, and a function that joins them with the others."""
    structure: Any
    leaves, structure = jax.tree.flatten(batch)
    rows, rest = [], []
    for x, kind in zip(leaves, kinds, strict=True):
        if kind is Kind.SPLIT:
            rows.append(x)
        else:
            rest.append(take_part(kind, workers, x))

    def join(rows: Rows) -> Any:
        split, whole = iter(rows), iter(rest)
        return structure.unflatten(next(split if k is Kind.SPLIT else whole) for k in kinds)

    return rows, join


def check_rows(each: Iterable[tuple[str, int, int]]) -> None:
    """Raises ``ValueError`` where leaves under one entry of the kinds have other numbers of rows.

    Args:
      each: the name, the number of rows, and the entry of each leaf that is split.
    """
    first: dict[int, tuple[str, int]] = {}
    for where, rows, entry in each:
        other, wanted = first.setdefault(entry, (where, rows))
        if rows != wanted:
            raise ValueError(
                f"{where} has {rows} rows and {other} {wanted}, and a batch is cut over the workers by "
                "rows: if one is no rows of the batch, such as class weights, say so in in_kinds of "
                "make_train_step or worker_value_and_grad, with lioncub_jax.Kind.SHARED (whole to each "
                "worker); if both are, with lioncub_jax.Kind.SPLIT for each"
            )


def checked_array(where: str, x: Any) -> Any:
    """An array or a number; ``TypeError`` for anything else, such as a list's text or a tensor."""
    known = isinstance(
        x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float, complex)
    )
    dtype = getattr(x, "dtype", None)
    if not known or not (
        dtype is None
        or jnp.issubdtype(dtype, np.number)
        or jnp.issubdtype(dtype, np.bool_)
        or is_key(x)
    ):
        of = f" of dtype {dtype}" if known else ""
        raise TypeError(
            f"{where} is {type(x).__module__}.{type(x).__qualname__}{of}: give an array of numbers, of "
            "tensors and columns of other libraries np.asarray(x)"
        )
    return x


def _classify(where: str, x: Any, kind: Kind | None) -> Kind:
    checked_array(where, x)
    if kind is Kind.FOLDED_KEY and not (is_key(x) or is_raw_key(x)):
        raise ValueError(f"{where} is FOLDED_KEY, and no random key: give jax.random.key(seed)")
    if kind is Kind.SHARED and is_raw_key(x):
        warnings.warn(
            f"{where} looks like a raw random key and is SHARED: all workers would draw the same, such as "
            "one dropout mask. Give lioncub_jax.Kind.FOLDED_KEY; a key for all as jax.random.key(seed), "
            "two numbers as int32",
            stacklevel=2,
        )
    if kind not in (None, Kind.SPLIT):
        return kind  # type: ignore[return-value]
    if jnp.ndim(x) == 0:
        return Kind.FOLDED_KEY if is_key(x) else Kind.SHARED
    if is_raw_key(x):
        raise ValueError(
            f"{where} looks like a raw random key, which all workers would share, or which would be cut "
            "like a batch: give a typed one, jax.random.key(seed), or its kind, "
            "lioncub_jax.Kind.FOLDED_KEY; two numbers of a batch as int32"
        )
    if kind is Kind.SPLIT:
        return kind
    raise ValueError(
        f"{where} is an array of shape {jnp.shape(x)}, and what it is to the workers is not given: give "
        f"worker_value_and_grad(in_kinds=...), for each argument behind the parameters {_GIVE}; or "
        "give all rows as one argument, such as the tuple (images, labels), which needs no kinds"
    )


def classify_outputs(aux: Any, given: Kinds) -> list[Kind]:
    """The `Kind` of each leaf of ``aux``: `PER_WORKER`, `SPLIT`, or `SHARED`.

    Raises:
      TypeError: for kinds that are none, or that do not match.
      ValueError: for an array without a kind.
    """
    kinds: list[Kind] = []
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    for (path, x), (kind, _) in zip(leaves, _broadcast_kinds(given, aux), strict=True):
        if jnp.ndim(x) and kind not in (Kind.SPLIT, Kind.PER_WORKER):
            unknown = "what becomes of it is not given" if kind is None else "SHARED is for numbers"
            raise ValueError(
                f"aux{jax.tree_util.keystr(path)} is an array of shape {jnp.shape(x)} on each worker, and "
                f"{unknown}: give worker_value_and_grad(aux_kinds=...), lioncub_jax.Kind.SPLIT to join "
                "them along the first dimension or PER_WORKER for [workers, ...], whose sum over the "
                "first axis is that over the workers; or return numbers"
            )
        is_number = kind is not Kind.PER_WORKER and not jnp.ndim(x)
        kinds.append(Kind.SHARED if kind is None or is_number else kind)
    return kinds


def warn_of_ratios(aux: Any, given: Kinds) -> None:
    """Warns of a floating number without a kind beside a whole one in ``aux``."""
    beside: dict[
        tuple[Any, ...], dict[type, str]
    ] = {}  # numbers without a kind, by what they are in
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    for (path, x), (kind, _) in zip(leaves, _broadcast_kinds(given, aux), strict=True):
        if jnp.ndim(x) or kind in (Kind.SHARED, Kind.PER_WORKER):
            continue
        for number in (jnp.inexact, jnp.integer):
            if jnp.issubdtype(jnp.result_type(x), number):
                beside.setdefault(path[:-1], {})[number] = f"aux{jax.tree_util.keystr(path)}"
    for each in beside.values():
        if len(each) == 2:
            warnings.warn(
                f"{each[jnp.inexact]} is a floating number, averaged over the workers, and beside it "
                f"{each[jnp.integer]} a whole one, added: a ratio of them is too small by the number of "
                "workers. For a ratio return the count as float32, or give aux_kinds="
                "lioncub_jax.Kind.PER_WORKER for both and add what each worker has; if you need no ratio, "
                "give these numbers aux_kinds=lioncub_jax.Kind.SHARED",
                stacklevel=2,
            )


def spec_over_workers(kind: Kind, workers: Workers, spec: P) -> P:
    """The spec over all workers of what lies as ``spec`` says in each of them."""
    if kind is Kind.PER_WORKER:
        spec = P(workers.axes, *spec)
    elif kind is Kind.SPLIT:
        first, *rest = spec or (None,)
        spec = P((*workers.axes, *axes_of(first)), *rest)
    return shortened(spec)


def take_part(kind: Kind, workers: Workers, x: Any) -> Any:
    """One worker's part of an array."""
    if kind is Kind.PER_WORKER:
        return x[0]
    return fold(workers, x) if kind is Kind.FOLDED_KEY else x


def fold(workers: Workers, x: jax.Array) -> jax.Array:
    """Gives each worker random keys of its own; a raw one stays raw."""
    fold_in = jnp.vectorize(jax.random.fold_in) if is_key(x) else jax.random.fold_in
    return fold_in(x, worker_index(workers.axes))


def _broadcast_kinds(given: Kinds, tree: Any) -> list[tuple[Kind | None, int]]:
    """For each leaf of a tree its kind or None, and the number of the entry of ``given`` that has it.

    Entries are for leaves, or for whole parts of the tree.
    """
    structure: Any
    entries, structure = jax.tree.flatten(given, is_leaf=lambda x: x is None)
    for kind in entries:
        if kind is not None and not isinstance(kind, Kind):
            raise TypeError(f"{kind!r} is no kind: give {_GIVE}, or None for a number or key")
    try:
        each = jax.tree.broadcast(structure.unflatten(range(len(entries))), tree)
    except ValueError as error:
        raise TypeError(
            f"kinds {given} do not match {jax.tree.structure(tree)}: give one for each leaf of it, or for "
            "a whole part"
        ) from error
    return [(entries[i], i) for i in jax.tree.leaves(each)]
