"""flax.nnx on Explicit axes with dropout: types say how parameters are cut, and Rngs go into the step.

    python examples/trainers/explicit_rngs.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import common
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

AXES, KIND, around = {"data": 4, "tensor": 2}, AxisType.Explicit, jax.set_mesh
CONTEXT, BATCH, WIDTH, HIDDEN = 8, 512, 32, 128


class NextByte(nnx.Module):
    """Guesses a byte of text from the eight before it; hidden units are cut over tensor."""

    def __init__(self, rngs):
        def param(init, shape, *names):
            return nnx.Param(init(rngs.params(), shape, out_sharding=P(*names)))

        normal, lecun = nnx.initializers.normal(0.1), nnx.initializers.lecun_normal()
        self.embed = param(normal, (256, WIDTH))
        self.up = param(lecun, (CONTEXT * WIDTH, HIDDEN), None, "tensor")
        self.down = param(lecun, (HIDDEN, 256), "tensor", None)

    def __call__(self, text, rngs):
        rows = P("data")
        x = self.embed[...].at[text].get(out_sharding=rows)
        x = nnx.relu(jnp.reshape(x, (len(text), -1), out_sharding=rows) @ self.up[...])
        keep = jax.random.bernoulli(
            rngs.dropout(), 0.9, x.shape, out_sharding=jax.typeof(x).sharding
        )
        return jnp.dot(jnp.where(keep, x / 0.9, 0), self.down[...], out_sharding=rows)


def build(mesh, learning_rate):
    """A model, its optimizer and random streams, and the jitted step."""
    model, rngs = NextByte(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    tx = optax.lion(learning_rate, weight_decay=0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, windows, rngs):
        logits = model(windows[:, :-1], rngs)
        correct = jax.nn.one_hot(windows[:, -1], 256)
        return optax.softmax_cross_entropy(logits, correct).mean()

    @nnx.jit
    def train_step(state, windows):
        model, optimizer, rngs = state
        loss, grads = nnx.value_and_grad(loss_fn)(model, windows, rngs)
        optimizer.update(model, grads)
        return state, {"loss": loss}

    return (model, optimizer, rngs), train_step


def batches(mesh):
    return common.placed(common.text_batches(BATCH, CONTEXT), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches, around, KIND)
