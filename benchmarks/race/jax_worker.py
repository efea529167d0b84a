"""One JAX worker of the race; `benchmarks/step_time.py` starts it in the lab, once for each worker."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import numpy as np
import timing
from flax import nnx
from gpt import corpus
from gpt.model import GPT, next_byte_loss
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meeting import largest
from methods import ALONE, AXIS, METHODS
from model import BATCH, CONTEXT, MODEL

import lioncub_jax as lc
from lioncub_jax import planner
from lioncub_jax.planner.model import Cluster, Host, Link


def main() -> None:
    args = timing.options(__doc__, METHODS)
    jax.distributed.initialize()
    mesh = on(jax.devices())
    racing, about = {}, {}
    for name in args.methods:
        racing[name], about[name], _ = prepared(name, mesh)
    blocks = timing.take_turns(racing, largest(mesh), turns=args.turns, seconds=args.seconds)
    worker = jax.process_index()
    timing.write(args.out / f"worker{worker}.json", blocks, methods=about)


def on(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def prepared(
    name: str, everyone: Mesh
) -> tuple[Callable[[], Any], dict[str, Any], jax.stages.Compiled]:
    """A function that does one step and waits for it, the bytes that the step sends, its program."""
    mesh = on(jax.local_devices()) if name == ALONE else everyone
    model = GPT(**MODEL, rngs=nnx.Rngs(0))
    loss, params, model_state = lc.from_nnx(model, next_byte_loss)
    tx = METHODS[name]()
    state = lc.init_state(tx, params, mesh, axis_name=AXIS, model_state=model_state)
    step = lc.make_train_step(loss, tx, mesh, axis_name=AXIS)
    batch = own_windows(NamedSharding(mesh, P(AXIS)))
    run = step.lower(state, batch).compile()

    def once() -> None:
        nonlocal state
        state, metrics = run(state, batch)
        jax.block_until_ready((state, metrics))

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    scheme, cluster = planner.scheme_named(name), Cluster(mesh.size, Link(math.inf, 0.0))
    host = Host(widens_bfloat16=jax.default_backend() == "cpu")
    about = {
        "compiled_bytes": lc.traffic.compiled_bytes(run, mesh),
        "predicted_bytes": planner.step_time(scheme, shapes, cluster, 0.0, host).sent_bytes,
    }
    return once, about, run


def own_windows(sharding: NamedSharding) -> jax.Array:
    """This worker's rows of text as its part of a global array."""
    text = corpus.standard_library().train
    mine = corpus.draw(text, BATCH, CONTEXT, (0, jax.process_index()))
    return jax.make_array_from_process_local_data(sharding, mine)


if __name__ == "__main__":
    main()
