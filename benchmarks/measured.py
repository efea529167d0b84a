"""How well `lioncub plan --measured` predicts the time of a step: by real processes, in the network lab.

    python benchmarks/measured.py     # on an idle machine

The workers probe their links with the step of float32 AdamW, by `lioncub probe --step`, and then time the
steps of all methods in turns. The last line has the errors, of which the goal is 1.15 times. `python
benchmarks/convergence.py --report` writes the page from the rows.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from goal import curves, lab, published
from goal.trainer import TOKENS

from lioncub_jax.tools import plan as planner

ROWS = Path(__file__).parent / "results" / "measured.jsonl"
WORKERS, RATES = 2, ("100mbit", "1gbit")
STEP = "goal.trainer:adamw_step"  # that is probed
METHODS = ["adamw", "vote", "owner-lion", "owner-adamw", "powersgd-16"]


def main() -> None:
    args = report.parser(__doc__, ROWS).parse_args()
    rows = [row for rate in RATES for row in compared(rate)]
    report.append(args.save, [row | report.provenance() for row in rows])
    print(json.dumps({"benchmark": "measured", "errors": published.factors(rows), "rows": rows}))


def compared(rate: str) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    measured = probed(rate)
    at = planner.Cluster(WORKERS, planner.Link(math.inf, kind="exact"), measured=measured)
    plan = planner.plan(curves.size(), at, measured.compute, tokens=TOKENS)
    for row in lab.timed(lab.entries(METHODS, TOKENS), "jax", rate, WORKERS):
        name = row["contender"]
        overlap = measured.overlap * (name == "adamw")
        yield {
            "rate": rate, "workers": WORKERS, "method": name,
            "predicted": plan.rows[name].step(plan.compute, 1.0, overlap),
            "seconds": row["seconds"],
        }  # fmt: skip


def probed(rate: str) -> planner.Measured:
    """What the command says of the links, with the step of float32 AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "probe.json"
        command = ["-m", "lioncub_jax", "probe", "--distributed", "--step", STEP, "--out", str(out)]
        lab.run(command, rate, WORKERS)
        return planner.Measured(**json.loads(out.read_text()))


if __name__ == "__main__":
    main()
