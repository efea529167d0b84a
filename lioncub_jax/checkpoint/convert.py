"""A training state as leaves that any program can read, and back on any mesh, with any number of workers.

Leaves know neither a mesh nor a bucket: parameters are whole, what each worker has of its own is
``[workers, *shape]``, and what owners hold has the shapes of the parameters. State classes declare who
holds their fields (``holders``, see `Holder`), a ``Flat`` has its bucket, and shardings say the rest.
"""

import functools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path
from orbax.checkpoint.tree import from_flat_dict

from lioncub_jax.checkpoint.rows import Rows, spread
from lioncub_jax.exchange.bits import merge_over_workers
from lioncub_jax.exchange.layout import Flat
from lioncub_jax.exchange.mapped import Holder
from lioncub_jax.exchange.matrices import Deal
from lioncub_jax.mesh.checksum import checksums, untyped
from lioncub_jax.mesh.hosts import is_key, key_words, put
from lioncub_jax.mesh.placement import Workers, check_alive
from lioncub_jax.mesh.specs import spec_of

Leaves = Mapping[str, Any]
# The field that flax's boxes have is no part of a name, so that a module and a plain tree read each other.
_BOXED = GetAttrKey("value")


class Damaged(ValueError):
    """A checkpoint that is not as it was written; the message names what is not."""


class Entry(NamedTuple):
    """An array of a state.

    Attributes:
      name: of the leaf that it is; of rows what comes before the names of the parameters.
      x: the array or its type, on a mesh that leaves all to XLA.
      holder: who holds a value of its own.
      rows: the rows that it consists of, or None.
    """

    name: str
    x: Any
    holder: Holder
    rows: Rows | None = None

    def leaves(self) -> dict[str, Any]:
        """Types of its leaves, if it has elements."""
        if not self.x.size:
            return {}
        if self.rows:
            return {f"{self.name}.{n}": leaf for n, leaf in self.rows.leaves(self.x.dtype).items()}
        return {self.name: jax.eval_shape(plain, self.x).update(sharding=self.x.sharding)}

    def split(self) -> dict[str, jax.Array]:
        """Its leaves."""
        if not self.x.size:
            return {}
        if self.rows:
            # XLA's CPU runs few collectives at once.
            parts = jax.block_until_ready(self.rows.split(spec_of(self.x), self.x))
            return {f"{self.name}.{n}": leaf for n, leaf in parts.items()}
        return {self.name: plain(self.x)}

    def join(self, leaves: Leaves) -> jax.Array:
        """Undoes `split`."""
        to = jax.ShapeDtypeStruct(self.x.shape, self.x.dtype, sharding=self.x.sharding)
        if not to.size:
            return jnp.zeros(to.shape, to.dtype, device=to.sharding)
        if self.rows:
            parts = {n: leaves[f"{self.name}.{n}"] for _, n, *_ in self.rows.params}
            return jax.block_until_ready(self.rows.join(to, parts))
        x = leaves[self.name]
        return x if x.dtype == to.dtype else _cast(to, x)


@functools.partial(jax.jit, static_argnums=0)
def _cast(to: Any, x: jax.Array) -> jax.Array:
    """Undoes `plain`."""
    x = jax.random.wrap_key_data(x, impl=to.dtype) if is_key(to) else x.astype(to.dtype)
    return lax.with_sharding_constraint(x, to.sharding)


def plain(x: jax.Array) -> jax.Array:
    """What orbax can hold: of random keys their words, of unsigned integers at least a byte."""
    if x.dtype.name in ("uint2", "uint4"):
        return x.astype(jnp.uint8)
    return jax.jit(key_words)(x) if is_key(x) else x


def portable(state: Any, workers: Workers) -> dict[str, Any]:
    """Makes a tree of global arrays with plain names, for any program that uses orbax, on any mesh.

    Parameters are whole, what each worker has of its own is ``[workers, *shape]``, and what owners hold has
    the shapes of the parameters. Random keys are the words that they consist of.

    Args:
      state: a ``StepState``, a ``TrainState`` of flax, or any tree of arrays, such as a dict with
        ``"params"`` and an ``nnx.Optimizer``. What lies on no mesh is the same everywhere.
      workers: the workers, on the mesh of the state.

    Returns:
      A tree of dicts, such as ``{"step": ..., "params": {"w": ...}, "opt_state": {"0": {"mu": ...}}}``,
      without what has no elements.

    Raises:
      ValueError: for two leaves of one name, a state that was donated, and for what is each worker's own
        and has no leading axis of workers.
      TypeError: for what is no array.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> workers = lc.Workers.one_per_device()
      >>> tx = lc.owner_adamw(1e-3, workers=workers)
      >>> state = lc.init_state(tx, {"w": jnp.ones((2, 3))}, workers)
      >>> lc.checkpoint.portable(state, workers)["opt_state"]["0"]["owner"]["inner"]["mu"]["w"].shape
      (2, 3)

    Source: this library; see `restore` for the way back.
    """
    return from_flat_dict(leaves_in(entries(state, workers)), sep=".")


