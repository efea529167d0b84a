"""The planner's answer: every method side by side, and which to use.

Methods are ranked by the time until a loss is reached: a step's time, times the steps that a method was
seen to take where a worker's gradient is about as noisy. A factor between two methods is a range: links
reach a share of their rate that few know, an all-reduce of gradients overlaps with computing or does not,
and steps have a standard error.
"""

import dataclasses
import math
from typing import NamedTuple

import optax

from lioncub_jax.audit.units import bytes_text, rate_text, seconds_text
from lioncub_jax.exchange.arguments import check_number
from lioncub_jax.tools.plan import evidence
from lioncub_jax.tools.plan.evidence import Found, Learned
from lioncub_jax.tools.plan.methods import BFLOAT16, SCHEMES, Scheme, scheme_named
from lioncub_jax.tools.plan.model import (
    MODEL,
    NO_GROUP,
    Cluster,
    Estimate,
    parameters_in,
    state_bytes,
    step_time,
)

TIES = "vote", "vote-2-bits"  # where workers who disagree are a tie
TIED = "Votes of two workers, where each disagreement is a tie, were not measured."
APART = "with classes of images of their own, votes lost 12 points of accuracy and owners none"
OWNER = "owner-adamw"  # what to try where nothing was measured
NOT_MEASURED = "not measured"
# Verdicts, which decide how the answer begins.
NOTHING, LOCAL_STEPS, HIDES = "nothing", "local steps", "a mean hides"
USE, MEASURE, USE_MEAN = "use", "measure first", "use a mean"
WORTHWHILE = 1.05  # times faster; less is not enough to change how a model is trained
ERRORS = 2  # standard errors on each side
LONG = 5  # times as long as computing, which an exchange in each step of many workers may take
LOCAL_SHARE = 0.1  # of the time of computing, for exchanges where workers take steps alone

Corner = tuple[float, float]  # share of the link's rate, overlap of a mean


class Row(NamedTuple):
    """A method that works on a cluster.

    Attributes:
      scheme: what it is.
      estimate: of an exchange.
      learned: how it learns; None for what was not measured.
      accumulate: micro-steps for each exchange, beyond those of the scheme.
    """

    scheme: Scheme
    estimate: Estimate
    learned: Learned | None
    accumulate: int = 1

    @property
    def code(self) -> str:
        """The code of the scheme, and how many micro-steps make a step."""
        more = f" with {self.accumulate} micro-steps" if self.accumulate > 1 else ""
        return self.scheme.code + more

    def ratio(self) -> float:
        """Returns the tokens to the loss over AdamW's; infinite for what was not measured."""
        return self.learned.ratio if self.learned else math.inf

    def time(self, compute: float, corner: Corner) -> float:
        """Returns the seconds to the loss over the steps of AdamW; means alone overlap."""
        share, overlap = corner
        overlap *= self.scheme.kind == "mean"
        return self.ratio() * self.estimate.step(compute, share, overlap, self.accumulate)


