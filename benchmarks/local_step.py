"""Time of a worker's own step, without the network, against jitted ``optax.lion`` and ``optax.adamw``.

    python benchmarks/local_step.py [--quick]

Of matrices alone ``optax.contrib.muon`` is beside them, of each and of all of one shape. Measured:
blend, pack, the owner's share of counting (or decoding, for momentum at the owner), unpack, weight
decay and update, for W = 8 workers, on one device. The two collectives are replaced by a loopback that
hands a worker its own message, W parts of it for one from each of W workers, so that every array has
its real size and is really written, as a collective would. The candidates take turns in one process; a
sample is as many calls as take 20 ms, each figure is the median over rounds, each ratio the median of
the ratios round by round. Buffers are donated, as in a training step. The floor is the bytes that must
be read and written, once each, at the rate of a copy in the same run.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report

import lioncub_jax as lc
from lioncub_jax import optimizers
from lioncub_jax.exchange import decide, transform, wires
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.plan import Exchange, Plan, make_plan
from lioncub_jax.exchange.wires import pack_message, unpack_message

WORKERS = 8
LION, ADAMW, MUON = "optax.lion", "optax.adamw", "optax.contrib.muon"
FEEDBACK = lc.quantize.error_feedback(lc.quantize.midrise(3))
COPIED = 2**28  # float32 values
SAMPLE_SECONDS, MOST_CALLS = 0.02, 4096
# Shapes by the number of parameters.
MATRICES = "16M in matrices"
LAYER = [(256,), (256, 768), (256, 256), (256,), (256, 1024), (1024, 256)]
MODELS = {
    "1M": [(2**20,)], "4M": [(2**22,)], "16M": [(2**24,)], "64M": [(2**26,)],
    "7M in 54 arrays": LAYER * 9,
    MATRICES: [(512, 512)] * 16 + [(512, 1024), (1024, 512)] * 4 + [(1024, 1024)] * 8,
}  # fmt: skip
QUICK = "4M", "16M", MATRICES


class Candidate(NamedTuple):
    """A jitted step ``(params, state, grads) -> (params, state, grads)`` and its first state."""

    step: Any
    state: Any
    wire_bytes: int = 0  # of its messages: each written once by one side and read once by the other
    params: Any = None  # in shapes of its own


def loopback() -> wires.Wire:
    """The two-phase wire with its collectives short-circuited: what is sent comes back."""

    def collect(message, fmt, axis):
        posted = jax.lax.optimization_barrier(pack_message(message, fmt))
        return unpack_message(posted[:, None], fmt)

    def gather(replies, axis):
        copies = jnp.broadcast_to(replies[0], (WORKERS, replies.shape[1]))
        return jax.lax.optimization_barrier(copies)

    return wires.two_phase()._replace(collect=collect, gather=gather)


def voting(params: Any, **parts: Any) -> Candidate:
    """The whole pipeline with ``communicate`` at its head, for worker 0 of 8."""
    rest = optax.chain(optax.add_decayed_weights(1e-3), optax.scale_by_learning_rate(1e-4))
    quantizer = parts.get("quantizer", lc.quantize.sign())
    rule = parts.get("momentum", lc.momentum.nothing())
    decision = parts.get("decision", decide.default_for(quantizer))
    codec = decision.codec_of(quantizer)
    exchange = Exchange(
        ("data",), group=(), momentum_rule=rule, message_codec=codec, decision=decision, wire=loopback(),
    )  # fmt: skip
    exchange = transform.with_matrices(exchange, params)
    state = lc.communicate(workers="data", momentum=rule).init(params)
    leaves = jax.tree.leaves(params)
    first = jnp.int32(0)
    plan = make_plan(exchange, leaves, WORKERS, 1, first, first, first)
    shared, buckets = plan.shared, [bucket.layout for bucket in plan.buckets]
    parts = [jnp.zeros((x.rows_per_chunk, ROW)) for x in shared] if shared else params
    error = transform.zero_errors(codec, parts)
    if shared:  # whole matrices are dealt
        state = state._replace(mu=transform.flats([None] * len(shared), shared))
        error = transform.flats(error, shared)
    state = state._replace(error=error)
    if decision.init is not None:
        held = []
        for bucket in plan.buckets:
            chunk = jnp.zeros((bucket.layout.rows_per_chunk, ROW))
            held.append(decision.init(chunk, bucket.deal))
        state = state._replace(owner=transform.flats(held, buckets))

    def step(params, state, grads):
        here = make_plan(exchange, leaves, WORKERS, 1, first, first, state.count)
        updates, state = transform.take_step(here, grads, state, None)
        updates, _ = rest.update(updates, rest.init(params), params)
        return optax.apply_updates(params, updates), state, grads

    return Candidate(jax.jit(step, donate_argnums=(0, 1, 2)), state, wire_bytes(plan))


def wire_bytes(plan: Plan) -> int:
    """Bytes of memory that sending and receiving touch: out, in, this owner's reply, all replies."""
    words = 0
    for bucket in plan.buckets:
        words += 2 * WORKERS * bucket.message.words + (1 + WORKERS) * bucket.reply.words
    return 4 * words


