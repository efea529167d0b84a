"""Runs in which some workers lie, or some votes are missing: one program for all attacks on a method.

Which attack, how many liars and what share of votes is missing are arguments of the program, because
compiling takes longer than a run.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt.corpus import Corpus
from oracle import baselines, coding, simulate
from oracle import lion as reference
from report import Rows, rows_of

from harm import simulated
from harm.simulated import SMALL, Size
from lioncub_jax import faults
from lioncub_jax.faults import Attack

ATTACKS: dict[str, Attack] = {
    "nobody": lambda grads, key: grads,
    "flip": faults.sign_flip,
    "random": faults.random_votes,
    "times 1e6": faults.scaled(1e6),
    "times -1e6": faults.scaled(-1e6),
    "NaN": faults.not_finite,
    "leaf": faults.collusion,
}
BETAS, DECAY = (0.8, 0.9), 0.1
# By a study of this model in version 0.2, which git has: the best of four rates, a factor of two apart, for
# 8 workers of whom nobody lies, by the validation loss. It is one for all methods but the average.
RATE, RATE_OF_AVERAGE = 4e-3, 8e-3
# What is attacked: "mean", these votes, and momentum at the owner.
VOTES = {
    "vote": reference.local_momentum(*BETAS),
    "average": reference.local_momentum(*BETAS, decide=reference.average),
    "int8": reference.local_momentum(*BETAS, codes=coding.integer(8)),
}
# Where values are decoded: a number, or a quarter of the workers and at least 2.
DOMINANCE = {"owner, 1": 1.0, "owner, 2": 2.0, "unbounded": np.inf, "turned": np.inf}
QUARTER = "owner", "trimmed", "median", "turned, bounded"
BASES = ("mean", *VOTES, *QUARTER, *DOMINANCE)
CLAIMED = ("mean", "vote", "owner", "owner, 1")
# Of 8 workers, of which "owner, 2" is "owner", and of more.
EIGHT = ("mean", "vote", "average", "int8", "owner", "owner, 1", "trimmed", "median")
MORE = ("mean", "vote", "average", "owner", "owner, 1", "owner, 2", "trimmed", "median")
WORST = ("flip", "times -1e6", "leaf")
SHARES = (0.1, 0.3, 0.5)  # of missing votes, and of late ones
MISSED = ("vote", "average", "owner", "median")
UNLIKE = ("mean", "vote", "owner", "owner, 1", "unbounded")  # workers that see other data
CROWDED = ("mean", "owner", "owner, 2", "unbounded")  # more workers that see the same
TURNED = ("turned", "turned, bounded")  # `rotated_sign()`, with most workers
CROWDS = ((8, "iid"), (8, "class"), (16, "iid"), (32, "iid"))  # and their split


class Lie(NamedTuple):
    """A run.

    Attributes:
      base: of ``BASES``, what is attacked.
      workers: how many.
      attack: of ``ATTACKS``.
      liars: how many of the workers.
      missing: the share of votes that is missing, at random.
      seed: of all that is drawn.
      late: the share of votes that is late, at random: of the workers that are missing with that share.
      split: how examples are shared out over the workers, of `simulated.shared_out`.
    """

    base: str
    workers: int
    attack: str
    liars: int
    missing: float
    seed: int
    late: float = 0.0
    split: str = "iid"


def trim(base: str, workers: int) -> int:
    """Values that the owner leaves out on each side."""
    return {"trimmed": workers // 4, "median": (workers - 1) // 2}.get(base, 0)


def attacked(workers: int) -> tuple[str, ...]:
    """What is attacked, in the order of its table."""
    return MORE if workers > 8 else EIGHT


def unlike() -> list[Lie]:
    """Runs of workers that see other data than the others, with nobody who lies, and with a loud one.

    And of more workers that see the same: what the owner's bound costs.
    """
    found = []
    for workers, split in CROWDS:
        bases = UNLIKE if workers == 8 else CROWDED + (TURNED if workers == 32 else ())
        for base, seed in product(bases, range(3)):
            found.append(Lie(base, workers, "nobody", 0, 0.0, seed, split=split))
        if split != "iid":
            owners = [base for base in bases if base.startswith("owner")]
            found += [Lie(base, workers, "times -1e6", 1, 0.0, 0, split=split) for base in owners]
    return found


def dominance(base: str, workers: int) -> float:
    """How many times the median of others a step may be."""
    return max(2.0, workers / 4) if base in QUARTER else DOMINANCE.get(base, np.inf)


def numbers_of_liars(workers: int) -> tuple[int, ...]:
    """One, a quarter, and just below half."""
    return 1, workers // 4, (workers - 1) // 2


def planned(workers: tuple[int, ...]) -> list[Lie]:
    """All runs, the ones with 8 workers first: three seeds where something is claimed, one elsewhere.

    With more workers, the worst attacks on some methods.
    """
    found = []
    for count, base in ((n, base) for n in workers for base in attacked(n)):
        cases = [("nobody", 0, 0.0)]
        for liars in numbers_of_liars(count):
            some = ATTACKS if count == 8 else WORST
            some = some if liars != count // 4 else ("flip",)
            cases += [(attack, liars, 0.0) for attack in some if attack != "nobody"]
        if count == 8 and base in MISSED:
            cases += [("nobody", 0, share) for share in SHARES]
        for case in cases:
            claimed = count == 8 and base in CLAIMED and case[0] in ("nobody", "flip")
            some = [Lie(base, count, *case, seed) for seed in range(3 if claimed else 1)]
            found += some + [x._replace(missing=0.0, late=x.missing) for x in some if x.missing]
    return found


def method_of(base: str, workers: int) -> Callable[[Any], reference.Simulator]:
    """What is attacked, ``rate -> Simulator``."""
    if base == "mean":
        return lambda rate: baselines.averaged(optax.lion(rate, *BETAS, weight_decay=DECAY))
    votes = VOTES[base] if base in VOTES else at_owner(base, workers)
    return lambda rate: reference.optimizer(votes, rate, DECAY)


def at_owner(base: str, workers: int) -> reference.Simulator:
    """Codes of 3 bits with their whole error, or "turned": `rotated_sign()`."""
    turned = base in TURNED
    codes = coding.rotated(coding.midrise(1)) if turned else coding.midrise(3)
    return reference.momentum_at_owner(
        *BETAS, coding.error_feedback(codes, keep=0.7 if turned else 1.0),
        dominance=dominance(base, workers), trim=trim(base, workers),
    )  # fmt: skip


def harm(
    workers: int, key: jax.Array, t: jax.Array, kind: Any, liars: Any, missing: Any, *late: Any
) -> simulate.Harm:
    """What a step is given: who lies how, who is not there, and who is late."""
    every = jnp.arange(workers)
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, t)))(every)

    def tamper(grads: Any, step: jax.Array) -> Any:
        del step
        attacks = list(ATTACKS.values())
        lies = jax.vmap(lambda g, k: jax.lax.switch(kind, attacks, g, k))(grads, keys)

        def leaf(lie: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.where((every < liars).reshape(-1, *[1] * (x.ndim - 1)), lie, x)

        return jax.tree.map(leaf, lies, grads)

    drawn = jax.random.uniform(jax.random.fold_in(key, -1 - t), (workers,))
    return simulate.Harm(tamper, drawn < missing, drawn < late[0] if late else None)


class Runner:
    """Runs lies about one text, compiling a program for each method and number of workers."""

    def __init__(self, text: Corpus, size: Size = SMALL):
        self._name, self._size = text.name, size
        self._data = simulated.data_of(text, size.context)
        self._compiled: dict[Any, Any] = {}

    def run(self, lie: Lie) -> dict[str, Any]:
        """Trains, and returns a row."""
        began = time.perf_counter()
        rate = RATE_OF_AVERAGE if lie.base == "average" else RATE
        curve, test = self.outcome(lie, rate)
        bound = dominance(lie.base, lie.workers)
        return {
            **lie._asdict(), "rate": rate, "steps": self._size.steps,
            "batch": self._size.batch // lie.workers, "dominance": number(bound),
            "trim": trim(lie.base, lie.workers), "dataset": self._name,
            "test": {"bits_per_byte": number(test)},
            "curve": {"bits_per_byte": [*map(number, curve)]},
            "seconds": round(time.perf_counter() - began, 2),
        }  # fmt: skip

    def outcome(self, lie: Lie, rate: float) -> tuple[np.ndarray, np.ndarray]:
        """Bits per byte, by the way and at the end."""
        count, late = (self._data.train.size - 1) // self._size.context, lie.late > 0
        table, lengths = simulated.shared_out(lie.split, count, lie.workers, lie.seed)
        args = (
            self._data, table, lengths, jnp.float32(rate), lie.seed,
            list(ATTACKS).index(lie.attack), lie.liars, jnp.float32(lie.missing),
            *([jnp.float32(lie.late)] if late else []),
        )  # fmt: skip
        key = lie.base, lie.workers, late
        if key not in self._compiled:
            method, harmed = method_of(lie.base, lie.workers), partial(harm, lie.workers)
            made = simulated.program(self._size, method, lie.workers, harmed, late)
            # What comes next is mostly of the same kind: one program is kept.
            self._compiled = {key: jax.jit(made).lower(*args).compile()}
        return jax.device_get(self._compiled[key](*args))


def number(x: Any) -> float | None:
    """JSON: five digits; what is not finite is null."""
    return float(f"{x:.5g}") if math.isfinite(x) else None


def key_of(row: dict[str, Any]) -> Lie:
    """The run that a row is of; rows of before say neither ``late`` nor ``split``."""
    row = Lie._field_defaults | row
    return Lie(*(row[name] for name in Lie._fields))


# --- What came out


def ends(rows: Rows, **wanted: Any) -> list[float]:
    """Bits per byte at the end, by seed; infinite where there was no number."""
    every = [Lie._field_defaults | row for row in rows]
    found = sorted(rows_of(every, **Lie._field_defaults | wanted), key=lambda row: row["seed"])
    each = [row["test"]["bits_per_byte"] for row in found]
    return [np.inf if bits is None else bits for bits in each]


def behind(rows: Rows, lie: dict[str, Any]) -> float | None:
    """Bits per byte behind the same method with nobody who lies: the mean of pairs of one seed."""
    clean = {"attack": "nobody", "liars": 0, "missing": 0.0}
    at = {name: lie[name] for name in ("base", "workers", "split") if name in lie}
    own, free = ends(rows, **at | lie), ends(rows, **at | clean)
    if not own or len(free) < len(own):
        return None
    return float(np.mean(np.array(own) - np.array(free[: len(own)])))
