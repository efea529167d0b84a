"""Workers in processes of their own, over sockets, against the same workers in one process.

Votes are counted in integers, so the two must agree to the last bit. Sums in floating point (metrics,
averaged momentum) are added in another order by another network, and need not.

Run as a program this file is one of the processes.
"""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

AXIS = "data"
STEPS, ROWS, FEATURES = 5, 6, 5  # rows of each worker
SECONDS = 120


class Case(NamedTuple):
    """An optimizer on a mesh of processes and each process's devices."""

    tx: optax.GradientTransformation
    axes: tuple  # of the mesh: (all devices,) or (processes, devices of each)
    where: dict
    specs: dict | None = None


ONE_AXIS = {"axis_name": AXIS}
TWO_LEVELS = {"axis_name": "node", "group_axis": "device"}
CASES = {
    "lion_cub": Case(
        lc.lion_cub(0.05, quantizer=lc.quantize.midrise(2), **ONE_AXIS), (AXIS,), ONE_AXIS
    ),
    "owner_lion": Case(lc.owner_lion(0.05, **ONE_AXIS), (AXIS,), ONE_AXIS),
    "two_levels": Case(lc.lion_cub(0.05, **TWO_LEVELS), ("node", "device"), TWO_LEVELS),
    "tensor": Case(
        lc.owner_lion(0.05, **ONE_AXIS),
        (AXIS, "tp"),
        ONE_AXIS,
        {"w": P(None, "tp"), "v": P("tp"), "b": P()},
    ),
}


def loss_fn(params, model_state, batch, rng):
    """Noise from the step's key and from a key that each worker keeps."""
    own = jax.random.fold_in(model_state["key"], model_state["calls"])
    noise = jax.random.normal(rng, (ROWS, 1)) + jax.random.normal(own, (ROWS, 1))
    hidden = jnp.tanh(batch["x"] @ params["w"])
    error = hidden @ params["v"] + params["b"] - batch["y"] + 0.01 * noise
    changed = {**model_state, "calls": model_state["calls"] + 1}
    return jnp.mean(error**2), {"largest": jnp.max(hidden), "hidden": hidden}, changed


def first_params():
    rng = np.random.default_rng(0)
    shapes = {"w": (FEATURES, 40), "v": (40, 1), "b": (1,)}
    return {k: rng.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}


def batch_of(step, workers):
    rng = np.random.default_rng(step + 1)
    x = rng.normal(size=(workers * ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1, keepdims=True))}


def train(case, processes, devices, place):
    """All steps; the last state and metrics. ``place(sharding, batch)`` makes global arrays."""
    shape = (processes, -1)[-len(case.axes) :]
    kinds = (AxisType.Auto,) * len(case.axes)
    mesh = Mesh(np.array(devices).reshape(shape), case.axes, axis_types=kinds)
    model_state = {"key": jax.random.key(1), "calls": np.int32(0)}
    state = lc.init_state(
        case.tx, first_params(), mesh, specs=case.specs, model_state=model_state,
        rng=jax.random.key(3), **case.where,
    )  # fmt: skip
    step = lc.make_train_step(lc.StatefulLoss(loss_fn), case.tx, mesh, **case.where)
    spec = P(tuple(case.where.values()))
    parts = math.prod(mesh.shape[name] for name in case.where.values())
    for i in range(STEPS):
        batch = place(NamedSharding(mesh, spec), batch_of(i, parts))
        state, metrics = step(state, batch)
    assert step.traces == 1
    return state, metrics


def replicated(state):
    """What every process can read: parameters and the counters of the votes."""
    found = jax.tree.leaves_with_path((state.params, lc.vote_stats(state.opt_state)))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in found}


# --- One of the processes


def local_rows(sharding, batch):
    """Global arrays of which each process gives only its own rows."""

    def own(x):
        rows = len(x) // jax.process_count()
        start = jax.process_index() * rows
        part = x[start : start + rows]
        return jax.make_array_from_process_local_data(sharding, part, x.shape)

    return jax.tree.map(own, batch)


def run_process(task, port, processes, index, local_devices, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", local_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, index)
    assert jax.process_count() == processes
    {"train": train_all, "differ": differ}[task](processes, index, Path(folder))
    jax.distributed.shutdown()


def train_all(processes, index, folder):
    for name, case in CASES.items():
        state, metrics = train(case, processes, jax.devices(), local_rows)
        found = replicated(state)
        np.savez(folder / f"{name}-{index}.npz", loss=metrics["loss"], **found)
        print(f"process {index}: {name}: loss {float(metrics['loss'])}", flush=True)


def differ(processes, index, folder):
    """One parameter, then their number, is another in the last process; then all are the same."""
    del folder
    mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
    workers, tx, params = lc.Workers(mesh, AXIS), CASES["lion_cub"].tx, first_params()
    last = processes - 1
    ending = (
        f"differs between processes 0 and {last}: all workers start from the same; give each process the "
        "same seed, or read the same checkpoint"
    )
    more = {"extra": np.zeros(3, np.float32)} if index == last else {}
    for other, named in [
        ({**params, "v": params["v"] + np.float32(index == last)}, "['params']['v']"),
        ({**params, **more}, "the number of arrays"),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"init_state: {named} {ending}")):
            lc.init_state(tx, other, workers)
    assert int(lc.init_state(tx, params, workers).step) == 0
    print(f"process {index}: refused", flush=True)


# --- The tests


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def spawn(arguments, log):
    root = Path(lc.__file__).parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    # They compile as pytest's own process does, but what it was told about devices is not for them.
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(paths),
            "XLA_FLAGS": " ".join(flags),
        },
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(children):
    """Until all have ended, one has failed, or the time is up."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


def run_all(task, processes, local_devices, folder):
    """Runs the processes to their end; one that fails or hangs takes the others down with it."""
    port = free_port()
    logs = [Path(folder) / f"{i}.log" for i in range(processes)]
    children = []
    try:
        for i, log in enumerate(logs):
            with log.open("w") as out:
                children.append(spawn([task, port, processes, i, local_devices, folder], out))
        wait_for(children)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    codes = [child.returncode for child in children]
    output = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)
    assert codes == [0] * processes, f"exit codes {codes}\n{output}"
    return output


@pytest.mark.parametrize(
    ("processes", "local_devices"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)]
)
def test_processes_end_with_the_bits_of_one_process(processes, local_devices, tmp_path):
    run_all("train", processes, local_devices, tmp_path)
    devices = jax.devices()[: processes * local_devices]
    assert len(devices) == processes * local_devices
    for name, case in CASES.items():
        state, metrics = train(case, processes, devices, lambda s, batch: jax.device_put(batch, s))
        wanted = replicated(state)
        for index in range(processes):
            with np.load(tmp_path / f"{name}-{index}.npz") as found:
                assert set(found) == {"loss", *wanted}
                np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-6)
                for key, value in wanted.items():
                    np.testing.assert_array_equal(found[key], value, err_msg=f"{name}, {key}")
        first = first_params()
        assert not any(np.array_equal(first[k], state.params[k]) for k in first)


@pytest.mark.slow
def test_parameters_that_differ_between_processes_are_refused_in_each(tmp_path):
    output = run_all("differ", 2, 1, tmp_path)
    assert [f"process {i}: refused" in output for i in range(2)] == [True, True]


if __name__ == "__main__":
    port, processes, index, local_devices = map(int, sys.argv[2:6])
    run_process(sys.argv[1], port, processes, index, local_devices, sys.argv[6])
