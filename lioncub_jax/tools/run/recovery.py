"""Recovery of the newest state that the machines of a run still have in memory."""

import itertools
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lioncub_jax.checkpoint.layout import check_same_model
from lioncub_jax.checkpoint.leaves import Target, leaf_infos, leaves_of, spread
from lioncub_jax.checkpoint.tiles import Tile
from lioncub_jax.mesh.hosts import together
from lioncub_jax.tools.run import private_files
from lioncub_jax.tools.run import snapshot_files as files
from lioncub_jax.tools.run.assembly import assemble, tiles_of
from lioncub_jax.tools.run.snapshot_files import Description, Key, Name, Part


class WorkerStateLost(UserWarning):
    """A worker's own momentum and feedback are gone with a lost machine; see `Snapshots`."""


def names_of_processes(folder: Path) -> list[list[Name]]:
    """The files of snapshots that each process sees, oldest first; all processes must ask."""

    def list_own() -> list[str]:
        with private_files.opened(folder) as here:
            return os.listdir(here)

    own = together(f"the snapshots in {folder} cannot be listed", list_own)
    return [files.names_in(texts) for texts in files.exchange(tuple[str, ...], own)]


class Snapshot(NamedTuple):
    """A snapshot as the processes have read it.

    Attributes:
      about: its description.
      data: what the caller gave.
      held: the tiles that this process has.
      having: for each tile the processes that have it; none: it is lost.
    """

    about: Description
    data: Any
    held: dict[Tile, np.ndarray]
    having: dict[Tile, set[int]]

    @property
    def lost(self) -> list[Tile]:
        """Tiles that no process has."""
        return [tile for tile, processes in self.having.items() if not processes]


# A message of a process: the names of damaged files, and the heads of the others.
ReadFiles = tuple[tuple[str, ...], tuple[Part, ...]]