class Plan(NamedTuple):
    """Every method on one cluster.

    Attributes:
      cluster: workers and links.
      compute: seconds, as given.
      tokens: that a worker sees in a step, as given.
      data: what workers see, as given.
      parameters: of the model.
      nearest: the setting whose steps these are.
      rows: by name, those that work; "vote-micro-4" is "vote" with 4 micro-steps.
      refused: why the others do not work, by name.
    """

    cluster: Cluster
    compute: float
    tokens: int
    data: str
    parameters: int
    nearest: Found
    rows: dict[str, Row]
    refused: dict[str, str]

    def corners(self) -> list[Corner]:
        """Lists the middle of what may be, then the ends: least and largest share, no and full overlap."""
        shares, measured = self.cluster.shares(), self.cluster.measured
        overlaps = (0.0, 0.0 if self.cluster.on_cpu else 1.0)  # XLA for CPUs overlaps nothing
        if measured and measured.overlap is not None:
            overlaps = (measured.overlap, measured.overlap)
        middle = math.sqrt(math.prod(shares)), sum(overlaps) / 2
        return [middle, *((share, overlap) for share in shares for overlap in overlaps)]

    def times(self, *kinds: str, corner: Corner | None = None) -> dict[str, float]:
        """Sorts the times to the loss of all that were seen to get there, or of such kinds."""
        corner = corner or self.corners()[0]
        times = {
            name: row.time(self.compute, corner)
            for name, row in self.rows.items()
            if row.ratio() < math.inf and (not kinds or row.scheme.kind in kinds)
        }
        return dict(sorted(times.items(), key=lambda one: one[1]))

    def first(self, *kinds: str) -> str:
        """Names the first at the loss, of all or of such kinds; none is ""."""
        return next(iter(self.times(*kinds)), "")

    def verdict(self) -> str:
        """Returns what `advice` begins with: one of the constants of this module."""
        if self.cluster.num_workers == 1 or not self.rows:
            return NOTHING
        if self.hides():
            return HIDES
        least = self.least_exchange()
        if least and self.exchange(least) > self.longest() * self.compute:
            return LOCAL_STEPS
        other = self.first("ours", "other")
        if not other and not self.first("mean"):
            return NOT_MEASURED
        low, high = self.range_over_means(other) if other else (0.0, 0.0)
        return USE if low >= WORTHWHILE else MEASURE if high >= WORTHWHILE else USE_MEAN

    def use(self) -> str:
        """Names the method to use, perhaps after a measurement; or "not measured"."""
        verdict = self.verdict()
        if verdict in (USE, MEASURE):
            return self.first("ours", "other")
        return (verdict in (USE_MEAN, HIDES) and self.first("mean")) or NOT_MEASURED

    def mean(self) -> Row | None:
        """Returns the all-reduce of gradients that takes least; None if none fits."""
        return min(
            (row for row in self.rows.values() if row.scheme.kind == "mean"),
            key=lambda row: (row.estimate.communication(), row.scheme.name),
            default=None,
        )

    def exchange(self, row: Row) -> float:
        """Returns the seconds in collectives of an exchange, in the middle of what may be."""
        return row.estimate.communication(self.corners()[0][0])

    def least_exchange(self) -> Row | None:
        """Returns the method of the least exchange, of those that exchange in each step and reach the loss.

        If none was seen to reach it, this is ``owner_adamw``; None if that does not fit.
        """
        known = [row for row in self.each_step() if row.ratio() < math.inf]
        return min(known, key=self.exchange, default=self.rows.get(OWNER))

    def each_step(self) -> list[Row]:
        """Lists the methods that exchange in each step, measured or not."""
        return [row for row in self.rows.values() if row.scheme.every * row.accumulate == 1]

    def longest(self) -> int:
        """Returns how many times as long as computing an exchange in each step may take.

        W workers whose exchange takes W - 1 times as long as computing are as fast as one.
        """
        return min(self.cluster.num_workers - 1, LONG)

    def hides(self) -> bool:
        """Returns whether an all-reduce at the link's least share takes no longer than computing."""
        return any(low <= self.cluster.link.bandwidth <= high for low, high in self.hides_at())

    def hides_at(self) -> list[tuple[float, float]]:
        """Lists the ranges of links' rates at which an all-reduce can hide behind computing.

        Faster links reach lower shares, so there may be a gap between two ranges.
        """
        mean = self.mean()
        if not mean or mean.estimate.fixed >= self.compute or self.corners()[-1][1] < 1:
            return []
        needs = mean.estimate.link_bits / (self.compute - mean.estimate.fixed)
        ranges: list[tuple[float, float]] = []
        for limit in self.cluster.link.limits():
            low = needs / min(self.cluster.at(limit).shares())
            if ranges and low <= ranges[-1][1]:
                low, _ = ranges.pop()
            if low <= limit:
                ranges.append((low, limit))
        return ranges

    def range_if_alike(self, name: str) -> tuple[float, float]:
        """Returns `range_over_means` of a method that learns like AdamW."""
        alike = self.nearest.methods[evidence.REFERENCE]
        rows = {each: row._replace(learned=alike) for each, row in self.rows.items()}
        return self._replace(rows=rows).range_over_means(name)

    def range_over_means(
        self, name: str, corners: list[Corner] | None = None, errors: float = ERRORS
    ) -> tuple[float, float]:
        """Returns how many times as fast as the best mean a method may be, at least and at most."""
        own = self.rows[name]
        assert own.learned
        factors, relative = [], own.learned.error / own.learned.ratio
        for corner in corners or self.corners():
            mean = min(self.times("mean", corner=corner).values(), default=math.inf)
            factors.append(mean / own.time(self.compute, corner))
        return min(factors) / (1 + errors * relative), max(factors) * (1 + errors * relative)


