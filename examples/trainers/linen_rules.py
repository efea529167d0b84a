"""flax.linen with logical axis rules, as large trainers of JAX have it: the state is made where it lies.

    python examples/trainers/linen_rules.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import contextlib

import common
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 4, "tensor": 2}
CONTEXT, BATCH, WIDTH, LAYERS = 16, 64, 64, 2
RULES = (
    ("batch", "data"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
)  # what has no rule is not cut


def dense(features, *names):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    return nn.Dense(features, use_bias=False, kernel_init=init)


class Mixer(nn.Module):
    """What was before is mixed in by running means; then a feed-forward layer."""

    @nn.compact
    def __call__(self, x):
        seen = jnp.cumsum(nn.LayerNorm()(x), axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        hidden = nn.gelu(dense(4 * WIDTH, "embed", "mlp")(jnp.concatenate([x, seen], -1)))
        hidden = nn.with_logical_constraint(hidden, ("batch", "length", "mlp"))
        x = x + dense(WIDTH, "mlp", "embed")(hidden)
        return nn.with_logical_constraint(x, ("batch", "length", "embed"))


class LanguageModel(nn.Module):
    """The next byte from the bytes before it."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.with_logical_partitioning(nn.initializers.normal(0.1), ("vocab", "embed"))
        x = nn.Embed(256, WIDTH, embedding_init=table)(tokens)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        for _ in range(LAYERS):
            x = Mixer()(x)
        return dense(256, "embed", "vocab")(nn.LayerNorm()(x))


@contextlib.contextmanager
def around(mesh):
    """Where the names in the model mean something: around all that is traced."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield


def build(mesh, learning_rate):
    """The first state, made in the devices' memory as the rules say, and the jitted step."""
    model = LanguageModel()
    tokens = jnp.zeros((BATCH, CONTEXT), jnp.int32)
    tx = optax.lion(learning_rate)

    def init(key):
        params = model.init(key, tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    abstract = jax.eval_shape(init, jax.random.key(0))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)
    state = nn.unbox(jax.jit(init, out_shardings=shardings)(jax.random.key(0)))

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    rows = NamedSharding(mesh, P("data"))
    train_step = jax.jit(
        step, in_shardings=(shardings, rows), out_shardings=(shardings, None), donate_argnums=0
    )
    return state, train_step


def batches(mesh):
    return common.placed(common.text_batches(BATCH, CONTEXT), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches, around)
