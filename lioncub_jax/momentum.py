"""What a worker remembers, and when workers make their momenta alike.

Workers vote with a blend of their own gradient and their own momentum, so momenta drift apart where
workers see different data. A schedule says at which steps ``sync.sync_momentum`` averages them, and
whether in full precision or in codes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lioncub_jax import checks, quantize
from lioncub_jax.ballots import Quantizer


class Memory(NamedTuple):
    """What a worker blends into its message and what it keeps, as pure functions of one leaf.

    The two halves are apart because a worker that abstains sends nothing and must not remember either,
    and because momentum is then overwritten in place only after the message was made from it.

    Attributes:
      init: ``params -> mu``.
      message: ``(g, mu) -> c``, what the worker votes with.
      remember: ``(g, mu) -> mu``.
    """

    init: Callable[[optax.Params], Any]
    message: Callable[[jax.Array, Any], jax.Array]
    remember: Callable[[jax.Array, Any], Any]


def blend(b1: Any = 0.9, b2: Any = 0.99, mu_dtype: Any = None) -> Memory:
    """Lion's memory: ``c = b1 mu + (1 - b1) g`` is sent, ``mu = b2 mu + (1 - b2) g`` is kept.

    Args:
      b1: weight of the momentum in the message, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      mu_dtype: dtype of the momentum; None for that of the parameters.

    Raises:
      ValueError: if a beta is outside [0, 1).
      TypeError: if ``mu_dtype`` is not floating.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).
    """
    checks.check_betas(b1, b2)
    checks.check_mu_dtype(mu_dtype)

    def message(g: jax.Array, mu: jax.Array) -> jax.Array:
        return (1.0 - b1) * g + b1 * mu

    def remember(g: jax.Array, mu: jax.Array) -> jax.Array:
        return ((1 - b2) * g + b2 * mu).astype(mu.dtype)

    return Memory(lambda p: optax.tree.zeros_like(p, dtype=mu_dtype), message, remember)


def nothing() -> Memory:
    """Sends the gradient as it is and keeps nothing: for momentum that lives at the owner.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.communicate(axis_name="data", memory=lc.nothing())  # signSGD with majority vote
    """
    return Memory(
        lambda params: jax.tree.map(lambda p: None, params), lambda g, mu: g, lambda g, mu: mu
    )


class Gaps(NamedTuple):
    """The steps between two syncs, where they follow the drift.

    Attributes:
      shortest: the first gap, and the least.
      longest: the most.
      threshold: below it in ``W (1 - drift)`` the next gap is half of the last, else twice.
    """

    shortest: int
    longest: int
    threshold: float


class Schedule(NamedTuple):
    """At which steps something is due; steps count from 1.

    A named tuple and not a bare function, because ``optax.inject_hyperparams`` would call a function.

    Attributes:
      name: for people.
      due: ``int32[] -> bool[]``, or None: never, which compiles to nothing, or as ``gaps`` say.
      up: the codes in which momenta travel to their owners, or None for full precision.
      gaps: how steps follow the drift, or None where they are known beforehand.
    """

    name: str
    due: Callable[[jax.Array], jax.Array] | None
    up: Quantizer | None = None
    gaps: Gaps | None = None

    @property
    def ever(self) -> bool:
        """Whether there is a step at all at which it may be due."""
        return self.due is not None or self.gaps is not None


def never() -> Schedule:
    """Never: plain Distributed Lion.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.never().due is None
      True
    """
    return Schedule("never", None)


def every(period: int) -> Schedule:
    """Every ``period`` steps.

    Raises:
      ValueError: if ``period`` is below 1.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 10) if lc.every(4).due(t)]
      [4, 8]
    """
    checks.check_count(f"every({period!r})", period)
    return Schedule(f"every({period})", lambda step: step % period == 0)


def first(steps: int, schedule: Schedule | None = None) -> Schedule:
    """During the first ``steps`` steps only: at every one, or where ``schedule`` is due.

    Raises:
      ValueError: if ``steps`` is below 1 or ``schedule`` is never due, or is ``adaptive``.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 20) if lc.first(9, lc.every(4)).due(t)]
      [4, 8]
    """
    checks.check_count(f"first({steps!r})", steps)
    inner = schedule or every(1)
    if inner.due is None:
        given = inner.name if inner.gaps else "never()"
        raise ValueError(
            f"first({steps}, {given}): give a schedule that is due at times known before"
        )
    due = inner.due
    return inner._replace(
        name=f"first({steps}, {inner.name})", due=lambda step: (step <= steps) & due(step)
    )


def thinning(k: int) -> Schedule:
    """Ever more rarely: after ``j`` syncs the next one is ``2**(j / k)`` steps away, rounded down.

    Args:
      k: syncs until the gap has doubled, at least 1.

    Raises:
      ValueError: if ``k`` is below 1.

    Source: Lion Cub (arXiv 2411.16462), thinning schedule.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 40) if lc.thinning(2).due(t)]
      [1, 2, 4, 6, 10, 15, 23, 34]
    """
    checks.check_count(f"thinning({k!r})", k)
    times, j = [1], 1
    while times[-1] < 2**31:
        times.append(times[-1] + int(2 ** (j / k)))
        j += 1
    table = np.array(times[:-1], np.int32)
    return Schedule(f"thinning({k})", lambda step: jnp.any(step == table))


def coded(schedule: Schedule | None = None, bits: int = 1) -> Schedule:
    """Syncs in codes, often, each for a 27th of the bytes of full precision.

    Every worker sends ``Q(mu_i)``, codes with a step for each block of 128; the owner of a slice adds to
    the mean of what it decodes the error ``e`` that it kept from the last sync, and answers with ``u``,
    signs and one bfloat16 for each row of 64:

        ``u = C(mean_i Q(mu_i) + e)``, ``e = mean_i Q(mu_i) + e - u``, ``mu_i = u + (mu_i - Q(mu_i))``

    What a code misses stays in the worker's own momentum and what an answer misses stays with the owner,
    so ``mean_i mu_i + e`` is what it was: nothing is lost, only said later.

    Args:
      schedule: when; ``every(3)`` by default. Often and coarse beats seldom and exact.
      bits: of the codes, ``midrise(bits, block=128)``; the answer has one.

    Returns:
      A ``Schedule`` for ``sync=``; each sync sends ``bits + 1/8`` bits up and 1 + 1/4 down for each
      parameter, times (W-1)/W.

    Raises:
      ValueError: if ``schedule`` is never due or is ``adaptive``; if ``bits`` is out of range.
      TypeError: if ``schedule`` is none.

    Source: this library; error feedback on both sides is that of dist-EF-blockSGD (arXiv 1905.10936).

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.distributed_lion(1e-4, axis_name="data", sync=lc.coded(lc.every(3)))
    """
    inner = every(3) if schedule is None else schedule
    check_schedule(inner)
    if inner.gaps is not None:
        raise ValueError(
            f"coded({inner.name}): codes do not tell the drift that an adaptive gap follows, it is known "
            "only to full precision; give coded(every(T)), or adaptive(...) alone"
        )
    if inner.due is None:
        raise ValueError("coded(never()): give a schedule that is due at times, such as every(3)")
    up = quantize.error_feedback(quantize.midrise(bits, block=128), jnp.float32)
    extra = "" if bits == 1 else f", bits={bits}"
    return inner._replace(name=f"coded({inner.name}{extra})", up=up)


def adaptive(shortest: int = 4, longest: int = 128, threshold: float = 0.5) -> Schedule:
    """Syncs in full precision with a gap that follows the drift found at each of them.

    ``alike = W (1 - drift)``, of all synced leaves together, is 1 for momenta that are independent, more
    if they share a signal, and less if workers pull against each other because they see different data.
    The next gap is half of the last one where ``alike < threshold`` and twice it otherwise.

    Args:
      shortest: the first gap, and the least, in steps.
      longest: the most.
      threshold: of ``alike``, above 0.

    Returns:
      A ``Schedule`` for ``sync=``; the gap is a part of the state, the same on every worker.

    Raises:
      ValueError: if a gap is below 1 or ``longest`` below ``shortest``, or ``threshold`` is not above 0.

    Source: this library; the drift is the diagnostic of Lion Cub (arXiv 2411.16462).

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, axis_name="data", sync=lc.adaptive(longest=64))
    """
    given = f"adaptive(shortest={shortest!r}, longest={longest!r}, threshold={threshold!r})"
    for gap in (shortest, longest):
        checks.check_count(given, gap, "gaps that are whole numbers of at least 1")
    if longest < shortest:
        raise ValueError(
            f"{given}: the longest gap is below the shortest; give shortest <= longest"
        )
    known = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not known or not 0 < threshold < np.inf:
        raise ValueError(f"{given}: give a threshold above 0, such as 0.5")
    name = f"adaptive({shortest}, {longest}, {threshold})"
    return Schedule(name, None, gaps=Gaps(shortest, longest, float(threshold)))


def check_schedule(given: Any) -> None:
    """Raises ``TypeError`` for anything but a ``Schedule``."""
    if not isinstance(given, Schedule):
        raise TypeError(
            f"{given!r} is not a schedule: give never(), every(T), first(M), thinning(k), coded(...) or "
            "adaptive(...)"
        )
