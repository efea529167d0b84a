"""Snapshots of a run in memory: of one process, and of three machines, one of which is lost.

Run as a program this file is one of the processes.
"""

import contextlib
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_checkpoint_processes import run_all

import lioncub_jax as lc
from lioncub_jax.checkpoint import Checkpoints, Snapshots, WorkerStateLost, found, reshard, tiles
from lioncub_jax.layout import Holder
from lioncub_jax.traffic import collectives

AXIS = "data"
STEP = 7


def optimizer():
    """Momentum of each worker, error feedback, and momentum of owners in one state."""
    coded = lc.quantize.error_feedback(lc.quantize.midrise(2))
    owner = lc.decide.momentum_at_owner(optax.scale_by_lion(0.5, 0.5))
    return lc.communicate(axis_name=AXIS, memory=lc.momentum.blend(0.5, 0.5), up=coded, owner=owner)


def workers_of(devices, inner=1):
    shape = (len(devices) // inner, inner)
    return lc.Workers(
        jax.make_mesh(shape, (AXIS, "fsdp"), devices=devices, axis_types=(AxisType.Auto,) * 2), AXIS
    )


def first_state(workers, dtype=jnp.float32):
    params = {
        "w": jnp.zeros((16, 40), dtype),
        "b": jnp.zeros(3, dtype),
        "none": jnp.zeros((0, 3), dtype),
    }
    specs = {"w": P("fsdp"), "b": P(), "none": P()}
    model_state = {
        "key": jax.random.key(1),
        "mean": jnp.zeros(3),
        "count": jnp.zeros((), jnp.int32),
    }
    return lc.init_state(optimizer(), params, workers, specs=specs, model_state=model_state)


def number(path, shape, dtype, step=STEP):
    """What an array of the state holds at a step, the whole of it."""
    if path == ".step":
        return np.int32(step)
    drawn = np.random.default_rng([zlib.crc32(path.encode()), step]).normal(size=shape)
    return (100 * drawn).astype(dtype)


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def numbered(state, step=STEP):
    def leaf(path, x):
        whole = number(jax.tree_util.keystr(path), x.shape, x.dtype, step) if not is_key(x) else x
        return (
            x
            if is_key(x)
            else jax.make_array_from_callback(x.shape, x.sharding, lambda i: whole[i])
        )

    return jax.tree_util.tree_map_with_path(leaf, state)


def steps_in(folder):
    return sorted(name.step for name in found.names_in(folder) if name.kind == "own")


def words(x):
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def assert_same(found, wanted):
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in pairs:
        assert x.dtype == y.dtype and x.sharding == y.sharding, path
        np.testing.assert_array_equal(words(x), words(y), err_msg=jax.tree_util.keystr(path))


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "checkpoints", tmp_path / "memory"


@contextlib.contextmanager
def both(folders, workers, **options):
    """The checkpoints and the snapshots of a run."""
    with (
        Checkpoints(folders[0], axis_name=workers) as saved,
        Snapshots(saved, folders[1], **options) as snapshots,
    ):
        yield saved, snapshots


@pytest.mark.parametrize(("inner", "dtype"), [(1, jnp.float32), (2, jnp.bfloat16)])
def test_a_snapshot_is_read_to_the_bit(folders, inner, dtype):
    workers = workers_of(jax.devices(), inner)
    state = numbered(first_state(workers, dtype))
    with both(folders, workers) as (_, snapshots):
        snapshots.save(state, {"next": [1, 2]})
        found = snapshots.restore(first_state(workers, dtype))
    assert (found.step, found.data) == (STEP, {"next": [1, 2]})
    assert_same(found.state, state)


@pytest.mark.parametrize("rule", ["mean", "keep"])
@pytest.mark.parametrize("count", [3, 8])
def test_with_other_workers_it_is_what_a_checkpoint_gives(folders, count, rule):
    before, after = workers_of(jax.devices()[:4]), workers_of(jax.devices()[:count])
    state = numbered(first_state(before))
    with both(folders, before) as (saved, snapshots):
        snapshots.save(state)
        like = first_state(after)
        found = snapshots.restore(like, workers=rule)
        saved.save(state, wait=True)
        assert_same(found.state, saved.restore(like, workers=rule).state)


def test_arrays_may_be_donated_when_a_snapshot_is_taken(folders):
    workers = workers_of(jax.devices()[:2])
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with both(folders, workers) as (_, snapshots):
        state = numbered(first_state(workers))
        snapshots.save(state)
        change(state.params)
        assert_same(snapshots.restore(first_state(workers)).state, numbered(first_state(workers)))


def test_every_kth_call_takes_one_and_three_stay(folders):
    workers = workers_of(jax.devices()[:2])
    with both(folders, workers, every=2, buddies=4) as (saved, snapshots):
        for step in range(1, 12):
            snapshots(numbered(first_state(workers), step))
        snapshots.wait()
        assert steps_in(folders[1]) == [6, 8, 10]
        kinds = [path.suffix for path in folders[1].iterdir()]
        assert sorted(kinds) == [".buddy"] * 3 + [".own"] * 3  # of steps 2, 6 and 10
        # Another start of the run takes away what the first left, and not before it has three.
        again = Snapshots(saved, folders[1])
        for step in (11, 12, 13):
            assert again.restore(first_state(workers)).step == step - 1
            again.save(numbered(first_state(workers), step))
            again.wait()
        assert steps_in(folders[1]) == [11, 12, 13]
        again.clear()
        assert steps_in(folders[1]) == [] and not list(folders[1].iterdir())


def test_the_newest_of_memory_and_disk_is_taken(folders):
    workers = workers_of(jax.devices()[:2])
    first = first_state(workers)
    with both(folders, workers) as (saved, snapshots):
        assert snapshots.restore(first) is None
        saved.save(numbered(first, 3), wait=True)
        assert snapshots.restore(first).step == 3
        snapshots.save(numbered(first, 4))
        assert snapshots.restore(first).step == 4
        saved.save(numbered(first, 5), wait=True)
        assert snapshots.restore(first).step == 5


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_one_is_passed_over(folders, harm):
    workers = workers_of(jax.devices()[:2])
    first = first_state(workers)
    with both(folders, workers) as (_, snapshots):
        for step in (1, 2):
            snapshots.save(numbered(first, step))
        snapshots.wait()
        (newest,) = folders[1].glob("2-*.own")
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 4
        newest.write_bytes({"flip": content, "cut": content[:-40], "empty": b""}[harm])
        with pytest.warns(
            UserWarning, match=r"snapshot 2-.*\.own in .* is damaged or cannot be read, and"
        ):
            found = snapshots.restore(first)
        assert_same(found.state, numbered(first, 1))


def test_one_that_a_process_was_still_writing_is_no_loss_of_a_machine(folders):
    """Also where older ones, which are whole, are older than the checkpoint on disk."""
    workers = workers_of(jax.devices()[:2])
    first = first_state(workers)
    with both(folders, workers) as (saved, snapshots):
        for step in (10, 20, 30):
            snapshots.save(numbered(first, step))
        snapshots.wait()
        for path in folders[
            1
        ].iterdir():  # as if there were a second process, which lacks in the last
            one = path.with_name(path.name.replace("0-of-1", "0-of-2"))
            path.rename(one)
            if not one.name.startswith("30"):
                shutil.copy(one, one.with_name(one.name.replace("0-of-2", "1-of-2")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert snapshots.restore(first).step == 20
            saved.save(numbered(first, 25), wait=True)
            assert snapshots.restore(first).step == 25


def test_halves_and_old_starts_do_not_fill_the_memory(folders):
    workers = workers_of(jax.devices()[:2])
    with Checkpoints(folders[0], axis_name=workers) as saved:
        for step in range(12):  # starts that take one snapshot each
            snapshots = Snapshots(saved, folders[1], buddies=0)
            assert not list(folders[1].glob("*.part"))
            snapshots.save(numbered(first_state(workers), step))
            snapshots.wait()
            (folders[1] / f"{step}-1-1-0-of-1.own.part").write_text("half")
        assert steps_in(folders[1]) == list(range(6, 12))


def test_a_step_that_is_done_again_is_another_snapshot(folders):
    workers = workers_of(jax.devices()[:2])
    with both(folders, workers) as (_, snapshots):
        for step, start in ((7, 1), (8, 1), (7, 2)):
            snapshots.save(
                numbered(first_state(workers), start)._replace(
                    step=numbered(first_state(workers), step).step
                )
            )
        snapshots.wait()
        assert steps_in(folders[1]) == [7, 7, 8]


def test_what_is_not_written_is_said(folders):
    workers = workers_of(jax.devices()[:2])
    with Checkpoints(folders[0], axis_name=workers) as saved:
        snapshots = Snapshots(saved, folders[1])
        snapshots.folder.rmdir()
        snapshots.save(first_state(workers))
        with pytest.raises(
            OSError, match=r"a snapshot was not written to .*memory: .*No such file.*make room"
        ):
            snapshots.wait()
        snapshots.folder.mkdir()
        snapshots.save(first_state(workers))  # and the next one is
        snapshots.wait()


def test_bad_input(folders):
    workers, one = workers_of(jax.devices()[:2]), workers_of(jax.devices()[:1])
    saved = Checkpoints(folders[0], axis_name=workers)
    with pytest.raises(TypeError, match="is a str: give the Checkpoints of the run"):
        Snapshots(str(folders[0]), folders[1])
    for every in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"every={every!r}: .*a number of steps, 1 or more"):
            Snapshots(saved, folders[1], every=every)
    for buddies in (-1, 2.0, True):
        with pytest.raises(ValueError, match=f"buddies={buddies!r}: give a number of steps, or 0"):
            Snapshots(saved, folders[1], buddies=buddies)
    folders[1].write_text("")
    with pytest.raises(ValueError, match="memory is a file: give a folder for the snapshots"):
        Snapshots(saved, folders[1])
    folders[1].unlink()
    with pytest.raises(ValueError, match=r"there is one worker: give Snapshots.*buddies=0"):
        Snapshots(saved, folders[1]).save(first_state(one))
    Snapshots(saved, folders[1], buddies=0).save(first_state(one))
    with pytest.raises(ValueError, match="workers='mine': give one of 'mean', 'keep'"):
        Snapshots(saved, folders[1]).restore(first_state(one), workers="mine")
    with pytest.raises(TypeError, match="cannot be held by JSON"):
        Snapshots(saved, folders[1]).save(first_state(workers), {"x": jnp.ones(1)})
    with pytest.raises(TypeError, match="without a step"):
        Snapshots(saved, folders[1]).save({"params": first_state(workers).params})


def test_what_is_of_another_run_or_model_is_refused(folders, tmp_path):
    workers = workers_of(jax.devices()[:2])
    first = first_state(workers)
    with Snapshots(Checkpoints(folders[0], axis_name=workers), folders[1]) as snapshots:
        snapshots.save(first)
    other = Snapshots(Checkpoints(tmp_path / "other", axis_name=workers), folders[1])
    with pytest.raises(
        ValueError, match=r"memory are of another run than the checkpoints in .*other"
    ):
        other.restore(first)
    own = Snapshots(Checkpoints(folders[0], axis_name=workers), folders[1])
    wider = lc.init_state(optimizer(), {"w": jnp.zeros((9, 9))}, workers)
    with pytest.raises(ValueError, match=r"snapshot 0 in .* is of another model"):
        own.restore(wider)


def test_a_run_may_move_and_begins_anew_where_its_checkpoints_were_taken_away(folders, tmp_path):
    workers = workers_of(jax.devices()[:2])
    first = first_state(workers)
    with both(folders, workers) as (saved, snapshots):
        saved.save(first)
        snapshots.save(first)
    moved = tmp_path / "moved"
    folders[0].rename(moved)
    with both((moved, folders[1]), workers) as (_, snapshots):
        assert snapshots.restore(first).step == 0
    for one in moved.glob("*"):  # as a shell does
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    with both((moved, folders[1]), workers) as (_, snapshots):
        with pytest.raises(ValueError, match=r"or those were taken away since: forget .*clear\(\)"):
            snapshots.restore(first)
        snapshots.clear()
        assert snapshots.restore(first) is None
        snapshots.save(first)
        assert snapshots.restore(first).step == 0


def test_a_run_is_named_once_and_nothing_else_is_taken_for_its_name(folders):
    workers = workers_of(jax.devices()[:2])
    folders[0].mkdir()
    (folders[0] / "run.new").write_text("half of a na")  # of a process that was killed
    (folders[0] / "run").touch()  # of a machine that lost its power
    with Checkpoints(folders[0], axis_name=workers) as saved:
        assert saved.run() == saved.run() != "half of a na"
        named = saved.run()
    with Checkpoints(folders[0], axis_name=workers) as saved:
        assert saved.run() == named and saved.steps() == []
    (folders[0] / "running").touch()
    with pytest.raises(ValueError, match=r"no folder of checkpoints, it holds 'running'"):
        Checkpoints(folders[0], axis_name=workers)


def test_copies_for_buddies_are_two_bytes_a_parameter_over_all_workers(folders):
    """And one percent of what 100 steps of 8 workers send."""
    workers = lc.Workers(jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,)), AXIS)
    tx = lc.owner_lion(1e-3, axis_name=workers)
    params = {"w": jnp.zeros((512, 512))}
    state = lc.init_state(tx, params, workers)
    with Checkpoints(folders[0], axis_name=workers) as saved:
        snapshots = Snapshots(saved, folders[1])
        found = collectives(snapshots.lower(state).compile(), workers.mesh)
    (sent,) = found
    assert (sent.op, sent.axes) == ("collective-permute", (AXIS,))
    slices = 512 * 512 // 8
    assert sent.sent_bytes == 2 * slices
    step = lc.make_train_step(lambda p, b, r: jnp.mean((b @ p["w"]) ** 2), tx, workers)
    batch = jax.ShapeDtypeStruct((8, 512), jnp.float32)
    each = sum(c.sent_bytes for c in collectives(step.lower(state, batch).compile(), workers.mesh))
    assert sent.sent_bytes <= 0.01 * 100 * each


