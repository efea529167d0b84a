"""Every method of the study three times: simulated, as a transform of the library, and in bytes.

A method is what a user writes; the simulator is the same thing in the words of `reference`, and a test
holds the two together. Each has as many learning rates to be tuned over as every other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import lioncub_jax as lc
from lioncub_jax import accounting, baselines, dgc, reference, reference_baselines, reference_dgc
from lioncub_jax.reference import Simulator

DECAY = 0.1  # decoupled, of Lion, its votes and AdamW
LIGHT_DECAY = 5e-4  # of those whose updates have the size of gradients

# Four learning rates each.
VOTES = (1e-3, 2e-3, 4e-3, 8e-3)
MEANS = (2e-3, 4e-3, 8e-3, 1.6e-2)
GRADIENTS = (0.1, 0.2, 0.4, 0.8)
NOISY_GRADIENTS = (0.05, 0.1, 0.2, 0.4)
PLAIN_GRADIENTS = (0.5, 1.0, 2.0, 4.0)

Rate = Any  # a number, or a function of the steps taken


class Method(NamedTuple):
    """A way to train.

    Attributes:
      label: for tables and figures.
      source: the paper, or "ours".
      rates: the learning rates it is tuned over.
      simulated: ``(rate, steps) -> Simulator``.
      transform: ``(rate, steps, axis_name) -> optax transform``; None where the library does not offer
        what others do.
      sent: ``(params, workers, steps, syncs) -> bytes`` that each worker sends in a run.
      drifts: whether workers have momenta of their own.
      votes: ``() -> Simulator`` of the update before learning rate and decay, for those of Lion's kind.
    """

    label: str
    source: str
    rates: tuple[float, ...]
    simulated: Callable[[Rate, int], Simulator]
    transform: Callable[..., optax.GradientTransformation] | None
    sent: Callable[[Any, int, int, int], float]
    drifts: bool = False
    votes: Callable[[], Simulator] | None = None


def each_step(traffic: Callable[[Any, int], accounting.Traffic]) -> Callable[..., float]:
    """Bytes of a run in which all steps are alike."""

    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        return steps * traffic(params, workers).sent_bytes

    return sent


def predicted(**parts: Any) -> Callable[..., float]:
    """Bytes of a run of ``communicate`` with these parts."""
    return each_step(lambda params, workers: accounting.predict(params, workers, **parts))


def baseline(
    label: str, source: str, rates: tuple[float, ...], method: Any, simulator: Any, **options: Any
) -> Method:
    """One of `baselines`; ``simulator(rate) -> Simulator``."""
    return Method(
        label, source, rates,
        lambda rate, steps: simulator(rate),
        lambda rate, steps, axis_name: method(rate, axis_name=axis_name, **options),
        each_step(lambda params, workers: baselines.traffic(method, params, workers, **options)),
    )  # fmt: skip


def local(
    label: str, source: str, codes: Any = None, decide: Any = None, rates: tuple[float, ...] = VOTES,
    transform: Any = lc.lion_cub, parts: Any = None, **options: Any,
) -> Method:  # fmt: skip
    """Votes of workers with momenta of their own; ``options`` are the transform's."""

    def votes() -> Simulator:
        return reference.local_momentum(codes=codes, decide=decide)

    parts = parts or {{"quantizer": "up"}.get(k, k): v for k, v in options.items()}
    return Method(
        label, source, rates,
        lambda rate, steps: reference.optimizer(votes(), rate, DECAY),
        transform and (
            lambda rate, steps, axis_name: transform(
                rate, weight_decay=DECAY, axis_name=axis_name, **options
            )
        ),
        predicted(**parts), True, votes,
    )  # fmt: skip


def at_owner(label: str, quantizer: Any, codes: Any, feedback: Any = None) -> Method:
    """One momentum for all, in slices."""

    def votes() -> Simulator:
        return reference.momentum_at_owner(codes=codes, feedback=feedback)

    owner = lc.momentum_at_owner(optax.scale_by_lion())
    return Method(
        label, "ours", VOTES,
        lambda rate, steps: reference.optimizer(votes(), rate, DECAY),
        lambda rate, steps, axis_name: lc.owner_lion(
            rate, weight_decay=DECAY, axis_name=axis_name, quantizer=quantizer
        ),
        predicted(up=quantizer, owner=owner), False, votes,
    )  # fmt: skip


def owner_with_feedback(p: int, dtype: Any = jnp.bfloat16) -> Method:
    exact = ", float32 error" if dtype == jnp.float32 else ""
    return at_owner(
        f"owner, {p} bit{'s' * (p > 1)}{exact}",
        lc.error_feedback(lc.midrise(p, block=128), dtype),
        reference.midrise(p, 128),
        dtype,
    )


def vote_of(p: int, block: int | None) -> Method:
    scale = f"block of {block}" if block else "scale of a leaf"
    quantizer, codes = lc.midrise(p, block=block), reference.midrise(p, block)
    return local(f"vote, {p} bits, {scale}", "ours", codes, quantizer=quantizer)


def _averaged(tx: Callable[[Rate], Any]) -> Callable[[Rate], Simulator]:
    return lambda rate: reference_baselines.averaged(tx(rate))


def _descending(make: Callable[[], Simulator], decay: float) -> Callable[[Rate], Simulator]:
    return lambda rate: reference.optimizer(make(), rate, decay)


