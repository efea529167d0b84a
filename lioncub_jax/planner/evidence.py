"""What is known about learning: how many times float32 Lion's steps a method takes to the same loss.

`evidence.json`, beside this file, is made from committed rows of runs by ``python benchmarks/convergence.py
--evidence``; docs/planner.md says what its numbers mean. It is read on first use.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lioncub_jax.planner.model import check_one_of

VERSION = 1  # of the packaged file
TARGETS = (0.6, 0.8, 1.0)  # shares of float32 Lion's run, after which it has the loss to reach
TARGET = 0.8  # the one that methods are ranked by
DATA = ("alike", "different")  # what workers see: the same kind, or classes or texts of their own


class Task(NamedTuple):
    """What was trained.

    Attributes:
      name: "images", "text", or "gpt", which is larger.
      dataset: its name.
      parameters: of the model.
      steps: of a run.
    """

    name: str
    dataset: str
    parameters: int
    steps: int


class Learned(NamedTuple):
    """How a method gets to the loss of float32 Lion: by the worse of the tasks.

    Attributes:
      factor: its steps over float32 Lion's; None where a run as long as Lion's does not get there.
      std: over seeds, of factors seed by seed; None for fewer than two that got there.
      seeds: how many runs.
      task: which task is the worse.
      workers: by task, with how many it was measured: the nearest.
    """

    factor: float | None
    std: float | None
    seeds: int
    task: str
    workers: Mapping[str, int]

    def far_from(self, workers: int) -> bool:
        """Whether a task was measured with more than twice or less than half as many."""
        return any(not n / 2 <= workers <= 2 * n for n in self.workers.values())


def learned(method: str, workers: int, parameters: int, data: str = DATA[0]) -> Learned | None:
    """What was measured about a method, on the tasks nearest in size, with the nearest number of workers.

    Args:
      method: its name in the study, such as "vote" or "owner-3".
      workers: how many; the nearest is so by the ratio, of each task by itself.
      parameters: of the model, for `tasks_near`.
      data: what workers see, one of ``DATA``.

    Returns:
      A ``Learned``; None for what was not measured on those tasks with such data.

    Raises:
      ValueError: for other data.

    Example:
      >>> learned("lion", 100, 10**6).factor
      1.0
    """
    rows = [one for one in _rows(data) if one["method"] == method]
    nearest = {
        task.name: min(of_task, key=lambda one: abs(math.log(workers / one["workers"])))
        for task in tasks_near(parameters, data)
        if (of_task := [one for one in rows if one["task"] == task.name])
    }
    if not nearest:
        return None
    at = TARGETS.index(TARGET)
    worse = max(nearest.values(), key=lambda one: one["factor"][at] or math.inf)
    measured = {task: one["workers"] for task, one in nearest.items()}
    return Learned(worse["factor"][at], worse["std"][at], worse["seeds"], worse["task"], measured)


def tasks_near(parameters: int, data: str = DATA[0]) -> tuple[Task, ...]:
    """The tasks whose models are nearest in size, of those that were trained with such data.

    So all methods are judged by the same tasks: the nearest, and those at most twice as far, by the
    ratio of parameters.

    Args:
      parameters: of the model that is planned.
      data: what workers see, one of ``DATA``.

    Raises:
      ValueError: for other data.

    Example:
      >>> [task.name for task in tasks_near(124_000_000)]
      ['gpt']
    """
    check_one_of("data", data, DATA)
    trained = {one["task"] for one in _rows(data)}
    tasks = [Task(name, **about) for name, about in _packaged()["tasks"].items() if name in trained]
    away = {task: abs(math.log(parameters / task.parameters)) for task in tasks}
    return tuple(task for task in tasks if away[task] <= min(away.values()) + math.log(2))


def _rows(data: str) -> list[dict[str, Any]]:
    return [one for one in _packaged()["factors"] if one["data"] == data]


@functools.cache
def _packaged() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("evidence.json").read_text())
