"""Stages as an inner axis: what crosses each axis, and the same losses as without stages."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from pages import ROOT
from test_drop_in import LEARNING_RATE, TRAINERS, changed, run, usual

import lioncub_jax as lc

STYLE, STEPS = "pipeline_stages", 5
PAGE = (ROOT / "docs/how_to/pipeline.md").read_text()
ROWS = re.findall(r"\| ([^|]+) \| ([\d,]+) \| ([\d,]+) \|", PAGE)
SAID = {name.strip("`"): tuple(int(x.replace(",", "")) for x in both) for name, *both in ROWS}
FLOAT32 = "a float32 mean of gradients"


@pytest.fixture(autouse=True)
def trainers_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINERS))


@functools.cache
def trained(optimizer, stages=2):
    """Losses, what travels, and the state, of the usual trainer or with the lines of the page."""
    source = usual(STYLE) if optimizer == "lion" else changed(STYLE)
    source = source.replace("lc.lion_cub(", f"lc.{optimizer}(")
    return run(source.replace('"stage": 2', f'"stage": {stages}'), STEPS)


@pytest.mark.parametrize("optimizer", ["lion_cub", "owner_adamw"])
def test_each_axis_has_the_bytes_that_the_page_says(optimizer):
    _, found, (params, _) = trained(optimizer)
    sent = lc.audit.sent_bytes(found)
    assert (sent["data",], sent["stage",]) == SAID[optimizer]
    size = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(params))
    within = lc.audit.sent_bytes(trained("lion")[1])["stage",]
    assert (lc.audit.float32_all_reduce_bytes(size, 4), within) == SAID[FLOAT32]
    assert f"{size:,} parameters" in " ".join(PAGE.split())


def plain():
    """Losses of the model on one device, all layers in one scan."""
    names = {"__name__": "trainer"}
    exec(usual(STYLE), names)
    params, tx = (
        names["init_params"](jax.random.key(0)),
        optax.lion(LEARNING_RATE, weight_decay=0.1),
    )

    @jax.jit
    @jax.value_and_grad
    def loss_and_grads(params, windows):
        x = params["embed"][windows[:, :-1]].reshape(len(windows), -1) @ params["first"]
        logits = names["apply_layers"](params["layers"], x) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()

    state, losses = tx.init(params), []
    alone = Mesh(jax.devices()[:1], "data")
    for _, windows in zip(range(STEPS), names["batches"](alone), strict=False):
        loss, grads = loss_and_grads(params, windows)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def test_stages_have_the_losses_of_the_model_without_them():
    # To what sums in another order make: Lion turns signs of what is nearly 0, and codes fall to the next.
    np.testing.assert_allclose(trained("lion")[0], plain(), rtol=1e-3)


@pytest.mark.long
def test_one_stage_and_two_have_the_same_votes():
    one, two = (trained("owner_adamw", stages)[0] for stages in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-3)
