"""One small table of what to use: from the evidence alone, and the same that `plan` says.

One number stands for a network: the time of a float32 mean of gradients over that of computing a step.
There is no latency and no packing in it, and the model is a number of parameters.
"""

import math
from typing import NamedTuple

from lioncub_jax.tools.plan import evidence
from lioncub_jax.tools.plan.evidence import DATA
from lioncub_jax.tools.plan.methods import FLOAT32, scheme_named
from lioncub_jax.tools.plan.model import EXACT, Cluster, Link, step_time
from lioncub_jax.tools.plan.report import NOT_MEASURED, Plan, plan

NETWORKS = (0.1, 1, 10, 100)
TOKENS = (32, 256, 2048)  # that a worker sees in a step
WORKERS = 8  # or the nearest that was measured
SIZE = 10_000_000  # parameters


class Use(NamedTuple):
    """A line: what to use for one kind of data, on networks next to each other.

    Attributes:
      data: one of ``DATA``.
      tokens: that a worker sees in a step; several where all have this answer.
      plans: by tokens and network; of none where nobody measured.
    """

    data: str
    tokens: list[int]
    plans: dict[tuple[int, float], Plan]

    def method(self) -> str:
        """Names the scheme to use."""
        return next((one.use() for one in self.plans.values()), NOT_MEASURED)

    def verdict(self) -> str:
        """Returns what is advised."""
        return next((one.verdict() for one in self.plans.values()), NOT_MEASURED)

    def networks(self) -> list[float]:
        """Lists the networks."""
        return sorted({network for _, network in self.plans})

    def joins(self, other: "Use") -> bool:
        """Returns whether a line for more tokens says the same: an all-reduce, or nothing."""
        known = self.method()
        return (
            (self.data, self.networks(), known, self.verdict())
            == (other.data, other.networks(), other.method(), other.verdict())
            and (known == NOT_MEASURED or scheme_named(known).kind == "mean")
        )  # fmt: skip


def cluster_at(network: float, workers: int) -> Cluster:
    """Makes a cluster whose float32 mean of gradients takes so many times as long as a second of computing.

    Args:
      network: that ratio.
      workers: how many.

    Example:
      >>> cluster_at(10, 8).num_workers
      8
    """
    free = Cluster(workers, Link(math.inf, 0.0, EXACT), memory_bandwidth=math.inf)
    return free.at(step_time(FLOAT32, SIZE, free).link_bits / network)


def what_to_use() -> list[Use]:
    """Finds the method to use by data, noise and network; what has the same answer is one line.

    Example:
      >>> sorted({row.data for row in what_to_use()})
      ['alike', 'different']
    """
    rows: list[Use] = []
    for data in DATA:
        for tokens in TOKENS:
            for one in _by_network(data, tokens):
                same = next((row for row in rows if row.joins(one)), None)
                if same:
                    same.tokens.append(tokens)
                    same.plans.update(one.plans)
                else:
                    rows.append(one)
    return rows


def _by_network(data: str, tokens: int) -> list[Use]:
    """A line for each answer, of the fastest networks first."""
    workers = _workers(tokens, data)
    rows = [Use(data, [tokens], {})]
    for network in NETWORKS if workers else ():
        at = cluster_at(network, workers)
        one = plan(SIZE, at, 1.0, tokens=tokens, data=data)
        last = rows[-1].verdict(), rows[-1].method()
        if rows[-1].plans and last != (one.verdict(), one.use()):
            rows.append(Use(data, [tokens], {}))
        rows[-1].plans[tokens, network] = one
    return rows


def _workers(tokens: int, data: str) -> int:
    """The number of workers of a measured setting: 8, or the nearest; 0 if there is none."""
    cells = [one for one in evidence.packaged().cells if (one.tokens, one.data) == (tokens, data)]
    return min(
        (one.num_workers for one in cells), key=lambda n: abs(math.log(n / WORKERS)), default=0
    )
