"""Which method to use: all of them side by side, by the time until a loss is reached.

That is a step's time, times the steps that a method was seen to take where a worker's gradient is about as
noisy. A factor between two methods is a range: links reach a share of their rate that few know, an
all-reduce of gradients overlaps with computing or does not, and steps have a standard error.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from lioncub_jax.exchange.checks import check_number
from lioncub_jax.tools.plan import evidence
from lioncub_jax.tools.plan.evidence import DATA, FAR, Found
from lioncub_jax.tools.plan.methods import ALONE, SCHEMES
from lioncub_jax.tools.plan.model import Cluster, Row, orthogonalising, step_time

# Why a method is not to be used.
FITS_NOT, NO_GROUP, APART = "does not fit", "no group=", "data differ"
OWNER = "owner-adamw"  # what to try where nothing was measured
# Verdicts.
NOTHING, LOCAL_STEPS, HIDES = "nothing", "local steps", "a mean hides"
USE, MEASURE, USE_MEAN, NOT_MEASURED = "use", "measure first", "use a mean", "not measured"
WORTHWHILE = 1.05  # times faster; less is not enough to change how a model is trained
ERRORS = 2  # standard errors on each side
LONG = 5  # times as long as computing, which an exchange in each step of many workers may take
LOCAL_SHARE = 0.1  # of the time of computing, for exchanges where workers take steps alone

Range = tuple[float, float]  # least and most


class Plan(NamedTuple):
    """Every method on one cluster.

    Attributes:
      cluster: workers and links.
      compute: seconds, as given.
      tokens: that a worker sees in a step, as given.
      data: what workers see, as given.
      parameters: of the model.
      nearest: the setting whose steps these are.
      rows: by name, those that work, and those of `ALONE`: one worker that takes all rows.
      refused: why the others do not work, by name.
    """

    cluster: Cluster
    compute: float
    tokens: int
    data: str
    parameters: int
    nearest: Found
    rows: dict[str, Row]
    refused: dict[str, str]

    def by(self, setting: Found) -> "Plan":
        """Returns the same plan by the evidence of another setting.

        Steps are not measured if that is far away, and not for votes of two workers: there each
        disagreement is a tie.
        """
        known = {} if setting.distance == FAR else setting.methods
        ties = self.cluster.num_workers == 2
        learned = {x.name: known.get(x.learns) for x in SCHEMES.values() if not (ties and x.votes)}
        learned[ALONE["muon"].name] = known.get("muon")
        rows = {n: x._replace(learned=learned.get(n, x.learned)) for n, x in self.rows.items()}
        return self._replace(nearest=setting, rows=rows)

    def if_alike(self) -> "Plan":
        """Returns the plan as if all that exchange in each step learned like AdamW."""
        alike = self.nearest.methods[evidence.REFERENCE]
        methods = {x.learns: alike for x in SCHEMES.values() if x.every == 1}
        return self.by(Found(self.nearest.cell, evidence.NEAR, methods))

    def seconds(self, row: Row) -> np.ndarray:
        """Returns the seconds of a step, ``[3, 3]``, see `Cluster.unknown`."""
        return row.step(self.compute, *self.cluster.unknown()) + row.orthogonalising

    def soon(self, row: Row) -> tuple[float, float]:
        """Returns the seconds to the loss over the steps of AdamW, and of a step, both in the middle."""
        middle = float(self.seconds(row)[1, 1])
        return row.ratio * middle, middle

    def first(self, *kinds: str) -> Row | None:
        """Returns the method of such kinds that reaches the loss first, in the middle of what may be."""
        rows = (x for x in self.rows.values() if x.scheme.kind in kinds and x.ratio < math.inf)
        return min(rows, key=self.soon, default=None)

    def faster(self, row: Row, part: Any = np.s_[:], errors: float = ERRORS) -> Range:
        """Returns how many times as fast as the best mean a method may be, at least and at most."""
        assert row.learned
        means = [x.ratio * self.seconds(x) for x in self.rows.values() if x.scheme.kind == "mean"]
        best = np.min(means, axis=0, initial=math.inf)
        factors = (best / (row.ratio * self.seconds(row)))[part]
        spread = 1 + errors * row.learned.error / row.ratio
        return float(factors.min() / spread), float(factors.max() * spread)

    def answer(self) -> tuple[str, Row | None]:
        """Returns a verdict, one of the constants of this module, and the method to use if there is one."""
        if self.cluster.num_workers == 1 or all(
            x.scheme.kind == "alone" for x in self.rows.values()
        ):
            return NOTHING, None
        other, mean = self.first("ours", "other"), self.first("mean")
        if self.hides():
            return HIDES, mean
        if self.exchange(self.least_exchange()) > self.longest() * self.compute:
            return LOCAL_STEPS, None
        if not (other or mean):
            alike = self.if_alike()
            gains = (ours := alike.first("ours")) and alike.faster(ours)[1] >= WORTHWHILE
            return (NOT_MEASURED if gains else USE_MEAN), None
        low, high = self.faster(other) if other else (0.0, 0.0)
        if high < WORTHWHILE:
            return USE_MEAN, mean
        return (USE if low >= WORTHWHILE else MEASURE), other

    def exchange(self, row: Row) -> float:
        """Returns the seconds in collectives of an exchange, in the middle of what may be."""
        return float(row.communication(self.cluster.unknown()[0][1, 0]))

    def least_exchange(self) -> Row:
        """Returns the method of the least exchange, of those that exchange in each step and reach the loss.

        If none was seen to reach it, this is ``owner_adamw``, or the least where that does not fit.
        """
        each = [x for x in self.rows.values() if x.scheme.every == 1 and x.scheme.kind != "alone"]
        reached = [x for x in each if x.ratio < math.inf]
        return min(
            reached or [x for x in each if x.scheme.name == OWNER] or each, key=self.exchange
        )

    def longest(self) -> int:
        """Returns how many times as long as computing an exchange in each step may take.

        W workers whose exchange takes W - 1 times as long as computing are as fast as one.
        """
        return min(self.cluster.num_workers - 1, LONG)

    def hides(self) -> bool:
        """Returns whether an all-reduce that overlaps takes no time, at the link's least share."""
        means = (x for x in self.rows.values() if x.scheme.kind == "mean")
        return any(self.seconds(x)[0, 2] <= self.compute for x in means)

    def steps_alone(self) -> int:
        """Returns of how many steps' computing an exchange of DiLoCo in codes is a tenth."""
        diloco = step_time(SCHEMES["diloco-32-coded"], self.parameters, self.cluster)
        return math.ceil(self.exchange(diloco) / (LOCAL_SHARE * self.compute))

    def to_measure(self, row: Row) -> str:
        """Returns which number narrows the range of a method most, and how it is measured."""
        left = {
            "the rate that an all-reduce reaches, by lioncub probe": self.faster(row, np.s_[1]),
            "how much of an all-reduce overlaps with computing, by lioncub probe --step": (
                self.faster(row, np.s_[:, 1])
            ),
            "its steps to a loss: run both for some hundreds of steps": self.faster(row, errors=0),
        }
        return min(left, key=lambda what: left[what][1] / left[what][0])

    def numbers(self) -> dict[str, Any]:
        """Returns plain numbers of each method, the first at the loss first, as `lioncub plan --json` does.

        Bits and bytes that a worker sends, and seconds, are of a step; tokens are over AdamW's; "faster" is
        how many times as fast as the best all-reduce a method is at the loss, at least and at most. None
        stands for what is not known.
        """
        methods = {}
        for row in sorted(self.rows.values(), key=self.soon):
            reached = row.ratio < math.inf
            methods[row.scheme.name] = {
                "code": row.scheme.code,
                "bits": 8 * row.sent_bytes / self.parameters,
                "sent_bytes": row.sent_bytes,
                "seconds": self.soon(row)[1],
                "tokens": row.ratio if reached else None,
                "faster": self.faster(row) if reached and self.first("mean") else None,
                "held_bytes": row.held_bytes,
            }
        verdict, use = self.answer()
        return {
            "verdict": verdict,
            "use": use and use.scheme.name,
            "methods": methods,
            "refused": self.refused,
        }


