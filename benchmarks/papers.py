"""Both papers' tables, reduced: a small vision transformer, 4 to 32 simulated workers, Fashion-MNIST.

    python benchmarks/papers.py --images FOLDER          # Fashion-MNIST, from IDX files in a folder
    python benchmarks/papers.py --data digits            # the digits of scikit-learn, which need no files
    python benchmarks/papers.py --left                   # says what there is to run, and runs nothing
    python benchmarks/papers.py --report                 # makes docs/reports/papers.md from the rows

One process, one core. Rows are written as they come, and no run is made twice.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import report
from goal import tuning
from goal.contenders import ADAM, LION, Family, Hyper, adam, lion
from goal.curves import hyper_of
from goal.images import EPOCHS, Run, init, key_of, runner
from goal.runner import use_one_thread
from goal.vision import Tables
from oracle import baselines, coding, sync
from oracle import dgc as reference_dgc
from oracle import lion as reference
from oracle.coding import Codes
from oracle.lion import Simulator

import lioncub_jax as lc

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "papers.jsonl"
PAGE = ROOT / "docs" / "reports" / "papers.md"
LEARNT = PAGE.with_name("learnt.md")
WORKERS, MANY, MIDDLE = (4, 8, 16), 32, 8
SEEDS, TRIES, CORE_SECONDS = (0, 1), 6, 25.0
FACTORS = 1.0, 0.5, 2.0  # of the rate of the method that a variant is made of
SGD = Family(0.1, (0.9, 0.0), (0.95, 0.0), (5e-4, 5e-3))
SIGN = Family(5e-4, (0.9, 0.0), (0.99, 0.0))
NO_MOMENTUM = SIGN._replace(betas=(0.0, 0.0), long=(0.0, 0.0))


class Method(NamedTuple):
    """A method of a table.

    Attributes:
      says: its name on the page.
      family: where tuning begins.
      direction: ``Hyper -> Simulator``, without rate and decay.
      paper: its accuracy there with 4, 8 and 16 workers, in percent.
      like: of which method it is a variant, whose choice is tried at three rates; itself tuned if none.
    """

    says: str
    family: Family
    direction: Callable[[Hyper], Simulator]
    paper: tuple[float, ...] = ()
    like: str = ""


def local(codes: Codes | None = None, decide: Any = None) -> Callable[[Hyper], Simulator]:
    """Lion of each worker's own momentum, which it sends in codes."""
    return lambda h: reference.local_momentum(h.b1, h.b2, codes=codes, decide=decide)


def synced(schedule: Any, layers: str = "") -> Callable[[Hyper], Simulator]:
    """A majority vote whose momenta are averaged at times, of layers whose names begin so."""

    def direction(h: Hyper) -> Simulator:
        where = {
            name: jax.tree.map(lambda _, name=name: name.startswith(layers), layer)
            for name, layer in jax.eval_shape(lambda: init(jax.random.key(0), 1)).items()
        }
        return sync.synced(reference.local_momentum(h.b1, h.b2), schedule.due, where)

    return direction


def largest(p: int) -> Codes:
    """Lion Cub's codes with the largest magnitude of a leaf in place of the mean: "L-infinity"."""
    integers = coding.integer(p)

    def encode(x: jax.Array, buffer: Any, t: Any) -> tuple[jax.Array, jax.Array]:
        scales = [
            jnp.broadcast_to(
                jnp.max(jnp.abs(part), axis=(1, 2), keepdims=True), (*part.shape[:2], 1)
            )
            for _, part in buffer.cut(x)
        ]
        scale, most = jnp.concatenate(scales, axis=1), integers.most(len(x))
        return jnp.round(coding.quotient(x, scale) * most), scale

    return integers._replace(encode=encode)


def at_owner(direction: Any, reply: int | None) -> Callable[[Hyper], Simulator]:
    """A direction at the owner of codes of 3 bits with feedback."""
    codes = coding.error_feedback(coding.midrise(3))
    return lambda h: reference.at_owner(direction(h), codes, reply)


