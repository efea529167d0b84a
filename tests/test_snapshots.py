"""Snapshots of a run in memory: of one process, and of three machines, one of which is lost.

Run as a program this file is one of the processes.
"""

import contextlib
import functools
import itertools
import json
import operator
import os
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_same
from jax.experimental import multihost_utils
from test_checkpoint import cut_short, flip, opened, refuses
from test_processes import assert_holds, first_state, main, number, numbered, run_all, workers_of

import lioncub_jax as lc
from lioncub_jax.audit import collectives
from lioncub_jax.checkpoint import layout, tiles
from lioncub_jax.exchange.holder import Holder
from lioncub_jax.mesh.hosts import gathered_json
from lioncub_jax.tools import run
from lioncub_jax.tools.run import Snapshots, WorkerStateLost, private_files, snapshot_files
from lioncub_jax.tools.run.snapshots import run_name, send

STEP = 7


@pytest.fixture(autouse=True)
def umask():
    """As where each user has a group: what is made may be written by it if nobody says otherwise."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def first():
    """A state of two workers."""
    return first_state(workers_of(2))


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "checkpoints", tmp_path / "memory"


@contextlib.contextmanager
def both(folders, **options):
    """The checkpoints and the snapshots of a run."""
    with opened(folders[0]) as saved, Snapshots(saved, folders[1], **options) as snapshots:
        yield saved, snapshots


def steps_in(folder):
    names = snapshot_files.names_in(os.listdir(folder))
    return sorted(name.step for name in names if name.kind == "own")


def at(state, step):
    return state._replace(step=state.step + step)


def assert_alike(found, wanted):
    assert_same(found, wanted)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, wanted)


def test_a_snapshot_is_read_to_the_bit_and_its_arrays_may_be_donated(folders):
    first = first_state(workers_of(8, inner=2), jnp.bfloat16)
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with both(folders) as (_, snapshots):
        state = numbered(first, STEP)
        snapshots.save(state, {"next": [1, 2]})
        change(state.params)
        found = snapshots.restore(first)
    assert (found.step, found.data) == (STEP, {"next": [1, 2]})
    assert_alike(found.state, numbered(first, STEP))
    (copy,) = tiles.copy_to_host({"x": jnp.ones(3)}).values()
    assert copy.flags.owndata  # whoever is faster: no view of what may be donated


@pytest.mark.parametrize(("count", "rule"), [(3, "keep"), (8, "mean")])
def test_with_other_workers_it_is_what_a_checkpoint_gives(folders, count, rule):
    state, like = numbered(first_state(workers_of(4)), STEP), first_state(workers_of(count))
    with both(folders) as (saved, snapshots):
        snapshots.save(state)
        found = snapshots.restore(like, on_resize=rule)
        saved.save(state, wait=True)
        assert_alike(found.state, saved.restore(like, on_resize=rule).state)


def test_every_kth_call_takes_one_and_three_stay(folders, first, tmp_path, monkeypatch):
    monkeypatch.setenv("LIONCUB_STEPPED", str(tmp_path / "stepped"))
    with both(folders, every=2, buddies=4) as (saved, snapshots):
        for step in range(1, 12):
            snapshots(at(first, step))
        snapshots.wait()
        assert (tmp_path / "stepped").exists()
        assert steps_in(folders[1]) == [6, 8, 10]
        kinds = [path.suffix for path in folders[1].iterdir()]
        assert sorted(kinds) == [".buddy"] * 3 + [".own"] * 3  # of steps 2, 6 and 10
        # Another start of the run takes away what the first left, and not before it has three.
        again = Snapshots(saved, folders[1])
        for step in (11, 12, 13):
            assert again.restore(first).step == step - 1
            again.save(at(first, step))
            again.wait()
        assert steps_in(folders[1]) == [11, 12, 13]
        again.save(at(first, 12))  # done again: another snapshot
        again.wait()
        assert steps_in(folders[1]) == [12, 12, 13]
        again.clear()
        assert not list(folders[1].iterdir())


def test_a_start_is_numbered_whatever_the_clock_says_and_may_go_back(folders, first, monkeypatch):
    clock = iter(range(9, 0, -1))
    monkeypatch.setattr("time.time_ns", lambda: next(clock) * 10**18)
    for steps in ([8, 9, 10], [10, 11, 12], [3, 4]):
        with both(folders, buddies=0) as (_, snapshots):
            for step in steps:
                snapshots.save(at(first, step))
    with both(folders, buddies=0) as (_, snapshots):
        assert snapshots.restore(first).step == 4


def test_the_newest_of_memory_and_disk_is_taken(folders, first):
    with both(folders) as (saved, snapshots):
        assert snapshots.restore(first) is None
        saved.save(at(first, 3), wait=True)
        assert snapshots.restore(first).step == 3
        snapshots.save(at(first, 4))
        assert snapshots.restore(first).step == 4
        saved.save(at(first, 5), wait=True)
        assert snapshots.restore(first).step == 5


def let_others_write(path):
    path.chmod(0o666)


def rename(path):
    """The content of step 1 under the name of step 2."""
    path.with_name(path.name.replace("1-2-2-", "1-1-1-")).replace(path)


@pytest.mark.parametrize("harm", [flip, cut_short, let_others_write, rename])
def test_a_damaged_one_is_passed_over(folders, first, harm):
    with both(folders) as (_, snapshots):
        for step in (1, 2):
            snapshots.save(numbered(first, step))
        snapshots.wait()
        (newest,) = folders[1].glob("*-2-0-of-1.own")
        harm(newest)
        told = (
            r"snapshot 1-2-2-.*\.own in .* is damaged, cannot be read or may be written by others"
        )
        with pytest.warns(UserWarning, match=told):
            found = snapshots.restore(first)
    if harm is rename:  # and nothing is left of step 1
        assert found is None
    else:
        assert_alike(found.state, numbered(first, 1))


RUNS = b"cposix\nmkdir\n(S'run'\ntR."  # unpickled it makes a folder
RUBBISH = [RUNS, b"\xff" * 16, (10**6).to_bytes(8, "little") + b"[" * 10**6]
CHANGES = [  # where in a description, the numbers of tiles and the data
    ([0], {}), ([0, 0], None), ([0, 3], []), ([0, 3, 1], [2**20]), ([1], [2**40]), ([1], [0] * 999),
    ([0, 1, 0, 1, 0], [2**40] * 2), ([0, 1, 1, 1, 1], "O"), ([0, 1, 1, 1, 1], "V999999999"),
]  # fmt: skip


def changed(content, path, value):
    end = 8 + int.from_bytes(content[:8], "little")
    about, *rest = json.loads(content[8:end])
    words = [json.loads(about), *rest]
    functools.reduce(operator.getitem, path[:-1], words)[path[-1]] = value
    text = json.dumps([json.dumps(words[0]), *words[1:]]).encode()
    return len(text).to_bytes(8, "little") + text + content[end:]


def test_no_content_of_a_sealed_file_is_run_or_raises(folders, first, monkeypatch):
    with both(folders, buddies=0) as (_, snapshots):
        for step in (0, 1):
            snapshots.save(at(first, step))
        snapshots.wait()
        monkeypatch.chdir(folders[1])
        with private_files.opened(folders[1]) as folder:
            _, newest = sorted(os.listdir(folder))
            content = bytes(private_files.read(folder, newest))
            harmed = [changed(content, *change) for change in CHANGES]
            for other in [*RUBBISH, content[:-1], content + b"0", *harmed]:
                private_files.seal(folder, newest, other)
                with pytest.warns(UserWarning, match=f"snapshot {newest} in .* is damaged"):
                    assert snapshots.restore(first).step == 0
    assert len(os.listdir()) == 2


@pytest.mark.filterwarnings("error")
def test_one_that_a_process_was_still_writing_is_no_loss_of_a_machine(folders, first):
    """Also where older ones, which are whole, are older than the checkpoint on disk."""
    with both(folders) as (saved, snapshots):
        for step in (10, 20, 30):
            snapshots.save(at(first, step))
        snapshots.wait()
        # As if a second process had not yet written the last.
        with private_files.opened(folders[1]) as folder:
            for name in os.listdir(folder):
                for other in ("0-of-2",) if "-30-" in name else ("0-of-2", "1-of-2"):
                    content = private_files.read(folder, name)
                    private_files.seal(folder, name.replace("0-of-1", other), content)
                os.unlink(name, dir_fd=folder)
        assert snapshots.restore(first).step == 20
        saved.save(at(first, 25), wait=True)
        assert snapshots.restore(first).step == 25


def test_halves_and_old_starts_do_not_fill_the_memory(folders, first):
    with opened(folders[0]) as saved:
        for step in range(8):  # starts that take one snapshot each
            snapshots = Snapshots(saved, folders[1], buddies=0)
            snapshots.save(at(first, step))
            snapshots.wait()
            assert not list(folders[1].glob("*.part"))
            half = folders[1] / f"{step + 1}-1-1-0-of-1.own.part"
            half.write_text("half")
            Snapshots(saved, folders[1], buddies=0)  # who reads beside a run takes nothing away
            assert half.exists()
        assert steps_in(folders[1]) == [2, 3, 4, 5, 6, 7]


def test_what_is_not_written_is_said(folders, first):
    with both(folders) as (_, snapshots):
        snapshots.folder.rmdir()
        snapshots.save(first)
        told = r"a snapshot was not written to .*memory: .*No such file.*make room"
        refuses(told, snapshots.wait, OSError)
        snapshots.folder.mkdir()  # its group may write it: it is looked at at each use
        snapshots.save(first)
        refuses(
            "a snapshot was not written to .*memory has mode 775: others may",
            snapshots.wait,
            OSError,
        )
        snapshots.folder.chmod(0o700)
        snapshots.save(first)  # and the next one is
        snapshots.wait()
        assert steps_in(folders[1]) == [0]


def test_bad_input(folders, first, tmp_path):
    (tmp_path / "file").write_text("")
    alone = first_state(workers_of(1))
    with both(folders, buddies=0) as (saved, snapshots):
        snapshots.save(alone)
        snapshots.wait()
        for told, call in {
            "there is one worker: give Snap.*buddies=0": lambda: Snapshots(saved, folders[1]).save(alone),
            "on_resize='mine': give one of 'mean'": lambda: snapshots.restore(first, on_resize="mine"),
            "file is a file or a link: give a folder": lambda: Snapshots(saved, tmp_path / "file"),
        }.items():  # fmt: skip
            refuses(told, call)
        for name, wrong, told in [
            ("every", (0, -1, 1.5, True), "a number of steps, 1 or more"),
            ("buddies", (-1, 2.0, True), "give a number of steps, or 0"),
        ]:
            for value in wrong:
                call = functools.partial(Snapshots, saved, folders[1], **{name: value})
                refuses(f"{name}={value!r}: .*{told}", call)
        told = "is a str: give the Checkpoints of the run"
        refuses(told, lambda: Snapshots("runs", folders[1]), TypeError)


def given_away(path, monkeypatch):
    """Makes a folder that of another user; a link too."""
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: -1)
    else:
        os.chown(path, 12345, -1, follow_symlinks=False)


def test_folders_that_another_user_made_or_can_change(folders, first, tmp_path, monkeypatch):
    """Names below a shared folder are guessed: there the folder is made by the library, or one's own."""
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)  # as /dev/shm
    theirs = shared / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "snapshots").symlink_to(victim)
    (shared / "link").symlink_to(victim)
    with opened(folders[0]) as saved:
        with Snapshots(saved, shared / "new" / "mine") as snapshots:
            assert (shared / "new").stat().st_mode & 0o777 == 0o700
            snapshots.save(first)
        shared.chmod(0o777)  # as Kubernetes makes its volumes: others may rename what is in it
        for call in (lambda: snapshots.restore(first), lambda: Snapshots(saved, shared / "new")):
            refuses("shared has mode 777: others may write it", call)
        shared.chmod(0o1777)
        refuses("shared has mode 1777: others may write it", lambda: Snapshots(saved, shared))
        refuses("link is a file or a link", lambda: Snapshots(saved, shared / "link"))
        refuses(
            "theirs/snapshots is a file or a link", lambda: Snapshots(saved, theirs / "snapshots")
        )
        given_away(theirs, monkeypatch)
        for path in (theirs, theirs / "snapshots", theirs / "new"):
            refuses("theirs belongs to another user", lambda path=path: Snapshots(saved, path))
    assert not list(victim.iterdir())