# --- Three machines


def machine_of(folder, index):
    return folder.parent / f"machine-{index}"


def write(folder):
    workers = workers_of(jax.devices())
    with (
        Checkpoints(folder, axis_name=workers) as saved,
        Snapshots(saved, machine_of(folder, jax.process_index())) as snapshots,
    ):
        for step in (STEP - 2, STEP - 1, STEP):
            snapshots.save(numbered(first_state(workers), step), {"next": step + 1})


def read(folder):
    """With all machines, in another order."""
    index = (jax.process_index() + 1) % 3
    found, said = restored(folder, index)
    assert not said
    assert_process_holds(found.state, lambda path, whole: whole)


def read_without(folder):
    """After machine 1 was lost and replaced."""
    found, said = restored(folder, jax.process_index())
    workers = workers_of(jax.devices())
    arrays = reshard.layout_of(found.state, workers).arrays
    slices, own = (str(w.message) for w in said)
    assert f"are those of step {STEP - 2}, in bfloat16, for a state of step {STEP}" in slices
    assert "start from the mean of the others' momentum and owe nothing: 2, 3." in own
    assert f"Their own, of step {STEP}, was nowhere else" in own

    def expected(path, whole):
        holder = arrays[path].holder
        if whole.ndim == 0 or holder not in (Holder.OWNER, Holder.WORKER, Holder.FEEDBACK):
            return whole
        whole, lost, left = whole.copy(), [2, 3], [0, 1, 4, 5]
        if holder is Holder.OWNER:
            older = number(
                path, whole.shape, whole.dtype, STEP - 2
            )  # buddies were sent theirs then
            whole[lost] = np.asarray(jnp.asarray(older[lost]).astype(jnp.bfloat16))
        elif holder is Holder.FEEDBACK:
            whole[lost] = 0
        elif np.issubdtype(whole.dtype, np.integer):
            whole[lost] = whole[left].max(0)
        else:
            whole[lost] = whole[left].mean(0)
        return whole

    assert {Holder.OWNER, Holder.WORKER, Holder.FEEDBACK} <= {x.holder for x in arrays.values()}
    assert_process_holds(found.state, expected)


