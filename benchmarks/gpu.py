"""A worker's step on one CUDA GPU, piece by piece, against the bytes that it must move.

    python benchmarks/gpu.py [--sizes 16M,64M] [--rounds 15] [--budget 480] [--save FILE]

On a bare machine with one GPU, from the root of this repository (the driver must be 525 or newer;
for 580 or newer ``jax[cuda13]`` will do too):

    python -m pip install -e '.[plots]' 'jax[cuda12]'

Without a GPU, with the extra `cuda`, the same ops are compiled for a described one and read:

    python benchmarks/gpu.py --predict [h100-8] [--sizes 16M,64M] [--save FILE]

Measured, for float32 and bfloat16: the local steps of ``local_step.py`` for worker 0 of 8, the
pieces pack, tally and unpack by themselves, and the training step of ``examples/train_gpt.py`` with
one worker. Each stands beside jitted ``optax.lion`` and beside its floor: the bytes of what it must
read and write, once each, at the bandwidth of a copy measured in the same run. What candidates share
(parameters, gradients) is in memory once, and every result takes the place of an argument.

A sample is as many calls as take 20 ms, waited for once at the end, so that the cost of starting them
is hidden as in training. All take turns in one process; figures are medians over rounds, ratios the
medians of the ratios round by round. On a CPU, ``--sizes 1M,4M --rounds 3`` tries the program out.

Predicted is, by shape and without a run, that an op takes as long as its kernels' bytes do at the
bandwidth of the memory. Rows of ``results/gpu_predicted.jsonl`` stand beside those measured on a GPU.
"""

import argparse
import contextlib
import math
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import local_step
import report
from aot import machines, reading
from local_step import WORKERS
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

import lioncub_jax as lc
from lioncub_jax.exchange import bits, layout
from lioncub_jax.exchange.decide import Inbox, Slice
from lioncub_jax.exchange.quantize import EncodeContext, Message
from lioncub_jax.exchange.wires import Format

DTYPES = jnp.float32, jnp.bfloat16
SIZES = "16M,64M,256M,1B"
UNITS = {"K": 2**10, "M": 2**20, "B": 2**30}
LARGEST = 2**31 - 1  # elements are counted in int32
COPIED = {True: 2**28, False: 2**25}  # float32 values on a GPU and elsewhere
SAMPLE_MS = 20.0
MOST_CALLS = 4096
BASELINE = "optax.lion"
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
PREDICTED = pathlib.Path(__file__).parent / "results" / "gpu_predicted.jsonl"
AGREES = 1.25  # a row confirms its prediction up to this factor, either way

Store = dict[str, Any]  # arrays, or trees of them, by name


class Op(NamedTuple):
    """A program that takes arrays from the store by name, and whose first results replace some.

    Attributes:
      fn: jitted; it donates what it replaces.
      takes: names of its arguments.
      gives: names of its results; what is left over is not kept.
      floor: bytes that it must move, or None where memory is not what takes its time.
    """

    fn: Any
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    floor: int | None


class Program(NamedTuple):
    """An op, compiled."""

    op: Op
    run: jax.stages.Compiled

    def __call__(self, store: Store) -> Any:
        results = self.run(*(store[name] for name in self.op.takes))
        store.update(zip(self.op.gives, results, strict=False))
        return results


class Skipped(Exception):
    """A size that was not measured; the message says why."""


def every(size: int, dtype: Any) -> tuple[dict[str, Op], Store]:
    """All ops of this size, and the shapes of what they take."""
    whole, shapes = steps(size, dtype)
    parts, more = pieces(size, dtype)
    return whole | parts, shapes | more


def steps(size: int, dtype: Any) -> tuple[dict[str, Op], Store]:
    """The whole local steps, and the shapes of what they take."""
    params = {"w": jax.ShapeDtypeStruct((size,), dtype)}
    found: dict[str, local_step.Candidate] = {}

    def states(params: Any) -> Any:
        found.update(local_step.candidates(params))
        return {name: candidate.state for name, candidate in found.items()}

    shapes: Store = {"params": params, "grads": params}
    held = jax.eval_shape(states, params)
    ops = {}
    for name in found:
        state = shapes[f"state of {name}"] = held[name]
        where = "params", f"state of {name}", "grads"
        # Parameters and state are read and written, gradients read, messages written and read.
        floor = 2 * size_of(params) + 2 * size_of(state) + size_of(params) + found[name].wire_bytes
        ops[name] = Op(found[name].step, where, where, floor)
    return ops, shapes


