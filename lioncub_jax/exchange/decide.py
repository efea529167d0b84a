"""Decisions of an owner: from the codes of all workers about a chunk of rows to one reply.

Each worker is the *owner* of one chunk of the rows, see `step`.

| decision | formula, over the n workers that vote | reply | source |
|---|---|---|---|
| ``majority()`` | ``u = sign(sum_i v_i)``, a tie is a fair bit | 1 bit | "MaVo", Distributed Lion |
| ``ternary()`` | ``u = sign(sum_i v_i)``, a tie is 0 | 2 bits | the same, to the letter |
| ``average()`` | ``u = sum_i v_i / (n max_code)`` | planes of the sum | "Avg", Distributed Lion |
| ``at_owner(tx)`` | ``u, s = tx(mean_i dequantize(q_i), s)`` | 1 to 8 bits or float32 | ours |

`votes` has what a decision is given and returns, and counts. Here is the optimizer at the owner of a chunk:
it decodes values, averages them, and encodes the result by one of the replies `sign`, `codes` and `values`.
The reply `sign` and the decision `ternary` have the names of quantizers because they send the same: a sign
in one bit, and -1, 0 or +1 in two.
"""

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial
from jax.typing import DTypeLike

from lioncub_jax.exchange import bits, checks, layout, matrices, quantize, xla
from lioncub_jax.exchange.bits import ROW, saturated
from lioncub_jax.exchange.checks import check_floating, check_kinds
from lioncub_jax.exchange.matrices import Deal, DimensionNumbers, widened
from lioncub_jax.exchange.quantize import Codec, Context, Quantizer
from lioncub_jax.exchange.votes import (
    Decision,
    Planes,
    ReplyCodec,
    Tally,
    average,
    decode_signs,
    majority,
    number_of_ties,
    signs_format,
    ternary,
    vote,
    with_tie_bits,
)
from lioncub_jax.exchange.wires import (
    Format,
    Inbox,
    Reply,
    Sums,
    unpack_scales,
)

__all__ = [
    "Context",
    "Decision",
    "Inbox",
    "Reply",
    "ReplyCodec",
    "Sums",
    "Tally",
    "at_owner",
    "average",
    "codes",
    "majority",
    "sign",
    "ternary",
    "values",
    "vote",
]


def default_for(quantizer: Quantizer) -> Decision:
    """The default decision on votes: `ternary` for codes with a zero, else `majority`."""
    with_zero = quantizer.vote is not None and quantizer.vote.midtread
    return ternary() if with_zero else majority()


def at_owner(
    tx: optax.GradientTransformation,
    reply: ReplyCodec | None = None,
    *,
    rest: optax.GradientTransformation | None = None,
    dimension_numbers: DimensionNumbers = None,
) -> Decision:
    """Averages decoded gradients and runs ``tx`` on the owner's chunk of one global state.

    ``g = mean_i dequantize(q_i)`` over the workers that participated, then ``u, state = tx.update(g,
    state)``. If no worker participates the state stays as it is, counters too, and the update is zero. An
    element with a mean that is not finite (finite values can have a sum that is not) keeps its state, and
    its update is zero: for ``sign()``, which has no zero within a row that moves, the fair bit of a tie. A
    mean has no bound: where workers may lie, vote.

    Args:
      tx: elementwise, such as ``optax.scale_by_lion(b1, b2)``; ``optax.identity()`` for the mean itself.
        It is given no parameters. With ``rest`` it is given one matrix ``[m, n]`` at a time.
      reply: the codec of an update: ``codes(2)`` by default; ``sign()`` where ``tx`` ends in a sign, which
        is then the whole update in one bit; ``values()`` for float32.
      rest: elementwise, for what belongs to no matrix; None where rows are no whole matrices.
      dimension_numbers: with ``rest``, which leaves are matrices, as `owner_muon`.

    Raises:
      ValueError: from ``init``, for a ``tx`` that mixes elements, uses parameters, or keeps arrays of
        another shape: an owner has a chunk of each.
      TypeError: for a reply or a transform that is none.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> lion = lc.decide.at_owner(optax.scale_by_lion(0.9, 0.99), lc.decide.sign())

    Source: this library; ZeRO (arXiv 1910.02054) shards optimizer state in the same way.
    """
    reply = codes(2) if reply is None else reply
    check_kinds(tx=(tx, optax.GradientTransformation), reply=(reply, ReplyCodec))
    name, matrices_of = f"at the owner, {reply.name}", None
    if rest is not None:
        check_kinds(rest=(rest, optax.GradientTransformation))
        matrices_of = partial(matrices.matrices_of, dimension_numbers)

    def codec_of(quantizer: Quantizer) -> Codec:
        if quantizer.value is None:
            raise ValueError(
                f"decision={name}: it decodes values, and {quantizer.name} sends codes without "
                "scales: give midrise(p)"
            )
        return quantizer.value

    return Decision(
        name,
        reply,
        codec_of,
        decide=Partial(decide_on_mean, tx, rest, reply),
        init=Partial(init_owner, tx, rest, reply),
        decide_locally=Partial(decide_locally, tx, rest),
        matrices_of=matrices_of,
    )


