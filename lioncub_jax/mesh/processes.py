"""Several processes: what they tell each other, and how what each has on its host comes onto a mesh of all.

Whoever asks is answered when all have asked.
"""

import json
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from lioncub_jax.mesh.keys import is_key, of_words, words_of


def any_process(flag: bool) -> bool:
    """Whether it is so in any process; all must ask."""
    return bool(_from_each(np.array(flag)).any())


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
    mine = np.frombuffer(json.dumps(what).encode(), np.uint8)
    sizes = _from_each(np.array(mine.size))
    each = _from_each(np.pad(mine, (0, int(sizes.max()) - mine.size)))
    return [json.loads(text[:size].tobytes()) for text, size in zip(each, sizes, strict=True)]


def _from_each(x: np.ndarray) -> np.ndarray:
    if jax.process_count() == 1:
        return x[None]
    from jax.experimental import multihost_utils  # not loaded for a single process

    return np.asarray(multihost_utils.process_allgather(x))


def is_own(x: Any, sharding: NamedSharding) -> bool:
    """Whether this process alone has an array, which is to lie on devices of others too."""
    of_host = not isinstance(x, jax.ShapeDtypeStruct)
    return not sharding.is_fully_addressable and getattr(x, "is_fully_addressable", of_host)


def put(x: Any, sharding: NamedSharding, rows: int | None = None) -> jax.Array:
    """Places an array on a mesh; one of this process alone by its own devices, and nothing is sent.

    Args:
      x: global, or of this process alone: the same array on all, or those rows that its devices take.
      sharding: where to.
      rows: of all processes, if its own are the rows of its devices.
    """
    if is_key(x):  # device_put knows keys in one process only
        return of_words(put(words_of(x), sharding, rows), x)
    if not is_own(x, sharding):
        return jax.device_put(x, sharding)
    # Neither does device_put know rows: it compares what is given on all processes, over the network.
    host = np.asarray(x)
    shape = host.shape if rows is None else (rows, *host.shape[1:])
    return jax.make_array_from_process_local_data(sharding, host, shape)


def check_same(call: str, tree: Any, sharding: NamedSharding) -> None:
    """Raises ``ValueError`` for arrays that processes have each, and not alike, by a checksum of each."""
    if sharding.is_fully_addressable:
        return
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    own = {jax.tree_util.keystr(path): checksum(x) for path, x in leaves if is_own(x, sharding)}
    each = told(own)
    for other, sums in enumerate(each):
        for path in {**each[0], **sums}:
            if each[0].get(path) != sums.get(path):
                raise ValueError(
                    f"{call}: {path} differs between processes 0 and {other}: all workers start from "
                    "the same; give each process the same seed, or read the same checkpoint"
                )


def checksum(x: Any, before: int = 0) -> int:
    """Of the bytes of an array, and of what was summed up before."""
    return zlib.crc32(np.ascontiguousarray(words_of(x)).tobytes(), before)
