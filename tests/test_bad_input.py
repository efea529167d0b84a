"""Every mistake is an error that says what was given and what to do, as early as it can be known."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

AXIS = "data"
PARAMS = {"w": jnp.ones((5,))}

cub = functools.partial(lc.lion_cub, 0.1, axis_name=AXIS)
distributed = functools.partial(lc.distributed_lion, 0.1, axis_name=AXIS)
owner = functools.partial(lc.owner_lion, 0.1, axis_name=AXIS)
communicate = functools.partial(lc.communicate, axis_name=AXIS, memory=lc.momentum.nothing())
at_owner = lc.decide.momentum_at_owner(optax.scale_by_lion())
ALIASES = {"lion_cub": cub, "distributed_lion": distributed, "owner_lion": owner}


def make_mesh(workers=4):
    devices = jax.devices()
    assert len(devices) >= workers
    return jax.make_mesh(
        (workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:workers]
    )


def trace(body, workers=4, tree=PARAMS):
    """Traces ``body`` in ``shard_map`` on a tree that all workers hold; nothing is compiled."""
    mapped = jax.shard_map(body, mesh=make_mesh(workers), in_specs=P(), out_specs=P(AXIS))
    return jax.eval_shape(mapped, tree)


def trace_update(tx, workers=4, grads=PARAMS, params=PARAMS, **extra):
    """Traces an update on gradients that are each worker's own."""

    def body(grads):
        state = tx.init(PARAMS)
        local = jax.tree.map(lambda g: jax.lax.pcast(g, AXIS, to="varying"), grads)
        return tx.update(local, state, params, **extra)[0]

    return trace(body, workers, grads)


def raises(error, *parts):
    """Expects an error whose message holds all ``parts``, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


def test_the_good_input_of_these_tests_is_good():
    for tx in (
        cub(),
        distributed(),
        owner(),
        communicate(),
        lc.global_gradients(optax.sgd(1.0), AXIS),
    ):
        assert trace_update(tx)["w"].shape == (20,)


# --- axes -------------------------------------------------------------------------------------------

UNBOUND = ("is not a mesh axis here", "jax.shard_map or jax.pmap", "init_state and make_train_step")


@pytest.mark.parametrize("make", [cub, distributed, communicate])
def test_an_update_outside_of_shard_map(make):
    tx = make()
    with raises(ValueError, "axis_name='data'", *UNBOUND):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_state_in_slices_outside_of_shard_map():
    with raises(ValueError, "axis_name='data'", *UNBOUND):
        owner().init(PARAMS)


def test_global_gradients_of_a_dtype_that_is_no_float():
    with raises(ValueError, "dtype=", "int8", "float32 or bfloat16"):
        lc.global_gradients(optax.sgd(0.1), AXIS, jnp.int8)


@pytest.mark.parametrize("bits", [0, 9, 4.0])
def test_coded_gradients_of_bits_that_are_no_code(bits):
    with raises(ValueError, f"midrise({bits})", "1 to 8 bits"):
        lc.coded_gradients(optax.sgd(0.1), AXIS, bits)


def test_coded_gradients_of_what_is_no_transform():
    with raises(TypeError, "is not a GradientTransformation"):
        lc.coded_gradients(optax.adamw, AXIS)


def test_global_gradients_outside_of_shard_map():
    tx = lc.global_gradients(optax.sgd(0.1), AXIS)
    with raises(ValueError, "axis_name='data'", *UNBOUND):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "tx",
    [
        lc.lion_cub(0.1, axis_name="batch"),
        lc.owner_lion(0.1, axis_name="batch"),
        lc.global_gradients(optax.sgd(0.1), "batch"),
        lc.sync_momentum(communicate(memory=lc.momentum.blend()), "batch", lc.sync.every(2)),
    ],
    ids=["lion_cub", "owner_lion", "global_gradients", "sync_momentum"],
)
def test_the_name_of_another_axis(tx):
    other = (
        "is not an axis of the workers here",
        "the mapped axes are ('data',)",
        "give both the same",
    )
    with raises(ValueError, "axis_name='batch'", *other):
        trace_update(tx)


@pytest.mark.parametrize("axis", [(), ("data", "data"), ("data", 1), ["data"], 0])
def test_what_names_no_axis(axis):
    for make in (lc.lion_cub, lc.distributed_lion, lc.owner_lion):
        with raises(ValueError, f"axis_name={axis!r}", "a string, a tuple of names"):
            make(0.1, axis_name=axis)


def test_the_axis_has_no_default():
    for make in (lc.lion_cub, lc.distributed_lion, lc.owner_lion):
        with pytest.raises(TypeError, match="axis_name"):
            make(0.1)


# --- gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx", [cub(), distributed(average=True), owner(), lc.global_gradients(optax.sgd(0.1), AXIS)]
)
def test_gradients_that_jax_has_already_summed(tx):
    """``jax.grad`` with respect to parameters that all workers share."""

    def body(params):
        state = tx.init(params)
        x = jax.lax.axis_index(AXIS).astype(jnp.float32)
        grads = jax.grad(lambda p: x * jnp.sum(p["w"] ** 2))(params)
        return tx.update(grads, state, params)[0]

    with raises(ValueError, "['w']", "already reduced in full precision", "local_value_and_grad"):
        trace(body)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_leaves_that_cannot_vote(dtype):
    leaf = jnp.ones((3,), dtype)
    message = f"['layer']['w'] is {dtype}", "only floating leaves can vote", "optax.masked"
    for make in (cub, distributed, communicate, owner):
        with raises(TypeError, *message):
            make().init({"layer": {"w": leaf}})
    with raises(TypeError, f"['w'] is {dtype}", *message[1:]):
        trace_update(cub(), grads={"w": jnp.ones((5,), dtype)})


def test_decay_without_parameters():
    """The message is optax's own."""
    with pytest.raises(ValueError, match="not passing `params` when calling `update`"):
        trace_update(cub(weight_decay=0.1), params=None)
    assert trace_update(communicate(), params=None)["w"].shape == (20,)


