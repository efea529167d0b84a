"""Programs that vote and send floats all the same: read when they are compiled, and refused in words.

What a method of the library sends by itself is no error: every test that compiles one says so.
"""

import sysconfig
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_on, normal, run_python
from flax import jax_utils
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client
from test_chains import PARAMS, loss

import lioncub_jax as lc
from lioncub_jax.programs import compilations

BATCH = normal(64, 64)


def cub(workers, **options):
    return lc.lion_cub(1e-3, workers=workers, **options)


def adam(workers):
    return lc.baselines.one_bit_adam(1.0, warmup=2, workers=workers)


CUB = cub("data")


@pytest.fixture
def mesh():
    return mesh_on("data=8")


@pytest.fixture(autouse=True)
def raising():
    before = lc.audit.mode("raise")
    yield
    lc.audit.mode(before)


def step_of(mesh, loss=loss, make=cub, beside=lambda grads: 0.0):
    """A trainer's step mapped over the workers, its first arguments, and how its state lies."""
    workers = lc.Workers(mesh, "data")
    tx = make(workers)

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, beside(grads)

    step = lc.map_step(step, workers)
    params, batch = jax.device_put((PARAMS, BATCH), workers.shardings((P(), P("data"))))
    state = step.prepare(tx.init(params))
    return step, (params, state, batch), jax.tree.map(lambda x: x.sharding, state)


def out_shardings(mesh, state):
    everywhere = NamedSharding(mesh, P())
    return {"out_shardings": (everywhere, everywhere if state is None else state, everywhere, None)}