def plan(
    parameters: int,
    cluster: Cluster,
    compute: float,
    *,
    tokens: int,
    data: str = DATA[0],
    memory: float = math.inf,
) -> Plan:
    """Compares every method on a cluster, by the evidence of the nearest setting.

    Args:
      parameters: of the model; of a tree ``optax.tree.size(params)``.
      cluster: workers, links and memory.
      compute: seconds of a device's own forward and backward pass and update, above zero.
      tokens: that one worker sees in a step: its batch times the length.
      data: what workers see, "alike" or "different".
      memory: bytes of a device.

    Returns:
      A `Plan`.

    Raises:
      ValueError: as `cell_for`; for no parameters, and a compute time that is not above zero.

    Example:
      >>> from lioncub_jax.tools.plan import Link
      >>> slow = plan(124_000_000, Cluster(8, Link(1e9, 50e-6)), 0.144, tokens=32)
      >>> verdict, row = slow.answer()
      >>> verdict, row.scheme.name
      ('use', 'vote')
    """
    check_number(
        f"compute={compute!r}", compute, lambda time: 0 < time < math.inf,
        "give seconds, above zero; speedups depend on it",
    )  # fmt: skip
    rows, refused = {}, {}
    for name, scheme in SCHEMES.items():
        row = step_time(scheme, parameters, cluster)
        if data != DATA[0] and scheme.votes:
            refused[name] = APART
        elif row.held_bytes > memory:
            refused[name] = FITS_NOT
        elif cluster.group_size > 1 and not scheme.two_levels:
            refused[name] = NO_GROUP
        else:
            rows[name] = row
    nearest = evidence.cell_for(cluster.num_workers, tokens, data, parameters)
    for scheme in ALONE.values():
        rows[scheme.name] = step_time(scheme, parameters, cluster)._replace(
            local=(cluster.num_workers - 1) * compute, learned=nearest.methods[evidence.REFERENCE]
        )
    for name, row in rows.items():
        if row.scheme.orthogonalises:
            owners = cluster.num_workers if row.scheme.orthogonalises == "owners" else 1
            takes = compute * orthogonalising(parameters, tokens, owners)
            rows[name] = row._replace(orthogonalising=takes)
    return Plan(cluster, compute, tokens, data, parameters, nearest, rows, refused).by(nearest)
