"""The examples run as a user runs them, refuse bad input in one sentence, and count correctly."""

import functools
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys

import flax
import jax
import numpy as np
import pytest
from conftest import run_python
from pages import ROOT, applied, block, cells, notebook

import lioncub_jax as lc

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
corpus, model, options, training = (
    importlib.import_module(f"gpt.{name}") for name in ("corpus", "model", "options", "training")
)
train_gpt = importlib.import_module("train_gpt")

TINY = f"--layers 1 --width 32 --context 32 --text {json.__file__} {re.__file__}"


def run(command):
    return run_python(*f"{ROOT}/{command}".split(), JAX_PLATFORMS="cpu", COLUMNS="80")


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_demo_leaves_measurements_and_a_sample(tmp_path):
    told = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo"], cwd=ROOT, capture_output=True, text=True
    )
    demo = "examples/train_gpt.py --out runs/demo --overwrite"
    assert told.stdout.rstrip().endswith(f"python {demo}")
    quick = f"{TINY} --steps 4 --batch 2 --sync-every 2 --dropout 0.1 --untied --out {tmp_path}"
    done = run(f"{demo} {quick}")
    assert done.returncode == 0, done.stderr
    first, *steps, last = rows_of(tmp_path)
    assert first["config"]["optimizer"] == "lion-cub" and first["workers"] == 8
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(math.isfinite(row["loss"]) and row["abstained"] == 0 for row in steps)
    assert last["validation_bits_per_byte"] == steps[-1]["validation"] < 8.5
    assert last["sent_bytes_of_a_sync"] > 0
    assert (tmp_path / "sample.txt").stat().st_size > 500
    assert "step 4/4" in done.stdout and "\x1b" not in done.stdout


# --- A CNN, and the diff to plain optax

MEASURE = """
import json, sys
from pathlib import Path
folder, epochs, seeds, devices = Path(sys.argv[1]), *map(int, sys.argv[2:])
best = [train(folder, epochs, seed) for seed in range(seeds)]
sent = []
if devices > 1:
    *state, step = build(0, lambda count: 1e-3)
    if "nnx" in globals():
        state.append(nnx.state(state[0], nnx.Param))
    batch = np.zeros((BATCH, 8, 8, 1), np.float32), np.zeros(BATCH, np.int32)
    compiled = step.lower(*state, batch).compile()
    found = lc.audit.collectives(getattr(compiled, "compiled", compiled), workers.mesh)
    found = [one for one in found if one.payload_bytes > 8]
    sent = [(one.operands[0].dtype, one.payload_bytes, one.sent_bytes) for one in found]
rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
print(json.dumps({"best": best, "sent": sent, "last": rows[-1]}))
"""


def digits(source, folder, epochs, seeds, devices):
    """Best accuracies by seed, what travels between workers in a step, and the last row of the log."""
    known = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""}
    code, sizes = source.partition("if __name__")[0] + MEASURE, (epochs, seeds, devices)
    done = run_python("-c", code, folder, *sizes, **known)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("epochs", "seeds"), [(6, 1), pytest.param(20, 3, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "lines"), [("digits_nnx", (4, 1)), ("digits_linen", (4, 1))])
def test_a_cnn_by_votes_is_as_good_as_by_plain_optax_on_one_device(
    name, lines, epochs, seeds, tmp_path
):
    source, diff = (
        (EXAMPLES / f"{name}.py").read_text(),
        block("how_to/trainer.md", f"example: {name}"),
    )
    assert tuple(len(re.findall(rf"^\{sign}", diff, re.M)) for sign in "+-") == lines
    plain = applied(diff, source, " +", " -")
    assert "lc." not in plain
    for folder in ("votes", "plain"):
        (tmp_path / folder).mkdir()
    votes = digits(source, tmp_path / "votes", epochs, seeds, 4)
    if name == "digits_nnx" or seeds > 1:  # else the bound below is enough
        alone = digits(plain, tmp_path / "plain", epochs, seeds, 1)
        # One of 360 digits is 0.003; seeds differ by 0.01.
        assert np.mean(votes["best"]) > np.mean(alone["best"]) - 0.02
    assert min(votes["best"]) > 0.9 and 0 < votes["last"]["loss"] < 1
    statistics = 4 * 2 * (16 + 32)  # bytes, in the all-reduce of the numbers of the metrics
    [floats] = [size for dtype, size, _ in votes["sent"] if dtype != "u32"]
    assert statistics < floats <= statistics + 16
    float32 = lc.audit.float32_all_reduce_bytes(6186, 4)
    assert floats < sum(sent for *_, sent in votes["sent"]) < float32 / 6
    saved = flax.serialization.msgpack_restore((tmp_path / "votes/best.msgpack").read_bytes())
    means = [x.shape for path, x in jax.tree.leaves_with_path(saved) if path[-1].key == "mean"]
    assert sorted(means) == [(16,), (32,)]  # of all workers


