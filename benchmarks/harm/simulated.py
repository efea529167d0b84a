"""A run of simulated workers, from the first step to the last, in one program: a GPT reads a text."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from functional import Schedule, functional
from gpt import corpus
from gpt.model import GPT
from oracle import simulate
from oracle.lion import Simulator

POINTS = 10  # of a curve
SUFFIXES = (".txt", ".md", ".rst")


class Size(NamedTuple):
    """How large a run is.

    Attributes:
      layers: of the GPT, as heads, width and expansion.
      context: bytes of a window.
      batch: windows that all workers read together in a step.
      steps: of the optimizer.
    """

    layers: int
    heads: int
    width: int
    expansion: int
    context: int
    batch: int
    steps: int


SMALL = Size(3, 2, 32, 3, context=32, batch=32, steps=800)  # 40,160 parameters


# --- The text


class Data(NamedTuple):
    """Given to compiled programs as arguments; windows are a byte longer than the context."""

    train: jax.Array  # uint8[n]
    validation: jax.Array  # uint8[windows, context + 1], for the curve
    test: jax.Array  # uint8[batches, windows, context + 1]


def load(folder: Path | None, size: Size = SMALL) -> corpus.Corpus:
    """The texts of a folder, of each of which the end validates; Python's standard library for None.

    Raises:
      ValueError: for a folder that is missing or has no texts, and for less text than two windows.
    """
    text = corpus.standard_library() if folder is None else of_folder(folder)
    least = min(text.train.size, text.validation.size)
    if least <= (needed := 2 * size.context):
        raise ValueError(
            f"{folder or text.name}: training and validation need more than {needed} bytes each, and one "
            f"has {least}: give about {20 * needed} bytes of text or more"
        )
    return text


def of_folder(folder: Path) -> corpus.Corpus:
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise ValueError(
            f"{folder} holds no texts (*{', *'.join(SUFFIXES)}); folders in it are not looked into: give "
            "the one that holds them"
        )
    texts = {path.name: path.read_bytes() for path in paths}
    return corpus.Corpus(folder.resolve().name, *corpus.split_by_position(texts))


def data_of(text: corpus.Corpus, context: int) -> Data:
    """Of the windows of the validation text, even ones are for the curve, odd ones for the end."""
    starts = np.arange((text.validation.size - 1) // context) * context
    windows = text.validation[starts[:, None] + np.arange(context + 1)]
    test = spread(windows[1::2], 4000)
    size = min(1000, len(test))
    test = test[: len(test) // size * size].reshape(-1, size, context + 1)
    return Data(*map(jnp.asarray, (text.train, spread(windows[::2], 2000)[:1000], test)))


def spread(windows: np.ndarray, most: int) -> np.ndarray:
    """At most so many, at even distances."""
    return windows[:: -(-len(windows) // most)]


def shared_out(split: str, count: int, workers: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of each worker ``int32[W, most]``, and how many it has ``int32[W]``.

    Every worker has as many as the others, give or take one, of "iid" from anywhere, of "class" those
    of its own part of the text. What has one less begins again, so each entry is an example of its worker.
    """
    order = np.random.default_rng(seed).permutation(count) if split == "iid" else np.arange(count)
    parts = [np.sort(part) for part in np.array_split(order, workers)]
    table = np.stack([np.resize(part, len(parts[0])) for part in parts])
    return table.astype(np.int32), np.array([len(part) for part in parts], np.int32)


def drawn(key: jax.Array, table: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
    """``int32[W, count]``: each worker's examples of a step, drawn with replacement from its own."""
    uniform = jax.random.uniform(key, (len(table), count))
    place = jnp.minimum((uniform * lengths[:, None]).astype(jnp.int32), lengths[:, None] - 1)
    return jnp.take_along_axis(table, place, axis=1)


# --- The model and a run of it


def model_of(size: Size) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """``key -> params``, and ``(params, windows) -> nats``."""

    def model(key: jax.Array) -> GPT:
        return GPT(
            layers=size.layers, width=size.width, heads=size.heads, expansion=size.expansion,
            context=size.context, rngs=nnx.Rngs(key),
        )  # fmt: skip

    return functional(model)


def program(
    size: Size,
    method: Callable[[Any], Simulator],
    workers: int,
    harm: Callable[..., simulate.Harm] = lambda key, t: simulate.Harm(),
    late: bool = False,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """``(data, table, lengths, rate, seed, ...) -> (curve, end)`` in bits per byte.

    Args:
      size: of the run.
      method: ``rate -> Simulator``, of a rate that falls.
      workers: W.
      harm: ``(key, step, ...) -> Harm``, of what comes after the seed.
      late: whether ``harm`` says who is.
    """
    init, nats = model_of(size)
    places, count = jnp.arange(size.context + 1), size.batch // workers

    def train(
        data: Data, table: Any, lengths: Any, rate: Any, seed: Any, *more: Any
    ) -> tuple[jax.Array, jax.Array]:
        simulator, key = method(Schedule(rate, size.steps)), jax.random.key(seed)
        draws, harms = jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)

        def step(run: simulate.Simulated, t: jax.Array) -> tuple[simulate.Simulated, None]:
            own = drawn(jax.random.fold_in(draws, t), table, lengths, count)
            windows = data.train[own[..., None] * size.context + places]
            return simulate.step(nats, simulator, run, windows, harm=harm(harms, t, *more))[0], None

        def segment(run: simulate.Simulated, times: jax.Array) -> Any:
            run, _ = jax.lax.scan(step, run, times)
            return run, nats(run.params, data.validation)

        run = simulate.start(simulator, init(key), workers, key, late=late)
        run, curve = jax.lax.scan(segment, run, jnp.arange(size.steps).reshape(POINTS, -1))
        test = jax.lax.map(partial(nats, run.params), data.test).mean()
        return curve / math.log(2), test / math.log(2)

    return train
