"""Saving and going on: to the bit on the same mesh, by exact rules on another, and never from damage."""

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.checkpoint import Checkpoints, Damaged, manager, reshard, stop_on_sigterm
from lioncub_jax.mesh.placement import Workers

SHAPES = {"w": (8, 40), "v": (4, 6, 8), "b": (5,), "s": (), "none": (0, 3)}
SPECS = {"w": P("tp", "fsdp"), "v": P(None, None, ("fsdp", "tp")), "b": P(), "s": P(), "none": P()}
TP = {**SPECS, "w": P(None, "tp"), "v": P("tp")}
WHOLE = dict.fromkeys(SHAPES, P())


class Place:
    """A mesh, how the model lies on it, and who the workers are."""

    def __init__(
        self, sizes, names=("data",), specs=None, group=None, kind=AxisType.Auto, axis="data"
    ):
        count = math.prod(sizes)
        assert len(jax.devices()) == 8
        devices = jax.devices()[:count]
        kinds = (kind,) * len(sizes)
        self.mesh = jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)
        self.specs, self.axes = specs or WHOLE, {"axis_name": axis, "group_axis": group}
        held = [axis, group] if isinstance(axis, str) else [*axis, group]
        self.devices = math.prod(n for a, n in self.mesh.shape.items() if a in held)
        self.workers = self.devices // (self.mesh.shape[group] if group else 1)


PLACES = {
    "8": lambda **k: Place((8,), **k),
    "4": lambda **k: Place((4,), **k),
    "2": lambda **k: Place((2,), **k),
    "1": lambda **k: Place((1,), **k),
    "2x2": lambda **k: Place((2, 2), ("pod", "data"), axis=("pod", "data"), **k),
    "4, tp 2": lambda **k: Place((4, 2), ("data", "tp"), TP, **k),
    "tp 2, 4": lambda **k: Place((2, 4), ("tp", "data"), TP, **k),
    "2, tp 2, fsdp 2": lambda **k: Place((2, 2, 2), ("data", "tp", "fsdp"), SPECS, **k),
    "fsdp 2, 2, tp 2": lambda **k: Place((2, 2, 2), ("fsdp", "data", "tp"), SPECS, **k),
    "2, tp 2, fsdp 2, explicit": lambda **k: Place(
        (2, 2, 2), ("data", "tp", "fsdp"), SPECS, kind=AxisType.Explicit, **k
    ),
    "4 of 2": lambda **k: Place((4, 2), ("data", "dev"), group="dev", **k),
    "2 of 4": lambda **k: Place((2, 4), ("data", "dev"), group="dev", **k),
    "dev 2, 4": lambda **k: Place((2, 4), ("dev", "data"), group="dev", **k),
    "2 of 2, tp 2": lambda **k: Place((2, 2, 2), ("data", "dev", "tp"), TP, group="dev", **k),
}


def place_of(name):
    return PLACES[name]()


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


def first_state(tx, place):
    model_state = {"key": jax.random.key(1), "calls": jnp.int32(0), "mean": jnp.zeros(3)}
    params = {k: jnp.zeros(shape) for k, shape in SHAPES.items()}
    return lc.init_state(
        tx, params, place.mesh, **place.axes, specs=place.specs, model_state=model_state,
        rng=jax.random.key(7),
    )  # fmt: skip


def votes(**options):
    """Each worker's own momentum; betas are powers of two, so that everything is exact."""
    return lambda place: lc.sync_momentum(
        lc.communicate(memory=lc.momentum.blend(0.5, 0.5), **place.axes, **options),
        (place.axes["axis_name"]), lc.sync.every(50),
    )  # fmt: skip


def owned(**options):
    owner = lc.decide.momentum_at_owner(optax.scale_by_lion(0.5, 0.5))
    return lambda place: lc.communicate(
        **{"memory": lc.momentum.nothing()} | options, owner=owner, **place.axes
    )


