"""Saving and going on: on the same mesh, by exact rules on another, and never from damage."""

import errno
import functools
import json
import math
import os
import re
import resource
import shutil
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from conftest import assert_same, run_python, within, workers_on
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.baselines import powersgd
from lioncub_jax.checkpoint import Checkpoints, Damaged, files, portable, restore, stop_on_sigterm
from lioncub_jax.checkpoint.convert import named
from lioncub_jax.mesh.checksum import host_checksum
from lioncub_jax.mesh.hosts import key_words

# Of the last leaf almost every owner has some rows.
SHAPES = {"w": (64, 320), "v": (4, 6, 8), "b": (5,), "s": (), "none": (0, 3)}
WHOLE = dict.fromkeys(SHAPES, P())
TP = {**WHOLE, "w": P(None, "tp"), "v": P("tp")}
FSDP = {**WHOLE, "w": P("tp", "fsdp"), "v": P(None, None, ("fsdp", "tp"))}

# The axes of a mesh in their order, how the model lies on it, the axis of the workers and that of a group.
PLACES = {
    "8": ("data=8", WHOLE, "data", None),
    "6": ("data=6", WHOLE, "data", None),
    "4": ("data=4", WHOLE, "data", None),
    "2": ("data=2", WHOLE, "data", None),
    "1": ("data=1", WHOLE, "data", None),
    "tp 2, 2 x 2": ("tp=2 pod=2 data=2", TP, ("pod", "data"), None),
    "fsdp 2, 2, tp 2": ("fsdp=2 data=2 tp=2", FSDP, "data", None),
    "groups of 2, 4": ("dev=2 data=4", WHOLE, "data", "dev"),
    "2 groups of 2, tp 2": ("data=2 dev=2 tp=2", TP, "data", "dev"),
}
EXPLICIT = "fsdp 2, 2, tp 2"


@functools.cache
def workers_of(name):
    sizes, _, axis, group = PLACES[name]
    kind = AxisType.Explicit if name == EXPLICIT else AxisType.Auto
    return workers_on(sizes, group, kind, axis)


def voters_of(name):
    """How many workers there are, a group for one."""
    workers = workers_of(name)
    return workers.num_gradients // workers.mesh.shape.get("dev", 1)


OWNER = lc.decide.at_owner(optax.scale_by_lion(0.5, 0.5), lc.decide.sign())
MOMENTUM = lc.momentum.blend(0.5, 0.5)  # powers of two, so that everything is exact


def exact(workers, bucket_size=None):
    """Momentum of each worker and momentum of owners, that no code rounds."""
    both = lc.communicate(
        momentum=MOMENTUM, quantizer=lc.quantize.dense(), workers=workers, bucket_size=bucket_size,
        decision=lc.decide.at_owner(optax.scale_by_lion(0.5, 0.5), lc.decide.values()),
    )  # fmt: skip
    return lc.sync_momentum(both, lc.sync.every(50), workers=workers)


def coded(workers):
    up = lc.quantize.error_feedback(lc.quantize.midrise(2))
    return lc.communicate(momentum=MOMENTUM, quantizer=up, decision=OWNER, workers=workers)


@functools.cache
def constants(name):
    """Small whole numbers, in a pattern that no permutation keeps."""
    rng = np.random.default_rng(sum(map(ord, name)))
    return rng.integers(1, 64, SHAPES[name]).astype(np.float32)


def linear_loss(params, model_state, batch, rng):
    """The gradient of a worker is its batch times the constants, exactly."""
    inner = sum(jnp.sum(params[k] * constants(k)) for k in SHAPES)
    own = jax.random.fold_in(model_state["key"], model_state["calls"])
    changed = {
        "key": model_state["key"],
        "calls": model_state["calls"] + 1 + jnp.int32(batch[0]),
        "mean": 0.5 * model_state["mean"] + batch[0],
    }
    noise = jax.random.uniform(rng) + jax.random.uniform(own)
    return inner * jnp.mean(batch), {"noise": noise}, changed


def first_state(make, name, **change):
    workers = workers_of(name)
    mean = jnp.zeros(3, jnp.complex64)
    model_state = {"key": jax.random.key(1), "calls": jnp.int32(0), "mean": mean}
    params = {k: jnp.zeros(shape) for k, shape in SHAPES.items()} | change
    params = {k: x for k, x in params.items() if x is not None}
    return lc.init_state(
        make(workers), params, workers, specs={k: PLACES[name][1].get(k, P()) for k in params},
        model_state=model_state, rng=jax.random.key(7),
        local=optax.trace(0.5) if make is compressing else None,
    )  # fmt: skip