def warmup_of(steps: int) -> int:
    """DGC's warm-up: the first tenth of a run."""
    return steps // 10


def sparse() -> Method:
    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        warmup = warmup_of(steps)
        stages = [(s.first_step, dgc.traffic(params, workers, density=s.density).sent_bytes)
                  for s in dgc.stages(0.001, warmup)]  # fmt: skip
        ends = [first for first, _ in stages[1:]] + [steps]
        return sum((end - first) * count for (first, count), end in zip(stages, ends, strict=True))

    def simulated(rate: Rate, steps: int) -> Simulator:
        simulator = reference_dgc.dgc(0.9, 0.001, warmup_of(steps))
        return reference.optimizer(simulator, rate, LIGHT_DECAY)

    def transform(rate: Rate, steps: int, axis_name: Any) -> optax.GradientTransformation:
        return dgc.dgc(
            rate, 0.9, 0.001, warmup_of(steps), weight_decay=LIGHT_DECAY, axis_name=axis_name
        )

    return Method("DGC, 0.1 %", "1712.01887", GRADIENTS, simulated, transform, sent)


def ties_up(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """What public code does with a tie: always the same side."""
    return jnp.where(margin >= 0, 1, -1) * (reach > 0)


METHODS: dict[str, Method] = {
    "lion": baseline(
        "Lion, float32", "2302.06675", VOTES, baselines.lion,
        _averaged(lambda rate: optax.lion(rate, weight_decay=DECAY)), weight_decay=DECAY,
    ),
    "adamw": baseline(
        "AdamW, float32", "1711.05101", MEANS, baselines.adamw,
        _averaged(lambda rate: optax.adamw(rate, weight_decay=DECAY)), weight_decay=DECAY,
    ),
    "sgd": baseline(
        "SGD-momentum, float32", "", GRADIENTS, baselines.sgd,
        _descending(lambda: reference_baselines.averaged(optax.trace(0.9)), LIGHT_DECAY),
        momentum=0.9, weight_decay=LIGHT_DECAY,
    ),
    "signsgd": baseline(
        "signSGD, majority", "1802.04434", VOTES, baselines.signsgd,
        _descending(lambda: reference.local_momentum(0.0, 0.0), DECAY), weight_decay=DECAY,
    ),
    "signum": baseline(
        "SIGNUM", "1810.05291", VOTES, baselines.signum,
        _descending(lambda: reference.local_momentum(0.9, 0.9), DECAY),
        momentum=0.9, weight_decay=DECAY,
    ),
    "ef-signsgd": baseline(
        "EF-signSGD", "1901.09847", PLAIN_GRADIENTS, baselines.ef_signsgd,
        lambda rate: reference_baselines.ef_signsgd(rate, LIGHT_DECAY), weight_decay=LIGHT_DECAY,
    ),
    "terngrad": baseline(
        "TernGrad", "1705.07878", NOISY_GRADIENTS, baselines.terngrad,
        _descending(lambda: reference_baselines.terngrad(momentum=0.9), LIGHT_DECAY),
        momentum=0.9, weight_decay=LIGHT_DECAY,
    ),
    "qsgd": baseline(
        "QSGD, 4 bits", "1610.02132", GRADIENTS, baselines.qsgd,
        _descending(lambda: reference_baselines.qsgd(4, momentum=0.9), LIGHT_DECAY),
        bits=4, momentum=0.9, weight_decay=LIGHT_DECAY,
    ),
    "dgc": sparse(),
    "vote": local("MaVo: 1-bit vote", "2404.00438"),
    "average": local(
        "Avg: 1 bit, averaged", "2404.00438", decide=reference.average, rates=MEANS,
        transform=lc.distributed_lion, average=True, parts={"down": lc.average()},
    ),
    "int8": local(
        "Lion Cub, int8 sum", "2411.16462", reference.integer(8),
        quantizer=lc.integer(8), wire=lc.counts(),
    ),
    "ternary": local(
        "exact zeros and ties", "both", reference.ternary(), quantizer=lc.ternary()
    ),
    "ties-up": local("ties always up", "public code", decide=ties_up, transform=None),
    "vote-2": vote_of(2, 128),
    "vote-3": vote_of(3, 128),
    "vote-4": vote_of(4, 128),
    "vote-2-leaf": vote_of(2, None),
    "vote-4-leaf": vote_of(4, None),
    "owner-1": owner_with_feedback(1),
    "owner-2": owner_with_feedback(2),
    "owner-3": owner_with_feedback(3),
    "owner-4": owner_with_feedback(4),
    "owner-3-float32": owner_with_feedback(3, jnp.float32),
    "owner-3-plain": at_owner(
        "owner, 3 bits, no feedback", lc.midrise(3, block=128), reference.midrise(3, 128)
    ),
    "owner-3-random": at_owner(
        "owner, 3 bits, stochastic",
        lc.midrise(3, block=128, rounding=lc.stochastic(0)), reference.midrise(3, 128, 0),
    ),
}  # fmt: skip


def method_named(name: str) -> Method:
    """Raises ``ValueError`` with the known ones for any other name."""
    if name not in METHODS:
        raise ValueError(f"{name!r} is no method; there are {', '.join(METHODS)}")
    return METHODS[name]
