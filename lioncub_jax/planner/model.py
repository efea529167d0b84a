"""The model of a step: what every method sends, and how long that takes on a cluster.

    step = compute + local + communication + waiting
    communication = sum over collectives of (hops * latency + bits / bandwidth + bytes * software cost)

Bytes are those of `lioncub_jax.traffic.predict`, which equal the compiled program's. All else is a model:
links are full duplex and not shared with others, nothing overlaps, and no worker is slower than others but
by chance, which all wait for (`Late`). What it leaves out is in docs/planner.md. Rates are in bits per
second, times in seconds, as `lioncub_jax.units` reads them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lioncub_jax import checks, decide, quantize, wires
from lioncub_jax.baselines.powersgd import powersgd
from lioncub_jax.traffic import predicted as accounting
from lioncub_jax.traffic.predicted import Sent


def ring(participants: int) -> int:
    """Hops of a ring, as Gloo and large messages on few GPUs use it: each to its neighbour in turn."""
    return participants - 1


def tree(participants: int) -> int:
    """Hops of trees and recursive doubling, as NCCL and MPI use for many participants."""
    return (participants - 1).bit_length()


# Hops of each collective, from the hops that it takes to pass data to all, and the participants.
_HOPS: dict[str, Callable[[int, int], int]] = {
    "all-reduce": lambda hops, n: 2 * hops,
    "all-gather": lambda hops, n: hops,
    "reduce-scatter": lambda hops, n: hops,
    "all-to-all": lambda hops, n: min(n - 1, 1),  # direct: all messages are on their way at once
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
      hops: ``participants -> hops`` of the algorithm of reductions and gathers: ``tree`` or ``ring``.
      one_way_pairs: whether of each two workers only one sends to the other at a time, as under Gloo in
        JAX, where a pair has one connection and "ready to receive" waits in it. All-to-alls are
        slower then.
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
    hops: Callable[[int], int] = tree
    one_way_pairs: bool = False
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
      seconds_per_byte: software cost of each byte sent, by collective ("all-to-all", "all-gather",
        "all-reduce", "reduce-scatter"); zero where it is not given.
      widens_bfloat16: whether bfloat16 is all-reduced as float32, as XLA does on CPU.

    Raises:
      ValueError: for a memory bandwidth that is not above zero, or an unknown collective.
    """

    memory_bandwidth: float = 800e9
    local_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds_per_byte: Mapping[str, float] = dataclasses.field(default_factory=dict)
    widens_bfloat16: bool = False

    def __post_init__(self) -> None:
        if not self.memory_bandwidth > 0:
            given = self.memory_bandwidth
            raise ValueError(f"memory_bandwidth={given!r}: give bits per second, above zero")
        if unknown := set(self.seconds_per_byte) - set(_HOPS):
            raise ValueError(f"seconds_per_byte of {sorted(unknown)}: give {sorted(_HOPS)}")


class Scheme(NamedTuple):
    """A method that users can choose.

    Attributes:
      name: for people, and the key of ``Host.local_seconds``.
      code: how it is written in a program, without ``lioncub_jax.``.
      parts: what `lioncub_jax.traffic.predict` takes; empty for a method that is no vote.
      sends: ``(parts, params, Cluster, Host) -> collectives`` of an exchange, per device.
      packs: whether the worker has packing, counting and unpacking to do.
      learns: its name in the study, where it was seen how many steps it takes; empty for a bound.
      every: steps of a worker for each exchange; bytes and times are shared out among them.
      in_float32: share of all steps that all-reduce float32 gradients instead.
    """

    name: str
    code: str
    parts: Mapping[str, Any]
    sends: Callable[[Mapping[str, Any], Any, Cluster, Host], tuple[Sent, ...]]
    packs: bool = True
    learns: str = ""
    every: int = 1
    in_float32: float = 0.0


def _predicted(parts: Mapping[str, Any], params: Any, at: Cluster, host: Host) -> tuple[Sent, ...]:
    if at.group_size > 1:
        checks.check_group("group", "data", parts.get("up", quantize.sign()))
    traffic = accounting.predict(params, at.workers, group_size=at.group_size, **parts)
    return traffic.collectives


def _averaged(itemsize: int) -> Callable[..., tuple[Sent, ...]]:
    """An all-reduce of gradients; in groups each device reduces a slice of them across workers."""

    def sends(parts: Mapping[str, Any], params: Any, at: Cluster, host: Host) -> tuple[Sent, ...]:
        wide = 4 if host.widens_bfloat16 else itemsize
        size = parameters_in(params) * wide / 4  # in float32s
        inside = (at.group_size - 1) * 4 * size / at.group_size
        across = accounting.float32_all_reduce_bytes(size, at.workers) / at.group_size
        steps = (
            Sent("reduce-scatter", True, inside),
            Sent("all-reduce", False, across),
            Sent("all-gather", True, inside),
        )
        return tuple(one for one in steps if one.sent_bytes)

    return sends


