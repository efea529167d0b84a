"""The commands as people call them: what they print, and what they refuse with which words.

What needs a process of its own, because of what it loads or starts, is in test_house.py.
"""

import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import lioncub_jax as lc
from lioncub_jax import cli, lab, planner, units
from lioncub_jax.cli import examples, output, targets
from lioncub_jax.cli import plan as plan_command

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

def beside():
    from lies_beside import ten
    return ten()

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
SHORT = {
    "PLAN": "plan --workers 8 --bandwidth 1gbit",
    "SIZED": "plan --workers 8 --bandwidth 1gbit --params 100M",
    "GIVEN": "plan --workers 8 --bandwidth 1gbit --params 100M --compute 125ms",
    "NAMED": "plan --params 100M --compute 125ms --cluster",
}
LINK = planner.Link(1e9, 50e-6)
EIGHT = planner.Cluster(8, LINK)


def argv_of(line):
    words = (SHORT.get(word, word) for word in line.split(" "))
    return shlex.split(" ".join(words))


def rows_of(text):
    """``command line => words`` of each line."""
    return [line.split(" => ") for line in text.strip("\n").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Targets in a file, programs in files, and files that are none."""
    path = tmp_path_factory.mktemp("targets")
    (path / "models.py").write_text(MODELS)
    (path / "lies_beside.py").write_text("import jax.numpy as jnp\ndef ten(): return jnp.ones(10)")
    (path / "divides.py").write_text("1 / 0")
    (path / "exits.py").write_text("import sys; sys.exit('usage: none')")
    plain = jax.jit(lambda x: x + 1).lower(1.0)
    (path / "alone.hlo").write_text(plain.compile().as_text())
    (path / "stable.mlir").write_text(plain.as_text())
    (path / "binary.bin").write_bytes(b"\x89\xff")
    (path / "long.hlo").write_text(f"HloModule m\n  %x = f32[2] all-reduce({'%y, ' * 9999}")
    return path


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    """A target's folder is put on the path for good, in a process that ends with its command."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def program(folder):
    made = targets.load(f"{folder}/models.py:compiled")()
    (folder / "step.hlo").write_text(made[0].as_text())
    return made


@pytest.fixture
def said(capsys):
    """``line -> what a command that works printed``."""

    def run(line):
        assert cli.main(argv_of(line)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def numbers(said):
    return lambda line: json.loads(said(f"{line} --json"))


@pytest.fixture
def refused(capsys):
    """``line -> the one line of a command that does not``."""

    def run(line):
        with pytest.raises(SystemExit) as end:
            cli.main(argv_of(line))
        out, error = capsys.readouterr()
        assert (end.value.code, out, error.count("\n")) == (2, "", 1)
        assert error.startswith("error: ") and len(error) < 1000
        return error

    return run


# --- plan


def json_of(cluster=EIGHT, *host, **asked):
    found = planner.as_json(planner.plan(10**8, cluster, 0.125, *host, **asked))
    return json.loads(output.as_text(found))


def test_the_plan_shows_a_table_for_each_rate_and_advice(said):
    text = said("GIVEN --bandwidth 1gbit,100mbit,10tbit --late 1%:2s")
    late = planner.Cluster(8, LINK, late=planner.Late(0.01, 2.0))
    for rate in (1e9, 1e8, 1e13):
        assert f"8 workers at {units.rate_text(rate)}" in text
        assert planner.advice(planner.plan(10**8, late.at(rate), 0.125)) in text
    assert text.count("1-bit vote  ") == 4  # three tables and the legend
    assert text.endswith(f"{planner.legend()}\n")
    assert "100,000,000 parameters; compute 125 ms a step (given); latency 50 us; packing" in text
    assert "Late by 2 s in 1% of a worker's steps: all wait, 155 ms a step, less with" in text
    assert "Late" not in said("GIVEN")


ADVICE = """
GIVEN --bandwidth 100mbit => At 100 Mbit/s use make_train_step(..., coded_gradients(optax.sgd(1.0)),
GIVEN --bandwidth 10tbit => Do not use this: at 10 Tbit/s nothing is to the loss 1.05 times as soon as
GIVEN --workers 1 => Do not use this: one worker has no others to exchange votes with; use optax.lion.
GIVEN --devices-per-worker 2 --inside-bandwidth 1tbit => it has no two levels: each device is a worker
GIVEN => give a model's shapes (--model FILE.py:NAME)
"""


@pytest.mark.parametrize(("line", "words"), rows_of(ADVICE))
def test_a_plan_says_what_to_use_and_what_does_not_work_there(said, line, words):
    assert words in " ".join(said(line).split())


def test_every_option_of_the_plan_reaches_the_model(numbers):
    found = numbers(
        "GIVEN --latency 1ms --devices-per-worker 4 --inside-bandwidth 900gbit "
        "--memory-bandwidth 1tbyte --platform cpu --late 1%:2s"
    )
    cluster = planner.Cluster(
        8, planner.Link(1e9, 1e-3), 4, planner.Link(900e9, 5e-6), True, late=planner.Late(0.01, 2.0)
    )  # fmt: skip
    plan = json_of(cluster, planner.Host(8e12))
    assert found == {"parameters": 10**8, "plans": [plan], "cluster": None}


def test_the_data_reach_the_plan(numbers):
    assert plan_command.DATA == planner.DATA
    assert numbers("GIVEN --data different")["plans"] == [json_of(data="different")]


@pytest.mark.parametrize("name", planner.CLUSTERS)
def test_machines_have_names(said, numbers, name):
    named = planner.cluster_named(name)
    found, text = numbers(f"NAMED {name}"), said(f"NAMED {name}")
    assert found["plans"] == [json_of(named.cluster, planner.Host(named.memory_bandwidth))]
    assert text.startswith(f"{name}: {named.about}.")
    assert f"\nSource: {named.source} Latencies are assumed.\n" in text
    assert ("An all-to-all gets" in text) == (named.cluster.all_to_all_share < 1)


def test_what_is_given_overrides_a_name(numbers):
    given = (
        "--workers 4 --bandwidth 10gbit,1gbit --latency 1ms --inside-bandwidth 1tbit "
        "--devices-per-worker 2 --memory-bandwidth 1tbyte --platform cpu"
    )
    found, host = numbers(f"NAMED h100-64 {given}"), planner.Host(8e12)
    cluster = planner.Cluster(4, planner.Link(1e10, 1e-3), 2, planner.Link(1e12, 5e-6), True)
    assert found["plans"] == [json_of(cluster.at(rate), host) for rate in (1e10, 1e9)]


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("models.py:huge", 40_000**2 + 3 * 40_000), ("models.py:variables", 2 * 30),
        ("models:tree", 7_000_000_003), ("models.py:beside", 10),
    ],
)  # fmt: skip
def test_models_are_counted_by_shape_without_being_made(numbers, model, size):
    assert numbers(f"PLAN --compute 1s --model {model}")["parameters"] == size


