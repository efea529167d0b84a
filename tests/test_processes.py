"""Workers in processes of their own, over sockets: what they compute, agree on, save and survive.

Two processes are started once for all that is asked of two. Votes are counted in integers, so parameters
must be those of one process to the last bit; sums in floating point (metrics) are added in another order by
another network, and need not. Run as a program this file is one of the processes.
"""

import contextlib
import errno
import functools
import itertools
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import normal, workers_on
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_replicas import damaged

import lioncub_jax as lc
from lioncub_jax.checkpoint import files, stop_on_sigterm
from lioncub_jax.exchange.layout import Flat
from lioncub_jax.mesh import hosts as processes

SECONDS = 600  # until something hangs
SEED = 2026


def paths_of(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}


def checkpoints_in(folder, count, **options):
    """Those of a run of so many workers."""
    return lc.Checkpoints(folder, workers=workers_of(count), **options)


def workers_of(count, inner=1, names=("data", "fsdp"), group=None):
    sizes = f"{names[0]}={count // inner} {names[1]}={inner}"
    return workers_on(sizes, group, axis=next(n for n in names if n in ("data", "node")))


# --- Training

STEPS, ROWS, FEATURES = 5, 6, 5  # rows of each worker
VOTE = {"quantizer": lc.quantize.midrise(2)}
CASES = {  # the axes, how parameters and batches are cut, and the quarters of a batch that a process takes
    "groups": (functools.partial(lc.lion_cub, **VOTE), ("node", "device"), None, None,
               [[0, 1], [2, 3]]),
    "tensor": (lc.owner_lion, ("data", "tp"),
               {"w": P(None, "tp"), "v": P("tp"), "b": P()}, None, [[0, 1], [2, 3]]),
    "across": (lc.lion_cub, ("fsdp", "data"), None, P(("data", "fsdp")),
               [[0, 2], [1, 3]]),
    "spread": (functools.partial(lc.lion_cub, **VOTE), ("device", "node"), None, None,
               [[0, 2], [1, 3]]),
    "same rows": (lc.owner_adamw, ("fsdp", "data"), None, None, [[0, 1, 2, 3]] * 2),
}  # fmt: skip


def loss_fn(params, batch, rng):
    noise = jax.random.normal(rng, (ROWS, 1)) + jax.vmap(jax.random.normal)(batch["key"])[:, None]
    found = jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["b"]
    return jnp.mean((found - batch["y"] + 0.01 * noise) ** 2)


def first_params():
    rng = np.random.default_rng(0)
    shapes = {"w": (FEATURES, 40), "v": (40, 1), "b": (1,)}
    return {k: rng.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}


def trained(name):
    """Parameters and counters, which every process can read, and losses, of both kinds of steps."""
    make, axes, specs, batch_spec, taken = CASES[name]
    workers = workers_of(4, 2, axes, "device" if "device" in axes else None)
    tx = make(0.05, workers=workers)
    state = lc.init_state(tx, first_params(), workers, specs=specs, rng=jax.random.key(3))
    step = lc.make_train_step(loss_fn, tx, workers, batch_spec=batch_spec)

    def own_step(state, batch):
        params, opt_state, key = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    params = jax.tree.map(jnp.copy, state.params)
    own, mapped = (params, tx.init(params), jax.random.key(4)), lc.map_step(own_step, workers)
    rows = np.arange(workers.num_gradients * ROWS)
    quarters = rows.reshape(4, -1)
    # Of map_step a worker whose devices are in two processes has all of its rows in both.
    of_own = [[0, 1, 2, 3]] * 2 if name == "across" else taken
    if jax.process_count() == 2:  # each has its own
        rows, of_own = (quarters[x[jax.process_index()]].reshape(-1) for x in (taken, of_own))
    else:
        of_own = rows

    def batch_of(i, rows):
        x = normal(workers.num_gradients * ROWS, FEATURES, seed=i + 1)[rows]
        keys = jax.random.split(jax.random.key(i), 24)[rows]
        return {"x": x, "y": jnp.sin(x.sum(1, keepdims=True)), "key": keys}

    for i in range(STEPS):
        state, metrics = step(state, batch_of(i, rows))
        own, loss = mapped(own, batch_of(i, of_own))
    assert step.traces == 1
    found = paths_of((state.params, lc.metrics(state), own[0], lc.metrics(own[1])))
    found = {path: np.asarray(x) for path, x in found.items()}
    return found, [float(metrics["loss"]), float(loss)]


