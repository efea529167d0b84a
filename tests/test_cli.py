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

import jax
import pytest
from conftest import absent
from pages import ROOT

import lioncub_jax as lc
from lioncub_jax.audit import units
from lioncub_jax.tools import cli
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.cli import examples, output, targets
from lioncub_jax.tools.cli import plan as plan_command

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

def lowered():
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tx = lc.communicate(workers="data", momentum=lc.momentum.nothing())
    params = {"w": jnp.ones((130, 65))}
    tx = lc.on_mesh(tx, lc.Workers(mesh, "data"), specs={"w": jax.P()})
    grads = {"w": jnp.ones((4, 130, 65))}
    return jax.jit(tx.update).lower(grads, tx.init(params), params), mesh

def compiled():
    program, mesh = lowered()
    return program.compile(), mesh

def saved():
    return open("step.hlo").read(), lowered()[1]

def stable():
    return jax.jit(lambda x: x + 1).lower(1.0).as_text(), lowered()[1]

def other_mesh():
    return open("step.hlo").read(), jax.sharding.AbstractMesh((4,), ("data",))

def alone():
    return jax.jit(lambda x: x + 1).lower(1.0), jax.sharding.AbstractMesh((1,), ("data",))

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
    "PLAN": "plan --workers 8 --bandwidth 1gbit --tokens-per-worker 32",
    "SIZED": "plan --workers 8 --bandwidth 1gbit --model 100M",
    "QUIET": "plan --workers 8 --bandwidth 1gbit --model 100M --compute 125ms",
    "GIVEN": "plan --workers 8 --bandwidth 1gbit --model 100M --compute 125ms --tokens-per-worker 32",
    "NAMED": "plan --model 100M --compute 125ms --tokens-per-worker 32 --cluster",
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
    (path / "taken").mkdir()
    for name, text in {
        "models.py": MODELS,
        "lies_beside.py": "import jax.numpy as jnp\ndef ten(): return jnp.ones(10)",
        "divides.py": "1 / 0",
        "exits.py": "import sys; sys.exit('usage: none')",
        "taken/json.py": "def text(): return ''",
    }.items():
        (path / name).write_text(text)
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


def plan_of(cluster=EIGHT, **asked):
    return planner.plan(10**8, cluster, 0.125, **({"tokens": 32} | asked))


def json_of(cluster=EIGHT, **asked):
    return json.loads(output.as_text(plan_command.as_json(plan_of(cluster, **asked))))


def test_the_plan_is_three_sentences_for_each_rate_and_a_table_where_it_explains(said):
    rates, plans = "--bandwidth 1gbit,10tbit", [plan_of(EIGHT.at(rate)) for rate in (1e9, 1e13)]
    assert said(f"GIVEN {rates}") == "\n\n".join(map(planner.advice, plans)) + "\n"
    text = said(f"GIVEN --explain {rates}")
    for plan in plans:
        assert f"8 workers at {units.rate_text(plan.cluster.link.bandwidth)}" in text
        assert planner.advice(plan) in text
    assert text.count("owner-lion  ") == 3  # two tables and the legend
    assert "In a program, by names of lioncub_jax:\nvote                lion_cub(...)\n" in text
    assert "100,000,000 parameters; compute 125 ms a step; latency 50 us; packing" in text


ADVICE = """
GIVEN => at 1 Gbit/s, of which tcp collectives reach 80% to 95%, it is
GIVEN --explain => Above 10 Gbit/s and 40 Gbit/s tcp links reach lower shares, so ranges jump there.
GIVEN --network rdma => of which rdma collectives reach 50% to 86%
GIVEN --bandwidth 10tbit => Do not use this: at 10 Tbit/s
GIVEN --workers 1 => Do not use this: one worker has no others to exchange with; use optax.adamw or
QUIET --tokens-per-worker 1M => nobody ran 1,000,000 tokens
QUIET --tokens-per-worker 2048 --data different --explain => nobody ran 2,048 tokens, 8
GIVEN --memory 1200MB --explain => adamw: parameters, gradients and state in float32 take 1.6 GB of a
GIVEN --memory 1MB => Nothing fits: parameters, gradients
GIVEN --explain --devices-per-worker 2 --inside-bandwidth 1tbit => local-2: it has no group=
"""


