"""The newest states of a run in the memory of its machines, beside its checkpoints on disk.

A checkpoint stays and takes a while. A snapshot is for a start after a death, is read within a second, and
every few steps there is another. Every machine has a copy of what is the same on all workers. Slices of
momentum that an owner holds are nowhere else, so another machine keeps a copy of them.
"""

import functools
import os
import socket
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lioncub_jax.checkpoint import states, tiles
from lioncub_jax.checkpoint.agreement import from_first
from lioncub_jax.checkpoint.files import PART, RUN
from lioncub_jax.checkpoint.layout import Layout, layout_of
from lioncub_jax.checkpoint.leaves import Target, arrays_of
from lioncub_jax.checkpoint.manager import Checkpoints, Restored, as_json, check_rule
from lioncub_jax.checkpoint.tiles import Tile
from lioncub_jax.exchange.arguments import check_count, check_number
from lioncub_jax.exchange.holder import Holder
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.hosts import gathered_json, together
from lioncub_jax.mesh.placement import Workers, check_alive
from lioncub_jax.mesh.specs import product
from lioncub_jax.tools.run import private_files
from lioncub_jax.tools.run import snapshot_files as files
from lioncub_jax.tools.run.progress import stepped
from lioncub_jax.tools.run.recovery import Recovery, names_of_processes
from lioncub_jax.tools.run.snapshot_files import Description, Name

GENERATIONS = 3  # a process that writes is at most one behind, and nothing is taken from under it


