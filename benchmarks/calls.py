"""What a call of a mapped step costs in Python, for 200 arrays, plain and in a module of nnx.

    python benchmarks/calls.py [--arrays 200]

One worker, arrays of one number, and a step that returns them: what is left is the way in and out. Beside
it, in turns, a plain tree goes through ``jax.jit`` of the same step, and a module through an ``nnx.jit``
that does nothing. Figures are the least of the calls in milliseconds: what else runs only adds.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import report
from flax import nnx

import lioncub_jax as lc

CALLS = 200


class Module(nnx.Module):
    """So many parameters."""

    def __init__(self, arrays: int):
        self.w = nnx.List([nnx.Param(jnp.ones(1)) for _ in range(arrays)])


def step(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
    return state, rows.mean()


def module_step(module: Module, rows: jax.Array) -> jax.Array:
    return rows.mean()


def least(*calls: Callable[[], Any]) -> list[float]:
    """The least milliseconds of each, taking turns."""
    best = [float("inf")] * len(calls)
    for turn in range(CALLS):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn > 1:  # the first two compile
                best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def measured(arrays: int) -> dict[str, float]:
    """Milliseconds of the four calls, and what the mapped ones cost beside the others."""
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    workers, rows = lc.Workers(mesh, "data"), jnp.ones(2)
    mapped, jitted = lc.map_step(step, workers), jax.jit(step)
    state = {i: jnp.ones(1) for i in range(arrays)}
    plain, by_jit = least(lambda: mapped(state, rows), lambda: jitted(state, rows))

    module, of_module = Module(arrays), lc.map_step(module_step, workers)
    empty = nnx.jit(lambda module, rows: None)
    nnx_mapped, nnx_empty = least(lambda: of_module(module, rows), lambda: empty(module, rows))
    return {
        "plain": plain,
        "jit": by_jit,
        "plain_python": plain - by_jit,
        "nnx": nnx_mapped,
        "empty_nnx_jit": nnx_empty,
        "over_empty_nnx_jit": nnx_mapped / nnx_empty,
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--arrays", type=int, default=200)
    args = parser.parse_args()
    about = {"benchmark": "calls", "arrays": args.arrays}
    report.finish(about | measured(args.arrays), args.save)


if __name__ == "__main__":
    main()