def plain(tx: optax.GradientTransformation, params: Any) -> Candidate:
    """An optimizer of optax as it comes, jitted and donated."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return Candidate(jax.jit(step, donate_argnums=(0, 1, 2)), tx.init(params))


def muons(params: Any) -> dict[str, Candidate]:
    """Muon as optax has it, of each matrix and of all of one shape, and at the owner, who has an eighth."""
    stacks = [
        jnp.stack([x for x in params if x.shape == shape]) for shape in {x.shape for x in params}
    ]
    numbers = optax.contrib.MuonDimensionNumbers(1, 2)
    stacked = optax.contrib.muon(
        1e-4, consistent_rms=0.2, muon_weight_dimension_numbers=[numbers] * len(stacks)
    )
    owner = decide.at_owner(optimizers.muon_of_matrix(), rest=optax.scale_by_adam())
    return {
        MUON: plain(optax.contrib.muon(1e-4, consistent_rms=0.2), params),
        f"{MUON}, stacked": plain(stacked, stacks)._replace(params=stacks),
        "owner_muon": voting(params, quantizer=FEEDBACK, decision=owner),
    }


def candidates(params: Any) -> dict[str, Candidate]:
    """The optimizers that are compared, by name."""
    blend = lc.momentum.blend()
    at_owner = lc.decide.at_owner(optax.scale_by_lion(), lc.decide.sign())
    adam = lc.decide.at_owner(optax.scale_by_adam(), lc.decide.codes(2))
    return {
        LION: plain(optax.lion(1e-4, weight_decay=1e-3), params),
        "1-bit vote": voting(params, momentum=blend),
        "2-bit vote": voting(params, momentum=blend, quantizer=lc.quantize.midrise(2)),
        "3-bit vote": voting(params, momentum=blend, quantizer=lc.quantize.midrise(3)),
        "owner, 3 bits + feedback": voting(params, quantizer=FEEDBACK, decision=at_owner),
        ADAMW: plain(optax.adamw(1e-4, weight_decay=1e-3), params),
        "owner_adamw": voting(params, quantizer=FEEDBACK, decision=adam),
        **(muons(params) if [x.ndim for x in jax.tree.leaves(params)] == [2] * len(params) else {}),
    }


# --- Their times


class Timed(NamedTuple):
    """A compiled step, and what it is given: each call takes the results of the one before.

    Attributes:
      run: ``(*arrays) -> arrays``.
      arrays: the first ones.
      program: what was compiled.
      compile_seconds: of tracing and compiling.
      floor_bytes: that must move in a call; 0 where something else takes the time.
    """

    run: Callable[..., tuple[Any, ...]]
    arrays: tuple[Any, ...]
    program: jax.stages.Compiled
    compile_seconds: float
    floor_bytes: int = 0


def compiled(step: Any, arrays: tuple[Any, ...], floor_bytes: int = 0) -> Timed:
    """A jitted step."""
    began = time.perf_counter()
    program = step.lower(*arrays).compile()
    return Timed(program, arrays, program, time.perf_counter() - began, floor_bytes)


def seconds(one: Timed, calls: int) -> tuple[Timed, float]:
    """Seconds of one call among many, of which only the last is waited for; and the next state."""
    arrays, began = one.arrays, time.perf_counter()
    for _ in range(calls):
        arrays = one.run(*arrays)
    jax.block_until_ready(arrays)
    return one._replace(arrays=arrays), (time.perf_counter() - began) / calls


def measured(candidates: dict[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round, all taking turns."""
    calls = {}
    for name in candidates:
        candidates[name], _ = seconds(candidates[name], 2)
        candidates[name], took = seconds(candidates[name], 2)
        calls[name] = min(max(1, round(SAMPLE_SECONDS / took)), MOST_CALLS)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name in candidates:
            candidates[name], took = seconds(candidates[name], calls[name])
            times[name].append(took)
    return times


