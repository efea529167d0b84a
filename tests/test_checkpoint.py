"""Saving and going on: on the same mesh, by exact rules on another, and never from damage."""

import errno
import functools
import io
import json
import os
import re
import shutil
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_same, run_python, within, workers_on
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.baselines.dgc import dgc
from lioncub_jax.checkpoint import Checkpoints, Damaged, files, stop_on_sigterm
from lioncub_jax.checkpoint.layout import paths_of
from lioncub_jax.mesh.hosts import key_words

# Of the last leaf almost every owner has some rows.
SHAPES = {"w": (64, 320), "v": (4, 6, 8), "b": (5,), "s": (), "none": (0, 3)}
WHOLE = dict.fromkeys(SHAPES, P())
TP = {**WHOLE, "w": P(None, "tp"), "v": P("tp")}
FSDP = {**WHOLE, "w": P("tp", "fsdp"), "v": P(None, None, ("fsdp", "tp"))}

# The axes of a mesh in their order, how the model lies on it, the axis of the workers and that of a group.
PLACES = {
    "8": ("data=8", WHOLE, "data", None),
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
    return workers.count // workers.mesh.shape.get("dev", 1)


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
        each = np.repeat(weights, workers.count // voters)
        state, _ = step_of(name)(state, each.astype(np.float32))
    return state


def values(tree):
    """Leaves by path, as numpy; of random keys their words."""
    return {path: np.asarray(key_words(x)) for path, x in paths_of(tree).items()}


def carried(folder, state, old, new, make, **options):
    """Saves in one place and restores in another."""
    with Checkpoints(folder, workers=workers_of(old)) as checkpoints:
        checkpoints.save(state, {"at": 3}, wait=True)
    with Checkpoints(folder, workers=workers_of(new)) as checkpoints:
        like = first_state(make, new)
        found = checkpoints.restore(like, **options)
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
    assert max(np.abs(x).max() for p, x in values(found).items() if ".owner" in p) > 8


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
    assert all(np.array_equal(at_save[path], x) for path, x in values(again).items())
    assert_same(step(again, batch), wanted)
    assert step.traces == traces  # it lies as the state before lay


# --- Another number of workers


KEY = ".model_state['key']"
OWN = (
    ".mu",
    ".error",
    ".acc_grads",
    ".velocity",
    ".residual",
    ".local_state",
    "['mean']",
    "['calls']",
)


def accumulating(workers):
    """With state of a class that says nothing of whose it is."""
    return optax.MultiSteps(coded(workers), 4)


def compressing(workers):
    """With an optimizer of each worker's own besides."""
    return dgc(0.5, workers=workers)


def numbered(state):
    """Whole numbers where workers have something of their own, so that means are exact."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path)
        if not any(part in name for part in OWN) or ".owner" in name:
            return x
        numbers = np.random.default_rng(sum(map(ord, name))).integers(0, 9, x.shape)
        numbers = 8 * numbers * (1 - 2j if jnp.iscomplexobj(x) else 1)
        return jax.device_put(jnp.asarray(numbers, x.dtype), x.sharding)

    return jax.tree_util.tree_map_with_path(leaf, state)


@pytest.mark.parametrize(
    ("old", "new", "make", "rule"),
    [
        ("8", "2", accumulating, "mean"), ("8", "2", accumulating, "keep"),
        ("2", "8", accumulating, "keep"),
        ("8", "2", compressing, "keep"),
    ],
)  # fmt: skip
def test_what_workers_get_when_their_number_changes(old, new, make, rule, tmp_path):
    state = numbered(first_state(make, old))
    state = state._replace(step=state.step + 3)
    options = {} if rule == "mean" else {"on_resize": rule}  # the mean is the default
    found = values(carried(tmp_path, state, old, new, make, **options))
    ruled = 0
    for path, x in values(state).items():
        if ".owner" in path:
            continue  # cut anew, as above
        if any(part in path for part in OWN) and len(x):
            owed = ".error" in path or ".residual" in path
            x, ruled = by_rule(x, int(new), rule, owed), ruled + 1
        if "['key']" not in path:
            np.testing.assert_array_equal(found[path], x, err_msg=path)
    assert ruled == 3 * len(SHAPES) + 2
    # Those who were there keep their random keys, and each newcomer has one of its own.
    keys, before = found[KEY], values(state)[KEY]
    np.testing.assert_array_equal(keys[: len(before)], before[: len(keys)])
    assert len({row.tobytes() for row in keys}) == int(new)


def by_rule(x, count, rule, owed):
    """The rules once more, in numpy."""
    mean = x.max(0) if x.dtype == np.int32 else x.mean(0).astype(x.dtype)
    if rule == "mean":
        return np.broadcast_to(mean, (count, *x.shape[1:]))
    new = np.concatenate([x[:count], np.repeat(mean[None], max(0, count - len(x)), 0)])
    if owed and count < len(x):
        new = (new + mean - new.astype(np.float32).mean(0)).astype(x.dtype)
        np.testing.assert_array_equal(new.astype(np.float32).mean(0), x.astype(np.float32).mean(0))
    return new


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
        refuses("votes on some of the parameters only", lambda: checkpoints.restore(like))


# --- Damage


@functools.cache
def small(step=0):
    params = {"w": np.float32([step, 2]), "b": np.arange(99) + step}
    everywhere = jax.sharding.NamedSharding(workers_of("2").mesh, P())
    return jax.device_put({"step": np.int32(step), "params": params}, everywhere)


def opened(folder, **options):
    return Checkpoints(folder, **{"workers": "data"} | options)


def save_small(folder, *steps, **options):
    with opened(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(small(step), {"step": step})


def restore_small(folder, **options):
    with opened(folder) as checkpoints:
        return checkpoints.restore(small(), **options)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, at=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def flip_data(path):
    """Of a description the number that is its data."""
    flip(path, len('{"format": 4, "body": {"step": 2, "metric": null, "data": {"step": '))


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("harm", [flip, flip_data, cut_short, Path.unlink])
def test_damage_is_refused_by_name_or_harmless_and_never_read(harm, tmp_path):
    whole, folder, refused = tmp_path / "whole", tmp_path / "harmed", set()
    save_small(whole, 1, 2)
    files = files_of(whole / "2")
    assert [path.name for path in files] == ["0.arrays", "about.json"]
    for path in files:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        harm(folder / path.relative_to(whole))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            found = restore_small(folder)
        told = [str(w.message) for w in warned if "damaged" in str(w.message)]
        assert_same(found.state, small(found.step))
        assert found.data == {"step": found.step}
        assert len(told) == (found.step == 1)
        if told:
            refused.add(path.name)
            assert f"{folder / '2'} is damaged" in told[0] and str(folder / "1") in told[0]
            with pytest.raises(Damaged, match="2 is damaged") as caught:
                restore_small(folder, step=2)
            assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)
            assert caught.value.__cause__ is caught.value.__context__ is None
    assert refused == {"0.arrays", "about.json"}


def test_a_number_that_is_not_as_written_is_named(tmp_path):
    """As where a file is whole but holds something else: the checkpoint's arrays, written anew."""
    save_small(tmp_path / "run", 1)
    save_small(tmp_path / "other", 2)
    (tmp_path / "other" / "2" / "0.arrays").rename(tmp_path / "run" / "1" / "0.arrays")
    named = r"1 is damaged: state\['params'\]\['b'\] and 2 more arrays are not as written"
    refuses(named, lambda: restore_small(tmp_path / "run", step=1), Damaged)


def test_a_damaged_checkpoint_gives_way_to_the_next_one_of_its_step(tmp_path):
    save_small(tmp_path, 1, 2)
    for again in ("2.damaged", "2.damaged-2"):
        flip(tmp_path / "2" / "about.json")
        with opened(tmp_path) as checkpoints:
            with pytest.warns(UserWarning, match="1 is used instead"):
                assert checkpoints.restore(small()).step == 1
            checkpoints.save(small(2), {"step": 2}, wait=True)
            assert checkpoints.steps() == [1, 2]
        # It is kept, so that somebody may look at it or copy from it.
        assert (tmp_path / again / "about.json").is_file()
        assert restore_small(tmp_path).data == {"step": 2}
    for step in "12":
        flip(tmp_path / step / "about.json")
    none_left = r"no checkpoint in .* is whole: .*2 is damaged.*1 is damaged"
    refuses(none_left, lambda: restore_small(tmp_path), Damaged)


def test_the_last_few_are_kept_and_who_only_reads_changes_nothing(tmp_path):
    with opened(tmp_path / "none") as checkpoints:
        assert checkpoints.steps() == []
    assert not (tmp_path / "none").exists()
    save_small(tmp_path, 1, 2, 3, 4, keep=2)
    half = tmp_path / "5.0123456789ab.part"  # of a process that was killed, on another machine
    shutil.copytree(tmp_path / "4", half)
    before = files_of(tmp_path)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3, 4]
        assert checkpoints.restore(small()).data == {"step": 4}
        assert checkpoints.restore(small(), step=3).data == {"step": 3}
    assert files_of(tmp_path) == before
    save_small(tmp_path, 5, keep=3)
    assert half.is_dir()  # that machine may still write to it
    os.utime(half, (0, 0))
    for path in half.iterdir():
        os.utime(path, (0, 0))
    save_small(tmp_path, 6, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5", "6"]


def test_going_back_puts_the_abandoned_branch_aside(tmp_path):
    save_small(tmp_path, 20, 30, 40)
    later = (
        r"had checkpoints of later steps, \[30, 40\], and none of them was restored: .* Restore one"
    )
    refuses(later, lambda: save_small(tmp_path, 25))
    assert restore_small(tmp_path, step=20).step == 20
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps() == [20, 30, 40]  # a restore alone changes nothing
        checkpoints.restore(small(), step=20)
        checkpoints.save(small(25))
        checkpoints.save(small(30))
        checkpoints.wait()
        assert checkpoints.steps() == [20, 25, 30]
    assert {path.name for path in tmp_path.glob("*.*")} == {"30.abandoned", "40.abandoned"}
    assert restore_small(tmp_path).step == 30


def test_the_best_stays_beside_the_newest(tmp_path):
    with opened(tmp_path, keep=1, best="min") as checkpoints:
        assert checkpoints.best() is None
        for step, loss in enumerate([3.0, jnp.float32(1.0), float("nan"), 2.0], 1):
            checkpoints.save(small(step), {"loss": float(loss)}, metric=loss)
        refuses("give a number", lambda: checkpoints.save(small(9), metric=[1, 2]), TypeError)
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
        lies = {x.sharding for x in jax.tree.leaves(found.state)}
        assert lies == {jax.sharding.SingleDeviceSharding(jax.devices()[0])}
        for change, words in [
            ({"w": jnp.zeros((8, 41))}, r"params\['w'\] is float32\[2\] in it, wanted .*8, 41"),
            ({"x": jnp.zeros(3)}, "of another model: it lacks state.params"),
        ]:
            like = shapes | change
            refuses(words, functools.partial(checkpoints.restore_params, like))
        cut_short(tmp_path / "2" / "0.arrays")
        with pytest.warns(UserWarning, match="1 is used instead"):
            assert checkpoints.restore_params(shapes).step == 1
        wrong = {"w": object()}
        refuses("give arrays", lambda: checkpoints.restore_params(wrong), TypeError)


def test_a_checkpoint_under_another_name_is_none_and_numbers_that_are_none_are_data(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(small(1), {"loss": float("nan")})
    assert np.isnan(restore_small(tmp_path).data["loss"])
    (tmp_path / "1").rename(tmp_path / "3")
    named = "3 is damaged: it is the checkpoint of step 1 under another name; give it its name back"
    refuses(named, lambda: restore_small(tmp_path, step=3), Damaged)


# --- What fails and is no damage

PASSING = [
    OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "Permission denied"),
    MemoryError("no memory"), jax.errors.JaxRuntimeError("INTERNAL: of a device"),
]  # fmt: skip


@pytest.mark.parametrize("reader", ["read_about", "read_array"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_read_that_fails_once_is_raised_and_the_checkpoint_stays(reader, tmp_path, monkeypatch):
    save_small(tmp_path, 1, 2)
    before, failures, read = files_of(tmp_path), [], getattr(files, reader)

    def fails_once(*args):
        if failures:
            raise failures.pop()
        return read(*args)

    monkeypatch.setattr(files, reader, fails_once)
    with opened(tmp_path) as checkpoints:
        for error in PASSING:
            failures.append(error)
            with pytest.raises(type(error)) as caught:
                checkpoints.restore(small())
            assert caught.value is error
            assert files_of(tmp_path) == before
        assert checkpoints.restore(small()).step == 2

        def taken_away(folder, *args):  # by another process, while it is read
            if folder.name == "2":
                shutil.rmtree(folder, ignore_errors=True)
            return read(folder, *args)

        monkeypatch.setattr(files, reader, taken_away)
        with pytest.raises(
            FileNotFoundError, match=r"no checkpoint of step 2 .* there are \[1, 2\]"
        ):
            checkpoints.restore(small(), step=2)
        save_small(tmp_path, 2)
        assert checkpoints.restore(small()).step == 1


CALLS = [(os, name) for name in ("mkdir", "scandir", "stat", "rename", "unlink", "fsync", "rmdir")]


@pytest.mark.filterwarnings("ignore:.*(cannot be removed|stay):UserWarning")
@pytest.mark.parametrize(("module", "name"), [*CALLS, (io, "open")])
def test_whichever_call_of_the_system_fails_what_is_told_saved_is_whole(
    module, name, tmp_path, monkeypatch
):
    """One failure at a time, of each call of a save; `keep` has it delete as well."""
    call, left = getattr(module, name), [-1]

    def fails(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
        return call(*args, **kwargs)

    folder, saved = tmp_path / "run", []
    with opened(folder, keep=1) as checkpoints:
        checkpoints.save(small(0), wait=True)
        saved.append(0)
        monkeypatch.setattr(module, name, fails)
        for step in range(1, 40):
            left[0] = step
            try:
                checkpoints.save(small(step), wait=True)
                saved.append(step)
            except OSError as problem:
                assert f"checkpoint {folder / str(step)} was not written (" in str(problem)
            survived, left[0] = left[0] > 0, -1
            newest = checkpoints.restore(small(0))
            assert newest.step >= saved[-1] and newest.state["params"]["w"][0] == newest.step
            if survived:
                break
        assert survived and step > 1
        checkpoints.save(small(40), wait=True)
    assert [path.name for path in folder.iterdir() if path.name != "40"] == []


@pytest.mark.parametrize("file", [".arrays", ".json"])
def test_what_the_disk_changes_is_not_told_saved_and_the_older_one_stays(
    file, tmp_path, monkeypatch
):
    fsync = os.fsync

    def loses(handle):
        fsync(handle)
        if file in os.readlink(f"/proc/self/fd/{handle}"):
            os.pwrite(handle, b"?", 3)

    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(small(1), wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", loses)
            checkpoints.save(small(2))
            lost = "2 was not written .*(not hold what was written|is not what was written)"
            refuses(lost, checkpoints.wait, OSError)
        assert checkpoints.restore(small(0)).step == 1


FORGED = [
    {"step": None},
    {"leaves": []},
    {"tiles": {}},
    {"tiles": {"['params']['b']": [["../1/0", 0, [[0, 2]]]]}},
    {"tiles": {"['params']['b']": [[0, 0, []]]}},
]


def test_what_others_leave_in_the_folder_stops_nobody(tmp_path, monkeypatch):
    """Sealed descriptions that make no sense, pipes, what is no half, and a process killed in its end."""
    with opened(tmp_path, keep=9) as checkpoints:
        for step in (1, 2):
            checkpoints.save(small(step), wait=True)
        about = tmp_path / "2" / "about.json"
        body = json.loads(about.read_text())["body"]
        for forge in FORGED:
            about.write_text(files.seal(body | forge))
            with pytest.warns(UserWarning, match="2 is damaged: it"):
                assert checkpoints.restore(small(0)).step == 1
        about.unlink()
        os.mkfifo(about)
        half = tmp_path / "3.0123456789ab.part"
        half.mkdir()
        os.mkfifo(half / "lock")
        (tmp_path / "4.0123456789ab.part").touch()
        with within(20), pytest.warns(UserWarning, match="2 is damaged"):
            assert checkpoints.restore(small(0)).step == 1
            checkpoints.save(small(5), wait=True)
    folder = tmp_path / "new"
    with monkeypatch.context() as patch, opened(folder) as checkpoints:
        patch.setattr(files, "finish", lambda *_: os.open(folder / "none", os.O_RDONLY))
        patch.setattr(shutil, "rmtree", lambda *_: None)  # as if killed
        refuses("1 was not written", lambda: checkpoints.save(small(1), wait=True), OSError)
    with opened(folder) as checkpoints:
        checkpoints.save(small(1), wait=True)
    assert os.listdir(folder) == ["1"]


@pytest.mark.parametrize("dtype", ["int2", "int4", "uint4", "float4_e2m1fn", "float8_e5m2", "bool"])
def test_numbers_of_any_width_are_read_to_the_bit(dtype, tmp_path):
    params = jax.device_put(jnp.arange(15).reshape(3, 5).astype(dtype), small()["step"].sharding)
    with opened(tmp_path) as checkpoints:
        checkpoints.save({"step": 1, "params": params}, wait=True)
        assert_same(checkpoints.restore({"step": 0, "params": params}).state["params"], params)


ODD = "lr=1e-3[seed=0]", "a\\b", "x*?[!a]", "xyz", "new\nline", "{b}$HOME %s", "\udce9"


def test_paths_of_all_kinds_hold_their_own(tmp_path):
    for step, name in enumerate(ODD):
        with opened(tmp_path / name / "ck") as checkpoints:
            checkpoints.save(small(step))
    for step, name in enumerate(ODD):
        with opened(tmp_path / name / "ck") as checkpoints:
            assert checkpoints.restore(small(0)).step == step and checkpoints.steps() == [step]


def test_a_folder_of_many_entries_is_opened_by_names_alone(tmp_path, monkeypatch):
    for step in range(300):
        (tmp_path / str(step)).mkdir()
        (tmp_path / f"{step}.damaged").mkdir()
    looked = []
    for name in ("stat", "lstat"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, c=call, **k: (looked.append(a), c(*a, **k))[1])
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps() == list(range(300))
    assert len(looked) < 50


# --- Bad input


def test_folders_and_arguments_that_cannot_be_are_refused(tmp_path):
    refuses("no checkpoint in", lambda: restore_small(tmp_path / "new"), FileNotFoundError)
    save_small(tmp_path / "some", 1)
    missing = r"no checkpoint of step 5 in .*; there are \[1\]"
    refuses(missing, lambda: restore_small(tmp_path / "some", step=5), FileNotFoundError)
    (tmp_path / "notes.txt").write_text("mine")
    for other in (".nfs0001", ".DS_Store", "lost+found", "core.17"):
        (tmp_path / "some" / other).touch()
    assert restore_small(tmp_path / "some").step == 1
    refuses("is no folder of checkpoints, it holds .*'notes.txt'", lambda: opened(tmp_path))
    refuses("notes.txt is a file", lambda: opened(tmp_path / "notes.txt"))
    for given, words in {
        "s3://bucket/run": "is a URL, and checkpoints are files .*: mount the store",
        "file:///run": "is a URL", "~/run": r"begins with ~, .*: give os.path.expanduser\('~/run'\)",
        Path("gs://bucket"): "is a URL", "": "is no folder",
    }.items():  # fmt: skip
        refuses(
            words,
            lambda g=given: opened(g),
        )
    for name, value in [
        ("workers", ()),
        *((n, x) for n in ("keep", "timeout") for x in (0, -1, 1.5, True)),
    ]:
        refuses(
            re.escape(f"{name}={value!r}"), lambda n=name, x=value: opened(tmp_path / "a", **{n: x})
        )


def test_what_is_no_state_is_refused_in_a_sentence(tmp_path):
    state = small(2)
    unplaced = state | {"step": jax.ShapeDtypeStruct((), jnp.int32)}
    save_small(tmp_path, 1)
    with opened(tmp_path, workers="pod") as elsewhere, opened(tmp_path) as here:
        for call in ("save", "restore"):
            refuses(
                "axis='pod', group=None: the mesh has", lambda c=call: getattr(elsewhere, c)(state)
            )
            for given, words in [
                ({"w": jnp.ones((2, 3))}, "the arrays of the state lie on 0 meshes: give a state"),
                (None, "lie on 0 meshes"),
                (state | {"note": "first"}, r"state\['note'\] is 'first', a str: a checkpoint "
                 "holds arrays and numbers; leave it out"),
                (state | {"tokens": np.int64(2**40)},
                 r"state\['tokens'\] is int64 and does not fit into int32: give it as data"),
                (unplaced, r"state\['step'\] is a ShapeDtypeStruct that does not lie on a mesh: give it a "
                 "NamedSharding"),
            ]:  # fmt: skip
                kind = TypeError if "a str" in words else ValueError
                refuses(
                    rf"{call}\(.*\): .*{words}", functools.partial(getattr(here, call), given), kind
                )
        whole = "the step of the state is .*: give a whole number, save"
        for words, kind, given, options in [
            *((whole, ValueError, state, {"step": x}) for x in (1.5, "1", jnp.zeros(8, jnp.int32), True)),
            ("step=-1: give a whole number", ValueError, state, {"step": -1}),
            (r"save\(state\) got a dict without a step: give save\(state, step=...\), or a state with a "
             "field 'step'", TypeError, state["params"], {}),
            ("1 is there already", ValueError, small(1), {}),
            ("cannot be held by JSON", TypeError, state, {"data": object()}),
        ]:  # fmt: skip
            refuses(words, functools.partial(here.save, given, **options), kind)
        rule = "on_resize='all': give one of 'mean', 'keep'"
        refuses(rule, lambda: here.restore(state, on_resize="all"))
        assert here.steps() == [1]
    gone = jax.tree.map(jnp.copy, state)
    for x in gone["params"].values():
        x.delete()  # as donated
    donated = (
        r"\(state\): state\['params'\].* was given to an earlier step, .*: go on with the state"
    )
    with opened(tmp_path / "new") as saved:
        refuses(donated, functools.partial(saved.save, gone))
    with opened(tmp_path / "flat", workers=("data", "dev")) as one_level:
        two = first_state(coded, "groups of 2, 4")
        refuses("is of two levels, and the workers have group=None", lambda: one_level.save(two))


def test_a_checkpoint_of_another_model_optimizer_or_format_is_refused(tmp_path):
    def first(make=coded, **change):
        return first_state(make, "2", **{"w": jnp.zeros((64, 40))} | change)

    def cub(workers):
        return lc.lion_cub(0.1, workers=workers)

    with opened(tmp_path) as checkpoints:
        checkpoints.save(first())
        for like, words in [
            (first(w=jnp.zeros((8, 41))), r"params\['w'\] is float32\[64, 40\] in it, wanted .*8, 41"),
            (first(x=jnp.zeros(3)), r"of another model: it lacks state.params\['x'\] of shape \(3,\)"),
            (first(b=None), r"it has state.params\['b'\] of shape \(5,\), which is not wanted"),
            (first(b=jnp.zeros(5, jnp.bfloat16)), r"params\['b'\] is float32\[5\] in it, wanted bf"),
            (first(cub), "of another optimizer: it lacks state.opt_state.*carry_over"),
        ]:  # fmt: skip
            refuses(words, functools.partial(checkpoints.restore, like))
    save_small(tmp_path, 1, 2)
    newer = (
        "2 has format 5, and this version .* reads format 4: read it with the version that wrote it"
    )
    older = "2 has a format before 4, and .* reads format 4: read it with version 0.3 or earlier"
    about = tmp_path / "2" / "about.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "FORMAT", 5)
        about.write_text(files.seal(json.loads(about.read_text())["body"]))
    for told in (newer, older):
        refuses(told, lambda: restore_small(tmp_path))  # and it is not passed over
        refuses(told, lambda: restore_small(tmp_path, step=2))
        if about.exists():
            about.unlink()
            (tmp_path / "2" / "about").mkdir()
    assert restore_small(tmp_path, step=1).step == 1  # nothing was renamed


# --- The end


def test_what_was_saved_is_complete_when_the_statement_or_the_save_ends(tmp_path):
    outside = opened(tmp_path)
    outside.save(small(1))  # in the background here too
    assert outside.restore(small()).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    with pytest.raises(ZeroDivisionError), opened(tmp_path) as checkpoints:
        checkpoints.save(small(2), {"step": 2})
        1 / 0  # noqa: B018
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    refuses("save: these checkpoints of .* are closed", lambda: checkpoints.save(small(3)))
    refuses("restore: these checkpoints of .* are closed", lambda: checkpoints.restore(small()))
    checkpoints.close()
    outside.close()
    save_small(tmp_path, 3)
    assert restore_small(tmp_path, step=2).data == {"step": 2}


NEVER_LEFT = """
import errno, os, sys, time, jax
jax.config.update("jax_num_cpu_devices", 8)
from test_checkpoint import opened, small
slow, full = (opened(os.path.join(sys.argv[1], name)) for name in ("slow", "full"))
full.save(small(1), wait=True)

def fsync(handle):  # longer than the program
    time.sleep(0.5)
    if "full" in os.readlink(f"/proc/self/fd/{handle}"):
        raise OSError(errno.ENOSPC, "No space left on device")

os.fsync = fsync
full.save(small(2))
slow.save(small(1))
"""


def test_the_end_of_the_program_waits_for_the_last_save_and_says_if_it_failed(tmp_path):
    done = run_python("-c", NEVER_LEFT, tmp_path)
    assert done.returncode == 0, done.stderr
    (lost,) = re.findall("its last checkpoint is not complete: checkpoint (.*?), and", done.stderr)
    assert lost == f"{tmp_path / 'full' / '2'} was not written (No space left on device)"
    assert restore_small(tmp_path / "slow").step == restore_small(tmp_path / "full").step == 1


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
