"""What is left of the snapshots of a run, on all its machines, and the state that is made of it."""

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lioncub_jax.checkpoint import placing, reshard, tiles
from lioncub_jax.checkpoint.processes import told
from lioncub_jax.checkpoint.reshard import Layout
from lioncub_jax.layout import Holder

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


def names_in(folder: Path) -> list[Name]:
    """The files of a folder that are snapshots."""
    found = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
    return [Name(int(m[1]), int(m[2]), int(m[3]), int(m[4]), m[5]) for m in found if m]


def told_names(folder: Path) -> list[list[Name]]:
    """The files that each process sees, in the order of the processes."""
    return [[Name(*name) for name in names] for names in told(names_in(folder))]


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
        snapshots = Counter(start for _, start in seen)
        lost = {key: counts[key] - len(some) for key, some in seen.items()}
        # One alone that is not whole was being written; what a lost machine lacks, it lacks in all.
        left = [key for key in seen if not lost[key] or snapshots[key[1]] > 1]
        return sorted(left, key=lambda key: (lost[key], -key[0], -key[1]))

    def read(
        self, step: int, start: int, like: Any, target: Layout, keep: bool
    ) -> tuple[Any, Any] | None:
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
        return state, about["data"]

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
