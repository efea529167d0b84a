"""Leaves out of the rows in which owners and groups hold them, and back.

In training, momentum of a group lies in slices of buckets, and state of owners in slices of 1/W: rows of
128. Each device gathers the rows of a bucket, and splits and joins them as a step does, so that
`exchange.layout` and `exchange.matrices` alone know their order. A leaf has the dtype of its rows.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import matrices, wires
from lioncub_jax.exchange.bits import ROW, common_dtype, round_up
from lioncub_jax.exchange.layout import BucketLayout
from lioncub_jax.exchange.matrices import Deal
from lioncub_jax.mesh.axes import names, worker_index
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import cuts_of, product


class Rows(NamedTuple):
    """Rows of a bucket, and what is in them; hashable.

    Attributes:
      bucket: the bucket.
      cuts: of an owner the buckets of its group, or its deal, by the indices of their slices in ``bucket``.
      params: by the indices of leaves the parameter: its name, shape and spec.
      own: True where each worker has leaves of its own, ``[workers, *shape]``; else an owner has a slice.
      workers: the workers, on a mesh that leaves all to XLA.
      part: of a deal's owner, which of its rows: those of "matrices", of the "rest", or "" for all.
    """

    bucket: BucketLayout | Deal
    cuts: tuple[tuple[int, BucketLayout | Deal], ...]
    params: tuple[tuple[int, str, tuple[int, ...], P], ...]
    own: bool
    workers: Workers
    part: str = ""

    @property
    def deal(self) -> Deal | None:
        """Of whole matrices at an owner."""
        return next((x for _, x in self.cuts if isinstance(x, Deal)), None)

    def of(self, name: str) -> "Rows":
        """Those of an array of an owner's state, by its name in it: of a deal, such as inner.rest.mu."""
        _, part, *_ = *name.split("."), "", ""
        if self.deal is None or part not in ("matrices", "rest"):
            return self
        mixed = {s.leaf for s in self.deal.segments if s.row_dims}
        params = [x for x in self.params if (x[0] in mixed) == (part == "matrices")]
        return self._replace(part=part, params=tuple(params))

    def leaves(self, dtype: Any) -> dict[str, Any]:
        """Types of the leaves, as they lie whole on each worker."""
        axis, count = self.workers.axis, product(self.workers.mesh.shape, names(self.workers.axis))
        return {
            name: self.workers.shape(
                P(*(axis,) * self.own, *spec),
                jax.ShapeDtypeStruct(shape, dtype),
                *(count,) * self.own,
            )
            for _, name, shape, spec in self.params
        }

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def split(self, spec: P, x: jax.Array) -> dict[str, jax.Array]:
        """The leaves in an array that lies so, spread over the workers."""

        def of_device(x: jax.Array) -> dict[str, jax.Array]:
            x, group = x.reshape(-1, ROW), names(self.workers.group)
            if self.deal:
                x = matrices.in_place(self._to_owners(x), self.deal, self.part, self._each)
            parts = _to_leaves(x, self.bucket, self._over)
            each = [_to_leaves(parts[k], cut, group) for k, cut in self.cuts] or [parts]
            parts = {k: x for part in each for k, x in part.items()}
            return {name: parts[k][None] if self.own else parts[k] for k, name, *_ in self.params}

        types = self.leaves(x.dtype)
        specs = {name: leaf.sharding.spec for name, leaf in types.items()}
        leaves = jax.shard_map(
            of_device, mesh=self.workers.mesh, in_specs=spec, out_specs=specs, check_vma=False
        )(x)
        for name, leaf in types.items():
            wide = spread(leaf, self.workers)
            if wide.shape == leaf.shape:
                leaves[name] = lax.with_sharding_constraint(leaves[name], wide.sharding)
        return leaves

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def join(self, to: Any, leaves: Mapping[str, jax.Array]) -> jax.Array:
        """Undoes `split`, with zeros in the padding, for an array of the type ``to``."""
        types, local = self.leaves(to.dtype), to.sharding.shard_shape(to.shape)

        def of_device(leaves: Any) -> jax.Array:
            parts = {k: leaves[n][0] if self.own else leaves[n] for k, n, *_ in self.params}
            if self.cuts:
                group = names(self.workers.group)
                parts = {k: _to_rows(parts, cut, group, cut.rows_per_chunk) for k, cut in self.cuts}
            num_rows = self.bucket.rows_per_chunk if self.deal else math.prod(local) // ROW
            rows = _to_rows(parts, self.bucket, self._over, num_rows)
            if self.deal:
                rows = self._to_owners(matrices.cut_rows(rows, self.deal, self.part))
            return rows.reshape(local).astype(to.dtype)

        specs = ({name: leaf.sharding.spec for name, leaf in types.items()},)
        return jax.shard_map(
            of_device,
            mesh=self.workers.mesh,
            in_specs=specs,
            out_specs=to.sharding.spec,
            check_vma=False,
        )({name: leaves[name].astype(to.dtype) for name in types})

    @property
    def _over(self) -> Any:
        return names(self.workers.group if self.own else self.workers.axis)

    @property
    def _each(self) -> int:
        """Owners of each worker, of a deal."""
        return self.bucket.rows_per_chunk // self.deal.rows if self.deal else 1

    def _to_owners(self, x: jax.Array) -> jax.Array:
        """Rows of matrices from the devices that share them to those that own whole ones, and back."""
        if not (self.deal and self.deal.devices_own and self.part == "matrices"):
            return x
        return wires.swapped(x.reshape(self._each, -1, ROW), self.deal.shared_by).reshape(-1, ROW)


def _to_leaves(x: jax.Array, bucket: BucketLayout | Deal, over: Any) -> dict[int, jax.Array]:
    """The leaves of a bucket, out of all its rows or the chunk that this device has."""
    if len(x) < bucket.num_chunks * bucket.rows_per_chunk:
        x = wires.gather_rows(x, over)
    return bucket.split(x)


def _to_rows(leaves: Any, bucket: BucketLayout | Deal, over: Any, num_rows: int) -> jax.Array:
    """The rows of a bucket that this device has, at least float32: a chunk, or all."""
    if isinstance(bucket, Deal):
        rows = bucket.join({s.leaf: jnp.zeros(s.shape) for s in bucket.segments} | leaves)
    else:
        rows = bucket.join(leaves, common_dtype(jnp.float32, *leaves.values()))
    if num_rows < len(rows):
        rows = lax.dynamic_slice_in_dim(rows, worker_index(over) * num_rows, num_rows)
    return rows


def spread(x: Any, workers: Workers) -> Any:
    """A type with its first dimension cut over all axes of the workers, and as long as that takes."""
    if not x.shape:
        return x
    first, *rest = cuts_of(tuple(x.sharding.spec), x.ndim)
    over = (*first, *[n for n in workers.axes if n not in first])
    rows = round_up(x.shape[0], product(workers.mesh.shape, over))
    spec = P(over, *[cut or None for cut in rest])
    return workers.shape(spec, jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype))
