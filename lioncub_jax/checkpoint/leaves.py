"""A checkpoint holds leaves, and knows neither a mesh nor a bucket.

A state in training lies as its mesh wants it: momentum of a group in slices of buckets, momentum of owners
in slices of 1/W, all of them rows of 128 with padding in between. What is saved is what a person would
call the state: parameters whole, what is each worker's own ``[workers, *shape]``, and what owners hold, one
for all, shaped like the parameters. A field keeps its name, ``.opt_state.owner.mu['w']``, where one level
of whole leaves has it too, so that one level and two read each other.

The way there is one function, `_parts`: from the rows that a state's array has, to the leaves that are cut
out of them, by nothing but reshapes, transposes and slices. It is linear, and the way back is its
transpose, which JAX derives: slices become padding, and what was split is joined. Both are exact, to the
sign of a zero. Where the rows of an array belong is read from the state itself (`layout_of`): state classes
say whose their fields are (``holders``, see `layout.Holder`), a ``Flat`` has its bucket, shardings say
the rest. So nothing of it is written down: the leaves are saved in tiles, and cut anew for whatever mesh
reads them. Beside them stand their names, shapes and dtypes, whose they are, and checksums.

Where the number of workers changes, what is each worker's own meets a rule, in `_shared`. Arrays that are
leaves already go straight to their place; only rows are reshuffled, once a save and once a restore.
Snapshots in memory are taken far more often than checkpoints: they hold the arrays as they lie, with the
`Layout` beside them, and become leaves when another mesh reads them.
"""

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.layout import Bucket, Flat, Holder, Segment, to_shape
from lioncub_jax.exchange.means import mean_of
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.checksum import untyped
from lioncub_jax.mesh.hosts import is_key, words_of
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_in, cuts_of, product, shard_shape, spec_of

OWN = {Holder.WORKER, Holder.FEEDBACK}  # arrays with a leading axis of workers
IN_ROWS = "rows"
_LOST_BUCKET = re.compile(r"(.*)\['(?:mu|error|owner)'\]\[\d+\]\['value'\]")

Param = tuple[str, tuple[int, ...], tuple[tuple[str, ...], ...]]  # path, shape, cuts of dimensions


class Rows(NamedTuple):
    """Where the rows of a bucket belong.

    Attributes:
      bucket: whose rows they are.
      cuts: of an owner in two levels: the leaves of its bucket are slices of these.
      params: by the indices of the leaves their parameters.
      group: how many devices a worker has, in two levels; else 1.
      inner: the inner axes over which the leaves are cut, with their sizes.
    """

    bucket: Bucket
    cuts: tuple[Bucket, ...]
    params: tuple[tuple[int, Param], ...]
    group: int
    inner: tuple[tuple[str, int], ...]


class Leaf(NamedTuple):
    """What is known of an array, in a checkpoint or in training.

    Attributes:
      shape: of random keys, that of their words.
      dtype: of random keys ``key<...>``.
      holder: whose it is.
      lies: "" for a leaf, ``IN_ROWS`` for what training has in rows, and for rows of which nobody can say
        whose they are, and which are saved as they lie, a number that tells their layout from others.
      sums: the checksums of what was saved.
    """

    shape: tuple[int, ...]
    dtype: str
    holder: Holder
    lies: str = ""
    sums: list[int] | None = None

    @property
    def own(self) -> bool:
        """Whether each worker has its own."""
        return self.holder in OWN

    @property
    def is_key(self) -> bool:
        """Whether it is random keys."""
        return self.dtype.startswith("key<")

    def at(self, sharding: Any = None) -> jax.ShapeDtypeStruct:
        """What is saved, of random keys their words."""
        dtype = jnp.uint32 if self.is_key else jnp.dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)


class Stored(NamedTuple):
    """An array of a state.

    Attributes:
      path: where it is.
      leaf: what it is, as it lies.
      workers: over how many workers its first dimension is cut, be it 1.
      name: that of its leaf; of rows that of their field, before the paths of the leaves.
      rows: what they are, or None for an array that is saved as it lies.
    """

    path: str
    leaf: Leaf
    workers: int
    name: str
    rows: Rows | None


# How the arrays of a state, those with elements, lie on its mesh: plain numbers, which can be compared,
# hashed and kept.
Layout = tuple[Stored, ...]


