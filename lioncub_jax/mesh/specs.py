"""How arrays are cut over a mesh: specs that parameters say themselves, compared, shortened and checked.

A worker's parameters are cut over the *inner axes* of a mesh (fsdp, tensor, expert), never over the axes
of the workers. A spec has one spelling here, so that nothing is compiled twice.
"""

import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.wires import varying_axes


def specs_of(params: Any) -> Any:
    """How parameters are cut, as they say it themselves.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct`` with a ``NamedSharding`` (any other is taken
        as replicated), of ``flax.linen.Partitioned`` boxes, or an ``nnx.State`` with sharding metadata.

    Returns:
      A tree of ``PartitionSpec`` like the parameters (unboxed).

    Example:
      >>> import jax, lioncub_jax as lc
      >>> from flax import linen as nn
      >>> layer = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "fsdp")))
      >>> params = layer.init(jax.random.key(0), jax.numpy.ones((1, 2)))["params"]
      >>> lc.mesh.specs_of(params)["kernel"] == jax.P(None, "fsdp")
      True
    """
    declared = _declared(params) if _flax_in_use() else None
    if declared is None:
        return jax.tree.map(spec_of, params)
    return jax.tree.map(lambda s: P() if s is None else s, declared, is_leaf=_is_spec_or_none)


def unboxed(params: Any) -> Any:
    """Parameters out of flax's boxes, if they are in any."""
    if not _flax_in_use():
        return params
    from flax import linen

    return linen.meta.unbox(params)


def spec_of(x: Any) -> P:
    """The ``PartitionSpec`` of one array; ``P()`` where it has no ``NamedSharding``."""
    if isinstance(x, jax.core.Tracer):
        return shortened(jax.typeof(x).sharding.spec)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or x.size == 0:
        return P()
    return _cutting(sharding)


@functools.cache  # a training step asks for every parameter, every time
def _cutting(sharding: NamedSharding) -> P:
    # An axis of one device cuts nothing, and XLA forgets it.
    return restrict(sharding.spec, [n for n, size in sharding.mesh.shape.items() if size > 1])


def apart(tree: Any, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of some axes over which the type of any array varies."""
    over = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))
    return tuple(n for n in axes if n in over)


def by_type(leaves: Sequence[jax.Array], workers: Sequence[str]) -> tuple[P, ...]:
    """How arrays lie, by their types, once what differs between workers has a leading axis."""

    def spec(x: jax.Array) -> P:
        inner = jax.typeof(x).sharding.spec
        axes = tuple(n for n in workers if n in varying_axes(x))
        return shortened(P(axes, *inner) if axes else inner)

    return tuple(map(spec, leaves))


@functools.cache
def shortened(spec: P) -> P:
    """One spelling for specs that mean the same, so that nothing is compiled twice."""
    entries = [axes_of(entry) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return P(*[e[0] if len(e) == 1 else e or None for e in entries])


def _flax_in_use() -> bool:
    """Boxes are flax's: who has not imported flax has none, and need not wait for its import."""
    return "flax" in sys.modules


def _declared(params: Any) -> Any:
    """What the metadata of flax says about how parameters are cut, or None without any."""
    from flax import linen, nnx

    if isinstance(params, nnx.State) and not _placed(params):
        return nnx.get_partition_spec(params)
    boxes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, linen.Partitioned))
    if any(isinstance(x, linen.Partitioned) for x in boxes):
        return linen.get_partition_spec(params)
    return None


def _placed(params: Any) -> bool:
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    return any(isinstance(s, NamedSharding) for s in shardings)


def _is_spec_or_none(x: Any) -> bool:
    return x is None or isinstance(x, P)


