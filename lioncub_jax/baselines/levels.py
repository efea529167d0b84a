"""Which mesh axes the workers of a baseline are on."""

from typing import Any

from lioncub_jax.mesh.placement import Workers, names_of
from lioncub_jax.wires import AxisName


def one_level(method: str, axis_name: AxisName | Workers) -> Any:
    """The axis of workers that are one device each, or shards of one.

    Raises:
      ValueError: for workers in two levels.
    """
    axis, group = names_of(axis_name)
    if group is not None:
        raise ValueError(
            f"{method} has no two levels, but the workers have {axis_name}: it would have to send what a "
            "group has in common. Give Workers without a group_axis; with the names of both axes in "
            "their axis_name each device is a worker"
        )
    return axis
