"""numpyro's `SVI`: a Bayesian network of two layers, and a guide of normals; orbax saves its state.

    python examples/large/numpyro_svi.py

Without the lines that end with `# lioncub` it trains on one device.
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import orbax.checkpoint as ocp
from etils import epath
from numpyro.infer import SVI, Trace_ELBO, init_to_sample
from numpyro.infer.autoguide import AutoNormal

import lioncub_jax as lc  # lioncub

STEPS, RATE, SEED, FOLDER = 40, 1e-2, 0, "runs/numpyro_svi"
TOTAL = 4096  # images that there are

workers = lc.Workers.one_per_device()  # lioncub
tx = optax.adamw(RATE)
tx = lc.owner_adamw(RATE, workers=workers)  # lioncub


def batch(step, rows=256):
    """Images of ten classes, 8 by 8 pixels, and their labels."""
    draw = np.random.default_rng([SEED, step])
    centers = np.random.default_rng(0).normal(size=(10, 64))
    labels = draw.integers(0, 10, rows)
    return (centers[labels] + 2.0 * draw.normal(size=(rows, 64))).astype(np.float32), labels


def model(batch):
    images, labels = batch
    hidden = numpyro.sample("hidden", dist.Normal(0, 0.1).expand([64, 64]).to_event(2))
    last = numpyro.sample("last", dist.Normal(0, 0.1).expand([64, 10]).to_event(2))
    logits = jax.nn.relu(images @ hidden) @ last
    # The likelihood of these rows counts for all images: a worker's too, so that the prior counts once.
    with numpyro.plate("rows", TOTAL, subsample_size=len(images)):
        numpyro.sample("label", dist.Categorical(logits=logits), obs=labels)


guide = AutoNormal(model, init_loc_fn=init_to_sample, init_scale=0.01)
svi = SVI(model, guide, numpyro.optim.optax_to_numpyro(tx), Trace_ELBO())
state = svi.init(jax.random.key(SEED), batch(0))
step = jax.jit(svi.update)
step = lc.map_step(svi.update, workers)  # lioncub
with ocp.CheckpointManager(epath.Path(FOLDER).resolve()) as manager:
    start = 0 if manager.latest_step() is None else manager.latest_step() + 1
    if start:
        state = manager.restore(start - 1, args=ocp.args.StandardRestore(state))
    for i in range(start, STEPS):
        state, loss = step(state, batch(i))
        print(i, float(loss) / TOTAL)
    manager.save(STEPS - 1, args=ocp.args.StandardSave(state))
