"""The convergence study: that a method is the same thing simulated and on devices, and that runs keep."""

import json
import re
from itertools import product

import convergence
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AXIS
from study import methods, plan, runs, signs, splits, store, tasks
from study.candidates import CANDIDATES
from study.methods import METHODS
from study.peers import PEERS
from study.runs import Spec

WORKERS, STEPS = 8, 12
BETAS = (0.9, 0.99)
# Differ from another in a number only.
ALIKE = {
    "diloco", "diloco-4", "owner-2-rotated", "owner-1-rotated", "rotated-0.9-0.9", "rotated-0.85-0.9",
    "rotated-0.8-0.95", "vote-0.9-0.9", "vote-0.9-0.95", "powersgd",
    "vote-sync-64", "vote-sync-100", "vote-coded-2", "vote-coded-6", "vote-coded-12", "vote-small",
    "vote-matrices", "vote-3", "vote-2-leaf", "owner-2", "owner-4", "lion-long", "lion-middle",
    "vote-long", "vote-middle",
}  # fmt: skip
OFFERED = [name for name, m in METHODS.items() if m.transform is not None and name not in ALIKE]
# One of each kind: who votes, who has the momentum, what is synced, what is sent of the gradient.
KINDS = {
    "vote",
    "vote-2",
    "average",
    "owner-3",
    "vote-sync-10",
    "vote-coded-3",
    "ef-signsgd",
    "dgc",
    "lion",
}
CASES = [n if n in KINDS else pytest.param(n, marks=pytest.mark.slow) for n in OFFERED]


@pytest.fixture(scope="module")
def story():
    """Parameters, and gradients ``[steps, W, ...]`` like those of training: a common part and noise."""
    rng = np.random.default_rng(0)
    shapes = {"attention": (12, 33), "write": (130,), "norm": ()}
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    grads = {
        k: (rng.normal(size=s) + rng.normal(size=(STEPS, WORKERS, *s))).astype(np.float32)
        for k, s in shapes.items()
    }
    return params, grads


def rate(t):
    return 0.01 * (1 + t % 3)


@pytest.mark.parametrize("name", CASES)
def test_a_method_is_the_same_simulated_and_as_a_transform(run_workers, story, name):
    """Codes at the edge of a step may fall to its other side by rounding: of a few elements, no more."""
    params, grads = story
    method = METHODS[name]
    simulator = method.simulated(rate, STEPS, BETAS)

    @jax.jit
    def simulated(grads):
        def step(state, g):
            updates, state = simulator.update(g, state, params)
            return state, updates

        return jax.lax.scan(step, simulator.init(params, WORKERS), grads)[1]

    want = jax.tree.map(np.asarray, simulated(jax.tree.map(jnp.asarray, grads)))
    tx = method.transform(rate, STEPS, BETAS, AXIS)
    got, _ = run_workers({name: tx}, params, grads, np.zeros((STEPS, WORKERS), bool))[name]
    for leaf, a in got.items():
        differ = np.abs(a - want[leaf]) > 1e-5 * np.abs(want[leaf]).max()
        assert differ.mean() < 0.005, (leaf, differ.mean())
        assert np.abs(want[leaf]).max() > 0


def test_feedback_of_local_votes_keeps_what_a_code_does_not_say():
    votes = METHODS["vote-1-feedback"].votes((0.0, 0.5))
    params = {"w": jnp.zeros(4)}
    x = jnp.array([[3.0, 1.0, -1.0, -3.0], [5.0, 2.0, 1.0, 0.5]])  # mean sizes 2 and 2.125
    once, state = votes.update({"w": x}, votes.init(params, 2), params)
    said = jnp.array([[2.0, 2.0, -2.0, -2.0], [2.125] * 4])
    assert jnp.array_equal(state.error["w"], x - said)
    assert jnp.array_equal(once["w"][:2], jnp.ones(2))
    assert jnp.array_equal(state.mu["w"], x / 2)
    zero = {"w": jnp.zeros((2, 4))}
    again, state = votes.update(zero, state, params)  # now what was left over votes
    left = x - said
    sizes = jnp.abs(left).mean(axis=1, keepdims=True).astype(jnp.bfloat16).astype(jnp.float32)
    assert jnp.array_equal(state.error["w"], left - jnp.sign(left) * sizes)
    assert again["w"][jnp.array([0, 1, 3])].tolist() == [1, -1, -1]  # they differ in the third


