"""What is left of the snapshots of a run, on all its machines, and the state that is made of it."""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lioncub_jax import own
from lioncub_jax.checkpoint import leaves, tiles
from lioncub_jax.checkpoint.leaves import Layout, Target
from lioncub_jax.checkpoint.tiles import Tile
from lioncub_jax.layout import Holder
from lioncub_jax.mesh.processes import told

_FILE = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-of-(\d+)\.(own|buddy)")
Key = tuple[int, int, int]  # of a snapshot: step, start and save


class WorkerStateLost(UserWarning):
    """What only a lost machine held is gone: a worker's own momentum and feedback; see `Snapshots`."""


class Name(NamedTuple):
    """The name of a file: whose snapshot, and when.

    Attributes:
      kind: ``"own"``: what its devices hold; ``"buddy"``: the slices that others own.
      step: of the state.
      start: of the run, in milliseconds since the epoch; one for all processes.
      save: which of this start; a step may come twice, where a run goes back.
      process: that wrote it.
      of: how many processes there were.
    """

    kind: str
    step: int
    start: int
    save: int
    process: int
    of: int

    @property
    def snapshot(self) -> Key:
        """Of which it is a part."""
        return self.step, self.start, self.save

    def __str__(self) -> str:
        return f"{self.step}-{self.start}-{self.save}-{self.process}-of-{self.of}.{self.kind}"


def names_in(folder: Path) -> list[Name]:
    """The files of a folder that are snapshots."""
    found = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
    return [Name(m[6], *map(int, m.groups()[:5])) for m in found if m]


class About(NamedTuple):
    """What every file of a snapshot says of it.

    Attributes:
      run: the name of the run.
      layout: how the state lay.
      two_levels: whether a worker was a group of devices.
      data: what the caller gave.
      tiles: all of them; a file has some, by their places in this list.
    """

    run: str
    layout: Layout
    two_levels: bool
    data: Any
    tiles: list[Tile]


class Parts(NamedTuple):
    """What the processes have read of a snapshot.

    Attributes:
      about: None if nobody has anything.
      held: the tiles that this process has, by number.
      having: of each tile the processes that have it; nobody: it is lost.
      damaged: files that are not as they were written.
    """

    about: About | None
    held: dict[int, np.ndarray]
    having: list[set[int]]
    damaged: list[Name]

    @property
    def lost(self) -> list[int]:
        """Numbers of tiles that no process has."""
        return [k for k, some in enumerate(self.having) if not some]