# (a) Distributed Lion's table.
METHODS = {
    "adamw": Method("AdamW", ADAM, lambda h: baselines.averaged(adam(h))),
    "lion": Method("Lion", LION, lambda h: baselines.averaged(lion(h))),
    "mavo": Method("D-Lion MaVo: `lion_cub`", LION, local(), (90.9, 89.6, 88.9)),
    "avg": Method(
        "D-Lion Avg", LION, local(decide=reference.average), (90.5, 87.9, 87.9)
    ),
    "signum": Method(
        "SIGNUM", SIGN, lambda h: reference.local_momentum(h.b1, h.b1), (88.3, 87.2, 85.5)
    ),
    "signsgd": Method("signSGD", NO_MOMENTUM, lambda h: reference.local_momentum(0.0, 0.0)),
    "sgd": Method(
        "SGD with momentum", SGD, lambda h: baselines.averaged(optax.trace(h.b1)), (79.3, 81.8, 82.5)
    ),
    "terngrad": Method("TernGrad", SGD, lambda h: baselines.terngrad(momentum=h.b1)),
    "dgc": Method(
        "DGC, 4 % of values", SGD, lambda h: reference_dgc.dgc(momentum=h.b1, density=0.04)
    ),
    "qsgd": Method("QSGD, 4 bits", SGD, lambda h: baselines.qsgd(4, momentum=h.b1)),
}  # fmt: skip


def variant(says: str, direction: Callable[[Hyper], Simulator], like: str = "mavo") -> Method:
    return METHODS[like]._replace(says=says, direction=direction, paper=(), like=like)


# (b) Lion Cub's questions: codes, syncs; and shards of classes, for which `APART` has more.
CODES = {
    **{f"l1-{p}": variant(f"L1, {p} bits", local(coding.integer(p))) for p in (4, 8)},
    **{f"largest-{p}": variant(f"L-infinity, {p} bits", local(largest(p))) for p in (4, 8)},
    **{
        f"midrise-{p}": variant(f"a scale a row, {p} bits up", local(coding.midrise(p)))
        for p in (2, 4, 8)
    },
}  # fmt: skip
SYNCS = {
    "every-10": variant("every 10 steps", synced(lc.sync.every(10))),
    "every-100": variant("every 100 steps", synced(lc.sync.every(100))),
    "first-100": variant("each of the first 100 steps", synced(lc.sync.first(100))),
    "thinning-2": variant("ever more rarely, `thinning(2)`", synced(lc.sync.thinning(2))),
    "every-10-attention": variant("every 10, attention only", synced(lc.sync.every(10), "attention")),
    "every-10-mlp": variant("every 10, MLPs only", synced(lc.sync.every(10), "mlp")),
}  # fmt: skip
OWNERS = {
    "owner-lion": variant("`owner_lion`", at_owner(lion, None), "lion"),
    "owner-adamw": variant("`owner_adamw`", at_owner(adam, 2), "adamw"),
}
VARIANTS = CODES | SYNCS | OWNERS
ALL = METHODS | VARIANTS
APART = "adamw", "lion", "mavo", "midrise-4", "every-10", "every-100", *OWNERS
VOTES = {"mavo"}
ONLY_FEW = "l1-4", "largest-4"  # which run with 4 workers alone


class Job(NamedTuple):
    """A method in one setting: its tuning, then its seeds.

    Attributes:
      method: its name.
      workers: how many.
      data: "fashion" or "digits".
      shards: "alike" or "classes".
    """

    method: str
    workers: int
    data: str
    shards: str = "alike"

    def runs(self) -> int:
        """The number of runs, of tuning and of seeds."""
        if self.workers == MANY:
            return 1
        tries = len(FACTORS) if self.variant else TRIES
        return tries + len(SEEDS)

    @property
    def variant(self) -> bool:
        """True where tuning begins at the choice of another method or of other shards."""
        return bool(ALL[self.method].like) or self.shards != "alike"


def jobs(data: str) -> list[Job]:
    """All of them, those that others need first."""
    few = [name for name in CODES if name.endswith("-4")]
    return [
        *(Job(name, workers, data) for workers in WORKERS for name in METHODS),
        *(Job(name, MIDDLE, data) for name in VARIANTS if name not in ONLY_FEW),
        *(Job(name, WORKERS[0], data) for name in few),
        *(Job(name, MIDDLE, data, "classes") for name in APART),
        *(Job(name, MANY, data) for name in METHODS),
    ]


