"""Bytes per step: what the wire predicts, beside what the compiled program sends.

`of` needs no device: it counts from the shapes. `compiled.collectives` reads the collectives out
of a compiled step. The two must agree, and a benchmark and a test say that they do.
"""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from lioncub_jax import axes, checks, wires
from lioncub_jax.arguments import check_count
from lioncub_jax.exchange import Asked, senders
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_in, product
from lioncub_jax.sync import Schedule, check_schedule, picks, plan_of_codes
from lioncub_jax.wires import Sent


class Traffic(NamedTuple):
    """What one worker sends in one step.

    Attributes:
      scheme: the quantizer, the wire and what comes back, for people.
      workers: how many workers.
      parameters: elements that each device votes on: all of them, or its shard or slice.
      collectives: what each device sends, one collective after the other, padding and all side
        information included.
    """

    scheme: str
    workers: int
    parameters: int
    collectives: tuple[Sent, ...]

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends to other workers."""
        return sum(one.sent_bytes for one in self.collectives if not one.inside)

    @property
    def group_bytes(self) -> float:
        """Bytes that it sends inside its group, in two levels."""
        return sum(one.sent_bytes for one in self.collectives if one.inside)

    @property
    def bits_per_parameter(self) -> float:
        """Bits sent by each worker for each parameter, up and down together."""
        return 8 * self.sent_bytes / max(self.parameters, 1)


def of(
    tx: optax.GradientTransformation,
    params: Any,
    workers: Workers | int,
    *,
    specs: Any = None,
    step: int | None = None,
) -> Traffic:
    """Predicts what each device sends in a step of a transform, syncs of momenta left out.

    Args:
      tx: what an optimizer or baseline of this library, `communicate` or `sync_momentum` returned, or any
        transform of optax around them: a chain, masks and labels, ``inject_hyperparams``, ``MultiSteps``
        (which votes in each step, and moves parameters in every k-th).
      params: tree of arrays or ``jax.ShapeDtypeStruct``; only sizes matter, and how they are cut.
      workers: a `Workers`, on a mesh of devices or a ``jax.sharding.AbstractMesh``, of which none need be
        there; or how many, each one device. On a mesh of CPUs a mean in bfloat16 counts as one in
        float32, which XLA makes of it there.
      specs: a tree of ``PartitionSpec`` like the parameters: how a worker cuts them. None for as they say
        it themselves, and for a number of workers whole.
      step: how many steps were taken before, to ask about a warm-up of ``dgc`` or ``one_bit_adam``, or
        one step of ``zero_one_adam``; None for after it, or most steps.

    Returns:
      A ``Traffic``; one worker sends nothing to others.

    Raises:
      TypeError: for a transform in which nothing says what it sends, one that talks by itself, and what
        `on_mesh` returned.
      ValueError: for fewer than one worker, or more than the quantizer or wire can count; for a step
        below 0; for specs that the mesh does not have.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> tx = lc.baselines.qsgd(0.1, bits=2, workers="data")
      >>> round(lc.traffic.of(tx, {"w": jnp.ones(2**20)}, 2).bits_per_parameter, 3)
      2.129
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))
      >>> cut = {"specs": {"w": jax.P("fsdp")}}
      >>> lc.traffic.of(tx, {"w": jnp.ones(2**20)}, lc.Workers(mesh, "data"), **cut).parameters == 2**18
      True
    """
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"step={step!r}: give the steps taken before, from 0; or None")
    if not isinstance(workers, Workers):
        check_count(f"workers={workers!r}", workers)
        mesh: Any = AbstractMesh((workers,), ("workers",))
        workers = Workers(mesh, "workers")
        specs = jax.tree.map(lambda _: P(), params) if specs is None else specs
    shards, cuts = _shards(params, workers, specs)
    count = product(workers.mesh.shape, axes.names(workers.axis))
    group_size, device = workers.count // count, workers.mesh.abstract_mesh.abstract_device
    platform = device and device.platform
    schemes, sent, elements = dict[str, None](), list[Sent](), 0
    for sender, tree in _senders(tx, shards):
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        if any(cuts.values()) and not cuts.keys() >= {*paths}:
            raise ValueError(
                "a transform in front of the vote changes the tree, as optax.flatten does, and no spec "
                "tells how its leaves are cut: leave it out, or specs"
            )
        over = [cuts.get(path, frozenset()) for path in paths]
        asked = Asked(jax.tree.leaves(tree), over, count, group_size, platform, step)
        schemes[sender.scheme] = None
        sent += sender.sends(asked)
        elements += sum(leaf.size for leaf in asked.leaves)
    return Traffic("; ".join(schemes), count, round(elements / group_size), tuple(sent))


def _senders(tx: Any, params: Any) -> list[tuple[Any, Any]]:
    found, reason = [], Exception("nothing in it does")
    try:
        found = senders(tx, params)
    # What is no transform, who talks over an axis, which is not bound here, and what wants global arrays.
    except (AttributeError, NameError, ValueError) as error:
        reason = error
    if found:
        return found
    raise TypeError(
        f"{type(tx).__name__} does not say what it sends: give what lion_cub, another optimizer or "
        "baseline, communicate or sync_momentum returned, alone or in chains and wrappers of optax, and "
        f"not what on_mesh returned ({reason})"
    ) from reason


def sync_traffic(params: Any, workers: int, schedule: Schedule, where: Any = None) -> Traffic:
    """Predicts what each worker sends in one sync of its momentum, at a step where one is due.

    Args:
      params: tree of arrays or ``jax.ShapeDtypeStruct``, whole; only sizes matter.
      workers: how many workers.
      schedule: as in `sync_momentum`; in codes or not is all that matters of it.
      where: as in `sync_momentum`, a tree of bools or a function from the parameters to one.

    Returns:
      A ``Traffic`` of the leaves that are chosen; one worker sends nothing.

    Raises:
      ValueError: for fewer than one worker, or a mask of another tree than the parameters'.
      TypeError: if ``schedule`` is not a ``Schedule``, or the mask is not of bools.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> sync = lc.traffic.sync_traffic({"w": jnp.ones((1024, 1024))}, 8, lc.sync.coded(lc.sync.every(3)))
      >>> round(sync.bits_per_parameter / 3, 2)  # a step
      0.66
    """
    check_count(f"workers={workers!r}", workers)
    check_schedule(schedule)
    chosen = picks(params, checks.as_mask("where", where))
    leaves = [x for x, pick in zip(jax.tree.leaves(params), chosen, strict=True) if pick]
    size = sum(leaf.size for leaf in leaves)
    # A mean square of each leaf travels with it, to tell the drift.
    numbers = wires.mean_bytes(size + len(leaves), workers)
    sent: tuple[Sent, ...] = (Sent("all-reduce", False, numbers),)
    if schedule.up is not None:
        asked = Asked(leaves, [frozenset()] * len(leaves), workers)
        sent = plan_of_codes(schedule, "workers").sends(asked)
    return Traffic(f"momentum, {schedule.name}", workers, size, sent)


def _shards(params: Any, workers: Workers, specs: Any) -> tuple[Any, dict[Any, frozenset]]:
    """The leaves that one device holds, and over which inner axes each is cut, by its path."""
    cut = workers.cut(params, specs)
    each = jax.tree_util.tree_leaves_with_path(cut)
    shards = jax.tree.map(
        lambda x, lies: jax.ShapeDtypeStruct(lies.shard_shape(x.shape), x.dtype),
        params, workers.shardings(cut),
    )  # fmt: skip
    return shards, {path: frozenset(axes_in(spec)) for path, spec in each}


def float32_all_reduce_bytes(parameters: float, workers: int) -> float:
    """Bytes that each worker sends for an all-reduce of float32 gradients by the best algorithm."""
    return 2 * (workers - 1) / workers * 4 * parameters
