"""MaxText's pre-training: a decoder of two layers, on its synthetic batch; it saves and goes on by itself.

    python examples/large/maxtext_pretrain.py

Without the lines that end with `# lioncub` the axis `diloco` is one more that the model is not cut over.
"""

import functools
import logging
import sys
from pathlib import Path

import jax
import maxtext
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train

import lioncub_jax as lc  # lioncub

STEPS, RATE, SEED, FOLDER, SCAN, FSDP = 40, 3e-3, 0, "runs/maxtext_pretrain", True, 1


def get_optimizer(config, rate, model, mesh):  # lioncub
    return lc.owner_adamw(rate, workers=lc.Workers(mesh, "diloco"))  # lioncub


def train_step(model, config, shardings, params_shardings, state, batch):  # lioncub
    step = functools.partial(plain_step, model, config, shardings, params_shardings)  # lioncub
    workers = lc.Workers(shardings.optimizer.step.mesh, "diloco")  # lioncub
    out = {"z_loss": "mean", "total_weights": "sum"}  # lioncub
    return lc.map_step(step, workers, out=out)(state, batch)  # lioncub


optimizers.get_optimizer = get_optimizer  # lioncub
plain_step, train.train_step = train.train_step, train_step  # lioncub

logging.basicConfig(stream=sys.stdout, level=logging.INFO, force=True)
options = {
    "base_output_directory": Path(FOLDER).absolute().parent, "run_name": Path(FOLDER).name,
    "hardware": "cpu", "skip_jax_distributed_system": True, "enable_goodput_recording": False,
    "enable_checkpointing": True, "async_checkpointing": False, "checkpoint_period": STEPS,
    "ici_diloco_parallelism": jax.device_count() // FSDP, "ici_fsdp_parallelism": FSDP,
    "dataset_type": "synthetic", "max_target_length": 64, "vocab_size": 256,
    "per_device_batch_size": 16 // jax.device_count(),
    "decoder_block": "llama2", "scan_layers": SCAN, "base_emb_dim": 64, "base_mlp_dim": 128,
    "base_num_decoder_layers": 2, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 16,
    "attention": "dot_product", "dtype": "float32", "matmul_precision": "highest",
    "steps": STEPS, "learning_rate": RATE, "warmup_steps_fraction": 0.0,
    "learning_rate_final_fraction": 1.0, "learning_rate_schedule_steps": 1000, "init_weights_seed": SEED,
    "adam_b2": 0.999, "adam_weight_decay": 1e-4,
}  # fmt: skip
base = Path(maxtext.__file__).parent / "configs/base.yml"
arguments = ["train", str(base), *[f"{name}={value}" for name, value in options.items()]]
if __name__ == "__main__":
    train.main(arguments)
