"""Time of a step: what a method sends, how long that takes on a cluster, and what a device keeps.

    step = every * compute + local + communication - overlap * min(compute, communication)
    communication = sum over collectives of (hops * latency + bits / (share * bandwidth))

A link reaches a share of its nominal rate, see `shares`. Where `lioncub probe` has measured the machines,
its times stand in place of the second line. docs/explain/planner.md says what the model leaves out. Rates
are in bits per second, times in seconds.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from lioncub_jax.exchange.arguments import check_count, check_number
from lioncub_jax.tools.plan.evidence import check_one_of, rows_of
from lioncub_jax.tools.plan.methods import Scheme

MODEL = 8  # bytes of a float32 parameter and its gradient
# How often a collective passes through a tree of all participants.
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
EXACT = "exact"  # a link that reaches its rate
NO_GROUP = (
    "it has no group=, which --devices-per-worker stands for; devices of one worker on an inner mesh axis "
    "work, and are not calculated here"
)


SHARES: list[dict[str, Any]] = rows_of("shares.json")
"""Published shares of nominal rates, by kind of network, with their sources."""


def kinds() -> list[str]:
    """Names the kinds of networks.

    Example:
      >>> kinds()[0]
      'tcp'
    """
    return [*dict.fromkeys(row["kind"] for row in SHARES), EXACT]


@dataclasses.dataclass(frozen=True)
class Link:
    """A full-duplex network link.

    Attributes:
      bandwidth: nominal bits per second each way, of the slower way if they differ; ``math.inf`` for one
        without limit.
      latency: seconds from one end to the other, one way, software included: half of a round trip.
      kind: of the network, one of `kinds`.

    Raises:
      ValueError: for a bandwidth that is not above zero, a negative latency, or another kind.

    Example:
      >>> Link(1e9, 50e-6).bandwidth
      1000000000.0
    """

    bandwidth: float
    latency: float = 50e-6
    kind: str = "tcp"

    def __post_init__(self) -> None:
        check_number(
            f"bandwidth={self.bandwidth!r}", self.bandwidth,
            lambda rate: rate > 0, "give bits per second, above zero",
        )  # fmt: skip
        check_number(
            f"latency={self.latency!r}", self.latency, lambda time: 0 <= time < math.inf,
            "give seconds, zero or more",
        )  # fmt: skip
        check_one_of("network", self.kind, kinds())

    def shares(self) -> tuple[float, float]:
        """Least and largest published share of the nominal rate on such links.

        Example:
          >>> Link(1e9, kind="exact").shares()
          (1.0, 1.0)
        """
        known = [row["share"] for row in self.known_shares()] or [1.0]
        return min(known), max(known)

    def limits(self) -> list[float]:
        """Lists the rates up to which such links reach the same shares; the last is infinite.

        Example:
          >>> Link(1e9).limits()
          [10000000000.0, 40000000000.0, inf]
        """
        rates = {row["up_to"] or math.inf for row in SHARES if row["kind"] == self.kind}
        return sorted(rates) or [math.inf]

    def known_shares(self) -> list[dict[str, Any]]:
        """Rows of ``SHARES`` of such links; none for an exact one."""
        own = self.kind, next(limit for limit in self.limits() if limit >= self.bandwidth)
        return [row for row in SHARES if (row["kind"], row["up_to"] or math.inf) == own]


class Measured(NamedTuple):
    """Measurement of machines by `lioncub probe`.

    Attributes:
      num_workers: how many workers.
      seconds: of collectives, ``{"all-reduce": [[bytes that a worker sends, seconds], ...]}``.
      memory_bandwidth: bits per second at which codes are packed and unpacked.
      nominal: bits per second of a worker's link, where they were given.
      compute: seconds of a step without its exchange; None, as what follows, where no step was given.
      step: seconds of a step.
      overlap: share of the shorter of computing and exchange that runs beside the other.
      slowdown: how many times as long as one message its many arrays take, if nothing overlaps; or 1.
      parameters: of the model of the step.
    """

    num_workers: int
    seconds: Mapping[str, Sequence[Sequence[float]]]
    memory_bandwidth: float
    nominal: float | None = None
    compute: float | None = None
    step: float | None = None
    overlap: float | None = None
    slowdown: float = 1.0
    parameters: int | None = None

    def time(self, op: str, sent: float) -> float:
        """Seconds of a collective, between and beyond what was measured."""
        points = self.seconds[op]
        place = min(max(bisect.bisect_left([size for size, _ in points], sent), 1), len(points) - 1)
        (low, fast), (high, slow) = points[place - 1 : place + 1]
        return fast + max((sent - low) / (high - low), 0.0) * (slow - fast)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers and what connects them.

    Attributes:
      num_workers: how many workers.
      link: of a worker to all others; its devices share it (of several network cards, the sum).
      group_size: devices of one worker, over which its model or its optimizer is cut.
      inside: link of each device to the others of its worker; needed where ``group_size`` is above 1.
      on_cpu: whether JAX runs on CPUs, by Gloo: of two workers only one sends to the other at a time, and
        bfloat16 is all-reduced as float32.
      all_to_all_share: of ``link``, what a worker gets when all send to all: below 1 where the middle of
        the network is narrow, as in a torus of chips.
      memory_bandwidth: of a device, bits per second, for packing, counting and unpacking; None for a guess.
      measured: by `lioncub probe` on these machines, in place of links and memory.

    Raises:
      ValueError: for fewer than one worker or device, a group without a link, a share that is not above 0
        and at most 1, a memory bandwidth that is not above zero, or a measurement of other workers.

    Example:
      >>> nodes = Cluster(8, Link(100e9, 20e-6), group_size=8, inside=Link(900e9, 5e-6))
    """

    num_workers: int
    link: Link
    group_size: int = 1
    inside: Link | None = None
    on_cpu: bool = False
    all_to_all_share: float = 1.0
    memory_bandwidth: float | None = None
    measured: Measured | None = None

    def __post_init__(self) -> None:
        check_count(f"num_workers={self.num_workers!r}", self.num_workers)
        check_count(f"group_size={self.group_size!r}", self.group_size)
        if self.group_size > 1 and self.inside is None:
            raise ValueError(
                f"{self.group_size} devices in a worker: give the Link between them, inside= "
                "(--inside-bandwidth)"
            )
        check_number(
            f"all_to_all_share={self.all_to_all_share!r}", self.all_to_all_share,
            lambda share: 0 < share <= 1, "give a number above 0, at most 1",
        )  # fmt: skip
        check_number(
            f"memory_bandwidth={self.memory_bandwidth!r}", self.memory,
            lambda rate: rate > 0, "give bits per second, above zero",
        )  # fmt: skip
        if self.measured and self.measured.num_workers != self.num_workers:
            raise ValueError(
                f"num_workers={self.num_workers}, and {self.measured.num_workers} were measured: run "
                "lioncub probe with as many workers as the training will have"
            )

    @property
    def memory(self) -> float:
        """Bits per second, as given, or those of a server's processor or a slow GPU."""
        guess = 100e9 if self.on_cpu else 800e9  # bytes
        return 8 * guess if self.memory_bandwidth is None else self.memory_bandwidth

    def at(self, bandwidth: float) -> "Cluster":
        """Returns the same cluster with another bandwidth between workers."""
        return dataclasses.replace(self, link=dataclasses.replace(self.link, bandwidth=bandwidth))

    def shares(self) -> tuple[float, float]:
        """Least and largest share of the link's rate; 1 where times were measured."""
        return (1.0, 1.0) if self.measured else self.link.shares()


