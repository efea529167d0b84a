"""Probe of machines: what collectives, packing and overlap take there, through JAX on a mesh.

One line in a program, in which `lioncub_jax.mesh.join` has run if there are several processes, or
the command `lioncub probe`. Every process calls it alike. What it returns, `lioncub plan --measured` takes.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax.exchange import bits
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.hosts import gathered_arrays
from lioncub_jax.mesh.placement import Workers, check_workers
from lioncub_jax.programs.compiled import SENT
from lioncub_jax.programs.units import bytes_text, rate_text, seconds_text
from lioncub_jax.tools.plan.methods import SCHEMES
from lioncub_jax.tools.plan.model import Cluster, Link, Measured, step_time

__all__ = ["probe", "table"]

SIZES = 2**12, 2**16, 2**20, 2**23, 2**25  # bytes that a worker has
TURNS = 3  # of a collective in a program
REPEATS = 5
LONG = 0.03  # seconds of a collective, after which no larger size follows
PACKED = 2**23  # parameters

# A user's function of workers: a step of `make_train_step`, its first state, and a batch.
Target = Callable[[Workers], tuple[Any, Any, Any]]


def _all_to_all(x: jax.Array, axis: AxisName) -> jax.Array:
    return lax.all_to_all(x, axis, 0, 0, tiled=True)


def _all_gather(x: jax.Array, axis: AxisName) -> jax.Array:
    # A part from every worker, so that the compiler sends all.
    return lax.all_gather(x, axis, tiled=True)[:: lax.axis_size(axis)]


# By the names of `Measured`: what runs, and on which dtype.
COLLECTIVES: dict[str, tuple[Callable[..., jax.Array], Any]] = {
    "all-reduce": (lax.pmean, jnp.float32),
    "all-reduce bfloat16": (lax.pmean, jnp.bfloat16),
    "all-to-all": (_all_to_all, jnp.uint32),
    "all-gather": (_all_gather, jnp.uint32),
}


def probe(workers: Workers, target: Target | None = None) -> Measured:
    """Measures collectives between workers, packing, and the overlap of a step.

    Args:
      workers: where the training would run, a device each.
      target: makes ``(step, state, batch)`` of workers, with an optimizer in `global_gradients`, to measure
        a step with its exchange, without it (of one worker), and how much of the exchange overlaps.

    Returns:
      A `Measured`, the same on all processes: times are those of the slowest.

    Raises:
      TypeError: for no `Workers`.
      ValueError: for one worker, or a mesh with other axes.

    Example:
      >>> probe(lc.Workers(mesh, "data"))  # doctest: +SKIP
      Measured(num_workers=8, seconds={'all-reduce': [(3584.0, 0.00021), ...
    """
    check_workers(workers)
    if workers.group or not 1 < workers.num_gradients == workers.mesh.size:
        raise ValueError(f"{workers}: give two workers or more, of one device each")
    shape = PACKED // 128, 128
    packing = jax.jit(lambda x: bits.unpack(bits.pack(x > 0)).astype(x.dtype))
    # As the planner counts: bits to others and back, and a float32, written and read.
    passed = 8 * 2 * (2 / 8 + 4) * PACKED
    measured = Measured(
        workers.num_gradients,
        {op: list(_points(op, workers)) for op in COLLECTIVES},
        passed / _seconds(partial(packing, jnp.ones(shape))),
    )
    return _with_step(measured, workers, target) if target else measured


def _points(op: str, workers: Workers) -> Iterator[tuple[float, float]]:
    """Bytes that a worker sends and seconds, from small to large; all processes end at the same size."""
    collective, dtype = COLLECTIVES[op]
    count, spec = workers.num_gradients, jax.P(workers.axis)

    @jax.jit
    @partial(jax.shard_map, mesh=workers.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def run(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, TURNS, lambda _, x: collective(x, workers.axis), x)

    lies = jax.NamedSharding(workers.mesh, spec)
    for size in SIZES:
        length = size // dtype.dtype.itemsize // count * count
        x = jnp.ones(count * length, dtype, device=lies)
        seconds = _seconds(partial(run, x)) / TURNS
        yield SENT[op.split()[0]](count, length * dtype.dtype.itemsize), seconds
        if seconds > LONG and size > SIZES[0]:  # two sizes make a line
            return


def _seconds(run: Callable[[], Any]) -> float:
    """Median time of a run, on the process where it is largest; a first run is not counted."""

    def once() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - begin

    once()
    own = statistics.median(once() for _ in range(REPEATS))
    return float(gathered_arrays(np.float64(own)).max())


def _with_step(measured: Measured, workers: Workers, target: Target) -> Measured:
    """Adds an overlap, so that the planner's mean takes as long as the step took."""

    def seconds(step: Any, state: Any, batch: Any) -> float:
        def run() -> Any:
            nonlocal state
            state, metrics = step(state, batch)
            return metrics

        return _seconds(run)

    names, types = workers.mesh.axis_names, workers.mesh.axis_types
    here = jax.make_mesh([1] * len(names), names, types, devices=jax.local_devices()[:1])
    step, state, batch = target(workers)
    at = Cluster(workers.num_gradients, Link(math.inf), measured=measured)
    exchange = step_time(SCHEMES["adamw"], optax.tree.size(state.params), at).communication()
    taken, compute = seconds(step, state, batch), seconds(*target(Workers(here, workers.axis)))
    hidden = (compute + exchange - taken) / min(compute, exchange)
    return measured._replace(
        compute=compute,
        overlap=min(hidden, 1.0),
    )


def table(measured: Measured) -> str:
    """Shows what was measured: a line for each collective, with its rate at the largest size.

    Example:
      >>> points = [[1000, 0.001], [125_000_000, 1.25]]
      >>> print(table(Measured(2, {"all-reduce": points}, 8e11)).splitlines()[1])
      all-reduce           latency 1 ms     125 MB in 1.25 s     800 Mbit/s
    """
    lines = [f"{measured.num_workers} workers"]
    for op, points in measured.seconds.items():
        (_, latency), *_, (size, took) = points
        largest = f"{bytes_text(size)} in {seconds_text(took)}"
        lines.append(
            f"{op:<20} latency {seconds_text(latency):<8} {largest:<20} {rate_text(8 * size / took)}"
        )
    lines.append(f"{'packing':<20} {bytes_text(measured.memory_bandwidth / 8)}/s of memory")
    if measured.compute:
        lines.append(
            f"{'a step':<20} {seconds_text(measured.compute)} without its exchange, overlap "
            f"{measured.overlap:.0%}"
        )
    return "\n".join(lines)
