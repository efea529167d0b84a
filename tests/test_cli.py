"""The commands as people call them: what they print, and what they refuse with which words."""

import importlib.metadata
import importlib.resources
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import lioncub_jax as lc
from lioncub_jax import cli, lab, planner, units
from lioncub_jax.cli import bytes as bytes_command
from lioncub_jax.cli import examples, targets
from lioncub_jax.cli import plan as plan_command
from lioncub_jax.planner import report as planner_report

ROOT = Path(__file__).parents[1]
MODELS = """
import jax, jax.numpy as jnp, numpy as np
from flax import linen, nnx
import lioncub_jax as lc

class Layers(nnx.Module):
    def __init__(self, rngs, width=40_000):
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)

def huge():
    return Layers(nnx.Rngs(0))

def variables():
    return linen.BatchNorm(use_running_average=True).init(jax.random.key(0), jnp.ones((1, 30)))

def tree():
    return {"a": jax.ShapeDtypeStruct((7_000_000_000,), jnp.bfloat16), "b": np.ones(3, np.float32)}

def integers():
    return {"ids": jnp.ones(3, int)}

def text():
    return "seven billion"

def nothing():
    return None

def fails():
    raise RuntimeError("no such\\nlayer")

def fails_at_length():
    raise RuntimeError("first words " + "below\\n" * 5000)

def sleeps():
    import time
    print("asleep", flush=True)
    time.sleep(60)

def needs(width):
    return jnp.ones(width)

limit = 3
matmul = jax.jit(lambda x: x @ x)

def one_step():
    return matmul(jnp.ones((64, 64)))

def lowered():
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tx = lc.communicate(axis_name="data", memory=lc.momentum.nothing())
    params = {"w": jnp.ones((130, 65))}
    tx = lc.on_mesh(tx, mesh, axis_name="data", specs={"w": jax.P()})
    grads = {"w": jnp.ones((4, 130, 65))}
    return jax.jit(tx.update).lower(grads, tx.init(params), params), mesh

def compiled():
    program, mesh = lowered()
    return program.compile(), mesh

def traced_only():
    return jax.jit(lambda x: x).trace(1.0), lowered()[1]

def no_mesh():
    return lowered()[0], np.ones((4, 2))

def does_not_compile():
    class Broken(jax.stages.Lowered):
        def __init__(self): pass
        def compile(self): raise RuntimeError("unsupported\\n" * 999)
    return Broken(), lowered()[1]
"""
PLAN = ["plan", "--workers", "8", "--bandwidth", "1gbit"]
SIZED = [*PLAN, "--params", "100M"]
GIVEN = [*SIZED, "--compute", "125ms"]
NAMED = ["plan", "--params", "100M", "--cluster"]
LINK = planner.Link(1e9, 50e-6)


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """A target's folder is put on the path for good, in a process that ends with its command."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("targets") / "models.py"
    path.write_text(MODELS)
    return str(path)


@pytest.fixture(scope="module")
def program(models):
    return targets.call(f"{models}:compiled")


@pytest.fixture
def said(capsys):
    """``argv -> what a command that works printed``."""

    def run(*argv):
        assert cli.main(argv) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """``argv -> the one line of a command that does not``."""

    def run(*argv):
        with pytest.raises(SystemExit) as end:
            cli.main(argv)
        out, line = capsys.readouterr()
        assert (end.value.code, out, line.count("\n")) == (2, "", 1)
        assert line.startswith("error: ")
        return line

    return run


def test_the_plan_shows_a_table_for_each_rate_and_advice(said):
    text = said(*GIVEN, "--bandwidth", "100mbit,10tbit")
    plans = [
        planner_report.plan(10**8, planner.Cluster(8, LINK).at(rate), 0.125)
        for rate in (1e9, 1e8, 1e13)
    ]
    for plan in plans:
        assert f"8 workers at {units.rate_text(plan.cluster.link.bandwidth)}" in text
        assert planner_report.advice(plan) in text
    assert text.count("Do not use this") == 1
    assert text.count("1-bit vote") == 4  # three tables and the legend
    assert text.endswith(f"{planner.legend()}\n")
    assert "100,000,000 parameters; compute 125 ms a step (given); latency 50 us, tree" in text


def test_the_plan_as_json_is_the_plan(said):
    found = json.loads(said(*GIVEN, "--json"))
    plan = planner_report.plan(10**8, planner.Cluster(8, LINK), 0.125)
    plans = [planner_report.as_json(plan)]
    assert found == {"parameters": 10**8, "plans": plans, "cluster": None}


def test_every_option_of_the_plan_reaches_the_model(said):
    given = [
        "--latency", "1ms", "--algorithm", "ring", "--devices-per-worker", "4",
        "--inside-bandwidth", "900gbit", "--inside-latency", "2us", "--memory-bandwidth", "1tbyte",
        "--platform", "cpu", "--late", "1%:2s", "--json",
    ]  # fmt: skip
    found = json.loads(said(*GIVEN, *given))["plans"][0]
    cluster = planner.Cluster(
        8, planner.Link(1e9, 1e-3), 4, planner.Link(900e9, 2e-6), planner.ring,
        late=planner.Late(0.01, 2.0),
    )  # fmt: skip
    plan = planner_report.plan(10**8, cluster, 0.125, planner.Host(8e12, widens_bfloat16=True))
    assert found == planner_report.as_json(plan)


def test_the_plan_says_how_long_a_step_waits_for_who_is_late(said):
    text = said(*GIVEN, "--late", "1%:2s")
    assert "Late by 2 s in 1% of a worker's steps: all wait, 155 ms a step = 2 s *" in text
    assert " (1 - 0.99^8), less with steps alone." in text
    assert "Late" not in said(*GIVEN)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["--goal", "step"], {"goal": "step"}),
        (["--goal", "loss"], {"goal": "loss", "data": "alike"}),
        (["--data", "different"], {"data": "different"}),
    ],
)
def test_the_goal_and_the_data_reach_the_plan(said, given, asked):
    plan = planner_report.plan(10**8, planner.Cluster(8, LINK), 0.125, **asked)
    found = json.loads(said(*GIVEN, *given, "--json"))["plans"]
    assert found == [planner_report.as_json(plan)]
    text = said(*GIVEN, *given)
    assert planner_report.advice(plan) in text and planner.legend(plan.goal) in text
    assert ("DiLoCo" in text) == ("time\n" in text.replace(" ", "")) == (plan.goal == "loss")


def test_the_choices_are_the_planners():
    assert (plan_command.GOALS, plan_command.DATA) == (planner.GOALS, planner.DATA)


@pytest.mark.parametrize("name", planner.CLUSTERS)
def test_machines_have_names(said, name):
    named = planner.cluster_named(name)
    argv = [*NAMED, name, "--compute", "125ms"]
    text, found = said(*argv), json.loads(said(*argv, "--json"))
    assert text.startswith(f"{name}: {named.about}.")
    assert f"\nSource: {named.source} Latencies are assumed.\n" in text
    assert ("An all-to-all gets" in text) == (named.cluster.all_to_all_share < 1)
    host = planner.Host(named.memory_bandwidth)
    plan = planner_report.plan(10**8, named.cluster, 0.125, host)
    assert found["plans"] == [planner_report.as_json(plan)]
    assert found["cluster"] == {
        "name": name, "about": named.about, "source": named.source,
        "all_to_all_share": named.cluster.all_to_all_share, "overridden": [],
    }  # fmt: skip


def test_what_is_given_overrides_a_name(said):
    given = [
        "--workers", "4", "--bandwidth", "10gbit,1gbit", "--latency", "1ms", "--inside-latency", "1us",
        "--inside-bandwidth", "1tbit", "--devices-per-worker", "2", "--memory-bandwidth", "1tbyte",
        "--platform", "cpu",
    ]  # fmt: skip
    argv = [*NAMED, "h100-64", "--compute", "125ms"]
    found, host = (
        json.loads(said(*argv, *given, "--json")),
        planner.Host(8e12, widens_bfloat16=True),
    )
    cluster = planner.Cluster(4, planner.Link(1e10, 1e-3), 2, planner.Link(1e12, 1e-6))
    assert found["plans"] == [
        planner_report.as_json(planner_report.plan(10**8, cluster.at(rate), 0.125, host))
        for rate in (1e10, 1e9)
    ]
    assert {f"--{name.replace('_', '-')}" for name in found["cluster"]["overridden"]} == {
        word for word in given if word.startswith("--")
    }
    text = said(*argv, "--workers", "4", "--devices-per-worker", "1")
    assert "a worker is a node. Overridden by --workers, --devices-per-worker.\n" in text
    assert "4 workers at 3.2 Tbit/s" in text and "inside" not in text.split("Tbit/s", 1)[1]


@pytest.mark.parametrize(
    ("name", "size"),
    [("huge", 40_000**2 + 3 * 40_000), ("variables", 2 * 30), ("tree", 7_000_000_003)],
)
def test_models_are_counted_by_shape_without_being_made(said, models, name, size):
    found = json.loads(said(*PLAN, "--compute", "1s", "--model", f"{models}:{name}", "--json"))
    assert found["parameters"] == size


def test_a_model_may_be_in_a_module(said, models, monkeypatch):
    monkeypatch.syspath_prepend(Path(models).parent)
    found = json.loads(said(*PLAN, "--compute", "1s", "--model", "models:tree", "--json"))
    assert found["parameters"] == 7_000_000_003


def test_a_file_may_import_what_lies_beside_it_when_it_is_called(said, tmp_path):
    (tmp_path / "beside.py").write_text("import jax.numpy as jnp\ndef ten(): return jnp.ones(10)")
    (tmp_path / "late.py").write_text("def make():\n    from beside import ten\n    return ten()")
    argv = ["--compute", "1s", "--model", f"{tmp_path}/late.py:make", "--json"]
    assert json.loads(said(*PLAN, *argv))["parameters"] == 10


def test_a_measured_step_is_the_compute_time(said, models):
    text = said(*SIZED, "--measure", f"{models}:one_step")
    assert "(measured here)" in text
    assert 0 < targets.measure(f"{models}:one_step", runs=1) < 1


def test_a_figure_is_drawn(said, tmp_path):
    path = tmp_path / "plan.png"
    assert f"drawn: {path}" in said(*GIVEN, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_without_matplotlib_the_plan_says_what_to_install(refused, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'lioncub_jax[plots]'" in refused(*GIVEN, "--plot", str(tmp_path / "a.png"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "plan | bytes | lab"),
        (["fly"], "invalid choice: 'fly'"),
        (PLAN, "one of the arguments --params --model is required"),
        (SIZED, "no compute time: without it every speedup would look better than it is; give"),
        ([*NAMED[:3], "--workers", "8"], "error: no --bandwidth: give it, or machines by name"),
        ([*NAMED[:3], "--bandwidth", "1gbit"], "error: no --workers: give it, or machines by name"),
        (NAMED[:3], "no --workers and no --bandwidth: give it, or machines by name, such as"),
        ([*NAMED, "v5"], f"cluster 'v5': give one of {', '.join(planner.CLUSTERS)}"),
        ([*NAMED, "v5e-8"], "no compute time"),
        (
            [
                *NAMED,
                "h100-64",
                "--compute",
                "1s",
                "--devices-per-worker",
                "1",
                "--inside-bandwidth",
                "1tbit",
            ],
            "--inside-bandwidth: it has no effect without",
        ),
        (
            [*NAMED, "v5e-8", "--compute", "1s", "--devices-per-worker", "4"],
            "4 without --inside-bandwidth: give the rate",
        ),
        ([*GIVEN, "--workers", "0"], "number '0': give a number above zero"),
        ([*GIVEN, "--workers", "-3"], "number '-3': give a number above zero"),
        ([*GIVEN, "--workers", "2.5"], "number '2.5': give a whole number"),
        ([*GIVEN, "--params", "0"], "number '0': give a number above zero"),
        ([*GIVEN, "--params", "7 billion"], "unit 'billion' is not one of k, m, b, t"),
        ([*GIVEN, "--bandwidth", "1gbit,fast"], "rate 'fast': give a number and a unit"),
        ([*GIVEN, "--bandwidth", "100"], "unit '' is not one of"),
        ([*GIVEN, "--bandwidth", "0gbit"], "rate '0gbit': give a number above zero"),
        ([*GIVEN, "--compute", "0s"], "time '0s': give a number above zero"),
        ([*GIVEN, "--latency", "50"], "time '50': unit '' is not one of ns, us, ms, s"),
        ([*GIVEN, "--late", "1%"], "late '1%': give a share of steps and a time, such as 1%:2s"),
        ([*GIVEN, "--late", "0.01:2s"], "share '0.01': unit '' is not one of %; give 1% or 0.5%"),
        ([*GIVEN, "--late", "0%:2s"], "share '0%': give a number above zero"),
        ([*GIVEN, "--late", "101%:2s"], "share '101%': give at most 100%"),
        ([*GIVEN, "--late", "1%:2"], "time '2': unit '' is not one of ns, us, ms, s"),
        ([*GIVEN, "--goal", "fun"], "invalid choice: 'fun' (choose from"),
        ([*GIVEN, "--data", "mine"], "invalid choice: 'mine' (choose from"),
        (
            [*GIVEN, "--goal", "step", "--data", "alike"],
            "--data: it has no effect with --goal step; leave it out",
        ),
        ([*GIVEN, "--algorithm", "star"], "invalid choice: 'star'"),
        ([*GIVEN, "--devices-per-worker", "0"], "number '0': give a number above zero"),
        ([*GIVEN, "--devices-per-worker", "8"], "8 without --inside-bandwidth: give the rate"),
        ([*GIVEN, "--inside-bandwidth", "1tbit"], "--inside-bandwidth: it has no effect without"),
        ([*GIVEN, "--inside-latency", "1us"], "--inside-latency: it has no effect without"),
        ([*GIVEN, "--params", "1e300t"], "number '1e300t' is too large for a number"),
        ([*GIVEN, "--workers", "1e308"], "number '1e308': give one of at most 1e+15"),
        ([*GIVEN, "--bandwidth", "1e308tbit"], "rate '1e308tbit' is too large for a number"),
        ([*GIVEN, "--work", "9"], "unrecognized arguments: --work 9"),
        ([*GIVEN, "--model", "m.py:f"], "not allowed with argument --params"),
        ([*GIVEN, "--measure", "m.py:f"], "not allowed with argument --compute"),
        ([*GIVEN, "--plot", "no/where/plan.png"], "there is no folder no/where; make it"),
        ([*GIVEN, "--plot", "plan.xyz"], "give a name that ends in one of"),
        ([*SIZED, "--measure", "no.py:f", "--plot", "plan.xyz"], "give a name that ends in one of"),
        (
            [*SIZED, "--measure", "no.py:f", "--plot", "/proc/plan.png"],
            "a file that can be written",
        ),
        ([*GIVEN, "--", "python"], "only lab and run take a command"),
    ],
)
def test_what_a_plan_cannot_be_made_of_is_said_in_one_line(refused, argv, words):
    assert words in refused(*argv)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{models}", "give MODULE:NAME or FILE.py:NAME"),
        ("{models}:", "give MODULE:NAME or FILE.py:NAME"),
        ("nowhere.py:huge", "nowhere.py: there is no such file"),
        ("no_such_module:huge", "importing no_such_module failed with ModuleNotFoundError"),
        ("{models}:hugh", "there is no 'hugh' in"),
        ("{models}:limit", "limit is a int: give a function"),
        (
            "{models}:fails",
            "fails without arguments failed with RuntimeError: no such layer (in models.py, line",
        ),
        ("{models}:fails_at_length", "first words below below"),
        ("{models}:needs", "missing 1 required positional argument: 'width'"),
        ("{models}:text", "returned str: give an nnx.Module, linen variables or a tree of arrays"),
        ("{models}:integers", "returned array at ['ids'] of int32: parameters are floating"),
        ("{models}:nothing", "returned no arrays"),
    ],
)
def test_a_model_that_is_none_is_said_in_one_line(refused, models, target, words):
    line = refused(*PLAN, "--compute", "1s", "--model", target.format(models=models))
    assert words in line and len(line) < 1000


def test_a_file_that_fails_and_a_step_that_returns_nothing_are_named(refused, models, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    line = refused(*SIZED, "--measure", f"{broken}:step")
    assert "broken.py failed with ZeroDivisionError: division by zero" in line
    broken.write_text("import sys; sys.exit('usage: none')")
    assert "SystemExit: usage: none" in refused(*SIZED, "--measure", f"{broken}:step")
    assert "returned no jax array to wait for" in refused(*SIZED, "--measure", f"{models}:text")


def test_bytes_are_those_of_the_accounting(said, models, program):
    found = json.loads(said("bytes", f"{models}:compiled", "--params", "8450", "--json"))
    predicted = lc.traffic.predict({"w": jax.ShapeDtypeStruct((130, 65), "float32")}, 4)
    votes = [one for one in found["collectives"] if one["op"] != "all-reduce"]
    assert sum(one["sent_bytes"] for one in votes) == predicted.sent_bytes
    assert {tuple(one["axes"]) for one in votes} == {("data",)}
    read = lc.traffic.collectives(*program)
    assert found["every_step"] == {
        ",".join(axes): sent for axes, sent in lc.traffic.sent_bytes(read).items()
    }
    assert found["mesh"] == {"data": 4, "tp": 2}
    assert found["float32_all_reduce"] == 2 * 3 / 4 * 4 * 8450


def test_a_lowered_step_and_a_saved_text_say_the_same(said, models, program, tmp_path):
    saved = tmp_path / "step.hlo"
    saved.write_text(program[0].as_text())
    from_text = said("bytes", str(saved), "--mesh", "data=4,tp=2", "--params", "8450")
    assert from_text == said("bytes", f"{models}:lowered", "--params", "8450")
    assert "all-to-all" in from_text and "total" in from_text
    assert "A float32 all-reduce of 8,450 parameters over data sends 50.7 kB" in from_text


def test_a_program_without_collectives_says_so(said, tmp_path):
    saved = tmp_path / "alone.hlo"
    saved.write_text(jax.jit(lambda x: x + 1).lower(1.0).compile().as_text())
    assert "no collective" in said("bytes", str(saved), "--mesh", "data=1")


def test_devices_are_made_before_jax_starts(models):
    command = "import sys; from lioncub_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["bytes", f"{models}:lowered", "--devices", "8", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", command, *argv], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mesh"] == {"data": 4, "tp": 2}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.hlo"], "nowhere.hlo: no such file"),
        (["{hlo}"], "does not say which mesh it is for: give --mesh data=4,tp=2"),
        (["{hlo}", "--mesh", "data"], "mesh 'data': give names and sizes"),
        (["{hlo}", "--mesh", "data=4,data=2"], "each name once"),
        (["{hlo}", "--mesh", "data=four"], "mesh 'data=four'"),
        (["{hlo}", "--mesh", "data=0"], "mesh 'data=0'"),
        (["{hlo}", "--mesh", "data=4"], "runs on 8 devices and the mesh {{'data': 4}} has 4"),
        (["{hlo}", "--mesh", "data=8", "--devices", "8"], "is compiled; leave it"),
        (["{hlo}", "--mesh", "data=8", "--params", "1M", "--axis", "dp"], "--axis dp: the mesh has"),
        (["{models}:lowered", "--mesh", "data=8"], "returns its own: leave it out"),
        (["{models}:lowered", "--devices", "0"], "number '0'"),
        (["{models}:lowered", "--devices", "4"], "--devices 4: jax has started already"),
        (["{models}:text"], "returned str: return (step.lower(...), mesh)"),
        (["{models}:traced_only"], "not (Traced, Mesh)"),
        (["{models}:no_mesh"], "not (Lowered, ndarray)"),
        (["{models}:does_not_compile"], "does_not_compile returned failed with RuntimeError: unsupp"),
        (["{stable}", "--mesh", "data=4,tp=2"], "step.mlir: this is StableHLO, the program before it is"),
        (["{binary}", "--mesh", "data=8"], "step.bin is not text: give what compiled.as_text() returned"),
        (["{long}", "--mesh", "data=1"], "[...]"),
        (["/proc/self/mem", "--mesh", "data=8"], "error: "),
        (["/tmp", "--mesh", "data=8"], "/tmp: a folder; give compiled.as_text() in a file"),
        (["{hlo}", "--mesh", "data=8", "--axis", "data"], "--axis: it has no effect without --params"),
        (["{models}:fails"], "failed with RuntimeError: no such layer"),
    ],
)  # fmt: skip
def test_what_has_no_bytes_is_said_in_one_line(refused, models, program, tmp_path, argv, words):
    paths = {
        "hlo": tmp_path / "step.hlo", "stable": tmp_path / "step.mlir",
        "binary": tmp_path / "step.bin", "long": tmp_path / "long.hlo",
    }  # fmt: skip
    paths["hlo"].write_text(program[0].as_text())
    paths["stable"].write_text(jax.jit(lambda x: x + 1).lower(1.0).as_text())
    paths["binary"].write_bytes(b"\x89\xff")
    paths["long"].write_text(f"HloModule m\n  %x = f32[2] all-reduce({'%y, ' * 9999}")
    line = refused("bytes", *(word.format(models=models, **paths) for word in argv))
    assert words.format() in line and len(line) < 1000


@pytest.fixture
def fake_lab(monkeypatch):
    """What the lab was asked for; it reports one failed worker."""
    asked = {}

    def run(network, command, **options):
        options.pop("write")("0 | a line")
        asked.update(options, network=network, command=command)
        return lab.Report((lab.WorkerReport(7, 10, 20),), 1.5, 7)

    monkeypatch.setattr(lab, "run", run)
    monkeypatch.setattr(lab, "check", lambda network: asked.update(checked=network))
    return asked


def test_the_lab_gets_all_options_and_its_exit_code_is_ours(fake_lab, capsys, tmp_path):
    report = tmp_path / "run.json"
    argv = [
        "lab", "--workers", "4", "--rate", "100mbit", "--delay", "5ms", "--subnet", "10.9.0.0/24",
        "--logs", "logs", "--timeout", "90s", "--port", "4321", "--grace", "2s",
        "--report", str(report), "--", "python", "train.py", "--workers", "3", "--", "x",
    ]  # fmt: skip
    assert cli.main(argv) == 7
    assert fake_lab == {
        "network": lab.Network(4, 1e8, 0.005, "10.9.0.0/24"),
        "command": ["python", "train.py", "--workers", "3", "--", "x"],
        "logs": Path("logs"),
        "timeout": 90.0,
        "port": 4321,
        "grace": 2.0,
    }
    assert json.loads(report.read_text()) == {
        "workers": [{"exit_code": 7, "sent_bytes": 10, "received_bytes": 20}],
        "seconds": 1.5,
        "exit_code": 7,
    }
    shown = capsys.readouterr().out
    assert shown.startswith("0 | a line\n") and "exit code" in shown


def test_the_lab_has_its_own_defaults(fake_lab):
    assert cli.main(["lab", "--workers", "2", "--", "true"]) == 7
    assert fake_lab == {"network": lab.Network(2), "command": ["true"]}


def test_the_lab_is_checked_alone_or_with_a_network(fake_lab, said):
    assert "can run the lab" in said("lab", "--check")
    assert fake_lab == {"checked": None}
    said("lab", "--check", "--delay", "5ms")
    assert fake_lab == {"checked": lab.Network(2, delay=0.005)}


def test_a_report_that_cannot_be_written_after_the_run_is_printed(fake_lab, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["lab", "--workers", "2", "--report", "/dev/full", "--", "true"])
    out, error = capsys.readouterr()
    assert error.startswith(
        "error: /dev/full: No space left on device; the report is printed instead"
    )
    assert json.loads(out[out.index("{") :])["workers"][0]["sent_bytes"] == 10


def test_a_report_of_before_is_kept_until_the_next_is_there(fake_lab, monkeypatch, tmp_path):
    def run(*_, **__):
        raise lab.LabError("no permission")

    monkeypatch.setattr(lab, "run", run)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for path in (old, new):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["lab", "--workers", "2", "--report", str(path), "--", "true"])
    assert old.read_text() == "{}" and not new.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workers", "4"], "the command behind --"),
        (["--", "true"], "give --workers"),
        (["--workers", "0", "--", "true"], "number '0'"),
        (["--workers", "2", "--rate", "fast", "--", "true"], "rate 'fast'"),
        (["--workers", "2", "--delay", "5", "--", "true"], "time '5'"),
        (["--workers", "2", "--report", "no/where.json", "--", "true"], "there is no folder no"),
        (["--workers", "2", "--report", "/tmp", "--", "true"], "/tmp: Is a directory; name a file"),
        (["--workers", "2", "--report", "/proc/r.json", "--", "true"], "name a file that can be written"),
        (["--workers", "2", "true"], "unrecognized arguments: true"),
        (["--check", "--", "true"], "-- true: --check starts no command; leave it out"),
        (["--check", "--logs", "a", "--port", "9"], "--logs, --port: it has no effect with --check"),
        (["--check", "--report", "r.json"], "--report: it has no effect with --check"),
        (["--check", "--timeout", "9s", "--grace", "9s"], "--timeout, --grace: it has no effect with"),
    ],
)  # fmt: skip
def test_what_the_lab_cannot_run_is_said_in_one_line(fake_lab, refused, argv, words):
    assert words in refused("lab", *argv)
    assert not fake_lab


def test_a_machine_that_cannot_run_the_lab_says_what_it_lacks(monkeypatch, capsys):
    def check(network):
        raise lab.LabError("no permission; do one of these:\n  - run as root")

    monkeypatch.setattr(lab, "check", check)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["lab", "--check"])
    assert capsys.readouterr().err == "error: no permission; do one of these:\n  - run as root\n"


def help_of(capsys, *command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [(), ("plan",), ("bytes",), ("lab",)])
def test_help_describes_the_command_and_ends_with_examples(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, *command)
    assert max(map(len, text.splitlines())) <= 80
    usage, description, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: {' '.join(['lioncub', *command])}") and len(description) > 100
    last = text.split("\n\n")[-1].splitlines()
    assert last[0] == "examples:" and all(line.startswith("  ") for line in last[1:])


EXAMPLES = {"": 3, "plan": 4, "bytes": 3, "lab": 3}


@pytest.fixture(scope="module")
def example_program():
    lowered, mesh = examples.lowered()
    return lowered.compile(), mesh


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_examples_of_the_help_run(command, capsys, monkeypatch, tmp_path, example_program):
    """In this process, whose devices are there already: --devices would come too late."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examples, "lowered", lambda: example_program)  # compiled once for all
    text = help_of(capsys, *filter(None, [command])).split("examples:\n")[1]
    lines = text.replace("\\\n", " ").splitlines()
    assert len(lines) == EXAMPLES[command]
    for line in lines:
        program, *argv = shlex.split(line)
        if program == "python":
            assert argv == ["-m", "lioncub_jax.cli.examples", ">", "step.hlo"]
            Path("step.hlo").write_text(example_program[0].as_text())
            continue
        if "--devices" in argv:
            at = argv.index("--devices")
            assert argv[at + 1] == str(len(jax.devices()))
            del argv[at : at + 2]
        try:
            assert (program, cli.main(argv)) == ("lioncub", 0), line
        except SystemExit:
            assert argv[0] == "lab", line
            pytest.skip(capsys.readouterr().err)
        assert capsys.readouterr().out, line


