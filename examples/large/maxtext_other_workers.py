"""Takes what maxtext_pretrain.py saved to another number of workers; simulated devices of a CPU will do.

    JAX_NUM_CPU_DEVICES=4 python examples/large/maxtext_other_workers.py   # as many as there were: out
    JAX_NUM_CPU_DEVICES=2 python examples/large/maxtext_other_workers.py   # as many as there shall be: in

Then maxtext_pretrain.py goes on. The old checkpoints stay, in a folder of another name.
"""

from pathlib import Path

import orbax.checkpoint as ocp
from flax import nnx
from maxtext.common import checkpointing
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils
from maxtext_pretrain import FOLDER, arguments

import lioncub_jax as lc

folder = Path(FOLDER).absolute()
between = folder.with_name(f"{folder.name}-portable")
config, recorder = train.initialize(arguments)
_, manager, _, _, mesh, *_, trained = train_utils.setup_train_loop(config, recorder)
workers = lc.Workers(mesh, "diloco")
# An nnx.State that MaxText makes of both has lost the classes that say what is each worker's own.
state = {"params": nnx.state(trained.model, nnx.Param), "optimizer": trained.optimizer}
if not between.exists():
    ocp.PyTreeCheckpointer().save(between, lc.checkpoint.portable(state, workers))
    folder.rename(folder.with_name(f"{folder.name}-{workers.num_gradients}"))
else:
    state = lc.checkpoint.restore(between, state, workers)
    nnx.update(trained.model, state["params"])
    trained.optimizer = state["optimizer"]
    checkpointing.maybe_save_checkpoint(manager, trained, config, None)
manager.close()
