"""Specs of arrays on a mesh: read off parameters, shortened to one spelling, and checked.

A worker's parameters are cut over the *inner axes* of a mesh (fsdp, tensor, expert), never over the axes
of the workers. A spec has one spelling here, so that nothing is compiled twice.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# A tree of ``PartitionSpec``, or a prefix of one.
Specs: TypeAlias = Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StateSpecs:
    """How parameters and a state of theirs lie; a node without arrays, so that a state can carry it.

    Attributes:
      params: the spec of each parameter, over the inner axes.
      state: the spec of each array of the state, the workers' axes in front of what is each worker's own.
    """

    params: tuple[P, ...]
    state: tuple[P, ...]


def specs_of(params: optax.Params) -> Specs:
    """Reads the specs of parameters off the parameters.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct`` with a ``NamedSharding`` (any other is taken
        as replicated), of ``flax.linen.Partitioned`` boxes, or an ``nnx.State`` with sharding metadata.
        In a trace types say it, where axes are Explicit; so do types before metadata of nnx.
        Logical names become axes of the mesh by the boxes' rules, or those that are active
        (``flax.linen.logical_axis_rules``).

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
    specs = declared(params)
    if specs is None:
        return jax.tree.map(spec_of, params)
    return jax.tree.map(lambda s: P() if s is None else s, specs, is_leaf=lambda s: s is None)


def spec_of(x: Any) -> P:
    """The ``PartitionSpec`` of one array; ``P()`` where it has no ``NamedSharding``."""
    if isinstance(x, jax.core.Tracer):
        return shortened(jax.typeof(x).sharding.spec)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or x.size == 0:
        return P()
    return shortened(sharding.spec, _cutting(sharding.mesh))


@functools.cache  # a training step asks for every parameter, every time
def _cutting(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that cut anything: one of a single device does not, and XLA forgets it."""
    return tuple(n for n, size in mesh.shape.items() if size > 1)


def by_type(tree: optax.Params, axes: Sequence[str]) -> Specs:
    """Specs of arrays by their types, with a leading dimension for what varies over the axes."""

    def spec_of_type(x: jax.Array) -> P:
        kind = jax.typeof(x)
        over = tuple(n for n in axes if n in kind.manual_axis_type.varying)
        return shortened(P(over, *kind.sharding.spec) if over else kind.sharding.spec)

    return jax.tree.map(spec_of_type, tree)


@functools.cache
def shortened(spec: P, axes: Collection[str] | None = None) -> P:
    """A spec with only the axes named, or all; one spelling for those that mean the same."""
    entries = [tuple(n for n in axes_of(e) if axes is None or n in axes) or None for e in spec]
    while entries and not entries[-1]:
        entries.pop()
    return P(*entries)


def flax_in_use() -> bool:
    """True where flax is imported: else there are no rules and serializers of it to be asked or told."""
    return "flax" in sys.modules


@functools.lru_cache(maxsize=1024)
def _is_of_flax(kind: type) -> bool:
    return any(x.__module__.partition(".")[0] == "flax" for x in kind.__mro__)


def is_of_flax(x: object) -> bool:
    """True for an object of a class of flax, or of one made of it; who has none need not wait for flax."""
    return _is_of_flax(type(x))  # type: ignore[arg-type]


def has_flax(tree: Any) -> bool:
    """True for a tree with an object of flax in it."""
    return any(map(is_of_flax, jax.tree.leaves(tree, is_leaf=is_of_flax)))


def declared(params: optax.Params) -> Specs | None:
    """Specs of parameters by the metadata of flax, or None without any."""
    if not has_flax(params):
        return None
    from flax import linen, nnx

    if isinstance(params, nnx.State) and not any(map(_knows, jax.tree.leaves(params))):
        # What optax masks is a variable of no array, and has no spec.
        return jax.tree.map(
            lambda x, spec: spec if jax.tree.leaves(x) else x,
            params,
            nnx.get_partition_spec(params),
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )
    boxes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, linen.Partitioned))
    if not any(isinstance(x, linen.Partitioned) for x in boxes):
        return None
    specs = linen.get_partition_spec(params)
    logical = [x for x in boxes if isinstance(x, linen.LogicallyPartitioned)]
    rules = next((x.rules for x in logical if x.rules), linen.get_logical_axis_rules())
    return linen.logical_to_mesh(specs, rules) if logical and rules else specs


def _knows(x: object) -> bool:
    """True for an array that has its spec itself."""
    if isinstance(x, jax.core.Tracer):
        return bool(jax.typeof(x).sharding.mesh.explicit_axes)
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def checked(specs: Specs, params: optax.Params, mesh: Mesh, workers: Sequence[str]) -> Specs:
    """Specs of parameters in their one spelling, in a tree like the parameters.

    Raises:
      ValueError: for parameters that cannot lie on the mesh as their specs say.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    flat = jax.tree.leaves(specs)
    if len(flat) != len(leaves) or set(map(type, flat)) - {P}:
        raise ValueError(
            f"specs has {len(flat)} leaves and the parameters have {len(leaves)}: give a PartitionSpec "
            "for each parameter, in a tree like theirs, such as lioncub_jax.mesh.specs_of(params)"
        )
    shortest = []
    for (path, x), spec in zip(leaves, flat, strict=True):
        name, shape = jax.tree_util.keystr(path) or "(root)", jnp.shape(x)
        if taken := {*axes_in(spec)} & {*workers}:
            raise ValueError(
                f"{name} of shape {shape} has spec {spec}, but {taken.pop()!r} is an axis of the workers: "
                "parameters are the same on all workers, and cut over inner axes only: shard it over an "
                "axis that is not the workers'"
            )
        try:
            NamedSharding(mesh, spec).shard_shape(shape)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"{name} has shape {shape}, and cannot lie as {spec} on {dict(mesh.shape)} ({error}): "
                "replicate it, or pad it; of a logical name flax.linen.logical_to_mesh(specs, rules) makes "
                "an axis"
            ) from error
        # XLA replicates what is empty, whatever its spec.
        shortest.append(shortened(spec, _cutting(mesh)) if x.size else P())
    return jax.tree.unflatten(structure, shortest)