def trained(make, place, weights, steps=3):
    """Steps with gradients ``weights[worker] * constants``."""
    tx = make(place)
    state = first_state(tx, place)
    step = lc.make_train_step(lc.StatefulLoss(linear_loss), tx, place.mesh, **place.axes)
    for _ in range(steps):
        state, metrics = step(state, np.repeat(weights, place.devices // len(weights)))
    return state, step, metrics


def values(tree):
    """Leaves by path, as numpy."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    plain = {jax.tree_util.keystr(path): x for path, x in found}
    return {
        path: np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for path, x in plain.items()
    }


def assert_same(found, wanted, but=()):
    found, wanted = values(found), values(wanted)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        if not any(part in path for part in but):
            np.testing.assert_array_equal(found[path], value, err_msg=path)
            assert found[path].dtype == value.dtype, path


def carried(folder, state, old, new, make, **options):
    """Saves in one place and restores in another."""
    with Checkpoints(folder, **old.axes) as checkpoints:
        checkpoints.save(state, {"at": 3}, wait=True)
    with Checkpoints(folder, **new.axes) as checkpoints:
        like = first_state(make(new), new)
        found = checkpoints.restore(like, **options)
    assert found.step == 3 and found.data == {"at": 3}
    shardings = [jax.tree.map(lambda x: x.sharding, tree) for tree in (found.state, like)]
    assert shardings[0] == shardings[1]
    return found.state


# --- The same numbers in every layout

SAME_WORKERS = [
    ("4", "4 of 2"), ("4 of 2", "dev 2, 4"), ("tp 2, 4", "4, tp 2"), ("4, tp 2", "2x2"),
    ("fsdp 2, 2, tp 2", "2 of 4"), ("2 of 4", "2, tp 2, fsdp 2, explicit"),
    ("2, tp 2, fsdp 2, explicit", "2 of 2, tp 2"), ("2 of 2, tp 2", "fsdp 2, 2, tp 2"),
]  # fmt: skip


@functools.cache
def voted(name):
    place = place_of(name)
    return trained(votes(), place, np.arange(1, place.workers + 1, dtype=np.float32))[0]


@functools.cache
def decided(name):
    place = place_of(name)
    return trained(owned(up=lc.quantize.dense(), down=lc.decide.floats()), place, np.float32([2]))[
        0
    ]


DEVICES_OWN = (".model_state",)  # with a group there are more of them


def mostly_slow(pairs, fast):
    """A few pairs of layouts in the quick run; all of them in the whole one."""
    return [pair if pair in fast else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(
    ("old", "new"), mostly_slow(SAME_WORKERS, [("4", "4 of 2"), SAME_WORKERS[-2]])
)
def test_momentum_of_the_workers_is_the_same_in_every_layout(old, new, tmp_path):
    found = carried(tmp_path, voted(old), place_of(old), place_of(new), votes())
    # Training in the other layout from the start is the oracle: gradients are exact whole numbers.
    assert_same(found, voted(new), but=(*DEVICES_OWN, ".drift"))


OTHER_WORKERS = [
    ("8", "4"), ("4", "8"), ("4 of 2", "2 of 4"), ("2 of 4", "8"), ("8", "2, tp 2, fsdp 2"),
    ("fsdp 2, 2, tp 2", "4"), ("2 of 2, tp 2", "8"), ("1", "8"), ("8", "1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    mostly_slow(
        SAME_WORKERS[3:] + OTHER_WORKERS,
        [SAME_WORKERS[-2], ("8", "4"), ("2 of 4", "8"), ("1", "8")],
    ),
)
def test_momentum_of_the_owners_is_cut_anew(old, new, tmp_path):
    make = owned(up=lc.quantize.dense(), down=lc.decide.floats())
    found = carried(tmp_path, decided(old), place_of(old), place_of(new), make)
    assert_same(found, decided(new), but=DEVICES_OWN)
    assert max(np.abs(x).max() for p, x in values(found).items() if ".owner" in p) > 8


# --- Going on


CODED = {"up": lc.quantize.error_feedback(lc.quantize.midrise(2))}
RUNS = {
    "votes, synced": ("8", lambda place: lc.lion_cub(0.1, sync=lc.sync.every(4), **place.axes)),
    "owners, error feedback": ("4", owned(**CODED)),
    "two levels": ("4 of 2", owned(memory=lc.momentum.blend(0.5, 0.5), **CODED)),
    "inner axes": ("2, tp 2, fsdp 2", owned(**CODED)),
    "explicit axes": ("2, tp 2, fsdp 2, explicit", votes()),
}


def noisy_batch(i, place):
    return np.random.default_rng(i).normal(size=2 * place.devices).astype(np.float32)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow)
        if n in ("inner axes", "explicit axes", "two levels")
        else n
        for n in RUNS
    ],
)
def test_a_run_goes_on_to_the_bit_and_the_saved_arrays_may_be_donated(name, tmp_path):
    where, make = RUNS[name]
    place = place_of(where)
    state, step, _ = trained(make, place, np.float32([1]))
    with Checkpoints(tmp_path, **place.axes) as checkpoints:
        at_save = values(state)
        checkpoints.save(state)
        before, metrics = state, []
        for i in range(20):
            state, found = step(state, noisy_batch(i, place))
            metrics.append(np.asarray(found["noise"]))
        assert any(x.is_deleted() for x in jax.tree.leaves(before))
    with Checkpoints(tmp_path, **place.axes) as checkpoints:
        again = checkpoints.restore(like_of(make(place), place)).state
    assert all(np.array_equal(at_save[path], x) for path, x in values(again).items())
    traces = step.traces
    for i in range(20):
        again, found = step(again, noisy_batch(i, place))
        np.testing.assert_array_equal(metrics[i], found["noise"])
    assert_same(again, state)
    assert step.traces == traces  # it lies as the state before lay
    assert not all(np.array_equal(at_save[path], x) for path, x in values(again).items())


def like_of(tx, place):
    """Shapes and shardings without arrays."""
    state = first_state(tx, place)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


# --- Another number of workers


def numbered(state):
    """Whole numbers where workers have something of their own, so that means are exact."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path)
        if not any(part in name for part in (".mu", ".error", "['mean']")) or ".owner" in name:
            return x
        seed = sum(map(ord, name))
        numbers = np.random.default_rng(seed).integers(0, 9, x.shape)
        return jax.device_put(jnp.asarray(8 * numbers, x.dtype), x.sharding)

    return jax.tree_util.tree_map_with_path(leaf, state)


@pytest.mark.parametrize("rule", ["mean", "keep"])
@pytest.mark.parametrize(
    ("old", "new"), [("8", "4"), ("4", "8"), pytest.param("4", "2", marks=pytest.mark.slow)]
)
def test_what_workers_get_when_their_number_changes(old, new, rule, tmp_path):
    make, places = (
        owned(memory=lc.momentum.blend(0.5, 0.5), **CODED),
        (place_of(old), place_of(new)),
    )
    state = numbered(first_state(make(places[0]), places[0]))
    state = state._replace(step=state.step + 3)
    options = {} if rule == "mean" else {"workers": rule}  # the mean is the default
    found = values(carried(tmp_path, state, *places, make, **options))
    checked = set()
    for path, x in values(state).items():
        if ".owner" in path:
            continue  # cut anew, as above
        if ".mu" in path or ".error" in path or ".model_state" in path:
            checked.add(path)
            wanted = by_rule(path, x, places[1].workers, rule)
            np.testing.assert_array_equal(found[path], wanted, err_msg=path)
        else:
            np.testing.assert_array_equal(found[path], x, err_msg=path)
    assert len(checked) == 2 * len(SHAPES) + 3
    keys = found[".model_state['key']"]
    assert len({row.tobytes() for row in keys}) == places[1].workers


def by_rule(path, x, count, rule):
    """The rules once more, in numpy."""
    old = len(x)
    if "['key']" in path:
        newcomers = range(old, count)
        folded = [jax.random.fold_in(jax.random.wrap_key_data(x[i % old]), i) for i in newcomers]
        return np.stack([*x[:count], *map(jax.random.key_data, folded)])
    mean = x.max(0) if x.dtype == np.int32 else x.astype(np.float32).mean(0).astype(x.dtype)
    if rule == "mean":
        return np.broadcast_to(mean, (count, *x.shape[1:]))
    new = np.concatenate([x[:count], np.repeat(mean[None], max(0, count - old), 0)])
    if ".error" in path and count < old:
        new = (new + mean - new.astype(np.float32).mean(0)).astype(x.dtype)
        np.testing.assert_array_equal(new.astype(np.float32).mean(0), x.astype(np.float32).mean(0))
    return new


def test_accumulated_gradients_of_any_optax_transform_are_averaged(tmp_path):
    def make(place):
        return optax.MultiSteps(lc.lion_cub(0.1, **place.axes), 4)

    old, new = place_of("8"), place_of("4")  # on cut parameters MultiSteps cannot run
    state, _, _ = trained(make, old, np.arange(1, 9, dtype=np.float32))
    found = values(carried(tmp_path, state, old, new, make))
    for name in SHAPES:
        wanted = np.broadcast_to(4.5 * constants(name), (4, *SHAPES[name]))
        np.testing.assert_array_equal(found[f".opt_state.acc_grads['{name}']"], wanted)


# --- Damage


@functools.cache
def first_small():
    place = place_of("2")
    return first_state(owned(**CODED)(place), place)


def small(step=0):
    state = first_small()
    return state._replace(
        step=state.step + step, params=jax.tree.map(lambda x: x + step, state.params)
    )


def save_small(folder, *steps, **options):
    with Checkpoints(folder, axis_name="data", **options) as checkpoints:
        for step in steps:
            checkpoints.save(small(step), {"step": step})


def restore_small(folder, **options):
    with Checkpoints(folder, axis_name="data") as checkpoints:
        return checkpoints.restore(small(), **options)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("error:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("damage", [flip, pytest.param(truncate, marks=pytest.mark.slow),
                                    lambda path: path.unlink()],
                         ids=["flipped", "cut short", "deleted"])  # fmt: skip
def test_damage_is_refused_by_name_or_harmless_and_never_read(damage, tmp_path):
    save_small(tmp_path / "whole", 1, 2)
    refused, wanted = set(), [values(small(step)) for step in (0, 1, 2)]
    for i, path in enumerate(files_of(tmp_path / "whole" / "2")):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / path.relative_to(tmp_path / "whole"))
        with pytest.warns(UserWarning) if needed(folder) else contextlib.nullcontext() as warned:
            found = restore_small(folder)
        for key, x in values(found.state).items():
            np.testing.assert_array_equal(x, wanted[found.step][key], err_msg=f"{path}: {key}")
        assert found.data == {"step": found.step}
        if found.step == 1:
            refused.add(kind_of(path))
            (text,) = [str(w.message) for w in warned if "damaged" in str(w.message)]
            assert str(folder / "2") in text and str(folder / "1") in text
    assert refused >= {"d", "about"}  # the arrays themselves and their description