@functools.cache
def step_of(name):
    workers = workers_of(name)
    return lc.make_train_step(linear_loss, exact(workers), workers)


@functools.cache
def trained(name, unlike):
    """After three steps, of gradients that are the workers' own, or all the same."""
    workers = workers_of(name)
    voters = voters_of(name)
    weights = np.arange(1, voters + 1) if unlike else np.full(voters, 2)
    state = first_state(exact, name)
    for _ in range(3):
        each = np.repeat(weights, workers.num_gradients // voters)
        state, _ = step_of(name)(state, each.astype(np.float32))
    return state


def values(tree):
    """Leaves by name, as numpy; of random keys their words."""
    return {name: np.asarray(key_words(x)) for name, x in named(tree)}


def carried(folder, state, old, new, make):
    """Saves in one place and restores in another."""
    with Checkpoints(folder, workers=workers_of(old)) as checkpoints:
        checkpoints.save(state, {"at": 3}, wait=True)
    with Checkpoints(folder, workers=workers_of(new)) as checkpoints:
        like = first_state(make, new)
        found = checkpoints.restore(like)
    assert found.step == 3 and found.data == {"at": 3}
    lies, wanted = (jax.tree.map(lambda x: x.sharding, tree) for tree in (found.state, like))
    assert lies == wanted
    return found.state


def refuses(match, call, kind=ValueError):
    with pytest.raises(kind, match=match):
        call()


# --- The same numbers in every layout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2 groups of 2, tp 2", EXPLICIT), (EXPLICIT, "2 groups of 2, tp 2"), ("2 groups of 2, tp 2", "8"),
        *(pytest.param(*of, marks=pytest.mark.long) for of in [
            ("tp 2, 2 x 2", "groups of 2, 4"), ("groups of 2, 4", "tp 2, 2 x 2"), ("8", "groups of 2, 4"),
            ("1", "8"),
        ]),
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_training_in_the_other_layout(old, new, tmp_path):
    """Each worker's own where there are as many; where not all of them have the same."""
    unlike = voters_of(old) == voters_of(new)
    found = carried(tmp_path, trained(old, unlike), old, new, exact)
    # Each device of a group has model state of its own, so there may be more of it.
    found, wanted = (x._replace(model_state=()) for x in (found, trained(new, unlike)))
    assert_same(found, wanted)
    assert max(np.abs(x).max() for name, x in values(found).items() if ".owner." in name) > 8


@pytest.mark.parametrize("place", ["8", "2 groups of 2, tp 2"])
def test_another_size_of_buckets_has_the_same_numbers(place, tmp_path):
    state, smaller = trained(place, True), functools.partial(exact, bucket_size=2000)
    found = carried(tmp_path / "a", state, place, place, smaller)
    assert len(found.opt_state.inner.owner) > len(state.opt_state.inner.owner)
    assert_same(carried(tmp_path / "b", found, place, place, exact), state)


def test_saved_arrays_may_be_donated_and_the_restored_need_no_second_program(tmp_path):
    place = "2 groups of 2, tp 2"
    step, batch = step_of(place), np.ones(8, np.float32)
    state, _ = step(first_state(exact, place), batch)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with Checkpoints(tmp_path, workers=workers_of(place)) as checkpoints:
        at_save, before = values(state), state
        checkpoints.save(state)
        wanted = step(state, batch)
        assert any(x.is_deleted() for x in jax.tree.leaves(before))
    with Checkpoints(tmp_path, workers=workers_of(place)) as checkpoints:
        again, traces = checkpoints.restore(like).state, step.traces
    assert all(np.array_equal(at_save[name], x) for name, x in values(again).items())
    assert_same(step(again, batch), wanted)
    assert step.traces == traces  # it lies as the state before lay


ORBAX_ALONE = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
reader = ocp.PyTreeCheckpointer()
types = ocp.PyTreeCheckpointHandler().metadata(ocp.step.epath.Path(sys.argv[1])).tree
how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), types)
np.savez(sys.argv[2], **reader.restore(sys.argv[1], restore_args=how)["params"])
assert not any(name.startswith("lioncub") for name in sys.modules)
"""


def test_a_manager_of_ones_own_saves_and_four_and_six_workers_go_on_from_eight(tmp_path):
    """In two lines, and a program that knows orbax alone reads the parameters."""
    state = trained("8", False)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        tree = portable(state, workers_of("8"))
        manager.save(3, args=ocp.args.StandardSave(tree))
    for place in ("4", "6", "8"):
        like = first_state(exact, place)
        found = restore(tmp_path / "run" / "3" / "default", like, workers_of(place))
        wanted = trained(place, False)
        # What is drawn or added up by each worker of its own has other numbers of other workers.
        assert_same(*(x._replace(model_state=(), rng=0) for x in (found, wanted)))
        step_of(place)(found, np.ones(int(place), np.float32))
    done = run_python("-c", ORBAX_ALONE, tmp_path / "run/3/default", tmp_path / "params.npz")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "params.npz") as params:
        assert {*params} == {*SHAPES} - {"none"}
        for name in params:
            np.testing.assert_array_equal(params[name], state.params[name])


# --- Another number of workers


KEY = "model_state.key"
OWN = "mu", "error", "acc_grads", "local_state", "mean", "calls"


def accumulating(workers):
    """With state of a class that says nothing of whose it is."""
    return optax.MultiSteps(coded(workers), 4)


def compressing(workers):
    """With an optimizer of each worker's own besides."""
    return powersgd(optax.sgd(0.5), 1, workers=workers)


