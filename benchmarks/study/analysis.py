"""Statistics of the study: pure functions on lists of rows.

Runs of equal seed start from the same parameters and see the same examples, so methods are compared in
pairs. A run that ended without a number counts as diverged: it is in no mean, and never passes.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lioncub_jax import planner
from study import signs
from study.methods import METHODS
from study.plan import SIGNS, SYNCS, rows_of
from study.runs import Spec

Rows = list[dict[str, Any]]

# What is reported of a task, and whether more of it is better.
METRICS = {"images": ("accuracy", True), "text": ("bits_per_byte", False)}
BANDWIDTHS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
LATENCY = 50e-6  # seconds from one end of a link to the other
RATES_DIFFER = ("tuning", "betas")  # elsewhere all runs of a method have the rate that was chosen
SYNTHETIC = tuple(name for name in SIGNS if name not in SYNCS)  # one vote knows of no sync


class Mean(NamedTuple):
    """A mean over seeds.

    Attributes:
      mean: of those with a number; None without any.
      std: sample standard deviation; None for fewer than two.
      n: runs with a number.
      diverged: runs without.
    """

    mean: float | None
    std: float | None
    n: int
    diverged: int = 0


class Recovered(NamedTuple):
    """What a method regains of what the plain vote loses.

    Attributes:
      lost: by "vote" to "lion", positive if it does; over the seeds that all three have.
      share: of that; None where nothing is lost.
      bits: over those of "vote".
    """

    lost: float | None
    share: float | None
    bits: float


class Repeat(NamedTuple):
    """A run that was repeated after a change of the library.

    Attributes:
      run: which.
      before: the metric on the test examples of the row of before; None if it diverged.
      after: of the new row.
      std: of the method's seeds before; None for fewer than two.
    """

    run: Spec
    before: float | None
    after: float | None
    std: float | None

    @property
    def away(self) -> float | None:
        """The difference in standard deviations, positive where more came out; None without numbers."""
        if self.before is None or self.after is None or not self.std:
            return None
        return (self.after - self.before) / self.std


# --- Rows


def checked(rows: Rows) -> Rows:
    """The rows again; raises ``ValueError`` where they do not belong into one report."""
    for task in METRICS:
        of_task = rows_of(rows, task=task)
        for field in ("size", "dataset", "parameters", "steps"):
            found = sorted({str(row.get(field)) for row in of_task})
            if len(found) > 1:
                raise ValueError(
                    f"{task}: rows of more than one {field} ({', '.join(found)}) cannot be compared; "
                    "keep them in a file each and give one by --save"
                )
        seen: dict[Any, Any] = {}
        for row in of_task:
            run = run_of(row)
            same = run if run.part in RATES_DIFFER else run._replace(rate=0.0)
            if same in seen:
                raise ValueError(
                    f"two rows of one run: {run} and {seen[same]}; delete the lines of those whose "
                    "rate is not what tuning chose, and run them anew"
                )
            seen[same] = run
    return rows


def run_of(row: dict[str, Any]) -> Spec:
    """The run that a row is of."""
    return Spec(*(row[name] for name in Spec._fields))


def value_of(row: dict[str, Any]) -> float | None:
    """The task's metric on the test examples; None for a run that diverged."""
    return row["test"][METRICS[row["task"]][0]]


def by_seed(rows: Rows) -> dict[int, float | None]:
    """The metric of runs of one kind by their seeds."""
    return {row["seed"]: value_of(row) for row in rows}


def goodness(task: str) -> int:
    """1 where more is better, else -1."""
    return 1 if METRICS[task][1] else -1


# --- Means and pairs


def mean(values: Iterable[float | None]) -> Mean:
    """Mean and sample standard deviation of the numbers among the values."""
    given = list(values)
    found = [x for x in given if x is not None]
    std = statistics.stdev(found) if len(found) > 1 else None
    center = statistics.fmean(found) if found else None
    return Mean(center, std, len(found), len(given) - len(found))


def difference(rows: Rows, lion: Rows) -> Mean:
    """Of the metric to Lion's, over the seeds that both have; neither may have diverged to count."""
    ours, theirs = by_seed(rows), by_seed(lion)
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    return mean(None if a is None or b is None else a - b for a, b in pairs)


def within_one_std(rows: Rows, lion: Rows) -> bool | None:
    """Whether the mean is no worse than Lion's by more than Lion's standard deviation, on equal seeds.

    None where that cannot be said, for want of two equal seeds at which Lion has a number.
    """
    ours, theirs = by_seed(rows), by_seed(lion)
    common = sorted(ours.keys() & theirs.keys())
    baseline = mean(theirs[seed] for seed in common)
    if baseline.mean is None or baseline.std is None:
        return None
    found = mean(ours[seed] for seed in common)
    if found.diverged or found.mean is None:
        return False
    return goodness(rows[0]["task"]) * (found.mean - baseline.mean) >= -baseline.std


def recovered(rows: Rows, vote: Rows, lion: Rows) -> Recovered:
    """How much of the way from "vote" to "lion" a method goes, and for how many times the bits."""
    found = [by_seed(some) for some in (rows, vote, lion)]
    common = sorted(set.intersection(*(set(one) for one in found)))
    at = [mean(one[seed] for seed in common) for one in found]
    bits = bits_of(rows) / bits_of(vote)
    if any(one.mean is None or one.diverged for one in at):
        return Recovered(None, None, bits)
    sign = goodness(rows[0]["task"])
    ours, low, high = (sign * one.mean for one in at)
    share = (ours - low) / (high - low) if high > low else None
    return Recovered(high - low, share, bits)