def test_memory_of_a_run_is_where_others_cannot_rename_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, how: path != "/dev/shm" and access(path, how))
    tmp_path.chmod(0o777)
    keep = functools.partial(run.keep, ["true"], 1)
    refuses("others may rename what is in /dev/shm and .*Set TMPDIR", keep)
    tmp_path.chmod(0o1777)
    assert keep(write=lambda line: None).exit_code == 0


SAYS = [
    {},
    "x",
    None,
    [[]],
    [[1], []],
    [[], [1]],
    *([[], [[x, [], None]]] for x in ("{}", "[" * 10**5)),
]
TILES = 2**60, 2**40, -1


def claims(words, mine):
    """Some words; a number stands for a snapshot of which a process has that tile."""
    return [[], [[mine[1][0][0], [words], None]]] if isinstance(words, int) else words


def test_what_cannot_be_said_is_refused_and_who_said_it_is_named(folders, first, monkeypatch):
    with both(folders, buddies=0) as (_, snapshots):
        snapshots.save(first)
        # Of the names of snapshots, of the newest checkpoint, and of what is in a snapshot.
        for stage, words in [*itertools.product(range(3), SAYS), *((2, k) for k in TILES)]:
            calls = itertools.count()

            def both_say(mine, stage=stage, words=words, calls=calls):
                other = claims(words, mine) if next(calls) == stage else mine
                return json.loads(json.dumps([mine, other]))

            monkeypatch.setattr(snapshot_files, "gathered_json", both_say)
            refuses("process 1 says", lambda: snapshots.restore(first))


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
    refuses(words, lambda: gathered_json(None))


