"""Workers that lie word by word: whatever one sends, it has one vote and nothing else that is a vote."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, normal
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import bits, wires

Q, D, W = lc.quantize, lc.decide, lc.wires
WORKERS, LIAR, ALL = 4, 2, jnp.uint32(0xFFFFFFFF)
SHAPES = {"a": (130,), "b": (3, 128), "c": ()}
NAN, INFINITE, BELOW = 0x7FC07FC0, 0x7F807F80, 0xBF80BF80  # two steps in a word


def gradients():
    """Of four workers; on a row nobody has one, on another the liar alone, on a third all but the liar."""
    grads = {k: normal(WORKERS, *shape) for k, shape in SHAPES.items()}
    grads["b"][:, 0], grads["b"][np.arange(WORKERS) != LIAR, 1], grads["b"][LIAR, 2] = 0, 0, 0
    return grads


def told(mesh, monkeypatch, parts, where, lies):
    """What comes of each lie, where one worker's words are changed by it: updates, states, metrics."""
    tx = lc.communicate(workers=AXIS, memory=lc.momentum.nothing(), **parts)
    honest = getattr(wires.Format, where)

    def step(grads, which):
        def changed(form, *args):
            words = honest(form, *args)
            parts = getattr(form, {"pack": "message"}.get(where, "reply"))
            each = []
            for lie in lies.values():
                planes, numbers, rows = lie(form, *parts.split(words))
                numbers = [numbers[:, k] for k in range(parts.numbers)]
                each.append(parts.join(len(words), planes, numbers, rows))
            lied = jnp.stack(each)[which]
            return jnp.where(jax.lax.axis_index(AXIS) == LIAR, lied, words)

        own = jax.tree.map(lambda g: g[0], grads)
        with monkeypatch.context() as patch:
            patch.setattr(wires.Format, where, changed)
            updates, state = tx.update(own, tx.init(own))
        owned = jax.tree.map(lambda x: x if x.ndim else x[None], state.owner)
        return updates, owned, lc.metrics(state)

    run = jax.shard_map(
        step, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=(P(), P(AXIS), P()), check_vma=False
    )
    run, grads = jax.jit(run), gradients()
    return {name: jax.device_get(run(grads, k)) for k, name in enumerate(lies)}


def assert_sane(metrics, absent=0):
    assert metrics["votes/abstained"] == metrics["votes/abstentions"] == absent
    assert 0 <= metrics["votes/ties"] <= 1 and 0 <= metrics.get("votes/agreement", 0) <= 1


# --- Messages of votes


def saying(form, code, voted=ALL, presence=1):
    """All elements one code."""
    like = jnp.zeros((WORKERS, form.message.of_plane), jnp.uint32)
    planes = bits.constant(code, form.message.planes, like)
    rows = jnp.full((WORKERS, form.message.of_rows), voted) if form.message.of_rows else None
    return planes, jnp.full((WORKERS, 1), presence, jnp.uint32), rows


VOTES = {
    "+": lambda form, *words: saying(form, form.top),
    "-": lambda form, *words: saying(form, 0),
    "honest": lambda form, *words: words,
    "many": lambda form, *words: saying(form, form.top, presence=0x80000001),
    "nobody": lambda form, *words: saying(form, form.top, presence=0x80000000),
    "no row": lambda form, *words: saying(form, form.top, voted=0),
    "no code": lambda form, *words: saying(form, 2**form.message.planes - 1),
    "noise": lambda form, planes, numbers, rows: (
        [bits.coin(0, x.size, k).reshape(x.shape) for k, x in enumerate(planes)],
        bits.coin(0, numbers.size, 8).reshape(numbers.shape) | 1,
        None if rows is None else bits.coin(0, rows.size, 9).reshape(rows.shape),
    ),
}


@pytest.mark.parametrize(
    ("codes", "decision", "wire"),
    [
        (Q.sign(), D.majority(), W.two_phase()),
        (Q.sign(), D.average(), W.gathered()),
        (Q.midrise(2), D.majority(), W.gathered()),
        (Q.midrise(3), D.average(), W.two_phase()),
        (Q.ternary(), D.ternary(), W.two_phase()),
        (Q.ternary(), D.total(), W.gathered()),
        (Q.integer(8), D.average(), W.two_phase()),
    ],
    ids=lambda part: part.name,
)
def test_whatever_a_worker_sends_it_has_one_vote(mesh_of, monkeypatch, codes, decision, wire):
    """Each update is between those of the two utmost votes."""
    parts = {"quantizer": codes, "decision": decision, "wire": wire}
    found = told(mesh_of(WORKERS), monkeypatch, parts, "pack", VOTES)
    most, least = found["+"][0], found["-"][0]
    for name, (updates, _, metrics) in found.items():
        for k, u in updates.items():
            assert (least[k] <= u).all() and (u <= most[k]).all(), (name, k)
        assert_sane(metrics, absent=int(name == "nobody"))