@pytest.mark.parametrize("flag", [jnp.zeros((3,), bool), jnp.zeros((1, 1), bool)], ids=["3", "1 1"])
def test_abstain_that_is_no_scalar(flag):
    with raises((TypeError, ValueError), "abstain", str(flag.shape)):
        trace_update(cub(), abstain=flag)


# --- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0, -1, 9, 2.0, True, "3", None])
def test_bits_out_of_range(p):
    with raises(ValueError, f"midrise({p!r})", "1 to 8 bits"):
        lc.quantize.midrise(p)
    with raises(ValueError, f"integer({p!r})", "2 to 8 bits"):
        lc.quantize.integer(p)


def test_integer_codes_of_one_bit():
    with raises(ValueError, "integer(1)", "2 to 8 bits"):
        lc.quantize.integer(1)


@pytest.mark.parametrize("value", [1.0, -0.1, 2, float("nan"), float("inf"), jnp.float32(1.5)])
@pytest.mark.parametrize("beta", ["b1", "b2"])
def test_betas_outside_of_0_to_1(beta, value):
    for make in (*ALIASES.values(), lc.momentum.blend):
        with raises(ValueError, f"{beta}={value!r}", "a number in [0, 1)"):
            make(**{beta: value})


@pytest.mark.parametrize("value", ["0.9", None, "much"])
def test_betas_that_are_no_numbers(value):
    for make in (*ALIASES.values(), lc.momentum.blend):
        with raises((TypeError, ValueError), f"b1={value!r}", "a number in [0, 1)"):
            make(b1=value)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, bool])
def test_momentum_in_integers(dtype):
    """``(1 - b2) g`` would be cut to zero for ever."""
    for make in (*ALIASES.values(), lc.momentum.blend):
        with raises((TypeError, ValueError), "mu_dtype", jnp.dtype(dtype).name):
            make(mu_dtype=dtype)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "10"])
def test_buckets_of_no_size(size):
    for make in (*ALIASES.values(), communicate):
        with raises(ValueError, f"bucket_size={size!r}", "a number of elements, or None"):
            make(bucket_size=size)


@pytest.mark.parametrize("dominance", [0.5, 0, -1, float("nan")])
def test_dominance_below_one(dominance):
    with raises(ValueError, f"dominance={dominance!r}", "at least 1", "inf for no bound"):
        owner(dominance=dominance)
    with raises(ValueError, f"dominance={dominance!r}", "at least 1", "inf for no bound"):
        lc.decide.momentum_at_owner(optax.scale_by_lion(), dominance=dominance)


