"""Trainers that people run, on four simulated devices: plain, and with optimizers of the library.

    make trainers
    python benchmarks/trainers.py --only flax_nnx --methods lion_cub

Each file of `examples/large` runs in an environment of its own, `.venv-trainers/NAME`, with the versions in
`requirements/trainers`. Plain is the file without the lines that end with `# lioncub`. A run that stops
half-way and goes on by the trainer's own checkpoints is compared with one that did not. The table of
docs/how_to/large_trainers.md and the lines there are written anew.
"""

import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import sysconfig
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
WRITTEN = "lc.owner_adamw(RATE, workers=workers)"  # in each file, once
METHODS = {
    "plain": "",
    "owner_adamw": WRITTEN,
    "lion_cub": "lc.lion_cub(RATE / 5, workers=workers)",
    "owner_muon": "lc.owner_muon(RATE, workers=workers)",
}
RESUMED = ("owner_adamw",)
DEVICES, STEPS, SKIPPED = 4, 40, 5
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
      methods: that it trains with.
    """

    file: str
    name: str
    package: str
    requirements: str
    methods: tuple[str, ...] = tuple(METHODS)

    def source(self) -> str:
        return (FILES / f"{self.file}.py").read_text()


TRAINERS = [Trainer("flax_nnx", "Flax, `nnx.Optimizer`", "flax", "flax")]


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


# --- Files


def lines_of(source: str) -> list[str]:
    """The lines that name the library or exist for it, without their mark."""
    lines = [line for line in source.splitlines() if line.endswith(MARK)]
    return [line.removesuffix(MARK).rstrip() for line in lines]


def written(source: str, method: str, steps: int) -> str:
    """The file with another method and number of steps."""
    assert source.count(WRITTEN) == 1, "the file trains with owner_adamw"
    if method == "plain":
        lines = source.splitlines(keepends=True)
        source = "".join(line for line in lines if not line.rstrip().endswith(MARK))
    source = source.replace(WRITTEN, METHODS[method])
    source, found = re.subn(r"^(STEPS, .* = )\d+,", rf"\g<1>{steps},", source, flags=re.M)
    assert found == 1, "the file begins with its number of steps"
    return source


# --- Environments and runs


def environment(trainer: Trainer) -> Path:
    """The Python of a trainer's environment, which sees the one that runs; made if not there."""
    folder = ENVIRONMENTS / trainer.requirements
    wanted = ROOT / f"requirements/trainers/{trainer.requirements}.txt"
    ready, python = folder / "ready.txt", folder / "bin/python"
    if not ready.exists() or ready.read_text() != wanted.read_text():
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True
        )
        [packages] = folder.glob("lib/*/site-packages")
        (packages / "seen.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--python", python, "install", "-r", wanted], check=True)
        ready.write_text(wanted.read_text())
    return python


def version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}), m.version('jax'))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def run(python: Path, source: str, folder: Path) -> Ran:
    """Runs a file in a folder, and reads what it prints."""
    (folder / "trainer.py").write_text(source)
    own = {
        "JAX_NUM_CPU_DEVICES": str(DEVICES), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2",
    }  # fmt: skip
    command = [python, ROOT / "benchmarks/trainer_child.py", "trainer.py"]
    losses, times, last = dict[int, float](), list[float](), ""
    with (
        (folder / "errors.txt").open("w+") as errors,
        subprocess.Popen(
            command, cwd=folder, env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):  # fmt: skip
        assert process.stdout
        for line in process.stdout:
            if found := re.fullmatch(r"(\d+) (\S+)\n", line):
                losses[int(found[1])] = float(found[2])
                times.append(time.perf_counter())
            last = line
        if process.wait():
            errors.seek(0)
            raise SystemExit(f"error: {folder}: {errors.read()[-4000:]}")
    steps = [b - a for a, b in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)]
    return Ran(losses, statistics.median(steps) if steps else 0.0, json.loads(last))


