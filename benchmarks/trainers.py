"""Trainers that people run, on four simulated devices: plain, and with optimizers of the library.

    make trainers TRAINERS_PYTHON=/path/to/python3.12
    python benchmarks/trainers.py --only flax_nnx --methods lion_cub

Each file of `examples/large` runs in an environment of its own, `.venv-trainers/NAME`, with the versions in
`requirements/trainers`. Plain is the file without the lines that end with `# lioncub`. Rows of `losses` are
means over seeds, at the best of three rates. Rows of `times` are of one run that has no compilation cache.
A run that stops half-way and goes on by the trainer's own checkpoints is compared with one that did not.
The tables of docs/how_to/large_trainers.md and the lines there are written anew.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import report

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "results" / "trainers.jsonl"
FILES = ROOT / "examples/large"
ENVIRONMENTS = ROOT / ".venv-trainers"
DOCUMENT = ROOT / "docs/how_to/large_trainers.md"
MARK = "# lioncub"
WRITTEN = "lc.owner_adamw("  # in each file, once
# What the rate of a file, which is that of AdamW, is multiplied with.
METHODS = {"plain": 1.0, "owner_adamw": 1.0, "lion_cub": 0.35, "owner_muon": 1.0}
OURS = [name for name in METHODS if name != "plain"]
RESUMED = "owner_adamw"
FACTORS, SEEDS = (
    (1.0, 1 / 3, 3.0),
    (0, 1, 2),
)  # of the rate in the file; the first run tells of bytes
DEVICES, TIMED, SKIPPED, LAST = 4, 40, 5, 5  # steps, but for the first
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
LOAD = os.getloadavg()[0]  # of others, before the first run
IDLE = 0.5  # with more load, times are those of other work too


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A trainer.

    Attributes:
      file: of `examples/large`, without its ending.
      name: for people.
      package: on the registry, whose version is told.
      requirements: of `requirements/trainers`, without its ending.
      line: what it prints of a step, its number and its loss.
      constants: other values of the file's numbers.
      methods: that it trains with.
      other: a file that takes its checkpoints to another number of workers.
      processes: how many it runs with too, the same devices spread over them.
      steps: how many a run has.
    """

    file: str
    name: str
    package: str
    requirements: str
    line: str = r"(\d+) (\S+)\n"
    constants: tuple[tuple[str, Any], ...] = ()
    methods: tuple[str, ...] = tuple(METHODS)
    other: str = ""
    processes: int = 1
    steps: int = 200

    @property
    def key(self) -> str:
        """The file, and what is other in it."""
        return ", ".join([self.file, *[f"{name}={value}" for name, value in self.constants]])

    def source(self) -> str:
        return (FILES / f"{self.file}.py").read_text()


FEW = ("plain", "owner_adamw")
MAXTEXT = r".*completed step: (\d+), .* loss: ([\d.]+).*\n"
TRAINERS = [
    Trainer("flax_nnx", "Flax, `nnx.Optimizer`", "flax", "flax"),
    Trainer("flax_linen", "Flax, `TrainState`, and grain", "flax", "flax"),
    Trainer("keras_fit", "Keras, `Model.fit`", "keras", "keras", steps=40),  # epochs, of 16 steps
    Trainer("numpyro_svi", "numpyro, `SVI`", "numpyro", "numpyro"),
    Trainer(
        "maxtext_pretrain",
        "MaxText, pre-training",
        "maxtext",
        "maxtext",
        MAXTEXT,
        other="maxtext_other_workers",
        processes=2,
        steps=40,
    ),
    Trainer(
        "maxtext_pretrain",
        "MaxText without `scan_layers`",
        "maxtext",
        "maxtext",
        MAXTEXT,
        (("SCAN", False),),
        FEW,
        steps=40,
    ),
    Trainer(
        "maxtext_pretrain",
        "MaxText, two workers, `fsdp=2`",
        "maxtext",
        "maxtext",
        MAXTEXT,
        (("FSDP", 2),),
        FEW,
        steps=40,
    ),
    Trainer(
        "tunix_peft",
        "Tunix, `PeftTrainer`",
        "google-tunix",
        "tunix",
        other="tunix_other_workers",
        processes=2,
    ),
    Trainer(
        "tunix_peft",
        "Tunix, adapters (LoRA)",
        "google-tunix",
        "tunix",
        constants=(("LORA", True), ("RATE", 1e-2)),
    ),
    Trainer(
        "tunix_peft",
        "Tunix, two workers, `fsdp=2`",
        "google-tunix",
        "tunix",
        constants=(("FSDP", 2),),
        methods=FEW,
    ),
    Trainer("kauldron_train", "Kauldron, `TrainStep`", "kauldron", "kauldron"),
]


