"""Time of a step: what a method sends, how long that takes on a cluster, and what a device keeps.

    step = every * compute + local + communication - overlap * min(compute, communication)
    communication = sum over collectives of (hops * latency + bits / (share * bandwidth))

A link reaches a share of its nominal rate, see `shares`. Where `lioncub probe` has measured the machines,
its times stand in place of the second line. docs/explain/planner.md says what the model leaves out. Rates
are in bits per second, times in seconds.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lioncub_jax.exchange.checks import check_count, check_number
from lioncub_jax.tools.plan.evidence import Learned, check_one_of, rows_of
from lioncub_jax.tools.plan.methods import Scheme

MODEL = 8  # bytes of a float32 parameter and its gradient
SHARES: dict[str, list[dict[str, Any]]] = rows_of("shares.json")
"""Published shares of nominal rates, by kind of network and up to rates, with their sources."""
KINDS = [*SHARES, "exact"]
"""Kinds of networks."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A full-duplex network link.

    Attributes:
      bandwidth: nominal bits per second each way, of the slower way if they differ; ``math.inf`` for one
        without limit.
      latency: seconds from one end to the other, one way, software included: half of a round trip.
      kind: of the network, one of ``KINDS``.

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
            f"bandwidth={self.bandwidth!r}", self.bandwidth, lambda rate: rate > 0,
            "give bits per second, above zero",
        )  # fmt: skip
        check_number(
            f"latency={self.latency!r}", self.latency, lambda time: 0 <= time < math.inf,
            "give seconds, zero or more",
        )  # fmt: skip
        check_one_of("network", self.kind, KINDS)

    def shares(self) -> list[float]:
        """Published shares of the nominal rate on such links; an exact one reaches its rate.

        Example:
          >>> Link(1e9).shares(), Link(1e9, kind="exact").shares()
          ([0.95, 0.8], [1.0])
        """
        for limit in SHARES.get(self.kind, []):
            if self.bandwidth <= (limit["up_to"] or math.inf):
                return [one["share"] for one in limit["known"]]
        return [1.0]


class Measured(NamedTuple):
    """Measurement of machines by `lioncub probe`.

    Attributes:
      num_workers: how many workers.
      seconds: of collectives, ``{"all-reduce": [[bytes that a worker sends, seconds], ...]}``.
      memory_bandwidth: bits per second at which codes are packed and unpacked.
      compute: seconds of a step without its exchange; None, as what follows, where no step was given.
      overlap: share of the shorter of computing and a mean that runs beside the other; negative where the
        many arrays of the mean take longer than one message.
    """

    num_workers: int
    seconds: Mapping[str, Sequence[Sequence[float]]]
    memory_bandwidth: float
    compute: float | None = None
    overlap: float | None = None

    def time(self, op: str, sent: float) -> float:
        """Seconds of a collective, between and beyond what was measured."""
        sizes, seconds = zip(*self.seconds[op], strict=True)
        return float(np.interp(sent, sizes, seconds)) * max(sent / sizes[-1], 1.0)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers and what connects them.

    Attributes:
      num_workers: how many workers.
      link: of a worker to all others; its devices share it (of several network cards, the sum).
      group_size: devices of one worker, over which its model or its optimizer is cut.
      on_cpu: whether JAX runs on CPUs: XLA for CPUs all-reduces bfloat16 as float32 and overlaps nothing.
      all_to_all_share: of ``link``, what a worker gets when all send to all: below 1 where the middle of
        the network is narrow, as in a torus of chips.
      memory_bandwidth: of a device, bits per second, for packing, counting and unpacking; as of a slow GPU.
      measured: by `lioncub probe` on these machines, in place of links and memory.

    Raises:
      ValueError: for fewer than one worker or device, a share that is not above 0 and at most 1, or a
        measurement of other workers.

    Example:
      >>> nodes = Cluster(8, Link(100e9, 20e-6), group_size=8)
    """

    num_workers: int
    link: Link
    group_size: int = 1
    on_cpu: bool = False
    all_to_all_share: float = 1.0
    memory_bandwidth: float = 8 * 800e9
    measured: Measured | None = None

    def __post_init__(self) -> None:
        check_count(f"num_workers={self.num_workers!r}", self.num_workers)
        check_count(f"group_size={self.group_size!r}", self.group_size)
        check_number(
            f"all_to_all_share={self.all_to_all_share!r}", self.all_to_all_share,
            lambda share: 0 < share <= 1, "give a number above 0, at most 1",
        )  # fmt: skip
        if self.measured and self.measured.num_workers != self.num_workers:
            raise ValueError(
                f"num_workers={self.num_workers}, and {self.measured.num_workers} were measured: run "
                "lioncub probe with as many workers as the training will have"
            )

    def unknown(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns shares of the link's rate ``[3, 1]``, least to most, and overlaps of a mean ``[3]``."""
        known = [1.0] if self.measured else self.link.shares()
        low, high, least, most = min(known), max(known), 0.0, 0.0 if self.on_cpu else 1.0
        if self.measured and self.measured.overlap is not None:
            least = most = self.measured.overlap
        shares = np.array([[low], [math.sqrt(low * high)], [high]])
        return shares, np.array([least, (least + most) / 2, most])


def _named(about: str, source: str, link: Any, **of: Any) -> Cluster:
    """A cluster of clusters.json, which also says what it is, and where its rates are from.

    Rates are those that vendors state, each way: half of what they state for both ways. Links are ``[bits
    per second, seconds, kind]``. Latencies are assumed, for no vendor states any: 1 us between chips of a
    TPU slice, 5 us over NVLink, 20 us between nodes whose cards read a GPU's memory, 50 us over TCP and
    data centre networks.
    """
    return Cluster(link=Link(*link), **of)