def plan(
    params: optax.Params | int,
    cluster: Cluster,
    compute: float,
    *,
    tokens: int,
    data: str = evidence.DATA[0],
    memory: float = math.inf,
) -> Plan:
    """Compares every method on a cluster, by the evidence of the nearest setting.

    Steps are not measured if that setting is far away, and not for votes of two workers: there each
    disagreement is a tie.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``, or how many parameters there are.
      cluster: workers, links and memory.
      compute: seconds of a device's own forward and backward pass and update, above zero.
      tokens: that one worker sees in a step: its batch times the length.
      data: what workers see, "alike" or "different".
      memory: bytes of a device.

    Returns:
      A `Plan`.

    Raises:
      ValueError: as `cell_for`; for no parameters, and a compute time that is not above zero.

    Example:
      >>> from lioncub_jax.tools.plan import Link
      >>> slow = plan(124_000_000, Cluster(8, Link(1e9, 50e-6)), 0.144, tokens=32)
      >>> round(slow.rows["vote"].estimate.step(0.144), 2), slow.nearest.distance
      (0.36, 'here')
    """
    check_number(
        f"compute={compute!r}", compute, lambda time: 0 < time < math.inf,
        "give seconds, above zero; speedups depend on it",
    )  # fmt: skip
    size = parameters_in(params)
    nearest = evidence.cell_for(cluster.num_workers, tokens, data, size)
    rows, refused = {}, {}
    for scheme in SCHEMES:
        if why := _refusal(scheme, size, cluster, data, memory):
            refused[scheme.name] = why
            continue
        estimate = step_time(scheme, params, cluster)
        unknown = nearest.distance == evidence.FAR or (
            cluster.num_workers == 2 and scheme.name in TIES
        )
        learned = None if unknown else nearest.methods.get(scheme.learns)
        rows[scheme.name] = Row(scheme, estimate, learned)
        if learned and learned.ratio < math.inf and scheme.every == 1:
            for count, how in _accumulated(scheme, learned, nearest).items():
                rows[f"{scheme.name}-micro-{count}"] = Row(scheme, estimate, how, count)
    return Plan(cluster, compute, tokens, data, size, nearest, rows, refused)


def _refusal(scheme: Scheme, size: int, cluster: Cluster, data: str, memory: float) -> str:
    """Why a method is not to be used there; "" where it may be."""
    if data == "different" and scheme.name in TIES:
        return APART
    holds = MODEL * size / cluster.group_size + state_bytes(scheme, size, cluster)
    if holds > memory:
        return (
            f"parameters, gradients and state in float32 take {bytes_text(holds)} of a device that has "
            f"{bytes_text(memory)}"
        )
    return NO_GROUP if cluster.group_size > 1 and not scheme.two_levels else ""


def _accumulated(scheme: Scheme, learned: Learned, nearest: Found) -> dict[int, Learned]:
    """Learning of a method with more micro-steps: as measured, or with the most that they cost any."""
    most: dict[int, Learned] = {}
    for name, micro in nearest.methods.items():
        method, _, number = name.rpartition("-micro-")
        base = nearest.methods.get(method)
        if base and math.inf not in (base.ratio, micro.ratio):
            there = learned.with_micro_steps(base, micro)
            most[int(number)] = max(there, most.get(int(number), there))
    own = f"{scheme.learns}-micro-"
    return {n: nearest.methods.get(f"{own}{n}", assumed) for n, assumed in most.items()}


# --- In words