def refused(*parts):
    """Matches a message that has all of the parts, in this order."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))


# --- What is refused


def test_momentum_that_leaves_the_step_as_replicated(mesh):
    step, args, state = step_of(mesh)
    step.__name__ = "étape"  # XLA writes it otherwise
    with refused(
        r"all-gather of f32\[1, 64, 128\] \(of the shape of opt_state\[0\].mu\['a'\]\['kernel'\]\), 229 kB",
        r"gradients or momentum, which are \[workers, ...\]: a constraint or out_shardings",
    ):
        jax.jit(step, **out_shardings(mesh, None))(*args)
    params, *_ = jax.jit(step, **out_shardings(mesh, state))(*args)
    assert jnp.isfinite(params["b"]).all()


def test_a_batch_that_a_step_closes_over_is_an_error(mesh):
    """Of a mapped step when it is traced; of a shard_map by hand XLA gathers it, and the advice says so."""
    held = {}
    mapped, args, _ = step_of(mesh, lambda params, x: loss(params, held["rows"]))

    def step(params, opt_state, rows):
        held["rows"] = rows
        return mapped(params, opt_state, BATCH)

    with refused("closes over an array of the jax.jit around it.*give it as an argument"):
        jax.jit(step).lower(*args)

    def by_hand(params, rows):
        def worker(params):
            grads = jax.grad(loss)(params, rows)
            return CUB.update(grads, CUB.init(params), params)[0]

        over = jax.shard_map(worker, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return over(params)

    advice = "an array that the loss closes over, such as a batch: give it as an argument"
    with refused(advice) as raised:
        jax.jit(by_hand).lower(args[0], args[2]).compile()
    assert str(raised.value).count("\n- ") == 2  # and how to say that it is meant


def test_parameters_that_are_cut_over_the_workers_when_compiled_anew(mesh):
    step, (params, opt_state, batch), _ = step_of(mesh)
    step = jax.jit(step)
    step(params, opt_state, batch)  # sends votes only
    cut = jax.device_put(params, NamedSharding(mesh, P("data")))
    with refused(
        r"all-gather of f32\[8, 128\] \(of the shape of params\['a'\]\['kernel'\]\), 28.7 kB",
        "Parameters are cut over other axes of the mesh only",
    ):
        step(cut, opt_state, batch)


def test_a_program_that_votes_is_known_where_its_trace_was_kept_and_no_other_is_asked_for(
    mesh, monkeypatch
):
    step, args, _ = step_of(mesh)
    three, four = jnp.ones(3), jnp.ones(4)
    asked, listed = [], compilations.compiled_programs
    monkeypatch.setattr(compilations, "compiled_programs", lambda: asked.append(1) or listed())

    def no_vote(x):
        """A name that votes in no other test: programs are known by their names."""
        return x + 1

    jax.jit(no_vote)(three)
    inner = jax.jit(step)
    inner.lower(*args)
    jax.jit(no_vote)(four)
    assert not asked
    around = jax.jit(lambda *args: inner(*args), **out_shardings(mesh, None))
    with refused("a constraint or out_shardings"):
        around(*args)
    assert len(asked) == 2


def in_pmap(step, init):
    params = jax_utils.replicate(PARAMS)
    given = params, jax.pmap(init, axis_name="data")(params), BATCH.reshape(8, 8, 64)
    return jax.pmap(step, axis_name="data").lower(*given)


@pytest.mark.parametrize(
    "tx",
    # Means of arrays of the same sizes, in some steps.
    [CUB, cub("data", sync=lc.sync.every(2)), adam("data")],
    ids=["alone", "with syncs", "with a warm-up"],
)
def test_gradients_that_are_averaged_before_the_vote(tx):
    def step(params, opt_state, batch):
        grads = lax.pmean(jax.grad(loss)(params, batch), "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with refused(
        r"all-reduce of f32\[64, 128\].*, 57.3 kB, \S*test_watch.py:",
        "gradients are averaged before the vote",
        "leave lax.pmean out",
    ):
        in_pmap(step, tx.init).compile()


def test_a_line_of_a_library_is_told_with_who_called_it(mesh):
    """As of one that wraps functions of JAX."""
    source = "def mean(x):\n    return lax.pmean(x, 'data')"
    library = {"lax": lax}
    exec(compile(source, f"{sysconfig.get_path('purelib')}/wrapping.py", "exec"), library)

    def step(params, batch):
        grads = jax.tree.map(lambda x: library["mean"](x * batch.sum()), params)
        return CUB.update(grads, CUB.init(params), params)[0]

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    with refused(r"f32\[300\] \(.*\), 2.1 kB, \S*wrapping.py:2, called at \S*test_watch.py:"):
        jax.jit(jax.shard_map(step, mesh=mesh, **specs))({"w": jnp.ones(300)}, BATCH)


def test_every_array_is_counted_and_the_four_largest_are_named(mesh):
    many = {f"w{i}": jnp.ones(130 + i) for i in range(7)}

    def step(params, batch):
        grads = jax.tree.map(lambda x: lax.pmean(x * batch.sum(), "data"), params)
        return CUB.update(grads, CUB.init(params), params)[0]

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    with refused(r"f32\[136\]", r"f32\[133\][^\n]*\n  and 3 more"):
        jax.jit(jax.shard_map(step, mesh=mesh, **specs))(many, BATCH)


def test_what_xla_joins_to_a_number_of_the_library_is_seen(mesh):
    def norm(grads):
        return optax.tree.norm(lax.pmean(grads, "data"))

    step, args, _ = step_of(mesh, beside=norm)
    with refused(r"f32\[(1, )?64, 128\]"):
        jax.jit(step).lower(*args).compile()


# Compiles a step whose workers average first, for the devices of a client that JAX does not know by itself.
ELSEWHERE = """
import jax, numpy as np
from jax.extend import backend
from jax.sharding import AxisType, PartitionSpec as P
from jaxlib import xla_client

client = xla_client.make_cpu_client(num_devices=2)
backend.register_backend_factory("other", lambda: client)
import lioncub_jax as lc

mesh = jax.make_mesh((2,), ("data",), devices=client.devices(), axis_types=(AxisType.Auto,))
tx = lc.lion_cub(1e-3, workers="data")
params = {"w": np.ones((16, 32), "f")}

def step(params, x):
    grads = jax.lax.pmean(jax.tree.map(lambda p: p * x.sum(), params), "data")
    return tx.update(grads, tx.init(params), params)[0]

specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
assert client is not jax.devices()[0].client
jax.jit(jax.shard_map(step, mesh=mesh, **specs)).lower(
    *jax.eval_shape(lambda: (params, np.ones(2, "f")))
).compile()
"""


def test_programs_of_every_backend_are_read():
    ran = run_python("-c", ELSEWHERE, JAX_PLATFORMS="cpu,other")
    assert "all-reduce of f32[16, 32]" in ran.stderr and ran.returncode


# --- What is not


def test_floats_of_the_model_must_be_declared(mesh):
    def program(size, mean):
        def of_batch(params, batch):
            hidden = jnp.tile(batch @ params["a"]["kernel"], size // 128)
            hidden -= mean(hidden.mean(0))  # over all workers
            return jnp.mean(hidden**2) + params["b"].mean() + params["a"]["bias"].mean()

        step, args, _ = step_of(mesh, of_batch)
        return jax.jit(step).lower(*args)

    def plain(x):
        return lax.pmean(x, "data")

    def declared(x):
        with lc.audit.declared():
            return plain(x)

    program(128, plain).compile()
    program(256, declared).compile()
    with refused(r"all-reduce of f32\[256\]"):
        program(256, plain).compile()


# --- The switch, and those who compile themselves


def test_the_switch_and_programs_that_are_given(mesh):
    def lowered(**options):
        step, args, _ = step_of(mesh)
        return jax.jit(step, **options).lower(*args)

    gathers = out_shardings(mesh, None)
    assert lc.audit.mode("warn") == "raise"
    with pytest.warns(UserWarning, match="also 344 kB of floats"):
        wrong = lowered(**gathers).compile()
    assert lc.audit.mode("allow") == "warn"
    with warnings.catch_warnings(action="error"):
        allowed = lowered(**gathers).compile()
        lc.audit.mode("raise")
        lowered().compile()  # what was compiled before stays allowed
        assert allowed.as_text()
    for program in (wrong, wrong.as_text()):
        with refused("also 344 kB of floats"):
            lc.audit.check_votes(program)
    compiled = lowered().compile()
    assert lc.audit.check_votes(SimpleNamespace(compiled=compiled)) == lc.audit.check_votes(
        compiled
    )  # of nnx.jit
    with pytest.raises(TypeError, match="is given a Lowered, and only the compiled program"):
        lc.audit.check_votes(lowered())
    with refused("no vote is in this program"):
        lc.audit.check_votes(jax.jit(lambda x: x + 1).lower(1.0).compile())
    with refused(r"mode\('off'\): give 'raise', 'warn' or 'allow'"):
        lc.audit.mode("off")


def test_a_program_that_votes_and_that_no_backend_shows_is_warned_of():
    devices = xla_client.make_cpu_client(num_devices=8).devices()  # as if elsewhere
    step, args, _ = step_of(jax.make_mesh((8,), ("data",), devices=devices))
    lowered = jax.jit(step).lower(*args)
    with pytest.warns(UserWarning, match="step votes, and no backend shows .*nobody has looked"):
        lowered.compile()


def test_another_program_of_the_name_of_one_that_votes_is_not_warned_of(mesh):
    step, args, _ = step_of(mesh)
    jax.jit(step).lower(*args)

    def step(x):
        return x

    with warnings.catch_warnings(action="error"):
        jax.jit(step).lower(1.0).compile()


@pytest.mark.parametrize("make", [cub, adam], ids=["vote", "with a warm-up"])
def test_votes_that_only_a_branch_takes_are_warned_of(make, mesh):
    tx = optax.apply_if_finite(make("data"), 3)

    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with pytest.warns(UserWarning, match="apply_if_finite does that.*abstains by itself"):
        in_pmap(step, tx.init).compile()
    with warnings.catch_warnings(action="error"):  # what map_step calls is checked before
        step, args, _ = step_of(mesh, make=lambda w: optax.MultiSteps(make(w), 2))
        jax.jit(step).lower(*args).compile()


# --- What travels, in words


def test_what_travels_inside_a_worker_is_told():
    """Momentum that lies in parts over fsdp, in a step whose specs say that it is whole."""
    mesh = mesh_on("data=4 fsdp=2")
    step, (params, state, batch), _ = step_of(mesh)
    mu = jax.device_put(state[0].mu, NamedSharding(mesh, P("data", "fsdp")))
    state = (state[0]._replace(mu=mu), *state[1:])
    told = lc.audit.check_votes(jax.jit(step).lower(params, state, batch).compile())
    assert told.startswith("A device sends 3.16 kB between the workers of 'data' in a step")
    gathered = "all-gather of f32[32, 128], 16.4 kB, "
    assert f"Inside a worker it sends 24.8 kB over 'fsdp':\n  {gathered}" in told
    assert "test_watch.py:" in told


@pytest.mark.parametrize("tx", [CUB, adam("data")], ids=["vote", "with a warm-up"])
def test_leaves_that_a_mask_leaves_out_are_named_where_types_do_not_tell(tx):
    """Each worker's own gradient would move them."""
    tx = optax.masked(tx, {"a": True, "b": False, "none": True})

    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        return tx.update(grads, state, params)

    with pytest.warns(
        UserWarning, match=r"the leaves \['b'\] are masked from the vote.*drift apart"
    ):
        in_pmap(step, tx.init)
