"""The model of a step: what every method sends, and how long that takes on a cluster.

    step = compute + local + communication + waiting
    communication = sum over collectives of (hops * latency + bits / bandwidth)

Bytes are those of `lioncub_jax.traffic.of`, which equal the compiled program's. All else is a model:
links are full duplex and not shared with others, nothing overlaps, and no worker is slower than others but
by chance, which all wait for (`Late`). What it leaves out is in docs/planner.md. Rates are in bits per
second, times in seconds, as `lioncub_jax.units` reads them.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lioncub_jax import checks, optimizer
from lioncub_jax.baselines.one_bit_adam import one_bit_adam
from lioncub_jax.baselines.powersgd import powersgd
from lioncub_jax.traffic import predicted as accounting
from lioncub_jax.traffic.predicted import Sent

# Hops of each collective, from those that it takes to pass data to all, and the participants.
_HOPS: dict[str, Callable[[int, int], int]] = {
    "all-reduce": lambda deep, n: 2 * deep,
    "all-gather": lambda deep, n: deep,
    "reduce-scatter": lambda deep, n: deep,
    "all-to-all": lambda deep, n: min(n - 1, 1),  # direct: all messages are on their way at once
}


@dataclasses.dataclass(frozen=True)
class Link:
    """A full-duplex network link.

    Attributes:
      bandwidth: bits per second each way; ``math.inf`` for one without limit.
      latency: seconds from one end to the other, software included.

    Raises:
      ValueError: for a bandwidth that is not above zero, or a negative latency.

    Example:
      >>> Link(1e9, 50e-6).bandwidth
      1000000000.0
    """

    bandwidth: float
    latency: float = 50e-6

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth={self.bandwidth!r}: give bits per second, above zero")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency!r}: give seconds, zero or more")


@dataclasses.dataclass(frozen=True)
class Late:
    """How often a worker is late, by chance and alone: each step of each worker anew.

    Attributes:
      share: of a worker's steps, in [0, 1].
      seconds: by which it is late then.

    Raises:
      ValueError: for a share that is not from 0 to 1, or a time that is negative or not finite.

    Example:
      >>> Late(0.01, 2.0).waiting(workers=8)  # 2 s (1 - 0.99^8)
      0.15...
    """

    share: float
    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share!r}: give the part of steps, 0 to 1")
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds!r}: give seconds, zero or more")

    def waiting(self, workers: int, every: int = 1) -> float:
        """Seconds of a step, in the mean, that all are behind because they wait for the slowest.

        Of ``every`` steps a worker is late in ``n``, which is binomial, and all wait for the largest of W
        such: ``E[max n] = sum over j >= 0 of (1 - P(n <= j)^W)``.

        Args:
          workers: who wait for each other.
          every: steps of a worker for each exchange.

        Raises:
          ValueError: for fewer than one of them.
        """
        checks.check_count(f"workers={workers!r}", workers)
        checks.check_count(f"every={every!r}", every)
        chances = [
            math.comb(every, n) * self.share**n * (1 - self.share) ** (every - n)
            for n in range(every)
        ]
        most = sum(1 - min(sum(chances[: j + 1]), 1.0) ** workers for j in range(every))
        return self.seconds * most / every


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers and what connects them.

    Attributes:
      workers: how many.
      link: of a worker to all others; its devices share it (of several network cards, the sum).
      group_size: devices of one worker, which average their gradients first (``group_axis``).
      inside: link of each device to the others of its group; needed where ``group_size`` is above 1.
      on_cpu: whether JAX runs on CPUs, by Gloo: of each two workers only one sends to the other at a time,
        because a pair has one connection and "ready to receive" waits in it, so all-to-alls are slower;
        and bfloat16 is all-reduced as float32.
      all_to_all_share: of ``link``, what a worker gets when all send to all: below 1 where the middle of
        the network is narrow, as in a torus of chips.
      late: how often a worker is late, and by how much; nobody ever is by default.

    Raises:
      ValueError: for fewer than one worker or device, a group without a link, or a share that
        is not above 0 and at most 1.

    Example:
      >>> nodes = Cluster(8, Link(100e9, 20e-6), group_size=8, inside=Link(900e9, 5e-6))
    """

    workers: int
    link: Link
    group_size: int = 1
    inside: Link | None = None
    on_cpu: bool = False
    all_to_all_share: float = 1.0
    late: Late = Late(0.0, 0.0)

    def __post_init__(self) -> None:
        checks.check_count(f"workers={self.workers!r}", self.workers)
        checks.check_count(f"group_size={self.group_size!r}", self.group_size)
        if self.group_size > 1 and self.inside is None:
            raise ValueError(
                f"group_size={self.group_size} without inside: give the Link in a group"
            )
        if not 0 < self.all_to_all_share <= 1:
            given = self.all_to_all_share
            raise ValueError(f"all_to_all_share={given!r}: give a number above 0, at most 1")

    def at(self, bandwidth: float) -> "Cluster":
        """The same cluster with another bandwidth between workers."""
        return dataclasses.replace(self, link=dataclasses.replace(self.link, bandwidth=bandwidth))


