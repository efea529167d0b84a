"""An nnx module whose metadata says how its parameters are cut, and so is the state of the optimizer."""

import common
import jax
import optax
from flax import nnx
from jax.sharding import AxisType

import lioncub_jax as lc

mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
workers = lc.Workers(mesh, "data")


class NextByte(nnx.Module):
    def __init__(self, rngs):
        cut = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.Linear(8 * 32, 256, kernel_init=cut, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(256, 256, kernel_init=cut, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text).reshape(len(text), -1)
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def loss_fn(model, windows):
    logits = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


with jax.set_mesh(mesh):
    model = NextByte(nnx.Rngs(0))
    state = model, nnx.Optimizer(model, lc.lion_cub(1e-3, workers=workers), wrt=nnx.Param)


def train_step(state, windows):
    model, optimizer = state
    loss, grads = nnx.value_and_grad(loss_fn)(model, windows)
    optimizer.update(model, grads)
    return state, loss


train_step = lc.map_step(train_step, workers)

if __name__ == "__main__":
    common.train(mesh, state, train_step)
