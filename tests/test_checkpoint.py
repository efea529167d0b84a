"""Saving and going on: on the same mesh, by exact rules on another, and never from damage."""

import asyncio
import errno
import functools
import json
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
import orbax.checkpoint as ocp
import pytest
from conftest import run_python, workers_on
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.baselines.dgc import dgc
from lioncub_jax.checkpoint import Checkpoints, Damaged, Snapshots, manager, stop_on_sigterm
from lioncub_jax.checkpoint.leaves import paths_of
from lioncub_jax.mesh.processes import words_of

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


OWNER = lc.decide.at_owner(optax.scale_by_lion(0.5, 0.5))
MEMORY = lc.momentum.blend(0.5, 0.5)  # powers of two, so that everything is exact


def exact(workers, bucket_size=None):
    """Momentum of each worker and momentum of owners, that no code rounds."""
    both = lc.communicate(
        memory=MEMORY, quantizer=lc.quantize.dense(), workers=workers, bucket_size=bucket_size,
        decision=lc.decide.at_owner(optax.scale_by_lion(0.5, 0.5), lc.decide.values()),
    )  # fmt: skip
    return lc.sync_momentum(both, lc.sync.every(50), workers=workers)


def coded(workers):
    up = lc.quantize.error_feedback(lc.quantize.midrise(2))
    return lc.communicate(memory=MEMORY, quantizer=up, decision=OWNER, workers=workers)


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
    model_state = {"key": jax.random.key(1), "calls": jnp.int32(0), "mean": jnp.zeros(3)}
    params = {k: jnp.zeros(shape) for k, shape in SHAPES.items()} | change
    params = {k: x for k, x in params.items() if x is not None}
    return lc.init_state(
        make(workers), params, workers, specs={k: PLACES[name][1].get(k, P()) for k in params},
        model_state=model_state, rng=jax.random.key(7),
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
    return {path: np.asarray(words_of(x)) for path, x in paths_of(tree).items()}


def assert_same(found, wanted, but="nothing"):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    found, wanted = values(found), values(wanted)
    for path, value in wanted.items():
        if but not in path:
            np.testing.assert_array_equal(found[path], value, err_msg=path)
            assert found[path].dtype == value.dtype, path


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
        ("tp 2, 2 x 2", "groups of 2, 4"), ("groups of 2, 4", "tp 2, 2 x 2"),
        (EXPLICIT, "2 groups of 2, tp 2"), ("2 groups of 2, tp 2", EXPLICIT),
        ("8", "groups of 2, 4"), ("2 groups of 2, tp 2", "8"), ("1", "8"),
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_training_in_the_other_layout(old, new, tmp_path):
    """Each worker's own where there are as many; where not all of them have the same."""
    unlike = voters_of(old) == voters_of(new)
    found = carried(tmp_path, trained(old, unlike), old, new, exact)
    # Each device of a group has model state of its own, so there may be more of it.
    assert_same(found, trained(new, unlike), but=".model_state")
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
OWN = ".mu", ".error", ".acc_grads", ".velocity", ".residual", "['mean']", "['calls']"


def accumulating(workers):
    """With state of a class that says nothing of whose it is."""
    return optax.MultiSteps(coded(workers), 4)


def compressing(workers):
    return dgc(0.5, workers=workers)


def test_counters_of_0_3_in_front_of_the_vote_become_each_workers_own(tmp_path):
    """They were one number for all."""

    def make(workers):
        return optax.chain(optax.scale_by_adam(), coded(workers))

    state = first_state(make, "8")
    adam = state.opt_state[0]._replace(count=state.step + 5)
    state = state._replace(step=state.step + 3, opt_state=(adam, state.opt_state[1]))
    found = carried(tmp_path, state, "8", "2", make).opt_state[0]
    np.testing.assert_array_equal(found.count, [5, 5])


def numbered(state):
    """Whole numbers where workers have something of their own, so that means are exact."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path)
        if not any(part in name for part in OWN) or ".owner" in name:
            return x
        numbers = np.random.default_rng(sum(map(ord, name))).integers(0, 9, x.shape)
        return jax.device_put(jnp.asarray(8 * numbers, x.dtype), x.sharding)

    return jax.tree_util.tree_map_with_path(leaf, state)


@pytest.mark.parametrize("rule", ["mean", "keep"])
@pytest.mark.parametrize(
    ("old", "new", "make"), [("8", "2", accumulating), ("2", "8", accumulating), ("8", "2", compressing)]
)  # fmt: skip
def test_what_workers_get_when_their_number_changes(old, new, make, rule, tmp_path):
    state = numbered(first_state(make, old))
    state = state._replace(step=state.step + 3)
    options = {} if rule == "mean" else {"workers": rule}  # the mean is the default
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
    assert ruled == (3 if make is accumulating else 2) * len(SHAPES) + 2
    # Those who were there keep their random keys, and each newcomer has one of its own.
    keys, before = found[KEY], values(state)[KEY]
    np.testing.assert_array_equal(keys[: len(before)], before[: len(keys)])
    assert len({row.tobytes() for row in keys}) == int(new)


def by_rule(x, count, rule, owed):
    """The rules once more, in numpy."""
    mean = x.max(0) if x.dtype == np.int32 else x.astype(np.float32).mean(0).astype(x.dtype)
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
def first_small():
    return first_state(coded, "2", **SMALL)


# Of random numbers, which no code makes small: larger ones have files of their own.
SMALL = {"w": np.random.default_rng(0).normal(size=(64, 40)).astype(np.float32)}


def small(step=0):
    first = first_small()
    moved = {k: x + step for k, x in first.params.items()}
    return first._replace(step=first.step + step, params=moved)


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


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 16
    path.write_bytes(content)


def flip_first(path):
    flip(path, 0)


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("error:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("harm", [flip, flip_first, cut_short, Path.unlink])
def test_damage_is_refused_by_name_or_harmless_and_never_read(harm, tmp_path, caplog):
    whole, folder, refused = tmp_path / "whole", tmp_path / "harmed", set()
    save_small(whole, 1, 2)
    files = files_of(whole / "2")
    # Of arrays: how they are spread over files differs, and `_sharding` may be larger than each.
    largest = max((x for x in files if x.parent.name == "d"), key=lambda x: x.stat().st_size)
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
            refused |= {path, path.parent.name}
            assert f"{folder / '2'} is damaged" in told[0] and str(folder / "1") in told[0]
            with pytest.raises(Damaged, match="2 is damaged") as caught:
                restore_small(folder, step=2)
            # One sentence, and nothing that orbax says of each of its files.
            assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)
            assert caught.value.__cause__ is caught.value.__context__ is None
    assert refused >= {largest, "d", "about"}  # the arrays themselves and their description
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_number_that_is_not_as_written_is_named(tmp_path):
    """As where a file is whole but holds something else: the checkpoint's arrays, written anew."""
    save_small(tmp_path / "run", 1)
    save_small(tmp_path / "other", 2)
    shutil.rmtree(tmp_path / "run" / "1" / "arrays")
    (tmp_path / "other" / "2" / "arrays").rename(tmp_path / "run" / "1" / "arrays")
    named = r"1 is damaged: state.params\['b'\] and 4 more arrays are not as written"
    refuses(named, lambda: restore_small(tmp_path / "run", step=1), Damaged)


def test_a_damaged_checkpoint_gives_way_to_the_next_one_of_its_step(tmp_path):
    save_small(tmp_path, 1, 2)
    for again in ("2.damaged", "2.damaged-2"):
        flip(tmp_path / "2" / "about" / "metadata")
        with opened(tmp_path) as checkpoints:
            with pytest.warns(UserWarning, match="1 is used instead"):
                assert checkpoints.restore(small()).step == 1
            checkpoints.save(small(2), {"step": 2}, wait=True)
            assert checkpoints.steps() == [1, 2]
        # It is kept, so that somebody may look at it or copy from it.
        assert (tmp_path / again / "about" / "metadata").is_file()
        assert restore_small(tmp_path).data == {"step": 2}
    for step in "12":
        flip(tmp_path / step / "about" / "metadata")
    none_left = r"no checkpoint in .* is whole: .*2 is damaged.*1 is damaged"
    refuses(none_left, lambda: restore_small(tmp_path), Damaged)


def test_damage_is_none_the_less_for_who_handles_an_error_of_a_disk(tmp_path):
    save_small(tmp_path, 1, 2)
    flip(tmp_path / "2" / "about" / "metadata")
    try:
        raise OSError(errno.EIO, "where the data lie")
    except OSError:
        with pytest.warns(UserWarning, match="1 is used instead"):
            assert restore_small(tmp_path).step == 1


def test_a_read_leaves_the_event_loops_of_the_process_alone(tmp_path, monkeypatch):
    save_small(tmp_path, 1)
    monkeypatch.delattr(asyncio, "set_event_loop_policy")  # as Python will
    assert restore_small(tmp_path).step == 1


def test_the_last_few_are_kept_and_a_half_written_one_is_none(tmp_path):
    save_small(tmp_path, 1, 2, 3, 4, keep=2)
    shutil.copytree(tmp_path / "4", tmp_path / "5.orbax-checkpoint-tmp-123")
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3, 4]
        assert checkpoints.restore(small()).data == {"step": 4}
        assert checkpoints.restore(small(), step=3).data == {"step": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


# --- What fails and is no damage

PASSING = [
    OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "Permission denied"),
    MemoryError("no memory"), ValueError("UNKNOWN: Error reading: EIO"),
    ValueError("PERMISSION_DENIED: Error reading"), RuntimeError("RESOURCE_EXHAUSTED: out of memory"),
]  # fmt: skip


