"""Every method of the study three times: simulated, as a transform of the library, and in bytes.

A method is what a user writes; the simulator is the same thing in the words of `reference`, and a test
holds the two together. Each has as many learning rates to be tuned over as every other.
"""

import jax.numpy as jnp
import optax

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.reference import baselines as reference_baselines
from study.builders import (
    DECAY,
    GRADIENTS,
    LIGHT_DECAY,
    MEANS,
    NOISY_GRADIENTS,
    PLAIN_GRADIENTS,
    VOTES,
    Betas,
    Method,
    at_owner,
    averaged,
    baseline,
    descending,
    full_precision,
    leaves_named,
    local,
    owner_with_feedback,
    sparse,
    synced,
    ties_up,
    vote_by_leaf,
    vote_of,
    vote_with_feedback,
    with_betas,
)  # fmt: skip
from study.candidates import CANDIDATES
from study.peers import PEERS

METHODS: dict[str, Method] = {
    "lion": full_precision(),
    "adamw": baseline(
        "AdamW, float32", "1711.05101", MEANS, baselines.adamw,
        averaged(lambda rate: optax.adamw(rate, weight_decay=DECAY)), weight_decay=DECAY,
    ),
    "sgd": baseline(
        "SGD-momentum, float32", "", NOISY_GRADIENTS, baselines.sgd,
        descending(lambda: reference_baselines.averaged(optax.trace(0.9)), LIGHT_DECAY),
        momentum=0.9, weight_decay=LIGHT_DECAY,
    ),
    "signsgd": baseline(
        "signSGD, majority", "1802.04434", VOTES, baselines.signsgd,
        descending(lambda: reference.local_momentum(0.0, 0.0), DECAY), weight_decay=DECAY,
    ),
    "signum": baseline(
        "SIGNUM", "1810.05291", VOTES, baselines.signum,
        descending(lambda: reference.local_momentum(0.9, 0.9), DECAY),
        momentum=0.9, weight_decay=DECAY,
    ),
    "ef-signsgd": baseline(
        "EF-signSGD", "1901.09847", PLAIN_GRADIENTS, baselines.ef_signsgd,
        lambda rate: reference_baselines.ef_signsgd(rate, LIGHT_DECAY), weight_decay=LIGHT_DECAY,
    ),
    "terngrad": baseline(
        "TernGrad", "1705.07878", NOISY_GRADIENTS, baselines.terngrad,
        descending(lambda: reference_baselines.terngrad(momentum=0.9), LIGHT_DECAY),
        momentum=0.9, weight_decay=LIGHT_DECAY,
    ),
    "qsgd": baseline(
        "QSGD, 4 bits", "1610.02132", GRADIENTS, baselines.qsgd,
        descending(lambda: reference_baselines.qsgd(4, momentum=0.9), LIGHT_DECAY),
        bits=4, momentum=0.9, weight_decay=LIGHT_DECAY,
    ),
    "dgc": sparse(),
    "vote": local("MaVo: 1-bit vote", "2404.00438"),
    "average": local(
        "Avg: 1 bit, averaged", "2404.00438", decide=reference.average, rates=MEANS,
        transform=lc.distributed_lion, average=True, parts={"down": lc.decide.average()},
    ),
    "int8": local(
        "Lion Cub, int8 sum", "2411.16462", reference.integer(8),
        quantizer=lc.quantize.integer(8), wire=lc.wires.counts(),
    ),
    "ternary": local(
        "exact zeros and ties", "both", reference.ternary(), quantizer=lc.quantize.ternary()
    ),
    "ties-up": local("ties always up", "public code", decide=ties_up, transform=None),
    "vote-2": vote_of(2),
    "vote-3": vote_of(3),
    "vote-4": vote_of(4),
    "vote-2-leaf": vote_by_leaf(2),
    "vote-4-leaf": vote_by_leaf(4),
    "vote-1-feedback": vote_with_feedback(1),
    "vote-3-feedback": vote_with_feedback(3),
    "owner-1": owner_with_feedback(1),
    "owner-2": owner_with_feedback(2),
    "owner-3": owner_with_feedback(3),
    "owner-4": owner_with_feedback(4),
    "owner-3-float32": owner_with_feedback(3, jnp.float32),
    "owner-3-plain": at_owner(
        "owner, 3 bits, no feedback", lc.quantize.midrise(3), reference.midrise(3)
    ),
    "owner-3-random": at_owner(
        "owner, 3 bits, stochastic",
        lc.quantize.midrise(3, rounding=lc.quantize.stochastic(0)), reference.midrise(3, seed=0),
    ),
}  # fmt: skip

_VOTE, _VOTE_4 = METHODS["vote"], METHODS["vote-4"]
_HEAD = leaves_named("write", "read")
_SMALL = leaves_named("write", "norm", "positions")
_MATRICES = leaves_named("attention", "mlp")
METHODS |= {
    f"vote-sync-{steps}": synced(_VOTE, f"vote, sync every {steps}", lc.sync.every(steps))
    for steps in (10, 64, 100)
} | {
    f"vote-coded-{steps}": synced(
        _VOTE, f"vote, coded sync every {steps}", lc.sync.coded(lc.sync.every(steps)), 1
    )
    for steps in (2, 3, 6, 12)
} | {
    "vote-thinning": synced(_VOTE, "vote, sync thinning(2)", lc.sync.thinning(2)),
    "vote-head": synced(_VOTE, "vote, sync of input and head every 4", lc.sync.every(4), where=_HEAD),
    "vote-small": synced(_VOTE, "vote, sync of small leaves every 2", lc.sync.every(2), where=_SMALL),
    "vote-matrices": synced(_VOTE, "vote, sync of blocks every 64", lc.sync.every(64), where=_MATRICES),
    "vote-adaptive": synced(_VOTE, "vote, sync adaptive(4, 128)", lc.sync.adaptive(4, 128)),
    "vote-4-coded-3": synced(
        _VOTE_4, "vote, 4 bits, coded sync every 3", lc.sync.coded(lc.sync.every(3)), 1
    ),
}  # fmt: skip

HORIZONS: dict[str, Betas] = {"long": (0.9, 0.99), "middle": (0.9, 0.95), "short": (0.8, 0.9)}
METHODS |= {
    f"{name}-{horizon}": with_betas(METHODS[name], betas)
    for name in ("lion", "vote")
    for horizon, betas in HORIZONS.items()
}


METHODS |= PEERS | CANDIDATES


def method_named(name: str) -> Method:
    """Raises ``ValueError`` with the known ones for any other name."""
    if name not in METHODS:
        raise ValueError(f"{name!r} is no method; there are {', '.join(METHODS)}")
    return METHODS[name]
