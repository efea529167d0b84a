"""What a method of the study is, and how one is made of a simulator, a transform and its bytes.

A method is what a user writes; the simulator is the same thing in the words of `reference`, and a test
holds the two together. Each has as many learning rates to be tuned over as every other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.baselines.dgc import dgc, stages
from lioncub_jax.reference import baselines as reference_baselines
from lioncub_jax.reference import dgc as reference_dgc
from lioncub_jax.reference import sync as reference_sync
from lioncub_jax.reference.lion import Simulator
from lioncub_jax.sync import Schedule
from lioncub_jax.traffic import predicted as accounting
from study import leaf_scale, local_feedback

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


class Method(NamedTuple):
    """A way to train.

    Attributes:
      label: for tables and figures.
      source: the paper, or "ours".
      rates: the learning rates it is tuned over.
      simulated: ``(rate, steps, betas) -> Simulator``.
      transform: ``(rate, steps, betas, axis_name) -> optax transform``; None where the library does not
        offer what others do.
      sent: ``(params, workers, steps, syncs) -> bytes`` that each worker sends in a run.
      drifts: whether workers have momenta of their own.
      votes: ``betas -> Simulator`` of the update before learning rate and decay, for those of Lion's kind.
      local_steps: steps that each worker takes on its own before the workers talk.
      local: ``rate -> optax transform``, by which optimizer.
    """

    label: str
    source: str
    rates: tuple[float, ...]
    simulated: Callable[[Rate, int, Betas], Simulator]
    transform: Callable[..., optax.GradientTransformation] | None
    sent: Callable[[Any, int, int, int], float]
    drifts: bool = False
    votes: Callable[[Betas], Simulator] | None = None
    local_steps: int = 1
    local: Callable[[Rate], optax.GradientTransformation] | None = None


def each_step(traffic: Callable[[Any, int], accounting.Traffic]) -> Callable[..., float]:
    """Bytes of a run in which all steps are alike."""

    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        return steps * traffic(params, workers).sent_bytes

    return sent


def predicted(**parts: Any) -> Callable[..., float]:
    """Bytes of a run of ``communicate`` with these parts."""
    return each_step(lambda params, workers: accounting.predict(params, workers, **parts))


def sent_by(tx: optax.GradientTransformation) -> Callable[..., float]:
    """Bytes of a run of a transform that can be asked."""
    return each_step(lambda params, workers: accounting.of(tx, params, workers))


def baseline(
    label: str, source: str, rates: tuple[float, ...], method: Any, simulator: Any, **options: Any
) -> Method:
    """One of `baselines`; ``simulator(rate) -> Simulator``."""
    return Method(
        label, source, rates,
        lambda rate, steps, betas: simulator(rate),
        lambda rate, steps, betas, axis_name: method(rate, axis_name=axis_name, **options),
        sent_by(method(1.0, axis_name="workers", **options)),
    )  # fmt: skip


def synced(
    method: Method, label: str, schedule: Schedule, bits: int = 0, where: Any = None
) -> Method:
    """A vote whose momenta are made alike at times; ``bits`` of a coded schedule, 0 for none."""
    gaps = schedule.gaps
    adaptive = gaps and tuple(gaps)

    def votes(betas: Betas) -> Simulator:
        assert method.votes is not None
        inner = method.votes(betas)

        def given(params: Any) -> Simulator:  # which leaves, only their tree can tell
            mask = where(params) if where else None
            return reference_sync.synced(inner, schedule.due, mask, bits, adaptive)

        return Simulator(
            lambda params, workers: given(params).init(params, workers),
            lambda grads, state, params=None, abstain=None: given(params).update(
                grads, state, params, abstain
            ),
        )

    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        one = accounting.sync_traffic(params, workers, schedule, where).sent_bytes
        return method.sent(params, workers, steps, 0) + syncs * one

    def transform(rate: Rate, steps: int, betas: Betas, axis_name: Any) -> Any:
        return method.transform(rate, steps, betas, axis_name, sync=schedule, sync_where=where)

    return method._replace(
        label=label, source="ours" if bits or gaps or where else "2411.16462",
        simulated=lambda rate, steps, betas: reference.optimizer(votes(betas), rate, DECAY),
        transform=transform, sent=sent, votes=votes,
    )  # fmt: skip


def leaves_named(*names: str) -> Callable[[Any], Any]:
    """A mask of the leaves in whose path there is one of these names."""

    def mask(tree: Any) -> Any:
        def picks(path: Any, leaf: Any) -> bool:
            return any(name in jax.tree_util.keystr(path) for name in names)

        return jax.tree_util.tree_map_with_path(picks, tree)

    return mask


def full_precision() -> Method:
    """Lion of the mean gradient: what all others are held against."""

    def simulated(rate: Rate, steps: int, betas: Betas) -> Simulator:
        return reference_baselines.averaged(optax.lion(rate, *betas, weight_decay=DECAY))

    def transform(
        rate: Rate, steps: int, betas: Betas, axis_name: Any
    ) -> optax.GradientTransformation:
        return baselines.lion(rate, *betas, weight_decay=DECAY, axis_name=axis_name)

    sent = sent_by(baselines.lion(1.0, axis_name="workers"))
    return Method("Lion, float32", "2302.06675", VOTES, simulated, transform, sent)


def with_betas(method: Method, betas: Betas) -> Method:
    """The same with betas of its own, whatever the task's are."""
    return method._replace(
        label=f"{method.label}, betas {betas[0]} and {betas[1]}",
        simulated=lambda rate, steps, _: method.simulated(rate, steps, betas),
        transform=method.transform
        and (lambda rate, steps, _, axis_name: method.transform(rate, steps, betas, axis_name)),
    )