def test_every_method_is_tuned_over_as_many_rates():
    assert {len(method.rates) for method in METHODS.values()} == {4}
    assert all(list(m.rates) == sorted(set(m.rates)) for m in METHODS.values())


def test_every_part_of_the_plan_names_methods_that_are_there():
    lists = (plan.MAIN, plan.ABLATION, plan.SYNCS, plan.NONIID, plan.DIRICHLET, plan.LOCAL)
    for name in (*(n for names in lists for n in names), *plan.SIGNS, *plan.IID_SYNCS):
        assert name in METHODS, name
    assert all(METHODS[name].votes is not None for name in plan.SIGNS)


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'lyon' is no method; there are lion, adamw, .*dgc.*owner-3"
    ):
        methods.method_named("lyon")


def row(spec, loss):
    return spec._asdict() | {"validation": {"loss": loss, "accuracy": 0.5}}


def tuned(best_at=1):
    """Rows that tune every method of the images task, with the best rate at one place of the grid."""
    study = plan.Study(tasks.SIZES["tiny"], ("images",), [])
    rows = []
    for spec in study.specs("tuning"):
        place = study.rates(spec.method).index(spec.rate)
        rows.append(row(spec, 1.0 + abs(place - best_at)))
    return rows


def test_what_is_reported_uses_the_rate_with_the_least_validation_loss():
    study = plan.Study(tasks.SIZES["tiny"], ("images",), tuned(best_at=2))
    # "betas" is run at every rate, "candidates" on text alone.
    for part in (part for part in plan.PARTS if part not in ("tuning", "betas", "candidates")):
        specs = study.specs(part)
        assert specs and len(set(specs)) == len(specs), part
        for spec in specs:
            like = plan.tuned_as(spec.method, spec.split) if part != "signs" else "vote"
            assert spec.rate == study.rates(like)[2], (part, spec)
            assert spec.seed not in plan.TUNING_SEEDS["class"]
    main = study.specs("main")
    assert {(s.workers, s.workers * s.batch) for s in main} == {(w, 32) for w in (4, 8, 16, 32)}


def test_a_diverged_run_is_never_the_best():
    rows = tuned(best_at=0)
    for found in rows:
        if found["rate"] == 1e-3:
            found["validation"] = {"loss": None, "accuracy": 0.1}
    study = plan.Study(tasks.SIZES["tiny"], ("images",), rows)
    assert study.best_rate("images", "lion", "iid") == 2e-3


def test_rates_for_data_that_differ_are_chosen_by_the_mean_over_seeds():
    lucky, *others = plan.TUNING_SEEDS["class"]
    rows = tuned(best_at=2)
    for found in rows:
        if (found["method"], found["split"]) == ("vote", "class"):
            at_first = found["rate"] == 1e-3
            loss = (0.1 if found["seed"] == lucky else 3.0) if at_first else found["rate"] * 100
            found["validation"]["loss"] = loss
    study = plan.Study(tasks.SIZES["tiny"], ("images",), rows)
    assert study.best_rate("images", "vote", "class") == 2e-3
    without = [row for row in rows if row["seed"] != others[0]]
    with pytest.raises(ValueError, match="vote on images, class, is not tuned yet"):
        plan.Study(tasks.SIZES["tiny"], ("images",), without).best_rate("images", "vote", "class")


def test_parts_that_need_tuning_say_so():
    study = plan.Study(tasks.SIZES["tiny"], ("images",), tuned()[4:])
    with pytest.raises(
        ValueError, match=r"lion on images, iid, is not tuned yet: run --part tuning"
    ):
        study.specs("main")
    with pytest.raises(ValueError, match=r"'mane' is no part of the study; there are tuning, main"):
        study.specs("mane")


def test_some_methods_need_only_their_own_tuning():
    rows = [found for found in tuned(best_at=2) if found["method"] == "lion"]
    study = plan.Study(tasks.SIZES["tiny"], ("images",), rows)
    specs = study.specs("main", ["lion"], [8, 32])
    assert {(s.method, s.workers, s.rate) for s in specs} == {("lion", 8, 4e-3), ("lion", 32, 4e-3)}
    with pytest.raises(ValueError, match="vote on images, iid, is not tuned yet"):
        study.specs("main", ["lion", "vote"])


