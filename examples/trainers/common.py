"""Parts of all trainers here: a mesh of CPU devices, real data, and the loop."""

import argparse
import dataclasses
import inspect
import subprocess
import typing

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits


def make_mesh(**axes):
    """A mesh such as ``make_mesh(data=4, fsdp=2)``; without devices enough, a CPU stands in for eight."""
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def text_batches(count, context):
    """Windows ``int32[count, context + 1]`` of Python's standard library, without end."""
    sources = [argparse, dataclasses, inspect, subprocess, typing]
    text = np.frombuffer("\n".join(map(inspect.getsource, sources)).encode(), np.uint8)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(len(text) - context, size=(count, 1))
        yield text[starts + np.arange(context + 1)].astype(np.int32)


def digit_batches(count):
    """Digits written by hand, ``float32[count, 8, 8]`` and ``int32[count]``, without end."""
    digits, rng = load_digits(), np.random.default_rng(0)
    while True:
        chosen = rng.integers(len(digits.target), size=count)
        yield (
            (digits.images[chosen] / 16).astype(np.float32),
            digits.target[chosen].astype(np.int32),
        )


def placed(batches, mesh):
    """Batches as arrays whose rows are cut over the workers."""
    for batch in batches:
        yield jax.device_put(batch, NamedSharding(mesh, P("data")))


def main(axes, build, batches):
    """Trains for some steps and prints the loss now and then."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # a CPU stands in for eight
    mesh = make_mesh(**axes)
    state, train_step = build(mesh, args.learning_rate)
    for step, batch in zip(range(args.steps), batches(mesh), strict=False):
        state, metrics = train_step(state, batch)
        if (step + 1) % 20 == 0:
            print(step + 1, jax.tree.map(lambda x: round(float(np.mean(x)), 3), metrics))
