"""Times of a worker's step on one CUDA GPU: milliseconds over a floor, compiling, memory, a GPT of 124M.

    python -m pip install -e '.[plots]' 'jax[cuda12]'    # on a bare machine with a driver of 525 or newer
    python benchmarks/gpu.py --save benchmarks/results/gpu.jsonl

* "local": the steps of ``local_step.py``, for worker 0 of 8, in float32 and bfloat16.
* "gpt": loss and gradient of a GPT of 124M parameters on 8 windows of 1,024 tokens, and one of these steps.
* "exchange", with two GPUs or more: that GPT by ``make_train_step``, a worker for each GPU, over NCCL.

With one GPU nothing goes over a network. Candidates take turns; a figure is a median over rounds, and a
sample is as many calls as take 20 ms. ``--sizes 65536 --rounds 2 --model gpt-2m`` tries it out on a CPU.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import local_step
import report
from aot import programs
from local_step import Timed, compiled

import lioncub_jax as lc

SIZES = 2**24, 2**26, 2**28


def gpt(model: programs.Model) -> dict[str, Timed]:
    """A whole step of the model with each local step, which goes on from its own parameters."""
    batch = jax.random.randint(jax.random.key(1), model.windows, 0, 500)
    timed = {}
    for name, one in local_step.candidates(weights(model)).items():

        def step(params: Any, state: Any, one: Any = one) -> Any:
            params, state, _ = one.step(params, state, jax.grad(model.loss)(params, batch))
            return params, state

        timed[name] = compiled(jax.jit(step, donate_argnums=(0, 1)), (weights(model), one.state))
    return timed


def weights(model: programs.Model) -> Any:
    """Small random parameters."""
    key = jax.random.key(0)
    return jax.tree.map(lambda x: 0.02 * jax.random.normal(key, x.shape, x.dtype), model.params)


def exchange(model: programs.Model) -> dict[str, Timed]:
    """The real training step, a worker for each device."""
    workers = lc.Workers(jax.make_mesh((jax.device_count(),), ("data",)), "data")
    rows, length = model.windows
    batch = jax.random.randint(jax.random.key(1), (rows * workers.num_gradients, length), 0, 500)
    timed = {}
    for name, make in programs.OPTIMIZERS.items():
        tx = make(workers=workers)
        state = lc.init_state(tx, weights(model), workers)
        step = lc.make_train_step(model.loss, tx, workers)
        step.compiled(programs.OVERLAP[jax.default_backend()])
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
    """All parts; rows are kept when they are there."""
    rate, model = local_step.copy_rate(args.rounds), programs.MODELS[args.model]()
    given = {"devices": jax.device_count(), "copy_gb_per_s": rate / 1e9}

    def keep(part: str, parameters: int, dtype: str, steps: dict[str, Timed]) -> None:
        about = {"parameters": parameters, "dtype": dtype}
        for row in local_step.rows_of(part, about, steps, args.rounds, rate):
            report.append(args.save, [row | given | report.provenance()])

    for size in args.sizes or SIZES:
        for dtype in ("float32", "bfloat16"):
            keep("local", size, dtype, local_step.local([jnp.zeros(size, dtype)]))
    keep("gpt", model.size, "bfloat16", gpt(model))
    if jax.device_count() > 1 and device.platform == "gpu":
        keep("exchange", model.size, "bfloat16", exchange(model))


if __name__ == "__main__":
    main()
