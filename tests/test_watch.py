"""Programs that vote and send floats all the same: read when they are compiled, and refused in words."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

W = 8
PARAMS = {"a": {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}, "b": jnp.ones((128, 32))}
LABELS = {"a": {"kernel": "vote", "bias": "vote"}, "b": "mean"}
BATCH = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


def loss(params, batch):
    return jnp.mean(
        (jnp.tanh(batch @ params["a"]["kernel"] + params["a"]["bias"]) @ params["b"]) ** 2
    )


def mesh_of():
    return jax.make_mesh((W,), ("data",), axis_types=(AxisType.Auto,))


def placed(mesh, tree, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def step_of(tx, mesh, loss=loss, **options):
    """A jitted step of a trainer of one's own, and its first arguments."""
    workers = lc.Workers(mesh, "data")
    tx = lc.on_mesh(tx(workers), workers, specs=jax.tree.map(lambda _: P(), PARAMS))
    grad_fn = lc.worker_value_and_grad(loss, workers, **options)

    def step(params, opt_state, batch):
        value, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = placed(mesh, PARAMS, P())
    return step, (params, tx.init(params), placed(mesh, BATCH, P("data"))), tx


def cub(workers):
    return lc.lion_cub(1e-3, axis_name=workers)


@pytest.fixture(autouse=True)
def raising():
    before = lc.watch.mode("raise")
    yield
    lc.watch.mode(before)


# --- What is refused


def test_momentum_that_leaves_the_step_as_replicated():
    mesh = mesh_of()
    step, args, tx = step_of(cub, mesh)
    everywhere = NamedSharding(mesh, P())
    with pytest.raises(ValueError) as raised:
        jax.jit(step, out_shardings=(everywhere, everywhere, everywhere))(*args)
    text = str(raised.value)
    assert (
        "all-gather of f32[1, 64, 128] (of the shape of opt_state[0].mu['a']['kernel']), 229 kB"
        in text
    )
    assert "momentum of each worker leaves the step as if it were the same for all" in text
    assert "tx.shardings(params)" in text
    lie = everywhere, tx.shardings(PARAMS), everywhere
    params, *_ = jax.jit(step, out_shardings=lie)(*args)
    assert jnp.isfinite(params["b"]).all()


def test_parameters_that_are_cut_over_the_workers():
    mesh = mesh_of()
    step, (params, opt_state, batch), _ = step_of(cub, mesh)
    cut = jax.tree.map(lambda x: placed(mesh, x, P("data")), params)
    with pytest.raises(ValueError) as raised:
        jax.jit(step)(cut, opt_state, batch)
    assert "all-gather of f32[8, 128] (params['a']['kernel']), 28.7 kB" in str(raised.value)
    assert "Parameters are cut over other axes of the mesh only" in str(raised.value)


def test_a_program_that_is_compiled_anew_for_other_shardings_is_read_again():
    mesh = mesh_of()
    step, (params, opt_state, batch), _ = step_of(cub, mesh)
    step = jax.jit(step)
    step(params, opt_state, batch)  # sends votes only
    cut = {**params, "b": placed(mesh, params["b"], P("data"))}
    with pytest.raises(ValueError, match=r"all-gather of f32\[16, 32\] \(params\['b'\]\)"):
        step(cut, opt_state, batch)