@pytest.mark.parametrize("handler", [ocp.JsonCheckpointHandler, ocp.PyTreeCheckpointHandler])
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_read_that_fails_once_is_raised_and_the_checkpoint_stays(handler, tmp_path, monkeypatch):
    save_small(tmp_path, 1, 2)
    before, failures, read = files_of(tmp_path), [], handler.restore

    def fails_once(self, *args, **kwargs):
        if failures:
            raise failures.pop()
        return read(self, *args, **kwargs)

    monkeypatch.setattr(handler, "restore", fails_once)
    with opened(tmp_path) as checkpoints:
        for error in PASSING:
            failures.append(error)
            with pytest.raises(type(error)) as caught:
                checkpoints.restore(small())
            assert caught.value is error
            assert files_of(tmp_path) == before
        assert checkpoints.restore(small()).step == 2
        checkpoints.save(small(3), wait=True)
        assert checkpoints.steps() == [1, 2, 3]
        shutil.rmtree(tmp_path / "3")  # taken away while it is read
        refuses("not found", lambda: checkpoints.restore(small()), FileNotFoundError)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_file_that_the_system_does_not_open_is_no_damage(tmp_path):
    save_small(tmp_path / "run", 1, 2)
    path = tmp_path / "run" / "2" / "arrays" / "manifest.ocdbt"
    path.rename(tmp_path / "aside")
    path.symlink_to(path.name)  # to itself: ELOOP, for whoever reads it, root too
    with pytest.raises((OSError, ValueError), match="symbolic links") as caught:
        restore_small(tmp_path / "run")
    assert not isinstance(caught.value, Damaged)