def kind_of(path):
    return path.parent.name


def needed(folder):
    """Whether the damaged checkpoint is refused when it is asked for by its number."""
    try:
        restore_small(folder, step=2)
    except ValueError as error:
        assert f"{folder / '2'} is damaged" in str(error)
        return True
    return False


def test_a_number_that_is_not_as_written_is_named(tmp_path):
    """As where a file is whole but holds something else: the checkpoint's arrays, written anew."""
    save_small(tmp_path, 1)
    save_small(tmp_path / "other", 2)
    shutil.rmtree(tmp_path / "1" / "arrays")
    shutil.copytree(tmp_path / "other" / "2" / "arrays", tmp_path / "1" / "arrays")
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"1 is damaged: state.params\['b'\] and 4 more arrays are not"
    ):
        restore_small(tmp_path, step=1)


def test_where_all_are_damaged_nothing_is_restored(tmp_path):
    save_small(tmp_path, 1, 2)
    for step in "12":
        flip(tmp_path / step / "about" / "metadata")
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* is whole: .*2 is damaged.*1 is damaged"
    ):
        restore_small(tmp_path)


def test_a_damaged_checkpoint_gives_way_to_the_next_one_of_its_step(tmp_path):
    save_small(tmp_path, 1, 2)
    flip(tmp_path / "2" / "about" / "metadata")
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        with pytest.warns(UserWarning, match="is used instead"):
            assert checkpoints.restore(small()).step == 1
        checkpoints.save(small(2), {"step": 2}, wait=True)
        assert checkpoints.steps() == [1, 2]
        # It is kept, so that somebody may look at it or copy from it.
        assert (tmp_path / "2.damaged" / "about" / "metadata").is_file()
    assert restore_small(tmp_path).step == 2
    flip(tmp_path / "2" / "about" / "metadata")
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        with pytest.warns(UserWarning, match="is used instead"):
            checkpoints.restore(small())
        checkpoints.save(small(3), wait=True)
        assert checkpoints.steps() == [1, 3]
    assert (tmp_path / "2.damaged").is_dir() and (tmp_path / "2.damaged-2").is_dir()