def read_half_written(folder):
    """What was being written when the run was killed is no state, and no loss of a machine either."""
    workers = workers_of(jax.devices())
    with Checkpoints(folder, axis_name=workers) as saved:
        snapshots = Snapshots(saved, machine_of(folder, "shared"))
        snapshots.save(first_state(workers))  # as init_state makes it
        snapshots.wait()
        multihost_utils.sync_global_devices("written")
        if jax.process_index() == 1:
            (mine,) = snapshots.folder.glob("0-*-1-1-of-3.own")
            mine.unlink()
        multihost_utils.sync_global_devices("harmed")
        assert snapshots.restore(first_state(workers)) is None


def read_fewer(folder):
    """After machine 1 was lost, on the two that are left."""
    found, said = restored(folder, (0, 2)[jax.process_index()])
    assert len(said) == 2
    for path, x in jax.tree_util.tree_leaves_with_path(found.state):
        name = jax.tree_util.keystr(path)
        if ".params" in name:
            wanted = number(name, x.shape, x.dtype)
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(
                    np.asarray(shard.data), wanted[shard.index], err_msg=name
                )
        if name == ".model_state['mean']":
            six = number(name, (6, 3), np.float32)[[0, 1, 4, 5]]
            for shard in x.addressable_shards:
                np.testing.assert_allclose(np.asarray(shard.data)[0], six.mean(0), rtol=1e-5)


