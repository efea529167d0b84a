"""Compiled programs that are kept in a folder, so that a run that is started again compiles nothing.

JAX's own compilation cache is written by process 0 alone, and on CPUs no other process finds what it
wrote: all the others compile at every start. Here each process keeps its own.
"""

import hashlib
import importlib.metadata
import os
import platform
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
from jax import extend
from jax.experimental import serialize_executable
from jax.sharding import Mesh

DIGEST = 32  # bytes of a SHA-256, in front of what is kept
PACKAGES = "jax", "jaxlib"
FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"


class Programs:
    """Runs a jitted function by programs that are read from a folder, or compiled and written to it.

    A program is found by all that it is made of: the lowered text, the devices and their process, the
    versions of JAX, XLA and its flags, and the machine. Who can write to the folder can run anything in
    your processes: give one that is yours alone.

    Args:
      jitted: of ``jax.jit``.
      mesh: of the devices that it runs on.
      options: what the compiler was told besides; part of what a program is found by.
      folder: made if it is not there; a slow one, or one in memory.

    Raises:
      ValueError: for a folder that is a file.

    Source: this library.
    """

    def __init__(self, jitted: Any, mesh: Mesh, options: Any, folder: str | os.PathLike[str]):
        self._jitted, self._mesh, self._options = jitted, mesh, options
        self._folder = Path(folder).absolute()
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"programs={str(folder)!r} is a file: give a folder")
        self._ready: dict[Any, Any] = {}

    def __call__(self, *args: Any, static: Any) -> Any:
        """Runs it: ``static`` is the last argument, which is not traced."""
        leaves, tree = jax.tree.flatten(args)
        key = tree, static, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        if key not in self._ready:
            self._ready[key] = self.compiled(self._jitted.lower(*args, static))
        return self._ready[key](*args)

    def compiled(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """The program, read or compiled and written."""
        path = self._folder / f"{self._name(lowered)}.program"
        kept = path.read_bytes() if path.exists() else None
        if kept is not None and hashlib.sha256(kept[DIGEST:]).digest() == kept[:DIGEST]:
            return serialize_executable.deserialize_and_load(
                kept[DIGEST:],
                lowered.in_tree,
                lowered.out_tree,
                execution_devices=list(self._mesh.devices.flat),
            )
        if kept is not None:
            warnings.warn(f"{path} is not as it was written: compiled anew", stacklevel=4)
        compiled = lowered.compile()
        program, _, _ = serialize_executable.serialize(compiled)
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(path, hashlib.sha256(program).digest() + program)
        return compiled

    def _name(self, lowered: jax.stages.Lowered) -> str:
        devices = self._mesh.devices.flat
        made_of = [
            lowered.as_text(), *map(importlib.metadata.version, PACKAGES), platform.node(),
            extend.backend.get_backend().platform_version,
            *(os.environ.get(flags, "") for flags in FLAGS), self._options, jax.process_index(),
            [(d.id, d.device_kind, d.process_index) for d in devices],
        ]  # fmt: skip
        return hashlib.sha256("\0".join(map(str, made_of)).encode()).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: two runs may share a folder, and one may be killed."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
