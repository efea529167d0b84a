"""What the study says of its rows: statistics against numpy, and committed tables and figures."""

from pathlib import Path

import convergence
import faults
import liars
import numpy as np
import pytest
from report import read
from study import tables
from study.runs import key_of

DOCS = Path(convergence.__file__).parents[1] / "docs"
LION = {0: 0.80, 1: 0.84, 2: 0.82, 3: 0.90}


def runs(method, values, **given):
    """Rows of a method by seeds, in which as little is said as a report needs."""
    same = {
        "part": "main", "task": "images", "method": method, "workers": 8, "split": "iid", "batch": 8,
        "steps": 800, "rate": 0.001, "bits_per_parameter": 8.0, "sent_bytes": 8e5, "syncs": 0,
        "compiling": 1.0, "seconds": 7.4,
    } | given  # fmt: skip
    metric = tables.METRICS[same["task"]][0]
    return [same | {"seed": seed, "test": {metric: value}} for seed, value in values.items()]


# --- Statistics


def test_means_are_numpys_and_differences_are_of_pairs_with_equal_seeds():
    ours = {2: 0.81, 0: 0.83, 7: 0.99, 1: 0.80, 3: None}  # 7 has no partner
    found = tables.difference(runs("vote", ours), runs("lion", LION))
    pairs = [ours[s] - LION[s] for s in (0, 1, 2)]
    # Up to the rounding of a few additions in another order.
    moments = pytest.approx((np.mean(pairs), np.std(pairs, ddof=1)), rel=1e-12, abs=1e-15)
    assert (found.mean, found.std) == moments and (found.n, found.diverged) == (3, 1)
    assert tables.mean([0.5]) == (0.5, None, 1, 0)
    assert tables.mean([None]) == (None, None, 0, 1)


def test_rows_that_cannot_be_compared_are_refused():
    rows, other = runs("lion", LION), {"size": 1, "dataset": 1, "parameters": 1, "steps": 1}
    for change in [{}, *({field: value} for field, value in other.items())]:
        said = f"more than one {min(change)}" if change else "two rows of one run"
        with pytest.raises(ValueError, match=said):
            tables.checked(rows + runs("lion", {0: 0.8}, rate=2.0, **change))


# --- What is committed


def test_committed_tables_are_those_of_the_committed_rows():
    """If not: convergence.py --report and --evidence, faults.py and liars.py --again --report."""
    rows, document = read(convergence.ROWS, key_of), convergence.DOCUMENT.read_text()
    assert tables.rewritten(document, rows, convergence.ROWS.parent) == document
    page = (DOCS / "faults.md").read_text()
    for module in (faults, liars):
        assert module.documented(page, module.read(module.ROWS)) == page
    assert convergence.EVIDENCE.read_text() == convergence.evidence_of(rows)
