"""Trains on several hosts, saves, and goes on: the same command on each host, and its own index.

    python examples/several_hosts.py --address host0:1234 --hosts 2 --index 0 --folder /shared/run

Under Slurm and MPI, on a TPU pod and in the lab, leave the first three options out: the launcher says them.
docs/how_to/several_hosts.md has more.
"""

import argparse
import inspect
import sys

import jax
import numpy as np
import optax

import lioncub_jax as lc

CONTEXT, ROWS = 8, 64  # rows of a device


def main() -> None:
    args = options()
    address, hosts, index = args.address, args.hosts, args.index
    folder, steps, wait = args.folder, args.steps, args.wait
    learning_rate = 3e-3  # for this small model
    try:
        # [several hosts]
        lc.mesh.join(address, hosts, index, wait=wait, heartbeat_timeout_seconds=30)
        # [/several hosts]
    except (ValueError, TimeoutError) as error:
        sys.exit(f"error: {error}")
    # [several hosts]
    workers = lc.Workers(lc.mesh.two_level_mesh(), "node", group="device")  # a host is a worker
    tx = lc.owner_adamw(learning_rate, weight_decay=0.1, workers=workers)
    state = lc.init_state(tx, first_params(), workers)  # the same numbers on every host
    step = lc.make_train_step(loss_fn, tx, workers)
    # [/several hosts]
    with lc.stop_on_sigterm() as stopping:  # noqa: SIM117 (pages show the inner one)
        # [several hosts]
        with lc.Checkpoints(folder, workers=workers) as checkpoints, lc.mesh.end_on_error():
            if checkpoints.steps():
                state = checkpoints.restore(state).state
            for i in range(int(state.step), steps):
                state, metrics = step(state, rows_of_this_host(i))
                if (i + 1) % 50 == 0 or i + 1 == steps:
                    checkpoints.save(state)
                    # [/several hosts]
                    print(f"step {i + 1} of {steps}: loss {metrics['loss']:.3f}", flush=True)
                elif stopping(i + 1):
                    checkpoints.save(state)
                    print(f"asked to stop: saved step {i + 1}", flush=True)
                    break
            else:
                print(f"all {steps} steps are done", flush=True)


def rows_of_this_host(i: int) -> np.ndarray:
    """Text for the devices of this host, ``int32[rows, 9]``: other rows in each step and on each host."""
    with open(inspect.__file__, "rb") as file:
        text = np.frombuffer(file.read(), np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    rng = np.random.default_rng([i, jax.process_index()])
    return windows[rng.integers(len(windows), size=ROWS * jax.local_device_count())]


def first_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"embed": (256, 32), "hidden": (CONTEXT * 32, 256), "out": (256, 256)}
    return {k: rng.normal(0, s[0] ** -0.5, s).astype(np.float32) for k, s in shapes.items()}


def loss_fn(params: dict[str, jax.Array], windows: jax.Array, rng: jax.Array) -> jax.Array:
    """Cross-entropy of a byte, guessed from the eight before it."""
    x = params["embed"][windows[:, :-1]].reshape(len(windows), -1)
    logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", metavar="HOST:PORT", help="of host 0")
    parser.add_argument("--hosts", type=int, help="how many there are")
    parser.add_argument("--index", type=int, help="of this host, from 0")
    parser.add_argument("--folder", required=True, help="for checkpoints; all hosts see it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--wait", type=float, default=45, help="seconds for a late host (45)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
