"""The newest states of a run in the memory of its machines, beside its checkpoints on disk.

A checkpoint is for good and takes a while; a snapshot is for a start after a death, is read again within
a second, and every few steps there is another. What all workers have, every machine has a
copy of. The slices of momentum that owners hold nobody else has, so another machine keeps a copy of them.
"""

import os
import re
import socket
import threading
import time
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lioncub_jax import checks, wires
from lioncub_jax.checkpoint import placing, reshard, states, tiles
from lioncub_jax.checkpoint.manager import Checkpoints, Restored, as_json, check_rule
from lioncub_jax.checkpoint.processes import told
from lioncub_jax.checkpoint.reshard import Layout
from lioncub_jax.layout import Holder
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.sums import untyped

GENERATIONS = 3  # a process that writes is at most one behind, and nothing is taken from under it
_FILE = re.compile(r"(\d+)-(\d+)-(\d+)-of-(\d+)\.(own|buddy)")


class WorkerStateLost(UserWarning):
    """What only a lost machine held is gone: a worker's own momentum and feedback; see `Snapshots`."""


class Name(NamedTuple):
    """The name of a file: whose snapshot, and when.

    Attributes:
      step: of the state.
      start: of the run, in milliseconds since the epoch; one for all processes.
      process: that wrote it.
      of: how many processes there were.
      kind: ``"own"``: what its devices hold; ``"buddy"``: the slices that others own.
    """

    step: int
    start: int
    process: int
    of: int
    kind: str

    def __str__(self) -> str:
        return f"{self.step}-{self.start}-{self.process}-of-{self.of}.{self.kind}"


