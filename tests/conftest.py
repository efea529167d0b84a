"""Eight CPU devices for every test, a quick compiler, and one way to run a transform on some workers."""

import contextlib
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import lab
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.mesh.hosts import key_words

jax.config.update("jax_num_cpu_devices", 8)
# Tests compile much and run little. So XLA is told not to optimise machine code, which takes a third of
# the time for the same collectives, and to use no fused multiply-add, whose one rounding in place of two
# is in one program and not in the next. With an empty XLA_FLAGS they compile as for users, as `make
# test-long` does for the tests of equality.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
# A flag that JAX does not know ends the process without a word: later versions have only these emitters,
# which take half as long again.
if jax.__version_info__ < (0, 11):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("KERAS_BACKEND", "jax")  # before anything imports keras

gc.set_threshold(50_000)  # tracing makes many small objects, few of them garbage

AXIS = "data"
on_both_kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def absent(workers):
    """So many workers of one device each, none of which is there."""
    return lc.Workers(jax.sharding.AbstractMesh((workers,), (AXIS,)), AXIS)


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert len(jax.devices()) == 8, "XLA was started before conftest.py could ask for 8 CPU devices"
    gc.freeze()  # what was imported stays: no collection looks at it again


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_file(request):
    """JAX's caches never shrink by themselves: two processes of a whole run held 5 GB each."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()


def mesh_on(sizes, kind=AxisType.Auto):
    """The first devices as a mesh such as ``"data=4 tp=2"``."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in sizes.split())}
    devices = jax.devices()[: math.prod(sizes.values())]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def workers_on(sizes, group=None, kind=AxisType.Auto, axis=AXIS):
    """The workers of such a mesh."""
    return lc.Workers(mesh_on(sizes, kind), axis, group)


def scanned(txs, states, params, grads, abstain=None, told=True):
    """``{name: (updates, states)}``, ``[steps, ...]`` each, of transforms or simulators, from these states.

    They are told who abstains, if that is given and unless ``told`` is False.
    """

    def step(states, now):
        grads, abstain = now
        extra = {"abstain": abstain} if told and abstain is not None else {}
        done = {name: tx.update(grads, states[name], params, **extra) for name, tx in txs.items()}
        return {name: state for name, (_, state) in done.items()}, done

    return jax.lax.scan(step, states, (grads, abstain))[1]


def nobody(grads):
    """Who abstains from steps with gradients ``[steps, W, ...]``: none, ``bool[steps, W]``."""
    some, *_ = *jax.tree.leaves(grads), np.zeros((2, 2))
    return np.zeros(some.shape[:2], bool)


def run_workers(txs, params, grads, abstain=None, check_vma=True):
    """Runs some transforms, each worker in its own device, from state of their own.

    Returns for each name ``(updates [steps, ...], state [steps, W, ...])``, of gradients
    ``[steps, W, ...]``. The types prove that updates are the same on every worker, unless they are not
    checked. A mean, from which nobody can abstain, is not told that nobody does.
    """
    abstain = nobody(grads) if abstain is None else abstain
    mesh, someone = mesh_on(f"{AXIS}={abstain.shape[1]}"), abstain.any()

    def worker(params, grads, abstain):
        grads, abstain = jax.tree.map(lambda x: x[:, 0], (grads, abstain))
        own = jax.lax.pcast(params, AXIS, to="varying") if check_vma else params
        states = {name: tx.init(own) for name, tx in txs.items()}
        done = scanned(txs, states, params, grads, abstain, told=someone)
        return {n: (u, jax.tree.map(lambda x: x[:, None], s)) for n, (u, s) in done.items()}

    split = P(None, AXIS)
    specs = {"in_specs": (P(), split, split), "out_specs": dict.fromkeys(txs, (P(), split))}
    run = jax.shard_map(worker, mesh=mesh, **specs, check_vma=check_vma)
    arrays = jax.tree.map(jnp.asarray, (params, grads, abstain))
    return jax.tree.map(np.asarray, jax.jit(run)(*arrays))