def run(job: Job, once: report.Once) -> None:
    """Tunes the method and runs its seeds."""

    def ran(part: str, hyper: Hyper, seed: int) -> dict[str, Any]:
        return once.run(Run(part, job.method, job.data, job.workers, job.shards, *hyper, seed))

    def measure(hyper: Hyper) -> float:
        loss = ran("tuning", hyper, tuning.SEED)["tuning_loss"]
        return math.inf if loss is None else loss  # None for a run that diverged

    method, rows = ALL[job.method], once.rows()
    if job.workers == MANY:
        hyper, seeds = chosen(rows, job._replace(workers=WORKERS[-1])), SEEDS[:1]
    elif job.variant:
        start = chosen(rows, job._replace(method=method.like or job.method, shards="alike"))
        tried = [start._replace(rate=tuning.rounded(start.rate * f)) for f in FACTORS]
        hyper, seeds = min(tried, key=measure), SEEDS
    else:
        first = tuning.first(method.family)
        hyper, seeds = tuning.search(measure, first, method.family, TRIES), SEEDS
    for seed in seeds:
        ran("seed", hyper, seed)


def chosen(rows: report.Rows, job: Job) -> Hyper:
    """The choice of tuning.

    Raises:
      ValueError: where that job has not run.
    """
    known = report.rows_of(rows, part="seed", **job._asdict())
    if not known:
        raise ValueError(f"{job.method} has not run with {job.workers} workers: run that first")
    return hyper_of(known[0])


def left(some: list[Job], rows: report.Rows) -> str:
    """A line on what is left of jobs, in runs and core hours."""
    known = [row["cpu_seconds"] + row["compiling"] for row in rows]
    each = sum(known) / len(known) if known else CORE_SECONDS
    done = {job: len(report.rows_of(rows, **job._asdict())) for job in some}
    runs = sum(max(job.runs() - done[job], 0) for job in some)
    return (
        f"{sum(done.values())} runs done, {runs} runs or {runs * each / 3600:.2f} core hours left"
    )


def made() -> dict[Path, str]:
    """The page, with tables of the committed rows."""
    rows = report.read(ROWS, key_of)
    tables = Tables(rows, ALL)
    eight, four = (MIDDLE, "alike"), (WORKERS[0], "alike")
    texts = {
        "accuracies": tables.accuracies(METHODS, (*WORKERS, MANY)),
        "order": tables.order(("mavo", "avg", "signum", "sgd"), WORKERS),
        "codes": tables.variants("mavo", CODES, {"8 workers": eight, "4 workers": four}),
        "classes": tables.variants(
            "lion", [name for name in APART if name != "lion"],
            {"alike": eight, "classes of its own": (MIDDLE, "classes")},
        ),
    }  # fmt: skip
    return {
        PAGE: report.written(PAGE.read_text(), texts),
        LEARNT: report.written(LEARNT.read_text(), {"classes": classes(tables)}),
    }


def classes(tables: Tables) -> str:
    """Lines on workers with classes of their own."""
    cells = {
        says: tables.less((MIDDLE, "classes"), name, "lion")
        for name, says in {
            "mavo": "`lion_cub`", "every-10": "With a sync every 10 steps",
            "owner-lion": "`owner_lion`", "owner-adamw": "`owner_adamw`",
        }.items()
    }  # fmt: skip
    return "".join(f"* {says}: {cell}.\n" for says, cell in cells.items())


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__, ROWS)
    parser.add_argument("--images", type=Path, help="a folder with the IDX files of Fashion-MNIST")
    parser.add_argument("--data", choices=tuple(EPOCHS), default="fashion")
    parser.add_argument("--left", action="store_true", help="say what is left, and run nothing")
    parser.add_argument("--report", action="store_true", help="make the page from the rows")
    args = parser.parse_args(argv)
    if args.report:
        for path, text in made().items():
            path.write_text(text)
        return
    all_jobs = jobs(args.data)
    print(left(all_jobs, report.read(args.save, key_of)), flush=True)
    if args.left:
        return
    use_one_thread()
    trains = runner(lambda name, h: ALL[name].direction(h), VOTES, args.images)
    for job in all_jobs:
        run(job, report.Once(args.save, key_of, trains))
        print(f"{job}: {left(all_jobs, report.read(args.save, key_of))}", flush=True)


if __name__ == "__main__":
    main()