def named(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, name: str = ""
) -> list[tuple[str, Any]]:
    """The leaves of a tree in their order, each with its name: keys, joined by dots.

    Such as ``opt_state.0.mu.kernel``.
    """
    found = []
    for path, leaf in tree_leaves_with_path(tree, is_leaf=is_leaf):
        keys = tuple(key for key in path if key != _BOXED)
        inner = keystr(keys, simple=True, separator=".")
        found.append((".".join(filter(None, (name, inner))), leaf))
    return found


def leaves_in(found: list[Entry]) -> dict[str, jax.Array]:
    """The leaves of arrays."""
    return {name: x for entry in found for name, x in entry.split().items()}


def types_in(found: list[Entry]) -> dict[str, tuple[Any, Entry]]:
    """The types of the leaves of arrays, each with its array."""
    return {name: (leaf, entry) for entry in found for name, leaf in entry.leaves().items()}


def entries(state: Any, workers: Workers) -> list[Entry]:
    """The arrays of a state in their order; raises for labels that lie, and names that clash."""
    check_alive("state", state)
    workers = _auto(workers)
    names = [name for name, _ in named(state)]
    inside = {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}
    for name, times in Counter(names).items():
        if name in inside or times > 1 or "" in name.split("."):
            raise ValueError(
                f"two leaves of the state are called {name}, or one is called as a part of the other: "
                "orbax would write one over the other. A key is empty or holds a dot: give another"
            )
    placed = [_placed(f"state.{name}", x, workers) for name, x in named(state)]
    return list(_entries(jax.tree.unflatten(jax.tree.structure(state), placed), workers))


def _auto(workers: Workers) -> Workers:
    """The workers, on a mesh that leaves all to XLA."""
    return Workers(untyped(workers.mesh), workers.axis, workers.group)


def _placed(name: str, x: Any, workers: Workers) -> Any:
    """An array, or its type, on the mesh; what lies on none goes to each device."""
    to = NamedSharding(workers.mesh, getattr(getattr(x, "sharding", None), "spec", P()))
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=to)
    if not isinstance(x, jax.Array):
        host = np.asarray(x)
        x = host.astype(jax.dtypes.canonicalize_dtype(host.dtype)) if host.dtype != object else host
        if host.dtype.kind in "OSU" or (host.dtype.kind in "iu" and (x != host).any()):
            raise TypeError(
                f"{name} is {host!r}: a checkpoint holds arrays, and numbers that they hold (64 bits by "
                "jax_enable_x64): leave it out of the state, or give it as data"
            )
    return put(x, to)


def _entries(state: Any, workers: Workers) -> Iterator[Entry]:
    declared = dict(declared_in(state))
    params = dict(named(field_of(state, "params")))
    for name, x in named(state, lambda x: isinstance(x, Flat)):
        field = name
        while field and field not in declared:
            field = field.rpartition(".")[0]
        node, holder = declared.get(field, (None, None))
        if not isinstance(x, Flat) or holder is Holder.MEASURED:
            for at, y in named(x, name=name):
                yield _entry(at, y, holder, workers)
            continue
        found = of_each_worker(node)
        rows = rows_of(x, found, holder, params, workers)
        # Of unknown parameters rows are saved as they lie.
        deals = [y.bucket for _, y in found if isinstance(y, Flat) and isinstance(y.bucket, Deal)]
        where = repr((workers, x.bucket, *deals)).encode()
        prefix = field if rows else f"{name}.rows-{zlib.crc32(where)}"
        for at, y in named(x.value):
            full = f"{prefix}.{at}".strip(".")
            if y.ndim and rows:
                yield Entry(full, y, holder or Holder.ALL, rows.of(at))
            else:  # a counter is the same in all buckets
                yield _entry(full, y, holder if y.ndim else Holder.ALL, workers)