def test_a_half_written_checkpoint_is_none(tmp_path):
    save_small(tmp_path, 1, 2)
    (tmp_path / "2").rename(tmp_path / "3.orbax-checkpoint-tmp-123")
    assert restore_small(tmp_path).step == 1


def test_the_error_of_a_damaged_checkpoint_is_one_short_sentence(tmp_path):
    save_small(tmp_path, 1)
    for path in files_of(tmp_path / "1" / "arrays" / "d"):
        flip(path)
    script = f"""if True:
        import jax; jax.config.update("jax_num_cpu_devices", 8)
        from test_checkpoint import restore_small
        from pathlib import Path
        restore_small(Path({str(tmp_path)!r}), step=1)
    """
    shown = run_script(script).stderr.strip().splitlines()
    assert "1 is damaged: its arrays cannot be read (ValueError: DATA_LOSS" in shown[-1]
    assert len(shown[-1]) < 700 and len(shown) < 40, shown


def run_script(text):
    """Another interpreter, which may import the tests."""
    here = os.path.dirname(__file__)
    paths = [os.path.dirname(here), here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


# --- What fails and is no damage

PASSING = [
    OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "Permission denied"),
    MemoryError("no memory"), ValueError("UNKNOWN: Error reading: EIO"),
    ValueError("PERMISSION_DENIED: Error reading"), RuntimeError("RESOURCE_EXHAUSTED: out of memory"),
]  # fmt: skip