class Estimate(NamedTuple):
    """An exchange by one scheme and the steps of a worker that belong to it.

    Attributes:
      sent_bytes: what a worker, all of its devices together, sends to others, in the mean of its steps.
      state_bytes: of the optimizer's state on a device.
      every: steps of a worker for each exchange.
      local: seconds of packing, counting and unpacking in an exchange.
      fixed: seconds in collectives whatever the rate between workers.
      link_bits: what each link between workers carries in an exchange, one bit after the other.
      bandwidth: nominal bits per second of these links.
    """

    sent_bytes: float
    state_bytes: float
    every: int
    local: float
    fixed: float
    link_bits: float
    bandwidth: float

    def communication(self, share: float = 1.0) -> float:
        """Seconds in collectives in an exchange, on links that reach a share of their rate."""
        return self.fixed + self.link_bits / (self.bandwidth * share)

    def step(
        self, compute: float, share: float = 1.0, overlap: float = 0.0, accumulate: int = 1
    ) -> float:
        """Seconds of each step of a worker of so many seconds of computing, in the mean.

        Args:
          compute: seconds of a step without exchange.
          share: of the nominal rate.
          overlap: share of the shorter of computing and exchange that runs beside the other.
          accumulate: times as many steps for each exchange.
        """
        steps, takes = self.every * accumulate, self.communication(share)
        hidden = overlap * min(compute, takes)
        return compute + (self.local + takes - hidden) / steps


