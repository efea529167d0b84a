"""The commands as people call them: what they print, and what they refuse with which words.

What needs a process of its own, because of what it loads or starts, is in test_house.py.
"""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys

import jax
import pytest
from conftest import absent
from pages import ROOT

import lioncub_jax as lc
from lioncub_jax.programs import units
from lioncub_jax.tools import cli
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.plan import picture

MODELS = """
import jax, jax.numpy as jnp, numpy as np
import lioncub_jax as lc

limit = 3

def fails():
    raise ValueError("no such layer")

def needs(width):
    return jnp.ones(width)

def lowered():
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    workers = lc.Workers(mesh, "data")
    tx = lc.communicate(workers=workers, momentum=lc.momentum.nothing())
    params = {"w": jnp.ones((130, 65))}
    update = lambda params, state, rows: tx.update({"w": rows[0]}, state, params)
    return lc.map_step(update, workers).lower(params, tx.init(params), jnp.ones((4, 130, 65))), mesh

def compiled():
    program, mesh = lowered()
    return program.compile(), mesh

def other_mesh():
    return compiled()[0], jax.sharding.AbstractMesh((4,), ("data",))

def alone():
    return jax.jit(lambda x: x + 1).lower(1.0), jax.sharding.AbstractMesh((1,), ("data",))
"""
SHORT = {
    "QUIET": "plan --workers 8 --bandwidth 1gbit --model 100M --compute 125ms",
    "GIVEN": "plan --workers 8 --bandwidth 1gbit --model 100M --compute 125ms --tokens-per-worker 32",
    "NAMED": "plan --model 100M --compute 125ms --tokens-per-worker 32 --cluster",
}
EIGHT = planner.Cluster(8, planner.Link(1e9, 50e-6))


def argv_of(line):
    words = (SHORT.get(word, word) for word in line.split(" "))
    return shlex.split(" ".join(words))