def test_a_run_may_move_and_snapshots_of_another_run_or_model_are_refused(folders, first, tmp_path):
    moved = tmp_path / "moved"
    with both(folders) as (saved, snapshots):
        saved.save(first)
        snapshots.save(first)
    folders[0].rename(moved)
    with both((moved, folders[1])) as (_, snapshots):
        assert snapshots.restore(first).step == 0
        wider = lc.init_state(optax.identity(), {"w": jnp.zeros((9, 9))}, workers_of(2))
        refuses(r"snapshot of step 0 in .* is of another model", lambda: snapshots.restore(wider))
    for one in moved.glob("*"):  # as a shell does
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    with both((moved, folders[1])) as (_, snapshots):
        told = (r"memory are of another run than the checkpoints in .*moved, or those were taken away "
                r"since: forget .*clear\(\)")  # fmt: skip
        refuses(told, lambda: snapshots.restore(first))
        snapshots.clear()
        assert snapshots.restore(first) is None
        snapshots.save(first)
        assert snapshots.restore(first).step == 0


def test_a_run_is_named_once_and_nothing_else_is_taken_for_its_name(tmp_path):
    (tmp_path / "run-1.part").write_text("half of a na")  # of a process that was killed
    (tmp_path / "run").touch()  # of a machine that lost its power
    named = run_name(tmp_path)
    assert named == run_name(tmp_path) != "half of a na"
    with opened(tmp_path) as saved:
        assert saved.steps() == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "running").touch()
    refuses("no folder of checkpoints, it holds 'running'", lambda: opened(tmp_path / "other"))


