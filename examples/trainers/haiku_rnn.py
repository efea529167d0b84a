"""dm-haiku with a recurrent network: an LSTM reads text byte by byte and guesses the next.

    python examples/trainers/haiku_rnn.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

from typing import NamedTuple

import common
import haiku as hk
import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 8}
CONTEXT, BATCH, WIDTH = 16, 64, 64


class TrainingState(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState


def next_bytes(text):
    """Logits ``[batch, time, 256]`` of what follows each byte."""
    core = hk.LSTM(WIDTH)
    x = hk.Embed(256, WIDTH, w_init=hk.initializers.RandomNormal(0.1))(text)
    x, _ = hk.dynamic_unroll(core, x, core.initial_state(len(text)), time_major=False)
    return hk.Linear(256)(x)


def build(mesh, learning_rate):
    """The first state, the same on all devices, and the jitted step."""
    network = hk.without_apply_rng(hk.transform(next_bytes))
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.lion(learning_rate, weight_decay=0.1),
    )

    windows = next(common.text_batches(1, CONTEXT))
    params = network.init(jax.random.key(0), windows[:, :-1])
    params = jax.device_put(params, NamedSharding(mesh, P()))
    state = TrainingState(params, tx.init(params))

    def loss_fn(params, windows):
        logits = network.apply(params, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    @jax.jit
    def update(state, windows):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, windows)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainingState(params, opt_state), {"loss": loss}

    return state, update


def batches(mesh):
    return common.placed(common.text_batches(BATCH, CONTEXT), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches)
