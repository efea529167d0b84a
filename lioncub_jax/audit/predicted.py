"""Bytes per step that a traced update will send, to be compared with the compiled program's.

`of` needs no device: it traces the update and adds up its collectives. `compiled.collectives` reads those
that XLA has made of them. The two must agree, and a benchmark and a test say that they do.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.checks import check_kinds, refused_functions
from lioncub_jax.exchange.layout import Flat
from lioncub_jax.exchange.mapped import jitted_init, state_specs
from lioncub_jax.exchange.matrices import Deal
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.boxes import find_nodes
from lioncub_jax.mesh.placement import Workers, check_workers
from lioncub_jax.mesh.specs import Specs, axes_of, product, stacked
from lioncub_jax.programs.compiled import Collective, Operand
from lioncub_jax.training.differ import Differences, named_axes
from lioncub_jax.training.modules import check_split

# What a collective is called in a traced program, and in a compiled one.
_OPS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}
_QUIET = {"axis_index", "pvary", "shard_map"}  # they name axes, and nothing travels
_FLAGS = 4  # numbers: flags and counts of votes inside a worker, which are not counted


class Traffic(NamedTuple):
    """Bytes that one worker sends in one step.

    Attributes:
      num_workers: how many workers.
      parameters: elements that each device holds: all of them, or its shard or slice.
      sent_bytes: bytes that each device sends to other workers, padding and all side information
        included; where the number of the step decides, as in warm-ups and syncs, the fewest.
      group_bytes: bytes that it sends inside its worker: in its group, in two levels, and of whole matrices
        that are cut over inner axes.
      stages: where the number of the step decides, ``sent_bytes`` of each way that a step can go, in the
        order of the program's branches: without and with a sync, or the stages of a warm-up.
      collectives: of ``sent_bytes`` and ``group_bytes``, one after the other.
      filling: of whole matrices at owners, how much of what travels is empty, over the parameters. Where it
        is above 10 %, put devices together, ``Workers(mesh, axis, group=...)``.
    """

    num_workers: int
    parameters: int
    sent_bytes: float
    group_bytes: float = 0.0
    stages: tuple[float, ...] = ()
    collectives: tuple[Collective, ...] = ()
    filling: float = 0.0

    @property
    def bits_per_parameter(self) -> float:
        """Bits sent by each worker for each parameter, up and down together."""
        return 8 * self.sent_bytes / max(self.parameters, 1)


def of(
    tx: optax.GradientTransformation, params: Any, workers: Workers, *, specs: Specs = None
) -> Traffic:
    """Predicts what each device sends in a step of a transform.

    Args:
      tx: any transform with updates on which workers agree: an optimizer or baseline of this library, a
        chain of optax with one in it, masks and labels, ``inject_hyperparams``, ``MultiSteps`` (which votes
        in each step, and moves parameters in every k-th).
      params: tree of arrays or ``jax.ShapeDtypeStruct``; only sizes matter, and how they are cut.
      workers: a `Workers`, on a mesh of devices or a ``jax.sharding.AbstractMesh``, of which none need be
        there. On a mesh of CPUs a mean in bfloat16 counts as one in float32, which XLA makes of it there.
      specs: a tree of ``PartitionSpec`` like the parameters: how a worker cuts them. None for as they say
        it themselves.

    Returns:
      A ``Traffic``; one worker sends nothing to others.

    Raises:
      TypeError: for no transform, no `Workers`, or a module in place of its parameters.
      ValueError: for updates that differ between workers, specs that the mesh does not have, or more
        workers than the quantizer or wire can count; for a collective that is not known here, or in a loop
        of unknown length.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> tx = lc.owner_adamw(1e-3, workers="data")
      >>> two = lc.Workers(jax.sharding.AbstractMesh((2,), ("data",)), "data")
      >>> round(lc.audit.of(tx, {"w": jnp.ones(2**20)}, two).bits_per_parameter, 3)
      2.63
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))
      >>> cut = {"specs": {"w": jax.P("fsdp")}}
      >>> lc.audit.of(tx, {"w": jnp.ones(2**20)}, lc.Workers(mesh, "data"), **cut).parameters == 2**18
      True
    """
    check_workers(workers)
    check_kinds(tx=(tx, optax.GradientTransformation))
    check_split(params)
    cut = workers.param_specs(params, specs)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    tx = optax.with_extra_args_support(tx)
    state = jitted_init(tx, workers, shapes, cut).eval_shape(shapes)
    ways = _ways(_traced_update(tx, workers, shapes, cut, state), workers)
    # Of each way that a step can go.
    sent = [_sum_bytes(way, workers, between=True) for way in ways]
    usual = ways[sent.index(min(sent))]
    elements, lie = 0, jax.tree.leaves(workers.shardings(cut))
    for x, sharding in zip(jax.tree.leaves(shapes), lie, strict=True):
        elements += math.prod(sharding.shard_shape(x.shape))
    count = product(workers.mesh.shape, axes.names(workers.axis))
    return Traffic(
        num_workers=count,
        parameters=round(elements * count / workers.num_gradients),
        sent_bytes=min(sent),
        group_bytes=_sum_bytes(usual, workers, between=False),
        stages=tuple(sent),
        collectives=tuple(usual),
        filling=_filling(state),
    )


def _traced_update(
    tx: optax.GradientTransformationExtraArgs, workers: Workers, params: optax.Params, specs: Specs,
    state: optax.OptState,
) -> Jaxpr:  # fmt: skip
    """The program of an update on a worker, by shapes.

    Raises:
      ValueError: for an update that differs between workers, or state that all hold and that does.
    """
    lie, refused = state_specs(tx, workers, params, specs), refused_functions(tx)
    found = []

    def update(grads: optax.Updates, state: optax.OptState, params: optax.Params) -> Any:
        return tx.update(grads, state, params, grad=grads, **refused)

    def on_worker(grads: optax.Updates, state: optax.OptState, params: optax.Params) -> jax.Array:
        grads = jax.tree.map(lambda x: x[0], grads)
        state = workers.stack(state, lie, undo=True)
        found.append(jax.jit(update).trace(grads, state, params).jaxpr.jaxpr)
        return jnp.zeros(())  # by a result with a spec JAX knows an Explicit mesh

    grads = jax.tree.map(lambda x: x.update(shape=(workers.num_gradients, *x.shape)), params)
    in_specs = stacked(specs, workers.axes), lie, specs
    jax.eval_shape(workers.map(on_worker, in_specs, P(), typed=True), grads, state, params)
    differences = Differences(workers)
    held = [axes_of(x[0]) if workers.stacks(x) else () for x in jax.tree.leaves(lie)]
    num_params = len(jax.tree.leaves(params))
    over = [workers.axes] * num_params + held + [()] * num_params
    results = differences.results(found[0], [*map(differences.over, over)])
    names = jax.tree_util.tree_leaves_with_path((params, state))
    for (path, _), classes, may in zip(names, results, [()] * num_params + held, strict=True):
        if wrong := [n for n in differences.axes_of(classes) if n not in may]:
            name = (
                f"{('the update of ', 'the state ')[path[0].idx]}{jax.tree_util.keystr(path[1:])}"
            )
            raise ValueError(
                f"{name} differs between workers, over {', '.join(wrong)}, so their parameters would "
                "drift apart: let workers talk, lion_cub(..., workers=workers), or global_gradients(tx, "
                "workers=workers) around yours, with the Workers that are given here. A leaf that a mask "
                "or label keeps from that transform gets optax.set_to_zero() or global_gradients; behind "
                "it decide by what all agree on, such as the norm of the update"
            )
    return found[0]


def _filling(state: Any) -> float:
    """The empty share of all deals in a state."""
    found = {x.bucket for x in find_nodes(state, Flat) if isinstance(x.bucket, Deal)}
    places = sum(deal.num_chunks * deal.rows_per_chunk * ROW for deal in found)
    elements = sum(run.number * run.size for deal in found for run in deal.pieces)
    return places / elements - 1 if elements else 0.0


def _ways(program: Jaxpr, workers: Workers, times: int = 1) -> list[list[Collective]]:
    """Collectives of a traced program that runs so often, for each way that a step can go.

    Those between workers, and those inside a group of devices that is one.
    """
    ways: list[list[Collective]] = [[]]
    for step in program.eqns:
        name, inner = step.primitive.name, [*jaxprs_in_params(step.params)]
        if name in _OPS:
            one = _collective(_OPS[name], step, workers, times)
            inside = set(one.axes or ()) & {*axes.names(workers.group)} or one.op != "all-reduce"
            if _is_between(one, workers) or (inside and one.operands[0].size > _FLAGS):
                for way in ways:
                    way.append(one)
            continue
        if name not in _QUIET and named_axes(step):
            raise ValueError(f"the traced update has a {name} over {named_axes(step)}: {_UNKNOWN}")
        if name == "cond" and isinstance(step.invars[0], Literal):
            inner = [inner[step.invars[0].val]]  # XLA drops the others
        turns = times * step.params["length"] if name == "scan" else times
        each = [_ways(one, workers, turns) for one in inner]
        if name == "while" and any(map(any, each)):
            raise ValueError(f"the traced update sends inside of a while loop: {_UNKNOWN}")
        if name == "cond":  # one of the branches, where any of them sends
            branches = [way for branch in each for way in branch]
            each = [branches] if any(branches) else []
        for then in each:
            ways = [before + after for before in ways for after in then]
    return ways


def _is_between(one: Collective, workers: Workers) -> bool:
    return bool(set(one.axes or ()) & {*axes.names(workers.axis)})


def _sum_bytes(way: list[Collective], workers: Workers, *, between: bool) -> float:
    """Adds up the bytes that go from worker to worker, or those that stay inside a group."""
    return sum((one.sent_bytes for one in way if _is_between(one, workers) == between), 0.0)


def _collective(op: str, step: JaxprEqn, workers: Workers, times: int) -> Collective:
    mesh = workers.mesh.abstract_mesh
    over, groups = named_axes(step), step.params.get("axis_index_groups")
    size = len(groups[0]) if groups else product(mesh.shape, over)
    widened = op == "all-reduce" and axes.platform(mesh) == "cpu"
    operands = []
    for var in step.invars:
        x: Any = var.aval
        dtype = "f32" if widened and x.dtype == jnp.bfloat16 else _hlo_name(x.dtype)
        local = workers.shardings(x.sharding.spec).shard_shape(x.shape)
        operands.append(Operand(dtype, local))
    return Collective(op, tuple(operands), over, size, times)


_UNKNOWN = (
    "nobody knows here how often or what it sends; read the bytes of the compiled program, "
    "lioncub_jax.audit.collectives(compiled, mesh)"
)


def _hlo_name(dtype: np.dtype) -> str:
    """Names a dtype as HLO does: "f32", "s8", "pred"."""
    kinds = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c", "bool": "pred"}
    kind = dtype.name.rstrip("0123456789")
    return kinds[kind] + dtype.name.removeprefix(kind)


def float32_all_reduce_bytes(parameters: float, num_workers: int) -> float:
    """Bytes that each worker sends for an all-reduce of float32 gradients by the best algorithm.

    Args:
      parameters: how many there are.
      num_workers: at least one.

    Returns:
      ``2 (W - 1) / W * 4`` for each parameter.

    Example:
      >>> float32_all_reduce_bytes(1_000_000, 8)
      7000000.0
    """
    return 2 * (num_workers - 1) / num_workers * 4 * parameters
