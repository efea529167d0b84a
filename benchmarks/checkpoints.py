"""Times of a save and of a restore beside bare orbax, and beside another version of this library.

    python benchmarks/checkpoints.py [--other PYTHON] [--megabytes 240] [--rounds 7]

Parameters of 24 arrays on each of 8 devices of one CPU. In each round every arm saves once, waits
until the checkpoint has its name, and restores: orbax by its ``CheckpointManager``, also into NumPy, which
is what reading back costs at least; ours; and ``lc.Checkpoints`` of the environment with the interpreter
``--other``, in a process of its own. Medians leave out the first round, which compiles.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from statistics import median
from typing import Any

import jax
import numpy as np

DEVICES, ARRAYS = 8, 24
Times = dict[str, float]


def main() -> None:
    import report  # of other versions it is another

    parser = report.parser(__doc__)
    parser.add_argument("--other", help="an interpreter that imports another version")
    parser.add_argument("--megabytes", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    arms = {"orbax": orbax_rounds(args.megabytes), "ours": our_rounds(args.megabytes)}
    if args.other:
        arms["other"] = other_rounds(args)
    taken: dict[str, list[Times]] = {name: [] for name in arms}
    for _ in range(args.rounds):
        for name, rounds in arms.items():
            taken[name].append(next(rounds))
    for rounds in arms.values():
        rounds.close()
    medians = {
        f"{name}_{what}_s": median(times[what] for times in each[1:])
        for name, each in taken.items()
        for what in each[0]
    }
    for name, value in medians.items():
        print(f"{name:24} {value:.3f}")
    bare = medians["orbax_finished_s"] + medians["orbax_into_numpy_s"]
    ratios = {
        "finished_over_orbax_save_and_read": medians["ours_finished_s"] / bare,
        "restored_over_orbax": medians["ours_restored_s"] / medians["orbax_restored_s"],
    }
    if args.other:
        ratios["returns_over_other"] = medians["ours_returns_s"] / medians["other_returns_s"]
    figures = {name: float(f"{x:.3g}") for name, x in (medians | ratios).items()}
    report.finish({"benchmark": "checkpoints", "megabytes": args.megabytes} | figures, args.save)


def state_of(megabytes: int) -> tuple[dict[str, Any], Any]:
    """The state, and the mesh."""
    mesh = jax.make_mesh((DEVICES,), ("data",), (jax.sharding.AxisType.Auto,))
    rng, size = np.random.default_rng(0), megabytes * 10**6 // (4 * ARRAYS)
    params = {f"w{i}": rng.normal(size=(8, size // 8)).astype(np.float32) for i in range(ARRAYS)}
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return {"params": jax.device_put(params, everywhere)}, mesh


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until it is done and its arrays are there, and its result."""
    began = time.perf_counter()
    result = jax.block_until_ready(act())
    return time.perf_counter() - began, result


def orbax_rounds(megabytes: int) -> Generator[Times, None, None]:
    """Rounds of bare orbax."""
    import orbax.checkpoint as ocp

    state, _ = state_of(megabytes)
    to = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), state)
    with (
        tempfile.TemporaryDirectory() as folder,
        ocp.CheckpointManager(
            folder, options=ocp.CheckpointManagerOptions(max_to_keep=1)
        ) as manager,
    ):
        for step in range(10**6):
            began = time.perf_counter()
            manager.save(step, args=ocp.args.StandardSave(state))
            returns = time.perf_counter() - began
            manager.wait_until_finished()
            finished = time.perf_counter() - began
            restored, _ = timed(
                lambda s=step: manager.restore(s, args=ocp.args.StandardRestore(to))
            )
            item, plan = (
                manager.directory / str(step) / "default",
                ocp.args.PyTreeRestore(restore_args=how),
            )
            numpy, _ = timed(
                lambda i=item, p=plan: ocp.PyTreeCheckpointHandler().restore(i, args=p)
            )
            yield {
                "returns": returns,
                "finished": finished,
                "restored": restored,
                "into_numpy": numpy,
            }


def our_rounds(megabytes: int) -> Generator[Times, None, None]:
    """Rounds of `Checkpoints`, of this version and of those before."""
    import lioncub_jax as lc

    state, mesh = state_of(megabytes)
    with (
        tempfile.TemporaryDirectory() as folder,
        lc.Checkpoints(folder, workers=lc.Workers(mesh, "data"), keep=1) as checkpoints,
    ):
        for step in range(10**6):
            began = time.perf_counter()
            checkpoints.save(state, step=step)
            returns = time.perf_counter() - began
            checkpoints.wait()
            finished = time.perf_counter() - began
            restored, found = timed(lambda: checkpoints.restore(state).state)
            assert all((found["params"][k] == x).all() for k, x in state["params"].items())
            yield {"returns": returns, "finished": finished, "restored": restored}


def other_rounds(args: argparse.Namespace) -> Generator[Times, None, None]:
    """Rounds in a process of the other environment, one for each line that it is told."""
    words = [args.other, __file__, "--rounds-of-other", str(args.megabytes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout
        while True:
            print(file=other.stdin, flush=True)
            yield json.loads(other.stdout.readline())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    logging.getLogger("absl").setLevel(logging.ERROR)
    if sys.argv[1:2] == ["--rounds-of-other"]:
        rounds = our_rounds(int(sys.argv[2]))
        for _ in sys.stdin:
            print(json.dumps(next(rounds)), flush=True)
        rounds.close()
    else:
        main()