# --- The rows of each process

ALL = np.arange(48, dtype=np.float32).reshape(16, 3)


def started(axes=None, width=3, tx=None, name="x", workers=None, **options):
    """A state and its step."""
    tx, workers = tx or lc.lion_cub(0.05, workers="data"), workers or workers_of(4, 2, axes)
    params = {key: np.ones((width, 128), np.float32) for key in "vw"}
    state = lc.init_state(tx, params, workers)

    def loss(params, batch, rng):
        mean = jnp.mean(batch[name] @ params["v"] + batch[name] @ params["w"]) / 2
        return mean * batch.get("c", 1.0)

    return state, lc.make_train_step(loss, tx, workers, **options)


def rows_fit(folder):
    me, within = jax.process_index(), ("data", "fsdp")
    rows = np.split(ALL, 2)[me]
    other = "6.0} rows" if me else "8.0} rows for each part of the batch, and process 1 {"
    for axes, count, words in [
        (within, 8 - 2 * me, other),
        (within, 7, f"These are the rows of process {me} of 2, whose devices take"),
        (("fsdp", "data"), 8, "0 and 1 take the same rows of the batch, and gave different ones"),
    ]:
        state, step = started(axes, accumulate=2)
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(words)):
                step(state, {"x": rows[:count]})
    for whole, words in [
        (np.ones(4), "batch['x'] has 16 rows and batch['c'] 8"),
        (
            np.float32(me),
            "values of map_step differ: processes 0, 1. Process 0 has `batch['c'], float32, checksum",
        ),
    ]:
        state, step = started(within)
        with pytest.raises(ValueError, match=re.escape(words)):
            step(state, {"x": rows, "c": whole})
    state, step = started(within)
    with pytest.warns(UserWarning, match="0 and 1 gave the same rows, so the batch has them twice"):
        state, _ = step(state, {"x": ALL[:8]})
    if me:  # alone, and does not wait for the other
        with pytest.raises(
            ValueError, match=re.escape("process 1 gives {\"batch['x']\": 6.0} rows")
        ):
            step(state, {"x": ALL[:6]})
    state, _ = started(within)
    lies = NamedSharding(state.rng.sharding.mesh, P("data"))
    every = jax.make_array_from_callback(ALL.shape, lies, lambda i: ALL[i])
    assert step(state, {"x": every})[1]["loss"] == np.mean(ALL.sum(1))
    state, step = started(within)
    with pytest.raises(ValueError, match=r"rows for each part of the batch, and process . {"):
        step(state, {"x": every if me else rows})
    state, step = started(("fsdp", "data"))
    _, metrics = step(state, {"x": ALL, "c": np.float32(2)})
    assert metrics["loss"] == 2 * np.mean(ALL.sum(1))


def other_code(folder):
    """In the last process something is another: a sentence in both, and nobody waits."""
    me, vote = jax.process_index(), functools.partial(lc.lion_cub, workers="data")
    injected = optax.inject_hyperparams(vote, static_args=("workers",))
    for first, last, words in [
        (
            vote(0.5),
            vote(0.5, bucket_size=256),
            "^collectives of the step differ: processes 0, 1. ",
        ),
        (vote(0.5), vote(0.25), "0 has `.*dense<-?5.0.*process 1 has `.*dense<-?2.5"),
        (
            injected(0.5),
            injected(0.25),
            r"0 has `state.*\['learning_rate'\] = 0.5`, .* = 0.25`. Run",
        ),
        (
            vote(0.5),
            lc.owner_lion(0.5, workers="data"),
            "^arguments of the step differ: .*opt_state",
        ),
    ]:
        state, step = started(("data", "fsdp"), tx=last if me else first)
        with pytest.raises(ValueError, match=words):
            step(state, {"x": np.split(ALL, 2)[me]})
    state, step = started(("data", "fsdp"), name="xy"[me])
    with pytest.raises((RuntimeError, KeyError), match=r"not traced: another process|'y'"):
        step(state, {"x": np.split(ALL, 2)[me]})
    if me:  # on devices of its own, of which the other knows nothing
        mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
        state, step = started(workers=lc.Workers(mesh, "data"))
        step(state, {"x": ALL})