def is_own(name):
    return not {*OWN}.isdisjoint(name.split(".")) and ".owner" not in name


def numbered(state):
    """Whole numbers where workers have something of their own, so that means are exact."""
    leaves = []
    for name, x in named(state):
        if is_own(name):
            numbers = np.random.default_rng(sum(map(ord, name))).integers(0, 9, x.shape)
            numbers = 8 * numbers * (1 - 2j if jnp.iscomplexobj(x) else 1)
            x = jax.device_put(jnp.asarray(numbers, x.dtype), x.sharding)
        leaves.append(x)
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


@pytest.mark.parametrize(
    ("old", "new", "make"),
    [("8", "2", accumulating), ("2", "8", accumulating), ("8", "4", compressing)],
)
def test_what_workers_get_when_their_number_changes(old, new, make, tmp_path):
    state = numbered(first_state(make, old))
    state = state._replace(step=state.step + 3)
    found = values(carried(tmp_path, state, old, new, make))
    ruled = 0
    for name, x in values(state).items():
        if ".owner" in name:
            continue  # cut anew, as above
        if is_own(name) and len(x):
            mean = x.max(0) if x.dtype == np.int32 else x.mean(0).astype(x.dtype)
            x, ruled = np.broadcast_to(mean, (int(new), *mean.shape)), ruled + 1
        if name != KEY:
            np.testing.assert_array_equal(found[name], x, err_msg=name)
    assert ruled == (2 if make is compressing else 3) * len(SHAPES) + 2
    # Those who were there keep their random keys, and each newcomer has one of its own.
    keys, before = found[KEY], values(state)[KEY]
    np.testing.assert_array_equal(keys[: len(before)], before[: len(keys)])
    assert len({row.tobytes() for row in keys}) == int(new)


def test_votes_on_some_parameters_move_only_where_their_slices_say_which(tmp_path):
    def make(workers):
        rest = lc.global_gradients(optax.sgd(0.1), workers=workers)
        some = {k: k != "b" for k in SHAPES}
        others = {k: k == "b" for k in SHAPES}
        return optax.chain(optax.masked(coded(workers), some), optax.masked(rest, others))

    old = "groups of 2, 4"
    state = first_state(make, old)
    state = state._replace(step=state.step + 3)
    assert_same(carried(tmp_path, state, old, old, make), state)
    with Checkpoints(tmp_path, workers=workers_of("2 groups of 2, tp 2")) as checkpoints:
        like = first_state(make, "2 groups of 2, tp 2")
        refuses("has rows- in its name on as many workers", lambda: checkpoints.restore(like))


# --- Damage


def small(step=0):
    params = {"w": np.float32([step, 2]), "b": np.arange(1.0, 100, dtype=np.float32) + step}
    everywhere = jax.sharding.NamedSharding(workers_of("2").mesh, P())
    return jax.device_put({"step": np.int32(step), "params": params}, everywhere)


def opened(folder, **options):
    return Checkpoints(folder, **{"workers": workers_of("2")} | options)