def assert_same(found, wanted, but=0, of="", rtol=0.0, atol=0.0):
    """Trees of the same shapes, dtypes and finite numbers, or so near, but for so many of each leaf."""

    def same(path, x, y):
        x, y, of_leaf = (
            *(np.asarray(key_words(z)) for z in (x, y)),
            (of, jax.tree_util.keystr(path)),
        )
        assert (x.shape, x.dtype) == (y.shape, y.dtype), of_leaf
        assert not jnp.issubdtype(x.dtype, jnp.inexact) or np.isfinite(x).all(), of_leaf
        near = x == y
        if rtol or atol:
            near = np.isclose(x.astype(float), y.astype(float), rtol, atol)
        differ = np.argwhere(~near)
        assert len(differ) <= but, (*of_leaf, len(differ), differ[:4], x[x != y][:4], y[x != y][:4])

    jax.tree_util.tree_map_with_path(same, found, wanted)


def blank(grads):
    """The parameters, zeros, of gradients ``[steps, W, ...]``."""
    return jax.tree.map(lambda g: jnp.zeros(g.shape[2:], g.dtype), grads)


def update_of(tx, workers):
    """``(grads, state, params, **extra) -> (updates, state)`` of gradients ``[workers, ...]``."""

    def update(grads, state, params, extra):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state, params, **extra)

    mapped = lc.map_step(update, workers, rows="grads")

    def call(grads, state, params, **extra):
        return mapped(grads, state, params, extra)

    call.lower = lambda grads, state, params, **extra: mapped.lower(grads, state, params, extra)
    return call


def run_on_mesh(txs, workers, specs, grads, abstain=None):
    """Updates ``[steps, ...]`` and the last state of some transforms, mapped over the workers.

    Gradients are ``[steps, devices of workers, ...]``, and so is who abstains; parameters are zeros.
    """
    abstain = nobody(grads) if abstain is None else abstain
    params = jax.device_put(blank(grads), workers.shardings(specs))

    def update(params, each, states, grads, abstain):
        grads, abstain = jax.tree.map(lambda x: x[0], (grads, abstain))
        done = {n: tx.update(grads, states[n], params, abstain=abstain) for n, tx in txs.items()}
        return {n: u for n, (u, _) in done.items()}, {n: state for n, (_, state) in done.items()}

    step = lc.map_step(update, workers, rows=("grads", "abstain"))
    each = dict.fromkeys(txs, params)  # so that updates lie as parameters do
    states, updates = {name: tx.init(params) for name, tx in txs.items()}, []
    for i, who in enumerate(abstain):
        now, states = step(params, each, states, jax.tree.map(lambda g, i=i: g[i], grads), who)
        updates.append(now)
    return {name: (stacked([x[name] for x in updates]), states[name]) for name in txs}


def stacked(trees):
    """Trees of arrays as one, which lies as they do."""

    def stack(*arrays):
        lie = arrays[0].sharding
        lie = jax.sharding.NamedSharding(lie.mesh, P(None, *lie.spec))
        return jax.jit(lambda *x: jnp.stack(x), out_shardings=lie)(*arrays)

    return jax.tree.map(stack, *trees)


@pytest.fixture(scope="session")
def machine():
    """Skips where the lab cannot run, and says why."""
    try:
        lab.run(lab.Network(2, rate=1e8), ["true"])
    except lab.LabError as missing:
        pytest.skip(f"the lab cannot run here: {missing}")


def soon(look, wanted):
    """What is seen in the end: what is wanted may take the machine a moment, at most 20 seconds."""
    deadline = time.monotonic() + 20
    while (seen := look()) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return seen


@contextlib.contextmanager
def within(seconds):
    """Fails what takes longer, such as a wait for ever."""

    def late(*_):
        raise TimeoutError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def normal(*shape, seed=0):
    """Normal numbers of that shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_order(words):
    """What matches a message that has all words, such as ``"one ... and another"``."""
    return "(?s)" + ".*".join(map(re.escape, words.split(" ... ")))


def run_python(*arguments, **environment):
    """What Python did with arguments, which has ended, in a process that can import what this one can."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
