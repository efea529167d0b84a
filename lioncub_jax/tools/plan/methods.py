"""Methods that the planner compares: their code, what they send and what a device keeps.

`methods.json` has a row for each. Its numbers are per parameter, and a test holds them against the
transforms that the code makes. A row of 128 parameters has 1 bit for its abstention, or a bfloat16 scale.
PowerSGD's rank r is a share of the width w, as in the study: 32 bits r (w + 4 w) / (4 w^2) of a matrix of w
and 4 w. Local steps keep a copy of the parameters. 1-bit Adam has 15 % of its run in float32 (its paper
takes 15 to 25 %), which is 18.75 % of the steps to the loss: its row has the mean step.
"""

from typing import NamedTuple

from lioncub_jax.tools.plan.evidence import check_one_of, rows_of

BFLOAT16 = "-bfloat16"


class Scheme(NamedTuple):
    """A method that users can choose.

    Attributes:
      name: as in the evidence, but for means in bfloat16.
      code: how it is written in a program, without ``lioncub_jax.``.
      kind: "ours", "other" (those of `baselines`), or "mean" of gradients, with which all are compared.
      mean: bits that are all-reduced.
      up: bits that go to the owners, by an all-to-all.
      back: bits that come back, by an all-gather.
      each: bytes of optimizer state that every device keeps.
      shared: bytes of optimizer state that the workers share among them.
      packs: bytes of memory that packing, counting and unpacking pass through; 0: none of that.
      rounds: exchanges that follow each other.
      every: steps of a worker for each exchange.
    """

    name: str
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

    @property
    def two_levels(self) -> bool:
        """True where the devices of a worker can share its exchange."""
        return self.every == 1 and not self.name.startswith("powersgd")

    @property
    def learns(self) -> str:
        """Its name in the evidence: a mean in bfloat16 is taken to learn like one in float32."""
        return self.name.removesuffix(BFLOAT16)


SCHEMES = tuple(Scheme(**row) for row in rows_of("methods.json"))


def scheme_named(name: str) -> Scheme:
    """Finds the scheme of that name.

    Raises:
      ValueError: if there is none.

    Example:
      >>> scheme_named("vote").code
      'lion_cub(...)'
    """
    by_name = {one.name: one for one in SCHEMES}
    check_one_of("scheme", name, by_name)
    return by_name[name]


FLOAT32 = scheme_named("lion")
