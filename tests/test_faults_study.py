"""The benchmarks of faults: who lies in which run, that a run is the study's but for that, and the sums."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from harm import followed, inflict, timeline
from matplotlib import pyplot
from study import liars, runs, tasks

import lioncub_jax as lc
from lioncub_jax import lab

ROOT = Path(__file__).parents[1]


def benchmark(name):
    """A program of the folder, as a module of a name of its own."""
    spec = importlib.util.spec_from_file_location(
        f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LIARS, FAULTS = benchmark("liars"), benchmark("faults")


@pytest.fixture(scope="module")
def text():
    return tasks.load("text", None, tasks.SIZES["tiny"])


def runner_of(task, rate=1e-2):
    size = tasks.SIZES["tiny"]
    return liars.LiarsRunner(task, size.steps, size.text.batch, lambda method, split: rate)


def lie(base="vote", attack="nobody", count=0, missing=0.0):
    return liars.Lie(base, 8, attack, count, missing, 0)


def test_without_liars_a_run_is_the_studys(text):
    size, row = tasks.SIZES["tiny"], runner_of(text).run(lie())
    spec = runs.Spec("main", "text", "vote", 8, "iid", size.text.batch // 8, size.steps, 1e-2, 0)
    plain = runs.Runner(text).run(spec)
    assert (
        row["test"] == plain["test"]
        and row["curve"]["bits_per_byte"] == plain["curve"]["bits_per_byte"]
    )


def test_one_program_runs_every_lie_and_each_changes_what_it_must(text):
    runner = runner_of(text)
    clean = runner.run(lie())["test"]["bits_per_byte"]

    def end(**how):
        return runner.run(lie(**how))["test"]["bits_per_byte"]

    assert end(attack="flip", count=0) == clean, "nobody lies"
    assert end(attack="times 1e6", count=3) == clean, "a vote is a sign"
    assert end(attack="flip", count=3) == end(attack="times -1e6", count=3) != clean
    assert end(attack="NaN", count=3) != clean and end(missing=0.3) != clean
    assert end(missing=1.0) > 7.9, "nobody votes, so nothing is learned"
    assert len(runner._compiled) == 1


def test_late_votes_are_of_those_who_would_be_missing_and_are_not_lost(text):
    runner = runner_of(text)
    late, all_late, missing = (
        runner.run(lie()._replace(**one))
        for one in ({"late": 0.3}, {"late": 1.0}, {"missing": 0.3})
    )
    assert late["test"] != missing["test"] and late["late"] == 0.3 and missing["late"] == 0.0
    assert all_late["test"]["bits_per_byte"] < 7.9, "a step behind, and not lost"


def test_every_case_is_planned_once_and_liars_are_fewer_than_half():
    planned = liars.planned((8, 16, 32))
    assert len(planned) == len(set(planned))
    assert all(2 * one.liars < one.workers for one in planned)
    unlike = liars.unlike()
    assert {one.base for one in planned + unlike} == set(liars.BASES)
    assert len(unlike) == len(set(unlike)) and {one.split for one in unlike} == set(LIARS.SPLITS)
    assert {one.attack for one in planned} == set(liars.ATTACKS)
    missing = [one for one in planned if one.missing]
    late = [one for one in planned if one.late]
    assert late and [one._replace(missing=one.late, late=0.0) for one in late] == missing
    assert {(one.workers, one.liars) for one in planned if one.attack == "flip"} == {
        (8, 1), (8, 2), (8, 3), (16, 1), (16, 4), (16, 7), (32, 1), (32, 8), (32, 15),
    }  # fmt: skip
    more = {one for one in planned if one.workers > 8}
    assert {one.base for one in more} == set(liars.MORE)
    assert {one.attack for one in more} == {"nobody", *liars.WORST}


def row_of(one, bits):
    return {**one._asdict(), "test": {"bits_per_byte": bits}}


def test_what_is_lost_is_a_mean_of_pairs():
    rows = [row_of(lie()._replace(seed=s), b) for s, b in enumerate([3.0, 3.2])]
    rows += [
        row_of(lie(attack="flip", count=3)._replace(seed=s), b) for s, b in enumerate([3.1, 3.4])
    ]
    flipped = {"base": "vote", "workers": 8, "attack": "flip", "liars": 3, "missing": 0.0}
    assert liars.behind(rows, flipped) == pytest.approx(0.15)
    assert LIARS.keys(rows)["vote_3_flippers_of_8"] == pytest.approx(0.15)
    assert LIARS.keys(rows)["mean_1_loud_of_8"] is None
    rows[-1]["test"]["bits_per_byte"] = None
    assert liars.behind(rows, flipped) == np.inf


def test_late_votes_are_told_from_missing_ones_and_from_rows_of_before():
    rows = [row_of(lie()._replace(**one), b) for b, one in (
        (3.0, {}), (3.5, {"missing": 0.3}), (3.25, {"late": 0.3}),
    )]  # fmt: skip
    del rows[0]["late"], rows[1]["late"]  # those of before do not have it
    assert liars.key_of(rows[0]) == lie() and liars.key_of(rows[2]).late == 0.3
    found = LIARS.keys(rows)
    assert (found["vote_30_percent_missing"], found["vote_30_percent_late"]) == (0.5, 0.25)
    (_, *bases), lines = LIARS.table_of(rows, 8)
    lines, vote = {name: cells for name, *cells in lines}, bases.index("vote")
    assert (lines["30% missing"][vote], lines["30% late"][vote]) == ("+0.500", "+0.250")


def fault_row(kind, run=0, **changes):
    whole = {
        "exit_code": 0,
        "left": 0,
        "loss": 2.5,
        "last_step": 120,
        "seconds_to_next_step": 9.0,
        "steps": 120,
    }
    times = [[1.0, 1], [2.0, 2], [12.0, 2], [13.0, 3]]
    said = {"times": times, "fault": [2.5, 2.5], "died": [2.6]}
    return {"kind": kind, "run": run, **whole, "steps_again": 4, **said, **changes}


def test_a_run_that_ends_otherwise_has_not_survived():
    rows = [fault_row("unbroken"), fault_row("worker"), fault_row("worker", 1, loss=2.51)]
    rows += [fault_row("worker", 2, left=1), fault_row("worker", 3, exit_code=1)]
    found = FAULTS.keys(rows)
    assert found["worker_survived"] == "1 of 4" and found["worker_seconds_most"] == 9.0
    rows.append(fault_row("worker", 4, seconds_to_next_step=None))
    assert FAULTS.keys(rows)["worker_seconds_most"] == 9.0, (
        "all its steps were done when it was killed"
    )
    rows.append(fault_row("worker", 5, seconds_to_next_step=None, last_step=60))
    assert FAULTS.keys(rows)["worker_seconds_most"] == np.inf


def test_a_kind_that_nobody_survived_is_claimed_so():
    rows = [
        fault_row("unbroken"),
        fault_row("disk full", seconds_to_next_step=None, exit_code=1, last_step=7),
    ]
    rows.append(fault_row("link 5 s", seconds_to_next_step=0.0, steps_again=0))
    found = FAULTS.keys(rows)
    assert (found["disk_full_survived"], found["disk_full_seconds_most"]) == ("0 of 1", np.inf)
    assert (found["link_5_s_survived"], found["link_5_s_seconds_most"]) == ("1 of 1", 0.0)


# --- What is lost, from what was said


def lost_of(kind, steps, starts, died=(), began=10.0, ended=10.0):
    harm = FAULTS.Harm(kind, 0, None, None)
    harm.began, harm.ended, harm.during, harm.done = began, ended, "step", Future()
    said = [(float(when), step, 2.5) for when, step in steps]
    return FAULTS.lost(harm, said, list(starts), [{"time": when} for when in died])


def test_a_kill_costs_from_the_kill_to_the_first_step_of_the_next_start():
    steps = [(8, 11), (9, 12), (10.1, 13), (30, 11), (31, 12)]  # 13 was under way
    found = lost_of("worker", steps, starts=[0, 11], died=[10.2])
    assert found == {
        "seconds_to_next_step": pytest.approx(19.9),
        "steps_again": 3,
        "during": "step",
    }


def test_a_fault_that_nobody_died_of_costs_from_its_end():
    steps = [(8, 11), (9, 12), (14.9, 13), (15.5, 14)]
    found = lost_of("link 5 s", steps, starts=[0], ended=15.0)
    assert found == {"seconds_to_next_step": 0.5, "steps_again": 0, "during": "step"}


def test_a_fault_that_some_die_of_later_costs_from_the_last_step():
    steps = [(8, 20), (12, 29), (13, 30), (30, 11)]
    found = lost_of("disk errs", steps, starts=[0, 14], died=[13.5], ended=11.0)
    assert found == {"seconds_to_next_step": 17.0, "steps_again": 20, "during": "step"}
    # A link is back, the run goes on, and one dies of it later.
    found = lost_of("link 30 s", [(9, 20), (52, 21), (70, 21)], [0, 60], died=[59], ended=40.0)
    assert found == {"seconds_to_next_step": 12.0, "steps_again": 1, "during": "step"}
    # The fault outlasts those that die of it.
    found = lost_of("link 30 s", [(9, 20), (35, 11)], starts=[0, 34], died=[33], ended=40.0)
    assert found == {"seconds_to_next_step": 2.0, "steps_again": 10, "during": "step"}


def test_what_a_run_died_of_is_the_fatal_message_or_the_last_error_before():
    run = object.__new__(followed.Followed)
    run.lines = [
        "0 | step 1 2.5",
        "0 | OSError: [Errno 28]",
        "1 | OSError: checkpoint 2 was not written",
        "1 | ImportError: sys.meta_path is None, Python is likely shutting down",
    ]
    assert run.error() == ""
    run.lines += ["lioncub: worker 1 died with code 1", "0 | ValueError: later"]
    assert run.error() == "OSError: checkpoint 2 was not written"
    run.lines.insert(1, "0 | 2 | F1123 06:49:36.6 42 client.h:80] Terminating process because")
    assert run.error() == "Terminating process because"


def test_a_run_that_never_goes_on_has_no_next_step():
    found = lost_of("disk full", [(8, 20)], starts=[0, 14], died=[13.5, 20, 30], ended=13.6)
    assert found["seconds_to_next_step"] is None and found["steps_again"] is None


def test_what_is_drawn_for_a_save_is_a_save_and_the_rest_is_anywhere():
    drawn = {k: [FAULTS.Harm(k, n, None, None) for n in range(40)] for k in FAULTS.FAULTS}
    for kind, fault in FAULTS.FAULTS.items():
        ats = {harm.at for harm in drawn[kind]}
        assert all(0 < at < FAULTS.STEPS - 1 for at in ats) and len(ats) >= 5
        assert all(at % FAULTS.EVERY == 0 for at in ats) == fault.saving
        chosen = [harm.places for harm in drawn[kind]]
        assert all(len(places) == fault.places for places in chosen)
        assert {place for places in chosen for place in places} == set(
            fault.among if fault.places else ()
        )


# --- The picture


def test_steps_that_were_done_before_are_done_again():
    assert timeline.split(fault_row("worker")) == ([-1.5, -0.5, 10.5], [9.5])
    unbroken = fault_row("unbroken", fault=None, times=[[5.0, 1], [6.0, 2], [7.0, 3]])
    assert timeline.split(unbroken) == ([-1.0, 0.0, 1.0], [])


def test_the_typical_run_is_the_middle_one_of_those_with_times():
    rows = [
        fault_row("worker", n, seconds_to_next_step=x, last_step=99)
        for n, x in enumerate([9.0, None, 5.0])
    ]
    rows += [fault_row("worker", 3, times=None), fault_row("unbroken", seconds_to_next_step=None)]
    found = FAULTS.typical(rows)
    assert list(found) == ["nothing", "kill -9 of a worker"]
    assert found["kill -9 of a worker"]["run"] == 0


def test_a_picture_has_a_line_for_each_kind(tmp_path):
    rows = {"nothing": fault_row("unbroken", fault=None, died=[]), "a kill": fault_row("worker")}
    heights = []
    for names in (["nothing"], ["nothing", "a kill"]):
        timeline.draw({name: rows[name] for name in names}, tmp_path / "picture.png")
        heights.append(pyplot.imread(tmp_path / "picture.png").shape[0])
    assert heights[0] < heights[1]
    with pytest.raises(ValueError, match=r"no row has the times of its steps: run python bench"):
        timeline.draw({}, tmp_path / "picture.png")


# --- What is done, and what is left


def test_a_stopped_process_goes_on_when_it_is_over():
    process = subprocess.Popen(["sleep", "60"])
    seen = []

    def over():
        state = Path(f"/proc/{process.pid}/stat").read_text().split()[2]
        seen.append(state)
        return state == "T"

    try:
        inflict.stop([process.pid], over)
        assert "T" in seen
        inflict.kill([process.pid])
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_a_process_that_a_run_leaves_is_found_whoever_started_it():
    started = ["sh", "-c", "setsid sleep 60 > /dev/null & echo $!"]
    environment = os.environ | {followed.MARK: "a run of a test"}
    said = subprocess.run(started, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    pid = int(said.stdout)
    assert followed.marked("a run of a test") == [pid]
    assert followed.marked("another run") == []
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def disk(tmp_path):
    """A small file system, mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    try:
        lab.check()  # where root may make namespaces it may mount
    except lab.LabError as missing:
        pytest.skip(f"the lab cannot run here: {missing}")
    with inflict.disk_of(tmp_path):
        yield tmp_path
    assert followed.mounted_below(tmp_path) == []