@pytest.mark.parametrize("dtype", ["float32", "int4", "uint8", "int64", "bool"])
def test_counts_in_another_dtype(dtype):
    with raises(ValueError, f"counts({dtype})", "int8, int16 or int32"):
        lc.wires.counts(dtype)


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_dense_values_in_another_dtype(dtype):
    with raises(ValueError, f"dense({dtype})", "float32 or bfloat16"):
        lc.quantize.dense(dtype)


# --- more workers than can be counted ---------------------------------------------------------------

TOO_MANY = [
    (
        8,
        {"up": lc.quantize.integer(4)},
        ("integer(4)", "8 workers", "at most 7 workers", "midrise(4)"),
    ),
    (
        8,
        {"up": lc.quantize.midrise(6), "wire": lc.wires.counts()},
        ("counts", "8 workers can reach 504", "counts to 127", "wider dtype", "two_phase"),
    ),
    (
        4,
        {"up": lc.quantize.integer(2), "wire": lc.wires.lanes()},
        ("integer(2)", "4 workers", "at most 1 workers"),
    ),
]


@pytest.mark.parametrize(
    ("workers", "parts", "message"), TOO_MANY, ids=["integer", "counts", "lanes"]
)
def test_more_workers_than_a_code_or_wire_can_count(workers, parts, message):
    with raises(ValueError, *message):
        trace_update(communicate(**parts), workers)


@pytest.mark.parametrize(
    ("workers", "parts", "message"),
    [
        (
            128,
            {"wire": lc.wires.counts()},
            ("counts", "128 workers can reach 128", "counts to 127"),
        ),
        (128, {"up": lc.quantize.integer(8)}, ("integer(8)", "128 workers", "at most 127 workers")),
        (
            258,
            {"up": lc.quantize.midrise(8), "wire": lc.wires.lanes()},
            ("lanes", "258 workers", "counts to 65535"),
        ),
    ],
    ids=["counts", "integer", "lanes"],
)
def test_the_first_number_of_workers_that_is_too_large(workers, parts, message):
    assert lc.traffic.predict(PARAMS, workers - 1, **parts).sent_bytes > 0
    with raises(ValueError, *message):
        lc.traffic.predict(PARAMS, workers, **parts)


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_a_prediction_for_no_workers(workers):
    with raises(ValueError, f"workers={workers}", "at least 1"):
        lc.traffic.predict(PARAMS, workers)


# --- parts that do not fit --------------------------------------------------------------------------

