"""Images for workers: a small vision transformer, simulated workers that train it, and two sets of images.

Fashion-MNIST is read from a folder of IDX files (``train-images-idx3-ubyte``, packed by gzip or not); the
digits of scikit-learn are always there. A worker sees 8 images in a step, and all workers together see the
training images once (digits: ten times), so more workers take fewer steps, as in the papers.
"""

import functools
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from functional import Schedule
from oracle import lion as reference
from oracle import simulate
from oracle.lion import Simulator, blend
from sklearn.datasets import load_digits

from goal.contenders import Hyper
from goal.curves import opinions
from goal.runner import Program, Runner

BATCH = 8  # images of a worker in a step
POINTS = 8  # of a run
PATCHES, WIDTH, LAYERS, HEADS, CLASSES = 16, 64, 2, 4, 10
EPOCHS = {"fashion": 1, "digits": 10}
HELD_OUT = 12  # one training image in so many is for tuning


class Run(NamedTuple):
    """A training run; rows are found by it.

    Attributes:
      part: "tuning" or "seed".
      method: its name.
      data: "fashion" or "digits".
      workers: how many.
      shards: "alike", or "classes": each worker has classes of its own.
      rate: the highest learning rate.
      b1: see `Hyper`.
      b2: see `Hyper`.
      decay: decoupled.
      seed: of the parameters and the batches.
    """

    part: str
    method: str
    data: str
    workers: int
    shards: str
    rate: float
    b1: float
    b2: float
    decay: float
    seed: int


def key_of(row: dict[str, Any]) -> Run:
    """The run of a row."""
    return Run(*(row[name] for name in Run._fields))


# --- Images


class Images(NamedTuple):
    """Patches ``float32[n, 16, pixels]`` and labels ``int32[n]``, to train, to tune by, and to report."""

    train: tuple[Any, Any]
    tuning: tuple[Any, Any]
    test: tuple[Any, Any]