# --- How a state lies


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
    """How a trainer's state lies: of arrays, or of ``jax.ShapeDtypeStruct`` with shardings."""
    params = {
        path: (path, x.shape, tuple(cuts_of(tuple(spec_of(x)), len(x.shape))))
        for path, x in paths_of(field_of(state, "params")[1]).items()
    }
    held: dict[str, Held] = {}
    for path, node in _nodes("", state):
        held |= _held(path, node, params, workers)

    def stored(path: str, x: Any) -> Stored:
        spec = spec_of(x)
        by_sharding = Holder.WORKER if workers.stacks(spec) else Holder.ALL
        holder, lies, name, rows = held.get(path, (by_sharding, "", path, None))
        if holder in OWN and not workers.stacks(spec) and workers.count > 1:
            _refuse_label(path, x.shape, workers)
        shape = jax.eval_shape(words_of, x).shape if is_key(x) else x.shape
        cut = {*axes_in(P(*spec[:1]))} & {*axes.names(workers.axis)}
        count = product(workers.mesh.shape, cut)
        return Stored(path, Leaf(shape, str(x.dtype), holder, lies), count, name, rows)

    arrays = paths_of(state)
    _check_classes(arrays)
    return tuple(stored(path, x) for path, x in arrays.items() if x.size)


