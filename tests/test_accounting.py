"""Predicted bytes against the compiled program's, against the papers' formulas, and at scale.

That every public optimizer sends what is predicted is the contract's. Here are the numbers themselves, what
no public optimizer is made of, and workers of several devices.
"""

import runpy

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, absent, workers_on
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from pages import ROOT

import lioncub_jax as lc
from lioncub_jax.programs import units

AT_OWNER = {"decision": lc.decide.at_owner(optax.scale_by_lion(), lc.decide.sign())}
Q, D, WIRES = lc.quantize, lc.decide, lc.wires


def predict(params, workers, **parts):
    tx = lc.communicate(**parts, momentum=lc.momentum.nothing(), workers=AXIS)
    return lc.audit.of(tx, params, absent(workers))


def described(*of):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in of]


def shapes(*sizes):
    return described(*((size,) for size in sizes))


# --- Formulas

# Parts, and bits up and down for each parameter of 8 workers, of which each sends 7/8, in a buffer so large
# that padding does not show.
SCHEMES = {
    "sign": ({}, 2 + 2 / 128),
    "sign, average": ({"decision": D.average()}, (1 + 4) * (1 + 1 / 128)),
    "2 bits": ({"quantizer": Q.midrise(2)}, 3 + 2 / 128),
    "ternary": ({"quantizer": Q.ternary()}, 2 + 2),
    "sign, gathered": ({"wire": WIRES.gathered()}, 8 * (1 + 1 / 128)),
    "sign, int8 counts": ({"wire": WIRES.counts()}, 2 * 8 * (1 + 1 / 128)),
    "owner, 3 bits": (
        {"quantizer": Q.error_feedback(Q.midrise(3)), **AT_OWNER}, 3 + 16 / 128 + 1 + 1 / 128,
    ),
}  # fmt: skip


def test_large_models_cost_what_the_formula_says():
    for name, (parts, bits) in SCHEMES.items():
        found = predict(shapes(2**30), 8, **parts)
        assert found.bits_per_parameter == pytest.approx(7 / 8 * bits, rel=1e-3), name


def test_an_owner_answers_in_two_bits_whatever_it_runs_unless_a_reply_is_named():
    """By each way to it; a sign of Adam's update is never the default."""
    adam, codes = optax.scale_by_adam(), {"quantizer": lc.quantize.midrise(3), "workers": AXIS}

    def by_parts(**reply):
        decision = lc.decide.at_owner(adam, **reply)
        return lc.communicate(momentum=lc.momentum.nothing(), decision=decision, **codes)

    two, one = 3 + 2 + 32 / 128, 3 + 1 + 17 / 128
    for tx, bits in [
        (lc.owner_adamw(0.1, **codes), two), (lc.owner(adam, **codes), two), (by_parts(), two),
        (by_parts(reply=lc.decide.sign()), one),
    ]:  # fmt: skip
        found = lc.audit.of(tx, shapes(2**30), absent(8))
        assert found.bits_per_parameter == pytest.approx(7 / 8 * bits, rel=1e-3)


def test_small_models_pay_for_padding():
    # Two rows, their row word, presence, and down the ties and pairs as well, for each other worker.
    assert predict(shapes(10), 4096).sent_bytes == 4095 * 4 * ((8 + 1 + 1) + (8 + 1 + 4))
    assert 2 < predict(shapes(2**20), 64).bits_per_parameter / (63 / 64) <= 1.025 * 2


# What travels in float32, and PowerSGD, of which small leaves do.
FLOATS = {*contract.FLOATS, "owner, trace", "powersgd"}


def test_an_adapter_sends_less_than_half_of_what_float32_means_do():
    adapter = described((16, 4), (4, 24), (24, 4), (4, 16), (64,), (4, 32), (32, 4), (32,))
    means = lc.audit.float32_all_reduce_bytes(672, 4)
    for name in contract.TRANSFORMS.keys() - FLOATS:
        found = lc.audit.of(contract.transform(name, AXIS), adapter, absent(4))
        assert found.parameters == 672 and found.sent_bytes <= means / 2, name


def test_bits_follow_from_the_bytes():
    assert lc.audit.Traffic(4, 1000, 250.0).bits_per_parameter == 2
    assert lc.audit.Traffic(4, 0, 0.0).bits_per_parameter == 0
    everywhere = lc.global_gradients(optax.sgd(1.0), workers=(AXIS, "gpu"))
    groups = lc.Workers(AbstractMesh((2, 4), (AXIS, "gpu")), AXIS, "gpu")
    assert lc.audit.of(everywhere, shapes(1000), groups).sent_bytes == 2 * 7 / 8 * 4000
    # Inside a group float32 is added up in slices, and the answers to all slices are gathered, in a branch.
    either = lc.audit.of(
        lc.baselines.one_bit_adam(0.1, warmup=1, workers=groups), shapes(2**20), groups
    )
    assert 8 * either.group_bytes == pytest.approx(3 / 4 * 2**20 * (32 + 1 + 16 / 128), rel=1e-3)


def test_the_demo_sends_what_the_readme_says():
    gpt = runpy.run_path(str(ROOT / "examples/gpt/model.py"))["GPT"]
    sizes = {"layers": 2, "width": 128, "heads": 4, "context": 64}
    model = nnx.eval_shape(lambda: gpt(**sizes, rngs=nnx.Rngs(0)))
    traffic = predict(nnx.state(model, nnx.Param), 8)
    dense = lc.audit.float32_all_reduce_bytes(traffic.parameters, 8)
    said = f"{traffic.parameters:,} parameters"
    sends = (
        f"{units.bytes_text(traffic.sent_bytes)} a step. Float32 Lion sends {dense / 1e6:.1f} MB"
    )
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert said in readme and sends in readme