class Recovery:
    """The snapshots that the processes of a run see, each on its machine."""

    def __init__(self, folder: Path, run: str, checkpoints: Path, target: Target):
        self._folder, self._run, self._checkpoints = folder, run, checkpoints
        self._target, self._names = target, names_of_processes(folder)

    def best_first(self) -> list[tuple[Key, bool]]:
        """The snapshots to go on from, and whether each is whole: whole ones first, then newer ones.

        A process that is in no snapshot of a start, of three or more, was on a machine that is lost. One
        that is in some was still writing the others, and those are no snapshots.
        """
        starts: dict[int, dict[Key, set[int]]] = {}
        for name in itertools.chain(*self._names):
            if name.kind == "own":
                snapshots = starts.setdefault(name.start, {})
                snapshots.setdefault(name.snapshot, set()).add(name.process)
        ranked = []
        for snapshots in starts.values():
            alive = set().union(*snapshots.values())
            for key, processes in snapshots.items():
                lost = key[3] - len(processes)
                if not lost or (len(snapshots) >= 3 and processes == alive):
                    ranked.append((-lost, key))
        return [(key, not lost) for lost, key in sorted(ranked, reverse=True)]

    def read(self, key: Key, keep: bool) -> tuple[Any, Any] | None:
        """The state of a snapshot and its data, or None if too little of it is left."""
        snapshot, target = self._read(key, "own"), self._target
        if snapshot is None:
            return None
        if snapshot.about.run != self._run:
            raise ValueError(
                f"the snapshots in {self._folder} are of another run than the checkpoints in "
                f"{self._checkpoints}, or those were taken away since: forget them by Snapshots.clear(), "
                "or give each run a folder of its own"
            )
        layout, source = snapshot.about.layout, f"snapshot of step {key[2]} in {self._folder}"
        same, saved = layout == target.layout, leaf_infos(layout)
        check_same_model(source, saved, target.leaves)
        if not self._replace_lost(key, snapshot):
            return None
        arrays = {}
        for array, shape in zip(layout, snapshot.about.shapes, strict=True):
            info = array.info
            sharding = target.sharding(array.path) if same else spread(info.shape, target.mesh)
            having = {tile: snapshot.having[tile] for tile in tiles_of(array, shape)}
            arrays[array.path] = assemble(array, info.abstract(sharding), having, snapshot.held)
        if same:
            return target.fill(arrays), snapshot.data
        leaves = leaves_of(layout, target.mesh, arrays)
        return target.build(saved, leaves, keep), snapshot.data

    def _read(self, key: Key, kind: str) -> Snapshot | None:
        """Reads a snapshot: each file by the process of its number, or by the first that sees it.

        None where a file is damaged, or they are not of one snapshot.
        """
        damaged, own_parts, held = self._read_own(key, kind)
        messages = files.exchange(ReadFiles, [damaged, own_parts], self._check)
        damaged = [name for names, _ in messages for name in names]
        # The data of the first process counts.
        abouts = {part.about: part.data for _, parts in reversed(messages) for part in parts}
        if damaged or len(abouts) != 1:
            which = ", ".join(damaged) or f"of step {key[2]}"
            warnings.warn(
                f"snapshot {which} in {self._folder} is damaged, cannot be read or may be written by "
                "others, and an older one is taken",
                stacklevel=4,
            )
            return None
        [(text, data)] = abouts.items()
        about, every = files.parse_description(text, self._target.layout)
        having: dict[Tile, set[int]] = {tile: set() for tile in every}
        for process, (_, parts) in enumerate(messages):
            for part in parts:
                for k in part.numbers:
                    having[every[k]].add(process)
        return Snapshot(about, data, held, having)

    def _read_own(
        self, key: Key, kind: str
    ) -> tuple[list[str], list[Part], dict[Tile, np.ndarray]]:
        """Reads the files that are this process's to read: damaged names, heads, and tiles."""
        readers: dict[Name, int] = {}
        for process, names in enumerate(self._names):
            for name in names:
                if (name.snapshot, name.kind) == (key, kind):
                    readers[name] = (
                        process if process == name.process else readers.get(name, process)
                    )
        damaged, parts = [], []
        held: dict[Tile, np.ndarray] = {}
        for name, reader in readers.items():
            if reader != jax.process_index():
                continue
            # A file that cannot be read is reported as damage is: the others wait for this process.
            try:
                with private_files.opened(self._folder) as folder:
                    content = private_files.read(folder, str(name))
                part, tiles = files.from_bytes(content, kind, self._target.layout)
            except Exception:
                damaged.append(str(name))
            else:
                parts.append(part)
                held |= tiles
        return damaged, parts, held

    def _check(self, message: ReadFiles) -> None:
        for part in message[1]:
            _, every = files.parse_description(part.about, self._target.layout)
            if max(part.numbers, default=-1) >= len(every):
                raise ValueError(f"there is no tile {max(part.numbers)}")

    def _replace_lost(self, key: Key, snapshot: Snapshot) -> bool:
        """Replaces what a lost machine took with it, and warns of it; False where it cannot."""
        about, before = snapshot.about, snapshot.lost
        if not before:
            return True
        step, left = self._copy_from_buddies(key, snapshot), snapshot.lost
        held = {path for (path, _), processes in snapshot.having.items() if processes}
        per_worker = {array.path for array in about.layout if array.info.per_worker}
        # Rows of a group are parts of one momentum.
        if left and (about.two_levels or not {path for path, _ in left} <= held & per_worker):
            return False
        if len(left) < len(before):
            warnings.warn(
                "after the loss of a machine the slices that its workers owned are those of step "
                f"{step}, in bfloat16, for a state of step {key[2]}: the newest copies of their buddies",
                WorkerStateLost,
                stacklevel=4,
            )
        if left:
            rows = sorted({row for _, index in left for row in range(*index[0])})
            workers = ", ".join(str(row) for row in rows)
            warnings.warn(
                "after the loss of a machine these workers start from the mean of the others' momentum "
                f"and owe nothing: {workers}. Their own, of step {key[2]}, was nowhere "
                "else",
                WorkerStateLost,
                stacklevel=4,
            )
        return True

    def _copy_from_buddies(self, key: Key, snapshot: Snapshot) -> int:
        """Takes lost slices from their newest copies, and returns the step of the oldest of these."""
        oldest = key
        copies = {n.snapshot for names in self._names for n in names if n.kind == "buddy"}
        for copy in sorted((k for k in copies if (key[0], 0) <= k <= key), reverse=True):
            buddies = self._read(copy, "buddy")
            if buddies is None or buddies.about != snapshot.about:
                continue
            for tile in snapshot.lost:
                if buddies.having[tile]:
                    snapshot.having[tile] |= buddies.having[tile]
                    oldest = copy
                    if tile in buddies.held:
                        snapshot.held[tile] = buddies.held[tile]
        return oldest[2]
