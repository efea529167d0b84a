"""Every method of the study twice: simulated, and as a transform of the library, which says what it sends.

A method is what a user writes; the simulator is the same thing in the words of `reference`, and a test
holds the two together. Each has as many learning rates to be tuned over as every other.
"""

import bisect
from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jax.sharding import AbstractMesh
from oracle import baselines as reference_baselines
from oracle import coding
from oracle import dgc as reference_dgc
from oracle import lion as reference
from oracle import one_bit_adam as reference_adam
from oracle import powersgd as reference_power
from oracle import sync as reference_sync
from oracle.lion import Simulator

import lioncub_jax as lc
from lioncub_jax import baselines
from lioncub_jax.baselines.dgc import dgc, stages
from lioncub_jax.baselines.one_bit_adam import in_full
from lioncub_jax.sync import Schedule

DECAY = 0.1  # decoupled, of Lion, its votes and AdamW
LIGHT_DECAY = 5e-4  # of those whose updates have the size of gradients

# Four learning rates each.
VOTES = (1e-3, 2e-3, 4e-3, 8e-3)
MEANS = (2e-3, 4e-3, 8e-3, 1.6e-2)
GRADIENTS = (0.1, 0.2, 0.4, 0.8)
NOISY_GRADIENTS = (0.05, 0.1, 0.2, 0.4)
PLAIN_GRADIENTS = (0.5, 1.0, 2.0, 4.0)

Rate = Any  # a number, or a function of the steps taken
Betas = tuple[float, float]  # of those of Lion's kind
Simulated = Callable[[Rate, int, Betas], Simulator]


class Method(NamedTuple):
    """A way to train.

    Attributes:
      label: for tables.
      source: the paper, or "ours".
      rates: the learning rates it is tuned over.
      simulated: ``(rate, steps, betas) -> Simulator``.
      transform: ``(rate, steps, betas, workers) -> optax transform``.
      stage: ``(step, steps) -> which stage of the transform`` it is, where steps differ in what they send.
      sync: when momenta are made alike.
      local_steps: steps that each worker takes on its own before the workers talk.
      local: ``rate -> optax transform``, by which optimizer.
    """

    label: str
    source: str
    rates: tuple[float, ...]
    simulated: Simulated
    transform: Callable[..., optax.GradientTransformation]
    stage: Callable[[int, int], int] | None = None
    sync: Schedule | None = None
    local_steps: int = 1
    local: Callable[[Rate], optax.GradientTransformation] | None = None

    def sent(self, params: Any, workers: int, steps: int, syncs: int) -> float:
        """Bytes that each worker sends in a run."""
        tx, calls = self.transform(1.0, steps, (0.9, 0.99), "workers"), steps // self.local_steps
        mesh = AbstractMesh((workers,), ("workers",))
        stages = lc.traffic.of(tx, params, lc.Workers(mesh, "workers")).stages
        if self.stage is not None:
            return sum(stages[self.stage(t, steps)] for t in range(steps))
        return calls * stages[0] + syncs * (stages[-1] - stages[0])


def descending(votes: Callable[[int, Betas], Simulator], decay: float = DECAY) -> Simulated:
    """Of updates before learning rate and decay, ``(steps, betas) -> Simulator``."""
    return lambda rate, steps, betas: reference.optimizer(votes(steps, betas), rate, decay)


def averaged(tx: Callable[..., optax.GradientTransformation]) -> Simulated:
    """Of the mean gradient in full precision, ``(rate, betas) -> optax transform``."""
    return lambda rate, steps, betas: reference_baselines.averaged(tx(rate, betas))


def local(
    label: str, source: str, codes: Any = None, decide: Any = None, rates: tuple[float, ...] = VOTES,
    transform: Any = lc.lion_cub, **options: Any,
) -> Method:  # fmt: skip
    """Votes of workers with momenta of their own; ``options`` are the transform's."""
    return Method(
        label, source, rates,
        descending(lambda steps, betas: reference.local_momentum(*betas, codes=codes, decide=decide)),
        lambda rate, steps, betas, workers: transform(
            rate, *betas, weight_decay=DECAY, workers=workers, **options
        ),
    )  # fmt: skip


def bits_voted(p: int) -> Method:
    label = f"vote, {p} bits, block of 128"
    return local(label, "ours", coding.midrise(p), quantizer=lc.quantize.midrise(p))


