"""Linen with logical axis rules: momentum begins with the axis of the workers, which needs a rule."""

import common
import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import lioncub_jax as lc

windows = common.windows
RULES = (("data", "data"), ("batch", "data"), ("mlp", "tensor"))  # the first is for the workers
mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
workers = lc.Workers(mesh, "data")


def dense(features, *names):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    return nn.Dense(features, use_bias=False, kernel_init=init)


class NextByte(nn.Module):
    @nn.compact
    def __call__(self, text):
        x = nn.Embed(256, 32)(text).reshape(len(text), -1)
        x = nn.relu(dense(256, "embed", "mlp")(x))
        return dense(256, "mlp", "embed")(nn.with_logical_constraint(x, ("batch", "mlp")))


def loss_fn(params, windows):
    logits = model.apply({"params": params}, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


def init(key):
    params = model.init(key, windows[:, :-1])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def step(state, windows):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, windows)
    return state.apply_gradients(grads=grads), loss


model, key = NextByte(), jax.random.key(0)
tx = lc.lion_cub(1e-3, workers=workers)
with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
    lies = nn.get_partition_spec(jax.eval_shape(init, key))
    shardings = nn.logical_to_mesh_sharding(lies, mesh, RULES)
    state = nn.unbox(jax.jit(init, out_shardings=shardings)(key))
    train_step = lc.map_step(step, workers)

if __name__ == "__main__":
    common.train(mesh, state, train_step, rules=RULES)
