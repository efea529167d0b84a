"""How a training state lies on its mesh, and the way from one such layout to another.

Between two layouts stands a form that knows no mesh: parameters whole, each worker's momentum and error
``[workers, *shape]``, an owner's momentum ``shape``. Slices and buckets are opened into it and cut anew
from it. What is each worker's own meets a rule where the number of workers changes.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lioncub_jax import wires
from lioncub_jax.bits import ROW
from lioncub_jax.exchange import CommunicateState
from lioncub_jax.layout import Bucket, Flat, Segment
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_of, cuts_of, product, shard_shape, spec_of
from lioncub_jax.sync import SyncState

Cuts = tuple[tuple[str, ...], ...]  # for each dimension, the axes that cut it
OWN = "each", "error", "model"  # kinds with a leading axis of workers
IN_BUCKETS = "slices", "owned"  # kinds that lie as buckets do


class Stored(NamedTuple):
    """One array of a state.

    Attributes:
      shape: without the words of a random key.
      dtype: by name; of a random key ``key<...>``.
      cuts: how it is cut over the mesh.
      kind: ``same`` on all workers; ``each`` worker's own; ``error`` feedback; ``model`` state; a group's
        ``slices``; a slice's owner's, ``owned``; ``drift``, a measurement.
    """

    shape: tuple[int, ...]
    dtype: str
    cuts: Cuts
    kind: str


class Vote(NamedTuple):
    """One ``CommunicateState`` in the state, or one ``SyncState`` whose owners keep something.

    Attributes:
      path: where it is.
      names: paths of its leaves inside the parameters; empty if they are not the parameters.
      cuts: buckets that a group shares, empty without a group.
      owned: buckets of which each worker owns a slice, empty if owners keep nothing.
    """

    path: str
    names: tuple[str, ...]
    cuts: tuple[Bucket, ...]
    owned: tuple[Bucket, ...]


class Layout(NamedTuple):
    """Everything that is needed to find a leaf in the arrays of a state."""

    sizes: dict[str, int]
    workers: tuple[str, ...]
    group: tuple[str, ...]
    arrays: dict[str, Stored]
    votes: tuple[Vote, ...]

    @property
    def number(self) -> int:
        """How many workers."""
        return product(self.sizes, self.workers)

    @property
    def parts(self) -> int:
        """How many devices of a group share a bucket; 1 without a group."""
        return product(self.sizes, self.group)

    def as_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        votes = [{**vote._asdict(), "cuts": _rows_of(vote.cuts), "owned": _rows_of(vote.owned)}
                 for vote in self.votes]  # fmt: skip
        arrays = {path: x._asdict() for path, x in self.arrays.items()}
        # Pairs, because JSON objects may be sorted and the order of a mesh's axes counts.
        return {
            **self._asdict(),
            "sizes": list(self.sizes.items()),
            "arrays": arrays,
            "votes": votes,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Layout":
        """Undoes ``as_json``."""
        arrays = {
            path: Stored(tuple(x["shape"]), x["dtype"], _tuples(x["cuts"]), x["kind"])
            for path, x in found["arrays"].items()
        }
        votes = [
            Vote(v["path"], tuple(v["names"]), _from_rows(v["cuts"]), _from_rows(v["owned"]))
            for v in found["votes"]
        ]
        sizes = dict(found["sizes"])
        return cls(sizes, tuple(found["workers"]), tuple(found["group"]), arrays, tuple(votes))


def _tuples(nested: Iterable[Iterable[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(inner) for inner in nested)


def _rows_of(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    return [{**bucket._asdict(), "dtype": str(np.dtype(bucket.dtype))} for bucket in buckets]


def _from_rows(rows: Any) -> tuple[Bucket, ...]:
    def segment(index: int, shape: Any, size: int, first_row: int, rows: int) -> Segment:
        return Segment(index, tuple(shape), size, first_row, rows)

    return tuple(
        Bucket(**{**row, "segments": tuple(segment(*s) for s in row["segments"]),
                  "dtype": jnp.dtype(row["dtype"]), "axes": tuple(row["axes"])})
        for row in rows
    )  # fmt: skip


# --- How a state lies


def paths_of(tree: Any) -> dict[str, Any]:
    """Leaves by their paths."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def layout_of(state: Any, workers: Workers) -> Layout:
    """How a ``TrainState`` lies: of arrays, or of ``jax.ShapeDtypeStruct`` with shardings."""
    params = {
        path.removeprefix(".params"): x
        for path, x in paths_of(state).items()
        if _is(path, ".params")
    }
    votes, syncs = _nodes(state, CommunicateState), _nodes(state, SyncState)
    names = wires.names(workers.axis_name), wires.names(workers.group_axis or ())
    found = Layout(dict(workers.mesh.shape), *names, {}, ())
    arrays = {
        path: Stored(x.shape, str(x.dtype), _cuts(x), _kind(path, x, votes, syncs, workers))
        for path, x in paths_of(state).items()
    }
    found = found._replace(arrays=arrays)
    told = [_vote(path, node, params, found) for path, node in votes.items()]
    told += [_sync(path, node, params, found) for path, node in syncs.items() if node.owner]
    return found._replace(votes=tuple(told))


