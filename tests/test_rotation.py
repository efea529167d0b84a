"""Rows that are turned before they are coded: what a rotation keeps, and what it makes of one bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AXIS

import lioncub_jax as lc
from lioncub_jax import reference, rotation
from lioncub_jax.reference import lion as of_reference

UP = lc.quantize.rotated(lc.quantize.midrise(1))


def test_the_named_one_is_of_these_parts():
    named, made = lc.quantize.rotated_sign(), lc.quantize.error_feedback(UP, keep=0.7)
    assert named.name == made.name == "rotated(midrise(1)) + error feedback of 0.7"
    assert (named.feedback, named.keep, named.turns) == (jnp.bfloat16, 0.7, True)


def rows_of(seed, count=40):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, 128)), jnp.float32)


def test_a_rotation_keeps_lengths_and_angles_and_is_undone():
    x, y = rows_of(0), rows_of(1)
    step = jnp.int32(5)
    turned = [rotation.turned(v, step) for v in (x, y)]
    kept = [jnp.sum(a * b, axis=1) for a, b in ((x, x), (x, y))]
    found = [jnp.sum(a * b, axis=1) / 128 for a, b in ((turned[0], turned[0]), tuple(turned))]
    for a, b in zip(found, kept, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rotation.turned_back(turned[0], step), x, rtol=1e-5, atol=1e-5)
    whole = jnp.round(8 * x)  # of short integers sums are exact
    assert jnp.array_equal(rotation.turned_back(rotation.turned(whole, step), step), whole)


def test_every_step_has_a_rotation_of_its_own():
    x = rows_of(2)
    steps = [rotation.turned(x, jnp.int32(t)) for t in (0, 1, 2, 1000)]
    for i, a in enumerate(steps):
        assert all(float(jnp.mean(a == b)) < 0.9 for b in steps[:i])


def test_what_stands_out_is_shared_out_and_coded_exactly():
    """One value in a row is as large everywhere once it is turned: a sign and a scale say all of it."""
    x = (
        jnp.zeros((4, 128))
        .at[jnp.arange(4), jnp.array([0, 5, 77, 127])]
        .set(jnp.array([1.0, -2, 3, 4]))
    )
    turned = rotation.turned(x, jnp.int32(3))
    assert jnp.array_equal(
        jnp.abs(turned), jnp.broadcast_to(jnp.max(x**2, 1, keepdims=True) ** 0.5, x.shape)
    )


@pytest.mark.parametrize("share", [1, 8])
def test_one_bit_of_few_values_says_more_after_a_rotation(share):
    """The share of a sparse row that one bit misses; of normal numbers it is 1 - 2/pi, turned or not."""
    x = rows_of(3, 512) * (np.arange(128) % share == 0)
    buffer = reference.buffer_of([x.shape], 1)

    def missed(codes):
        message = codes.encode(jnp.asarray(x)[None], buffer, 0)
        said = codes.back(reference.decode(message, 1), buffer, 0)[0]
        return float(jnp.sum((said - x) ** 2) / np.sum(x**2))

    plain, turned = missed(reference.midrise(1)), missed(reference.rotated(reference.midrise(1)))
    assert turned == pytest.approx(1 - 2 / np.pi, abs=0.02)
    assert plain == pytest.approx(1 - 2 / np.pi / share, abs=0.02)


def test_owners_by_turned_codes_do_not_care_who_is_who(run_workers):
    """Permuting the workers changes nothing but the last digit of a sum."""
    rng = np.random.default_rng(4)
    params = {"w": jnp.zeros((9, 50)), "b": jnp.zeros(7)}
    grads = {k: rng.normal(size=(5, 8, *p.shape)).astype(np.float32) for k, p in params.items()}
    order = rng.permutation(8)
    tx = lc.owner_lion(0.01, axis_name=AXIS, quantizer=lc.quantize.error_feedback(UP, jnp.float32))
    nobody = np.zeros((5, 8), bool)
    here, _ = run_workers({"tx": tx}, params, grads, nobody)["tx"]
    there, _ = run_workers({"tx": tx}, params, {k: g[:, order] for k, g in grads.items()}, nobody)[
        "tx"
    ]
    differ = [np.mean(here[k] != there[k]) for k in here]
    assert max(differ) < 0.01


def test_turned_codes_send_as_many_bytes():
    params = {"w": jax.ShapeDtypeStruct((300, 70), jnp.float32)}
    plain, turned = (
        lc.traffic.of(
            lc.owner_lion(1.0, axis_name=AXIS, quantizer=lc.quantize.error_feedback(up)), params, 8
        )
        for up in (lc.quantize.midrise(1), UP)
    )
    assert plain.sent_bytes == turned.sent_bytes > 0


def test_the_reference_turns_as_the_library_does():
    x = jnp.asarray(np.random.default_rng(5).integers(-9, 9, (1, 33, 128)), jnp.float32)
    buffer = reference.buffer_of([(33, 128)], 1)
    codes = of_reference.Codes(
        lambda workers: 0, lambda x, buffer, t: of_reference.Message(x, x[..., :1])
    )
    for t in (0, 9):
        message = reference.rotated(codes).encode(x, buffer, t)
        assert jnp.array_equal(message.q, rotation.turned(x, jnp.int32(t)))
