"""Compiled steps that are kept in a folder from start to start."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import run_python, workers_on

import lioncub_jax as lc
from lioncub_jax.checkpoint import private_files


def loss(params, batch, rng):
    return jnp.mean((batch @ params["w"]) ** 2)


def made(folder, rate=1e-3, count=4, **options):
    """A step and a state."""
    workers = workers_on(f"data={count}")
    tx = lc.lion_cub(rate, workers=workers)
    state = lc.init_state(tx, {"w": jnp.ones((8, 3))}, workers)
    return lc.make_train_step(loss, tx, workers).compiled(options, folder), state


def batch(rows=8):
    return np.random.default_rng(0).normal(size=(rows, 8)).astype(np.float32)


def trained(step, state, rows=8, steps=3):
    for _ in range(steps):
        state, metrics = step(state, batch(rows))
    return np.asarray(state.params["w"]), float(metrics["loss"])


def programs(folder):
    return {path: path.read_bytes() for path in folder.glob("*.program")}


def test_what_is_read_is_run_and_nothing_under_another_name(tmp_path):
    """A program of another learning rate, sealed in place of the step's own, trains at that rate."""
    slow = trained(*made(tmp_path / "slow", rate=1e-3))
    fast = trained(*made(tmp_path / "fast", rate=1e-2))
    (place,), (other,) = programs(tmp_path / "slow"), programs(tmp_path / "fast").values()
    with private_files.opened(tmp_path / "slow") as folder:
        private_files.seal(folder, place.name, other[private_files.DIGEST :])
    np.testing.assert_array_equal(trained(*made(tmp_path / "slow", rate=1e-3))[0], fast[0])
    place.write_bytes(other)
    with pytest.warns(UserWarning, match="compiled anew: .* is not as it was written"):
        np.testing.assert_array_equal(trained(*made(tmp_path / "slow", rate=1e-3))[0], slow[0])
    assert (slow[0] != fast[0]).any()


def test_other_shapes_devices_and_options_have_programs_of_their_own(tmp_path):
    step, state = made(tmp_path)
    trained(step, state)
    trained(*made(tmp_path), rows=16)
    assert len(programs(tmp_path)) == 2
    trained(*made(tmp_path, count=2))
    assert len(programs(tmp_path)) == 3
    trained(*made(tmp_path, xla_cpu_enable_fast_math=True))
    assert len(programs(tmp_path)) == 4
    # One step with two shapes has both, and may go back.
    step, state = made(tmp_path)
    for rows in (8, 16, 8):
        state, _ = step(state, batch(rows))
    assert len(programs(tmp_path)) == 4 and step.traces == 2


def test_a_program_that_is_damaged_or_that_others_may_write_is_compiled_anew(tmp_path):
    wanted = trained(*made(tmp_path))
    ((path, content),) = programs(tmp_path).items()
    with private_files.opened(tmp_path) as folder:
        private_files.seal(folder, path.name, b"what")  # whole, and no program
    harms = {
        "": lambda: None,
        "is not as it was written": lambda: path.write_bytes(content[:99] + b"?" + content[100:]),
        "has mode 620: others may": lambda: path.chmod(0o620),
    }
    for told, harm in harms.items():
        harm()
        with pytest.warns(UserWarning, match=rf"\.program is compiled anew: .*{told}"):
            found = trained(*made(tmp_path))
        np.testing.assert_array_equal(found[0], wanted[0])
    trained(*made(tmp_path))  # it was written again: no warning


def test_a_folder_that_is_not_ones_own_is_refused_and_looked_at_at_each_use(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(ValueError, match="shared has mode 777: others may write"):
        made(tmp_path / "shared" / "mine")
    step, state = made(tmp_path / "mine")
    (tmp_path / "mine").symlink_to(tmp_path / "shared")  # meanwhile
    with pytest.warns(UserWarning, match="compiled anew: .*link.*|is not kept in .*link"):
        trained(step, state)
    assert not programs(tmp_path / "shared")


FILLS = """
import pathlib, sys
import jax
from test_programs import batch, made, trained

jax.config.update("jax_num_cpu_devices", 8)
folder = pathlib.Path(sys.argv[1])
step, state = made(None)
step.lower(state, batch()).compile()  # JAX's cache has it now
jax.clear_caches()
trained(*made(folder / "from_cache"))
jax.clear_caches()
step, state = made(folder / "compiled_before")
step.lower(state, batch()).compile()  # read from the cache, and remembered by JAX
trained(step, state)
"""


def test_what_is_kept_beside_jaxs_own_cache_is_whole(tmp_path):
    """XLA writes what it has read from that cache without its code, and a later start dies of it."""
    own = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONWARNINGS": "error::UserWarning",
    }
    done = run_python(FILLS, str(tmp_path), **own)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache").glob("jit_traced-*"))
    wanted = trained(*made(None))[0]
    for folder in ("from_cache", "compiled_before"):
        kept = programs(tmp_path / folder)
        np.testing.assert_array_equal(trained(*made(tmp_path / folder))[0], wanted)
        assert len(kept) == 1 and programs(tmp_path / folder) == kept  # read, and not compiled anew


def test_the_first_step_is_told_to_the_run_that_started_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LIONCUB_STEPPED", str(tmp_path / "stepped"))
    step, state = made(None)
    step.lower(state, batch()).compile()
    assert not (tmp_path / "stepped").exists()
    step(state, batch())
    assert (tmp_path / "stepped").exists()


SENDS_FLOATS = """
import sys
import jax, jax.numpy as jnp, numpy as np, lioncub_jax as lc
from conftest import workers_on

jax.config.update("jax_num_cpu_devices", 8)
lc.watch.mode(sys.argv[2])

def loss(params, batch, rng):
    hidden = batch @ params["w"]
    return jnp.mean((hidden - jax.lax.pmean(hidden.mean(0), "data")) ** 2)

workers = workers_on("data=4")
tx = lc.lion_cub(1e-3, workers=workers)
state = lc.init_state(tx, {"w": jnp.ones((8, 256))}, workers)
lc.make_train_step(loss, tx, workers).compiled(programs=sys.argv[1])(state, np.ones((8, 8), "f"))
"""


def test_a_program_that_was_kept_and_sends_floats_is_refused_when_it_is_read(tmp_path):
    warned, kept = run_python(SENDS_FLOATS, str(tmp_path), "warn"), programs(tmp_path)
    assert warned.returncode == 0 and len(kept) == 1
    refused = run_python(SENDS_FLOATS, str(tmp_path), "raise")
    assert refused.returncode and programs(tmp_path) == kept
    assert "ValueError: this step votes" in refused.stderr and "f32[256]" in refused.stderr
