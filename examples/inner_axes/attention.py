"""A `shard_map` of the model itself, for attention over heads: in a worker it names inner axes alone."""

import common
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
workers = lc.Workers(mesh, "data")
heads = P(None, None, "tensor", None)  # batch, time, heads, width
specs = {"embed": P(), "qkv": heads, "out": P("tensor", None, None)}
shapes = {"embed": (256, 64), "qkv": (3, 64, 4, 16), "out": (4, 16, 256)}


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def loss_fn(params, windows):
    rows = lc.mesh.inner(P("data", None, "tensor", None))
    attention = jax.shard_map(
        attend, mesh=lc.mesh.inner(mesh), in_specs=(rows,) * 3, out_specs=rows
    )
    x = params["embed"][windows[:, :-1]]
    q, k, v = jnp.einsum("btw,nwhd->nbthd", x, params["qkv"])
    logits = jnp.einsum("bthd,hdw->btw", attention(q, k, v), params["out"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def train_step(state, windows):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, windows)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 3), strict=True))
params = {name: jax.random.normal(keys[name], shape) / 8 for name, shape in shapes.items()}
params = jax.device_put(params, workers.shardings(specs))
tx = lc.lion_cub(1e-3, workers=workers)
state = params, tx.init(params)
train_step = lc.map_step(train_step, workers)

if __name__ == "__main__":
    common.train(mesh, state, train_step)
