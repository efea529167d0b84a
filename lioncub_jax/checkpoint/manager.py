"""The checkpoints of a run: a thin layer over ``orbax.checkpoint.CheckpointManager``.

Orbax writes in the background, names a step when all of it is there, and deletes older ones. Ours are the
conversion (`convert`), checksums (`files`), and the hook that reads a step back before it gets its name.
"""

import contextlib
import math
import operator
import os
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.tree import from_flat_dict

from lioncub_jax.checkpoint import files
from lioncub_jax.checkpoint.convert import (
    Damaged,
    Leaves,
    entries,
    field_of,
    leaves_in,
    let_out,
    restored,
)
from lioncub_jax.checkpoint.files import STATE, About, line_of
from lioncub_jax.exchange.checks import check_count
from lioncub_jax.mesh.checksum import checksums
from lioncub_jax.mesh.hosts import gathered_json
from lioncub_jax.mesh.placement import Workers, check_real

_MEETINGS: Counter[int] = Counter()  # by the name of a folder
# Where orbax has processes meet in the background: all have written, and the first has named the step.
_BACKGROUND = "async_write_complete", "async_commit_complete"
_UNFINISHED = ".orbax-checkpoint-tmp"


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


class Unequal(ValueError):
    """Copies of an array differ, of which a checkpoint would keep one."""


class Saving(NamedTuple):
    """A step that is written in the background.

    Attributes:
      about: its description, without the sums.
      sums: has a function that waits for them.
      caller: the thread that called ``save``.
      met: where this process has met the others.
    """

    about: About
    sums: Future[Callable[[], tuple[Leaves, Leaves]]]
    caller: threading.Thread
    met: list[str]


