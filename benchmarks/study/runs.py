"""One run of the study: W simulated workers, from the first step to the last, in one program."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from oracle import simulate

from study import splits, tasks
from study.methods import Method, method_named
from study.tasks import Task

POINTS = 10  # of a curve


class Spec(NamedTuple):
    """What is run; rows of the study are found by it.

    Attributes:
      part: of the study, such as "tuning" or "main".
      task: "images" or "text".
      method: a key of ``METHODS``.
      workers: how many.
      split: "iid" or "class".
      batch: of one worker.
      steps: of the optimizer.
      rate: the highest learning rate.
      seed: of the initial parameters, the split and the batches.
    """

    part: str
    task: str
    method: str
    workers: int
    split: str
    batch: int
    steps: int
    rate: float
    seed: int

    @property
    def program(self) -> tuple[Any, ...]:
        """What runs of one compiled program have in common."""
        return self.task, self.method, self.workers, self.split, self.batch, self.steps


class Outcome(NamedTuple):
    """What a program answers."""

    curve: dict[str, jax.Array]  # [POINTS]: of a thousand validation examples or so
    train_loss: jax.Array  # float32[POINTS]: means over the steps before
    validation: dict[str, jax.Array]
    test: dict[str, jax.Array]
    syncs: jax.Array  # int32[]


def key_of(row: dict[str, Any]) -> Spec:
    """The run that a row is of."""
    return Spec(*(row[name] for name in Spec._fields))


def schedule(rate: Any, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Up for a twentieth of the steps, then down to zero along a cosine."""
    warmup = max(1, steps // 20)

    def at(t: jax.Array) -> jax.Array:
        return rate * jnp.minimum(1.0, (t + 1) / warmup) * 0.5 * (1 + jnp.cos(jnp.pi * t / steps))

    return at


# Of a key, a step and more.
Harming = Callable[..., simulate.Harm]


def program(
    task: Task,
    method: Method,
    spec: Spec,
    harm: Harming = lambda key, t: simulate.Harm(),
    late: bool = False,
) -> Callable[..., Outcome]:
    """``(data, table, lengths, rate, seed, ...) -> Outcome``, to be compiled once for many runs.

    What comes after the seed is given to ``harm``; ``late`` is whether it says who is.
    """
    alone = method.local_steps
    calls = spec.steps // alone
    points = max(n for n in range(1, POINTS + 1) if calls % n == 0)
    times = jnp.arange(calls * alone).reshape(points, -1, alone)

    def train(
        data: tasks.Data, table: Any, lengths: Any, rate: Any, seed: Any, *more: Any
    ) -> Outcome:
        falling = schedule(rate, spec.steps)
        simulator = method.simulated(falling, spec.steps, task.betas)
        local = method.local and method.local(falling)
        key = jax.random.key(seed)
        draws = jax.random.fold_in(key, 1)

        def step(run: simulate.Simulated, steps: jax.Array) -> tuple[simulate.Simulated, jax.Array]:
            own = [drawn(jax.random.fold_in(draws, t), table, lengths, spec.batch) for t in steps]
            batch = task.batch(data.train, jnp.concatenate(own, axis=1))
            harmed = harm(jax.random.fold_in(key, 2), steps[0], *more)
            run, losses = simulate.step(task.loss, simulator, run, batch, alone, local, harmed)
            return run, losses.mean()

        def segment(run: simulate.Simulated, times: jax.Array) -> tuple[simulate.Simulated, Any]:
            run, losses = jax.lax.scan(step, run, times)
            seen = task.measure(run.params, jax.tree.map(lambda x: x[0], data.validation))
            return run, (seen, losses.mean())

        run = simulate.start(simulator, task.init(key), spec.workers, key, local, late=late)
        run, (curve, losses) = jax.lax.scan(segment, run, times)
        return Outcome(
            curve, losses,
            tasks.evaluate(task, run.params, data.validation),
            tasks.evaluate(task, run.params, data.test),
            jnp.asarray(getattr(run.opt_state, "syncs", 0)),
        )  # fmt: skip

    return train


def drawn(key: jax.Array, table: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
    """``int32[W, count]``: each worker's examples of a step, drawn with replacement from its own."""
    uniform = jax.random.uniform(key, (len(table), count))
    place = jnp.minimum((uniform * lengths[:, None]).astype(jnp.int32), lengths[:, None] - 1)
    return jnp.take_along_axis(table, place, axis=1)


class Runner:
    """Runs specs of one task, compiling each program once.

    Attributes:
      task: what is learned.
    """

    def __init__(self, task: Task):
        self.task = task
        self._compiled: dict[Any, Any] = {}

    def run(self, spec: Spec) -> dict[str, Any]:
        """Trains, and returns what a row of the study says about it."""
        began = time.perf_counter()
        make = partial(program, self.task, method_named(spec.method), spec)
        outcome, compiling = self.outcome(spec, spec.program, make)
        syncs = int(outcome.syncs)
        sent = method_named(spec.method).sent(self.task.parameters, spec.workers, spec.steps, syncs)
        return {
            **spec._asdict(),
            "dataset": self.task.dataset,
            "parameters": self.task.size,
            "sent_bytes": sent,  # by each worker, in all steps
            "bits_per_parameter": float(f"{8 * sent / spec.steps / self.task.size:.5g}"),
            "syncs": syncs,
            "validation": numbers(outcome.validation),
            "test": numbers(outcome.test),
            "curve": numbers(outcome.curve | {"train_loss": outcome.train_loss}),
            "compiling": round(compiling, 2),
            "seconds": round(time.perf_counter() - began, 2),
        }

    def outcome(
        self, spec: Spec, program: Any, make: Callable[[], Any], *more: Any
    ) -> tuple[Any, float]:
        """What the program answers, and the seconds until it was compiled.

        Args:
          spec: of the run.
          program: what runs of one compiled program have in common.
          make: makes the program.
          more: what it takes beside data, split, rate and seed.
        """
        began = time.perf_counter()
        parts = self.task.share(spec.split, spec.workers, spec.seed)
        table, lengths = map(jnp.asarray, splits.table(parts))
        args = self.task.data, table, lengths, jnp.float32(spec.rate), spec.seed, *more
        key = program, table.shape
        if key not in self._compiled:
            # What comes next is mostly of the same kind: one program is kept.
            self._compiled = {key: jax.jit(make()).lower(*args).compile()}
        compiling = time.perf_counter() - began
        return jax.device_get(self._compiled[key](*args)), compiling


def numbers(tree: Any) -> Any:
    """JSON: five digits; what is not finite is null."""
    return jax.tree.map(lambda x: _numbers(np.asarray(x, float)), tree)


def _numbers(x: np.ndarray) -> Any:
    if x.ndim:
        return [_numbers(one) for one in x]
    return float(f"{x:.5g}") if np.isfinite(x) else None