def save_small(folder, *steps, **options):
    with opened(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(small(step), {"step": step})


def restore_small(folder, **options):
    with opened(folder) as checkpoints:
        return checkpoints.restore(small(), **options)


def files_of(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def flip(path, at=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def assert_right_or_refused(folder):
    """The newest step that is whole, as it was saved; returns what warnings say of the others."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        found = restore_small(folder)
    told = [str(w.message) for w in warned if "is damaged" in str(w.message)]
    assert_same(found.state, small(found.step))
    assert found.data == {"step": found.step} and len(told) == 2 - found.step
    return told


def harms(path, places):
    """Ways to damage a file, the bytes of which are flipped at so many places."""
    size = path.stat().st_size
    ways = [functools.partial(flip, at=size * i // places) for i in range(places)]
    return [
        *ways,
        cut_short,
        Path.unlink,
        lambda x: x.write_bytes(b""),
        lambda x: (x.unlink(), x.mkdir()),
    ]


@pytest.mark.parametrize("places", [1, pytest.param(16, marks=pytest.mark.long)])
def test_damaged_files_are_refused_by_name_or_harmless_and_never_read(places, tmp_path):
    whole, folder, refused, tried = tmp_path / "whole", tmp_path / "harmed", set(), 0
    save_small(whole, 1, 2)
    for path in files_of(whole / "2"):
        for harm in harms(path, places):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            harm(folder / path.relative_to(whole))
            tried += 1
            if told := assert_right_or_refused(folder):
                refused.add(path.parent.name)
                assert f"{folder / '2'} is damaged" in told[0]
                assert len(told[0]) < 700 and "\n" not in told[0]
    print(f"{tried} damaged files, refused in {sorted(refused)}")
    assert {"2", "state", "d"} <= refused and tried >= 12 * (places + 4)  # of 12 files, or more
    with pytest.raises(Damaged, match="2 is damaged"):
        flip(folder / "2" / files.ABOUT)
        restore_small(folder, step=2)


HARMS = {
    "negated": lambda x: -x,
    "two signs": lambda x: x * np.where(np.arange(99) < 2, -1, 1),
    "two swapped": lambda x: x[np.r_[1, 0, 2:99]],
    "one bit": lambda x: (x.view(np.uint32) ^ (np.arange(99) == 7)).view(np.float32),
    "another dtype": lambda x: x.view(np.int32),
    "another shape": lambda x: x[:98],
}


@pytest.mark.parametrize("harm", HARMS)
def test_numbers_that_are_not_as_written_are_named(harm, tmp_path):
    """Orbax alone restores them without a word: it wrote them."""
    save_small(tmp_path, 1, 2)
    params = {name: np.asarray(x) for name, x in small(2)["params"].items()}
    params["b"] = HARMS[harm](params["b"])
    tree = {"step": np.int32(2), "params": params}
    ocp.PyTreeCheckpointer().save(
        tmp_path / "2" / "state", jax.tree.map(jnp.asarray, tree), force=True
    )
    (told,) = assert_right_or_refused(tmp_path)
    assert "2 is damaged: params.b is not as it was written" in told or "params.b cannot be" in told


def test_swapped_rows_of_an_array_that_is_cut_are_another_array():
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    assert host_checksum(x) != host_checksum(x[[1, 0, *range(2, 8)]])


def test_a_damaged_step_is_set_aside_when_it_is_saved_again(tmp_path):
    save_small(tmp_path, 1, 2)
    flip(tmp_path / "2" / files.ABOUT)
    with opened(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match="2 is damaged: its description is not as it was"):
            assert checkpoints.restore(small()).step == 1
        checkpoints.save(small(2), {"step": 2}, wait=True)
        assert checkpoints.steps() == [1, 2]
    (aside,) = tmp_path.glob("2.abandoned-*")  # so that somebody may look at it or copy from it
    assert (aside / files.ABOUT).is_file()
    assert restore_small(tmp_path).data == {"step": 2}
    for step in "12":
        flip(tmp_path / step / files.ABOUT)
    none_left = r"no checkpoint in .* is whole: .*2 is damaged.*1 is damaged"
    with pytest.warns(UserWarning, match="is damaged"):
        refuses(none_left, lambda: restore_small(tmp_path), Damaged)


def test_who_only_reads_changes_nothing_and_a_save_takes_away_what_a_killed_one_left(tmp_path):
    with opened(tmp_path / "none") as checkpoints:
        assert checkpoints.steps() == []
    assert not (tmp_path / "none").exists()
    save_small(tmp_path, 1, 2, 3, 4, keep=2)
    for step in (2, 9):
        shutil.copytree(tmp_path / "4", tmp_path / f"{step}.orbax-checkpoint-tmp")
    before = files_of(tmp_path)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3, 4]
        assert checkpoints.restore(small()).data == {"step": 4}
        assert checkpoints.restore(small(), step=3).data == {"step": 3}
    assert files_of(tmp_path) == before
    save_small(tmp_path, 5, keep=3)
    # That of a later step may be another's; the next save of this step writes over it.
    assert sorted(x.name for x in tmp_path.iterdir()) == ["3", "4", "5", "9.orbax-checkpoint-tmp"]
    save_small(tmp_path, 9, keep=1)
    assert [x.name for x in tmp_path.iterdir()] == ["9"] and restore_small(tmp_path).step == 9


def test_going_back_sets_the_abandoned_branch_aside(tmp_path):
    save_small(tmp_path, 20, 30, 40)
    for step in (25, 40):
        refuses(
            r"has a checkpoint of step 40, and a restart .* Restore an earlier one first",
            functools.partial(save_small, tmp_path, step),
        )
    assert restore_small(tmp_path, step=20).step == 20
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps() == [20, 30, 40]  # a restore alone changes nothing
        checkpoints.restore(small(), step=20)
        checkpoints.save(small(25))
        checkpoints.save(small(30))
        checkpoints.wait()
        assert checkpoints.steps() == [20, 25, 30]
    aside = {path.name.partition("-")[0] for path in tmp_path.glob("*.*")}
    assert aside == {"30.abandoned", "40.abandoned"}
    assert restore_small(tmp_path).step == 30


def test_policies_of_orbax_decide_and_options_that_are_ours_are_refused(tmp_path):
    with opened(tmp_path, save_interval_steps=10) as checkpoints:
        saved = [checkpoints.save(small(step)) for step in range(12)]
        assert saved == [step % 10 == 0 for step in range(12)]
        assert checkpoints.save(small(12), force=True)
    assert opened(tmp_path).steps() == [0, 10, 12]
    every = ocp.checkpoint_managers.EveryNSteps(10)
    with opened(tmp_path, preservation_policy=every) as checkpoints:
        checkpoints.save(small(14), wait=True)
        assert checkpoints.steps() == [0, 10]
    for name in ("read_only", "cleanup_tmp_directories", "async_options", "no_such"):
        refuses(name, lambda n=name: opened(tmp_path, **{n: True}), TypeError)


def test_the_best_stays_beside_the_newest(tmp_path):
    with opened(tmp_path, keep=1, best="min") as checkpoints:
        assert checkpoints.best() is None
        for step, loss in enumerate([3.0, jnp.float32(1.0), float("nan"), 2.0], 1):
            checkpoints.save(small(step), {"loss": float(loss)}, metric=loss)
        refuses("float", lambda: checkpoints.save(small(9), metric=[1, 2]), TypeError)
    with opened(tmp_path, best="min") as checkpoints:
        assert checkpoints.best() == 2 and checkpoints.steps() == [2, 4]
    with opened(tmp_path, best="max") as checkpoints:
        assert checkpoints.best() == 4
    with opened(tmp_path) as checkpoints:
        refuses("best='min'", checkpoints.best)
        refuses("metric=1: give Checkpoints", lambda: checkpoints.save(small(9), metric=1))
    refuses("best='least': give 'min' or 'max'", lambda: opened(tmp_path, best="least"))


def test_parameters_alone_are_read_where_they_are_wanted(tmp_path):
    save_small(tmp_path, 1, 2)
    params = small(2)["params"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    with opened(tmp_path) as checkpoints:
        for like in (params, shapes, jax.tree.map(np.asarray, params)):
            found = checkpoints.restore_params(like)
            assert_same(found.state, params)
            assert found.step == 2 and found.data == {"step": 2}
        for change, words in [
            ({"w": jnp.zeros((8, 41))}, r"params.w is float32\[2\] in it, wanted .*8, 41"),
            ({"x": jnp.zeros(3)}, "of another model.* params.x is None in it"),
        ]:
            like = shapes | change
            refuses(words, functools.partial(checkpoints.restore_params, like))
        refuses("holds arrays", lambda: checkpoints.restore_params({"w": object()}), TypeError)
        flip(tmp_path / "2" / files.ABOUT)
        with pytest.warns(UserWarning, match="the one before it is used"):
            assert checkpoints.restore_params(shapes).step == 1


DATA = {
    "next": 7, 3: ("a", None, [True, -1e300]), "loss": float("inf"), (1, 2): {"none": {}, "empty": []},
    "numpy": [np.float32(0.1), np.int64(2**40), np.bool_(True), jnp.dtype("bfloat16").type(1.5)],
    "dict": {"dict": 1},
}  # fmt: skip


def test_data_comes_back_as_it_was_and_what_json_cannot_hold_is_refused(tmp_path):
    def told(x):
        return {**x, "numpy": [(type(y), y.item()) for y in x["numpy"]]}

    with opened(tmp_path) as checkpoints:
        checkpoints.save(small(1), DATA, wait=True)
        assert told(checkpoints.restore(small()).data) == told(DATA)
        checkpoints.save(small(2), math.nan, wait=True)
        assert math.isnan(checkpoints.restore(small()).data)
        for data in (object(), {"x": {1, 2}}, jnp.ones(2)):
            refuses(
                "data holds .*give", functools.partial(checkpoints.save, small(3), data), TypeError
            )
    (tmp_path / "2").rename(tmp_path / "3")
    told = "3 is damaged: it is that of step 2 under another name; give it its name back"
    refuses(told, lambda: restore_small(tmp_path, step=3), Damaged)


# --- What fails and is no damage

PASSING = [
    OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "Permission denied"),
    MemoryError("no memory"), jax.errors.JaxRuntimeError("INTERNAL: of a device"),
    ValueError("UNAVAILABLE: a network"),
]  # fmt: skip


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_read_that_fails_once_is_raised_and_the_checkpoint_stays(tmp_path, monkeypatch):
    save_small(tmp_path, 1, 2)
    before, failures, read = files_of(tmp_path), [], ocp.PyTreeCheckpointHandler.restore

    def fails_once(*args, **kwargs):
        if failures:
            raise failures.pop()
        return read(*args, **kwargs)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fails_once)
    with opened(tmp_path) as checkpoints:
        for error in PASSING:
            failures.append(error)
            with pytest.raises(type(error)) as caught:
                checkpoints.restore(small())
            assert caught.value is error
            assert files_of(tmp_path) == before
        assert checkpoints.restore(small()).step == 2

        def taken_away(handler, item, **kwargs):  # by another process, while it is read
            shutil.rmtree(tmp_path / "2", ignore_errors=True)
            return read(handler, item, **kwargs)

        monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", taken_away)
        assert checkpoints.restore(small()).step == 1
        missing = r"no checkpoint of step 2 .* there are \[1\]"
        refuses(missing, lambda: checkpoints.restore(small(), step=2), FileNotFoundError)


def test_a_process_without_files_to_open_is_told_so_and_no_checkpoint_is_called_damaged(tmp_path):
    save_small(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened(tmp_path) as checkpoints:
        checkpoints.restore(small())
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), limits[1]))
        try:
            with pytest.raises(Exception, match="Too many open files") as caught:
                checkpoints.restore(small())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not isinstance(caught.value, Damaged) and checkpoints.restore(small()).step == 1


def test_a_disk_that_takes_nothing_more_is_told_and_the_older_ones_stay(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(small(1), wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        try:
            checkpoints.save(small(2))
            told = f"checkpoint {tmp_path / '2'} was not written .*, and those before it stay"
            refuses(told, checkpoints.wait, OSError)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.steps() == [1] and checkpoints.restore(small()).step == 1
        checkpoints.save(small(2), wait=True)
        checkpoints.save(small(3), wait=True)
        assert checkpoints.steps() == [3]
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file/inside")
    with opened(tmp_path / "link") as nowhere:
        refuses("", lambda: nowhere.save(small(1)), OSError)


@pytest.mark.parametrize("file", ["d", "about"])
def test_what_the_disk_changes_is_not_told_saved_and_the_older_one_stays(
    file, tmp_path, monkeypatch
):
    def harmed(write):
        def act(folder, *args):
            for path in files_of(folder / "state"):
                flip(path)
            return write(folder, *args)

        return act

    fsync = os.fsync

    def loses(handle):
        fsync(handle)
        os.pwrite(handle, b"?", 3)

    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(small(1), wait=True)
        with monkeypatch.context() as patch:
            if file == "d":
                patch.setattr(files, "write", harmed(files.write))
            else:
                patch.setattr(os, "fsync", loses)
            checkpoints.save(small(2))
            lost = "2 was not written .*(cannot be read|does not hold)"
            refuses(lost, checkpoints.wait, OSError)
        assert checkpoints.steps() == [1] and checkpoints.restore(small(0)).step == 1


FORGED = [
    None,
    [],
    {"x": 1},
    [2, None, {"params.b": [[2], "no dtype", [1, 2]]}],
    [2, {"int32": {}}, {}],
]


def test_what_others_leave_in_the_folder_stops_nobody(tmp_path):
    """Sealed descriptions that make no sense, pipes, an empty folder, other files."""
    with opened(tmp_path, keep=9) as checkpoints:
        for step in (1, 2):
            checkpoints.save(small(step), wait=True)
        about = tmp_path / "2" / files.ABOUT
        for body in FORGED:
            about.write_text(files.sealed(json.dumps(body)))
            with pytest.warns(UserWarning, match="2 is damaged: "):
                assert checkpoints.restore(small(0)).step == 1
        about.unlink()
        os.mkfifo(about)
        with (
            within(20),
            pytest.warns(UserWarning, match="2 is damaged: its description is missing"),
        ):
            assert checkpoints.restore(small(0)).step == 1
        (tmp_path / "7").mkdir()
        for other in (".nfs0001", "lost+found", "core.17", "007", "4.orbax-checkpoint-tmp"):
            (tmp_path / other).touch()
        with pytest.warns(UserWarning, match="7 is damaged"):
            assert checkpoints.restore(small(0)).step == 1
        checkpoints.save(small(5), wait=True)
        assert checkpoints.steps() == [1, 5]
        for path in files_of(tmp_path / "5" / "state"):
            path.unlink()
            os.mkfifo(path)
        with within(20), pytest.warns(UserWarning, match="a pipe or a device"):
            assert checkpoints.restore(small(0)).step == 1


@pytest.mark.parametrize(
    "dtype", ["int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e5m2", "bool", "complex64"]
)
def test_numbers_of_any_width_are_read_to_the_bit(dtype, tmp_path):
    params = jax.device_put(jnp.arange(15).reshape(3, 5) % 2, small()["step"].sharding).astype(
        dtype
    )
    state = {"step": 1, "params": {"x": params, "none": jnp.zeros((0, 2)), "empty": {}}}
    with opened(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        found = checkpoints.restore(state).state
        assert_same(found, jax.tree.map(jnp.asarray, state))
        other = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), state)
        if dtype != "float32":  # no cast is silent
            refuses(r"params.x is .* wanted float32", lambda: checkpoints.restore(other))


# --- Bad input

ODD = "x*?[!a", "xyz", "new\nline", "{b}$HOME %s", "a:b", "gs"


def test_paths_of_all_kinds_hold_their_own_or_are_refused(tmp_path):
    for step, name in enumerate(ODD):
        save_small(tmp_path / name / "ck", step)
    for step, name in enumerate(ODD):
        assert restore_small(tmp_path / name / "ck").step == step
    (tmp_path / "notes.txt").touch()
    for given, words in {
        "s3://bucket/run": "mount the bucket", "file:///run": "mount the bucket",
        Path("s3://b"): "mount the bucket", "~/run": r"os.path.expanduser", "": "give the name of a folder",
        "a\\b": "cannot restore what it saves", "lr=1e-3[seed=0]/run": "cannot restore what it saves",
        "\udce9": "bytes that are no text",
        tmp_path / "notes.txt": "notes.txt is a file",
    }.items():  # fmt: skip
        refuses(words, lambda g=given: opened(g))
    refuses("workers=", lambda: opened(tmp_path, workers="data"), TypeError)
    for name, value in [(n, x) for n in ("keep", "timeout") for x in (0, -1, 1.5, True)]:
        told = re.escape(f"{name}={value!r}")
        refuses(told, lambda n=name, x=value: opened(tmp_path / "a", **{n: x}))


def test_names_that_orbax_would_write_over_each_other_are_refused_before_anything_is_written(
    tmp_path,
):
    x = jnp.ones(2)
    for params in (
        {"a.b": x, "a": {"b": x}},
        {"a": x, "a.b": x},
        {"a": [x], "a.0": x},
        {"a..b": x},
    ):
        with opened(tmp_path / "clash") as checkpoints:
            save = functools.partial(checkpoints.save, {"params": params}, step=1)
            refuses("two leaves of the state are called params.a", save)
        assert opened(tmp_path / "clash").steps() == []
    odd = {"a.b": x, "a": {"c": 2 * x}, "a/b": 4 * x, "[0]": 5 * x, "%2F": 6 * x}
    with opened(tmp_path) as checkpoints:
        checkpoints.save({"params": odd}, step=1, wait=True)
        assert_same(checkpoints.restore({"params": odd}).state["params"], odd)


def test_what_is_no_state_is_refused_in_a_sentence(tmp_path):
    state = small(2)
    save_small(tmp_path, 1)
    with opened(tmp_path) as here:
        for given, words in [
            (state | {"note": "first"}, "state.note is .*'first'.*: a checkpoint holds arrays"),
            (
                state | {"tokens": np.int64(2**40)},
                r"state.tokens is array\(1099511627776\): a checkpoint holds .*64 bits",
            ),
            (state | {"what": object()}, "state.what is .*object"),
        ]:
            for call in (here.save, here.restore):
                refuses(words, functools.partial(call, given), TypeError)
        wrong = "the step is .*: give save"
        for step in (1.5, "1", jnp.zeros(8, jnp.int32), -1):
            refuses(wrong, functools.partial(here.save, state, step=step), TypeError)
        refuses(wrong, functools.partial(here.save, state["params"]), TypeError)
        refuses(
            "there is no folder",
            lambda: restore(tmp_path / "x", state, here.workers),
            FileNotFoundError,
        )
        gone = jax.tree.map(jnp.copy, state)
        for x in gone["params"].values():
            x.delete()  # as donated
        refuses("was given to an earlier step, .*: go on with the state", lambda: here.save(gone))
        assert here.steps() == [1]
    with opened(
        tmp_path / "flat", workers=lc.Workers(workers_of("groups of 2, 4").mesh, "data")
    ) as flat:
        two = first_state(coded, "groups of 2, 4")
        refuses("is of two levels, and the workers have group=None", lambda: flat.save(two))


def test_a_checkpoint_of_another_model_optimizer_or_format_is_refused(tmp_path):
    def first(make=coded, **change):
        return first_state(make, "2", **{"w": jnp.zeros((64, 40))} | change)

    def cub(workers):
        return lc.lion_cub(0.1, workers=workers)

    with opened(tmp_path) as checkpoints:
        checkpoints.save(first())
        for like, words in [
            (first(w=jnp.zeros((8, 41))), r"params.w is float32\[64, 40\] in it, wanted .*8, 41"),
            (first(x=jnp.zeros(3)), r"of another model.*params.x is None in it, wanted .*\[3\]"),
            (first(b=None), r"params.b is float32\[5\] in it, wanted None"),
            (first(b=jnp.zeros(5, jnp.bfloat16)), r"params.b is float32\[5\] in it, wanted bf"),
            (first(cub), "opt_state.0.* is None in it.*carry_over"),
        ]:
            refuses(words, functools.partial(checkpoints.restore, like))
    save_small(tmp_path, 1, 2)
    about = tmp_path / "2" / files.ABOUT
    about.rename(about.with_name("about.json"))
    told = "2 has format 4, .* and this version reads 5: restore it by 0.4, save its parameters there by"
    refuses(told, lambda: restore_small(tmp_path))  # and it is not passed over
    assert restore_small(tmp_path, step=1).step == 1


# --- The end


def test_a_save_goes_on_in_the_background_inside_of_the_statement_alone(tmp_path, monkeypatch):
    """At the end of a program orbax could start no thread to end it."""
    wrote, write = [], files.write

    def slow(*args):
        time.sleep(0.5)
        write(*args)
        wrote.append(True)

    monkeypatch.setattr(files, "write", slow)
    outside = opened(tmp_path)
    outside.save(small(1))
    assert wrote == [True]
    with pytest.raises(ZeroDivisionError), outside as checkpoints:
        checkpoints.save(small(2), {"step": 2})
        assert wrote == [True]
        1 / 0  # noqa: B018
    assert wrote == [True] * 2 and outside.steps() == [1, 2]
    outside.save(small(3))
    assert outside.restore(small()).step == 3
    outside.close()


def test_sigterm_is_told_to_the_loop_and_the_handler_is_put_back():
    def own(*told):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, own)
    with stop_on_sigterm() as stopping:
        assert not stopping(0)
        signal.raise_signal(signal.SIGTERM)
        assert stopping(1) and stopping(2)
    assert signal.signal(signal.SIGTERM, before) is own
    with stop_on_sigterm(signals=[signal.SIGTERM, signal.SIGUSR1]) as stopping:
        assert not stopping(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopping(1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    refuses("every=0", lambda: stop_on_sigterm(0).__enter__())
    with ThreadPoolExecutor(1) as pool:
        refuses("main thread", pool.submit(lambda: stop_on_sigterm().__enter__()).result)
