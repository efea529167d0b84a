"""Accuracy of each method while some of 8 workers lie: simulated workers, and scikit-learn's digits.

    python benchmarks/liars.py    # minutes; methods that are in the file of rows are not run again

A liar knows what all honest workers send in a step, and replaces what it encodes. The attacks are those of
the literature. Rates were chosen without liars. A row has the accuracies of three seeds at the end. The
table of docs/reports/faults.md is written anew. Its last four methods are of commit e6d7b15.
"""

from functools import partial
from itertools import product
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
from sklearn.datasets import load_digits

ROWS = Path(__file__).parent / "results" / "liars.jsonl"
DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "faults.md"
WORKERS, LIARS, SEEDS = 8, (1, 2, 3), 3
STEPS, BATCH, WIDTH, TRAIN = 300, 2, 32, 1200  # examples of a worker; the others of 1,797 test
LOUD = 1e30  # stands for the largest code and the largest scale

# ``(messages, honest mean, honest deviation) -> messages`` of liars; the last worker is honest.
ATTACKS = {
    "nobody": lambda x, mean, std: x,
    "inner product x -0.5": lambda x, mean, std: -0.5 * mean,
    "sign flip": lambda x, mean, std: -mean,
    "inner product x -10": lambda x, mean, std: -10 * mean,
    "ALIE, z = 0.5": lambda x, mean, std: mean - 0.5 * std * jnp.sign(mean),
    "ALIE, z = 1.5": lambda x, mean, std: mean - 1.5 * std * jnp.sign(mean),
    "largest codes": lambda x, mean, std: -LOUD * jnp.sign(mean),
    "mimic": lambda x, mean, std: x[-1],
    "labels": lambda x, mean, std: x,  # of gradients for 9 minus the label
}
VOTE = partial(reference.local_momentum, 0.9, 0.99)
OWNER = partial(reference.momentum_at_owner, 0.9, 0.99)
# The method of some codes, the codes, and the rate.
METHODS: dict[str, Any] = {
    "mean": (OWNER, coding.dense(), 8e-3),
    "signs": (partial(reference.local_momentum, 0.0, 0.0), coding.sign(), 1.6e-2),
    "lion_cub": (VOTE, coding.sign(), 8e-3),
    "average": (partial(VOTE, decide=reference.average), coding.sign(), 1.6e-2),
    "int8": (VOTE, coding.integer(8), 8e-3),
    "owner_lion": (OWNER, coding.error_feedback(coding.midrise(3)), 8e-3),
}


def lying(codes: coding.Codes, attack: str, liars: Any) -> coding.Codes:
    """Codes of which the first workers encode what the attack says."""
    most = codes.most(WORKERS)

    def encode(x: jax.Array, buffer: Any, t: Any) -> tuple[jax.Array, jax.Array]:
        lies = (jnp.arange(WORKERS) < liars)[:, None, None]
        mean, std = jnp.mean(x, 0, where=~lies), jnp.std(x, 0, where=~lies)
        level, scale = codes.encode(jnp.where(lies, ATTACKS[attack](x, mean, std), x), buffer, t)
        if attack == "largest codes" and most:
            level = jnp.where(lies, jnp.where(mean > 0, -most, most), level)
            scale = jnp.where(lies, LOUD, scale) if codes.feedback else scale
        return level, scale

    return codes._replace(encode=encode)


def outcome(method: str, attack: str, liars: Any, seed: Any) -> jax.Array:
    """The accuracy at the end of a run."""
    direction, codes, rate = METHODS[method]
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = jnp.float32(images[order] / 16), jnp.int32(labels[order])
    optimizer = reference.optimizer(
        direction(codes=lying(codes, attack, liars)), lambda t: rate * (1 - t / STEPS), 0.0
    )
    key = jax.random.key(seed)
    params = [
        (jax.random.normal(jax.random.fold_in(key, n), (n, m)) / n**0.5, jnp.zeros(m))
        for n, m in ((64, WIDTH), (WIDTH, 10))
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
        wrong = (jnp.arange(WORKERS) < liars)[:, None] & (attack == "labels")
        return simulate.step(loss, optimizer, run, (images[chosen], jnp.where(wrong, 9 - y, y)))[
            0
        ], None

    run, _ = jax.lax.scan(step, simulate.start(optimizer, params, WORKERS), jnp.arange(STEPS))
    return jnp.mean(logits(run.params, images[TRAIN:]).argmax(1) == labels[TRAIN:])


def rows_of(method: str) -> report.Rows:
    """The rows of all attacks on a method."""
    rows = []
    for attack in ATTACKS:
        seeds = jax.jit(jax.vmap(partial(outcome, method, attack), (None, 0)))
        for liars in LIARS if attack != "nobody" else (0,):
            row = {"method": method, "attack": attack, "liars": liars, "workers": WORKERS}
            accuracy = np.round(seeds(liars, jnp.arange(SEEDS)), 4).tolist()
            rows.append(row | {"accuracy": accuracy} | report.provenance())
    return rows


def documented(document: str, rows: report.Rows) -> str:
    """The document with means over seeds; of one liar, those of the worst attack on a method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    wanted = {"nobody": {"liars": 0}, "1, the worst of all": {"liars": 1}}
    for liars, attack in product(LIARS[1:], list(ATTACKS)[1:]):
        wanted[f"{liars}, {attack}"] = {"liars": liars, "attack": attack}
    lines = [
        [title]
        + [
            f"{min(np.mean(row['accuracy']) for row in report.rows_of(rows, method=one, **fields)):.2f}"
            for one in methods
        ]
        for title, fields in wanted.items()
    ]
    return report.written(document, "liars", report.markdown(["liars", *methods], lines))


def main() -> None:
    args = report.rows_parser(__doc__, ROWS).parse_args()
    done = {row["method"] for row in report.read(args.save)}
    for method in METHODS:
        if method not in done:
            report.append(args.save, rows_of(method))
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), report.read(args.save)))


if __name__ == "__main__":
    main()