def _entry(name: str, x: Any, holder: Holder | None, workers: Workers) -> Entry:
    stacked = workers.stacks(spec_of(x))
    if re.search(r"\.(mu|error|owner)\.\d+\.value\b", name):
        raise ValueError(
            f"state.{name} holds slices of the parameters in a dict that does not say of which, as "
            "nnx.state(optimizer) does: give the optimizer itself, and all of the model, {'params': "
            "nnx.state(model, nnx.Param), 'rest': nnx.state(model, nnx.Not(nnx.Param)), 'optimizer': "
            "optimizer}"
        )
    if holder is Holder.WORKER and x.size and not stacked and workers.num_gradients > 1:
        # A false label, as of pmap's out_axes=None, which drops all values but one.
        raise ValueError(
            f"state.{name} has shape {x.shape} and is not cut over the workers, but each of "
            f"{workers.num_gradients} has its own, and a checkpoint would keep that of one. "
            f"{let_out(workers)}; what is [{workers.num_gradients}, ...] already goes where it belongs by "
            f"jax.device_put(x, NamedSharding(mesh, {P(workers.axes)}))"
        )
    return Entry(name, x, holder or (Holder.WORKER if stacked else Holder.ALL))


def let_out(workers: Workers) -> str:
    """How to let out of a map what differs between workers."""
    return (
        f"Let it out of jax.pmap with out_axes=0, or of jax.shard_map with out_specs={P(workers.axes)}, as "
        "[workers, ...]"
    )


def field_of(state: Any, name: str) -> Any:
    """A field or entry of a state; None without one."""
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def declared_in(node: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Holder]]]:
    """By their names the declared fields of states, with their state and their holder."""

    def declares(x: Any) -> bool:
        return x is not node and hasattr(x, "holders")

    if hasattr(node, "holders"):
        for field, holder in node.holders().items():
            yield f"{name}.{field}".strip("."), (node, holder)
    for at, inner in named(node, declares, name):
        if declares(inner):
            yield from declared_in(inner, at)


def of_each_worker(node: Any) -> list[tuple[str, Any]]:
    """What each worker has, which says what rows are of: by its names, or as `Flat` by shared buckets."""
    fields = [getattr(node, f) for f, h in node.holders().items() if h is not Holder.OWNER]
    each = [named(x, lambda x: x is None or isinstance(x, Flat)) for x in fields]
    return max(each, key=len, default=[])


def rows_of(
    flat: Flat, found: list[tuple[str, Any]], holder: Any, params: Leaves, workers: Workers
) -> Rows | None:
    """How a bucket of a state lies; None where the parameters in it are unknown."""
    shared = [x.bucket for _, x in found if isinstance(x, Flat)]
    two_levels = any(x.group if isinstance(x, Deal) else True for x in shared)
    if two_levels != (workers.group is not None):
        raise ValueError(
            f"the state is of {'two levels' if two_levels else 'one level'}, and the workers have "
            f"group={workers.group!r}: give workers= as to the optimizer"
        )
    if shared and sum(len(x.segments) for x in shared) != sum(x.size > 0 for x in params.values()):
        return None  # of some parameters, and a bucket does not say of which
    own, of = holder is Holder.WORKER, [*params]
    if not shared and len(found) != len(params):
        of = [name for name, _ in found]
    cuts = tuple((s.leaf, shared[s.leaf]) for s in flat.bucket.segments if shared and not own)
    leaves = []
    for s in [s for _, x in cuts or [(0, flat.bucket)] for s in x.segments]:
        param = params.get(of[s.leaf]) if s.leaf < len(of) else None
        spec = spec_of(param)
        if param is None or NamedSharding(workers.mesh, spec).shard_shape(param.shape) != s.shape:
            return None
        leaves.append((s.leaf, of[s.leaf], param.shape, spec))
    return Rows(flat.bucket, cuts, tuple(leaves), own, workers)


# --- Back


