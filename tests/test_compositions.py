"""Each of optax's wrappers around, in front of and behind each method: it runs, or is an error with a cure.

A step is traced and read, which proves that parameters cannot drift apart and that no worker waits for
ever; with the methods of the first line it also runs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import in_order, normal, workers_on

import lioncub_jax as lc
from lioncub_jax import baselines

PARAMS = {"w": jnp.ones((6, 5)) / 9, "b": jnp.zeros(5)}
LABELS = {"w": "train", "b": "rest"}
BATCH = normal(16, 6)
WORKERS = functools.cache(lambda: workers_on("data=4"))

METHODS = {
    "lion_cub": lambda w: lc.lion_cub(1e-3, workers=w),
    "owner_adamw": lambda w: lc.owner_adamw(1e-3, workers=w),
    "global_gradients": lambda w: lc.global_gradients(optax.adamw(1e-3), workers=w),
    "owner_lion": lambda w: lc.owner_lion(1e-3, workers=w),
    "owner_muon": lambda w: lc.owner_muon(1e-3, workers=w),
    "distributed_lion": lambda w: lc.distributed_lion(1e-3, average=True, workers=w),
    "synced": lambda w: lc.lion_cub(1e-3, workers=w, sync=lc.sync.every(2)),
    "one_bit_adam": lambda w: baselines.one_bit_adam(1e-3, warmup=2, workers=w),
    "powersgd": lambda w: baselines.powersgd(optax.sgd(1e-3), 1, workers=w),
    "diloco": lambda w: baselines.diloco(workers=w),
}


def in_front(*txs):
    return lambda tx: optax.chain(*txs, tx)


def behind(*txs):
    return lambda tx: optax.chain(tx, *txs)


def every(step):
    return step % 2 == 0


HANGS = "cond or a loop whose predicate differs ... Decide by what all workers agree on"
AROUND = "is around a transform in which workers communicate"
DRIFTS = "differs between workers after the step ... A parameter would drift apart"
RIGHT = None
WRAPPERS = {
    "nothing": (lambda tx: tx, RIGHT),
    "clipping, zeros for NaN": (in_front(optax.clip_by_global_norm(1.0), optax.zero_nans()), RIGHT),
    "momentum in front": (in_front(optax.trace(0.9)), RIGHT),
    "Adam in front": (in_front(optax.scale_by_adam()), RIGHT),
    "noise in front": (in_front(optax.add_noise(0.01, 0.5, jax.random.key(0))), RIGHT),
    "a schedule and decay behind": (
        behind(optax.add_decayed_weights(0.1), optax.scale_by_schedule(lambda n: 1 / (n + 1))), RIGHT,
    ),
    "averages and clipping behind": (
        behind(optax.ema(0.9), optax.clip_by_global_norm(1.0), optax.apply_every(2)), RIGHT,
    ),
    "a plateau": (behind(optax.contrib.reduce_on_plateau(patience=1)), RIGHT),
    "apply_if_finite behind": (behind(optax.apply_if_finite(optax.ema(0.9), 3)), RIGHT),
    "apply_if_finite around": (
        lambda tx: optax.apply_if_finite(tx, 3), f"{AROUND} ... abstains by itself",
    ),
    "MultiSteps": (lambda tx: optax.MultiSteps(tx, 2), RIGHT),
    "MultiSteps that skips": (
        lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite), HANGS,
    ),
    "a label": (lambda tx: optax.partition({"train": tx, "rest": optax.set_to_zero()}, LABELS), RIGHT),
    "a mask": (lambda tx: optax.masked(tx, {"w": True, "b": False}), "['b'] ... a mask or label keeps"),
    "conditionally_mask": (lambda tx: optax.conditionally_mask(tx, every), AROUND),
    "conditionally_transform": (lambda tx: optax.conditionally_transform(tx, every), AROUND),
    "mechanize": (optax.contrib.mechanize, "differs between workers"),
    "schedule_free": (lambda tx: optax.contrib.schedule_free(tx, 1e-3), RIGHT),
    "sam": (lambda tx: optax.contrib.sam(tx, optax.sgd(0.1)), DRIFTS),
    "another exchange behind": (
        lambda tx: optax.chain(tx, lc.lion_cub(1e-3, workers=WORKERS())),
        "are the same on all workers ... in front of the exchange",
    ),
}  # fmt: skip


def step_of(tx, is_told):
    def step(state, batch):
        params, opt_state = state
        loss_fn = lambda p: jnp.mean((batch @ p["w"] + p["b"] - 1) ** 2)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        told = {"value": lc.mean_over_workers(loss, WORKERS())} if is_told else {}
        updates, opt_state = tx.update(grads, opt_state, params, **told)
        return (optax.apply_updates(params, updates), opt_state), loss

    return lc.map_step(step, WORKERS())


def cases():
    for i, method in enumerate(METHODS):
        marks = () if i < 3 else pytest.mark.long
        for wrapper in WRAPPERS:
            yield pytest.param(method, wrapper, marks=marks, id=f"{wrapper}, {method}")


@pytest.mark.parametrize(("method", "wrapper"), [*cases()])
def test_a_composition_runs_or_is_an_error_with_a_cure(method, wrapper):
    wrap, words = WRAPPERS[wrapper]
    tx = wrap(METHODS[method](WORKERS()))
    step = step_of(tx, "plateau" in wrapper)
    if words is not RIGHT:
        with pytest.raises((ValueError, TypeError), match=in_order(words)):
            step.explain(step.prepare((PARAMS, tx.init(PARAMS))), BATCH)
        return
    state = step.prepare((PARAMS, tx.init(PARAMS)))
    step.explain(state, BATCH)
    if method in [*METHODS][:3]:
        for _ in range(2):
            state, loss = step(state, BATCH)
        assert np.isfinite(loss) and all(np.isfinite(x).all() for x in state[0].values())