@pytest.mark.parametrize("handler", [ocp.JsonCheckpointHandler, ocp.StandardCheckpointHandler])
def test_a_read_that_fails_once_is_raised_and_the_checkpoint_stays(handler, tmp_path, monkeypatch):
    save_small(tmp_path, 1, 2)
    before, failures, read = small_files(tmp_path), [], handler.restore

    def fails_once(self, *args, **kwargs):
        if failures:
            raise failures.pop()
        return read(self, *args, **kwargs)

    monkeypatch.setattr(handler, "restore", fails_once)
    with Checkpoints(tmp_path, axis_name="data") as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for error in PASSING:
            failures.append(error)
            with pytest.raises(type(error)) as caught:
                checkpoints.restore(small())
            assert caught.value is error
            assert small_files(tmp_path) == before
        assert checkpoints.restore(small()).step == 2
        checkpoints.save(small(3), wait=True)
        assert checkpoints.steps() == [1, 2, 3]
        assert checkpoints.restore(small(), step=2).data == {"step": 2}


def small_files(folder):
    return [str(path.relative_to(folder)) for path in files_of(folder)]


def test_a_file_that_the_system_does_not_open_is_no_damage(tmp_path):
    save_small(tmp_path, 1, 2)
    path = tmp_path / "2" / "arrays" / "manifest.ocdbt"
    path.rename(tmp_path / "aside")
    path.symlink_to(path.name)  # to itself: ELOOP, for whoever reads it, root too
    refuses("symbolic links", lambda: open_small(tmp_path), (OSError, ValueError))
    path.unlink()
    (tmp_path / "aside").rename(path)
    assert restore_small(tmp_path).step == 2


def open_small(folder):
    """Restores, where a fallback to an older checkpoint or damage found would be an error."""
    (folder / "aside").rename(folder.parent / "aside")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            restore_small(folder)
    except Damaged:
        pytest.fail("a file that cannot be opened is taken for damage")
    finally:
        (folder.parent / "aside").rename(folder / "aside")


def test_a_checkpoint_that_is_taken_away_while_it_is_read_is_no_damage(tmp_path):
    save_small(tmp_path, 1, 2)
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        shutil.rmtree(tmp_path / "2")
        refuses("not found", lambda: checkpoints.restore(small()), FileNotFoundError)


def test_an_error_with_a_failing_disk_behind_it_is_no_damage(tmp_path):
    for behind, wanted in {OSError(errno.EIO, "x"): False, FileNotFoundError("x"): True}.items():
        error = KeyError("chunk_shape")
        error.__cause__ = behind
        assert manager._is_damage(error, tmp_path) == wanted


def test_the_last_few_are_kept(tmp_path):
    save_small(tmp_path, 1, 2, 3, 4, keep=2)
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        assert checkpoints.steps() == [3, 4]
        assert checkpoints.restore(small(), step=3).data == {"step": 3}


# --- Bad input


def refuses(match, call, kind=ValueError):
    with pytest.raises(kind, match=match):
        call()


def test_folders_that_hold_no_checkpoints_are_refused(tmp_path):
    refuses("no checkpoint in", lambda: restore_small(tmp_path / "new"), FileNotFoundError)
    save_small(tmp_path / "some", 1)
    missing = r"no checkpoint of step 5 in .*; there are \[1\]"
    refuses(missing, lambda: restore_small(tmp_path / "some", step=5), FileNotFoundError)
    (tmp_path / "notes.txt").write_text("mine")
    refuses("is no folder of checkpoints, it holds .*'notes.txt'", lambda: save_small(tmp_path))
    refuses("is a file", lambda: save_small(tmp_path / "notes.txt"))


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_a_useless_number_to_keep_or_to_wait_is_refused(keep, tmp_path):
    refuses(f"timeout={keep!r}", lambda: Checkpoints(tmp_path, axis_name="data", timeout=keep))
    refuses("keep=", lambda: save_small(tmp_path, keep=keep))