@dataclasses.dataclass(frozen=True)
class Host:
    """What a worker itself spends in a step, besides the model's own computing.

    Attributes:
      memory_bandwidth: bits per second, for the estimate of packing, counting and unpacking: what is
        sent, the error feedback and a float32 for each parameter are written once and read once more
        than ``optax.lion`` does. That is an upper estimate: on CPU less was measured.
      local_seconds: measured seconds by the name of a scheme, in place of that estimate; may be
        negative, because voting can take less than ``optax.lion``, whose cost counts as zero.

    Raises:
      ValueError: for a memory bandwidth that is not above zero.
    """

    memory_bandwidth: float = 800e9
    local_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.memory_bandwidth > 0:
            given = self.memory_bandwidth
            raise ValueError(f"memory_bandwidth={given!r}: give bits per second, above zero")


class Scheme(NamedTuple):
    """A method that users can choose.

    Attributes:
      name: for people, and the key of ``Host.local_seconds``.
      code: how it is written in a program, without ``lioncub_jax.``.
      learns: its name in the evidence, where it was seen how many steps it takes.
      make: makes its transform, whose bytes these are, of the ``axis_name`` and a ``group_axis``.
      packs: bytes of memory of each parameter that packing, counting and unpacking pass through: a float32,
        and error feedback; 0 for who does none of that.
      every: steps of a worker for each exchange; bytes and times are shared out among them.
      in_float32: share of all steps that all-reduce float32 gradients instead.
      mean: whether it is the mean of gradients that others are compared with.
    """

    name: str
    code: str
    learns: str
    make: functools.partial[optax.GradientTransformation]
    packs: int = 0
    every: int = 1
    in_float32: float = 0.0
    mean: bool = False


def _mean(name: str, code: str, learns: str, dtype: Any = jnp.float32) -> Scheme:
    """The inner optimizer does not matter to what is sent."""
    make = functools.partial(optimizer.global_gradients, optax.identity(), dtype=dtype)
    return Scheme(name, code, learns, make, mean=True)


def _powersgd(rank: int, bits: int | None, learns: str) -> Scheme:
    name = f"PowerSGD, rank {rank}" if bits is None else f"PowerSGD {rank}, {bits} bits"
    told = "" if bits is None else f", {bits}"
    make = functools.partial(powersgd, optax.identity(), rank, bits)
    return Scheme(name, f"baselines.powersgd(optax.adamw(...), {rank}{told})", learns, make, 8)


def _alone(how: str, shared: str, learns: str, make: Any, packs: int = 0) -> Scheme:
    """Two steps that a worker takes alone, by AdamW, and what is shared then."""
    code = f"make_train_step(..., {shared}, local_steps=2, local=optax.adamw(...))"
    return Scheme(f"2 alone, {how}", code, learns, make, packs, 2)


