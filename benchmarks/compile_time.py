"""Time to compile a whole training step of 100 and of 300 parameter arrays, against optax's own.

    python benchmarks/compile_time.py [--quick] [--arrays 100 300] [--width 64]

The step of a byte GPT, layers unrolled, on 8 CPU devices: loss, gradient and update, as a user compiles
it. ``optax.lion`` and ``optax.adamw`` are ordinary data parallelism under ``jax.jit``: parameters on every
device, the batch cut, XLA adds the gradients in float32. Two trivial rivals send the same float32 gradients
from inside a ``jax.shard_map``: "mapped" by one ``pmean`` of their tree, and "joined" as one array, which
is what codes in one message are at least. The others are steps of ``lc.make_train_step``. Each is divided
by the optimizer of optax that it stands for. Each is traced, lowered and compiled in a process of its own,
of shapes alone and with no cache on disk; methods take turns, and figures are the medians of the rounds.
Trace seconds are Python's, to the jaxpr of the whole step;
lower seconds go from there to XLA's input; compile seconds are XLA's alone, and compile_cpu those that
all cores spent on it, which other work on the machine lengthens less.
"""

import json
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import report
from aot import programs
from aot.programs import ADAMW, LION
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WORKERS, CONTEXT, HEADS, BYTES = 8, 32, 4, 256
MAPPED, JOINED = "optax.lion, mapped", "optax.lion, joined"
METHODS = {
    LION: LION, MAPPED: MAPPED, JOINED: JOINED, "vote": "vote, 1 bit", "average": "average",
    "owner": "owner, 3 bits", ADAMW: ADAMW, "owner_adamw": "owner_adamw",
}  # fmt: skip
PLAIN = {"owner_adamw": ADAMW, ADAMW: ADAMW}  # what a method is divided by, where it is not LION
PARTS = ("trace", "lower", "compile", "together", "compile_cpu")


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


def mapped(model: programs.Model, mesh: Mesh, joined: bool) -> Any:
    """The step of ``optax.lion`` in a ``shard_map``, with float32 gradients in one array if ``joined``."""
    tx = optax.lion(1e-4)

    def lay(tree: Any, spec: P) -> Any:
        where = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

    def on_worker(params: Any, state: Any, windows: jax.Array) -> Any:
        own = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        value, grads = jax.value_and_grad(loss)(own, windows)
        if joined:
            row, to_tree = ravel_pytree(grads)
            grads = to_tree(jax.lax.pmean(row, "data"))
        else:
            grads = jax.lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    step = jax.shard_map(on_worker, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    rows, length = model.windows
    windows = jax.ShapeDtypeStruct((rows * mesh.size, length), jnp.int32)
    state = jax.eval_shape(tx.init, model.params)
    given = lay(model.params, P()), lay(state, P()), lay(windows, P("data"))
    return jax.jit(step, donate_argnums=(0, 1)).lower(*given)


def one(method: str, leaves: int, width: int) -> dict[str, float]:
    """Seconds of each part, in this process."""
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))
    model = programs.Model(shapes(leaves, width), loss, (2, CONTEXT + 1))
    spent = {"trace": 0.0}

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("jaxpr_trace_duration"):  # of the whole step, and of functions inside it
            spent["trace"] = max(spent["trace"], seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    if method in (MAPPED, JOINED):
        step = mapped(model, mesh, method == JOINED)
    else:
        step, _ = programs.lowered(model, METHODS[method], mesh)
    done, on_cores = time.perf_counter(), time.process_time()
    step.compile()
    spent["lower"] = done - start - spent["trace"]
    spent["compile"] = time.perf_counter() - done
    spent["compile_cpu"] = time.process_time() - on_cores
    spent["together"] = spent["trace"] + spent["lower"] + spent["compile"]
    return spent


def measured(leaves: int, width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each part of each method, each in a process of its own, taking turns."""
    samples: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    for method in [*METHODS] * rounds:
        words = __file__, "--one", method, str(leaves), "--width", str(width)
        samples[method].append(report.in_a_process(*words, environment=environment))

    def median(each: list[dict[str, float]]) -> dict[str, float]:
        return {part: statistics.median(seconds[part] for seconds in each) for part in PARTS}

    return {method: median(each) for method, each in samples.items()}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="100 arrays only")
    parser.add_argument("--arrays", nargs="+", type=int, default=[100, 300])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--width", type=int, default=64, help="of the model; 64 makes small arrays")
    parser.add_argument(
        "--one", nargs=2, metavar=("METHOD", "ARRAYS"), help="this alone, seconds as JSON"
    )
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), args.width)))
        return
    rows = []
    for leaves in [100] if args.quick else args.arrays:
        medians = measured(leaves, args.width, args.rounds)
        for method, seconds in medians.items():
            plain = medians[PLAIN.get(method, LION)]
            over = {part: taken / plain[part] for part, taken in seconds.items()}
            rows.append(
                {"arrays": leaves, "method": method, "seconds": seconds, "over_plain": over}
            )
    about = {"benchmark": "compile_time", "workers": WORKERS, "width": args.width}
    report.finish({**about, "rounds": args.rounds, "rows": rows}, args.save)


if __name__ == "__main__":
    main()
