"""flax.nnx with nnx.Optimizer and nnx.jit; where parameters lie is written at each of them.

    python examples/trainers/nnx_optimizer.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import common
import jax
import optax
from flax import nnx

AXES = {"data": 4, "fsdp": 2}
CONTEXT, BATCH, WIDTH = 8, 256, 64


def cut(init, *names):
    return nnx.with_partitioning(init, names)


class NextByte(nnx.Module):
    """Guesses a byte of text from the eight before it."""

    def __init__(self, rngs):
        normal, lecun = nnx.initializers.normal(0.1), nnx.initializers.lecun_normal()
        self.embed = nnx.Embed(256, 32, embedding_init=cut(normal, None, "fsdp"), rngs=rngs)
        self.hidden = nnx.Linear(
            CONTEXT * 32, WIDTH, kernel_init=cut(lecun, "fsdp", None), rngs=rngs
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 256, kernel_init=cut(lecun, None, "fsdp"), rngs=rngs)

    def __call__(self, text):
        x = self.embed(text).reshape(len(text), -1)
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def build(mesh, learning_rate):
    """A model and its optimizer, each array made where its metadata says, and the jitted step."""
    with jax.set_mesh(mesh):
        model = NextByte(nnx.Rngs(0))
        tx = optax.lion(learning_rate, weight_decay=0.1)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, windows):
        logits = model(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()

    @nnx.jit
    def train_step(state, windows):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(loss_fn)(model, windows)
        optimizer.update(model, grads)
        return state, {"loss": loss}

    return (model, optimizer), train_step


def batches(mesh):
    return common.placed(common.text_batches(BATCH, CONTEXT), mesh, ("data", "fsdp"))


if __name__ == "__main__":
    common.main(AXES, build, batches)