def _nodes(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """States that say whose their fields are, by their paths, those inside of others too."""
    if hasattr(tree, "holders"):
        yield path, tree
    for key, x in paths_of(tree, lambda x: x is not tree and hasattr(x, "holders")).items():
        if hasattr(x, "holders"):
            yield from _nodes(path + key, x)


Held = tuple[Holder, str, str, Rows | None]  # also how an array lies, and its name


def _held(path: str, node: Any, params: Mapping[str, Param], workers: Workers) -> dict[str, Held]:
    """Whose the arrays of a node's fields are, by path, and which rows those of buckets have."""
    # What a field has for each leaf of the parameters, or for each bucket, be it None.
    one = lambda x: x is None or isinstance(x, Flat)  # noqa: E731
    whose = node.holders().items()
    fields = [(f"{path}.{f}", paths_of(getattr(node, f), one), holder) for f, holder in whose]
    # A worker's own say the leaves: by their paths, or by the buckets that a group shares.
    entries = max((x for _, x, h in fields if h is not Holder.OWNER), key=len, default={})
    cuts = tuple(x.bucket for x in entries.values() if isinstance(x, Flat))
    names = params if cuts or len(entries) == len(params) else entries
    known = dict(enumerate(map(params.get, names)))

    found: dict[str, Held] = {}
    for field, values, holder in fields:
        inside = cuts if holder is Holder.OWNER else ()
        for key, value in values.items():
            lies, rows = "", None
            if isinstance(value, Flat) and holder is not Holder.MEASURED:
                _check_levels(path, bool(holder in OWN or inside), workers)
                rows = _rows(value.bucket, inside, known, workers)
                lies = IN_ROWS if rows else _number(value.bucket, workers)
            for rest in paths_of(value):
                at = field + key + rest
                name = field + rest.removeprefix(".value") if rows else at
                found[at] = holder, lies, name, rows
    return found


def _number(bucket: Bucket, workers: Workers) -> str:
    """Tells where the rows of a bucket lie from elsewhere."""
    where = tuple(workers.mesh.shape.items()), workers.axis, workers.group, bucket
    return str(zlib.crc32(repr(where).encode()))


def _rows(
    bucket: Bucket, cuts: tuple[Bucket, ...], known: Mapping[int, Param | None], workers: Workers
) -> Rows | None:
    """The rows of a bucket, or None where nobody can say whose they are."""
    sizes, params = workers.mesh.shape, {}
    for s in (s for cut in cuts or (bucket,) for s in cut.segments):
        param = known.get(s.leaf)
        if param is None or shard_shape(*param[1:], sizes) != s.shape:
            return None
        params[s.leaf] = param
    group = product(sizes, axes.names(workers.group))
    inner = tuple((n, sizes[n]) for n in workers.inner if n in bucket.axes and sizes[n] > 1)
    return Rows(bucket, cuts, tuple(params.items()), group, inner)


def _check_levels(path: str, two: bool, workers: Workers) -> None:
    if two != (workers.group is not None):
        raise ValueError(
            f"state{path} is of {'two levels' if two else 'one level'}, and the workers have group="
            f"{workers.group!r}: give workers= as to the optimizer"
        )


def _refuse_label(path: str, shape: tuple[int, ...], workers: Workers) -> None:
    """Of what states call a worker's own: a lying label, as pmap's out_axes=None, drops all but one."""
    spec, count = P(workers.axes), workers.count
    raise ValueError(
        f"state{path} has shape {shape} and is not cut over the workers, but each of {count} has its own, "
        "and a checkpoint would keep that of one. Let it out of jax.pmap with out_axes=0, or of "
        f"jax.shard_map with out_specs={spec}, as [{count}, ...]; what is [{count}, ...] already goes "
        f"where it belongs by jax.device_put(x, NamedSharding(mesh, {spec}))"
    )


def _check_classes(paths: Mapping[str, Any]) -> None:
    """Buckets that ``nnx.state`` made dicts of do not say any more how they lie."""
    for path in paths:
        if lost := _LOST_BUCKET.match(path):
            raise ValueError(
                f"state{lost[1]} holds slices of the parameters in a dict that does not say of which, as "
                "nnx.state(optimizer) does: give the optimizer itself, {'params': nnx.state(model, "
                "nnx.Param), 'optimizer': optimizer}"
            )


# --- From rows to leaves, and back


def _parts(stored: Stored, x: jax.Array) -> dict[str, jax.Array]:
    """The leaves of an array of a state, by name: of rows those that are cut out of them."""
    rows = stored.rows
    if rows is None or not x.shape:  # a counter is alike in all buckets
        return {stored.name: x}
    params, inner = dict(rows.params), dict(rows.inner)
    x = x.reshape(stored.workers, rows.group, math.prod(inner.values()), -1, ROW)
    owned = stored.leaf.holder is Holder.OWNER
    # [shards, devices of a group, rows of all workers, ROW], or [workers, shards, devices, rows, ROW].
    x = _merged(x.transpose(2, 1, 0, 3, 4)) if owned else x.transpose(0, 2, 1, 3, 4)
    whole = [(rows.bucket, x)]
    if rows.cuts:
        slices = [(rows.cuts[s.leaf], part) for s, part in _apart(rows.bucket, x)]
        whole = [(cut, part[..., : cut.chunk, :]) for cut, part in slices]
    found = {}
    for bucket, part in whole:
        for s, own in _apart(bucket, _merged(part)):
            path, shape, cuts = params[s.leaf]
            flat = own.reshape(*own.shape[:-2], -1)[..., : s.size]
            found[stored.name + path] = _whole(to_shape(flat, s), inner, shape, cuts)
    return found


def _merged(rows: jax.Array) -> jax.Array:
    """``[..., a, b, ROW]`` as ``[..., a * b, ROW]``."""
    return rows.reshape(*rows.shape[:-3], -1, ROW)


def _apart(bucket: Bucket, rows: jax.Array) -> list[tuple[Segment, jax.Array]]:
    """Of ``[..., rows, ROW]`` those of each segment; they lie one after the other, then padding."""
    sizes = [s.rows for s in bucket.segments]
    # Split, and not sliced: the transpose joins all of them at once.
    split = lax.split(rows, [*sizes, rows.shape[-2] - sum(sizes)], rows.ndim - 2)
    return list(zip(bucket.segments, split[:-1], strict=True))


def _whole(
    shards: jax.Array, inner: Mapping[str, int], shape: Sequence[int], cuts: Sequence[Any]
) -> jax.Array:
    """``[*batch, inner shards, *local shape]`` to ``[*batch, *shape]`` of a parameter."""
    batch, local = shards.shape[: -1 - len(shape)], shards.shape[shards.ndim - len(shape) :]
    n, names, order = len(batch), list(inner), list(range(len(batch)))
    for d, over in enumerate(cuts):
        order += [*(n + names.index(a) for a in over), n + len(names) + d]
    split = shards.reshape(*batch, *inner.values(), *local)
    return split.transpose(order).reshape(*batch, *shape)


def described(layout: Layout) -> dict[str, Leaf]:
    """The leaves of a state, by name."""
    found: dict[str, Leaf] = {}
    for stored in layout:
        parts = jax.eval_shape(functools.partial(_parts, stored), stored.leaf.at())
        found |= {name: stored.leaf._replace(shape=x.shape) for name, x in parts.items()}
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _opened(rows: tuple[Stored, ...], mesh: Mesh, arrays: list[jax.Array]) -> dict[str, jax.Array]:
    found: dict[str, jax.Array] = {}
    for stored, x in zip(rows, arrays, strict=True):
        found |= _parts(stored, x)
    lies = {name: spread(x.shape, mesh) for name, x in found.items()}
    return lax.with_sharding_constraint(found, lies)


def leaves_of(layout: Layout, mesh: Mesh, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The leaves of a state, of its `arrays_of`: those in rows are spread over the mesh."""
    rows = tuple(s for s in layout if s.rows)
    rest = arrays.keys() - {s.path for s in rows}
    opened = _opened(rows, mesh, [arrays[s.path] for s in rows])
    return {path: arrays[path] for path in rest} | opened


def arrays_of(state: Any) -> dict[str, jax.Array]:
    """Arrays with elements, by path, of random keys their words, on a mesh that leaves all to XLA."""
    found = {}
    for path, x in paths_of(state).items():
        if x.size:
            words = jax.jit(words_of)(x) if is_key(x) else x
            found[path] = jax.device_put(words, _auto(x.sharding))
    return found


def _auto(sharding: Any) -> NamedSharding:
    return NamedSharding(untyped(sharding.mesh), sharding.spec)


def spread(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Cuts an array over as many axes of a mesh as will divide it, first dimensions first, as rows lie."""
    left = list(shape)
    cuts: list[tuple[str, ...]] = [()] * len(shape)
    for axis, size in mesh.shape.items():
        for d in [d for d, n in enumerate(left) if n % size == 0][:1]:
            left[d] //= size
            cuts[d] = (*cuts[d], axis)
    return NamedSharding(mesh, P(*[over or None for over in cuts]))


# --- Onto a mesh


class Target:
    """The state that is wanted: how it lies, and the leaves that it is made of.

    Args:
      like: what the state shall be like; its leaves are those of ``lies``.
      lies: the same as arrays, or ``ShapeDtypeStruct``s with shardings, on one mesh.
      workers: of that mesh.
    """

    def __init__(self, like: Any, lies: Any, workers: Workers):
        self.layout, self._tree = layout_of(lies, workers), jax.tree.structure(like)
        self._wanted, self.mesh = paths_of(lies), untyped(workers.mesh)
        self.leaves = described(self.layout)

    def place(self, path: str, leaf: Leaf, stays: bool) -> jax.ShapeDtypeStruct:
        """Where what was saved is read to: where it is wanted, or spread over all devices."""
        return leaf.at(self._lies(path) if stays else spread(leaf.shape, self.mesh))

    def _lies(self, path: str) -> NamedSharding:
        return _auto(self._wanted[path].sharding)

    def stays(self, name: str, leaf: Leaf) -> bool:
        """Whether a leaf is an array that is wanted."""
        wanted = self.leaves.get(name)
        same = wanted is not None and (wanted.shape, wanted.lies) == (leaf.shape, leaf.lies)
        return same and leaf.lies != IN_ROWS

    def made(self, saved: Mapping[str, Leaf], leaves: dict[str, jax.Array], keep: bool) -> Any:
        """The state, of leaves that lie where `place` says."""
        direct = {name for name, leaf in saved.items() if self.stays(name, leaf)}
        rest = [s for s in self.layout if s.path not in direct]

        def make(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
            moved = self._moved(saved, leaves, keep)
            return {s.path: _laid(s, moved) for s in rest}

        given = {name: x for name, x in leaves.items() if name not in direct}
        made = jax.jit(make, out_shardings={s.path: self._lies(s.path) for s in rest})(given)
        return self.filled(leaves | made)

    def _moved(
        self, saved: Mapping[str, Leaf], leaves: dict[str, jax.Array], keep: bool
    ) -> dict[str, jax.Array]:
        """Leaves for as many workers as are wanted."""
        found = dict(leaves)
        for name, x in self.leaves.items():
            if name not in saved:
                found[name] = jnp.full(x.shape, -1, x.dtype)  # what was not measured
            elif name in leaves and x.shape != saved[name].shape:
                owed = Holder.FEEDBACK in (x.holder, saved[name].holder)
                key = self._wanted[name].dtype if x.is_key else None
                found[name] = _shared(leaves[name], x.shape[0], owed, key, keep)
        return found

    def filled(self, arrays: dict[str, jax.Array]) -> Any:
        """The state, of its arrays as `arrays_of` has them."""

        def put(path: str, x: Any) -> jax.Array:
            if not x.size:
                return jnp.zeros(x.shape, x.dtype, device=x.sharding)
            found = jax.device_put(arrays[path], x.sharding)
            typed = functools.partial(jax.random.wrap_key_data, impl=x.dtype)
            return jax.jit(typed, out_shardings=x.sharding)(found) if is_key(x) else found

        made = [put(path, x) for path, x in self._wanted.items()]
        return jax.tree.unflatten(self._tree, made)


def _laid(stored: Stored, leaves: dict[str, jax.Array]) -> jax.Array:
    """An array of the state, of the leaves: what `_parts` takes out, put back, zeros in the padding."""
    shaped, parts = stored.leaf.at(), functools.partial(_parts, stored)
    given = {name: leaves[name].astype(shaped.dtype) for name in jax.eval_shape(parts, shaped)}
    if not stored.rows or not shaped.shape:
        return next(iter(given.values()))
    [rows] = jax.linear_transpose(parts, shaped)(given)
    return rows


def _shared(x: jax.Array, count: int, owed: bool, key: Any, keep: bool) -> jax.Array:
    """What ``[workers, ...]`` becomes for another number of workers."""
    if key is not None:
        return _keys(x, count, key)
    survivors = x[: min(count, len(x))] if keep else x[:0]
    mean = mean_of(x)
    new = jnp.broadcast_to(mean, (count - len(survivors), *x.shape[1:])).astype(x.dtype)
    new = jnp.concatenate([survivors, new])
    if owed and keep and count < len(x):
        # What is owed to all together is owed still: no error is lost with its worker.
        new = (new.astype(mean.dtype) + mean - mean_of(new)).astype(x.dtype)
    return new


def _keys(words: jax.Array, count: int, impl: Any) -> jax.Array:
    """Those who were there keep their keys; each newcomer folds its index into one of them."""
    keys = jax.random.wrap_key_data(words, impl=impl)
    if count <= len(words):
        return words[:count]
    index = jnp.arange(len(words), count)
    each = keys.reshape(len(words), -1)[index % len(words)]
    added = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)))(each, index)
    return jax.random.key_data(jnp.concatenate([keys, added.reshape(len(index), *keys.shape[1:])]))