def read(data: str, folder: Path | None) -> Images:
    """Reads a set of images.

    Raises:
      ValueError: for Fashion-MNIST without a folder that holds it.
    """
    if data == "digits":
        known = load_digits()
        images, labels = known.images * (255 / 16), known.target
        test = np.arange(len(labels)) % 5 == 0
        both = [(images[~test], labels[~test]), (images[test], labels[test])]
    else:
        if folder is None or not list(folder.glob("train-images-idx3-ubyte*")):
            raise ValueError(
                f"{folder}: no train-images-idx3-ubyte there; give the folder of Fashion-MNIST's IDX files "
                "(--images), or try --data digits"
            )
        both = [
            tuple(idx(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
            for part in ("train", "t10k")
        ]
    (images, labels), test = both
    held = np.arange(len(labels)) % HELD_OUT == 0
    parts = (images[~held], labels[~held]), (images[held], labels[held]), test
    return Images(*((patches(x), jnp.asarray(y, jnp.int32)) for x, y in parts))


def idx(folder: Path, name: str) -> np.ndarray:
    """An array of bytes from a file in the IDX format."""
    path = folder / name
    data = (
        path.read_bytes()
        if path.exists()
        else gzip.decompress((folder / f"{name}.gz").read_bytes())
    )
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def patches(images: np.ndarray) -> jax.Array:
    """Images ``[n, 4 s, 4 s]`` with values to 255, to 16 patches each: ``float32[n, 16, s s]``."""
    count, side = len(images), images.shape[1] // 4
    cut = images.reshape(count, 4, side, 4, side).swapaxes(2, 3)
    return jnp.asarray(cut.reshape(count, PATCHES, side * side), jnp.float32) / 127.5 - 1


# --- The model: a dictionary of parameters, by layer


def init(key: jax.Array, pixels: int) -> dict[str, Any]:
    """The parameters of a transformer of 16 patches; 0.1 million."""
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * scale * rows**-0.5

    params: dict[str, Any] = {
        "patches": matrix(pixels, WIDTH),
        "positions": 0.02 * jax.random.normal(next(keys), (PATCHES, WIDTH)),
        "head": jnp.zeros((WIDTH, CLASSES)),
        "norms": jnp.ones((2 * LAYERS + 1, WIDTH)),
    }
    branch = (2 * LAYERS) ** -0.5
    for n in range(LAYERS):
        qkv, out = matrix(WIDTH, 3 * WIDTH), matrix(WIDTH, WIDTH, branch)
        params[f"attention {n + 1}"] = {"qkv": qkv, "out": out}
        up, down = matrix(WIDTH, 4 * WIDTH), matrix(4 * WIDTH, WIDTH, branch)
        params[f"mlp {n + 1}"] = {"up": up, "down": down}
    return params


def logits(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Logits ``float32[n, 10]`` of patches ``[n, 16, pixels]``."""
    x, norms = x @ params["patches"] + params["positions"], iter(params["norms"])
    for n in range(1, LAYERS + 1):
        attention, mlp = params[f"attention {n}"], params[f"mlp {n}"]
        qkv = (normed(x) * next(norms)) @ attention["qkv"]
        heads = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS), 2, 0)
        x += jax.nn.dot_product_attention(*heads).reshape(x.shape) @ attention["out"]
        x += jax.nn.gelu((normed(x) * next(norms)) @ mlp["up"]) @ mlp["down"]
    return (normed(x) * next(norms)).mean(axis=1) @ params["head"]


def normed(x: jax.Array) -> jax.Array:
    """Each vector with mean 0 and variance 1."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-6)


def loss(params: dict[str, Any], batch: Any, rng: Any = None) -> jax.Array:
    """Mean cross-entropy in nats."""
    x, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), labels).mean()


def scores(params: dict[str, Any], images: Any) -> tuple[jax.Array, jax.Array]:
    """The loss and the accuracy, of so many images at once that they fit a cache."""
    x, labels = images
    size = next(n for n in range(min(500, len(labels)), 0, -1) if len(labels) % n == 0)
    each = jax.lax.map(
        lambda part: logits(params, part), x.reshape(-1, size, *x.shape[1:])
    ).reshape(len(labels), CLASSES)
    right = jnp.mean(jnp.argmax(each, axis=1) == labels)
    return optax.softmax_cross_entropy_with_integer_labels(each, labels).mean(), right


# --- A run


def runner(
    directions: Callable[[str, Hyper], Simulator], votes: set[str], folder: Path | None
) -> Runner:
    """A runner of methods on images.

    Args:
      directions: ``(method, Hyper) -> Simulator`` of a direction.
      votes: methods whose workers vote by signs of their own: their rows say how often averaging and
        majority agree.
      folder: of Fashion-MNIST.
    """
    images = functools.cache(lambda data: read(data, folder))

    def program(run: Run) -> Program:
        steps = steps_of(run, len(images(run.data).train[1]))

        def method(hyper: Hyper) -> Simulator:
            direction = directions(run.method, hyper)
            return reference.optimizer(direction, Schedule(hyper.rate, steps), hyper.decay)

        def start(images: Images, hyper: Hyper, seed: Any) -> simulate.Simulated:
            key = jax.random.key(seed)
            params = init(key, images.train[0].shape[-1])
            return simulate.start(method(hyper), params, run.workers, key)

        def part(
            state: simulate.Simulated, images: Images, hyper: Hyper, seed: Any, point: Any
        ) -> Any:
            batch_of = batches(run, images.train, jax.random.key(seed))

            def step(state: simulate.Simulated, t: Any) -> Any:
                state, losses = simulate.step(loss, method(hyper), state, batch_of(t))
                return state, losses.mean()

            times = point * (steps // POINTS) + jnp.arange(steps // POINTS)
            state, losses = jax.lax.scan(step, state, times)
            about = {"train": losses.mean()}
            if run.method in votes:
                fresh = batch_of(steps + times[0])
                grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(state.params, fresh)
                about |= agreement(blend(hyper.b1, grads, state.opt_state.mu))
            return state, about

        def end(state: simulate.Simulated, images: Images) -> dict[str, Any]:
            tuned, (nats, accuracy) = (
                scores(state.params, some) for some in (images.tuning, images.test)
            )
            return {"tuning_loss": tuned[0], "loss": nats, "accuracy": accuracy, "steps": steps}

        return Program(POINTS, start, part, end)

    return Runner(program, lambda run: images(run.data))


def batches(run: Run, images: tuple[Any, Any], key: jax.Array) -> Callable[[Any], Any]:
    """A function ``t -> x[W, BATCH, ...], labels[W, BATCH]`` of all images, or of a worker's classes."""
    x, labels = images
    by_class = run.shards == "classes"
    if by_class:
        order = jnp.argsort(labels)
        x, labels = x[order], labels[order]

    def batch_of(t: Any) -> Any:
        part = len(labels) // (run.workers if by_class else 1)
        at = jax.random.randint(jax.random.fold_in(key, t), (run.workers, BATCH), 0, part)
        at += by_class * part * jnp.arange(run.workers)[:, None]
        return x[at], labels[at]

    return batch_of


def steps_of(run: Run, count: int) -> int:
    """Steps of a run over so many images, a multiple of its points."""
    steps = EPOCHS[run.data] * count // (BATCH * run.workers)
    return steps // POINTS * POINTS


def agreement(own: dict[str, Any]) -> dict[str, dict[str, jax.Array]]:
    """The numbers of `opinions`, by layer."""
    each = {name: opinions(layer) for name, layer in own.items()}
    return {
        what: {name: one[what] for name, one in each.items()} for what in ("agree", "tie", "size")
    }
