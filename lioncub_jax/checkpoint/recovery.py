"""The newest state that the machines of a run still have in memory, and what it is made of."""

import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lioncub_jax.checkpoint import leaves, private_files, tiles
from lioncub_jax.checkpoint import snapshot_files as files
from lioncub_jax.checkpoint.leaves import Target
from lioncub_jax.checkpoint.snapshot_files import Description, Key, Name
from lioncub_jax.layout import Holder
from lioncub_jax.mesh.processes import together


class WorkerStateLost(UserWarning):
    """What only a lost machine held is gone: a worker's own momentum and feedback; see `Snapshots`."""


def seen(folder: Path) -> list[list[Name]]:
    """The snapshots that each process sees, oldest first; all must ask."""

    def listed() -> list[str]:
        with private_files.opened(folder) as here:
            return [str(name) for name in files.names_in(os.listdir(here))]

    mine = together(f"the snapshots in {folder} cannot be listed", listed)
    return [files.names_in(texts) for texts in files.asked(tuple[str, ...], mine)]


class Parts(NamedTuple):
    """What the processes have read of a snapshot.

    Attributes:
      about: None if nobody has anything, or something is damaged.
      data: what the caller gave.
      held: the tiles that this process has, by number.
      having: of each tile the processes that have it; nobody: it is lost.
      damaged: files that are not as they were written.
    """

    about: Description | None
    data: Any
    held: dict[int, np.ndarray]
    having: list[set[int]]
    damaged: list[str]

    @property
    def lost(self) -> list[int]:
        """Numbers of tiles that no process has."""
        return [k for k, some in enumerate(self.having) if not some]


