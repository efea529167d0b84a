"""Probe of machines: what collectives, packing and overlap take there, through JAX on a mesh.

One line in a program, in which `lc.mesh.join` has run if there are several processes, or
the command `lioncub probe`. Every process calls it alike. What it returns, `lioncub plan --measured` takes.
"""

import collections
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from lioncub_jax import audit
from lioncub_jax.audit.units import bytes_text, rate_text, seconds_text
from lioncub_jax.exchange import bits
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.placement import Workers, check_workers
from lioncub_jax.tools.plan.model import Measured, parameters_in

__all__ = ["probe", "table"]

SIZES = 2**12, 2**16, 2**20, 2**23, 2**25  # bytes that a worker has
LONG = 0.25  # seconds that repeats take together; what takes longer runs once, and no larger size follows
MOST_REPEATS = 20
PACKED = 2**23  # parameters

# A user's function of workers: a step of `make_train_step`, its first state, and a batch.
Target = Callable[[Workers], tuple[Any, Any, Any]]
Clock = Callable[[], float]


def _all_reduce(x: jax.Array, axis: axes.AxisName) -> jax.Array:
    return axes.varying(lax.pmean(x, axis), axes.names(axis))


def _all_to_all(x: jax.Array, axis: axes.AxisName) -> jax.Array:
    return lax.all_to_all(x.reshape(lax.axis_size(axis), -1), axis, 0, 0).reshape(x.shape)


def _all_gather(x: jax.Array, axis: axes.AxisName) -> jax.Array:
    # A part from every worker, so that the compiler sends all.
    return lax.all_gather(x, axis).reshape(-1)[:: lax.axis_size(axis)]


# By the names of `Measured`: what runs, on which dtype, and what a worker sends of its bytes.
COLLECTIVES = {
    "all-reduce": (_all_reduce, jnp.float32, lambda count: 2 * (count - 1) / count),
    "all-reduce bfloat16": (_all_reduce, jnp.bfloat16, lambda count: 2 * (count - 1) / count),
    "all-to-all": (_all_to_all, jnp.uint32, lambda count: (count - 1) / count),
    "all-gather": (_all_gather, jnp.uint32, lambda count: count - 1),
}