def restored(folder, machine):
    workers = workers_of(jax.devices())
    with (
        Checkpoints(folder, axis_name=workers) as saved,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always", WorkerStateLost)
        found = Snapshots(saved, machine_of(folder, machine)).restore(first_state(workers))
    assert (found.step, found.data) == (STEP, {"next": 8})
    return found, [w for w in said if w.category is WorkerStateLost]


def assert_process_holds(state, expected):
    """What this process holds, of the arrays without random keys."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if is_key(x) or 0 in x.shape:
            continue
        whole = np.asarray(expected(name, np.asarray(number(name, x.shape, x.dtype))))
        for shard in x.addressable_shards:
            np.testing.assert_allclose(
                np.asarray(shard.data), whole[shard.index], rtol=1e-6, err_msg=name
            )


@pytest.mark.slow
def test_three_machines_of_which_one_is_lost(tmp_path):
    folder = tmp_path / "checkpoints"
    run_all("write", 3, folder, tmp_path, program=__file__)
    run_all("read", 3, folder, tmp_path, program=__file__)
    shutil.rmtree(tmp_path / "machine-1")
    run_all("read_without", 3, folder, tmp_path, program=__file__)
    run_all("read_fewer", 2, folder, tmp_path, program=__file__)


def test_a_snapshot_that_was_being_written_is_none(tmp_path):
    run_all("read_half_written", 3, tmp_path / "checkpoints", tmp_path, program=__file__)


TASKS = write, read, read_without, read_fewer, read_half_written


def run_process(task, port, processes, index, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, index)
    {f.__name__: f for f in TASKS}[task](Path(folder))
    jax.distributed.shutdown()


# --- Tiles


def test_tiles_of_a_file_come_back_with_their_dtypes(tmp_path):
    values = [
        np.arange(6, dtype=np.float32).reshape(2, 3), np.array(True), np.zeros((0, 2), np.int8),
        np.asarray(jnp.arange(4, dtype=jnp.bfloat16)), np.arange(5, dtype=np.uint32)[::2],
    ]  # fmt: skip
    given = [
        tiles.Tile(f"x{i}", tuple((3, 3 + n) for n in v.shape), v) for i, v in enumerate(values)
    ]
    tiles.write(tmp_path / "file.own", {"about": 1}, given)
    about, found = tiles.read(tmp_path / "file.own")
    assert about == {"about": 1} and len(found) == len(given)
    for one, other in zip(found, given, strict=True):
        assert one[:2] == other[:2] and one.value.dtype == other.value.dtype
        np.testing.assert_array_equal(one.value, other.value)


def test_a_part_of_several_tiles_is_joined_from_them():
    whole = np.arange(24).reshape(4, 6)
    held = {((a, a + 2), (b, b + 3)): whole[a : a + 2, b : b + 3] for a in (0, 2) for b in (0, 3)}
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    place = jax.ShapeDtypeStruct((4, 6), jnp.int32, sharding=NamedSharding(mesh, P("x")))
    found = tiles.placed(place, {key: {0} for key in held}, held)
    np.testing.assert_array_equal(found, whole)
    assert found.sharding == place.sharding


if __name__ == "__main__":
    port, processes, index = map(int, sys.argv[2:5])
    run_process(sys.argv[1], port, processes, index, sys.argv[5])
