"""Saves a training state and goes on from it: on the same devices, or with other workers.

A checkpoint holds the leaves of a state (`leaves`), with checksums of each, in tiles (`files`). A save
copies them to the host and returns. The rest runs in the background (`commit`): each process writes and
reads back its file, the first gives the checkpoint its name, and then it counts.

Damage is only what is not as it was written. A disk, a permission or a memory that fails says nothing about
a checkpoint: such errors are raised as they are, and the checkpoint stays.
"""

import atexit
import contextlib
import json
import math
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lioncub_jax.checkpoint import files, leaves, states
from lioncub_jax.checkpoint.agreement import barrier, first_line, from_first
from lioncub_jax.checkpoint.commit import Save, commit, save_error
from lioncub_jax.checkpoint.files import Damaged, Description
from lioncub_jax.checkpoint.layout import ArrayInfo, check_same_model, layout_of, param_names
from lioncub_jax.checkpoint.tiles import copy_to_host
from lioncub_jax.exchange.arguments import check_count
from lioncub_jax.exchange.holder import Holder
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.checksum import checksums, untyped
from lioncub_jax.mesh.hosts import any_process, gathered_json, together
from lioncub_jax.mesh.placement import Workers, check_alive, worker_axes

RULES = ("mean", "keep")
_NOT_THERE = FileNotFoundError, IsADirectoryError, NotADirectoryError, Damaged
_MEETINGS: Counter[int] = Counter()  # by the name of a folder