@pytest.mark.parametrize(("line", "words"), rows_of(ADVICE))
def test_a_plan_says_what_to_use_and_what_does_not_work_there(said, line, words):
    assert words in " ".join(said(line).split())


def test_every_option_of_the_plan_reaches_the_model_and_overrides_a_name(numbers):
    options = (
        "--workers 4 --bandwidth 10gbit,1gbit --latency 1ms --inside-bandwidth 1tbit --network exact "
        "--devices-per-worker 2 --memory-bandwidth 1tbyte --platform cpu --data different --memory 2GB"
    )
    link, inside = planner.Link(1e10, 1e-3, "exact"), planner.Link(1e12, 5e-6, "nvlink")
    cluster = planner.Cluster(4, link, 2, inside, True, memory_bandwidth=8e12)
    asked = {"data": "different", "tokens": 256, "memory": 2e9}
    plans = [json_of(cluster.at(rate), **asked) for rate in (1e10, 1e9)]
    answer = numbers(f"QUIET --tokens-per-worker 256 {options}")
    assert answer == {"parameters": 10**8, "plans": plans, "cluster": None}
    named = numbers(f"QUIET --tokens-per-worker 256 --cluster h100-64 {options}")
    assert named["plans"] == plans


def test_a_plan_takes_what_a_probe_measured(said, folder):
    points = [[1e3, 0.002], [1e8, 1.0]]
    ops = "all-reduce", "all-reduce bfloat16", "all-to-all", "all-gather"
    measured = planner.Measured(8, dict.fromkeys(ops, points), 8e11, compute=0.1, overlap=0.5)
    (folder / "probe.json").write_text(output.as_text(measured))
    line = "plan --model 100M --tokens-per-worker 256 --measured probe.json"
    assert "on the machines that were measured it is " in said(line)
    cluster = planner.Cluster(8, planner.Link(float("inf"), kind="exact"), measured=measured)
    plan = planner.plan(10**8, cluster, 0.1, tokens=256)
    assert said(line) == planner.advice(plan) + "\n"
    assert said(f"{line} --explain").splitlines()[2] == "8 workers as measured"
    of_another = measured._replace(parameters=10**6)
    (folder / "probe.json").write_text(output.as_text(of_another))
    assert said(f"{line} --compute 100ms").startswith(planner.advice(plan)[:30])
    with pytest.raises(SystemExit, match="2"):  # a step of a hundredth of the parameters
        cli.main(argv_of(line))


# A node of GPUs, and a pod of chips whose all-to-all is slow; others for a release.
QUICK = "p4d-64", "v5e-256"
NAMED = [pytest.param(x, marks=() if x in QUICK else pytest.mark.long) for x in planner.clusters()]


@pytest.mark.parametrize("name", NAMED)
def test_machines_have_names(said, numbers, name):
    named = planner.cluster_named(name)
    found, text = numbers(f"NAMED {name}"), said(f"NAMED {name} --explain")
    assert found["plans"] == [json_of(named.cluster)]
    assert text.startswith(f"{name}: {named.about}.")
    assert f"\nSource: {named.source} Latencies are assumed.\n" in text
    assert ("An all-to-all gets" in text) == (named.cluster.all_to_all_share < 1)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("models.py:huge", 40_000**2 + 3 * 40_000), ("models.py:variables", 2 * 30),
        ("models:tree", 7_000_000_003), ("models.py:beside", 10),
    ],
)  # fmt: skip
def test_models_are_counted_by_shape_without_being_made(numbers, model, size):
    assert numbers(f"PLAN --compute 1s --model {model}")["parameters"] == size


