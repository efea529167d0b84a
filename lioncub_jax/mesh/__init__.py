"""Workers on a mesh: their axes, the specs of arrays, and several processes."""

from lioncub_jax.mesh.hosts import check_same_step, end_on_error
from lioncub_jax.mesh.placement import Workers, two_level_mesh
from lioncub_jax.mesh.specs import inner, specs_of
from lioncub_jax.mesh.start import join

__all__ = [
    "Workers",
    "check_same_step",
    "end_on_error",
    "inner",
    "join",
    "specs_of",
    "two_level_mesh",
]