# Of a process: files that are damaged, its tiles by number, a description, and the data of the caller.
Words = tuple[tuple[str, ...], tuple[int, ...], Any, Any]


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
        held: dict[Key, set[int]] = {}
        counts = {}
        for name in (n for names in self._seen for n in names if n.kind == "own"):
            held.setdefault(name.snapshot, set()).add(name.process)
            counts[name.start] = name.of

        def lost(key: Key) -> int:
            return counts[key[0]] - len(held[key])

        def for_good(key: Key) -> bool:
            of_start = [some for (start, *_), some in held.items() if start == key[0]]
            return len(of_start) >= 3 and set().union(*of_start) <= held[key]

        left = [key for key in held if not lost(key) or for_good(key)]
        best = sorted(left, key=lambda key: (-lost(key), key), reverse=True)
        return [(key, not lost(key)) for key in best]

    def read(self, key: Key, keep: bool) -> tuple[Any, Any] | None:
        """The state of a snapshot and its data, or None if too little of it is left."""
        parts, target = self._parts(key, "own"), self._target
        if parts.about is None:
            which = ", ".join(parts.damaged) or "-".join(map(str, key))
            warnings.warn(
                f"snapshot {which} in {self._folder} is damaged, cannot be read or may be written by "
                "others, and an older state is taken",
                stacklevel=3,
            )
            return None
        if parts.about.run != self._run:
            raise ValueError(
                f"the snapshots in {self._folder} are of another run than the checkpoints in "
                f"{self._checkpoints}, or those were taken away since: forget them by Snapshots.clear(), "
                "or give each run a folder of its own"
            )
        layout, name = parts.about.layout, f"snapshot of step {key[2]} in {self._folder}"
        same = layout == target.layout
        saved = target.leaves if same else leaves.described(layout)
        leaves.check_same_model(name, saved, target.leaves)
        if not self._made_good(key, parts.about, parts):
            return None
        arrays = _placed(parts.about, target, parts)
        if same:
            return target.filled(arrays), parts.data
        whole = leaves.leaves_of(layout, target.mesh, arrays)
        return target.made(saved, whole, keep), parts.data

    def _parts(self, key: Key, kind: str) -> Parts:
        """Each file is read by the process of its number, or by the first that sees it; all are told."""
        me = jax.process_index()
        readers: dict[Name, int] = {}
        for p, names in enumerate(self._seen):
            for name in names:
                first = p == name.process or name not in readers
                if (name.snapshot, name.kind) == (key, kind) and first:
                    readers[name] = p
        held: dict[int, np.ndarray] = {}
        damaged, about, data = [], None, None
        for name in [name for name, reader in readers.items() if reader == me]:
            # What cannot be read is told to all, as damage is: they wait for what this process has found.
            try:
                with private_files.opened(self._folder) as folder:
                    content = private_files.read(folder, str(name))
                about, data, some = files.unpacked(content, kind, self._target.layout)
                held |= some
            except Exception:
                damaged.append(str(name))
        words = json.loads(files.as_json([damaged, sorted(held), about, data]))
        each = files.asked(Words, words)
        damaged = [name for words in each for name in words[0]]
        about, data = self._agreed([words[2:] for words in each if words[2]], bool(damaged))
        having: list[set[int]] = [set() for _ in (about.tiles if about else ())]
        for p, (_, numbers, *_) in enumerate(each if about else ()):
            if max(numbers, default=-1) >= len(having):
                raise ValueError(
                    f"process {p} says that it has tile {max(numbers)} of {len(having)}"
                )
            for k in numbers:
                having[k].add(p)
        return Parts(about, data, held, having, damaged)

    def _agreed(self, said: list[Any], damaged: bool) -> tuple[Description | None, Any]:
        """What a snapshot is and its data, if all say the same and it makes sense."""
        if damaged or not said or any(about != said[0][0] for about, _ in said):
            return None, None
        try:
            return files.described(said[0][0], self._target.layout), said[0][1]
        except Exception:
            return None, None

    def _made_good(self, key: Key, about: Description, parts: Parts) -> bool:
        """Whether what a lost machine took with it can be had or done without; says what it is."""
        if not parts.lost:
            return True
        before, step = len(parts.lost), self._from_buddies(key, parts)
        left, every = parts.lost, about.tiles
        of = {every[k][0] for k in left}
        held = {path for (path, _), some in zip(every, parts.having, strict=True) if some}
        own_of_workers = {x.path for x in about.layout if x.leaf.own}
        # Rows of a group are parts of one momentum.
        if left and (about.two_levels or not of <= held & own_of_workers):
            return False
        if len(left) < before:
            warnings.warn(
                "after the loss of a machine the slices that its workers owned are those of step "
                f"{step}, in bfloat16, for a state of step {key[2]}: the newest copies of their buddies",
                WorkerStateLost,
                stacklevel=4,
            )
        if left:
            rows = sorted({row for k in left for row in range(*every[k][1][0])})
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
            for k in parts.lost:
                if theirs.about == parts.about and theirs.having[k]:
                    parts.having[k] |= theirs.having[k]
                    oldest = min(oldest, copy)
                    if k in theirs.held:
                        parts.held[k] = theirs.held[k]
        return oldest[2]


def _placed(about: Description, target: Target, parts: Parts) -> dict[str, jax.Array]:
    """The arrays as they lay, each read to its place or spread over the mesh."""
    found: dict[str, jax.Array] = {}
    numbers: dict[str, dict[tiles.Index, int]] = {}
    for k, (path, index) in enumerate(about.tiles):
        numbers.setdefault(path, {})[index] = k
    for stored in about.layout:
        mine = numbers[stored.path]
        who = {index: parts.having[k] for index, k in mine.items()}
        held = {index: parts.held[k] for index, k in mine.items() if k in parts.held}
        fill = "zero" if stored.leaf.holder is Holder.FEEDBACK else "mean"
        fill = "key" if stored.leaf.is_key else fill
        place = target.place(stored.path, stored.leaf, about.layout == target.layout)
        found[stored.path] = tiles.placed(place, who, held, fill)
    return found
