"""Linen and `TrainState`, with parameters that are cut over fsdp."""

import common
import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

windows = common.windows
mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
workers, rows = lc.Workers(mesh, "data"), P(("data", "fsdp"))


class NextByte(nn.Module):
    @nn.compact
    def __call__(self, text):
        x = nn.Embed(256, 32)(text).reshape(len(text), -1)
        return nn.Dense(256)(nn.gelu(nn.Dense(256)(x)))


def loss_fn(params, windows):
    logits = model.apply({"params": params}, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


model = NextByte()
params = model.init(jax.random.key(0), windows[:1, :-1])["params"]
specs = jax.tree.map(lambda x: P("fsdp", *[None] * (x.ndim - 1)), params)
params = jax.device_put(params, workers.shardings(specs))
tx = lc.lion_cub(1e-3, workers=workers)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state, windows):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, windows)
    return state.apply_gradients(grads=grads), loss


train_step = lc.map_step(train_step, workers)

if __name__ == "__main__":
    common.train(mesh, state, train_step, rows)
