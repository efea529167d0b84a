"""The loss of each contender, step by step: W simulated workers on one core, in one program.

All contenders see the same windows at the same step of a worker, whoever takes steps alone. Beside the
loss a run says what its noise was: how often two workers cast the same vote, and the gradient noise
scale of McCandlish et al. (arXiv 1812.06162).
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from functional import Schedule, functional
from gpt import corpus
from gpt.model import GPT
from oracle import simulate
from oracle.lion import blend

from goal.contenders import GONE, TRIED, Contender, Hyper, contender_named
from goal.model import CONTEXT, HEAD, MODEL, STEPS, WIDTH
from goal.runner import Program, Runner

POINTS = 16  # of a curve; local steps divide the steps between two of them
WINDOWS = 256  # of validation text


class Run(NamedTuple):
    """A training run; the key of its row.

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
      width: of the model.
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
    width: int = WIDTH


def hyper_of(row: dict[str, Any]) -> Hyper:
    """The hyperparameters of a row."""
    return Hyper(*(row[name] for name in Hyper._fields))


def key_of(row: dict[str, Any]) -> Run | None:
    """The training run that a row is of; None for a row of another kind, or of a method in `GONE`.

    Raises:
      ValueError: for a row of another benchmark, or of a contender that is no longer there.
    """
    if row["part"] == "time" or row["contender"] in GONE:
        return None
    if row["part"] not in ("tuning", "curve"):
        raise ValueError(f"part {row['part']!r}")
    if row["contender"] not in TRIED:
        contender_named(row["contender"])
    return Run(**{name: row[name] for name in Run._fields if name in row})


# --- The model and the text


def model_of(seed: Any, width: int = WIDTH) -> GPT:
    """The model that every run begins with, from a seed or a key."""
    sizes = MODEL | {"width": width, "heads": width // HEAD}
    return GPT(**sizes, rngs=nnx.Rngs(seed))


def shapes(width: int = WIDTH) -> Any:
    """Shapes of the parameters."""
    return jax.eval_shape(functional(partial(model_of, width=width))[0], jax.random.key(0))


def size(width: int = WIDTH) -> int:
    """The number of parameters."""
    return sum(x.size for x in jax.tree.leaves(shapes(width)))


def drawn(
    text: jax.Array, key: jax.Array, t: Any, workers: int, count: int, split: bool
) -> jax.Array:
    """``uint8[W, count, CONTEXT + 1]``: windows from random places, of all text or of a worker's part."""
    part = (text.size - CONTEXT - 1) // (workers if split else 1)
    at = jax.random.randint(jax.random.fold_in(key, t), (workers, count), 0, part)
    if split:
        at += part * jnp.arange(workers)[:, None]
    return text[at[..., None] + jnp.arange(CONTEXT + 1)]


# --- A run


def program(contender: Contender, run: Run) -> Program:
    """The program of many runs, compiled once."""
    local_steps, micro, split = contender.local_steps, contender.accumulate, run.data == "different"
    count, workers = run.tokens // CONTEXT, run.workers
    init, nats = functional(partial(model_of, width=run.width))

    def method(hyper: Hyper) -> Any:
        rate = Schedule(hyper.rate, run.steps // micro)
        return contender.simulated(hyper, rate), contender.local and contender.local(hyper, rate)

    def start(text: Text, hyper: Hyper, seed: Any) -> simulate.Simulated:
        simulator, local = method(hyper)
        key = jax.random.key(seed)
        return simulate.start(simulator, init(key), workers, key, local)

    def part(
        state: simulate.Simulated, text: Text, hyper: Hyper, seed: Any, point: Any
    ) -> Any:  # fmt: skip
        simulator, local = method(hyper)
        key = jax.random.fold_in(jax.random.key(seed), 1)
        batch_of = partial(drawn, text.train, key, workers=workers, count=count, split=split)

        def step(state: simulate.Simulated, steps: jax.Array) -> Any:
            batch = jnp.concatenate([batch_of(t) for t in steps], axis=1)
            state, losses = simulate.step(nats, simulator, state, batch, local_steps, local)
            return state, losses.mean()

        length = run.steps // POINTS
        times = point * length + jnp.arange(length)
        state, losses = jax.lax.scan(step, state, times.reshape(-1, local_steps * micro))
        fresh = batch_of(run.steps + times[0])
        grads = jax.vmap(jax.grad(nats), in_axes=(None, 0))(state.params, fresh)
        about = noise(grads, run.tokens)
        if contender.votes:
            own = blend(hyper.b1, grads, state.opt_state.mu)
            about |= {"agreement": agreement(own), **opinions(own)}
        bits = {"loss": nats(state.params, text.windows), "train": losses.mean()}
        return state, about | {name: x / math.log(2) for name, x in bits.items()}

    return Program(POINTS, start, part)


def noise(grads: Any, tokens: int) -> dict[str, jax.Array]:
    """The unbiased square of the mean of gradients ``[W, ...]``, and the variance of one byte's."""
    leaves = jax.tree.leaves(grads)
    workers = len(leaves[0])
    each = sum(jnp.sum(x * x) for x in leaves) / workers
    mean = sum(jnp.sum(jnp.mean(x, axis=0) ** 2) for x in leaves)
    signal = (workers * mean - each) / (workers - 1)
    return {"signal": signal, "variance": (each - signal) * tokens}


def agreement(own: Any) -> jax.Array:
    """The share of equal votes of two workers, over pairs of workers and elements that are not 0."""
    pairs, agreeing = 0.0, 0.0
    for x in jax.tree.leaves(own):
        signs = jnp.sign(x)
        number = jnp.sum(jnp.abs(signs), axis=0)
        pairs += jnp.sum(number * (number - 1))
        agreeing += jnp.sum(jnp.sum(signs, axis=0) ** 2 - number)
    return 0.5 + 0.5 * agreeing / jnp.maximum(pairs, 1)


def opinions(own: Any) -> dict[str, jax.Array]:
    """Compares averaging and majority of what workers would send in full precision, leaves ``[W, ...]``.

    Returns:
      "agree": the share of elements where the sign of the mean is the majority of the signs, a tie being
      half. "tie": the share of ties. "size": the mean magnitude of the mean of the signs.
    """
    x = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(own)], axis=1)
    mean, votes = jnp.sign(x.mean(axis=0)), jnp.sign(x).mean(axis=0)
    return {
        "agree": 0.5 + 0.5 * jnp.mean(mean * jnp.sign(votes)),
        "tie": jnp.mean(votes == 0),
        "size": jnp.mean(jnp.abs(votes)),
    }


class Text(NamedTuple):
    """Bytes to train on, and windows ``uint8[n, CONTEXT + 1]`` to measure the loss on."""

    train: jax.Array
    windows: jax.Array


def runner(kept: Path | None = None) -> Runner:
    """A runner of all contenders on Python's standard library."""
    library = corpus.standard_library()
    windows = jnp.asarray(corpus.spread(library.validation, WINDOWS, CONTEXT))
    text = Text(jnp.asarray(library.train), windows)
    return Runner(lambda run: program(contender_named(run.contender), run), lambda run: text, kept)
