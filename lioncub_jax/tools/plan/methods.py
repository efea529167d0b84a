"""Methods that the planner compares: their code, what they send and what a device keeps.

`methods.json` has a row for each. Its numbers are per parameter, and a test holds them against the
transforms that the code makes. A row of 128 parameters has 1 bit for its abstention, or a bfloat16 scale.
PowerSGD's rank r is a share of the width w, as in the study: 32 bits r (w + 4 w) / (4 w^2) of a matrix of w
and 4 w. Local steps keep a copy of the parameters, and micro-steps the sum of gradients. 1-bit Adam has
15 % of its run in float32 (its paper takes 15 to 25 %), which is 18.75 % of the steps to the loss: its row
has the mean step.
"""

from typing import NamedTuple

from lioncub_jax.tools.plan.evidence import rows_of


class Scheme(NamedTuple):
    """A method that users can choose.

    Attributes:
      name: as in the evidence, but for means in bfloat16.
      title: for people.
      code: how it is written in a program, without ``lioncub_jax.``.
      kind: "ours", "other" (those of `baselines`), "mean" of gradients, with which all are compared, or
        "alone": one worker that takes all rows in micro-steps.
      mean: bits that are all-reduced.
      up: bits that go to the owners, by an all-to-all.
      back: bits that come back, by an all-gather.
      each: bytes of optimizer state that every device keeps.
      shared: bytes of optimizer state that the workers share among them.
      packs: bytes of memory that packing, counting and unpacking pass through; 0: none of that.
      rounds: exchanges that follow each other.
      every: steps of a worker for each exchange: local steps or micro-steps.
      two_levels: whether the devices of a worker can share its exchange.
      votes: whether workers who disagree may be a tie.
      orthogonalises: who iterates as Muon does, see `model.orthogonalising`: "owners", each for its own
        matrices, "workers", each for all, or "" for nobody.
    """

    name: str
    title: str
    code: str
    kind: str
    mean: float = 0.0
    up: float = 0.0
    back: float = 0.0
    each: float = 0.0
    shared: float = 0.0
    packs: float = 0.0
    rounds: int = 1
    every: int = 1
    two_levels: bool = True
    votes: bool = False
    orthogonalises: str = ""

    @property
    def learns(self) -> str:
        """Its name in the evidence: a mean in bfloat16 is taken to learn like one in float32."""
        return self.name.removesuffix("-bfloat16")


ALONE = {
    "adamw": Scheme("alone", "one worker alone", "optax.adamw(...)", "alone", each=8),
    "muon": Scheme(
        "alone-muon", "one worker, Muon", "optax.contrib.muon(...)", "alone", each=4,
        orthogonalises="workers",
    ),
}  # fmt: skip
"""One worker that takes the rows of all, by the method that it learns like."""
SCHEMES = {row["name"]: Scheme(**row) for row in rows_of("methods.json")}
"""All methods that the planner compares, by name."""
