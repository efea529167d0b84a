"""Step time on a shaped network: votes against float32 and bfloat16 Lion, and against PyTorch.

    python benchmarks/step_time.py [--torch] [--workers 4 2] [--rates unshaped 1gbit 100mbit]

A GPT of 7.3 million parameters, 2 windows of 64 bytes for each worker, trained by real processes in
the network lab (`lioncub lab`), one worker in each network namespace. In a session all methods take
turns, in blocks of steps between barriers; a turn is as long as its slowest worker took. Beside the
time stand the bytes by the worker's interface (headers and acknowledgements included), by the compiled
program, and by the prediction. "no communication" is jitted optax.lion on every worker at once, with
no exchange: the cores are shared as in all other methods. What the planner says is calibrated on the
unshaped session alone.

``--torch`` adds DistributedDataParallel, its fp16 hook and PowerSGD (pip install -r
requirements/peers.txt). Frameworks are compared by the ratio to their own step without communication.
"""

import functools
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import report
from flax import nnx
from gpt.model import GPT
from race import results
from race.model import MODEL
from race.results import Result
from race.session import hold
from rich.console import Console
from rich.table import Table

from lioncub_jax import lab, planner, units
from lioncub_jax.planner import report as planner_report
from lioncub_jax.planner.model import FLOAT32, SILENT, Cluster, Host, Link

RACE = Path(__file__).parent / "race"
UNSHAPED = "unshaped"
VOTE, OWNER = "1-bit vote", "owner, 3 bits"
DENSE, ALONE = FLOAT32.name, SILENT.name
Session = dict[str, Result]
Key = tuple[str, int, str]  # framework, workers, rate


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--rates", nargs="+", default=[UNSHAPED, "1gbit", "100mbit"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a block, about")
    parser.add_argument("--torch", action="store_true", help="PyTorch too")
    parser.add_argument("--again", type=Path, help="sum up the rows of this file, measure nothing")
    parser.add_argument("--figures", type=Path, help="a folder for step_time_4.png and so on")
    args = parser.parse_args()
    if UNSHAPED not in args.rates:
        parser.error(
            f"--rates {' '.join(args.rates)}: {UNSHAPED} must be one, to calibrate the planner"
        )
    if args.again:
        sessions = measured_before(args.again, args.rates)
        args.turns = None  # those of the rows are in their own summaries
    else:
        sessions = measured(args)
    args.workers = list(dict.fromkeys(workers for _, workers, _ in sessions))
    summary = summarized(sessions, args)
    report.finish({"benchmark": "step_time", **summary}, args.save)


def measured(args: Any) -> dict[Key, Session]:
    """All sessions, one after the other."""
    frameworks = ["jax", "torch"] if args.torch else ["jax"]
    sessions: dict[Key, Session] = {}
    with tempfile.TemporaryDirectory() as cache:
        for key in itertools.product(frameworks, args.workers, args.rates):
            sessions[key] = held(*key, args, cache)
            show(key, sessions[key])
    return sessions


def measured_before(path: Path, rates: list[str]) -> dict[Key, Session]:
    """The sessions at these rates in a file of results."""
    sessions: dict[Key, Session] = {}
    names = {None if rate == UNSHAPED else units.rate(rate): rate for rate in rates}
    for line in path.read_text().splitlines():
        for one in (Result(*row) for row in json.loads(line)["rows"]):
            if one.rate in names:
                key = one.framework, one.workers, names[one.rate]
                sessions.setdefault(key, {})[one.method] = one
    for key, found in sessions.items():
        show(key, found)
    return sessions


def show(key: Key, found: Session) -> None:
    Console(width=130).print(table(found, "{}, {} workers, {}".format(*key)))


def held(framework: str, workers: int, rate: str, args: Any, cache: str) -> Session:
    """One session in the lab; the output of a worker that fails is shown."""
    # The programs are the same at every rate.
    environment = {"JAX_COMPILATION_CACHE_DIR": cache}
    bits = None if rate == UNSHAPED else units.rate(rate)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--turns", str(args.turns), "--seconds", str(args.seconds)]
        network, program = lab.Network(workers, bits), RACE / f"{framework}_worker.py"
        hold(program, network, folder, *options, environment=environment)
        return results.read(Path(folder), framework, workers, bits)


def table(found: Session, title: str) -> Table:
    """A session for people, the fastest method first."""
    out = Table(title=title)
    for column in ("method", "ms a step", "min", "max", "x own no communication"):
        out.add_column(column, justify="left" if column == "method" else "right")
    for column in ("interface", "compiled", "predicted"):
        out.add_column(column, justify="right")
    for one in sorted(found.values(), key=lambda one: one.seconds):
        times = [f"{1e3 * x:.1f}" for x in (one.seconds, one.fastest, one.slowest)]
        sent = one.interface_bytes, one.compiled_bytes, one.predicted_bytes
        texts = ["" if x is None else units.bytes_text(x) for x in sent]
        ratio = f"{one.seconds / found[ALONE].seconds:.2f}"
        out.add_row(one.method, *times, ratio, *texts)
    return out


