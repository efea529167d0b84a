"""How soon the others train on in the same processes when a worker is killed, by JAX alone.

    python benchmarks/surviving.py [--runs 10] [--heartbeat 3] [--timeout 5]

Three processes train a small net by `owner_lion` over Gloo; each keeps what its device holds, every 5
steps, on its host. One that is not the coordinator is killed by SIGKILL within two seconds of step 10. The
others leave the step, agree by ``live_devices`` on who is left, and train on over its devices. No
checkpoints are saved.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.lab.run import wiring

WORKERS, WIDTH, LIMIT = 3, 256, 60.0
held: list[np.ndarray | None] = []


def loss(params, batch, rng):
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x - jnp.roll(batch, 1, 1)))


def train(devices: list[jax.Device]) -> None:
    workers = lc.Workers(Mesh(devices, ("data",), axis_types=(AxisType.Auto,)), "data")
    tx = lc.owner_lion(1e-3, axis_name=workers)
    first = np.random.default_rng(0).normal(size=(4, WIDTH, WIDTH)) / WIDTH**0.5
    params = [jnp.asarray(w, jnp.float32) for w in first]
    if held:
        like = lc.training.abstract_state(tx, params, workers)
        leaves = [placed(x, h) for x, h in zip(jax.tree.leaves(like), held, strict=True)]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    else:
        state = lc.init_state(tx, params, workers)
    step = lc.make_train_step(loss, tx, workers)
    rows = NamedSharding(workers.mesh, P("data"))
    for t in range(1, 1_000_000 if len(devices) == WORKERS else 30):
        batch = np.random.default_rng(t).normal(size=(24, WIDTH)).astype(np.float32)
        batch = jax.make_array_from_callback(batch.shape, rows, lambda i, b=batch: b[i])
        state, metrics = step(state, batch)
        float(metrics["loss"])
        if t in (1, 10):
            print(f"step {t} of {len(devices)}", flush=True)
        if t % 5 == 0:
            held[:] = [on_host(x) for x in jax.tree.leaves(state)]


def on_host(x: jax.Array) -> np.ndarray | None:
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return None if key else np.array(x.addressable_shards[0].data)


def placed(x: jax.ShapeDtypeStruct, value: np.ndarray | None) -> jax.Array:
    """What the device held, cut or repeated to its new shape: only its time matters."""
    if value is None:
        return jax.jit(lambda: jax.random.key(0), out_shardings=x.sharding)()
    shape = x.sharding.shard_shape(x.shape)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.resize(value, shape))


def worker(heartbeat: int) -> None:
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat)
    while True:
        try:
            with multihost_utils.live_devices(jax.devices()) as devices:
                train(devices)
                break
        except multihost_utils.ProcessFailureError:
            print("agreed", flush=True)
    os._exit(0)


def killed(heartbeat: int, timeout: int) -> tuple[float, float]:
    """One run: seconds until both survivors have agreed, and have done a step; inf if they do not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said: list[tuple[float, str]] = []
    flags = {"XLA_FLAGS": f"--xla_cpu_collective_timeout_seconds={timeout}"} if timeout else {}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(heartbeat)],
            env=os.environ | flags | wiring(["127.0.0.1"] * WORKERS, i, port, interface="lo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(WORKERS)
    ]

    def read(process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            said.append((time.time(), line.strip()))

    threads = [threading.Thread(target=read, args=(process,)) for process in running]
    for thread in threads:
        thread.start()

    def times(text: str) -> list[float]:
        return [t for t, line in said if line == text]

    while len(times(f"step 10 of {WORKERS}")) < WORKERS and all(p.poll() is None for p in running):
        time.sleep(0.05)
    time.sleep(random.uniform(0, 2))
    at = time.time()
    running[random.choice([1, 2])].send_signal(signal.SIGKILL)
    while any(p.poll() is None for p in running) and time.time() < at + LIMIT:
        time.sleep(0.05)
    for process in running:
        process.kill()
    for thread in threads:
        thread.join()
    found = [times(text) for text in ("agreed", f"step 1 of {WORKERS - 1}")]
    agreed, stepped = (max(t) - at if len(t) == 2 else float("inf") for t in found)
    return agreed, stepped


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--heartbeat", type=int, default=3, help="seconds (3)")
    parser.add_argument(
        "--timeout", type=int, default=5, help="of a collective; 0 as XLA's own (5)"
    )
    args = parser.parse_args()
    runs = []
    for _ in range(args.runs):
        runs.append(killed(args.heartbeat, args.timeout))
        print("agreed after {:.1f} s, stepped after {:.1f} s".format(*runs[-1]), flush=True)
    agreed, stepped = zip(*runs, strict=True)
    report.finish(
        {
            "benchmark": Path(__file__).stem,
            "heartbeat": args.heartbeat,
            "timeout": args.timeout,
            "went_on": f"{sum(s < LIMIT for s in stepped)} of {len(runs)}",
            "agreed": [round(median(agreed), 1), round(max(agreed), 1)],
            "stepped": [round(median(stepped), 1), round(max(stepped), 1)],
        },
        args.save,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]))
    else:
        main()