class Ran(NamedTuple):
    """A run of a file.

    Attributes:
      losses: by step.
      seconds: of a step, the median.
      told: what was compiled.
    """

    losses: dict[int, float]
    seconds: float
    told: dict[str, Any]

    def last(self) -> float:
        """The mean of the last losses."""
        return statistics.mean([*self.losses.values()][-LAST:])


# --- Files


def lines_of(source: str) -> list[str]:
    """The lines that name the library or exist for it, without their mark."""
    lines = [line for line in source.splitlines() if line.endswith(MARK)]
    return [line.removesuffix(MARK).rstrip() for line in lines]


def written(source: str, method: str, **constants: Any) -> str:
    """The file with another method, and other constants in the line that begins with STEPS."""
    assert source.count(WRITTEN) == 1, "the file trains with owner_adamw"
    if method == "plain":
        lines = source.splitlines(keepends=True)
        source = "".join(line for line in lines if not line.rstrip().endswith(MARK))
    source = source.replace(WRITTEN, f"lc.{method}(")
    names, values = constants_of(source)
    assert {*constants} <= {*names}, names
    told = [str(constants.get(name, value)) for name, value in zip(names, values, strict=True)]
    line = f"{', '.join(names)} = {', '.join(told)}"
    return source.replace(f"{', '.join(names)} = {', '.join(values)}", line)


def constants_of(source: str) -> tuple[list[str], list[str]]:
    """The names and the values of the line that begins with STEPS."""
    found = re.findall(r"^(STEPS, .*) = (.*)$", source, flags=re.M)
    assert len(found) == 1, "one line has the file's numbers"
    return found[0][0].split(", "), found[0][1].split(", ")


# --- Environments and runs