# --- Messages of values


def steps_of(word):
    return lambda form, planes, numbers, rows: (planes, numbers, jnp.full_like(rows, word))


def all_of(code):
    return lambda form, planes, *words: (bits.constant(code, len(planes), planes[0]), *words)


LION = D.at_owner(optax.scale_by_lion(), D.sign())
VALUES = {  # what is sent, and what it must be the same as
    "many": (lambda form, planes, numbers, rows: (planes, numbers | (ALL - 1), rows), "honest"),
    "NaN": (steps_of(NAN), "zero"),
    "infinite": (steps_of(INFINITE), "zero"),
    "below": (steps_of(BELOW), "zero"),
    "no code": (all_of(7), "largest"),
    "honest": (lambda form, *words: words, "honest"),
    "zero": (steps_of(0), "zero"),
    "largest": (all_of(6), "largest"),
}
DENSE = {"NaN": (all_of(1), "zero"), "zero": (all_of(0), "zero")}


@pytest.mark.parametrize(
    ("codes", "decision", "wire", "lies"),
    [
        (Q.levels(3), LION, W.two_phase(), VALUES),
        (Q.levels(3), LION, W.gathered(), VALUES),
        (Q.dense(), D.at_owner(optax.identity(), D.values()), W.two_phase(), DENSE),
    ],
)
def test_what_is_no_number_is_a_zero(mesh_of, monkeypatch, codes, decision, wire, lies):
    parts = {"quantizer": codes, "decision": decision, "wire": wire}
    lied = {name: lie for name, (lie, _) in lies.items()}
    found = told(mesh_of(WORKERS), monkeypatch, parts, "pack", lied)
    for name, (_, like) in lies.items():
        jax.tree.map(np.testing.assert_array_equal, found[name], found[like])
        assert any(u.any() for u in found[name][0].values()), "the others move it"


# --- Replies


def replying(word, presence):
    """All words of a reply."""

    def lie(form, planes, numbers, rows):
        numbers = jnp.full_like(numbers, word).at[:, 1].set(presence)
        rows = None if rows is None else jnp.full_like(rows, word)
        return [jnp.full_like(x, word) for x in planes], numbers, rows

    return lie


@pytest.mark.parametrize(
    ("codes", "decision"),
    [
        (Q.sign(), D.majority()),
        (Q.sign(), D.average()),
        (Q.ternary(), D.total()),
        (Q.midrise(3), D.at_owner(optax.scale_by_adam(), D.values())),
        (Q.midrise(3), D.at_owner(optax.scale_by_adam(), D.codes(2))),
    ],
    ids=lambda part: part.name,
)
def test_an_owner_that_lies_decides_its_slice_and_nothing_that_is_no_number(
    mesh_of, monkeypatch, codes, decision
):
    lies = {"honest": lambda form, *words: words} | {
        f"{word:x}, {count}": replying(word, count)
        for word, count in ((NAN, 0), (ALL, ALL), (INFINITE, 1), (BELOW, 3))
    }
    parts = {"quantizer": codes, "decision": decision}
    found = told(mesh_of(WORKERS), monkeypatch, parts, "pack_reply", lies)
    honest = found.pop("honest")
    reach = WORKERS if decision.name == "total" else 1
    for updates, owned, metrics in found.values():
        for k, u in updates.items():
            assert np.isfinite(u).all(), k
            assert decision.decodes or abs(u).max() <= reach
        jax.tree.map(np.testing.assert_array_equal, owned, honest[1])  # counters too
        # The first of three rows of 16 is all that there is; the liar owns the third.
        jax.tree.map(np.testing.assert_array_equal, updates, honest[0])
        assert_sane(metrics)


# --- Sums


@pytest.mark.parametrize("number", [1, 77, -2, 2**30])
@pytest.mark.parametrize("wire", [W.counts("int32"), W.lanes()], ids=lambda wire: wire.name)
def test_of_any_sum_comes_a_step(mesh_of, monkeypatch, wire, number):
    """Who lies decides all of it, and nothing beyond."""
    summed = jax.lax.psum

    def collect(*args):
        with monkeypatch.context() as patch:
            lied = jnp.int32(number)
            patch.setattr(jax.lax, "psum", lambda x, axis: summed(x, axis) + lied.astype(x.dtype))
            return wire.collect(*args)

    parts = {"quantizer": Q.sign(), "decision": D.average(), "wire": wire._replace(collect=collect)}
    lies = {"honest": lambda form, *words: words}
    updates, _, metrics = told(mesh_of(WORKERS), monkeypatch, parts, "pack", lies)["honest"]
    assert all(abs(u).max() <= 1 for u in updates.values())
    assert 0 <= metrics["votes/abstained"] <= WORKERS
    assert 0 <= metrics["votes/ties"] <= 1 and 0 <= metrics["votes/agreement"] <= 1