def repeats(rows: Rows, before: Rows) -> list[Repeat]:
    """Each row beside the row of before of the same run, where there is one."""
    old = {run_of(row): row for row in before if "test" in row}
    seeds = defaultdict(list)
    for run, row in old.items():
        seeds[run._replace(seed=0)].append(value_of(row))
    return [
        Repeat(run, value_of(old[run]), value_of(row), mean(seeds[run._replace(seed=0)]).std)
        for row in rows
        if (run := run_of(row)) in old
    ]


def bits_of(rows: Rows) -> float:
    """Bits that a worker sends for each parameter in a step; syncs may differ between seeds."""
    return statistics.fmean(row["bits_per_parameter"] for row in rows)


def large_bits(row: dict[str, Any], side: int = 2**13) -> float:
    """The same for one large matrix, where padding and scales of leaves vanish."""
    params, size = {"leaf": jax.ShapeDtypeStruct((side, side), jnp.float32)}, side**2
    sent = METHODS[row["method"]].sent(params, row["workers"], row["steps"], row["syncs"])
    return 8 * sent / row["steps"] / size


# --- Modelled time
#
#     run = steps (compute + hops * latency) + syncs * hops of a sync * latency + bits sent / bandwidth
#
# Hops are the planner's, of trees. Packing is left out: 10 us a step here by the planner's estimate.

SCHEME_OF = {
    **dict.fromkeys(("lion", "adamw", "sgd"), ("float32 Lion",)),
    **dict.fromkeys(("qsgd", "dgc"), ("gathered",)),
    "int8": ("integer(8) counts",),
    "terngrad": ("float32 Lion", "1-bit vote"),  # scales first, then codes
}


def hops(method: str, workers: int) -> float:
    """Hops of a step: what the planner says it takes if a hop takes a second and bits take none."""
    cluster = planner.Cluster(workers, planner.Link(math.inf, 1.0))
    names = SCHEME_OF.get(method, ("1-bit vote",))
    found = [planner.step_time(planner.scheme_named(n), 1, cluster, 0.0) for n in names]
    return sum(one.communication for one in found)


def compute_seconds(rows: Rows, task: str, workers: int, batch: int) -> float | None:
    """One worker's share of a step on one core: the median over Lion's runs; None without any."""
    found = rows_of(rows, task=task, workers=workers, batch=batch, method="lion", split="iid")
    # Candidates ran beside other programs.
    found = [row for row in found if row["part"] != "candidates"]
    shares = [(r["seconds"] - r["compiling"]) / r["steps"] / workers for r in found]
    return statistics.median(shares) if shares else None


def run_seconds(row: dict[str, Any], compute: float, bandwidth: float) -> float:
    """A whole run of W workers on a core each, on links of so many bits per second."""
    workers = row["workers"]
    of_sync = hops("vote" if "coded" in row["method"] else "lion", workers)
    waits = row["steps"] * hops(row["method"], workers) + row["syncs"] * of_sync
    return row["steps"] * compute + LATENCY * waits + 8 * row["sent_bytes"] / bandwidth


# --- Signs kept, and drift


def late(values: list[float]) -> float:
    """The mean of the last half of training."""
    return statistics.fmean(values[len(values) // 2 :])


def layer_of(leaf: str) -> str:
    """What leaves of the same kind have in common: ``blocks.3.mlp.up.kernel`` is "mlp.up"."""
    inner = re.sub(r"^blocks\.\d+\.", "", leaf).rpartition(".")[0]
    return "norms" if inner.startswith("norm") else inner


def by_layer(leaves: dict[str, list[float]]) -> dict[str, list[float]]:
    """What the leaves of each kind of layer come to in the last half of training."""
    found = defaultdict(list)
    for leaf, values in leaves.items():
        found[layer_of(leaf)].append(late(values))
    return dict(found)


def synthetic(
    methods: Iterable[str] = SYNTHETIC,
    workers: Iterable[int] = (8, 32),
    size: int = 2**20,
    seed: int = 0,
) -> dict[tuple[str, int], float]:
    """The share of signs that one vote keeps of the mean's, for noise that has nothing else in it.

    Worker i has ``x_i = mean + noise_i``, with a mean that all share, Gaussian of standard deviation 0.1 in
    each coordinate, and noise of standard deviation 1. Momenta are zero before it, so the values are
    what is encoded, up to a factor that b1 makes; what feedback does later is not in it.
    """
    chunks = max(1, size // 2**15)
    betas = 0.9, 0.99
    simulators = {name: votes(betas) for name in methods if (votes := METHODS[name].votes)}

    def kept(key: jax.Array, count: int) -> dict[str, jax.Array]:
        common, own = jax.random.split(key)
        x = jax.random.normal(own, (count, size // chunks))
        x = x + 0.1 * jax.random.normal(common, x.shape[1:])
        exact = jnp.sign(x.mean(axis=0))
        found = {}
        for name, votes in simulators.items():
            said, _ = votes.update({"x": x}, votes.init({"x": x[0]}, count), {"x": x[0]})
            found[name] = signs.agreement(said["x"], exact)
        return found

    keys = jax.random.split(jax.random.key(seed), chunks)
    shares = {}
    for count in workers:
        found = jax.jit(lambda keys, count=count: jax.lax.map(lambda k: kept(k, count), keys))(keys)
        shares |= {(name, count): float(x.mean()) for name, x in jax.device_get(found).items()}
    return shares


def synthetic_rows(methods: Iterable[str] = SYNTHETIC, size: int = 2**20) -> Rows:
    """`synthetic` as rows of a part of their own, with the fields by which rows are told apart."""
    rows = []
    for (method, workers), kept in synthetic(methods, size=size).items():
        spec = Spec("synthetic", "gaussian", method, workers, "iid", 1, 1, 0.0, 0)
        rows.append({**spec._asdict(), "kept": float(f"{kept:.5g}")})
    return rows
