"""How examples are shared out over workers, evenly or not: for studies of workers that see different data.

Every split is a list of W ``int64`` arrays: the examples of each worker, ascending. No two share an
example and together they have them all, so ``data[part]`` is a worker's own data (of a text, its own
text), and `table` gives them to a jitted program. Drawing is numpy's, from the seed alone.
"""

import heapq
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from lioncub_jax.checks import check_count

Parts = list[np.ndarray]  # W of int64[n_w], ascending

TRIES = 100  # of dirichlet, until every worker has an example
ALPHAS = (
    1e-9,
    1e9,
)  # what numpy draws without underflow or overflow; the ends are 0/1 and even shares


def iid(count: int, workers: int, seed: int = 0) -> Parts:
    """Every worker gets the same number of examples, give or take one, drawn from all.

    Args:
      count: examples.
      workers: W.
      seed: of the drawing; the same seed, the same split.

    Returns:
      W arrays ``int64[count // W or one more]``, ascending.

    Raises:
      ValueError: with fewer examples than workers, or none of either.

    Example:
      >>> [len(part) for part in iid(10, 4)]
      [3, 3, 2, 2]
    """
    _check_enough(count, workers, "examples")
    order = np.random.default_rng(seed).permutation(count)
    return [np.sort(part) for part in np.array_split(order, workers)]


def contiguous(count: int, workers: int) -> Parts:
    """Worker w gets the w-th of W pieces in the order of the data, equally long, give or take one.

    For a text, where ``count`` is its length: each worker reads its own piece of it.

    Args:
      count: examples, or bytes of a text.
      workers: W.

    Returns:
      W arrays ``int64[count // W or one more]``, ascending without gaps.

    Raises:
      ValueError: with fewer examples than workers, or none of either.

    Example:
      >>> [part.tolist() for part in contiguous(5, 2)]
      [[0, 1, 2], [3, 4]]
    """
    _check_enough(count, workers, "examples")
    return np.array_split(np.arange(count, dtype=np.int64), workers)


def dirichlet(labels: Any, workers: int, alpha: float, seed: int = 0) -> Parts:
    """Label skew: the examples of each class are shared in proportions of their own.

        p_k ~ Dirichlet(alpha, ..., alpha) over the W workers, for each class k;
        worker w gets a part p_kw of class k, cut at floor(n_k (p_k1 + ... + p_kw))

    A large ``alpha`` nears `iid`; a small one nears one worker for a class. Workers differ in how much
    they have as well. Where a worker would have nothing, all proportions are drawn again, up to 100
    times: what comes out is the distribution above, given that every worker has an example.

    Args:
      labels: ``int[n]``, the class of each example.
      workers: W.
      alpha: concentration, from 1e-9 to 1e9; 0.1 is strong skew, 100 hardly any.
      seed: of the drawing; the same seed, the same split.

    Returns:
      W arrays ``int64[n_w]``, ascending, none empty.

    Raises:
      ValueError: for labels that are not a 1-D array of integers, fewer examples than workers, an
        ``alpha`` out of its range, or one so small that some worker had nothing every time.

    Example:
      >>> parts = dirichlet([0] * 50 + [1] * 50, workers=4, alpha=0.5)
      >>> sum(len(part) for part in parts)
      100

    Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (arXiv
    1905.12022), in its experiments; Hsu et al. (arXiv 1909.06335) instead give all workers the same
    number of examples and draw each worker's mix of classes.
    """
    labels = _checked_labels(labels)
    _check_enough(len(labels), workers, "examples")
    _check_alpha(alpha)
    rng = np.random.default_rng(seed)
    for _ in range(TRIES):
        owner = _owners(labels, workers, float(alpha), rng)
        if np.bincount(owner, minlength=workers).all():
            return _parts(owner, workers)
    raise ValueError(
        f"alpha={alpha!r} left one of {workers} workers without any of {len(labels)} examples in each of "
        f"{TRIES} draws: give a larger alpha, fewer workers or more examples"
    )