# --- What an owner does with a mean

Transform: TypeAlias = optax.GradientTransformation


class OwnerState(NamedTuple):
    """State of `at_owner` for a chunk.

    Attributes:
      inner: of the transform, arrays ``[rows, 128]``, as its ``init`` made them in the padding; of two a
        dict of "matrices" and "rest".
      error: ``float[rows, 128]``, the error of earlier replies in codes, 0 in the padding; else ``()``.
    """

    inner: optax.OptState
    error: Any


def without_empty(state: optax.OptState) -> optax.OptState:
    """None for arrays of no rows, where all leaves are matrices or none is; orbax cannot save them."""
    return jax.tree.map(lambda x: x if x.size else None, state)


def with_empty(state: optax.OptState) -> optax.OptState:
    """Undoes `without_empty`."""
    empty = jnp.zeros((0, ROW))
    return jax.tree.map(lambda x: empty if x is None else x, state, is_leaf=lambda x: x is None)


def init_owner(
    tx: Transform, rest: Transform | None, reply: ReplyCodec, rows: jax.Array, deal: Deal | None
) -> OwnerState:
    """States of the transforms, and the error of replies; ``ValueError`` if one needs more than a chunk."""
    if rest is None:
        inner = tx.init(rows)
        checks.check_elementwise(tx, rows, inner)
    else:
        inner = init_matrices(tx, rest, rows, deal)
    return OwnerState(inner, reply.init(rows))


def decide_on_mean(
    tx: Transform, rest: Transform | None, reply: ReplyCodec, received: Inbox | Sums,
    context: Context, state: OwnerState,
) -> tuple[Reply, OwnerState]:  # fmt: skip
    """Averages, runs the transforms, encodes their result."""
    mean = mean_of_values(received, context).reshape(-1, ROW)
    u, inner = run(tx, rest, mean, received.present, context, state.inner)
    planes, row_data, ties, error = reply.encode(u, context, state.error)
    return Reply(planes, row_data, ties, (), received.present), OwnerState(inner, error)


def decide_locally(
    tx: Transform, rest: Transform | None, mean: jax.Array, present: jax.Array, context: Context,
    state: OwnerState,
) -> tuple[jax.Array, OwnerState]:  # fmt: skip
    """``u`` of a single worker, ``float32[rows, 128]``, plus the error of earlier replies."""
    mean = mean * share(present)  # by 1, which flushes subnormal numbers where several workers do
    u, inner = run(tx, rest, mean, present, context, state.inner)
    known = ~jnp.isnan(u)
    if not jax.tree.leaves(state.error):
        return jnp.where(known, u, 0), OwnerState(inner, ())
    u = jnp.where(known, u + state.error.astype(jnp.float32), 0)
    return u, OwnerState(inner, jnp.where(known, 0, state.error))