def check_specs(specs: Any, params: Any, mesh: Mesh, workers: Sequence[str]) -> None:
    """Raises ``ValueError`` for parameters that cannot lie on the mesh as their specs say."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    flat = jax.tree.leaves(specs)
    if len(flat) != len(leaves) or not all(isinstance(s, P) for s in flat):
        raise ValueError(
            f"specs has {len(flat)} leaves and the parameters have {len(leaves)}: give a PartitionSpec "
            "for each parameter, in a tree like theirs, such as lioncub_jax.mesh.specs_of(params)"
        )
    for (path, leaf), spec in zip(leaves, flat, strict=True):
        _check_spec(jax.tree_util.keystr(path) or "(root)", jnp.shape(leaf), spec, mesh, workers)


def _check_spec(
    path: str, shape: tuple[int, ...], spec: P, mesh: Mesh, workers: Sequence[str]
) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"{path} has shape {shape}, but its spec {spec} has {len(spec)} entries")
    for dim, axes in enumerate(map(axes_of, spec)):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{path}: the mesh has axes {mesh.axis_names}, {spec} has {axis!r}"
                )
            if axis in workers:
                raise ValueError(
                    f"{path} has spec {spec}, but {axis!r} is an axis of the workers: each worker holds "
                    "all parameters, cut over inner axes only. Put the workers on another axis, or "
                    "shard parameters over an axis that is not in axis_name"
                )
        parts = product(mesh.shape, axes)
        if shape[dim] % parts:
            raise ValueError(
                f"{path} has shape {shape} and spec {spec}: dimension {dim} is cut into {parts} parts, "
                f"which do not divide {shape[dim]}; replicate it, or pad it"
            )


def axes_of(entry: Any) -> tuple[str, ...]:
    """One entry of a spec, as the axes that cut a dimension."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def product(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """The number of devices along some axes of a mesh."""
    return math.prod(sizes[axis] for axis in axes)


def cuts_of(entries: Sequence[Any], ndim: int) -> list[tuple[str, ...]]:
    """For each dimension of an array the axes that cut it, by the entries of its spec."""
    return [*map(axes_of, entries), *[()] * (ndim - len(entries))]


def shard_shape(
    shape: Sequence[int], entries: Sequence[Any], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of what one device holds of an array, by the entries of its spec."""
    cuts = cuts_of(entries, len(shape))
    return tuple(n // product(sizes, axes) for n, axes in zip(shape, cuts, strict=True))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """Specs as shardings on a mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs)


def check_batch_spec(spec: P, mesh: Mesh, workers: Sequence[str]) -> None:
    """Raises ``ValueError`` unless a batch's first dimension is cut over the workers before all else."""
    first = axes_of(spec[0]) if len(spec) else ()
    unknown = [n for entry in spec for n in axes_of(entry) if n not in mesh.axis_names]
    elsewhere = [n for entry in spec[1:] for n in axes_of(entry) if n in workers]
    if unknown or elsewhere or first[: len(workers)] != tuple(workers):
        example = P((*workers, *[n for n in mesh.axis_names if n not in workers]))
        raise ValueError(
            f"batch_spec={spec}: the first dimension of a batch is cut over the workers' axes "
            f"{tuple(workers)}, in this order, and then over any of the mesh's other axes "
            f"{mesh.axis_names}, such as {example}"
        )


def parts(spec: P, mesh: Mesh) -> int:
    """Into how many parts a spec cuts the first dimension."""
    return product(mesh.shape, axes_of(spec[0])) if len(spec) else 1


def stacked(specs: Any, axes: Sequence[str]) -> Any:
    """Specs of arrays with one more, leading dimension, cut over ``axes``."""
    return jax.tree.map(lambda spec: shortened(P(tuple(axes), *spec)), specs)


def restrict(specs: Any, axes: Sequence[str]) -> Any:
    """Specs with only the axes named."""
    return jax.tree.map(functools.partial(_only, axes=tuple(axes)), specs)


@functools.cache
def _only(spec: P, axes: tuple[str, ...]) -> P:
    return shortened(P(*[tuple(a for a in axes_of(e) if a in axes) or None for e in spec]))


def cut_of(tree: Any) -> Any:
    """How arrays are cut over explicit axes, by their types."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
