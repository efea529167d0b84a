"""What all workers of a session measured, put together."""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple


class Result(NamedTuple):
    """One method in one session: seconds of a step, and bytes that a worker sends in it."""

    framework: str
    workers: int
    rate: float | None
    method: str
    seconds: float  # the median over turns, each as long as its slowest worker took
    fastest: float
    slowest: float
    interface_bytes: float  # of the worker that sent most, headers included
    compiled_bytes: float | None = None  # in the compiled program
    predicted_bytes: float | None = None


def read(folder: Path, framework: str, workers: int, rate: float | None) -> dict[str, Result]:
    """The results of a session by method, from the files of its workers."""
    found = [json.loads((folder / f"worker{i}.json").read_text()) for i in range(workers)]
    methods = found[0]["methods"]
    return {
        name: _result(found, name, about, framework, workers, rate)
        for name, about in methods.items()
    }


def _result(
    found: list[Any], name: str, about: dict[str, float], framework: str, workers: int, rate: Any
) -> Result:
    blocks = [block for one in found for block in one["blocks"] if block["method"] == name]
    turns = sorted({block["turn"] for block in blocks})
    of_turn = [[block for block in blocks if block["turn"] == turn] for turn in turns]
    seconds = [max(block["seconds"] for block in of) for of in of_turn]
    sent = statistics.median(max(block["sent_bytes"] for block in of) for of in of_turn)
    return Result(
        framework, workers, rate, name,
        statistics.median(seconds), min(seconds), max(seconds), sent, **about,
    )  # fmt: skip
