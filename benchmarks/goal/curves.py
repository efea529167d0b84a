"""The loss of each contender, step by step: W simulated workers on one core, in one program.

All contenders see the same windows at the same step of a worker, whoever takes steps alone. Beside the
loss a run says what its noise was: how often two workers vote alike, and the gradient noise scale of
McCandlish et al. (arXiv 1812.06162).
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from functional import functional, schedule
from gpt import corpus
from gpt.model import GPT
from oracle import simulate
from oracle.lion import blend

from goal.contenders import Contender, Hyper, contender_named
from goal.model import CONTEXT, MODEL, STEPS

POINTS = 16  # of a curve; local steps divide the steps between two of them
WINDOWS = 256  # of validation text


class Run(NamedTuple):
    """What is run; rows are found by it.

    Attributes:
      part: "tuning" or "curve".
      contender: its name.
      tokens: that a worker sees in a step.
      workers: how many.
      data: "alike", or "different": each worker has its own part of the text.
      rate: the highest learning rate.
      b1: see `Hyper`.
      b2: see `Hyper`.
      decay: decoupled.
      seed: of the parameters and the data.
      steps: of a worker; the rate falls to zero over them.
    """

    part: str
    contender: str
    tokens: int
    workers: int
    data: str
    rate: float
    b1: float
    b2: float
    decay: float
    seed: int
    steps: int = STEPS

    @property
    def hyper(self) -> Hyper:
        return Hyper(self.rate, self.b1, self.b2, self.decay)


def hyper_of(row: dict[str, Any]) -> Hyper:
    """What a row ran with."""
    return Hyper(*(row[name] for name in Hyper._fields))


def key_of(row: dict[str, Any]) -> Run | None:
    """The training run that a row is of; None for a row of another kind.

    Raises:
      ValueError: for a row of another benchmark, or of a contender that is no longer there.
    """
    if row["part"] == "time":
        return None
    if row["part"] not in ("tuning", "curve"):
        raise ValueError(f"part {row['part']!r}")
    contender_named(row["contender"])
    return Run(**{name: row[name] for name in Run._fields if name in row})


# --- The model and the text


def model_of(seed: Any) -> GPT:
    """As every run begins; of a seed or a key."""
    return GPT(**MODEL, rngs=nnx.Rngs(seed))


init, nats = functional(model_of)


def shapes() -> Any:
    """Of the parameters."""
    return jax.eval_shape(init, jax.random.key(0))


def drawn(
    text: jax.Array, key: jax.Array, t: Any, workers: int, count: int, apart: bool
) -> jax.Array:
    """``uint8[W, count, CONTEXT + 1]``: windows from random places, of all text or of a worker's part."""
    part = (text.size - CONTEXT - 1) // (workers if apart else 1)
    at = jax.random.randint(jax.random.fold_in(key, t), (workers, count), 0, part)
    if apart:
        at += part * jnp.arange(workers)[:, None]
    return text[at[..., None] + jnp.arange(CONTEXT + 1)]


# --- A run


def program(contender: Contender, run: Run) -> Callable[..., Any]:
    """``(text, windows, hyper, seed) -> {name: float32[POINTS]}``, compiled once for many runs."""
    alone = contender.local_steps
    times = jnp.arange(run.steps).reshape(POINTS, -1, alone)
    count, workers, apart = run.tokens // CONTEXT, run.workers, run.data == "different"

    def train(text: jax.Array, windows: jax.Array, hyper: Hyper, seed: Any) -> Any:
        rate = schedule(hyper.rate, run.steps)
        simulator = contender.simulated(hyper, rate)
        local = contender.local and contender.local(hyper, rate)
        key = jax.random.key(seed)
        batch_of = partial(
            drawn, text, jax.random.fold_in(key, 1), workers=workers, count=count, apart=apart
        )

        def step(state: simulate.Simulated, steps: jax.Array) -> Any:
            batch = jnp.concatenate([batch_of(t) for t in steps], axis=1)
            state, losses = simulate.step(nats, simulator, state, batch, alone, local)
            return state, losses.mean()

        def segment(state: simulate.Simulated, times: jax.Array) -> Any:
            state, losses = jax.lax.scan(step, state, times)
            fresh = batch_of(run.steps + times[0, 0])
            grads = jax.vmap(jax.grad(nats), in_axes=(None, 0))(state.params, fresh)
            said = noise(grads, run.tokens)
            if contender.votes:
                said["agreement"] = agreement(blend(hyper.b1, grads, state.opt_state.mu))
            loss = nats(state.params, windows)
            return state, {"loss": loss, "train": losses.mean(), **said}

        state = simulate.start(simulator, init(key), workers, key, local)
        _, found = jax.lax.scan(segment, state, times)
        bits = {name: found[name] / math.log(2) for name in ("loss", "train")}
        return found | bits

    return train


def noise(grads: Any, tokens: int) -> dict[str, jax.Array]:
    """Of gradients ``[W, ...]``: the unbiased square of the mean, and the variance of one byte's."""
    leaves = jax.tree.leaves(grads)
    workers = len(leaves[0])
    each = sum(jnp.sum(x * x) for x in leaves) / workers
    mean = sum(jnp.sum(jnp.mean(x, axis=0) ** 2) for x in leaves)
    signal = (workers * mean - each) / (workers - 1)
    return {"signal": signal, "variance": (each - signal) * tokens}


def agreement(own: Any) -> jax.Array:
    """How often two workers vote alike, over pairs of workers and elements that are not 0."""
    pairs, alike = 0.0, 0.0
    for x in jax.tree.leaves(own):
        signs = jnp.sign(x)
        number = jnp.sum(jnp.abs(signs), axis=0)
        pairs += jnp.sum(number * (number - 1))
        alike += jnp.sum(jnp.sum(signs, axis=0) ** 2 - number)
    return 0.5 + 0.5 * alike / jnp.maximum(pairs, 1)


class Runner:
    """Runs, compiling each program once."""

    def __init__(self) -> None:
        text = corpus.standard_library()
        self._text = jnp.asarray(text.train)
        self._windows = jnp.asarray(corpus.spread(text.validation, WINDOWS, CONTEXT))
        self._compiled: dict[Any, Any] = {}

    def arguments(self, run: Run) -> Any:
        """What the program of a run takes."""
        hyper = Hyper(*(jnp.float32(x) for x in run.hyper))
        return self._text, self._windows, hyper, run.seed

    def run(self, run: Run) -> dict[str, Any]:
        """Trains, and returns what a row says about it."""
        began = time.perf_counter()
        args = self.arguments(run)
        key = run.contender, run.tokens, run.workers, run.data, run.steps
        if key not in self._compiled:
            # What comes next is mostly of the same kind: one program is kept.
            jax.clear_caches()
            made = jax.jit(program(contender_named(run.contender), run))
            self._compiled = {key: made.lower(*args).compile()}
        compiling = time.perf_counter() - began
        found = jax.device_get(self._compiled[key](*args))
        return {
            **run._asdict(),
            **{name: numbers(x) for name, x in found.items()},
            "compiling": round(compiling, 2),
            "seconds": round(time.perf_counter() - began, 2),
        }


def numbers(x: np.ndarray) -> list[float | None]:
    """JSON: five digits; what is not finite is null."""
    return [float(f"{one:.5g}") if math.isfinite(one) else None for one in x.tolist()]