def behind(error, cause):
    error.__context__ = cause
    return error


def test_what_is_behind_an_error_tells_damage_from_a_disk():
    device = jax.errors.JaxRuntimeError("INTERNAL: of a device")
    busy = ValueError("FAILED_PRECONDITION: Failed to open: Device busy [os_error_code='16']")
    for cause, damage in {
        OSError(errno.EIO, "x"): False, FileNotFoundError("x"): True, device: False, busy: False,
        ValueError("FAILED_PRECONDITION: of a code"): True, AttributeError("chunk_shape"): True,
    }.items():  # fmt: skip
        assert manager._is_damage([Exception("while reading array index"), cause]) == damage
    full = "RESOURCE_EXHAUSTED: Failed to write 5 bytes to file 3: No space [os_error_code='28']"
    late = "UNAVAILABLE: no answer [tensorstore_spec='...']"
    peer = "UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"
    space = OSError(errno.ENOSPC, "No space left on device")
    for error, why in {
        ValueError("a leaf was deleted"): None,
        ValueError(peer): None,  # a worker's death is no disk's
        ValueError(full): "No space left on device",
        ValueError(late): f"ValueError: {late}",
        behind(RuntimeError("DEADLINE_EXCEEDED: of a barrier"), space): "No space left on device",
        TimeoutError(
            "of a barrier"
        ): "another process did not write its part in time, and its error says why",
    }.items():
        assert manager._why_not_written(manager._chain(error, None)) == why


