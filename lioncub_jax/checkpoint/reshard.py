"""How a training state lies on its mesh, and the way from one such layout to another.

Between two layouts stands a form that knows no mesh: parameters whole, each worker's momentum and error
``[workers, *shape]``, an owner's momentum ``shape``. Slices and buckets are opened into it and cut anew
from it. What is each worker's own meets a rule where the number of workers changes. Whose a field is,
state classes say themselves (``holders``, see `layout.Holder`).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lioncub_jax import wires
from lioncub_jax.bits import ROW
from lioncub_jax.layout import Bucket, Flat, Holder, Segment, in_row_order, in_shape
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_of, cuts_of, product, shard_shape, spec_of

Cuts = tuple[tuple[str, ...], ...]  # for each dimension, the axes that cut it
_LOST_BUCKET = re.compile(r"(.*)\['(?:mu|error|owner)'\]\[\d+\]\['value'\]")
OWN = {Holder.WORKER, Holder.FEEDBACK}  # arrays with a leading axis of workers


class Place(NamedTuple):
    """Where an array lies that is rows of a bucket.

    Attributes:
      sliced: which `Sliced` of the layout it belongs to.
      bucket: which bucket of it, of ``owned`` for an owner's array, else of ``cuts``.
      name: what its leaves are called in the form that knows no mesh, before their own paths.
    """

    sliced: int
    bucket: int
    name: str


class Stored(NamedTuple):
    """One array of a state.

    Attributes:
      shape: without the words of a random key.
      dtype: by name; of a random key ``key<...>``.
      cuts: how it is cut over the mesh.
      holder: whose it is.
      place: where its rows lie, or None for an array that is a leaf.
    """

    shape: tuple[int, ...]
    dtype: str
    cuts: Cuts
    holder: Holder
    place: Place | None = None


class Sliced(NamedTuple):
    """A transform's state that holds slices of buckets.

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
    sliced: tuple[Sliced, ...]
    params: str = ".params"  # the path of the parameters

    @property
    def number(self) -> int:
        """How many workers."""
        return product(self.sizes, self.workers)

    @property
    def parts(self) -> int:
        """How many devices of a group share a bucket; 1 without a group."""
        return product(self.sizes, self.group)

    def bucket(self, stored: Stored) -> tuple[Sliced, Bucket]:
        """Of an array with a place: the state that it belongs to, and its bucket."""
        assert stored.place is not None
        sliced = self.sliced[stored.place.sliced]
        buckets = sliced.owned if stored.holder is Holder.OWNER else sliced.cuts
        return sliced, buckets[stored.place.bucket]

    def as_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        sliced = [{**x._asdict(), "cuts": _rows_of(x.cuts), "owned": _rows_of(x.owned)}
                  for x in self.sliced]  # fmt: skip
        arrays = {p: {**x._asdict(), "holder": x.holder.value} for p, x in self.arrays.items()}
        # Pairs, because JSON objects may be sorted and the order of a mesh's axes counts.
        return {
            **self._asdict(),
            "sizes": list(self.sizes.items()),
            "arrays": arrays,
            "sliced": sliced,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Layout":
        """Undoes ``as_json``."""
        arrays = {
            path: Stored(
                tuple(x["shape"]),
                x["dtype"],
                _tuples(x["cuts"]),
                Holder(x["holder"]),
                Place(*x["place"]) if x["place"] else None,
            )
            for path, x in found["arrays"].items()
        }
        sliced = [
            Sliced(v["path"], tuple(v["names"]), _from_rows(v["cuts"]), _from_rows(v["owned"]))
            for v in found["sliced"]
        ]
        sizes = dict(found["sizes"])
        names = tuple(found["workers"]), tuple(found["group"])
        return cls(sizes, *names, arrays, tuple(sliced), found.get("params", cls.params))


def _tuples(nested: Iterable[Iterable[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(inner) for inner in nested)


def _rows_of(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    return [{**bucket._asdict(), "dtype": str(np.dtype(bucket.dtype))} for bucket in buckets]


def _from_rows(rows: Any) -> tuple[Bucket, ...]:
    def segment(index: int, shape: Any, *rest: Any) -> Segment:
        return Segment(index, tuple(shape), *rest)

    return tuple(
        Bucket(**{**row, "segments": tuple(segment(*s) for s in row["segments"]),
                  "dtype": jnp.dtype(row["dtype"]), "axes": tuple(row["axes"])})
        for row in rows
    )  # fmt: skip


# --- How a state lies


def paths_of(tree: Any) -> dict[str, Any]:
    """Leaves by their paths."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def field_of(state: Any, name: str) -> tuple[str, Any]:
    """A field of a trainer's state, or an entry of a dict, with its path; ``("", None)`` without one."""
    if isinstance(state, Mapping):
        return (f"[{name!r}]", state[name]) if name in state else ("", None)
    return (f".{name}", getattr(state, name)) if hasattr(state, name) else ("", None)


def layout_of(state: Any, workers: Workers) -> Layout:
    """How a trainer's state lies: of arrays, or of ``jax.ShapeDtypeStruct`` with shardings."""
    names = wires.names(workers.axis_name), wires.names(workers.group_axis or ())
    nodes = dict(_nodes("", state))
    with_flats = [path for path, node in nodes.items() if any(map(_flats, _declared(node)))]
    known: dict[str, tuple[Holder, Place | None]] = {}
    for path, node in nodes.items():
        at = with_flats.index(path) if path in with_flats else -1
        for field, holder in node.holders().items():
            known |= _held(f"{path}.{field}", getattr(node, field), holder, at)

    def stored(path: str, x: Any) -> Stored:
        of_workers = Holder.WORKER if workers.stacks(spec_of(x)) else Holder.ALL
        cuts = tuple(map(axes_of, spec_of(x)))
        return Stored(x.shape, str(x.dtype), cuts, *known.get(path, (of_workers, None)))

    arrays = {path: stored(path, x) for path, x in paths_of(state).items()}
    _check_classes(arrays)
    prefix, tree = field_of(state, "params")
    found = Layout(dict(workers.mesh.shape), *names, arrays, (), prefix)
    for path, node in nodes.items():
        _check_levels(path, node, found)
    _check_own(found, workers)
    params = list(paths_of(tree))
    return found._replace(
        sliced=tuple(_sliced(path, nodes[path], params, found) for path in with_flats)
    )


def _nodes(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """States that say whose their fields are, by their paths, those inside of others too."""
    if hasattr(tree, "holders"):
        yield path, tree
    inner = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: x is not tree and hasattr(x, "holders")
    )
    for key, x in inner:
        if hasattr(x, "holders"):
            yield from _nodes(path + jax.tree_util.keystr(key), x)


def _declared(node: Any) -> list[Any]:
    return [getattr(node, field) for field in node.holders()]


def _flats(tree: Any) -> list[Flat]:
    return [x for _, x in _entries(tree) if isinstance(x, Flat)]


def _entries(tree: Any) -> list[tuple[str, Any]]:
    """What a field has for each leaf of the parameters, or for each bucket, be it None."""
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: x is None or isinstance(x, Flat)
    )
    return [(jax.tree_util.keystr(path), x) for path, x in leaves]


def _held(
    field: str, value: Any, holder: Holder, sliced: int
) -> dict[str, tuple[Holder, Place | None]]:
    """Whose the arrays of a field are, by path, and where the rows of those in buckets lie."""
    found: dict[str, tuple[Holder, Place | None]] = {}
    for k, (inner, x) in enumerate(_entries(value)):
        if isinstance(x, Flat) and holder is not Holder.MEASURED:
            names = [field + rest for rest in paths_of(x.value)]
            places = [Place(sliced, k, name) for name in names]
            paths = [field + inner + rest for rest in paths_of(x)]
            found |= {p: (holder, place) for p, place in zip(paths, places, strict=True)}
        else:
            found |= {field + inner + rest: (holder, None) for rest in paths_of(x)}
    return found


def _sliced(path: str, node: Any, params: list[str], layout: Layout) -> Sliced:
    """The buckets of a state, and the parameters that its segments are of."""
    holders = node.holders()
    owned = [x.bucket for f, h in holders.items() if h is Holder.OWNER
             for x in _flats(getattr(node, f))]  # fmt: skip
    kept = [_entries(getattr(node, f)) for f, h in holders.items() if h is not Holder.OWNER]
    entries = max(kept, key=len)
    cuts = [x.bucket for _, x in entries if isinstance(x, Flat)]
    all_of_them = cuts or len(entries) == len(params)
    names = params if all_of_them else [name for name, _ in entries]
    segments = [s for bucket in cuts or owned for s in bucket.segments]
    fits = all(
        s.leaf < len(names) and names[s.leaf] in params
        and s.shape == _local_shape(layout, layout.params + names[s.leaf])
        for s in segments
    )  # fmt: skip
    return Sliced(path, tuple(names) if fits else (), tuple(cuts), tuple(owned))


def _check_levels(path: str, node: Any, layout: Layout) -> None:
    """Of a state with error feedback, which is one that votes."""
    own = [f for f, h in node.holders().items() if h in OWN]
    if Holder.FEEDBACK not in node.holders().values():
        return
    two = any(_flats(getattr(node, field)) for field in own)
    if two != bool(layout.group):
        raise ValueError(
            f"state{path} is of {'two levels' if two else 'one level'}, and group_axis is "
            f"{layout.group or None}: give axis_name and group_axis as to the optimizer"
        )


def _check_own(layout: Layout, workers: Workers) -> None:
    """Of what states call a worker's own: a lying label, as pmap's out_axes=None, drops all but one."""
    for path, x in layout.arrays.items():
        apart = x.cuts and set(x.cuts[0]) & set(workers.axes)
        if x.holder in OWN and not apart and workers.count > 1 and 0 not in x.shape:
            spec = P(workers.axes)
            raise ValueError(
                f"state{path} has shape {x.shape} and is not cut over the workers, but each of "
                f"{workers.count} has its own, and a checkpoint would keep that of one. Let it out of "
                f"jax.pmap with out_axes=0, or of jax.shard_map with out_specs={spec}, as "
                f"[{workers.count}, ...]; what is [{workers.count}, ...] already goes where it belongs "
                f"by jax.device_put(x, NamedSharding(mesh, {spec}))"
            )


def _check_classes(paths: Iterable[str]) -> None:
    """Buckets that ``nnx.state`` made dicts of do not say any more how they lie."""
    for path in paths:
        if lost := _LOST_BUCKET.match(path):
            raise ValueError(
                f"state{lost[1]} holds slices of the parameters in a dict that does not say of which, as "
                "nnx.state(optimizer) does: give the optimizer itself, {'params': nnx.state(model, "
                "nnx.Param), 'optimizer': optimizer}"
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
    out: dict[str, Any] = {}
    for path, x in arrays.items():
        stored = layout.arrays[path]
        if stored.place is None:
            out[path] = x
        elif x.ndim == 0:
            out[stored.place.name] = x  # a counter, alike in all buckets
        else:
            for cut, rows in _pieces(layout, stored, x):
                sliced, _ = layout.bucket(stored)
                leaves = _leaves(layout, sliced, cut, rows)
                out |= {stored.place.name + name: leaf for name, leaf in leaves.items()}
    return out


def _sizes(layout: Layout, stored: Stored) -> tuple[int, int, int, int, int]:
    """``(workers, devices of a group, inner shards, rows of each, elements of a row)`` of an array.

    Only its number of elements counts, however its last dimensions are arranged.
    """
    _, bucket = layout.bucket(stored)
    shards = product(layout.sizes, _inner(layout, bucket))
    apart = stored.cuts and set(stored.cuts[0]) & set(layout.workers)
    first = layout.number if apart else 1
    each = math.prod(stored.shape) // (first * layout.parts * shards * ROW)
    return first, layout.parts, shards, each, ROW


def _inner(layout: Layout, bucket: Bucket) -> tuple[str, ...]:
    others = {*layout.workers, *layout.group}
    return tuple(axis for axis in layout.sizes if axis in bucket.axes and axis not in others)


def _pieces(layout: Layout, stored: Stored, x: jax.Array) -> Iterator[tuple[Bucket, jax.Array]]:
    """Buckets that are made of leaves, with their rows ``[*workers, inner shards, rows, ROW]``."""
    sliced, bucket = layout.bucket(stored)
    rows = x.reshape(_sizes(layout, stored))  # [workers, parts, shards, rows, ROW]
    if stored.holder is not Holder.OWNER:
        yield bucket, _merged(jnp.moveaxis(rows, 1, 2))
        return
    rows = _merged(rows.transpose(2, 1, 0, 3, 4))  # [shards, parts, rows, ROW]
    if not sliced.cuts:
        yield bucket, rows[:, 0]
        return
    for s in bucket.segments:
        cut = sliced.cuts[s.leaf]  # an owner's bucket is made of a group's slices of buckets
        yield cut, _merged(rows[..., s.first_row : s.first_row + cut.chunk, :])


def _merged(rows: jax.Array) -> jax.Array:
    """``[..., a, b, ROW]`` as ``[..., a * b, ROW]``."""
    return rows.reshape(*rows.shape[:-3], -1, ROW)


def _leaves(
    layout: Layout, sliced: Sliced, bucket: Bucket, rows: jax.Array
) -> dict[str, jax.Array]:
    """``[*batch, inner shards, rows, ROW]`` as whole leaves ``[*batch, *shape]``."""
    _check_named(sliced)
    out = {}
    for s in bucket.segments:
        own = rows[..., s.first_row : s.first_row + s.rows, :]
        shards = in_shape(own.reshape(*own.shape[:-2], -1)[..., : s.size], s)
        name = sliced.names[s.leaf]
        out[name] = _joined(layout, layout.params + name, _inner(layout, bucket), shards)
    return out


def _check_named(sliced: Sliced) -> None:
    if not sliced.names:
        raise ValueError(
            f"state{sliced.path} votes on some of the parameters only, and its slices do not say on "
            "which, or they are not the field 'params' of the state: restore it with as many workers, "
            "groups and shards as it was saved from"
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


def laid_out(layout: Layout, whole: dict[str, Any], paths: Iterable[str]) -> dict[str, jax.Array]:
    """Undoes ``opened`` for the arrays of a layout that are asked for; traced."""
    out: dict[str, jax.Array] = {}
    for path in paths:
        stored = layout.arrays[path]
        if stored.place is None:
            out[path] = whole[path]
        elif not stored.shape:
            out[path] = whole[stored.place.name]
        else:
            out[path] = _in_bucket(layout, stored, whole).reshape(stored.shape)
    return out


def _in_bucket(layout: Layout, stored: Stored, whole: dict[str, Any]) -> jax.Array:
    """Undoes ``_pieces``: ``[workers, parts, inner shards, rows, ROW]``."""
    assert stored.place is not None
    (sliced, bucket), name = layout.bucket(stored), stored.place.name
    if stored.holder is not Holder.OWNER:
        rows = _rows(layout, sliced, bucket, name, whole)
        return jnp.moveaxis(_in_parts(rows, layout.parts, bucket.chunk), 1, 2)
    if sliced.cuts:
        cuts = [sliced.cuts[s.leaf] for s in bucket.segments]
        slices = [
            _in_parts(_rows(layout, sliced, cut, name, whole), layout.parts, cut.chunk)
            for cut in cuts
        ]
        rows = _side_by_side(bucket, slices)
    else:
        rows = _rows(layout, sliced, bucket, name, whole)[:, None]
    first, _, _, each, _ = _sizes(layout, stored)
    return _in_parts(rows, first, each).transpose(2, 1, 0, 3, 4)


def _rows(
    layout: Layout, sliced: Sliced, bucket: Bucket, prefix: str, whole: dict[str, Any]
) -> jax.Array:
    """Whole leaves as ``[*batch, inner shards, rows, ROW]``."""
    _check_named(sliced)
    inner, pieces = _inner(layout, bucket), []
    for s in bucket.segments:
        name = sliced.names[s.leaf]
        shards = _cut(layout, layout.params + name, inner, whole[prefix + name])
        flat = in_row_order(shards, s)
        pieces.append(_padded(flat, s.rows * ROW, -1).reshape(*flat.shape[:-1], s.rows, ROW))
    return _side_by_side(bucket, pieces)


def _side_by_side(bucket: Bucket, pieces: Sequence[jax.Array]) -> jax.Array:
    """The rows of a bucket, of those of its segments, zeros where it has none."""
    placed = sorted(zip(bucket.segments, pieces, strict=True), key=lambda pair: pair[0].first_row)
    ends = [s.first_row for s, _ in placed[1:]] + [bucket.rows]
    filled = [_padded(x, end - s.first_row, -2) for (s, x), end in zip(placed, ends, strict=True)]
    rows = jnp.concatenate(filled, axis=-2)
    before = [(0, 0)] * rows.ndim
    before[-2] = (bucket.rows - rows.shape[-2], 0)
    return jnp.pad(rows, before)


def _in_parts(rows: jax.Array, parts: int, each: int) -> jax.Array:
    """``[..., rows, ROW]`` as ``[..., parts, each, ROW]``, zeros behind the end."""
    rows = _padded(rows, parts * each, -2)
    return rows.reshape(*rows.shape[:-2], parts, each, ROW)


def _padded(x: jax.Array, size: int, axis: int) -> jax.Array:
    short = [(0, 0)] * x.ndim
    short[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, short)


# --- From one layout to another


def moved(old: Layout, new: Layout) -> list[str]:
    """Paths of the new layout whose arrays are not simply those of the old one."""
    same = alike(old, new)

    def stays(path: str, x: Stored) -> bool:
        before = old.arrays.get(path)
        return before is not None and before.shape == x.shape and (same or x.place is None)

    return [path for path, x in new.arrays.items() if 0 not in x.shape and not stays(path, x)]


def alike(old: Layout, new: Layout) -> bool:
    """Whether buckets and slices of one layout are those of the other."""
    return _mesh_of(old) == _mesh_of(new) and old.sliced == new.sliced


def _mesh_of(layout: Layout) -> Any:
    cuts = [x.cuts for path, x in layout.arrays.items() if path.startswith(layout.params)]
    return list(layout.sizes.items()), layout.workers, layout.group, cuts


def names_of(layout: Layout) -> dict[str, Stored]:
    """What a layout holds in the form that knows no mesh; arrays without elements left out."""
    arrays = {
        path: jax.ShapeDtypeStruct(x.shape, jnp.float32)
        for path, x in layout.arrays.items()
        if 0 not in x.shape
    }
    holders = {}
    for path, x in layout.arrays.items():
        if x.place is None:
            holders[path] = x.holder
        elif x.holder in OWN:
            names = layout.sliced[x.place.sliced].names
            holders |= {x.place.name + name: x.holder for name in names}
    found = jax.eval_shape(lambda arrays: opened(layout, arrays), arrays)

    def dtype(name: str) -> str:
        return layout.arrays[name].dtype if name in layout.arrays else ""

    return {n: Stored(x.shape, dtype(n), (), holders.get(n, Holder.ALL)) for n, x in found.items()}


# --- What is saved and what is wanted


def check_same_model(name: str, saved: Layout, target: Layout) -> None:
    """Raises ``ValueError`` if what is saved is not what is wanted, mesh and workers aside."""
    as_they_lie = alike(saved, target)
    old, new = (_comparable(layout, as_they_lie) for layout in (saved, target))
    problems = [
        *(f"it lacks state{p} of shape {_shape(new[p])}" for p in new
          if p not in old and new[p].holder is not Holder.MEASURED),
        *(f"it has state{p} of shape {_shape(old[p])}, which is not wanted" for p in old
          if p not in new and old[p].holder is not Holder.MEASURED),
        *(f"state{p} is {_described(old[p])} in it, wanted {_described(new[p])}" for p in new
          if p in old and not _fits(old[p], new[p])),
    ]  # fmt: skip
    problems.sort(key=lambda text: "state.params" not in text)  # the rest follows from them
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        optimizers = "state.opt_state", "state.local_state"
        of = "optimizer" if all(any(o in p for o in optimizers) for p in problems) else "model"
        raise ValueError(
            f"{name} is of another {of}: {'; '.join(problems[:4])}{more}. Restore with the model and "
            "the optimizer it was saved with"
        )


def _comparable(layout: Layout, as_it_lies: bool) -> dict[str, Stored]:
    found = layout.arrays if as_it_lies else names_of(layout)
    return {path: x for path, x in found.items() if 0 not in x.shape}


def _shape(x: Stored, own: bool | None = None) -> tuple[int, ...]:
    """Without the axis of the workers."""
    own = x.holder in OWN if own is None else own
    return x.shape[1:] if own else x.shape


def _described(x: Stored) -> str:
    return f"{x.dtype}{list(_shape(x))}"


def _fits(old: Stored, new: Stored) -> bool:
    # Over one worker it may not show that an array has an axis of workers.
    own = old.holder in OWN or new.holder in OWN
    same = not (old.dtype and new.dtype) or old.dtype == new.dtype
    return same and _shape(old, own) == _shape(new, own)


# --- What workers get where their number changes


def converted(
    old: Layout, new: Layout, arrays: dict[str, Any], keys: dict[str, Any], keep: bool
) -> dict[str, jax.Array]:
    """The arrays of the new layout that are ``moved``; traced.

    Args:
      old: the layout of ``arrays``.
      new: the layout wanted.
      arrays: by path; of random keys their words.
      keys: random keys by path, with the name of the generator and the number of words.
      keep: whether workers that survive keep what is theirs.
    """
    whole = opened(old, arrays)
    before, after = names_of(old), names_of(new)
    for name, x in after.items():
        own = {x.holder, before[name].holder if name in before else x.holder} & OWN
        if x.holder is Holder.MEASURED and name not in before:
            whole[name] = jnp.full(x.shape, -1)  # what was not measured
        elif own and whole[name].shape[0] != x.shape[0]:
            owed = Holder.FEEDBACK in own
            whole[name] = _shared(whole[name], x.shape[0], owed, keys.get(name, [None])[0], keep)
    found = laid_out(new, whole, moved(old, new))
    return {
        path: x if path in keys else x.astype(new.arrays[path].dtype) for path, x in found.items()
    }


def _shared(x: jax.Array, count: int, owed: bool, key: str | None, keep: bool) -> jax.Array:
    """What ``[workers, ...]`` becomes for another number of workers."""
    if key is not None:
        return _keys(x, count, key)
    survivors = x[: min(count, len(x))] if keep else x[:0]
    mean = _mean(x)
    new = jnp.broadcast_to(mean, (count - len(survivors), *x.shape[1:])).astype(x.dtype)
    new = jnp.concatenate([survivors, new])
    if owed and keep and count < len(x):
        # What is owed to all together is owed still: no error is lost with its worker.
        new = (new.astype(jnp.float32) + mean - _mean(new)).astype(x.dtype)
    return new


def _mean(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.max(x, axis=0)
    return jnp.mean(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=0)


def _keys(words: jax.Array, count: int, impl: str) -> jax.Array:
    """Those who were there keep their keys; each newcomer folds its index into one of them."""
    keys = jax.random.wrap_key_data(words, impl=impl)
    if count <= len(words):
        return words[:count]
    index = jnp.arange(len(words), count)
    each = keys.reshape(len(words), -1)[index % len(words)]
    added = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)))(each, index)
    return jax.random.key_data(jnp.concatenate([keys, added.reshape(len(index), *keys.shape[1:])]))