_CODES = functools.partial(optimizer.coded_gradients, optax.identity())
WARMUP = 0.15  # of 1-bit Adam's steps, in float32: its paper takes 15 to 25 %

OURS: tuple[Scheme, ...] = (
    Scheme("1-bit vote", "lion_cub(...)", "vote", functools.partial(optimizer.lion_cub, 1.0), 4),
    Scheme(
        "owner, 3 bits", "owner_lion(...)", "owner-3",
        functools.partial(optimizer.owner_lion, 1.0), 6,
    ),
    Scheme("AdamW, 4 bits", "coded_gradients(optax.adamw(...))", "adamw-4", _CODES, 8),
    _alone("4 bits", "coded_gradients(optax.sgd(1.0))", "alone-2-4", _CODES, 8),
    _powersgd(4, 6, "powersgd-adamw-6"),
    _alone(
        "PowerSGD", "baselines.powersgd(optax.sgd(1.0), 16, 6)", "alone-2-powersgd-16-6",
        functools.partial(powersgd, optax.identity(), 16, 6), 8,
    ),
)  # fmt: skip

# What a bfloat16 mean does to learning was not measured: it is taken to be nothing.
FLOAT32 = _mean("float32 Lion", "global_gradients(optax.lion(...))", "lion")
PEERS: tuple[Scheme, ...] = (
    FLOAT32,
    _mean(
        "bfloat16 Lion", "global_gradients(optax.lion(...), dtype=jnp.bfloat16)", "lion",
        jnp.bfloat16,
    ),
    _mean("float32 AdamW", "baselines.adamw(...)", "adamw"),
    _mean("bfloat16 AdamW", "baselines.adamw(dtype=jnp.bfloat16)", "adamw", jnp.bfloat16),
    _powersgd(4, None, "powersgd-adamw"),
    _powersgd(16, None, "powersgd-adamw-16"),
    Scheme(
        "1-bit Adam", "baselines.one_bit_adam(warmup=...)", "one-bit-adam",
        functools.partial(one_bit_adam, 1.0, warmup=1), 8, in_float32=WARMUP,
    ),
    _alone("float32", "global_gradients(optax.sgd(1.0))", "alone-2", FLOAT32.make),
)  # fmt: skip
SCHEMES = (*OURS, *PEERS)