# --- What is saved and what is wanted


def from_json(found: Mapping[str, Any]) -> dict[str, Leaf]:
    """Leaves as `described` has them, of what JSON made of them."""
    return {
        name: Leaf(tuple(shape), dtype, Holder(holder), *rest)
        for name, (shape, dtype, holder, *rest) in found.items()
    }


def params_of(saved: Mapping[str, Leaf]) -> dict[str, tuple[str, Leaf]]:
    """The parameters of a state, by their paths inside of it, with their names."""
    found = {}
    for name, leaf in saved.items():
        for field in (".params", "['params']"):
            rest = name.removeprefix(field)
            if rest != name and rest[:1] in ("", ".", "["):
                found[rest] = name, leaf
    return found


def check_same_model(name: str, saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> None:
    """Raises ``ValueError`` if what is saved is not what is wanted, mesh and workers aside."""
    problems = []
    for path in {**wanted, **saved}:
        old, new = saved.get(path), wanted.get(path)
        if old and new:
            if {old.lies, new.lies} - {"", IN_ROWS} and old.lies != new.lies:
                _refuse_some_parameters(path)
            own = old.own or new.own  # over one worker it may not show
            cast = old.lies or new.lies  # a bucket has the widest dtype of its leaves
            if old.shape[own:] != new.shape[own:] or not (cast or old.dtype == new.dtype):
                given, asked = (f"{x.dtype}{list(x.shape[own:])}" for x in (old, new))
                problems.append(f"state{path} is {given} in it, wanted {asked}")
        elif new and new.holder is not Holder.MEASURED:
            problems.append(f"it lacks state{path} of shape {new.shape[new.own :]}")
        elif old and old.holder is not Holder.MEASURED:
            shape = old.shape[old.own :]
            problems.append(f"it has state{path} of shape {shape}, which is not wanted")
    problems.sort(key=lambda text: "state.params" not in text)  # the rest follows from them
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        optimizers = "state.opt_state", "state.local_state"
        of = "optimizer" if all(any(o in p for o in optimizers) for p in problems) else "model"
        raise ValueError(
            f"{name} is of another {of}: {'; '.join(problems[:4])}{more}. Restore with the model and "
            "the optimizer it was saved with"
        )


def _refuse_some_parameters(path: str) -> None:
    raise ValueError(
        f"state{path} votes on some of the parameters only, and its slices do not say on which, or they "
        "are not the field 'params' of the state: restore it with as many workers, groups and shards as "
        "it was saved from"
    )
