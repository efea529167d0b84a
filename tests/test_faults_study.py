"""The benchmarks of faults: that a run is the study's but for that, and the sums."""

from concurrent.futures import Future

import faults
import liars as program
import numpy as np
import pytest
from study import liars, runs, tasks


def lie(**how):
    return liars.Lie("vote", 8, "nobody", 0, 0.0, 0)._replace(**how)


def test_a_run_is_the_studys_but_for_who_lies_is_missing_or_late():
    size = tasks.SIZES["tiny"]
    text = tasks.load("text", None, size)
    runner = liars.LiarsRunner(text, size.steps, size.text.batch, lambda method, split: 1e-2)

    def end(**how):
        return runner.run(lie(**how))["test"]["bits_per_byte"]

    clean, flipped, missing = end(), end(attack="flip", liars=3), end(missing=0.3)
    spec = runs.Spec("main", "text", "vote", 8, "iid", size.text.batch // 8, size.steps, 1e-2, 0)
    assert clean == runs.Runner(text).run(spec)["test"]["bits_per_byte"]
    assert clean == end(attack="flip") == end(attack="times 1e6", liars=3), "a vote is a sign"
    assert flipped == end(attack="times -1e6", liars=3) != clean
    assert clean not in (end(attack="NaN", liars=3), missing)
    assert end(missing=1.0) > 7.9, "nobody votes, so nothing is learned"
    assert len(runner._compiled) == 1
    assert end(late=0.3) != missing and end(late=1.0) < 7.9, "a step behind, and not lost"


def test_what_is_lost_is_a_mean_of_pairs_and_late_votes_are_not_missing():
    ends = [({}, 3.0), ({"seed": 1}, 3.2), ({"attack": "flip", "liars": 3}, 3.1),
            ({"attack": "flip", "liars": 3, "seed": 1}, 3.4), ({"missing": 0.3}, 3.5),
            ({"late": 0.3}, 3.25)]  # fmt: skip
    rows = [lie(**how)._asdict() | {"test": {"bits_per_byte": bits}} for how, bits in ends]
    del rows[0]["late"]  # those of before do not have it
    found = program.keys(rows)
    assert found == {
        "vote_3_flippers_of_8": 0.15, "vote_30_percent_missing": 0.5, "vote_30_percent_late": 0.25,
        "median_3_flippers_of_8": None, "mean_1_loud_of_8": None, "owner_1_loud_of_8": None,
    }  # fmt: skip
    rows[3]["test"]["bits_per_byte"] = None
    assert program.keys(rows)["vote_3_flippers_of_8"] == np.inf


# --- What is lost by faults


def fault_row(kind, **changes):
    return {"kind": kind, "exit_code": 0, "left": 0, "loss": 2.5, "last_step": 120, "steps": 120,
            "seconds_to_next_step": 9.0, "steps_again": 4} | changes  # fmt: skip


def test_a_run_that_ends_otherwise_has_not_survived():
    others = {"loss": 2.51}, {"left": 1}, {"exit_code": 1}, {"seconds_to_next_step": None}
    rows = [fault_row("unbroken"), fault_row("worker"), *(fault_row("worker", **x) for x in others)]
    found = faults.keys(rows)
    # The last had done all its steps when it was killed.
    assert found["worker_survived"] == "2 of 5" and found["worker_seconds_most"] == 9.0
    rows[-1]["last_step"] = 60
    assert faults.keys(rows)["worker_seconds_most"] == np.inf


@pytest.mark.parametrize(
    ("kind", "steps", "starts", "died", "ended", "seconds", "again"),
    [
        # From the kill to the first step of the next start; 13 was under way.
        ("worker", [(8, 11), (9, 12), (10.1, 13), (30, 11)], [0, 11], [10.2], 10.0, 19.9, 3),
        # A link is back, the run goes on, and one dies of it later.
        ("link 30 s", [(9, 20), (52, 21), (70, 21)], [0, 60], [59], 40.0, 12.0, 1),
    ],
)
def test_a_fault_costs_seconds_and_steps(kind, steps, starts, died, ended, seconds, again):
    harm = faults.Harm(kind, 0, None, None)
    harm.began, harm.ended, harm.during, harm.done = 10.0, ended, "step", Future()
    said = [(float(when), step, 2.5) for when, step in steps]
    found = faults.lost(harm, said, starts, [{"time": when} for when in died])
    wanted = {"seconds_to_next_step": seconds, "steps_again": again, "during": "step"}
    assert found == pytest.approx(wanted)
