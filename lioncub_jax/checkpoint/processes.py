"""What processes of a run tell each other when they save and restore; all must ask."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def any_process(flag: bool) -> bool:
    """Whether it is so in any process; all must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def together(sentence: str, act: Callable[[], None]) -> None:
    """Acts in every process; where one fails all raise: it its own error, the others a sentence."""
    try:
        act()
    except Exception:
        any_process(True)
        raise
    if any_process(False):
        raise RuntimeError(f"{sentence}: another process failed, and its error says why")


def told(what: Any) -> list[Any]:
    """What each process says, anything that JSON can hold, in the order of the processes."""
    if jax.process_count() == 1:
        return [json.loads(json.dumps(what))]
    mine = np.frombuffer(json.dumps(what).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size))
    padded = np.pad(mine, (0, int(sizes.max()) - mine.size))
    each = multihost_utils.process_allgather(padded)
    return [json.loads(text[:size].tobytes()) for text, size in zip(each, sizes, strict=True)]