def test_bad_arguments_are_refused(tmp_path):
    save_small(tmp_path, 1)
    refuses(
        "workers='all': give one of 'mean', 'keep'", lambda: restore_small(tmp_path, workers="all")
    )
    refuses("1 is there already", lambda: save_small(tmp_path, 1))
    refuses("axis_name=\\(\\): give the name", lambda: Checkpoints(tmp_path, axis_name=()))
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        refuses(
            "cannot be held by JSON", lambda: checkpoints.save(small(2), {"x": object()}), TypeError
        )
    with Checkpoints(tmp_path, axis_name="pod") as checkpoints:
        refuses("axis_name='pod' is none of them", lambda: checkpoints.restore(small()))
        refuses("axis_name='pod' is none of them", lambda: checkpoints.save(small(2)))
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        refuses("lie on 0 meshes", lambda: checkpoints.restore(small()._replace(
            **dict.fromkeys(("step", "params", "model_state", "opt_state", "rng"), ()))))  # fmt: skip


def test_what_is_no_state_is_refused_in_a_sentence(tmp_path):
    state, params = small(), {"w": jnp.ones((2, 3))}
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        for call in (checkpoints.save, checkpoints.restore):
            for given in (params, None):
                wanted = (
                    rf"{call.__name__}\(.*\): the arrays of the state lie on 0 meshes: give a state"
                )
                refuses(wanted, functools.partial(call, given))
            noted = state._asdict() | {"note": "first"}
            refuses(r"state\['note'\] is 'first', a str: a checkpoint holds arrays and numbers; leave "
                    "it out", functools.partial(call, noted), TypeError)  # fmt: skip
            large = state._asdict() | {"tokens": np.int64(2**40)}
            refuses(r"state\['tokens'\] is int64 and does not fit into int32: give it as data",
                    functools.partial(call, large))  # fmt: skip
        refuses(r"save\(state\) got a dict without a step: give save\(state, step=...\), or a state "
                "with a field 'step'", lambda: checkpoints.save(state.params), TypeError)  # fmt: skip
        for step in (1.5, jnp.zeros(8, jnp.int32), True):
            refuses("the step of the state is .*: give a whole number, save",
                    functools.partial(checkpoints.save, state._replace(step=step)))  # fmt: skip
        refuses("step=-1: give a whole number", lambda: checkpoints.save(state, step=-1))
        shapeless = state._replace(step=jax.ShapeDtypeStruct((), jnp.int32))
        refuses("state.step is a ShapeDtypeStruct that does not lie on a mesh: give it a NamedSharding",
                lambda: checkpoints.restore(shapeless))  # fmt: skip
        assert checkpoints.steps() == []


def test_a_closed_folder_says_so(tmp_path):
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        checkpoints.save(small(1))
    refuses("save: these checkpoints of .* are closed", lambda: checkpoints.save(small(2)))
    refuses("restore: these checkpoints of .* are closed", lambda: checkpoints.restore(small()))
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    save_small(tmp_path, 2)
    assert restore_small(tmp_path).step == 2


ENDS = {
    "at once": "Checkpoints(FOLDER, axis_name='data').save(small(1), {'step': 1})",
    "by an error": "Checkpoints(FOLDER, axis_name='data').save(small(1), {'step': 1}); 1 / 0",
    "by an error inside": """
with Checkpoints(FOLDER, axis_name='data') as checkpoints:
    checkpoints.save(small(1), {'step': 1})
    sys.exit(1)
""",
}
BEFORE_THE_END = """
import sys; import jax; jax.config.update("jax_num_cpu_devices", 8)
from test_checkpoint import Checkpoints, small
"""


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_right_after_a_save_has_its_checkpoint(end, tmp_path):
    done = run_script(f"{BEFORE_THE_END}\nFOLDER = {str(tmp_path)!r}\n{ENDS[end]}")
    assert done.returncode == (end != "at once"), done.stderr
    assert "the program ended while" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert restore_small(tmp_path).step == 1


