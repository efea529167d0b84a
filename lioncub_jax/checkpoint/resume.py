"""From the arrays of a checkpoint to a state on the present mesh, and what workers that come or go get."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.checkpoint import reshard as relayout
from lioncub_jax.checkpoint.reshard import Layout, Stored


def check_same_model(name: str, saved: Layout, target: Layout) -> None:
    """Raises ``ValueError`` if what is saved is not what is wanted, mesh and workers aside."""
    as_they_lie = relayout.alike(saved, target)
    old, new = (_comparable(layout, as_they_lie) for layout in (saved, target))
    problems = [
        *(f"it lacks state{p} of shape {_shape(new[p])}" for p in new
          if p not in old and new[p].kind != "drift"),
        *(f"it has state{p} of shape {_shape(old[p])}, which is not wanted" for p in old
          if p not in new and old[p].kind != "drift"),
        *(f"state{p} is {_said(old[p])} in it, wanted {_said(new[p])}" for p in new
          if p in old and not _fits(old[p], new[p])),
    ]  # fmt: skip
    problems.sort(key=lambda text: "state.params" not in text)  # the rest follows from them
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        of = "optimizer" if all("state.opt_state" in p for p in problems) else "model"
        raise ValueError(
            f"{name} is of another {of}: {'; '.join(problems[:4])}{more}. Restore with the model and "
            "the optimizer it was saved with"
        )


def _comparable(layout: Layout, as_it_lies: bool) -> dict[str, Stored]:
    found = layout.arrays if as_it_lies else relayout.names_of(layout)
    return {path: x for path, x in found.items() if 0 not in x.shape}


def _shape(x: Stored, own: bool | None = None) -> tuple[int, ...]:
    """Without the axis of the workers."""
    own = x.kind in relayout.OWN if own is None else own
    return x.shape[1:] if own else x.shape


def _said(x: Stored) -> str:
    return f"{x.dtype}{list(_shape(x))}"


def _fits(old: Stored, new: Stored) -> bool:
    # Over one worker it may not show that an array has an axis of workers.
    own = old.kind in relayout.OWN or new.kind in relayout.OWN
    same = not (old.dtype and new.dtype) or old.dtype == new.dtype
    return same and _shape(old, own) == _shape(new, own)


# --- Where arrays are read to, and what is made of them


def untyped(mesh: Mesh) -> Mesh:
    """The mesh with all axes left to the compiler, which may then move anything anywhere."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def places(saved: Layout, target: Layout, like: Any, keys: dict[str, Any]) -> dict[str, Any]:
    """Where each array of a checkpoint is read to: where it is wanted, or spread over all devices.

    Args:
      saved: the layout of the checkpoint.
      target: the layout wanted.
      like: the state wanted.
      keys: random keys by path, with the name of the generator and the number of words.
    """
    wanted = relayout.paths_of(like)
    direct = set(target.arrays) - set(relayout.moved(saved, target))
    mesh = untyped(next(iter(wanted.values())).sharding.mesh)
    out = {}
    for path, x in saved.arrays.items():
        if 0 in x.shape:
            continue
        shape = (*x.shape, keys[path][1]) if path in keys else x.shape
        dtype = jnp.uint32 if path in keys else jnp.dtype(x.dtype)
        spec = wanted[path].sharding.spec if path in direct else _spread(x.shape, mesh)
        out[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    return out


def _spread(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Cuts an array over as many axes of a mesh as will divide it."""
    left = list(shape)
    cuts: list[tuple[str, ...]] = [()] * len(shape)
    for axis, size in mesh.shape.items():
        fitting = [d for d, n in enumerate(left) if n % size == 0]
        if fitting:
            d = max(fitting, key=lambda d: left[d])
            left[d] //= size
            cuts[d] = (*cuts[d], axis)
    return P(*[axes or None for axes in cuts])


def placed(
    saved: Layout,
    target: Layout,
    like: Any,
    arrays: dict[str, Any],
    keys: dict[str, Any],
    keep: bool,
) -> Any:
    """The state wanted, of the arrays of a checkpoint, each read to its place."""
    wanted = relayout.paths_of(like)
    mesh = untyped(next(iter(wanted.values())).sharding.mesh)
    moved = relayout.moved(saved, target)
    empty = {path: x for path, x in wanted.items() if 0 in x.shape}
    made = {path: NamedSharding(mesh, wanted[path].sharding.spec) for path in [*moved, *empty]}

    def make(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        new = converted(saved, target, arrays, keys, keep) if moved else {}
        return new | {path: jnp.zeros(x.shape, x.dtype) for path, x in empty.items()}

    found = arrays | jax.jit(make, out_shardings=made)(arrays if moved else {})
    leaves = [_leaf(found[path], x.sharding, keys.get(path)) for path, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _leaf(x: jax.Array, sharding: Any, key: Any) -> jax.Array:
    if key is None:
        return jax.device_put(x, sharding)
    wrap = functools.partial(jax.random.wrap_key_data, impl=key[0])
    return jax.jit(wrap, out_shardings=sharding)(jax.device_put(x, sharding))


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
    whole = relayout.opened(old, arrays)
    before, after = relayout.names_of(old), relayout.names_of(new)
    for name, x in after.items():
        own = {x.kind, before[name].kind if name in before else x.kind} & set(relayout.OWN)
        if x.kind == "drift" and name not in before:
            whole[name] = jnp.zeros(x.shape)
        elif own and whole[name].shape[0] != x.shape[0]:
            kind = own.pop()
            whole[name] = _shared(whole[name], x.shape[0], kind, keys.get(name, [None])[0], keep)
    found = relayout.laid_out(new, whole, relayout.moved(old, new))
    return {
        path: x if path in keys else x.astype(new.arrays[path].dtype) for path, x in found.items()
    }


def _shared(x: jax.Array, count: int, kind: str, key: str | None, keep: bool) -> jax.Array:
    """What ``[workers, ...]`` becomes for another number of workers."""
    if key is not None:
        return _keys(x, count, key)
    survivors = x[: min(count, len(x))] if keep else x[:0]
    mean = _mean(x)
    new = jnp.broadcast_to(mean, (count - len(survivors), *x.shape[1:])).astype(x.dtype)
    new = jnp.concatenate([survivors, new])
    if kind == "error" and keep and count < len(x):
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
