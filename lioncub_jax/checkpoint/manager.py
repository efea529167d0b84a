"""Saving a training state and going on from it: on the same devices, or with other workers.

A checkpoint holds the arrays of a ``TrainState`` as they lie, with a checksum of each, and a description
of how they lie. Reading one on another mesh goes through a form that knows no mesh (`relayout`). orbax
writes in the background and renames a checkpoint only when it is complete.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax import checks
from lioncub_jax.checkpoint import reshard as relayout
from lioncub_jax.checkpoint import resume
from lioncub_jax.checkpoint.reshard import Layout
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.wires import AxisName

FORMAT = 1
RULES = ("mean", "keep")


class Restored(NamedTuple):
    """What `Checkpoints.restore` found.

    Attributes:
      state: a ``TrainState`` on the present mesh.
      data: what was given to ``save``, such as the position in the data.
      step: the step it was saved at.

    Source: this library; see `Checkpoints` for an example.
    """

    state: Any
    data: Any
    step: int


class Damaged(ValueError):
    """A checkpoint that cannot be read as it was written."""


class Checkpoints:
    """The checkpoints of a run, in a folder of their own; a context manager that waits for the last write.

    Args:
      directory: the folder; made if it is not there. Processes of one run must see the same folder.
      axis_name: mesh axis of the workers, or several as a tuple.
      group_axis: mesh axis of the devices of one worker, if the optimizer has one (two levels).
      keep: how many checkpoints stay; the oldest goes when one more is complete.

    Raises:
      ValueError: for ``keep`` below 1, and a folder that holds anything but checkpoints.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, lioncub_jax as lc
      >>> from lioncub_jax.checkpoint import Checkpoints
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.lion_cub(1e-3, axis_name="data")
      >>> state = lc.init_state(tx, {"w": jnp.ones((2, 3))}, mesh, axis_name="data")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Checkpoints(folder, axis_name="data") as checkpoints:
      ...         checkpoints.save(state, {"next_batch": 7}, wait=True)
      ...         found = checkpoints.restore(state)
      >>> found.step, found.data
      (0, {'next_batch': 7})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        axis_name: AxisName,
        group_axis: AxisName | None = None,
        keep: int = 3,
    ):
        checks.check_count(f"keep={keep!r}", keep)
        checks.check_axis(axis_name)
        self.directory = Path(directory).absolute()
        self._axes = axis_name, group_axis
        self._refused: set[int] = set()
        _check_folder(self.directory)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, state: Any, data: Any = None, wait: bool = False) -> None:
        """Saves a state under its step; its arrays may be donated as soon as this returns.

        Copies the arrays to the host, and writes them in the background. Checkpoints that `restore`
        refused as damaged are removed first.

        Args:
          state: a ``TrainState``.
          data: anything JSON can hold, such as the position in the data.
          wait: return only when the checkpoint is complete.

        Raises:
          ValueError: if there is a checkpoint of this step, or the state is not on a mesh with the axes.
          TypeError: if JSON cannot hold ``data``.
        """
        step = int(state.step)
        self._remove_refused()
        if step in self.steps():
            raise ValueError(
                f"{self._name(step)} is there already: save each step once, or give a run that starts "
                "again from an earlier step a folder of its own"
            )
        layout = relayout.layout_of(state, self._workers(state))
        arrays, keys = _words(state)
        sums = _checksums(arrays)
        about = _sealed(
            {"layout": layout.as_json(), "keys": keys, "sums": sums, "data": _as_json(data)}
        )
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about)
        )
        self._manager.save(step, args=args, force=True)
        if wait:
            self.wait()

    def restore(self, like: Any, *, step: int | None = None, workers: str = "mean") -> Restored:
        """Reads a checkpoint onto the mesh on which ``like`` lies.

        With as many workers as before, every number is what it was. With another number of them, each
        worker's own momentum follows ``workers``; error feedback keeps its mean over the workers; of
        model state floats are averaged, the largest of whole numbers is taken, and random keys stay
        with newcomers folding in their index. What owners hold is one for all and is cut anew. Drift
        that was measured leaf by leaf is 0 until the next measurement where a group now measures it.

        Args:
          like: a fresh ``TrainState`` on the present mesh, from `init_state`; or ``ShapeDtypeStruct``s
            with shardings in its place.
          step: which; None for the newest that is whole.
          workers: ``"mean"``: all get the mean over the workers there were. ``"keep"``: workers that
            survive keep what is theirs, model state too, and newcomers get the mean.

        Returns:
          A ``Restored``.

        Raises:
          FileNotFoundError: if there is no checkpoint, or none of that step.
          ValueError: if it is damaged (with ``step=None``: if all are; a warning names each that is
            passed over), of another model or optimizer, or of a newer version of this library.

        Example:
          See `Checkpoints`.
        """
        if workers not in RULES:
            raise ValueError(f"workers={workers!r}: give one of {', '.join(map(repr, RULES))}")
        target = relayout.layout_of(like, self._workers(like))
        steps = self.steps()
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.directory}; there are {steps}"
            )
        if step is not None:
            return self._restored(step, like, target, workers)
        return self._newest(steps, like, target, workers)

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, damaged or not, in order."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Returns when what was saved is complete on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and gives up the background threads."""
        self._manager.close()

    def _name(self, step: int) -> str:
        return f"checkpoint {self.directory / str(step)}"

    def _workers(self, state: Any) -> Workers:
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(state)]
        meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
        if len(meshes) != 1:
            raise ValueError(
                f"the arrays of the state lie on {len(meshes)} meshes: give a TrainState from init_state, "
                "or one of ShapeDtypeStructs with NamedShardings on one mesh"
            )
        (mesh,) = meshes
        if not isinstance(mesh, Mesh):
            raise ValueError("the state lies on an abstract mesh: give shardings with devices")
        return Workers.on(mesh, *self._axes)

    def _remove_refused(self) -> None:
        for step in sorted(self._refused):
            self._manager.delete(step)
        self._refused.clear()

    def _newest(self, steps: list[int], like: Any, target: Layout, workers: str) -> Restored:
        problems: list[str] = []
        for step in reversed(steps):
            try:
                found = self._restored(step, like, target, workers)
            except Damaged as problem:
                problems.append(str(problem))
                self._refused.add(step)
                continue
            for text in problems:
                warnings.warn(f"{text}; {self._name(step)} is used instead", stacklevel=3)
            return found
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        raise Damaged(f"no checkpoint in {self.directory} is whole: {'; '.join(problems)}")

    def _restored(self, step: int, like: Any, target: Layout, workers: str) -> Restored:
        about = self._about(step)
        saved = Layout.from_json(about["layout"])
        resume.check_same_model(self._name(step), saved, target)
        places = resume.places(saved, target, like, about["keys"])
        arrays = self._arrays(step, places, about["sums"])
        keep = workers == "keep"
        state = resume.placed(saved, target, like, arrays, about["keys"], keep)
        return Restored(state, about["data"], step)

    def _about(self, step: int) -> dict[str, Any]:
        def read() -> Any:
            args = ocp.args.Composite(about=ocp.args.JsonRestore())
            return self._manager.restore(step, args=args)["about"]

        about = self._read(step, "its description", read)
        version = about.get("format") if isinstance(about, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise ValueError(
                f"{self._name(step)} has format {version} and this version of lioncub_jax reads formats "
                f"up to {FORMAT}: install the version that wrote it, or a newer one"
            )
        if not isinstance(about, dict) or _sealed(about.get("body")) != about:
            raise Damaged(
                f"{self._name(step)} is damaged: its description is not as it was written"
            )
        return about["body"]

    def _arrays(self, step: int, places: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
        def read() -> Any:
            args = ocp.args.Composite(arrays=ocp.args.StandardRestore(places))
            return self._manager.restore(step, args=args)["arrays"]

        arrays = self._read(step, "its arrays", read)
        found = _checksums(arrays)
        wrong = [path for path in sums if found[path] != sums[path]]
        if wrong:
            raise Damaged(
                f"{self._name(step)} is damaged: state{wrong[0]}"
                + (f" and {len(wrong) - 1} more arrays are" if wrong[1:] else " is")
                + " not as written"
            )
        return arrays

    def _read(self, step: int, what: str, read: Callable[[], Any]) -> Any:
        """Reads; whatever goes wrong is damage, and damage for all processes."""
        problem, found = None, None
        try:
            found = read()
        except Exception as error:
            problem = error
        failed = _any_process(problem is not None)
        if failed:
            said = "another process could not read it" if problem is None else _first_line(problem)
            raise Damaged(
                f"{self._name(step)} is damaged: {what} cannot be read ({said})"
            ) from problem
        return found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _any_process(flag: bool) -> bool:
    """Whether it is so in any process; all must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def _check_folder(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: give a folder for the checkpoints")
    if not directory.exists():
        return
    others = [x.name for x in sorted(directory.iterdir()) if not _is_checkpoint(x)]
    if others:
        raise ValueError(
            f"{directory} is no folder of checkpoints, it holds {', '.join(map(repr, others[:3]))}: give "
            "an empty folder, one that is not there yet, or one with checkpoints only"
        )


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and path.name.partition(".orbax-checkpoint-tmp")[0].isdecimal()


# --- Arrays and their checksums


def _words(state: Any) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Arrays with elements, by path, random keys as words; of keys the generator and how many words."""
    arrays, keys = {}, {}
    for path, x in relayout.paths_of(state).items():
        words = _key_words(x) if _is_key(x) else x
        if _is_key(x):
            keys[path] = [str(jax.random.key_impl(x)), words.shape[-1]]
        if x.size:
            arrays[path] = words
    return arrays, keys


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


_key_words = jax.jit(jax.random.key_data)


def _checksums(arrays: dict[str, jax.Array]) -> dict[str, list[int]]:
    """Two words for each array, the same however it lies; one wrong byte changes both."""
    if not arrays:
        return {}
    paths = sorted(arrays)
    shardings: list[Any] = [arrays[path].sharding for path in paths]
    mesh = resume.untyped(shardings[0].mesh)
    plain = [jax.device_put(arrays[p], _on(mesh, s)) for p, s in zip(paths, shardings, strict=True)]
    found = np.asarray(_summing(mesh)(plain))
    return {path: [int(word) for word in row] for path, row in zip(paths, found, strict=True)}


def _on(mesh: Mesh, sharding: Any) -> NamedSharding:
    return NamedSharding(mesh, sharding.spec)


@functools.cache
def _summing(mesh: Mesh) -> Callable[..., jax.Array]:
    def sums(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([_checksum(x) for x in arrays])

    return jax.jit(sums, out_shardings=NamedSharding(mesh, P()))


def _checksum(x: jax.Array) -> jax.Array:
    """``uint32[2]``: sums over the elements of a hash of bits and place."""
    words = _bits_of(x)
    index = jnp.zeros(words.shape, jnp.uint32)
    for d in range(words.ndim):
        stride = math.prod(words.shape[d + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) * jnp.uint32(stride)
    # The hash is one to one in the bits, so that a change of one element cannot cancel.
    hashed = [_mix(words ^ _mix(index + jnp.uint32(seed))) for seed in (1, 0x9E3779B9)]
    return jnp.stack([jnp.sum(h, dtype=jnp.uint32) for h in hashed])


def _mix(h: jax.Array) -> jax.Array:
    """A hash that is one to one."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def _bits_of(x: jax.Array) -> jax.Array:
    """The bits of every element, in words; elements of 8 bytes give two."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


# --- Descriptions


def _as_json(data: Any) -> Any:
    try:
        return json.loads(json.dumps(data))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"data={data!r} cannot be held by JSON ({error}): give numbers, strings, lists and dicts"
        ) from error


def _sealed(body: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(body))
    text = json.dumps(body, sort_keys=True)
    return {"format": FORMAT, "body": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}


# --- Being told to stop


@contextlib.contextmanager
def stop_on_sigterm(every: int = 1) -> Iterator[Callable[[int], bool]]:
    """Lets a run end at a step of its own when it is told to stop, as clusters do before they take over.

    Args:
      every: several processes ask each other at steps that are multiples of this; each time the host
        waits for the devices. One process alone knows at once.

    Returns:
      A context manager of ``stopping(step)``: whether SIGTERM has come, to any process. All get the
      same answer at the same step, so all must ask at every step.

    Raises:
      ValueError: outside the main thread, where Python takes no signals, or ``every`` below 1.

    Enter it after ``jax.distributed.initialize``, which has a handler of its own.

    Example:
      >>> from lioncub_jax.checkpoint import stop_on_sigterm
      >>> with stop_on_sigterm() as stopping:
      ...     for step in range(3):
      ...         if stopping(step):
      ...             break
      >>> step
      2
    """
    checks.check_count(f"every={every!r}", every)
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "stop_on_sigterm: Python takes signals in the main thread only; enter it there"
        )
    asked: list[int] = []
    agreed: list[int] = []

    def stopping(step: int) -> bool:
        if not agreed and step % every == 0 and _any_process(bool(asked)):
            agreed.append(step)
        return bool(agreed) or (jax.process_count() == 1 and bool(asked))

    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