feedback = lc.quantize.error_feedback(lc.quantize.midrise(3))
both_ways = {"owner": lc.decide.feedback_at_owner(), "down": lc.decide.scaled_signs()}
STEPS = "sends codes without steps", "midrise(p) or dense()"
MISFITS = {
    "dense votes": (
        {"up": lc.quantize.dense()},
        ("dense(float32) has no codes to count", "momentum_at_owner"),
    ),
    "owner of ternary codes": (
        {"owner": at_owner, "up": lc.quantize.ternary()},
        ("momentum at the owner decodes values", "ternary", *STEPS),
    ),
    "owner of integer codes": (
        {"owner": at_owner, "up": lc.quantize.integer()},
        ("momentum at the owner decodes values", "integer(8)", *STEPS),
    ),
    "feedback of votes": (
        {"up": feedback},
        ("error feedback", "no error to feed back", "owner=momentum_at_owner(tx)"),
    ),
    "votes of turned rows": (
        {"up": lc.quantize.rotated(lc.quantize.midrise(1))},
        ("rotated(midrise(1))", "a vote is on each parameter", "owner=momentum_at_owner(tx)"),
    ),
    "counts at the owner": (
        {"owner": at_owner, "up": feedback, "wire": lc.wires.counts()},
        ("the counts(int8) wire adds codes", "owner=count()", "two_phase"),
    ),
    "lanes at the owner": (
        {"owner": at_owner, "up": feedback, "wire": lc.wires.lanes()},
        ("the lanes wire adds codes", "owner=count()", "two_phase"),
    ),
    "all-reduce of signs": (
        {"wire": lc.wires.all_reduce()},
        ("the all-reduce wire adds values", "up=dense()", "two_phase"),
    ),
    "all-reduce of codes": (
        {"owner": at_owner, "up": feedback, "wire": lc.wires.all_reduce()},
        ("the all-reduce wire adds values", "up=dense()", "two_phase"),
    ),
    "majority with zeros": (
        {"up": lc.quantize.ternary(), "down": lc.decide.majority()},
        ("ternary has a code for zero", "down=ternary_sum() or average()"),
    ),
    "majority of integers": (
        {"up": lc.quantize.integer(8), "down": lc.decide.majority()},
        ("integer(8) has a code for zero", "down=ternary_sum() or average()"),
    ),
    "total without zeros": (
        {"up": lc.quantize.midrise(2), "down": lc.decide.total()},
        ("midrise(2) has no code for zero", "down=average()"),
    ),
    "average of values": (
        {"owner": at_owner, "up": lc.quantize.dense(), "down": lc.decide.average()},
        ("down=average does not fit owner=momentum at the owner", "majority() or floats()"),
    ),
    "floats of counts": (
        {"down": lc.decide.floats()},
        ("down=floats does not fit owner=count", "majority() or average()"),
    ),
    "scaled signs of momentum": (
        {"owner": at_owner, "up": feedback, "down": lc.decide.scaled_signs()},
        ("down=scaled signs does not fit owner=momentum", "feedback_at_owner()"),
    ),
    "feedback at the owner in one bit": (
        {"owner": lc.decide.feedback_at_owner(), "up": feedback},
        ("down=majority does not fit owner=feedback at the owner", "scaled_signs()"),
    ),
    "feedback at the owner of values": (
        {**both_ways, "up": lc.quantize.dense()},
        ("dense(float32) does not fit feedback at the owner", "give midrise(p)"),
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_parts_that_do_not_fit_together(name):
    parts, message = MISFITS[name]
    with raises(ValueError, *message):
        communicate(**parts)


def test_a_prediction_for_parts_that_do_not_fit_together():
    for parts, message in MISFITS.values():
        with raises(ValueError, *message):
            lc.traffic.predict(PARAMS, 4, **parts)


def test_parts_of_another_name_do_not_fit_either():
    """What a part can do is in its fields, not in its name."""
    for name, (parts, _) in MISFITS.items():
        renamed = {of: part._replace(name=f"my {part.name}") for of, part in parts.items()}
        with pytest.raises(ValueError, match="my ") as refused:
            communicate(**renamed)
        assert "give" in str(refused.value) or "carries" in str(refused.value), name


def test_optimizers_refuse_what_does_not_fit_them():
    with raises(ValueError, "dense(float32) has no codes to count"):
        cub(quantizer=lc.quantize.dense())
    with raises(ValueError, "error feedback", "no error to feed back"):
        cub(quantizer=feedback)
    with raises(ValueError, "ternary sends codes without steps"):
        owner(quantizer=lc.quantize.ternary())
    with raises(ValueError, "the counts(int8) wire adds codes"):
        owner(wire=lc.wires.counts())
    with raises(ValueError, "the all-reduce wire adds values"):
        distributed(wire=lc.wires.all_reduce())


def test_feedback_for_codes_that_are_not_decoded():
    for up in (lc.quantize.integer(8), lc.quantize.ternary(), lc.quantize.dense()):
        with raises(ValueError, f"error_feedback({up.name})", "steps that travel", "midrise(p)"):
            lc.quantize.error_feedback(up)


@pytest.mark.parametrize("keep", [0, -0.5, 1.5, float("nan"), "half"])
def test_feedback_of_no_share_of_the_error(keep):
    with raises(ValueError, f"error_feedback(keep={keep!r})", "above 0 and at most 1"):
        lc.quantize.error_feedback(lc.quantize.midrise(1), keep=keep)


def test_a_rotation_of_codes_that_cannot_be_turned_back():
    one = lc.quantize.midrise(1)
    for up in (
        lc.quantize.integer(8), lc.quantize.ternary(), lc.quantize.dense(),
        lc.quantize.rotated(one), lc.quantize.error_feedback(one),
    ):  # fmt: skip
        with raises(
            ValueError, f"rotated({up.name})", "turned back", "error_feedback(rotated(midrise(1)))"
        ):
            lc.quantize.rotated(up)


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64"])
def test_feedback_that_is_not_floating(dtype):
    with raises(ValueError, f"error_feedback(dtype={dtype})", "floating dtype"):
        lc.quantize.error_feedback(lc.quantize.midrise(3), dtype)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("up", lc.quantize.sign),
        ("up", "sign"),
        ("owner", lc.decide.count),
        ("owner", optax.scale_by_lion()),
        ("down", lc.decide.majority),
        ("wire", lc.wires.two_phase),
        ("memory", lc.momentum.blend),
        ("memory", (0.9, 0.99)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)[:12]),
)
def test_a_part_of_another_kind(name, given):
    """Such as the function that builds it, without the parentheses."""
    with raises(TypeError, f"{name}=", "give"):
        communicate(**{name: given})