def local(params: Any) -> dict[str, Timed]:
    """Each step with arrays of its own, parameters of zeros and gradients, and the bytes that must move."""
    timed = {}
    for name, one in candidates(params).items():
        own = one.params or params
        grads = [jax.random.normal(jax.random.key(0), x.shape, x.dtype) for x in own]
        arrays = jax.tree.map(jnp.copy, own), one.state, grads
        # Parameters and state are read and written, gradients read, messages written and read.
        moved = 3 * size_of(params) + 2 * size_of(one.state) + one.wire_bytes
        timed[name] = compiled(one.step, arrays, moved)
    return timed


def rows_of(
    part: str, about: dict[str, Any], steps: dict[str, Timed], rounds: int, rate: float
) -> report.Rows:
    """A row for each step, printed too; ``rate`` is the bytes a second of a copy."""
    rows: report.Rows = []
    times = {name: np.array(taken) for name, taken in measured(steps, rounds).items()}
    for name, one in steps.items():
        ms, memory = 1e3 * times[name], one.program.memory_analysis()
        median, floor = float(np.median(ms)), 1e3 * one.floor_bytes / rate
        rows.append({
            "part": part, **about, "step": name,
            "ms": median, "ms_min": float(ms.min()), "ms_max": float(ms.max()),
            "over_floor": median / floor if floor else None,
            "over_lion": float(np.median(times[name] / times[LION])),
            "over_adamw": float(np.median(times[name] / times[ADAMW])),
            "over_muon": float(np.median(times[name] / times[MUON])) if MUON in times else None,
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "compile_seconds": one.compile_seconds, "rounds": rounds,
        })  # fmt: skip
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def copy_rate(rounds: int) -> float:
    """Bytes a second of a copy, reading and writing counted."""
    on_gpu = jax.devices()[0].platform == "gpu"
    x = jnp.zeros(COPIED if on_gpu else 2**20, jnp.float32)
    step = jax.jit(lambda x: (x + 1,), donate_argnums=0)
    times = measured({"copy": compiled(step, (x,))}, rounds)["copy"]
    return 2 * size_of(x) / statistics.median(times)


def size_of(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only 4M and 16M parameters in float32, and in matrices",
    )
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rate, rows = copy_rate(args.rounds), []
    for dtype in ["float32"] if args.quick else ["float32", "bfloat16"]:
        for parameters in QUICK if args.quick else MODELS:
            steps = local([jnp.zeros(shape, dtype) for shape in MODELS[parameters]])
            about = {"parameters": parameters, "dtype": dtype}
            rows += rows_of("local", about, steps, args.rounds, rate)
    known = report.rows_of(rows, parameters="16M", dtype="float32")
    ratios = {row["step"]: row["over_lion"] for row in known}
    about = {"benchmark": "local_step", "workers": WORKERS, "over_optax_lion": ratios}
    report.finish({**about, "rows": rows}, args.save)


if __name__ == "__main__":
    main()