def test_copies_for_buddies_are_two_bytes_a_parameter_over_all_workers(folders, monkeypatch):
    workers, sent = workers_of(8), []
    state = first_state(workers)

    def seen(*args):
        sent.extend(collectives(send.lower(*args).compile(), workers.mesh))
        return send(*args)

    monkeypatch.setattr("lioncub_jax.tools.run.snapshots.send", seen)
    with both(folders) as (_, snapshots):
        snapshots.save(state)
    (copy,) = sent
    assert (copy.op, copy.axes) == ("collective-permute", ("data",))
    assert copy.sent_bytes == 2 * state.opt_state.owner[0].value.inner.mu.size // 8


# --- Three machines with two workers each


def snapshots_of(folder, machine):
    return Snapshots(opened(folder / "checkpoints"), folder / f"machine-{machine}")


def restored(folder, machine, count=6, inner=1):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", WorkerStateLost)
        found = snapshots_of(folder, machine).restore(first_state(workers_of(count, inner)))
    assert (found.step, found.data) == (STEP, {"next": 8})
    return found.state, [str(w.message) for w in said if w.category is WorkerStateLost]


def half_written(folder):
    """What was being written when the run was killed is no state, and no loss of a machine either."""
    first = first_state(workers_of(6))
    with snapshots_of(folder, "shared") as snapshots:
        snapshots.save(first)
        snapshots.wait()
        multihost_utils.sync_global_devices("written")
        if jax.process_index() == 1:
            (mine,) = snapshots.folder.glob("*-1-of-3.own")
            mine.unlink()
        multihost_utils.sync_global_devices("harmed")
        assert snapshots.restore(first) is None
        if jax.process_index() == 1:  # says what an unpickler would run
            snapshot_files.gathered_json = lambda what: gathered_json(
                [[], [[RUNS.decode(), [], []]]]
            )
        refuses("process 1 says", lambda: snapshots.restore(first))
        snapshot_files.gathered_json = gathered_json