class Snapshots:
    """Keeps the newest states of a run in memory, each machine what its devices hold.

    ``snapshots(state)`` at every step copies every K-th to the host and writes it to a folder in memory in
    the background, with a SHA-256. `restore` takes the newest state that is whole, of memory or of the
    checkpoints on disk. After the death of a process nothing is lost but steps: its files stay. After the
    death of a machine, parameters and counters are read from any other; owners' slices from the
    copies that other machines keep, rounded to bfloat16 and ``buddies`` steps old at most; and a
    worker's own momentum and its feedback are gone, and said to be: it starts from the mean of the
    other workers' momentum, and owes nothing.

    A machine holds three snapshots; each process writes all that its devices hold.

    Args:
      checkpoints: those of the run, which say the axes; fallen back on.
      folder: in memory, such as one below ``/dev/shm`` or `elastic.memory()`; every machine its own,
        processes of one machine the same. Made if it is not there.
      every: K, in calls; so many steps are done again, and those during one write.
      buddies: calls between the copies that owners send to another machine, or to another worker where
        there is one machine; 0 for none. A copy is 2 bytes a parameter over all workers.

    Raises:
      TypeError: for ``checkpoints`` that are none.
      ValueError: for ``every`` below 1, ``buddies`` below 0, or a folder that is a file; when called, for
        ``buddies`` of a single worker, and as `Checkpoints.save`.
      OSError: when called next, if the last one could not be written, as where memory is full.

    Example:
      >>> import lioncub_jax as lc
      >>> def trained(step, state, batches, saved, folder):
      ...     with lc.checkpoint.Snapshots(saved, folder, every=10) as snapshots:
      ...         if snapshots.steps():
      ...             state = snapshots.restore(state).state
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
        checks.check_count(f"every={every!r}", every, "a number of steps, 1 or more")
        if isinstance(buddies, bool) or not isinstance(buddies, int) or buddies < 0:
            raise ValueError(f"buddies={buddies!r}: give a number of steps, or 0 for no copies")
        self._checkpoints, self._every, self._buddies = checkpoints, every, buddies
        self.folder = Path(folder).absolute()
        _check_folder(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._start = int(told(time.time_ns() // 1_000_000)[0])
        self._calls = self._copies = 0
        self._writing: threading.Thread | None = None
        self._failed: BaseException | None = None

    def __enter__(self) -> "Snapshots":
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()

    def __call__(self, state: Any, data: Any = None) -> None:
        """Takes a snapshot if it is time."""
        self._calls += 1
        if self._calls % self._every == 0:
            self.save(state, data)

    def save(self, state: Any, data: Any = None) -> None:
        """Takes a snapshot now; its arrays may be donated as soon as this returns.

        Args:
          state: as `Checkpoints.save`.
          data: as `Checkpoints.save`.
        """
        self.wait()
        state, workers = self._checkpoints.on_mesh("snapshots(state)", state)
        step = states.step_of(state, None)
        layout = reshard.layout_of(state, workers)
        arrays, keys = placing.words(state)
        about = {
            "run": str(self._checkpoints.directory), "layout": layout.as_json(), "keys": keys,
            "data": as_json(data), "who": {p: list(tiles.holders_of(x).items()) for p, x in arrays.items()},
        }  # fmt: skip
        files = [("own", about, [t for p, x in arrays.items() for t in tiles.copied(p, x)])]
        if self._buddies and self._calls >= self._copies:
            self._copies = self._calls + self._buddies
            copies = self._of_others(arrays, layout, workers)
            files += [("buddy", about, copies)] if copies else []
        task = threading.Thread(target=self._write, args=(step, files))
        task.start()
        self._writing = task

    def wait(self) -> None:
        """Returns when the last snapshot is written; raises what kept it from being."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise OSError(
                f"a snapshot was not written to {self.folder}: {failed}; make room there (it holds "
                f"{GENERATIONS} states), or give another folder"
            ) from failed

    def steps(self) -> list[int]:
        """The steps of which there is a snapshot on any machine, whole or not, or a checkpoint."""
        names = [n for names in told_names(self.folder) for n in names]
        return sorted({n.step for n in names if n.kind == "own"} | set(self._checkpoints.steps()))

    def clear(self) -> None:
        """Forgets all snapshots of this machine, as before going back to an older checkpoint."""
        self.wait()
        for name in _names(self.folder):
            (self.folder / str(name)).unlink(missing_ok=True)

    def restore(self, like: Any, *, workers: str = "mean") -> Restored:
        """Reads the newest state that is whole, from memory or from disk.

        Args:
          like: as `Checkpoints.restore`.
          workers: as `Checkpoints.restore`.

        Returns:
          A ``Restored``.

        Raises:
          FileNotFoundError, Damaged, TypeError: as `Checkpoints.restore`.
          ValueError: as `Checkpoints.restore`, and for snapshots of another run.

        Warns:
          WorkerStateLost: where a machine took a worker's own state with it.
        """
        self.wait()
        check_rule(workers)
        wanted: Any = jax.tree.structure(like)
        placed_like, present = self._checkpoints.on_mesh("restore(like)", like)
        target = reshard.layout_of(placed_like, present)
        found = Found(self.folder, str(self._checkpoints.directory))
        disk = max(self._checkpoints.steps(), default=-1)
        for step, start in found.best_first():
            restored = None
            if step >= disk:
                restored = found.read(step, start, placed_like, target, workers == "keep")
            if restored is not None:
                state = jax.tree.unflatten(wanted, jax.tree.leaves(restored.state))
                return restored._replace(state=state)
        return self._checkpoints.restore(like, workers=workers)

    def _write(self, step: int, files: list[tuple[str, dict[str, Any], list[tiles.Tile]]]) -> None:
        try:
            for kind, about, parts in files:
                name = Name(step, self._start, jax.process_index(), jax.process_count(), kind)
                tiles.write(self.folder / str(name), about, parts)
                self._tidy(name)
        except BaseException as error:  # raised by the next call, which is not lost
            self._failed = error

    def _tidy(self, written: Name) -> None:
        """Takes away what is older than the generations that stay, and then what earlier starts left."""
        names = _names(self.folder)
        mine = sorted(n for n in names if (n.start, *n[2:]) == (written.start, *written[2:]))
        gone = mine[:-GENERATIONS]
        if len(mine) >= GENERATIONS:
            gone += [n for n in names if n.start < written.start]
        for name in gone:
            (self.folder / str(name)).unlink(
                missing_ok=True
            )  # another process may have been faster

    def lower(self, state: Any) -> jax.stages.Lowered:
        """The program that sends the owners' slices to their buddies, for the accounting of bytes."""
        state, workers = self._checkpoints.on_mesh("lower(state)", state)
        owned = _owned(placing.words(state)[0], reshard.layout_of(state, workers))
        return _sending(workers, owned, _shift(workers)).lower(owned)

    def _of_others(
        self, arrays: dict[str, jax.Array], layout: Layout, workers: Workers
    ) -> list[tiles.Tile]:
        owned = _owned(arrays, layout)
        if not owned:
            return []
        shift = _shift(workers)
        sent = _sending(workers, owned, shift)(owned)
        before = _devices_before(workers, shift)
        found = {}
        for path, x in sent.items():
            places = x.sharding.devices_indices_map(x.shape)
            for shard in x.addressable_shards:
                index = tiles.index_of(places[before[shard.device]], x.shape)
                found[path, index] = np.array(shard.data).view(jnp.bfloat16)
        return [tiles.Tile(*key, value) for key, value in found.items()]


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder for the snapshots")


# --- Buddies


def _owned(arrays: dict[str, jax.Array], layout: Layout) -> dict[str, jax.Array]:
    """What only its owner has; the counts beside it everybody has."""

    def is_slice(stored: reshard.Stored) -> bool:
        return stored.holder is Holder.OWNER and stored.place is not None and stored.shape != ()

    return {path: x for path, x in arrays.items() if is_slice(layout.arrays[path])}