def scheme_named(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
      ValueError: if there is none.

    Example:
      >>> scheme_named("1-bit vote").code
      'lion_cub(...)'
    """
    every = {one.name: one for one in SCHEMES}
    if name not in every:
        raise ValueError(f"scheme {name!r}: give one of {', '.join(every)}")
    return every[name]


def _sent(scheme: Scheme, params: Any, at: Cluster) -> list[Sent]:
    """The collectives of an exchange, per device."""
    grouped = at.group_size > 1
    if scheme.make.func is powersgd and not any(x.ndim > 1 for x in jax.tree.leaves(params)):
        raise ValueError(
            "its bytes depend on the shapes of matrices, and none are known: give a model's shapes "
            "(--model FILE.py:NAME) in place of a number of parameters"
        )
    if grouped and not scheme.mean:
        if "group_axis" not in inspect.signature(scheme.make).parameters:
            raise ValueError(
                "it has no two levels: each device is a worker, or they share one by an inner mesh axis"
            )
        tx = scheme.make(axis_name="workers", group_axis="group")
        found = accounting.of(tx, params, at.workers, group_size=at.group_size).collectives
    else:
        found = _flat(scheme, params, at.workers, at)
        if grouped:
            found = _in_slices(found, _flat(scheme, params, at.group_size, at), at.group_size)
    return [one for one in found if one.sent_bytes]


def _flat(scheme: Scheme, params: Any, workers: int, at: Cluster) -> tuple[Sent, ...]:
    platform = "cpu" if at.on_cpu else None
    tx = scheme.make(axis_name="workers")
    return accounting.of(tx, params, workers, platform=platform).collectives


def _in_slices(
    across: tuple[Sent, ...], inside: tuple[Sent, ...], devices: int
) -> tuple[Sent, ...]:
    """An all-reduce in groups: each device reduces a slice across workers, between two halves inside."""
    halves = [one.sent_bytes / 2 for one in inside]
    return (
        *(Sent("reduce-scatter", True, half) for half in halves),
        *(Sent("all-reduce", False, one.sent_bytes / devices) for one in across),
        *(Sent("all-gather", True, half) for half in halves),
    )


class Estimate(NamedTuple):
    """What a step takes by one scheme; the mean step where not all are alike.

    Attributes:
      scheme: its name.
      sent_bytes: what a worker, all of its devices together, sends to other workers.
      inside_bytes: what each device sends inside its group.
      communication: seconds in collectives.
      local: seconds of packing, counting and unpacking.
      waiting: seconds for workers that are late.
      step: seconds of the whole step, compute included.
      link_bits: what each link between workers carries, one bit after the other.
      unlimited: seconds of the whole step if these links were as fast as can be.
    """

    scheme: str
    sent_bytes: float
    inside_bytes: float
    communication: float
    local: float
    waiting: float
    step: float
    link_bits: float
    unlimited: float


class Pays(NamedTuple):
    """The bandwidths between which a scheme is faster than another.

    Attributes:
      above: bits per second; 0 if there is no lower bound.
      below: bits per second; ``math.inf`` if there is no upper bound, 0 if it never pays.
    """

    above: float
    below: float


def parameters_in(params: Any) -> int:
    """How many elements a tree of shapes has; a number stands for itself.

    Example:
      >>> parameters_in(7_000_000_000)
      7000000000
    """
    return params if isinstance(params, int) else sum(x.size for x in jax.tree.leaves(params))


def _tree(params: Any) -> Any:
    if not isinstance(params, int):
        return params
    checks.check_count(f"params={params!r}", params)
    return {"params": jax.ShapeDtypeStruct((params,), jnp.float32)}


def step_time(
    scheme: Scheme, params: Any, cluster: Cluster, compute: float, host: Host | None = None
) -> Estimate:
    """Models a step by one scheme.

    Args:
      scheme: one of ``SCHEMES``.
      params: a tree of arrays or ``jax.ShapeDtypeStruct``, or how many parameters there are.
      cluster: workers and links.
      compute: seconds of a device's own forward and backward pass and update.
      host: what a worker spends besides; the defaults of ``Host`` if None.

    Returns:
      An ``Estimate``.

    Raises:
      ValueError: where the scheme does not work with so many workers or in groups; for a compute
        time below zero.

    Example:
      >>> slow = Cluster(8, Link(1e9, 50e-6))
      >>> vote = step_time(scheme_named("1-bit vote"), 124_000_000, slow, 0.144)
      >>> dense = step_time(FLOAT32, 124_000_000, slow, 0.144)
      >>> round(dense.step / vote.step, 1)
      19.0

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", 2005, for the terms of latency and bandwidth.
    """
    if not 0 <= compute < math.inf:
        raise ValueError(f"compute={compute!r}: give seconds, zero or more")
    host, tree = host or Host(), _tree(params)
    own = _sent(scheme, tree, cluster)
    dense = _sent(FLOAT32, tree, cluster) if scheme.in_float32 else []
    usual = (1 - scheme.in_float32) / scheme.every  # the share of steps that have its own exchange
    sent = [(usual, one) for one in own] + [(scheme.in_float32, one) for one in dense]
    link_bits = 8 * sum(share * _carried(one, cluster) for share, one in sent if not one.inside)
    beside = sum(share * _beside_the_link(one, cluster) for share, one in sent)
    local = host.local_seconds.get(scheme.name)
    if local is None:
        packed = sum(one.sent_bytes for one in own if one.op != "reduce-scatter")
        unpacked = scheme.packs * parameters_in(params) / cluster.group_size
        packs = usual if own and scheme.packs else 0.0
        local = packs * 8 * 2 * (packed + unpacked) / host.memory_bandwidth
    waiting = cluster.late.waiting(cluster.workers, scheme.every)
    unlimited, carrying = compute + local + waiting + beside, link_bits / cluster.link.bandwidth
    return Estimate(
        scheme.name,
        cluster.group_size * sum(share * one.sent_bytes for share, one in sent if not one.inside),
        sum(share * one.sent_bytes for share, one in sent if one.inside),
        beside + carrying,
        local,
        waiting,
        unlimited + carrying,
        link_bits,
        unlimited,
    )


def _beside_the_link(one: Sent, cluster: Cluster) -> float:
    """Seconds that a collective takes on links as fast as can be, between workers."""
    participants, link, carried = cluster.workers, cluster.link, 0.0
    if one.inside:
        assert cluster.inside is not None
        participants, link = cluster.group_size, cluster.inside
        carried = 8 * one.sent_bytes / link.bandwidth
    deep = (participants - 1).bit_length()  # of trees, and recursive doubling, as of NCCL and MPI
    return _HOPS[one.op](deep, participants) * link.latency + carried


def _carried(one: Sent, cluster: Cluster) -> float:
    """Bytes that a worker's link carries; more where it cannot carry at its full rate."""
    sent = one.sent_bytes * cluster.group_size  # all its devices use it at once
    if one.op != "all-to-all":
        return sent
    rounds = _rounds_of_one_way_pairs(cluster.workers) if cluster.on_cpu else 1.0
    return rounds * sent / cluster.all_to_all_share


def _rounds_of_one_way_pairs(n: int) -> float:
    """How much longer an all-to-all takes: half of the messages go first, an odd one is left over."""
    return 2 * math.ceil((n - 1) / 2) / (n - 1)


def pays(ours: Estimate, theirs: Estimate, speedup: float = 1.0) -> Pays:
    """The bandwidths at which a step is ``speedup`` times as fast as another's.

    A step takes ``a + b / bandwidth`` seconds, so one is ``speedup`` times the other at one bandwidth at
    most. Break-even, ``speedup=1``, does not depend on the compute time.

    Args:
      ours: the one, by `step_time`; its bandwidth between workers does not matter.
      theirs: the other, in the same cluster.
      speedup: how many times as fast.

    Returns:
      A ``Pays``: faster where ``above < bandwidth < below``.

    Example:
      >>> at = Cluster(8, Link(1e9, 50e-6))
      >>> vote = step_time(scheme_named("1-bit vote"), 10**9, at, 0.0)
      >>> round(pays(vote, step_time(FLOAT32, 10**9, at, 0.0)).below / 1e9)  # Gbit/s
      643
    """
    # What is gained with each second that a bit takes, and what is lost whatever the bandwidth.
    gained = theirs.link_bits - speedup * ours.link_bits
    lost = speedup * ours.unlimited - theirs.unlimited
    if gained > 0:
        return Pays(0.0, gained / lost if lost > 0 else math.inf)
    if lost < 0:
        return Pays(abs(gained / lost), math.inf)
    return Pays(0.0, 0.0)


def calibrated(
    measured: Mapping[str, float],
    params: Any,
    cluster: Cluster,
    compute: float,
    host: Host | None = None,
) -> Host:
    """Sets what a worker spends such that the model gives the steps that were measured.

    Args:
      measured: seconds of a step by the name of a scheme, on a network as fast as can be.
      params: as `step_time`.
      cluster: that network; what the model says it takes is not counted again.
      compute: as `step_time`.
      host: what else is known.

    Returns:
      A ``Host`` with ``local_seconds`` of those schemes.

    Example:
      >>> here = Cluster(4, Link(math.inf, 0.0))
      >>> calibrated({"1-bit vote": 0.125}, 10**6, here, 0.0625).local_seconds
      {'1-bit vote': 0.0625}
    """
    host = host or Host()
    free = dataclasses.replace(host, local_seconds=dict.fromkeys(measured, 0.0))
    spent = {
        name: seconds - step_time(scheme_named(name), params, cluster, compute, free).step
        for name, seconds in measured.items()
    }
    return dataclasses.replace(host, local_seconds={**host.local_seconds, **spent})