def test_a_measured_step_is_the_compute_time(said):
    assert "(measured here)" in said("SIZED --measure models.py:one_step")
    assert 0 < targets.measure("models.py:one_step", runs=1) < 1


REFUSED = """
 => plan | bytes | lab
fly => invalid choice: 'fly'
PLAN => one of the arguments --params --model is required
SIZED => no compute time: without it every speedup would look better than it is; give
plan --params 1M --workers 8 => error: no --bandwidth: give it, or machines by name
plan --params 1M --bandwidth 1gbit => error: no --workers: give it, or machines by name
plan --params 1M => no --workers and no --bandwidth: give it, or machines by name, such as
NAMED v5 => cluster 'v5': give one of v5e-8, v5e-256,
plan --params 1M --cluster v5e-8 => no compute time
NAMED h100-64 --devices-per-worker 1 --inside-bandwidth 1tbit => --inside-bandwidth: it has no effect
NAMED v5e-8 --devices-per-worker 4 => 4 without --inside-bandwidth: give the rate
GIVEN --workers 0 => number '0': give a number above zero
GIVEN --workers -3 => number '-3': give a number above zero
GIVEN --workers 2.5 => number '2.5': give a whole number
GIVEN --workers 1e308 => number '1e308': give one of at most 1e+15
GIVEN --params '7 billion' => unit 'billion' is not one of k, m, b, t
GIVEN --params 1e300t => number '1e300t' is too large for a number
GIVEN --bandwidth 1gbit,fast => rate 'fast': give a number and a unit
GIVEN --bandwidth 100 => unit '' is not one of
GIVEN --bandwidth 0gbit => rate '0gbit': give a number above zero
GIVEN --compute 0s => time '0s': give a number above zero
GIVEN --latency 50 => time '50': unit '' is not one of ns, us, ms, s
GIVEN --late 1% => late '1%': give a share of steps and a time, such as 1%:2s
GIVEN --late 0.01:2s => share '0.01': unit '' is not one of %; give 1% or 0.5%
GIVEN --late 0%:2s => share '0%': give a number above zero
GIVEN --late 101%:2s => share '101%': give at most 100%
GIVEN --late 1%:2 => time '2': unit '' is not one of ns, us, ms, s
GIVEN --data mine => invalid choice: 'mine' (choose from
GIVEN --devices-per-worker 8 => 8 without --inside-bandwidth: give the rate
GIVEN --inside-bandwidth 1tbit => --inside-bandwidth: it has no effect without
GIVEN --work 9 => unrecognized arguments: --work 9
GIVEN --model m.py:f => not allowed with argument --params
GIVEN --measure m.py:f => not allowed with argument --compute
GIVEN -- python => only lab and run take a command
run --workers 2 => give --workers, and the command behind --
run -- true => give --workers, and the command behind --
run --workers 2 --min 3 -- true => min=3 is above workers=2
run --workers 2 --events /nowhere/x -- true => there is no folder /nowhere
SIZED --measure divides.py:step => divides.py failed with ZeroDivisionError: division by zero
SIZED --measure exits.py:step => SystemExit: usage: none
SIZED --measure models.py:text => returned no jax array to wait for
PLAN --compute 1s --model models.py => give MODULE:NAME or FILE.py:NAME
PLAN --compute 1s --model models.py: => give MODULE:NAME or FILE.py:NAME
PLAN --compute 1s --model nowhere.py:huge => nowhere.py: there is no such file
PLAN --compute 1s --model no_such:huge => importing no_such failed with ModuleNotFoundError
PLAN --compute 1s --model models.py:hugh => there is no 'hugh' in
PLAN --compute 1s --model models.py:limit => limit is a int: give a function
PLAN --compute 1s --model models.py:fails => failed with RuntimeError: no such layer (in models.py, line
PLAN --compute 1s --model models.py:fails_at_length => first words below below
PLAN --compute 1s --model models.py:needs => missing 1 required positional argument: 'width'
PLAN --compute 1s --model models.py:text => returned str: give an nnx.Module, linen variables or a tree
PLAN --compute 1s --model models.py:integers => returned array at ['ids'] of int32: parameters are floating
PLAN --compute 1s --model models.py:nothing => returned no arrays
"""