def coded_sync(gap: int) -> Method:
    """A vote whose momenta are made alike in codes of one bit."""
    schedule = lc.sync.coded(lc.sync.every(gap))
    vote = local(f"vote, coded sync every {gap}", "ours", sync=schedule)

    def votes(steps: int, betas: Betas) -> Simulator:
        return reference_sync.synced(reference.local_momentum(*betas), schedule.due, None, 1)

    return vote._replace(simulated=descending(votes), sync=schedule)


def at_owner(label: str, quantizer: Any, codes: Any) -> Method:
    """One momentum for all, in slices, with feedback."""

    def votes(steps: int, betas: Betas) -> Simulator:
        return reference.momentum_at_owner(
            *betas, coding.error_feedback(codes, keep=quantizer.keep)
        )

    return Method(
        label, "ours", VOTES, descending(votes),
        lambda rate, steps, betas, workers: lc.owner_lion(
            rate, *betas, weight_decay=DECAY, workers=workers, quantizer=quantizer
        ),
    )  # fmt: skip


def bits_owned(p: int) -> Method:
    quantizer = lc.quantize.error_feedback(lc.quantize.midrise(p))
    return at_owner(f"owner, {p} bit{'s' * (p > 1)}", quantizer, coding.midrise(p))


def baseline(
    label: str, source: str, rates: tuple[float, ...], tx: Any, simulated: Simulated, **options: Any
) -> Method:
    """One of `baselines`, with its ``options``."""
    return Method(
        label, source, rates, simulated,
        lambda rate, steps, betas, workers: tx(rate, workers=workers, **options),
    )  # fmt: skip