def test_votes_without_a_word_of_memory():
    """They would be signSGD, and nobody asked for it."""
    with raises(TypeError, "communicate() missing 1 required keyword-only argument: 'memory'"):
        lc.communicate(axis_name=AXIS)
    with raises(
        TypeError, "memory=None is not a Memory: give what a function that builds one returns"
    ):
        communicate(memory=None)


def ours_on_a_mesh():
    workers = lc.Workers(make_mesh(4), AXIS)
    tx = cub(axis_name=workers)
    return workers, tx, lc.on_mesh(tx, workers)


@pytest.mark.parametrize(
    "call",
    [
        lambda params: lc.init_state(ours_on_a_mesh()[1], params, ours_on_a_mesh()[0]),
        lambda params: ours_on_a_mesh()[2].init(params),
        lambda params: ours_on_a_mesh()[2].update(params, (), params),
        lambda params: lc.worker_value_and_grad(len, ours_on_a_mesh()[0])(params, jnp.ones(4)),
        lambda params: cub(axis_name=None).init(params),
        lambda params: owner(axis_name=None).init(params),
        lambda params: lc.traffic.predict(params, 4),
    ],
)
def test_a_module_with_functions_among_its_leaves(call):
    """As those of equinox have."""
    with raises(
        TypeError, "params['relu'] is", "parameters are arrays; give jnp.asarray(...). Split an equinox",
        "eqx.partition(model, eqx.is_array), and join it in the loss, eqx.combine(params, static)",
    ):  # fmt: skip
        call({"relu": jax.nn.relu, "w": jnp.ones(3)})


def test_what_is_no_key_and_a_raw_one():
    workers, tx, _ = ours_on_a_mesh()
    typed, raw = (
        lc.init_state(tx, PARAMS, workers, rng=key)
        for key in (jax.random.key(5), jax.random.PRNGKey(5))
    )
    assert typed.rng.dtype == raw.rng.dtype
    assert jax.random.bits(typed.rng) == jax.random.bits(raw.rng)
    for given in (5, jnp.zeros(3, jnp.uint32), jax.random.split(jax.random.key(0))):
        with raises(TypeError, "rng is", "give one key, jax.random.key(seed)"):
            lc.init_state(tx, PARAMS, workers, rng=given)


# --- syncs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "3", None])
@pytest.mark.parametrize(
    "make", [lc.sync.every, lc.sync.first, lc.sync.thinning], ids=lambda f: f.__name__
)
def test_periods_that_are_no_whole_number_from_one_up(make, n):
    with raises(ValueError, f"{make.__name__}({n!r})", "a whole number of at least 1"):
        make(n)


def test_the_first_steps_of_never():
    with raises(ValueError, "first(3, never())", "a schedule that is due at times"):
        lc.sync.first(3, lc.sync.never())


@pytest.mark.parametrize(
    "schedule",
    [100, lambda step: step % 3 == 0, "every", 0],
    ids=["period", "function", "name", "zero"],
)
def test_a_sync_that_is_no_schedule(schedule):
    message = f"{schedule!r} is not a schedule", "never(), every(T), first(M), thinning(k)"
    vote = communicate(memory=lc.momentum.blend())
    with raises(TypeError, *message):
        lc.sync_momentum(vote, AXIS, schedule)
    with raises(TypeError, *message):
        lc.sync_momentum(vote, AXIS, lc.sync.every(2), watch=schedule)
    for make in (cub, distributed):
        with raises(TypeError, *message):
            make(sync=schedule)


