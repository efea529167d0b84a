"""The answer as pages show it, from what the planner says: a whole table and a short one."""

from goal.choice import NETWORKS, SIZE, Use, what_to_use
from lioncub_jax.tools.plan import DATA, Plan, evidence
from lioncub_jax.tools.plan.report import MEASURE, NOT_MEASURED


def what_to_use_text() -> str:
    """The table and what its columns are, as both stand in documents.

    Returns:
      Lines of Markdown. Numbers that differ among the networks of a row are shown as the first to the last.
    """
    known = evidence.packaged()
    study, cell = known.study, known.cells[0]
    head = "network", "tokens", "data", "use", "bits", "steps", "as fast", "rate", "decay", "betas"
    rows = what_to_use()
    lines = [head, ["---"] * len(head), *map(_cells, rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\n* *network*: the time of a float32 all-reduce of gradients, divided by the time of "
        "computing a step.\n"
        "* *tokens*: what one worker sees in a step. *bits*: what it sends in a step for each parameter.\n"
        "* *steps*: to the loss, divided by those of float32 AdamW.\n"
        "* *as fast*: how many times as fast as the best all-reduce of gradients it reaches the loss. The "
        "least is over one that overlaps fully with computing. The most is over one that does not "
        "overlap. Both have two standard errors of the steps.\n"
        "* *rate* and *decay*: divided by those of float32 AdamW. Multiply those of the AdamW that you "
        f"have, and tune. These ratios and *betas* were best in runs of {cell.steps} steps.\n\n"
        f"Measured with a {study['model']} of {cell.parameters:,} parameters, not on a GPU. "
        f"{_runs(rows)}\n"
    )


def _runs(rows: list[Use]) -> str:
    """The numbers of workers and seeds of the rows."""
    settings: dict[str, set[int]] = {}
    for row in rows:
        for plan in row.plans.values():
            if row.method() == NOT_MEASURED:
                continue
            cell, how = plan.nearest.cell, plan.rows[row.method()].learned
            assert how
            where = f"{cell.tokens:,} tokens, {row.data}: {cell.num_workers} workers"
            settings.setdefault(where, set()).add(how.runs)
    seeds = {where: _from_to([str(n) for n in sorted(runs)]) for where, runs in settings.items()}
    return " ".join(f"{where}, {n} seed{'s' * (n != '1')}." for where, n in seeds.items())


def _cells(row: Use) -> list[str]:
    if row.method() == NOT_MEASURED:
        networks = _networks(row) if row.plans else "any"
        return [networks, f"{row.tokens:,}", row.data, row.verdict(), *[""] * 6]
    plans = list(row.plans.values())
    scheme, estimate, how, _ = plans[0].rows[row.method()]
    assert how
    ranges = [one.range_over_means(row.method()) for one in plans]
    first = "measure first: " if row.verdict() == MEASURE else ""
    least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
    return [
        _networks(row),
        f"{row.tokens:,}",
        row.data,
        f"{first}`{scheme.code}`",
        f"{8 * estimate.sent_bytes / SIZE:.3g}",
        f"{how.ratio:.2g}",
        f"{least:.2g} to {most:.2g}" if scheme.kind != "mean" else "1",
        f"{how.rate_over_adamw:.2g}",
        f"{how.decay_over_adamw:.2g}",
        f"{how.b1:g}, {how.b2:g}",
    ]


def answer_text() -> str:
    """The same in Markdown for a first page: a line for each network, a column for each noise."""
    rows = [row for row in what_to_use() if row.plans]
    noises = list(dict.fromkeys((row.tokens, row.data) for row in rows))
    heads = (f"{n:,} tokens{'' if data == DATA[0] else f', data {data}'}" for n, data in noises)
    at = {(row.tokens, row.data, x): plan for row in rows for x, plan in row.plans.items()}
    lines = [("network", *heads), ["---"] * (len(noises) + 1)]
    lines += [(f"{x:g}", *(_answer(at[n, data, x]) for n, data in noises)) for x in NETWORKS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _answer(plan: Plan) -> str:
    if plan.use() == NOT_MEASURED:
        return plan.verdict()
    scheme = plan.rows[plan.use()].scheme
    if scheme.kind == "mean":
        return f"an all-reduce{' in bfloat16' if scheme.learns != scheme.name else ''}"
    low, high = plan.range_over_means(plan.use())
    first = "measure first: " if plan.verdict() == MEASURE else ""
    return f"{first}`{scheme.code}`, {low:.2g} to {high:.2g}"


def _networks(row: Use) -> str:
    return _from_to([f"{network:g}" for network in row.plans])


def _from_to(numbers: list[str]) -> str:
    first, last = numbers[0], numbers[-1]
    return first if first == last else f"{first} to {last}"
