"""Tables of both papers' questions, from the rows on images that are there.

Accuracies are in percent, means over seeds. Differences are those of `paired`: their deviation is pooled
over all methods with the same workers and shards.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import report
from report import Rows

from goal.images import key_of
from goal.paired import Pooled, pooled

IN_PAPER = 3  # numbers of workers
STEADY = 5.0  # points of accuracy: seeds of a method that lie farther apart say nothing of others' errors
Setting = tuple[int, str]  # workers and shards


class Tables:
    """The rows of seeds on Fashion-MNIST.

    Args:
      rows: all.
      methods: by name, with what they are called and the paper's accuracies.
    """

    def __init__(self, rows: Rows, methods: Mapping[str, Any]):
        self._methods = methods
        self._rows: dict[Setting, dict[str, Rows]] = defaultdict(lambda: defaultdict(list))
        for row in {key_of(row): row for row in rows}.values():
            if row["part"] == "seed" and row["data"] == "fashion":
                self._rows[row["workers"], row["shards"]][row["method"]].append(row)

    def runs(self, at: Setting) -> dict[str, dict[int, float]]:
        """Accuracies of all methods that ran there, by seed."""
        return {
            name: {row["seed"]: 100 * row["accuracy"] for row in rows}
            for name, rows in self._rows[at].items()
        }

    def pooled(self, at: Setting) -> Pooled | None:
        """Pooled accuracies of the steady methods that ran there; None where none did."""
        steady = {name: seeds for name, seeds in self.runs(at).items() if spread(seeds) <= STEADY}
        return pooled(steady) if steady else None

    def accuracies(self, names: Collection[str], numbers: Collection[int]) -> str:
        """The first paper's table: ours, and its own for 4, 8 and 16 workers."""
        head, last = ["method"], ["a difference is seen from"]
        lines = {name: [self._methods[name].says] for name in names}
        for place, workers in enumerate(numbers):
            at, in_paper = (workers, "alike"), place < IN_PAPER
            head += [f"{workers} workers", *["the paper"] * in_paper]
            last += [_error(self.pooled(at)), *[""] * in_paper]
            for name, line in lines.items():
                paper = self._methods[name].paper or [""] * IN_PAPER
                line += [self.accuracy(at, name), *map(str, paper[place : place + 1])]
        return report.markdown(head, [*lines.values(), last])

    def order(self, names: Collection[str], numbers: Collection[int]) -> str:
        """Each method less the one behind it in the paper, here and there."""
        lines = []
        for better, worse in itertools.pairwise(names):
            line = [f"{self._methods[better].says} less {self._methods[worse].says}"]
            for place, workers in enumerate(numbers):
                there = self._methods[better].paper[place] - self._methods[worse].paper[place]
                here = self.less((workers, "alike"), better, worse)
                line += [here, f"{there:+.1f}"]
            lines.append(line)
        head = ["difference", *(x for n in numbers for x in (f"{n} workers", "the paper"))]
        return report.markdown(head, lines)

    def less(self, at: Setting, name: str, other: str) -> str:
        """An accuracy less another, with its error; of a method that is not steady its accuracies."""
        runs = self.pooled(at)
        difference = runs and runs.less(name, other)
        return difference.text(1) if difference else self.without_error(at, name)

    def accuracy(self, at: Setting, name: str) -> str:
        """The mean of a method, or the accuracies of one that is not steady."""
        runs = self.pooled(at)
        if runs and name in runs.means:
            return f"{runs.means[name]:.1f}"
        return self.without_error(at, name)

    def without_error(self, at: Setting, name: str) -> str:
        """Says that a method is not steady, with its accuracies, or that it has not run."""
        seeds = self.runs(at).get(name, {})
        if spread(seeds) <= STEADY:
            return "not run"
        return f"not steady: {' and '.join(f'{x:.1f}' for x in seeds.values())}"

    def variants(self, base: str, names: Collection[str], settings: Mapping[str, Setting]) -> str:
        """Methods less the base, in each setting by its title; the base has its accuracy."""
        first = [self.accuracy(at, base) for at in settings.values()]
        lines = [[self._methods[base].says, *first]]
        for name in names:
            cells = [self.less(at, name, base) for at in settings.values()]
            if any(cell != "not run" for cell in cells):
                lines.append([self._methods[name].says, *cells])
        return report.markdown(["method", *settings], lines)


def spread(seeds: Mapping[int, float]) -> float:
    """How far the runs of a method lie apart."""
    return max(seeds.values(), default=0.0) - min(seeds.values(), default=0.0)


def _error(runs: Pooled | None) -> str:
    """The largest error of a difference."""
    pairs = itertools.permutations(runs.means, 2) if runs else ()
    error = max((runs.less(*pair).error or 0 for pair in pairs), default=0)
    return f"{error:.1f}" if error else ""
