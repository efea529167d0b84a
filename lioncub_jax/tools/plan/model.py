"""The model of a step: what every method sends, and how long that takes on a cluster.

    step = compute + local + communication
    communication = sum over collectives of (hops * latency + bits / bandwidth)

Bytes are those of `lioncub_jax.audit.of`, which equal the compiled program's. All else is a model:
links are full duplex and not shared with others, nothing overlaps, and no worker is slower than others.
What it leaves out is in docs/explain/planner.md. Rates are in bits per second, times in seconds, as
`lioncub_jax.audit.units` reads them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractDevice, AbstractMesh

from lioncub_jax import optimizers as optimizer
from lioncub_jax.audit import predicted as accounting
from lioncub_jax.baselines.diloco import diloco
from lioncub_jax.baselines.one_bit_adam import one_bit_adam
from lioncub_jax.baselines.powersgd import as_matrix, powersgd
from lioncub_jax.exchange import quantize
from lioncub_jax.exchange.arguments import check_count, check_number
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.tools.plan.evidence import TARGET, check_one_of

# Of the matrix that a number of parameters stands for, over its width. PowerSGD sends of it about what it
# sends of those of a GPT.
LENGTH = 384
MOST = 2**37  # words of 32 codes, counted in 32 bits

# How often a collective passes through a tree of all participants.
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}


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
        check_number(
            f"bandwidth={self.bandwidth!r}",
            self.bandwidth,
            lambda rate: rate > 0,
            "give bits per second, above zero",
        )
        check_number(
            f"latency={self.latency!r}", self.latency, lambda time: 0 <= time < math.inf,
            "give seconds, zero or more",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers and what connects them.

    Attributes:
      workers: how many.
      link: of a worker to all others; its devices share it (of several network cards, the sum).
      group_size: devices of one worker, which average their gradients first (``Workers(..., group=)``).
      inside: link of each device to the others of its group; needed where ``group_size`` is above 1.
      on_cpu: whether JAX runs on CPUs, by Gloo: of each two workers only one sends to the other at a time,
        because a pair has one connection and "ready to receive" waits in it, so all-to-alls are slower;
        and bfloat16 is all-reduced as float32.
      all_to_all_share: of ``link``, what a worker gets when all send to all: below 1 where the middle of
        the network is narrow, as in a torus of chips.
      memory_bandwidth: of a device, bits per second; None for `memory`'s guess. It is for the estimate of
        packing, counting and unpacking: what is
        sent, the error feedback and a float32 for each parameter are written once and read once more
        than ``optax.lion`` does. That is an upper estimate: on CPU less was measured.

    Raises:
      ValueError: for fewer than one worker or device, a group without a link, a share that is not above 0
        and at most 1, or a memory bandwidth that is not above zero.

    Example:
      >>> nodes = Cluster(8, Link(100e9, 20e-6), group_size=8, inside=Link(900e9, 5e-6))
    """

    workers: int
    link: Link
    group_size: int = 1
    inside: Link | None = None
    on_cpu: bool = False
    all_to_all_share: float = 1.0
    memory_bandwidth: float | None = None

    def __post_init__(self) -> None:
        check_count(f"workers={self.workers!r}", self.workers)
        check_count(f"group_size={self.group_size!r}", self.group_size)
        if self.group_size > 1 and self.inside is None:
            raise ValueError(
                f"group_size={self.group_size} without inside: give the Link in a group "
                "(--inside-bandwidth)"
            )
        check_number(
            f"all_to_all_share={self.all_to_all_share!r}",
            self.all_to_all_share,
            lambda share: 0 < share <= 1,
            "give a number above 0, at most 1",
        )
        check_number(
            f"memory_bandwidth={self.memory_bandwidth!r}", self.memory,
            lambda rate: rate > 0, "give bits per second, above zero",
        )  # fmt: skip

    @property
    def memory(self) -> float:
        """Bits per second, as given, or those of a server's processor or a slow GPU."""
        guess = 100e9 if self.on_cpu else 800e9  # bytes
        return 8 * guess if self.memory_bandwidth is None else self.memory_bandwidth

    def at(self, bandwidth: float) -> "Cluster":
        """The same cluster with another bandwidth between workers."""
        return dataclasses.replace(self, link=dataclasses.replace(self.link, bandwidth=bandwidth))