def probe(
    workers: Workers,
    target: Target | None = None,
    *,
    nominal: float | None = None,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Measures collectives between workers, packing, and the overlap of a step.

    Args:
      workers: where the training would run.
      target: makes ``(step, state, batch)`` of workers, to measure a step with its exchange, without it
        (on the devices of one worker), and how much of the exchange overlaps with computing.
      nominal: bits per second of a worker's link, to compare with.
      clock: seconds.

    Returns:
      A `Measured`, the same on all processes: times are those of the slowest.

    Raises:
      TypeError: for no `Workers`.
      ValueError: for one worker, or the mesh of a group.

    Example:
      >>> probe(lc.Workers(mesh, "data"))  # doctest: +SKIP
      Measured(num_workers=8, seconds={'all-reduce': [[3584.0, 0.00021], ...
    """
    check_workers(workers)
    if workers.count < 2 or workers.group:
        raise ValueError(
            f"{workers.count} workers, {workers}: give two workers or more on one axis, without a group"
        )
    seconds = {op: list(_points(op, workers, clock)) for op in COLLECTIVES}
    shape = PACKED // 128, 128
    packing = jax.jit(lambda x: bits.unpack(bits.pack(x > 0), shape[0]).astype(x.dtype))
    # As the planner counts: bits to others and back, and a float32, written and read.
    passed = 8 * 2 * (2 / 8 + 4) * PACKED
    memory_bandwidth = passed / _seconds(partial(packing, jnp.ones(shape)), clock)
    measured = Measured(workers.count, seconds, memory_bandwidth, nominal)
    return _with_step(measured, workers, target, clock) if target else measured


def _points(op: str, workers: Workers, clock: Clock) -> Iterator[tuple[float, float]]:
    """Bytes that a worker sends and seconds, from small to large; all processes end at the same size."""
    collective, dtype, sent = COLLECTIVES[op]
    axis, count = workers.axis, workers.count

    def body(x: jax.Array, times: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, x: collective(x, axis).astype(x.dtype), x)

    spec = jax.P(axis)
    repeated = jax.jit(
        jax.shard_map(body, mesh=workers.mesh, in_specs=(spec, jax.P()), out_specs=spec)
    )
    sharding = jax.NamedSharding(workers.mesh, spec)
    for size in SIZES:
        length = size // dtype.dtype.itemsize // count * count
        x = jax.jit(partial(jnp.ones, count * length, dtype), out_shardings=sharding)()
        once = _seconds(partial(repeated, x, 1), clock)
        sends = sent(count) * length * dtype.dtype.itemsize
        times = max(1, min(MOST_REPEATS, int(LONG / 5 / once)))
        yield sends, _seconds(partial(repeated, x, times), clock) / times if times > 1 else once
        if once > LONG and size > SIZES[0]:  # two sizes make a line
            return


def _seconds(run: Callable[[], Any], clock: Clock) -> float:
    """Median time of a run, on the process where it is largest; a first run is not counted."""

    def once() -> float:
        begin = clock()
        jax.block_until_ready(run())
        return clock() - begin

    once()
    first = _slowest(once())
    repeats = min(MOST_REPEATS, int(LONG / first) or 1) if first else 1
    return _slowest(statistics.median(once() for _ in range(repeats)))


def _slowest(seconds: float) -> float:
    return float(np.max(multihost_utils.process_allgather(np.float64(seconds))))


def _with_step(measured: Measured, workers: Workers, target: Target, clock: Clock) -> Measured:
    """Adds the times of a step with and without its exchange, and how much of that overlaps."""
    step, state, batch = target(workers)
    measured = measured._replace(parameters=parameters_in(state.params))
    program = step.lower(state, batch).compile()
    between, sent = {*axes.names(workers.axis)}, collections.defaultdict[str, float](float)
    for one in audit.collectives(program, workers.mesh):
        if between & {*(one.axes or ())}:
            sent[one.op] += one.times * one.sent_bytes
    exchange = sum(measured.time(op, size) for op, size in sent.items())
    taken = _step_seconds(step, state, batch, clock)
    return _compared(measured, _step_seconds(*target(_alone(workers)), clock), exchange, taken)


def _compared(measured: Measured, compute: float, exchange: float, step: float) -> Measured:
    """Adds an overlap or a slowdown, so that the planner's mean takes as long as the step took."""
    hidden = (compute + exchange - step) / min(compute, exchange)
    return measured._replace(
        compute=compute,
        step=step,
        overlap=min(max(hidden, 0.0), 1.0),
        slowdown=max((step - compute) / exchange, 1.0),
    )


def _step_seconds(step: Any, state: Any, batch: Any, clock: Clock) -> float:
    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return _seconds(run, clock)


def _alone(workers: Workers) -> Workers:
    """The first worker of this process by itself."""
    mesh, names = workers.mesh, axes.names(workers.axis)
    here = next(
        place
        for place, device in np.ndenumerate(mesh.devices)
        if device.process_index == jax.process_index()
    )
    kept = tuple(
        slice(at, at + 1) if name in names else slice(None)
        for name, at in zip(mesh.axis_names, here, strict=True)
    )
    return Workers(
        jax.sharding.Mesh(mesh.devices[kept], mesh.axis_names, axis_types=mesh.axis_types),
        workers.axis,
    )


def table(measured: Measured) -> str:
    """Shows what was measured: a line for each collective, with its rate at the largest size.

    Example:
      >>> points = [[1000, 0.001], [125_000_000, 1.25]]
      >>> print(table(Measured(2, {"all-reduce": points}, 8e11, nominal=1e9)).splitlines()[1])
      all-reduce           latency 1 ms     125 MB in 1.25 s     800 Mbit/s, 80% of 1 Gbit/s
    """
    lines = [f"{measured.num_workers} workers"]
    for op, points in measured.seconds.items():
        size, took = points[-1]
        rate = 8 * size / took
        nominal = measured.nominal
        share = f", {rate / nominal:.0%} of {rate_text(nominal)}" if nominal else ""
        latency = f"latency {seconds_text(points[0][1])}"
        largest = f"{bytes_text(size)} in {seconds_text(took)}"
        lines.append(f"{op:<20} {latency:<16} {largest:<20} {rate_text(rate)}{share}")
    lines.append(f"packing              {bytes_text(measured.memory_bandwidth / 8)}/s of memory")
    if measured.compute and measured.step:
        how = f"{measured.overlap:.0%} of it overlaps"
        if measured.slowdown > 1:
            how = f"{measured.slowdown:.1f} times as long as by itself"
        lines.append(
            f"a step               {seconds_text(measured.step)}, without its exchange "
            f"{seconds_text(measured.compute)}; the exchange: {how}"
        )
    return "\n".join(lines)