def test_signs_of_a_method_without_signs_are_refused():
    task = tasks.load("images", None, tasks.SIZES["tiny"])
    with pytest.raises(ValueError, match="adamw does not end in a sign"):
        signs.program(task, METHODS["adamw"], spec_of("adamw"))


def spec_of(method, **given):
    fields = {
        "part": "x", "task": "images", "method": method, "workers": 4, "split": "iid", "batch": 4,
        "steps": 20, "rate": 4e-3, "seed": 0,
    }  # fmt: skip
    return Spec(**fields | given)


@pytest.fixture(scope="module")
def digits():
    return tasks.load("images", None, tasks.SIZES["tiny"])


def test_a_run_repeats_and_seeds_differ(digits):
    runner = runs.Runner(digits)
    first, other = runner.run(spec_of("vote")), runner.run(spec_of("vote", seed=1))
    again = runs.Runner(digits).run(spec_of("vote"))
    for took in ("seconds", "compiling"):
        assert first.pop(took) > 0 and again.pop(took) > 0
    assert first == again
    assert first["test"] != other["test"]
    assert len(first["curve"]["loss"]) == len(first["curve"]["train_loss"]) == runs.POINTS
    sent = METHODS["vote"].sent(digits.parameters, 4, 20, 0)
    assert first["sent_bytes"] == sent > 0
    assert first["bits_per_parameter"] == pytest.approx(8 * sent / 20 / first["parameters"], 1e-4)


def test_training_learns(digits):
    learned = runs.Runner(digits).run(spec_of("owner-3", steps=200, batch=32, rate=8e-3))
    assert learned["test"]["accuracy"] > 0.4  # of ten classes
    losses = learned["curve"]["train_loss"]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("method", [pytest.param("lion", marks=pytest.mark.slow), "owner-3"])
def test_the_papers_own_size_is_a_program(method):
    size = tasks.SIZES["paper"]
    task = tasks.load("images", None, size)
    count = sum(x.size for x in jax.tree.leaves(task.parameters))
    assert 18e6 < count < 20e6  # 6 layers of width 512
    study = plan.Study(size, ("images",), [])
    spec = next(s for s in study.specs("tuning") if s.method == method)
    assert spec.batch * spec.workers == 1024 and spec.rate < 1e-3
    parts = task.share("iid", spec.workers, 0.3, 0)
    table, lengths = map(jnp.asarray, splits.table(parts))
    program = runs.program(task, METHODS[method], spec)
    outcome = jax.eval_shape(program, task.data, table, lengths, jnp.float32(1e-3), 0)
    assert outcome.train_loss.shape == outcome.curve["accuracy"].shape


def test_what_is_not_finite_is_null():
    assert runs.numbers({"x": np.float32("nan"), "y": np.array([1.23456789, np.inf])}) == {
        "x": None,
        "y": [1.2346, None],
    }


