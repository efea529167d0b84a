"""Tunix's `PeftTrainer`: a Qwen3 of two layers, all of it or adapters by qwix; it saves by itself.

    python examples/large/tunix_peft.py

Without the lines that end with `# lioncub` its mesh is the same, and gradients are all-reduced.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.sft import hooks, peft_trainer

import lioncub_jax as lc  # lioncub

STEPS, RATE, SEED, FOLDER, LORA, FSDP = 40, 3e-3, 0, "runs/tunix_peft", False, 1

# The workers' axis is in front of those over which the model is cut.
shape = jax.device_count() // FSDP, FSDP, 1
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "tp"))
workers = lc.Workers(mesh, "data")  # lioncub
tx = optax.adamw(RATE)
tx = lc.owner_adamw(RATE, workers=workers)  # lioncub
Trainer = peft_trainer.PeftTrainer


class Mapped(peft_trainer.PeftTrainer):  # lioncub
    def create_train_step_fn(self):  # lioncub
        return lc.map_step(super().create_train_step_fn(), workers)  # lioncub


Trainer = Mapped  # lioncub


def batches():
    """Counting by sevens, from anywhere, up to 17 to 33 tokens."""
    for step in range(STEPS):
        draw = np.random.default_rng([SEED, step])
        tokens = (draw.integers(0, 512, (16, 1)) + 7 * np.arange(33)) % 512
        mask = np.arange(33) < draw.integers(17, 34, (16, 1))
        # Each process gives its rows.
        tokens, mask = [
            np.split(x, jax.process_count())[jax.process_index()] for x in (tokens, mask)
        ]
        yield peft_trainer.TrainingInput(input_tokens=tokens.astype(np.int32), input_mask=mask)


def model_input(batch):
    rows, length = batch.input_tokens.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
        "attention_mask": jnp.broadcast_to(causal, (rows, length, length)),
    }


class Shown(hooks.TrainingHooks):
    def on_train_step_end(self, trainer, step, loss):
        print(step - 1, float(loss))

    def ignored(self, *args):
        pass

    on_train_start = on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = (
        ignored
    )


with mesh:
    config = ModelConfig(
        num_layers=2, vocab_size=512, embed_dim=64, hidden_dim=256, num_heads=4, head_dim=16,
        num_kv_heads=2, rope_theta=10000, norm_eps=1e-6,
    )  # fmt: skip
    model = Qwen3(config, rngs=nnx.Rngs(SEED))
    if LORA:
        adapters = qwix.LoraProvider(
            module_path=".*(q|k|v|o|gate|up|down)_proj", rank=8, alpha=16.0
        )
        model = qwix.apply_lora_to_model(model, adapters, **model.get_model_input())
    state = nnx.state(model)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nnx.get_partition_spec(state))
    nnx.update(model, jax.device_put(state, shardings))
    folder = str(epath.Path(FOLDER).resolve())
    options = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000, max_steps=STEPS, data_sharding_axis=(("data", "fsdp"),),
        checkpoint_root_directory=folder,
    )  # fmt: skip
    trainer = Trainer(model, tx, options)
    trainer.with_gen_model_input_fn(model_input)
    trainer.with_training_hooks(Shown())
    if __name__ == "__main__":
        trainer.train(batches())
