"""What the owner of a slice answers to the workers' messages, and how its reply is coded.

A *decision* is what happens between the two collectives of a step:

| decision | of | comes back |
|---|---|---|
| ``majority()`` | votes | one bit: the sign of the sum, ties by a fair coin |
| ``ternary()`` | votes | two bits: the exact sign of the sum, with zeros |
| ``average()``, ``total()`` | votes | the planes of the sum |
| ``at_owner(tx, codes(p))`` | decoded values | what ``tx`` makes of their mean, in ``p`` bits |
| ``at_owner(tx, sign())`` | decoded values | its sign, one bit: for a ``tx`` that ends in a sign, as Lion |
| ``at_owner(tx, values())`` | decoded values | the same in float32 |

Formulas: the update ``u`` of codes ``q_i`` of W workers, and the name in the paper. A vote is sent as
``q_i + top`` over 2, in ``0..top``, so "sum > 0" is "sum of codes > W top / 2".

| decision | formula | paper |
|---|---|---|
| ``majority()`` | ``u = sign(sum_i q_i)``, a tie is a coin | "MaVo", Distributed Lion (arXiv 2404.00438) |
| ``ternary()`` | ``u = sign(sum_i q_i)``, a tie is 0 | the same, to the letter |
| ``average()`` | ``u = sum_i q_i / (W top)``; for signs ``sum_i q_i / W`` | "Avg", Distributed Lion |
| ``total()`` | ``u = sum_i q_i`` | the sum of p-bit codes, Lion Cub (arXiv 2411.16462) |
| ``at_owner(tx)`` | ``u, s = tx(mean_i Q^-1(q_i), s)`` | ours; state sharded as in ZeRO (1910.02054) |
| ``codes(p)`` | ``reply = Q(u + e)``, ``e = u + e - reply`` | dist-EF-blockSGD (arXiv 1905.10936) |

W counts the workers that vote on the row. Ties are broken by ``bits.coin``: fair, and replicated. A row of
128 elements on which nobody votes gets update 0.
"""

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lioncub_jax.exchange import bits, quantize, rotation, traced, xla
from lioncub_jax.exchange.arguments import check_floating, check_kinds
from lioncub_jax.exchange.bits import BLOCK, ROW
from lioncub_jax.exchange.quantize import Quantizer
from lioncub_jax.mesh import kernels

__all__ = [
    "Answer",
    "Coder",
    "Decision",
    "Inbox",
    "OwnerState",
    "Reply",
    "Signs",
    "Slice",
    "Sums",
    "Tally",
    "at_owner",
    "average",
    "codes",
    "majority",
    "sign",
    "ternary",
    "total",
    "values",
]

Planes = Sequence[jax.Array]


class Slice(NamedTuple):
    """The rows that one owner decides on: ``chunks`` of so many rows.

    Attributes:
      chunks: 1 where each worker owns a chunk, all where everybody owns everything.
      rows: of a chunk.
      workers: how many workers there are.
      up: the codes that arrive.
      dtype: of the leaves.
      counts: ``int32[chunks rows]``, elements of each row that are no padding; None where all are, or
        where padding cannot count.
      step: ``int32[]``, steps taken before; only rotated codes need it.
    """

    chunks: int
    rows: int
    workers: int
    up: Quantizer
    dtype: Any
    counts: jax.Array | None
    step: jax.Array | None = None

    @property
    def reach(self) -> int:
        """The largest sum of codes."""
        return self.workers * self.up.top(self.workers)

    def real(self) -> jax.Array:
        """``bool[chunks, rows, 128]``: which elements are no padding, if there are counts."""
        assert self.counts is not None
        real = jnp.arange(ROW, dtype=jnp.int32)[None] < self.counts[:, None]
        return real.reshape(self.chunks, self.rows, ROW)

    def restored(self, rows: jax.Array) -> jax.Array:
        """Means of what was decoded as means of values, ``float32[chunks rows, 128]``: rotated back."""
        if not self.up.rotates:
            return rows
        assert self.step is not None
        return rotation.undone(rows, self.step)


