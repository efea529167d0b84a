"""How long a whole training step compiles, with 100 and with 300 parameter arrays, against ``optax.lion``.

    python benchmarks/compile_time.py [--quick] [--width 64]

The step of a byte GPT, layers unrolled, on 8 CPU devices: loss, gradient and update, as a user compiles
it. ``optax.lion`` is ordinary data parallelism under ``jax.jit``: parameters on every device, the batch
cut, XLA adds the gradients in float32. The others are steps of ``lc.make_train_step``. Each is traced,
lowered and compiled in a process of its own, of shapes alone and with no cache on disk; methods take
turns, and figures are the least of the rounds: the work is the same each time, and what else the machine
does only adds to it. Trace seconds are Python's, to the jaxpr of the whole step;
lower seconds go from there to XLA's input; compile seconds are XLA's alone, and compile_cpu those that
all cores spent on it, which other work on the machine lengthens less.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import report
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import lioncub_jax as lc

WORKERS, CONTEXT, HEADS, BYTES = 8, 32, 4, 256
LION = "optax.lion"
METHODS: dict[str, Callable[[Any], Any]] = {
    "vote": lambda workers: lc.lion_cub(1e-3, workers=workers),
    "average": lambda workers: lc.distributed_lion(1e-3, average=True, workers=workers),
    "owner": lambda workers: lc.owner_lion(1e-3, workers=workers),
}
PARTS = ("trace", "lower", "compile", "compile_cpu")


def shapes(leaves: int, width: int) -> dict[str, Any]:
    """Parameters by shape: eight arrays a layer, and four more."""
    layers, rest = divmod(leaves - 4, 8)
    assert layers > 0 and rest == 0, f"{leaves} arrays: 4, and 8 a layer"

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {name: array(width, width) for name in ("query", "key", "value", "out")}
    layer |= {"up": array(width, 4 * width), "down": array(4 * width, width)}
    layer |= {"norm1": array(width), "norm2": array(width)}
    rest = {"read": array(BYTES, width), "positions": array(CONTEXT, width)}
    rest |= {"norm": array(width), "write": array(width, BYTES)}
    return {"layers": [dict(layer) for _ in range(layers)], **rest}


def loss(params: Any, windows: jax.Array, rng: Any = None) -> jax.Array:
    """Mean cross-entropy of the bytes that follow, of windows ``[batch, context + 1]``."""
    tokens = windows[:, :-1]
    x = params["read"][tokens] + params["positions"]
    for layer in params["layers"]:
        y = norm(x, layer["norm1"])
        split = [
            (y @ layer[name]).reshape(*y.shape[:2], HEADS, -1) for name in ("query", "key", "value")
        ]
        x += jax.nn.dot_product_attention(*split, is_causal=True).reshape(x.shape) @ layer["out"]
        x += jax.nn.gelu(norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    logits = norm(x, params["norm"]) @ params["write"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def lowered(method: str, leaves: int, width: int) -> Callable[[], jax.stages.Lowered]:
    """What traces and lowers a step, on being called."""
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))
    params = shapes(leaves, width)
    windows = jax.ShapeDtypeStruct(
        (2 * WORKERS, CONTEXT + 1), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    if method != LION:
        workers = lc.Workers(mesh, "data")
        tx = METHODS[method](workers)
        state = lc.training.abstract_state(tx, params, workers)
        step = lc.make_train_step(loss, tx, workers)
        return lambda: step.lower(state, windows)
    tx = optax.lion(1e-3)

    def plain(params: Any, state: Any, windows: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, windows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def whole(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))

    given = jax.tree.map(whole, (params, jax.eval_shape(tx.init, params)))
    return lambda: jax.jit(plain, donate_argnums=(0, 1)).lower(*given, windows)


def one(method: str, leaves: int, width: int) -> dict[str, float]:
    """Seconds of each part, in this process."""
    jax.config.update("jax_num_cpu_devices", WORKERS)
    lower, spent = lowered(method, leaves, width), {"trace": 0.0}

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("jaxpr_trace_duration"):  # of the whole step, and of functions inside it
            spent["trace"] = max(spent["trace"], seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    step = lower()
    done, on_cores = time.perf_counter(), time.process_time()
    step.compile()
    spent["lower"] = done - start - spent["trace"]
    spent["compile"] = time.perf_counter() - done
    spent["compile_cpu"] = time.process_time() - on_cores
    return spent


def measure(
    methods: list[str], leaves: int, width: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Least seconds of each part of each method, each in a process of its own, taking turns."""
    found: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    for _ in range(rounds):
        for method in methods:
            asked = [sys.executable, __file__, "--one", method, str(leaves), "--width", str(width)]
            done = subprocess.run(
                asked, env=environment, capture_output=True, text=True, check=True
            )
            found[method].append(json.loads(done.stdout.splitlines()[-1]))
    return {
        method: {part: min(each[part] for each in found[method]) for part in PARTS}
        for method in methods
    }


def ratios(found: dict[str, dict[str, float]], leaves: int) -> dict[str, float]:
    """Seconds over those of ``optax.lion``: of the worse of vote and owner, and of each method."""
    keys = {}
    for part in ("compile", "compile_cpu", "trace"):
        over = {name: found[name][part] / found[LION][part] for name in found if name != LION}
        keys[f"{part}_over_lion_{leaves}"] = max(over["vote"], over["owner"])
        keys |= {f"{part}_{name}_over_lion_{leaves}": ratio for name, ratio in over.items()}
    return keys


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="100 arrays only")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--width", type=int, default=64, help="of the model; 64 makes small arrays")
    parser.add_argument(
        "--one", nargs=2, metavar=("METHOD", "ARRAYS"), help="only this, seconds as JSON"
    )
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), args.width)))
        return
    head = ["step", "arrays", *(f"{part} s" for part in PARTS), "compile x optax.lion"]
    summary: dict[str, Any] = {"benchmark": "compile_time", "workers": WORKERS, "width": args.width}
    rows, lines = [], []
    for leaves in [100] if args.quick else [100, 300]:
        found = measure([LION, *METHODS], leaves, args.width, args.rounds)
        summary |= ratios(found, leaves)
        for name, seconds in found.items():
            each = [seconds[part] for part in PARTS]
            over = seconds["compile"] / found[LION]["compile"]
            lines.append([name, str(leaves), *(f"{x:.2f}" for x in (*each, over))])
            rows.append([leaves, name, *each])
    Console(width=110).print(report.table("seconds", head, lines))
    report.finish(summary | {"rounds": args.rounds, "rows": rows}, args.save)


if __name__ == "__main__":
    main()
