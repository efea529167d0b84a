"""The tuning of every method: rate, betas and decay, by one rule and one number of runs for all.

The rate climbs by factors of two until it was seen to fall off on both sides; then the other betas, the
other decay, and rates between, each from the best so far. A seed is used that no reported run has.
"""

from collections.abc import Callable

from goal.contenders import Family, Hyper

CLIMBS = 4  # runs for the rate, at most, before anything else is tried
SEED = 1000


def first(family: Family) -> Hyper:
    return Hyper(family.rate, *family.betas, family.decays[0])


def search(measure: Callable[[Hyper], float], start: Hyper, family: Family, runs: int) -> Hyper:
    """The best of so many runs; ``measure`` gives the last loss, infinite for one that diverged."""
    tried: dict[Hyper, float] = {}

    def at(hyper: Hyper) -> None:
        if len(tried) < runs and hyper not in tried:
            tried[hyper] = measure(hyper)

    def best() -> Hyper:
        return min(tried, key=tried.__getitem__)

    def times(factor: float) -> Hyper:
        return best()._replace(rate=rounded(best().rate * factor))

    at(start)
    at(times(2))
    while len(tried) < min(CLIMBS, runs - 2):
        seen = len(tried)
        for factor in (2, 0.5):
            if len(tried) == seen:
                at(times(factor))
        if len(tried) == seen:
            break
    at(family.other_betas(best()))
    at(family.other_decay(best()))
    for factor in (2**0.5, 0.5**0.5, 2, 0.5, 2**0.25, 0.5**0.25):  # some may have been seen
        at(times(factor))
    return best()


def rounded(rate: float) -> float:
    """Three digits, so that rows can be looked up by a rate."""
    return float(f"{rate:.3g}")
