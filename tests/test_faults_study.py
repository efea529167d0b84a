"""The benchmarks of faults: who lies in which run, that a run is the study's but for that, and the sums."""

import importlib.util
import json
import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from study import liars, runs, tasks

import lioncub_jax as lc

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
    return liars.LiarsRunner(
        task, size.steps, size.text.batch, dict.fromkeys(liars.BASES.values(), rate)
    )


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


def test_every_case_is_planned_once_and_liars_are_fewer_than_half():
    planned = liars.planned((8, 16, 32))
    assert len(planned) == len(set(planned))
    assert all(2 * one.liars < one.workers for one in planned)
    assert {one.base for one in planned} == set(liars.BASES)
    assert {one.attack for one in planned} == set(liars.ATTACKS)
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


def fault_row(kind, run=0, **changes):
    whole = {"exit_code": 0, "left": 0, "loss": 2.5, "last_step": 120, "seconds_to_next_step": 9.0}
    return {"kind": kind, "run": run, **whole, "steps_again": 4, **changes}


def test_a_run_that_ends_otherwise_has_not_survived():
    rows = [fault_row("unbroken"), fault_row("worker"), fault_row("worker", 1, loss=2.51)]
    rows += [fault_row("worker", 2, left=1), fault_row("worker", 3, exit_code=1)]
    found = FAULTS.keys(rows)
    assert found["worker_survived"] == "1 of 4" and found["worker_seconds_most"] == 9.0
    rows.append(fault_row("worker", 4, seconds_to_next_step=None))
    assert FAULTS.keys(rows)["worker_seconds_most"] == np.inf


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
    assert all(row["dominance"] == liars.DOMINANCE[row["base"]]
               for row in rows if row["base"] in liars.DOMINANCE)  # fmt: skip