@pytest.mark.slow
def test_the_study_goes_on_where_it_was_stopped(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    args = ["--size", "tiny", "--task", "images", "--part", "tuning", "--method", "lion",
            "--jobs", "1", "--save", str(rows)]  # fmt: skip
    convergence.main(args)
    first = rows.read_text().splitlines()
    assert len(first) == 4 * (1 + 3)  # four rates; more seeds where data differ
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 16
    for line in map(json.loads, first):
        assert line["command"].startswith("python benchmarks/convergence.py --part tuning")
        assert str(tmp_path) not in line["command"]
        assert {"date", "jax", "flax", "optax", "python", "seed", "size"} <= set(line)
    rows.write_text("\n".join(first[:-1]) + "\n")
    convergence.main(args)
    after = rows.read_text().splitlines()
    assert after[:-1] == first[:-1]
    took = "seconds", "compiling"
    last, again = (
        {k: v for k, v in json.loads(x[-1]).items() if k not in took} for x in (first, after)
    )
    assert last == again


def test_a_sample_has_each_method_once_and_what_is_claimed():
    rows = store.read(convergence.ROWS)
    found = plan.sample(rows)
    assert {spec.method for spec in found} == METHODS.keys() - PEERS.keys() - CANDIDATES.keys()
    assert len(set(found)) == len(found) and set(found) <= {store.key_of(row) for row in rows}
    for task, workers in product(("images", "text"), (8, 32)):
        at = [s for s in found if (s.part, s.task, s.workers) == ("main", task, workers)]
        seeds = {m: {s.seed for s in at if s.method == m} for m in plan.CLAIMED}
        assert seeds == {"lion": {0}, "vote": {0, 1, 2}, "owner-3": set(range(6))}
    others = [s for s in found if s.method not in (*plan.CLAIMED, *plan.NONIID_CLAIMED)]
    assert len(others) == len({s.method for s in others})
    assert {(s.task, s.workers) for s in others} == {("images", 8)}


def test_a_sample_takes_the_rate_that_tuning_chose():
    rows = [row | {"part": "betas"} for row in tuned(best_at=3) if row["method"] == "vote"]
    assert [s.rate for s in plan.sample([r | {"method": "vote-short"} for r in rows])] == [8e-3]
    main = [row | {"part": "main", "method": "adamw", "seed": 1, "rate": 4e-3} for row in rows[:1]]
    assert [s.rate for s in plan.sample(rows + main)] == [4e-3]


@pytest.mark.slow
def test_a_sample_is_repeated_in_a_file_of_its_own(tmp_path, digits):
    before, again = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    rows = [runs.Runner(digits).run(spec_of("sgd", part="main", workers=8)) | {"size": "tiny"}]
    store.append(before, rows)
    text = before.read_text()
    args = ["--size", "tiny", "--task", "images", "--jobs", "1", "--save", str(before)]
    for _ in range(2):  # the second finds nothing to do
        convergence.main([*args, "--sample", str(again)])
    (found,) = store.read(again)
    assert before.read_text() == text
    assert store.key_of(found) == store.key_of(rows[0])
    assert found["test"]["accuracy"] == pytest.approx(rows[0]["test"]["accuracy"], abs=0.05)
    wanted = "python benchmarks/convergence.py --sample again.jsonl --size tiny"
    assert found["command"] == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--sample", "{rows}"], r"rows.jsonl is the file of --save, .*give another file"),
        (["--sample", "{more}", "--report"], r"--sample runs and --report does not"),
        (["--sample", "{more}", "--save", "{more}2"], r"more2, which is not there"),
        (
            ["--sample", "{more}", "--task", "images"],
            r"repeats rows of Fashion-MNIST, and this is scikit-learn's digits: give .* --images",
        ),
    ],
)
def test_a_sample_that_would_compare_nothing_is_refused(capsys, tmp_path, given, said):
    rows, more = tmp_path / "rows.jsonl", tmp_path / "more"
    store.append(rows, [row(spec_of("vote"), 0.5) | {"dataset": "Fashion-MNIST"}])
    text = rows.read_text()
    args = [word.format(rows=rows, more=more) for word in given]
    with pytest.raises(SystemExit):
        convergence.main(["--size", "tiny", "--save", str(rows), *args])
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert rows.read_text() == text and not more.exists()


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"part": "main"}\n')
    with pytest.raises(
        ValueError, match=r"rows.jsonl, line 1: no row of the study .*delete the line"
    ):
        store.read(path)
    assert store.read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "lyon"], r"'lyon' is no method; there are lion"),
        (["--images", "nowhere"], r"nowhere: no such folder"),
        (["--text", "nowhere"], r"nowhere: no such folder"),
        (["--part", "mane"], r"invalid choice: 'mane'"),
        (["--jobs", "0"], r"--jobs 0: give a whole number of at least 1"),
    ],
)
def test_bad_options_end_before_anything_runs(capsys, tmp_path, args, said):
    with pytest.raises(SystemExit):
        convergence.main([*args, "--size", "tiny", "--save", str(tmp_path / "rows.jsonl")])
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "rows.jsonl").exists()


def test_more_workers_than_classes_are_refused(digits):
    with pytest.raises(ValueError, match=r"workers"):
        runs.Runner(digits).run(spec_of("vote", workers=16, split="class"))
