"""Whether Muon suits images: the digits of scikit-learn, by a small CNN and by a vision transformer.

    python benchmarks/vision.py [--save FILE]

4 workers, 16 images each, 300 steps, a cosine after a warmup. Each method is tuned alike: five rates a
factor of two apart, the best by the loss on held-out digits over three seeds. A line is a run. AdamW and
Muon are those of optax, of the mean gradient in float32. Where Muon has a network, its kernels of
convolutions are matrices ``[height * width * in, out]``; "but kernels" leaves these to AdamW. The table of
docs/explain/muon.md is written anew.
"""

import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from flax import linen as nn
from optax.contrib import MuonDimensionNumbers
from sklearn.datasets import load_digits

import lioncub_jax as lc

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "vision.jsonl"
DOCUMENT = ROOT / "docs" / "explain" / "muon.md"
WORKERS, IMAGES, STEPS, SEEDS, TRAIN = (
    4,
    16,
    300,
    3,
    1200,
)  # digits; the others of 1,797 are held out
DECAY = 0.05
FACTORS = 0.25, 0.5, 1.0, 2.0, 4.0  # of the rate of a method


class CNN(nn.Module):
    """Three convolutions with group norm, and a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        for width in (16, 32, 64):
            x = nn.relu(nn.GroupNorm(4)(nn.Conv(width, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2), padding="SAME")
        return nn.Dense(10)(x.mean((1, 2)))


class ViT(nn.Module):
    """Two blocks of width 32 on patches of 2 x 2."""

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        x = nn.Conv(32, (2, 2), (2, 2), name="embedding")(x).reshape(len(x), 16, 32)
        x += self.param("positions", nn.initializers.normal(0.02), (16, 32))
        for _ in range(2):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x += nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(10, name="head")(nn.LayerNorm()(x.mean(1)))


MODELS: dict[str, nn.Module] = {"CNN": CNN(), "ViT": ViT()}


def matrices(params: Any, kernels: bool) -> Any:
    """Which leaves are matrices: kernels of hidden layers, with heads side by side."""

    def numbers(path: Any, x: jax.Array) -> MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path)
        outer = "embedding" in name or "positions" in name or "head" in name
        if x.ndim < 2 or outer or (x.ndim == 4 and not kernels):
            return None
        if x.ndim == 4:
            return MuonDimensionNumbers((0, 1, 2), 3)
        heads_in = "out" in name  # [heads, size, width]
        return MuonDimensionNumbers(
            tuple(range(x.ndim - 1)) if heads_in else 0, -1 if heads_in else tuple(range(1, x.ndim))
        )

    return jax.tree.map_with_path(numbers, params)


def muon(rate: Any, kernels: bool = True) -> optax.GradientTransformation:
    return optax.contrib.muon(
        rate, weight_decay=DECAY, adam_weight_decay=DECAY, consistent_rms=0.2,
        muon_weight_dimension_numbers=functools.partial(matrices, kernels=kernels),
    )  # fmt: skip


def owner_muon(rate: Any, workers: Any, kernels: bool = True) -> optax.GradientTransformation:
    return lc.owner_muon(
        rate, weight_decay=DECAY, adam_weight_decay=DECAY, workers=workers,
        muon_weight_dimension_numbers=functools.partial(matrices, kernels=kernels),
    )  # fmt: skip


# The method at a rate, and the rate in the middle of those that are tried.
METHODS: dict[str, tuple[Callable[..., Any], float]] = {
    "AdamW": (
        lambda rate, workers: lc.global_gradients(
            optax.adamw(rate, weight_decay=DECAY), workers=workers
        ),
        1e-2,
    ),
    "owner_adamw": (functools.partial(lc.owner_adamw, weight_decay=DECAY), 1e-2),
    "Muon": (lambda rate, workers: lc.global_gradients(muon(rate), workers=workers), 2e-2),
    "owner_muon": (owner_muon, 2e-2),
    "Muon but kernels": (
        lambda rate, workers: lc.global_gradients(muon(rate, False), workers=workers),
        2e-2,
    ),
    "owner_muon but kernels": (functools.partial(owner_muon, kernels=False), 2e-2),
}

# The transformer has no kernels but that of its patches.
PAIRS = [
    (model, method)
    for model, method in itertools.product(MODELS, METHODS)
    if not (model == "ViT" and "kernels" in method)
]


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images ``float32[n, 8, 8, 1]`` and labels, in an order of chance."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return np.float32(images[order] / 16).reshape(-1, 8, 8, 1), labels[order]


class Program:
    """The step of a model by a method; the rate is an argument, so that it is compiled once."""

    def __init__(self, model: str, method: str) -> None:
        self.workers = lc.Workers.one_per_device()
        self.model, self.make = MODELS[model], METHODS[method][0]
        self.step = lc.map_step(self.one, self.workers, rows=("images", "labels"))
        self.evaluated = jax.jit(self.held_out)

    def tx(self, rate: Any) -> optax.GradientTransformation:
        return self.make(
            lambda count: (
                optax.warmup_cosine_decay_schedule(0.0, 1.0, STEPS // 20, STEPS)(count) * rate
            ),
            workers=self.workers,
        )

    def loss(self, params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits: Any = self.model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def one(self, params: Any, state: Any, images: Any, labels: Any, rate: Any) -> Any:
        grads = jax.grad(self.loss)(params, images, labels)
        updates, state = self.tx(rate).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def held_out(self, params: Any, images: jax.Array, labels: jax.Array) -> Any:
        logits: Any = self.model.apply(params, images)
        return self.loss(params, images, labels), (logits.argmax(-1) == labels).mean()

    def run(self, rate: float, seed: int) -> dict[str, Any]:
        images, labels = digits()
        params = self.model.init(jax.random.key(seed), images[:1])
        state, rng = self.tx(rate).init(params), np.random.default_rng(seed)
        for _ in range(STEPS):
            rows = rng.integers(TRAIN, size=WORKERS * IMAGES)
            params, state = self.step(params, state, images[rows], labels[rows], jnp.float32(rate))
        loss, hits = self.evaluated(params, images[TRAIN:], labels[TRAIN:])
        return {"rate": rate, "seed": seed, "loss": float(loss), "accuracy": float(hits)}


def documented(document: str, rows: report.Rows) -> str:
    """The document with losses and accuracies of the best rate of each method."""
    lines = []
    for model, method in PAIRS:
        runs: dict[float, report.Rows] = {}
        for row in report.rows_of(rows, model=model, method=method):
            runs.setdefault(row["rate"], []).append(row)
        if not runs:
            continue
        rate = min(runs, key=lambda rate: statistics.mean(row["loss"] for row in runs[rate]))
        cells = []
        for name, form in (("loss", ".3f"), ("accuracy", ".3f")):
            each = [row[name] for row in runs[rate]]
            error = statistics.stdev(each) / len(each) ** 0.5
            cells.append(f"{statistics.mean(each):{form}} ± {error:{form}}")
        lines.append([f"{model}, {method}", f"{rate:g}", *cells])
    table = report.markdown(["", "best rate", "held-out loss", "accuracy"], lines)
    return report.written(document, {"vision": table})


def main() -> None:
    jax.config.update("jax_num_cpu_devices", WORKERS)
    args = report.parser(__doc__, ROWS).parse_args()
    done = {(x["model"], x["method"], x["rate"], x["seed"]) for x in report.read(args.save)}
    for model, method in PAIRS:
        program = Program(model, method)
        for factor, seed in itertools.product(FACTORS, range(SEEDS)):
            rate = METHODS[method][1] * factor
            if (model, method, rate, seed) not in done:
                row = {"model": model, "method": method, **program.run(rate, seed)}
                report.append(args.save, [row | report.provenance()])
                print(json.dumps(row), flush=True)
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), report.read(args.save)))


if __name__ == "__main__":
    main()