def another_rate(folder):
    """Set by hand in one process, between two calls that compare."""
    vote = optax.inject_hyperparams(lc.lion_cub, static_args=("workers",))(0.5, workers="data")
    state, step = started(("data", "fsdp"), tx=vote)
    rows = {"x": np.split(ALL, 2)[jax.process_index()]}
    for _ in range(4):
        state, _ = step(state, rows)
    for rates in ([0.25, 0.25], [0.25, 0.125]):
        state.opt_state.hyperparams["learning_rate"] = jnp.float32(rates[jax.process_index()])
        state, _ = step(state, rows)
    for _ in range(2):
        state, _ = step(state, rows)
    with pytest.raises(
        ValueError, match=r"scalars .*\['learning_rate'\] = 0.25`, .* = 0.125`. Run"
    ):
        step(state, rows)


def mapped(folder):
    """A rate that one sets by hand in a mapped step is named; one alone evaluates what all have."""
    me, workers = jax.process_index(), workers_of(4, 2)
    make = optax.inject_hyperparams(lc.owner_adamw, static_args=("workers",))
    tx = make(0.5, workers=workers)

    def train(state, rows):
        params, stats, opt_state = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        stats = {"batch_stats": 0.5 * (stats["batch_stats"] + rows.mean(0))}
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    state = np.ones(3, np.float32), {"batch_stats": np.zeros(3, np.float32)}, tx.init(jnp.ones(3))
    step, rows = lc.map_step(train, workers), np.split(ALL, 2)[me]
    step.explain(state, rows)
    for _ in range(5):
        state, _ = step(state, rows)
    if me == 0:
        params, stats = jax.device_get(state[:2])
        assert np.isfinite(jnp.tanh(ALL - stats["batch_stats"]) @ params).all()
        wanted = (1 - 0.5**5) * ALL.mean(0)
        np.testing.assert_allclose(stats["batch_stats"], wanted, rtol=1e-5)
        state[2].hyperparams["learning_rate"] = jnp.float32(0.25)
    for _ in range(3):  # calls 6, 7 and 8
        state, _ = step(state, rows)
    told = r"scalars .*learning_rate.* = 0.25`, .*learning_rate.* = 0.5`. Run"
    with pytest.raises(ValueError, match=told):
        step(state, rows)
    if me:  # on devices of its own, of which the other knows nothing
        mesh = Mesh(np.array(jax.local_devices()), ("data",))
        lc.map_step(lambda w, rows: (w, rows @ w), lc.Workers(mesh, "data"))(jnp.ones(3), ALL)


def leave(folder):
    """An error of one, in the context that ends it; the last task, for nobody comes back."""
    with lc.mesh.end_on_error():
        multihost_utils.sync_global_devices("all else is done")
        if jax.process_index():
            raise KeyError("of one")
        multihost_utils.sync_global_devices("never")


def sent():
    """Bytes that others have got of this process, as the kernel counts them at each of its sockets."""
    total = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd.name))) as one:
            told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
            total += int.from_bytes(told[120:128], sys.byteorder)
    return total


def votes_alone(folder):
    """Neither parameters nor rows travel."""
    before = sent()
    state, step = started(("data", "fsdp"), width=1024)
    assert sent() - before < optax.tree.size(state.params) / 5
    batch = {"x": normal(256, 1024, seed=jax.process_index())}
    said = lc.audit.collectives(step.lower(state, batch).compile(), state.rng.sharding.mesh)
    predicted = 5 * 2 * sum(lc.audit.sent_bytes(said).values())  # of two devices
    before = sent()
    for _ in range(5):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    assert 0.9 * predicted < sent() - before < 1.2 * predicted < batch["x"].nbytes
    processes.WAITS_SECONDS = 0.1
    if jax.process_index():  # until the other has said that it waits
        until(lambda: "process 0 has waited" in (folder / "0.log").read_text(), [])
    jax.block_until_ready(step(state, batch))
    processes.WAITS_SECONDS = 60.0


# --- States that tell leaf, worker and step


def first_state(workers, dtype=jnp.float32):
    """Momentum of each worker, error feedback, and momentum of owners in one state."""
    tx = lc.communicate(
        workers="data", momentum=lc.momentum.blend(0.5, 0.5),
        quantizer=lc.quantize.error_feedback(lc.quantize.midrise(2)),
        decision=lc.decide.at_owner(optax.scale_by_lion(0.5, 0.5), lc.decide.sign()),
    )  # fmt: skip
    shapes = {"w": (16, 40), "b": (3,), "none": (0, 3)}
    params = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    model_state = {"key": jax.random.key(1), "mean": jnp.zeros(3), "count": jnp.int32(0)}
    specs = dict.fromkeys(shapes, P()) | {"w": P("fsdp")}
    return lc.init_state(tx, params, workers, specs=specs, model_state=model_state)


