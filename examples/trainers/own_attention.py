"""A transformer whose attention is a shard_map of its own, heads cut over tensor, under one jax.jit.

    python examples/trainers/own_attention.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 4, "tensor": 2}
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 16, 64, 64, 4, 2
SPECS = {
    "qkv": P(None, None, "tensor", None),
    "join": P("tensor", None, None),
    "up": P(None, "tensor"),
    "down": P("tensor", None),
}


def init_params(key):
    shapes = {
        "qkv": (3, WIDTH, HEADS, WIDTH // HEADS),
        "join": (HEADS, WIDTH // HEADS, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    shapes = {"layers": [shapes] * LAYERS, "embed": (256, WIDTH), "out": (WIDTH, 256)}
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    scaled = [jax.random.normal(k, x) / np.sqrt(WIDTH) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, scaled)


def attend(q, k, v):
    """Each byte reads those before it; a device has some of the rows, and some of the heads."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)


def normed(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def build(mesh, learning_rate):
    """The first state, its matrices cut over tensor, and the jitted step."""
    specs = {"layers": [SPECS] * LAYERS, "embed": P(), "out": P(None, "tensor")}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.jit(init_params, out_shardings=shardings)(jax.random.key(0))
    tx = optax.lion(learning_rate)
    opt_state = tx.init(params)

    def forward(params, tokens):
        heads = P("data", None, "tensor", None)
        attention = jax.shard_map(attend, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads)
        x = params["embed"][tokens]
        for layer in params["layers"]:
            q, k, v = jnp.einsum("btw,nwhd->nbthd", normed(x), layer["qkv"])
            x = x + jnp.einsum("bthd,hdw->btw", attention(q, k, v), layer["join"])
            x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
        return normed(x) @ params["out"]

    def loss_fn(params, windows):
        logits = forward(params, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    @jax.jit
    def train_step(state, windows):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return (params, opt_state), train_step


def batches(mesh):
    return common.placed(common.text_batches(BATCH, CONTEXT), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches)
