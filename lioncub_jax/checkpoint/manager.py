"""Saving a training state and going on from it: on the same devices, or with other workers.

A checkpoint holds the leaves of a state (`leaves`), with a checksum of each, and their names. orbax
writes in the background and renames a checkpoint only when it is complete.

Only what is not as it was written is damage. A disk, a permission or a memory that fails says nothing
about a checkpoint: such errors are raised as they are, and the checkpoint stays.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from lioncub_jax.arguments import check_count
from lioncub_jax.axes import AxisName, spelled
from lioncub_jax.checkpoint import leaves, private_files, states
from lioncub_jax.checkpoint.leaves import Leaf, Target
from lioncub_jax.mesh.placement import Workers, names_of
from lioncub_jax.mesh.processes import any_process, together, told
from lioncub_jax.mesh.sums import checksums, untyped

FORMAT = 3  # 1 and 2: versions 0.1 and 0.2, arrays as they lay
RULES = ("mean", "keep")
RUN = "run"  # a file beside the checkpoints: the name of their run


class Restored(NamedTuple):
    """What `Checkpoints.restore` found.

    Attributes:
      state: like the one given to ``restore``, with what was saved.
      data: what was given to ``save``, such as the position in the data.
      step: the step it was saved at.

    Source: this library; see `Checkpoints` for an example.
    """

    state: Any
    data: Any
    step: int


class Damaged(ValueError):
    """A checkpoint that is not as it was written.

    A checksum or a seal does not match, a file is missing, or it cannot be read, and no disk, device or
    memory says that it failed.
    """


class Checkpoints:
    """The checkpoints of a run, in a folder of their own; a context manager that writes in the background.

    Args:
      directory: the folder; made if it is not there. Processes of one run must see the same folder.
      workers: as the optimizer's: a ``Workers``, or the name of their mesh axis, or several as a tuple. Its
        mesh need not be that of the states: they know theirs.
      keep: how many checkpoints stay; the oldest goes when one more is complete.
      timeout: seconds after which a save that some process has not written is an error in all of them. A
        process whose disk fails tells nobody, so the others wait for it as long as this.

    Raises:
      ValueError: for ``keep`` or ``timeout`` below 1, or a folder that holds anything but checkpoints.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, lioncub_jax as lc
      >>> from lioncub_jax.checkpoint import Checkpoints
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.lion_cub(1e-3, workers=workers)
      >>> state = lc.init_state(tx, {"w": jnp.ones((2, 3))}, workers)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Checkpoints(folder, workers=workers) as checkpoints:
      ...         checkpoints.save(state, {"next_batch": 7}, wait=True)
      ...         found = checkpoints.restore(state)
      >>> found.step, found.data
      (0, {'next_batch': 7})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        workers: AxisName | Workers,
        keep: int = 3,
        timeout: int = 1200,
    ):
        check_count(f"keep={keep!r}", keep)
        check_count(f"timeout={timeout!r}", timeout)
        self._axes: Any = [*map(spelled, names_of(workers))]
        self.directory = Path(directory).absolute()
        self._refused: set[int] = set()
        self._under_way = -1  # the step that was saved last
        self._closed = self._entered = self._failed = False
        _check_folder(self.directory)
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,  # halves that a run left when it was killed
            # Else the end of a program that cuts off a save may wait five minutes for a folder.
            async_options=ocp.AsyncOptions(
                timeout_secs=timeout, create_directories_asynchronously=False
            ),
        )
        self._manager = ocp.CheckpointManager(self.directory, options=self._options)
        atexit.register(self._at_exit)

    def __enter__(self) -> "Checkpoints":
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(
        self, state: Any, data: Any = None, wait: bool = False, *, step: int | None = None
    ) -> None:
        """Saves a state under its step; its arrays may be donated as soon as this returns.

        Inside the ``with`` statement it copies the arrays to the host and writes them in the background;
        leaving the statement waits. Outside it returns when the checkpoint is complete, because nobody
        would wait for the last one, and the end of a program cuts off what it writes.

        Checkpoints that `restore` passed over as damaged are renamed to ``<step>.damaged`` first, and kept.

        Args:
          state: a ``StepState``, a ``TrainState`` of flax, or any tree of arrays, such as a dict
            with ``"params"`` and an ``nnx.Optimizer``. Arrays that lie on no mesh, and numbers, are
            taken as the same everywhere.
          data: anything JSON can hold, such as the position in the data.
          wait: return only when the checkpoint is complete, inside a ``with`` statement too.
          step: its number; None for the state's field or entry ``step``.

        Raises:
          ValueError: if there is a checkpoint of this step, the arrays of the state are on several meshes
            or on none with the axes, or ``close`` was called; if an array was donated, what is each
            worker's own has no leading axis of workers, or an array is labelled one value and its
            copies differ, to the bit.
          TypeError: if ``state`` has no step or holds what is no array, or JSON cannot hold ``data``.
          OSError: if a checkpoint could not be written, such as on a full disk; where it was written in the
            background, by the next call of ``save``, ``wait`` or ``close``.
        """
        self._check_open("save")
        states.check_there("save(state)", state)
        state, workers = self.on_mesh("save(state)", state)
        step = states.step_of(state, step)
        self._set_refused_aside()
        if step in self.steps():
            raise ValueError(
                f"{self._name(step)} is there already: save each step once, or give a run that starts "
                "again from an earlier step a folder of its own"
            )
        layout = leaves.layout_of(state, workers)
        arrays = leaves.arrays_of(state)
        saved = leaves.leaves_of(layout, untyped(workers.mesh), arrays)
        sums, apart = checksums(arrays | saved)
        states.check_one_value(state, apart, workers)
        known = {name: x._replace(sums=sums[name]) for name, x in leaves.described(layout).items()}
        about = _sealed({"leaves": known, "data": as_json(data)})
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(saved), about=ocp.args.JsonSave(about)
        )
        self.wait()
        self._under_way = step
        if any_process(self._failed):
            self._end()
            # Without the halves of that save: threads of orbax may still write to them.
            left = dataclasses.replace(self._options, cleanup_tmp_directories=False)
            self._manager = ocp.CheckpointManager(self.directory, options=left)
            self._failed = False
        with self._writing():
            # orbax waits five minutes for a folder that its first process could not make.
            together(f"{self._name(step)} was not written", lambda: self._try_folder(step))
            self._manager.save(step, args=args, force=True)
        if wait or not self._entered:
            self.wait()

    def restore(self, like: Any, *, step: int | None = None, workers: str = "mean") -> Restored:
        """Reads a checkpoint onto the mesh on which ``like`` lies.

        With as many workers as before, every number is what it was. With another number of them, each
        worker's own momentum follows ``workers``; error feedback keeps its mean over the workers; of
        model state floats are averaged, the largest of whole numbers is taken, and random keys stay
        with newcomers folding in their index. What owners hold is one for all and is cut anew. Drift
        that was measured leaf by leaf is unknown until a group that now measures it has done so.

        Args:
          like: a fresh state of the kind that was saved, on the present mesh, such as that of
            `init_state`; or a ``ShapeDtypeStruct`` with its sharding for each array. What lies on no mesh
            comes back as the same everywhere.
          step: which; None for the newest that is whole.
          workers: ``"mean"``: all get the mean over the workers there were. ``"keep"``: workers that
            survive keep what is theirs, model state too, and newcomers get the mean.

        Returns:
          A ``Restored``.

        Raises:
          FileNotFoundError: if there is no checkpoint, or none of that step.
          Damaged: a ``ValueError``, if it is not as it was written (with ``step=None``: if all are not;
            a warning names each that is passed over).
          ValueError: if it is of another model or optimizer, or of another format, if ``like`` is not
            on one mesh with the axes or has no axis of workers where each has its own, or ``close`` was
            called.
          TypeError: if ``like`` holds what is no array.
          Exception: a file, a permission or the memory that fails is raised as it is, and nothing is
            passed over; where it failed in another process, as a ``RuntimeError``.

        Example:
          See `Checkpoints`.
        """
        self._check_open("restore")
        check_rule(workers)
        target = self.target(like)
        steps = self.steps()
        if step is None:
            return self._newest(steps, target, workers)
        if step not in steps:
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.directory}; there are {steps}"
            )
        return self._restored(step, target, workers)

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, damaged or not, in order."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Returns when what was saved is complete on disk; errors as in `save`."""
        if not self._failed:
            with self._writing():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and gives up the background threads."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._at_exit)
            try:
                self.wait()
            finally:
                self._end()

    def _end(self) -> None:
        """Ends orbax's threads. Some still write other parts of a save that failed, and fail again."""
        with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
            self._manager.close()

    def _at_exit(self) -> None:
        """Says so if the end of the interpreter, which stops the threads of orbax, cut off a save."""
        try:
            self.wait()
        except Exception as problem:
            raise RuntimeError(
                f"the program ended while a checkpoint was written to {self.directory}, and it is not "
                f"complete ({_first_line(problem)}): leave the with statement, or call "
                "checkpoints.close(), before the program ends"
            ) from None

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ValueError(
                f"{call}: these checkpoints of {self.directory} are closed; call it before close() and "
                "inside the with statement, or open the folder again with Checkpoints(...)"
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says which checkpoint an error of the disk is of; orbax names neither it nor the folder."""
        handled = sys.exception()
        try:
            yield
        except Exception as problem:
            self._failed = True
            why = _why_not_written(_chain(problem, handled))
            if why is None:
                raise
            raise OSError(
                f"{self._name(self._under_way)} was not written ({why}), and those before it stay: free or "
                "mend that disk, and start again from the newest"
            ) from problem

    def _try_folder(self, step: int) -> None:
        if jax.process_index() == 0:
            tried = self.directory / f"{step}.orbax-checkpoint-tmp-tried"
            tried.mkdir(exist_ok=True)
            tried.rmdir()

    def run(self) -> str:
        """The name of the run, kept in the folder, and so another where the folder was emptied.

        All processes must ask. A copy of the folder has the same name.

        Raises:
          OSError: in process 0, where the file cannot be read, or made where there is none; in the others a
            ``RuntimeError``.
        """
        named = self.directory / RUN

        def name() -> str:
            if jax.process_index() > 0:
                return ""
            found = named.read_text() if named.exists() else ""
            if not found:  # or a machine died before it was on the disk
                found = uuid.uuid4().hex
                private_files.write(str(named), found.encode())
            return found

        found = together(f"{named}, the name of the run, cannot be read or written", name)
        return told(found)[0]

    def _name(self, step: int) -> str:
        return f"checkpoint {self.directory / str(step)}"

    def on_mesh(self, call: str, state: Any) -> tuple[Any, Workers]:
        """The state with all its arrays on its mesh, and the workers of these checkpoints on it."""
        state, mesh = states.on_one_mesh(call, state)
        return state, Workers(mesh, *self._axes)

    def target(self, like: Any) -> Target:
        """What `restore` is asked for."""
        return Target(like, *self.on_mesh("restore(like)", like))

    def _set_refused_aside(self) -> None:
        """Renames what was passed over, so that its step is free; somebody may still read it."""
        if not self._refused:
            return
        self.wait()

        def rename() -> None:
            for step in sorted(self._refused if jax.process_index() == 0 else ()):
                folder = self.directory / str(step)
                others = len(list(self.directory.glob(f"{step}.damaged*")))
                folder.rename(f"{folder}.damaged{f'-{others + 1}' if others else ''}")

        together(f"a damaged checkpoint in {self.directory} cannot be renamed", rename)
        self._refused.clear()
        self._manager.reload()

    def _newest(self, steps: list[int], target: Target, workers: str) -> Restored:
        problems: dict[int, str] = {}
        for step in reversed(steps):
            try:
                found = self._restored(step, target, workers)
            except Damaged as problem:
                problems[step] = str(problem)
                continue
            for text in problems.values():
                warnings.warn(f"{text}; {self._name(step)} is used instead", stacklevel=3)
            # Only now: that an older one can be read shows that the fault is not in the reading.
            self._refused.update(problems)
            return found
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        raise Damaged(f"no checkpoint in {self.directory} is whole: {'; '.join(problems.values())}")

    def _restored(self, step: int, target: Target, workers: str) -> Restored:
        about = self._about(step)
        saved = leaves.from_json(about["leaves"])
        leaves.check_same_model(self._name(step), saved, target.leaves)
        arrays = self._arrays(step, saved, target)
        return Restored(target.made(saved, arrays, workers == "keep"), about["data"], step)

    def _about(self, step: int) -> dict[str, Any]:
        found = self._read(step, "about", "its description", ocp.JsonCheckpointHandler().restore)
        about = found if isinstance(found, dict) else {}
        if any_process(_sealed(about.get("body")) != about):
            version = about.get("format")
            if isinstance(version, int) and version != FORMAT:
                written = f"0.{version}" if version < FORMAT else "a newer version"
                raise ValueError(
                    f"{self._name(step)} has format {version}, and this version of lioncub_jax reads "
                    f"format {FORMAT}: read it with the one that wrote it, {written}"
                )
            raise Damaged(
                f"{self._name(step)} is damaged: its description is not as it was written"
            )
        return about["body"]

    def _arrays(self, step: int, saved: dict[str, Leaf], target: Target) -> dict[str, Any]:
        places = {
            name: target.place(name, leaf, target.stays(name, leaf)) for name, leaf in saved.items()
        }
        arrays = self._read(step, "arrays", "its arrays", lambda path: _read_arrays(path, places))
        found, _ = checksums(arrays)
        wrong = sorted(path for path, leaf in saved.items() if found[path] != leaf.sums)
        if wrong:
            raise Damaged(
                f"{self._name(step)} is damaged: state{wrong[0]}"
                + (f" and {len(wrong) - 1} more arrays are" if wrong[1:] else " is")
                + " not as written"
            )
        return arrays

    def _read(self, step: int, item: str, what: str, read: Callable[[Path], Any]) -> Any:
        """Reads with one of orbax's handlers: its manager waits for all processes, a failed one too."""
        name, folder, handled = self._name(step), self.directory / str(step), sys.exception()

        def careful() -> tuple[Any, str]:
            try:
                return read(folder / item), ""
            except Exception as problem:
                chain = _chain(problem, handled)
                # Or the whole checkpoint was taken away meanwhile.
                if not (_is_damage(chain) and folder.is_dir()):
                    raise
                return None, _first_line(chain[-1])

        sentence = f"{name} was not read, and nothing is known of its state"
        found, damage = together(sentence, careful)
        if any_process(bool(damage)):
            why = damage or "another process says why"
            raise Damaged(f"{name} is damaged: {what} cannot be read ({why})")
        return found


def check_rule(workers: str) -> None:
    """Raises ``ValueError`` unless it says what workers get where their number changes."""
    if workers not in RULES:
        raise ValueError(f"workers={workers!r}: give one of {', '.join(map(repr, RULES))}")


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
    """A checkpoint, one that is not complete, or a damaged one; or the name of the run."""
    if path.name == RUN or (path.name.startswith(RUN) and path.suffix == private_files.PART):
        return path.is_file()
    name = r"\d+(\.orbax-checkpoint-tmp.*|\.damaged(-\d+)?)?"
    return path.is_dir() and re.fullmatch(name, path.name) is not None


# --- What fails in a process, and what is damage


# How tensorstore begins where a disk or a machine fails (UNKNOWN: EIO), or what it adds to the system's
# words; of a checkpoint's bytes it says anything else.
_OF_A_MACHINE = re.compile(
    r"(ABORTED|CANCELLED|DEADLINE_EXCEEDED|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|UNAVAILABLE"
    r"|UNKNOWN): |.*\[os_error_code='(?!(2|20|21)')",  # that a file is missing, or is no file
    re.DOTALL,
)
# A status alone may be anybody's: a collective that fails says "UNKNOWN: Gloo ...".
_OF_TENSORSTORE = re.compile(r"\[(os_error_code|tensorstore_spec)=")
_MISSING = FileNotFoundError, IsADirectoryError, NotADirectoryError


def _is_damage(chain: list[BaseException]) -> bool:
    """Whether what was read is not what was written: what no disk, device or memory says of itself.

    What is wanted was checked before: it is the model's, and lies on its mesh.
    """
    return not any(
        isinstance(link, (MemoryError, jax.errors.JaxRuntimeError))
        or (isinstance(link, OSError) and not isinstance(link, _MISSING))
        or _OF_A_MACHINE.match(str(link))
        for link in chain
    )


def _why_not_written(chain: list[BaseException]) -> str | None:
    """What the system said of a disk, here or in another process; None for other errors."""
    late = None
    for link in chain:
        if isinstance(link, TimeoutError):
            late = "another process did not write its part in time, and its error says why"
        elif isinstance(link, OSError):
            return link.strerror or str(link)
        elif isinstance(link, ValueError) and _OF_TENSORSTORE.search(str(link)):
            number = re.search(r"os_error_code='(\d+)'", str(link))
            return os.strerror(int(number[1])) if number else _first_line(link)
    return late


def _chain(problem: BaseException, handled: BaseException | None) -> list[BaseException]:
    """An error and those behind it, up to one that the caller was handling."""
    found: list[BaseException] = []
    link: BaseException | None = problem
    while link is not None and link is not handled:
        found.append(link)
        link = link.__cause__ or link.__context__
    return found


class _Arrays(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Ends all its reads before it fails.

    Where one read fails orbax closes the loop over the others, and each of them would then print a
    traceback of its own, hundreds of lines, around the one that matters.
    """

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        before = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        finally:
            await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)


def _read_arrays(folder: Path, places: dict[str, Any]) -> dict[str, Any]:
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _Arrays()))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    restore = ocp.checkpoint_utils.construct_restore_args(places)
    return handler.restore(folder, args=ocp.args.PyTreeRestore(places, restore_args=restore))


def _first_line(error: BaseException) -> str:
    line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {line[:200]}"


# --- Descriptions


def as_json(data: Any) -> Any:
    """As JSON gives it back; raises ``TypeError`` for what it cannot hold."""
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


# --- Being asked to stop


@contextlib.contextmanager
def stop_on_sigterm(every: int = 10) -> Iterator[Callable[[int], bool]]:
    """Lets a run end at a step of its own when it is asked to stop, as clusters do before they take over.

    Args:
      every: several processes ask each other at steps that are multiples of this. To ask, the host waits
        until the devices have done all steps given to them, so at every step the devices would idle
        while the host prepares the next; ``every`` steps must fit into the time between SIGTERM and
        the kill. One process alone asks nobody and knows at once.

    Returns:
      A context manager of ``stopping(step)``: whether SIGTERM has come, to any process. All get the
      same answer at the same step, so all must call it at every step.

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
    check_count(f"every={every!r}", every)
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "stop_on_sigterm: Python takes signals in the main thread only; enter it there"
        )
    asked: list[int] = []
    agreed = False

    def stopping(step: int) -> bool:
        nonlocal agreed
        if not agreed and (jax.process_count() == 1 or step % every == 0):
            agreed = any_process(bool(asked))
        return agreed

    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
