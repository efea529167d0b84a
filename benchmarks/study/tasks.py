"""What is learned: images by a ViT, text by a byte-level GPT; small, or as large as in the papers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt.model import GPT, next_byte_loss

from study import images, prose, splits
from study.vit import ViT


class Shape(NamedTuple):
    """A transformer, and how many examples its workers take together."""

    layers: int
    heads: int
    width: int
    expansion: int  # of the hidden layers
    inputs: int  # patches on a side of an image, or bytes of context
    batch: int
    betas: tuple[float, float] = (0.9, 0.99)


class Size(NamedTuple):
    """How large the runs of a study are."""

    images: Shape
    text: Shape
    steps: int

    def of(self, task: str) -> Shape:
        """The model of a task."""
        return getattr(self, task)


# "tiny" shows whether it runs. "small" takes seconds: what a worker owns is rounded to half a block, which
# adds a quarter to what 8 workers send, and up to 60 % with 32.
SIZES = {
    "tiny": Size(Shape(1, 1, 8, 2, 2, 32), Shape(1, 1, 8, 2, 8, 32), 20),
    "small": Size(Shape(4, 2, 32, 4, 4, 64), Shape(3, 2, 32, 3, 32, 32, (0.8, 0.9)), 800),
}


class Data(NamedTuple):
    """Arrays of a task, given to compiled programs as arguments.

    ``train`` is what `Task.batch` looks examples up in; the others are batches to evaluate on.
    """

    train: Any
    validation: Any
    test: Any


class Task(NamedTuple):
    """Something to learn.

    Attributes:
      name: "images" or "text".
      dataset: what it is learned from.
      examples: how many there are to share out.
      init: ``key -> params``.
      loss: ``(params, batch, rng) -> float32[]``, mean cross-entropy in nats.
      batch: ``(train, indices) -> batch`` of examples.
      measure: ``(params, batch) -> {name: float32[]}``, means over a batch to evaluate on.
      betas: of Lion and its votes.
      data: see `Data`.
      share: ``(split, workers, seed) -> parts``, the examples of each worker.
    """

    name: str
    dataset: str
    examples: int
    init: Callable[[jax.Array], Any]
    loss: Callable[..., jax.Array]
    batch: Callable[[Any, jax.Array], Any]
    measure: Callable[[Any, Any], dict[str, jax.Array]]
    betas: tuple[float, float]
    data: Data
    share: Callable[[str, int, int], splits.Parts]

    @property
    def parameters(self) -> Any:
        """The parameters as shapes."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(x.size for x in jax.tree.leaves(self.parameters))


def load(name: str, folder: Path | None, size: Size) -> Task:
    """A task by name, from a folder of the user's or from what is embedded."""
    if name not in TASKS:
        raise ValueError(f"{name!r} is no task; there are {', '.join(TASKS)}")
    return TASKS[name](folder, size.of(name))


def of_images(folder: Path | None, size: Shape) -> Task:
    """The last twelfth of the training images is for tuning, at most 5000."""
    found = images.load(folder)
    held = min(5000, len(found.train_labels) // 12)
    labels = found.train_labels.astype(np.int32)
    everything = jnp.asarray(found.train_images), jnp.asarray(labels)
    train = tuple(x[:-held] for x in everything)
    validation = tuple(x[-held:] for x in everything)
    test = jnp.asarray(found.test_images), jnp.asarray(found.test_labels.astype(np.int32))
    shape = found.train_images.shape[1:]

    def model(key: jax.Array) -> ViT:
        return ViT(size, shape, found.classes, nnx.Rngs(key))

    init, call = functional(model)

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        logits = call(params, lambda model: model(batch[0]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def measure(params: Any, batch: Any) -> dict[str, jax.Array]:
        logits = call(params, lambda model: model(batch[0]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return {"loss": losses.mean(), "accuracy": (logits.argmax(-1) == batch[1]).mean()}

    def share(split: str, workers: int, seed: int) -> splits.Parts:
        own = labels[: len(labels) - held]
        if split == "class":
            return splits.by_class(own, workers)
        return splits.iid(len(own), workers, seed)

    data = Data(train, in_batches(validation), in_batches(test))
    return Task(
        "images", found.name, len(train[1]), init, loss,
        lambda train, i: (train[0][i], train[1][i]), measure, size.betas, data, share,
    )  # fmt: skip


def of_text(folder: Path | None, size: Shape) -> Task:
    """Windows side by side; of the validation text, even ones are for tuning, odd ones for the report."""
    context = size.inputs
    text = prose.load(folder, 2 * context)
    count = (text.train.size - 1) // context

    def model(key: jax.Array) -> GPT:
        return GPT(
            layers=size.layers, width=size.width, heads=size.heads, expansion=size.expansion,
            context=context, rngs=nnx.Rngs(key),
        )  # fmt: skip

    init, call = functional(model)

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        return call(params, lambda model: next_byte_loss(model, batch, deterministic=True))

    def batch(train: jax.Array, i: jax.Array) -> jax.Array:
        return train[i[..., None] * context + jnp.arange(context + 1)]

    def measure(params: Any, windows: jax.Array) -> dict[str, jax.Array]:
        return {"bits_per_byte": loss(params, windows, None) / math.log(2)}

    def share(split: str, workers: int, seed: int) -> splits.Parts:
        if split == "class":  # each worker reads its own part of the text
            return splits.contiguous(count, workers)
        return splits.iid(count, workers, seed)

    ends = np.arange((text.validation.size - 1) // context) * context
    windows = jnp.asarray(text.validation[ends[:, None] + np.arange(context + 1)])
    tuning, test = windows[::2], windows[1::2]
    data = Data(
        jnp.asarray(text.train), in_batches(spread(tuning, 2000)), in_batches(spread(test, 4000))
    )
    return Task(
        "text", text.name, count, init, loss, batch, measure, size.betas, data, share,
    )  # fmt: skip


TASKS: dict[str, Callable[[Path | None, Shape], Task]] = {"images": of_images, "text": of_text}


def functional(model: Callable[[jax.Array], Any]) -> tuple[Any, Any]:
    """Of a module without state of its own: ``key -> params``, and ``(params, use) -> use(model)``."""
    graph, shapes, rest = nnx.split(
        nnx.eval_shape(lambda: model(jax.random.key(0))), nnx.Param, ...
    )

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.split(model(key), nnx.Param, ...)[1])

    def call(params: Any, use: Callable[[Any], Any]) -> Any:
        state = nnx.clone(shapes)
        nnx.replace_by_pure_dict(state, params)
        return use(nnx.merge(graph, state, rest))

    return init, call


def spread(examples: jax.Array, most: int) -> jax.Array:
    """At most so many, at even distances."""
    return examples[:: -(-len(examples) // most)]


def in_batches(examples: Any) -> Any:
    """``[batches, n, ...]``, whole batches of at most 1000; what is left over is left out."""
    count = len(jax.tree.leaves(examples)[0])
    size = min(1000, count)
    whole = count // size * size
    return jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), examples)


def evaluate(task: Task, params: Any, batches: Any) -> dict[str, jax.Array]:
    """Means over all batches."""
    means = jax.lax.map(lambda batch: task.measure(params, batch), batches)
    return jax.tree.map(jnp.mean, means)
