"""The answer as pages show it, from what the planner says: a whole table, a short one, and a few lines."""

import textwrap

from lioncub_jax.tools.plan import DATA, Plan, evidence, what_to_use
from lioncub_jax.tools.plan.choice import NETWORKS, SIZE, Use


def what_to_use_text() -> str:
    """The table and what its columns are, as both stand in documents.

    Returns:
      Lines of Markdown. Numbers that differ among the networks of a row are shown as the first to the last.
    """
    known = evidence.packaged()
    study, cell = known.study, known.cells[0]
    head = "network", "tokens", "data", "use", "bits", "steps", "faster", "rate", "decay", "betas"
    rows = what_to_use()
    lines = [head, ["---"] * len(head), *map(_cells, rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\n* *network*: the time of a float32 all-reduce of gradients, divided by the time of "
        "computing a step.\n"
        "* *tokens*: what one worker sees in a step. *bits*: what it sends in a step for each parameter.\n"
        "* *steps*: to the loss, divided by the steps of the better float32 optimizer.\n"
        "* *faster*: how many times faster it reaches the loss than the best other method.\n"
        "* *rate* and *decay*: divided by those of float32 AdamW. Multiply those of the AdamW that you "
        f"have, and tune. These ratios and *betas* were best in runs of {cell.steps} steps.\n\n"
        f"Measured with a {study['model']} of {cell.parameters:,} parameters, not on a GPU. "
        f"{_runs(rows)}\n"
    )


def _runs(rows: list[Use]) -> str:
    """How many workers and seeds stand behind the rows."""
    said: dict[str, set[int]] = {}
    for row in rows:
        for plan in row.plans.values():
            cell, how = plan.found.cell, plan.rows[row.method()].learned
            assert how
            where = f"{cell.tokens:,} tokens, {row.data}: {cell.workers} workers"
            said.setdefault(where, set()).add(how.runs[evidence.RANKED])
    seeds = {where: _from_to([str(n) for n in sorted(runs)]) for where, runs in said.items()}
    return " ".join(f"{where}, {n} seed{'s' * (n != '1')}." for where, n in seeds.items())


def _cells(row: Use) -> list[str]:
    if not row.plans:
        return ["any", f"{row.tokens:,}", row.data, row.method(), *[""] * 6]
    plans = list(row.plans.values())
    scheme, estimate, how = used = plans[0].rows[row.method()]
    assert how
    best = min(plans[0].rows[name].steps() for name in ("lion", "adamw"))
    return [
        _networks(row),
        f"{row.tokens:,}",
        row.data,
        f"`{scheme.code}`",
        f"{8 * estimate.sent_bytes / SIZE:.3g}",
        f"{used.steps() / best:.2f}",
        _from_to([f"{one.gain(one.first('mean', 'peer')):.2f}" for one in plans]),
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
    scheme = plan.rows[plan.use()].scheme
    if scheme.kind == "mean":
        return f"an all-reduce{' in bfloat16' if scheme.learns != scheme.name else ''}"
    others = map(plan.first, ("mean", "peer"))
    mean, peer = (f"{plan.gain(name):.2g}" if name else "–" for name in others)
    return f"`{scheme.code}`, {mean} and {peer}"


def _networks(row: Use) -> str:
    return _from_to([f"{network:g}" for network in row.plans])


def _from_to(numbers: list[str]) -> str:
    first, last = numbers[0], numbers[-1]
    return first if first == last else f"{first} to {last}"


def what_to_use_short() -> str:
    """What was measured of it, in short: by the names of methods, as at the head of the library."""
    lines: dict[str, list[str]] = {}
    for row in what_to_use():
        if row.plans:
            noise = f"{row.tokens:,} tokens, data {row.data}"
            lines.setdefault(noise, []).append(f"{row.method()} at {_networks(row)}")
    text = (f"{noise}: {', '.join(said)}" for noise, said in lines.items())
    return "\n".join(textwrap.fill(line, 98, subsequent_indent="  ") for line in text)
