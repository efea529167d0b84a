"""Turns of methods in time: blocks of steps, and bytes by the interface.

Knows no framework, so that all are timed in one way: a method is a function that does one step and waits
for it, and ``most`` is a maximum over the workers, which is also the barrier.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTERFACE = "eth0"  # of a worker, in the lab


def take_turns(
    methods: dict[str, Callable[[], Any]],
    most: Callable[[float], float],
    *,
    turns: int,
    seconds: float,
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
    name: str, turn: int, step: Callable[[], Any], steps: int, most: Callable[[float], float]
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
    raise ValueError(f"no interface {INTERFACE} here: start this program by `lioncub lab`")
