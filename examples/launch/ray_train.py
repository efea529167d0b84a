"""Ray Train: one worker on each node, started again from the newest checkpoint when a node is lost.

    python examples/launch/ray_train.py    # on a node of the cluster; options of train_gpt.py may follow

Change: the numbers of nodes and of GPUs of a node (and --mesh with them), and the two folders.
"""

import contextlib
import os
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

HOME = os.path.expanduser("~")
PROJECT = os.environ.get("PROJECT", f"{HOME}/lioncub_jax")  # the same path on every node
RUN = os.environ.get("RUN", f"{HOME}/runs/gpt")  # on storage that all nodes share
NODES, GPUS = int(os.environ.get("NODES", "4")), int(os.environ.get("GPUS", "8"))

OPTIONS = f"""
--distributed
--mesh data={NODES},group={max(1, GPUS)}
--batch 64
--steps 20000
--checkpoint {RUN}/checkpoints --save-every 500 --resume
--stopped-status 75
--out {RUN}/results
"""


@contextlib.contextmanager
def stopping():
    """In place of SIGTERM, which a worker's thread does not hear: Ray says that a node will be taken."""
    yield lambda step: step % 10 == 0 and ray.train.get_preemption_info() is not None


def work(config):
    """Of each worker; --distributed raises an error if Ray has not joined it to the others."""
    sys.path[:0] = [PROJECT, f"{PROJECT}/examples"]
    import train_gpt  # and with it JAX, here and not where the driver is

    train_gpt.main(config["options"], stopping)


def main():
    resources = {"GPU": GPUS} if GPUS else {"CPU": 1}
    trainer = JaxTrainer(
        work,
        train_loop_config={"options": [*OPTIONS.split(), *sys.argv[1:]]},
        # Ray joins workers where GPUs are asked for, and on CPUs by this option and JAX_PLATFORMS=cpu.
        jax_config=JaxConfig(use_gpu=True),
        # All workers of a node would be given its first GPUs, so there is one on each.
        scaling_config=ScalingConfig(
            num_workers=NODES, use_gpu=GPUS > 0, resources_per_worker=resources,
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(
            name="train-gpt", storage_path=f"{RUN}/ray", failure_config=FailureConfig(max_failures=3),
            worker_runtime_env={"env_vars": {} if GPUS else {"JAX_PLATFORMS": "cpu"}},
        ),
    )  # fmt: skip
    trainer.fit()


if __name__ == "__main__":
    main()
