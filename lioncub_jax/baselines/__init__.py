"""Baselines of the papers, behind the interface of this library's optimizers; a file of a page each.

| baseline | worker sends | travels back | source |
|---|---|---|---|
| `global_gradients(tx)` | its gradient, float32 | (all-reduce) the mean | optax, on the mean |
| `one_bit_adam` | floats, then 1 bit and a scale for each row of 128 | the same | 2102.02888 |
| `powersgd` | two factors of each matrix, float32 | (all-reduce) their means | 1905.13727 |
| `diloco` | its difference of H steps: float32, or p bits and feedback | the mean, the same | 2311.08105 |

Workers may be in two levels, `Workers` with a ``group``: gradients are averaged inside a group, which
sends as one worker. `powersgd` has no two levels.

Where workers compress, one that has a value that is not finite, or is asked to ``abstain``, abstains
from the step, as in `communicate`; under `global_gradients` none can. A single worker compresses
nothing.

``lioncub_jax.audit.of(tx, params, workers)`` counts the bytes of each.
"""

from lioncub_jax.baselines.diloco import diloco
from lioncub_jax.baselines.one_bit_adam import one_bit_adam
from lioncub_jax.baselines.powersgd import powersgd

__all__ = ["diloco", "one_bit_adam", "powersgd"]