def number(path, shape, dtype, step):
    """What an array of the state holds at a step, the whole of it, in numbers whose means are exact."""
    if path == ".step":
        return np.int32(step)
    drawn = np.random.default_rng([zlib.crc32(path.encode()), step]).integers(-999, 999, shape)
    return np.asarray(drawn, dtype)


def real(state):
    """Of arrays in rows, which elements are no padding: that is zero, and not saved."""
    found = {}
    for path, flat in jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, Flat)):
        for rest, x in paths_of(flat).items() if isinstance(flat, Flat) else ():
            rows = np.zeros((flat.bucket.rows, 128), np.float32)
            for s in flat.bucket.segments:
                rows[s.first_row :].reshape(-1)[: s.size] = 1
            rows = rows.reshape(flat.bucket.num_chunks, 1, -1)
            if x.ndim:
                shards = x.size // rows.size
                found[jax.tree_util.keystr(path) + rest] = rows.repeat(shards, 1).reshape(x.shape)
    return found


def wholes(state, step, number=number):
    """By path: an array of the state, and what it holds at a step, padding too; without random keys."""
    mask = real(state)
    for path, x in paths_of(state).items():
        if "key<" not in str(x.dtype):
            yield path, x, number(path, x.shape, x.dtype, step) * mask.get(path, 1)


def numbered(state, step):
    leaves = paths_of(state)
    for path, x, whole in wholes(state, step):
        whole = np.asarray(whole, x.dtype)
        leaves[path] = jax.make_array_from_callback(x.shape, x.sharding, whole.__getitem__)
    return jax.tree.unflatten(jax.tree.structure(state), leaves.values())


def assert_holds(state, step, number=number):
    """Of what this process holds, without random keys."""
    for path, x, whole in wholes(state, step, number):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index], err_msg=path)


def assert_half_as_many(found):
    """Of 8 workers now 4, or of 4 now 2: what all have, and means of what they had."""
    assert found.step == 5 and found.data == {"next": 6}
    assert_holds(found.state._replace(model_state=(), opt_state=()), 5)

    def mean(path, shape, dtype, step):
        before = number(".opt_state.mu" + path, (2 * shape[0], *shape[1:]), dtype, step)
        return np.broadcast_to(before.mean(0), shape)

    assert_holds(found.state.opt_state.mu, 5, mean)


# --- What each of two processes does, one after the other


def train(folder):
    for name in CASES:
        found, loss = trained(name)
        np.savez(folder / f"{name}-{jax.process_index()}.npz", loss=loss, **found)


def differ(folder):
    """A parameter is another in the last process, then one is there alone; and a number to be saved."""
    tx, workers = lc.lion_cub(0.05, workers="data"), workers_of(4)
    params, last = first_params(), jax.process_index() == 1
    more = {"extra": np.zeros(3, np.float32)} if last else {}
    for other, named in [
        ({**params, "v": params["v"] + np.float32(last)}, "params['v']"),
        ({**params, **more}, "params['extra']"),
    ]:
        told = f"values of init_state differ: processes 0, 1. .*{re.escape(named)}, float32, "
        with pytest.raises(ValueError, match=told):
            lc.init_state(tx, other, workers)
    devices = workers.mesh.devices[:: -1 if last else 1]
    turned = lc.Workers(Mesh(devices, workers.mesh.axis_names), "data")
    with pytest.raises(
        ValueError, match=r"mesh of init_state differ: .* 0 has `\[0, 1, .*.*1 has `.* 1, 0"
    ):
        lc.init_state(tx, params, turned)
    with pytest.raises(ValueError, match="devices of the mesh of the step differ: processes 0, 1"):
        x = jax.ShapeDtypeStruct((2,), int, sharding=NamedSharding(turned.mesh, P()))
        lc.mesh.check_same_step(jax.jit(jnp.sin).lower(1.0), x=x)
    # A loop of one's own begins with arrays of each process, or of all.
    step, whole = jax.jit(jnp.sin).lower(1.0), workers.shardings(P())
    alike = {"w": jnp.ones(3), "key": jax.random.split(jax.random.key(0))}
    lc.mesh.check_same_step(step, params=alike, none=jnp.zeros((0, 3)), of_host=np.ones(2))
    for x in (
        jnp.full(4, float(last)),
        np.full(4, last),
        jax.random.split(jax.random.key(last)),
        jax.make_array_from_process_local_data(whole, np.full(4, last)),
    ):
        told = (
            r"^values of the step differ: processes 0, 1. .*`params\['v'\], .* checksum .* and seed"
        )
        with pytest.raises(ValueError, match=told):
            lc.mesh.check_same_step(step, params={**alike, "v": x})
    with jax.enable_x64(last):
        assert processes.gathered_json(jax.process_index()) == [0, 1]
    state = {"step": 0, "params": lc.init_state(tx, params, workers).params, "number": float(last)}
    told = re.escape("state.number (one of 1) is labelled one value and differs between devices 0")
    with checkpoints_in(folder / "differ", 4) as saved:
        saved.save(state)
        with pytest.raises(ValueError, match=told):
            saved.wait()