class Restored(NamedTuple):
    """The result of `Checkpoints.restore`.

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
    """A checkpoint was deleted since it was listed, as when newer ones are complete."""


class Checkpoints:
    """The checkpoints of a run, in a folder of their own; a context manager that writes in the background.

    It makes, changes and deletes nothing before the first `save`. Every process of a run makes one and
    calls the same methods in the same order; `steps`, `wait` and `close` may be called by one.

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
      ...         restored = checkpoints.restore(state)
      ...         params = checkpoints.restore_params(state.params).state
      >>> restored.step, restored.data
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
        worker_axes(workers)  # raises for what names none
        self.workers = workers
        self._keep, self._best, self._timeout = keep, best, timeout
        self.directory, self._steps_before = files.check_directory(directory)
        self._damaged: set[int] = set()  # steps that a restore passed over
        self._restored: int | None = None
        self._closed = False
        self._executor = ThreadPoolExecutor(1)  # no thread before its first task
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
        data: object = None,
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
        self._begin_call("save")
        self._raise_last_error()
        check_alive("save(state): state", state)
        state, workers = states.on_workers("save(state)", state, self.workers)
        step, metric, data = states.step_of(state, step), self._metric(metric), as_json(data)
        layout = layout_of(state, workers)
        arrays = leaves.arrays_of(state)
        saved = leaves.leaves_of(layout, untyped(workers.mesh), arrays)
        sums, unequal = checksums(arrays | saved)
        states.check_copies_equal(state, unequal, workers)
        infos = leaves.leaf_infos(layout)
        infos = {name: info._replace(sums=sums[name]) for name, info in infos.items()}
        tiles, sizes = files.assign_tiles(saved)
        about = Description(step=step, metric=metric, data=data, leaves=infos, tiles=tiles)
        me = jax.process_index()
        own = [(name, part) for name, parts in tiles.items() for p, _, part in parts if p == me]
        pieces = [*copy_to_host(saved, own).values()]  # in the order of the file
        unfinished, lock = from_first(lambda: self._begin(step))
        self._damaged.clear()
        self._restored, self._steps_before = None, []
        new = Save(
            folder=self.directory / str(step),
            unfinished=self.directory / unfinished,
            lock=lock,
            about=files.seal(about._asdict()),
            sizes=sizes,
            pieces=pieces,
        )
        self._writing = self._executor.submit(self._write, new, step)
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
        self._begin_call("restore")
        check_rule(on_resize)
        target = leaves.Target(like, *states.on_workers("restore(like)", like, self.workers))

        def read(about: Description) -> Any:
            check_same_model(self._name(about.step), about.leaves, target.leaves)
            places = {name: target.place(name, info) for name, info in about.leaves.items()}
            arrays = self._read_arrays(about, places)
            return target.build(about.leaves, arrays, on_resize == "keep")

        restored, damaged = self._newest_whole(step, read)
        # Only now: that an older one can be read shows that the fault is not in the reading.
        self._damaged.update(damaged)
        self._restored = restored.step
        return restored

    def restore_params(self, like: Any, *, step: int | None = None) -> Restored:
        """Reads only the parameters of a checkpoint, such as to serve or to evaluate a model.

        Args:
          like: a tree of arrays or of ``ShapeDtypeStruct``s, as the field or entry ``params`` of the state
            that was saved. What has no sharding is put on the first device.
          step: which; None for the newest that is whole.

        Returns:
          A ``Restored``; its ``state`` is the parameters.

        Raises:
          ValueError: if the parameters have other names, shapes or dtypes; else as `restore`.
        """
        self._begin_call("restore_params")
        places = states.places_of(like)
        wanted = {
            f".params{path}": ArrayInfo(x.shape, str(x.dtype), Holder.ALL)
            for path, x in places.items()
            if x.size
        }

        def read(about: Description) -> Any:
            names = param_names(about.leaves)
            params = {f".params{path}": about.leaves[name] for path, name in names.items()}
            check_same_model(self._name(about.step), params, wanted)
            arrays = self._read_arrays(about, {name: places[path] for path, name in names.items()})
            by_path = {path: arrays[name] for path, name in names.items()}
            return states.placed_like(like, by_path)

        return self._newest_whole(step, read)[0]

    def best(self) -> int | None:
        """The step with the best metric, for ``restore(step=)``; None where none has one.

        Raises:
          ValueError: without ``Checkpoints(best=)``.
        """
        self._begin_call("best")
        if self._best is None:
            raise ValueError(
                "best(): give Checkpoints(..., best='min') or 'max', and save(metric=)"
            )
        return from_first(self._best_step)

    def steps(self) -> list[int]:
        """The steps with a checkpoint, damaged or not, in order."""
        return files.listing(self.directory).steps

    def wait(self) -> None:
        """Returns when the last save is complete on disk; errors as in `save`."""
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
                self._executor.shutdown()

    def _at_exit(self) -> None:
        """Raises the error of the last save; the end of the program has waited for it."""
        try:
            self.wait()
        except OSError as error:
            raise RuntimeError(
                f"the program has ended, and its last checkpoint is not complete: {error}. Leave the "
                "with statement, or call checkpoints.close(), before the program ends, to learn of it there"
            ) from None

    # --- All processes together

    def _begin_call(self, call: str) -> None:
        if self._closed:
            raise ValueError(
                f"{call}: these checkpoints of {self.directory} are closed; call it before close() and "
                "inside the with statement, or open the folder again with Checkpoints(...)"
            )
        if self._writing is not None:
            wait([self._writing])  # its error is for save, wait and close
        self._meet(call)

    def _meet(self, call: str) -> None:
        """Raises where not all processes come: no sum over devices ends before they have."""
        name = zlib.crc32(os.fsencode(self.directory.name))  # a host may mount it elsewhere
        _MEETINGS[name] += 1
        try:
            barrier(f"checkpoints {name} {_MEETINGS[name]} {call}", self._timeout)
        except Exception as error:
            why = "" if isinstance(error, TimeoutError) else f" ({first_line(error)})"
            raise TimeoutError(
                f"{call}: process {jax.process_index()} waited up to {self._timeout} s for all "
                f"{jax.process_count()} processes{why}. Every process makes the "
                f"Checkpoints of {self.directory} and calls their methods in the same order, not process "
                "0 alone; if one is slower, give Checkpoints(..., timeout=)"
            ) from None

    def _raise_last_error(self) -> None:
        """Raises in all processes where the last save failed in one."""
        own: OSError | None = None
        try:
            self.wait()
        except OSError as error:
            own = error
        if any_process(own is not None):
            raise own or OSError(
                f"a checkpoint in {self.directory} was not written: another process says why"
            )

    # --- Saving

    def _begin(self, step: int) -> tuple[str, int]:
        """Begins a checkpoint, in process 0, when nothing is in its way.

        Returns:
          The name of the unfinished checkpoint, and its lock.
        """
        folder = self.directory / str(step)
        try:
            entries = files.listing(self.directory)
            aside = self._in_the_way(step, entries.steps)
            self.directory.mkdir(parents=True, exist_ok=True)
            for other, why in aside.items():
                files.set_aside(self.directory / str(other), why)
            unfinished, lock = files.begin(folder)
            for name in entries.unfinished:
                if files.is_left(self.directory / name, unfinished, self._timeout):
                    files.remove(self.directory / name)
        except OSError as error:
            raise save_error(folder, error) from error
        return unfinished.name, lock

    def _in_the_way(self, step: int, steps: list[int]) -> dict[int, str]:
        """Checkpoints that are to be renamed, each with the reason; raises for one that may not be."""
        later = [s for s in self._steps_before if s > step] if self._restored is None else []
        if later:
            raise ValueError(
                f"{self.directory} had checkpoints of later steps, {later}, and none of them was restored: "
                f"a restart would take {later[-1]} and not step {step}. Restore one first, or give this "
                "run a folder of its own"
            )
        aside = {}
        for other in steps:
            if other in self._damaged:
                aside[other] = "damaged"
            elif self._restored is not None and other > self._restored:
                aside[other] = "abandoned"
        if step in steps and step not in aside:
            raise ValueError(
                f"{self._name(step)} is there already: save each step once, or give a run that starts "
                "again from an earlier step a folder of its own"
            )
        return aside

    def _write(self, new: Save, step: int) -> list[str]:
        """Runs in the background; returns warnings."""
        commit(new, self._timeout)
        return self._delete_old(step) if jax.process_index() == 0 else []

    def _delete_old(self, step: int) -> list[str]:
        """Deletes all but the newest and the best, now that this step is complete; returns warnings."""
        try:
            stay = {step, self._best_step() if self._best else step}
            old = [s for s in self.steps()[: -self._keep] if s not in stay]
        except OSError as error:
            return [f"old checkpoints in {self.directory} stay, which cannot be read ({error})"]
        return [note for s in old if (note := files.remove(self.directory / str(s)))]

    def _metric(self, metric: Any) -> float | None:
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
        ranked = []
        for step in self.steps():
            with contextlib.suppress(ValueError, FileNotFoundError):  # damaged, or deleted
                metric = files.read_about(self.directory / str(step)).metric
                if metric is not None and not math.isnan(metric):
                    ranked.append((sign * metric, step))
        return max(ranked)[1] if ranked else None

    # --- Reading

    def _newest_whole(
        self, step: int | None, read: Callable[[Description], Any]
    ) -> tuple[Restored, dict[int, str]]:
        """Reads a step, or the newest that is whole.

        Returns:
          What was read, and the problems of newer checkpoints, by their steps.
        """

        def restored(step: int) -> Restored:
            about = self._read(step, files.read_about)
            return Restored(read(about), about.data, step)

        steps = from_first(self.steps)
        if step is not None:
            with contextlib.suppress(Gone):
                if step in steps:
                    return restored(step), {}
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.directory}; there are {steps}"
            )
        problems: dict[int, str] = {}
        gone: set[int] = set()
        while left := [s for s in steps if s not in problems]:
            newest = left[-1]
            try:
                result = restored(newest)
            except Damaged as problem:
                problems[newest] = str(problem)
            except Gone as problem:
                if newest in gone:  # and listed again
                    problems[newest] = str(problem)
                gone.add(newest)
                steps = from_first(self.steps)
            else:
                for text in problems.values():
                    warnings.warn(f"{text}; {self._name(newest)} is used instead", stacklevel=3)
                return result, problems
        if not problems:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        raise Damaged(f"no checkpoint in {self.directory} is whole: {'; '.join(problems.values())}")

    def _read_arrays(
        self, about: Description, places: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Reads arrays of a checkpoint to their places, and compares their checksums."""

        def read(folder: Path) -> dict[str, jax.Array]:
            return {n: files.read_array(folder, about.tiles[n], x) for n, x in places.items()}

        arrays = self._read(about.step, read)
        sums, _ = checksums(arrays)
        wrong = sorted(name for name in places if sums[name] != about.leaves[name].sums)
        if wrong:
            raise Damaged(
                f"{self._name(about.step)} is damaged: state{wrong[0]}"
                + (f" and {len(wrong) - 1} more arrays are" if wrong[1:] else " is")
                + " not as written"
            )
        return arrays

    def _read(self, step: int, read: Callable[[Path], Any]) -> Any:
        """Reads in all processes; what is damaged or gone in one is so for all."""
        name, folder = self._name(step), self.directory / str(step)

        def read_own() -> tuple[Any, str]:
            try:
                return read(folder), ""
            except _NOT_THERE as error:
                if not folder.is_dir():
                    return None, "gone"
                return None, str(error) if isinstance(error, Damaged) else first_line(error)

        result, problem = together(
            f"{name} was not read, and nothing is known of its state", read_own
        )
        if jax.process_count() > 1:
            problem = max(gathered_json(problem), key=lambda text: (text == "gone", text))
        if problem == "gone":
            raise Gone(f"{name} is gone")
        if problem:
            raise Damaged(f"{name} is damaged: {problem}")
        return result

    def _name(self, step: int) -> str:
        return f"checkpoint {self.directory / str(step)}"


def check_rule(on_resize: str) -> None:
    """Raises ``ValueError`` unless it is a rule for another number of workers."""
    if on_resize not in RULES:
        raise ValueError(f"on_resize={on_resize!r}: give one of {', '.join(map(repr, RULES))}")


def as_json(data: object) -> Any:
    """Data as JSON gives it back; raises ``TypeError`` for what it cannot hold."""
    try:
        return json.loads(json.dumps(data))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"data={data!r} cannot be held by JSON ({error}): give numbers, strings, lists and dicts"
        ) from error
