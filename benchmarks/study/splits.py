"""How examples are shared out over workers, evenly or not: for studies of workers that see different data.

Every split is a list of W ``int64`` arrays: the examples of each worker, ascending. No two share an
example and together they have them all, so ``data[part]`` is a worker's own data (of a text, its own
text), and `table` gives them to a jitted program. Drawing is numpy's, from the seed alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lioncub_jax.arguments import check_count

Parts = list[np.ndarray]  # W of int64[n_w], ascending


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
      ValueError: for fewer classes than workers.

    Example:
      >>> [part.tolist() for part in by_class([7, 3, 5, 3, 7], workers=2)]
      [[0, 1, 3, 4], [2]]
    """
    classes, which = np.unique(labels, return_inverse=True)
    _check_enough(len(classes), workers, "classes")
    return _parts(which % workers, workers)


def table(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A split as two arrays, so that a jitted program can draw from it.

    Worker w draws ``rows[w, i]`` with i uniform below ``lengths[w]``. Shorter rows are filled by
    beginning again, so that each entry is an example of that worker's.

    Args:
      parts: W arrays ``int[n_w]``, none empty, as the functions of this module return them.

    Returns:
      ``rows int32[W, longest]`` and ``lengths int32[W]``.

    Example:
      >>> rows, lengths = table([np.array([4, 5, 6]), np.array([7])])
      >>> rows.tolist(), lengths.tolist()
      ([[4, 5, 6], [7, 7, 7]], [3, 1])
    """
    longest = max(len(part) for part in parts)
    rows = np.stack([np.resize(part, longest) for part in parts]).astype(np.int32)
    return rows, np.array([len(part) for part in parts], np.int32)


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
