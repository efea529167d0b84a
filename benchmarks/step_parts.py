"""Where the milliseconds of a step go: model, pack, the two collectives, the owner's share, unpack.

    python benchmarks/step_parts.py [--workers 4] [--rate 1gbit] [--method "1-bit vote"]

Real processes in the network lab, as in `step_time.py`, under XLA's profiler. Times are a worker's own,
with the time for which it waits for the others counted to the collective in which it waits; the mean over
workers. The profiler makes steps a little slower. A fused loop counts to the part of its last operation,
so blending gradient and momentum is in "pack".
"""

import json
import statistics
import tempfile
from pathlib import Path

import report
from race import session
from rich.console import Console
from rich.table import Table

from lioncub_jax import lab, units

PROGRAM = Path(__file__).parent / "race" / "profile_worker.py"
TRACED = {"XLA_FLAGS": "--xla_cpu_enable_xprof_traceme=true"}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--method", default="1-bit vote")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    spent = measured(args)
    table = Table("part", "ms a step", title=f"{args.method}, {args.workers} workers, {args.rate}")
    for part, ms in spent.items():
        table.add_row(part, f"{ms:.2f}")
    Console().print(table)
    summary = {
        "benchmark": "step_parts", "method": args.method, "workers": args.workers,
        "rate": args.rate, "steps": args.steps, "milliseconds": spent,
    }  # fmt: skip
    report.finish(summary, args.save)


def measured(args) -> dict[str, float]:
    """Milliseconds by part, the longest first."""
    with tempfile.TemporaryDirectory() as folder:
        network = lab.Network(args.workers, units.rate(args.rate))
        options = ["--method", args.method, "--steps", str(args.steps)]
        session.hold(PROGRAM, network, folder, *options, environment=TRACED)
        each = [json.loads(path.read_text()) for path in Path(folder).glob("worker*.json")]
    means = {part: statistics.mean(one.get(part, 0.0) for one in each) for part in each[0]}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    main()
