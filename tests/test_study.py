"""The convergence study: methods are the same simulated and on devices, all are tuned alike."""

import convergence
import jax
import numpy as np
import pytest
from conftest import AXIS
from report import append, read
from study import plan, runs, tasks
from study.methods import METHODS

WORKERS, STEPS = 8, 12
TINY = tasks.SIZES["tiny"]
# One of each kind: who votes, who has the momentum, what is synced, what is sent of the gradient.
KINDS = ("lion", "vote-2", "average", "owner-3", "vote-coded-3", "ef-signsgd", "dgc")
OTHERS = [name for name in METHODS if name not in KINDS]


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


def study_of(rows):
    return plan.Study(TINY, ("images",), rows)


def tuned(best_at=1):
    """Rows that tune every method of the images task, with the best rate at one place of the grid."""

    def loss(spec):
        return 1.0 + abs(METHODS[spec.method].rates.index(spec.rate) - best_at)

    specs = study_of([]).specs("tuning")
    return [spec._asdict() | {"validation": {"loss": loss(spec)}} for spec in specs]


def test_every_method_is_tuned_over_as_many_rates():
    for method in METHODS.values():
        assert len(method.rates) == 4 and list(method.rates) == sorted(set(method.rates))


def test_what_is_reported_uses_the_rate_with_the_least_validation_loss():
    study = study_of(tuned(best_at=2))
    for part in set(plan.PARTS) - {"tuning"}:
        specs = study.specs(part)
        assert specs and len(set(specs)) == len(specs), part
        for spec in specs:
            like = plan.tuned_as(spec.method, spec.split)
            assert spec.rate == METHODS[like].rates[2], (part, spec)
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
    spec = runs.Spec("x", "images", "owner-3", 4, "iid", 32, 200, 8e-3, 0)
    runner = runs.Runner(digits)
    first, again, other = (runner.run(spec._replace(seed=seed)) for seed in (0, 0, 1))
    for took in ("seconds", "compiling"):
        assert first.pop(took) > 0 <= again.pop(took)
    assert first == again and first["test"] != other["test"]
    assert first["test"]["accuracy"] > 0.4  # of ten classes
    sent = METHODS["owner-3"].sent(digits.parameters, 4, 200, 0)
    assert first["sent_bytes"] == sent > 0
    assert first["bits_per_parameter"] == pytest.approx(8 * sent / 200 / digits.size, 1e-4)
    assert runs.numbers([1.23456789, np.inf]) == [1.2346, None]


def test_rows_are_repeated_at_rates_of_another_file_once(tmp_path):
    before, again = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    append(before, [found | {"dataset": "scikit-learn's digits"} for found in tuned(best_at=2)])
    text = before.read_text()
    for _ in range(2):  # the second finds nothing to do
        convergence.main(["--size", "tiny", "--task", "images", "--jobs", "1", "--part", "main",
                          "--method", "sgd", "--workers", "8", "--tuned", str(before),
                          "--save", str(again)])  # fmt: skip
    found = read(again, runs.key_of)
    assert before.read_text() == text and [row["seed"] for row in found] == [0, 1, 2]
    assert {row["rate"] for row in found} == {METHODS["sgd"].rates[2]}
    assert {row["command"] for row in found} == {
        "python benchmarks/convergence.py --part main --size tiny"
    }
