"""The examples run as a user runs them, refuse bad input in one sentence, and count correctly."""

import importlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lioncub_jax as lc

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
corpus, meshes, model, options, saving, training = (
    importlib.import_module(f"gpt.{name}")
    for name in ("corpus", "meshes", "model", "options", "saving", "training")
)
train_gpt = importlib.import_module("train_gpt")

TINY = [
    "--steps", "4", "--layers", "1", "--width", "32", "--context", "32", "--batch", "2", "--workers", "4",
]  # fmt: skip
SOURCE = Path(json.__file__).read_bytes() + Path(re.__file__).read_bytes()


def run(*arguments):
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "COLUMNS": "80",
    }  # fmt: skip
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "source.txt"
    path.write_bytes(SOURCE)
    return path


@pytest.mark.parametrize(
    ("options", "least_ratio"),
    [
        ("--optimizer lion-cub --sync-every 2 --dropout 0.1 --untied", 15),
        pytest.param("--optimizer owner --bits 4", 5, marks=pytest.mark.slow),
    ],
    ids=["lion-cub", "owner"],
)
def test_a_run_leaves_measurements_a_plot_and_a_sample(options, least_ratio, text_file, tmp_path):
    script = EXAMPLES / "train_gpt.py"
    done = run(script, *TINY, *options.split(), "--text", text_file, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    first, *steps, last = rows_of(tmp_path)
    assert first["config"]["optimizer"] == options.split()[1]
    assert set(first["versions"]) == {"python", "jax", "jaxlib", "flax", "optax"}
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(math.isfinite(row["loss"]) and row["abstained"] == 0 for row in steps)
    assert last["validation_bits_per_byte"] == steps[-1]["validation"] < 8.5
    assert last["bigram_bits_per_byte"] < last["unigram_bits_per_byte"] < 8
    assert last["float32_bytes_per_step"] > least_ratio * last["sent_bytes_per_step"]
    assert (last["sent_bytes_of_a_sync"] > 0) == ("--sync-every" in options)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").stat().st_size > 500
    assert "step 4/4" in done.stdout and "\x1b" not in done.stdout


def test_the_quickstart_learns_and_counts_its_bytes():
    done = run(EXAMPLES / "quickstart.py")
    assert done.returncode == 0, done.stderr
    before, after = re.search(r"loss ([\d.]+) before, ([\d.]+) after", done.stdout).groups()
    assert float(after) < 0.5 * float(before)
    assert re.search(r"each worker sends \d+ kB a step", done.stdout)
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 60


def test_a_run_repeats_with_its_seed():
    text = corpus.Corpus("source", np.frombuffer(SOURCE, np.uint8), np.frombuffer(SOURCE, np.uint8))
    layout = meshes.build({"data": 8})
    gpt = model.GPT(layers=1, width=16, heads=2, context=16, rngs=nnx.Rngs(0))
    prepared = training.prepare(
        gpt, text, lc.lion_cub(1e-3, axis_name="data"), layout, batch=32, seed=0
    )

    def losses():
        rows = []
        fresh = jax.tree.map(jnp.copy, prepared.state)
        training.train(prepared._replace(state=fresh), 3, rows.append)
        return [(row.loss, row.validation) for row in rows]

    assert losses() == losses()


BAD_ARGUMENTS = {
    "--bits 3 --optimizer adamw": "adamw leaves no choice of bits; lion-cub or owner does",
    "--bits 3 --optimizer majority": "majority leaves no choice of bits",
    "--bits 9": "'9' is no whole number from 1 to 8",
    "--bits 0": "'0' is no whole number from 1 to 8",
    "--sync-every 5 --optimizer owner": "owner has one momentum for all workers",
    "--width 30 --heads 4": "--width 30 must be a multiple of --heads 4",
    "--steps 0": "'0' is no whole number at least 1",
    "--workers two": "'two' is no whole number at least 1",
    "--dropout 1": "'1' is no number at least 0 and below 1",
    "--lr nan": "'nan' is no number at least 0",
    "--optimizer sgd": "invalid choice: 'sgd'",
    "--mesh data=4,expert=2": "'expert' is no axis; there are pod, data, group, fsdp, tensor",
    "--mesh data=4,fsdp=two": "fsdp=two is no whole number at least 1",
    "--mesh data=0": "data=0 is no whole number at least 1",
    "--mesh data=2,data=4": "data is given twice",
    "--mesh fsdp=4": "the workers are missing; add data=N",
    "--mesh data=4 --workers 4": "--workers 4 is short for --mesh data=4: give one",
    "--mesh data=2,tensor=3": "--heads 4 must be a multiple of tensor=3",
    "--mesh data=2,group=3": "must be a multiple of 3 (group=3 in --mesh)",
    "--resume": "--resume: give --checkpoint DIR",
    "--coordinator host:1 --process 0": "go together: --processes not given",
    "--coordinator host --processes 2 --process 0": "--coordinator host: give HOST:PORT",
    "--coordinator host:1 --processes 2 --process 2": "2 processes count from 0 to 1",
    "--coordinator host:1 --processes 2 --process 0 --distributed": "give one of them",
    "--mesh data=8 --coordinator host:1 --processes 3 --process 0": "do not share the 8 devices",
    "--text {tmp}/missing": "missing: No such file or directory",
    "--text {tmp}": "Is a directory",
    "--text {tmp}/empty": "the file is empty",
    "--text {tmp}/short": "of its 100 bytes 90 are for training and 10 for validation, and each "
    "part needs 65 with --context 64",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_in_one_sentence(arguments, tmp_path, capsys):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(SystemExit) as refused:
        train_gpt.main(arguments.format(tmp=tmp_path).split())
    assert refused.value.code == 2
    assert BAD_ARGUMENTS[arguments] in capsys.readouterr().err.splitlines()[-1]


def test_results_are_not_overwritten_unasked(tmp_path, text_file):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run"}\n')
    refused = run(EXAMPLES / "train_gpt.py", *TINY, "--text", text_file, "--out", tmp_path)
    assert refused.returncode == 2
    assert "holds results: give another folder, or --overwrite" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "metrics.jsonl").read_text() == '{"kind": "run"}\n'


def test_more_workers_than_accelerators_are_refused():
    with pytest.raises(
        ValueError, match="--mesh data=99 takes 99 devices: there are 8 cpu devices"
    ):
        meshes.build({"data": 99})


# --- Meshes, checkpoints and processes


TINIER = ["--layers", "1", "--width", "32", "--context", "32", "--batch", "4"]


def train_here(text_file, out, options):
    """Runs the program in this process, on its eight devices; what it measured, and its exit status."""
    arguments = [*TINIER, "--text", str(text_file), "--out", str(out), *options.split()]
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.config, "update", lambda *_: None)
        try:
            train_gpt.main(arguments)
        except SystemExit as end:
            status = end.code
    rows = rows_of(out) if out.exists() else []
    return [row for row in rows if row["kind"] == "step"], status