@pytest.mark.parametrize(("line", "words"), rows_of(REFUSED))
def test_what_plan_and_run_cannot_do_is_said_in_one_line(refused, line, words):
    assert words in refused(line)


# --- bytes


def test_bytes_are_those_of_the_accounting(said, numbers, program):
    found = numbers("bytes step.hlo --mesh data=4,tp=2 --params 8450")
    predicted = lc.traffic.predict([jax.ShapeDtypeStruct((130, 65), "float32")], 4)
    votes = [one for one in found["collectives"] if one["op"] != "all-reduce"]
    assert sum(one["sent_bytes"] for one in votes) == predicted.sent_bytes
    assert {tuple(one["axes"]) for one in votes} == {("data",)}
    sent = lc.traffic.sent_bytes(lc.traffic.collectives(*program))
    assert found["every_step"] == {",".join(axes): count for axes, count in sent.items()}
    assert (found["mesh"], found["in_branches"]) == ({"data": 4, "tp": 2}, {})
    assert found["workers"] == ["data"]
    assert found["float32_all_reduce"] == 2 * 3 / 4 * 4 * 8450
    text = said("bytes step.hlo --mesh data=4,tp=2 --params 8450")
    assert text == said("bytes models.py:lowered --params 8450") and "all-to-all" in text
    assert "A float32 all-reduce of 8,450 parameters over data sends 50.7 kB" in text
    assert "kB between the workers of 'data' in a step" in text
    assert "no collective" in said("bytes alone.hlo --mesh data=1")


