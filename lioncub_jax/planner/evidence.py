"""What is known about learning: how many times float32 Lion's steps a method takes to the same loss.

`evidence.json`, beside this file, is made from committed rows of runs by ``python benchmarks/convergence.py
--evidence``; docs/planner.md says what its numbers mean. It is read on first use.
"""

import functools
import json
import math
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

FORMAT = 1
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
      ValueError: for other data, or a file of another format.

    Example:
      >>> learned("lion", 100, 10**6).factor
      1.0
    """
    near = {task.name for task in tasks_near(parameters, data)}
    nearest: dict[str, dict[str, Any]] = {}
    for one in _rows().get((method, data), ()):
        if one["task"] not in near:
            continue
        before = nearest.get(one["task"])
        if before is None or _distance(one, workers) < _distance(before, workers):
            nearest[one["task"]] = one
    if not nearest:
        return None
    at = TARGETS.index(TARGET)

    def steps(task: str) -> float:
        found = nearest[task]["factor"][at]
        return math.inf if found is None else found

    worse = max(nearest, key=steps)
    one, measured = nearest[worse], {task: one["workers"] for task, one in nearest.items()}
    return Learned(
        one["factor"][at], one["std"][at], one["seeds"], worse, MappingProxyType(measured)
    )


def _distance(one: Mapping[str, Any], workers: int) -> float:
    return abs(math.log(workers / one["workers"]))


def check_data(data: str) -> None:
    """Raises ``ValueError`` for what is not in ``DATA``."""
    if data not in DATA:
        raise ValueError(f"data={data!r}: give one of {', '.join(DATA)}")


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
    check_data(data)
    trained = {one["task"] for (_, of), some in _rows().items() if of == data for one in some}
    away = {
        task: abs(math.log(parameters / task.parameters))
        for task in tasks()
        if task.name in trained
    }
    least = min(away.values(), default=0.0)
    return tuple(task for task, one in away.items() if one <= least + math.log(2))


def tasks() -> tuple[Task, ...]:
    """What was trained to find out, in the order of their names."""
    return tuple(Task(name, **about) for name, about in _packaged()["tasks"].items())


@functools.cache
def _packaged() -> dict[str, Any]:
    return read(resources.files("lioncub_jax.planner").joinpath("evidence.json").read_text())


@functools.cache
def _rows() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By method and data."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in _packaged()["factors"]:
        found.setdefault((one["method"], one["data"]), []).append(one)
    return found


def read(text: str) -> dict[str, Any]:
    """The content of an evidence file.

    Raises:
      ValueError: for one of another format, or of other targets.

    Example:
      >>> read('{"format": 0}')
      Traceback (most recent call last):
      ValueError: evidence.json is of format 0, and this version reads 1: ...
    """
    found = json.loads(text)
    again = (
        "install lioncub_jax anew, or make it again by python benchmarks/convergence.py --evidence"
    )
    if found.get("format") != FORMAT:
        given = found.get("format")
        raise ValueError(
            f"evidence.json is of format {given!r}, and this version reads {FORMAT}: {again}"
        )
    if tuple(found["targets"]) != TARGETS:
        given = found["targets"]
        raise ValueError(f"evidence.json has targets {given}, and not {list(TARGETS)}: {again}")
    return found
