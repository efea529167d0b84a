"""Agreement of all processes of a run: they meet, and learn what the first of them did."""

import time
from collections.abc import Callable
from typing import TypeVar

import jax

from lioncub_jax.mesh.hosts import gathered_json

Result = TypeVar("Result")


def barrier(key: str, seconds: int) -> None:
    """Returns when all processes have come.

    Raises:
      TimeoutError: after ``seconds``.
      Exception: at once, where a process has died.
    """
    if jax.process_count() > 1:
        # JAX's own barriers wait for ever. Loaded only here: it takes as long as jax.
        from orbax.checkpoint import multihost  # type: ignore[import-untyped]

        began = time.monotonic()
        try:
            multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * seconds)
        except Exception as error:
            if time.monotonic() - began < 0.9 * seconds:
                raise
            raise TimeoutError from error


def from_first(act: Callable[[], Result]) -> Result:
    """Acts in process 0 and gives its result, which JSON must hold, to all.

    Raises:
      OSError, ValueError: in all processes, where process 0 raises one.
    """
    result, error = None, None
    if jax.process_index() == 0:
        try:
            result = act()
        except (OSError, ValueError) as problem:
            error = problem
    result, is_os_error, text = gathered_json(
        [result, isinstance(error, OSError), str(error or "")]
    )[0]
    if text:
        raise error or (OSError if is_os_error else ValueError)(text)
    return result


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {line[:200]}"
