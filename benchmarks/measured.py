"""How well `lioncub plan --measured` predicts the time of a step: by real processes, in the network lab.

    python benchmarks/measured.py [--rates 100mbit 1gbit] [--workers 2]     # on an idle machine

The workers probe their links with the step of float32 AdamW, as `lioncub probe --step` does, and then time
the steps of all methods in turns. The last line has the errors, of which the goal is 1.15 times. `python
benchmarks/convergence.py --report` writes the page from the rows.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
import report
from goal import curves, published, turns
from goal.model import CONTEXT
from goal.trainer import mesh_of
from goal.worker import largest
from gpt import corpus
from gpt.model import next_byte_loss

import lioncub_jax as lc
from lioncub_jax import baselines
from lioncub_jax.audit import units
from lioncub_jax.tools import lab, probe
from lioncub_jax.tools import plan as planner

ROWS = Path(__file__).parent / "results" / "measured.jsonl"
TOKENS = 256
TURNS, SECONDS = 5, 0.7  # of each method; of one of its turns, about
METHODS: dict[str, Callable[[lc.Workers], optax.GradientTransformation]] = {
    "adamw": lambda w: lc.global_gradients(optax.adamw(1e-3), workers=w),
    "vote": lambda w: lc.lion_cub(1e-4, workers=w),
    "owner-lion": lambda w: lc.owner_lion(1e-4, workers=w),
    "owner-adamw": lambda w: lc.owner_adamw(1e-3, workers=w),
    "powersgd-16": lambda w: baselines.powersgd(optax.adamw(1e-3), 16, workers=w),
}


def main(argv: list[str] | None = None) -> None:
    parser = report.rows_parser(__doc__, ROWS)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="of the links")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        work(args.worker)
        return
    rows = [row for rate in args.rates for row in compared(rate, args.workers)]
    report.append(args.save, [row | report.provenance() for row in rows])
    print(json.dumps({"benchmark": "measured", "errors": published.factors(rows), "rows": rows}))


def compared(rate: str, workers: int) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    with tempfile.TemporaryDirectory() as folder:
        out, lines = Path(folder) / "out.json", []
        command = [sys.executable, __file__, "--worker", str(out)]
        done = lab.run(lab.Network(workers, units.rate(rate)), command, write=lines.append)
        if done.exit_code:
            sys.exit("\n".join([*lines, f"a worker failed: {done.exit_code}"]))
        found = json.loads(out.read_text())
    measured = planner.Measured(**found["measured"])
    at = planner.Cluster(workers, planner.Link(math.inf, kind="exact"), measured=measured)
    for name, seconds in found["seconds"].items():
        plan = planner.plan(curves.shapes(), at, measured.compute, tokens=TOKENS)
        row = plan.rows[name]
        predicted = row.estimate.step(plan.compute, 1.0, plan.corners()[0][1] * (name == "adamw"))
        yield {
            "rate": rate, "workers": workers, "method": name, "predicted": predicted,
            "seconds": seconds,
        }  # fmt: skip


def work(out: Path) -> None:
    """A worker: the probe, then all methods in turns."""
    jax.distributed.initialize()
    mesh = mesh_of(jax.devices())
    workers = lc.Workers(mesh, "data")
    measured = probe.probe(workers, partial(training, METHODS["adamw"]))
    racing = {name: stepping(*training(tx, workers)) for name, tx in METHODS.items()}
    most = largest(mesh)
    blocks = turns.take_turns(racing, most, turns=TURNS, seconds=SECONDS)
    seconds = {
        name: most(
            statistics.median(block["seconds"] for block in blocks if block["method"] == name)
        )
        for name in METHODS
    }
    if jax.process_index() == 0:
        out.write_text(json.dumps({"measured": measured._asdict(), "seconds": seconds}))


def training(tx_of: Callable[..., Any], workers: lc.Workers) -> tuple[Any, lc.StepState, jax.Array]:
    """A step, its first state and a batch of this process."""
    loss, params, model_state = lc.from_nnx(curves.model_of(0), next_byte_loss)
    tx = tx_of(workers)
    state = lc.init_state(tx, params, workers, model_state=model_state)
    mine = sum(device.process_index == jax.process_index() for device in workers.mesh.devices.flat)
    text = corpus.standard_library().train
    batch = corpus.draw(text, mine * TOKENS // CONTEXT, CONTEXT, (0, 0))
    return lc.make_train_step(loss, tx, workers), state, batch


def stepping(step: Any, state: Any, batch: Any) -> Callable[[], None]:
    """One step more at each call."""

    def one() -> None:
        nonlocal state
        state, _ = step(state, batch)
        jax.block_until_ready(state)

    return one


if __name__ == "__main__":
    main()
