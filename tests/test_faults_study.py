"""The benchmark of liars; and committed tables."""

import ahead_of_time
import launchers
import liars
import numpy as np
import pytest
import report
import trainers
from oracle import coding

# --- What is committed


@pytest.mark.parametrize("module", [liars, ahead_of_time, launchers, trainers])
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