REFUSED = """
 => plan | probe | bytes
fly => invalid choice: 'fly'
PLAN => give --model: a number of parameters such as 7B, or FILE.py:NAME to count them
SIZED => no compute time: without it every speedup would look better than it is; give
SIZED => about 6 * parameters * tokens per worker / the FLOP/s that all devices of a worker reach
plan --model 1M --compute 1s --workers 8 => error: give --workers and --bandwidth, machines by name
plan --model 1M --compute 1s --bandwidth 1gbit => error: give --workers and --bandwidth, machines
NAMED v5 => cluster 'v5': give one of v5e-8, v5e-256,
plan --model 1M --cluster v5e-8 => no compute time
plan --model 1M --cluster v5e-8 => devices of a worker reach; and give --tokens-per-worker, what ONE
NAMED h100-64 --devices-per-worker 1 --inside-bandwidth 1tbit => --inside-bandwidth: it has no effect
GIVEN --workers 0 => number '0': give a number above zero
GIVEN --workers -3 => number '-3': give a number above zero
GIVEN --workers 2.5 => number '2.5': give a whole number
GIVEN --workers 1e308 => number '1e308': give a number above zero, of at most 1e+15
QUIET => error: give --tokens-per-worker, what ONE worker sees in a step, its batch times the length
GIVEN --tokens-per-worker 0.5 => number '0.5': give a whole number
GIVEN --tokens-per-worker 31 => tokens=31: nobody measured less than one window of 32 tokens a worker
GIVEN --memory 24 => size '24': unit '' is not one of b, kb, mb, gb, tb; give 500MB, 24GB or 1.5TB
GIVEN --network fast => invalid choice: 'fast' (choose from
GIVEN --measured nowhere.json => nowhere.json: No such file
GIVEN --measured models.py => models.py: this is no file of lioncub probe --out; write it again
GIVEN --model '7 billion' => unit 'billion' is not one of k, m, b, t
GIVEN --bandwidth 1gbit,fast => rate 'fast': give a number and a unit
GIVEN --bandwidth 100 => unit '' is not one of
GIVEN --bandwidth 0gbit => rate '0gbit': give a number above zero
GIVEN --compute 0s => time '0s': give a number above zero
GIVEN --latency 50 => time '50': unit '' is not one of ns, us, ms, s
GIVEN --data mine => invalid choice: 'mine' (choose from
GIVEN --devices-per-worker 8 => 8 devices in a worker: give the Link between them, inside= (--inside
GIVEN --inside-bandwidth 1tbit => --inside-bandwidth: it has no effect without
GIVEN --work 9 => unrecognized arguments: --work 9
PLAN --compute 1s --model divides.py:step => divides.py failed with ZeroDivisionError: division by zero
PLAN --compute 1s --model exits.py:step => SystemExit: usage: none
PLAN --compute 1s --model taken/json.py:text => give the file another name
PLAN --compute 1s --model models.py => number 'models.py': give a number and a unit, such as 434816
PLAN --compute 1s --model models.py: => give MODULE:NAME or FILE.py:NAME
PLAN --compute 1s --model nowhere.py:huge => importing nowhere.py failed with ModuleNotFoundError
PLAN --compute 1s --model no_such:huge => importing no_such failed with ModuleNotFoundError
PLAN --compute 1s --model models.py:hugh => there is no function 'hugh' in models.py; it has
PLAN --compute 1s --model models.py:limit => there is no function 'limit'
PLAN --compute 1s --model models.py:fails => failed with RuntimeError: no such layer (in models.py, line
PLAN --compute 1s --model models.py:fails_at_length => first words below below
PLAN --compute 1s --model models.py:needs => missing 1 required positional argument: 'width'
PLAN --compute 1s --model models.py:text => returned str: give an nnx.Module, linen variables or a tree
PLAN --compute 1s --model models.py:integers => returned int32 at ['ids']: give an nnx.Module
PLAN --compute 1s --model models.py:nothing => returned no arrays
"""