class Checkpoints:
    """The checkpoints of a run, in a folder of their own; a context manager that writes in the background.

    It makes, changes and deletes nothing before the first `save`. Every process of a run makes one and
    calls the same methods in the same order; `steps` may be called by one.

    Args:
      directory: the folder, on a disk that all processes see, or ``gs://bucket/run``.
      workers: the workers, on the mesh of the states.
      keep: how many of the newest checkpoints stay.
      best: ``"min"`` or ``"max"``: the one whose ``save(metric=)`` is the smallest or largest stays too.
      timeout: seconds after which what some process has not called, or has not written, is an error.
      **options: of ``orbax.checkpoint.CheckpointManagerOptions``, such as ``save_interval_steps``,
        ``save_decision_policy``, or a ``preservation_policy`` in place of ``keep`` and ``best``.

    Raises:
      ValueError: for ``keep`` or ``timeout`` below 1, another ``best``, and a folder that orbax cannot
        write to and read again: another store, ``[..]``, a backslash.
      TypeError: for workers that are none, and an option that orbax does not have or this class sets.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, lioncub_jax as lc
      >>> workers = lc.Workers.one_per_device()
      >>> tx = lc.lion_cub(1e-3, workers=workers)
      >>> state = lc.init_state(tx, {"w": jnp.ones((2, 3))}, workers)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with lc.Checkpoints(folder, workers=workers) as checkpoints:
      ...         saved = checkpoints.save(state, {"next_batch": 7}, wait=True)
      ...         restored = checkpoints.restore(state)
      ...         params = checkpoints.restore_params(state.params).state
      >>> restored.step, restored.data
      (0, {'next_batch': 7})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        workers: Workers,
        keep: int = 3,
        best: str | None = None,
        timeout: int = 1200,
        **options: Any,
    ):
        check_count(f"keep={keep!r}", keep)
        check_count(f"timeout={timeout!r}", timeout)
        check_real(workers)
        if best not in (None, "min", "max"):
            raise ValueError(f"best={best!r}: give 'min' or 'max', or None for the newest alone")
        self.directory, self.workers = files.check_directory(directory), workers
        self._best, self._timeout = best, timeout
        stay = [ocp.checkpoint_managers.LatestN(keep)]
        if best:
            # A metric that is NaN is none, and never best.
            best_one = ocp.checkpoint_managers.BestN(
                n=1, get_metric_fn=_metric, reverse=best == "min",
                keep_checkpoints_without_metrics=False,
            )  # fmt: skip
            stay.append(best_one)
            options |= {"best_fn": _metric, "best_mode": best}
        options.setdefault(
            "preservation_policy", ocp.checkpoint_managers.AnyPreservationPolicy(stay)
        )
        self._options = ocp.CheckpointManagerOptions(
            read_only=False, enable_async_checkpointing=True, cleanup_tmp_directories=False,
            step_prefix=None, step_format_fixed_length=None, step_name_format=None,
            async_options=ocp.AsyncOptions(
                timeout, barrier_sync_fn=self._meet_in_background,
                post_finalization_callback=self._verify,
            ),
            **options,
        )  # fmt: skip
        self._manager: ocp.CheckpointManager | None = None  # made by the first save
        self._saving: Saving | None = None
        self._failed: Exception | None = None
        self._restored = math.inf  # checkpoints of later steps are set aside
        self._waits = True

    def __enter__(self) -> "Checkpoints":
        self._waits = False  # until it is left
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._waits = True
        if kind is None:
            self.close()
        else:  # the others may not leave
            self._settle()
            self._let_go()

    def save(
        self,
        state: Any,
        data: object = None,
        *,
        step: int | None = None,
        metric: Any = None,
        force: bool = False,
        wait: bool | None = None,
    ) -> bool:
        """Saves a state under its step; its arrays may be donated as soon as this returns.

        Orbax copies the arrays to the host and writes them in the background. A step gets its name, and
        older ones go, only after it was read back and its checksums agree. The next save, `wait` and the
        end of the ``with`` statement wait for that.

        The first save after a `restore` renames checkpoints that are newer than the restored one to
        ``<step>.abandoned-<time>``, such as those that it passed over as damaged; nothing deletes them.

        Args:
          state: a ``StepState``, a ``TrainState`` of flax, or any tree of arrays, such as a dict
            with ``"params"`` and an ``nnx.Optimizer``. Arrays that lie on no mesh, and numbers, are
            taken as the same everywhere.
          data: numbers, texts, lists, tuples and dicts, which come back as they are.
          step: its number; None for the state's field or entry ``step``.
          metric: a number, such as the validation loss, for ``best``; NaN is never best.
          force: save whatever the save policy says.
          wait: return only when the checkpoint has its name; None for False inside of the ``with``
            statement, which waits at its end, and for True outside.

        Returns:
          Whether it is saved; False where the save policy says no.

        Raises:
          ValueError: for a step that is not behind the newest checkpoint, and as `portable`; by the next
            call, where copies of an array that is labelled one value differ.
          TypeError: if ``state`` has no step or holds what is no array, or JSON cannot hold ``data``.
          OSError: if a checkpoint could not be written, such as on a full disk: in all processes, by the
            next call of ``save``, ``wait`` or ``close``. A ``TimeoutError`` where one does not call it.
        """
        step, metrics = step_of(state, step), self._metrics(metric)
        files.encoded(data)  # else a TypeError
        manager = self._made_manager()
        if (newest := manager.latest_step()) is not None and step <= newest:
            raise ValueError(
                f"save(step={step}): {self.directory} has a checkpoint of step {newest}, and a restart "
                "would take that one. Restore an earlier one first, and those behind it are set aside; or "
                "give this run a folder of its own"
            )
        if not (force or manager.should_save(step)):
            return False
        self._together("save", self._outcome)
        found = entries(state, self.workers)
        leaves = leaves_in(found)
        types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in leaves.items()}
        about, sums = About(step, data, types, {}), Future[Any]()
        self._saving = Saving(about, sums, threading.current_thread(), [])
        args = ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(from_flat_dict(leaves, sep="."))})
        manager.save(step, args=args, metrics=metrics, force=True)
        # Copies of what is in rows are compared as they lie. Only the hook waits for the sums.
        in_rows = {f"{e.name} in rows {i}": e.x for i, e in enumerate(found) if e.rows}
        sums.set_result(checksums(leaves | in_rows))
        if self._waits if wait is None else wait:
            self.wait()
        return True

    def restore(self, like: Any, *, step: int | None = None) -> Restored:
        """Reads a checkpoint onto the mesh on which ``like`` lies; it changes nothing in the folder.

        With as many workers as before, every number is what it was. With another number of them, what was
        each worker's own, such as momentum and errors, is averaged; of whole numbers the largest is taken,
        and random keys stay, with newcomers folding in their index. What owners hold is one for all and is
        cut anew.

        Args:
          like: as in `lioncub_jax.checkpoint.restore`.
          step: which; None for the newest that is whole.

        Returns:
          A ``Restored``.

        Raises:
          FileNotFoundError: if there is no checkpoint, or none of that step.
          Damaged: a ``ValueError``, if it is not as it was written (with ``step=None``: if all are not;
            a warning names each that is passed over, and its leaf).
          ValueError: if it is of another model or optimizer, or of another format.
          TypeError: if ``like`` holds what is no array.
          TimeoutError: where some process does not call it.
          Exception: a file, a permission or the memory that fails is raised as it is, and nothing is
            passed over; where it failed in another process, as an ``OSError``.

        Example:
          See `Checkpoints`.
        """
        found = self._newest_whole("restore", like, step, "")
        self._restored = found.step
        return found

    def restore_params(self, like: Any, *, step: int | None = None) -> Restored:
        """Reads only the parameters of a checkpoint, such as to serve or to evaluate a model.

        Args:
          like: a tree of arrays or of ``ShapeDtypeStruct``s, as the field or entry ``params`` of the state
            that was saved. What lies on no mesh is put on each device.
          step: which; None for the newest that is whole.

        Returns:
          A ``Restored``; its ``state`` is the parameters.

        Raises:
          ValueError: if the parameters have other names, shapes or dtypes; else as `restore`.
        """
        found = self._newest_whole("restore_params", {"params": like}, step, "params")
        return found._replace(state=found.state["params"])

    def best(self) -> int | None:
        """The step with the best metric, for ``restore(step=)``; None where none has one.

        Raises:
          ValueError: without ``Checkpoints(best=)``.
        """
        if self._best is None:
            raise ValueError("best(): give Checkpoints(best='min') or 'max', and save(metric=)")
        return self._made_manager().best_step() if self.steps() else None

    def steps(self) -> list[int]:
        """The steps with a checkpoint, damaged or not, in order."""
        if not self.directory.exists():
            return []
        names = ocp.path.step.standard_name_format()
        return sorted(found.step for found in names.find_all(self.directory))

    def wait(self) -> None:
        """Returns when the last save has its name; errors as in `save`. All processes call it."""
        if self._saving:
            self._together("wait", self._outcome)

    def close(self) -> None:
        """Waits, and gives up the background threads. All processes call it."""
        try:
            self.wait()
        finally:
            self._let_go()

    # --- The end of a save

    def _settle(self) -> None:
        """Waits until nothing is written any more, and keeps the error."""
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                self._failed = error

    def _outcome(self) -> None:
        """Raises if the last save failed."""
        self._settle()
        error, self._failed, saving, self._saving = self._failed, None, self._saving, None
        if isinstance(error, Unequal):
            raise error
        if error and saving:
            raise OSError(
                f"checkpoint {self.directory / str(saving.about.step)} was not written ({line_of(error)}), "
                "and those before it stay: free or mend that disk, and start again from the newest"
            ) from error

    def _let_go(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()
        if self._failed:
            warnings.warn(f"the last checkpoint was not written: {self._failed}", stacklevel=3)

    # --- All processes together

    def _together(self, call: str, act: Callable[[], Any]) -> Any:
        """Acts in all processes; where it fails in one, all raise the same.

        Raises where not all processes come, since no sum over devices ends before they have.
        """
        name = zlib.crc32(os.fsencode(self.directory.name))  # a host may mount it elsewhere
        _MEETINGS[name] += 1
        key = f"checkpoints {name} {_MEETINGS[name]} {call}"
        try:
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * self._timeout)
        except Exception as error:
            raise TimeoutError(
                f"{call}: process {jax.process_index()} waited up to {self._timeout} s for all "
                f"{jax.process_count()} processes ({line_of(error)}). Every process makes the Checkpoints "
                f"of {self.directory} and calls their methods in the same order, not process 0 alone; if "
                "one is slower, give Checkpoints(..., timeout=)"
            ) from None
        result, mine = None, None
        try:
            result = act()
        except Exception as error:
            mine = error
        said = [x for x in gathered_json(mine and [type(mine).__name__, str(mine)]) if x]
        if said and self._manager is not None:
            self._manager.reload()  # a failed save has struck older steps from its list
        if mine and len(said) == 1:
            raise mine
        for kind, text in said:
            raise _KINDS.get(kind, OSError)(text)
        return result

    def _meet_in_background(self, *, key: str, timeout_ms: int) -> None:
        """Meets the others where orbax does; after a failure also where this process did not come.

        Else they would wait there until the timeout. `wait` tells all what happened.
        """
        meet, saving = ocp.multihost.get_barrier_sync_fn(), self._saving
        places: list[str] = []
        if saving and threading.current_thread() is not saving.caller:
            here = [i for i, place in enumerate(_BACKGROUND, 1) if place in key]
            places += _BACKGROUND[len(saving.met) : here[0] if here else None]
            saving.met.extend(places)
            places = [f"{place} {saving.about.step}" for place in places]
            key = places.pop() if here else key
        for place in [*places, key]:
            meet(key=place, timeout_ms=timeout_ms)

    # --- Saving

    def _made_manager(self) -> ocp.CheckpointManager:
        """The manager, for which checkpoints that are newer than the restored one are not there."""
        newer = [step for step in self.steps() if step > self._restored]

        def make_way() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            for step in newer if jax.process_index() == 0 else []:
                aside = f"{step}.abandoned-{time.time_ns()}"
                (self.directory / str(step)).rename(self.directory / aside)

        if newer or self._manager is None:
            self._together("save", make_way)
            self._let_go()
            self._manager = ocp.CheckpointManager(self.directory, options=self._options)
        self._restored = math.inf
        return self._manager

    def _verify(self) -> None:
        """The hook: before a step gets its name, and before an older one goes. Process 0 calls it."""
        assert self._saving
        about, step = self._saving.about, self._saving.about.step
        sums, unequal = self._saving.sums.result(self._timeout)()
        check_copies_equal(unequal, self.workers)
        folder = self.directory / f"{step}{_UNFINISHED}"
        if not folder.exists():  # a store has it under its name, and marks it when it is complete
            folder = self.directory / str(step)
        files.write(folder, about._replace(sums={name: sums[name] for name in about.leaves}))
        done = map(str, self.steps())
        for path in {*self.directory.iterdir()} - {self.directory / name for name in done}:
            number = path.name.removesuffix(
                _UNFINISHED
            )  # an earlier step of a process that was killed
            if number.isdigit() and int(number) < step:
                with contextlib.suppress(OSError):  # the next save tries again
                    path.rmtree()

    def _metrics(self, metric: Any) -> dict[str, float] | None:
        if metric is not None and self._best is None:
            raise ValueError(f"metric={metric!r}: give Checkpoints(best='min') or 'max' for it")
        value = math.nan if metric is None else float(metric)
        return None if math.isnan(value) else {"metric": value}

    # --- Reading

    def _newest_whole(self, call: str, like: Any, step: int | None, part: str) -> Restored:
        """Reads a step, or the newest that is whole: leaves with names that begin with ``part``."""
        self._settle()
        passed: dict[int, str] = {}
        while True:
            steps = gathered_json(self._together(call, self.steps))[0]
            left = [s for s in steps if (s == step if step is not None else s not in passed)]
            if not left:
                break
            at, folder = left[-1], self.directory / str(left[-1])
            try:
                return Restored(*self._read(call, folder, like, part), at)
            except Damaged as error:
                if at not in gathered_json(self.steps())[0]:
                    continue  # it was deleted meanwhile, as newer ones are complete
                passed[at] = f"checkpoint {folder} is damaged: {error}"
                if step is not None:
                    raise Damaged(passed[at]) from None
                warnings.warn(f"{passed[at]}; the one before it is used", stacklevel=3)
        if passed:
            raise Damaged(
                f"no checkpoint in {self.directory} is whole: {'; '.join(passed.values())}"
            )
        of = "" if step is None else f" of step {step}"
        raise FileNotFoundError(f"no checkpoint{of} in {self.directory}; there are {steps}")

    def _read(self, call: str, folder: Any, like: Any, part: str) -> tuple[Any, Any]:
        about = self._together(call, lambda: files.described(folder))
        saved = {name: x for name, x in about.leaves.items() if name.startswith(part)}

        def leaves(places: Leaves) -> dict[str, Any]:
            return self._together(call, lambda: files.read(folder / STATE, places))

        return restored(like, self.workers, saved, leaves, about.sums), about.data


_KINDS: dict[str, type[Exception]] = {x.__name__: x for x in (Damaged, Unequal, ValueError)}


def _metric(metrics: dict[str, float]) -> float:
    """What was given to ``save``."""
    return metrics["metric"]


def step_of(state: Any, given: int | None) -> int:
    """The step that a state is saved under: the one given, or that of the state."""
    steps = jax.tree.leaves(field_of(state, "step") if given is None else given)
    with contextlib.suppress(TypeError, ValueError):
        [step] = map(operator.index, steps)
        if step >= 0:
            return step
    raise TypeError(
        f"save(state): the step is {steps}: give save(state, step=...), a whole number of at least 0, or a "
        "state with a field 'step', such as a StepState"
    )


def check_copies_equal(unequal: Leaves, workers: Workers) -> None:
    """Raises `Unequal` for arrays with copies that differ, by the ids of two devices."""
    for name in sorted(unequal, key=lambda name: (not name.startswith("params"), name)):
        one, other = unequal[name]
        what = f"state.{name} (one of {len(unequal)})"
        if name.startswith("params"):
            raise Unequal(
                f"parameters differ between devices {one} and {other}, {what}, and a checkpoint would keep "
                "one copy of them. Workers that start from the same and take the agreed update never "
                "differ. If hosts began with other parameters, give them one seed or checkpoint; a "
                "shard_map of yours needs check_vma=True, which finds what differs. Go on from one copy, "
                "jax.device_put(np.asarray(x), x.sharding)"
            )
        raise Unequal(
            f"{what} is labelled one value and differs between devices {one} and {other}: each worker has "
            f"its own, and a checkpoint would keep that of one. {let_out(workers)}"
        )