NO_BYTES = """
nowhere.hlo => nowhere.hlo: no such file
step.hlo => does not say which mesh it is for: give --mesh data=4,tp=2
step.hlo --mesh data => mesh 'data': give names and sizes
step.hlo --mesh data=4,data=2 => each name once
step.hlo --mesh data=four => mesh 'data=four'
step.hlo --mesh data=0 => mesh 'data=0'
step.hlo --mesh data=4 => runs on 8 devices and the mesh {'data': 4} has 4
step.hlo --mesh data=8 --devices 8 => is compiled; leave it
models.py:lowered --mesh data=8 => returns its own: leave it out
models.py:lowered --devices 4 => --devices 4: jax has started already
models.py:text => returned str: return (step.lower(...), mesh)
models.py:traced_only => not (Traced, Mesh)
models.py:no_mesh => not (Lowered, ndarray)
models.py:does_not_compile => does_not_compile returned failed with RuntimeError: unsupp
models.py:fails => failed with RuntimeError: no such layer
stable.mlir --mesh data=4,tp=2 => stable.mlir: this is StableHLO, the program before it is
binary.bin --mesh data=8 => binary.bin is not text: give what compiled.as_text() returned
long.hlo --mesh data=1 => [...]
/proc/self/mem --mesh data=8 => error:
/tmp --mesh data=8 => /tmp: a folder; give compiled.as_text() in a file
"""


@pytest.mark.parametrize(("line", "words"), rows_of(NO_BYTES))
def test_what_has_no_bytes_is_said_in_one_line(refused, program, line, words):
    assert words in refused(f"bytes {line}")


# --- lab


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


def test_the_lab_gets_all_options_and_its_exit_code_is_ours(fake_lab, capsys):
    line = (
        "lab --workers 4 --rate 100mbit --delay 5ms --logs logs --timeout 90s "
        "--grace 2s --report run.json -- python train.py --workers 3 -- x"
    )
    assert cli.main(argv_of(line)) == 7
    assert fake_lab == {
        "network": lab.Network(4, 1e8, 0.005),
        "command": ["python", "train.py", "--workers", "3", "--", "x"],
        "logs": Path("logs"), "timeout": 90.0, "grace": 2.0,
    }  # fmt: skip
    assert json.loads(Path("run.json").read_text()) == {
        "workers": [{"exit_code": 7, "sent_bytes": 10, "received_bytes": 20}],
        "seconds": 1.5,
        "exit_code": 7,
    }
    shown = capsys.readouterr().out
    assert shown.startswith("0 | a line\n") and "exit code" in shown


def test_the_lab_has_its_own_defaults_and_is_checked_alone_or_with_a_network(fake_lab, said):
    assert cli.main(argv_of("lab --workers 2 -- true")) == 7
    assert fake_lab == {"network": lab.Network(2), "command": ["true"]}
    assert "can run the lab" in said("lab --check")
    assert fake_lab["checked"] is None
    said("lab --check --delay 5ms")
    assert fake_lab["checked"] == lab.Network(2, delay=0.005)


def test_a_report_that_cannot_be_written_after_the_run_is_printed(fake_lab, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv_of("lab --workers 2 --report /dev/full -- true"))
    out, error = capsys.readouterr()
    assert error.startswith(
        "error: /dev/full: No space left on device; the report is printed instead"
    )
    assert json.loads(out[out.index("{") :])["workers"][0]["sent_bytes"] == 10


