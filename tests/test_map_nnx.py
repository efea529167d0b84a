"""Steps of flax's nnx under map_step, which change modules, optimizers, streams and metrics in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import in_order, normal, workers_on
from flax import nnx

import lioncub_jax as lc

X = normal(16, 6)
Y = (X[:, :3] > 0).argmax(1)


@functools.cache
def workers():
    return workers_on("data=4")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.a, self.norm = nnx.Linear(6, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.drop, self.b = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))


def loss_fn(model, batch):
    logits = model(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return loss.mean(), logits


def build(make=lc.owner_adamw):
    model = Model(nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), make(1e-2, workers=workers()))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    return loss


def metrics():
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


@pytest.mark.parametrize("around", [lambda f: f, nnx.jit], ids=["alone", "nnx.jit"])
def test_a_step_of_nnx_changes_its_objects_in_place_and_learns(around):
    step, (model, optimizer), seen = lc.map_step(around(train_step), workers()), build(), metrics()
    kernel, losses = model.a.kernel, []
    for _ in range(12):
        losses.append(float(step(model, optimizer, seen, {"x": X, "y": Y})))
    assert np.mean(losses[-3:]) < losses[0] - 0.2
    assert model.a.kernel is kernel and optimizer.step[...] == 12
    assert seen.accuracy.count[...] == 12 * 16  # what each worker counted is added
    assert model.norm.mean.shape == (8,) and model.drop.rngs.count[...] == 12
    evaluated = nnx.clone(model)
    evaluated.eval()
    loss, _ = nnx.jit(loss_fn)(evaluated, {"x": X, "y": Y})  # no line, and no call of all processes
    assert np.isfinite(loss)


def test_statistics_of_batch_norm_are_the_mean_of_the_workers():
    model, optimizer = build()
    before = jax.tree.map(jnp.copy, nnx.state(model))
    lc.map_step(train_step, workers())(model, optimizer, metrics(), {"x": X, "y": Y})
    means = []
    for rows in X.reshape(4, 4, 6):
        alone = Model(nnx.Rngs(0))
        nnx.update(alone, before)
        alone(rows)
        means.append(alone.norm.mean[...])
    np.testing.assert_allclose(model.norm.mean[...], np.mean(means, 0), rtol=1e-5, atol=1e-6)


def test_metrics_are_those_of_all_rows_also_where_a_mask_counts_them():
    class Masked(nnx.Metric):
        def __init__(self):
            self.total = nnx.metrics.MetricState(jnp.zeros(()))
            self.count = nnx.metrics.MetricState(jnp.int32(0))

        def update(self, x, mask):
            self.total[...] += (x * mask).sum()
            self.count[...] += mask.sum()

    def step(metric, batch):
        metric.update(batch["x"][:, 0], batch["mask"])

    found, one, mask = Masked(), Masked(), (Y == 0).astype(np.int32)
    for _ in range(2):
        lc.map_step(step, workers())(found, {"x": X, "mask": mask})
        step(one, {"x": X, "mask": mask})
    assert found.count[...] == one.count[...]
    np.testing.assert_allclose(found.total[...], one.total[...], rtol=1e-6)


def test_a_metric_that_is_no_sum_is_refused():
    def step(metric, batch):
        metric.update(values=batch)

    with pytest.raises(
        ValueError, match=in_order("metric that differs between workers ... Welford")
    ):
        lc.map_step(step, workers())(nnx.metrics.Welford(), X)


def test_what_stands_in_front_is_prepared_in_place():
    model = Model(nnx.Rngs(0))
    tx = optax.MultiSteps(lc.owner_adamw(1e-2, workers=workers()), 2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = lc.map_step(train_step, workers())
    with pytest.raises(ValueError, match=in_order("acc_grads ... step.prepare(state)")):
        step(model, optimizer, metrics(), {"x": X, "y": Y})
    assert step.prepare(optimizer) is optimizer
    for _ in range(4):
        step(model, optimizer, metrics(), {"x": X, "y": Y})
    assert optimizer.opt_state.gradient_step[...] == 2
    assert optimizer.opt_state.acc_grads["a"]["kernel"].shape == (4, 6, 8)


def test_a_module_may_be_returned_and_streams_be_an_argument():
    def step(model, rngs, batch):
        noise = rngs.noise.uniform(batch["x"].shape)
        _, logits = loss_fn(model, {**batch, "x": batch["x"] + noise})
        return model, logits

    model, rngs = Model(nnx.Rngs(0)), nnx.Rngs(noise=1)
    same, logits = lc.map_step(step, workers())(model, rngs, {"x": X, "y": Y})
    assert same is model and logits.shape == (16, 3) and rngs.noise.count[...] == 1


def whole_state_step(graphdef, state, batch):
    """A step of an ``nnx.State`` of a model and its optimizer, as MaxText has it."""
    model, optimizer = nnx.merge(graphdef, state)
    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


def two_states_step(graphdef, tx, params, rest, opt_state, batch):
    """A step of bare ``nnx.State``, with a state of optax that was made of one."""

    def loss_of(params, rest):
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss, _ = loss_fn(model, batch)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(params, rest)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), rest, opt_state, loss


def test_a_bare_state_of_nnx_trains_as_the_objects_do():
    """Its variables say what they are: BatchStat is averaged, and momentum is each worker's own."""
    batch, (model, optimizer) = {"x": X, "y": Y}, build()
    graphdef, state = nnx.split((model, optimizer))
    of_all = lc.map_step(functools.partial(whole_state_step, graphdef), workers())
    tx = optimizer.tx
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    bare = lc.map_step(functools.partial(two_states_step, graphdef, tx), workers())
    opt_state = tx.init(params)
    # Copies, since the step of objects changes those that these hold.
    state, params, rest = jax.tree.map(jnp.copy, (state, params, rest))
    step, found = lc.map_step(train_step, workers()), []
    for _ in range(3):
        state, whole = of_all(state, batch)
        params, rest, opt_state, two = bare(params, rest, opt_state, batch)
        found.append([float(x) for x in (step(model, optimizer, metrics(), batch), whole, two)])
    np.testing.assert_allclose(found, [[x] * 3 for x, *_ in found], rtol=1e-6)
    np.testing.assert_allclose(
        rest["norm"]["mean"][...], model.norm.mean[...], rtol=1e-5, atol=1e-6
    )


def test_a_dict_of_pure_values_has_lost_whose_they_are():
    graphdef, state = nnx.split(build())

    def step(pure, batch):
        like = nnx.State(state)
        nnx.replace_by_pure_dict(like, pure)
        return whole_state_step(graphdef, like, batch)

    with pytest.raises(ValueError, match=in_order("all workers ... a dict of pure values")):
        lc.map_step(step, workers())(nnx.to_pure_dict(state), {"x": X, "y": Y})
