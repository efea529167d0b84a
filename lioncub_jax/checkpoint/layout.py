"""The layout of a state: how each of its arrays lies on the mesh, and which leaves it holds.

A layout is read from the state itself and is never saved. State classes declare the holders of their fields
(``holders``, see `Holder`), a ``Flat`` has its bucket, and shardings say the rest.
"""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from lioncub_jax.exchange.holder import Holder
from lioncub_jax.exchange.layout import BucketLayout, Flat
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.hosts import is_key, key_words
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_in, cuts_of, product, shard_shape, spec_of

PER_WORKER = {Holder.WORKER, Holder.FEEDBACK}  # arrays with a leading axis of workers
IN_ROWS = "rows"
# Of buckets that ``nnx.state`` made dicts of: they say no longer how they lie.
_LOST_BUCKET = re.compile(r"(.*)\['(?:mu|error|owner)'\]\[\d+\]\['value'\]")


class ArrayInfo(NamedTuple):
    """The type of an array, in a checkpoint or in training.

    Attributes:
      shape: of random keys, that of their words.
      dtype: of random keys ``key<...>``.
      holder: who holds a value of its own.
      packing: "" for a leaf; ``IN_ROWS`` for rows of a bucket in training; and for rows whose parameters
        are unknown, which are saved as they lie, a number that differs between layouts.
      sums: two checksums of what was saved.
    """

    shape: tuple[int, ...]
    dtype: str
    holder: Holder
    packing: str = ""
    sums: tuple[int, ...] | None = None

    @property
    def per_worker(self) -> bool:
        """True with a leading axis of workers."""
        return self.holder in PER_WORKER

    @property
    def is_key(self) -> bool:
        """True for random keys."""
        return self.dtype.startswith("key<")

    def abstract(self, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
        """The saved array without its values; of random keys their words."""
        dtype = jnp.uint32 if self.is_key else jnp.dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)


class Param(NamedTuple):
    """A parameter: its path below ``params``, its shape, and for each dimension the axes that cut it."""

    path: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]


class Rows(NamedTuple):
    """The parameters to which the rows of a bucket belong.

    Attributes:
      bucket: the rows.
      cuts: for an owner in two levels the buckets of the group; their slices are the leaves of ``bucket``.
      params: pairs of the index of a leaf and its parameter.
      group_size: devices of a worker in two levels; else 1.
      inner: the inner axes over which the leaves are cut, with their sizes.
    """

    bucket: BucketLayout
    cuts: tuple[BucketLayout, ...]
    params: tuple[tuple[int, Param], ...]
    group_size: int
    inner: tuple[tuple[str, int], ...]


class ArrayLayout(NamedTuple):
    """An array of a state.

    Attributes:
      path: its path in the state.
      info: its type, as it lies.
      num_workers: into how many parts the workers' axes cut its first dimension.
      name: the name of its leaf; for rows that of their field, which the paths of the leaves follow.
      rows: the parameters of its rows, or None for an array that is saved as it lies.
    """

    path: str
    info: ArrayInfo
    num_workers: int
    name: str
    rows: Rows | None


Layout = tuple[ArrayLayout, ...]  # of all arrays with elements; hashable


class _Declaration(NamedTuple):
    """The fields of an `ArrayLayout` that a state class declares."""

    holder: Holder
    name: str
    packing: str = ""
    rows: Rows | None = None


def paths_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Leaves by their paths."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def field_of(state: Any, name: str) -> tuple[str, Any]:
    """A field of a trainer's state, or an entry of a dict, with its path; ``("", None)`` without one."""
    if isinstance(state, Mapping):
        return (f"[{name!r}]", state[name]) if name in state else ("", None)
    return (f".{name}", getattr(state, name)) if hasattr(state, name) else ("", None)


