"""The papers' tables, reduced: methods are tuned alike, nothing runs twice, images are read right."""

import gzip
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pages
import papers
import pytest
import report
from goal import images, vision
from goal.contenders import Hyper
from oracle import coding


class Runner:
    """Best at a rate of 0.001; what ran is kept."""

    def __init__(self):
        self.ran = []

    def run(self, run):
        self.ran.append(run)
        away = abs(math.log2(run.rate / 0.001))
        return run._asdict() | {"tuning_loss": away, "cpu_seconds": 18.0, "compiling": 0.0}


def test_methods_are_tuned_alike_and_nothing_runs_twice(tmp_path):
    runner, save = Runner(), tmp_path / "rows.jsonl"
    once, some = report.Once(save, papers.key_of, runner), papers.jobs("digits")
    for job in some:
        papers.run(job, once)
    assert len(runner.ran) == len(set(runner.ran)) == sum(job.runs() for job in some)
    runs = Counter((run.part, run.method, run.workers, run.shards) for run in runner.ran)
    tuned = {runs["tuning", name, n, "alike"] for name in papers.METHODS for n in papers.WORKERS}
    variants = {runs["tuning", name, 8, "classes"] for name in papers.APART}
    assert (tuned, variants) == ({papers.TRIES}, {len(papers.FACTORS)})
    assert papers.left(some, report.read(save)).endswith(" 0 runs or 0.00 core hours left")
    before = len(runner.ran)
    papers.run(some[0], once)
    assert len(runner.ran) == before
    with pytest.raises(ValueError, match="mavo has not run with 16 workers: run that first"):
        papers.run(papers.Job("mavo", 32, "digits"), once._replace(save=tmp_path / "none"))


def test_a_run_learns_and_says_how_often_averaging_and_majority_agree(monkeypatch):
    monkeypatch.setattr(images, "EPOCHS", {"digits": 3})
    runner = images.runner(lambda name, h: papers.ALL[name].direction(h), papers.VOTES, None)
    row = runner.run(images.Run("seed", "mavo", "digits", 4, "classes", 2e-3, 0.8, 0.9, 0.1, 0))
    assert row["steps"] == 120 and row["train"][-1] < row["train"][0] and row["accuracy"] > 0.2
    assert 0.6 < np.mean(row["agree"]["mlp 1"]) < 0.95 and images.key_of(row).rate == 2e-3


def test_the_page_is_made_of_the_committed_rows():
    """If not: python benchmarks/papers.py --report."""
    assert all(path.read_text() == text for path, text in papers.made().items())


def test_tables_have_differences_with_errors_and_say_what_was_not_run():
    rows = [
        images.Run("seed", name, "fashion", 4, "alike", 1e-3, 0.9, 0.99, 0.1, seed)._asdict()
        | {"accuracy": accuracy + 0.01 * seed}
        for name, each in {
            "mavo": (0.9, 0.9),
            "signum": (0.8, 0.802),
            "sgd": (0.801, 0.799),
        }.items()
        for seed, accuracy in enumerate(each)
    ]
    table = vision.Tables(rows, papers.ALL)
    lines = table.accuracies(("mavo", "avg"), papers.WORKERS).splitlines()
    assert lines[2].startswith("| D-Lion MaVo: `lion_cub` | 90.5 | 90.9 | not run | 89.6")
    assert lines[3].startswith("| D-Lion Avg | not run | 90.5 |")
    order = table.order(("mavo", "signum", "sgd"), (4,)).splitlines()
    assert re.search(r"\| \+9\.9 ± 0\.\d \| \+2\.6 \|", order[2])
    assert re.search(r"\| \+0\.1 ± 0\.\d \(alike\) \| \+9\.0 \|", order[3])


def test_methods_that_are_not_steady_have_no_part_in_the_errors_of_others():
    rows = [
        images.Run("seed", name, "fashion", 4, "alike", 1e-3, 0.9, 0.99, 0.1, seed)._asdict()
        | {"accuracy": accuracy}
        for name, each in {
            "mavo": (0.9, 0.91), "avg": (0.89, 0.901), "largest-4": (0.55, 0.7)
        }.items()
        for seed, accuracy in enumerate(each)
    ]  # fmt: skip
    without = vision.Tables(rows[:4], papers.ALL).less((4, "alike"), "avg", "mavo")
    table = vision.Tables(rows, papers.ALL)
    assert table.less((4, "alike"), "avg", "mavo") == without and "±" in without
    assert table.less((4, "alike"), "largest-4", "mavo") == "not steady: 55.0 and 70.0"
    assert table.accuracy((4, "alike"), "largest-4") == "not steady: 55.0 and 70.0"
    assert table.less((4, "alike"), "l1-4", "mavo") == "not run"


def test_what_pages_and_answers_say_of_classes_is_what_was_measured():
    tables = vision.Tables(report.read(papers.ROWS, papers.key_of), papers.ALL)

    def less(name):
        return tables.less((papers.MIDDLE, "classes"), name, "lion")

    assert round(float(less("mavo").split()[0])) == -12 and "alike" not in less("mavo")
    assert all(less(name).endswith("(alike)") for name in ("owner-lion", "owner-adamw", "every-10"))
    words = [(pages.ROOT / name).read_text() for name in ("README.md", "docs/how_to/images.md")]
    assert all("lost 12 points" in text for text in words)


@pytest.mark.parametrize("name", papers.ALL)
def test_each_method_is_a_direction(name):
    """Of the model's own parameters, by their shapes."""
    simulator = papers.ALL[name].direction(Hyper(1e-3, 0.9, 0.99, 0.1))

    def shapes():
        params = images.init(jax.random.key(0), 1)
        grads = jax.tree.map(lambda p: jnp.stack([p] * 3), params)
        return params, simulator.update(grads, simulator.init(params, 3), params)[0]

    params, updates = jax.tree.map(jnp.shape, jax.eval_shape(shapes))
    assert updates == params


def test_codes_of_the_largest_magnitude_use_all_levels():
    tree = {"a": np.array([[4.0, -2, 1, 0]]), "b": np.array([[0.5, 0.25]])}
    buffer = coding.buffer_of(tree)
    level, _ = papers.largest(4).encode(buffer.join(tree), buffer, 0)
    assert level[0, 0, :4].tolist() == [7, -4, 2, 0] and level[0, 1, :2].tolist() == [7, 4]


def test_agreement_is_that_of_signs():
    # The mean and the majority: alike, unlike, and a tie.
    own = {"layer": np.array([[1.0, 4, 1], [1, -1, -2], [1, -1, 0], [1, -1, 0]])}
    found = images.agreement(own)
    assert found["agree"]["layer"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert found["tie"]["layer"] == pytest.approx(1 / 3)
    assert found["size"]["layer"] == pytest.approx((1 + 0.5 + 0) / 3)


def test_images_are_read_from_idx_files_packed_or_not(tmp_path):
    pictures = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8)
    data = bytes([0, 0, 8, 3]) + np.array([2, 8, 8], ">i4").tobytes() + pictures.tobytes()
    (tmp_path / "plain").write_bytes(data)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(data))
    for name in ("plain", "packed"):
        np.testing.assert_array_equal(images.idx(tmp_path, name), pictures)
    patches = images.patches(pictures)
    assert patches.shape == (2, 16, 4)
    np.testing.assert_allclose((patches[1, 5] + 1) * 127.5, pictures[1, 2:4, 2:4].ravel(), 1e-5)
    with pytest.raises(ValueError, match="no train-images-idx3-ubyte there"):
        images.read("fashion", tmp_path)
