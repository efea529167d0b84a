"""The newest state that the machines of a run still have in memory, and what it is made of."""

import itertools
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lioncub_jax.checkpoint import leaves, private_files, tiles
from lioncub_jax.checkpoint import snapshot_files as files
from lioncub_jax.checkpoint.leaves import Target
from lioncub_jax.checkpoint.snapshot_files import Description, Key, Name, Part
from lioncub_jax.checkpoint.tiles import Tile
from lioncub_jax.mesh.hosts import together


class WorkerStateLost(UserWarning):
    """What only a lost machine held is gone: a worker's own momentum and feedback; see `Snapshots`."""


def seen(folder: Path) -> list[list[Name]]:
    """The snapshots that each process sees, oldest first; all must ask."""

    def listed() -> list[str]:
        with private_files.opened(folder) as here:
            return os.listdir(here)

    mine = together(f"the snapshots in {folder} cannot be listed", listed)
    return [files.names_in(texts) for texts in files.asked(tuple[str, ...], mine)]


class Parts(NamedTuple):
    """What the processes have read of a snapshot.

    Attributes:
      about: the snapshot.
      data: what the caller gave.
      held: the tiles that this process has.
      having: of each tile the processes that have it; nobody: it is lost.
    """

    about: Description
    data: Any
    held: dict[Tile, np.ndarray]
    having: dict[Tile, set[int]]

    @property
    def lost(self) -> list[Tile]:
        """Those that no process has."""
        return [tile for tile, some in self.having.items() if not some]


# Of a process: files that are damaged, and what the others have.
Words = tuple[tuple[str, ...], tuple[Part, ...]]


class Recovery:
    """The snapshots that the processes of a run see, each on its machine."""

    def __init__(self, folder: Path, run: str, checkpoints: Path, target: Target):
        self._folder, self._run, self._checkpoints = folder, run, checkpoints
        self._target, self._seen = target, seen(folder)

    def best_first(self) -> list[tuple[Key, bool]]:
        """The snapshots to go on from, and whether each is whole: whole ones first, then newer ones.

        A process that is in no snapshot of a start, of three or more, was on a machine that is lost. One
        that is in some was still writing the others, and those are no snapshots.
        """
        starts: dict[int, dict[Key, set[int]]] = {}
        for name in itertools.chain(*self._seen):
            if name.kind == "own":
                snapshots = starts.setdefault(name.start, {})
                snapshots.setdefault(name.snapshot, set()).add(name.process)
        found = []
        for snapshots in starts.values():
            left = set().union(*snapshots.values())
            for key, some in snapshots.items():
                lost = key[3] - len(some)
                if not lost or (len(snapshots) >= 3 and some == left):
                    found.append((-lost, key))
        return [(key, not lost) for lost, key in sorted(found, reverse=True)]

    def read(self, key: Key, keep: bool) -> tuple[Any, Any] | None:
        """The state of a snapshot and its data, or None if too little of it is left."""
        parts, target = self._parts(key, "own"), self._target
        if parts is None:
            return None
        if parts.about.run != self._run:
            raise ValueError(
                f"the snapshots in {self._folder} are of another run than the checkpoints in "
                f"{self._checkpoints}, or those were taken away since: forget them by Snapshots.clear(), "
                "or give each run a folder of its own"
            )
        layout, name = parts.about.layout, f"snapshot of step {key[2]} in {self._folder}"
        same, saved = layout == target.layout, leaves.described(layout)
        leaves.check_same_model(name, saved, target.leaves)
        if not self._made_good(key, parts):
            return None
        arrays = {}
        for stored, shape in zip(layout, parts.about.shapes, strict=True):
            place = target.place(stored.path, stored.leaf, same)
            every = tiles.cut(stored, shape)
            who = {tile: parts.having[tile] for tile in every}
            arrays[stored.path] = tiles.placed(stored, place, who, parts.held)
        if same:
            return target.filled(arrays), parts.data
        whole = leaves.leaves_of(layout, target.mesh, arrays)
        return target.made(saved, whole, keep), parts.data

    def _parts(self, key: Key, kind: str) -> Parts | None:
        """Each file is read by the process of its number, or by the first that sees it; all are told.

        None where one is damaged, or they are not of one snapshot.
        """
        readers: dict[Name, int] = {}
        for p, names in enumerate(self._seen):
            for name in names:
                if (name.snapshot, name.kind) == (key, kind):
                    readers[name] = p if p == name.process else readers.get(name, p)
        damaged, found = [], []
        held: dict[Tile, np.ndarray] = {}
        for name, reader in readers.items():
            if reader != jax.process_index():
                continue
            # What cannot be read is told to all, as damage is: they wait for what this process has found.
            try:
                with private_files.opened(self._folder) as folder:
                    content = private_files.read(folder, str(name))
                part, some = files.unpacked(content, kind, self._target.layout)
            except Exception:
                damaged.append(str(name))
            else:
                found.append(part)
                held |= some
        each = files.asked(Words, [damaged, found], self._check)
        damaged = [name for names, _ in each for name in names]
        # The data of the first process counts.
        abouts = {part.about: part.data for _, some in reversed(each) for part in some}
        if damaged or len(abouts) != 1:
            which = ", ".join(damaged) or f"of step {key[2]}"
            warnings.warn(
                f"snapshot {which} in {self._folder} is damaged, cannot be read or may be written by "
                "others, and an older one is taken",
                stacklevel=4,
            )
            return None
        [(text, data)] = abouts.items()
        about, every = files.described(text, self._target.layout)
        having: dict[Tile, set[int]] = {tile: set() for tile in every}
        for p, (_, some) in enumerate(each):
            for part in some:
                for k in part.numbers:
                    having[every[k]].add(p)
        return Parts(about, data, held, having)

    def _check(self, words: Words) -> None:
        for part in words[1]:
            _, every = files.described(part.about, self._target.layout)
            if max(part.numbers, default=-1) >= len(every):
                raise ValueError(f"there is no tile {max(part.numbers)}")

    def _made_good(self, key: Key, parts: Parts) -> bool:
        """Whether what a lost machine took with it can be had or done without; says what it is."""
        about, before = parts.about, parts.lost
        if not before:
            return True
        step, left = self._from_buddies(key, parts), parts.lost
        held = {path for (path, _), some in parts.having.items() if some}
        own_of_workers = {x.path for x in about.layout if x.leaf.own}
        # Rows of a group are parts of one momentum.
        if left and (about.two_levels or not {path for path, _ in left} <= held & own_of_workers):
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
            warnings.warn(
                "after the loss of a machine these workers start from the mean of the others' momentum "
                f"and owe nothing: {', '.join(map(str, rows))}. Their own, of step {key[2]}, was nowhere "
                "else",
                WorkerStateLost,
                stacklevel=4,
            )
        return True

    def _from_buddies(self, key: Key, parts: Parts) -> int:
        """Takes lost slices from their newest copies, and says how old the oldest of these is."""
        oldest = key
        copies = {n.snapshot for names in self._seen for n in names if n.kind == "buddy"}
        for copy in sorted((k for k in copies if (key[0], 0) <= k <= key), reverse=True):
            theirs = self._parts(copy, "buddy")
            if theirs is None or theirs.about != parts.about:
                continue
            for tile in parts.lost:
                if theirs.having[tile]:
                    parts.having[tile] |= theirs.having[tile]
                    oldest = copy
                    if tile in theirs.held:
                        parts.held[tile] = theirs.held[tile]
        return oldest[2]
