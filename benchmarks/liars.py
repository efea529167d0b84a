"""Accuracy of each method while some of 8 workers lie: simulated workers, and scikit-learn's digits.

    python benchmarks/liars.py    # minutes; methods that are in the file of rows are not run again

A liar knows what all honest workers send in a step, and replaces what it encodes. The attacks are those of
the literature. Rates were chosen without liars. A row has the accuracies of three seeds at the end. The
table of docs/reports/faults.md is written anew. The last four columns
are of commit e6d7b15.
"""

from functools import partial
from pathlib import Path

import goal  # noqa: F401 (finds the oracle)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from optax.contrib import MuonDimensionNumbers
from oracle import coding, simulate
from oracle import lion as reference
from oracle import muon as reference_muon
from sklearn.datasets import load_digits

ROWS = Path(__file__).parent / "results" / "liars.jsonl"
DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "faults.md"
WORKERS, SEEDS = 8, 3
STEPS, BATCH, WIDTH, TRAIN = 300, 2, 32, 1200  # examples of a worker; the others of 1,797 test
LOUD = 1e30  # stands for the largest code and the largest scale
ATTACKS = (
    "inner product x -0.5", "sign flip", "inner product x -10", "ALIE, z = 0.5", "ALIE, z = 1.5",
    "largest codes", "mimic", "labels",
)  # fmt: skip
VOTE, OWNER = reference.local_momentum, reference.momentum_at_owner


def muon(b1, b2, codes):
    """Muon of all matrices at the owner, and Adam of the biases."""

    def numbers(params):
        return jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, params)

    return reference_muon.muon_at_owner(numbers, b1, b2=b2, codes=codes)


# The method of two betas and some codes, the betas, the codes, and the rate.
METHODS = {
    "mean": (OWNER, (0.9, 0.99), coding.dense(), 8e-3),
    "signs": (VOTE, (0.0, 0.0), coding.sign(), 1.6e-2),
    "lion_cub": (VOTE, (0.9, 0.99), coding.sign(), 8e-3),
    "average": (partial(VOTE, decide=reference.average), (0.9, 0.99), coding.sign(), 1.6e-2),
    "int8": (VOTE, (0.9, 0.99), coding.integer(8), 8e-3),
    "owner_lion": (OWNER, (0.9, 0.99), coding.error_feedback(coding.midrise(3)), 8e-3),
    "owner_muon": (muon, (0.95, 0.98), coding.error_feedback(coding.midrise(3)), 3.2e-2),
}


def lying(codes: coding.Codes, attack: str, liars: jax.Array) -> coding.Codes:
    """Codes of which the first workers encode what the attack says."""
    most = codes.most(WORKERS)

    def encode(x, buffer, t):
        lies = (jnp.arange(WORKERS) < liars)[:, None, None]
        mean, std = jnp.mean(x, 0, where=~lies), jnp.std(x, 0, where=~lies)
        sign = jnp.sign(mean)
        sent = (
            -0.5 * mean, -mean, -10 * mean, mean - 0.5 * std * sign, mean - 1.5 * std * sign,
            -LOUD * sign, x[-1], x,
        )[ATTACKS.index(attack)]  # fmt: skip
        level, scale = codes.encode(jnp.where(lies, sent, x), buffer, t)
        if attack == "largest codes" and most:
            level = jnp.where(lies, jnp.where(mean > 0, -most, most), level)
            scale = jnp.where(lies, LOUD, scale) if codes.feedback else scale
        return level, scale

    return codes._replace(encode=encode)


def outcome(method: str, attack: str, liars: jax.Array, seed: jax.Array) -> jax.Array:
    """The accuracy at the end of a run."""
    direction, betas, codes, rate = METHODS[method]
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = jnp.float32(images[order] / 16), jnp.int32(labels[order])
    votes = direction(*betas, codes=lying(codes, attack, liars))
    optimizer = reference.optimizer(votes, lambda t: rate * (1 - t / STEPS), 0.0)
    key = jax.random.key(seed)
    params = [
        (jax.random.normal(jax.random.fold_in(key, n), (n, m)) / n**0.5, jnp.zeros(m))
        for n, m in ((64, WIDTH), (WIDTH, 10))
    ]

    def logits(params, x):
        (w, b), (v, c) = params
        return jnp.tanh(x @ w + b) @ v + c

    def loss(params, batch, rng):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    def step(run, t):
        chosen = jax.random.randint(jax.random.fold_in(key, 99 + t), (WORKERS, BATCH), 0, TRAIN)
        y = labels[chosen]
        if attack == "labels":
            y = jnp.where((jnp.arange(WORKERS) < liars)[:, None], 9 - y, y)
        return simulate.step(loss, optimizer, run, (images[chosen], y))[0], None

    run, _ = jax.lax.scan(step, simulate.start(optimizer, params, WORKERS), jnp.arange(STEPS))
    return jnp.mean(logits(run.params, images[TRAIN:]).argmax(1) == labels[TRAIN:])


def rows_of(method: str) -> report.Rows:
    """The rows of all attacks on a method."""
    rows = []
    for attack in ATTACKS:
        seeds = jax.jit(jax.vmap(partial(outcome, method, attack), (None, 0)))
        for liars in range(4):
            row = {"method": method, "attack": attack, "liars": liars, "workers": WORKERS}
            accuracy = np.round(seeds(liars, jnp.arange(SEEDS)), 4).tolist()
            rows.append(row | {"accuracy": accuracy} | report.provenance())
    return rows


def documented(document: str, rows: report.Rows) -> str:
    """The document with means over seeds, of the worst attack on each method."""
    lines: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["liars"]):
        line = lines.setdefault(f"{row['liars'] or 'nobody'}", {})
        line[row["method"]] = min(line.get(row["method"], 1.0), np.mean(row["accuracy"]))
    cells = [[title, *(f"{line[name]:.2f}" for name in METHODS)] for title, line in lines.items()]
    table = report.markdown(["liars", *METHODS], cells)
    return report.written(document, {"liars": table})


def main() -> None:
    args = report.parser(__doc__, ROWS).parse_args()
    done = {row["method"] for row in report.read(args.save)}
    for method in METHODS:
        if method not in done:
            report.append(args.save, rows_of(method))
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), report.read(args.save)))


if __name__ == "__main__":
    main()
