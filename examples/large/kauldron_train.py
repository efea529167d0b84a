"""Kauldron's `Trainer`: its loop, its data, its checkpoints, and a `TrainStep` whose step is mapped.

    python examples/large/kauldron_train.py

Without the lines that end with `# lioncub` its mesh is the same, and gradients are all-reduced.
"""

from pathlib import Path

import grain
import numpy as np
import optax
from flax import linen as nn
from kauldron import kd
from kauldron.train.metric_writer import NoopWriter

import lioncub_jax as lc  # lioncub

STEPS, RATE, SEED, FOLDER = 40, 1e-2, 0, "runs/kauldron_train"

workers = lc.Workers(kd.sharding.DEVICES_MESH, "devices")  # lioncub
tx = optax.adamw(RATE)
tx = lc.owner_adamw(RATE, workers=workers)  # lioncub
TrainStep = kd.train.TrainStep


class Mapped(kd.train.TrainStep):  # lioncub
    def _step(self, state, batch):  # lioncub
        def step(state, batch):  # lioncub
            state, context = super(Mapped, self)._step(state, batch)  # lioncub
            return state, context.replace(grads=None, opt_state=None)  # lioncub

        return lc.map_step(step, workers)(state, batch)  # lioncub


TrainStep = Mapped  # lioncub


class Images(grain.sources.RandomAccessDataSource):
    """Images of ten classes, 8 by 8 pixels, and their labels."""

    def __len__(self):
        return 12288

    def __getitem__(self, i):
        centers = np.random.default_rng(0).normal(size=(10, 64))
        draw = np.random.default_rng([0, int(i)])
        label = draw.integers(10)
        image = np.float32(centers[label] + 2.0 * draw.normal(size=64))
        return {"image": image, "label": np.array([label])}


class Model(nn.Module):
    image: kd.kontext.Key = "batch.image"

    @nn.compact
    def __call__(self, image):
        x = nn.relu(nn.Dense(256)(image))
        x = nn.Dropout(0.1, deterministic=not kd.nn.train_property())(x)
        return nn.Dense(10)(x)


class Shown(NoopWriter):
    def write_step_metrics(self, *, step, aux, **_):
        print(step, float(aux.compute(flatten=False).loss_values["xent"]))


trainer = kd.train.Trainer(
    seed=SEED, workdir=Path(FOLDER).absolute(), num_train_steps=STEPS, log_metrics_every=1,
    train_ds=kd.data.py.DataSource(data_source=Images(), shuffle=True, batch_size=256, num_workers=0),
    model=Model(),
    train_losses={
        "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.label")
    },
    trainstep=TrainStep(), optimizer=tx, writer=Shown(),
    checkpointer=kd.ckpts.Checkpointer(save_interval_steps=STEPS),
)  # fmt: skip
trainer.train()
