"""Steps to the goal times milliseconds of a step: who is first."""

import math
from typing import Any

from goal import rows
from goal.contenders import CONTENDERS, Choice

Rows = list[dict[str, Any]]


def best_choice(found: Rows, name: str) -> Choice:
    """The choice with the least loss at the end of its run.

    Raises:
      ValueError: where it is not tuned yet.
    """
    contender = CONTENDERS[name]
    if contender.like:
        return best_choice(found, contender.like)
    tuned = {
        Choice(row["rate"], row["option"]): row["loss"][-1]
        for row in rows.of(found, part="tuning", contender=name)
    }
    missing = [choice for choice in contender.choices if choice not in tuned]
    if missing:
        raise ValueError(f"{name} is not tuned yet: run --part tuning first")
    last = {choice: loss if math.isfinite(loss) else math.inf for choice, loss in tuned.items()}
    return min(contender.choices, key=last.__getitem__)