def _owners(labels: np.ndarray, workers: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """``int64[n]``: the worker of each example, from proportions drawn for each class."""
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(workers, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(examples)).astype(np.int64)
        owner[examples] = np.searchsorted(cuts, np.arange(len(examples)), side="right")
    return owner


def by_class(labels: Any, workers: int) -> Parts:
    """Each class goes to one worker: the k-th class that occurs to worker ``k mod W``.

    The strongest label skew. Where W does not divide the number of classes, the first workers have one
    class more.

    Args:
      labels: ``int[n]``, the class of each example.
      workers: W.

    Returns:
      W arrays ``int64[n_w]``, ascending.

    Raises:
      ValueError: for labels that are not a 1-D array of integers, or fewer classes than workers.

    Example:
      >>> [part.tolist() for part in by_class([7, 3, 5, 3, 7], workers=2)]
      [[0, 1, 3, 4], [2]]
    """
    labels = _checked_labels(labels)
    classes, which = np.unique(labels, return_inverse=True)
    _check_enough(len(classes), workers, "classes")
    return _parts(which % workers, workers)


def by_document(documents: Sequence[tuple[int, int]], workers: int) -> Parts:
    """Whole documents, dealt so that workers have about the same amount: the largest first.

    Each document goes to the worker that has least so far, the first of several.

    Args:
      documents: ``(start, end)`` of each in a text, ``start < end``, no two of them overlapping.
      workers: W.

    Returns:
      W arrays ``int64[n_w]``, ascending: positions in the text. ``text[part]`` is a worker's documents,
      one after the other.

    Raises:
      ValueError: for documents that are empty or overlap, or fewer of them than workers.

    Example:
      >>> [part.tolist() for part in by_document([(0, 2), (2, 6), (6, 7)], workers=2)]
      [[2, 3, 4, 5], [0, 1, 6]]

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies" (SIAM J. Appl. Math. 17, 1969): the
    largest part has at most 4/3 of what the best dealing would give it.
    """
    ranges = sorted((operator.index(start), operator.index(end)) for start, end in documents)
    _check_enough(len(ranges), workers, "documents")
    _check_apart(ranges)
    least = [(0, worker) for worker in range(workers)]
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    for start, end in sorted(ranges, key=lambda place: place[0] - place[1]):
        has, worker = least[0]
        dealt[worker].append((start, end))
        heapq.heapreplace(least, (has + end - start, worker))
    return [
        np.concatenate([np.arange(*place, dtype=np.int64) for place in sorted(own)])
        for own in dealt
    ]


def table(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A split as two arrays, so that a jitted program can draw from it.

    Worker w draws ``rows[w, i]`` with i uniform below ``lengths[w]``. Shorter rows are filled by
    beginning again, so that each entry is an example of that worker's.

    Args:
      parts: W arrays ``int[n_w]``, none empty, as the functions of this module return them.

    Returns:
      ``rows int32[W, longest]`` and ``lengths int32[W]``.

    Raises:
      ValueError: for no parts, an empty one, one that is not a 1-D array of integers, or an example
        that ``int32`` cannot number.

    Example:
      >>> rows, lengths = table([np.array([4, 5, 6]), np.array([7])])
      >>> rows.tolist(), lengths.tolist()
      ([[4, 5, 6], [7, 7, 7]], [3, 1])
    """
    arrays = [np.asarray(part) for part in parts]
    if not arrays:
        raise ValueError("parts is empty: give what a split returned, one array for each worker")
    for worker, part in enumerate(arrays):
        _check_part(part, worker)
    longest = max(len(part) for part in arrays)
    rows = np.stack([np.resize(part, longest) for part in arrays]).astype(np.int32)
    return rows, np.array([len(part) for part in arrays], np.int32)


def _parts(owner: np.ndarray, workers: int) -> Parts:
    """The examples of each worker, from the worker of each example."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=workers))
    return np.split(order, ends[:-1])


def _check_enough(count: Any, workers: Any, kind: str) -> None:
    check_count(f"workers={workers!r}", workers)
    check_count(f"{count!r} {kind}", count)
    if workers > count:
        raise ValueError(
            f"workers={workers} is more than the {count} {kind}, and each worker needs one: give at "
            f"most {count} workers"
        )


def _check_alpha(alpha: Any) -> None:
    least, most = ALPHAS
    number = isinstance(alpha, (int, float, np.number)) and not isinstance(alpha, bool)
    if not number or not least <= alpha <= most:
        raise ValueError(
            f"alpha={alpha!r}: give a number above zero, from {least:g} to {most:g}, such as 0.5"
        )


def _checked_labels(labels: Any) -> np.ndarray:
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"labels have shape {array.shape} and dtype {array.dtype}: give a 1-D array of integers, the "
            "class of each example"
        )
    return array


def _check_apart(ranges: list[tuple[int, int]]) -> None:
    """Raises ``ValueError`` for sorted ranges that are empty or overlap."""
    before = 0
    for start, end in ranges:
        if not before <= start < end:
            raise ValueError(
                f"document ({start}, {end}) after {before}: give (start, end) with 0 <= start < end, no "
                "two of them overlapping"
            )
        before = end


def _check_part(part: np.ndarray, worker: int) -> None:
    if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer) or not part.size:
        raise ValueError(
            f"the part of worker {worker} has shape {part.shape} and dtype {part.dtype}: give a 1-D array "
            "of integers with at least one, as a split returns it"
        )
    if part.min() < 0 or part.max() > np.iinfo(np.int32).max:
        raise ValueError(
            f"the part of worker {worker} goes from {part.min()} to {part.max()}: int32 numbers examples "
            f"from 0 to {np.iinfo(np.int32).max}; give each worker a smaller set of data"
        )
