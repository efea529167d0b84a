"""Saving a training state and going on from it: on the same devices, or with other workers.

A checkpoint holds the leaves of a state (`leaves`), with a checksum of each, and their names, in files of
its own (`files`). It is written in the background, read back, and then it counts.

Only what is not as it was written is damage. A disk, a permission or a memory that fails says nothing
about a checkpoint: such errors are raised as they are, and the checkpoint stays.
"""

import atexit
import contextlib
import errno
import json
import math
import os
import signal
import threading
import time
import uuid
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lioncub_jax.checkpoint import files, leaves, private_files, states
from lioncub_jax.checkpoint.files import Damaged
from lioncub_jax.checkpoint.leaves import Leaf, Target
from lioncub_jax.exchange.arguments import check_count
from lioncub_jax.exchange.layout import Holder
from lioncub_jax.mesh.axes import AxisName, spelled
from lioncub_jax.mesh.checksum import checksums, untyped
from lioncub_jax.mesh.hosts import any_process, together, told
from lioncub_jax.mesh.placement import Workers, names_of

RULES = ("mean", "keep")
_MISSING = FileNotFoundError, IsADirectoryError, NotADirectoryError, Damaged
_MEETINGS: Counter[int] = Counter()  # by the name of a folder


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


class Gone(Exception):
    """A checkpoint was taken away since it was listed, as when newer ones are complete."""