def _nothing(parts: Mapping[str, Any], params: Any, at: Cluster, host: Host) -> tuple[Sent, ...]:
    return ()


def _one_level(name: str, at: Cluster) -> None:
    if at.group_size > 1:
        raise ValueError(
            f"there are no two levels with {name}: each device is a worker, or they share one by an inner "
            "mesh axis"
        )


def _thin_factors(
    parts: Mapping[str, Any], params: Any, at: Cluster, host: Host
) -> tuple[Sent, ...]:
    """PowerSGD's two exchanges, of floats or codes."""
    _one_level("PowerSGD", at)
    if not any(len(leaf.shape) > 1 for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "its bytes depend on the shapes of matrices, and none are known: give a model's shapes "
            "(--model FILE.py:NAME) in place of a number of parameters"
        )
    tx = powersgd(optax.identity(), parts["rank"], parts.get("bits"), axis_name="workers")
    return accounting.of(tx, params, at.workers).collectives


def _differences(
    parts: Mapping[str, Any], params: Any, at: Cluster, host: Host
) -> tuple[Sent, ...]:
    """How far the workers came alone, in float32 or in codes with feedback both ways."""
    _one_level("local steps", at)
    return (_predicted if parts else _averaged(4))(parts, params, at, host)


_AT_OWNER = decide.momentum_at_owner(optax.scale_by_lion())


def _vote(name: str, code: str, learns: str, **parts: Any) -> Scheme:
    return Scheme(name, code, parts, _predicted, learns=learns)


def _owner(p: int) -> Scheme:
    up = quantize.error_feedback(quantize.midrise(p))
    code = "owner_lion(...)"
    if p != 3:
        code = f"owner_lion(quantizer=quantize.error_feedback(quantize.midrise({p})))"
    name = f"owner, {p} bit{'s' if p > 1 else ''}"
    return _vote(name, code, f"owner-{p}", up=up, owner=_AT_OWNER)


def _dense(name: str, code: str, itemsize: int, learns: str) -> Scheme:
    return Scheme(name, code, {}, _averaged(itemsize), False, learns)


FLOAT32 = _dense("float32 Lion", "global_gradients(optax.lion(...))", 4, "lion")
# What a bfloat16 mean does to learning was not measured: it is taken to be nothing.
BFLOAT16 = _dense(
    "bfloat16 Lion", "global_gradients(optax.lion(...), dtype=jnp.bfloat16)", 2, "lion"
)
SILENT = Scheme("no communication", "(a bound: nothing is sent)", {}, _nothing, False)

SCHEMES: tuple[Scheme, ...] = (
    _vote("1-bit vote", "lion_cub(...)", "vote"),
    _vote(
        "2-bit vote", "lion_cub(quantizer=quantize.midrise(2))", "vote-2",
        up=quantize.midrise(2),
    ),
    _vote(
        "4-bit vote", "lion_cub(quantizer=quantize.midrise(4))", "vote-4",
        up=quantize.midrise(4),
    ),
    _vote("average", "distributed_lion(average=True)", "average", down=decide.average()),
    _vote("ternary", "lion_cub(quantizer=quantize.ternary())", "ternary", up=quantize.ternary()),
    _vote("gathered", "lion_cub(wire=wires.gathered())", "vote", wire=wires.gathered()),
    _vote("int8 counts", "lion_cub(wire=wires.counts())", "vote", wire=wires.counts()),
    _vote(
        "integer(8) counts", "lion_cub(quantizer=quantize.integer(8), wire=wires.counts())", "int8",
        up=quantize.integer(8), wire=wires.counts(),
    ),
    _vote("lanes", "lion_cub(wire=wires.lanes())", "vote", wire=wires.lanes()),
    _owner(1),
    _vote(
        "owner, 1 bit rotated",
        "owner_lion(quantizer=quantize.rotated_sign())",
        "owner-1-faded",
        up=quantize.rotated_sign(), owner=_AT_OWNER,
    ),
    _owner(2),
    _owner(3),
    BFLOAT16,
    FLOAT32,
    SILENT,
)  # fmt: skip

EVERY = 8  # steps of a worker between two exchanges of DiLoCo
WARMUP = 0.15  # of 1-bit Adam's steps, in float32: its paper takes 15 to 25 %


def _codes(p: int, down: Any) -> dict[str, Any]:
    """With feedback at worker and owner, in float32."""
    up = quantize.error_feedback(quantize.midrise(p), jnp.float32)
    return {"up": up, "owner": decide.feedback_at_owner(jnp.float32, p), "down": down}