def advice(plan: Plan) -> str:
    """Says what to use there, what it gains, and where that was measured.

    Args:
      plan: what `plan` returned.

    Returns:
      Sentences about the method that reaches the loss first, of this library or not. They may begin with
      "Do not use this" where nothing is ``WORTHWHILE`` times faster than an all-reduce of gradients, with
      "Measure first" where that depends on what is not known, and then name the one number to measure;
      with "Take local steps" where even the least exchange takes too long beside computing; with
      "Not measured" where the nearest setting is far away, and then name no method.

    Example:
      >>> from lioncub_jax.tools.plan import Link
      >>> advice(plan(10**8, Cluster(1, Link(1e9)), 0.1, tokens=32))[:31]
      'Do not use this: one worker has'
    """
    if plan.cluster.num_workers == 1:
        return "Do not use this: one worker has no others to exchange with; use optax.adamw or optax.lion."
    if not plan.rows:
        return (
            f"Nothing fits: {next(iter(plan.refused.values()))}. Cut the model over more devices."
        )
    verdict, where = plan.verdict(), _link_text(plan)
    if verdict in _WITHOUT_METHOD:
        return _WITHOUT_METHOD[verdict](plan)
    row, other = plan.rows[plan.use()], plan.first("ours", "other")
    assert row.learned
    rest = f"{_rival(plan)}{_tuned(row.learned)} {_measured(plan, row)}"
    if not plan.first("mean"):
        return f"Use {row.code}: no all-reduce of gradients fits a device. {rest}"
    if not other:
        return f"Use {row.code}: no other method was seen to reach the loss. {rest}"
    low, high = plan.range_over_means(other)
    if verdict == USE_MEAN:
        return (
            f"Do not use this: {where} no method is {WORTHWHILE} times faster than an all-reduce of "
            f"gradients. {plan.rows[other].code}, the best other, is at most {digits(high)} times as "
            f"fast. Use {row.code}. {rest}"
        )
    gains = (
        f"{_between(low, high)} times as fast as the best all-reduce. This is "
        f"{plan.rows[plan.first('mean')].code}.{_hides_at(plan)}{_alone(plan)}"
    )
    if verdict == MEASURE:
        return f"Measure first: {where} {row.code} is {gains} {_what_to_measure(plan)} {rest}"
    return f"Use {row.code}: {where} it is {gains} {rest}"


def _link_text(plan: Plan) -> str:
    if plan.cluster.measured:
        return "on the machines that were measured"
    link, (low, high) = plan.cluster.link, plan.cluster.shares()
    rate = f"at {rate_text(link.bandwidth)}"
    if low == high == 1:
        return rate
    return f"{rate}, of which {link.kind} collectives reach {low:.0%} to {high:.0%},"


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _hides_at(plan: Plan) -> str:
    ranges = []
    for low, high in plan.hides_at():
        to = "" if high == math.inf else f" to {rate_text(high)}"
        if high > 1.1 * low:  # a narrower one helps nobody
            ranges.append(f"from about {rate_text(_round_up(low))}{to}")
    if not ranges:
        return ""
    rates, best = " and ".join(ranges), plan.first("mean")
    if best and plan.rows[best].accumulate > 1:
        return f" Without micro-steps it can hide behind computing {rates}."
    return f" {_capital(rates)} that all-reduce can hide behind computing."


def _alone(plan: Plan) -> str:
    """One worker that takes all rows, in as many micro-steps, beside the method to use."""
    alone = plan.cluster.num_workers * plan.compute
    times = digits(alone / plan.rows[plan.use()].time(plan.compute, plan.corners()[0]))
    return f" One worker alone, with all rows in micro-steps, takes about {times} times as long."


def _tuned(how: Learned) -> str:
    """Ratios to AdamW that tuning chose."""
    ratios = how.rate_over_adamw, how.decay_over_adamw
    rate, decay = ("" if ratio == 1 else f"{digits(ratio)} times " for ratio in ratios)
    return (
        f"Begin with {rate}the learning rate and {decay}the weight decay of your AdamW, and tune; betas "
        f"were {how.b1:g} and {how.b2:g}."
    )


def _rival(plan: Plan) -> str:
    """The next method, and where it is of the same kind the best of the other: ours, or of others."""
    times, name = plan.times("ours", "other"), plan.use()
    row = plan.rows[name]
    others = [other for other in times if plan.rows[other].scheme is not row.scheme]
    if name not in times or not others:
        return ""
    after, kind = others[0], row.scheme.kind
    rival = next((other for other in others if plan.rows[other].scheme.kind != kind), after)

    def longer(other: str) -> str:
        factor = digits(times[other] / times[name])
        return "as long" if factor == "1" else f"{factor} times as long"

    words = f"The next, {plan.rows[after].code}, takes about {longer(after)}"
    if rival != after:
        whose = "of others" if kind == "ours" else "of this library"
        words += f", and the best {whose}, {plan.rows[rival].code}, {longer(rival)}"
    return f"{words}. "


