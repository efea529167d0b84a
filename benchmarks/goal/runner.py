"""Runs of simulated workers, from one point of a curve to the next."""

import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from goal.contenders import Hyper

FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def use_one_thread() -> None:
    """For this process and those it starts: small programs gain nothing from a second core."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()


class Program(NamedTuple):
    """A run in parts, each from one point of its curve to the next.

    Attributes:
      points: how many.
      start: ``(data, hyper, seed) -> state``.
      part: ``(state, data, hyper, seed, point) -> state, a tree of float32[]``.
      end: ``(state, data) -> {name: float32[]}``, of what is known at the end alone.
    """

    points: int
    start: Callable[..., Any]
    part: Callable[..., Any]
    end: Callable[..., Any] = lambda state, data: {}


class Runner:
    """Runs, compiling each program once.

    Args:
      program: that of a run.
      data: what a run learns from, arrays.
    """

    def __init__(self, program: Callable[[Any], Program], data: Callable[[Any], Any]):
        self._program, self._data = program, data
        self._compiled: dict[Any, Program] = {}

    def run(self, run: Any) -> dict[str, Any]:
        """Trains, and returns what a row says about it."""
        began = time.process_time()
        hyper = Hyper(*(jnp.float32(getattr(run, name)) for name in Hyper._fields))
        data = self._data(run)
        key = run._replace(part="", seed=0, **dict.fromkeys(Hyper._fields, 0))
        if key not in self._compiled:
            # What comes next is mostly of the same kind: one program is kept.
            jax.clear_caches()
            points, *traced, end = self._program(run)
            start = jax.jit(traced[0]).lower(data, hyper, run.seed).compile()
            state = start(data, hyper, run.seed)
            part = jax.jit(traced[1], donate_argnums=0)
            part = part.lower(state, data, hyper, run.seed, 0).compile()
            self._compiled = {key: Program(points, start, part, jax.jit(end))}
        ready = time.process_time()
        points, start, part, end = self._compiled[key]
        state, curve = start(data, hyper, run.seed), []
        for point in range(points):
            state, about = part(state, data, hyper, run.seed, point)
            curve.append(jax.tree.map(float, about))
        return {
            **run._asdict(),
            **jax.tree.map(lambda *x: [number(y) for y in x], *curve),
            **{name: number(x.item()) for name, x in end(state, data).items()},
            "compiling": round(ready - began, 2),
            "cpu_seconds": round(time.process_time() - ready, 2),
        }


def number(x: float) -> float | None:
    """JSON: five digits of what is not whole; what is not finite is null."""
    if isinstance(x, int):
        return x
    return float(f"{x:.5g}") if math.isfinite(x) else None
