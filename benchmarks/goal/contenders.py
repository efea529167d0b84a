"""The methods that run to the loss, each twice, simulated, and as its users write it.

A method is what a user writes; the simulator is the same in the words of the tests' oracle, and a test
holds the two together. All have the same model, text, schedule and decoupled decay, and one tuning:
see `tuning`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from oracle import baselines as reference_baselines
from oracle import coding
from oracle import lion as reference
from oracle import muon as reference_muon
from oracle import one_bit_adam as reference_adam
from oracle import powersgd as reference_power
from oracle import sync as reference_sync
from oracle.lion import Simulator

import lioncub_jax as lc
from goal.model import STEPS
from lioncub_jax import baselines

OURS, OTHER = "ours", "other"
DECAYS = 0.1, 1.0  # decoupled, that tuning tries
FOREVER = 2**30  # steps
FULL, CODED = "in full precision", "in one bit"  # stages of 1-bit Adam
WARMUP = round(0.15 * STEPS)  # of 1-bit Adam in a run of the lab

Schedule = Callable[[Any], Any]  # steps of a worker so far to a learning rate


class Hyper(NamedTuple):
    """Hyperparameters that are tuned; numbers, or traced arrays.

    Attributes:
      rate: the highest learning rate.
      b1: weight of the momentum.
      b2: decay of Lion's momentum, or of Adam's second moment.
      decay: decoupled weight decay.
    """

    rate: Any
    b1: Any
    b2: Any
    decay: Any


class Family(NamedTuple):
    """The first values of tuning, and those that it tries instead.

    Attributes:
      rate: the first rate.
      betas: the first ones, for short runs.
      long: those of long runs, which are tried too.
      decays: the first one, and what is tried instead.
    """

    rate: float
    betas: tuple[float, float]
    long: tuple[float, float]
    decays: tuple[float, float] = DECAYS

    def other_betas(self, hyper: Hyper) -> Hyper:
        """A choice with the pair of betas that it has not."""
        b1, b2 = self.long if (hyper.b1, hyper.b2) == self.betas else self.betas
        return hyper._replace(b1=b1, b2=b2)

    def other_decay(self, hyper: Hyper) -> Hyper:
        """A choice with the decay that it has not."""
        return hyper._replace(decay=self.decays[hyper.decay == self.decays[0]])


LION = Family(5e-4, (0.8, 0.9), (0.9, 0.99))
ADAM = Family(2e-3, (0.8, 0.98), (0.9, 0.99))
# Muon's momentum, and the second beta of the AdamW of its other leaves, whose first one is that of `ADAM`.
MUON = Family(0.0113, (0.95, 0.98), (0.9, 0.98))


class Contender(NamedTuple):
    """A method.

    Attributes:
      code: how it is written in a program, without ``lioncub_jax.``.
      side: "ours", or "other": those of `baselines`, also in codes.
      family: of which optimizer its rate and betas are.
      simulated: ``(Hyper, Schedule) -> Simulator``.
      made: ``(Hyper, Schedule, workers) -> optax.GradientTransformation``, of `make_train_step`.
      local_steps: steps of a worker between two talks.
      local: ``(Hyper, Schedule) -> optimizer`` that takes them.
      stages: the names of its kinds of steps, in their order.
      votes: whether workers vote, each with a momentum of its own.
      accumulate: micro-steps whose mean gradient makes one exchange.
      syncs_every: steps from one sync of the momenta to the next; 0 for none.
    """

    code: str
    side: str
    family: Family
    simulated: Callable[[Hyper, Schedule], Simulator]
    made: Callable[[Hyper, Schedule, Any], optax.GradientTransformation]
    local_steps: int = 1
    local: Callable[[Hyper, Schedule], optax.GradientTransformation] | None = None
    stages: tuple[str, ...] = ("",)
    votes: bool = False
    accumulate: int = 1
    syncs_every: int = 0


def lion(h: Hyper) -> optax.GradientTransformation:
    return optax.scale_by_lion(h.b1, h.b2)


def adam(h: Hyper) -> optax.GradientTransformation:
    return optax.scale_by_adam(h.b1, h.b2)


def falling(direction: optax.GradientTransformation, h: Hyper, rate: Schedule) -> Any:
    """With decay and rate, as all optimizers of optax have them."""
    decay = optax.add_decayed_weights(h.decay)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(rate))


def adamw(h: Hyper, rate: Schedule) -> optax.GradientTransformation:
    return falling(adam(h), h, rate)


def lionw(h: Hyper, rate: Schedule) -> optax.GradientTransformation:
    return falling(lion(h), h, rate)


def muon(h: Hyper, rate: Schedule) -> optax.GradientTransformation:
    """Muon of the hidden matrices at an RMS of 0.2, and AdamW of the rest at the same rate and decay."""
    return optax.contrib.muon(
        rate, beta=h.b1, weight_decay=h.decay, adam_b1=ADAM.betas[0], adam_b2=h.b2,
        adam_weight_decay=h.decay, muon_weight_dimension_numbers=hidden, consistent_rms=0.2,
    )  # fmt: skip


def hidden(params: Any) -> Any:
    """Which axes of a leaf are a matrix; None for vectors and embeddings, which Muon does not suit."""

    def numbers(path: Any, x: Any) -> optax.contrib.MuonDimensionNumbers | None:
        if x.ndim < 2 or "embedding" in jax.tree_util.keystr(path):
            return None
        return optax.contrib.MuonDimensionNumbers(0, tuple(range(1, x.ndim)))  # heads side by side

    return jax.tree.map_with_path(numbers, params)


def mean_of(
    code: str,
    family: Family,
    tx: Callable[[Hyper, Schedule], optax.GradientTransformation],
    dtype: Any = jnp.float32,
) -> Contender:
    """An optimizer of the mean gradient."""
    averaged = reference_baselines.averaged if dtype == jnp.float32 else averaged_in_bfloat16
    return Contender(
        code, OTHER, family,
        lambda h, rate: averaged(tx(h, rate)),
        lambda h, rate, workers: lc.global_gradients(tx(h, rate), dtype, workers=workers),
    )  # fmt: skip


def averaged_in_bfloat16(tx: optax.GradientTransformation) -> Simulator:
    """The mean of gradients that travel in bfloat16, and an optimizer of it."""
    mean = reference_baselines.averaged(tx)

    def update(grads: Any, *state: Any) -> Any:
        # A compiler may leave out a cast there and back.
        rounded = jax.tree.map(lambda g: jax.lax.reduce_precision(g, 8, 7), grads)
        return mean.update(rounded, *state)

    return Simulator(mean.init, update)


def voting(code: str, family: Family, simulated: Any, made: Any) -> Contender:
    """One whose direction is agreed on: ``simulated(h)`` and ``made(h, workers)`` are directions."""
    return Contender(
        code, OURS, family,
        lambda h, rate: reference.optimizer(simulated(h), rate, h.decay),
        lambda h, rate, workers: falling(made(h, workers), h, rate),
    )  # fmt: skip


def voted(
    code: str,
    codes: Any = None,
    decide: Any = None,
    schedule: Any = None,
    every: int = 0,
    **parts: Any,
) -> Contender:
    """`lion_cub`, or votes that differ from it in one part, for the oracle and for the library."""

    def simulated(h: Hyper) -> Simulator:
        votes = reference.local_momentum(h.b1, h.b2, codes=codes, decide=decide)
        return reference_sync.synced(votes, schedule.due) if schedule else votes

    def made(h: Hyper, workers: Any) -> optax.GradientTransformation:
        votes = lc.scale_by_lion_cub(h.b1, h.b2, workers=workers, **parts)
        return lc.sync.sync_momentum(votes, schedule, workers=workers) if schedule else votes

    one = voting(code, LION, simulated, made)
    return one._replace(votes=True, syncs_every=every)


def owned(code: str, family: Family, direction: Any, reply_bits: int | None) -> Contender:
    """A direction at the owner of codes of 3 bits, answered by its sign or in so many bits."""
    quantizer = lc.quantize.error_feedback(lc.quantize.midrise(3))
    codes = coding.error_feedback(coding.midrise(3), quantizer.value.error_dtype)
    reply = lc.decide.sign() if reply_bits is None else lc.decide.codes(reply_bits)
    return voting(
        code, family,
        lambda h: reference.at_owner(direction(h), codes, reply_bits),
        lambda h, workers: lc.owner(
            direction(h), quantizer=quantizer, reply=reply, workers=workers
        ),
    )  # fmt: skip


def owned_muon(up: int, back: int) -> Contender:
    """Muon of whole matrices at the owner, in codes of so many bits up and back."""
    codes = coding.error_feedback(coding.midrise(up), jnp.bfloat16)
    return Contender(
        f"owner_muon(...), {up} bits up and {back} back", OURS, MUON,
        lambda h, rate: reference.optimizer(
            reference_muon.muon_at_owner(
                hidden, h.b1, ADAM.betas[0], h.b2, codes=codes, reply=back
            ),
            rate, h.decay,
        ),
        lambda h, rate, workers: lc.owner_muon(
            rate, beta=h.b1, weight_decay=h.decay, adam_b1=ADAM.betas[0], adam_b2=h.b2,
            adam_weight_decay=h.decay, muon_weight_dimension_numbers=hidden, workers=workers,
            quantizer=lc.quantize.error_feedback(lc.quantize.midrise(up)), reply=lc.decide.codes(back),
        ),
    )  # fmt: skip


class Inner(NamedTuple):
    """An optimizer that others are built around.

    Attributes:
      code: how it is written in a program.
      family: of its rate and betas.
      tx: ``(Hyper, Schedule) -> optimizer``.
    """

    code: str
    family: Family
    tx: Callable[[Hyper, Schedule], optax.GradientTransformation]


ADAMW = Inner("optax.adamw(...)", ADAM, adamw)
AROUND_MUON = Inner("optax.contrib.muon(...)", MUON, muon)


def power(rank: int, inner: Inner = ADAMW) -> Contender:
    return Contender(
        f"baselines.powersgd({inner.code}, {rank})", OTHER, inner.family,
        lambda h, rate: reference_power.powersgd(inner.tx(h, rate), rank),
        lambda h, rate, workers: baselines.powersgd(inner.tx(h, rate), rank, workers=workers),
    )  # fmt: skip


def local_updates(
    code: str, side: str, steps: int, simulated: Callable[[], Simulator],
    made: Callable[[Any], optax.GradientTransformation], inner: Inner = ADAMW,
) -> Contender:  # fmt: skip
    """Workers that take steps on their own, and what they share of how far they came."""
    return Contender(
        f"make_train_step(..., {code}, local_steps={steps}, local={inner.code})",
        side, inner.family,
        lambda h, rate: simulated(),
        lambda h, rate, workers: made(workers),
        steps, inner.tx,
    )  # fmt: skip


def one_bit_adam(stage_of: int) -> Callable[[Hyper, Schedule, Any], optax.GradientTransformation]:
    return lambda h, rate, workers: baselines.one_bit_adam(
        rate, h.b1, h.b2, weight_decay=h.decay, warmup=stage_of, workers=workers
    )


def warmup_of(rate: Schedule) -> int:
    """The steps of 1-bit Adam in floats; its paper takes 15 to 25 % of a run."""
    return round(0.15 * getattr(rate, "steps", STEPS))


MEAN = optax.sgd(1.0)  # of how far workers came

CONTENDERS: dict[str, Contender] = {
    "lion": mean_of("global_gradients(optax.lion(...))", LION, lionw),
    "adamw": mean_of("global_gradients(optax.adamw(...))", ADAM, adamw),
    "vote": voted("lion_cub(...)"),
    "owner-lion": owned("owner_lion(...)", LION, lion, None),
    "owner-adamw": owned("owner_adamw(...)", ADAM, adam, 2),
    "powersgd-4": power(4),
    "powersgd-16": power(16),
    "local-2": local_updates(
        "global_gradients(optax.sgd(1.0))", OTHER, 2,
        lambda: reference_baselines.averaged(MEAN),
        lambda workers: lc.global_gradients(MEAN, workers=workers),
    ),
    "one-bit-adam": Contender(
        "baselines.one_bit_adam(...)", OTHER, ADAM,
        lambda h, rate: reference.optimizer(
            reference_adam.one_bit_adam(h.b1, h.b2, warmup=warmup_of(rate)), rate, h.decay
        ),
        one_bit_adam(WARMUP), stages=(FULL, CODED),
    ),
}  # fmt: skip


def outer(rate: float, momentum: float, inner: Inner = ADAMW) -> Contender:
    """DiLoCo whose differences travel in codes of 4 bits."""
    return local_updates(
        f"baselines.diloco({rate}, {momentum}, bits=4)", OTHER, 32,
        lambda: reference_baselines.diloco(rate, momentum, 4),
        lambda workers: baselines.diloco(rate, momentum, 4, workers=workers), inner,
    )  # fmt: skip


# Two bits of a vote, which keep more of its size: the sums of the paper with p = 2.
TWO_BITS = voted(
    "lion_cub(..., quantizer=quantize.midrise(2))",
    coding.midrise(2),
    quantizer=lc.quantize.midrise(2),
)
BFLOAT16 = mean_of("global_gradients(optax.adamw(...), 'bfloat16')", ADAM, adamw, "bfloat16")
# Outer optimizers that are tried, once the rest of DiLoCo is tuned, by the method that is tuned.
OUTERS = {
    name: {
        name: outer(0.7, 0.9, inner),
        f"{name}-6": outer(0.7, 0.6, inner),
        f"{name}-3": outer(1.0, 0.3, inner),
    }
    for name, inner in {"diloco-32-coded": ADAMW, "diloco-32-muon": AROUND_MUON}.items()
}
# Those that run in longer runs only, beside some of the above.
LONG: dict[str, Contender] = {
    "vote-2-bits": TWO_BITS,
    "powersgd-8": power(8),
    "local-8-coded": local_updates(
        "baselines.diloco(1.0, momentum=0, bits=4)", OTHER, 8,
        lambda: reference.at_owner(
            optax.scale(-1.0), coding.error_feedback(coding.midrise(4), jnp.float32), 4
        ),
        lambda workers: baselines.diloco(1.0, 0, 4, workers=workers),
    ),
    **OUTERS["diloco-32-coded"],
    "muon": mean_of(f"global_gradients({AROUND_MUON.code})", MUON, muon),
    "muon-bfloat16": mean_of(
        f"global_gradients({AROUND_MUON.code}, 'bfloat16')", MUON, muon, "bfloat16"
    ),
    "owner-muon": owned_muon(3, 2),
    "powersgd-8-muon": power(8, AROUND_MUON),
    **OUTERS["diloco-32-muon"],
    "adamw-micro-4": BFLOAT16._replace(accumulate=4),
    "adamw-micro-16": BFLOAT16._replace(accumulate=16),
    "vote-micro-4": CONTENDERS["vote"]._replace(accumulate=4),
    "vote-micro-16": CONTENDERS["vote"]._replace(accumulate=16),
}  # fmt: skip

# The reasons why votes are behind float32 Lion, and Muon at the owner behind float32 Muon, at the choice of
# rate, betas and decay.
REASONS: dict[str, Contender] = {
    **{f"owner-muon-{up}-{back}": owned_muon(up, back) for up, back in ((2, 2), (3, 1), (4, 2))},
    "vote-alike": voted("lion_cub(...), at the rate of Lion"),
    "vote-2": TWO_BITS,
    "vote-sync-64": voted(
        "lion_cub(..., sync=every(64))", schedule=lc.sync.every(64), every=64
    ),
    "vote-tie-0": voted(
        "scale_by_lion_cub(..., decision=ternary())", decide=reference.ternary_sum,
        decision=lc.decide.ternary(),
    ),
    "vote-4": voted(
        "lion_cub(..., quantizer=quantize.midrise(4))", coding.midrise(4), quantizer=lc.quantize.midrise(4)
    ),
    "vote-mean": voted(
        "distributed_lion(..., average=True)", decide=reference.average,
        decision=lc.decide.average(),
    ),
}  # fmt: skip


# Methods that are not ranked, although their rows stay. Those that are gone came to none of the losses that
# methods are ranked by in runs of 256 steps. Those that were tried look for a reason, or have syncs in
# codes, which the library had; deviations of losses are of theirs too.
GONE = "average", "owner-lion-rotated", "local-2-coded", "diloco"
TRIED = *REASONS, "vote-sync-coded"


def timed(name: str, stage: str) -> Contender:
    """A contender whose every step is of that stage."""
    one = CONTENDERS[name]
    if not stage:
        return one
    # 1-bit Adam that stays in its first stage, or is in its second from the second step on.
    return one._replace(made=one_bit_adam(FOREVER if stage == FULL else 1))


def contender_named(name: str) -> Contender:
    """Raises ``ValueError`` with the known ones for any other name."""
    known = CONTENDERS | LONG | REASONS
    if name not in known:
        raise ValueError(f"{name!r} does not run; those who do: {', '.join(known)}")
    return known[name]