def _power(rank: int, learns: str, bits: int | None = None) -> Scheme:
    told = "" if bits is None else f", {bits}"
    name = f"PowerSGD, rank {rank}" if bits is None else f"PowerSGD {rank}, {bits} bits"
    parts = {"rank": rank, "bits": bits, "error_dtype": jnp.float32}
    code = f"baselines.powersgd(optax.adamw(...), {rank}{told})"
    return Scheme(name, code, parts, _thin_factors, learns=learns)


def _alone(
    steps: int, how: str, shared: str, learns: str, parts: Mapping[str, Any], sends: Any = None
) -> Scheme:
    """Steps that a worker takes alone, by AdamW, and what is shared then."""
    code = f"make_train_step(..., {shared}, local_steps={steps}, local=optax.adamw(...))"
    name = f"{steps} alone, {how}"
    return Scheme(name, code, parts, sends or _differences, bool(parts), learns, steps)


def _diloco(how: str, bits: str, learns: str, parts: Mapping[str, Any]) -> Scheme:
    found = _alone(EVERY, how, f"baselines.diloco({bits})", learns, parts)
    return found._replace(name=f"DiLoCo {EVERY}, {how}")


# Other optimizers than Lion, in codes of this library.
OTHERS: tuple[Scheme, ...] = (
    Scheme(
        "AdamW, 4 bits", "coded_gradients(optax.adamw(...))", _codes(4, decide.scaled(4)), _predicted,
        learns="adamw-4",
    ),
    _alone(
        2, "4 bits", "coded_gradients(optax.sgd(1.0))", "alone-2-4", _codes(4, decide.scaled(4))
    ),
    _power(4, "powersgd-adamw-6", 6),
    _power(16, "powersgd-adamw-16-6", 6),
    _alone(
        2, "PowerSGD", "baselines.powersgd(optax.sgd(1.0), 16, 6)", "alone-2-powersgd-16-6",
        {"rank": 16, "bits": 6, "error_dtype": jnp.float32}, _thin_factors,
    ),
)  # fmt: skip

# What users take today where the network is slow. 0/1 Adam's steps in float32 are ever more rare: they are
# left out.
PEERS: tuple[Scheme, ...] = (
    _dense("float32 AdamW", "baselines.adamw(...)", 4, "adamw"),
    _dense("bfloat16 AdamW", "baselines.adamw(dtype=jnp.bfloat16)", 2, "adamw"),
    _power(4, "powersgd-adamw"),
    _power(16, "powersgd-adamw-16"),
    Scheme(
        "1-bit Adam", "baselines.one_bit_adam(warmup=...)", _codes(1, decide.scaled_signs()),
        _predicted, learns="one-bit-adam", in_float32=WARMUP,
    ),
    Scheme(
        "0/1 Adam", "baselines.zero_one_adam(...)", _codes(1, decide.scaled_signs()), _predicted,
        learns="zero-one-adam",
    ),
    _alone(2, "float32", "global_gradients(optax.sgd(1.0))", "alone-2", {}),
    _diloco("float32", "", "diloco", {}),
    _diloco("4 bits", "bits=4", "diloco-4", _codes(4, decide.scaled(4))),
    _diloco("1 bit", "bits=1", "diloco-1", _codes(1, decide.scaled(1))),
)  # fmt: skip

# What advice by the step alone chooses from, the closest to float32 Lion's loss first.
ADVISED = ("owner, 3 bits", "owner, 2 bits", "4-bit vote", "2-bit vote", "1-bit vote")