SAYS_WHETHER_IT_IS_CONNECTED = """
while :; do
    if ip -o link show eth0 | grep -q NO-CARRIER; then echo down; else echo up; fi
    sleep 0.1
done
"""


def test_the_link_of_one_worker_of_a_lab_goes_down_and_up_again(disk):
    network = [*followed.CLI, "lab", "--workers", "2", "--timeout", "60s", "--"]
    run = [*network, "sh", "-c", SAYS_WHETHER_IT_IS_CONNECTED]
    with subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        said = (line.strip() for line in process.stdout)
        while next(said) != "1 | up":
            pass
        during = []

        def over():
            during.append(next(said))
            return during[-1] == "1 | down"

        inflict.unplug(process.pid, [1], over)
        while next(said) != "1 | up":
            pass
        process.terminate()
    assert during[-1] == "1 | down" and "0 | down" not in during


def test_a_full_disk_takes_no_byte_and_has_room_again(disk):
    assert followed.mounted_below(disk) == [str(disk)]
    (disk / "old").write_bytes(bytes(1 << 20))
    tried = []

    def over():
        if len(tried) == 1:
            (disk / "old").unlink()
        tried.append(os.statvfs(disk).f_bavail)
        return len(tried) > 1 and tried[-1] == 0

    inflict.fill(disk, over)
    assert tried[0] > 0 and tried[-1] == 0, "and what is deleted meanwhile is filled too"
    assert os.statvfs(disk).f_bavail > 0


