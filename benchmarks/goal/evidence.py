"""What time to loss says to the planner: factors in steps, on the GPT of the race."""

import math
from typing import Any

import jax
from flax import nnx
from study.evidence import Told, compared

from goal import curves, rows
from goal.summary import LION_NAME, STEPS

TASK, DATASET = "gpt", "standard library"
# The planner's names, and the option that a row must have to be of that method.
METHODS: dict[str, tuple[str, int]] = {
    "Lion, float32": ("lion", 0),
    "AdamW, float32": ("adamw", 0),
    "1-bit vote": ("vote", 0),
    "owner, 3 bits": ("owner-3", 0),
    "owner, 1 bit rotated": ("owner-1-faded", 0),
    "AdamW, in codes": ("adamw-4", 4),
    "PowerSGD, AdamW": ("powersgd-adamw-16", 16),
    "PowerSGD, rank 4": ("powersgd-adamw", 4),
    "PowerSGD, in 6 bits": ("powersgd-adamw-16-6", 16),
    "PowerSGD, rank 4 in 6 bits": ("powersgd-adamw-6", 4),
    "1-bit Adam": ("one-bit-adam", 58),
    "0/1 Adam": ("zero-one-adam", 0),
    "local AdamW, averaged": ("alone-2", 2),
    "2 steps alone, in codes": ("alone-2-4", 4),
    "2 steps alone, PowerSGD in 6 bits": ("alone-2-powersgd-16-6", 16),
    "DiLoCo, float32": ("diloco", 8),
}


def told(found: list[dict[str, Any]]) -> Told:
    """Of the curves of all contenders that the planner has a name for.

    Raises:
      ValueError: for rows of several numbers of workers.
    """
    lion = of(found, LION_NAME, 0)
    if not lion:
        return Told({}, [])
    workers = {row["workers"] for row in rows.of(found, part="curve", steps=STEPS)}
    if len(workers) > 1:
        raise ValueError(f"rows of {sorted(workers)} workers cannot be compared: give those of one")
    about = {"task": TASK, "data": "alike", "workers": workers.pop()}
    factors = [
        {**about, "method": method, **learned}
        for name, (method, option) in sorted(METHODS.items(), key=lambda one: one[1])
        if (learned := compared(of(found, name, option), lion))
    ]
    task = {"dataset": DATASET, "parameters": parameters(), "steps": STEPS}
    return Told({TASK: task}, factors)


def of(found: list[dict[str, Any]], name: str, option: int) -> dict[int, list[tuple[float, float]]]:
    """Curves by seed."""
    runs = rows.of(found, part="curve", contender=name, option=option, steps=STEPS)
    return {
        run["seed"]: list(zip(run["taken"], map(finite, run["loss"]), strict=True)) for run in runs
    }


def finite(loss: float) -> float:
    """A loss that is no number is infinite, for nothing is reached there."""
    return loss if math.isfinite(loss) else math.inf


def parameters() -> int:
    """Of the model."""
    shapes = nnx.eval_shape(lambda: curves.model_of(0))
    return sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))
