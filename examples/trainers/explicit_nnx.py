"""flax.nnx on Explicit axes: rows and parameters are cut over fsdp, and products say where results lie.

    python examples/trainers/explicit_nnx.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import common
import jax
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

AXES, KIND, around = {"data": 4, "fsdp": 2}, AxisType.Explicit, jax.set_mesh
CONTEXT, BATCH, WIDTH = 8, 256, 64


def cut(init, *names):
    return nnx.with_partitioning(init, names)


class NextByte(nnx.Module):
    """Guesses a byte of text from the eight before it."""

    def __init__(self, rngs):
        normal, lecun = nnx.initializers.normal(0.1), nnx.initializers.lecun_normal()
        self.embed = nnx.Embed(256, 32, embedding_init=cut(normal, "fsdp", None), rngs=rngs)
        self.up = nnx.Linear(CONTEXT * 32, WIDTH, kernel_init=cut(lecun, "fsdp", None), rngs=rngs)
        self.down = nnx.Linear(WIDTH, 256, kernel_init=cut(lecun, None, "fsdp"), rngs=rngs)

    def __call__(self, text):
        rows = P(("data", "fsdp"))
        x = self.embed(text, out_sharding=rows).reshape(len(text), -1)
        return self.down(nnx.relu(self.up(x, out_sharding=rows)), out_sharding=rows)


def build(mesh, learning_rate):
    """A model and its optimizer, each array made where its metadata says, and the jitted step."""
    model = NextByte(nnx.Rngs(0))
    tx = optax.lion(learning_rate, weight_decay=0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, windows):
        logits, targets = model(windows[:, :-1]), windows[:, -1]
        losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, 256))
        return losses.mean(), logits.argmax(-1)

    @nnx.jit
    def train_step(state, windows):
        model, optimizer = state
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, guesses), grads = grad_fn(model, windows)
        optimizer.update(model, grads)
        return state, {"loss": loss, "right": (guesses == windows[:, -1]).mean()}

    return (model, optimizer), train_step


def batches(mesh):
    return common.placed(common.text_batches(BATCH, CONTEXT), mesh, ("data", "fsdp"))


if __name__ == "__main__":
    common.main(AXES, build, batches, around, KIND)
