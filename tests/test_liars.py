"""Workers that lie word by word: whatever one sends, it has one vote and nothing else that is a vote."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, assert_same, mesh_on, normal
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.exchange import bits, wires

Q, D, W = lc.quantize, lc.decide, lc.wires
WORKERS, ALL = 4, 0xFFFFFFFF  # the first lies, and owns all rows that are no padding
NAN, INFINITE, BELOW = 0x7FC07FC0, 0x7F807F80, 0xBF80BF80  # two steps in a word
LION, MEAN, ADAM = optax.scale_by_lion(), optax.identity(), optax.scale_by_adam()


def gradients():
    """On a row nobody has one, on another the liar alone, on a third all but the liar."""
    grads = {"a": normal(WORKERS, 130), "b": normal(WORKERS, 3, 128), "c": normal(WORKERS)}
    grads["b"][:, 0], grads["b"][1:, 1], grads["b"][0, 2] = 0, 0, 0
    return grads


def told(monkeypatch, parts, where, lies):
    """What comes of each lie about packed words: updates, the owners' state, metrics."""
    tx = lc.communicate(workers=AXIS, momentum=lc.momentum.nothing(), **parts)
    honest = getattr(wires, where)

    def step(grads, which):
        def changed(sent, form):
            words, each = honest(sent, form), []
            for lie in lies.values():
                planes, numbers, rows = lie(form, *wires.split(form, words))
                parts = len(words), planes, list(numbers.T), rows
                each.append(wires.concatenate(form, *parts))
            return jnp.where(jax.lax.axis_index(AXIS) == 0, jnp.stack(each)[which], words)

        own = jax.tree.map(lambda g: g[0], grads)
        with monkeypatch.context() as patch:
            patch.setattr(wires, where, changed)
            updates, state = tx.update(own, tx.init(own))
        return updates, jax.tree.map(jnp.atleast_1d, state.owner), lc.metrics(state)

    cut = P(AXIS)
    specs = {"in_specs": (cut, P()), "out_specs": (P(), cut, P())}
    mesh, grads = mesh_on(f"{AXIS}={WORKERS}"), gradients()
    run = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))
    return {name: jax.device_get(run(grads, k)) for k, name in enumerate(lies)}


def assert_sane(metrics, absent=0):
    assert metrics["votes/abstained"] == metrics["votes/abstentions"] == absent
    assert 0 <= metrics["votes/ties"] <= 1 and 0 <= metrics.get("votes/agreement", 0) <= 1


def says(code=None, rows=None, presence=None):
    """A message of one code, or its planes; rows and presence are words, or as they were."""

    def lie(form, planes, numbers, own):
        if code is not None:
            planes = bits.constant(code(form), len(planes), planes[0])
        own = own if own is None or rows is None else jnp.full_like(own, rows)
        return planes, numbers if presence is None else jnp.full_like(numbers, presence), own

    return lie


def largest(form):
    return form.max_code


def beyond(form):
    return 2**form.planes - 1


VOTES = {
    "+": says(largest, ALL), "-": says(lambda form: 0, ALL), "honest": says(),
    "many": says(largest, ALL, 2**31 + 1), "nobody": says(largest, ALL, 2**31),
    "no row": says(largest, 0), "no code": says(beyond, ALL),
}  # fmt: skip


@pytest.mark.parametrize(
    ("codes", "decision", "wire"),
    [
        (Q.sign(), D.majority(), W.two_phase()),
        (Q.sign(), D.average(), W.gathered()),
        (Q.midrise(2), D.majority(), W.gathered()),
        (Q.midrise(3), D.average(), W.two_phase()),
        (Q.ternary(), D.ternary(), W.two_phase()),
        (Q.integer(8), D.average(), W.two_phase()),
    ],
)
def test_whatever_a_worker_sends_it_has_one_vote(monkeypatch, codes, decision, wire):
    """Each update is between those of its two utmost votes."""
    parts = {"quantizer": codes, "decision": decision, "wire": wire}
    found = told(monkeypatch, parts, "pack_message", VOTES)
    most, least = found["+"][0], found["-"][0]
    for name, (updates, _, metrics) in found.items():
        for k, u in updates.items():
            assert (least[k] <= u).all() and (u <= most[k]).all(), (name, k)
        assert_sane(metrics, absent=int(name == "nobody"))