def other_workers(folder):
    """On four what one process saved of eight; and what one process is to read."""
    first = first_state(workers_of(4))
    with checkpoints_in(folder / "of-8", 4) as checkpoints:
        assert_half_as_many(checkpoints.restore(first))
    with checkpoints_in(folder / "of-4", 4) as checkpoints:
        checkpoints.save(numbered(first, 5), {"next": 6})


def agree(folder):
    """A disk that fails once, in one process; one that took nothing, in the first; and what is damaged."""
    first, index = first_state(workers_of(4)), jax.process_index()
    folder = folder / "agree"
    with checkpoints_in(folder, 4) as checkpoints:
        for step in (1, 2):
            checkpoints.save(numbered(first, step), {"step": step}, wait=True)
        read, failed = files.read, OSError(errno.EIO, "once")

        def fails(*args):
            raise failed

        files.read = fails if index else read
        with pytest.raises(OSError, match="once") as caught:
            checkpoints.restore(first)
        files.read = read
        assert (caught.value is failed) == bool(index)
        assert checkpoints.restore(first).step == 2
        write, files.write = files.write, fails  # in process 0 alone it is called
        checkpoints.save(numbered(first, 7))
        began = time.monotonic()
        why = re.escape(
            f"checkpoint {folder / '7'} was not written ([Errno 5] once), and those before"
        )
        with pytest.raises(OSError, match=why):
            checkpoints.wait()
        assert time.monotonic() - began < 30
        files.write = write
        assert checkpoints.steps() == [1, 2]
        if index == 0:
            (folder / "2" / files.ABOUT).write_text("{}")
        multihost_utils.sync_global_devices("damaged")
        with pytest.warns(UserWarning, match="2 is damaged"):
            assert checkpoints.restore(first).step == 1
        checkpoints.save(numbered(first, 2), {"step": 2}, wait=True)
        assert checkpoints.steps() == [1, 2] and list(folder.glob("2.abandoned-*"))
        assert_holds(checkpoints.restore(first).state, 2)


def refuse(folder):
    """A disk that takes nothing more from one process, for a while: all say the same, and soon."""
    first, mine = first_state(workers_of(4)), jax.process_index() == 1
    folder = folder / "refuse"
    with checkpoints_in(folder, 4) as checkpoints:
        checkpoints.save(numbered(first, 1), wait=True)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if mine:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        began = time.monotonic()
        checkpoints.save(numbered(first, 2))
        with pytest.raises(OSError, match="2 was not written") as caught:
            checkpoints.save(numbered(first, 3))
        assert time.monotonic() - began < 30
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        print(f"refused: {caught.value}", flush=True)
        assert checkpoints.steps() == [1]
        checkpoints.save(numbered(first, 4), wait=True)
        assert checkpoints.steps() == [1, 4]
        assert_holds(checkpoints.restore(first).state, 4)


def alone(folder):
    """Process 0 alone makes the checkpoints and saves; then both make them, and it alone saves."""
    first, index = first_state(workers_of(4)), jax.process_index()
    told = (r"save: process 0 waited up to 1 s for all 2 processes.*\. Every process makes the Checkpoints "
            r"of .* and calls their methods in the same order, not process 0")  # fmt: skip
    for run in ("alone", "together"):
        with checkpoints_in(folder / run, 4, timeout=1) as saved:
            if run == "together":
                saved.steps()
            if index == 0:
                with pytest.raises(TimeoutError, match=told):
                    saved.save(numbered(first, 1))
        multihost_utils.sync_global_devices(run)
        assert not (folder / run).exists()