def _nodes(state: Any, kind: type) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, kind))
    return {jax.tree_util.keystr(path): x for path, x in leaves if isinstance(x, kind)}


def _is(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", "[", ".")


def _cuts(x: Any) -> Cuts:
    return tuple(map(axes_of, spec_of(x)))


def _kind(path: str, x: Any, votes: Iterable[str], syncs: Iterable[str], workers: Workers) -> str:
    if _is(path, ".model_state"):
        return "model"
    if any(_is(path, f"{sync}.drift") for sync in syncs):
        return "drift"
    if any(_is(path, f"{sync}.owner") for sync in syncs):
        return "owned"
    node = next((vote for vote in votes if _is(path, vote)), None)
    rest = "" if node is None else path.removeprefix(node)
    if _is(rest, ".owner"):
        return "owned"
    own = _is(rest, ".mu") or _is(rest, ".error")
    if own and workers.group_axis is not None:
        return "slices"
    if own:
        return "error" if _is(rest, ".error") else "each"
    return "each" if workers.stacks(spec_of(x)) else "same"


def _vote(path: str, node: CommunicateState, params: dict[str, Any], layout: Layout) -> Vote:
    _check_levels(path, node, layout)
    return _named(path, node.error, node.owner, params, layout)


def _sync(path: str, node: SyncState, params: dict[str, Any], layout: Layout) -> Vote:
    return _named(path, node.drift, node.owner, params, layout)


def _named(path: str, kept: Any, owner: Any, params: dict[str, Any], layout: Layout) -> Vote:
    """Of the buckets of owners, by a tree with an entry for each leaf, or each slice, that they cut."""
    if layout.group:
        names = list(params)
        cuts = tuple(flat.bucket for flat in kept)
    else:
        leaves = jax.tree_util.tree_leaves_with_path(kept, is_leaf=lambda x: x is None)
        names, cuts = [jax.tree_util.keystr(inner) for inner, _ in leaves], ()
    owned = tuple(flat.bucket for flat in owner)
    segments = [s for bucket in (cuts if layout.group else owned) for s in bucket.segments]
    fits = all(
        s.leaf < len(names) and names[s.leaf] in params
        and s.shape == _local_shape(layout, ".params" + names[s.leaf])
        for s in segments
    )  # fmt: skip
    return Vote(path, tuple(names) if fits else (), cuts, owned)


def _check_levels(path: str, node: CommunicateState, layout: Layout) -> None:
    kept = jax.tree.leaves((node.mu, node.error), is_leaf=lambda x: isinstance(x, Flat))
    two = any(isinstance(x, Flat) for x in kept)
    if two != bool(layout.group):
        raise ValueError(
            f"state{path} is of {'two levels' if two else 'one level'}, and group_axis is "
            f"{layout.group or None}: give axis_name and group_axis as to the optimizer"
        )


def _local_shape(layout: Layout, path: str) -> tuple[int, ...]:
    stored = layout.arrays[path]
    return shard_shape(stored.shape, stored.cuts, layout.sizes)


# --- The form between two layouts


def opened(layout: Layout, arrays: dict[str, Any]) -> dict[str, jax.Array]:
    """Arrays of a layout, by path, in the form that knows no mesh, by name; traced.

    Raises:
      ValueError: for votes on some of the parameters only, whose slices nobody can name.
    """
    out = {path: x for path, x in arrays.items() if layout.arrays[path].kind not in IN_BUCKETS}
    for vote in layout.votes:
        for field in ("mu", "error"):
            for k, bucket in enumerate(vote.cuts):
                value = arrays.get(f"{vote.path}.{field}[{k}].value")
                if value is not None:
                    shards = _shards(layout, bucket, value.shape)
                    rows = value.reshape(layout.number, layout.parts, *shards)
                    leaves = _leaves(layout, vote, bucket, jnp.moveaxis(rows, 1, 2))
                    out |= {f"{vote.path}.{field}{name}": x for name, x in leaves.items()}
        out |= _from_owners(layout, vote, arrays)
    return out


def _shards(layout: Layout, bucket: Bucket, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """``(inner shards, rows of each, 64)`` in what one device or all shards of one worker hold."""
    shards = product(layout.sizes, _inner(layout, bucket))
    return shards, shape[-2] * shape[-1] // ROW // shards, ROW


def _inner(layout: Layout, bucket: Bucket) -> tuple[str, ...]:
    others = {*layout.workers, *layout.group}
    return tuple(axis for axis in layout.sizes if axis in bucket.axes and axis not in others)


def _leaves(layout: Layout, vote: Vote, bucket: Bucket, rows: jax.Array) -> dict[str, jax.Array]:
    """``[*batch, inner shards, parts, rows, 64]`` as whole leaves ``[*batch, *shape]``."""
    _check_named(vote)
    rows = rows.reshape(*rows.shape[:-3], -1, ROW)
    out = {}
    for s in bucket.segments:
        own = rows[..., s.first_row : s.first_row + s.rows, :]
        flat = own.reshape(*own.shape[:-2], -1)[..., : s.size]
        shards = flat.reshape(*flat.shape[:-1], *s.shape)
        name = vote.names[s.leaf]
        out[name] = _joined(layout, ".params" + name, _inner(layout, bucket), shards)
    return out


def _check_named(vote: Vote) -> None:
    if not vote.names:
        raise ValueError(
            f"state{vote.path} votes on some of the parameters only, and its slices do not say on which: "
            "restore it with as many workers, groups and shards as it was saved from"
        )


def _order(layout: Layout, path: str, inner: Sequence[str], batch: int) -> tuple[Any, Any]:
    """Sizes of a leaf's shards, a dimension for each axis, and the order that joins them."""
    stored = layout.arrays[path]
    order = list(range(batch))
    for d, axes in enumerate(cuts_of(stored.cuts, len(stored.shape))):
        order += [*(batch + inner.index(a) for a in axes), batch + len(inner) + d]
    return [*(layout.sizes[a] for a in inner), *_local_shape(layout, path)], order


def _joined(layout: Layout, path: str, inner: Sequence[str], shards: jax.Array) -> jax.Array:
    """``[*batch, inner shards, *local shape]`` to ``[*batch, *shape]``."""
    shape = layout.arrays[path].shape
    batch = shards.shape[: shards.ndim - 1 - len(shape)]
    sizes, order = _order(layout, path, inner, len(batch))
    return shards.reshape(*batch, *sizes).transpose(order).reshape(*batch, *shape)


def _cut(layout: Layout, path: str, inner: Sequence[str], whole: jax.Array) -> jax.Array:
    """Undoes ``_joined``."""
    batch = whole.shape[: whole.ndim - len(layout.arrays[path].shape)]
    sizes, order = _order(layout, path, inner, len(batch))
    split = [(*batch, *sizes)[at] for at in order]
    shards = whole.reshape(split).transpose(np.argsort(order))
    return shards.reshape(*batch, -1, *_local_shape(layout, path))


def _from_owners(layout: Layout, vote: Vote, arrays: dict[str, Any]) -> dict[str, Any]:
    """The owners' states as whole leaves; counters, which are alike, as they are."""
    out: dict[str, Any] = {}
    for k, bucket in enumerate(vote.owned):
        for rest, value in _under(arrays, f"{vote.path}.owner[{k}].value").items():
            prefix = f"{vote.path}.owner{rest}"
            if value.ndim == 0:
                out[prefix] = value
                continue
            shards = _shards(layout, bucket, value.shape)
            rows = value.reshape(-1, layout.parts, *shards).transpose(2, 1, 0, 3, 4)
            rows = rows.reshape(shards[0], layout.parts, -1, ROW)
            for cut, own in _pieces(layout, vote, bucket, rows):
                leaves = _leaves(layout, vote, cut, own)
                out |= {f"{prefix}{name}": x for name, x in leaves.items()}
    return out


def _pieces(layout: Layout, vote: Vote, bucket: Bucket, rows: jax.Array) -> Iterable[Any]:
    """An owner's bucket is made of leaves, or of slices of buckets that are made of leaves."""
    if not layout.group:
        return [(bucket, rows)]
    cuts = [(vote.cuts[s.leaf], s.first_row) for s in bucket.segments]
    return [(cut, rows[..., first : first + cut.chunk, :]) for cut, first in cuts]


def _under(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {path.removeprefix(prefix): x for path, x in arrays.items() if _is(path, prefix)}


def laid_out(layout: Layout, whole: dict[str, Any], paths: Iterable[str]) -> dict[str, jax.Array]:
    """Undoes ``opened`` for the arrays of a layout that are asked for; traced."""
    wanted = {path: layout.arrays[path] for path in paths}
    out = {path: whole[path] for path, x in wanted.items() if x.kind not in IN_BUCKETS}
    for vote in layout.votes:
        for k, bucket in enumerate(vote.cuts):
            for field in ("mu", "error"):
                if (path := f"{vote.path}.{field}[{k}].value") in wanted:
                    rows = _rows(layout, vote, bucket, f"{vote.path}.{field}", whole)
                    cut = _in_parts(rows, layout.parts, bucket.chunk)
                    out[path] = jnp.moveaxis(cut, 1, 2).reshape(wanted[path].shape)
        for k, bucket in enumerate(vote.owned):
            prefix = f"{vote.path}.owner[{k}].value"
            for rest, x in _under(wanted, prefix).items():
                name = f"{vote.path}.owner{rest}"
                cut = _for_owners(layout, vote, bucket, name, whole, x) if x.shape else whole[name]
                out[prefix + rest] = cut.reshape(x.shape)
    return out


def _rows(
    layout: Layout, vote: Vote, bucket: Bucket, prefix: str, whole: dict[str, Any]
) -> jax.Array:
    """Whole leaves as ``[*batch, inner shards, rows, 64]``."""
    _check_named(vote)
    inner, rows = _inner(layout, bucket), []
    for s in bucket.segments:
        name = vote.names[s.leaf]
        shards = _cut(layout, ".params" + name, inner, whole[prefix + name])
        flat = shards.reshape(*shards.shape[: shards.ndim - len(s.shape)], -1)
        rows.append(_padded(flat, s.rows * ROW, -1).reshape(*flat.shape[:-1], s.rows, ROW))
    return jnp.concatenate(rows, axis=-2)


def _in_parts(rows: jax.Array, parts: int, each: int) -> jax.Array:
    rows = _padded(rows, parts * each, -2)
    return rows.reshape(*rows.shape[:-2], parts, each, ROW)


def _padded(x: jax.Array, size: int, axis: int) -> jax.Array:
    short = [(0, 0)] * x.ndim
    short[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, short)


def _for_owners(
    layout: Layout, vote: Vote, bucket: Bucket, prefix: str, whole: dict[str, Any], target: Stored
) -> jax.Array:
    """One array of the owners' state, ``[owners, parts, inner shards, rows of each, 64]``."""
    if layout.group:
        cuts = [vote.cuts[s.leaf] for s in bucket.segments]
        slices = [
            _in_parts(_rows(layout, vote, cut, prefix, whole), layout.parts, cut.chunk)
            for cut in cuts
        ]
        pieces = [_padded(x, s.rows, -2) for x, s in zip(slices, bucket.segments, strict=True)]
        rows = jnp.concatenate(pieces, axis=-2)
    else:
        rows = _rows(layout, vote, bucket, prefix, whole)[:, None]
    each = _shards(layout, bucket, target.shape)[1]
    owners = math.prod(target.shape[:-2]) // layout.parts
    return _in_parts(rows, owners, each).transpose(2, 1, 0, 3, 4)


# --- From one layout to another


def moved(old: Layout, new: Layout) -> list[str]:
    """Paths of the new layout whose arrays are not simply those of the old one."""
    same = alike(old, new)

    def stays(path: str, x: Stored) -> bool:
        before = old.arrays.get(path)
        in_buckets = x.kind in IN_BUCKETS
        return before is not None and before.shape == x.shape and (same or not in_buckets)

    return [path for path, x in new.arrays.items() if 0 not in x.shape and not stays(path, x)]


def alike(old: Layout, new: Layout) -> bool:
    """Whether buckets and slices of one layout are those of the other."""
    return _mesh_of(old) == _mesh_of(new) and old.votes == new.votes


def _mesh_of(layout: Layout) -> Any:
    cuts = [x.cuts for path, x in layout.arrays.items() if _is(path, ".params")]
    return list(layout.sizes.items()), layout.workers, layout.group, cuts


def names_of(layout: Layout) -> dict[str, Stored]:
    """What a layout holds in the form that knows no mesh; arrays without elements left out."""
    arrays = {
        path: jax.ShapeDtypeStruct(x.shape, jnp.float32)
        for path, x in layout.arrays.items()
        if 0 not in x.shape
    }
    kinds = {path: x.kind for path, x in layout.arrays.items() if x.kind not in IN_BUCKETS}
    for vote in layout.votes:
        if layout.group:
            kinds |= {f"{vote.path}.mu{name}": "each" for name in vote.names}
            kinds |= {f"{vote.path}.error{name}": "error" for name in vote.names}
    found = jax.eval_shape(lambda arrays: opened(layout, arrays), arrays)

    def dtype(name: str) -> str:
        return layout.arrays[name].dtype if name in layout.arrays else ""

    return {n: Stored(x.shape, dtype(n), (), kinds.get(n, "same")) for n, x in found.items()}
