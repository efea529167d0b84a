"""What users take today where the network is slow, as methods of the study."""

from collections.abc import Callable
from typing import Any

import optax

from lioncub_jax import baselines, reference
from lioncub_jax.reference import baselines as reference_baselines
from lioncub_jax.reference import one_bit_adam as reference_adam
from lioncub_jax.reference import powersgd as reference_power
from lioncub_jax.reference.lion import Simulator
from lioncub_jax.traffic import predicted as accounting
from study.builders import DECAY, LIGHT_DECAY, MEANS, NOISY_GRADIENTS, Betas, Method, Rate, sent_by

RANK = 4
ALONE = 8  # steps of a worker between two talks, of DiLoCo


def adamw(rate: Rate) -> optax.GradientTransformation:
    return optax.adamw(rate, weight_decay=DECAY)


def momentum(rate: Rate) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(LIGHT_DECAY)
    return optax.chain(optax.trace(0.9), decay, optax.scale_by_learning_rate(rate))


def power(inner: Callable[[Rate], Any], name: str, rates: tuple[float, ...]) -> Method:
    return Method(
        f"PowerSGD, rank {RANK}, {name}", "1905.13727", rates,
        lambda rate, steps, betas: reference_power.powersgd(inner(rate), RANK),
        lambda rate, steps, betas, axis_name: baselines.powersgd(
            inner(rate), RANK, axis_name=axis_name
        ),
        sent_by(baselines.powersgd(inner(1.0), RANK, axis_name="workers")),
    )  # fmt: skip


def of_one_bit(
    label: str, source: str, tx: Any, simulator: Any, options: Callable[[int], dict[str, Any]]
) -> Method:
    """1-bit Adam and 0/1 Adam; ``options`` of a run of so many steps."""

    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        made = tx(1.0, axis_name="workers", **options(steps))
        each = [accounting.of(made, params, workers, step=t).sent_bytes for t in range(steps)]
        return sum(each)

    return Method(
        label, source, MEANS,
        lambda rate, steps, betas: reference.optimizer(simulator(**options(steps)), rate, DECAY),
        lambda rate, steps, betas, axis_name: tx(
            rate, weight_decay=DECAY, axis_name=axis_name, **options(steps)
        ),
        sent,
    )  # fmt: skip


def alone_first(bits: int | None) -> Method:
    """DiLoCo with a difference of so many bits each way."""

    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        tx = baselines.diloco(bits=bits, axis_name="workers")
        return steps // ALONE * accounting.of(tx, params, workers).sent_bytes

    def simulated(rate: Rate, steps: int, betas: Betas) -> Simulator:
        return reference_baselines.diloco(bits=bits)

    how = "float32" if bits is None else f"{bits} bit{'s' * (bits > 1)} both ways"
    return Method(
        f"DiLoCo, {ALONE} steps, {how}", "2311.08105", MEANS, simulated,
        lambda rate, steps, betas, axis_name: baselines.diloco(bits=bits, axis_name=axis_name),
        sent, local_steps=ALONE, local=adamw,
    )  # fmt: skip


PEERS: dict[str, Method] = {
    "powersgd": power(momentum, "SGD-momentum", NOISY_GRADIENTS),
    "powersgd-adamw": power(adamw, "AdamW", MEANS),
    "one-bit-adam": of_one_bit(
        "1-bit Adam", "2102.02888", baselines.one_bit_adam, reference_adam.one_bit_adam,
        lambda steps: {"warmup": max(1, round(0.15 * steps))},
    ),
    "zero-one-adam": of_one_bit(
        "0/1 Adam", "2202.06009", baselines.zero_one_adam, reference_adam.zero_one_adam,
        lambda steps: {},
    ),
    "diloco": alone_first(None),
    "diloco-4": alone_first(4),
    "diloco-1": alone_first(1),
}  # fmt: skip

# The optimizer of each, which it is held to in full precision.
UNCOMPRESSED = {name: "sgd" if name == "powersgd" else "adamw" for name in PEERS}
