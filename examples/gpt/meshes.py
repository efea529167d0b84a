"""The mesh of a run: which devices are workers, and how one worker's model is cut over its own."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

WORKERS = ("pod", "data")  # outermost first: pods talk over the slowest wires
GROUP = "group"
INNER = ("fsdp", "tensor")
AXES = (*WORKERS, GROUP, *INNER)

# Which dimension of a matrix is cut over "tensor", as in Megatron-LM: heads, hidden units, bytes.
TENSOR_DIMENSION = {"qkv": 2, "out": 0, "up": 1, "down": 0, "read": 0, "write": 1}


class Layout(NamedTuple):
    """A mesh, and what each of its axes is for."""

    mesh: Mesh

    @property
    def voters(self) -> lc.Workers:
        """The workers, as the library wants them."""
        names = tuple(n for n in self.mesh.axis_names if n in WORKERS)
        group = GROUP if GROUP in self.mesh.axis_names else None
        return lc.Workers(self.mesh, names[0] if len(names) == 1 else names, group)

    @property
    def workers(self) -> int:
        return self.size(*WORKERS)

    @property
    def rows(self) -> P:
        """The spec of a batch: the devices of a tensor axis work on the same rows."""
        return P(tuple(n for n in self.mesh.axis_names if n != "tensor"))

    def size(self, *names: str) -> int:
        return math.prod(self.mesh.shape.get(name, 1) for name in names)

    def place(self, rows: np.ndarray, *, leading: int = 0) -> jax.Array:
        """One global array of which each process gives the rows of its own devices."""
        sharding = NamedSharding(self.mesh, P(*[None] * leading, *self.rows))
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    def describe(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        return f"{self.workers} workers on {self.mesh.size} devices ({sizes})"


def parse(text: str) -> dict[str, int]:
    """``"data=4,fsdp=2"`` as sizes by name; raises ``ValueError`` for what is no mesh of the example."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES:
            raise ValueError(f"--mesh {text}: {name!r} is no axis; there are {', '.join(AXES)}")
        if name in sizes:
            raise ValueError(f"--mesh {text}: {name} is given twice; give each axis one size")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh {text}: {name}={size} is no whole number at least 1")
        sizes[name] = int(size)
    if "data" not in sizes:
        raise ValueError(f"--mesh {text}: the workers are missing; add data=N, such as data=4")
    return {name: sizes[name] for name in AXES if name in sizes}


def check(sizes: dict[str, int], *, heads: int, batch: int) -> None:
    """Raises ``ValueError`` where the model or the batch cannot be cut as the mesh wants."""
    tensor = sizes.get("tensor", 1)
    if heads % tensor:
        raise ValueError(f"--heads {heads} must be a multiple of tensor={tensor} in --mesh")
    cutting = {name: sizes[name] for name in (GROUP, "fsdp") if sizes.get(name, 1) > 1}
    parts = math.prod(cutting.values())
    if batch % parts:
        raise ValueError(
            f"--batch {batch} is what one worker takes in a step; its devices share it out, so it must "
            f"be a multiple of {parts} ({', '.join(f'{n}={s}' for n, s in cutting.items())} in --mesh)"
        )


def build(sizes: dict[str, int] | None) -> Layout:
    """A mesh of these sizes, or of workers only: up to eight, or all devices of all processes."""
    devices = jax.devices()
    every = jax.process_count() > 1
    sizes = sizes or {"data": len(devices) if every else min(8, len(devices))}
    wanted = math.prod(sizes.values())
    mesh = ",".join(f"{name}={size}" for name, size in sizes.items())
    if wanted > len(devices):
        raise ValueError(
            f"--mesh {mesh} takes {wanted} devices: there are {len(devices)} {devices[0].platform} "
            "devices; give fewer, or set JAX_PLATFORMS=cpu to let the CPU stand in"
        )
    if every and wanted < len(devices):
        raise ValueError(
            f"--mesh {mesh} takes {wanted} devices of the {len(devices)} that {jax.process_count()} "
            f"processes have: a mesh must have all of them, so that each process has its part"
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return Layout(
        jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), devices=devices[:wanted], axis_types=kinds
        )
    )


def specs(params: Any, mesh: Mesh) -> Any:
    """Specs of the parameters, cut over fsdp and tensor; vectors are whole on every device."""
    return jax.tree_util.tree_map_with_path(lambda path, x: _spec(path, x.shape, mesh), params)


def _spec(path: Any, shape: tuple[int, ...], mesh: Mesh) -> P:
    entries: list[str | None] = [None] * len(shape)
    if len(shape) < 2:
        return P()
    names = {str(getattr(key, "key", key)) for key in path}
    if names & {"read", "write"} and set(INNER) <= set(mesh.axis_names):
        return P()  # XLA aborts on looking up, and on the loss, in what these axes cut together
    for layer, dimension in TENSOR_DIMENSION.items():
        if layer in names and _divides(mesh, "tensor", shape[dimension]):
            entries[dimension] = "tensor"
    free = [i for i, size in enumerate(shape) if not entries[i] and _divides(mesh, "fsdp", size)]
    if free:
        entries[max(free, key=lambda i: shape[i])] = "fsdp"
    return P(*entries)


def _divides(mesh: Mesh, axis: str, size: int) -> bool:
    return axis in mesh.axis_names and size % mesh.shape[axis] == 0
