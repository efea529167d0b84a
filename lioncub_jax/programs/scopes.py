"""Names in a program, by which its compiled text says what workers send. They change no instruction."""

import contextlib
import re
from typing import Any

import jax

DECLARED = "lioncub.declared"  # floats of a trainer that are meant to travel
DECIDED = "lioncub.decided"  # an update in which no single worker decides to communicate

# Under vmap votes are of no mesh, and of no interest.
VOTE = re.compile(r"lioncub\.up/workers\(([^)]*)\)of\(([^)]+)\)/")
BRANCH_BY_COUNT = re.compile(r"lioncub\.by_count/cond/branch_\d+")
MEANT = re.compile(r'op_name="[^"]*lioncub\.(?:declared|floats((?:\.\d+)*))[^"]*"')


def sent_by_workers(axis: tuple[str, ...]) -> contextlib.AbstractContextManager[None]:
    """Scope of what workers send, with their axes and the mesh; inside of "lioncub.up"."""
    sizes = ",".join(f"{n}:{k}" for n, k in jax.sharding.get_abstract_mesh().shape.items())
    return jax.named_scope(f"workers({','.join(axis)})of({sizes})")


def by_count() -> contextlib.AbstractContextManager[None]:
    """Scope of a branch that depends on a replicated count only, so that all workers take it."""
    return jax.named_scope("lioncub.by_count")


def floats(tree: Any) -> contextlib.AbstractContextManager[None]:
    """Scope of floats that are meant to travel between workers, with the sizes of the arrays."""
    sizes = sorted({x.size for x in jax.tree.leaves(tree)})
    return jax.named_scope(".".join(["lioncub.floats", *map(str, sizes)]))