def averaged(tx):
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(lax.pmean(grads, "data"), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, lax.pmean(value, "data")

    return step


def test_gradients_that_pmap_has_averaged():
    tx = lc.lion_cub(1e-3, axis_name="data")
    step = jax.pmap(averaged(tx), axis_name="data")
    params, opt_state = jax_utils.replicate(PARAMS), jax_utils.replicate(tx.init(PARAMS))
    with pytest.raises(ValueError) as raised:
        step(params, opt_state, BATCH.reshape(W, 8, 64))
    text = str(raised.value)
    assert "all-reduce of f32[64, 128], 57.3 kB" in text and "test_watch.py:" in text
    assert "gradients are averaged before the vote" in text and "leave lax.pmean out" in text


def test_syncs_that_are_meant_do_not_hide_gradients_that_are_not():
    tx = lc.lion_cub(
        1e-3, axis_name="data", sync=lc.sync.every(2)
    )  # means of arrays of the same sizes
    step = jax.pmap(averaged(tx), axis_name="data")
    params, opt_state = jax_utils.replicate(PARAMS), jax_utils.replicate(tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"all-reduce of f32\[64, 128\], 57.3 kB"):
        step(params, opt_state, BATCH.reshape(W, 8, 64))


def test_gradients_that_an_untyped_shard_map_has_averaged():
    tx = lc.lion_cub(1e-3, axis_name="data")
    mapped = jax.shard_map(
        averaged(tx), mesh=mesh_of(), in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match="gradients are averaged before the vote"):
        jax.jit(mapped)(PARAMS, tx.init(PARAMS), BATCH)


def test_every_array_is_counted_and_the_four_largest_are_named():
    many = {f"w{i}": jnp.ones(130 + i) for i in range(7)}
    tx = lc.lion_cub(1e-3, axis_name="data")

    def step(params, batch):
        grads = jax.tree.map(lambda x: lax.pmean(x * batch.sum(), "data"), params)
        return tx.update(grads, tx.init(params), params)[0]

    mapped = jax.shard_map(
        step, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"f32\[136\](.|\n)*f32\[133\](.|\n)*and 3 more"):
        jax.jit(mapped)(many, BATCH)


TAKES_A_MEAN = {
    "for a norm": lambda grads: optax.global_norm(jax.tree.map(lambda g: g.mean(0), grads)),
    "of one worker": lambda grads: optax.global_norm(jax.tree.map(lambda g: g[0], grads)),
    "for itself": lambda grads: jax.tree.map(lambda g: g.mean(0), grads),
}


@pytest.mark.parametrize("name", TAKES_A_MEAN)
def test_what_xla_joins_to_a_number_of_the_library_is_seen(name):
    mesh = mesh_of()
    workers = lc.Workers(mesh, "data")
    tx = lc.on_mesh(cub(workers), workers)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = lc.worker_value_and_grad(loss, workers)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return updates, opt_state, value, TAKES_A_MEAN[name](grads)

    params = placed(mesh, PARAMS, P())
    with pytest.raises(ValueError, match=r"f32\[(1, )?64, 128\]"):
        step(params, tx.init(params), BATCH)


# --- What is not


def mixed(workers):
    mean = lc.global_gradients(optax.lion(1e-3), workers)
    return optax.partition({"vote": cub(workers), "mean": mean}, LABELS)


MEANT = {
    "lion_cub": cub,
    "two bits": lambda w: lc.lion_cub(1e-3, axis_name=w, quantizer=lc.quantize.midrise(2)),
    "average": lambda w: lc.distributed_lion(1e-3, axis_name=w, average=True),
    "owner_lion": lambda w: lc.owner_lion(1e-3, axis_name=w),
    "dense owner": lambda w: lc.owner_lion(
        1e-3, axis_name=w, quantizer=lc.quantize.dense(), wire=lc.wires.all_reduce()
    ),
    "momentum sync": lambda w: lc.lion_cub(1e-3, axis_name=w, sync=lc.sync.every(2)),
    "coded sync": lambda w: lc.lion_cub(1e-3, axis_name=w, sync=lc.sync.coded()),
    "partly averaged": mixed,
    "averaged": lambda w: lc.global_gradients(optax.lion(1e-3), w),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANT)
def test_what_a_method_says_it_sends_is_no_error(name):
    step, args, _ = step_of(MEANT[name], mesh_of())
    jax.jit(step)(*args)


def with_statistics(size, declared):
    """A loss that centres ``size`` features by their mean over all workers."""

    def of_batch(params, batch):
        hidden = jnp.tile(batch @ params["a"]["kernel"], size // 128)
        if declared:
            with lc.watch.declared():
                hidden -= lax.pmean(hidden.mean(0), "data")
        else:
            hidden -= lax.pmean(hidden.mean(0), "data")
        return jnp.mean(hidden**2) + params["b"].mean() + params["a"]["bias"].mean()

    return of_batch


def test_floats_of_the_model_must_be_declared():
    def run(size, declared):
        step, args, _ = step_of(cub, mesh_of(), with_statistics(size, declared))
        jax.jit(step)(*args)

    run(128, False)
    run(256, True)
    with pytest.raises(ValueError, match=r"all-reduce of f32\[256\]"):
        run(256, False)


def test_the_switch():
    def compiled():
        step, args, _ = step_of(cub, mesh_of())
        everywhere = NamedSharding(mesh_of(), P())
        return jax.jit(step, out_shardings=(everywhere,) * 3).lower(*args).compile()

    assert lc.watch.mode("warn") == "raise"
    with pytest.warns(UserWarning, match="also 344 kB of floats"):
        compiled()
    assert lc.watch.mode("allow") == "warn"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled()
    with pytest.raises(ValueError, match=r"mode\('off'\): give 'raise', 'warn' or 'allow'"):
        lc.watch.mode("off")


# --- For those who compile themselves


def test_check_votes_reads_a_program_or_its_text():
    lc.watch.mode("allow")
    mesh = mesh_of()
    step, args, _ = step_of(cub, mesh)
    lowered = jax.jit(step).lower(*args)
    lc.check_votes(lowered.compile())
    everywhere = NamedSharding(mesh, P())
    wrong = jax.jit(step, out_shardings=(everywhere,) * 3).lower(*args).compile()
    for program in (wrong, wrong.as_text()):
        with pytest.raises(ValueError, match="also 344 kB of floats"):
            lc.check_votes(program)
    with pytest.raises(
        TypeError, match="check_votes is given a Lowered, and only the compiled program"
    ):
        lc.check_votes(lowered)
    with pytest.raises(ValueError, match="no vote is in this program"):
        lc.check_votes(jax.jit(lambda x: x + 1).lower(1.0).compile())


class Silent:
    """A backend's client that shows no programs."""

    def live_executables(self):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no HLO")


def test_a_backend_that_shows_no_programs_is_warned_of(monkeypatch):
    class Device:
        client = Silent()

    monkeypatch.setattr(lc.watch.jax, "devices", lambda: [Device()])
    with pytest.warns(UserWarning, match=r"may vote, .*UNIMPLEMENTED: no HLO.*nobody has looked"):
        step, args, _ = step_of(cub, mesh_of())
        jax.jit(step).lower(*args).compile()


def test_votes_that_only_a_branch_takes_are_warned_of():
    tx = optax.apply_if_finite(lc.lion_cub(1e-3, axis_name="data"), 3)

    def step(params, opt_state, batch):
        grads = jax.grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mapped = jax.pmap(step, axis_name="data")
    args = (
        jax_utils.replicate(PARAMS),
        jax_utils.replicate(tx.init(PARAMS)),
        BATCH.reshape(W, 8, 64),
    )
    with pytest.warns(UserWarning, match="apply_if_finite does that.*abstains by itself"):
        mapped.lower(*args).compile()
