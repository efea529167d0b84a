"""The benchmarks of faults: that a run is one without but for that, the sums, and the committed tables."""

from concurrent.futures import Future

import faults
import jax
import liars as program
import numpy as np
import pytest
from harm import liars, simulated

TINY = simulated.Size(1, 1, 8, 2, context=8, batch=32, steps=20)


def lie(**how):
    return liars.Lie("vote", 8, "nobody", 0, 0.0, 0)._replace(**how)


def test_a_run_is_one_without_harm_but_for_who_lies_is_missing_or_late():
    text = simulated.load(None, TINY)
    runner, data = liars.Runner(text, TINY), simulated.data_of(text, TINY.context)

    def end(**how):
        return runner.run(lie(**how))["test"]["bits_per_byte"]

    clean, flipped, missing = end(), end(attack="flip", liars=3), end(missing=0.3)
    table = simulated.shared_out("iid", (text.train.size - 1) // TINY.context, 8, 0)
    unharmed = jax.jit(simulated.program(TINY, liars.method_of("vote", 8), 8))
    assert clean == liars.number(unharmed(data, *table, liars.RATE, 0)[1])
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


def test_of_each_text_of_a_folder_the_end_validates(tmp_path):
    texts = {"b.txt": b"abcdefghij" * 2 + b"klmno", "a.md": b"0123456789" * 3, "n.py": b"x = 1"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    found = simulated.load(tmp_path, TINY._replace(context=2))
    assert bytes(found.train) == texts["a.md"][:27] + b"\n" + texts["b.txt"][:23]
    assert bytes(found.validation) == b"789\nno"


@pytest.mark.parametrize("split", program.SPLITS)
def test_each_example_is_one_workers_and_none_has_two_more_than_another(split):
    table, lengths = simulated.shared_out(split, 14, 4, seed=0)
    parts = [row[:n] for row, n in zip(table, lengths, strict=True)]
    assert lengths.tolist() == [4, 4, 3, 3]
    assert sorted(np.concatenate(parts)) == [*range(14)]
    assert (split == "class") == all(np.all(np.diff(part) == 1) for part in parts)
    np.testing.assert_array_equal(table, [np.resize(part, 4) for part in parts])


# --- What is committed


@pytest.mark.parametrize("module", [faults, program])
def test_committed_tables_are_those_of_the_committed_rows(module):
    """If not: faults.py and liars.py --again --report."""
    page = module.DOCUMENT.read_text()
    assert module.documented(page, module.read(module.ROWS)) == page


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
