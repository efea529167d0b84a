"""Runs of simulated workers, from one point of a curve to the next, and on from a stop equal to the bit."""

import hashlib
import math
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
      kept: a folder for what a run that was stopped goes on from; None for none.
    """

    def __init__(
        self,
        program: Callable[[Any], Program],
        data: Callable[[Any], Any],
        kept: Path | None = None,
    ) -> None:
        self._program, self._data, self._kept = program, data, kept
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
        before = Stopped(run, self._kept)
        state, curve = before.read(start(data, hyper, run.seed))
        while len(curve) < points:
            state, about = part(state, data, hyper, run.seed, len(curve))
            curve.append(jax.tree.map(float, about))
            before.write(state, curve, time.process_time() - ready)
        before.forget()
        return {
            **run._asdict(),
            **jax.tree.map(lambda *x: [number(y) for y in x], *curve),
            **{name: number(x.item()) for name, x in end(state, data).items()},
            "compiling": round(ready - began, 2),
            "cpu_seconds": round(before.seconds + time.process_time() - ready, 2),
        }


class Stopped:
    """A run that may be stopped at any time: a file has its state at the last point.

    Attributes:
      seconds: of a core, of earlier starts.
    """

    def __init__(self, run: Any, folder: Path | None):
        self.seconds = 0.0
        name = hashlib.sha256(repr(run).encode()).hexdigest()[:16]
        self._path = None if folder is None else folder / f"{name}.pickle"

    def read(self, state: Any) -> tuple[Any, list[Any]]:
        """The state of the last point and the points so far, or the fresh one and none."""
        if self._path is None or not self._path.exists():
            return state, []
        arrays, curve, self.seconds = pickle.loads(self._path.read_bytes())
        leaves, tree = jax.tree.flatten(state)
        known = [
            jax.random.wrap_key_data(x) if is_key(like) else jnp.asarray(x)
            for x, like in zip(arrays, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, known), curve

    def write(self, state: Any, curve: list[Any], seconds: float) -> None:
        """Keeps the state; a stop while it is written leaves the one before."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        arrays = [
            np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(state)
        ]
        part = self._path.with_suffix(".part")
        part.write_bytes(pickle.dumps((arrays, curve, self.seconds + seconds)))
        part.replace(self._path)

    def forget(self) -> None:
        """Deletes the file: the row has it all."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def is_key(x: jax.Array) -> bool:
    """True for a typed random key."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def number(x: float) -> float | None:
    """JSON: five digits of what is not whole; what is not finite is null."""
    if isinstance(x, int):
        return x
    return float(f"{x:.5g}") if math.isfinite(x) else None