def layout_of(state: Any, workers: Workers) -> Layout:
    """The layout of a trainer's state of arrays, or of ``jax.ShapeDtypeStruct`` with shardings.

    Raises:
      ValueError: for a worker's own array without an axis of workers, a state of other levels than
        ``workers``, and buckets that lost their classes.
    """
    arrays = paths_of(state)
    for path in arrays:
        if lost := _LOST_BUCKET.match(path):
            raise ValueError(
                f"state{lost[1]} holds slices of the parameters in a dict that does not say of which, as "
                "nnx.state(optimizer) does: give the optimizer itself, and all of the model, {'params': "
                "nnx.state(model, nnx.Param), 'rest': nnx.state(model, nnx.Not(nnx.Param)), 'optimizer': "
                "optimizer}"
            )
    declared = _declarations(state, workers)
    layout = []
    for path, x in arrays.items():
        if not x.size:
            continue
        spec = spec_of(x)
        stacked = workers.stacks(spec)
        default = _Declaration(Holder.WORKER if stacked else Holder.ALL, path)
        this = declared.get(path, default)
        if this.holder in PER_WORKER and not stacked and workers.count > 1:
            # A false label, as of pmap's out_axes=None, which drops all values but one.
            spec, count = P(workers.axes), workers.count
            raise ValueError(
                f"state{path} has shape {x.shape} and is not cut over the workers, but each of {count} has "
                "its own, and a checkpoint would keep that of one. Let it out of jax.pmap with out_axes=0, "
                f"or of jax.shard_map with out_specs={spec}, as [{count}, ...]; what is [{count}, ...] "
                f"already goes where it belongs by jax.device_put(x, NamedSharding(mesh, {spec}))"
            )
        shape = jax.eval_shape(key_words, x).shape if is_key(x) else x.shape
        over_workers = {*axes_in(P(*spec[:1]))} & {*axes.names(workers.axis)}
        num_workers = product(workers.mesh.shape, over_workers)
        info = ArrayInfo(shape, str(x.dtype), this.holder, this.packing)
        layout.append(ArrayLayout(path, info, num_workers, this.name, this.rows))
    return tuple(layout)


def _declarations(state: Any, workers: Workers) -> dict[str, _Declaration]:
    """Declarations of all state classes, by the paths of arrays."""
    params = {
        path: Param(path, x.shape, tuple(cuts_of(tuple(spec_of(x)), len(x.shape))))
        for path, x in paths_of(field_of(state, "params")[1]).items()
    }
    declared: dict[str, _Declaration] = {}
    for path, node in _declaring_nodes("", state):
        declared |= _declarations_of_node(path, node, params, workers)
    return declared


