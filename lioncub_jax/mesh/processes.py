"""Several processes: what they tell each other, and how what each has on its host comes onto a mesh of all.

Whoever asks is answered when all have asked. Random keys are no numbers: what lies on devices, is summed up
and is kept are their words.
"""

import json
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_of, product

Result = TypeVar("Result")
MOST_TOLD = 2**26  # bytes that a process may say at once: room is made for as many from each
_ONE = "a global jax.Array, such as jax.make_array_from_callback makes"


def any_process(flag: bool) -> bool:
    """Whether it is so in any process; all must ask."""
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def together(sentence: str, act: Callable[[], Result]) -> Result:
    """Acts in every process; where one fails all raise: it its own error, the others a sentence."""
    try:
        found = act()
    except Exception:
        any_process(True)
        raise
    if any_process(False):
        raise RuntimeError(f"{sentence}: another process failed, and its error says why")
    return found


def told(what: Any) -> list[Any]:
    """What each process says, anything that JSON can hold, in the order of the processes.

    Raises:
      ValueError: in all processes, where one says more than `MOST_TOLD` bytes, or what is no JSON.
    """
    mine = np.frombuffer(json.dumps(what).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size))
    if not 0 < sizes.min() <= sizes.max() <= MOST_TOLD:
        raise ValueError(
            f"processes want to say {sizes.tolist()} bytes to each other, and each may say 1 to "
            f"{MOST_TOLD}: run the same program in all"
        )
    each = multihost_utils.process_allgather(np.pad(mine, (0, sizes.max() - mine.size)))
    found = []
    for process, (text, size) in enumerate(zip(each, sizes, strict=True)):
        try:
            found.append(json.loads(text[:size].tobytes()))
        except (ValueError, RecursionError):
            raise ValueError(
                f"process {process} says what is no JSON: run the same program in all processes"
            ) from None
    return found


def is_key(x: Any) -> bool:
    """Whether something is an array of typed random keys."""
    return jnp.issubdtype(getattr(x, "dtype", np.void), jax.dtypes.prng_key)


def words_of(x: Any) -> Any:
    """An array; of random keys their words, ``uint32[..., words]``."""
    return jax.random.key_data(x) if is_key(x) else x


def of_words(words: jax.Array, like: Any) -> jax.Array:
    """What `words_of` made of an array like that one."""
    return (
        jax.random.wrap_key_data(words, impl=jax.random.key_impl(like)) if is_key(like) else words
    )


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
        for path, _ in sorted(each[0].items() ^ sums.items()):
            raise ValueError(
                f"{call}: {path} differs between processes 0 and {other}: all workers start from "
                "the same; give each process the same seed, or read the same checkpoint"
            )


def checksum(x: Any) -> int:
    """Of the bytes of an array."""
    return zlib.crc32(np.ascontiguousarray(words_of(x)).tobytes())


class Batches:
    """Where the batches of a step lie, and what must fit.

    A mesh cuts a batch into parts. Of an array that a process alone has, such as one of NumPy, the rows
    are those of the parts that its devices take, in the order of the parts.
    """

    def __init__(self, workers: Workers, spec: P, local_steps: int, accumulate: int):
        mesh = workers.mesh
        self._whole = NamedSharding(mesh, P())
        self._sharding = NamedSharding(mesh, spec)
        self._parts = product(mesh.shape, axes_of(spec[0]))
        self._steps = local_steps * accumulate
        self._why = (
            f"{workers.count} workers, {self._parts // workers.count} parts of each worker's by {spec}, "
            f"{local_steps} local steps, {accumulate} gradient accumulation steps"
        )
        self._taken: dict[int, set[int]] = {}  # by process: parts
        lies: Any = NamedSharding(mesh, P(*spec[:1])).devices_indices_map((self._parts,))
        for device, (part,) in lies.items():
            self._taken.setdefault(device.process_index, set()).add(part.start or 0)
        self._rows: dict[str, float] = {}  # for a part, when processes compared theirs

    def check(self, batch: Any, cut: Callable[[], Sequence[bool]]) -> None:
        """Has the processes compare what each gives, once, so that all raise where it does not fit.

        Args:
          batch: a tree of arrays.
          cut: says for each leaf whether it is cut over the workers, or goes whole to each.
        """
        if self._sharding.is_fully_addressable:
            return
        leaves = zip(jax.tree_util.tree_leaves_with_path(batch), cut(), strict=True)
        both = {_name(path): (x, c) for (path, x), c in leaves if is_own(x, self._sharding)}
        own = {name: x for name, (x, c) in both.items() if c}
        whole = {name: checksum(x) for name, (x, c) in both.items() if not c}
        me = jax.process_index()
        rows = {name: _rows(x) / len(self._taken[me]) for name, x in own.items()}
        if not both or rows == self._rows:
            return
        if self._rows:
            raise ValueError(
                f"process {me} gives {rows} rows for each part of the batch, and gave {self._rows} when "
                "processes compared theirs: give as many in each step, or make another step for others"
            )
        each = told([rows, [checksum(x) for x in own.values()], whole])
        seen: dict[Any, int] = {}  # parts, and checksums
        for process, taken in self._taken.items():
            if each[process][0] != rows:
                raise ValueError(
                    f"process {me} gives {rows} rows for each part of the batch, and process {process} "
                    f"{each[process][0]}: give as many for each; drop or pad what is left over"
                )
            other = seen.setdefault(frozenset(taken), process)
            if each[process][2] != whole:
                raise ValueError(
                    f"processes {me} and {process} gave different arrays that go whole to each worker, of "
                    f"{', '.join(whole) or 'none'}: give the same in all processes"
                )
            if each[other][1] != each[process][1]:
                raise ValueError(
                    f"processes {other} and {process} take the same rows of the batch, and gave different "
                    f"ones: give both the same, or cut the batch over the axes that lie between them, "
                    f"which batch_spec={self._sharding.spec} does not name"
                )
            other = seen.setdefault(tuple(each[process][1]), process)
            if self._taken[other] != taken:
                warnings.warn(
                    f"processes {other} and {process} gave the same rows, so the batch has them twice: "
                    f"each gives those of its own devices. Give what all have alike as {_ONE}",
                    stacklevel=3,
                )
        for name, x in own.items():
            self.rows_of_all(name, x)
        self._rows = rows

    def place(self, x: Any, rows: int | None) -> Any:
        """An array, or the shape of a global one, on the mesh: by its rows in all, or None to lie whole."""
        lies = self._whole if rows is None else self._sharding
        return (
            x.update(sharding=lies) if isinstance(x, jax.ShapeDtypeStruct) else put(x, lies, rows)
        )

    def rows_of_all(self, name: str, x: Any) -> int:
        """How many rows an array has, those of other processes too."""
        me, own = jax.process_index(), is_own(x, self._sharding)
        taken, rows = len(self._taken[me]) if own else self._parts, _rows(x)
        if rows == 0 or rows % (taken * self._steps):
            whose = (
                f": the rows of process {me} of {jax.process_count()}, whose devices take {taken} of "
                f"{self._parts} parts. Give what all have alike as {_ONE}"
            )
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}: its first dimension must be a positive multiple of "
                f"{taken * self._steps} ({self._why}){whose if own else ''}"
            )
        return rows // taken * self._parts


def _name(path: Any) -> str:
    return f"batch{jax.tree_util.keystr(path)}"


def _rows(x: Any) -> int:
    return jnp.shape(x)[0] if jnp.ndim(x) else 0