OF_TWO = "--steps 3 --untied --mesh"


@pytest.fixture(scope="module")
def of_two_workers(text_file, tmp_path_factory):
    """What two workers of one device each measure."""
    rows, _ = train_here(text_file, tmp_path_factory.mktemp("two"), f"{OF_TWO} data=2")
    return [row["loss"] for row in rows]


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("data=2,fsdp=4", marks=pytest.mark.slow),
        pytest.param("data=2,tensor=2", marks=pytest.mark.slow),
        "data=2,fsdp=2,tensor=2",
        "pod=2,data=1,group=4",
    ],
)
def test_two_workers_learn_the_same_on_every_mesh(mesh, of_two_workers, text_file, tmp_path):
    rows, status = train_here(text_file, tmp_path, f"{OF_TWO} {mesh}")
    assert status == 0
    # Sums in another order turn the signs of a few elements that are nearly 0.
    assert [row["loss"] for row in rows] == pytest.approx(of_two_workers, abs=2e-2)
    assert rows[0]["loss"] == pytest.approx(of_two_workers[0], rel=1e-5)
    run, *_, result = rows_of(tmp_path)
    assert run["workers"] == 2
    assert result["sent_bytes_inside_a_worker"] > 0
    assert 0 < result["sent_bytes_per_step"] < result["float32_bytes_per_step"] / 15