def _declaring_nodes(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """States with a method ``holders``, by their paths, those inside of others too."""
    if hasattr(tree, "holders"):
        yield path, tree
    for key, x in paths_of(tree, lambda x: x is not tree and hasattr(x, "holders")).items():
        if hasattr(x, "holders"):
            yield from _declaring_nodes(path + key, x)


def _is_entry(x: Any) -> bool:
    """True for an entry of a field: one of each leaf of the parameters or of each bucket, be it None."""
    return x is None or isinstance(x, Flat)


def _declarations_of_node(
    path: str, node: Any, params: Mapping[str, Param], workers: Workers
) -> dict[str, _Declaration]:
    fields = {f: (paths_of(getattr(node, f), _is_entry), h) for f, h in node.holders().items()}
    # Entries of each worker say the leaves: by their paths, or by the buckets that a group shares.
    not_owned = [entries for entries, holder in fields.values() if holder is not Holder.OWNER]
    entries = max(not_owned, key=lambda x: (len(x), len(x.keys() & params.keys())), default={})
    cuts = tuple(x.bucket for x in entries.values() if isinstance(x, Flat))
    names = params if cuts or len(entries) == len(params) else entries
    by_index = {k: params[name] for k, name in enumerate(names) if name in params}
    declared: dict[str, _Declaration] = {}
    for field, (entries, holder) in fields.items():
        inside = cuts if holder is Holder.OWNER else ()
        for key, value in entries.items():
            packing, rows = "", None
            if isinstance(value, Flat) and holder is not Holder.MEASURED:
                two_levels = bool(holder in PER_WORKER or inside)
                if two_levels != (workers.group is not None):
                    raise ValueError(
                        f"state{path} is of {'two levels' if two_levels else 'one level'}, and the workers "
                        f"have group={workers.group!r}: give workers= as to the optimizer"
                    )
                rows = _rows(value.bucket, inside, by_index, workers)
                packing = IN_ROWS if rows else _packing_number(value.bucket, workers)
            for rest in paths_of(value):
                at = f"{path}.{field}{key}{rest}"
                name = f"{path}.{field}{rest.removeprefix('.value')}" if rows else at
                declared[at] = _Declaration(holder, name, packing, rows)
    return declared


def _packing_number(bucket: BucketLayout, workers: Workers) -> str:
    """A number that differs where the rows of a bucket lie otherwise."""
    where = tuple(workers.mesh.shape.items()), workers.axis, workers.group, bucket
    return str(zlib.crc32(repr(where).encode()))


def _rows(
    bucket: BucketLayout,
    cuts: tuple[BucketLayout, ...],
    params: Mapping[int, Param],
    workers: Workers,
) -> Rows | None:
    """The parameters of the rows of a bucket, or None where one is unknown."""
    sizes, leaves = workers.mesh.shape, {}
    for s in (s for cut in cuts or (bucket,) for s in cut.segments):
        param = params.get(s.leaf)
        if param is None or shard_shape(param.shape, param.cuts, sizes) != s.shape:
            return None
        leaves[s.leaf] = param
    group_size = product(sizes, axes.names(workers.group))
    inner = tuple((n, sizes[n]) for n in workers.inner if n in bucket.axes and sizes[n] > 1)
    return Rows(bucket, cuts, tuple(leaves.items()), group_size, inner)


# --- Saved and wanted arrays


def param_names(saved: Mapping[str, ArrayInfo]) -> dict[str, str]:
    """The names of the parameters of a state, by their paths below ``params``."""
    names = {}
    for name in saved:
        for field in (".params", "['params']"):
            path = name.removeprefix(field)
            if path != name and path[:1] in ("", ".", "["):
                names[path] = name
    return names


def check_same_model(
    source: str, saved: Mapping[str, ArrayInfo], wanted: Mapping[str, ArrayInfo]
) -> None:
    """Raises ``ValueError`` if saved leaves are not those that are wanted, mesh and workers aside."""
    problems = []
    for path in {**wanted, **saved}:
        old, new = saved.get(path), wanted.get(path)
        if old and new:
            if {old.packing, new.packing} - {"", IN_ROWS} and old.packing != new.packing:
                raise ValueError(
                    f"state{path} votes on some of the parameters only, and its slices do not say on "
                    "which, or they are not the field 'params' of the state: restore it with as many "
                    "workers, groups and shards as it was saved from"
                )
            skip = old.per_worker or new.per_worker  # over one worker it may not show
            cast = old.packing or new.packing  # a bucket has the widest dtype of its leaves
            if old.shape[skip:] != new.shape[skip:] or not (cast or old.dtype == new.dtype):
                in_it, asked = (f"{x.dtype}{list(x.shape[skip:])}" for x in (old, new))
                problems.append(f"state{path} is {in_it} in it, wanted {asked}")
        elif new and new.holder is not Holder.MEASURED:
            problems.append(f"it lacks state{path} of shape {new.shape[new.per_worker :]}")
        elif old and old.holder is not Holder.MEASURED:
            shape = old.shape[old.per_worker :]
            problems.append(f"it has state{path} of shape {shape}, which is not wanted")
    if not problems:
        return
    problems.sort(key=lambda text: "state.params" not in text)  # the rest follows from them
    more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
    optimizers = ".opt_state", ".local_state"
    of = "optimizer" if all(any(o in p for o in optimizers) for p in problems) else "model"
    other = "; lc.checkpoint.carry_over takes moments to another" if of == "optimizer" else ""
    raise ValueError(
        f"{source} is of another {of}: {'; '.join(problems[:4])}{more}. Restore with the model and "
        f"the optimizer it was saved with{other}"
    )
