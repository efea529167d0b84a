"""Turns of methods in time: blocks of steps, and bytes by the interface.

Knows no framework, so that all are timed in one way: a method is a function that does one step and waits
for it, and ``most`` is a maximum over the workers, which is also the barrier.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Step = Callable[[], Any]
INTERFACE = "eth0"  # of a worker, in the lab


def work(
    folder: Path,
    rank: int,
    step_of: Callable[[str, str, int], Step],
    most: Callable[[float], float],
) -> None:
    """The work of a worker: reads ``job.json`` in a folder, and writes its blocks beside it.

    Args:
      folder: that of all workers.
      rank: of this one.
      step_of: makes the step of an entry, its contender, stage and tokens.
      most: see above.
    """
    job = json.loads((folder / "job.json").read_text())
    methods = {json.dumps(entry): step_of(*entry) for entry in job["entries"]}
    blocks = take_turns(methods, most, job["turns"], job["seconds"])
    (folder / f"worker{rank}.json").write_text(json.dumps(blocks))


def take_turns(
    methods: dict[str, Step], most: Callable[[float], float], turns: int, seconds: float
) -> list[dict[str, Any]]:
    """Runs all methods in turn, as often as asked; a block takes about ``seconds``, at least two steps.

    Returns:
      Blocks: the "method" and "turn", the "seconds" of a step, and its "sent_bytes" by the interface, with
      headers.
    """
    count = {}
    for name, step in methods.items():
        step()  # compiles, touches the memory and connects
        most(0)
        start = time.perf_counter()
        step()
        taken = most(time.perf_counter() - start)  # everybody must do as many steps
        count[name] = min(max(2, math.ceil(seconds / taken)), 50)
    return [
        _block(name, turn, step, count[name], most)
        for turn in range(turns)
        for name, step in methods.items()
    ]


def _block(
    name: str, turn: int, step: Step, steps: int, most: Callable[[float], float]
) -> dict[str, Any]:
    most(0)
    sent, start = sent_bytes(), time.perf_counter()
    for _ in range(steps):
        step()
    taken, sent = time.perf_counter() - start, sent_bytes() - sent
    per_step = {"seconds": taken / steps, "sent_bytes": sent / steps}
    return {"method": name, "turn": turn, **per_step}


def sent_bytes() -> int:
    """Bytes that the worker's interface has sent since the lab made it."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise ValueError(f"no interface {INTERFACE} here: start this program in the lab")