def _what_to_measure(plan: Plan) -> str:
    """The one number that narrows the range most."""
    name, (middle, *ends) = plan.use(), plan.corners()
    known_rate = [(middle[0], overlap) for _, overlap in ends]
    known_overlap = [(share, middle[1]) for share, _ in ends]
    ranges = {
        "the rate that an all-reduce reaches, by lioncub probe": plan.range_over_means(
            name, known_rate
        ),
        "how much of an all-reduce overlaps with computing, by lioncub probe --step": (
            plan.range_over_means(name, known_overlap)
        ),
        "its steps to a loss: run both for some hundreds of steps": plan.range_over_means(
            name, errors=0
        ),
    }
    return f"Measure {min(ranges, key=lambda words: ranges[words][1] / ranges[words][0])}."


def _local_steps(plan: Plan) -> str:
    words = f"{_too_long(plan)} {_steps_alone(plan)}"
    return f"Take local steps: {words} Compare the loss with that of one machine."


def _too_long(plan: Plan) -> str:
    """The least exchange that reached the loss and the limit; and one that is less and did not."""
    least, limit, workers = plan.least_exchange(), plan.longest(), plan.cluster.num_workers
    assert least
    small = min(plan.each_step(), key=plan.exchange)
    where = _link_text(plan)
    if least.ratio() == math.inf:
        which = f"no method was measured. {_capital(where)} the exchange of {least.code}"
    elif small is least:
        which = f"{where} the least exchange, of {least.code},"
    else:
        which = f"{where} the exchange of {least.code}"
    longer = digits(plan.exchange(least) / plan.compute)
    longer = f"just above {limit}" if longer == str(limit) else longer
    why = "" if limit < workers - 1 else f", where {workers} workers are no faster than one"
    words = (
        f"{which} takes {seconds_text(plan.exchange(least))}. This is {longer} times as long as computing. "
        f"The limit is {limit}{why}."
    )
    if workers == 2:
        return f"{words} {TIED}"
    times = plan.exchange(small) / plan.compute
    if small is not least and times <= limit:
        but = "did not reach the loss in short runs" if small.learned else "was not measured here"
        words += f" {small.code} takes {digits(times)} times computing, but {but}: compare it too."
    return words


def _steps_alone(plan: Plan) -> str:
    """How many steps a worker takes alone, and what DiLoCo in codes needs here."""
    coded = scheme_named("diloco-32-coded")
    whole = dataclasses.replace(plan.cluster, group_size=1)  # it has no two levels
    exchange = step_time(coded, plan.parameters, whole).communication(plan.corners()[0][0])
    steps = math.ceil(_round_up(exchange / (LOCAL_SHARE * plan.compute)))
    words = (
        f"Let each worker take {steps:,} steps or more alone, by local_steps= and "
        f"baselines.diloco(bits=4). Its exchange takes {seconds_text(exchange)}, at most a tenth of their "
        "computing."
    )
    refused = plan.refused.get(coded.name)
    if refused == NO_GROUP:
        words += (
            " It has no group=, so devices of a worker must share an inner mesh axis, such as fsdp."
        )
    elif refused:
        words += f" The plan refuses it here: {refused}."
    if not any(row.learned and row.scheme.every >= steps for row in plan.rows.values()):
        words += " So few exchanges were not measured here."
    return f"{words} DiLoCo's paper, arXiv 2311.08105, has one in 500 steps."


def _hides(plan: Plan) -> str:
    mean = plan.mean()
    assert mean
    takes = mean.estimate.communication(min(plan.cluster.shares()))
    unknown = f" Nobody ran {_asked(plan)}." if plan.nearest.distance == evidence.FAR else ""
    return (
        f"Do not use this: {_link_text(plan)} {_of(mean)} can hide behind computing. It takes at most "
        f"{seconds_text(float(f'{takes:.2g}'))} of a step of {seconds_text(plan.compute)}. Make it overlap "
        f"(lioncub probe --step says how much does), or accumulate micro-steps.{unknown}"
    )


def _of(mean: Row) -> str:
    dtype = "bfloat16" if mean.scheme.name.endswith(BFLOAT16) else "float32"
    return f"an all-reduce in {dtype}"


