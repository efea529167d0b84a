"""Checkpoints of several processes, of a run that is told to stop, and of one that is killed.

Run as a program this file is one of the processes.
"""

import errno
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.checkpoint import Checkpoints, stop_on_sigterm

AXIS = "data"
SECONDS = 120
KILLS = 20
SEED = 2026


def optimizer():
    """Momentum of each worker, error feedback, and momentum of owners in one state."""
    coded = lc.quantize.error_feedback(lc.quantize.midrise(2))
    owner = lc.decide.momentum_at_owner(optax.scale_by_lion(0.5, 0.5))
    return lc.communicate(axis_name=AXIS, memory=lc.momentum.blend(0.5, 0.5), up=coded, owner=owner)


def mesh_of(devices):
    return jax.make_mesh((len(devices),), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))


def first_state(mesh):
    params = {"w": jnp.zeros((6, 40)), "b": jnp.zeros(3)}
    model_state = {"key": jax.random.key(1), "mean": jnp.zeros(3)}
    return lc.init_state(optimizer(), params, mesh, axis_name=AXIS, model_state=model_state)


def numbered(state, step):
    """What a state must hold at a step: whole numbers that tell leaf, worker and step."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path)
        if name == ".step":
            number = np.int32(step)
        elif any(part in name for part in (".params", ".mu", ".error", "mean")):
            number = (np.arange(x.size).reshape(x.shape) % 32 + 8 * (step % 16)).astype(x.dtype)
        else:
            return x
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: number[index])

    return jax.tree_util.tree_map_with_path(leaf, state)


def local_values(state):
    """What this process holds: arrays without random keys."""
    found = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): [np.asarray(shard.data) for shard in x.addressable_shards]
        for path, x in found
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }


def assert_holds(state, wanted):
    found, wanted = local_values(state), local_values(wanted)
    assert found.keys() == wanted.keys()
    for path, shards in wanted.items():
        np.testing.assert_array_equal(found[path], shards, err_msg=path)


# --- The processes


def run_process(task, port, processes, index, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, index)
    assert jax.process_count() == len(jax.devices()) == processes
    tasks = (save, restore, train, loop, fail, refused)
    {one.__name__: one for one in tasks}[task](Path(folder))
    if processes > 1:
        jax.distributed.shutdown()


def save(folder):
    state = first_state(mesh_of(jax.devices()))
    with Checkpoints(folder, axis_name=AXIS) as checkpoints:
        checkpoints.save(numbered(state, 5), {"next": 6})


def restore(folder):
    """On two processes what four saved: the same parameters, means of the rest."""
    like = first_state(mesh_of(jax.devices()))
    with Checkpoints(folder, axis_name=AXIS) as checkpoints:
        found = checkpoints.restore(like)
    assert found.step == 5 and found.data == {"next": 6}
    for name, shards in local_values(found.state).items():
        if ".mu['" in name and ".owner" not in name:
            size = shards[0].size
            each = np.arange(4 * size).reshape(4, size) % 32 + 40
            np.testing.assert_array_equal(shards[0].reshape(-1), each.mean(0).astype(np.float32))
    wanted = numbered(like, 5)
    assert_holds(found.state.params, wanted.params)
    print("restored", flush=True)


def fail(folder):
    """A disk that fails once, in one process; and then a checkpoint that is damaged."""
    first = first_state(mesh_of(jax.devices()))
    with Checkpoints(folder, axis_name=AXIS) as checkpoints:
        for step in (1, 2):
            checkpoints.save(numbered(first, step), {"step": step}, wait=True)
        read, failed = ocp.StandardCheckpointHandler.restore, OSError(errno.EIO, "once")
        failures = [failed] if jax.process_index() == 1 else []

        def fails_once(self, *args, **kwargs):
            if failures:
                raise failures.pop()
            return read(self, *args, **kwargs)

        ocp.StandardCheckpointHandler.restore = fails_once
        with pytest.raises((OSError, RuntimeError)) as caught:
            checkpoints.restore(first)
        if jax.process_index() == 1:
            assert caught.value is failed
        else:
            assert "2 was not read" in str(caught.value)
            assert "another process failed, and its error says why" in str(caught.value)
        assert checkpoints.restore(first).step == 2
        tried = folder / "7.orbax-checkpoint-tmp-tried"  # where process 0 cannot make a folder
        if jax.process_index() == 0:
            tried.write_text("")
        multihost_utils.sync_global_devices("in the way")
        why = "File exists" if jax.process_index() == 0 else "another process failed"
        with pytest.raises((OSError, RuntimeError), match=f"7 was not written.*{why}"):
            checkpoints.save(numbered(first, 7), wait=True)
        tried.unlink(missing_ok=True)
        if jax.process_index() == 0:
            (folder / "2" / "about" / "metadata").write_text("{}")
        multihost_utils.sync_global_devices("damaged")
        with pytest.warns(UserWarning, match="2 is damaged"):
            assert checkpoints.restore(first).step == 1
        checkpoints.save(numbered(first, 2), {"step": 2}, wait=True)
        assert checkpoints.steps() == [1, 2] and (folder / "2.damaged").is_dir()
        assert_holds(checkpoints.restore(first).state, numbered(first, 2))
    print("agreed", flush=True)


def refused(folder):
    """A disk that takes nothing more from one process, for a while."""
    first = first_state(mesh_of(jax.devices()))
    with Checkpoints(folder, axis_name=AXIS, timeout=5) as checkpoints:
        checkpoints.save(numbered(first, 1), wait=True)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        mine = jax.process_index() == 1
        if mine:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        checkpoints.save(numbered(first, 2))
        with pytest.raises(OSError) as caught:
            checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        why = "File too large" if mine else "another process did not write its part in time"
        assert f"{folder / '2'} was not written ({why}" in str(caught.value), repr(caught.value)
        checkpoints.save(numbered(first, 4), wait=True)
        assert checkpoints.steps() == [1, 4]
    print("went on", flush=True)


def train(folder):
    """Until it is told to stop, which must be the same step for all."""
    mesh = mesh_of(jax.devices())
    state = first_state(mesh)
    step = lc.make_train_step(
        lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2),
        optax.chain(optimizer(), optax.scale(-0.01)), mesh, axis_name=AXIS,
    )  # fmt: skip
    state = state._replace(opt_state=(state.opt_state, optax.EmptyState()))
    rows = jax.make_array_from_callback(
        (mesh.size, 6), NamedSharding(mesh, P(AXIS)), lambda index: np.ones((1, 6), np.float32)
    )
    with Checkpoints(folder, axis_name=AXIS) as checkpoints, stop_on_sigterm() as stopping:
        for i in range(1, 100_000):
            state, _ = step(state, rows)
            if i == 3:
                (folder.parent / f"ready-{jax.process_index()}").touch()
            if stopping(i):
                checkpoints.save(state, {"next": i + 1})
                break
    assert i % 10 == 0  # asked at these steps only
    print(f"stopped after {i}", flush=True)


def loop(folder):
    """Saves without end."""
    first = first_state(mesh_of(jax.devices()))
    with Checkpoints(folder, axis_name=AXIS, keep=2) as checkpoints:
        start = max(checkpoints.steps(), default=0)
        for i in range(start + 1, 10**9):
            checkpoints.save(numbered(first, i), {"step": i}, wait=i == start + 1)
            if i == start + 1:
                print("saving", flush=True)


# --- The tests


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def spawn(task, port, processes, index, folder, log, program=__file__):
    root = Path(lc.__file__).parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    # What pytest's own process was told about devices is not for its children.
    told = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in told}
    return subprocess.Popen(
        [sys.executable, program, task, *map(str, (port, processes, index, folder))],
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def until(done, children):
    """Until it is done, or a child has failed, or the time is up."""
    deadline = time.monotonic() + SECONDS
    while not done() and time.monotonic() < deadline:
        if any(child.poll() not in (None, 0) for child in children):
            return
        time.sleep(0.02)


def run_all(task, processes, folder, logs, act=lambda children: None, program=__file__):
    """Runs processes to their end; what has not ended then is killed."""
    port, children = free_port(), []
    try:
        for i in range(processes):
            with (logs / f"{task}-{i}.log").open("w") as out:
                children.append(spawn(task, port, processes, i, folder, out, program))
        act(children)
        until(lambda: all(child.poll() is not None for child in children), children)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    said = [(logs / f"{task}-{i}.log").read_text() for i in range(processes)]
    codes = [child.returncode for child in children]
    assert codes == [0] * processes, f"exit codes {codes}\n" + "\n---\n".join(said)
    return said


@pytest.mark.slow
def test_two_processes_go_on_from_what_four_saved(tmp_path):
    folder = tmp_path / "checkpoints"
    run_all("save", 4, folder, tmp_path)
    said = run_all("restore", 2, folder, tmp_path)
    assert all("restored" in text for text in said)
    # And one process reads the same.
    mesh = mesh_of(jax.devices()[:4])
    with Checkpoints(folder, axis_name=AXIS) as checkpoints:
        assert_holds(checkpoints.restore(first_state(mesh)).state, numbered(first_state(mesh), 5))


def test_processes_told_to_stop_save_at_one_step(tmp_path):
    folder = tmp_path / "checkpoints"

    def tell(children):
        until(lambda: all((tmp_path / f"ready-{i}").exists() for i in range(2)), children)
        for child in children:
            child.send_signal(signal.SIGTERM)
            time.sleep(0.05)

    said = run_all("train", 2, folder, tmp_path, tell)
    steps = {int(text.rsplit("stopped after ", 1)[1].split()[0]) for text in said}
    assert len(steps) == 1
    with Checkpoints(folder, axis_name=AXIS) as checkpoints:
        assert checkpoints.steps() == sorted(steps)


@pytest.mark.slow
def test_processes_agree_that_one_of_them_could_not_read(tmp_path):
    said = run_all("fail", 2, tmp_path / "checkpoints", tmp_path)
    assert all("agreed" in text for text in said)


def test_processes_whose_disk_fails_in_one_of_them_all_end_the_save(tmp_path):
    said = run_all("refused", 2, tmp_path / "checkpoints", tmp_path)
    assert all("went on" in text for text in said)


@pytest.mark.slow
def test_whenever_a_run_is_killed_again_and_again_its_newest_checkpoint_is_whole(tmp_path):
    kill_and_restore(tmp_path, KILLS)


def test_whenever_a_run_is_killed_its_newest_checkpoint_is_whole(tmp_path):
    kill_and_restore(tmp_path, 2)


def kill_and_restore(tmp_path, kills):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    folder, like, steps = tmp_path / "checkpoints", first_state(mesh_of(jax.devices()[:1])), []
    for i in range(kills):
        log = tmp_path / f"{i}.log"
        with log.open("w") as out:
            child = spawn("loop", 0, 1, 0, folder, out)
        try:
            until(lambda log=log: "saving" in log.read_text(), [child])
            time.sleep(rng.random() * 0.3)
            assert child.poll() is None, log.read_text()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        with Checkpoints(folder, axis_name=AXIS) as checkpoints:
            found = checkpoints.restore(like)
            assert found.step == checkpoints.steps()[-1]  # none was passed over
        assert found.data == {"step": found.step}
        assert_holds(found.state, numbered(like, found.step))
        assert not list(folder.glob("*tmp*"))  # the half that was being written is gone
        steps.append(found.step)
    assert steps == sorted(steps) and steps[-1] >= kills


if __name__ == "__main__":
    port, processes, index = map(int, sys.argv[2:5])
    run_process(sys.argv[1], port, processes, index, sys.argv[5])
