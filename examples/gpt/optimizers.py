"""The optimizers that the example compares, with learning rates that suit its default model."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

import lioncub_jax as lc


class Recipe(NamedTuple):
    summary: str
    # (learning_rate, weight_decay, workers), and bits or sync where they can be chosen
    build: Callable[..., optax.GradientTransformation]
    learning_rate: float
    weight_decay: float
    bits: int | None = None  # what workers send per parameter, where that can be chosen
    drifts: bool = False  # each worker has a momentum of its own, which --sync-every averages


# Shorter memories than Lion's 0.9 and 0.99, because a run is a few hundred steps.
BETAS = {"b1": 0.8, "b2": 0.9}


def _lion_cub(bits: int, **options: Any) -> optax.GradientTransformation:
    quantizer = lc.quantize.sign() if bits == 1 else lc.quantize.midrise(bits)
    return lc.lion_cub(quantizer=quantizer, **BETAS, **options)


def _owner(bits: int, **options: Any) -> optax.GradientTransformation:
    quantizer = lc.quantize.error_feedback(lc.quantize.midrise(bits))
    return lc.owner_lion(quantizer=quantizer, **BETAS, **options)


def _baseline(
    optimizer: Callable[..., Any], workers: lc.Workers, **options: Any
) -> optax.GradientTransformation:
    return lc.global_gradients(optimizer(**options), workers=workers)


RECIPES = {
    "lion-cub": Recipe("votes of --bits each, 1 bit back", _lion_cub, 1e-3, 1.0, 1, drifts=True),
    "average": Recipe(
        "Distributed Lion: mean of the signs",
        partial(lc.distributed_lion, average=True, **BETAS), 3e-3, 0.3, drifts=True,
    ),
    "owner": Recipe(
        "gradients of --bits each, one momentum for all, 1 bit back", _owner, 1e-3, 1.0, 3
    ),
    "lion": Recipe(
        "baseline: Lion on gradients averaged in float32",
        partial(_baseline, optax.lion, **BETAS), 1e-3, 1.0,
    ),
    "adamw": Recipe(
        "baseline: AdamW on gradients averaged in float32", partial(_baseline, optax.adamw), 3e-3, 0.1
    ),
}  # fmt: skip
