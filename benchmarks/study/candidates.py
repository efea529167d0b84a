"""What was tried for many workers at no more than 2.3 bits, up and down together: on text, with 32."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import lioncub_jax as lc
from lioncub_jax import reference
from lioncub_jax.reference.lion import Codes, Simulator
from study import leaf_scale, one_bit
from study.builders import DECAY, Betas, Method, at_owner, owner_with_feedback, vote_of, with_betas

ONE, ROTATED = reference.midrise(1), reference.rotated(reference.midrise(1))
UP = lc.quantize.error_feedback(lc.quantize.rotated(lc.quantize.midrise(1)))


def tried(label: str, codes: Callable[[int], Codes], like: Method, **how: Any) -> Method:
    """``codes`` of a run of so many steps; ``like`` sends as many bytes."""

    def votes(betas: Betas, steps: int = 0) -> Simulator:
        return one_bit.at_owner(*betas, codes(steps), **how)

    return like._replace(
        label=f"owner, {label}", source="ours", transform=None, votes=votes,
        simulated=lambda rate, steps, betas: reference.optimizer(votes(betas, steps), rate, DECAY),
    )  # fmt: skip


def of(codes: Codes) -> Callable[[int], Codes]:
    return lambda steps: codes


_ROTATED = at_owner("owner, 1 bit, rotated", UP, ROTATED, jnp.bfloat16)
_ONE = owner_with_feedback(1)
_FADING = tried("rotated, feedback times 0.7", of(ROTATED), _ONE, gain=0.7)


def at_rate(method: Method, factor: float) -> Method:
    """The same at another learning rate than the one that is given."""

    def simulated(rate: Any, steps: int, betas: Betas) -> Simulator:
        return method.simulated(lambda t: factor * rate(t), steps, betas)

    return method._replace(label=f"{method.label}, {factor:g} times the rate", simulated=simulated)


def in_part(p: int, share: float, begins: float = 0.0, gain: float = 1.0) -> Method:
    """p bits in a share of the run, else one, all of turned rows."""
    fine = reference.rotated(reference.midrise(p))

    def codes(steps: int) -> Codes:
        first, length = round(begins * steps), round(share * steps)
        return one_bit.finer(ROTATED, fine, lambda t: (t >= first) & (t < first + length))

    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        length = round(share * steps)
        finer = owner_with_feedback(p).sent(params, workers, length, syncs)
        return finer + _ONE.sent(params, workers, steps - length, syncs)

    back = "" if gain == 1 else f", feedback times {gain}"
    made = tried(
        f"rotated, {p} bits for {share:.1%} from {begins:.0%} on, else 1{back}",
        codes,
        _ONE,
        gain=gain,
    )
    return made._replace(sent=sent)


def in_some_rows(share: float, gain: float) -> Method:
    """2 bits for some rows, drawn anew in each step, else one, all of turned rows."""
    codes = one_bit.finer_rows(ROTATED, reference.rotated(reference.midrise(2)), share)

    def sent(params: Any, workers: int, steps: int, syncs: int) -> float:
        one, two = (owner_with_feedback(p).sent(params, workers, steps, syncs) for p in (1, 2))
        return (1 - share) * one + share * two

    label = f"rotated, 2 bits for {share:.0%} of the rows, else 1, feedback times {gain}"
    return tried(label, of(codes), _ONE, gain=gain)._replace(sent=sent)


CANDIDATES: dict[str, Method] = {
    "owner-1-faded": at_owner(
        "owner, 1 bit, rotated, feedback times 0.7",
        lc.quantize.rotated_sign(), ROTATED, jnp.bfloat16,
    ),
    "owner-1-rotated": _ROTATED,
    "owner-2-rotated": at_owner(
        "owner, 2 bits, rotated",
        lc.quantize.error_feedback(lc.quantize.rotated(lc.quantize.midrise(2))),
        reference.rotated(reference.midrise(2)), jnp.bfloat16,
    ),
    "owner-1-decays-0.95": tried("1 bit, feedback times 0.95", of(ONE), _ONE, gain=0.95),
    "owner-1-decays-0.7": tried("1 bit, feedback times 0.7", of(ONE), _ONE, gain=0.7),
    "rotated-decays-0.95": tried("rotated, feedback times 0.95", of(ROTATED), _ONE, gain=0.95),
    **{
        f"rotated-decays-{gain}": tried(
            f"rotated, feedback times {gain}", of(ROTATED), _ONE, gain=gain
        )
        for gain in (0.8, 0.7, 0.6, 0.5)
    },
    "rotated-0.7-slower": at_rate(_FADING, 0.75),
    "rotated-0.7-faster": at_rate(_FADING, 1.25),
    "rotated-0.7-0.85-0.9": with_betas(_FADING, (0.85, 0.9)),
    "rotated-0.7-0.8-0.92": with_betas(_FADING, (0.8, 0.92)),
    "rotated-best-filter": tried(
        "rotated, feedback 0.4 of what is missed and 0.5 of the last", of(ROTATED), _ONE, gain=0.4, keep=0.5
    ),
    "rotated-no-feedback": tried("rotated, no feedback", of(ROTATED), _ONE, gain=0.0),
    "rotated-spread": tried(
        "rotated, half of the feedback later", of(ROTATED), _ONE, gain=0.5, keep=0.5
    ),
    "rotated-ef21": tried("rotated, EF21", of(ROTATED), _ONE, estimates=True),
    "owner-1-ef21": tried("1 bit, EF21", of(ONE), _ONE, estimates=True),
    "owner-1-leaf": tried("1 bit, scale of a leaf", of(leaf_scale.midrise(1)), _ONE),
    "owner-signs": tried("signs without scale or feedback", of(one_bit.signs()), _ONE, gain=0.0),
    "owner-ternary": tried("ternary, in 2 bits", of(one_bit.ternary()), owner_with_feedback(2)),
    "rotated-3-first": in_part(3, 0.0875),
    "rotated-2-first": in_part(2, 0.175),
    "rotated-3-last": in_part(3, 0.0875, 0.9125),
    "rotated-2-last": in_part(2, 0.175, 0.825),
    "rotated-0.7-2-last": in_part(2, 0.175, 0.825, gain=0.7),
    "rotated-0.7-2-middle": in_part(2, 0.175, 0.6, gain=0.7),
    "rotated-0.7-2-half": in_part(2, 0.175, 0.4, gain=0.7),
    "rotated-0.7-2-early": in_part(2, 0.175, 0.05, gain=0.7),
    "rotated-0.7-2-faster": at_rate(in_part(2, 0.175, 0.4, gain=0.7), 1.25),
    "rotated-0.7-2-rows": in_some_rows(0.175, gain=0.7),
    "rotated-0.7-2-few": in_some_rows(0.15, gain=0.7),
    "rotated-0.9-0.9": with_betas(_ROTATED, (0.9, 0.9)),
    "rotated-0.85-0.9": with_betas(_ROTATED, (0.85, 0.9)),
    "rotated-0.8-0.95": with_betas(_ROTATED, (0.8, 0.95)),
    "vote-0.9-0.9": with_betas(vote_of(1), (0.9, 0.9)),
    "vote-0.9-0.95": with_betas(vote_of(1), (0.9, 0.95)),
}  # fmt: skip