def parameters_in(params: optax.Params | int) -> int:
    """Counts the elements of a tree of shapes; a number stands for itself.

    Example:
      >>> parameters_in(7_000_000_000)
      7000000000
    """
    if not isinstance(params, int | float):
        return sum(x.size for x in jax.tree.leaves(params))
    check_count(f"params={params!r}", params)
    return int(params)


def step_time(scheme: Scheme, params: optax.Params | int, cluster: Cluster) -> Estimate:
    """Models an exchange by one scheme.

    Args:
      scheme: one of ``SCHEMES``.
      params: a tree of arrays or ``jax.ShapeDtypeStruct``, or how many parameters there are.
      cluster: workers, links and memory.

    Returns:
      An ``Estimate``.

    Raises:
      ValueError: where the scheme does not work in groups.

    Example:
      >>> from lioncub_jax.tools.plan import scheme_named
      >>> slow = Cluster(8, Link(1e9, 50e-6, "exact"))
      >>> vote, dense = (
      ...     step_time(scheme_named(name), 124_000_000, slow) for name in ("vote", "adamw")
      ... )
      >>> round(dense.step(0.144) / vote.step(0.144))
      19

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", 2005, for the terms of latency and bandwidth.
    """
    size, group = parameters_in(params), cluster.group_size
    if group > 1 and not scheme.two_levels:
        raise ValueError(NO_GROUP)
    workers, measured, on_cpu = cluster.num_workers, cluster.measured, cluster.on_cpu
    # XLA for CPUs sends bfloat16 as float32, and reduces each array by itself; codes travel together.
    mean = 32 if scheme.mean == 16 and on_cpu and not measured else scheme.mean
    each = on_cpu and not measured and not scheme.packs
    messages = scheme.rounds * (len(jax.tree.leaves(params)) if each else 1)
    reduce = "all-reduce bfloat16" if mean == 16 and measured else "all-reduce"
    sent_bytes = fixed = link_bits = 0.0
    for op, bits in {reduce: 2 * mean, "all-to-all": scheme.up, "all-gather": scheme.back}.items():
        sent = bits * (workers - 1) / workers * size / 8  # by all devices, which share the link
        sent_bytes += sent
        if measured and sent:
            fixed += messages * measured.time(op, sent / messages)
        elif sent:
            fixed += messages * _hops(op, workers) * cluster.link.latency
            link_bits += 8 * sent * _slower(op, cluster)
    if measured and not scheme.packs:
        fixed *= measured.slowdown
    if cluster.inside and group > 1:
        rate = cluster.inside.bandwidth * math.prod(cluster.inside.shares()) ** 0.5
        for op, bits in {"reduce-scatter": mean or 32, "all-gather": mean or scheme.back}.items():
            sent = bits * (group - 1) / group * size / 8
            fixed += _hops(op, group) * cluster.inside.latency + 8 * sent / rate
    packed = (sent_bytes + scheme.packs * size) / group if scheme.packs and workers > 1 else 0.0
    memory = measured.memory_bandwidth if measured else cluster.memory
    return Estimate(
        sent_bytes=sent_bytes / scheme.every,
        state_bytes=state_bytes(scheme, size, cluster),
        every=scheme.every,
        local=8 * 2 * packed / memory,  # written once and read once
        fixed=fixed,
        link_bits=link_bits,
        bandwidth=cluster.link.bandwidth,
    )


def state_bytes(scheme: Scheme, parameters: int, cluster: Cluster) -> float:
    """Bytes of the optimizer's state on a device; the devices of a worker share them, by any axis."""
    return (scheme.each + scheme.shared / cluster.num_workers) * parameters / cluster.group_size


def _hops(op: str, participants: int) -> int:
    """Counts hops in trees, as of NCCL and MPI; the messages of an all-to-all go all at once."""
    deep = (participants - 1).bit_length()
    return min(deep, 1) if op == "all-to-all" else _PASSES[op] * deep


def _slower(op: str, at: Cluster) -> float:
    """Returns how many times as long as at the link's full rate a collective takes."""
    if op != "all-to-all":
        return 1.0
    messages = at.num_workers - 1
    # Half of them go first, an odd one is left over.
    rounds = 2 * math.ceil(messages / 2) / messages if at.on_cpu else 1.0
    return rounds / at.all_to_all_share
