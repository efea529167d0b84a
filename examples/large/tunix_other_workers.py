"""Takes what tunix_peft.py saved to another number of workers; simulated devices of a CPU will do.

    JAX_NUM_CPU_DEVICES=4 python examples/large/tunix_other_workers.py   # as many as there were: out
    JAX_NUM_CPU_DEVICES=2 python examples/large/tunix_other_workers.py   # as many as there shall be: in

Then tunix_peft.py goes on. The old checkpoints stay, in a folder of another name.
"""

from pathlib import Path

import orbax.checkpoint as ocp
from flax import nnx
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix_peft import FOLDER, model, trainer, workers

import lioncub_jax as lc

folder = Path(FOLDER).absolute()
between = folder.with_name(f"{folder.name}-portable")
state = {"params": nnx.state(model, nnx.Param), "optimizer": trainer.optimizer}
if not between.exists():
    step = str(trainer.train_steps)
    ocp.PyTreeCheckpointer().save(between / step, lc.checkpoint.portable(state, workers))
    folder.rename(folder.with_name(f"{folder.name}-{workers.num_gradients}"))
else:
    [saved] = between.iterdir()
    state = lc.checkpoint.restore(saved, state, workers)
    nnx.update(model, state["params"])
    manager = CheckpointManager(str(folder))
    manager.save(int(saved.name), model, state["optimizer"], force=True)
    manager.close()
