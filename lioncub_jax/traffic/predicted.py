"""Bytes per step: what the wire predicts, beside what the compiled program sends.

`predict` needs no device: it counts from the shapes. `compiled.collectives` reads the collectives out
of a compiled step. The two must agree, and a benchmark and a test say that they do.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lioncub_jax import checks, momentum, wires
from lioncub_jax.decide import Down, Owner
from lioncub_jax.exchange import Asked, communicate, senders
from lioncub_jax.mesh.placement import check_arrays
from lioncub_jax.mesh.specs import axes_of, shard_shape
from lioncub_jax.optimizer import global_gradients
from lioncub_jax.quantize import Quantizer
from lioncub_jax.sync import Schedule, check_schedule, picks, plan_of_codes
from lioncub_jax.traffic import compiled
from lioncub_jax.wires import Sent, Wire

if TYPE_CHECKING:
    from rich.table import Table


class Traffic(NamedTuple):
    """What one worker sends in one step.

    Attributes:
      scheme: the quantiser, the wire and what comes back, for people.
      workers: how many workers.
      parameters: elements that each device votes on: all of them, or its shard or slice.
      sent_bytes: bytes that each device sends to other workers, padding and all side information
        included.
      group_bytes: bytes that it sends inside its group, in two levels.
      collectives: the same bytes, one collective after the other.
    """

    scheme: str
    workers: int
    parameters: int
    sent_bytes: float
    group_bytes: float = 0.0
    collectives: tuple[Sent, ...] = ()

    @property
    def bits_per_parameter(self) -> float:
        """Bits sent by each worker for each parameter, up and down together."""
        return 8 * self.sent_bytes / max(self.parameters, 1)

    @property
    def share_of_float32(self) -> float:
        """Against an all-reduce of float32 gradients."""
        dense = float32_all_reduce_bytes(self.parameters, self.workers)
        return self.sent_bytes / dense if dense else 0.0


def of(
    tx: optax.GradientTransformation,
    params: Any,
    workers: int,
    *,
    group_size: int = 1,
    specs: Any = None,
    inner_axes: Mapping[str, int] | None = None,
    platform: str | None = None,
    step: int | None = None,
) -> Traffic:
    """Predicts what each device sends in a step of a transform, syncs of momenta left out.

    Args:
      tx: what an optimizer or baseline of this library, `communicate` or `sync_momentum` returned, or any
        transform of optax around them: a chain, masks and labels, ``inject_hyperparams``, ``MultiSteps``
        (which votes in each step, and moves parameters in every k-th).
      params: tree of arrays or ``jax.ShapeDtypeStruct``; only sizes matter.
      workers: how many workers.
      group_size: devices of one worker on its ``group_axis``.
      specs: a tree of ``PartitionSpec`` like the parameters: how a worker cuts them.
      inner_axes: sizes of the mesh axes that the specs name.
      platform: "cpu" for XLA's CPU backend, which all-reduces bfloat16 as float32; None for all others.
      step: how many steps were taken before, to ask about a warm-up of ``dgc`` or ``one_bit_adam``, or
        one step of ``zero_one_adam``; None for after it, or most steps.

    Returns:
      A ``Traffic``; one worker sends nothing to others.

    Raises:
      TypeError: for a transform in which nothing says what it sends, one that talks by itself, and what
        `on_mesh` returned.
      ValueError: for fewer than one worker, or more than the quantiser or wire can count; for a step
        below 0; for specs of axes that have no size in ``inner_axes``.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> tx = lc.baselines.qsgd(0.1, bits=2, axis_name="data")
      >>> round(lc.traffic.of(tx, {"w": jnp.ones(2**20)}, 2).bits_per_parameter, 3)
      2.129
    """
    checks.check_count(f"workers={workers!r}", workers)
    checks.check_count(f"group_size={group_size!r}", group_size)
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"step={step!r}: give the steps taken before, from 0; or None")
    check_arrays(params)
    shards, cuts = _shards(params, specs, inner_axes or {})
    schemes, sent, elements = dict[str, None](), list[Sent](), 0
    for sender, tree in _senders(tx, shards):
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        if specs is not None and not cuts.keys() >= {*paths}:
            raise ValueError(
                "a transform in front of the vote changes the tree, as optax.flatten does, and no spec "
                "tells how its leaves are cut: leave it out, or specs"
            )
        axes = [cuts.get(path, frozenset()) for path in paths]
        asked = Asked(tree, axes, workers, group_size, platform, step)
        schemes[sender.scheme] = None
        sent += sender.sends(asked)
        elements += sum(math.prod(leaf.shape) for leaf in asked.leaves)
    across = sum((one.sent_bytes for one in sent if not one.inside), 0.0)
    inside = sum((one.sent_bytes for one in sent if one.inside), 0.0)
    scheme, parameters = "; ".join(schemes), round(elements / group_size)
    return Traffic(scheme, workers, parameters, across, inside, tuple(sent))


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


def predict(
    params: Any,
    workers: int,
    *,
    up: Quantizer | None = None,
    owner: Owner | None = None,
    down: Down | None = None,
    wire: Wire | None = None,
    bucket_size: int | None = None,
    group_size: int = 1,
    specs: Any = None,
    inner_axes: Mapping[str, int] | None = None,
    platform: str | None = None,
) -> Traffic:
    """Predicts what each device sends in a step of `communicate` with these parts: `of` in short.

    Args:
      params: tree of arrays or ``jax.ShapeDtypeStruct``; only sizes matter.
      workers: how many workers.
      up: as in `communicate`, like all arguments that follow.
      owner: as in `communicate`.
      down: as in `communicate`.
      wire: as in `communicate`.
      bucket_size: as in `communicate`.
      group_size: devices of one worker on its ``group_axis``.
      specs: a tree of ``PartitionSpec`` like the parameters: how a worker cuts them.
      inner_axes: sizes of the mesh axes that the specs name.
      platform: "cpu" for XLA's CPU backend, which all-reduces bfloat16 as float32; None for all others.

    Returns:
      A ``Traffic``; one worker sends nothing to others.

    Raises:
      ValueError: for fewer than one worker, or more than the quantiser or wire can count.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import traffic
      >>> round(traffic.predict({"w": jnp.ones((1024, 1024))}, 8).bits_per_parameter, 2)
      1.76
    """
    tx = communicate(
        axis_name="workers", group_axis="group" if group_size != 1 else None,
        memory=momentum.nothing(), up=up, owner=owner, down=down, wire=wire, bucket_size=bucket_size,
    )  # fmt: skip
    return of(
        tx, params, workers, group_size=group_size, specs=specs, inner_axes=inner_axes, platform=platform
    )  # fmt: skip


def predict_mean(
    params: Any, workers: int, dtype: Any = jnp.float32, platform: str | None = None
) -> Traffic:
    """Predicts what each device sends in a step of `global_gradients`: a ring all-reduce of every leaf.

    Args:
      params: tree of arrays or ``jax.ShapeDtypeStruct``; only sizes matter.
      workers: how many workers.
      dtype: of the all-reduce.
      platform: as `predict`.

    Returns:
      A ``Traffic``; one worker sends nothing to others.

    Raises:
      ValueError: for fewer than one worker.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import traffic
      >>> traffic.predict_mean({"w": jnp.ones(1000)}, 4).sent_bytes
      6000.0
    """
    tx = global_gradients(optax.identity(), "workers", dtype)
    return of(tx, params, workers, platform=platform)


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
    checks.check_count(f"workers={workers!r}", workers)
    check_schedule(schedule)
    chosen = picks(params, checks.as_mask("where", where))
    leaves = [x for x, pick in zip(jax.tree.leaves(params), chosen, strict=True) if pick]
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    scheme = f"momentum, {schedule.name}"
    sent: list[Sent] = []
    if workers > 1 and schedule.up is not None:
        asked = Asked(leaves, [frozenset()] * len(leaves), workers)
        sent += plan_of_codes(schedule, "workers").sends(asked)
    elif workers > 1 and size:
        # A mean square of each leaf travels with it, to tell the drift.
        sent.append(Sent("all-reduce", False, wires.mean_bytes(size + len(leaves), workers)))
    total = sum((one.sent_bytes for one in sent), 0.0)
    return Traffic(scheme, workers, size, total, 0.0, tuple(sent))


def _shards(
    params: Any, specs: Any, inner_axes: Mapping[str, int]
) -> tuple[Any, dict[Any, frozenset]]:
    """The leaves that one device holds, and over which inner axes each is cut, by its path."""
    if specs is None:
        return params, {}
    named = [frozenset(a for e in spec for a in axes_of(e)) for spec in jax.tree.leaves(specs)]
    if missing := frozenset().union(*named) - inner_axes.keys():
        raise ValueError(
            f"the specs name the axes {', '.join(sorted(missing))}, and inner_axes is {dict(inner_axes)}: "
            "give the size of each, such as inner_axes={'fsdp': 2}, or dict(mesh.shape)"
        )

    def shard(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shard_shape(leaf.shape, spec, inner_axes), leaf.dtype)

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return jax.tree.map(shard, params, specs), dict(zip(paths, named, strict=True))


def float32_all_reduce_bytes(parameters: float, workers: int) -> float:
    """Bytes that each worker sends for an all-reduce of float32 gradients by the best algorithm."""
    return 2 * (workers - 1) / workers * 4 * parameters


def table(traffics: list[Traffic], measured: dict[Traffic, float] | None = None) -> "Table":
    """A table for people: predicted bytes, and compiled ones where they are known.

    Args:
      traffics: rows.
      measured: bytes that a worker sends by the compiled program.

    Returns:
      A ``rich`` table.
    """
    from rich.table import Table  # heavy, and wanted here only

    measured = measured or {}
    out = Table("scheme", "workers", "sent per worker", "bits/param", "x float32", "compiled")
    for t in traffics:
        seen = f"{measured[t]:,.0f} B" if t in measured else ""
        share = f"{t.share_of_float32:.4f}"
        row = f"{t.sent_bytes:,.0f} B", f"{t.bits_per_parameter:.3f}", share, seen
        out.add_row(t.scheme, str(t.workers), *row)
    return out


def compiled_bytes(program: Any, mesh: Any) -> float:
    """Bytes that each device sends in every step of a compiled program, over all mesh axes.

    Args:
      program: ``jax.stages.Compiled``, such as ``step.lower(state, batch).compile()``.
      mesh: its mesh.
    """
    return sum(compiled.sent_bytes(compiled.collectives(program, mesh)).values())
