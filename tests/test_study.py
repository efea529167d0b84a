"""The convergence study: methods are the same simulated and on devices, all are tuned alike."""

import re

import convergence
import jax
import numpy as np
import pytest
from conftest import AXIS
from study import plan, runs, store, tasks
from study.methods import METHODS
from study.runs import Spec

WORKERS, STEPS = 8, 12
TINY = tasks.SIZES["tiny"]
# One of each kind: who votes, who has the momentum, what is synced, what is sent of the gradient.
KINDS = ("lion", "vote-2", "average", "owner-3", "vote-coded-3", "ef-signsgd", "dgc")
OTHERS = [n for n, made in METHODS.items() if made.transform is not None and n not in KINDS]


@pytest.mark.parametrize("names", [KINDS, pytest.param(OTHERS, marks=pytest.mark.long)])
def test_a_method_is_the_same_simulated_and_as_a_transform(run_workers, names):
    """Codes at the edge of a step may fall to its other side by rounding: of a few elements, no more."""
    rng = np.random.default_rng(0)
    shapes = {"attention": (12, 33), "write": (130,), "norm": ()}
    params = {k: np.asarray(rng.normal(size=s), np.float32) for k, s in shapes.items()}
    grads = {  # a common part and noise
        k: (0.5 + rng.normal(size=(STEPS, WORKERS, *s))).astype(np.float32)
        for k, s in shapes.items()
    }
    given = lambda t: 0.01 * (1 + t % 3), STEPS, (0.9, 0.99)

    def simulated(name):
        simulator = METHODS[name].simulated(*given)

        def step(state, g):
            return simulator.update(g, state, params)[::-1]

        return jax.lax.scan(step, simulator.init(params, WORKERS), grads)[1]

    txs = {name: METHODS[name].transform(*given, AXIS) for name in names}
    found = run_workers(txs, params, grads, np.zeros((STEPS, WORKERS), bool))
    for name in names:
        for leaf, want in jax.jit(simulated, static_argnums=0)(name).items():
            largest = np.abs(want).max()
            differ = np.abs(found[name][0][leaf] - want) > 1e-5 * largest
            assert largest > 0 and differ.mean() < 0.005, (name, leaf, differ.mean())


# --- What is run


def row(spec, loss):
    return spec._asdict() | {"validation": {"loss": loss, "accuracy": 0.5}}


def spec_of(method, **given):
    return Spec("x", "images", method, 4, "iid", 4, 20, 4e-3, 0)._replace(**given)


def study_of(rows):
    return plan.Study(TINY, ("images",), rows)


def tuned(best_at=1):
    """Rows that tune every method of the images task, with the best rate at one place of the grid."""
    study = study_of([])
    return [
        row(spec, 1.0 + abs(study.rates(spec.method).index(spec.rate) - best_at))
        for spec in study.specs("tuning")
    ]


def test_every_method_is_tuned_over_as_many_rates():
    for method in METHODS.values():
        assert len(method.rates) == 4 and list(method.rates) == sorted(set(method.rates))


def test_what_is_reported_uses_the_rate_with_the_least_validation_loss():
    study = study_of(tuned(best_at=2))
    # "betas" is run at every rate, "candidates" on text alone.
    for part in set(plan.PARTS) - {"tuning", "betas", "candidates"}:
        specs = study.specs(part)
        assert specs and len(set(specs)) == len(specs), part
        for spec in specs:
            like = plan.tuned_as(spec.method, spec.split) if part != "signs" else "vote"
            assert spec.rate == study.rates(like)[2], (part, spec)
            assert spec.method in METHODS and spec.seed not in plan.TUNING_SEEDS["class"]
    assert {(s.workers, s.workers * s.batch) for s in study.specs("main")} == {
        (workers, 32) for workers in (4, 8, 16, 32)
    }


def test_a_diverged_run_is_never_the_best_and_seeds_are_averaged():
    rows, lucky = tuned(best_at=0), plan.TUNING_SEEDS["class"][0]
    for found in rows:
        if found["rate"] == 1e-3 and found["split"] == "iid":
            found["validation"]["loss"] = None
        elif found["rate"] == 1e-3:
            found["validation"]["loss"] = 0.1 if found["seed"] == lucky else 3.0
    study = study_of(rows)
    assert study.best_rate("images", "lion", "iid") == 2e-3
    assert study.best_rate("images", "vote", "class") == 2e-3


# --- Runs


@pytest.fixture(scope="module")
def digits():
    return tasks.load("images", None, TINY)


def test_training_learns_and_repeats_and_seeds_differ(digits):
    runner, spec = runs.Runner(digits), spec_of("owner-3", steps=200, batch=32, rate=8e-3)
    first, again, other = (runner.run(spec._replace(seed=seed)) for seed in (0, 0, 1))
    for took in ("seconds", "compiling"):
        assert first.pop(took) > 0 <= again.pop(took)
    assert first == again and first["test"] != other["test"]
    assert first["test"]["accuracy"] > 0.4  # of ten classes
    sent = METHODS["owner-3"].sent(digits.parameters, 4, 200, 0)
    assert first["sent_bytes"] == sent > 0
    assert first["bits_per_parameter"] == pytest.approx(8 * sent / 200 / digits.size, 1e-4)
    assert runs.numbers([1.23456789, np.inf]) == [1.2346, None]


def test_a_sample_is_run_once_into_a_file_of_its_own(tmp_path, digits):
    before, again = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    wanted = runs.Runner(digits).run(spec_of("sgd", part="main", workers=8)) | {"size": "tiny"}
    store.append(before, [wanted])
    text = before.read_text()
    for _ in range(2):  # the second finds nothing to do
        convergence.main(["--size", "tiny", "--task", "images", "--jobs", "1",
                          "--save", str(before), "--sample", str(again)])  # fmt: skip
    (found,) = store.read(again)
    assert before.read_text() == text and store.key_of(found) == store.key_of(wanted)
    assert found["test"]["accuracy"] == pytest.approx(wanted["test"]["accuracy"], abs=0.05)
    assert found["command"] == "python benchmarks/convergence.py --sample again.jsonl --size tiny"


# --- What is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--method lyon", "'lyon' is no method; there are lion, adamw, .*owner-3"),
        ("--images nowhere", "nowhere: no such folder"),
        ("--sample {rows}", "rows is the file of --save, .*give another file"),
    ],
)
def test_bad_options_end_before_anything_runs(capsys, tmp_path, words, said):
    rows = tmp_path / "rows"
    given = words.format(rows=rows)
    with pytest.raises(SystemExit):
        convergence.main(["--size", "tiny", "--save", str(rows), *given.split()])
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