def pieces(size: int, dtype: Any) -> tuple[dict[str, Op], Store]:
    """Pack, tally and unpack of one-bit votes by themselves, and the shapes of what they take."""
    sign, decision = lc.quantize.sign(), lc.decide.majority()
    grads = {"w": jax.ShapeDtypeStruct((size,), dtype)}
    (bucket,) = layout.buckets([grads["w"]], WORKERS, axes=[frozenset()])
    (piece_of_it,) = bucket.pieces
    form = Format.of(bucket, sign, decision)
    where = Slice(1, bucket.chunk, WORKERS, sign, dtype, None)

    def pack(grads: Any, message: Any) -> tuple[Message]:
        now, me = jnp.int32(0), jnp.int32(0)
        drawn = bits.draw(now, me, WORKERS)
        place = EncodeContext(bucket, piece_of_it, 0, now, me, WORKERS, drawn, None, False)
        return (
            sign.encode(layout.piece_to_rows(grads["w"].astype(jnp.float32), piece_of_it), place),
        )

    def count(payload: jax.Array, voted: jax.Array, counted: Any) -> Any:
        return (counted_by_adders(payload, voted),)

    def unpack(replies: jax.Array, updates: jax.Array) -> tuple[jax.Array]:
        reply, _ = form.unpack_reply(replies)
        values = decision.coder.decode(reply.planes, reply.rows, where)
        return (values.reshape(-1)[:size].astype(updates.dtype),)

    given: Store = {
        "payload": jax.ShapeDtypeStruct((WORKERS, form.message.of_plane), jnp.uint32),
        "voted": jax.ShapeDtypeStruct((WORKERS, bits.row_words(bucket.chunk)), jnp.uint32),
        "replies": jax.ShapeDtypeStruct((WORKERS, form.reply.size), jnp.uint32),
        "updates": grads["w"],
    }
    (given["message"],) = jax.eval_shape(pack, grads, None)
    (given["counted"],) = jax.eval_shape(count, given["payload"], given["voted"], None)
    ops = {
        # Values are read; words of codes and a bit for each row are written.
        "pack": piece(pack, ("grads", "message"), {"grads": grads, **given}),
        # The words of all workers are read, for the slice of one owner; its reply is written.
        "tally": piece(count, ("payload", "voted", "counted"), given),
        # The words of all owners are read; an update of the parameters' dtype is written.
        "unpack": piece(unpack, ("replies", "updates"), given),
    }
    return ops, given