CLUSTERS = {name: _named(**row) for name, row in rows_of("clusters.json").items()}
"""Machines that have a name."""


class Row(NamedTuple):
    """A method on a cluster: an exchange, and the steps of a worker that belong to it.

    Attributes:
      scheme: what it is.
      sent_bytes: what a worker, all of its devices together, sends to others, in the mean of its steps.
      local: seconds of packing, counting and unpacking in an exchange.
      fixed: seconds in collectives whatever the rate between workers.
      link_seconds: that the bits of an exchange take on each link between workers, at its nominal rate.
      held_bytes: of parameters, gradients and the optimizer's state on a device, all in float32.
      learned: how it learns; None for what was not measured.
      orthogonalising: seconds of Muon's iterations in a step, ``[3, 1]``, most to least.
    """

    scheme: Scheme
    sent_bytes: float
    local: float
    fixed: float
    link_seconds: float
    held_bytes: float
    learned: Learned | None = None
    orthogonalising: Any = 0.0

    @property
    def ratio(self) -> float:
        """Tokens to the loss over AdamW's; infinite for what was not measured or not seen to get there."""
        return (self.learned and self.learned.ratio) or math.inf

    def communication(self, share: Any = 1.0) -> Any:
        """Seconds in collectives in an exchange, on links that reach a share of their rate."""
        return self.fixed + self.link_seconds / share

    def step(self, compute: float, share: Any = 1.0, overlap: Any = 0.0) -> Any:
        """Seconds of each step of a worker of so many seconds of computing, in the mean.

        Args:
          compute: seconds of a step without exchange.
          share: of the nominal rate.
          overlap: share of the shorter of computing and a mean that runs beside the other.
        """
        takes = self.communication(share)
        hidden = overlap * np.minimum(compute, takes) * (self.scheme.kind == "mean")
        return compute + (self.local + takes - hidden) / self.scheme.every


def step_time(scheme: Scheme, parameters: int, cluster: Cluster) -> Row:
    """Models an exchange by one scheme.

    Args:
      scheme: one of ``SCHEMES``.
      parameters: how many there are.
      cluster: workers, links and memory.

    Returns:
      A ``Row``.

    Raises:
      ValueError: for no parameters.

    Example:
      >>> from lioncub_jax.tools.plan import SCHEMES
      >>> slow = Cluster(8, Link(1e9, 50e-6, "exact"))
      >>> vote, dense = (step_time(SCHEMES[name], 124_000_000, slow) for name in ("vote", "adamw"))
      >>> round(dense.step(0.144) / vote.step(0.144))
      19

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", 2005, for the terms of latency and bandwidth.
    """
    check_count(f"parameters={parameters!r}", parameters)
    workers, measured = cluster.num_workers, cluster.measured
    mean = 32 if scheme.mean == 16 and cluster.on_cpu else scheme.mean
    reduce = "all-reduce bfloat16" if mean == 16 else "all-reduce"
    deep = (workers - 1).bit_length()  # hops in trees, as of NCCL and MPI
    hops = {reduce: 2 * deep, "all-to-all": min(deep, 1), "all-gather": deep}
    sent_bytes = fixed = link_seconds = 0.0
    for op, bits in {reduce: 2 * mean, "all-to-all": scheme.up, "all-gather": scheme.back}.items():
        sent = (
            bits * (workers - 1) / workers * parameters / 8
        )  # by all devices, which share the link
        sent_bytes += sent
        if measured and sent:
            fixed += scheme.rounds * measured.time(op, sent / scheme.rounds)
        elif sent:
            fixed += scheme.rounds * hops[op] * cluster.link.latency
            narrow = cluster.all_to_all_share if op == "all-to-all" else 1.0
            link_seconds += 8 * sent / narrow / cluster.link.bandwidth
    packed = 0.0
    if scheme.packs and workers > 1:
        packed = (sent_bytes + scheme.packs * parameters) / cluster.group_size
    memory = measured.memory_bandwidth if measured else cluster.memory_bandwidth
    local = 8 * 2 * packed / memory  # written once and read once
    # The devices of a worker share what is held, by any axis.
    state = scheme.each + scheme.shared / workers
    held = (MODEL + state) * parameters / cluster.group_size
    sent_bytes /= scheme.every
    return Row(scheme, sent_bytes, local, fixed, link_seconds, held)


def orthogonalising(parameters: int, tokens: int, num_owners: int) -> np.ndarray:
    """What one of the owners of Muon computes in an update, over the computing of a step: ``[3, 1]``.

    The most comes first, the least last. Where all workers compute the same, each is the one owner.

    Five steps of Newton-Schulz on a matrix of s by l, s <= l, are 5 (4 s^2 l + 2 s^3) operations: 30 s for
    each parameter of a square, and 22.5 s where l = 4 s. A step is 6 operations a parameter and token. Of a
    transformer of width w all parameters, or two thirds, are in w / 128, or w / 64, layers of 12 w^2.

    Example:
      >>> orthogonalising(124_000_000, 2048, 8).round(2).ravel().tolist()
      [0.33, 0.2, 0.12]
    """
    per_token = []
    for share, layers, operations in ((1.0, 128, 30.0), (2 / 3, 64, 22.5)):
        width = (share * parameters * layers / 12) ** (1 / 3)
        per_token.append(share * operations * width / 6)
    most, least = per_token
    return np.array([[most], [math.sqrt(most * least)], [least]]) / (tokens * num_owners)