class Checkpoints:
    """The checkpoints of a run, in a folder of their own; a context manager that writes in the background.

    It makes, changes and deletes nothing before the first `save`. Every process of a run makes one and
    calls the same methods in the same order; `steps`, `wait` and `close` each may call alone.

    Args:
      directory: the folder; the first save makes it. Processes of one run must see the same folder.
      workers: as the optimizer's: a ``Workers``, or the name of their mesh axis, or several as a tuple. Its
        mesh need not be that of the states: they know theirs.
      keep: how many checkpoints stay; the oldest goes when one more is complete and was read back.
      best: ``"min"`` or ``"max"``: the one whose ``save(metric=)`` is the smallest or largest stays too.
      timeout: seconds after which what some process has not called, or has not written, is an error in
        all others.

    Raises:
      ValueError: for ``keep`` or ``timeout`` below 1, another ``best``, a URL, a folder that begins with
        ``~``, or one that holds no checkpoint and something else.

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
      ...         params = checkpoints.restore_params(state.params).state
      >>> found.step, found.data
      (0, {'next_batch': 7})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        workers: AxisName | Workers,
        keep: int = 3,
        best: str | None = None,
        timeout: int = 1200,
    ):
        check_count(f"keep={keep!r}", keep)
        check_count(f"timeout={timeout!r}", timeout)
        if best not in (None, "min", "max"):
            raise ValueError(
                f"best={best!r}: give 'min' or 'max', or None to keep the newest alone"
            )
        self._axes: Any = [*map(spelled, names_of(workers))]
        self._keep, self._best, self._timeout = keep, best, timeout
        self.directory, self._before = files.check_directory(directory)
        self._refused: set[int] = set()
        self._restored: int | None = None
        self._closed = False
        self._writer = ThreadPoolExecutor(1)  # no thread before its first task
        self._writing: Future[list[str]] | None = None
        atexit.register(self._at_exit)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self._meet("close")
        finally:
            self.close()

    def save(
        self,
        state: Any,
        data: Any = None,
        wait: bool = False,
        *,
        step: int | None = None,
        metric: Any = None,
    ) -> None:
        """Saves a state under its step; its arrays may be donated as soon as this returns.

        It copies the arrays to the host and writes them in the background. The next save, `wait`, the end
        of the ``with`` statement and that of the program wait until the checkpoint is complete: read back,
        and under its name.

        Checkpoints that `restore` passed over as damaged are renamed to ``<step>.damaged`` first, and those
        newer than the one that it read to ``<step>.abandoned``; nothing deletes them.

        Args:
          state: a ``StepState``, a ``TrainState`` of flax, or any tree of arrays, such as a dict
            with ``"params"`` and an ``nnx.Optimizer``. Arrays that lie on no mesh, and numbers, are
            taken as the same everywhere.
          data: anything JSON can hold, such as the position in the data.
          wait: return only when the checkpoint is complete.
          step: its number; None for the state's field or entry ``step``.
          metric: a number, such as the validation loss, for ``best``; NaN is never best.

        Raises:
          ValueError: if there is a checkpoint of this step, or of later ones of which none was restored;
            the arrays of the state are on several meshes or on none with the axes, or ``close`` was called;
            if an array was donated, what is each worker's own has no leading axis of workers, or an array
            is labelled one value and its copies differ, to the bit.
          TypeError: if ``state`` has no step or holds what is no array, or JSON cannot hold ``data``.
          OSError: if a checkpoint could not be written, such as on a full disk; where it was written in the
            background, by the next call of ``save``, ``wait`` or ``close``. A ``TimeoutError`` where some
            process does not call it.
        """
        self._call("save")
        self._end_last()
        states.check_there("save(state)", state)
        state, workers = self.on_mesh("save(state)", state)
        step, metric = states.step_of(state, step), self._number(metric)
        body = {"step": step, "metric": metric, "data": as_json(data)}
        layout = leaves.layout_of(state, workers)
        arrays = leaves.arrays_of(state)
        saved = leaves.leaves_of(layout, untyped(workers.mesh), arrays)
        sums, apart = checksums(arrays | saved)
        states.check_one_value(state, apart, workers)
        body["leaves"] = {n: x._replace(sums=sums[n]) for n, x in leaves.described(layout).items()}
        body["tiles"], sizes = files.plan(saved)
        pieces = files.copied(saved, body["tiles"])
        half, lock = self._of_first(step, lambda: self._prepared(step))
        self._refused.clear()
        self._restored, self._before = None, []
        written = files.sealed(body), sizes, pieces
        self._writing = self._writer.submit(self._write, step, self.directory / half, lock, written)
        if wait:
            self.wait()

    def restore(self, like: Any, *, step: int | None = None, on_resize: str = "mean") -> Restored:
        """Reads a checkpoint onto the mesh on which ``like`` lies; it changes nothing in the folder.

        With as many workers as before, every number is what it was. With another number of them, each
        worker's own momentum follows ``on_resize``; error feedback keeps its mean over the workers; of
        model state floats are averaged, the largest of whole numbers is taken, and random keys stay
        with newcomers folding in their index. What owners hold is one for all and is cut anew. Drift
        that was measured leaf by leaf is unknown until a group that now measures it has done so.

        Args:
          like: a fresh state of the kind that was saved, on the present mesh, such as that of
            `init_state`; or a ``ShapeDtypeStruct`` with its sharding for each array. What lies on no mesh
            comes back as the same everywhere.
          step: which; None for the newest that is whole.
          on_resize: for another number of workers. ``"mean"``: all get the mean over the workers there
            were. ``"keep"``: workers that survive keep what is theirs, model state too, and newcomers get
            the mean.

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
          TimeoutError: where some process does not call it.
          Exception: a file, a permission or the memory that fails is raised as it is, and nothing is
            passed over; where it failed in another process, as a ``RuntimeError``.

        Example:
          See `Checkpoints`.
        """
        self._call("restore")
        check_rule(on_resize)
        target = self.target(like)

        def read(step: int) -> Restored:
            about = self._about(step)
            saved = leaves.from_json(about["leaves"])
            leaves.check_same_model(self._name(step), saved, target.leaves)
            places = {n: target.place(n, x, target.stays(n, x)) for n, x in saved.items()}
            arrays = self._arrays(step, about, saved, places)
            return Restored(target.made(saved, arrays, on_resize == "keep"), about["data"], step)

        found, problems = self._found(step, read)
        # Only now: that an older one can be read shows that the fault is not in the reading.
        self._refused.update(problems)
        self._restored = found.step
        return found

    def restore_params(self, like: Any, *, step: int | None = None) -> Restored:
        """Reads the parameters of a checkpoint alone, such as to serve or to evaluate a model.

        Args:
          like: a tree of arrays or of ``ShapeDtypeStruct``s, as the field or entry ``params`` of the state
            that was saved. What has no sharding is put on the first device.
          step: which; None for the newest that is whole.

        Returns:
          A ``Restored`` whose ``state`` is the parameters.

        Raises:
          ValueError: if the parameters have other names, shapes or dtypes; else as `restore`.
        """
        self._call("restore_params")
        places = states.places_of(like)

        def read(step: int) -> Restored:
            about = self._about(step)
            saved = leaves.params_of(leaves.from_json(about["leaves"]))
            wanted = {
                path: Leaf(x.shape, str(x.dtype), Holder.ALL)
                for path, x in places.items()
                if x.size
            }
            named = {f".params{path}": leaf for path, (_, leaf) in saved.items()}
            leaves.check_same_model(
                self._name(step), named, {f".params{path}": x for path, x in wanted.items()}
            )
            of_files = {saved[path][0]: places[path] for path in wanted}
            arrays = self._arrays(step, about, dict(saved.values()), of_files)
            by_path = {path: arrays[saved[path][0]] for path in wanted}
            return Restored(states.placed_like(like, by_path), about["data"], step)

        return self._found(step, read)[0]

    def best(self) -> int | None:
        """The step with the best metric, for ``restore(step=)``; None where none has one.

        Raises:
          ValueError: without ``Checkpoints(best=)``.
        """
        self._call("best")
        if self._best is None:
            raise ValueError(
                "best(): give Checkpoints(..., best='min') or 'max', and save(metric=)"
            )
        return self._of_first(None, self._best_step)

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, damaged or not, in order."""
        return files.listing(self.directory).steps

    def wait(self) -> None:
        """Returns when what was saved is complete on disk; errors as in `save`."""
        if self._writing is None:
            return
        wait([self._writing])
        writing, self._writing = self._writing, None
        for note in writing.result():
            warnings.warn(note, stacklevel=2)

    def close(self) -> None:
        """Waits and gives up the background thread."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._at_exit)
            try:
                self.wait()
            finally:
                self._writer.shutdown()

    def _at_exit(self) -> None:
        """Says what the last save failed on; the end of the program has waited for it."""
        try:
            self.wait()
        except OSError as problem:
            raise RuntimeError(
                f"the program has ended, and its last checkpoint is not complete: {problem}. Leave the "
                "with statement, or call checkpoints.close(), before the program ends, to learn of it there"
            ) from None

    # --- All processes together

    def _call(self, call: str) -> None:
        """Begins a call that all processes make."""
        if self._closed:
            raise ValueError(
                f"{call}: these checkpoints of {self.directory} are closed; call it before close() and "
                "inside the with statement, or open the folder again with Checkpoints(...)"
            )
        if self._writing is not None:
            wait([self._writing])  # its error is for save, wait and close
        self._meet(call)

    def _meet(self, call: str) -> None:
        """Raises in a process that waits alone: no sum over devices ends before all have come."""
        name = zlib.crc32(os.fsencode(self.directory.name))  # a host may mount it elsewhere
        _MEETINGS[name] += 1
        try:
            _barrier(f"checkpoints {name} {_MEETINGS[name]} {call}", self._timeout)
        except Exception as problem:
            why = "" if isinstance(problem, TimeoutError) else f" ({_first_line(problem)})"
            raise TimeoutError(
                f"{call}: process {jax.process_index()} waited up to {self._timeout} s for all "
                f"{jax.process_count()} processes{why}. Every process makes the "
                f"Checkpoints of {self.directory} and calls their methods in the same order, not process "
                "0 alone; if one is slower, give Checkpoints(..., timeout=)"
            ) from None

    def _end_last(self) -> None:
        """Has all processes fail where the last save failed in one."""
        failed: OSError | None = None
        try:
            self.wait()
        except OSError as problem:
            failed = problem
        if any_process(failed is not None):
            raise failed or OSError(
                f"a checkpoint in {self.directory} was not written: another process says why"
            )

    def _of_first(self, step: int | None, act: Callable[[], Any]) -> Any:
        """What process 0 finds, for all; errors too, those of the system with the name of the step."""
        found, failed = None, None
        if jax.process_index() == 0:
            try:
                found = act()
            except (OSError, ValueError) as problem:
                failed = problem if step is None else self._not_written(step, problem)
        answer = told([found, isinstance(failed, OSError), str(failed or "")])[0]
        if answer[2]:
            raise failed or (OSError if answer[1] else ValueError)(answer[2])
        return answer[0]

    # --- Saving

    def _prepared(self, step: int) -> tuple[str, int]:
        """The half of a checkpoint and its lock, in process 0, when nothing is in its way."""
        there = files.listing(self.directory)
        later = [s for s in self._before if s > step] if self._restored is None else []
        if later:
            raise ValueError(
                f"{self.directory} had checkpoints of later steps, {later}, and none of them was restored: "
                f"a restart would take {later[-1]} and not step {step}. Restore one first, or give this "
                "run a folder of its own"
            )
        aside = {s: "damaged" for s in there.steps if s in self._refused}
        if self._restored is not None:
            newer = [s for s in there.steps if s > self._restored]
            aside = dict.fromkeys(newer, "abandoned") | aside
        if step in there.steps and step not in aside:
            raise ValueError(
                f"{self._name(step)} is there already: save each step once, or give a run that starts "
                "again from an earlier step a folder of its own"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        for other, why in aside.items():
            files.set_aside(self.directory / str(other), why)
        half, lock = files.new_half(self.directory / str(step))
        for name in there.halves:
            if files.is_left(self.directory / name, half, self._timeout):
                files.remove(self.directory / name)
        return half.name, lock

    def _write(self, step: int, half: Path, lock: int, written: Any) -> list[str]:
        """Writes what this process has, in the background; in process 0 all that is left to do."""
        about, sizes, pieces = written
        first = jax.process_index() == 0
        try:
            failed = _failure(lambda: files.write_arrays(half, pieces))
            _barrier(half.name, self._timeout)  # who failed comes too, so that nobody waits for it
            if failed:
                raise failed
            if not first:
                self._wait_for_first(half, self.directory / str(step))
                return []
            files.complete(half, self.directory / str(step), about, sizes)
        except Exception as problem:
            if first:  # the others wait until it is no more
                files.remove(half)
            raise self._not_written(step, problem) from problem
        finally:
            if first:
                os.close(lock)
        return self._tidied(step)

    def _wait_for_first(self, half: Path, folder: Path) -> None:
        end = time.monotonic() + self._timeout
        while half.exists():
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.02)
        if not (folder / files.ABOUT).exists():
            raise OSError(errno.EIO, "process 0 did not complete it, and its error says why")

    def _not_written(self, step: int, problem: Exception) -> Exception:
        if isinstance(problem, ValueError):
            return problem
        why = (isinstance(problem, OSError) and problem.strerror) or _first_line(problem)
        if isinstance(problem, TimeoutError):
            why = "another process did not write its part in time, and its error says why"
        return OSError(
            f"{self._name(step)} was not written ({why}), and those before it stay: free or mend that "
            "disk, and start again from the newest"
        )

    def _tidied(self, step: int) -> list[str]:
        """Takes away what is too many, now that this step is complete; what it could not do."""
        try:
            stay = {step, self._best_step() if self._best else step}
            old = [s for s in self.steps()[: -self._keep] if s not in stay]
        except OSError as problem:
            return [f"old checkpoints in {self.directory} stay, which cannot be read ({problem})"]
        return [note for s in old if (note := files.remove(self.directory / str(s)))]

    def _number(self, metric: Any) -> float | None:
        if metric is None:
            return None
        if self._best is None:
            raise ValueError(
                f"metric={metric!r}: give Checkpoints(..., best='min') or 'max' for it"
            )
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not np.ndim(metric) and not isinstance(metric, str):
                return float(metric)
        raise TypeError(f"metric={metric!r}: give a number that a float holds")

    def _best_step(self) -> int | None:
        sign = 1 if self._best == "max" else -1
        found = []
        for step in self.steps():
            with contextlib.suppress(ValueError, FileNotFoundError):  # damaged, or gone
                value = files.read_about(self.directory / str(step))["metric"]
                if value is not None and not math.isnan(value):
                    found.append((sign * value, step))
        return max(found)[1] if found else None

    def run(self) -> str:
        """The name of the run, kept in the folder, and so another where the folder was emptied.

        All processes must ask. A copy of the folder has the same name.

        Raises:
          OSError: where process 0 cannot read the file, or make it where there is none.
        """
        named = self.directory / files.RUN

        def name() -> str:
            found = named.read_text() if named.exists() else ""
            if not found:  # or a machine died before it was on the disk
                found = uuid.uuid4().hex
                self.directory.mkdir(parents=True, exist_ok=True)
                private_files.write(str(named), found.encode())
            return found

        return self._of_first(None, name)

    def _name(self, step: int) -> str:
        return f"checkpoint {self.directory / str(step)}"

    def on_mesh(self, call: str, state: Any) -> tuple[Any, Workers]:
        """The state with all its arrays on its mesh, and the workers of these checkpoints on it."""
        state, mesh = states.on_one_mesh(call, state)
        return state, Workers(mesh, *self._axes)

    def target(self, like: Any) -> Target:
        """What `restore` is asked for."""
        return Target(like, *self.on_mesh("restore(like)", like))

    # --- Reading

    def _found(
        self, step: int | None, read: Callable[[int], Restored]
    ) -> tuple[Restored, dict[int, str]]:
        """What is read of a step, or of the newest that is whole; and what is wrong with newer ones."""
        steps = self._of_first(None, self.steps)
        if step is not None:
            with contextlib.suppress(Gone):
                if step in steps:
                    return read(step), {}
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.directory}; there are {steps}"
            )
        problems: dict[int, str] = {}
        gone: set[int] = set()
        while left := [s for s in steps if s not in problems]:
            try:
                found = read(left[-1])
            except Damaged as problem:
                problems[left[-1]] = str(problem)
            except Gone as problem:
                if left[-1] in gone:  # and listed again
                    problems[left[-1]] = str(problem)
                gone.add(left[-1])
                steps = self._of_first(None, self.steps)
            else:
                for text in problems.values():
                    warnings.warn(f"{text}; {self._name(found.step)} is used instead", stacklevel=3)
                return found, problems
        if not problems:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        raise Damaged(f"no checkpoint in {self.directory} is whole: {'; '.join(problems.values())}")

    def _about(self, step: int) -> dict[str, Any]:
        return self._read(step, files.read_about)

    def _arrays(
        self, step: int, about: Any, saved: Mapping[str, Leaf], places: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        def read(folder: Path) -> dict[str, jax.Array]:
            return {n: files.read_array(folder, about["tiles"][n], x) for n, x in places.items()}

        arrays = self._read(step, read)
        found, _ = checksums(arrays)
        wrong = sorted(path for path in places if found[path] != saved[path].sums)
        if wrong:
            raise Damaged(
                f"{self._name(step)} is damaged: state{wrong[0]}"
                + (f" and {len(wrong) - 1} more arrays are" if wrong[1:] else " is")
                + " not as written"
            )
        return arrays

    def _read(self, step: int, read: Callable[[Path], Any]) -> Any:
        """Reads in all processes; what is damaged or gone in one is so for all."""
        name, folder = self._name(step), self.directory / str(step)

        def careful() -> tuple[Any, str]:
            try:
                return read(folder), ""
            except _MISSING as problem:
                if not folder.is_dir():
                    return None, "gone"
                return None, str(problem) if isinstance(problem, Damaged) else _first_line(problem)

        found, wrong = together(f"{name} was not read, and nothing is known of its state", careful)
        if jax.process_count() > 1:
            wrong = max(told(wrong), key=lambda text: (text == "gone", text))
        if wrong == "gone":
            raise Gone(f"{name} is gone")
        if wrong:
            raise Damaged(f"{name} is damaged: {wrong}")
        return found


def _barrier(key: str, seconds: int) -> None:
    """Returns when all processes have come; raises after that time, or where one died."""
    if jax.process_count() > 1:
        # JAX's own barriers wait for ever. Loaded only here: it takes as long as jax.
        from orbax.checkpoint import multihost  # type: ignore[import-untyped]

        began = time.monotonic()
        try:
            multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * seconds)
        except Exception as problem:
            if time.monotonic() - began < 0.9 * seconds:
                raise
            raise TimeoutError from problem


def _failure(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as problem:
        return problem
    return None


def _first_line(error: BaseException) -> str:
    line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {line[:200]}"


def check_rule(on_resize: str) -> None:
    """Raises ``ValueError`` unless it says what workers get where their number changes."""
    if on_resize not in RULES:
        raise ValueError(f"on_resize={on_resize!r}: give one of {', '.join(map(repr, RULES))}")


def as_json(data: Any) -> Any:
    """As JSON gives it back; raises ``TypeError`` for what it cannot hold."""
    try:
        return json.loads(json.dumps(data))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"data={data!r} cannot be held by JSON ({error}): give numbers, strings, lists and dicts"
        ) from error


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
