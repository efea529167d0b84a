"""Checkpoints in an object store: gs:// against an emulator, in the environment of `make test-long`."""

import socket

import jax.numpy as jnp
import pytest
from conftest import assert_same
from etils import epath
from test_checkpoint import files, opened, refuses, small

import lioncub_jax as lc

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def bucket():
    """The address of an empty bucket."""
    server = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url,  # of gcsfs, and of tensorstore
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x", "FSSPEC_GCS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        running = server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
        running.start()
        yield "gs://bucket"
        running.stop()


def names_in(folder):
    return sorted(path.name.partition("-")[0] for path in epath.Path(folder).iterdir())


def test_a_store_holds_a_run_and_none_of_its_steps_is_complete_before_it_was_read_back(
    bucket, monkeypatch
):
    folder = f"{bucket}/runs/a"
    with opened(folder, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(small(step), {"step": step})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        found = checkpoints.restore(small())
        assert_same(found.state, small(3))
        assert found.data == {"step": 3}
        params = checkpoints.restore_params(small()["params"]).state
        assert_same(params, small(3)["params"])
        with monkeypatch.context() as patch:

            def fails(*args):
                raise OSError("it is another")

            patch.setattr(files, "write", fails)
            checkpoints.save(small(4))
            refuses("4 was not written .it is another", checkpoints.wait, OSError)
        assert checkpoints.steps() == [2, 3] and checkpoints.restore(small()).step == 3
        # The unfinished one goes with the next step.
        assert "4" in names_in(folder)
        checkpoints.save(small(5), wait=True)
        assert checkpoints.steps() == [3, 5] and "4" not in names_in(folder)


def test_what_is_missing_in_a_store_is_damage_and_is_set_aside(bucket):
    folder = f"{bucket}/runs/b"
    with opened(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(small(step), wait=True)
        (epath.Path(folder) / "2" / "state" / "manifest.ocdbt").unlink()
        with pytest.warns(UserWarning, match="2 is damaged"):
            assert checkpoints.restore(small()).step == 1
        checkpoints.save(small(2), wait=True)
        assert checkpoints.steps() == [1, 2] and names_in(folder) == ["1", "2", "2.abandoned"]
        assert checkpoints.restore(small()).step == 2


def test_a_portable_state_goes_to_a_store_and_back_by_orbax(bucket):
    import orbax.checkpoint as ocp

    state, workers = small(7), opened("run").workers
    item = f"{bucket}/runs/c/item"
    ocp.PyTreeCheckpointer().save(item, lc.checkpoint.portable(state, workers))
    assert_same(lc.checkpoint.restore(item, small(), workers), state)
    assert jnp.allclose(state["params"]["w"], jnp.array([7.0, 2]))
