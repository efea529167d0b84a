"""Takes what maxtext_pretrain.py saved to another number of workers; simulated devices of a CPU will do.

    JAX_NUM_CPU_DEVICES=4 python examples/large/maxtext_other_workers.py   # as many as there were: out
    JAX_NUM_CPU_DEVICES=2 python examples/large/maxtext_other_workers.py   # as many as there shall be: in

Then maxtext_pretrain.py goes on. The old checkpoints stay, in a folder of another name.
"""

from pathlib import Path

import orbax.checkpoint as ocp
from flax import nnx
from maxtext.common import checkpointing
from maxtext.utils import train_utils
from maxtext_pretrain import FOLDER, arguments, train

import lioncub_jax as lc

config, recorder = train.initialize(arguments)
_, manager, _, _, mesh, *_, state = train_utils.setup_train_loop(config, recorder)
workers = lc.Workers(mesh, "diloco")
folder = Path(FOLDER).absolute()
between = folder.with_name(f"{folder.name}-portable")
parts = {"params": nnx.state(state.model, nnx.Param), "optimizer": state.optimizer}
if not between.exists():
    step = str(manager.latest_step())
    ocp.PyTreeCheckpointer().save(between / step, lc.checkpoint.portable(parts, workers))
    folder.rename(folder.with_name(f"{folder.name}-{workers.count}"))
else:
    [saved] = between.iterdir()
    parts = lc.checkpoint.restore(saved, parts, workers)
    nnx.update(state.model, parts["params"])
    nnx.update(state.optimizer, nnx.state(parts["optimizer"]))
    checkpointing.maybe_save_checkpoint(manager, nnx.state(state), config, None)
    checkpointing.wait_until_finished(manager)
