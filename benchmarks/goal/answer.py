"""The answer as pages show it, from what the planner says: a whole table and a short one."""

from collections.abc import Collection

from goal.choice import NETWORKS, SIZE, Use, what_to_use
from lioncub_jax.tools.plan import DATA, Plan, evidence
from lioncub_jax.tools.plan.evidence import LONG_RUN
from lioncub_jax.tools.plan.report import MEASURE, NOT_MEASURED


def what_to_use_text() -> str:
    """The table and what its columns are, as both stand in documents.

    Returns:
      Lines of Markdown. Numbers that differ in a line are shown as the least to the most.
    """
    known = evidence.packaged()
    study, cell = known.study, known.cells[0]
    head = (
        "network", "tokens", "data", "runs", "use", "bits", "cost", "as fast", "rate", "decay", "betas",
    )  # fmt: skip
    rows = what_to_use()
    lines = [head, ["---"] * len(head), *(_cells(row) for row in rows if row.plans)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\n* *network*: the time of a float32 all-reduce of gradients, divided by the time of "
        "computing a step.\n"
        "* *tokens*: what one worker sees in a step. *bits*: what it sends in a step for each parameter.\n"
        "* *runs*: the steps of the longest runs of this method. In longer runs the order of methods may "
        "be another one.\n"
        "* *cost*: the tokens to the loss, divided by those of float32 AdamW. Micro-steps that did not run "
        "with a method are taken to cost it the most that they cost any, and so are longer runs.\n"
        "* *as fast*: how many times as fast as the best all-reduce of gradients it reaches the loss. The "
        "least is over one that overlaps fully with computing. The most is over one that does not "
        "overlap. Both have two standard errors of the cost.\n"
        "* *rate* and *decay*: divided by those of float32 AdamW. Multiply those of the AdamW that you "
        "have, and tune. These ratios and *betas* were best in these runs.\n\n"
        f"Measured with a {study['model']} of {cell.parameters:,} parameters, not on a GPU. "
        f"{_runs(rows)}{_not_measured(rows)}\n"
    )


def _runs(rows: list[Use]) -> str:
    """The numbers of workers and seeds of the methods that the table names, by setting."""
    settings: dict[str, set[int]] = {}
    for row in rows:
        for (tokens, _), plan in row.plans.items():
            if row.method() == NOT_MEASURED:
                continue
            cell, how = plan.nearest.cell, plan.rows[row.method()].learned
            assert how
            where = f"{tokens:,} tokens, {row.data}: {cell.num_workers} workers"
            settings.setdefault(where, set()).add(how.runs)
    seeds = {where: _from_to(runs) for where, runs in settings.items()}
    return " ".join(f"{where}, {n} seed{'s' * (n != '1')}." for where, n in seeds.items())


def _not_measured(rows: list[Use]) -> str:
    """What nobody ran."""
    missing = [
        f"{' and '.join(f'{n:,}' for n in row.tokens)} tokens with data {row.data}"
        for row in rows
        if not row.plans
    ]
    return f" Not measured: {', '.join(missing)}." if missing else ""


def _cells(row: Use) -> list[str]:
    tokens = ", ".join(f"{n:,}" for n in row.tokens)
    if row.method() == NOT_MEASURED:
        networks = _from_to(row.networks(), "g")
        return [networks, tokens, row.data, "", row.verdict(), *[""] * 6]
    plans = list(row.plans.values())
    scheme, _, how, _ = plans[0].rows[row.method()]
    assert how
    ranges = [one.range_over_means(row.method()) for one in plans]
    named = [one.rows[row.method()] for one in plans]
    bits = [8 * one.estimate.sent_bytes / SIZE / one.accumulate for one in named]
    first = "measure first: " if row.verdict() == MEASURE else ""
    least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
    return [
        _from_to(row.networks(), "g"),
        tokens,
        row.data,
        _lengths(plans),
        f"{first}`{plans[0].rows[row.method()].code}`",
        _from_to(bits, ".3g"),
        f"{how.ratio:.2g}",
        f"{least:.2g} to {most:.2g}" if scheme.kind != "mean" else "1",
        f"{how.rate_over_adamw:.2g}",
        f"{how.decay_over_adamw:.2g}",
        f"{how.b1:g}, {how.b2:g}",
    ]


def _lengths(plans: list[Plan]) -> str:
    """Steps of the runs of the methods that plans name."""
    rows = [plan.rows[plan.use()] for plan in plans if plan.use() != NOT_MEASURED]
    steps = {row.learned.steps for row in rows if row.learned}
    return f"{'only ' * (max(steps) < LONG_RUN)}{_from_to(steps, ',')}" if steps else ""


def answer_text() -> str:
    """The same in Markdown for a first page: a line for each network, a column for each noise."""
    at = {
        (tokens, row.data, network): plan
        for row in what_to_use()
        for (tokens, network), plan in row.plans.items()
    }
    noises = sorted({(data, tokens) for tokens, data, _ in at})
    heads = []
    for data, n in noises:
        steps = _lengths([at[n, data, x] for x in NETWORKS])
        heads.append(f"{n:,} tokens{'' if data == DATA[0] else f', data {data}'} ({steps} steps)")
    lines = [("network", *heads), ["---"] * (len(noises) + 1)]
    lines += [(f"{x:g}", *(_answer(at[n, data, x]) for data, n in noises)) for x in NETWORKS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _answer(plan: Plan) -> str:
    if plan.use() == NOT_MEASURED:
        return plan.verdict()
    scheme = plan.rows[plan.use()].scheme
    if scheme.kind == "mean":
        return f"an all-reduce{' in bfloat16' if scheme.learns != scheme.name else ''}"
    low, high = plan.range_over_means(plan.use())
    first = "measure first: " if plan.verdict() == MEASURE else ""
    code = f"`{plan.rows[plan.use()].code}`"
    if scheme.every > 1:  # the outer optimizer says it
        outer = code.partition("(..., ")[2].partition(", local_steps")[0]
        code = f"`{outer}` with {scheme.every} local steps"
    return f"{first}{code}, {low:.2g} to {high:.2g}"


def _from_to(numbers: Collection[float], form: str = "") -> str:
    """The least and the most of numbers; one where they look the same."""
    first, last = (format(limit(numbers), form) for limit in (min, max))
    return first if first == last else f"{first} to {last}"
