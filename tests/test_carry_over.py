"""A run that goes on with another optimizer keeps its moments, momenta and counters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import normal
from flax import nnx
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

RATE = optax.cosine_decay_schedule(1e-2, 40)
PARAMS = {"b": jnp.zeros(3), "w": jnp.arange(390.0).reshape(130, 3) / 390}
BATCHES = normal(8, 32, 130)


def loss(params, batch, rng=None):
    return jnp.mean((batch @ params["w"] + params["b"] - batch[:, :3]) ** 2)


@pytest.fixture(scope="module")
def before():
    """Parameters and state of ``optax.adamw`` on one device, after half of the batches."""
    tx = optax.adamw(RATE)
    return trained(tx, PARAMS, tx.init(PARAMS), BATCHES[:4])


def trained(tx, params, state, batches):
    for batch in batches:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("group", [None, "device"], ids=["one level", "two levels"])
def test_a_run_of_adamw_goes_on_at_the_owners_as_if_nothing_had_happened(before, group):
    """Of whole numbers on the wire, so that only roundings differ."""
    params, state = before
    workers = lc.Workers(lc.mesh.two_level_mesh(2), "node", group) if group else (
        lc.Workers.one_per_device()
    )  # fmt: skip
    tx = lc.owner_adamw(
        RATE, workers=workers, quantizer=lc.quantize.dense(), reply=lc.decide.values(), bucket_size=128
    )  # fmt: skip
    adam = state[0]
    after = lc.checkpoint.carry_over(
        lc.init_state(tx, params, workers), workers, mu=adam.mu, nu=adam.nu, count=adam.count
    )
    step = lc.make_train_step(loss, tx, workers)
    for batch in BATCHES[4:]:
        after, _ = step(after, batch)
    wanted, _ = trained(optax.adamw(RATE), params, state, BATCHES[4:])
    for name in wanted:
        np.testing.assert_allclose(after.params[name], wanted[name], rtol=2e-4, atol=2e-6)


def test_a_run_of_muon_goes_on_at_the_owners_of_whole_matrices():
    def is_leaf(x):
        return isinstance(x, optax.MaskedNode)

    muon = optax.contrib.muon(RATE, consistent_rms=0.2)
    params, state = trained(muon, PARAMS, muon.init(PARAMS), BATCHES[:4])
    matrices, rest = (optax.tree.get(state, x) for x in ("MuonState", "ScaleByAdamState"))
    mu = jax.tree.map(lambda x, y: y if is_leaf(x) else x, matrices.mu, rest.mu, is_leaf=is_leaf)
    workers = lc.Workers.one_per_device()
    tx = lc.owner_muon(
        RATE, workers=workers, quantizer=lc.quantize.dense(), reply=lc.decide.values()
    )
    after = lc.init_state(tx, params, workers)
    after = lc.checkpoint.carry_over(after, workers, mu=mu, nu=rest.nu, count=rest.count)
    step = lc.make_train_step(loss, tx, workers)
    for batch in BATCHES[4:]:
        after, _ = step(after, batch)
    wanted, _ = trained(muon, params, state, BATCHES[4:])
    for name in wanted:
        np.testing.assert_allclose(after.params[name], wanted[name], rtol=2e-4, atol=2e-5)


def test_each_worker_that_votes_gets_the_whole_momentum(before):
    params, (adam, *_) = before
    workers = lc.Workers.one_per_device()
    state = lc.init_state(lc.lion_cub(RATE, workers=workers), params, workers)
    state = lc.checkpoint.carry_over(state, workers, mu=adam.mu, count=adam.count)
    vote, _, schedule = state.opt_state
    assert state.step == 4  # a checkpoint is named by it, and loops begin at it
    assert schedule.count == 4 and vote.mu["w"].sharding.spec == P("data")
    np.testing.assert_array_equal(vote.mu["w"], np.broadcast_to(adam.mu["w"], (8, 130, 3)))


def test_the_optimizer_of_nnx_gets_the_moments_of_the_one_before():
    workers, model = lc.Workers.one_per_device(), nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    old = nnx.Optimizer(model, optax.adamw(RATE), wrt=nnx.Param)
    old.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    adam = optax.tree.get(old.opt_state, "ScaleByAdamState")
    tx = lc.lion_cub(RATE, workers=workers)
    state = {
        "params": nnx.state(model, nnx.Param),
        "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param),
    }
    for mu in adam.mu, nnx.to_pure_dict(adam.mu):
        new = lc.checkpoint.carry_over(state, workers, mu=mu, count=adam.count)["optimizer"]
        assert isinstance(new, nnx.Optimizer) and new.step[...] == new.opt_state[2].count[...] == 1
        for x in new.opt_state[0].mu["kernel"][...]:
            np.testing.assert_array_equal(x, adam.mu["kernel"][...])


@pytest.mark.parametrize("given", [["mu", "count"], ["mu", "nu"], ["count"]], ids="+".join)
def test_some_of_the_moments_and_counters_are_refused(before, given):
    params, (adam, *_) = before
    workers = lc.Workers.one_per_device()
    state = lc.init_state(lc.owner_adamw(RATE, workers=workers), params, workers)
    missing = ", ".join(f"{x}=" for x in ("mu", "nu", "count") if x not in given)
    with pytest.raises(
        ValueError, match=f"the new state has mu, nu, count: give {missing} of the same"
    ):
        lc.checkpoint.carry_over(state, workers, **{x: getattr(adam, x) for x in given})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"u": PARAMS}, r"the state has no u.b. Give fields of its optimizer"),
        (
            {"mu": {"w": jnp.ones((3, 130))}},
            r"mu.w has shape \[130, 3\]: \[3, 130\] was given",
        ),
        ({"mu": {"v": jnp.ones(3)}}, r"the state has no mu.v"),
    ],
)
def test_a_field_that_the_state_does_not_have_is_refused(fields, message):
    workers = lc.Workers.one_per_device()
    state = lc.init_state(lc.lion_cub(RATE, workers=workers), PARAMS, workers)
    with pytest.raises(ValueError, match=message):
        lc.checkpoint.carry_over(state, workers, **fields)


@pytest.mark.parametrize("lacks", [{}, {"b": None}, {"b": optax.MaskedNode()}])
def test_moments_of_some_parameters_alone_are_refused(lacks):
    """As of one part of `optax.partition`: the others would begin at 0 beside an old count."""
    workers = lc.Workers.one_per_device()
    state = lc.init_state(lc.owner_adamw(RATE, workers=workers), PARAMS, workers)
    some = {"w": PARAMS["w"]} | lacks
    with pytest.raises(ValueError, match=r"nothing for .*mu.b, 1 in all.*optax.partition"):
        lc.checkpoint.carry_over(state, workers, mu=some, nu=some, count=3)


def test_a_state_without_parameters_is_refused():
    workers = lc.Workers.one_per_device()
    tx = lc.owner_adamw(RATE, workers=workers)
    words = r'no mu.b.*the parameters in it.*"params": params'
    with pytest.raises(ValueError, match=words):
        lc.checkpoint.carry_over((PARAMS, tx.init(PARAMS)), workers, mu=PARAMS)
