"""What is left of the snapshots of a run, on all its machines, and the state that is made of it."""

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lioncub_jax.checkpoint import placing, reshard, tiles
from lioncub_jax.checkpoint.reshard import Layout
from lioncub_jax.layout import Holder
from lioncub_jax.mesh.processes import told

_FILE = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-of-(\d+)\.(own|buddy)")


class WorkerStateLost(UserWarning):
    """What only a lost machine held is gone: a worker's own momentum and feedback; see `Snapshots`."""


class Name(NamedTuple):
    """The name of a file: whose snapshot, and when.

    Attributes:
      step: of the state.
      start: of the run, in milliseconds since the epoch; one for all processes.
      save: which of this start; a step may come twice, where a run goes back.
      process: that wrote it.
      of: how many processes there were.
      kind: ``"own"``: what its devices hold; ``"buddy"``: the slices that others own.
    """

    step: int
    start: int
    save: int
    process: int
    of: int
    kind: str

    @property
    def snapshot(self) -> "Key":
        """Of which it is a part."""
        return self.step, self.start, self.save

    def __str__(self) -> str:
        return f"{self.step}-{self.start}-{self.save}-{self.process}-of-{self.of}.{self.kind}"


def names_in(folder: Path) -> list[Name]:
    """The files of a folder that are snapshots."""
    found = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
    return [Name(int(m[1]), int(m[2]), int(m[3]), int(m[4]), int(m[5]), m[6]) for m in found if m]


def told_names(folder: Path) -> list[list[Name]]:
    """The files that each process sees, in the order of the processes."""
    return [[Name(*name) for name in names] for names in told(names_in(folder))]


Key = tuple[int, int, int]  # step, start and save
Parts = dict[str, dict[tiles.Index, Any]]  # by path, by tile
Lost = list[tuple[str, tiles.Index]]  # tiles that no process has


