"""A small language model trained the usual way: flax.linen, TrainState, jax.jit, parameters cut over fsdp.

    python examples/trainers/linen_fsdp.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import functools

import common
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 4, "fsdp": 2}
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 32, 32, 64, 4, 2


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what it read."""

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class LanguageModel(nn.Module):
    """The next byte from the bytes before it."""

    @nn.compact
    def __call__(self, tokens):
        place = self.param("place", nn.initializers.normal(0.02), (CONTEXT, WIDTH))
        x = nn.Embed(256, WIDTH)(tokens) + place
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


def fsdp_spec(x, size):
    """Cuts the largest dimension that the axis divides."""
    fitting = [(n, dim) for dim, n in enumerate(x.shape) if n % size == 0]
    cut = max(fitting, default=(0, None))[1]
    return P(*["fsdp" if dim == cut else None for dim in range(x.ndim)])


def build(mesh, learning_rate):
    """The first state, its parameters cut over fsdp, and the jitted step."""
    model = LanguageModel()
    params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    specs = jax.tree.map(lambda x: fsdp_spec(x, mesh.shape["fsdp"]), params)
    params = jax.device_put(params, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))
    tx = optax.lion(learning_rate, weight_decay=0.1)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        correct = jnp.argmax(logits, -1) == batch[:, 1:]
        return losses.mean(), correct.mean()

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        (loss, accuracy), grads = grad_fn(state.params, batch)
        state = state.apply_gradients(grads=grads)
        return state, {"loss": loss, "accuracy": accuracy}

    return state, train_step


def batches(mesh):
    return common.placed(common.text_batches(BATCH, CONTEXT), mesh, ("data", "fsdp"))


if __name__ == "__main__":
    common.main(AXES, build, batches)