def _shift(workers: Workers) -> int:
    """How many places further a worker's buddy is: on another machine, if there is one for all."""
    if workers.count == 1:
        raise ValueError(
            "a buddy holds a copy of another worker's slices, and there is one worker: give "
            "Snapshots(..., buddies=0)"
        )
    machines = told(zlib.crc32(socket.gethostname().encode()))
    each = _by_worker(workers)
    count = len(each)

    def apart(shift: int) -> tuple[int, int]:
        pairs = [
            (a, b)
            for i in range(count)
            for a, b in zip(each[i], each[(i + shift) % count], strict=True)
        ]
        hosts = sum(machines[a.process_index] != machines[b.process_index] for a, b in pairs)
        return hosts, sum(a.process_index != b.process_index for a, b in pairs)

    return max(range(1, count), key=lambda shift: (apart(shift), -shift))


def _by_worker(workers: Workers) -> np.ndarray:
    """``[workers, others]`` devices."""
    mesh, names = workers.mesh, wires.names(workers.axis_name)
    axes = [mesh.axis_names.index(name) for name in names]
    rest = [d for d in range(mesh.devices.ndim) if d not in axes]
    count = int(np.prod([mesh.devices.shape[d] for d in axes]))
    return mesh.devices.transpose(*axes, *rest).reshape(count, -1)


def _devices_before(workers: Workers, shift: int) -> dict[Any, Any]:
    """The device whose slices each device is sent."""
    each = _by_worker(workers)
    return dict(zip(each.flat, np.roll(each, shift, axis=0).flat, strict=True))