class Reply(NamedTuple):
    """A decision on its way down.

    Attributes:
      planes: ``uint32[chunks, words]`` each.
      rows: ``uint32[chunks, words]``, numbers for the rows, packed; None without.
      ties: ``uint32[chunks]``, elements without a sign in rows that move; 0 where there are no signs.
      pairs: ``float32[chunks]`` each, pairs of votes that are unlike, and all pairs; empty where they are
        not counted.
    """

    planes: Planes
    rows: jax.Array | None
    ties: Any = 0
    pairs: Sequence[jax.Array] = ()


class Signs(NamedTuple):
    """The sign of a result, in words.

    Attributes:
      positive: ``uint32[chunks, words]``.
      tied: ``uint32[chunks, words]``, where there is no sign.
      moved: row words ``uint32[chunks, blocks]``, rows that may get an update; None for all.
    """

    positive: jax.Array
    tied: jax.Array
    moved: jax.Array | None

    def ties(self, where: Slice) -> jax.Array:
        """``uint32[chunks]``: elements without a sign, in rows that move, padding left out."""
        tied = self.tied
        if self.moved is not None:
            tied &= bits.over_rows(self.moved, where.rows)
        if where.counts is not None:
            tied &= bits.pack(where.real())[0]
        return jnp.sum(lax.population_count(tied), axis=-1, dtype=jnp.uint32)