def test_the_examples_count_their_parameters_rightly():
    size = sum(leaf.size for leaf in jax.tree.leaves(examples.model()))
    assert f"--params {size}" in bytes_command.EPILOG


# --- The process: how it is started, and how it ends


def program_of(*argv):
    return [sys.executable, "-m", "lioncub_jax", *argv]


OUTER = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_version_is_that_of_the_package(capsys):
    installed = importlib.metadata.version("lioncub_jax")
    assert lc.__version__ == installed
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lioncub_jax {installed}\n"


def test_the_folder_of_the_command_is_a_program_too():
    done = subprocess.run(
        [sys.executable, "-m", "lioncub_jax.cli", "--version"],
        capture_output=True, text=True, env=OUTER, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"lioncub_jax {lc.__version__}\n")


@pytest.mark.parametrize("argv", [["--help"], GIVEN])
def test_a_closed_pipe_ends_the_command_without_a_word(argv):
    """As by ``| head -1``, which may end before anything is written."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        program_of(*argv), stdout=write, stderr=subprocess.PIPE, env=OUTER, text=True, timeout=120
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("argv", [["--help"], GIVEN])
def test_a_full_disk_is_one_sentence(argv):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            program_of(*argv),
            stdout=full,
            stderr=subprocess.PIPE,
            env=OUTER,
            text=True,
            timeout=120,
        )
    said = "error: standard output: No space left on device; print to another place\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_an_interrupted_measurement_ends_without_a_traceback(models):
    # In the background of a script Ctrl-C is ignored, unless told otherwise.
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from lioncub_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", start, *SIZED, "--measure", f"{models}:sleeps"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=OUTER, text=True
    )
    assert process.stdout.readline() == "asleep\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130


def test_a_worker_line_that_cannot_be_printed_ends_the_run(monkeypatch, fake_lab, capsys):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    assert cli.main(["lab", "--workers", "2", "--", "true"]) == 141


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_of_any_width_shows_everything(width, monkeypatch, capsys, models):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for argv in (GIVEN, ["bytes", f"{models}:compiled", "--params", "8450"]):
        assert cli.main(argv) == 0
        text = capsys.readouterr().out
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        assert max(map(len, text.splitlines())) <= width
        if argv == GIVEN:
            plan = planner_report.plan(10**8, planner.Cluster(8, LINK), 0.125)
            assert " ".join(planner_report.advice(plan).split()) in " ".join(text.split())
            assert all(units.seconds_text(found.step) in text for found in plan.estimates.values())


def test_numbers_need_neither_flax_nor_orbax_nor_rich():
    """What the package itself loads is not this command's doing."""
    look = (
        "import sys, lioncub_jax.cli.main as _; before = set(sys.modules);"
        "from lioncub_jax.cli import main; main(sys.argv[1:]);"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, *GIVEN, "--json"],
        capture_output=True, text=True, env=OUTER, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not {"flax", "orbax", "rich", "matplotlib"} & set(done.stderr.split())


def test_types_are_in_the_package_and_the_wheel_takes_all_of_it():
    for name in ("py.typed", "planner/evidence.json"):
        assert importlib.resources.files(lc).joinpath(name).is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["lioncub_jax"]}, "all files of the folder, none left out"
    assert project["project"]["version"] == "0.2.0"


def test_the_documentation_shows_what_is_printed(said):
    text = (ROOT / "docs" / "planner.md").read_text()
    (block,) = re.findall(r"<!-- plan -->\n```console\n\$ lioncub (.*?)```", text, re.DOTALL)
    command, *lines = block.splitlines()
    printed = [line.rstrip() for line in said(*command.split()).splitlines()]
    assert len(lines) > 20
    assert set(lines) - {"..."} <= set(printed)