def measured(rows):
    """All but what time is in."""
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_as_if_it_were_not(text_file, tmp_path, monkeypatch, capsys):
    same = "--mesh data=2,group=2 --optimizer owner --dropout 0.1 --steps 6"
    saved = f"{same} --save-every 2 --checkpoint {tmp_path / 'saved'}"
    whole, _ = train_here(text_file, tmp_path / "whole", same)
    next_batch = training.next_batch

    def told_to_stop(run, step):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return next_batch(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(training, "next_batch", told_to_stop)
        begun, status = train_here(text_file, tmp_path / "broken", saved)
    assert status == 0 and measured(begun) == measured(whole[:3])
    assert "stopped after step 3 and saved in" in capsys.readouterr().out
    assert train_here(text_file, tmp_path / "another", saved)[1] == 2
    assert "has one of step 3: go on from there with --resume" in capsys.readouterr().err
    rows, status = train_here(text_file, tmp_path / "broken", saved + " --resume")
    assert status == 0 and measured(rows) == measured(whole)


def test_a_run_that_is_done_is_not_resumed():
    done = SimpleNamespace(steps=lambda: [6], restore=lambda state: SimpleNamespace(step=6))
    with pytest.raises(saving.Refused, match="6 steps are done and --steps is 6"):
        saving.resumed(SimpleNamespace(state=None), saving.Saved(done, None), 6)


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def until(true, children):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "nothing happens"
        assert all(child.poll() in (None, 0) for child in children), "a process failed"
        time.sleep(0.1)


@pytest.mark.slow
def test_processes_stop_together_and_one_goes_on_alone(text_file, tmp_path):
    port, out, saved = free_port(), tmp_path / "out", tmp_path / "saved"
    common = f"--mesh data=2,group=2 --checkpoint {saved} --stopped-status 7 --out".split()
    children = []
    try:
        for i in range(2):
            told = f"--coordinator localhost:{port} --processes 2 --process {i}".split()
            command = [
                sys.executable, EXAMPLES / "train_gpt.py", *TINIER, "--text", text_file,
                "--steps", "100000", *told, *common, out if i == 0 else tmp_path / "other",
            ]  # fmt: skip
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
            with (tmp_path / f"{i}.log").open("w") as log:
                children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        metrics = out / "metrics.jsonl"
        until(lambda: metrics.exists() and '"step"' in metrics.read_text(), children)
        children[1].send_signal(signal.SIGTERM)
        statuses = [child.wait(timeout=60) for child in children]
    finally:
        for child in children:
            child.kill()
    said = (tmp_path / "0.log").read_text()
    assert statuses == [7, 7], said
    step = int(re.search(r"stopped after step (\d+) and saved", said)[1])
    assert not (tmp_path / "other").exists()
    more = f"--mesh data=4 --checkpoint {saved} --resume --steps {step + 2}"
    rows, _ = train_here(text_file, out, more)
    assert [row["step"] for row in rows][-2:] == [step + 1, step + 2]
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_a_cluster_that_is_none_is_refused():
    refused = run(EXAMPLES / "train_gpt.py", *TINY[:-2], "--distributed")
    assert refused.returncode == 2
    assert "--distributed: JAX recognises no cluster here" in refused.stderr.splitlines()[-1]


LAUNCH = EXAMPLES / "launch"


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu_pod.sh"])
def test_launch_scripts_are_bash(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)


@pytest.mark.parametrize(("deaths", "code", "starts"), [(0, 0, 1), (2, 0, 3), (9, 1, 3)])
def test_slurm_starts_a_run_again_until_three_strikes(tmp_path, deaths, code, starts):
    """By an srun that fails so often, and counts what it is asked to do."""
    srun, said = tmp_path / "srun", tmp_path / "said"
    srun.write_text(
        f'#!/bin/bash\necho "$LIONCUB_MEMORY $*" >> {said}\n'
        f"[[ $1 == --overlap ]] || (( $(grep -c train_gpt {said}) > {deaths} ))\n"
    )
    srun.chmod(0o755)
    (tmp_path / "lioncub_jax").mkdir()
    known = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    assert (
        subprocess.run(["bash", LAUNCH / "slurm.sbatch"], env=known, check=False).returncode == code
    )
    *runs, last = said.read_text().splitlines()
    assert len(runs) == starts and all("--resume" in line for line in runs)
    assert last == "/dev/shm/lioncub-7 --overlap rm -rf /dev/shm/lioncub-7"


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_launch_files_use_options_that_go_together(path):
    said = path.read_text().partition("train_gpt.py")[2].partition("/results")[0] + "/results"
    known = said.replace("$MESH", "data=8,group=4").replace('"$JOB_COMPLETION_INDEX"', "3")
    arguments = known.replace("\\\n", " ").split()
    args = options.make_parser(train_gpt.__doc__).parse_args(arguments)
    options.settle(args)
    assert args.resume and args.checkpoint and math.prod(args.mesh.values()) == 32


def test_kubernetes_is_told_one_number_of_processes():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (command,) = container["args"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert f"--coordinator {name}-0.{service['metadata']['name']}:" in command
    assert f"--processes {spec['completions']} " in command
    assert spec["completions"] == spec["parallelism"]
    memory = {x["name"]: x["value"] for x in container["env"]}["LIONCUB_MEMORY"]
    mounted = {x["mountPath"]: x["name"] for x in container["volumeMounts"]}
    kinds = {x["name"]: x for x in spec["template"]["spec"]["volumes"]}
    assert kinds[mounted[str(Path(memory).parent)]]["emptyDir"] == {"medium": "Memory"}
    assert spec["template"]["spec"]["restartPolicy"] == "OnFailure", (
        "the pod, and its memory, stays"
    )


def test_files_are_split_by_their_names_alone():
    files = {f"{name}.py": name.encode() for name in "abcdefghijklmnopqrstuvwxyz"}
    train, validation = (bytes(part).split(b"\n") for part in corpus.split_by_file(files))
    assert len(validation) == 2
    assert sorted(train + validation) == sorted(files.values())
    reordered = corpus.split_by_file(dict(reversed(files.items())))
    assert bytes(reordered[1]).split(b"\n") == validation


def test_few_files_give_up_their_ends():
    files = {"one": b"a" * 18 + b"AA", "two": b"b" * 9 + b"B"}
    train, validation = corpus.split_by_position(files)
    assert bytes(train) == b"a" * 18 + b"\n" + b"b" * 9
    assert bytes(validation) == b"AA\nB"


def test_a_file_named_twice_is_read_once(text_file):
    text = corpus.from_files([text_file, text_file])
    assert text.train.size + text.validation.size == len(SOURCE)


def test_the_standard_library_is_split_by_file():
    text = corpus.standard_library()
    share = text.validation.size / (text.train.size + text.validation.size)
    assert 0.02 < share < 0.3
    assert b"import unittest" in bytes(text.train)


def test_windows_come_from_the_whole_text():
    text = np.arange(100, dtype=np.uint8)
    spread = corpus.spread(text, 5, 9)
    assert spread[0, 0] == 0 and spread[-1, -1] == 99
    drawn = corpus.draw(text, 1000, 9, (0, 1))
    assert drawn.shape == (1000, 10) and drawn.min() == 0 and drawn.max() == 99
    assert (np.diff(drawn, axis=1) == 1).all()
    assert (corpus.draw(text, 1000, 9, (0, 1)) == drawn).all()
    assert (corpus.draw(text, 1000, 9, (0, 2)) != drawn).any()


def test_baselines_are_what_counting_by_hand_gives():
    train = np.frombuffer(b"ab" * 500, np.uint8)
    windows = np.frombuffer(b"abab", np.uint8)[None]
    single = 501 / 1256  # 1000 bytes, one added for each of 256
    after_a = (500 + 16 * single) / (500 + 16)
    after_b = (499 + 16 * single) / (499 + 16)
    found = corpus.baselines(train, windows)
    assert found.unigram == pytest.approx(-math.log2(single))
    assert found.bigram == pytest.approx(-(2 * math.log2(after_a) + math.log2(after_b)) / 3)


def test_both_baselines_are_distributions():
    train = np.frombuffer(SOURCE, np.uint8)
    single = corpus.unigram(train)
    pair = corpus.bigram(train, single)
    assert single.sum() == pytest.approx(1) and np.allclose(pair.sum(axis=1), 1)
    assert (pair > 0).all()


@pytest.fixture(scope="module")
def small_gpt():
    return model.GPT(layers=1, width=16, heads=2, context=4, rngs=nnx.Rngs(0))


def test_the_model_does_not_see_what_comes_later(small_gpt):
    tokens = jnp.arange(4)[None]
    logits, changed = small_gpt(tokens), small_gpt(tokens.at[0, 2].set(99))
    assert (logits[0, :2] == changed[0, :2]).all()
    assert (logits[0, 2:] != changed[0, 2:]).any()


def test_sampling_slides_the_window_over_the_context(small_gpt):
    text = [7, 1, 200]
    for _ in range(6):
        text.append(int(small_gpt(jnp.array([text[-4:]]))[0, -1].argmax()))
    cold = {"length": 6, "temperature": 1e-6}
    sampled = model.continue_text(small_gpt, jnp.array(text[:3]), jax.random.key(0), **cold)
    assert sampled.tolist() == text[3:]