def sparse() -> Method:
    """DGC, whose warm-up is the first tenth of a run."""

    def transform(rate: Rate, steps: int, betas: Betas, workers: Any) -> Any:
        return dgc(rate, 0.9, 0.001, steps // 10, weight_decay=LIGHT_DECAY, workers=workers)

    def votes(steps: int, betas: Betas) -> Simulator:
        return reference_dgc.dgc(0.9, 0.001, steps // 10)

    def stage(step: int, steps: int) -> int:
        return bisect.bisect([*stages(0.001, steps // 10)], step) - 1

    simulated = descending(votes, LIGHT_DECAY)
    return Method("DGC, 0.1 %", "1712.01887", GRADIENTS, simulated, transform, stage)


# --- Peers: what users take today where the network is slow

RANK = 4
ALONE = 8  # steps of a worker between two talks, of DiLoCo


def adamw(rate: Rate, betas: Betas | None = None) -> optax.GradientTransformation:
    return optax.adamw(rate, weight_decay=DECAY)


def momentum(rate: Rate) -> optax.GradientTransformation:
    """SGD with momentum and decoupled decay."""
    decay = optax.add_decayed_weights(LIGHT_DECAY)
    return optax.chain(optax.trace(0.9), decay, optax.scale_by_learning_rate(rate))


def power(inner: Callable[[Rate], Any], name: str, rates: tuple[float, ...]) -> Method:
    return Method(
        f"PowerSGD, rank {RANK}, {name}", "1905.13727", rates,
        lambda rate, steps, betas: reference_power.powersgd(inner(rate), RANK),
        lambda rate, steps, betas, workers: baselines.powersgd(
            inner(rate), RANK, workers=workers
        ),
    )  # fmt: skip


def warmed(steps: int) -> dict[str, Any]:
    """The options of 1-bit Adam, in a run of so many steps."""
    return {"warmup": max(1, round(0.15 * steps))}


def alone_first(bits: int | None) -> Method:
    """DiLoCo with a difference of so many bits each way."""
    how = "float32" if bits is None else f"{bits} bit{'s' * (bits > 1)} both ways"
    return Method(
        f"DiLoCo, {ALONE} steps, {how}", "2311.08105", MEANS,
        lambda rate, steps, betas: reference_baselines.diloco(bits=bits),
        lambda rate, steps, betas, workers: baselines.diloco(bits=bits, workers=workers),
        local_steps=ALONE, local=adamw,
    )  # fmt: skip


PEERS: dict[str, Method] = {
    "powersgd": power(momentum, "SGD-momentum", NOISY_GRADIENTS),
    "powersgd-adamw": power(adamw, "AdamW", MEANS),
    "one-bit-adam": Method(
        "1-bit Adam", "2102.02888", MEANS,
        descending(lambda steps, betas: reference_adam.one_bit_adam(**warmed(steps))),
        lambda rate, steps, betas, workers: baselines.one_bit_adam(
            rate, weight_decay=DECAY, workers=workers, **warmed(steps)
        ),
        lambda step, steps: step < warmed(steps)["warmup"],
    ),
    "zero-one-adam": Method(
        "0/1 Adam", "2202.06009", MEANS,
        descending(lambda *_: reference_adam.zero_one_adam()),
        lambda rate, steps, betas, workers: baselines.zero_one_adam(
            rate, weight_decay=DECAY, workers=workers
        ),
        lambda step, steps: in_full(16, 100_000, step),
    ),
    "diloco": alone_first(None),
    "diloco-4": alone_first(4),
    "diloco-1": alone_first(1),
}  # fmt: skip


# --- All of them


def method_named(name: str) -> Method:
    """Raises ``ValueError`` with the known ones for any other name."""
    if name not in METHODS:
        raise ValueError(f"{name!r} is no method; there are {', '.join(METHODS)}")
    return METHODS[name]


_MOMENTUM = {"momentum": 0.9, "weight_decay": LIGHT_DECAY}
METHODS: dict[str, Method] = {
    "lion": Method(
        "Lion, float32", "2302.06675", VOTES,
        averaged(lambda rate, betas: optax.lion(rate, *betas, weight_decay=DECAY)),
        lambda rate, steps, betas, workers: lc.global_gradients(
            optax.lion(rate, *betas, weight_decay=DECAY), workers=workers
        ),
    ),
    "adamw": baseline(
        "AdamW, float32", "1711.05101", MEANS,
        lambda rate, workers: lc.global_gradients(adamw(rate), workers=workers), averaged(adamw),
    ),
    "sgd": baseline(
        "SGD-momentum, float32", "", NOISY_GRADIENTS,
        lambda rate, workers: lc.global_gradients(momentum(rate), workers=workers),
        descending(lambda *_: reference_baselines.averaged(optax.trace(0.9)), LIGHT_DECAY),
    ),
    "signsgd": baseline(
        "signSGD, majority", "1802.04434", VOTES, baselines.signsgd,
        descending(lambda *_: reference.local_momentum(0.0, 0.0)), weight_decay=DECAY,
    ),
    "signum": baseline(
        "SIGNUM", "1810.05291", VOTES, baselines.signum,
        descending(lambda *_: reference.local_momentum(0.9, 0.9)), momentum=0.9, weight_decay=DECAY,
    ),
    "ef-signsgd": baseline(
        "EF-signSGD", "1901.09847", PLAIN_GRADIENTS, baselines.ef_signsgd,
        lambda rate, *_: reference_baselines.ef_signsgd(rate, LIGHT_DECAY), weight_decay=LIGHT_DECAY,
    ),
    "terngrad": baseline(
        "TernGrad", "1705.07878", NOISY_GRADIENTS, baselines.terngrad,
        descending(lambda *_: reference_baselines.terngrad(momentum=0.9), LIGHT_DECAY), **_MOMENTUM,
    ),
    "qsgd": baseline(
        "QSGD, 4 bits", "1610.02132", GRADIENTS, baselines.qsgd,
        descending(lambda *_: reference_baselines.qsgd(4, momentum=0.9), LIGHT_DECAY),
        bits=4, **_MOMENTUM,
    ),
    "dgc": sparse(),
    "vote": local("MaVo: 1-bit vote", "2404.00438"),
    "average": local(
        "Avg: 1 bit, averaged", "2404.00438", decide=reference.average, rates=MEANS,
        transform=lc.distributed_lion, average=True,
    ),
    "int8": local(
        "Lion Cub, int8 sum", "2411.16462", coding.integer(8),
        quantizer=lc.quantize.integer(8), wire=lc.wires.counts(),
    ),
    "ternary": local(
        "exact zeros and ties", "both", coding.ternary(), quantizer=lc.quantize.ternary()
    ),
    "vote-2": bits_voted(2),
    "vote-4": bits_voted(4),
    "vote-coded-3": coded_sync(3),
    "owner-1": bits_owned(1),
    "owner-2": bits_owned(2),
    "owner-3": bits_owned(3),
    "owner-4": bits_owned(4),
    "owner-1-faded": at_owner(
        "owner, 1 bit, rotated, feedback times 0.7",
        lc.quantize.rotated_sign(), coding.rotated(coding.midrise(1)),
    ),
} | PEERS  # fmt: skip