def _far(plan: Plan) -> str:
    gains = {
        name: plan.range_if_alike(name)
        for name, row in plan.rows.items()
        if row.scheme.kind == "ours"
    }
    name = OWNER if OWNER in gains else next(iter(gains))
    code, cell, mean = plan.rows[name].code, plan.nearest.cell, plan.mean()
    useless = max(high for _, high in gains.values()) < WORTHWHILE
    words = (
        f"{'Do not use this' if useless else 'Not measured'}: nobody ran {_asked(plan)}. The nearest: "
        f"{_runs(plan, plan.nearest.methods[evidence.REFERENCE])} For images a token is a patch. "
    )
    if plan.tokens > cell.tokens and plan.data == cell.data:
        words += "With more tokens, methods that send less took more steps. "
    if not mean:
        return f"{words}No all-reduce of gradients fits a device, and {code} does."
    words += (
        f"Assume that {code} learns like AdamW. Then {_link_text(plan)} it is "
        f"{_between(*gains[name])} times as fast as {_of(mean)}."
    )
    if plan.corners()[1] != plan.corners()[2]:
        words += (
            " The least is where that overlaps fully with computing, the most where it does not."
        )
    words += _hides_at(plan)
    if useless:
        return f"{words} No method of this library could gain 5%."
    return (
        f"{words} Run {plan.rows.get(evidence.REFERENCE, mean).code} and {code} for some hundred steps, "
        "and compare their losses after the same time."
    )


_WITHOUT_METHOD = {LOCAL_STEPS: _local_steps, HIDES: _hides, NOT_MEASURED: _far}


def _asked(plan: Plan) -> str:
    return f"{plan.tokens:,} tokens, {plan.cluster.num_workers:,} workers and data {plan.data}"


def _runs(plan: Plan, how: Learned) -> str:
    """Runs of a method in the nearest setting."""
    cell, study = plan.nearest.cell, evidence.packaged().study
    return (
        f"{cell.tokens:,} tokens a worker and step, {cell.num_workers} workers and data {cell.data}. These "
        f"were runs of {'only ' * (how.steps < evidence.LONG_RUN)}{how.steps:,} steps of a "
        f"{study['model']} of {how.parameters:,} parameters (yours has {plan.parameters:,}). The text was "
        f"{study['dataset']}, with {how.runs} seed{'s' * (how.runs > 1)}, not on a GPU."
    )


def _measured(plan: Plan, row: Row) -> str:
    """The runs behind an answer, and what is not as in them."""
    (cell, distance, methods), how, scheme = plan.nearest, row.learned, row.scheme
    assert how
    measured = "Measured" if distance == evidence.HERE else "Nearest measurement"
    micro = f"{scheme.learns}-micro-{row.accumulate}"
    notes = {
        "bfloat16 is assumed to learn like float32.": scheme.name != scheme.learns,
        "Micro-steps are taken to cost it the most that they cost any method.": (
            row.accumulate > 1 and micro not in methods
        ),
        "The rank is the same share of the width.": scheme.name.startswith("powersgd"),
        "With more tokens votes and codes took more steps, so expect less.": (
            plan.tokens > cell.tokens
        ),
        TIED: plan.cluster.num_workers == 2,
        f"Votes are left out: {APART}.": APART in plan.refused.values(),
    }
    said = [note for note, holds in notes.items() if holds]
    return " ".join([f"{measured}: {_runs(plan, how)}", *_not_measured(plan, row), *said])


def _not_measured(plan: Plan, row: Row) -> list[str]:
    """Ways to send less often that nobody measured there, where an exchange takes longer than computing."""
    rows, mean = plan.rows.values(), plan.mean()
    missing = []
    if plan.exchange(row) > plan.compute and not any(x.learned for x in rows if x.scheme.every > 1):
        missing.append("local steps")
    if mean and plan.exchange(mean) > plan.compute and not any(x.accumulate > 1 for x in rows):
        missing.append("micro-steps")
    return [f"{_capital(' and '.join(missing))} were not measured there."] if missing else []


def _between(low: float, high: float) -> str:
    least, most = digits(low), digits(high)
    return f"{least} to {most}" if least != most else f"about {most}"


def _round_up(number: float) -> float:
    """Rounds up to two digits, for what holds from there on."""
    scale = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / scale) * scale


def digits(number: float) -> str:
    """Shows two digits, all that such a model knows.

    Example:
      >>> digits(123.4), digits(0.1234)
      ('120', '0.12')
    """
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
