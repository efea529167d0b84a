"""Trainers that people run, by `make trainers`: the lines that they need; and the optimizer for Keras."""

import ast

import jax
import keras
import numpy as np
import optax
import pages
import pytest
import trainers
from conftest import normal, workers_on

from lioncub_jax.training.keras import OptaxOptimizer

ROWS = normal(64, 6), normal(64, 2, seed=1)


@pytest.mark.parametrize("trainer", trainers.TRAINERS, ids=lambda x: x.key)
def test_a_trainer_needs_ten_lines_at_most_and_none_without_the_library(trainer):
    source = trainer.source()
    lines = trainers.lines_of(source)
    assert 0 < len(lines) <= 10 and any("lc." in line for line in lines)
    plain = ast.parse(trainers.written(source, "plain", STEPS=3))
    names = {x.id for x in ast.walk(plain) if isinstance(x, ast.Name)}
    assert not names & {"lc", "workers", "OptaxOptimizer", "Mapped"}
    other = trainers.written(
        source, "lion_cub", **dict(trainer.constants) | {"STEPS": 3, "RATE": 7.0}
    )
    assert "lc.lion_cub(" in other and "owner_adamw(" not in other
    assert "\nSTEPS, RATE, " in other and " = 3, 7.0, 0, " in other
    assert f"<!-- recipe: {trainer.file} -->\n```diff\n{trainers.recipe(trainer)}```" in (
        trainers.DOCUMENT.read_text()
    )
    assert (pages.ROOT / f"requirements/trainers/{trainer.requirements}.txt").exists()


def test_a_loss_that_is_apart_by_two_standard_errors_has_a_star():
    plain = {"mean": 1.0, "error": 0.03}
    assert trainers.loss({"mean": 1.09, "error": 0.04}, plain) == "1.0900±0.0400"
    assert trainers.loss({"mean": 1.11, "error": 0.04}, plain) == r"1.1100±0.0400\*"
    assert trainers.loss({"mean": 0.89, "error": 0.04}, plain) == r"0.8900±0.0400\*"


# --- Keras


def shown():
    """The model and the optimizer of examples/large/keras_fit.py, on four workers."""
    names = {"keras": keras, "workers": workers_on("data=4"), "RATE": 1e-2}
    lines = trainers.lines_of((trainers.FILES / "keras_fit.py").read_text())
    exec("\n".join(x for x in lines if not x.startswith("workers =")), names)
    return names["optimizer"], names["Model"]


def fitted(optimizer, Model=keras.Sequential, epochs=1):
    keras.utils.set_random_seed(0)
    layers = keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dense(2)
    model = Model([keras.Input((6,)), *layers])
    model.compile(optimizer, loss="mse", metrics=["mae"])
    history = model.fit(*ROWS, batch_size=32, epochs=epochs, shuffle=False, verbose=0)
    return model, history.history


def values(model):
    return [np.asarray(v.value) for v in model.trainable_variables]


def test_a_state_of_optax_in_keras_is_that_of_optax():
    model, told = fitted(OptaxOptimizer(optax.sgd(0.1)))
    wanted, told_by_keras = fitted(keras.optimizers.SGD(0.1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), values(model), values(wanted))
    assert told["loss"] == pytest.approx(told_by_keras["loss"])
    assert told["mae"] == pytest.approx(told_by_keras["mae"])


def test_fit_over_workers_keeps_each_ones_state_obeys_callbacks_and_goes_on(tmp_path):
    model, told = fitted(*shown(), epochs=2)
    assert all(np.isfinite(x).all() for x in values(model)) and told["loss"][1] < told["loss"][0]
    own = [v.shape[0] for v in model.optimizer.variables if len(v.shape) > 1]
    assert own and set(own) == {4}
    # Callbacks set the rate, by which updates are multiplied.
    before = values(model)
    model.optimizer.learning_rate = 0.0
    model.fit(*ROWS, batch_size=32, verbose=0, shuffle=False)
    jax.tree.map(np.testing.assert_array_equal, values(model), before)
    model.optimizer.learning_rate = 1.0
    model.save_weights(tmp_path / "a.weights.h5")
    again, _ = fitted(*shown())
    again.load_weights(tmp_path / "a.weights.h5")
    for one in (model, again):
        one.fit(*ROWS, batch_size=32, verbose=0, shuffle=False)
    jax.tree.map(np.testing.assert_array_equal, values(model), values(again))
    model.save(tmp_path / "a.keras")
    with pytest.raises(ValueError, match="does not hold its transform of optax"):
        keras.models.load_model(tmp_path / "a.keras", {"Mapped": type(model)})
