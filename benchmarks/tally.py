"""Counting votes on packed words against counting them unpacked.

    python benchmarks/tally.py

The owner's whole decision for 33.5M parameters (its share of them is 1/W, from W workers): the tally of
the codes, the tally of who voted on each row, the comparison with half of the votes cast, and the fair
coin for ties. Against it, for the same words: unpack every vote to an integer, sum over the workers,
compare, pack again. Both take turns in one process; figures are medians over rounds.
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from rich.console import Console
from rich.table import Table

from lioncub_jax import bits, decide, quantize
from lioncub_jax.decide import Slice
from lioncub_jax.wires import Inbox

PARAMETERS = 2**25


def by_adders(payload: jax.Array, voted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the library does: ``uint32[W, words]`` and row words ``uint32[W, blocks]`` to one of each."""
    workers, words = payload.shape
    rows = words // bits.WORDS_PER_ROW
    everyone = jnp.ones(workers, jnp.uint32)
    inbox = Inbox([payload[:, None]], voted[:, None], None, everyone, jnp.uint32(workers))
    where = Slice(1, rows, workers, quantize.sign(), jnp.float32, None)
    reply = decide.majority().encode(inbox.tally(where), bits.coin(0, words, 0)[None])
    assert reply.rows is not None
    return reply.planes[0][0], reply.rows[0]


def by_unpacking(payload: jax.Array, voted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One integer for each vote."""
    rows = payload.shape[-1] // bits.WORDS_PER_ROW
    votes = bits.unpack(payload[None], rows).astype(jnp.int32)
    cast = jnp.sum(bits.unpack_rows(voted, rows).astype(jnp.int32), 0)
    margin = 2 * jnp.sum(votes, 0) - cast[:, None]
    heads = bits.unpack(bits.coin(0, payload.shape[-1], 0)[None], rows) > 0
    return bits.pack((margin > 0) | ((margin == 0) & heads))[0], bits.pack_rows(cast > 0)


def measure(workers: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of both ways, taking turns; their answers must be equal."""
    rng = np.random.default_rng(workers)
    rows = PARAMETERS // workers // bits.ROW
    words = rng.integers(0, 2**32, (workers, rows * bits.WORDS_PER_ROW), np.uint32)
    voted = np.full((workers, bits.row_words(rows)), 2**32 - 1, np.uint32)
    arrays = jnp.asarray(words), jnp.asarray(voted)
    ways: dict[str, Any] = {"adders": jax.jit(by_adders), "unpacked": jax.jit(by_unpacking)}
    answers = [jax.block_until_ready(way(*arrays)) for way in ways.values()]
    for mine, theirs in zip(*answers, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way(*arrays))
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    table = Table("workers", "adders ms (median)", "min", "max", "unpacked ms (median)", "speedup")
    summary: dict[str, Any] = {"benchmark": "tally", "parameters": PARAMETERS}
    for workers in (4, 8, 16, 32, 64):
        times = measure(workers, args.rounds)
        mine, theirs = times["adders"], times["unpacked"]
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        ms, slow, speedup = (statistics.median(x) for x in (mine, theirs, ratios))
        row = [f"{x:.3f}" for x in (ms, min(mine), max(mine), slow)]
        table.add_row(str(workers), *row, f"{speedup:.1f}")
        summary |= {f"ms_w{workers}": ms, f"speedup_vs_unpack_w{workers}": speedup}
    Console(width=110).print(table)
    report.finish(summary | {"rounds": args.rounds}, args.save)


if __name__ == "__main__":
    main()