class Snapshots:
    """Keeps the newest states of a run in memory, each machine what its devices hold.

    ``snapshots(state)`` at every step copies every K-th to the host and writes it to a folder in memory in
    the background, with a SHA-256. `restore` takes the newest state that is whole, of memory or of the
    checkpoints on disk. After the death of a process nothing is lost but steps: its files stay. After the
    death of a machine, parameters and counters are read from any other; owners' slices from the
    copies that other machines keep, rounded to bfloat16 and ``buddies`` steps old at most; and a
    worker's own momentum and its feedback are gone, with a warning: it starts from the mean of the
    other workers' momentum, and without feedback.

    A process writes all that its devices hold, and keeps three snapshots, and as many again that earlier
    starts left until it has its own three. A folder belongs to one run; its name is kept in the folder of
    the checkpoints: where that was emptied or replaced meanwhile, the snapshots are another run's.

    Args:
      checkpoints: those of the run, which say the axes; fallen back on.
      folder: in memory, such as one below ``/dev/shm`` or `memory_folder()`; every machine its own,
        processes of one machine the same. Made if it is not there, and yours alone.
      every: K, in calls; so many steps are done again, and those during one write.
      buddies: calls between the copies that owners send to another machine, or to another worker where
        there is one machine; 0 for none. A copy is 2 bytes a parameter over all workers.

    Raises:
      TypeError: for ``checkpoints`` that are none.
      ValueError: for ``every`` below 1, ``buddies`` below 0, or a folder that is a file or a link, or that
        another user owns, or can change or rename, which is looked at at each use; when called, for
        ``buddies`` of a single worker, and for a state that lies on no mesh, has no step or was donated.
      OSError: when called next, if the last one could not be written, as where memory is full; and where
        the checkpoints have no name of the run yet and cannot be written.

    Example:
      >>> import lioncub_jax as lc
      >>> def trained(step, state, batches, saved, folder):
      ...     with Snapshots(saved, folder, every=10) as snapshots:
      ...         restored = snapshots.restore(state)
      ...         state = restored.state if restored else state
      ...         for batch in batches:
      ...             state, metrics = step(state, batch)
      ...             snapshots(state)
      ...     return state

    Source: this library.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        folder: str | os.PathLike[str],
        *,
        every: int = 10,
        buddies: int = 100,
    ):
        if not isinstance(checkpoints, Checkpoints):
            raise TypeError(
                f"checkpoints={checkpoints!r} is a {type(checkpoints).__name__}: give the Checkpoints of "
                "the run"
            )
        check_count(f"every={every!r}", every, "a number of steps, 1 or more")
        allowed = "give a number of steps, or 0 for no copies"
        check_number(f"buddies={buddies!r}", buddies, lambda n: n >= 0, allowed, int)
        self._checkpoints, self._every, self._buddies = checkpoints, every, buddies
        self.folder = Path(folder).absolute()
        self._together(lambda folder: None)  # it is made, or looked at
        newest = [names[-1].start for names in names_of_processes(self.folder) if names]
        self._start = 1 + max(newest, default=0)
        self._run = run_name(checkpoints.directory)
        self._calls = self._copies = self._saves = 0
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> "Snapshots":
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()

    def __call__(self, state: Any, data: object = None) -> None:
        """Takes a snapshot if it is time, and says by `stepped` that a step is done."""
        stepped(state)
        self._calls += 1
        if self._calls % self._every == 0:
            self.save(state, data)

    def save(self, state: Any, data: object = None) -> None:
        """Takes a snapshot now; its arrays may be donated as soon as this returns.

        Args:
          state: as `Checkpoints.save`.
          data: as `Checkpoints.save`.
        """
        self.wait()
        check_alive("snapshots(state): state", state)
        state, workers = states.on_workers("snapshots(state)", state, self._checkpoints.workers)
        step = states.step_of(state, None)
        layout, arrays = layout_of(state, workers), arrays_of(state)
        shapes = tuple(x.sharding.shard_shape(x.shape) for x in arrays.values())
        about = Description(self._run, layout, workers.group is not None, shapes)
        held = {"own": tiles.copy_to_host(arrays)}
        if self._buddies and self._calls >= self._copies:
            self._copies = self._calls + self._buddies
            if copies := _buddy_copies(arrays, layout, workers):
                held["buddy"] = copies
        self._saves += 1
        self._writing = self._writer.submit(self._write, step, about, as_json(data), held)

    def wait(self) -> None:
        """Returns when the last snapshot is written; raises what kept it from being."""
        writing, self._writing = self._writing, None
        if writing is not None and (failed := writing.exception()):
            raise OSError(
                f"a snapshot was not written to {self.folder}: {failed}; make room there (it holds "
                f"{GENERATIONS} states), or give another folder"
            ) from failed

    def clear(self) -> None:
        """Forgets all snapshots of this machine, as before going back to an older checkpoint."""
        self.wait()
        gathered_json(None)  # all processes have written
        self._together(lambda folder: private_files.remove(folder, _entries(folder)))

    def _together(self, act: Callable[[int], object]) -> None:
        """Acts in the folder, in all processes, and raises in all where it fails in one."""

        def opened() -> None:
            with private_files.opened(self.folder, make=True) as folder:
                act(folder)

        together(f"{self.folder} is no folder for snapshots, or cannot be emptied", opened)

    def restore(self, like: Any, *, on_resize: str = "mean") -> Restored | None:
        """Reads the newest state that is whole, from memory or from disk.

        A process that is missing from every snapshot of a start, of three or more, counts as a lost
        machine, and the newest snapshot of the others is taken if it is newer than the newest checkpoint.
        One that is missing from some was still writing them, and they are passed over.

        Args:
          like: as `Checkpoints.restore`.
          on_resize: as `Checkpoints.restore`.

        Returns:
          A ``Restored``, or None where there is nothing to go on from.

        Raises:
          Damaged, TypeError: as `Checkpoints.restore`.
          ValueError: as `Checkpoints.restore`, and for snapshots of another run.

        Warns:
          WorkerStateLost: where a machine took a worker's own state with it.
        """
        self.wait()
        check_rule(on_resize)
        placed, workers = states.on_workers("restore(like)", like, self._checkpoints.workers)
        target = Target(like, placed, workers)
        memory = Recovery(self.folder, self._run, self._checkpoints.directory, target)
        self._checkpoints.wait()
        steps = files.exchange(int, 1 + max(self._checkpoints.steps(), default=-1))
        disk = min(steps) - 1  # that all of them see
        for key, whole in memory.best_first():
            newer = (key[2], whole) > (disk, False)  # of one step the whole one, which is faster
            if newer and (read := memory.read(key, on_resize == "keep")):
                return Restored(*read, key[2])
        return self._checkpoints.restore(like, on_resize=on_resize) if disk >= 0 else None

    def _write(
        self, step: int, about: Description, data: Any, held: dict[str, dict[Tile, np.ndarray]]
    ) -> None:
        me = jax.process_index(), jax.process_count()
        for kind, parts in held.items():
            name = Name(self._start, self._saves, step, *me, kind)
            with private_files.opened(self.folder) as folder:
                private_files.seal(folder, str(name), *files.to_bytes(about, data, parts))
                entries = _entries(folder)
                private_files.remove(folder, _old(files.names_in(entries), name))
                private_files.remove(folder, _left_unfinished(entries, self._start))


def run_name(directory: Path) -> str:
    """The name of a run, kept beside its checkpoints, and so another where that folder was emptied.

    All processes must ask. A copy of the folder has the same name.

    Raises:
      OSError: where process 0 cannot read the file, or make it where there is none.
    """
    file = directory / RUN

    def read_or_make() -> str:
        name = file.read_text() if file.exists() else ""
        if not name:  # or a machine died before it was on the disk
            name = uuid.uuid4().hex
            directory.mkdir(parents=True, exist_ok=True)
            private_files.write(str(file), name.encode())
        return name

    return from_first(read_or_make)


def _entries(folder: int) -> list[str]:
    """Snapshots and unfinished ones."""
    entries = os.listdir(folder)
    unfinished = [name for name in entries if name.endswith(PART)]
    return [*map(str, files.names_in(entries)), *unfinished]


def _left_unfinished(entries: list[str], start: int) -> list[str]:
    """Unfinished snapshots of earlier starts; a process that only reads deletes nothing."""
    starts = {name: name.partition("-")[0] for name in entries if name.endswith(PART)}
    return [name for name, number in starts.items() if number.isdigit() and int(number) < start]


def _old(names: list[Name], written: Name) -> list[Name]:
    """Snapshots older than the generations that stay, and then those of earlier starts."""
    mine = [n for n in names if (n.process, n.kind) == (written.process, written.kind)]
    of_start = [n for n in mine if n.start == written.start]
    if len(of_start) < GENERATIONS:  # starts that each die soon shall not fill the memory
        return mine[: -2 * GENERATIONS]
    return of_start[:-GENERATIONS] + [n for n in names if n.start < written.start]


# --- Buddies


def _buddy_copies(
    arrays: dict[str, jax.Array], layout: Layout, workers: Workers
) -> dict[Tile, np.ndarray]:
    """Copies the slices of the workers that this process keeps copies of, in bfloat16."""
    sent, shifts = {}, {}
    for array in layout:
        if array.info.holder is Holder.OWNER:
            shift = _shift(workers)
            if array.num_workers > 1:  # counters beside slices are the same on all
                x = arrays[array.path]
                shifts[array.path] = shift * (len(x) // array.num_workers)
                sent[array.path] = send(x, shifts[array.path], x.sharding)
    copies = {}
    for (path, (rows, *rest)), bits in tiles.copy_to_host(sent).items():
        start = (rows[0] - shifts[path]) % len(arrays[path])
        copies[path, ((start, start + rows[1] - rows[0]), *rest)] = bits.view(jnp.bfloat16)
    return copies


@functools.partial(jax.jit, static_argnums=(1, 2))
def send(x: jax.Array, rows: int, sharding: NamedSharding) -> jax.Array:
    """The bits of an array in bfloat16, moved by so many rows, and so to other workers."""
    # As bits, which no compiler widens on the way.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return jax.lax.with_sharding_constraint(jnp.roll(bits, rows, axis=0), sharding)


@functools.cache  # processes ask each other, and machines do not change
def _shift(workers: Workers) -> int:
    """The number of places from a worker to its buddy, on another machine if it can be."""
    names = axes.names(workers.axis)
    count = product(workers.mesh.shape, names)
    if count == 1:
        raise ValueError(
            "a buddy holds a copy of another worker's slices, and there is one worker: give "
            "Snapshots(..., buddies=0)"
        )
    places = [workers.mesh.axis_names.index(name) for name in names]
    devices = np.moveaxis(workers.mesh.devices, places, range(len(places))).reshape(count, -1)
    processes = np.vectorize(lambda device: device.process_index)(devices)  # of each worker
    machines = np.array(gathered_json(zlib.crc32(socket.gethostname().encode())))

    def separation(shift: int) -> tuple[int, int, int]:
        buddies = np.roll(processes, -shift, axis=0)
        on_others = np.sum(machines[processes] != machines[buddies])
        return on_others, np.sum(processes != buddies), -shift

    return max(range(1, count), key=separation)