def scheme_named(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
      ValueError: if there is none.

    Example:
      >>> scheme_named("1-bit vote").code
      'lion_cub(...)'
    """
    every = {one.name: one for one in (*SCHEMES, *OTHERS, *PEERS)}
    if name not in every:
        raise ValueError(f"scheme {name!r}: give one of {', '.join(every)}")
    return every[name]


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
    """

    scheme: str
    sent_bytes: float
    inside_bytes: float
    communication: float
    local: float
    waiting: float
    step: float


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
      scheme: one of ``SCHEMES``, ``OTHERS`` or ``PEERS``.
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
    host = host or Host()
    sent = _in_a_step(scheme, params, cluster, host)
    communication = sum(share * _seconds(one, cluster, host) for share, one in sent)
    local = host.local_seconds.get(scheme.name)
    if local is None:
        local = _estimated_local(scheme, params, cluster, host)
    # Who sends nothing waits for nobody, and is as late as it is itself.
    waiting = cluster.late.waiting(cluster.workers if sent else 1, scheme.every)
    return Estimate(
        scheme.name,
        cluster.group_size * sum(share * one.sent_bytes for share, one in sent if not one.inside),
        sum(share * one.sent_bytes for share, one in sent if one.inside),
        communication,
        local,
        waiting,
        compute + local + communication + waiting,
    )


def _usual(scheme: Scheme) -> float:
    """The share of steps that have an exchange of its own kind."""
    return (1 - scheme.in_float32) / scheme.every


def _in_a_step(
    scheme: Scheme, params: Any, cluster: Cluster, host: Host
) -> list[tuple[float, Sent]]:
    """Collectives, each with the share of steps that have it."""
    kinds = [(_usual(scheme), scheme.sends), (scheme.in_float32, _averaged(4))]
    return [
        (share, one)
        for share, sends in kinds
        if share
        for one in sends(scheme.parts, _tree(params), cluster, host)
    ]


def _seconds(one: Sent, cluster: Cluster, host: Host) -> float:
    participants, link = cluster.workers, cluster.link
    if one.inside:
        assert cluster.inside is not None
        participants, link = cluster.group_size, cluster.inside
    hops = _HOPS[one.op](cluster.hops(participants), participants)
    software = one.sent_bytes * host.seconds_per_byte.get(one.op, 0.0)
    return hops * link.latency + 8 * _carried(one, cluster) / link.bandwidth + software


def _carried(one: Sent, cluster: Cluster) -> float:
    """Bytes that a link carries one after the other; more where it cannot carry at its full rate."""
    if one.inside:
        return one.sent_bytes
    sent = one.sent_bytes * cluster.group_size  # all its devices use it at once
    if one.op != "all-to-all":
        return sent
    rounds = _rounds_of_one_way_pairs(cluster.workers) if cluster.one_way_pairs else 1.0
    return rounds * sent / cluster.all_to_all_share


def _bits_on_link(scheme: Scheme, params: Any, cluster: Cluster, host: Host | None) -> float:
    sent = _in_a_step(scheme, params, cluster, host or Host())
    return 8 * sum(share * _carried(one, cluster) for share, one in sent if not one.inside)


def _rounds_of_one_way_pairs(n: int) -> float:
    """How much longer an all-to-all takes: half of the messages go first, an odd one is left over."""
    return 2 * math.ceil((n - 1) / 2) / (n - 1)


def _estimated_local(scheme: Scheme, params: Any, cluster: Cluster, host: Host) -> float:
    """Of the steps that pack: those in float32 are another kind, and pack nothing."""
    own = scheme.sends(scheme.parts, _tree(params), cluster, host) if scheme.packs else ()
    if not own:
        return 0.0
    packed = sum(one.sent_bytes for one in own if one.op != "reduce-scatter")
    feedback = getattr(scheme.parts.get("up"), "feedback", scheme.parts.get("error_dtype"))
    each = 4 + (0 if feedback is None else jnp.dtype(feedback).itemsize)
    unpacked = each * parameters_in(params) / cluster.group_size
    return _usual(scheme) * 8 * 2 * (packed + unpacked) / host.memory_bandwidth


def pays(
    scheme: Scheme,
    params: Any,
    cluster: Cluster,
    host: Host | None = None,
    *,
    than: Scheme = FLOAT32,
    speedup: float = 1.0,
    compute: float = 0.0,
) -> Pays:
    """The bandwidths at which a scheme's step is ``speedup`` times as fast as another's.

    A step takes ``a + b / bandwidth`` seconds, so one is ``speedup`` times the other at one bandwidth at
    most. Break-even, ``speedup=1``, does not depend on ``compute``.

    Args:
      scheme: one of ``SCHEMES``, ``OTHERS`` or ``PEERS``.
      params: as `step_time`.
      cluster: as `step_time`; its bandwidth between workers does not matter.
      host: as `step_time`.
      than: what it is compared with.
      speedup: how many times as fast.
      compute: as `step_time`.

    Returns:
      A ``Pays``: faster where ``above < bandwidth < below``.

    Example:
      >>> at = Cluster(8, Link(1e9, 50e-6))
      >>> round(pays(scheme_named("1-bit vote"), 10**9, at).below / 1e9)  # Gbit/s
      643
    """
    fast = cluster.at(math.inf)
    ours = step_time(scheme, params, fast, compute, host)
    theirs = step_time(than, params, fast, compute, host)
    # What is gained with each second that a bit takes, and what is lost whatever the bandwidth.
    bits = [_bits_on_link(one, params, cluster, host) for one in (scheme, than)]
    gained = bits[1] - speedup * bits[0]
    lost = speedup * ours.step - theirs.step
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
      host: what else is known, such as the software cost of collectives.

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