def local(
    label: str, source: str, codes: Any = None, decide: Any = None, rates: tuple[float, ...] = VOTES,
    transform: Any = lc.lion_cub, parts: Any = None, **options: Any,
) -> Method:  # fmt: skip
    """Votes of workers with momenta of their own; ``options`` are the transform's."""

    def votes(betas: Betas) -> Simulator:
        return reference.local_momentum(*betas, codes=codes, decide=decide)

    parts = parts or {{"quantizer": "up"}.get(k, k): v for k, v in options.items()}
    return Method(
        label, source, rates,
        lambda rate, steps, betas: reference.optimizer(votes(betas), rate, DECAY),
        transform and (
            lambda rate, steps, betas, axis_name, **more: transform(
                rate, *betas, weight_decay=DECAY, axis_name=axis_name, **options, **more
            )
        ),
        predicted(**parts), True, votes,
    )  # fmt: skip


def at_owner(label: str, quantizer: Any, codes: Any, feedback: Any = None) -> Method:
    """One momentum for all, in slices."""

    def votes(betas: Betas) -> Simulator:
        return reference.momentum_at_owner(
            *betas, codes=codes, feedback=feedback, keep=quantizer.keep,
            dominance=jnp.inf if quantizer.turns else None,  # as `owner_lion` has it
        )  # fmt: skip

    owner = lc.decide.momentum_at_owner(optax.scale_by_lion())
    return Method(
        label, "ours", VOTES,
        lambda rate, steps, betas: reference.optimizer(votes(betas), rate, DECAY),
        lambda rate, steps, betas, axis_name: lc.owner_lion(
            rate, *betas, weight_decay=DECAY, axis_name=axis_name, quantizer=quantizer
        ),
        predicted(up=quantizer, owner=owner), False, votes,
    )  # fmt: skip


def owner_with_feedback(p: int, dtype: Any = jnp.bfloat16) -> Method:
    exact = ", float32 error" if dtype == jnp.float32 else ""
    return at_owner(
        f"owner, {p} bit{'s' * (p > 1)}{exact}",
        lc.quantize.error_feedback(lc.quantize.midrise(p), dtype),
        reference.midrise(p),
        dtype,
    )


def vote_of(p: int) -> Method:
    return local(
        f"vote, {p} bits, block of 128", "ours", reference.midrise(p),
        quantizer=lc.quantize.midrise(p),
    )  # fmt: skip


def vote_by_leaf(p: int) -> Method:
    """One step for a leaf, which the library does not offer; as many bytes as with one for a row."""
    return local(
        f"vote, {p} bits, scale of a leaf", "ours", leaf_scale.midrise(p), transform=None,
        parts={"up": lc.quantize.midrise(p)},
    )  # fmt: skip


def vote_with_feedback(p: int) -> Method:
    def votes(betas: Betas) -> Simulator:
        return local_feedback.local_momentum(*betas, reference.midrise(p))

    return vote_of(p)._replace(
        label=f"vote, {p} bit{'s' * (p > 1)}, feedback", transform=None, votes=votes,
        simulated=lambda rate, steps, betas: reference.optimizer(votes(betas), rate, DECAY),
    )  # fmt: skip


def averaged(tx: Callable[[Rate], Any]) -> Callable[[Rate], Simulator]:
    return lambda rate: reference_baselines.averaged(tx(rate))


def descending(make: Callable[[], Simulator], decay: float) -> Callable[[Rate], Simulator]:
    return lambda rate: reference.optimizer(make(), rate, decay)


def warmup_of(steps: int) -> int:
    """DGC's warm-up: the first tenth of a run."""
    return steps // 10


def sparse() -> Method:
    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        warmup = warmup_of(steps)
        tx = baselines.dgc(1.0, density=0.001, warmup=warmup, axis_name="workers")
        each = [(s.first_step, accounting.of(tx, params, workers, step=s.first_step).sent_bytes)
                for s in stages(0.001, warmup)]  # fmt: skip
        ends = [first for first, _ in each[1:]] + [steps]
        return sum((end - first) * count for (first, count), end in zip(each, ends, strict=True))

    def simulated(rate: Rate, steps: int, betas: Betas) -> Simulator:
        simulator = reference_dgc.dgc(0.9, 0.001, warmup_of(steps))
        return reference.optimizer(simulator, rate, LIGHT_DECAY)

    def transform(
        rate: Rate, steps: int, betas: Betas, axis_name: Any
    ) -> optax.GradientTransformation:
        return dgc(
            rate, 0.9, 0.001, warmup_of(steps), weight_decay=LIGHT_DECAY, axis_name=axis_name
        )

    return Method("DGC, 0.1 %", "1712.01887", GRADIENTS, simulated, transform, sent)


def ties_up(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """What public code does with a tie: always the same side."""
    return jnp.where(margin >= 0, 1, -1) * (reach > 0)