class Found:
    """The snapshots that the processes of a run see, each on its machine."""

    def __init__(self, folder: Path, run: str, checkpoints: Path):
        self._folder, self._run, self._checkpoints = folder, run, checkpoints
        self._seen = told_names(folder)
        self._files: dict[Name, Any] = {}

    def best_first(self) -> list[tuple[Key, bool]]:
        """The snapshots to go on from, and whether each is whole: whole ones first, then newer ones.

        A process that is in no snapshot of a start, of three or more, was on a machine that is lost. One
        that is in some was still writing the others, and those are no snapshots.
        """
        seen: dict[Key, set[int]] = {}
        for name in (n for names in self._seen for n in names if n.kind == "own"):
            seen.setdefault(name.snapshot, set()).add(name.process)
        counts = {n.start: n.of for names in self._seen for n in names}
        of_start = {start: [k for k in seen if k[1] == start] for start in counts}

        def lost(key: Key) -> set[int]:
            return set(range(counts[key[1]])) - seen[key]

        def for_good(key: Key) -> bool:
            others = [seen[k] for k in of_start[key[1]]]
            return len(others) >= 3 and not lost(key) & set().union(*others)

        left = [key for key in seen if not lost(key) or for_good(key)]
        best = sorted(left, key=lambda key: (len(lost(key)), *(-n for n in key)))
        return [(key, not lost(key)) for key in best]

    def read(self, key: Key, like: Any, target: Layout, keep: bool) -> tuple[Any, Any] | None:
        """The state of a step, or None if too little of it is left."""
        about = self._about(key)
        if about is None:
            return None
        saved = Layout.from_json(about["layout"])
        reshard.check_same_model(f"snapshot {key[0]} in {self._folder}", saved, target)
        who = {
            path: {tiles.index_from(i): set(q) for i, q in each}
            for path, each in about["who"].items()
        }
        loads = self._loads(key, who)
        held = self._held(key, loads)
        if held is None:
            return None
        having: Parts = {
            path: {i: {p for p, some in enumerate(loads) if some & q} for i, q in each.items()}
            for path, each in who.items()
        }
        if not self._made_good(key, saved, having, held):
            return None
        state = self._placed(saved, target, like, about["keys"], keep, having, held)
        return state, about["data"]

    def _group(self, key: Key, kind: str = "own") -> list[dict[int, Name]]:
        """The files of a snapshot that each process sees, by who wrote them."""
        return [
            {n.process: n for n in names if (n.snapshot, n.kind) == (key, kind)}
            for names in self._seen
        ]

    def _file(self, name: Name) -> tuple[dict[str, Any], list[tiles.Tile]] | None:
        if name not in self._files:
            # What cannot be read is told to all, as damage is: they wait for what this process has found.
            try:
                self._files[name] = tiles.read(self._folder / str(name))
            except (OSError, ValueError):
                self._files[name] = None
        return self._files[name]

    def _about(self, key: Key) -> dict[str, Any] | None:
        """The description of a snapshot, told by the first process that sees it."""
        group, mine = self._group(key), None
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
                f"the snapshots in {self._folder} are of another run than the checkpoints in "
                f"{self._checkpoints}, or those were taken away since: forget them by Snapshots.clear(), "
                "or give each run a folder of its own"
            )
        return about

    def _loads(self, key: Key, who: Parts) -> list[set[int]]:
        """Whose files each process reads: its own, and what nobody else has, once."""
        seen = [set(names) for names in self._group(key)]
        loads = [({p} & some) or set(sorted(some)[:1]) for p, some in enumerate(seen)]
        for q in sorted(set().union(*seen)):
            read = set().union(*loads)
            if any(
                q in some and not some & read for each in who.values() for some in each.values()
            ):
                loads[next(p for p, some in enumerate(seen) if q in some)].add(q)
        return loads

    def _held(self, key: Key, loads: list[set[int]]) -> Parts | None:
        """The tiles that this process reads; None if a file is not as it was written, anywhere."""
        me, held, damaged = jax.process_index(), Parts(), []
        names = self._group(key)[me]
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
            f"snapshot {which} in {self._folder} is damaged, cannot be read or may be written by others, "
            "and an older state is taken",
            stacklevel=5,
        )

    def _made_good(self, key: Key, saved: Layout, having: Parts, held: Parts) -> bool:
        """Whether what a lost machine took with it can be had or done without; says what it is."""
        lost = [(path, i) for path, each in having.items() for i, some in each.items() if not some]
        if not lost:
            return True
        left, step = self._from_buddies(key, saved, lost, having, held)
        alone = any(not any(having[path].values()) for path, _ in left)
        of_all = any(saved.arrays[path].holder not in reshard.OWN for path, _ in left)
        if of_all or alone or (left and saved.group):  # rows of a group are parts of one momentum
            return False
        if len(left) < len(lost):
            warnings.warn(
                "after the loss of a machine the slices that its workers owned are those of step "
                f"{step}, in bfloat16, for a state of step {key[0]}: the newest copies of their buddies",
                WorkerStateLost,
                stacklevel=5,
            )
        if left:
            rows = ", ".join(map(str, _lost_rows(left)))
            warnings.warn(
                "after the loss of a machine these workers start from the mean of the others' momentum "
                f"and owe nothing: {rows}. Their own, of step {key[0]}, was nowhere else",
                WorkerStateLost,
                stacklevel=5,
            )
        return True

    def _from_buddies(
        self, key: Key, saved: Layout, lost: Lost, having: Parts, held: Parts
    ) -> tuple[Lost, int]:
        """Takes lost slices from their copies; what is lost after that, and the oldest copy's step."""
        me, step = jax.process_index(), key[0]
        copies = {n.snapshot for names in self._seen for n in names if n.kind == "buddy"}
        copies = {k for k in copies if k[1] == key[1] and k[0] <= key[0]}
        for copy in sorted(copies, reverse=True):
            group, mine = self._group(copy, "buddy"), []
            for q, name in group[me].items():
                found = self._file(name) if not any(q in names for names in group[:me]) else None
                for tile in found[1] if found else []:
                    if (tile.path, tile.at) in lost:
                        held.setdefault(tile.path, {})[tile.at] = tile.value
                        mine.append((tile.path, tile.at))
            for p, some in enumerate(told(mine)):
                for path, index in some:
                    having[path][tiles.index_from(index)].add(p)
                    step = min(step, copy[0])
            lost = [(path, i) for path, i in lost if not having[path][i]]
            if not any(saved.arrays[path].holder is Holder.OWNER for path, _ in lost):
                break
        return lost, step

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


def _lost_rows(lost: Lost) -> list[int]:
    return sorted({row for _, index in lost for row in range(*index[0])})