def test_a_disk_becomes_read_only_between_two_files_and_writable_again(disk):
    errors = []

    def over():
        try:
            (disk / "new").write_text("")
        except OSError as error:
            errors.append(error.errno)
        return True

    inflict.forbid(disk, over)
    assert errors == [errno.EROFS]
    with (disk / "new").open("w"), pytest.raises(OSError, match="files open for writing for 0"):
        inflict.forbid(disk, over, patience=0)


# A worker that only counts, says and saves what the real one does, and needs no JAX.
COUNTS = """
import os, sys, time
from pathlib import Path
steps, every, folder = int(sys.argv[2]), int(sys.argv[4]), Path(sys.argv[8])
folder.mkdir(exist_ok=True)
first = os.environ["RANK"] == "0"
for step in range(max([0, *(int(x.name) for x in folder.glob("*0"))]) + 1, steps + 1):
    time.sleep(0.02)
    if first:
        print(f"step {step} {1 / step:.6f}", flush=True)
    if first and step % every == 0:
        print(f"save {step}", flush=True)
        half = folder / f"{step}.half"
        for _ in range(50):
            with half.open("ab") as file:
                file.write(bytes(1 << 14))
            time.sleep(0.01)
        half.rename(folder / str(step))
    while step % every == 0 and not (folder / str(step)).exists():
        time.sleep(0.01)
"""
ENDS = {  # starts, and whether steps are done again
    "unbroken": (1, False), "worker": (2, True), "saving": (2, True), "disk full": (2, True),
    "disk errs": (2, True), "link 5 s": (1, False),
}  # fmt: skip


