"""The JAX side of the race: every scheme of the planner that is no peer, as its users would write it."""

from collections.abc import Callable

import jax.numpy as jnp
import optax

import lioncub_jax as lc
from lioncub_jax.planner.model import SILENT

AXIS = "data"
RATE = 1e-4
ALONE = SILENT.name  # each worker trains by itself


def _cub(**options: object) -> optax.GradientTransformation:
    return lc.lion_cub(RATE, axis_name=AXIS, **options)


def _owner(p: int) -> optax.GradientTransformation:
    return _coded(lc.quantize.error_feedback(lc.quantize.midrise(p)))


def _coded(quantizer: lc.quantize.Quantizer) -> optax.GradientTransformation:
    return lc.owner_lion(RATE, axis_name=AXIS, quantizer=quantizer)


def _mean(dtype: object = jnp.float32) -> optax.GradientTransformation:
    return lc.global_gradients(optax.lion(RATE), AXIS, dtype)


METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    ALONE: _mean,  # over a mesh of one device, where nothing is sent
    "float32 Lion": _mean,
    "bfloat16 Lion": lambda: _mean(jnp.bfloat16),
    "1-bit vote": _cub,
    "2-bit vote": lambda: _cub(quantizer=lc.quantize.midrise(2)),
    "4-bit vote": lambda: _cub(quantizer=lc.quantize.midrise(4)),
    "average": lambda: lc.distributed_lion(RATE, axis_name=AXIS, average=True),
    "ternary": lambda: _cub(quantizer=lc.quantize.ternary()),
    "gathered": lambda: _cub(wire=lc.wires.gathered()),
    "int8 counts": lambda: _cub(wire=lc.wires.counts()),
    "integer(8) counts": lambda: _cub(quantizer=lc.quantize.integer(8), wire=lc.wires.counts()),
    "lanes": lambda: _cub(wire=lc.wires.lanes()),
    "owner, 1 bit": lambda: _owner(1),
    "owner, 1 bit rotated": lambda: _coded(lc.quantize.rotated_sign()),
    "owner, 2 bits": lambda: _owner(2),
    "owner, 3 bits": lambda: _owner(3),
}
