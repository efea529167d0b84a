"""Who runs to the loss: every method as its users would write it, with what it is tuned over.

All have four choices to be tuned over, and the same model, data, schedule and decoupled decay.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import lioncub_jax as lc
from lioncub_jax import baselines

AXIS = "data"
DECAY = 0.1  # decoupled, of all
LION_BETAS, ADAM_BETAS = (0.9, 0.99), (0.9, 0.99)
FOREVER = 2**30  # steps
OURS = "ours"
FULL, CODED = "in full precision", "in one bit"  # stages of 1-bit Adam

Schedule = Callable[[Any], Any]  # steps of a worker so far to a learning rate


class Choice(NamedTuple):
    """What a method is tuned over.

    Attributes:
      rate: the highest learning rate.
      option: a rank, bits, steps that a worker takes alone, or of a warm-up; 0 where there is none.
    """

    rate: float
    option: int = 0


class Recipe(NamedTuple):
    """What `make_train_step` takes.

    Attributes:
      tx: what the workers share.
      local_steps: steps that a worker takes alone before that.
      local: by which optimizer.
    """

    tx: optax.GradientTransformation
    local_steps: int = 1
    local: optax.GradientTransformation | None = None


class Contender(NamedTuple):
    """A method.

    Attributes:
      name: for tables and rows.
      source: the paper, or "ours".
      choices: four, or none with ``like``.
      make: ``(Schedule, steps, option) -> Recipe``.
      stages: ``(steps, option) -> ((first step, stage), ...)``: where its steps are of several kinds.
      made_in: ``(stage, option) -> Recipe`` whose every step is of that kind, to be timed.
      like: the contender whose choice it takes, in place of being tuned.
      only: of the choices of ``like``, those with this option; 0 for all.
      framework: "jax", or "torch" for what `ddp_worker.py` does by that name.
    """

    name: str
    source: str
    choices: tuple[Choice, ...]
    make: Callable[[Schedule, int, int], Recipe]
    stages: Callable[[int, int], tuple[tuple[int, str], ...]] = lambda steps, option: ((0, ""),)
    made_in: Callable[[str, int], Recipe] | None = None
    like: str = ""
    only: int = 0
    framework: str = "jax"

    def timed(self, stage: str, option: int) -> Recipe:
        """Every step of which is of that stage."""
        if self.made_in is not None:
            return self.made_in(stage, option)
        return self.make(lambda count: 1e-4, FOREVER, option)


def rates(*each: float) -> tuple[Choice, ...]:
    return tuple(map(Choice, each))


LION = rates(7.5e-5, 1.5e-4, 3e-4, 6e-4)
ADAM = rates(2.5e-4, 5e-4, 1e-3, 2e-3)


def dense(tx: Callable[..., Any], betas: tuple[float, float], dtype: Any) -> Callable[..., Recipe]:
    def make(rate: Schedule, steps: int, option: int) -> Recipe:
        mean = tx(rate, *betas, weight_decay=DECAY)
        return Recipe(lc.global_gradients(mean, dtype, workers=AXIS))

    return make


def votes(tx: Callable[..., Any], **options: Any) -> Callable[..., Recipe]:
    def make(rate: Schedule, steps: int, option: int) -> Recipe:
        return Recipe(tx(rate, *LION_BETAS, weight_decay=DECAY, workers=AXIS, **options))

    return make


def power(bits: int | None) -> Callable[..., Recipe]:
    """AdamW behind PowerSGD of such a rank, whose factors are floats or codes."""

    def make(rate: Schedule, steps: int, option: int) -> Recipe:
        return Recipe(baselines.powersgd(adamw(rate), option, bits, workers=AXIS))

    return make


def adamw(rate: Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, *ADAM_BETAS, weight_decay=DECAY)


def one_bit_adam(rate: Schedule, steps: int, option: int) -> Recipe:
    """Of so many steps in full precision."""
    tx = baselines.one_bit_adam(rate, *ADAM_BETAS, weight_decay=DECAY, warmup=option, workers=AXIS)
    return Recipe(tx)


def in_torch(rate: Schedule, steps: int, option: int) -> Recipe:
    raise TypeError("a contender of PyTorch's is no recipe: goal/ddp_worker.py runs it")


def alone_first(rate: Schedule, steps: int, option: int) -> Recipe:
    return Recipe(baselines.diloco(workers=AXIS), option, adamw(rate))


def coded(rate: Schedule, steps: int, option: int) -> Recipe:
    return Recipe(lc.coded_gradients(adamw(rate), option, workers=AXIS))


def averaged(rate: Schedule, steps: int, option: int) -> Recipe:
    """The parameters of the workers, averaged after so many steps."""
    return Recipe(lc.global_gradients(optax.sgd(1.0), workers=AXIS), option, adamw(rate))


def two_alone(mean: Callable[[int], optax.GradientTransformation]) -> Callable[..., Recipe]:
    """Two steps alone, and then what the option says of the mean of how far the workers came."""

    def make(rate: Schedule, steps: int, option: int) -> Recipe:
        return Recipe(mean(option), 2, adamw(rate))

    return make


def coded_mean(bits: int) -> optax.GradientTransformation:
    return lc.coded_gradients(optax.sgd(1.0), bits, workers=AXIS)


def low_rank_mean(rank: int) -> optax.GradientTransformation:
    return baselines.powersgd(optax.sgd(1.0), rank, 6, workers=AXIS)


ROTATED = lc.quantize.rotated_sign()
RANKS = Choice(5e-4, 4), Choice(1e-3, 4), Choice(5e-4, 16), Choice(1e-3, 16)
# Its paper takes 15 to 25 % of a run for the warm-up.
WARMED = Choice(5e-4, 58), Choice(1e-3, 58), Choice(2e-3, 58), Choice(1e-3, 29)
BITS = Choice(5e-4, 4), Choice(1e-3, 4), Choice(5e-4, 3), Choice(5e-4, 2)
EVERY = Choice(5e-4, 2), Choice(5e-4, 8), Choice(1e-3, 8), Choice(1e-3, 32)
ALONE = Choice(5e-4, 2), Choice(1e-3, 2), Choice(2e-3, 2), Choice(1e-3, 4)
ALONE_BITS = Choice(5e-4, 4), Choice(1e-3, 4), Choice(2e-3, 4), Choice(1e-3, 3)
ALONE_RANKS = Choice(1e-3, 4), Choice(1e-3, 8), Choice(1e-3, 16), Choice(2e-3, 16)


def adam_stages(steps: int, option: int) -> tuple[tuple[int, str], ...]:
    return ((0, FULL), (option, CODED))


def adam_made(stage: str, option: int) -> Recipe:
    """1-bit Adam that stays in its first stage, or is in its second from the second step on."""
    return one_bit_adam(lambda count: 1e-4, FOREVER, FOREVER - 1 if stage == FULL else 1)


CONTENDERS: dict[str, Contender] = {
    one.name: one
    for one in (
        Contender("Lion, float32", "2302.06675", LION, dense(optax.lion, LION_BETAS, jnp.float32)),
        Contender("AdamW, float32", "1711.05101", ADAM, dense(optax.adamw, ADAM_BETAS, jnp.float32)),
        Contender(
            "AdamW, bfloat16", "1711.05101", (), dense(optax.adamw, ADAM_BETAS, jnp.bfloat16),
            like="AdamW, float32",
        ),
        Contender("1-bit vote", "2404.00438", LION, votes(lc.lion_cub)),
        Contender("owner, 3 bits", OURS, LION, votes(lc.owner_lion)),
        Contender(
            "owner, 1 bit rotated", OURS, (), votes(lc.owner_lion, quantizer=ROTATED),
            like="owner, 3 bits",
        ),
        Contender("AdamW, in codes", OURS, BITS, coded),
        Contender("PowerSGD, AdamW", "1905.13727", RANKS, power(None)),
        Contender("PowerSGD, rank 4", "1905.13727", (), power(None), like="PowerSGD, AdamW", only=4),
        Contender(
            "PowerSGD, rank 4 in 6 bits", OURS, (), power(6), like="PowerSGD, AdamW", only=4
        ),
        Contender("1-bit Adam", "2102.02888", WARMED, one_bit_adam, adam_stages, adam_made),
        Contender("local AdamW, averaged", "1805.09767", ALONE, averaged),
        Contender("2 steps alone, in codes", OURS, ALONE_BITS, two_alone(coded_mean)),
        Contender("2 steps alone, PowerSGD in 6 bits", OURS, ALONE_RANKS, two_alone(low_rank_mean)),
        Contender("DiLoCo, float32", "2311.08105", EVERY, alone_first),
        Contender(
            "PyTorch DDP, float32", "1711.05101", (), in_torch, like="AdamW, float32",
            framework="torch",
        ),
        Contender(
            "PyTorch DDP, bfloat16", "1711.05101", (), in_torch, like="AdamW, float32",
            framework="torch",
        ),
        Contender(
            "PyTorch DDP, PowerSGD", "1905.13727", (), in_torch, like="PowerSGD, AdamW",
            framework="torch",
        ),
        Contender(
            "PyTorch DDP, PowerSGD rank 4", "1905.13727", (), in_torch, like="PowerSGD, AdamW",
            only=4, framework="torch",
        ),
    )
}  # fmt: skip
# Of this library alone, and the papers that it is about.
VOTES = (
    "1-bit vote", "owner, 3 bits", "owner, 1 bit rotated", "AdamW, in codes", "PowerSGD, rank 4 in 6 bits",
    "2 steps alone, in codes", "2 steps alone, PowerSGD in 6 bits",
)  # fmt: skip


def contender_named(name: str) -> Contender:
    """Raises ``ValueError`` with the known ones for any other name."""
    if name not in CONTENDERS:
        raise ValueError(f"{name!r} does not run; those who do: {', '.join(CONTENDERS)}")
    return CONTENDERS[name]