class Scheme(NamedTuple):
    """A method that users can choose.

    Attributes:
      name: as in the evidence, but for means in bfloat16.
      code: how it is written in a program, without ``lioncub_jax.``.
      make: makes its transform, whose bytes these are, of ``workers=``.
      packs: bytes of memory of each parameter that packing, counting and unpacking pass through: a float32,
        and error feedback; 0 for who does none of that.
      every: steps of a worker for each exchange; bytes and times are shared out among them.
      in_float32: share of the steps to the loss that all-reduce float32 gradients instead.
      kind: "ours", "peer", or "mean": of gradients, a peer that all are compared with.
      widths: of PowerSGD, how many times as wide as its rank a matrix is, as in what was trained; ``make``
        takes the rank. 0 for all others.
    """

    name: str
    code: str
    make: Callable[..., optax.GradientTransformation]
    packs: int = 0
    every: int = 1
    in_float32: float = 0.0
    kind: str = "ours"
    widths: int = 0

    @property
    def learns(self) -> str:
        """Its name in the evidence: what a mean in bfloat16 does to learning is taken to be nothing."""
        return self.name.removesuffix(_BFLOAT16)


# The inner optimizer does not matter to what is sent.
_MEAN = partial(optimizer.global_gradients, optax.identity())
_IN_BFLOAT16 = partial(_MEAN, dtype=jnp.bfloat16)
_BFLOAT16 = "-bfloat16"
_POWERSGD = partial(powersgd, optax.identity())
WARMUP = 0.15  # of 1-bit Adam's run, in float32: its paper takes 15 to 25 %


def _alone(shared: str, steps: int) -> str:
    """The code of workers that take steps of their own."""
    return f"make_train_step(..., {shared}, local_steps={steps}, local=optax.adamw(...))"


FLOAT32 = Scheme("lion", "global_gradients(optax.lion(...))", _MEAN, kind="mean")
SCHEMES = (
    Scheme("vote", "lion_cub(...)", partial(optimizer.lion_cub, 1.0), 4),
    Scheme(
        "average", "distributed_lion(..., average=True)",
        partial(optimizer.distributed_lion, 1.0, average=True), 4,
    ),
    Scheme("owner-lion", "owner_lion(...)", partial(optimizer.owner_lion, 1.0), 6),
    Scheme(
        "owner-lion-rotated", "owner_lion(..., quantizer=quantize.rotated_sign())",
        partial(optimizer.owner_lion, 1.0, quantizer=quantize.rotated_sign()), 6,
    ),
    Scheme("owner-adamw", "owner_adamw(...)", partial(optimizer.owner_adamw, 1.0), 8),
    Scheme(
        "local-2-coded", _alone("baselines.diloco(1.0, momentum=0, bits=4)", 2),
        partial(diloco, bits=4), 8, every=2,
    ),
    FLOAT32,
    Scheme(
        "lion-bfloat16", "global_gradients(optax.lion(...), dtype=jnp.bfloat16)", _IN_BFLOAT16,
        kind="mean",
    ),
    Scheme("adamw", "global_gradients(optax.adamw(...))", _MEAN, kind="mean"),
    Scheme(
        "adamw-bfloat16", "global_gradients(optax.adamw(...), dtype=jnp.bfloat16)", _IN_BFLOAT16,
        kind="mean",
    ),
    Scheme(
        "powersgd-4", "baselines.powersgd(optax.adamw(...), width // 32)", _POWERSGD, 8,
        kind="peer", widths=32,
    ),
    Scheme(
        "powersgd-16", "baselines.powersgd(optax.adamw(...), width // 8)", _POWERSGD, 8,
        kind="peer", widths=8,
    ),
    Scheme(
        "local-2", _alone("global_gradients(optax.sgd(1.0))", 2), _MEAN, every=2, kind="peer",
    ),
    Scheme(
        "one-bit-adam", "baselines.one_bit_adam(..., warmup=...)",
        partial(one_bit_adam, 1.0, warmup=1), 8, in_float32=WARMUP / TARGET, kind="peer",
    ),
    Scheme("diloco", _alone("baselines.diloco()", 8), diloco, every=8, kind="peer"),
)  # fmt: skip