# --- Bad input


def test_folders_and_arguments_that_cannot_be_are_refused(tmp_path):
    refuses("no checkpoint in", lambda: restore_small(tmp_path / "new"), FileNotFoundError)
    save_small(tmp_path / "some", 1)
    missing = r"no checkpoint of step 5 in .*; there are \[1\]"
    refuses(missing, lambda: restore_small(tmp_path / "some", step=5), FileNotFoundError)
    (tmp_path / "notes.txt").write_text("mine")
    refuses("is no folder of checkpoints, it holds .*'notes.txt'", lambda: opened(tmp_path))
    refuses("notes.txt is a file", lambda: opened(tmp_path / "notes.txt"))
    for name, value in [
        ("workers", ()),
        *((n, x) for n in ("keep", "timeout") for x in (0, -1, 1.5, True)),
    ]:
        refuses(
            re.escape(f"{name}={value!r}"), lambda n=name, x=value: opened(tmp_path / "a", **{n: x})
        )


def test_what_is_no_state_is_refused_in_a_sentence(tmp_path):
    state = small(2)
    unplaced = state._replace(step=jax.ShapeDtypeStruct((), jnp.int32))
    save_small(tmp_path, 1)
    with opened(tmp_path, workers="pod") as elsewhere, opened(tmp_path) as here:
        for call in ("save", "restore"):
            refuses(
                "axis='pod', group=None: the mesh has", lambda c=call: getattr(elsewhere, c)(state)
            )
            for given, words in [
                ({"w": jnp.ones((2, 3))}, "the arrays of the state lie on 0 meshes: give a state"),
                (None, "lie on 0 meshes"),
                (state._asdict() | {"note": "first"}, r"state\['note'\] is 'first', a str: a checkpoint "
                 "holds arrays and numbers; leave it out"),
                (state._asdict() | {"tokens": np.int64(2**40)},
                 r"state\['tokens'\] is int64 and does not fit into int32: give it as data"),
                (unplaced, "state.step is a ShapeDtypeStruct that does not lie on a mesh: give it a "
                 "NamedSharding"),
            ]:  # fmt: skip
                kind = TypeError if "a str" in words else ValueError
                refuses(
                    rf"{call}\(.*\): .*{words}", functools.partial(getattr(here, call), given), kind
                )
        whole = "the step of the state is .*: give a whole number, save"
        for words, kind, given, options in [
            *((whole, ValueError, state, {"step": step}) for step in (1.5, jnp.zeros(8, jnp.int32), True)),
            ("step=-1: give a whole number", ValueError, state, {"step": -1}),
            (r"save\(state\) got a dict without a step: give save\(state, step=...\), or a state with a "
             "field 'step'", TypeError, state.params, {}),
            ("1 is there already", ValueError, small(1), {}),
            ("cannot be held by JSON", TypeError, state, {"data": object()}),
        ]:  # fmt: skip
            refuses(words, functools.partial(here.save, given, **options), kind)
        rule = "workers='all': give one of 'mean', 'keep'"
        refuses(rule, lambda: here.restore(state, workers="all"))
        assert here.steps() == [1]
    gone = jax.tree.map(jnp.copy, state)
    for x in (gone.step, gone.rng):
        x.delete()  # as donated
    donated = r": 2 of \d+ arrays hold nothing any more, such as state.step, since .* donated .*: give the"
    with opened(tmp_path / "new") as saved:
        for call in (saved.save, Snapshots(saved, tmp_path / "memory").save):
            refuses(donated, functools.partial(call, gone))
    with opened(tmp_path / "flat", workers=("data", "dev")) as one_level:
        two = first_state(coded, "groups of 2, 4")
        refuses("is of two levels, and the workers have group=None", lambda: one_level.save(two))