QUICK = ("worker", "disk errs")


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in ENDS]
)
def test_a_run_is_harmed_once_and_goes_on_to_its_end(kind, disk, monkeypatch):
    (disk / "worker.py").write_text(COUNTS)
    monkeypatch.setattr(followed, "WORKER", disk / "worker.py")
    fault = FAULTS.FAULTS[kind]
    if fault.does != "fill":  # which ends with a death
        monkeypatch.setitem(FAULTS.FAULTS, kind, fault._replace(lasts=min(fault.lasts, 0.5)))
    row = FAULTS.harmed(kind, 0)
    starts, again = ENDS[kind]
    found = [row[name] for name in ("exit_code", "last_step", "left", "starts")]
    assert found == [0, FAULTS.STEPS, 0, starts], row
    assert [step for _, step in row["times"]][-1] == FAULTS.STEPS
    assert bool(row["steps_again"]) == again and len(row["died"]) == starts - 1
    if fault.does:
        began, ended = row["fault"]
        assert 0 < began <= ended and row["seconds_to_next_step"] > 0
        assert row["during"] == "save" or not fault.saving
    for name, error in {"disk full": "No space left", "disk errs": "Read-only file system"}.items():
        assert (error in row["said"]) == (kind == name)


# --- Bad inputs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "earthquake"], "invalid choice: 'earthquake'"),
        (["--kind", "worker", "--runs", "0"], "--runs 0: give a whole number of 1 or more"),
        (
            ["--kind", "disk full"],
            "'disk full': only root may; run as root, or name others by --kind",
        ),
    ],
)
def test_bad_arguments_are_refused(words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit):
        FAULTS.main([*words, "--save", str(tmp_path / "none.jsonl")])
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("module", [LIARS, FAULTS])
def test_there_is_nothing_to_sum_up(module, tmp_path, capsys):
    with pytest.raises(SystemExit):
        module.main(["--again", "--save", str(tmp_path / "none.jsonl")])
    assert "and there are none" in capsys.readouterr().err


