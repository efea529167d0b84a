"""One small table of what to use: from the evidence alone, and the same that `plan` says.

One number stands for a network: the time of a float32 mean of gradients over that of computing a step.
There is no latency and no packing in it, and the model is a number of parameters.
"""

import math
from typing import NamedTuple

from lioncub_jax.tools.plan import evidence
from lioncub_jax.tools.plan.evidence import DATA
from lioncub_jax.tools.plan.methods import FLOAT32
from lioncub_jax.tools.plan.model import EXACT, Cluster, Link, step_time
from lioncub_jax.tools.plan.report import NOT_MEASURED, Plan, plan

NETWORKS = (0.1, 1, 10, 100)
TOKENS = (32, 256, 2048)  # that a worker sees in a step
WORKERS = 8  # or the nearest that was measured
SIZE = 10_000_000  # parameters


class Use(NamedTuple):
    """A row: the method to use at one noise, on networks next to each other.

    Attributes:
      tokens: that a worker sees in a step.
      data: one of ``DATA``.
      plans: by the network; of none where nobody measured.
    """

    tokens: int
    data: str
    plans: dict[float, Plan]

    def method(self) -> str:
        """Names the scheme to use."""
        return next((one.use() for one in self.plans.values()), NOT_MEASURED)

    def verdict(self) -> str:
        """Returns what is advised."""
        return next((one.verdict() for one in self.plans.values()), NOT_MEASURED)


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
    """Finds the method to use by data, noise and network; networks that have the same answer are one row.

    Example:
      >>> sorted({row.data for row in what_to_use()})
      ['alike', 'different']
    """
    rows: list[Use] = []
    for data in DATA:
        for tokens in TOKENS:
            workers = _workers(tokens, data)
            rows.append(Use(tokens, data, {}))
            for network in NETWORKS if workers else ():
                at = cluster_at(network, workers)
                one = plan(SIZE, at, 1.0, tokens=tokens, data=data)
                last = rows[-1].verdict(), rows[-1].method()
                if rows[-1].plans and last != (one.verdict(), one.use()):
                    rows.append(Use(tokens, data, {}))
                rows[-1].plans[network] = one
    return rows


def _workers(tokens: int, data: str) -> int:
    """The number of workers of a measured setting: 8, or the nearest; 0 if there is none."""
    cells = [one for one in evidence.packaged().cells if (one.tokens, one.data) == (tokens, data)]
    return min(
        (one.num_workers for one in cells), key=lambda n: abs(math.log(n / WORKERS)), default=0
    )