def test_a_checkpoint_of_another_model_optimizer_or_format_is_refused(tmp_path):
    save_small(tmp_path, 1, 2)
    for change, words in [
        ({"w": jnp.zeros((8, 41))}, r"params\['w'\] is float32\[64, 40\] in it, wanted .*8, 41"),
        ({"x": jnp.zeros(3)}, r"of another model: it lacks state.params\['x'\] of shape \(3,\)"),
        ({"b": None}, r"it has state.params\['b'\] of shape \(5,\), which is not wanted"),
        ({"b": jnp.zeros(5, jnp.bfloat16)}, r"params\['b'\] is float32\[5\] in it, wanted bf"),
    ]:  # fmt: skip
        with opened(tmp_path) as checkpoints:
            like = first_state(coded, "2", **SMALL | change)
            refuses(words, functools.partial(checkpoints.restore, like))
    with opened(tmp_path) as checkpoints:
        like = first_state(lambda workers: lc.lion_cub(0.1, workers="data"), "2", **SMALL)
        refuses("of another optimizer: it lacks state.opt_state", lambda: checkpoints.restore(like))
    path = tmp_path / "2" / "about" / "metadata"
    for version, told in {
        4: "2 has format 4, and this version .* reads format 3: read it .* wrote it, a newer version",
        2: "2 has format 2, and this version .* reads format 3: read it .* wrote it, 0.2",
    }.items():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version}))
        refuses(told, lambda: restore_small(tmp_path))  # and it is not passed over
        refuses(told, lambda: restore_small(tmp_path, step=2))
    assert restore_small(tmp_path, step=1).step == 1  # nothing was renamed


# --- The end


def test_what_was_saved_is_complete_when_the_statement_or_the_save_ends(tmp_path):
    outside = opened(tmp_path)
    outside.save(small(1))
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


NO_BYTE_FITS = """
import resource, sys, jax
jax.config.update("jax_num_cpu_devices", 8)
from test_checkpoint import opened, small
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
with opened(sys.argv[1]) as checkpoints:
    checkpoints.save(small(1), wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    checkpoints.save(small(2))
    try:
        checkpoints.save(small(3))
    except OSError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.save(small(4))
"""


def test_a_save_that_the_disk_refuses_is_named_once_and_the_next_is_whole(tmp_path):
    done = run_python(NO_BYTE_FITS, str(tmp_path))
    assert done.stdout.splitlines() == [
        f"checkpoint {tmp_path / '2'} was not written (File too large), and those before it stay: free or "
        "mend that disk, and start again from the newest"
    ]
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1, 4]
        assert_same(checkpoints.restore(small()).state, small(4))


NEVER_LEFT = """
import os, sys, time, jax
jax.config.update("jax_num_cpu_devices", 8)
from test_checkpoint import opened, small
state, checkpoints, mkdir = small(1), opened(sys.argv[1]).__enter__(), os.mkdir
os.mkdir = lambda *args: (time.sleep(0.5), mkdir(*args))  # as on a slow disk: longer than the program
checkpoints.save(state)
"""


def test_a_save_that_the_end_of_the_program_cuts_off_is_an_error_and_blocks_nothing(tmp_path):
    done = run_python(NEVER_LEFT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    with opened(tmp_path) as checkpoints:
        if not checkpoints.steps():  # else it was written in time
            assert f"the program ended while a checkpoint was written to {tmp_path}" in done.stderr
            assert "leave the with statement, or call checkpoints.close()" in done.stderr
            checkpoints.save(small(1), {"step": 1})
    assert restore_small(tmp_path).step == 1


def test_sigterm_is_told_to_the_loop_and_the_handler_is_put_back():
    def own(*told):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, own)
    with stop_on_sigterm() as stopping:
        assert not stopping(0)
        signal.raise_signal(signal.SIGTERM)
        assert stopping(1) and stopping(2)
    assert signal.signal(signal.SIGTERM, before) is own
    refuses("every=0", lambda: stop_on_sigterm(0).__enter__())
    with ThreadPoolExecutor(1) as pool:
        refuses("main thread", pool.submit(lambda: stop_on_sigterm().__enter__()).result)
