"""What time to loss says to the planner: factors in steps, on its GPT."""

from report import Rows, rows_of
from study.evidence import Told, compared

from goal import curves
from goal.summary import LION_NAME, STEPS, curves_of
from lioncub_jax.planner import parameters_in, scheme_named

TASK, DATASET = "gpt", "standard library"
# The planner's schemes, and the option that a row must have to be of that.
SCHEMES: dict[str, tuple[str, int]] = {
    "Lion, float32": ("float32 Lion", 0),
    "AdamW, float32": ("float32 AdamW", 0),
    "1-bit vote": ("1-bit vote", 0),
    "owner, 3 bits": ("owner, 3 bits", 0),
    "AdamW, in codes": ("AdamW, 4 bits", 4),
    "PowerSGD, AdamW": ("PowerSGD, rank 16", 16),
    "PowerSGD, rank 4": ("PowerSGD, rank 4", 4),
    "PowerSGD, rank 4 in 6 bits": ("PowerSGD 4, 6 bits", 4),
    "1-bit Adam": ("1-bit Adam", 58),
    "local AdamW, averaged": ("2 alone, float32", 2),
    "2 steps alone, in codes": ("2 alone, 4 bits", 4),
    "2 steps alone, PowerSGD in 6 bits": ("2 alone, PowerSGD", 16),
}


def told(found: Rows) -> Told:
    """Of the curves of all contenders that the planner has a name for.

    Raises:
      ValueError: for rows of several numbers of workers.
    """
    lion = curves_of(found, LION_NAME, STEPS)
    if not lion:
        return Told({}, [])
    workers = {row["workers"] for row in rows_of(found, part="curve", steps=STEPS)}
    if len(workers) > 1:
        raise ValueError(f"rows of {sorted(workers)} workers cannot be compared: give those of one")
    about = {"task": TASK, "data": "alike", "workers": workers.pop()}
    factors = [
        {**about, "method": scheme_named(scheme).learns, **learned}
        for name, (scheme, option) in SCHEMES.items()
        if (learned := compared(curves_of(found, name, STEPS, option=option), lion))
    ]
    size = parameters_in(curves.shapes())
    task = {"dataset": DATASET, "parameters": size, "steps": STEPS}
    return Told({TASK: task}, factors)
