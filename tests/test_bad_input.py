"""Every mistake is an error that says what was given and what to do, as early as it can be known.

What is refused of every transform alike, such as gradients that were summed already, is proved for all of
them in one place. Here are the tables of what is refused of one argument, one part or one call.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import AXIS, absent, in_order, workers_on
from contract import traced

import lioncub_jax as lc
from lioncub_jax.exchange import checks

Q, D, WIRES, SYNC = lc.quantize, lc.decide, lc.wires, lc.sync
PARAMS = {"w": jnp.ones((5,))}
FOUR = workers_on("data=4")
NAN = float("nan")

cub = functools.partial(lc.lion_cub, 0.1, workers=AXIS)
owner = functools.partial(lc.owner_lion, 0.1, workers=AXIS)
adamw = functools.partial(lc.owner_adamw, 0.1, workers=AXIS)
communicate = functools.partial(lc.communicate, workers=AXIS, momentum=lc.momentum.nothing())


def predict(workers, **parts):
    return lc.audit.of(communicate(**parts), PARAMS, absent(workers))


votes = communicate(momentum=lc.momentum.blend())
at_owner = D.at_owner(optax.scale_by_lion(), D.sign())


def raises(error, words):
    return pytest.raises(error, match=in_order(words))


# --- One argument -----------------------------------------------------------------------------------

BETAS = [1.0, -0.1, 2, NAN, float("inf"), jnp.float32(1.5), "0.9", None]
NO_COUNT = [0, -1, True, 2.0, "3", None]
NO_SCHEDULE = [100, lambda step: step % 3 == 0, "every", 0]
NO_NUMBERS = ["int8", "bool", "complex64"]
ARGUMENTS = [  # what takes it, what it is given, and the error, which shows that
    *(
        (lambda x, of=beta, make=make: make(**{of: x}), BETAS, ValueError, f"{beta}={{!r}} ... [0, 1)")
        for beta in ("b1", "b2")
        for make in (lc.momentum.blend, owner, adamw)
    ),
    # (1 - b2) g would be cut to zero for ever.
    *(
        (lambda x, make=make: make(mu_dtype=x), NO_NUMBERS, ValueError, "mu_dtype={} ... float32")
        for make in (lc.momentum.blend, owner)
    ),
    *(
        (
            lambda x, make=make: make(b2=x, mu_dtype=jnp.bfloat16), [0.999, jnp.float32(0.997)], ValueError,
            "b2={!r} ... momentum in bfloat16 would ... never decay ... at most 0.99609 ... float32",
        )
        for make in (lc.momentum.blend, owner)
    ),
    (lambda eps: adamw(eps=eps), [0, 1e-46, None], ValueError, "eps={!r} ... above 0 in float32"),
    (
        lambda n: communicate(bucket_size=n), NO_COUNT[:-1], ValueError,
        "bucket_size={!r} ... a number of elements, or None",
    ),
    (  # the error of a code would be kept nowhere
        lambda x: D.codes(2, x), [None], ValueError, "dtype={} ... give a floating dtype",
    ),
    (
        WIRES.counts, ["float32", "int4", "uint8", "int64", "bool"], ValueError,
        "counts({}) ... int8, int16 or int32",
    ),
    (
        lambda x: lc.global_gradients(optax.sgd(0.1), x, workers=AXIS), ["int8"], ValueError,
        "dtype= ... {} ... float32 or bfloat16",
    ),
    *(
        (make, NO_COUNT, ValueError, f"{make.__name__}({{!r}}) ... a whole number of at least 1")
        for make in (SYNC.every, SYNC.first, SYNC.thinning)
    ),
    *(
        (make, NO_SCHEDULE, TypeError, "{!r} is not a schedule ... give every(T), first(M)")
        for make in (
            lambda x: cub(sync=x),
            lambda x: lc.sync_momentum(votes, x, workers=AXIS),
            lambda x: SYNC.first(3, x),
        )
    ),
    (
        lambda where: cub(sync=SYNC.every(2), sync_where=where).init(PARAMS),
        [{"v": True}, {"w": {"a": True}}, True, lambda mu: True, [True]], ValueError,
        "the mask does not match the momentum's tree ... one bool ... 'w': *",
    ),
    # The function that builds a part, without the parentheses, or what it is not built by.
    *(
        (lambda x, of=of: communicate(**{of: x}), given, TypeError, f"{of}= ... give")
        for of, given in {
            "quantizer": [Q.sign, "sign"],
            "decision": [D.majority, D.sign(), optax.scale_by_lion()],
            "wire": [WIRES.two_phase],
            "momentum": [lc.momentum.blend, (0.9, 0.99), None],
        }.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "values", "error", "words"), ARGUMENTS)
def test_an_argument_out_of_range(call, values, error, words):
    for value in values:
        with raises(error, words.format(value)):
            call(value)


# --- Parts that do not fit --------------------------------------------------------------------------

FEEDBACK = Q.error_feedback(Q.midrise(3))
NO_STEPS = "sends codes without scales: give midrise(p)"
MISFITS = [
    ({"quantizer": Q.dense()}, "dense(float32) has no codes to count ... decision=at_owner(tx)"),
    ({"decision": at_owner, "quantizer": Q.ternary()}, f"decodes values ... ternary {NO_STEPS}"),
    ({"decision": at_owner, "quantizer": Q.integer()}, f"decodes values ... integer(8) {NO_STEPS}"),
    ({"quantizer": FEEDBACK}, "error feedback has no codes to count ... decision=at_owner(tx)"),
    (
        {"decision": at_owner, "quantizer": FEEDBACK, "wire": WIRES.counts()},
        "the counts(int8) wire adds codes ... decision=majority() ... two_phase",
    ),
    (
        {"wire": WIRES.all_reduce()},
        "the all-reduce wire adds values ... quantizer=dense() ... two_phase",
    ),
    (
        {"decision": at_owner, "quantizer": FEEDBACK, "wire": WIRES.all_reduce()},
        "the all-reduce wire adds values ... quantizer=dense() ... two_phase",
    ),
    (
        {"quantizer": Q.ternary(), "decision": D.majority()},
        "ternary has a code for zero ... give ternary() or average()",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "words"), MISFITS)
def test_parts_that_do_not_fit_together(parts, words):
    with raises(ValueError, words):
        communicate(**parts)
    # What a part can do is in its fields, not in its name.
    renamed = {
        of: part._replace(name=f"my {part.name}") if of != "decision" else part
        for of, part in parts.items()
    }  # fmt: skip
    with pytest.raises(ValueError, match="my "):
        communicate(**renamed)


TOO_MANY = [  # the first number of workers that is too large
    (
        128, {"wire": WIRES.counts()},
        "counts ... 128 workers can reach 128 ... counts to 127 ... wider",
    ),
    (128, {"quantizer": Q.integer(8)}, "integer(8) ... 128 workers ... at most 127 workers ... midrise(8)"),
    (
        3, {"quantizer": Q.midrise(6), "wire": WIRES.counts()},
        "counts ... 3 workers can reach 189 ... counts to 127 ... two_phase",
    ),
    (
        129, {"quantizer": Q.midrise(8), "wire": WIRES.counts("int16")},
        "counts ... 129 workers ... counts to 32767",
    ),
]  # fmt: skip


def test_more_workers_than_a_code_or_wire_can_count():
    for workers, parts, words in TOO_MANY:
        assert predict(workers - 1, **parts).sent_bytes > 0
        with raises(ValueError, words):
            predict(workers, **parts)


def majority(**changed):
    """The majority, with another codec of its replies."""
    return D.vote(D.majority().reply_codec._replace(**changed), takes_zero=False)


FORMAT, ENCODE = D.majority().reply_codec.format, D.majority().reply_codec.encode


@pytest.mark.parametrize(
    ("decision", "bits", "words"),
    [
        (majority(format=lambda fmt: FORMAT(fmt)._replace(numbers=4)), 2,
         "1 planes, 2 numbers and 1 words ... says 1, 4 and 1: give what ReplyCodec.format"),
        (majority(format=lambda fmt: FORMAT(fmt)._replace(numbers=2)), 1,
         "1 planes, 4 numbers and 1 words ... says 1, 2 and 1"),
        (majority(encode=lambda *given: (ENCODE(*given)[0], None)), 1,
         "1 planes, 4 numbers and 0 words ... says 1, 4 and 1"),
    ],
)  # fmt: skip
def test_a_reply_of_another_size_than_its_decision_says(decision, bits, words):
    with raises(ValueError, words):
        predict(2, decision=decision, quantizer=Q.midrise(bits))


# --- One call ---------------------------------------------------------------------------------------


ELSEWHERE = "workers='batch' ... is not an axis of the workers here ... mapped axes are ('data',)"
TRACED = [
    (lc.sync_momentum(votes, SYNC.every(2), workers="batch"), ELSEWHERE),
    (
        lc.sync_momentum(owner(), SYNC.every(2), workers=AXIS),
        "momentum at the owner ... needs no sync",
    ),
    (
        lc.sync_momentum(communicate(), SYNC.every(2), workers=AXIS),
        "keeps no momentum ... needs no sync",
    ),
    (lc.sync_momentum(optax.sgd(0.1), SYNC.every(2), workers=AXIS), "keeps no momentum"),
    *(
        (
            cub(mask=mask),
            "mask={'v': True} does not fit ... a bool for each leaf ... a whole subtree",
        )
        for mask in ({"v": True}, lambda params: {"v": True})
    ),
]


def each_array(change):
    """A transform of updates, one array after the other."""
    return optax.stateless(lambda updates, params: jax.tree.map(change, updates))


BEHIND = "only a chunk of each array ... optax.chain(lioncub_jax.owner(optax.identity(), ...), tx)"
MIXING = {
    "reduce_sum": optax.clip_by_global_norm(1.0),
    "cumsum": each_array(lambda x: jnp.cumsum(x, axis=1)),
    "sort": each_array(lambda x: jnp.sort(x, axis=0)),
    "rev": each_array(lambda x: x[:, ::-1]),
    "dot_general": each_array(lambda x: x @ jnp.ones((128, 128))),
    "scan": each_array(lambda x: jax.lax.map(jnp.sin, x)),  # row by row
    "gather": optax.chain(optax.scale_by_adam(), each_array(jax.jit(lambda x: x[jnp.arange(16)]))),
}
KEEPS = optax.GradientTransformation(
    lambda params: params, lambda updates, kept, params: (updates, kept)
)
# By the state, or by the parameters.
LACKING = [
    (KEEPS, "uses the parameters, which are not there"),
    (
        optax.scale_by_factored_rms(),
        f".v_row of shape (1,), which is neither ... (2, 128), and ... {BEHIND}",
    ),
    (
        optax.adamw(0.1),
        "uses the parameters ... behind the owner ... optax.add_decayed_weights(...)",
    ),
    (
        optax.chain(optax.scale(2.0), optax.contrib.reduce_on_plateau()),
        "tx asks for value ... behind the owner",
    ),
]
TRACED += [
    *(
        (lc.owner(tx, workers=AXIS), f"mixes elements, by {by}, and ... {BEHIND}")
        for by, tx in MIXING.items()
    ),
    *((lc.owner(tx, workers=AXIS), words) for tx, words in LACKING),
]


@pytest.mark.parametrize(("tx", "words"), TRACED)
def test_a_transform_that_cannot_run_here(tx, words):
    with raises(ValueError, words):
        traced(tx, PARAMS, PARAMS)


def injected(**options):
    make = optax.inject_hyperparams(lc.lion_cub, static_args=("workers",))
    return make(0.1, workers=AXIS, **options).init(PARAMS)


def test_an_array_is_checked_inside_of_a_trace_as_outside():
    # optax.inject_hyperparams makes arrays of numbers, and what JAX compares in a trace is a tracer.
    def check(x, b1):
        checks.check_betas(b1=b1)
        return x

    for b1, words in ((0.9, None), (1.5, "b1= ... give a number in [0, 1)")):
        with raises(ValueError, words) if words else contextlib.nullcontext():
            jax.eval_shape(functools.partial(check, b1=jnp.float32(b1)), 0.0)


HALF = {"w": jnp.ones(3, jnp.float16)}
GROUPS = optax.partition({"a": cub(), "b": cub()}, {"v": "a", "w": "b"})
CALLS = [
    (lambda: lc.owner(optax.adamw, workers=AXIS), TypeError, "is not a GradientTransformation"),
    (lambda: lc.owner(None, workers=AXIS), TypeError, "tx=None is not a GradientTransformation"),
    (lambda: lc.owner_adamw(1.0, quantizer=None, workers=AXIS), TypeError, "quantizer=None ... give"),
    (lambda: lc.owner_adamw(1.0, reply=None, workers=AXIS), TypeError, "reply=None ... give"),
    (
        lambda: lc.owner(optax.identity(), reply=D.codes, workers=AXIS), TypeError,
        "reply= ... is not a ReplyCodec",
    ),
    (lambda: lc.global_gradients(optax.adamw, workers=AXIS), TypeError, "is not a GradientTransformation"),
    (
        lambda: cub(b2=0.9999).init(HALF), ValueError,
        "b2=0.9999 ... momentum in float16 would ... never decay ... at most 0.99951 ... float32",
    ),
    # What optax makes an array of.
    (
        lambda: injected(bucket_size=64), ValueError,
        "bucket_size= ... name the argument in its static_args",
    ),
    (
        lambda: injected(mu_dtype=jnp.bfloat16), ValueError,
        'mu_dtype is an array ... such as "float32"',
    ),
    (
        lambda: cub(sync_where={"w": True}), ValueError,
        "sync_where is given without sync ... every(100)",
    ),
    (
        lambda: lc.sync_momentum(GROUPS, SYNC.every(2), workers=AXIS).init(PARAMS | {"v": jnp.ones(3)}),
        ValueError, "sync_momentum",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_a_call_that_says_too_little_or_too_much(call, error, words):
    with raises(error, words):
        call()


def test_a_module_with_functions_among_its_leaves():
    """As those of equinox have."""
    tx, module = cub(workers=FOUR), {"relu": jax.nn.relu, "w": jnp.ones(3)}
    for call in (
        lambda: lc.init_state(tx, module, FOUR),
        lambda: tx.init(module),
        lambda: cub(workers=None).init(module),
        lambda: lc.audit.of(votes, module, FOUR),
    ):
        with raises(
            TypeError,
            "params['relu'] is ... parameters are arrays; give jnp.asarray(...) ... "
            "eqx.partition(model, eqx.is_array) ... eqx.combine(params, static)",
        ):
            call()


def test_a_raw_key_is_the_typed_one():
    start = functools.partial(lc.init_state, cub(workers=FOUR), PARAMS, FOUR)
    typed, raw = start(rng=jax.random.key(5)).rng, start(rng=jax.random.PRNGKey(5)).rng
    assert typed.dtype == raw.dtype and jax.random.bits(typed) == jax.random.bits(raw)


def test_a_loss_with_other_arguments():
    tx = cub(workers=FOUR)
    step = lc.make_train_step(lambda params, x, y, z: 0.0, tx, FOUR)
    state = lc.init_state(tx, PARAMS, FOUR)
    with raises(
        TypeError, "the loss takes (params, x, y, z) ... (params, batch, rng): give it these"
    ):
        step(state, jnp.ones(4))
