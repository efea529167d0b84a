"""Trains on several hosts, saves, and goes on: the same command on each host, and its own index.

    python examples/several_hosts.py --address host0:1234 --hosts 2 --index 0 --folder /shared/run

Under Slurm, on a TPU pod, and in the lab, leave the first three options out: JAX
knows them there. docs/how_to/several_hosts.md has more.
"""

import argparse
import contextlib
import inspect
import os
import socket
import sys
import threading
from collections.abc import Iterator

import jax
import numpy as np
import optax

import lioncub_jax as lc

CONTEXT, ROWS = 8, 64  # rows of a device


def main() -> None:
    args = options()
    address, hosts, index = args.address, args.hosts, args.index
    folder, steps = args.folder, args.steps
    learning_rate = 3e-3  # for this small model
    with ends_after(args.wait, address, index):
        # [several hosts]
        jax.distributed.initialize(address, hosts, index, heartbeat_timeout_seconds=30)
        # [/several hosts]
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
    args = parser.parse_args()
    given = [args.address, args.hosts, args.index]
    if None in given and given != [None] * 3:
        parser.error("--address, --hosts and --index go together: give all three, or none")
    if args.hosts is not None and not 0 <= args.index < args.hosts:
        parser.error(f"--index {args.index}: {args.hosts} hosts count from 0 to {args.hosts - 1}")
    return args


@contextlib.contextmanager
def ends_after(seconds: float, address: str | None, index: int | None) -> Iterator[None]:
    """Ends this process with a sentence where the hosts do not meet in time.

    JAX waits for five minutes, and its stack trace says neither which host nor which address.
    """

    def end() -> None:
        place = "" if index is None else f"host {index}, "
        print(f"error: {place}after {seconds:g} s: {why_not(address)}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread is inside of JAX

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except ValueError as error:
        sys.exit(f"error: no other hosts are known ({error}): give --address, --hosts and --index")
    finally:
        timer.cancel()


def why_not(address: str | None) -> str:
    if address is None:
        return "the cluster names hosts that did not start"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        return (
            f"{address} does not answer ({error}): give the HOST:PORT of host 0, start host 0, and open "
            "the port in its firewall"
        )
    return (
        f"{address} answers, but not all hosts came: give each host the same --address and --hosts, and "
        "start all of them within --wait seconds"
    )


if __name__ == "__main__":
    main()
