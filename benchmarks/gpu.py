"""Times of a worker's step on one CUDA GPU: milliseconds over a floor, compiling, memory, a GPT of 124M.

    python -m pip install -e '.[plots]' 'jax[cuda12]'    # on a bare machine with a driver of 525 or newer
    python benchmarks/gpu.py --save benchmarks/results/gpu.jsonl

* "local": the steps of ``local_step.py``, for worker 0 of 8, in float32 and bfloat16. A copy of the message
  stands for each collective. The floor is the bytes that must be read and written, once each, at the rate
  of a copy in the same run.
* "gpt": loss and gradient of a GPT of 124M parameters on 8 windows of 1,024 tokens, and one of these steps.
* "exchange", with two GPUs or more: that GPT by ``make_train_step``, a worker for each GPU, over NCCL.

With one GPU nothing goes over a network. Candidates take turns; a figure is a median over rounds, and a
sample is as many calls as take 20 ms. ``--sizes 65536 --rounds 2 --model gpt-2m`` tries it out on a CPU.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import local_step
import optax
import report
from aot import programs
from local_step import LION, Timed, compiled, measured

import lioncub_jax as lc

SIZES = 2**24, 2**26, 2**28
COPIED = 2**28  # float32 values
ADAMW = "optax.adamw"


def size_of(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rows_of(
    part: str, about: dict[str, Any], candidates: dict[str, Timed], rounds: int, rate: float
) -> list[dict[str, Any]]:
    """A row for each candidate; ``rate`` is the bytes a second of a copy."""
    memory = {name: one.program.memory_analysis() for name, one in candidates.items()}
    times = measured(candidates, rounds)

    def ratio(name: str, other: str) -> float | None:
        return local_step.over(times[name], times[other]) if other in times else None

    return [
        {"part": part, **about, "step": name, "ms": 1e3 * statistics.median(times[name])}
        | {"ms_min": 1e3 * min(times[name]), "ms_max": 1e3 * max(times[name])}
        | {
            "over_floor": statistics.median(times[name]) * rate / one.floor_bytes
            if one.floor_bytes
            else None
        }
        | {"over_lion": ratio(name, LION), "over_adamw": ratio(name, ADAMW)}
        | {"temporary_bytes": memory[name].temp_size_in_bytes}
        | {"argument_bytes": memory[name].argument_size_in_bytes}
        | {"compile_seconds": one.compile_seconds, "rounds": rounds}
        for name, one in candidates.items()
    ]


def copy_rate(rounds: int) -> float:
    """Bytes a second of a copy, reading and writing counted."""
    on_gpu = jax.devices()[0].platform == "gpu"
    x = jnp.zeros(COPIED if on_gpu else 2**20, jnp.float32)
    step = jax.jit(lambda x: (x + 1,), donate_argnums=0)
    times = measured({"copy": compiled(step, (x,))}, rounds)["copy"]
    return 2 * size_of(x) / statistics.median(times)


def candidates(params: Any) -> dict[str, local_step.Candidate]:
    """The local steps, and AdamW alone and at the owner."""
    fed = lc.quantize.error_feedback(lc.quantize.midrise(3))
    adam = lc.decide.at_owner(optax.scale_by_adam(), lc.decide.codes(2))
    return local_step.candidates(params) | {
        ADAMW: local_step.plain(optax.adamw(1e-4, weight_decay=1e-3), params),
        "owner_adamw": local_step.voting(params, quantizer=fed, decision=adam),
    }


def local(size: int, dtype: Any) -> dict[str, Timed]:
    """The local steps on one array, with the bytes that must move."""
    params = [jnp.zeros(size, dtype)]
    steps = candidates(params)
    timed = local_step.compiled_steps(steps, params)
    # Parameters and state are read and written, gradients read, messages written and read.
    moved = {
        name: 3 * size_of(params) + 2 * size_of(one.state) + one.wire_bytes
        for name, one in steps.items()
    }
    return {name: one._replace(floor_bytes=moved[name]) for name, one in timed.items()}


def gpt(model: programs.Model) -> dict[str, Timed]:
    """A whole step of the model with each local step, which goes on from its own parameters."""
    batch = jax.random.randint(jax.random.key(1), model.windows, 0, 500)
    timed = {}
    for name, one in candidates(weights(model)).items():

        def step(params: Any, state: Any, one: Any = one) -> Any:
            params, state, _ = one.step(params, state, jax.grad(model.loss)(params, batch))
            return params, state

        timed[name] = compiled(jax.jit(step, donate_argnums=(0, 1)), (weights(model), one.state))
    return timed


def weights(model: programs.Model) -> Any:
    """Small random parameters."""
    leaves, tree = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten(
        [
            0.02 * jax.random.normal(key, x.shape, x.dtype)
            for key, x in zip(keys, leaves, strict=True)
        ]
    )


def exchange(model: programs.Model) -> dict[str, Timed]:
    """The real training step, a worker for each device."""
    workers = lc.Workers(jax.make_mesh((jax.device_count(),), ("data",)), "data")
    rows, length = model.windows
    batch = jax.random.randint(jax.random.key(1), (rows * workers.count, length), 0, 500)
    methods = {
        LION: lc.global_gradients(optax.lion(1e-4), workers=workers),
        ADAMW: lc.global_gradients(optax.adamw(1e-4), workers=workers),
        "lion_cub": lc.lion_cub(1e-4, workers=workers),
        "owner_lion": lc.owner_lion(1e-4, workers=workers),
        "owner_adamw": lc.owner_adamw(1e-4, workers=workers),
    }
    timed = {}
    for name, tx in methods.items():
        state = lc.init_state(tx, weights(model), workers)
        step = lc.make_train_step(model.loss, tx, workers)
        step.compiled(lc.training.overlap_options(workers))
        began = time.perf_counter()
        program = step.lower(state, batch).compile()

        def again(state: Any, step: Any = step) -> tuple[Any]:
            return (step(state, batch)[0],)

        timed[name] = Timed(again, (state,), program, time.perf_counter() - began)
    return timed


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", help="parameters of one array")
    parser.add_argument("--model", default="gpt-124m", choices=tuple(programs.MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.sizes:
        parser.error(
            f"JAX {jax.__version__} finds no GPU, only {device.device_kind!r}. On a machine with one: "
            "python -m pip install -e '.[plots]' 'jax[cuda12]'; or try small sizes: --sizes 65536 "
            "--rounds 2 --model gpt-2m"
        )
    run(args, device)


def run(args: argparse.Namespace, device: Any) -> None:
    """All parts; a row is printed and kept when it is there."""
    rate, model = copy_rate(args.rounds), programs.named(args.model)
    parts: list[tuple[str, dict[str, Any], Callable[[], dict[str, Timed]]]] = [
        ("local", {"parameters": size, "dtype": jnp.dtype(dtype).name}, partial(local, size, dtype))
        for size in args.sizes or SIZES
        for dtype in (jnp.float32, jnp.bfloat16)
    ]
    about = {"parameters": model.size, "dtype": "bfloat16"}
    parts.append(("gpt", about, partial(gpt, model)))
    if jax.device_count() > 1 and device.platform == "gpu":
        parts.append(("exchange", about, partial(exchange, model)))
    given = {"devices": jax.device_count(), "copy_gb_per_s": rate / 1e9}
    worst = 0.0
    for part, about, made in parts:
        for row in rows_of(part, about, made(), args.rounds, rate):
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            report.append(args.save, [row | given | report.provenance()])
            worst = max(worst, row["over_floor"] or 0)
    report.finish({"benchmark": "gpu", "over_floor_at_most": worst} | given, None)


if __name__ == "__main__":
    main()
