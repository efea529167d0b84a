"""What a worker computes in a step, without the network, against jitted ``optax.lion``.

    python benchmarks/local_step.py [--quick]

Measured: blend, pack, the owner's share of counting (or decoding, for momentum at the owner), unpack,
weight decay and update, for W = 8 workers, on one device. The two collectives are replaced by a
loopback that hands a worker its own message, W parts of it for one from each of W workers, so that
every array has its real size and is really written, as a collective would. The candidates take turns
in one process; each figure is the median over rounds, each ratio the median of the ratios round by
round. Buffers are donated, as in a training step.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from rich.console import Console

import lioncub_jax as lc
from lioncub_jax.exchange import decide, layout, transform, wires
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.layout import Bucket, Flat
from lioncub_jax.exchange.message import pack, unpack
from lioncub_jax.exchange.pieces import BucketPlan, WorkerPlan
from lioncub_jax.exchange.step import Exchange

WORKERS = 8


class Candidate(NamedTuple):
    """A jitted step ``(params, state, grads) -> (params, state, grads)`` and its first state."""

    step: Any
    state: Any
    wire_bytes: int = 0  # of its messages: each written once by one side and read once by the other


def loopback() -> wires.Wire:
    """The two-phase wire with its collectives short-circuited: what is sent comes back."""

    def collect(message, fmt, axis):
        posted = jax.lax.optimization_barrier(pack(message, fmt))
        return unpack(posted[:, None], fmt)

    def gather(replies, axis):
        copies = jnp.broadcast_to(replies[0], (WORKERS, replies.shape[1]))
        return jax.lax.optimization_barrier(copies)

    return wires.two_phase()._replace(collect=collect, gather=gather)


def voting(params: Any, **parts: Any) -> Candidate:
    """The whole pipeline with ``communicate`` at its head, for worker 0 of 8."""
    rest = optax.chain(optax.add_decayed_weights(1e-3), optax.scale_by_learning_rate(1e-4))
    quantizer = parts.get("quantizer", lc.quantize.sign())
    memory = parts.get("memory", lc.momentum.nothing())
    decision = parts.get("decision", decide.default_for(quantizer))
    code = decision.code_of(quantizer)
    exchange = Exchange(
        ("data",), group=(), memory=memory, code=code, decision=decision, wire=loopback()
    )
    state = lc.communicate(workers="data", memory=memory).init(params)
    leaves = jax.tree.leaves(params)
    buckets = layout.buckets(leaves, WORKERS)
    state = state._replace(error=transform.zero_errors(code, params))
    if decision.has_state:
        slices = [
            Flat(decision.init(jnp.zeros((b.rows_per_chunk, ROW), b.dtype)), b) for b in buckets
        ]
        state = state._replace(owner=tuple(slices))

    def step(params, state, grads):
        here, sizes = [], [None] * len(leaves)
        for bucket in buckets:
            pieces = layout.pieces([bucket], state.count)
            fmt = transform.format_of(exchange, bucket)
            rows = layout.row_sizes(bucket, sizes, code.midtread or decision.has_state)
            here.append(BucketPlan(bucket, pieces, fmt, rows, shard=0, num_shards=1))
        plan = WorkerPlan(
            ("data",), worker=jnp.int32(0), num_workers=WORKERS, num_steps=state.count, buckets=here,
            group_buckets=(), row_sizes=sizes, abstains_per_bucket=False,
        )  # fmt: skip
        updates, state = transform.take_step(exchange, plan, grads, state, None)
        updates, _ = rest.update(updates, rest.init(params), params)
        return optax.apply_updates(params, updates), state, grads

    return Candidate(jax.jit(step, donate_argnums=(0, 1, 2)), state, wire_bytes(exchange, buckets))


def wire_bytes(exchange: Exchange, buckets: Sequence[Bucket]) -> int:
    """Bytes of memory that sending and receiving touch: out, in, this owner's reply, all replies."""
    formats = [transform.format_of(exchange, bucket) for bucket in buckets]
    return 4 * sum(
        2 * WORKERS * fmt.message.words + (1 + WORKERS) * fmt.reply.words for fmt in formats
    )


def plain(tx: optax.GradientTransformation, params: Any) -> Candidate:
    """An optimizer of optax as it comes, jitted and donated."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return Candidate(jax.jit(step, donate_argnums=(0, 1, 2)), tx.init(params))


def candidates(params: Any) -> dict[str, Candidate]:
    """The optimizers that are compared, by name."""
    blend = lc.momentum.blend()
    at_owner = lc.decide.at_owner(optax.scale_by_lion(), lc.decide.sign())
    feedback = lc.quantize.error_feedback(lc.quantize.midrise(3))
    return {
        "optax.lion": plain(optax.lion(1e-4, weight_decay=1e-3), params),
        "1-bit vote": voting(params, memory=blend),
        "2-bit vote": voting(params, memory=blend, quantizer=lc.quantize.midrise(2)),
        "3-bit vote": voting(params, memory=blend, quantizer=lc.quantize.midrise(3)),
        "owner, 3 bits + feedback": voting(params, quantizer=feedback, decision=at_owner),
    }


def measure(shapes: Sequence[tuple[int, ...]], dtype: Any, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each candidate in each round, all in one process, taking turns."""
    rng = np.random.default_rng(0)

    def normal() -> list[jax.Array]:
        drawn = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        return [jnp.asarray(x).astype(dtype) for x in drawn]

    running = {}
    for name, candidate in candidates(normal()).items():
        running[name] = candidate.step, (normal(), candidate.state, normal())
    times: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds + 2):
        for name, (step, arrays) in running.items():
            start = time.perf_counter()
            arrays = jax.block_until_ready(step(*arrays))
            if turn >= 2:  # the first turns compile and touch the memory
                times[name].append(1e3 * (time.perf_counter() - start))
            running[name] = step, arrays
    return times


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="only 4M and 16M parameters in one array, in float32"
    )
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    results: list[list[Any]] = []
    keys: dict[str, float] = {}
    powers = [22, 24] if args.quick else [20, 22, 24, 26]
    models = {f"{2 ** (power - 20)}M": [(2**power,)] for power in powers}
    if not args.quick:
        layer = [(256,), (256, 768), (256, 256), (256,), (256, 1024), (1024, 256)]
        models["7M in 54 arrays"] = layer * 9
    for dtype in [jnp.float32] if args.quick else [jnp.float32, jnp.bfloat16]:
        for parameters, shapes in models.items():
            times = measure(shapes, dtype, args.rounds)
            for name, ms in times.items():
                pairs = zip(ms, times["optax.lion"], strict=True)
                ratio = statistics.median(mine / lion for mine, lion in pairs)
                median = statistics.median(ms)
                label = parameters, jnp.dtype(dtype).name, name
                results.append([*label, median, min(ms), max(ms), ratio])
                if parameters == "16M" and dtype == jnp.float32:
                    keys[name] = ratio
    head = ["parameters", "dtype", "step", "ms (median)", "min", "max", "x optax.lion"]
    lines = [[*row[:3], *(f"{x:.2f}" for x in row[3:])] for row in results]
    Console(width=110).print(report.table("one worker's step", head, lines))
    summary = {
        "benchmark": "local_step",
        "workers": WORKERS,
        "ratio_vs_optax_lion": keys["1-bit vote"],
        "ratio_owner_3bit": keys["owner, 3 bits + feedback"],
        "rounds": args.rounds,
        "rows": results,
    }
    report.finish(summary, args.save)


if __name__ == "__main__":
    main()
