"""Several processes: messages between them, and arrays of each host on a mesh of all.

Every process must make each call, or the others wait. Random keys are placed, compared and kept as the
words that they consist of.
"""

import contextlib
import functools
import json
import os
import re
import sys
import threading
import time
import traceback
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from lioncub_jax.mesh.axes import Axes
from lioncub_jax.mesh.placement import device_ids
from lioncub_jax.mesh.specs import product
from lioncub_jax.mesh.start import after
from lioncub_jax.version import __version__

Result = TypeVar("Result")
MOST_BYTES = 2**26  # bytes that a process may say at once: room is made for as many from each
WAITS_SECONDS = 20.0  # until it is said; less than JAX waits for heartbeats
LINGER_SECONDS = 3.0
_COLLECTIVE = re.compile(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)\b(?:.* : (\(.*))?")
ONE = "a global jax.Array, such as jax.make_array_from_callback makes"


class Waits:
    """Says on standard error that this process waits for others, before JAX ends it in words of its own.

    JAX ends all processes when heartbeats of one that died are late, by C++, and nothing can be said then.

    Attributes:
      latest: the result of the newest step, in which processes take part.
    """

    latest: jax.Array | None = None

    def __init__(self) -> None:
        # It ends with the main thread; a daemon that is still inside of JAX then would end in C++.
        threading.Thread(target=_watch, args=(weakref.ref(self),)).start()


def _watch(of: "weakref.ref[Waits]") -> None:
    longest, main = 0.0, threading.main_thread()
    while main.is_alive() and (waits := of()):
        latest, began = waits.latest, time.monotonic()
        del waits
        with (
            _says_that_it_waits(max(WAITS_SECONDS, 3 * longest)),
            contextlib.suppress(RuntimeError),  # for those who read the result, or it was donated
        ):
            jax.block_until_ready(latest)
        longest = max(longest, time.monotonic() - began)
        main.join(0.5)


def _says_that_it_waits(seconds: float) -> contextlib.AbstractContextManager[None]:
    """A context that says on standard error, after so many seconds, that this process waits."""

    def say_so() -> None:
        print(
            f"process {jax.process_index()} has waited {seconds:.0f} s for the other processes: one is "
            "slow or has died. If it died, JAX ends all when its heartbeats are late "
            "(heartbeat_timeout_seconds of lc.mesh.join); start all again from the newest "
            "checkpoint",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    return after(seconds, say_so)


@contextlib.contextmanager
def end_on_error() -> Iterator[None]:
    """A context in which an error ends this process at once, so that other processes do not wait for it.

    Without it, a process that leaves by an error waits for the others for minutes: in ``Checkpoints`` for a
    save of all, then in JAX. They wait for it in a collective. This context is the innermost. It prints the
    error and ends the process. The others see that their connections are lost, print that, and end too. In
    one process an error is raised as always.

    Example:
      >>> import lioncub_jax as lc
      >>> with lc.mesh.end_on_error():
      ...     pass  # steps

    Source: this library.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        why = "it failed"
        if isinstance(error, jax.errors.JaxRuntimeError):
            why = "it has lost another, or it failed"
        who = f"process {jax.process_index()} ends: {why}"
        print(f"{who}. Start all again. {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exc()
        sys.stdout.flush()
        # When the first process ends, JAX ends the others: they have time to say the same.
        time.sleep(LINGER_SECONDS if jax.process_index() == 0 else 0)
        os._exit(1)


def gathered_arrays(x: ArrayLike) -> np.ndarray:
    """The arrays of all processes, in their order; all must call it, with arrays of one type."""
    devices = Counter(device.process_index for device in jax.devices())
    if len({*devices.values()}) > 1:
        raise ValueError(
            f"processes have {[devices[i] for i in range(jax.process_count())]} devices, in their order: "
            "give as many to each"
        )
    with _says_that_it_waits(WAITS_SECONDS):
        return np.asarray(multihost_utils.process_allgather(np.asarray(x)))


def any_process(flag: bool) -> bool:
    """True where the flag is set in any process; all must call it."""
    return bool(gathered_arrays(flag).any())


def together(sentence: str, act: Callable[[], Result]) -> Result:
    """Calls ``act`` in every process. If one fails it raises its own error, the others ``sentence``."""
    try:
        result = act()
    except Exception:
        any_process(True)
        raise
    if any_process(False):
        raise RuntimeError(f"{sentence}: another process failed, and its error says why")
    return result


def gathered_json(what: Any) -> list[Any]:
    """Messages of all processes, anything that JSON can hold, in the order of the processes.

    Raises:
      ValueError: in all processes, where one says more than `MOST_BYTES` bytes, or what is no JSON.
    """
    mine = np.frombuffer(json.dumps(what).encode(), np.uint8)
    sizes = gathered_arrays(
        np.int32(min(mine.size, 2**31 - 1))
    )  # of one type, with jax_enable_x64 too
    if not 0 < sizes.min() <= sizes.max() <= MOST_BYTES:
        raise ValueError(
            f"processes want to say {sizes.tolist()} bytes to each other, and each may say 1 to "
            f"{MOST_BYTES}: run the same program in all"
        )
    each = gathered_arrays(np.pad(mine, (0, sizes.max() - mine.size)))
    messages = []
    for process, (text, size) in enumerate(zip(each, sizes, strict=True)):
        try:
            messages.append(json.loads(text[:size].tobytes()))
        except (ValueError, RecursionError):
            raise ValueError(
                f"process {process} says what is no JSON: run the same program in all processes"
            ) from None
    return messages


def is_key(x: object) -> bool:
    """True for an array of typed random keys."""
    return jnp.issubdtype(getattr(x, "dtype", np.void), jax.dtypes.prng_key)


def is_raw_key(x: Any) -> bool:
    """True for what may be a key of ``jax.random.PRNGKey``, an array of words."""
    if getattr(x, "dtype", None) != np.uint32 or x.ndim != 1:
        return False
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return bool(x.shape == words.shape)


def key_words(x: jax.Array) -> jax.Array:
    """An array; of random keys their words, ``uint32[..., words]``."""
    return jax.random.key_data(x) if is_key(x) else x


def from_key_words(words: jax.Array, like: Any) -> jax.Array:
    """Undoes `key_words` of an array like that one."""
    return (
        jax.random.wrap_key_data(words, impl=jax.random.key_impl(like)) if is_key(like) else words
    )


def is_process_local(x: Any, sharding: NamedSharding) -> bool:
    """True for an array of this process only, which is to lie on devices of others too."""
    of_host = not isinstance(x, jax.ShapeDtypeStruct)
    return not sharding.is_fully_addressable and getattr(x, "is_fully_addressable", of_host)


def put(x: Any, sharding: NamedSharding, whole: tuple[int, ...] | None = None) -> jax.Array:
    """Places an array on a mesh; one of this process only by its own devices, and nothing is sent.

    Args:
      x: global, or of this process only: the same array on all, or those rows that its devices take.
      sharding: where to.
      whole: the shape on all processes, if this one has the rows of its devices.
    """
    if is_key(x):  # device_put knows keys in one process only
        words = key_words(x)
        whole = whole and (*whole, *words.shape[x.ndim :])
        return from_key_words(put(words, sharding, whole), x)
    if not is_process_local(x, sharding):
        return jax.device_put(x, sharding)
    # Neither does device_put know rows: it compares what is given on all processes, over the network.
    host = np.asarray(x)
    shape = host.shape if whole is None else whole
    return jax.make_array_from_process_local_data(sharding, host, shape)


def check_same(what: str, tree: dict[str, Any], mesh: Mesh) -> None:
    """Raises ``ValueError`` for arrays of single processes that differ between them, by a checksum of each.

    And for meshes with their devices in another order: they would wait for each other for ever.
    """
    sharding = NamedSharding(mesh, P())
    if not sharding.is_fully_addressable:
        leaves = _by_name(tree).items()
        own = {name: x for name, x in leaves if is_process_local(x, sharding)}
        devices, cure = [str(device_ids(mesh))], f"{_SAME_SEED}; of a batch only rows may differ"
        _check_same_lines(what, {"devices of the mesh": devices, "values": _checksums(own)}, cure)


def crc(x: Any) -> int:
    """CRC of the bytes of an array."""
    return zlib.crc32(np.ascontiguousarray(key_words(x)).tobytes())


def check_same_step(lowered: jax.stages.Lowered, **arguments: Any) -> None:
    """Compares a compiled step between processes, before they wait in it for each other.

    Another ``bucket_size``, optimizer or version on one host ends in a hang, and another learning rate or
    seed in two models. Steps of ``make_train_step`` compare themselves in their first call, and
    ``init_state`` the parameters. A training loop of your own calls this in every process, once, in front
    of the first step; all of them raise or none. Checksums travel: of versions, of the types of the
    arguments, of values that all processes share among them, such as parameters and injected rates, and of
    the program without names and places in files. Where one differs, up to 200 characters of the first line
    that does travel too, for the error. Host callbacks are part of a program: give all processes the same.

    Args:
      lowered: ``jax.jit(step).lower(...)``.
      arguments: of the step, trees of arrays, by name. Values are compared of arrays of this process, which
        must be the same in all, and of global ones that are replicated.

    Raises:
      ValueError: where something differs: in which process, and what is the first of it.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> step, params = jax.jit(lambda params: params * 2), jnp.ones(3)
      >>> lc.mesh.check_same_step(step.lower(params), params=params)

    Source: this library.
    """
    if jax.process_count() == 1:
        return
    check_same_program(lowered, arguments)
    values = {}
    for name, x in _by_name(arguments).items():
        if isinstance(x, jax.ShapeDtypeStruct):
            continue
        x = key_words(x)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            if not x.is_fully_replicated:
                continue
            x = x.addressable_data(0)
        values[name] = x
    _check_same_lines("the step", {"values": _checksums(values)}, _SAME_SEED)


def _checksums(arrays: dict[str, Any]) -> list[str]:
    return [f"{name}, {jnp.result_type(x)}, checksum {crc(x)}" for name, x in arrays.items()]


def _by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """The leaves of arguments, by name and path."""
    paths = jax.tree_util.tree_leaves_with_path(arguments)
    return {f"{path[0].key}{jax.tree_util.keystr(path[1:])}": x for path, x in paths}


def check_same_program(lowered: jax.stages.Lowered, arguments: dict[str, Any]) -> None:
    """Compares all but the values of arrays, as `check_same_step`; the arguments are global."""
    leaves = _by_name(arguments)
    program = lowered.as_text().splitlines()
    collectives = [match for line in program if (match := _COLLECTIVE.search(line))]
    meshes = [getattr(getattr(x, "sharding", None), "mesh", None) for x in leaves.values()]
    devices = [str(device_ids(x)) for x in meshes if isinstance(x, jax.sharding.Mesh)]
    _check_same_lines("the step", {
        "versions": [f"jax {jax.__version__}, lioncub_jax {__version__}"],
        "devices of the mesh": [*dict.fromkeys(devices)],
        "arguments": [f"{name}: {jax.typeof(x)}" for name, x in leaves.items()],
        "scalars": _scalars(leaves),
        "collectives": [f"{x[1]} {x[2] or ''}" for x in collectives],
        "lines of the program": program,
    })  # fmt: skip


def check_same_scalars(calls: int, arguments: dict[str, Any]) -> None:
    """Compares numbers among the arguments of a step, in a few calls, and then in each 128th.

    A rate that one process has set by hand lies on no mesh, and in the next call in what the mesh calls one
    value. So the value that each process has is what is compared.
    """
    if calls & (calls - 1) == 0 or calls % 128 == 0:
        _check_same_lines("the step", {"scalars": _scalars(_by_name(arguments))})


def _scalars(leaves: dict[str, Any]) -> list[str]:
    """Numbers that are the same in all processes, with their names."""
    return [
        f"{name} = {np.asarray(key_words(x)).tolist()}"
        for name, x in leaves.items()
        if jnp.ndim(x) == 0 and (not isinstance(x, jax.Array) or x.is_fully_replicated)
    ]


_SAME_CODE = (
    "Run the same code with the same arguments (optimizer, bucket_size, rates) and versions on each "
    "host, and set a rate on all of them; what is each host's own belongs in the batch"
)


_SAME_SEED = "Give each process the same mesh and seed, or read the same checkpoint"


def _check_same_lines(what: str, parts: dict[str, list[str]], cure: str = _SAME_CODE) -> None:
    """Raises ``ValueError`` for the first part that is not the same in all processes."""
    sums = [zlib.crc32("\n".join(lines).encode()) for lines in parts.values()]
    # Of one size, whatever the processes run.
    each = gathered_arrays(np.array(sums, np.uint32)).T.tolist()
    for (name, lines), theirs in zip(parts.items(), each, strict=True):
        usual, odd, who = who_differs(theirs)
        if not who:
            continue
        crcs = gathered_json([zlib.crc32(line.encode()) for line in lines])
        at = next(i for i, (a, b) in enumerate(zip_longest(crcs[usual], crcs[odd])) if a != b)
        first = gathered_json(lines[at].strip()[:200] if at < len(lines) else "nothing more")
        raise ValueError(
            f"{name} of {what} differ: {who}. Process {usual} has `{first[usual]}`, process {odd} has "
            f"`{first[odd]}`. {cure}"
        )


def who_differs(values: list[int]) -> tuple[int, int, str]:
    """A process with the most frequent value, one with another, and words: none where all agree."""
    common, count = Counter(values).most_common(1)[0]
    odd = [i for i, value in enumerate(values) if value != common]
    if not odd:
        return 0, 0, ""
    names = ", ".join(map(str, odd if 2 * count > len(values) else range(len(values))))
    others = f" against the other {count}" if 2 * count > len(values) else ""
    return values.index(common), odd[0], f"process{'es' * (',' in names)} {names}{others}"


def part_of_device(mesh: Mesh, axes: Axes) -> dict[jax.Device, int]:
    """The part that each device takes, of those into which axes of a mesh cut rows."""
    slices: Any = NamedSharding(mesh, P(axes)).devices_indices_map((product(mesh.shape, axes),))
    return {device: part.start or 0 for device, (part,) in slices.items()}


@functools.cache
def parts_taken(mesh: Mesh, axes: Axes) -> dict[int, frozenset[int]]:
    """The parts that its devices take, by the process."""
    taken: dict[int, set[int]] = {}
    for device, part in part_of_device(mesh, axes).items():
        taken.setdefault(device.process_index, set()).add(part)
    return {process: frozenset(parts) for process, parts in taken.items()}


def check_rows(rows: dict[str, float], arrays: dict[str, Any], mesh: Mesh, axes: Axes) -> None:
    """Compares the rows that each process has alone, such as those of NumPy: all raise, or none.

    Args:
      rows: for each such array the rows that this process gives for each part of the batch.
      arrays: the arrays.
      mesh: that of the workers.
      axes: those that cut the rows into parts.

    Raises:
      ValueError: for other numbers of rows; for processes whose devices take the same parts, and which gave
        different rows.

    Warns:
      UserWarning: for processes whose devices take different parts, and which gave the same rows.
    """
    me, taken = jax.process_index(), parts_taken(mesh, axes)
    each = gathered_json([rows, [crc(x) for x in arrays.values()]])
    with_parts: dict[frozenset[int], int] = {}  # the first process with these parts
    with_sums: dict[tuple[int, ...], int] = {}  # the first process with these rows
    for process, parts in taken.items():
        theirs, sums = each[process]
        if theirs != rows:
            raise ValueError(
                f"process {me} gives {rows} rows for each part of the batch, and process {process} "
                f"{theirs}: give as many for each; drop or pad what is left over"
            )
        other = with_parts.setdefault(parts, process)
        if each[other][1] != sums:
            raise ValueError(
                f"processes {other} and {process} take the same rows of the batch, and gave different "
                f"ones: give both the same, or cut the batch over the axes that lie between them, by "
                f"batch_spec of make_train_step, which now names {axes}"
            )
        other = with_sums.setdefault(tuple(sums), process)
        if sums and taken[other] != parts:
            warnings.warn(
                f"processes {other} and {process} gave the same rows, so the batch has them twice: "
                f"each gives those of its own devices. Give what all have alike as {ONE}",
                stacklevel=6,
            )