def environment(trainer: Trainer, maker: str) -> Path:
    """The Python of a trainer's environment; made by that of this name, if not there."""
    folder = ENVIRONMENTS / trainer.requirements
    wanted = ROOT / f"requirements/trainers/{trainer.requirements}.txt"
    ready, python = folder / "ready.txt", folder / "bin/python"
    if not ready.exists() or ready.read_text() != wanted.read_text():
        subprocess.run([maker, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-r", wanted], check=True)
        ready.write_text(wanted.read_text())
    return python


def versions(python: Path, package: str) -> list[str]:
    """Of the package, of jax, and of Python."""
    code = f"""
import importlib.metadata as m, platform
print(m.version({package!r}), m.version("jax"), platform.python_version())"""
    return subprocess.check_output([python, "-c", code], text=True).split()


def variables(devices: int, cache: Path | None = None) -> dict[str, str]:
    """The environment of a run."""
    own = {
        "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "jax",
    }  # fmt: skip
    if cache:
        own |= {"JAX_COMPILATION_CACHE_DIR": str(cache)}
        own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | own


def places(processes: int) -> list[dict[str, str]]:
    """For each process of a run the variables that say where it stands; none for one that is alone."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        run = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost"}
        run |= {"MASTER_PORT": str(free.getsockname()[1])}
    return [run | {"RANK": str(i)} for i in range(processes)]


def run(
    python: Path, trainer: Trainer, source: str, folder: Path, env: dict[str, str], processes: int = 1
) -> Ran:  # fmt: skip
    """Runs a file in a folder, and reads what it prints, of several processes the first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{trainer.file}.py").write_text(source)
    command = [python, ROOT / "benchmarks/trainer_child.py", f"{trainer.file}.py"]
    losses, times, last = dict[int, float](), list[float](), ""
    first, *rest = [env | place for place in places(processes)]
    others = [subprocess.Popen(command, cwd=folder, env=x, **QUIET) for x in rest]
    with (
        (folder / "errors.txt").open("w+") as errors,
        subprocess.Popen(
            command, cwd=folder, env=first, text=True, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):  # fmt: skip
        assert process.stdout
        for line in process.stdout:
            if found := re.fullmatch(trainer.line, line):
                losses[int(found[1])] = float(found[2])
                times.append(time.perf_counter())
            last = line
        if process.wait():
            errors.seek(0)
            raise SystemExit(f"error: {folder}: {errors.read()[-4000:]}")
    assert not any(other.wait() for other in others), "another process failed"
    steps = [b - a for a, b in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)]
    return Ran(losses, statistics.median(steps) if steps else 0.0, json.loads(last))


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of one trainer, in folders that nobody needs afterwards.

    Attributes:
      trainer: which.
      python: of its environment.
      at: where the folders are.
      once: one rate and one seed, for a look.
    """

    trainer: Trainer
    python: Path
    at: Path
    once: bool = False

    def about(self, method: str) -> dict[str, Any]:
        told, jax_version, python = versions(self.python, self.trainer.package)
        return {
            "trainer": self.trainer.key, "package": self.trainer.package, "version": told,
            "with": jax_version, "on": python, "method": method, "devices": DEVICES,
            "lines": len(lines_of(self.trainer.source())),
        }  # fmt: skip

    def base(self, method: str) -> float:
        """The rate that a method begins with."""
        names, values = constants_of(self.trainer.source())
        return METHODS[method] * float(
            dict(self.trainer.constants).get("RATE", values[names.index("RATE")])
        )

    def source(self, method: str, seed: int, rate: float, steps: int) -> str:
        constants = dict(self.trainer.constants, STEPS=steps, SEED=seed, RATE=rate)
        return written(self.trainer.source(), method, **constants)

    def ran(
        self, method: str, seed: int, rate: float, steps: int, name: str, cached: bool = True,
        devices: int = DEVICES, processes: int = 1,
    ) -> Ran:  # fmt: skip
        """A run in the folder of this name; one that goes on in a folder again has the later steps."""
        source = self.source(method, seed, rate, steps)
        env = variables(devices // processes, self.at / "cache" if cached else None)
        found = run(self.python, self.trainer, source, self.at / method / name, env, processes)
        # Kauldron takes one more step than it is asked for.
        return found._replace(losses={i: x for i, x in found.losses.items() if i < steps})

    def losses(self, method: str) -> dict[str, Any]:
        """The row of a method's losses."""
        rates = [self.base(method) * x for x in FACTORS[: 1 if self.once else None]]
        seeds = SEEDS[1 : 1 if self.once else None]
        tried = {
            rate: self.ran(method, SEEDS[0], rate, self.trainer.steps, f"rate-{rate:.2g}")
            for rate in rates
        }
        for one in tried.values():
            assert sorted(one.losses) == [*range(self.trainer.steps)], one.losses
        best = min(tried, key=lambda rate: (math.isnan(tried[rate].last()), tried[rate].last()))
        more = [
            self.ran(method, seed, best, self.trainer.steps, f"seed-{seed}").last()
            for seed in seeds
        ]
        losses = [tried[best].last(), *more]
        return {
            "kind": "losses", **self.about(method), "steps": self.trainer.steps,
            "tried": {f"{rate:.3g}": one.last() for rate, one in tried.items()}, "rate": best,
            "first": tried[best].losses[0], "losses": losses, "mean": statistics.mean(losses),
            "error": statistics.stdev(losses) / math.sqrt(len(losses)) if seeds else None,
            **(tried[rates[0]].told["program"] or {"bytes": 0.0, "floats": []}),
            **(self.resumed(tried[rates[0]]) if method == RESUMED else {}),
            **(self.spread(tried[rates[0]]) if method == RESUMED else {}),
        }  # fmt: skip

    def spread(self, whole: Ran) -> dict[str, Any]:
        """How far losses are apart where several processes share the devices."""
        count, rate = self.trainer.processes, self.base(RESUMED)
        if count == 1:
            return {}
        many = self.ran(
            RESUMED, SEEDS[0], rate, self.trainer.steps, "processes", processes=count
        ).losses
        return {
            "processes": count,
            "spread": max(abs(x - whole.losses[i]) for i, x in many.items()),
        }

    def resumed(self, whole: Ran) -> dict[str, Any]:
        """How far losses are apart where a run stops half-way and goes on, also with fewer workers."""
        rate, half = self.base(RESUMED), self.trainer.steps // 2
        self.ran(RESUMED, SEEDS[0], rate, half, "broken")
        other = self.at / RESUMED / "other"
        shutil.copytree(self.at / RESUMED / "broken", other)
        again = self.ran(RESUMED, SEEDS[0], rate, self.trainer.steps, "broken").losses
        assert sorted(again) == [*range(half, self.trainer.steps)], again
        found = {"apart": max(abs(x - whole.losses[i]) for i, x in again.items())}
        if not self.trainer.other:
            return found
        shutil.copy(FILES / f"{self.trainer.other}.py", other)
        whole_run = self.source(RESUMED, SEEDS[0], rate, self.trainer.steps)
        (other / f"{self.trainer.file}.py").write_text(whole_run)
        for devices in (DEVICES, DEVICES // 2):  # out, and in
            command = [self.python, f"{self.trainer.other}.py"]
            subprocess.run(command, cwd=other, env=variables(devices), check=True)
        fewer = self.ran(
            RESUMED, SEEDS[0], rate, self.trainer.steps, "other", devices=DEVICES // 2
        ).losses
        assert sorted(fewer) == sorted(again), fewer
        return found | {
            "other": abs(fewer[half] - again[half]),
            "other_last": abs(fewer[self.trainer.steps - 1] - again[self.trainer.steps - 1]),
        }

    def times(self, method: str) -> dict[str, Any]:
        """The row of a method's times."""
        found = self.ran(method, SEEDS[0], self.base(method), TIMED, "timed", cached=False)
        return {
            "kind": "times", **self.about(method), "load": LOAD,
            "seconds": found.seconds, "compile": found.told["compile"],
        }  # fmt: skip


def measured(
    trainer: Trainer, python: Path, methods: list[str], kinds: list[str], once: bool
) -> Iterator[dict[str, Any]]:
    """A row of each kind for each method, of which plain is one in any case."""
    with tempfile.TemporaryDirectory() as at:
        runs = Runs(trainer, python, Path(at), once)
        for method in [x for x in trainer.methods if x in ("plain", *methods)]:
            for kind in kinds:
                yield runs.losses(method) if kind == "losses" else runs.times(method)


# --- The page


Newest = dict[tuple[str, str, str], dict[str, Any]]


def newest(rows: report.Rows) -> Newest:
    """The newest row of each trainer, method and kind."""
    return {(row["trainer"], row["method"], row["kind"]): row for row in rows if "kind" in row}


def learnt(found: Newest) -> str:
    """The table of losses."""
    head = ["trainer", "version", "lines", "steps", "AdamW, plain", *OURS, "goes on", "date"]
    lines = []
    for x in TRAINERS:
        rows = {m: found.get((x.key, m, "losses")) for m in METHODS}
        steps = {row["steps"] for row in rows.values() if row}
        assert len(steps) < 2, f"the rows of {x.key} are of {steps} steps"
        plain, resumed = rows["plain"], rows[RESUMED]
        if not plain or not resumed:
            lines.append([x.name, "not run", *[""] * (len(head) - 2)])
            continue
        lines.append([
            x.name, plain["version"], str(resumed["lines"]), str(plain["steps"]), loss(plain),
            *[loss(rows[m], plain) for m in OURS], equality(resumed), resumed["date"],
        ])  # fmt: skip
    return report.markdown(head, lines, columns="---")


def loss(row: dict[str, Any] | None, plain: dict[str, Any] | None = None) -> str:
    """A mean and its standard error; a star if it is apart from plain's by more than two of them."""
    if row is None:
        return "not run"
    if row["error"] is None:
        return f"{row['mean']:.4f}"
    star = ""
    if plain and plain["error"] is not None:
        apart = abs(row["mean"] - plain["mean"])
        star = r"\*" if apart > 2 * math.hypot(row["error"], plain["error"]) else ""
    return f"{row['mean']:.4f}±{row['error']:.4f}{star}"


def equality(row: dict[str, Any]) -> str:
    """How near losses are of a run that went on, did so with half the workers, or had more processes."""
    told = [near(row["apart"])]
    told += [f"{DEVICES // 2} workers: {near(row['other'])}"] if "other" in row else []
    told += [f"{row['processes']} processes: {near(row['spread'])}"] if "spread" in row else []
    return "; ".join(told)


def near(apart: float) -> str:
    return "equal" if apart == 0 else f"to {apart:.0e}"


def sent(found: Newest) -> str:
    """The table of bytes and times."""
    head = [
        "trainer",
        *[f"{m}, bytes" for m in OURS],
        "floats among them",
        "a step over plain's",
        "compiling over plain's",
    ]
    lines = []
    for x in TRAINERS:
        rows = {m: found.get((x.key, m, "losses")) for m in OURS}
        if not rows[RESUMED]:
            continue
        timed = {m: found.get((x.key, m, "times")) for m in METHODS}
        lines.append([
            x.name, *[f"{row['bytes']:,.0f}" if row else "not run" for row in rows.values()],
            floats(rows[RESUMED]["floats"]), *times(timed),
        ])  # fmt: skip
    return report.markdown(head, lines, columns="---")


def floats(names: list[str]) -> str:
    """Arrays of floats between workers, the largest first, and how many numbers beside them."""
    arrays = sorted({x for x in names if not x.endswith("[]")})
    numbers = sum(x.endswith("[]") for x in names)
    told = [f"{names.count(x)} of {x}" for x in arrays]
    if numbers:
        told.append(f"{numbers} number{'s' * (numbers > 1)}")
    return ", ".join(told) or "none"


def times(timed: dict[str, dict[str, Any] | None]) -> tuple[str, str]:
    """A step's time over plain's, and how much longer it compiles; not of a machine with other work."""
    plain, ours = timed["plain"], [timed[m] for m in OURS]
    rows = [row for row in (plain, *ours) if row]
    if not plain or len(rows) == 1 or any(row["load"] > IDLE for row in rows):
        return "-", "-"
    steps = [f"{row['seconds'] / plain['seconds']:.1f}" if row else "-" for row in ours]
    compiling = [f"{row['compile'] - plain['compile']:+.1f} s" if row else "-" for row in ours]
    return ", ".join(steps), ", ".join(compiling)


def recipe(trainer: Trainer) -> str:
    return "".join(f"+{line}\n" for line in lines_of(trainer.source()))


def documented(document: str, rows: report.Rows) -> str:
    """The document with the tables of these rows and the lines of each trainer."""
    found = newest(rows)
    document = report.written(document, {"trainers": learnt(found), "sent": sent(found)})
    for x in TRAINERS:
        mark = f"<!-- recipe: {x.file} -->\n```diff\n"
        before, there, rest = document.partition(mark)
        assert there, f"the page has no {mark}"
        document = before + mark + recipe(x) + "```" + rest.partition("```")[2]
    return document


def main() -> None:
    parser = report.parser(__doc__, ROWS)
    parser.add_argument("--only", nargs="+", metavar="FILE", choices=[x.key for x in TRAINERS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument(
        "--kinds", nargs="+", choices=["losses", "times"], default=["losses", "times"]
    )
    parser.add_argument("--python", default="python3.12", help="makes the environments")
    parser.add_argument("--once", action="store_true", help="one rate and one seed")
    parser.add_argument("--page", action="store_true", help="only write the page, of the rows")
    args = parser.parse_args()
    chosen = [x for x in TRAINERS if not args.only or x.key in args.only]
    for trainer in () if args.page else chosen:
        python = environment(trainer, args.python)
        for row in measured(trainer, python, args.methods, args.kinds, args.once):
            report.append(args.save, [row | report.provenance()])
            print(json.dumps(row), flush=True)
    rows = report.read(args.save)
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), rows))
    print(learnt(newest(rows)))


if __name__ == "__main__":
    main()
