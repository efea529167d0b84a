"""Time to loss: the hours that a user buys, and not bits or milliseconds. Who is first at the goal?

    python benchmarks/time_to_loss.py [--torch]     # times steps in the network lab
    python benchmarks/time_to_loss.py --again       # sums up the committed rows, measures nothing

Time to the loss is steps times milliseconds. The steps are those of curves of 256 steps in the same file
of rows; the goal is where the better of float32 Lion and AdamW stands after 80 % of its run. The
milliseconds are those of the real training step of four workers, in the lab at each rate, all in turns.

``--torch`` times DistributedDataParallel with AdamW, a bfloat16 hook and PowerSGD (pip install -r
requirements/peers.txt), which take the steps of the same method in JAX.
"""

import itertools
import json
from pathlib import Path

import report
from goal import curves, evidence, lab, pages
from goal.contenders import CONTENDERS
from goal.model import TOKENS

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "time_to_loss.jsonl"


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__, ROWS)
    parser.add_argument("--torch", action="store_true", help="time those of PyTorch, too")
    parser.add_argument("--again", action="store_true", help="measure nothing: sum up the rows")
    args = parser.parse_args(argv)
    try:
        report.read(args.save, curves.key_of)
    except ValueError as error:
        parser.error(str(error))
    if not args.again:
        names = {"jax": [*CONTENDERS, lab.NOTHING], "torch": [*lab.TORCH] if args.torch else []}
        run_times(args.save, names)
    rows = report.read(args.save, curves.key_of)
    print(json.dumps({"benchmark": "time_to_loss", **pages.keys(evidence.evidence(rows))}))


def run_times(save: Path, names: dict[str, list[str]]) -> None:
    """Times every stage of the contenders of each framework, with each noise at each rate."""
    for tokens, rate, framework in itertools.product(TOKENS, lab.RATES, names):
        entries = lab.entries(names[framework], tokens)
        for row in lab.timed(entries, framework, rate) if entries else ():
            report.append(save, [row | report.provenance()])


if __name__ == "__main__":
    main()