def axes_of(entry: Any) -> tuple[str, ...]:
    """One entry of a spec, as the axes that cut a dimension."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def axes_in(spec: P) -> list[str]:
    """The axes that cut an array."""
    return [axis for entry in spec for axis in axes_of(entry)]


def product(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """The number of devices along some axes of a mesh."""
    return math.prod(sizes[axis] for axis in axes)


def cuts_of(entries: Sequence[Any], ndim: int) -> list[tuple[str, ...]]:
    """For each dimension of an array the axes that cut it, by the entries of its spec."""
    return [*map(axes_of, entries), *[()] * (ndim - len(entries))]


def joined_shards(
    shards: jax.Array, inner: Mapping[str, int], shape: Sequence[int], cuts: Sequence[Sequence[str]]
) -> jax.Array:
    """``[*batch, inner shards, *local shape]`` to ``[*batch, *shape]`` of a parameter."""
    batch, local = shards.shape[: -1 - len(shape)], shards.shape[shards.ndim - len(shape) :]
    n, names, order = len(batch), list(inner), list(range(len(batch)))
    for d, over in enumerate(cuts):
        order += [*(n + names.index(a) for a in over), n + len(names) + d]
    split = shards.reshape(*batch, *inner.values(), *local)
    return split.transpose(order).reshape(*batch, *shape)


def check_batch_spec(spec: P, mesh: Mesh, workers: Sequence[str]) -> None:
    """Raises ``ValueError`` unless a batch's first dimension is cut over the workers before all else."""
    first = axes_of(spec[0]) if len(spec) else ()
    unknown = [n for n in axes_in(spec) if n not in mesh.axis_names]
    elsewhere = [n for n in axes_in(P(*spec[1:])) if n in workers]
    if unknown or elsewhere or first[: len(workers)] != tuple(workers):
        example = P((*workers, *[n for n in mesh.axis_names if n not in workers]))
        raise ValueError(
            f"batch_spec={spec}: the first dimension of a batch is cut over the workers' axes "
            f"{tuple(workers)}, in this order, and then over any of the mesh's other axes "
            f"{mesh.axis_names}, such as {example}"
        )


def stacked(specs: Specs, axes: Sequence[str]) -> Specs:
    """Specs of arrays with one more, leading dimension, cut over ``axes``."""
    return jax.tree.map(lambda spec: shortened(P(tuple(axes), *spec)), specs)


def restrict(specs: Specs, axes: Iterable[str]) -> Specs:
    """Specs with only the axes named."""
    return jax.tree.map(functools.partial(shortened, axes=frozenset(axes)), specs)


def specs_in_step(axis: Sequence[str], updates: Any, state: Any) -> Any:
    """Specs of gradients, of the state, and of a flag, as a transform is given them in a step.

    In front of what is each worker's own are the workers' axes. None where the state has no ``specs``.
    """
    if not isinstance(state.specs, StateSpecs):
        return None
    lead = P(tuple(axis))
    of_updates = stacked(state.specs.params, tuple(axis))
    trees: Any = [jax.tree.structure(x) for x in (updates, state)]
    flat = of_updates, state.specs.state
    return *[tree.unflatten(x) for tree, x in zip(trees, flat, strict=True)], lead


def inner(spec: Any) -> Any:
    """Takes the workers' axes out of a spec or mesh of a model, where it runs for one worker.

    Args:
      spec: a ``PartitionSpec``, a ``NamedSharding``, or a ``Mesh`` for the model's own ``jax.shard_map``.

    Returns:
      Inside ``shard_map``, or what `map_step` and `make_train_step` call: the spec (of the
      sharding) without the axes that are taken, or the mesh of which the rest can be used. Elsewhere what
      was given.

    Raises:
      TypeError: for anything else.

    Example:
      >>> import jax, lioncub_jax as lc
      >>> def attend(x, mesh):
      ...     cut = lc.mesh.inner(jax.P("data", "tensor"))
      ...     own = jax.shard_map(lambda x: x * 2, mesh=lc.mesh.inner(mesh), in_specs=cut, out_specs=cut)
      ...     return own(jax.lax.with_sharding_constraint(x, cut))
      >>> lc.mesh.inner(jax.P("data", "tensor")) == jax.P("data", "tensor")  # no worker is here
      True

    Source: this library.
    """
    here = jax.sharding.get_abstract_mesh()
    if not isinstance(spec, (P, NamedSharding, Mesh)):
        raise TypeError(
            f"inner({spec!r}): give a PartitionSpec, a NamedSharding or a Mesh; of a tree "
            "jax.tree.map(lioncub_jax.mesh.inner, tree)"
        )
    if not here.manual_axes:
        return spec
    if isinstance(spec, Mesh):
        return here
    return without(spec.spec if isinstance(spec, NamedSharding) else spec, here.manual_axes)


def without(spec: P, taken: tuple[str, ...]) -> P:
    """A spec without the axes that are taken."""
    return shortened(spec, frozenset(axes_in(spec)).difference(taken))