def summarized(sessions: dict[Key, Session], args: Any) -> dict[str, Any]:
    """The benchmark's figures, and all rows."""
    of = {workers: of_workers(sessions, workers, args) for workers in args.workers}
    return {
        "workers": args.workers[0],
        "parameters": planner.parameters_in(shapes()),
        "turns": args.turns,
        **of.pop(args.workers[0]),
        "others": {str(workers): found for workers, found in of.items()},
        "columns": list(Result._fields),
        "rows": [list(one) for found in sessions.values() for one in found.values()],
    }


def of_workers(sessions: dict[Key, Session], workers: int, args: Any) -> dict[str, Any]:
    """What was gained and lost by the 1-bit vote, and by momentum at the owner."""
    ours = {rate: sessions["jax", workers, rate] for rate in args.rates}
    host, compute, cluster = calibration(ours[UNSHAPED], workers)
    errors, rankings = {}, {}
    for rate in args.rates:
        peers = sessions.get(("torch", workers, rate), {})
        rankings[rate] = ranking(ours[rate], peers)
        if rate != UNSHAPED:
            at = cluster.at(units.rate(rate))
            errors[rate] = {
                name: predicted(name, at, compute, host) / one.seconds - 1
                for name, one in ours[rate].items()
            }
    worst = max(abs(error) for of in errors.values() for error in of.values())
    if args.figures:
        draw(args.figures, ours, workers, (host, compute, cluster))
    return {
        **gains(ours, VOTE),
        "owner_3bit": gains(ours, OWNER),
        "planner_worst_error": worst,
        "planner_errors": errors,
        "ranking": rankings,
    }


def gains(ours: dict[str, Session], name: str) -> dict[str, float]:
    """One method's step over the step without communication, and under float32 Lion's."""
    found = {}
    for rate, session in ours.items():
        if rate != UNSHAPED:
            step = session[name].seconds
            found[f"overhead_{rate}"] = step / session[ALONE].seconds
            found[f"speedup_vs_lion_{rate}"] = session[DENSE].seconds / step
    one = max((of[name] for of in ours.values()), key=lambda one: one.interface_bytes)
    return found | {"nic_vs_predicted": one.interface_bytes / one.predicted_bytes}


def calibration(unshaped: Session, workers: int) -> tuple[Host, float, Cluster]:
    """What the planner knows of the machine: one step of each method where the network is free."""
    cluster, compute = (
        Cluster(workers, Link(math.inf, 0.0), one_way_pairs=True),
        unshaped[ALONE].seconds,
    )
    measured = {name: one.seconds for name, one in unshaped.items()}
    wide = Host(widens_bfloat16=True)
    return planner.calibrated(measured, shapes(), cluster, compute, wide), compute, cluster


def predicted(name: str, cluster: Cluster, compute: float, host: Host) -> float:
    scheme = planner.scheme_named(name)
    return planner.step_time(scheme, shapes(), cluster, compute, host).step


@functools.cache
def shapes() -> Any:
    """The model's parameters."""
    model = nnx.eval_shape(lambda: GPT(**MODEL, rngs=nnx.Rngs(0)))
    return nnx.state(model, nnx.Param)


def ranking(ours: Session, peers: Session) -> list[list[Any]]:
    """Every method by its step over its own framework's step without communication."""
    rows = [
        [f"{one.framework}: {one.method}", one.seconds / found[ALONE].seconds]
        for found in (ours, peers)
        for one in found.values()
        if one.method != ALONE
    ]
    return sorted(rows, key=lambda row: row[1])


def draw(folder: Path, ours: dict[str, Session], workers: int, known: Any) -> None:
    """Measured points on the planner's curves."""
    host, compute, cluster = known
    points: dict[str, list[tuple[float, float]]] = {}
    for rate, session in ours.items():
        if rate != UNSHAPED:
            for name, one in session.items():
                points.setdefault(name, []).append((units.rate(rate), one.seconds))
    drawn = planner_report.DRAWN
    planner_report.plot(
        folder / f"step_time_{workers}.png", shapes(), cluster, compute, host,
        rates=[10 ** (7 + n / 12) for n in range(37)],
        schemes=drawn,
        measured={name: points[name] for name in drawn},
        title=f"{planner.parameters_in(shapes()):,} parameters, {workers} workers sharing 2 cores",
    )  # fmt: skip


if __name__ == "__main__":
    main()
