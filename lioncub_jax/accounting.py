"""Bytes per step: what the wire predicts, beside what the compiled program sends.

`predict` needs no device: it counts from the shapes. `compiled.collectives` reads the collectives out
of a compiled step. The two must agree, and a benchmark and a test say that they do.
"""

from typing import Any, NamedTuple

import jax
from rich.table import Table

from lioncub_jax import checks, compiled, decide, layout, quantize, wires
from lioncub_jax.ballots import Quantizer
from lioncub_jax.decide import Down, Owner
from lioncub_jax.wires import Wire


class Traffic(NamedTuple):
    """What one worker sends in one step.

    Attributes:
      scheme: the quantiser, the wire and what comes back, for people.
      workers: how many workers.
      parameters: elements that are voted on.
      sent_bytes: bytes that each worker sends, padding and all side information included.
    """

    scheme: str
    workers: int
    parameters: int
    sent_bytes: float

    @property
    def bits_per_parameter(self) -> float:
        """Bits sent by each worker for each parameter, up and down together."""
        return 8 * self.sent_bytes / max(self.parameters, 1)

    @property
    def share_of_float32(self) -> float:
        """Against an all-reduce of float32 gradients."""
        dense = float32_all_reduce_bytes(self.parameters, self.workers)
        return self.sent_bytes / dense if dense else 0.0


def predict(
    params: Any,
    workers: int,
    *,
    up: Quantizer | None = None,
    owner: Owner | None = None,
    down: Down | None = None,
    wire: Wire | None = None,
    bucket_size: int | None = None,
) -> Traffic:
    """Predicts what each worker sends in a step of `communicate` with the same parts.

    Args:
      params: tree of arrays or ``jax.ShapeDtypeStruct``; only sizes matter.
      workers: how many workers.
      up: as in `communicate`, like all arguments that follow.
      owner: as in `communicate`.
      down: as in `communicate`.
      wire: as in `communicate`.
      bucket_size: as in `communicate`.

    Returns:
      A ``Traffic``; one worker sends nothing.

    Raises:
      ValueError: for fewer than one worker, or more than the quantiser or wire can count.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import accounting
      >>> round(accounting.predict({"w": jnp.ones((1024, 1024))}, 8).bits_per_parameter, 2)
      1.78
    """
    checks.check_count(f"workers={workers!r}", workers)
    up = up or quantize.sign()
    owner = owner or decide.count()
    down = down or decide.fitting(up)
    wire = wire or wires.two_phase()
    checks.check_parts(up, owner, down, wire)
    leaves = jax.tree.leaves(params)
    buckets = layout.buckets(leaves, workers, up.rows_per_step, bucket_size)
    sent = [wire.sent(up, owner.needs_values, down, b, workers) for b in buckets if workers > 1]
    result = f"{owner.name}, {down.name}" if owner.needs_values else down.name
    scheme = f"{up.name}, {wire.name}, {result}"
    return Traffic(scheme, workers, sum(leaf.size for leaf in leaves), sum(sent))


def float32_all_reduce_bytes(parameters: int, workers: int) -> float:
    """Bytes that each worker sends for an all-reduce of float32 gradients by the best algorithm."""
    return 2 * (workers - 1) / workers * 4 * parameters


def table(traffics: list[Traffic], measured: dict[Traffic, float] | None = None) -> Table:
    """A table for people: predicted bytes, and compiled ones where they are known.

    Args:
      traffics: rows.
      measured: bytes that a worker sends by the compiled program.

    Returns:
      A ``rich`` table.
    """
    measured = measured or {}
    out = Table("scheme", "workers", "sent per worker", "bits/param", "x float32", "compiled")
    for t in traffics:
        seen = f"{measured[t]:,.0f} B" if t in measured else ""
        share = f"{t.share_of_float32:.4f}"
        row = f"{t.sent_bytes:,.0f} B", f"{t.bits_per_parameter:.3f}", share, seen
        out.add_row(t.scheme, str(t.workers), *row)
    return out


def compiled_bytes(program: Any, mesh: Any) -> float:
    """Bytes that each device sends in every step of a compiled program, over all mesh axes.

    Args:
      program: ``jax.stages.Compiled``, such as ``step.lower(state, batch).compile()``.
      mesh: its mesh.
    """
    return sum(compiled.sent_bytes(compiled.collectives(program, mesh)).values())