@pytest.mark.parametrize(("line", "words"), rows_of(REFUSED))
def test_what_plan_cannot_do_is_said_in_one_line(refused, line, words):
    assert words in refused(line)


# --- bytes


def test_bytes_are_those_of_the_accounting(said, numbers, program):
    found = numbers("bytes models.py:saved --params 8450")
    predicted = lc.audit.of(
        lc.lion_cub(1.0, workers="data"), [jax.ShapeDtypeStruct((130, 65), "float32")], absent(4)
    )
    votes = [one for one in found["collectives"] if one["op"] != "all-reduce"]
    assert sum(one["sent_bytes"] for one in votes) == predicted.sent_bytes
    assert {tuple(one["axes"]) for one in votes} == {("data",)}
    assert len(found["collectives"]) == len(lc.audit.collectives(*program))
    assert (found["mesh"], found["workers"]) == ({"data": 4, "tp": 2}, ["data"])
    assert found["float32_all_reduce"] == 2 * 3 / 4 * 4 * 8450
    text = said("bytes models.py:saved --params 8450")
    assert text == said("bytes models.py:lowered --params 8450") and "all-to-all" in text
    assert "A float32 all-reduce of 8,450 parameters over data sends 50.7 kB" in text
    assert "kB between the workers of 'data' in a step" in text
    assert "no collective" in said("bytes models.py:alone")


NO_BYTES = """
models.py:lowered --devices 4 => --devices 4: jax has started already
models.py:text => returned str: return (step.lower(...), mesh)
models.py:traced_only => returned Traced, Mesh: return (step
models.py:no_mesh => returned Lowered, ndarray: return (step
models.py:does_not_compile => does_not_compile returned failed with RuntimeError: unsupp
models.py:fails => failed with RuntimeError: no such layer
models.py:stable => this is not the text of a compiled program
models.py:other_mesh => runs on 8 devices and the mesh {'data': 4} has 4
step.hlo => 'step.hlo': give MODULE:NAME or FILE.py:NAME
"""


@pytest.mark.parametrize(("line", "words"), rows_of(NO_BYTES))
def test_what_has_no_bytes_is_said_in_one_line(refused, program, line, words):
    assert words in refused(f"bytes {line}")


# --- What is printed


@pytest.fixture(scope="module")
def example_program():
    lowered, mesh = examples.lowered()
    return lowered.compile(), mesh


@pytest.mark.parametrize("command", ["", "plan", "bytes"])
def test_the_examples_of_the_help_run(command, capsys, monkeypatch, tmp_path, example_program):
    """In this process, whose devices are there already: --devices would come too late."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examples, "lowered", lambda: example_program)  # compiled once for all
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: lioncub {command}".rstrip())
    lines = text.split("\nexamples:\n")[1].replace("\\\n", " ").splitlines()
    assert lines
    for line in lines:
        start, *argv = shlex.split(line.replace(f"--devices {len(jax.devices())}", ""))
        assert (start, cli.main(argv)) == ("lioncub", 0), line
        assert capsys.readouterr().out, line


@pytest.mark.parametrize("page", ["README.md", "docs/how_to/planner.md"])
def test_the_documentation_shows_what_is_printed(said, page):
    text = (ROOT / page).read_text()
    block = re.search(r"<!-- plan -->\n```console\n\$ lioncub (.*?)```", text, re.S)
    command, *lines = block[1].splitlines()
    assert lines and " ".join(lines).split() == said(command).split()


# --- The process: how it is started, and how it ends


def test_the_version_and_the_command_are_those_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lioncub_jax {lc.__version__}\n"
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


def test_an_interrupted_command_ends_without_a_traceback():
    # In the background of a script Ctrl-C is ignored, unless told otherwise.
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from lioncub_jax.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = argv_of("PLAN --compute 1s --model models.py:sleeps")
    assert ended("-c", start, *argv, stdout=subprocess.PIPE) == ("interrupted\n", 130)