def write(folder):
    first = first_state(workers_of(6))
    with snapshots_of(folder, jax.process_index()) as snapshots:
        for step in (STEP - 2, STEP - 1, STEP):
            snapshots.save(numbered(first, step), {"next": step + 1})


def read(folder):
    """With all machines, in another order."""
    state, said = restored(folder, (jax.process_index() + 1) % 3)
    assert not said
    assert_holds(state, STEP)
    state, said = restored(folder, (jax.process_index() + 1) % 3, inner=2)
    assert not said
    assert_holds(state._replace(model_state=(), opt_state=()), STEP)
    multihost_utils.sync_global_devices("read")


LOST, LEFT = [2, 3], [0, 1, 4, 5]  # workers


def read_without(folder):
    """After machine 1 was lost and replaced."""
    if jax.process_index() == 1:
        shutil.rmtree(folder / "machine-1")
    state, (slices, own) = restored(folder, jax.process_index())
    arrays = {x.path: x.info for x in layout.layout_of(state, workers_of(6))}
    assert f"are those of step {STEP - 2}, in bfloat16, for a state of step {STEP}" in slices
    assert "start from the mean of the others' momentum and owe nothing: 2, 3." in own
    assert f"Their own, of step {STEP}, was nowhere else" in own

    def expected(path, shape, dtype, step):
        whole = number(path, shape, dtype, step)
        holder = arrays[path].holder if whole.size else None
        if shape and holder is Holder.OWNER:
            older = number(path, shape, dtype, step - 2)  # when buddies were sent theirs
            whole[LOST] = older[LOST].astype(jnp.bfloat16)
        elif shape and holder is Holder.FEEDBACK:
            whole[LOST] = 0
        elif shape and holder is Holder.WORKER:
            of_all = np.max if dtype == np.int32 else np.mean
            whole[LOST] = of_all(whole[LEFT], 0)
        return whole

    assert {Holder.OWNER, Holder.WORKER, Holder.FEEDBACK} <= {x.holder for x in arrays.values()}
    assert_holds(state, STEP, expected)


TASKS = half_written, write, read, read_without


def test_of_three_machines_one_is_lost(tmp_path):
    for text in run_all(__file__, TASKS, 3, tmp_path):
        assert "done: read_without\n" in text
    # And one machine with four workers goes on from what the two others have.
    for machine in (0, 2):
        shutil.copytree(
            tmp_path / f"machine-{machine}", tmp_path / "machine-left", dirs_exist_ok=True
        )
    state, said = restored(tmp_path, "left", 4)
    assert len(said) == 2
    assert_holds(state._replace(model_state=(), opt_state=()), STEP)
    mean = number(".model_state['mean']", (6, 3), np.float32, STEP)[LEFT].mean(0)
    np.testing.assert_array_equal(state.model_state["mean"], [mean] * 4)


if __name__ == "__main__":
    main(*TASKS)
