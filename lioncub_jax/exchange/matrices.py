"""An optimizer of whole matrices at their owners, and another one of all other leaves.

`dealing` has where they lie. What is not known (padding, or no finite mean) counts as 0 in its matrix, and
its state stays.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import dealing, traced, wires
from lioncub_jax.exchange.arguments import part
from lioncub_jax.exchange.at_owner import AtOwner, OwnerState, elementwise, widened
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.dealing import Deal, DimensionNumbers, Hand, Matrices
from lioncub_jax.exchange.decision import Place
from lioncub_jax.exchange.quantize import saturated
from lioncub_jax.mesh import axes


class Inner(NamedTuple):
    """State of two transforms: arrays ``[rows, 128]``, and numbers.

    Attributes:
      matrices: of that of matrices.
      rest: of that of the other leaves.
    """

    matrices: Any
    rest: Any


@part
class AtMatrices(AtOwner):
    """``tx`` is given one matrix ``[m, n]`` at a time, and ``rest`` what belongs to none.

    Attributes:
      rest: elementwise.
      numbers: which leaves are matrices, see `dealing.matrices_of`.
    """

    rest: optax.GradientTransformation
    numbers: DimensionNumbers
    of_matrices = True

    def matrices_of(
        self, params: optax.Params, specs: Sequence[P] | None = None
    ) -> tuple[Matrices, ...]:
        """The matrices of each leaf."""
        return dealing.matrices_of(self.numbers, params, specs)

    def init(self, rows: jax.Array, deal: Deal | None) -> OwnerState:
        """State of both transforms, and the error of replies."""
        assert deal is not None
        of_matrices, of_rest = [cut(rows, deal, part) for part in Inner._fields]
        inner = Inner(self.tx.init(of_matrices), self.rest.init(of_rest))
        traced.check_elementwise(self.tx, of_matrices, inner.matrices, may_mix=True)
        traced.check_elementwise(self.rest, of_rest, inner.rest)
        return OwnerState(inner, self.codec.init(rows))

    def run(
        self, mean: jax.Array, known: jax.Array, place: Place, state: Inner
    ) -> tuple[jax.Array, Inner]:
        """``u`` of the rows of a chunk, NaN where the mean is not known, and the next state."""
        worker, deal = place
        assert deal is not None
        each = len(mean) // deal.rows
        owners = worker * each + jnp.arange(each, dtype=jnp.int32)
        ends = jnp.array(deal.matrix_rows)[owners]
        of_matrix = (jnp.arange(deal.rows)[None] < ends[:, None]).reshape(-1, 1)
        given = cut(jnp.where(known & of_matrix, mean, jnp.nan), deal, "matrices")
        own, known_own = [cut(x, deal, "rest") for x in (mean, known & ~of_matrix)]

        given = given.reshape(each, -1, ROW)
        u_matrices, matrices = of_matrices(self.tx, given, place, state.matrices)
        u_rest, rest = elementwise(self.rest, own, known_own, state.rest)

        u = in_place(u_matrices, deal, "matrices", each), in_place(u_rest, deal, "rest", each)
        return jnp.where(known, jnp.where(of_matrix, *u), jnp.nan), Inner(matrices, rest)


def cut(rows: jax.Array, deal: Deal, part: str) -> jax.Array:
    """Of all rows of a worker's owners those of a part, see `Deal.span`: ``[rows, 128]``."""
    return rows.reshape(-1, deal.rows, ROW)[:, deal.span(part)].reshape(-1, ROW)


def in_place(x: jax.Array, deal: Deal, part: str, each: int) -> jax.Array:
    """Undoes `cut`, for ``each`` owners of a worker, with zeros elsewhere."""
    span = deal.span(part)
    x = x.reshape(each, span.stop - span.start, ROW)
    return jnp.pad(x, ((0, 0), (span.start, deal.rows - span.stop), (0, 0))).reshape(-1, ROW)


def of_matrices(
    tx: optax.GradientTransformation, mean: jax.Array, place: Place, state: Any
) -> tuple[jax.Array, Any]:
    """``u`` of the matrices of a worker, and the next state.

    Args:
      tx: is given one matrix at a time.
      mean: ``[owners of the worker, rows, 128]`` on this device, NaN for what is not known.
      place: of the rows.
      state: arrays ``[rows, 128]`` of all these rows, and numbers.
    """
    tree: Any
    owner, deal = place
    assert deal is not None
    arrays, tree = jax.tree.flatten(state)
    kept = [x.reshape(mean.shape) for x in arrays if x.ndim]
    devices, mine = axes.workers_on(deal.shared_by), axes.worker_index(deal.shared_by)
    if deal.whole:
        owner, mean = owner * devices + mine, wires.swapped(mean, deal.shared_by)
    elif devices > 1:
        mean, *kept = [wires.gathered_parts(x, deal.shared_by) for x in (mean, *kept)]

    batched: Any = tree.unflatten([0 if x.ndim else None for x in arrays])
    # Of one matrix; vmap sees to it that no counter depends on it.
    each = jax.vmap(tx.update, in_axes=(0, batched), out_axes=(0, batched))

    def update(x: jax.Array, kept: Iterable[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        own = iter(kept)
        u, new = each(x, tree.unflatten([widened(next(own)) if x.ndim else x for x in arrays]))
        return u, jax.tree.leaves(new)

    _, new = update(*jax.tree.map(lambda x: jnp.zeros((1, 1, 1), x.dtype), (mean, kept)))
    kept = [axes.varying(jnp.zeros(mean.shape), (*axes.varying_axes(mean),)), *kept]
    for hand in deal.hands:
        first, number = [jnp.array(x)[owner] for x in (hand.first_rows, hand.numbers)]
        turn = partial(_turn, update, deal, hand, first, mean)
        kept = lax.fori_loop(0, number, turn, kept)
    if deal.whole:
        kept[0] = wires.swapped(kept[0], deal.shared_by)
    elif devices > 1:
        kept = [lax.dynamic_index_in_dim(x, mine) for x in kept]
    u, *kept = kept
    rows = iter(kept)
    new = [next(rows).reshape(x.shape) if x.ndim else y for x, y in zip(arrays, new, strict=True)]
    return u, tree.unflatten(new)


def _turn(
    update: Any, deal: Deal, hand: Hand, first: jax.Array, mean: jax.Array, t: jax.Array,
    kept: list[jax.Array],
) -> list[jax.Array]:  # fmt: skip
    """``u`` and the state of the matrix in turn, in the arrays of all rows."""
    to_matrix = partial(dealing.whole, hand=hand, deal=deal)

    def cut(rows: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(rows, first + t * hand.rows, hand.rows, 1)

    x, _, *old = [to_matrix(cut(rows))[None] for rows in (mean, *kept)]
    known, results = jnp.isfinite(x), []
    u, new = update(jnp.where(known, x, 0), old)
    new = [u, *[y for y in new if y.ndim]]
    for rows, n, o in zip(kept, new, (jnp.zeros_like(x), *old), strict=True):
        n = jnp.where(known, saturated(n, rows.dtype), o)[0]
        [back] = jax.linear_transpose(to_matrix, cut(rows))(n)
        results.append(lax.dynamic_update_slice_in_dim(rows, back, first + t * hand.rows, 1))
    return results
