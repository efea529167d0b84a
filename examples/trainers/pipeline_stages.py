"""A model whose layers lie on stages, filled by GPipe: a shard_map with ppermute from stage to stage.

    python examples/trainers/pipeline_stages.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/pipeline.md shows the lines that make its workers vote.
"""

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 4, "stage": 2}
CONTEXT, BATCH, WIDTH, DEPTH = 8, 128, 128, 4
MICRO = 4  # parts of a batch that follow each other through the stages


def init_params(key):
    """A way in, layers of one shape stacked, and a way out."""
    embed, first, layers, out = jax.random.split(key, 4)
    normal = jax.random.normal
    return {
        "embed": 0.1 * normal(embed, (256, 32)),
        "first": normal(first, (CONTEXT * 32, WIDTH)) / np.sqrt(CONTEXT * 32),
        "layers": normal(layers, (DEPTH, WIDTH, WIDTH)) / np.sqrt(WIDTH),
        "out": normal(out, (WIDTH, 256)) / np.sqrt(WIDTH),
    }


def apply_layers(layers, x):
    return lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w), None), x, layers)[0]


def gpipe(layers, x):
    """Applies all stages to ``x [rows, width]``; each runs its own layers, on one part after another."""
    stage, last = lax.axis_index("stage"), lax.axis_size("stage") - 1
    parts = x.reshape(MICRO, -1, x.shape[-1])

    def tick(came, i):
        part = jnp.where(stage == 0, parts[jnp.minimum(i, MICRO - 1)], came)
        part = apply_layers(layers, part)
        return lax.ppermute(part, "stage", [(s, s + 1) for s in range(last)]), part

    empty = lax.pcast(jnp.zeros_like(parts[0]), "stage", to="varying")
    _, made = lax.scan(tick, empty, jnp.arange(MICRO + last))
    made = jnp.where(
        stage == last, made[last:], 0
    )  # before, the last stage waited for the first part
    return lax.psum(made, "stage").reshape(x.shape)


def build(mesh, learning_rate):
    """The first state, its layers cut over the stages, and the jitted step."""
    specs = {"embed": P(), "first": P(), "layers": P("stage"), "out": P()}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.device_put(init_params(jax.random.key(0)), shardings)
    tx = optax.lion(learning_rate, weight_decay=0.1)
    opt_state = tx.init(params)

    def loss_fn(params, windows):
        x = params["embed"][windows[:, :-1]].reshape(len(windows), -1) @ params["first"]
        rows = P("data")
        stages = jax.shard_map(gpipe, mesh=mesh, in_specs=(P("stage"), rows), out_specs=rows)
        logits = stages(params["layers"], x) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()

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