def test_a_save_that_the_end_of_the_program_cuts_off_is_an_error_and_blocks_nothing(tmp_path):
    never_left = f"Checkpoints({str(tmp_path)!r}, axis_name='data').__enter__().save(small(1))"
    shown = run_script(f"{BEFORE_THE_END}\n{never_left}").stderr
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        if not checkpoints.steps():  # else it was written in time
            assert f"the program ended while a checkpoint was written to {tmp_path}" in shown
            assert "leave the with statement, or call checkpoints.close()" in shown
            checkpoints.save(small(1), {"step": 1})
    assert restore_small(tmp_path).step == 1


NO_BYTE_FITS = """
import resource
LIMITS = resource.getrlimit(resource.RLIMIT_FSIZE)
with Checkpoints(FOLDER, axis_name="data") as checkpoints:
    checkpoints.save(small(1), wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, LIMITS[1]))
    checkpoints.save(small(2))
    try:
        checkpoints.save(small(3))
    except OSError as error:
        print(f"said: {error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, LIMITS)
    checkpoints.save(small(4))
"""


def test_a_save_that_the_disk_refuses_is_named_once_and_the_next_is_whole(tmp_path):
    done = run_script(f"{BEFORE_THE_END}\nFOLDER = {str(tmp_path)!r}\n{NO_BYTE_FITS}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"said: checkpoint {tmp_path / '2'} was not written (File too large), and those before it stay: "
        "free or mend that disk, and start again from the newest"
    ]
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        assert checkpoints.steps() == [1, 4]
        assert checkpoints.restore(small()).step == 4


def test_an_error_of_writing_that_is_not_the_disks_stays_as_it_is():
    assert manager._why_not_written(ValueError("a leaf was deleted")) is None
    full = "RESOURCE_EXHAUSTED: Failed to write 5 bytes to file 3: No space [os_error_code='28']"
    assert manager._why_not_written(ValueError(full)) == os.strerror(errno.ENOSPC)
    late = "UNAVAILABLE: no answer [tensorstore_spec='...']"
    assert manager._why_not_written(ValueError(late)) == f"ValueError: {late}"
    peer = "UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"
    assert manager._why_not_written(ValueError(peer)) is None, "a worker's death is no disk's"
    assert "another process" in manager._why_not_written(TimeoutError("of a barrier"))
    behind = RuntimeError("DEADLINE_EXCEEDED: of a barrier")
    behind.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert manager._why_not_written(behind) == "No space left on device"


def test_the_workers_of_a_mesh_say_both_axes(tmp_path):
    place = place_of("4 of 2")
    workers = Workers(place.mesh, **place.axes)
    state = first_state(votes()(place), place)
    with Checkpoints(tmp_path, axis_name=workers) as checkpoints:
        checkpoints.save(state, wait=True)
        assert_same(checkpoints.restore(state).state, state)
    refuses("group_axis='dev': the workers that are given as axis_name know theirs, 'dev'",
            lambda: Checkpoints(tmp_path, axis_name=workers, group_axis="dev"))  # fmt: skip
    with Checkpoints(tmp_path, axis_name=("data",), group_axis="dev") as checkpoints:
        assert_same(checkpoints.restore(state).state, state)


def test_two_levels_and_one_are_not_mistaken_for_each_other(tmp_path):
    place = place_of("4 of 2")
    state = first_state(votes()(place), place)
    with Checkpoints(tmp_path, axis_name=("data", "dev")) as checkpoints:
        refuses("group_axis", lambda: checkpoints.save(state))


def changed_params(change):
    place = place_of("2")
    params = {k: jnp.zeros(shape) for k, shape in SHAPES.items()} | change
    params = {k: x for k, x in params.items() if x is not None}
    return lc.init_state(owned(**CODED)(place), params, place.mesh, axis_name="data",
                         model_state=small().model_state, rng=jax.random.key(0))  # fmt: skip


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_small(tmp_path, 1)
    for change, match in {
        "shape": ({"w": jnp.zeros((8, 41))}, r"params\['w'\] is float32\[8, 40\] in it, wanted .*8, 41"),
        "missing": ({"x": jnp.zeros(3)}, r"another model: it lacks state.params\['x'\] of shape \(3,\)"),
        "more": ({"b": None}, r"it has state.params\['b'\] of shape \(5,\), which is not wanted"),
        "dtype": ({"b": jnp.zeros(5, jnp.bfloat16)}, r"params\['b'\] is float32\[5\] in it, wanted bf"),
    }.values():  # fmt: skip
        with Checkpoints(tmp_path, axis_name="data") as checkpoints:
            like = changed_params(change)
            like = like._replace(model_state=small().model_state)
            refuses(match, functools.partial(checkpoints.restore, like))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    save_small(tmp_path, 1)
    place = place_of("2")
    with Checkpoints(tmp_path, axis_name="data") as checkpoints:
        like = first_state(lc.lion_cub(0.1, axis_name="data"), place)
        refuses("of another optimizer: it lacks state.opt_state", lambda: checkpoints.restore(like))