def test_a_mask_without_a_sync():
    for make in (cub, distributed):
        for sync in (None, lc.sync.never()):
            with raises(ValueError, "sync_where is given but sync is never()", "every(100)"):
                make(sync=sync, sync_where={"w": True})


@pytest.mark.parametrize(
    "where",
    [{"v": True}, {"w": {"a": True}}, True, lambda mu: True, [True]],
    ids=["other key", "deeper", "one bool", "function to one bool", "list"],
)
def test_a_mask_of_another_shape_than_the_momentum(where):
    tx = cub(sync=lc.sync.every(2), sync_where=where)
    with raises(ValueError, "the mask does not match the momentum's tree", "one bool", "'w': *"):
        tx.init(PARAMS)


def test_a_sync_where_there_is_no_momentum():
    tx = lc.sync_momentum(communicate(), AXIS, lc.sync.every(2))
    with raises(ValueError, "keeps no momentum", "momentum at the owner", "needs no sync"):
        tx.init(PARAMS)
    with raises(ValueError, "keeps no momentum"):
        lc.sync_momentum(optax.sgd(0.1), AXIS, lc.sync.every(2)).init(PARAMS)


def test_a_sync_of_momentum_at_the_owner():
    with raises(ValueError, "momentum at the owner", "needs no sync"):
        trace_update(lc.sync_momentum(owner(), AXIS, lc.sync.every(2)))


def test_one_sync_around_several_momenta():
    groups = optax.partition({"a": cub(), "b": cub()}, {"v": "a", "w": "b"})
    tx = lc.sync_momentum(groups, AXIS, lc.sync.every(2))
    with raises(ValueError, "sync_momentum"):
        tx.init({"v": jnp.ones(3), "w": jnp.ones(3)})


# --- training steps ---------------------------------------------------------------------------------


def loss(params, batch, rng):
    return jnp.mean(batch) * jnp.sum(params["w"])


def lower(tx, batch, **options):
    mesh = make_mesh()
    state = lc.init_state(tx, PARAMS, mesh, axis_name=AXIS)
    return lc.make_train_step(loss, tx, mesh, axis_name=AXIS, **options).lower(state, batch)


def test_a_mesh_without_the_axis():
    mesh, message = make_mesh(), ("('data',)", "axis_name='batch'")
    with raises(ValueError, *message):
        lc.init_state(cub(), PARAMS, mesh, axis_name="batch")
    with raises(ValueError, *message):
        lc.make_train_step(loss, cub(), mesh, axis_name="batch")


@pytest.mark.parametrize(
    ("batch", "accumulate", "message"),
    [
        (jnp.ones((6, 1)), 1, ("batch has shape (6, 1)", "multiple of 4", "4 workers")),
        (jnp.ones((4, 1)), 2, ("batch has shape (4, 1)", "multiple of 8", "4 workers, 2 gradient")),
        (jnp.ones(()), 1, ("batch has shape ()", "multiple of 4")),
        (jnp.ones((0, 2)), 1, ("batch has shape (0, 2)", "positive multiple of 4")),
        (
            {"x": jnp.ones((4,)), "y": jnp.ones((5,))},
            1,
            ("batch['y'] has shape (5,)", "multiple of 4"),
        ),
    ],
    ids=["6 rows", "2 parts", "no rows", "0 rows", "one leaf of two"],
)
def test_a_batch_that_does_not_divide(batch, accumulate, message):
    with raises(ValueError, *message):
        lower(cub(), batch, accumulate=accumulate)


@pytest.mark.parametrize("parts", [0, -1, 1.5, "2", None, True])
def test_accumulating_over_no_parts(parts):
    with raises(ValueError, f"accumulate={parts!r}", "a whole number of at least 1"):
        lc.make_train_step(loss, cub(), make_mesh(), axis_name=AXIS, accumulate=parts)


@pytest.mark.parametrize("tx", [optax.lion(0.1), optax.chain(optax.clip(1.0), optax.adamw(0.1))])
def test_an_optimizer_whose_workers_do_not_communicate(tx):
    with raises(ValueError, "update differs between workers", "lion_cub", "global_gradients"):
        lower(tx, jnp.ones((4, 1)))
