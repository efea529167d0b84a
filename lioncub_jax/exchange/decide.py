"""Decisions of an owner: from the codes of all workers about a chunk of rows to one reply.

Each worker is the *owner* of one chunk of the rows, see `step`.

| decision | formula, over the n workers that vote | reply | source |
|---|---|---|---|
| ``majority()`` | ``u = sign(sum_i v_i)``, a tie is a fair bit | 1 bit | "MaVo", Distributed Lion |
| ``ternary()`` | ``u = sign(sum_i v_i)``, a tie is 0 | 2 bits | the same, to the letter |
| ``average()`` | ``u = sum_i v_i / (n max_code)`` | planes of the sum | "Avg", Distributed Lion |
| ``at_owner(tx)`` | ``u, s = tx(mean_i dequantize(q_i), s)`` | 1 to 8 bits or float32 | ours |

`votes` has what a decision is given and returns, and counts, and `at_owner` runs an optimizer. This
file names what users call: these decisions, and the replies for `at_owner`, which are `sign`, `codes` and
`values`. The reply `sign` and the decision `ternary` have the names of quantizers because they send the
same: a sign in one bit, and -1, 0 or +1 in two.
"""

from lioncub_jax.exchange.at_owner import at_owner, codes, sign, values
from lioncub_jax.exchange.quantize import Context, Quantizer
from lioncub_jax.exchange.votes import Decision, ReplyCodec, Vote, average, majority, ternary
from lioncub_jax.exchange.wires import Inbox, Reply

__all__ = [
    "Context",
    "Decision",
    "Inbox",
    "Reply",
    "ReplyCodec",
    "Vote",
    "at_owner",
    "average",
    "codes",
    "majority",
    "sign",
    "ternary",
    "values",
]


def default_for(quantizer: Quantizer) -> Decision:
    """The default decision on votes: `ternary` for codes with a zero, else `majority`."""
    with_zero = quantizer.vote is not None and quantizer.vote.midtread
    return ternary() if with_zero else majority()
