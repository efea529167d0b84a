"""Differences between methods, beside those between seeds.

Methods share their seeds, so a value is a method's part, a seed's part and a rest. The deviation of the
rest is pooled over all methods that ran together, and a 95 % t-interval of it says which differences
are seen::

    x[m, s] = method[m] + seed[s] + rest[m, s],   std^2 = sum rest^2 / degrees of freedom
    two methods that all seeds ran, n of them, differ by their means' difference +- t(0.975) std sqrt(2/n)

Where a method ran with some seeds only, the least squares of that sum have the rest of the formula.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats


class Difference(NamedTuple):
    """The difference of two methods.

    Attributes:
      value: of the means.
      error: half of its 95 % interval; None where nothing ran twice.
    """

    value: float
    error: float | None

    def text(self, digits: int = 3) -> str:
        """With its error, as ``+0.018 ± 0.023 (alike)``: alike where the interval has 0 in it."""
        if self.error is None:
            return f"{self.value:+.{digits}f} one seed"
        verdict = " (alike)" if abs(self.value) <= self.error else ""
        return f"{self.value:+.{digits}f} ± {self.error:.{digits}f}{verdict}"


class Pooled(NamedTuple):
    """The deviation of single runs that is left when methods and seeds are taken out.

    Attributes:
      std: of one run; None where nothing ran twice.
      freedom: its degrees of freedom.
      means: of each method over its seeds, with the seeds' part taken out.
      covariance: of the methods' parts, in their order, for a deviation of 1.
    """

    std: float | None
    freedom: int
    means: Mapping[str, float]
    covariance: np.ndarray

    def less(self, one: str, other: str) -> Difference | None:
        """A method less another; None where one of them did not run."""
        if one not in self.means or other not in self.means:
            return None
        error = None
        if self.std is not None:
            names = list(self.means)
            contrast = np.array([(name == one) - float(name == other) for name in names])
            share = max(contrast @ self.covariance @ contrast, 0)
            error = float(stats.t.ppf(0.975, self.freedom) * self.std * share**0.5)
        return Difference(round(self.means[one] - self.means[other], 9), error)


def pooled(values: Mapping[str, Mapping[int, float]]) -> Pooled:
    """Pools values by method and seed, all finite."""
    runs = [(m, s, x) for m, some in values.items() for s, x in some.items()]
    method = np.array([m for m, _, _ in runs])[:, None]
    seed = np.array([s for _, s, _ in runs])[:, None]
    x = np.array([x for _, _, x in runs])
    methods, seeds = list(values), np.unique(seed)
    design = np.hstack([method == methods, seed == seeds[1:]]).astype(float)
    fitted, _, rank, _ = np.linalg.lstsq(design, x, rcond=None)
    freedom = len(runs) - int(rank)
    std = float(np.sqrt(np.sum((x - design @ fitted) ** 2) / freedom)) if freedom else None
    middle = float(np.mean([0.0, *fitted[len(methods) :]]))
    # Losses have four digits, so a mean may lie between two of three: rounded alike by every numpy.
    means = {name: round(float(fitted[n]) + middle, 9) for n, name in enumerate(methods)}
    covariance = np.linalg.pinv(design.T @ design)[: len(methods), : len(methods)]
    return Pooled(std, freedom, means, covariance)