def run(
    tx: Transform, rest: Transform | None, mean: jax.Array, present: jax.Array, context: Context,
    state: Any,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """``u`` of a mean, NaN where it is not known, and the state; with ``rest`` ``tx`` is of matrices."""
    known = known_elements(mean, present, context.row_sizes)
    if rest is None:
        return elementwise(tx, mean, known, state)
    return run_matrices(tx, rest, mean, known, context, state)


def init_matrices(
    tx: Transform, rest: Transform, rows: jax.Array, deal: Deal | None
) -> optax.OptState:
    """States of the transform of whole matrices and of that of the rest."""
    assert deal is not None
    whole, other = [matrices.cut_rows(rows, deal, which) for which in ("matrices", "rest")]
    state = {"matrices": tx.init(whole), "rest": rest.init(other)}
    checks.check_elementwise(tx, whole, state["matrices"], may_mix=True)
    checks.check_elementwise(rest, other, state["rest"])
    return without_empty(state)


def run_matrices(
    tx: Transform, rest: Transform, mean: jax.Array, known: jax.Array, context: Context, state: Any
) -> tuple[jax.Array, Any]:  # fmt: skip
    """`elementwise` of ``rest``, and ``tx`` of each matrix."""
    deal, state = context.deal, with_empty(state)
    assert deal is not None
    each = len(mean) // deal.rows  # owners of this worker
    owners = context.worker * each + jnp.arange(each, dtype=jnp.int32)
    ends = jnp.array(deal.matrix_rows)[owners]
    of_matrix = (jnp.arange(deal.rows)[None] < ends[:, None]).reshape(-1, 1)
    given = jnp.where(known, mean, jnp.nan)
    given = matrices.cut_rows(given, deal, "matrices").reshape(each, -1, ROW)
    own, known_own = [matrices.cut_rows(x, deal, "rest") for x in (mean, known & ~of_matrix)]

    u_matrices, whole = matrices.update_matrices(tx, given, context.worker, deal, state["matrices"])
    u_rest, other = elementwise(rest, own, known_own, state["rest"])

    u = (
        matrices.in_place(u_matrices, deal, "matrices", each),
        matrices.in_place(u_rest, deal, "rest", each),
    )
    new = without_empty({"matrices": whole, "rest": other})
    return jnp.where(known, jnp.where(of_matrix, *u), jnp.nan), new


def known_elements(mean: jax.Array, present: jax.Array, row_sizes: jax.Array | None) -> jax.Array:
    """``bool[rows, 128]``: elements of which there is a finite mean, padding left out."""
    known = jnp.isfinite(mean) & (present > 0)
    if row_sizes is not None:
        # Without this, padding would move its row, and a checkpoint would lose it.
        known &= layout.real_elements(row_sizes)
    return known


def mean_of_values(received: Inbox | Sums, context: Context) -> jax.Array:
    """``mean_i dequantize(q_i)`` over the workers that participate: ``float32[chunks, rows, 128]``."""
    if isinstance(received, Sums):
        return received.sums * share(received.present)
    decode, participates = context.codec.decode, received.participates[:, None, None, None] > 0
    assert decode is not None
    codes = context.codec.unpack_each(received.planes, context.format.num_rows)

    def values(worker: Any) -> jax.Array:
        scales = None if received.scales is None else received.scales[worker]
        return jnp.where(participates[worker], decode(codes(worker), scales), 0)

    return xla.sum_of(values, len(participates)) * share(received.present)


def zero_unknown(u: jax.Array) -> jax.Array:
    """Zeros in place of NaN."""
    return jnp.where(jnp.isnan(u), 0, u)


def share(present: jax.Array) -> jax.Array:
    """``1 / n``: the weight of one worker in a mean over the n that are present."""
    # 1/n once: XLA rewrites x / n to x * (1/n) only sometimes, and the bits would depend on the rest of the
    # program.
    return 1 / jnp.maximum(present, 1).astype(jnp.float32)


def elementwise(
    tx: Transform, mean: jax.Array, known: jax.Array, state: Any
) -> tuple[jax.Array, Any]:
    """``tx`` of rows: ``u`` in float32, NaN where they are not known, and the state, which stays there."""
    u, new = tx.update(jnp.where(known, mean, 0), jax.tree.map(widened, state))
    u = jnp.where(known, u.astype(jnp.float32), jnp.nan)
    return u, _where_known(xla.behind(known, u), new, state)


def _where_known(known: jax.Array, new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """The new state where means are known, the old one elsewhere; `transform.next_state` has counters.

    An infinity is stored as the largest finite number: it would stay forever.
    """

    def leaf(n: jax.Array, o: jax.Array) -> jax.Array:
        if jnp.issubdtype(n.dtype, jnp.floating):
            largest = float(jnp.finfo(o.dtype).max)
            n = jnp.clip(n, -largest, largest).astype(o.dtype)
        return jnp.where(known, n, o) if n.shape == known.shape else n

    return jax.tree.map(leaf, new, old)


# --- Codecs of replies


def sign() -> ReplyCodec:
    """One bit: the sign, which of Lion is the whole update; where it is 0, the fair bit of a tie.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> lion = lc.decide.at_owner(optax.scale_by_lion(), lc.decide.sign())
    """

    def encode(u: jax.Array, context: Context, error: tuple[()]) -> tuple[Any, ...]:
        u = context.in_chunks(zero_unknown(u))
        positive, marks = bits.pack(bits.sign_fields(u), 2)
        moved = bits.any_in_rows(marks)
        ties = number_of_ties(~marks, moved, context)
        return [with_tie_bits(positive, ~marks, context)], moved, ties, error

    return ReplyCodec("sign", encode, decode_signs, signs_format, jnp.sign)


def values() -> ReplyCodec:
    """The values as float32: for transforms that do not end in a sign.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> adam = lc.decide.at_owner(optax.scale_by_adam(), lc.decide.values())
      >>> parts = {"momentum": lc.momentum.nothing(), "quantizer": lc.quantize.dense(), "decision": adam}
      >>> tx = lc.communicate(workers="data", **parts)
    """

    def encode(u: jax.Array, context: Context, error: tuple[()]) -> tuple[Any, ...]:
        words = zero_unknown(u).view(jnp.uint32)
        return [words.reshape(context.num_chunks, -1)], None, jnp.uint32(0), error

    def decode(
        planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> tuple[jax.Array, None]:
        return planes[0].view(jnp.float32).reshape(-1, num_rows, ROW), None

    def value(u: jax.Array, scales: None, fmt: Format) -> jax.Array:
        return jnp.where(jnp.isfinite(u), u, 0)  # whatever an owner sends

    def reply_format(fmt: Format) -> Format:
        return fmt.reply(1, 0, words_per_row=ROW)

    return ReplyCodec("values", encode, decode, reply_format, lambda u: u, value)


def codes(p: int, dtype: DTypeLike = jnp.float32) -> ReplyCodec:
    """``p`` bits, and a bfloat16 for each row of 128; the quantization error is added to the next reply.

    ``x = u + f``, ``r = R(x)``, ``f = x - dequantize(r)``. Codes are mid-rise, with a scale for
    each row of 128 from its mean magnitude, padding left out; half of it is rounded to bfloat16. A zero
    counts as positive. Of one bit that is ``sign(x) mean|x|``. If no worker participates, ``f`` stays as it
    is and the update is zero. The update of a single worker is ``x``.

    Args:
      p: bits of a code, 1 to 8.
      dtype: in which the error is kept; one array of d/W elements per worker.

    Raises:
      ValueError: if the dtype is not floating, or ``p`` is out of range.

    Example:
      >>> from lioncub_jax import decide
      >>> decide.codes(4).name
      'codes(4)'

    Source: Zheng et al., dist-EF-blockSGD (arXiv 1905.10936), the owner's half; more bits are ours.
    """
    quantize.check_bits("codes", p, 1)
    check_floating("dtype", dtype)
    # All multiples of half a scale are finite: the largest bfloat16 is 255 times this power of two.
    max_code = 2**p - 1
    largest = 255 // max_code * 2.0**120
    short = jnp.int8 if p < 8 else jnp.int16

    def encode(u: jax.Array, context: Context, error: jax.Array) -> tuple[Any, ...]:
        x = zero_unknown(u + error.astype(jnp.float32))
        mean, _ = quantize.mean_of_sums(quantize.sums_of_rows(x), context.row_sizes)
        half = quantize.to_bfloat16(quantize.GAUSSIAN_STEP[p] / 2 * mean)
        half = jnp.minimum(half, largest)
        q = quantize.midrise_codes(x, x >= 0, quantize.inverted(2 * half), p)
        new_error = saturated(x - quantize.dequantized(q, max_code, half), error.dtype)
        new_error = jnp.where(jnp.isnan(u), error, new_error)
        # If no worker participates no element is known, so the scale is 0.
        row_data = half.astype(jnp.bfloat16).reshape(context.num_chunks, -1).view(jnp.uint32)
        return bits.pack(context.in_chunks(q), p), row_data, jnp.uint32(0), new_error

    def decode(
        planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> tuple[jax.Array, jax.Array]:
        assert row_data is not None
        half = unpack_scales(row_data, largest).reshape(-1, num_rows)  # whatever an owner sends
        codes = bits.unpack(planes)
        odd = quantize.odd_numbers(codes, max_code).astype(short)
        return odd, half if xla.for_cpu() else xla.materialized(half)

    def reply_format(fmt: Format) -> Format:
        return fmt.reply(p, fmt.num_rows // 2)

    def init(rows: jax.Array) -> jax.Array:
        return jnp.zeros_like(rows, dtype=dtype)

    return ReplyCodec(f"codes({p})", encode, decode, reply_format, lambda u: u, init=init)
