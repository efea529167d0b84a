"""Turns of methods in time: blocks of steps, and bytes by the interface.

Knows no framework, so that all are timed in one way: a method is a function that does one step and waits
for it, and ``most`` is a maximum over the workers, which is also the barrier.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

INTERFACE = "eth0"  # of a worker, in the lab


class Block(NamedTuple):
    """A few steps of one method on one worker."""

    method: str
    turn: int
    steps: int
    seconds: float  # per step
    sent_bytes: float  # per step, by the interface, headers and all


def take_turns(
    methods: dict[str, Callable[[], Any]],
    most: Callable[[float], float],
    *,
    turns: int,
    seconds: float,
) -> list[Block]:
    """Runs all methods in turn, as often as asked; a block takes about ``seconds``, at least two steps."""
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
) -> Block:
    most(0)
    sent, start = sent_bytes(), time.perf_counter()
    for _ in range(steps):
        step()
    taken, sent = time.perf_counter() - start, sent_bytes() - sent
    return Block(name, turn, steps, taken / steps, sent / steps)


def sent_bytes() -> int:
    """Bytes that the worker's interface has sent since the lab made it."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise ValueError(f"no interface {INTERFACE} here: start this program by `lioncub lab`")