def heal(folder):
    """Both learn which replica was wrong, and the one that was has the others' copy."""
    workers, wanted = workers_of(4), np.arange(6, dtype=np.float32)
    x = processes.put(wanted, NamedSharding(workers.mesh, P()))
    x = damaged(x, workers.mesh.devices.flat[2].id)
    replicas = lc.audit.Replicas(workers, every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lc.audit.ReplicaHealed)
        healed = replicas({"x": x})["x"]
    assert [(d.leaf, d.worker) for d in replicas.differences] == [("['x']", 2)]
    assert all((shard.data == wanted).all() for shard in healed.addressable_shards)


def stop(folder):
    """Until one is told to stop: the same step for all. The other is told when both have saved."""
    first = first_state(workers_of(4))
    with checkpoints_in(folder / "stop", 4) as saved, stop_on_sigterm() as stopping:
        for i in itertools.count(1):
            if i == 3:
                (folder / f"ready-{jax.process_index()}").touch()
            if stopping(i):
                assert stopping(i)
                saved.save(numbered(first, i))
                break
            time.sleep(0.002)
    (folder / f"saved-{jax.process_index()}").touch()
    until((folder / "all told").exists, [])
    print(f"stopped after {i}", flush=True)


def loop(folder):
    """Saves without end."""
    first = first_state(workers_of(2))
    with checkpoints_in(folder, 2, keep=2) as checkpoints:
        start = max(checkpoints.steps(), default=0) + 1
        for i in range(start, 10**9):
            checkpoints.save(numbered(first, i), {"step": i}, wait=i == start)
            if i == start:
                print("saving", flush=True)


PAIR = (
    train, rows_fit, other_code, another_rate, mapped, votes_alone, differ, other_workers, agree, refuse,
    alone, heal, stop,
)  # fmt: skip


# --- Starting processes


def main(*tasks):
    """Of one process, which was started by `run_all`."""
    names, port, processes, index, devices, folder = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    if processes != "1":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    for name in names.split(","):
        {task.__name__: task for task in tasks}[name](Path(folder))
        print(f"done: {name}", flush=True)
    if processes != "1":
        jax.distributed.shutdown()


def spawn(program, log, *arguments):
    # They compile as pytest's own process does, but what it was told about devices is not for them.
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    told = {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": " ".join(flags)}
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, program, *map(str, arguments)],
            env={k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | told,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def until(done, children):
    """Until it is done, or a child has failed."""
    deadline = time.monotonic() + SECONDS
    while not done() and all(child.poll() in (None, 0) for child in children):
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)


def kill(children):
    """What has not ended by now."""
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def run_all(program, tasks, processes, folder, act=lambda children: None):
    """Runs processes of two devices to their end, and gives what they said."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    names = ",".join(task.__name__ for task in tasks)
    logs, children = [folder / f"{i}.log" for i in range(processes)], []
    try:
        for i, log in enumerate(logs):
            children.append(spawn(program, log, names, port, processes, i, 2, folder))
        act(children)
        until(lambda: all(child.poll() is not None for child in children), children)
    finally:
        kill(children)
    said = [log.read_text() for log in logs]
    print(*(f"--- exit code {c.returncode}\n{s}" for c, s in zip(children, said, strict=True)))
    return said


# --- The tests


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder of two processes, and what they said."""
    folder = tmp_path_factory.mktemp("pair")
    with checkpoints_in(folder / "of-8", 8) as checkpoints:
        checkpoints.save(numbered(first_state(workers_of(8)), 5), {"next": 6})

    def tell(children):
        for child, sign in zip(children, ("ready", "saved"), strict=True):
            until(lambda sign=sign: len(list(folder.glob(f"{sign}-*"))) == 2, children)
            child.send_signal(signal.SIGTERM)
        (folder / "all told").touch()

    return folder, run_all(__file__, (*PAIR, leave), 2, folder, tell)


@pytest.mark.parametrize("task", [task.__name__ for task in PAIR])
def test_two_processes_hold_what_is_asserted_in_each(task, pair):
    for text in pair[1]:
        assert f"done: {task}\n" in text


