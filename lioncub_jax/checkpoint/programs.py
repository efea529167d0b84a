"""Compiled programs that are kept in a folder, so that a run that is started again compiles nothing.

JAX's own compilation cache is written by process 0 alone, and on CPUs no other process finds what it
wrote: all the others compile at every start. Here each process keeps its own, compiled without that cache:
what XLA's CPU backend has read from it carries no code that could be written again.
"""

import contextlib
import hashlib
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax import extend
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from lioncub_jax import watch
from lioncub_jax.checkpoint import private_files

CONFIG = (  # what changes a program and is not in its text
    "jax_disable_most_optimizations", "jax_optimization_level", "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort", "jax_memory_fitting_effort",
)  # fmt: skip
FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
CACHE = "jax_enable_compilation_cache"
FORMAT = "2"  # of 1 some were written without their code
# Its default. An option makes JAX compile what it has compiled in this process before.
ANEW: dict[str, str | bool] = {"xla_embed_ir_in_executable": False}


class Programs:
    """Runs a jitted function by programs that are read from a folder, or compiled and written to it.

    A program is found by all that it is made of: the lowered text, the devices and their process, the
    versions of JAX, XLA and its flags, and the machine. Who can write a program can run anything in your
    processes: the folder must be yours alone, which is looked at at each use, and what another user may
    write, or what has another name than it was written under, is compiled anew.

    Args:
      jitted: of ``jax.jit``.
      mesh: of the devices that it runs on.
      options: what the compiler was told besides; part of what a program is found by.
      folder: made if it is not there; a slow one, or one in memory.

    Raises:
      ValueError: for a folder that is a file or a link, or that another user owns or can change or rename.

    Source: this library.
    """

    def __init__(self, jitted: Any, mesh: Mesh, options: Any, folder: str | os.PathLike[str]):
        self._jitted, self._mesh, self._options = jitted, mesh, options
        self._folder = Path(folder).absolute()
        with contextlib.suppress(FileNotFoundError), private_files.opened(self._folder):
            pass  # it is looked at again when a program is read or written
        self._ready: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        """Runs it; the last argument is not traced."""
        *traced, static = args
        leaves, tree = jax.tree.flatten(traced)
        key = tree, static, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        if key not in self._ready:
            self._ready[key] = self._compiled(self._jitted.lower(*args))
        return self._ready[key](*traced)

    def _compiled(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """The program, read or compiled and written; a warning says what cannot be read or kept."""
        name = f"{self._name(lowered)}.program"
        try:
            with private_files.opened(self._folder) as folder:
                program = bytes(private_files.read(folder, name))
            kept: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                program,
                lowered.in_tree,
                lowered.out_tree,
                execution_devices=list(self._mesh.devices.flat),
            )
        except FileNotFoundError:
            pass
        except Exception as problem:  # whatever it is, what is asked for can be compiled
            warnings.warn(f"{self._folder / name} is compiled anew: {problem}", stacklevel=4)
        else:
            watch.look(self._jitted.__name__, [kept.as_text() or ""])  # nothing was compiled
            return kept
        with _without_cache():
            compiled = lowered.compile(compiler_options=ANEW)
        try:
            program, _, _ = serialize_executable.serialize(compiled)
            with private_files.opened(self._folder, make=True) as folder:
                private_files.seal(folder, name, program)
        except Exception as problem:  # such as a full disk, or a callback that cannot be written
            warnings.warn(
                f"a compiled step is not kept in {self._folder}, and the next start compiles it again: "
                f"{problem}",
                stacklevel=4,
            )
        return compiled

    def _name(self, lowered: jax.stages.Lowered) -> str:
        made_of = [
            FORMAT, lowered.as_text(), jax.__version__, jaxlib.__version__, platform.node(),
            extend.backend.get_backend().platform_version,
            *(os.environ.get(flags, "") for flags in FLAGS), self._options, jax.process_index(),
            [(d.id, d.device_kind, d.process_index) for d in self._mesh.devices.flat], self._mesh,
            *(getattr(jax.config, name, None) for name in CONFIG),
        ]  # fmt: skip
        return hashlib.sha256("\0".join(map(str, made_of)).encode()).hexdigest()


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compiles without JAX's compilation cache; JAX asks for the option once, until it is reset."""
    enabled = getattr(jax.config, CACHE)
    jax.config.update(CACHE, False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update(CACHE, enabled)
        compilation_cache.reset_cache()