def _sending(workers: Workers, owned: dict[str, jax.Array], shift: int) -> Any:
    mesh = untyped(workers.mesh)
    specs = {path: x.sharding.spec for path, x in owned.items()}  # type: ignore[attr-defined]

    def send(owned: dict[str, jax.Array]) -> dict[str, jax.Array]:
        # As bits, which no compiler widens on the way.
        def sent(x: jax.Array) -> jax.Array:
            half = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
            return wires.from_worker_before(half, workers.axis_name, shift)

        return {path: sent(x) for path, x in owned.items()}

    run = jax.shard_map(send, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.jit(run)


# --- What there is


def _names(folder: Path) -> list[Name]:
    found = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
    return [Name(int(m[1]), int(m[2]), int(m[3]), int(m[4]), m[5]) for m in found if m]


def told_names(folder: Path) -> list[list[Name]]:
    """The files that each process sees, in the order of the processes."""
    return [[Name(*name) for name in names] for names in told(_names(folder))]


Parts = dict[str, dict[tiles.Index, Any]]  # by path, by tile
Lost = list[tuple[str, tiles.Index]]


class Found:
    """The snapshots that the processes of a run see, each on its machine."""

    def __init__(self, folder: Path, run: str):
        self._folder, self._run = folder, run
        self._seen = told_names(folder)
        self._files: dict[Name, Any] = {}

    def best_first(self) -> list[tuple[int, int]]:
        """Steps and starts of the run: those of which the least is lost, and of these the newest."""
        seen: dict[tuple[int, int], set[int]] = {}
        counts: dict[tuple[int, int], int] = {}
        for name in (n for names in self._seen for n in names if n.kind == "own"):
            seen.setdefault(name[:2], set()).add(name.process)
            counts[name[:2]] = name.of
        return sorted(seen, key=lambda key: (counts[key] - len(seen[key]), -key[0], -key[1]))

    def read(self, step: int, start: int, like: Any, target: Layout, keep: bool) -> Restored | None:
        """The state of a step, or None if too little of it is left."""
        about = self._about(step, start)
        if about is None:
            return None
        saved = Layout.from_json(about["layout"])
        reshard.check_same_model(f"snapshot {step} in {self._folder}", saved, target)
        who = {path: {_index(i): set(q) for i, q in each} for path, each in about["who"].items()}
        loads = self._loads(step, start, who)
        held = self._held(step, start, loads)
        if held is None:
            return None
        having: Parts = {
            path: {i: {p for p, some in enumerate(loads) if some & q} for i, q in each.items()}
            for path, each in who.items()
        }
        lost = [(path, i) for path, each in having.items() for i, some in each.items() if not some]
        lost = self._from_buddies(start, saved, lost, having, held) if lost else lost
        if any(saved.arrays[path].holder not in reshard.OWN for path, _ in lost):
            return None
        if lost:
            rows = ", ".join(map(str, _lost_rows(lost)))
            warnings.warn(
                f"after the loss of a machine worker {rows} starts from the mean of the other "
                f"workers' momentum and owes nothing: its own, of step {step}, was nowhere else",
                WorkerStateLost,
                stacklevel=4,
            )
        state = self._placed(saved, target, like, about["keys"], keep, having, held)
        return Restored(state, about["data"], step)

    def _group(self, step: int, start: int, kind: str = "own") -> list[dict[int, Name]]:
        """The files of a snapshot that each process sees, by who wrote them."""
        return [
            {n.process: n for n in names if (n.step, n.start, n.kind) == (step, start, kind)}
            for names in self._seen
        ]

    def _file(self, name: Name) -> tuple[dict[str, Any], list[tiles.Tile]] | None:
        if name not in self._files:
            self._files[name] = tiles.read(self._folder / str(name))
        return self._files[name]

    def _about(self, step: int, start: int) -> dict[str, Any] | None:
        """The description of a snapshot, told by the first process that sees it."""
        group, mine = self._group(step, start), None
        first = next(p for p, names in enumerate(group) if names)
        name = min(group[first].values())
        if jax.process_index() == first:
            found = self._file(name)
            mine = found and found[0]
        about: dict[str, Any] | None = told(mine)[first]
        if about is None:
            self._pass_over([name])
        elif about["run"] != self._run:
            raise ValueError(
                f"the snapshots in {self._folder} are of another run, whose checkpoints are in "
                f"{about['run']} and not in {self._run}: give each run a folder of its own"
            )
        return about

    def _loads(self, step: int, start: int, who: Parts) -> list[set[int]]:
        """Whose files each process reads: its own, and what nobody else has, once."""
        seen = [set(names) for names in self._group(step, start)]
        loads = [({p} & some) or set(sorted(some)[:1]) for p, some in enumerate(seen)]
        for q in sorted(set().union(*seen)):
            read = set().union(*loads)
            if any(
                q in some and not some & read for each in who.values() for some in each.values()
            ):
                loads[next(p for p, some in enumerate(seen) if q in some)].add(q)
        return loads

    def _held(self, step: int, start: int, loads: list[set[int]]) -> Parts | None:
        """The tiles that this process reads; None if a file is not as it was written, anywhere."""
        me, held, damaged = jax.process_index(), Parts(), []
        names = self._group(step, start)[me]
        for q in sorted(loads[me]):
            found = self._file(names[q])
            damaged += [] if found else [names[q]]
            for tile in found[1] if found else []:
                held.setdefault(tile.path, {})[tile.at] = tile.value
        everywhere = [Name(*name) for names in told(damaged) for name in names]
        if everywhere:
            self._pass_over(everywhere)
            return None
        return held

    def _pass_over(self, names: list[Name]) -> None:
        which = ", ".join(map(str, names))
        warnings.warn(
            f"snapshot {which} in {self._folder} is damaged, and an older state is taken",
            stacklevel=5,
        )

    def _from_buddies(
        self, start: int, saved: Layout, lost: Lost, having: Parts, held: Parts
    ) -> Lost:
        """Takes the slices that are lost from the newest copies; what is lost after that."""
        me = jax.process_index()
        steps = {
            n.step for names in self._seen for n in names if n.kind == "buddy" and n.start == start
        }
        for step in sorted(steps, reverse=True):
            group, mine = self._group(step, start, "buddy"), []
            for q, name in group[me].items():
                found = self._file(name) if not any(q in names for names in group[:me]) else None
                for tile in found[1] if found else []:
                    if (tile.path, tile.at) in lost:
                        held.setdefault(tile.path, {})[tile.at] = tile.value
                        mine.append((tile.path, tile.at))
            for p, some in enumerate(told(mine)):
                for path, index in some:
                    having[path][_index(index)].add(p)
            lost = [(path, i) for path, i in lost if not having[path][i]]
            if not any(saved.arrays[path].holder is Holder.OWNER for path, _ in lost):
                break
        return lost

    def _placed(
        self, saved: Layout, target: Layout, like: Any, keys: dict[str, Any], keep: bool,
        having: Parts, held: Parts,
    ) -> Any:  # fmt: skip
        def of(path: str, place: Any) -> jax.Array:
            feedback = saved.arrays[path].holder is Holder.FEEDBACK
            fill = "zero" if feedback else "key" if path in keys else "mean"
            return tiles.placed(place, having[path], held.get(path, {}), fill)

        places = placing.places(saved, target, like, keys)
        arrays = {path: of(path, place) for path, place in places.items()}
        return placing.placed(saved, target, like, arrays, keys, keep)


def _index(pairs: Any) -> tiles.Index:
    return tuple((int(a), int(b)) for a, b in pairs)


def _lost_rows(lost: Lost) -> list[int]:
    return sorted({row for _, index in lost for row in range(*index[0])})