def rows_of(text):
    """``command line => words`` of each line."""
    return [line.split(" => ") for line in text.strip("\n").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("targets")
    (path / "models.py").write_text(MODELS)
    return path


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    """The working directory is put on the path for good, in a process that ends with its command."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def said(capsys):
    """``line -> what a command that works printed``."""

    def run(line):
        cli.main(argv_of(line))
        return capsys.readouterr().out

    return run


@pytest.fixture
def numbers(said):
    return lambda line: json.loads(said(f"{line} --json"))


@pytest.fixture
def refused(capsys):
    """``line -> the last line of a command that does not``."""

    def run(line):
        with pytest.raises(SystemExit) as end:
            cli.main(argv_of(line))
        out, error = capsys.readouterr()
        assert (end.value.code, out) == (2, "")
        return error.splitlines()[-1]

    return run


# --- plan


def json_of(cluster, size=10**8, tokens=32, **asked):
    plan = planner.plan(size, cluster, 0.125, tokens=tokens, **asked)
    return json.loads(json.dumps(plan.numbers()))


def test_a_plan_has_a_table_and_lines_for_each_rate(said):
    text = said("GIVEN --bandwidth 1gbit,10tbit")
    for rate, words in (("1 Gbit/s", "\nUse lion_cub(...)"), ("10 Tbit/s", "\nDo not use this")):
        given, table, told = text[text.index(f"tcp at {rate}") :].split("\n\n")[:3]
        assert "32 tokens a worker, data alike" in given and "speedup" in table
        assert f"\n{told}".startswith(words)
    assert text.count("one worker alone") == 2


def test_every_option_of_the_plan_reaches_the_model_and_overrides_a_name(numbers):
    options = (
        "--workers 4 --bandwidth 10gbit,1gbit --latency 1ms --network exact --devices-per-worker 2 "
        "--on-cpu --data different --memory 2GB --tokens-per-worker 256"
    )
    links = [planner.Link(rate, 1e-3, "exact") for rate in (1e10, 1e9)]
    asked = {"data": "different", "tokens": 256, "memory": 2e9}
    plans = [json_of(planner.Cluster(4, link, 2, on_cpu=True), **asked) for link in links]
    assert numbers(f"QUIET {options}") == plans
    named = numbers(f"NAMED 8x4090-10g {options}")
    for found, wanted in zip(named, plans, strict=True):  # of other memory
        for name, row in wanted["methods"].items():
            assert found["methods"][name]["sent_bytes"] == row["sent_bytes"]


def test_a_plan_takes_what_a_probe_measured(said, numbers, folder):
    points = [[1e3, 0.002], [1e8, 1.0]]
    ops = "all-reduce", "all-reduce bfloat16", "all-to-all", "all-gather"
    measured = planner.Measured(8, dict.fromkeys(ops, points), 8e11, compute=0.1, overlap=0.5)
    (folder / "probe.json").write_text(json.dumps(measured._asdict()))
    line = "plan --workers 8 --model 100M --compute 125ms --tokens-per-worker 256 --measured probe.json"
    cluster = planner.Cluster(8, planner.Link(float("inf")), measured=measured)
    assert numbers(line) == [json_of(cluster, tokens=256)]
    assert "links as measured" in said(line)


# A node of GPUs, and a pod of chips whose all-to-all is slow; others for a release.
QUICK = "p4d-64", "v5e-256"
NAMED = [pytest.param(x, marks=() if x in QUICK else pytest.mark.long) for x in planner.CLUSTERS]


@pytest.mark.parametrize("name", NAMED)
def test_machines_have_names(numbers, name):
    assert numbers(f"NAMED {name}") == [json_of(planner.CLUSTERS[name])]


REFUSED = """
fly => invalid choice: 'fly'
plan --compute 1s => the following arguments are required: --model, --tokens-per-worker
plan --model 1M --tokens-per-worker 32 => required: --compute
plan --model 1M --compute 1s --tokens-per-worker 32 --workers 8 => give --bandwidth and --workers
plan --model 1M --compute 1s --tokens-per-worker 32 --bandwidth 1gbit => num_workers=None: give a whole
NAMED v5 => invalid choice: 'v5' (choose from
GIVEN --workers 0 => number '0': give a number above zero
GIVEN --workers -3 => number '-3': give a number above zero
GIVEN --workers 2.5 => number '2.5': give a whole number
GIVEN --workers 1e308 => number '1e308': give a number above zero, of at most 1e+15
GIVEN --tokens-per-worker 0.5 => number '0.5': give a whole number
GIVEN --tokens-per-worker 31 => tokens=31: nobody measured less than one window of 32 tokens a worker
GIVEN --memory 24 => size '24': unit '' is not one of b, kb, mb, gb, tb; give 500MB, 24GB or 1.5TB
GIVEN --network fast => invalid choice: 'fast' (choose from
GIVEN --measured nowhere.json => nowhere.json
GIVEN --measured models.py => invalid _measured value: 'models.py'
GIVEN --model '7 billion' => unit 'billion' is not one of k, m, b, t
GIVEN --bandwidth 1gbit,fast => rate 'fast': give a number and a unit
GIVEN --bandwidth 100 => unit '' is not one of
GIVEN --bandwidth 0gbit => rate '0gbit': give a number above zero
GIVEN --compute 0s => time '0s': give a number above zero
GIVEN --latency 50 => time '50': unit '' is not one of ns, us, ms, s
GIVEN --data mine => invalid choice: 'mine' (choose from
GIVEN --speed 9 => unrecognized arguments: --speed 9
bytes step.hlo => 'step.hlo': give MODULE:NAME
bytes no_such:step => No module named 'no_such'
bytes models:hugh => module 'models' has no attribute 'hugh'
bytes models:other_mesh => runs on 8 devices and the mesh {'data': 4} has 4
"""


@pytest.mark.parametrize(("line", "words"), rows_of(REFUSED))
def test_what_a_command_cannot_do_is_said(refused, line, words):
    assert words in refused(line)


@pytest.mark.parametrize(("name", "why"), [("fails", "no such layer"), ("needs", "width")])
def test_an_error_of_the_users_own_code_keeps_its_traceback(name, why):
    with pytest.raises(RuntimeError, match=f"models:{name} failed") as error:
        cli.main(["bytes", f"models:{name}"])
    assert why in str(error.value.__cause__)


# --- bytes


def test_bytes_are_those_of_the_accounting(said):
    text = said("bytes models:compiled")
    assert text == said("bytes models:lowered") and "all-to-all" in text
    predicted = lc.audit.of(
        lc.lion_cub(1.0, workers="data"), [jax.ShapeDtypeStruct((130, 65), "float32")], absent(4)
    )
    sent = units.bytes_text(predicted.sent_bytes)
    assert f"A device sends {sent} between the workers of 'data' in a step" in text
    assert "all-" not in said("bytes models:alone")


# --- What is printed


@pytest.mark.parametrize("command", ["plan", "bytes"])
def test_the_examples_of_the_help_run(command, capsys, monkeypatch):
    """In a clone, and in this process, whose devices are there already."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: lioncub {command}")
    examples = re.split(r"\nexamples?[^\n]*:\n", text)[1].partition("\n\n")[0]
    lines = examples.replace("\\\n", " ").splitlines()
    assert lines
    for line in lines:
        argv = shlex.split(line)
        cli.main(argv[argv.index("lioncub") + 1 :])
        assert capsys.readouterr().out, line


@pytest.mark.parametrize("page", ["README.md", "docs/how_to/planner.md"])
def test_the_documentation_shows_what_is_printed(said, page):
    text = (ROOT / page).read_text()
    block = re.search(r"<!-- plan -->\n```console\n\$ lioncub (.*?)```", text, re.S)
    command, *lines = block[1].splitlines()
    assert lines and " ".join(lines).split() == said(command).split()


# --- The picture


def test_a_plan_is_drawn_with_the_times_of_its_rows(tmp_path, capsys):
    argv = "plan --model 124M --workers 8 --bandwidth 1gbit,10gbit --compute 150ms --tokens-per-worker 2048"
    cli.main([*argv.split(), "--plot", str(tmp_path / "plan.png")])
    assert (tmp_path / "plan.png").stat().st_size > 10_000 and capsys.readouterr().out
    at = planner.Cluster(8, planner.Link(1e9))
    one = planner.plan(124_000_000, at, 0.15, tokens=2048)
    found = picture.lines(one, [1e9])
    numbers = one.numbers()["methods"]
    vote = numbers["vote"]
    assert found["lion_cub"] == [pytest.approx(vote["tokens"] * vote["seconds"] / 0.15)]
    means = [
        x for name, x in numbers.items() if one.rows[name].scheme.kind == "mean" and x["tokens"]
    ]
    best = min(x["tokens"] * x["seconds"] for x in means)
    assert found[picture.MEAN] == [pytest.approx(best / 0.15)]
    assert "one worker alone" not in found


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--cluster 8x4090-10g --plot {tmp}/plan.nothing", "such as plan.png"),
        (
            "--measured {tmp}/probe.json --workers 2 --plot {tmp}/plan.png",
            "give --bandwidth or --cluster",
        ),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(argv, words, tmp_path, capsys):
    ops = "all-reduce", "all-reduce bfloat16", "all-to-all", "all-gather", "reduce-scatter"
    seconds = {op: [[1.0, 1e-3], [1e6, 1e-2]] for op in ops}
    measured = planner.Measured(2, seconds, 8e11)._asdict()
    (tmp_path / "probe.json").write_text(json.dumps(measured))
    given = "plan --model 1M --compute 10ms --tokens-per-worker 2048 " + argv.format(tmp=tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(given.split())
    assert words in capsys.readouterr().err


# --- The process


def test_the_version_and_the_command_are_those_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lioncub_jax {lc.__version__}\n"
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="lioncub")
    assert command.value == "lioncub_jax.tools.cli:main" and command.load() is cli.main


def test_a_reader_that_takes_one_line_ends_the_command_without_a_word():
    argv = [sys.executable, "-m", "lioncub_jax", *argv_of("GIVEN")]
    done = subprocess.run(
        f"{shlex.join(argv)} | head -1", shell=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stderr == "" and done.stdout.startswith("100,000,000 parameters, 8 workers")
