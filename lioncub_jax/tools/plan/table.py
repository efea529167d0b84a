"""A plan for people: a table of methods, and at most six lines below it."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lioncub_jax.programs.units import bytes_text, rate_text, seconds_text
from lioncub_jax.tools.plan import evidence, verdict
from lioncub_jax.tools.plan.methods import SCHEMES
from lioncub_jax.tools.plan.model import Row, step_time
from lioncub_jax.tools.plan.verdict import Plan, Range

HEADS = "bits a\nparam|sent\na step|time\na step|tokens\n/AdamW|speedup\nto the loss|\nmemory"


def shown(plan: Plan) -> Group:
    """Lays a plan out for `rich.print`: what was given, the table, and the lines.

    Example:
      >>> import rich
      >>> from lioncub_jax.tools.plan import Cluster, Link, plan
      >>> rich.print(shown(plan(10**8, Cluster(1, Link(1e9)), 0.1, tokens=32)))  # doctest: +ELLIPSIS
      100,000,000 parameters, 1 worker, ...
    """
    at = plan.cluster
    known = at.link.shares()
    reached = f"{min(known):.0%} to {max(known):.0%} reached"
    where = f"{at.link.kind} at {rate_text(at.link.bandwidth)} ({reached})"
    given = (
        f"{plan.parameters:,} parameters, {at.num_workers:,} worker{'s' * (at.num_workers > 1)}, "
        f"{'links as measured' if at.measured else where}, computing {seconds_text(plan.compute)}, "
        f"{plan.tokens:,} tokens a worker, data {plan.data}"
    )
    do, *rest = lines(plan)
    return Group(given, "", table(plan), "", Text(do, "bold"), *rest, "")


def table(plan: Plan) -> Table:
    """A row a method, the first at the loss above: ">" is the one to use, "=" the one to compare with.

    Where some were measured, the others have no row.
    """
    out = Table("  method", box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for head in HEADS.split("|"):
        out.add_column(head, justify="right")
    (_, use), mean = plan.answer(), plan.first("mean")
    for name, x in plan.numbers()["methods"].items():
        row = plan.rows[name]
        if not row.learned and (mean or row.scheme.every > 1):
            continue
        fast = "not reached" if row.learned else verdict.NOT_MEASURED
        if x["tokens"]:
            fast = "1" if row is mean else between(x["faster"]) if x["faster"] else ""
        out.add_row(
            ("> " if row is use else "= " if row is mean else "  ") + row.scheme.title,
            digits(x["bits"]), bytes_text(x["sent_bytes"]), seconds_text(x["seconds"]),
            f"{x['tokens']:.2f}" if x["tokens"] else "", fast, bytes_text(x["held_bytes"]),
            style="bold green" if row is use else "" if x["tokens"] else "dim",
        )  # fmt: skip
    for name, why in plan.refused.items():
        row = step_time(SCHEMES[name], plan.parameters, plan.cluster)
        held = bytes_text(row.held_bytes)
        out.add_row(f"  {row.scheme.title}", *[""] * 4, why, held, style="dim")
    return out


def lines(plan: Plan) -> list[str]:
    """Says what to do, the rates, what was measured and what not, and what a neighbouring setting says."""
    what, row = plan.answer()
    said, (cell, distance, methods, beside) = [_do(plan, what, row)], plan.nearest
    if what == verdict.NOTHING:
        return said
    how = (row and row.learned) or methods[evidence.REFERENCE]
    if row and row.scheme.kind != "mean":
        factor = digits(how.decay_over_adamw)
        decay = "the same decay" if factor == "1" else f"{factor} times its decay"
        said.append(
            f"Begin with {digits(how.rate_over_adamw)} times the learning rate of your AdamW and {decay}, "
            f"betas {how.b1:g} and {how.b2:g}; then tune."
        )
    near = "Measured" if distance == evidence.HERE else "Nearest runs"
    less = " (with more, expect less)" * (plan.tokens > cell.tokens)
    said.append(
        f"{near}: {cell.tokens:,} tokens a worker{less}, {cell.num_workers} workers, data {cell.data}; "
        f"{how.steps:,} steps of a byte GPT of {how.parameters:,} parameters, "
        f"{how.runs} seed{'s' * (how.runs > 1)}, no GPU."
    )
    unknown = [x.scheme for x in plan.rows.values() if not x.learned]
    names = [x.title for x in unknown if x.every == 1 and x.learns == x.name]
    if not any(x.learned for x in plan.rows.values() if x.scheme.every > 1):
        names = ["local steps", "micro-steps", *names]
    if names and distance != evidence.FAR:
        said.append(f"Not measured there: {', '.join(names)}.")
    if beside:
        said.append(f"Near a border: {_beside(plan.by(beside))}.")
    if verdict.APART in plan.refused.values():
        said.append(
            "Votes are left out: with classes of images of their own they lost 12 points of accuracy."
        )
    return said


def _do(plan: Plan, what: str, row: Row | None) -> str:
    workers = plan.cluster.num_workers
    if workers == 1:
        return "Do not use this: one worker has no others to exchange with."
    if what == verdict.NOTHING:
        return "Do not use this: nothing fits a device."
    if what == verdict.USE_MEAN:
        return f"Do not use this: no method can be {verdict.WORTHWHILE} times as fast as an all-reduce."
    if what == verdict.HIDES:
        return (
            "Do not use this: an all-reduce takes no longer than computing, and can hide behind it. Let it "
            "overlap; lioncub probe --step says how much does."
        )
    least, alike = plan.least_exchange(), plan.if_alike()
    if what == verdict.LOCAL_STEPS:
        times = digits(plan.exchange(least) / plan.compute)
        return (
            f"Take local steps: an exchange of {least.scheme.code} takes {times} times as long as "
            f"computing; the limit is {plan.longest()}. Let each worker take {plan.steps_alone():,} steps "
            "alone, or more, by local_steps= and baselines.diloco(bits=4)."
        )
    if not row:
        fast = between(alike.faster(alike.rows[least.scheme.name]))
        return (
            f"Not measured: nobody ran {plan.tokens:,} tokens, {workers:,} workers, data {plan.data}. Try "
            f"{least.scheme.code} and an all-reduce for some hundred steps: it is {fast} times as fast if "
            "it learns like AdamW."
        )
    fast = f"{between(plan.faster(row))} times as fast as the best all-reduce"
    if not plan.first("mean"):
        fast = "no all-reduce of gradients fits a device"
    first = f"Measure first {plan.to_measure(row)}." if what == verdict.MEASURE else "Use"
    return f"{first} {row.scheme.code}: {fast}."


def _beside(other: Plan) -> str:
    """What the setting on the other side of a border says."""
    cell, (what, row) = other.nearest.cell, other.answer()
    if other.nearest.distance == evidence.FAR:
        return f"runs stand for up to {evidence.FAR_TOKENS} times as many tokens and twice as many workers"
    says = f"{row.scheme.title}, {between(other.faster(row))} times as fast" if row else what
    return f"runs of {cell.tokens:,} tokens and {cell.num_workers} workers say {says}"


def between(fast: Range) -> str:
    """Shows a range in two digits.

    Example:
      >>> between((5.26, 6.83)), between((1.0, 1.0))
      ('5.3 to 6.8', '1')
    """
    least, most = map(digits, fast)
    return f"{least} to {most}" if least != most else most


def digits(number: float) -> str:
    """Shows two digits, all that such a model knows.

    Example:
      >>> digits(123.4), digits(0.1234)
      ('120', '0.12')
    """
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