class Found:
    """The snapshots that the processes of a run see, each on its machine."""

    def __init__(self, folder: Path, run: str, checkpoints: Path):
        self._folder, self._run, self._checkpoints = folder, run, checkpoints
        self._seen = [[Name(*name) for name in names] for names in told(names_in(folder))]

    def best_first(self) -> list[tuple[Key, bool]]:
        """The snapshots to go on from, and whether each is whole: whole ones first, then newer ones.

        A process that is in no snapshot of a start, of three or more, was on a machine that is lost. One
        that is in some was still writing the others, and those are no snapshots.
        """
        seen: dict[Key, set[int]] = {}
        for name in (n for names in self._seen for n in names if n.kind == "own"):
            seen.setdefault(name.snapshot, set()).add(name.process)
        counts = {n.start: n.of for names in self._seen for n in names}

        def lost(key: Key) -> set[int]:
            return set(range(counts[key[1]])) - seen[key]

        def for_good(key: Key) -> bool:
            others = [some for (_, start, _), some in seen.items() if start == key[1]]
            return len(others) >= 3 and not lost(key) & set().union(*others)

        left = [key for key in seen if not lost(key) or for_good(key)]
        best = sorted(left, key=lambda key: (len(lost(key)), *(-n for n in key)))
        return [(key, not lost(key)) for key in best]

    def read(self, key: Key, target: Target, keep: bool) -> tuple[Any, Any] | None:
        """The state of a step and its data, or None if too little of it is left."""
        parts = self._parts(key, "own")
        if parts.about and parts.about.run != self._run:
            raise ValueError(
                f"the snapshots in {self._folder} are of another run than the checkpoints in "
                f"{self._checkpoints}, or those were taken away since: forget them by Snapshots.clear(), "
                "or give each run a folder of its own"
            )
        if parts.damaged or parts.about is None:
            which = ", ".join(map(str, parts.damaged))
            warnings.warn(
                f"snapshot {which} in {self._folder} is damaged, cannot be read or may be written by "
                "others, and an older state is taken",
                stacklevel=3,
            )
            return None
        layout, name = parts.about.layout, f"snapshot {key[0]} in {self._folder}"
        saved = leaves.described(layout)
        leaves.check_same_model(name, saved, target.leaves)
        if not self._made_good(key, parts.about, parts):
            return None
        arrays = _placed(parts.about, target, parts)
        if layout == target.layout:
            return target.filled(arrays), parts.about.data
        whole = leaves.leaves_of(layout, target.mesh, arrays)
        return target.made(saved, whole, keep), parts.about.data

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
        damaged, about = [], None
        for name in [name for name, reader in readers.items() if reader == me]:
            # What cannot be read is told to all, as damage is: they wait for what this process has found.
            try:
                about, some = pickle.loads(own.read(self._folder / str(name)))
                held |= some
            except Exception:
                damaged.append(name)
        says = min(readers.values(), default=0)  # what the snapshot is
        mine = pickle.dumps(about).hex() if me == says and about else ""
        damages, numbers, abouts = zip(*told([damaged, sorted(held), mine]), strict=True)
        about = pickle.loads(bytes.fromhex(abouts[says])) if abouts[says] else None
        having: list[set[int]] = [set() for _ in (about.tiles if about else ())]
        for p, some in enumerate(numbers):
            for k in some if about else ():
                having[k].add(p)
        return Parts(about, held, having, [Name(*n) for names in damages for n in names])

    def _made_good(self, key: Key, about: About, parts: Parts) -> bool:
        """Whether what a lost machine took with it can be had or done without; says what it is."""
        if not parts.lost:
            return True
        before, step = len(parts.lost), self._from_buddies(key, parts)
        left = parts.lost
        of = {about.tiles[k][0] for k in left}
        held = {path for (path, _), some in zip(about.tiles, parts.having, strict=True) if some}
        own_of_workers = {x.path for x in about.layout if x.leaf.own}
        # Rows of a group are parts of one momentum.
        if left and (about.two_levels or not of <= held & own_of_workers):
            return False
        if len(left) < before:
            warnings.warn(
                "after the loss of a machine the slices that its workers owned are those of step "
                f"{step}, in bfloat16, for a state of step {key[0]}: the newest copies of their buddies",
                WorkerStateLost,
                stacklevel=4,
            )
        if left:
            rows = sorted({row for k in left for row in range(*about.tiles[k][1][0])})
            warnings.warn(
                "after the loss of a machine these workers start from the mean of the others' momentum "
                f"and owe nothing: {', '.join(map(str, rows))}. Their own, of step {key[0]}, was nowhere "
                "else",
                WorkerStateLost,
                stacklevel=4,
            )
        return True

    def _from_buddies(self, key: Key, parts: Parts) -> int:
        """Takes lost slices from their newest copies, and says how old the oldest of these is."""
        step = key[0]
        copies = {n.snapshot for names in self._seen for n in names if n.kind == "buddy"}
        for copy in sorted((k for k in copies if k[1] == key[1] and k[0] <= key[0]), reverse=True):
            theirs = self._parts(copy, "buddy")
            for k in parts.lost:
                if theirs.about and theirs.having[k]:
                    parts.having[k] |= theirs.having[k]
                    step = min(step, copy[0])
                    if k in theirs.held:
                        parts.held[k] = theirs.held[k]
        return step


def _placed(about: About, target: Target, parts: Parts) -> dict[str, jax.Array]:
    """The arrays as they lay, each read to its place or spread over the mesh."""
    found = {}
    for stored in about.layout:
        mine = {index: k for k, (path, index) in enumerate(about.tiles) if path == stored.path}
        who = {index: parts.having[k] for index, k in mine.items()}
        held = {index: parts.held[k] for index, k in mine.items() if k in parts.held}
        fill = "zero" if stored.leaf.holder is Holder.FEEDBACK else "mean"
        fill = "key" if stored.leaf.is_key else fill
        place = target.place(stored.path, stored.leaf, about.layout == target.layout)
        found[stored.path] = tiles.placed(place, who, held, fill)
    return found
