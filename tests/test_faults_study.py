"""The benchmarks of faults and liars: their sums; and committed tables."""

import ahead_of_time
import faults
import liars
import numpy as np
import pytest
import report
from oracle import coding

# --- What is committed


@pytest.mark.parametrize("module", [faults, liars, ahead_of_time])
def test_a_committed_table_is_that_of_the_committed_rows(module):
    """If not: run the module, which writes it."""
    page = module.DOCUMENT.read_text()
    assert module.documented(page, report.read(module.ROWS)) == page


def test_a_liar_replaces_what_it_encodes(monkeypatch):
    monkeypatch.setattr(liars, "STEPS", 3)
    clean = liars.outcome("lion_cub", "sign flip", 0, 0)
    assert clean == liars.outcome("lion_cub", "labels", 0, 0)
    assert clean != liars.outcome("lion_cub", "sign flip", 3, 0)
    codes = liars.lying(coding.midrise(3), "largest codes", 2)
    x = np.full((liars.WORKERS, 1, 128), 0.1, np.float32)
    level, _ = codes.encode(x, coding.buffer_of(x[:, 0]), 0)
    assert (level[:2] == -3.5).all() and (level[2:] > 0).all()


# --- What is lost by faults


def fault_row(kind, **changes):
    return {"kind": kind, "exit_code": 0, "left": 0, "loss": 2.5, "last_step": 120, "steps": 120,
            "seconds_to_next_step": 9.0, "steps_again": 4} | changes  # fmt: skip


def test_a_run_that_ends_otherwise_has_not_survived():
    others = {"loss": 2.51}, {"left": 1}, {"exit_code": 1}, {"seconds_to_next_step": None}
    rows = [fault_row("unbroken"), fault_row("worker"), *(fault_row("worker", **x) for x in others)]
    # The last had done all its steps when it was killed.
    assert faults.lines_of(rows)[1][1:6] == ["5", "", "2", "9.0", "9.0"]
    rows[-1]["last_step"] = 60
    assert faults.lines_of(rows)[1][5] == "inf"


def test_a_fault_costs_seconds_and_steps():
    """From the kill to the first step of the next start; 13 was under way."""
    said = [(float(when), step, 2.5) for when, step in [(8, 11), (9, 12), (10.1, 13), (30, 11)]]
    found = faults.lost(10.0, said, [0.0, 11.0], [10.2])
    assert found == {"seconds_to_next_step": pytest.approx(19.9), "steps_again": 3}
