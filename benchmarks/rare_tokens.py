"""Rows of rare tokens: the loss of a model of 32,000 words, and how far unused rows of its embedding drift.

    python benchmarks/rare_tokens.py [--steps 768] [--save FILE]

The words are those of the sources of Python's standard library; the model reads four and names the next.
A row of its embedding is 128 numbers, as a row of votes is. Each of 4 workers has 64 places of the text in
a step, so most rows that it has seen were not seen for hundreds of steps. A method runs at two rates, with
a cosine and without decay. A line is a run:

* loss: of words that were held out, in nats;
* drift: of rows that no worker has seen in the last quarter of the run, but before, how far they moved in
  it, as a share of the way at the whole rate;
* unused: how many rows those are.

The committed lines of votes are of commit 4be4f3a5d46d, which had an option ``forget=SHARE``: a worker
set a momentum to 0 where its gradient was 0 and the momentum below this share of the mean magnitude of its
leaf.
"""

import collections
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import goal  # noqa: F401  it puts the examples on the path
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from gpt.corpus import standard_library

import lioncub_jax as lc

WORKERS, PLACES, CONTEXT = 4, 64, 4
VOCABULARY, WIDTH, HIDDEN = 32_000, 128, 16
VOTE, MEAN = lc.lion_cub, lc.global_gradients
METHODS: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "AdamW": (lambda rate, **on: MEAN(optax.adamw(rate, weight_decay=0.0), **on), (4e-3, 8e-3)),
    "Lion": (lambda rate, **on: MEAN(optax.lion(rate, weight_decay=0.0), **on), (1e-3, 2e-3)),
    "vote": (functools.partial(VOTE, weight_decay=0.0), (1e-3, 2e-3)),
}


def words() -> tuple[np.ndarray, np.ndarray]:
    """``int32[n]`` each, for training and held out; the last number is of all rarer words."""
    corpus = standard_library()
    texts = [bytes(x).decode(errors="replace") for x in (corpus.train, corpus.validation)]
    train, held_out = (re.findall(r"\w+|[^\w\s]", text) for text in texts)
    common = [word for word, _ in collections.Counter(train).most_common(VOCABULARY - 1)]
    number = {word: i for i, word in enumerate(common)}
    return tuple(  # type: ignore[return-value]
        np.array([number.get(word, VOCABULARY - 1) for word in text], np.int32)
        for text in (train, held_out)
    )


def windows(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """``int32[places, CONTEXT + 1]``."""
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


def first_params() -> Any:
    rng = np.random.default_rng(0)
    read, hidden, write = (VOCABULARY, WIDTH), (CONTEXT * WIDTH, HIDDEN), (HIDDEN, VOCABULARY)
    shapes = {"read": read, "hidden": hidden, "write": write}
    return {
        name: (rng.normal(size=shape) * shape[0] ** -0.5 * (30 if name == "read" else 1)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def loss_fn(params: Any, batch: jax.Array, rng: Any = None) -> jax.Array:
    """The cross-entropy of the last word of each window."""
    x = params["read"][batch[:, :-1]].reshape(len(batch), -1)
    logits = jnp.tanh(x @ params["hidden"]) @ params["write"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1]).mean()


def run(
    method: str, rate: float, steps: int, text: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    """One run, in which the embedding is looked at after three quarters and at the end."""
    workers = lc.Workers.one_per_device()
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps)
    tx = METHODS[method][0](schedule, workers=workers)
    state, step = (
        lc.init_state(tx, first_params(), workers),
        lc.make_train_step(loss_fn, tx, workers),
    )
    rng, seen, recent = np.random.default_rng(1), set[int](), set[int]()
    before = way = 0.0
    for i in range(steps):
        if i == steps - steps // 4:
            before, recent, way = np.asarray(state.params["read"]), set(), 0.0
        batch = windows(text[0], rng.integers(0, text[0].size - CONTEXT, WORKERS * PLACES))
        (seen if i < steps - steps // 4 else recent).update(batch[:, :-1].ravel().tolist())
        way += float(schedule(i))
        state, _ = step(state, batch)
    unused = np.array(sorted(seen - recent))
    moved = np.abs(np.asarray(state.params["read"]) - before)[unused]
    held_out = windows(text[1], np.linspace(0, text[1].size - CONTEXT - 1, 4096).astype(int))
    params = jax.device_get(state.params)
    return {
        "method": method, "rate": rate, "steps": steps, "loss": float(jax.jit(loss_fn)(params, held_out)),
        "drift": float(moved.mean() / way), "unused": len(unused),
    }  # fmt: skip


def seen_once(steps: int = 9000) -> dict[str, list[float]]:
    """How many steps a row moves in that one of two workers saw once, and how far, in rates."""
    kinds = {"learning_rate": 1.0, "weight_decay": 0.0, "workers": "data"}
    txs = {
        "vote": lc.lion_cub(**kinds),
        "vote, ternary": lc.lion_cub(**kinds, quantizer=lc.quantize.ternary()),
        "owner_lion": lc.owner_lion(**kinds),
        "owner_adamw": lc.owner_adamw(**kinds),
        "optax.lion": MEAN(optax.lion(1.0, weight_decay=0.0), workers="data"),
    }

    def worker(grads: jax.Array) -> Any:
        def step(states: Any, i: jax.Array) -> Any:
            # A row that is always fed, and below it the one that is not.
            now = jnp.stack([grads[0, 0], jnp.where(i == 0, grads[0, 1], 0)])
            done = {name: tx.update(now, states[name], now) for name, tx in txs.items()}
            return {n: s for n, (_, s) in done.items()}, {n: u[1, 0] for n, (u, _) in done.items()}

        first = {name: tx.init(0 * grads[0]) for name, tx in txs.items()}
        return jax.lax.scan(step, first, jnp.arange(steps))[1]

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[:2])
    grads = jnp.ones((2, 2, 128)).at[1, 1].set(0)
    run = jax.shard_map(worker, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    moved = jax.tree.map(np.abs, jax.jit(run)(grads))
    return {name: [int((x > 0).sum()), float(x.sum())] for name, x in moved.items()}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", WORKERS)
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=768)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--once", action="store_true", help="a row that one worker saw once, and no model"
    )
    args = parser.parse_args()
    if args.once:
        print(json.dumps(seen_once()))
        return
    text, rows = words(), []
    for at in range(2):
        for method in args.methods:
            rate = METHODS[method][1][at]
            rows.append(run(method, rate, args.steps, text))
            report.append(args.save, [rows[-1] | report.provenance()])
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({m: min(x["loss"] for x in rows if x["method"] == m) for m in args.methods}))


if __name__ == "__main__":
    main()