def scheme_named(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
      ValueError: if there is none.

    Example:
      >>> scheme_named("vote").code
      'lion_cub(...)'
    """
    every = {one.name: one for one in SCHEMES}
    check_one_of("scheme", name, every)
    return every[name]


class _Sent(NamedTuple):
    """A collective of a device: its name, whether it runs inside a group, and what it sends."""

    op: str
    inside: bool
    sent_bytes: float


def _sent(scheme: Scheme, params: Any, at: Cluster) -> list[_Sent]:
    """The collectives of an exchange, per device."""
    leaves, tree = jax.tree.flatten(params)
    shapes = tree, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    rank = (max(width_of(leaves) // scheme.widths, 1),) if scheme.widths else ()
    sent = partial(_exchange, scheme.make, rank, shapes, at.on_cpu)
    if at.group_size == 1:
        return sent(at.workers, 1)
    if scheme.kind == "mean":
        return _in_slices(sent(at.workers, 1), sent(at.group_size, 1), at.group_size)
    if scheme.every > 1:
        raise ValueError(
            "local steps have no two levels: each device is a worker, or several share one by an inner "
            "mesh axis"
        )
    return sent(at.workers, at.group_size)


def width_of(leaves: Sequence[Any]) -> int:
    """The narrower side of matrices, in the mean over their elements; a rank is a share of it.

    Example:
      >>> width_of([jax.ShapeDtypeStruct((128, 512), "float32")])
      128
    """
    matrices = [x for x in leaves if x.ndim > 1]
    narrow = sum(min(as_matrix(x.shape)) * x.size for x in matrices)
    return narrow // max(sum(x.size for x in matrices), 1)


@functools.cache  # a plan asks for each bandwidth
def _exchange(
    make: Callable[..., Any], rank: Any, shapes: Any, on_cpu: bool, workers: int, group_size: int
) -> list[_Sent]:
    """What a transform sends of parameters of these shapes, on devices of which none is there."""
    tree, *leaves = shapes
    device = AbstractDevice("", None, platform="cpu") if on_cpu else None
    shape, names = (workers, group_size), ("workers", "group")
    mesh: Any = AbstractMesh(shape, names, abstract_device=device)
    among = Workers(mesh, "workers", "group" if group_size > 1 else None)
    found = accounting.of(make(*rank, workers=among), tree.unflatten(leaves), among).collectives
    each = (_Sent(one.op, one.axes == ("group",), one.sent_bytes) for one in found)
    return [one for one in each if one.sent_bytes]


def _in_slices(across: list[_Sent], inside: list[_Sent], devices: int) -> list[_Sent]:
    """An all-reduce in groups: each device reduces a slice across workers, between two halves inside."""
    halves = [one.sent_bytes / 2 for one in inside]
    return [
        *(_Sent("reduce-scatter", True, half) for half in halves),
        *(_Sent("all-reduce", False, one.sent_bytes / devices) for one in across),
        *(_Sent("all-gather", True, half) for half in halves),
    ]


class Estimate(NamedTuple):
    """What a step takes by one scheme; the mean step where not all are alike.

    Attributes:
      sent_bytes: what a worker, all of its devices together, sends to other workers.
      inside_bytes: what each device sends inside its group.
      communication: seconds in collectives.
      local: seconds of packing, counting and unpacking.
      step: seconds of the whole step, compute included.
      link_bits: what each link between workers carries, one bit after the other.
      unlimited: seconds of the whole step if these links were as fast as can be.
    """

    sent_bytes: float
    inside_bytes: float
    communication: float
    local: float
    step: float
    link_bits: float
    unlimited: float


def parameters_in(params: Any) -> int:
    """How many elements a tree of shapes has; a number stands for itself.

    Example:
      >>> parameters_in(7_000_000_000)
      7000000000

    Raises:
      ValueError: for more than 2**37, which the words of 32 bits of one device do not count.
    """
    count = sum(x.size for x in jax.tree.leaves(_shapes(params)))
    if count > MOST:
        raise ValueError(
            f"{count:,} parameters: at most {MOST:,} are counted, for what a device packs has indices of "
            "32 bits. Give those that one device holds, where a worker has several and the model is cut"
        )
    return count


def _shapes(params: Any) -> Any:
    if not isinstance(params, int):
        return params
    check_count(f"params={params!r}", params)
    width = math.isqrt(params // LENGTH) or 1
    length = params // width // 128 * 128  # whole rows of bits
    shapes = (width, length), (params - width * length,)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes if shape[-1]]


def step_time(scheme: Scheme, params: Any, cluster: Cluster, compute: float) -> Estimate:
    """Models a step by one scheme.

    Args:
      scheme: one of ``SCHEMES``.
      params: a tree of arrays or ``jax.ShapeDtypeStruct``; a number stands for one long matrix.
      cluster: workers, links and memory.
      compute: seconds of a device's own forward and backward pass and update.

    Returns:
      An ``Estimate``.

    Raises:
      ValueError: where the scheme does not work with so many workers or in groups; for a compute
        time below zero, and for more than 2**37 parameters.

    Example:
      >>> slow = Cluster(8, Link(1e9, 50e-6))
      >>> vote = step_time(scheme_named("vote"), 124_000_000, slow, 0.144)
      >>> dense = step_time(FLOAT32, 124_000_000, slow, 0.144)
      >>> round(dense.step / vote.step, 1)
      19.5

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", 2005, for the terms of latency and bandwidth.
    """
    said = "give seconds, zero or more"
    check_number(f"compute={compute!r}", compute, lambda time: 0 <= time < math.inf, said)
    tree, count = _shapes(params), parameters_in(params)
    own = _sent(scheme, tree, cluster)
    usual = (1 - scheme.in_float32) / scheme.every  # the share of steps that have its own exchange
    costs = usual * _costs(own, cluster)
    if scheme.in_float32:
        costs += scheme.in_float32 * _costs(_sent(FLOAT32, tree, cluster), cluster)
    sent, inside, beside, link_bits = map(float, costs)
    packed = sum(one.sent_bytes for one in own if one.op != "reduce-scatter")
    unpacked = scheme.packs * count / cluster.group_size
    packs = usual if own and scheme.packs else 0.0
    local = packs * 8 * 2 * (packed + unpacked) / cluster.memory
    unlimited, carrying = compute + local + beside, link_bits / cluster.link.bandwidth
    communication, step = beside + carrying, unlimited + carrying
    return Estimate(sent, inside, communication, local, step, link_bits, unlimited)


def _costs(exchange: list[_Sent], at: Cluster) -> np.ndarray:
    """Bytes to others and inside, seconds on links as fast as can be, and bits on a worker's link."""
    total = np.zeros(4)
    for op, is_inside, sent in exchange:
        if is_inside:
            assert at.inside is not None
            waits = _hops(op, at.group_size) * at.inside.latency
            total += 0.0, sent, waits + 8 * sent / at.inside.bandwidth, 0.0
        else:
            of_worker = at.group_size * sent  # all its devices use its link at once
            waits = _hops(op, at.workers) * at.link.latency
            total += of_worker, 0.0, waits, 8 * of_worker * _slower(op, at)
    return total


def _hops(op: str, participants: int) -> int:
    """Of trees and recursive doubling, as of NCCL and MPI; an all-to-all's messages go all at once."""
    deep = (participants - 1).bit_length()
    return min(deep, 1) if op == "all-to-all" else _PASSES[op] * deep


def _slower(op: str, at: Cluster) -> float:
    """How many times as long as at the link's full rate a collective takes."""
    if op != "all-to-all":
        return 1.0
    messages = at.workers - 1
    # Half of them go first, an odd one is left over.
    rounds = 2 * math.ceil(messages / 2) / messages if at.on_cpu else 1.0
    return rounds / at.all_to_all_share


def pays(ours: Estimate, theirs: Estimate, speedup: float = 1.0) -> float:
    """The bandwidth below which a step is ``speedup`` times as fast as another's.

    A step takes ``a + b / bandwidth`` seconds, so one is ``speedup`` times the other at one bandwidth at
    most. Break-even, ``speedup=1``, does not depend on the compute time.

    Args:
      ours: the one, by `step_time`; its bandwidth between workers does not matter.
      theirs: the other, in the same cluster.
      speedup: how many times as fast.

    Returns:
      Bits per second; ``math.inf`` where it is so at any rate, 0 where it saves nothing by sending less.

    Example:
      >>> at = Cluster(8, Link(1e9, 50e-6))
      >>> vote = step_time(scheme_named("vote"), 10**9, at, 0.0)
      >>> round(pays(vote, step_time(FLOAT32, 10**9, at, 0.0)) / 1e9)  # Gbit/s
      5343
    """
    # What is gained with each second that a bit takes, and what is lost whatever the bandwidth.
    gained = theirs.link_bits - speedup * ours.link_bits
    lost = speedup * ours.unlimited - theirs.unlimited
    if gained <= 0:
        return 0.0
    return gained / lost if lost > 0 else math.inf