def counted_by_adders(payload: jax.Array, voted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The owner's decision: ``uint32[W, words]`` and row words ``uint32[W, blocks]`` to one of each."""
    workers, words = payload.shape
    everyone = jnp.ones(workers, jnp.uint32)
    inbox = Inbox([payload[:, None]], voted[:, None], None, everyone, jnp.uint32(workers))
    rows = words // bits.WORDS_PER_ROW
    where = Slice(1, rows, workers, lc.quantize.sign(), jnp.float32, None)
    reply, _ = lc.decide.majority().answer(inbox, where, bits.coin(0, words, 0)[None], ())
    assert reply.rows is not None
    return reply.planes[0][0], reply.rows[0]


def piece(fn: Callable[..., Any], takes: tuple[str, ...], shapes: Store) -> Op:
    """An op that reads all but its last argument, whose place the result takes."""
    last = len(takes) - 1
    # The last argument is kept, although unused, because only a kept one lends its memory.
    jitted = jax.jit(fn, donate_argnums=last, keep_unused=True)
    return Op(jitted, takes, takes[-1:], sum(size_of(shapes[name]) for name in takes))


def size_of(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def filled(shapes: Store) -> Store:
    """Arrays of these shapes: states of zeros, all else of hashed bits."""
    return {
        name: jax.tree.map(_zeros if name.startswith("state") else _noise, shape)
        for name, shape in shapes.items()
    }


def _zeros(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


@jax.jit(static_argnums=0)
def _hashed(like: Any) -> jax.Array:
    # A hash and not jax.random, whose generator takes several times the memory of its result.
    words = bits.coin(0, math.prod(like.shape), 0).reshape(like.shape)
    if jnp.issubdtype(like.dtype, jnp.floating):
        return (words.astype(jnp.int32).astype(jnp.float32) / 2.0**31).astype(like.dtype)
    return words.astype(like.dtype)


def _noise(like: Any) -> jax.Array:
    return _hashed(jax.ShapeDtypeStruct(like.shape, like.dtype))


def compiled(ops: dict[str, Op], shapes: Store) -> dict[str, Program]:
    """Programs of all ops, for the memory that is there."""
    programs = {}
    for name, op in ops.items():
        lowered = op.fn.lower(*(shapes[argument] for argument in op.takes))
        programs[name] = Program(op, lowered.compile())
    check_memory(shapes, programs)
    return programs


def check_memory(shapes: Store, programs: dict[str, Program]) -> None:
    """Refuses what the device says it cannot hold; where it says nothing, nothing is refused."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    temporary = max(
        program.run.memory_analysis().temp_size_in_bytes for program in programs.values()
    )
    needed = size_of(list(shapes.values())) + temporary
    if needed > 0.95 * free:  # the rest is lost between arrays
        raise Skipped(f"memory: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def calls_of(program: Program, store: Store) -> int:
    """How many calls take as long as a sample must; warms up on the way."""
    calls = 1
    sample(program, store, 2)
    while (ms := sample(program, store, calls) * calls) < SAMPLE_MS and calls < MOST_CALLS:
        calls = min(MOST_CALLS, max(2 * calls, math.ceil(calls * SAMPLE_MS / ms)))
    return calls


def sample(program: Program, store: Store, calls: int) -> float:
    """Milliseconds of one call among many, of which only the last is waited for."""
    start = time.perf_counter()
    for _ in range(calls):
        results = program(store)
    jax.block_until_ready(results)
    return 1e3 * (time.perf_counter() - start) / calls


class Clock:
    """The time that is left of a budget, and how much of it the last size took."""

    def __init__(self, budget: float):
        self.ends = time.monotonic() + budget
        self.budget, self.last = budget, 0.0

    def left(self) -> float:
        return self.ends - time.monotonic()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A size, unless it would not be done in time: it takes no less than a smaller one did."""
        began = self.left()
        if began <= self.last:
            raise Skipped(
                f"time: {max(began, 0):.0f} of {self.budget:g} s were left, and the size before took "
                f"{self.last:.0f} s"
            )
        yield
        self.last = began - self.left()


class Times(NamedTuple):
    """Milliseconds in each round, and how many calls a sample was."""

    ms: dict[str, list[float]]
    calls: dict[str, int]


def timed(programs: dict[str, Program], store: Store, rounds: int, clock: Clock) -> Times:
    """All programs, taking turns; fewer rounds than asked, but one at least, when time runs out."""
    calls = {name: calls_of(program, store) for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds):
        if turn and clock.left() <= 0:
            break
        for name, program in programs.items():
            times[name].append(sample(program, store, calls[name]))
    return Times(times, calls)


def summary(ms: list[float]) -> dict[str, float]:
    return {"ms": statistics.median(ms), "ms_min": min(ms), "ms_max": max(ms)}


def ratio(mine: Iterable[float], theirs: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def copy_bandwidth(rounds: int, clock: Clock) -> dict[str, Any]:
    """Bytes per second of a copy, reading and writing counted; what floors are computed with."""
    count = COPIED[jax.devices()[0].platform == "gpu"]
    shapes = {"copied": jax.ShapeDtypeStruct((count,), jnp.float32)}
    fn = jax.jit(lambda x: (x + 1,), donate_argnums=0)
    moved = 2 * size_of(shapes)
    ops = {"copy": Op(fn, ("copied",), ("copied",), moved)}
    programs = compiled(ops, shapes)
    times = timed(programs, filled(shapes), rounds, clock).ms["copy"]
    return {"bytes": moved, "gb_per_s": moved / 1e6 / statistics.median(times), **summary(times)}


def measure(
    size: int, dtype: Any, rounds: int, clock: Clock, bandwidth: float
) -> list[dict[str, Any]]:
    """One row for each op at this size; raises ``Skipped`` where memory does not suffice."""
    ops, shapes = every(size, dtype)
    try:
        programs = compiled(ops, shapes)
        store = filled(shapes)
        times = timed(programs, store, rounds, clock)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise Skipped(f"memory: {str(error).splitlines()[0]}") from None
    return [
        about(size, dtype) | {"op": name} | row(program, times, name, size, bandwidth)
        for name, program in programs.items()
    ]


def about(size: int, dtype: Any) -> dict[str, str]:
    return {"parameters": label(size), "dtype": jnp.dtype(dtype).name}


def row(program: Program, times: Times, name: str, size: int, bandwidth: float) -> dict[str, Any]:
    """What is reported of one op; ``bandwidth`` in GB/s."""
    floor = program.op.floor
    floor_ms = None if floor is None else floor / 1e6 / bandwidth
    figures = summary(times.ms[name])
    return figures | {
        "floor_bytes": floor,
        "floor_ms": floor_ms,
        "x_floor": floor_ms and figures["ms"] / floor_ms,
        "x_optax_lion": ratio(times.ms[name], times.ms[BASELINE]),
        "temp_bytes_per_parameter": program.run.memory_analysis().temp_size_in_bytes / size,
        "kernels": kernels(program.run.as_text()),
        "calls": times.calls[name],
        "rounds": len(times.ms[name]),
    }


_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_LAUNCH = re.compile(r" (?:fusion|custom-call|copy|copy-start)\(")
_FUSED = re.compile(r" fusion\(.*?, calls=%?([\w.\-]+)")


def kernels(text: str) -> int:
    """Kernels and copies in the text of a compiled program; those in a loop count once.

    XLA for GPUs puts every operation into a fusion, but for copies and calls of libraries. On a CPU
    the number says little.
    """
    fused, found, where = set(_FUSED.findall(text)), 0, ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            where = header[1]
        elif where not in fused and _LAUNCH.search(line):
            found += 1
    return found


def predicted(machine: str, size: int, dtype: Any) -> list[dict[str, Any]]:
    """One row for each op at this size, compiled by shape for a device of a machine; nothing is run."""
    ops, shapes = every(size, dtype)
    where = jax.sharding.SingleDeviceSharding(machines.device_of(machine))

    def there(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    programs = compiled(ops, jax.tree.map(there, shapes))
    rows = {name: prediction(program, size) for name, program in programs.items()}
    lion = rows[BASELINE]["accessed_bytes"]
    given = {"machine": machine} | about(size, dtype)
    return [
        given | {"op": name} | one | {"x_optax_lion": one["accessed_bytes"] / lion}
        for name, one in rows.items()
    ]


def prediction(program: Program, size: int) -> dict[str, Any]:
    """Of a program for a described GPU: what its kernels move, and how long that takes its memory."""
    text, floor = program.run.as_text(), program.op.floor
    assert floor is not None, "every op of a size has one"
    moved = {kernel.name: kernel.bytes for kernel in reading.kernels(text)}
    accessed = sum(moved.values())
    return {
        "floor_bytes": floor,
        "accessed_bytes": accessed,
        "x_floor": accessed / floor,
        "ms": 1e3 * accessed / machines.gpu_bandwidth(),
        "temp_bytes_per_parameter": program.run.memory_analysis().temp_size_in_bytes / size,
        "kernels": kernels(text),
        # Where the bytes are: of each kernel with a twentieth of them, per parameter.
        "largest": {name: b / size for name, b in moved.items() if b >= accessed / 20},
    }


Predictions = dict[tuple[str, str, str], dict[str, Any]]


def kept(path: pathlib.Path) -> Predictions:
    """The predictions of a file by parameters, dtype and op; of several for one, the last."""
    return {name_of(row): row for row in report.read(path)}


def compared(one: dict[str, Any], known: Predictions) -> dict[str, Any]:
    """What was predicted of a row, and the ratio to its floor over the predicted ratio, or None."""
    foretold = known.get(name_of(one))
    if foretold is None:
        return {"predicted": None, "x_predicted": None}
    keys = "machine", "jax", "x_floor", "x_optax_lion", "kernels"
    return {
        "predicted": {key: foretold[key] for key in keys},
        "x_predicted": one["x_floor"] / foretold["x_floor"],
    }


def demo(argv: list[str], rounds: int, clock: Clock) -> dict[str, Any]:
    """The example's training step with one worker, who has nobody to send to, by both optimizers."""
    names = {"lion_cub": "lion-cub", BASELINE: "lion"}
    runs = {name: prepared([*argv, "--optimizer", recipe]) for name, recipe in names.items()}
    store: Store = {}
    programs = {}
    for name, (run, batch) in runs.items():
        store |= {"batch": batch, name: run.state}
        op = Op(None, (name, "batch"), (name,), None)
        programs[name] = Program(op, run.step)
    run, _ = runs[BASELINE]
    size = sum(x.size for x in jax.tree.leaves(run.state.params))
    times = timed(programs, store, rounds, clock)
    rows = {name: row(program, times, name, size, 0.0) for name, program in programs.items()}
    return {"parameters": size, "tokens": run.rows * run.model.context, "steps": rows}


def prepared(argv: list[str]) -> tuple[Any, jax.Array]:
    """The example's run and batch as its own command line would compile it, for a mesh of one worker."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import train_gpt
    from gpt import corpus, meshes, options, training

    args = options.make_parser(train_gpt.__doc__).parse_args([*argv, "--workers", "1"])
    options.settle(args)
    run = train_gpt.prepare(args, corpus.standard_library(), meshes.build(args.mesh))
    return run, training.next_batch(run, 1)


def size_from(text: str) -> int:
    """``"16M"`` as a number of parameters."""
    number, unit = text[:-1], UNITS.get(text[-1:], 0)
    size = int(number) * unit if number.isdecimal() else 0
    if not 0 < size <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: give whole numbers with K, M or B (of 1024), below 2B, such as {SIZES}"
        )
    return size


def sizes_from(text: str) -> list[int]:
    return sorted({size_from(part) for part in text.split(",")})


def label(size: int) -> str:
    """Undoes ``size_from``."""
    unit = max((u for u in UNITS if size % UNITS[u] == 0), key=lambda u: UNITS[u])
    return f"{size // UNITS[unit]}{unit}"


def make_parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--predict", nargs="?", const="h100-8", choices=machines.gpus(), metavar="MACHINE",
        help="compile for a device of this machine (default %(const)s) and read; measure nothing",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=sizes_from, metavar="N,...", help=f"parameters, on a GPU {SIZES} by default"
    )
    parser.add_argument("--rounds", type=int, default=15, help="default %(default)s")
    parser.add_argument(
        "--budget", type=float, default=480, metavar="SECONDS",
        help="the largest sizes are left out if it would not do (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--skip-demo", action="store_true", help="leave out the training step of the example"
    )
    return parser


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses what cannot be measured."""
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: give at least 1")
    if not 0 < args.budget < math.inf:
        parser.error(f"--budget {args.budget:g}: give a number of seconds above 0")
    if args.predict:
        # Before JAX starts: the compiler for a GPU needs none, and must choose kernels without trying.
        os.environ |= machines.environment(machines.named(args.predict))
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    if args.sizes is None and device.platform != "gpu" and not args.predict:
        parser.error(
            f"JAX {jax.__version__} finds no GPU, only {device.device_kind!r}. On a machine with one run: "
            "python -m pip install -e '.[plots]' 'jax[cuda12]'; or try this program out on small sizes: "
            "--sizes 1M,4M --rounds 3; or compile for a GPU that is not there: --predict"
        )
    args.sizes = args.sizes or sizes_from(SIZES)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    settle(parser, args)
    if args.predict:
        try:
            predict(args.predict, args.sizes, args.save)
        except ModuleNotFoundError as error:
            parser.error(str(error))
        return
    columns = TextColumn("{task.description}"), *Progress.get_default_columns()[1:3]
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        found = everything(args, progress)
    show(found)
    given = {"benchmark": "gpu", "platform": jax.devices()[0].platform, "workers": WORKERS}
    report.finish(given | {"rounds": args.rounds} | found, args.save)


def predict(machine: str, sizes: list[int], save: pathlib.Path | None) -> None:
    """Predicts all ops: a line for each in the file, a table for people, at last the worst of each op."""
    rows = [one for size in sizes for dtype in DTYPES for one in predicted(machine, size, dtype)]
    report.append(save, [one | report.provenance() for one in rows])
    keys = "ms", "x_floor", "x_optax_lion", "temp_bytes_per_parameter", "kernels"
    head = ["parameters", "dtype", "op", "ms", "x floor", "x lion", "temp B/param", "kernels"]
    lines = [[*name_of(one), *(_short(one[key]) for key in keys)] for one in rows]
    Console(width=120).print(report.table(f"compiled for {machine}, not run", head, lines))
    worst = {one["op"]: one["x_floor"] for one in sorted(rows, key=lambda one: one["x_floor"])}
    given = {"benchmark": "gpu_predicted", "machine": machine}
    report.finish(given | {"x_floor_at_most": worst}, None)


def everything(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What the JSON holds: the copy, the training step, a row for each op and size, what is missing."""
    clock, rows, skipped, trained = Clock(args.budget), [], [], None
    configs = [(size, dtype) for size in args.sizes for dtype in DTYPES]
    task = progress.add_task("copy", total=len(configs) + 1 + (not args.skip_demo))
    copied = copy_bandwidth(args.rounds, clock)
    progress.advance(task)
    if not args.skip_demo:
        progress.update(task, description="training step")
        trained = demo([], args.rounds, clock)
        progress.advance(task)
    for size, dtype in configs:
        name = about(size, dtype)
        progress.update(task, description=" ".join(name.values()))
        try:
            with clock.one():
                rows += measure(size, dtype, args.rounds, clock, copied["gb_per_s"])
        except Skipped as why:
            skipped.append(name | {"why": str(why)})
        progress.advance(task)
    known = kept(PREDICTED) if jax.devices()[0].platform == "gpu" else {}
    rows = [one | compared(one, known) for one in rows]
    return {"copy": copied, "rows": rows, "demo": trained, "skipped": skipped}


def show(found: dict[str, Any]) -> None:
    """The same for people."""
    console = Console(width=140)
    title = f"{jax.devices()[0].device_kind}, a copy moves {found['copy']['gb_per_s']:.0f} GB/s"
    head = ["parameters", "dtype", "op", "ms, median", "min", "max", "x floor (predicted)"]
    head += ["x lion (predicted)", "temp B/param", "kernels (predicted)"]
    measured = "ms", "ms_min", "ms_max"
    lines = [
        [
            *name_of(one), *(_short(one[key]) for key in measured), _beside(one, "x_floor"),
            _beside(one, "x_optax_lion"), _short(one["temp_bytes_per_parameter"]), _beside(one, "kernels"),
        ]
        for one in [*_training_rows(found["demo"]), *found["rows"]]
    ]  # fmt: skip
    console.print(report.table(title, head, lines))
    for one in found["skipped"]:
        console.print(f"skipped {one['parameters']} {one['dtype']}: {one['why']}")
    ratios = [one["x_predicted"] for one in found["rows"] if one["predicted"]]
    confirmed = sum(1 / AGREES <= ratio <= AGREES for ratio in ratios)
    console.print(
        f"{confirmed} of {len(ratios)} predicted ratios to the floor hold, up to a factor of {AGREES} "
        f"either way; {len(found['rows']) - len(ratios)} rows have no prediction"
    )


def name_of(one: dict[str, Any]) -> tuple[str, str, str]:
    """By which a row is known."""
    return one["parameters"], one["dtype"], one["op"]


def _beside(one: dict[str, Any], key: str) -> str:
    """A figure and, in brackets, its prediction."""
    foretold = one.get("predicted")
    return f"{_short(one[key])} ({_short(foretold[key]) if foretold else 'none'})"


def _short(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x)


def _training_rows(trained: dict[str, Any] | None) -> list[dict[str, Any]]:
    if trained is None:
        return []
    given = {"parameters": f"{trained['parameters']:,}", "dtype": "float32"}
    return [given | {"op": f"train, {name}"} | one for name, one in trained["steps"].items()]


if __name__ == "__main__":
    main()