class Tally(NamedTuple):
    """Counted votes.

    Attributes:
      planes: of the sum of codes, least significant first, ``uint32[chunks, words]`` each.
      votes: planes of row words, ``uint32[chunks, blocks]`` each: how many workers voted on each row; None
        where all did.
      where: the rows.
    """

    planes: list[jax.Array]
    votes: list[jax.Array] | None
    where: Slice

    def signs(self) -> Signs:
        """Sign of ``2 sum - votes * top``: compares the sum of codes with half of its largest value."""
        where, moved = self.where, None
        width = where.reach.bit_length()
        if self.votes is None:
            largest = bits.constant(where.reach, width, self.planes[0])
        else:
            moved = reduce(operator.or_, self.votes)
            each_row = bits.times(self.votes, where.up.top(where.workers), width)
            largest = [bits.over_rows(words, where.rows) for words in each_row]
        # Without plane 0 the number is halved and rounded down. If it was odd there is no tie.
        greater, equal = bits.compare(self.planes, largest[1:])
        return Signs(greater, equal & ~largest[0], moved)

    def pairs(self) -> tuple[jax.Array, jax.Array]:
        """Pairs of two workers' votes on an element, of one bit each: those unlike, and all of them.

        ``float32[chunks]`` each, padding left out. Of n votes, c of them for the upper code, c (n - c)
        pairs are unlike, of n (n - 1) / 2.
        """
        where, upper = self.where, self.planes
        assert self.votes is not None  # as every code of one bit has it
        votes = [bits.over_rows(words, where.rows) for words in self.votes]
        each_row = sum(bits.unpack_rows(x, where.rows) << k for k, x in enumerate(self.votes))
        in_row = (each_row * (jnp.maximum(each_row, 1) - 1) // 2).astype(jnp.float32)
        if where.counts is None:
            in_row *= ROW
        else:
            real = bits.pack(where.real())[0]
            upper = [plane & real for plane in upper]
            in_row *= where.counts.reshape(in_row.shape).astype(jnp.float32)
        unlike = bits.products(upper, bits.difference(votes, upper))
        return bits.total(unlike, BLOCK * where.workers**2 // 4), jnp.sum(in_row, axis=-1)


class Inbox(NamedTuple):
    """Packed codes of all workers for the chunks that this worker owns.

    Attributes:
      planes: ``uint32[W, chunks, words]`` each.
      voted: row words, ``uint32[W, chunks, blocks]``, or None.
      steps: ``float32[W, chunks, rows]``, or None.
      taking_part: ``uint32[W]``, 1 for workers that take part.
      present: ``uint32[]``, how many they are.
    """

    planes: list[jax.Array]
    voted: jax.Array | None
    steps: jax.Array | None
    taking_part: jax.Array
    present: jax.Array

    def tally(self, where: Slice) -> Tally:
        """Adds the codes on packed words."""
        votes = None if self.voted is None else bits.tally([self.voted])
        return Tally(bits.tally(self.planes)[: where.reach.bit_length()], votes, where)

    def mean(self, where: Slice) -> jax.Array:
        """Averages decoded values over the workers that take part: ``float32[chunks, rows, 128]``."""
        values = where.up.values(self.planes, self.steps, where.rows, where.workers)
        takes_part = self.taking_part[:, None, None, None]
        values = jnp.where(takes_part > 0, values, 0)
        if kernels.for_tpu():  # where XLA fuses what is computed with a reduction of one array only
            return jnp.sum(values, 0) * share(self.present)
        counted = jnp.broadcast_to(takes_part, values.shape)
        # One reduction of both: nothing is decoded twice, and no decoded array is kept, as XLA for CPU
        # keeps what it only adds.
        total, present = xla.reduced([operator.add] * 2, [values, counted], 0)
        return jnp.where(present > 0, total * share(self.present), 0)


class Sums(NamedTuple):
    """Sums over the workers, on every worker.

    Attributes:
      sums: of codes ``int32[chunks, rows, 128]``, or of values ``float32[chunks, rows, 128]``.
      votes: ``uint32[chunks, rows]``, workers that voted on each row; None where all did.
      present: ``uint32[]``, workers that take part.
    """

    sums: jax.Array
    votes: jax.Array | None
    present: jax.Array

    def tally(self, where: Slice) -> Tally:
        """Packs the sums, so that from here on every wire is alike."""
        planes = bits.pack(self.sums.astype(jnp.uint32), where.reach.bit_length())
        votes = None
        if self.votes is not None:
            each = range(bits.sum_bits(where.workers, 1))
            votes = [bits.pack_rows((self.votes >> k) & 1 > 0) for k in each]
        return Tally(planes, votes, where)

    def mean(self, where: Slice) -> jax.Array:
        """Divides by the workers that take part."""
        return self.sums * share(self.present)


def share(present: jax.Array) -> jax.Array:
    """What a worker counts for in a mean over those that are present."""
    # 1/n once: XLA rewrites x / n to x * (1/n) only sometimes, and the bits would depend on the rest of the
    # program.
    return 1 / jnp.maximum(present, 1).astype(jnp.float32)


class Answer(NamedTuple):
    """What a transform at the owner answers.

    Attributes:
      values: ``float32[chunks rows, 128]``; they mean nothing where they are not valid.
      valid: ``bool[chunks rows, 128]``: no padding, the mean was finite, and somebody took part.
      where: the rows.
    """

    values: jax.Array
    valid: jax.Array
    where: Slice

    def chunks(self) -> jax.Array:
        """``float32[chunks, rows, 128]``, 0 where they are not valid."""
        values = jnp.where(self.valid, self.values, 0)
        return values.reshape(self.where.chunks, self.where.rows, ROW)

    def signs(self) -> Signs:
        """Signs of the values; a row of zeros does not move."""
        values = self.chunks()
        signs = (values > 0).astype(jnp.uint32) | ((values != 0).astype(jnp.uint32) << 1)
        positive, marks = bits.pack(signs, 2)
        return Signs(positive, ~marks, bits.any_in_rows(marks, self.where.rows))

    def plus_error(self, error: jax.Array) -> jax.Array:
        """``float32[chunks rows, 128]`` plus the error of earlier replies, 0 where they are not valid."""
        return jnp.where(self.valid, self.values + error.astype(jnp.float32), 0)


class Coder(NamedTuple):
    """How a result travels back; built by the functions of this module.

    Attributes:
      name: for people.
      encode: ``(Tally or Answer, coin uint32[chunks, words], error) -> (Reply, error)``.
      decode: ``(planes, rows, Slice) -> [chunks, rows, 128]``, int32 or float32.
      planes: ``(top, workers) -> planes`` of a reply.
      row_words: ``(rows, workers) -> words`` of the numbers for the rows, block after block.
      words_per_row: words that a plane takes for one row.
      exact: the update of a single worker, which needs no code: the sign, or the value itself.
      error: ``float[rows, 128] ->`` the error feedback before the first step; ``()`` for none.
    """

    name: str
    encode: Callable[[Any, jax.Array, Any], tuple[Reply, Any]]
    decode: Callable[[Planes, Any, Slice], jax.Array]
    planes: Callable[[int, int], int] = lambda top, workers: 1
    row_words: Callable[[int, int], int] = lambda rows, workers: 0
    words_per_row: int = bits.WORDS_PER_ROW
    exact: Callable[[jax.Array], jax.Array] = lambda x: x
    error: Callable[[jax.Array], Any] = lambda rows: ()


class OwnerState(NamedTuple):
    """State of `at_owner` for a slice.

    Attributes:
      inner: of the transform, arrays ``[rows, 128]``, as its ``init`` made them in the padding.
      error: ``float[rows, 128]``, the error feedback of replies in codes, 0 in the padding; else ``()``.
    """

    inner: Any
    error: Any


class Decision(NamedTuple):
    """What happens at the owner of a slice; built by the functions of this module.

    Attributes:
      coder: of the reply.
      decodes: whether codes must be decoded (then steps travel), or counting them is enough.
      zeros: which codes of votes it takes: "any", only those "with" a code for zero, or only "without".
      tx: what runs on decoded means, or None.
    """

    coder: Coder
    decodes: bool
    zeros: str = "any"
    tx: Any = None

    @property
    def name(self) -> str:
        """For people."""
        return f"at the owner, {self.coder.name}" if self.decodes else self.coder.name

    def check(self, up: Quantizer, wire: Any) -> None:
        """Raises ``ValueError`` where it cannot decide on such codes, or on what this wire brings."""
        wrong = None
        if not self.decodes:
            wrong = self._no_votes(up)
        elif not (up.has_steps or up.dense):
            wrong = f"it decodes values, and {up.name} sends codes without steps: give midrise(p)"
        elif wire.carries == "codes":
            wrong = (
                f"the {wire.name} wire adds codes: give decision=majority(), or the two_phase wire"
            )
        if wrong is None and wire.carries == "values" and not up.dense:
            wrong = (
                f"the {wire.name} wire adds values: give quantizer=dense(), or the two_phase wire"
            )
        if wrong is not None:
            raise ValueError(f"decision={self.name}: {wrong}")

    def _no_votes(self, up: Quantizer) -> str | None:
        """Why codes are none that can be counted."""
        decode = "give decision=at_owner(tx), or the quantizer without it"
        if up.dense:
            return f"{up.name} has no codes to count: give decision=at_owner(tx), or sign()"
        if up.feedback is not None:
            return f"{up.name}: votes are not decoded, so there is no error to feed back; {decode}"
        if up.rotates:
            return (
                f"{up.name}: a vote is on each parameter, and its codes are of whole rows; {decode}"
            )
        if self.zeros == "without" and up.has_zero:
            return f"{up.name} has a code for zero, and its ties are zeros: give ternary() or average()"
        if self.zeros == "with" and not up.has_zero:
            return f"{up.name} has no code for zero, so a sum alone says nothing: give average()"
        return None

    def counts_pairs(self, up: Quantizer) -> bool:
        """Whether pairs of votes are counted: of one bit each."""
        return not self.decodes and up.top(1) == 1

    def init(self, rows: jax.Array) -> OwnerState:
        """Of a slice ``float[rows, 128]``; ``ValueError`` if that is not enough for the transform."""
        inner = self.tx.init(rows)
        traced.check_elementwise(self.tx, rows, inner)
        return OwnerState(inner, self.coder.error(rows))

    def answer(self, received: Inbox | Sums, where: Slice, coin: jax.Array, state: Any) -> Any:
        """The reply and the next state of a slice; ``coin``: ``uint32[chunks, words]``."""
        if not self.decodes:
            tally = received.tally(where)
            reply, _ = self.coder.encode(tally, coin, ())
            return reply._replace(pairs=tally.pairs() if self.counts_pairs(where.up) else ()), state
        answer, inner = self._run(received, where, state.inner)
        reply, error = self.coder.encode(answer, coin, state.error)
        return reply, OwnerState(inner, error)

    def alone(self, received: Inbox | Sums, where: Slice, state: OwnerState) -> Any:
        """The update of a single worker, ``float32[rows, 128]``, and the next state; the error is added."""
        answer, inner = self._run(received, where, state.inner)
        if not jax.tree.leaves(state.error):
            return answer.chunks()[0], OwnerState(inner, ())
        return answer.plus_error(state.error), OwnerState(
            inner, jnp.where(answer.valid, 0, state.error)
        )

    def _run(self, received: Inbox | Sums, where: Slice, state: Any) -> tuple[Answer, Any]:
        mean = where.restored(received.mean(where).reshape(-1, ROW))
        valid = jnp.isfinite(mean) & (received.present > 0)
        if where.counts is not None:  # else padding moves its row, and is forgotten by a checkpoint
            valid &= where.real().reshape(valid.shape)
        # Cast finite, so that no dtype of the leaves makes an infinity of it.
        mean = quantize.saturated(jnp.where(valid, mean, 0), where.dtype)
        update, new = self.tx.update(mean, state)
        return Answer(update.astype(jnp.float32), valid, where), _valid_only(valid, new, state)


def _valid_only(valid: jax.Array, new: Any, old: Any) -> Any:
    """The new state where means are valid, the old one elsewhere; `Worker.next_state` handles counters.

    An infinity is stored as the largest finite number: it would stay forever.
    """

    def leaf(n: jax.Array, o: jax.Array) -> jax.Array:
        if jnp.issubdtype(n.dtype, jnp.floating):
            most = jnp.finfo(n.dtype).max
            n = jnp.clip(n, -most, most)
        return jnp.where(valid, n, o) if n.shape == valid.shape else n

    return jax.tree.map(leaf, new, old)


# --- Votes


def majority() -> Decision:
    """``u = sign(sum_i q_i)`` in one bit, ties broken by a fair coin; one more bit for each row of 128.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"memory": lc.momentum.blend(), "decision": lc.decide.majority()}
      >>> tx = lc.communicate(workers="data", **parts)

    Source: Distributed Lion (arXiv 2404.00438), "MaVo"; the rule for ties and zeros is ours.
    """
    return Decision(sign()._replace(name="majority"), False, "without")


def ternary() -> Decision:
    """``u = sign(sum_i q_i)`` in two bits: -1, 0 or +1. A tie is a zero, to the letter of both papers.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"quantizer": lc.quantize.ternary(), "decision": lc.decide.ternary()}
      >>> tx = lc.communicate(workers="data", memory=lc.momentum.blend(), **parts)

    Source: Distributed Lion (arXiv 2404.00438) and Lion Cub (arXiv 2411.16462), where votes cancel.
    """

    def encode(tally: Tally, coin: jax.Array, error: Any) -> tuple[Reply, Any]:
        signs = tally.signs()
        return Reply([signs.positive, signs.tied], None, signs.ties(tally.where)), error

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        codes = bits.unpack_stored(planes, where.rows)
        return jnp.where(codes >= 2, 0, 2 * (codes & 1).astype(jnp.int32) - 1)

    return Decision(Coder("ternary", encode, decode, lambda *_: 2, exact=jnp.sign), False)


def average() -> Decision:
    """``u = sum_i q_i / (W top)``, in ``[-1, 1]``: the planes of the sum. W workers vote on the row.

    For signs that is ``sum_i q_i / W``. In codes ``0..top``: ``(2 sum - W top) / (W top)``.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"memory": lc.momentum.blend(), "decision": lc.decide.average()}
      >>> tx = lc.communicate(workers="data", **parts)

    Source: Distributed Lion (arXiv 2404.00438), "Avg".
    """

    def encode(tally: Tally, coin: jax.Array, error: Any) -> tuple[Reply, Any]:
        votes, workers = tally.votes, tally.where.workers
        if votes is None:
            like = tally.planes[0][:, : bits.row_words(tally.where.rows)]
            votes = bits.constant(workers, bits.sum_bits(workers, 1), like)
        numbers = jnp.stack(votes, -1)
        ties = tally.signs().ties(tally.where)
        return Reply(tally.planes, numbers.reshape(len(numbers), -1), ties), error

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        top = where.up.top(where.workers)
        sums = bits.unpack_stored(planes, where.rows).astype(jnp.int32)
        each = rows.reshape(len(rows), bits.row_words(where.rows), -1)
        votes = [bits.unpack_rows(each[..., k], where.rows) << k for k in range(each.shape[2])]
        reach = reduce(operator.add, votes).astype(jnp.int32)[..., None] * top
        sums = jnp.minimum(sums, reach)  # whatever an owner says
        return (2 * sums - reach).astype(jnp.float32) / jnp.maximum(reach, 1).astype(jnp.float32)

    def row_words(rows: int, workers: int) -> int:
        return bits.sum_bits(workers, 1) * bits.row_words(rows)

    coder = Coder("average", encode, decode, _sum_planes, row_words, exact=jnp.sign)
    return Decision(coder, False)


def total() -> Decision:
    """``u = sum_i q_i``, in whole numbers of steps: the planes of the sum.

    For codes with a zero, where abstainers add nothing and the number of votes need not travel.

    Example:
      >>> import lioncub_jax as lc
      >>> parts = {"quantizer": lc.quantize.ternary(), "decision": lc.decide.total()}
      >>> tx = lc.communicate(workers="data", memory=lc.momentum.nothing(), **parts)
    """

    def encode(tally: Tally, coin: jax.Array, error: Any) -> tuple[Reply, Any]:
        return Reply(tally.planes, None, tally.signs().ties(tally.where)), error

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        sums = bits.unpack_stored(planes, where.rows).astype(jnp.int32)
        return jnp.minimum(sums, where.reach) - where.reach // 2

    return Decision(Coder("total", encode, decode, _sum_planes), False, "with")


def fitting(up: Quantizer) -> Decision:
    """The decision on votes in such codes: zeros come back if there are any, else one bit."""
    return ternary() if up.has_zero else majority()


def _sum_planes(top: int, workers: int) -> int:
    return (workers * top).bit_length()


# --- Decoded values


def at_owner(tx: optax.GradientTransformation, reply: Coder | None = None) -> Decision:
    """Averages decoded gradients and runs ``tx`` on the owner's slice of one global state.

    ``g = mean_i decode(q_i)`` over the workers that took part, then ``u, state = tx.update(g, state)``.
    If nobody took part the state stays as it is, counters too, and the update is zero. An element whose
    mean is not finite (finite values can have a sum that is not) keeps its state, and its update is zero:
    for ``sign()``, which has no zero within a row that moves, the coin of a tie. A mean has no bound: where
    workers may lie, vote.

    Args:
      tx: elementwise, such as ``optax.scale_by_lion(b1, b2)``; ``optax.identity()`` for the mean itself.
        It is given no parameters.
      reply: how an update comes back: ``codes(2)`` by default; ``sign()`` where ``tx`` ends in a sign,
        which is then the whole update in one bit; ``values()`` for float32.

    Raises:
      ValueError: from ``init``, for a ``tx`` that mixes elements, uses parameters, or keeps arrays of
        another shape: an owner has a slice of each.
      TypeError: for a reply or a ``tx`` that is none.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> lion = lc.decide.at_owner(optax.scale_by_lion(0.9, 0.99), lc.decide.sign())

    Source: this library; ZeRO (arXiv 1910.02054) shards optimizer state in the same way.
    """
    coder = codes(2) if reply is None else reply
    check_kinds(tx=(tx, optax.GradientTransformation), reply=(coder, Coder))
    return Decision(coder, True, tx=tx)


def sign() -> Coder:
    """One bit: the sign, which of Lion is the whole update; where it is 0, the coin of a tie.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> lion = lc.decide.at_owner(optax.scale_by_lion(), lc.decide.sign())
    """

    def encode(result: Tally | Answer, coin: jax.Array, error: Any) -> tuple[Reply, Any]:
        signs = result.signs()
        assert signs.moved is not None
        side = signs.positive | (signs.tied & coin)
        return Reply([side], signs.moved, signs.ties(result.where)), error

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        moved = bits.over_rows(rows, where.rows)
        codes = bits.unpack_stored([*planes, moved], where.rows)
        return jnp.where(codes >= 2, 2 * (codes & 1).astype(jnp.int32) - 1, 0)

    return Coder(
        "sign", encode, decode, row_words=lambda rows, workers: bits.row_words(rows), exact=jnp.sign
    )


def values() -> Coder:
    """The values as float32: for transforms that do not end in a sign.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> adam = lc.decide.at_owner(optax.scale_by_adam(), lc.decide.values())
      >>> parts = {"memory": lc.momentum.nothing(), "quantizer": lc.quantize.dense(), "decision": adam}
      >>> tx = lc.communicate(workers="data", **parts)
    """

    def encode(answer: Answer, coin: jax.Array, error: Any) -> tuple[Reply, Any]:
        words = answer.chunks().view(jnp.uint32)
        return Reply([words.reshape(len(words), -1)], None), error

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        found = planes[0].view(jnp.float32).reshape(-1, where.rows, ROW)
        return jnp.where(jnp.isfinite(found), found, 0)  # whatever an owner says

    return Coder("floats", encode, decode, words_per_row=ROW)


def codes(p: int, dtype: Any = jnp.float32) -> Coder:
    """``p`` bits, and a bfloat16 for each row of 128; the quantization error is added to the next reply.

    ``x = u + e``, ``reply = code(x)``, ``e = x - reply``. Codes are mid-rise, with a step for each row of
    128 from its mean magnitude, padding left out; half of it is rounded to bfloat16. A zero counts as
    positive. Of one bit that is ``sign(x) mean|x|``. If nobody took part, ``e`` stays as it is and the
    update is zero. One worker alone is told ``x``.

    Args:
      p: bits of a code, 1 to 8.
      dtype: in which the error is kept; one array of d/W elements per worker.

    Raises:
      ValueError: if the dtype is not floating, or ``p`` is out of range.

    Example:
      >>> from lioncub_jax import decide
      >>> decide.codes(4).name
      'codes(4)'

    Source: Zheng et al., dist-EF-blockSGD (arXiv 1905.10936), the server's half; more bits are ours.
    """
    quantize.check_bits("codes", p, 1)
    check_floating("dtype", dtype)
    # All multiples of a unit are finite: the largest bfloat16 is 255 times this power of two.
    most = 255 // (2**p - 1) * 2.0**120

    def values_of(q: jax.Array, unit: jax.Array) -> jax.Array:  # exact products
        return (2 * q.astype(jnp.int32) - (2**p - 1)).astype(jnp.float32) * unit[..., None]

    def encode(answer: Answer, coin: jax.Array, error: jax.Array) -> tuple[Reply, jax.Array]:
        where = answer.where
        x = answer.plus_error(error)
        mean, _ = quantize.row_scale(x, where.counts)
        unit = quantize.to_bfloat16(quantize.GAUSSIAN_STEP[p] / 2 * mean)
        unit = jnp.minimum(unit, most)
        q = quantize.midrise_codes(x, x >= 0, 2 * unit, p)
        left = quantize.saturated(x - values_of(q, unit), error.dtype)
        left = jnp.where(answer.valid, left, error)
        # Where nobody took part no element is valid, so the unit is 0.
        rows = unit.astype(jnp.bfloat16).reshape(where.chunks, -1).view(jnp.uint32)
        return Reply(bits.pack(q.reshape(where.chunks, where.rows, ROW), p), rows), left

    def decode(planes: Planes, rows: Any, where: Slice) -> jax.Array:
        unit = rows.view(jnp.bfloat16).reshape(-1, where.rows).astype(jnp.float32)
        unit = jnp.where((unit >= 0) & (unit <= most), unit, 0)  # whatever an owner says
        return values_of(bits.unpack(planes, where.rows), unit)

    return Coder(
        f"codes({p})", encode, decode, lambda *_: p, lambda rows, workers: rows // 2,
        error=lambda rows: jnp.zeros_like(rows, dtype=dtype),
    )  # fmt: skip