def test_a_machine_that_cannot_run_the_lab_says_what_it_lacks_and_no_report_is_touched(
    monkeypatch, capsys
):
    def missing(*_, **__):
        raise lab.LabError("no permission; do one of these:\n  - run as root")

    monkeypatch.setattr(lab, "check", missing)
    monkeypatch.setattr(lab, "run", missing)
    old = Path("old.json")
    old.write_text("{}")
    for line in (
        "lab --check",
        *(f"lab --workers 2 --report {x}.json -- true" for x in ("old", "new")),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(argv_of(line))
        said = "error: no permission; do one of these:\n  - run as root\n"
        assert capsys.readouterr().err == said
    assert old.read_text() == "{}" and not Path("new.json").exists()


NO_LABS = """
--workers 4 => the command behind --
-- true => give --workers
--workers 0 -- true => number '0'
--workers 2 --rate fast -- true => rate 'fast'
--workers 2 --delay 5 -- true => time '5'
--workers 2 --report no/where.json -- true => there is no folder no
--workers 2 --report /tmp -- true => /tmp: Is a directory; name a file
--workers 2 --report /proc/r.json -- true => name a file that can be written
--workers 2 true => unrecognized arguments: true
--check -- true => -- true: --check starts no command; leave it out
--check --logs a => --logs: it has no effect with --check
--check --report r.json => --report: it has no effect with --check
--check --timeout 9s --grace 9s => --timeout, --grace: it has no effect with
"""


@pytest.mark.parametrize(("line", "words"), rows_of(NO_LABS))
def test_what_the_lab_cannot_run_is_said_in_one_line(fake_lab, refused, line, words):
    assert words in refused(f"lab {line}")
    assert not fake_lab


# --- What is printed


@pytest.fixture(scope="module")
def example_program():
    lowered, mesh = examples.lowered()
    return lowered.compile(), mesh


@pytest.mark.parametrize("command", ["", "plan", "bytes", "lab"])
def test_the_examples_of_the_help_run(command, capsys, monkeypatch, tmp_path, example_program):
    """In this process, whose devices are there already: --devices would come too late."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examples, "lowered", lambda: example_program)  # compiled once for all
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: lioncub {command}".rstrip())
    lines = text.split("\nexamples:\n")[1].replace("\\\n", " ").splitlines()
    assert len(lines) >= 3
    for line in lines:
        if line.strip() == "python -m lioncub_jax.cli.examples > step.hlo":
            Path("step.hlo").write_text(example_program[0].as_text())
            continue
        start, *argv = shlex.split(line.replace(f"--devices {len(jax.devices())}", ""))
        try:
            assert (start, cli.main(argv)) == ("lioncub", 0), line
        except SystemExit:
            assert argv[0] == "lab", line
            pytest.skip(capsys.readouterr().err)
        assert capsys.readouterr().out, line


def test_the_documentation_shows_what_is_printed(said):
    text = (ROOT / "docs" / "planner.md").read_text()
    block = re.search(r"<!-- plan -->\n```console\n\$ lioncub (.*?)```", text, re.S)
    command, *lines = block[1].splitlines()
    printed = [line.rstrip() for line in said(command).splitlines()]
    assert len(lines) > 20 and set(lines) - {"..."} <= set(printed)


# --- The process: how it is started, and how it ends


def test_the_version_and_the_command_are_those_of_the_package(capsys):
    installed = importlib.metadata.version("lioncub_jax")
    assert lc.__version__ == installed
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lioncub_jax {installed}\n"
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="lioncub")
    assert command.load() is cli.main


def ended(*program, **streams):
    """Exit code, and what was said, of a process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.Popen(
        [sys.executable, *program], stderr=subprocess.PIPE, env=environment, text=True, **streams
    )
    if done.stdout:
        assert done.stdout.readline() == "asleep\n"
        done.send_signal(signal.SIGINT)
    return done.communicate(timeout=120)[1], done.returncode


def test_a_closed_pipe_ends_the_command_without_a_word():
    """As by ``| head -1``, which may end before anything is written."""
    read, write = os.pipe()
    os.close(read)
    assert ended("-m", "lioncub_jax", "--help", stdout=write) == ("", 141)
    os.close(write)


def test_a_full_disk_is_one_sentence():
    said = "error: standard output: No space left on device (lioncub plan --help has examples)\n"
    with open("/dev/full", "w") as full:
        assert ended("-m", "lioncub_jax", *argv_of("GIVEN"), stdout=full) == (said, 2)


def test_an_interrupted_measurement_ends_without_a_traceback():
    # In the background of a script Ctrl-C is ignored, unless told otherwise.
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from lioncub_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = argv_of("SIZED --measure models.py:sleeps")
    assert ended("-c", start, *argv, stdout=subprocess.PIPE) == ("interrupted\n", 130)


def test_a_worker_line_that_cannot_be_printed_ends_the_run(monkeypatch, fake_lab):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    assert cli.main(argv_of("lab --workers 2 -- true")) == 141