# --- A transformer by Muon, and a vision transformer


@pytest.mark.parametrize(("name", "share"), [("transformer", 8), ("vit", 8)])
def test_transformers_learn_send_few_bytes_and_draw_their_loss(name, share, tmp_path):
    code, steps = (EXAMPLES / f"{name}.py").read_text(), 40
    code, found = re.subn(r"^(STEPS\b[^=]* = )\d+", rf"\g<1>{steps}", code, flags=re.M)
    assert found == 1
    (tmp_path / f"{name}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = re.search(r"loss ([\d.]+) before, ([\d.]+) after 40", done.stdout).groups()
    assert float(after) < 0.8 * float(before)
    sent, float32 = re.search(r"sends (\d+) kB .* are (\d+) kB", done.stdout).groups()
    assert int(sent) < int(float32) / share
    assert (tmp_path / f"runs/{name}.png").stat().st_size > 5000


def test_the_notebook_is_the_tutorial():
    """If not: python tests/pages.py --notebook start/tutorial.md > examples/tutorial.ipynb."""
    kept = json.loads((EXAMPLES / "tutorial.ipynb").read_text())
    assert kept == notebook("start/tutorial.md")
    code = ["".join(cell["source"]) for cell in kept["cells"] if cell["cell_type"] == "code"]
    assert "\n".join(code).split() == cells("start/tutorial.md").split()


# --- The smallest run


@pytest.mark.parametrize("steps", [60, pytest.param(300, marks=pytest.mark.long)])
def test_the_quickstart_learns_and_counts_its_bytes(steps):
    code = (EXAMPLES / "quickstart.py").read_text()
    assert code.count("300") == 2
    # As for users: it computes more than it compiles.
    done = run_python("-c", code.replace("300", str(steps)), XLA_FLAGS="", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    before, after = re.search(r"loss ([\d.]+) before, ([\d.]+) after", done.stdout).groups()
    assert float(after) < 0.5 * float(before)
    assert re.search(r"each worker sends \d+ kB a step", done.stdout)


@pytest.mark.parametrize(("accelerators", "workers"), [(1, 8), (4, 4)])
def test_the_quickstart_has_workers_on_any_machine(accelerators, workers, monkeypatch):
    """Where JAX has that many devices, and those of the CPU beside them."""
    cpu = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda kind=None: cpu if kind else cpu[:accelerators])
    monkeypatch.setattr(jax, "device_count", lambda: accelerators)
    monkeypatch.setattr(jax, "make_mesh", functools.partial(jax.make_mesh, devices=jax.devices()))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    names = {}
    exec((EXAMPLES / "quickstart.py").read_text().partition("class NextByte")[0], names)
    assert names["workers"].num_gradients == workers


def test_a_cluster_that_is_none_is_refused():
    refused = run(f"examples/train_gpt.py {TINY} --distributed")
    assert refused.returncode == 2
    assert "error: nobody says which processes there are" in refused.stderr.splitlines()[-1]


# --- In this process


def train_here(arguments):
    """Runs the program on the eight devices that are here; its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.config, "update", lambda *_: None)
        try:
            train_gpt.main(arguments.split())
        except SystemExit as end:
            return end.code
    return 0


def test_a_run_that_is_stopped_goes_on_on_another_mesh_as_if_it_had_not(
    tmp_path, monkeypatch, capsys
):
    same = f"{TINY} --steps 6 --untied --batch 4 --stopped-status 7 --save-every 2"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train_here(f"{same} --mesh data=2 --seed 5 --out {whole}") == 0
    next_batch = training.next_batch

    def told_to_stop(run, step):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return next_batch(run, step)

    saved = f"{same} --checkpoint {tmp_path / 'saved'}"
    cut = f"{saved} --mesh data=2,fsdp=2,tensor=2 --seed 5"
    with monkeypatch.context() as patch:
        patch.setattr(training, "next_batch", told_to_stop)
        assert train_here(f"{cut} --out {broken}") == 7
    assert "stopped after step 3 and saved in" in capsys.readouterr().out
    assert train_here(f"{cut} --out {tmp_path}") == 2
    assert "has one of step 3: go on from there with --resume" in capsys.readouterr().err
    # The seed is known.
    assert train_here(f"{saved} --mesh pod=2,data=1,group=4 --resume --out {broken}") == 0

    (run, *wanted, _), (cut_run, *found, result) = rows_of(whole), rows_of(broken)
    assert run["workers"] == cut_run["workers"] == 2
    found = [row for row in found if row["kind"] == "step"]
    assert [row["step"] for row in found] == [row["step"] for row in wanted] == [*range(1, 7)]
    wanted, found = ([row["loss"] for row in rows] for rows in (wanted, found))
    # Sums in another order turn the signs of a few elements that are nearly 0.
    assert found == pytest.approx(wanted, abs=2e-2)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert result["sent_bytes_inside_a_worker"] > 0
    assert 0 < result["sent_bytes_per_step"] < result["float32_bytes_per_step"] / 15


BAD_ARGUMENTS = {
    "--bits 3 --optimizer adamw": "adamw leaves no choice of bits; lion-cub or owner does",
    "--bits 9": "'9' is no whole number from 1 to 8",
    "--sync-every 5 --optimizer owner": "owner has one momentum for all workers",
    "--width 30 --heads 4": "--width 30 must be a multiple of --heads 4",
    "--steps 0": "'0' is no whole number at least 1",
    "--dropout 1": "'1' is no number at least 0 and below 1",
    "--lr nan": "'nan' is no number at least 0",
    "--mesh data=4,expert=2": "'expert' is no axis; there are pod, data, group, fsdp, tensor",
    "--mesh data=4,fsdp=two": "fsdp=two is no whole number at least 1",
    "--mesh data=2,data=4": "data is given twice",
    "--mesh fsdp=4": "the workers are missing; add data=N",
    "--mesh data=4 --workers 4": "--workers 4 is short for --mesh data=4: give one",
    "--mesh data=2,tensor=3": "--heads 4 must be a multiple of tensor=3",
    "--mesh data=2,group=3": "must be a multiple of 3 (group=3 in --mesh)",
    "--workers 99": "--mesh data=99 takes 99 devices: there are 8 cpu devices",
    "--resume": "--resume: give --checkpoint DIR",
    "--out {tmp}": "holds results: give another folder, or --overwrite",
    "--coordinator host:1 --process 0": "num_processes=None, process_id=0: give both, or neither",
    "--coordinator host --processes 2 --process 0": "give host:port of process 0",
    "--coordinator host:1 --processes 2 --process 2": "2 processes count from 0 to 1",
    "--mesh data=8 --coordinator host:1 --processes 3 --process 0": "do not share the 8 devices",
    "--text {tmp}/missing": "missing: No such file or directory",
    "--text {tmp}": "Is a directory",
    "--text {tmp}/empty": "the file is empty",
    "--text {tmp}/short": "of its 100 bytes 90 are for training and 10 for validation, and each "
    "part needs 65 with --context 64",
}


def test_bad_arguments_are_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(bytes(100))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for arguments, words in BAD_ARGUMENTS.items():
        assert train_here(arguments.format(tmp=tmp_path)) == 2, arguments
        assert words in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


# --- Clusters

LAUNCH = EXAMPLES / "launch"


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_launch_files_use_options_that_go_together(path):
    """Real launchers run them in `make launchers`."""
    text = path.read_text()
    if path.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", path], check=True)
    if path.name == "again.sh":
        return
    told = re.search(r"(--distributed|--coordinator).*?--out \S+", text, re.S)[0]
    for name, value in {
        "$MESH": "data=8,group=4", "{NODES}": "4", "{max(1, GPUS)}": "8",
        "${HOSTS%%,*}:${PORT:-1234}": "h:1", "$ADDRESS": "h:1", "$HOSTS": "4", "$INDEX": "3",
        '"': "", "\\\n": " ",
    }.items():  # fmt: skip
        told = told.replace(name, value)
    args = options.make_parser(train_gpt.__doc__).parse_args(told.split())
    options.settle(args)
    assert args.resume and args.checkpoint and args.stopped_status == 75
    assert args.mesh["data"] == 8 if "MESH" in text else args.mesh["data"] == 4


@pytest.mark.parametrize(
    ("ends", "status", "starts"),
    [("0", 0, 1), ("75", 75, 1), ("1 137 0", 0, 3), ("1 1 1 1", 1, 3), ("9 9 9", 9, 3)],
)
def test_a_command_starts_again_until_three_strikes(tmp_path, ends, status, starts):
    script = f'echo >> starts; exit $(echo {ends} | cut -d" " -f $(wc -l < starts))'
    done = subprocess.run(["bash", LAUNCH / "again.sh", "bash", "-c", script], cwd=tmp_path)
    assert done.returncode == status
    assert len((tmp_path / "starts").read_text()) == starts


@pytest.mark.parametrize("signals", [{}, {"ASK": "USR1"}])
def test_a_command_that_is_asked_to_stop_has_time_to_save_and_does_not_start_again(
    tmp_path, signals
):
    script = f"""trap 'sleep 0.3; touch saved; exit 3' {signals.get("ASK", "TERM")}
    echo up; while true; do sleep 0.05; done"""
    with subprocess.Popen(
        ["bash", LAUNCH / "again.sh", "bash", "-c", script], cwd=tmp_path, env=os.environ | signals,
        stdout=subprocess.PIPE,
    ) as run:  # fmt: skip
        assert run.stdout.readline() == b"up\n"
        run.terminate()
        assert run.wait() == 3
    assert (tmp_path / "saved").exists()
