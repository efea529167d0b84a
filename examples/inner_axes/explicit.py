"""Explicit axes: a worker has the inner ones alone, and `lc.mesh.inner` takes out the axis of workers."""

import common
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

mesh = jax.make_mesh((4, 2), ("data", "fsdp"))  # Explicit is JAX's default
workers, rows = lc.Workers(mesh, "data"), P(("data", "fsdp"))


class NextByte(nnx.Module):
    def __init__(self, rngs):
        def param(shape):
            normal = nnx.initializers.lecun_normal()
            return nnx.Param(normal(rngs.params(), shape, out_sharding=P("fsdp", None)))

        self.embed, self.up, self.down = param((256, 32)), param((8 * 32, 256)), param((256, 256))

    def __call__(self, text, rngs):
        here = lc.mesh.inner(rows)
        x = self.embed[...].at[text].get(out_sharding=here)
        x = jnp.dot(x.reshape(len(text), -1), self.up[...], out_sharding=here)
        keep = jax.random.bernoulli(rngs.dropout(), 0.9, x.shape, out_sharding=here)
        x = jnp.where(keep, nnx.relu(x) / 0.9, 0)
        return jnp.dot(x, self.down[...], out_sharding=here)


def loss_fn(model, windows, rngs):
    logits = model(windows[:, :-1], rngs)
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(windows[:, -1], 256)).mean()


with jax.set_mesh(mesh):
    model, rngs = NextByte(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    optimizer = nnx.Optimizer(model, lc.lion_cub(1e-3, workers=workers), wrt=nnx.Param)
    state = model, optimizer, rngs


def train_step(state, windows):
    model, optimizer, rngs = state
    loss, grads = nnx.value_and_grad(loss_fn)(model, windows, rngs)
    optimizer.update(model, grads)
    return state, loss


train_step = lc.map_step(train_step, workers)

if __name__ == "__main__":
    common.train(mesh, state, train_step, rows)
