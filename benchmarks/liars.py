"""Which methods still learn while some of 8 workers lie? Simulated workers, and scikit-learn's digits.

    python benchmarks/liars.py    # minutes on two cores; methods that are in the file are not run again

A liar knows what all honest workers send in a step, and replaces what it encodes. The attacks are those of
the literature. Rates were chosen without liars. A row has the accuracies of three seeds at the end. The
table of docs/reports/faults.md is written anew.
"""

from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import harm  # noqa: F401 (finds the oracle)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from oracle import coding, simulate
from oracle import lion as reference
from report import Rows
from sklearn.datasets import load_digits

import lioncub_jax as lc

ROWS = Path(__file__).parent / "results" / "liars.jsonl"
DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "faults.md"
WORKERS, LIARS, SEEDS = 8, (1, 2, 3), 3
STEPS, BATCH, WIDTH, TRAIN = 300, 2, 32, 1200  # examples a worker; of 1,797 the others test
BETAS = 0.9, 0.99
LOUD = 1e30  # stands for the largest code and the largest step

# ``(own, mean, deviation, one honest message) -> message`` of a liar.
ATTACKS = {
    "nobody": lambda own, mean, std, one: own,
    "inner product x -0.5": lambda own, mean, std, one: -0.5 * mean,
    "sign flip": lambda own, mean, std, one: -mean,
    "inner product x -10": lambda own, mean, std, one: -10 * mean,
    "ALIE, z = 0.5": lambda own, mean, std, one: mean - 0.5 * std * jnp.sign(mean),
    "ALIE, z = 1.5": lambda own, mean, std, one: mean - 1.5 * std * jnp.sign(mean),
    "largest codes": lambda own, mean, std, one: -LOUD * jnp.sign(mean),
    "mimic": lambda own, mean, std, one: one,
    "labels": lambda own, mean, std, one: own,  # of 9 minus the label
}
VOTE = partial(reference.local_momentum, *BETAS)
OWNER = partial(reference.momentum_at_owner, *BETAS)
FED_BACK = coding.error_feedback(coding.midrise(3))
# The method of some codes, the codes, and the rate.
METHODS: dict[str, Any] = {
    "mean": (OWNER, coding.dense(), 8e-3),
    "signs": (partial(reference.local_momentum, 0.0, 0.0), coding.sign(), 1.6e-2),
    "lion_cub": (VOTE, coding.sign(), 8e-3),
    "average": (partial(VOTE, decide=reference.average), coding.sign(), 1.6e-2),
    "int8": (VOTE, coding.integer(8), 8e-3),
    "owner_lion": (OWNER, FED_BACK, 8e-3),
}


def lying(codes: coding.Codes, attack: Any, liars: Any) -> coding.Codes:
    """Codes that the first workers encode of what the attack says."""
    most = codes.most(WORKERS)

    def encode(x: jax.Array, buffer: Any, t: Any) -> tuple[jax.Array, jax.Array]:
        lies = (jnp.arange(WORKERS) < liars)[:, None, None]
        mean = jnp.mean(x, 0, where=~lies)
        known = mean, jnp.std(x, 0, where=~lies), x[-1]
        each = [jax.vmap(of, (0, None, None, None))(x, *known) for of in ATTACKS.values()]
        level, step = codes.encode(jnp.where(lies, jnp.stack(each)[attack], x), buffer, t)
        loud = lies & (list(ATTACKS).index("largest codes") == attack)
        if most:
            level = jnp.where(loud, -most * jnp.where(mean > 0, 1, -1), level)
        return level, jnp.where(loud, LOUD, step) if codes.feedback else step

    return codes._replace(encode=encode)


def outcome(name: str, attack: Any, liars: Any, seed: Any) -> jax.Array:
    """The accuracy at the end of a run."""
    method, codes, rate = METHODS[name]
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = jnp.float32(images[order] / 16), jnp.int32(labels[order])
    votes = method(codes=lying(codes, attack, liars))
    optimizer = reference.optimizer(votes, lambda t: rate * (1 - t / STEPS), 0.0)
    key = jax.random.key(seed)
    sizes = 64, WIDTH, 10
    params = [
        (jax.random.normal(jax.random.fold_in(key, n), (n, m)) / n**0.5, jnp.zeros(m))
        for n, m in pairwise(sizes)
    ]

    def logits(params: Any, x: jax.Array) -> jax.Array:
        (w, b), (v, c) = params
        return jnp.tanh(x @ w + b) @ v + c

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    def step(run: Any, t: jax.Array) -> tuple[Any, None]:
        chosen = jax.random.randint(jax.random.fold_in(key, 99 + t), (WORKERS, BATCH), 0, TRAIN)
        y = labels[chosen]
        turned = (jnp.arange(WORKERS) < liars)[:, None] & (list(ATTACKS).index("labels") == attack)
        batch = images[chosen], jnp.where(turned, 9 - y, y)
        return simulate.step(loss, optimizer, run, batch)[0], None

    run, _ = jax.lax.scan(step, simulate.start(optimizer, params, WORKERS), jnp.arange(STEPS))
    return jnp.mean(logits(run.params, images[TRAIN:]).argmax(1) == labels[TRAIN:])


def run(name: str) -> Rows:
    """All attacks on a method, in one program."""
    cases = [("nobody", 0), *product(list(ATTACKS)[1:], LIARS)]
    each = jnp.array([(list(ATTACKS).index(attack), liars) for attack, liars in cases])
    seeds = jax.vmap(partial(outcome, name), (None, None, 0))
    found = jax.lax.map(lambda case: seeds(*case, jnp.arange(SEEDS)), each)
    rows = []
    for (attack, liars), accuracy in zip(cases, found.tolist(), strict=True):
        row = {"method": name, "attack": attack, "liars": liars, "workers": WORKERS}
        row |= {"accuracy": [round(x, 4) for x in accuracy], "lioncub_jax": lc.__version__}
        rows.append(row | report.provenance())
    return rows


def table(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Head and lines: means of the seeds; of one liar the worst attack on the method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))

    def line(name: str, **wanted: Any) -> list[str]:
        each = [report.rows_of(rows, method=method, **wanted) for method in methods]
        return [name, *(f"{min(np.mean(x['accuracy']) for x in some):.2f}" for some in each)]

    lines = [line("nobody", liars=0), line("1, the worst of all", liars=1)]
    for liars, attack in product(LIARS[1:], list(ATTACKS)[1:]):
        lines.append(line(f"{liars}, {attack}", liars=liars, attack=attack))
    return ["liars", *methods], lines


def documented(document: str, rows: Rows) -> str:
    """The document with the table of these rows."""
    return report.written(document, "liars", report.markdown(*table(rows)))


def main() -> None:
    args = report.rows_parser(__doc__, ROWS).parse_args()
    done = {row["method"] for row in report.read(args.save)}
    for name in [name for name in METHODS if name not in done]:
        report.append(args.save, run(name))
    rows = report.read(args.save)
    print(report.markdown(*table(rows)))
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), rows))


if __name__ == "__main__":
    main()