def test_a_newer_format_is_refused_and_not_passed_over(tmp_path):
    save_small(tmp_path, 1, 2)
    path = tmp_path / "2" / "about" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    refuses("2 has format 3 and this version.*reads format 2", lambda: restore_small(tmp_path))


def test_a_checkpoint_of_version_0_1_is_refused_with_what_to_do(tmp_path):
    save_small(tmp_path, 1, 2)
    path = tmp_path / "2" / "about" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    told = "2 has format 1, that of lioncub_jax 0.1.*finish the run with 0.1.*save its parameters"
    refuses(told, lambda: restore_small(tmp_path))
    refuses(told, lambda: restore_small(tmp_path, step=2))
    assert restore_small(tmp_path, step=1).step == 1  # nothing was renamed


def test_votes_on_some_parameters_move_only_where_their_slices_say_which(tmp_path):
    def make(place):
        mask = {k: k != "b" for k in SHAPES}
        vote = optax.masked(votes()(place), mask)
        rest = lc.global_gradients(optax.sgd(0.1), (place.axes["axis_name"], "dev"))
        return optax.chain(vote, optax.masked(rest, {k: k == "b" for k in SHAPES}))

    old, new = place_of("4 of 2"), place_of("2 of 4")
    state = first_state(make(old), old)
    state = state._replace(step=state.step + 3)
    assert_same(carried(tmp_path, state, old, old, make), state)
    with Checkpoints(tmp_path, **new.axes) as checkpoints:
        like = first_state(make(new), new)
        refuses("votes on some of the parameters only", lambda: checkpoints.restore(like))


# --- Buckets of any order


def test_segments_may_lie_in_any_order_with_rows_between_them():
    """Nothing is taken for granted but first row and rows of a segment, and the rows an owner has."""
    state, place = small(), place_of("2")
    layout = reshard.layout_of(state, Workers(place.mesh, **place.axes))
    (sliced,) = layout.sliced
    (bucket,), path = sliced.owned, ".opt_state.owner[0].value.mu"
    segments, first = [], 3
    for s in reversed(bucket.segments):
        segments.append(s._replace(first_row=first))
        first += s.rows + 3
    moved = bucket._replace(segments=tuple(segments), chunk=-(-first // 2) + 1)
    stored = layout.arrays[path]._replace(shape=(2, moved.chunk, reshard.ROW))
    other = layout._replace(
        sliced=(sliced._replace(owned=(moved,)),), arrays=layout.arrays | {path: stored}
    )
    rng = np.random.default_rng(0)
    leaves = {f".opt_state.owner.mu['{k}']": jnp.asarray(rng.normal(size=SHAPES[k]), jnp.float32)
              for k in SHAPES if 0 not in SHAPES[k]}  # fmt: skip
    found = reshard.laid_out(other, leaves, [path])[path]
    assert found.shape == stored.shape
    rows = np.array(found).reshape(-1, reshard.ROW)
    for s in moved.segments:
        name = sliced.names[s.leaf]
        own = rows[s.first_row : s.first_row + s.rows].reshape(-1)
        wanted = np.asarray(leaves[f".opt_state.owner.mu{name}"]).reshape(-1)
        np.testing.assert_array_equal(own[: s.size], wanted)
        rows[s.first_row : s.first_row + s.rows] = 0
    assert not rows.any()
    here = reshard.laid_out(layout, leaves, [path])[path]
    for lie, array in ((layout, here), (other, found)):
        back = reshard.opened(lie, {path: array})
        assert back.keys() == leaves.keys()
        for name, x in leaves.items():
            np.testing.assert_array_equal(back[name], x)


# --- Being told to stop


def test_sigterm_is_told_to_the_loop_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm() as stopping:
        assert not stopping(0)
        signal.raise_signal(signal.SIGTERM)
        assert stopping(1) and stopping(2)
    assert signal.getsignal(signal.SIGTERM) == before
    refuses("every=0", lambda: stop_on_sigterm(0).__enter__())


def test_signals_are_for_the_main_thread():
    with ThreadPoolExecutor(1) as pool:
        refuses("main thread", pool.submit(lambda: stop_on_sigterm().__enter__()).result)