def middle(form):
    return form.max_code // 2


def test_who_says_that_it_abstains_has_no_vote(monkeypatch):
    """Its codes would be in the sum, and not in the number by which the sum is divided."""
    lies = {"silent": says(middle, presence=0), "loud": says(largest, presence=0)}
    parts = {"quantizer": Q.ternary(), "decision": D.average()}
    found = told(monkeypatch, parts, "pack_message", lies)
    assert_same(found["loud"], found["silent"])
    assert_sane(found["loud"][2], absent=1)


VALUES = {  # lies that must be the same
    "honest": [says(), says(presence=ALL)],
    "zero": [says(rows=0), says(rows=NAN), says(rows=INFINITE), says(rows=BELOW)],
    "largest": [says(largest), says(beyond)],
}
DENSE = {"zero": [says(lambda form: 0), says(lambda form: 1)]}  # of a plane of NaN


@pytest.mark.parametrize(
    ("codes", "decision", "wire", "lies"),
    [
        (Q.midrise(3), D.at_owner(LION, D.sign()), W.two_phase(), VALUES),
        (Q.midrise(3), D.at_owner(LION, D.sign()), W.gathered(), VALUES),
        (Q.dense(), D.at_owner(MEAN, D.values()), W.two_phase(), DENSE),
    ],
)
def test_what_is_no_number_is_a_zero(monkeypatch, codes, decision, wire, lies):
    parts = {"quantizer": codes, "decision": decision, "wire": wire}
    each = {(name, k): lie for name, same in lies.items() for k, lie in enumerate(same)}
    found = told(monkeypatch, parts, "pack_message", each)
    for (name, _), one in found.items():
        assert_same(one, found[name, 0])
        assert one[0]["b"].any(), "the others move it"


def replies(word, presence):
    def lie(form, planes, numbers, rows):
        pairs = jnp.float32([2e5, 1]).view(jnp.uint32)[: numbers.shape[1] - 2]
        numbers = jnp.full_like(numbers, word).at[:, 1].set(presence).at[:, 2:].set(pairs)
        rows = None if rows is None else jnp.full_like(rows, word)
        return [jnp.full_like(x, word) for x in planes], numbers, rows

    return lie


@pytest.mark.parametrize(
    ("codes", "decision", "reach"),
    [
        (Q.sign(), D.majority(), 1),
        (Q.sign(), D.average(), 1),
        (Q.midrise(3), D.at_owner(ADAM, D.values()), np.finfo(np.float32).max),
        (Q.midrise(3), D.at_owner(ADAM, D.codes(2)), np.finfo(np.float32).max),
    ],
)
def test_what_an_owner_replies_is_a_step(monkeypatch, codes, decision, reach):
    """And it does not say alone who came."""
    words = (NAN, 0), (ALL, ALL), (INFINITE, 1), (BELOW, 3)
    lies = {"honest": says()} | {f"{one}": replies(*one) for one in words}
    parts = {"quantizer": codes, "decision": decision}
    found = told(monkeypatch, parts, "pack_reply", lies)
    for updates, owned, metrics in found.values():
        assert all(np.isfinite(u).all() and abs(u).max() <= reach for u in updates.values())
        assert_same(owned, found["honest"][1])  # counters too
        assert_sane(metrics)


@pytest.mark.parametrize("number", [-2, 2**30])
def test_of_any_sum_comes_a_step(monkeypatch, number):
    """Who lies decides all of it, and nothing beyond."""
    summed, wire = jax.lax.psum, W.counts("int32")

    def collect(*args):
        with monkeypatch.context() as patch:
            lied = jnp.int32(number)
            patch.setattr(jax.lax, "psum", lambda x, axis: summed(x, axis) + lied.astype(x.dtype))
            return wire.collect(*args)

    parts = {"quantizer": Q.sign(), "decision": D.average(), "wire": wire._replace(collect=collect)}
    found = told(monkeypatch, parts, "pack_message", {"honest": says()})["honest"]
    updates, _, metrics = found
    assert all(abs(u).max() <= 1 for u in updates.values())
    assert_sane(metrics, absent=np.clip(metrics["votes/abstained"], 0, WORKERS))