@pytest.mark.parametrize("module", [LIARS, FAULTS])
def test_rows_of_another_study_are_refused(module, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"part": "main"}) + "\n")
    with pytest.raises(ValueError, match="line 1: no row of the study"):
        module.read(path)


# --- What the page says


DOCUMENT = ROOT / "docs" / "faults.md"


@pytest.mark.parametrize("module", [LIARS, FAULTS])
def test_the_tables_of_the_page_are_those_of_the_committed_rows(module):
    rows, document = module.read(module.ROWS), DOCUMENT.read_text()
    assert rows and module.documented(document, rows) == document, "run it with --again --report"


def test_a_table_needs_a_place():
    with pytest.raises(ValueError, match="there is no place <!-- faults -->"):
        FAULTS.documented("# A page", [])


def test_what_the_page_says_of_the_goals_is_so():
    rows = LIARS.read(LIARS.ROWS)
    flipped = {"base": "vote", "workers": 8, "attack": "flip", "liars": 3, "missing": 0.0}
    clean = np.mean(liars.ends(rows, **flipped | {"attack": "nobody", "liars": 0}))
    assert (
        f"the vote ends {liars.behind(rows, flipped) / clean:.0%}".replace("%", " %")
        in DOCUMENT.read_text()
    )
    # One loud liar of 8 ends means and not the default owner, three end that too, and not a vote.
    loud = {"workers": 8, "attack": "times -1e6", "missing": 0.0}

    def lost(base, count):
        return liars.behind(rows, loud | {"base": base, "liars": count})

    assert lost("mean", 1) > 100 and lost("mean", 3) > 100 and lost("owner", 3) > 100
    assert lost("owner", 1) < 0.3 and lost("owner, 1", 1) < 0.2 and lost("vote", 1) < 0.2
    assert lost("owner, 1", 3) < 1 and lost("vote", 3) < 1
    for told in (lost("owner", 1), lost("owner, 1", 1), lost("owner, 1", 3)):
        assert f"| **+{told:.3f}** |" in DOCUMENT.read_text()


def test_the_owner_that_is_attacked_is_the_default():
    assert liars.DOMINANCE["owner"] == signature(lc.owner_lion).parameters["dominance"].default
    rows = LIARS.read(LIARS.ROWS)
    bounds = [runs.numbers(liars.dominance(row["base"], row["workers"])) for row in rows]
    assert [row.get("dominance") for row in rows] == bounds