def test_a_process_that_waits_says_so_and_one_that_fails_is_gone(pair):
    first, last = pair[1]
    assert re.search(
        r"process 0 has waited \d+ s for the other processes: one is slow or has", first
    )
    assert "process 1 ends: it failed. Start all again. KeyError: 'of one'\n" in last
    assert "done: leave" not in first + last


@pytest.mark.parametrize("name", CASES)
def test_processes_end_with_the_bits_of_one_process(name, pair):
    wanted, loss = trained(name)
    assert not any(np.array_equal(x, wanted[f"[0]['{k}']"]) for k, x in first_params().items())
    for index in range(2):
        with np.load(pair[0] / f"{name}-{index}.npz") as found:
            assert set(found) == {"loss", *wanted}
            np.testing.assert_allclose(found["loss"], loss, rtol=1e-6)
            for key, value in wanted.items():
                np.testing.assert_array_equal(found[key], value, err_msg=key)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([5, 5, 7], "process 2 against the other 2"),
        ([7, 5, 7, 7, 1], "processes 1, 4 against the other 3"),
        ([5, 7], "processes 0, 1"),
        ([5, 5], ""),
    ],
)
def test_of_several_processes_the_minority_is_named(values, words):
    assert processes.who_differs(values)[2] == words


def test_processes_with_other_numbers_of_devices_are_named(monkeypatch):
    devices = [SimpleNamespace(process_index=i) for i in (0, 1, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"processes have \[1, 2\] devices"):
        processes.gathered_arrays(1)


def test_one_process_reads_what_two_saved(pair):
    with checkpoints_in(pair[0] / "of-4", 4) as checkpoints:
        assert_holds(checkpoints.restore(first_state(workers_of(4))).state, 5)
    with checkpoints_in(pair[0] / "of-4", 2) as checkpoints:
        assert_half_as_many(checkpoints.restore(first_state(workers_of(2))))


def test_a_save_that_fails_in_one_process_is_told_by_all_in_one_sentence(pair):
    first, second = (re.findall("refused: (.*)", text) for text in pair[1])
    assert first == second and len(first) == 1 and "those before it stay" in first[0]


def test_processes_told_to_stop_save_at_one_step(pair):
    (step,) = {int(re.search(r"stopped after (\d+)", text)[1]) for text in pair[1]}
    assert checkpoints_in(pair[0] / "stop", 4).steps() == [step]


@pytest.mark.parametrize(("kills", "reads"), [(1, 6), pytest.param(20, 3, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("error::UserWarning")
def test_whoever_reads_beside_a_run_and_whenever_it_is_killed_its_newest_is_whole(
    kills, reads, tmp_path
):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    folder, like, newest = tmp_path / "checkpoints", first_state(workers_of(2)), 0

    def read():
        found = checkpoints_in(folder, 2).restore(like)
        assert found.data == {"step": found.step}
        assert_holds(found.state, found.step)
        return found.step

    for i in range(kills):
        log = tmp_path / f"{i}.log"
        child = spawn(__file__, log, "loop", 0, 1, 0, 2, folder)
        try:
            until(lambda log=log: "saving" in log.read_text(), [child])
            for k in range(reads):
                time.sleep(rng.random() * 0.3)
                if k % 2:  # or aimed at the moments of which there are few
                    until(lambda: list(folder.glob("*.*")), [child])
                assert read() > newest
            time.sleep(rng.random() * 0.3)
            assert child.poll() is None, log.read_text()
        finally:
            kill([child])
        newest = read()
        assert newest == checkpoints_in(folder, 2).steps()[-1]
    checkpoints_in(folder, 2).save(numbered(like, newest + 1))
    assert not list(folder.glob("*.*"))  # the halves that were being written are gone


@pytest.mark.parametrize(
    ("size", "text", "words"),
    [
        (2**40, b"", "each may say 1 to 67108864"), (-1, b"", "each may say 1 to 67108864"),
        (3, b"\x80\x03.", "process 1 says what is no JSON"), (10**6, b"[" * 10**6, "process 1 says what"),
    ],
)  # fmt: skip
def test_no_process_says_more_than_a_bound_or_what_is_no_json(monkeypatch, size, text, words):
    rows = [np.frombuffer(row.ljust(max(4, len(text))), np.uint8) for row in (b"null", text)]
    answers = iter([np.array([4, size]), np.array(rows)])
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: next(answers))
    with pytest.raises(ValueError, match=words):
        processes.gathered_json(None)


if __name__ == "__main__":
    main(*PAIR, leave, loop)
