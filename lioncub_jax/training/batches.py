"""Batches on the mesh: global arrays as they are, and of every process the rows that it has."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh import processes
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import parts

_ONE = "a global jax.Array, such as jax.make_array_from_callback makes"


class Batches:
    """Where the batches of a step lie, and what must fit.

    A mesh cuts a batch into parts. Of an array that a process alone has, such as one of NumPy, the rows
    are those of the parts that its devices take, in the order of the parts.
    """

    def __init__(self, workers: Workers, spec: P, local_steps: int, accumulate: int):
        mesh = workers.mesh
        self._sharding, self._parts = NamedSharding(mesh, spec), parts(spec, mesh)
        self._steps = local_steps * accumulate
        local = f"{local_steps} local steps, " if local_steps > 1 else ""
        self._why = f"{workers.count} workers, {local}{accumulate} gradient accumulation steps"
        if self._parts > workers.count:
            each = self._parts // workers.count
            self._why += f", and {each} parts of each worker's by {spec}"
        self._taken: dict[int, set[int]] = {}  # by process: parts
        lies: Any = NamedSharding(mesh, P(*spec[:1])).devices_indices_map((self._parts,))
        for device, (part,) in lies.items():
            self._taken.setdefault(device.process_index, set()).add(part.start or 0)
        self._rows: dict[str, float] = {}  # for a part, when processes compared theirs

    def check(self, batch: Any) -> None:
        """Has the processes compare what each gives, once, so that all raise where it does not fit."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        own = {_name(path): x for path, x in leaves if processes.is_own(x, self._sharding)}
        me, crc = jax.process_index(), 0
        rows = {name: _rows(x) / len(self._taken[me]) for name, x in own.items()}
        if not own or rows == self._rows:
            return
        if self._rows:
            raise ValueError(
                f"process {me} gives {rows} rows for each part of the batch, and gave {self._rows} when "
                "processes compared theirs: give as many in each step, or make another step for others"
            )
        for x in own.values():
            crc = processes.checksum(x, crc)
        each = processes.told([rows, crc])
        seen: dict[Any, int] = {}  # parts, and checksums
        for process, taken in self._taken.items():
            if each[process][0] != rows:
                raise ValueError(
                    f"process {me} gives {rows} rows for each part of the batch, and process {process} "
                    f"{each[process][0]}: give as many for each; drop or pad what is left over"
                )
            other = seen.setdefault(frozenset(taken), process)
            if each[other][1] != each[process][1]:
                raise ValueError(
                    f"processes {other} and {process} take the same rows of the batch, and gave different "
                    f"ones: give both the same, or cut the batch over the axes that lie between them, "
                    f"which batch_spec={self._sharding.spec} does not name"
                )
            other = seen.setdefault(each[process][1], process)
            if self._taken[other] != taken:
                warnings.warn(
                    f"processes {other} and {process} gave the same rows, so the batch has them twice: "
                    f"each gives those of its own devices. Give what all have alike as {_ONE}",
                    stacklevel=3,
                )
        for name, x in own.items():
            self._parts_of(name, x)
        self._rows = rows

    def place(self, path: Any, x: Any) -> Any:
        """An array of a batch, or the shape of a global one, on the mesh."""
        rows = _rows(x) // self._parts_of(_name(path), x) * self._parts
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=self._sharding)
        return processes.put(x, self._sharding, rows)

    def _parts_of(self, name: str, x: Any) -> int:
        """Of how many parts an array has the rows."""
        me, own = jax.process_index(), processes.is_own(x, self._sharding)
        taken = len(self._taken[me]) if own else self._parts
        if _rows(x) == 0 or _rows(x) % (taken * self._steps):
            whose = (
                f": the rows of process {me} of {jax.process_count()}, whose devices take {taken} of "
                f"{self._parts} parts. Give what all have alike as {_ONE}"
            )
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}: its first dimension must be a positive multiple of "
                f"{taken * self._steps} ({self._why}){whose if own else ''}"
            )
        return taken


def _name(path: Any) -> str:
    return f"batch{jax.tree_util.keystr(path)}"


def _rows(x: Any) -> int:
    return jnp.shape(x)[0] if jnp.ndim(x) else 0