def restored(
    like: Any,
    workers: Workers,
    saved: Leaves,
    read: Callable[[Leaves], dict[str, jax.Array]],
    sums: Leaves | None = None,
) -> Any:
    """A state of leaves that were saved.

    Args:
      like: a state of the kind that is wanted, of arrays or of types.
      workers: the workers, on its mesh.
      saved: types of all leaves, by their names.
      read: reads some to where it is told to, with a first dimension that may be longer than theirs.
      sums: checksums of the leaves.

    Raises:
      ValueError: for leaves of another model or optimizer; `Damaged` for another checksum.
    """
    found, workers = entries(like, workers), _auto(workers)
    wanted = types_in(found)
    measured = tuple(f"{n}." for n, (_, h) in declared_in(like) if h is Holder.MEASURED)
    _check_same_model(saved, wanted, measured, workers.num_gradients)
    places = {}
    for name in saved.keys() & wanted.keys():
        leaf, entry = wanted[name]
        places[name] = saved[name].update(sharding=leaf.sharding)
        if entry.rows or leaf.shape != saved[name].shape:
            places[name] = spread(places[name], workers)
    leaves = read(places)
    rows = {name: saved[name].shape[0] for name, x in leaves.items() if x.ndim}
    if sums:
        for name, words in checksums(leaves, rows)()[0].items():
            if (words, leaves[name].dtype) != (sums[name], saved[name].dtype):
                raise Damaged(f"{name} is not as it was written")
    for name, (leaf, entry) in wanted.items():
        if name not in leaves:  # not measured
            leaves[name] = jnp.full(leaf.shape, -1, leaf.dtype, device=leaf.sharding)
        elif not leaf.shape == saved[name].shape == leaves[name].shape:
            key = entry.x.dtype if is_key(entry.x) else None
            x = _resized(leaf, rows[name], key, leaves[name])
            leaves[name] = jax.block_until_ready(x)  # XLA's CPU runs few collectives at once
    return joined(like, found, leaves)


def joined(like: Any, found: list[Entry], leaves: Leaves) -> Any:
    """A state like this one, of whole leaves."""
    arrays, names = [], Counter(entry.name for entry in found if not entry.rows)
    for old, entry in zip(jax.tree.leaves(like), found, strict=True):
        lies, x = getattr(old, "sharding", None), entry.join(leaves)
        if names[entry.name] > 1:  # a step that donates its state takes no array twice
            x = jnp.copy(x)
        arrays.append(jax.device_put(x, lies if isinstance(lies, NamedSharding) else x.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _check_same_model(saved: Leaves, wanted: Leaves, measured: tuple[str, ...], count: int) -> None:
    """Raises ``ValueError`` if saved leaves are not those that are wanted, mesh and workers aside."""
    odd = []
    for name in {**wanted, **saved}:
        old, (new, entry) = saved.get(name), wanted.get(name, (None, None))
        if None in (old, new) and name.startswith(measured):
            continue  # the next measurement replaces it
        # Over one worker it may not show that an array has an axis of workers.
        one = count == 1 and not name.startswith("params.") and np.shape(new)[:1] == (1,)
        skip = one or bool(entry and entry.holder is Holder.WORKER)
        dtype = not (entry and entry.rows)  # a bucket has the widest dtype of its leaves
        in_it, asked = (
            None if x is None else f"{str(x.dtype) * dtype}{list(x.shape[skip:])}"
            for x in (old, new)
        )
        if in_it != asked:
            odd.append(f"{name} is {in_it} in it, wanted {asked}")
    if odd:
        odd.sort(key=lambda text: not text.startswith("params"))  # the rest follows from them
        raise ValueError(
            f"the checkpoint is of another model, optimizer or layout: {'; '.join(odd[:4])} ({len(odd)} in "
            "all). Restore with the model and the optimizer it was saved with, and what has rows- in its "
            "name on as many workers, groups and shards; lc.checkpoint.carry_over takes moments to another "
            "optimizer"
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _resized(to: Any, rows: int, key: Any, x: jax.Array) -> jax.Array:
    """The first rows of a leaf, ``[workers, ...]``, for another number of workers: each gets the mean.

    So no error of feedback is lost with its worker. Survivors keep their random keys.
    """
    x, count = x[:rows], to.shape[0]
    if key:  # newcomers fold their index into one of those who were there
        index = jnp.arange(count)
        keys = jax.random.wrap_key_data(x, impl=key)[index % rows].reshape(count, -1)
        new = jax.random.key_data(jax.vmap(jax.vmap(jax.random.fold_in, (0, None)))(keys, index))
        new = jnp.concatenate([x[:count], new.reshape(-1, *x.shape[1:])[rows:]])
    elif count == rows:
        new = x
    else:
        new = jnp.broadcast_to(merge_over_workers(x), to.shape).astype(x.dtype)
    return lax.with_sharding_constraint(new, to.sharding)