def measured(trainer: Trainer, python: Path, methods: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each method; plain runs in any case. The runs of `RESUMED` are broken and go on too."""
    told, jax_version = version(python, trainer.package).split()
    plain: Ran | None = None
    for method in [x for x in trainer.methods if x in ("plain", *methods)]:
        sources = [written(trainer.source(), method, n) for n in (STEPS, STEPS // 2)]
        with tempfile.TemporaryDirectory() as at:
            whole, broken = Path(at) / "whole", Path(at) / "broken"
            whole.mkdir()
            broken.mkdir()
            found = run(python, sources[0], whole)
            plain = plain or found
            again = {}
            if method in RESUMED:
                run(python, sources[1], broken)
                again = run(python, sources[0], broken).losses
                assert sorted(again) == [*range(STEPS // 2, STEPS)], again
        program = found.told["program"] or {"bytes": 0.0, "floats": []}
        assert sorted(found.losses) == [*range(STEPS)], found.losses
        yield {
            "trainer": trainer.file, "package": trainer.package, "version": told, "with": jax_version,
            "method": method, "lines": len(lines_of(trainer.source())),
            "first": found.losses[0], "last": statistics.mean([*found.losses.values()][-5:]),
            "apart": max(abs(x - found.losses[i]) for i, x in again.items()) if again else None,
            **program, "seconds": found.seconds, "over_plain": found.seconds / plain.seconds,
            "load": LOAD, "compile": found.told["compile"],
            "compile_over_plain": found.told["compile"] - plain.told["compile"],
        }  # fmt: skip


# --- The page


def newest(rows: report.Rows) -> report.Rows:
    """The newest row of each trainer and method, in their order."""
    last = {(row["trainer"], row["method"]): row for row in rows}
    return [last[x.file, m] for x in TRAINERS for m in x.methods if (x.file, m) in last]


def table(rows: report.Rows) -> str:
    head = [
        "trainer", "with", "lines", "optimizer", "loss", "bytes", "step over plain", "compiling over plain",
        "goes on with equal losses", "date",
    ]  # fmt: skip
    names = {x.file: x.name for x in TRAINERS}
    lines = []
    for row in newest(rows):
        plain = row["method"] == "plain"
        lines.append([
            f"{names[row['trainer']]} ({row['package']} {row['version']})", f"jax {row['with']}",
            "" if plain else str(row["lines"]), row["method"].replace("plain", "AdamW, one device"),
            f"{row['last']:.3f}", "" if plain else f"{row['bytes']:,.0f}", *times(row),
            equality(row), row["date"],
        ])  # fmt: skip
    ran = {row["trainer"] for row in rows}
    lines += [[x.name, "not run", *[""] * 8] for x in TRAINERS if x.file not in ran]
    return report.markdown(head, lines, columns="---")


def times(row: dict[str, Any]) -> tuple[str, str]:
    """A step's time over plain's, and how much longer it compiles; not of a machine with other work."""
    if row["method"] == "plain":
        return "", ""
    if row.get("load", math.inf) > IDLE:
        return "not measured", "not measured"
    return f"{row['over_plain']:.1f}", f"{row['compile_over_plain']:+.1f} s"


def equality(row: dict[str, Any]) -> str:
    if row["apart"] is None:
        return "not tried"
    return "yes" if row["apart"] == 0 else f"to {row['apart']:.0e}"


def recipe(trainer: Trainer) -> str:
    return "".join(f"+{line}\n" for line in lines_of(trainer.source()))


def documented(document: str, rows: report.Rows) -> str:
    """The document with the table of these rows and the lines of each trainer."""
    document = report.written(document, {"trainers": table(rows)})
    for x in TRAINERS:
        mark = f"<!-- recipe: {x.file} -->\n```diff\n"
        before, found, rest = document.partition(mark)
        assert found, f"the page has no {mark}"
        document = before + mark + recipe(x) + "```" + rest.partition("```")[2]
    return document


def main() -> None:
    parser = report.parser(__doc__, ROWS)
    parser.add_argument("--only", nargs="+", metavar="FILE", choices=[x.file for x in TRAINERS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--page", action="store_true", help="only write the page, of the rows")
    args = parser.parse_args()
    chosen = [x for x in TRAINERS if not args.only or x.file in args.only]
    for trainer in () if args.page else chosen:
        for row in measured(trainer, environment(trainer), args.methods):
            report.append(args.save, [row | report.provenance()])
            print(json.dumps(row), flush=True)
    rows = report.read(args.save)
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