# --- Programs


def sent_by(tx, sizes, tree, group=None, specs=None):
    """What is predicted, and bytes of a step by the compiled program, by axis; votes, and no numbers."""
    workers = workers_on(sizes, group)
    state = lc.training.abstract_state(tx, tree, workers, specs=specs)

    def loss(params, batch, rng):
        return sum(jnp.sum(x * batch.sum()) for x in params.values())

    step = lc.make_train_step(loss, tx, workers)
    found = lc.audit.collectives(step.lower(state, np.ones(8, "f")).compile(), workers.mesh)
    sent = lc.audit.sent_bytes(
        one._replace(operands=tuple(x for x in one.operands if x.size > 8)) for one in found
    )
    return lc.audit.of(tx, tree, workers, specs=specs), sent


def test_long_messages_and_replies_are_padded_and_counted_so():
    tree = {"w": shapes(900_001)[0]}
    traffic, sent = sent_by(VOTE, "data=2", tree)
    # 3520 rows of 7032 at each owner, 110 row words and whether the worker takes part: 14,191 words.
    assert traffic.sent_bytes == 4 * 14_208 + 4 * 14_208  # 444 * 32 words, and 111 * 128 back
    assert sent == {(AXIS,): traffic.sent_bytes}


def test_the_mean_in_bfloat16_is_float32_on_cpu_only():
    tree, tx = (
        {"w": shapes(1000)[0]},
        lc.global_gradients(optax.sgd(1.0), jnp.bfloat16, workers=AXIS),
    )
    on_cpu, sent = sent_by(tx, "data=4", tree)
    assert on_cpu.sent_bytes == 2 * lc.audit.of(tx, tree, absent(4)).sent_bytes
    assert sent == {(AXIS,): on_cpu.sent_bytes}


VOTE = lc.lion_cub(0.1, workers=AXIS)
MEAN = lc.global_gradients(optax.sgd(1.0), workers=AXIS)
TREE = dict(zip("bvws", described((66,), (130, 2), (34, 132), ()), strict=True))
LABELS = {"b": "mean", "v": "vote", "w": "vote", "s": "vote"}


def in_groups(sizes, cut=None, **parts):
    return lc.lion_cub(0.1, workers=workers_on(sizes, "gpu"), **parts), sizes, "gpu", cut


def around(tx, cut="tp"):
    return tx, "data=4 tp=2", None, cut


SENDS = {
    "a group, gathered": in_groups("data=2 gpu=4", wire=WIRES.gathered()),
    "a group, cut, in buckets": in_groups("data=2 gpu=2 tp=2", "tp", bucket_size=300),
    "a group, one worker": in_groups("data=1 gpu=4"),
    "labels": around(optax.partition({"vote": VOTE, "mean": MEAN}, LABELS)),
    "hyperparameters": around(
        optax.inject_hyperparams(lc.lion_cub, static_args=("workers",))(0.1, workers=AXIS)
    ),
    # Which forget how parameters are cut.
    "several steps": around(optax.MultiSteps(VOTE, 2).gradient_transformation(), None),
}


@pytest.mark.parametrize("name", SENDS)
def test_devices_of_groups_and_whatever_is_around_a_vote_send_what_is_predicted_by_axis(name):
    tx, sizes, group, cut = SENDS[name]
    specs = dict.fromkeys(TREE, P()) | dict.fromkeys("vw", P(cut))
    traffic, found = sent_by(tx, sizes, TREE, group, specs)
    sent = {(AXIS,): traffic.sent_bytes, ("gpu",): traffic.group_bytes}
    assert found == {axes: count for axes, count in sent.items() if count}
    assert bool(traffic.group_bytes) == bool(group)
    assert group or traffic.parameters == (260 + 34 * 132) // (2 if cut else 1) + 67


# --- What is refused and shown


CUT = lc.Workers(AbstractMesh((2, 3), (AXIS, "tp")), AXIS)
TWO = absent(2)


def asked(tx=VOTE, workers=TWO, **how):
    return lambda: lc.audit.of(tx, shapes(9), workers, **how)


def shifted(grads, params):
    neighbor = jax.lax.ppermute(grads[0], AXIS, [(0, 1), (1, 0)])
    return [jax.lax.pmean(neighbor, AXIS)]


def until(grads, params):
    halve = lambda x: jax.lax.pmean(jax.lax.pcast(x, AXIS, to="varying") / 2, AXIS)  # noqa: E731
    return [jax.lax.while_loop(lambda x: jnp.sum(x) > 1, halve, jax.lax.pmean(grads[0], AXIS))]


def thrice(grads, params):
    total, _ = jax.lax.scan(
        lambda x, _: (x + jax.lax.psum(grads[0], AXIS), None), jnp.zeros(9), length=3
    )
    return [total]


def test_what_a_loop_sends_is_sent_at_each_turn():
    sent = lc.audit.of(optax.stateless(thrice), shapes(9), TWO)
    assert sent.sent_bytes == 3 * 2 * 1 / 2 * 4 * 9


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (asked(workers=2), TypeError, "workers=2: give the workers of a mesh"),
        (asked(optax.stateless(shifted)), ValueError, "a ppermute over .'data',.: nobody knows here"),
        (asked(optax.stateless(until)), ValueError, "sends inside of a while loop: nobody knows"),
        (asked("lion_cub"), TypeError, "tx='lion_cub' is not a GradientTransformation"),
    ],
)  # fmt: skip
def test_what_cannot_be_counted_is_refused(ask, error, message):
    with pytest.raises(error, match=message):
        ask()
