"""The run: workers on a mesh, the compiled step, the loop and what it measures."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from gpt import corpus, meshes
from gpt.corpus import Corpus
from gpt.meshes import Layout
from gpt.model import GPT, continue_text, next_byte_loss

VALIDATION_BYTES = 32_768
VOTES = "votes/ties", "votes/abstained", "votes/abstentions"


class Traffic(NamedTuple):
    """Bytes that each device sends in a step, as the compiled program says."""

    every_step: float  # to other workers
    sync: float  # to other workers, more in a step that averages momenta
    inside: float  # to devices of the same worker
    float32: float  # what an all-reduce of float32 gradients between the workers would send


class Run(NamedTuple):
    """A step and all it needs."""

    model: GPT
    text: Corpus
    layout: Layout
    state: lc.training.StepState
    step: lc.training.TrainStep
    collectives: list[Any]
    sent: Traffic
    evaluate: Callable[[Any], float]  # parameters -> bits per byte on validation windows
    batch: int  # windows per worker
    seed: int

    @property
    def rows(self) -> int:
        """Windows of all workers in a step."""
        return self.batch * self.layout.workers


class Row(NamedTuple):
    """One row of the log; a mean over the steps since the last row where it can be."""

    step: int
    loss: float  # bits per byte
    validation: float | None
    tokens_per_second: float
    seconds: float
    tie_rate: float | None
    abstained: int | None
    abstentions: int | None


def prepare(model: GPT, text: Corpus, tx: Any, layout: Layout, *, batch: int, seed: int) -> Run:
    """Places the state on the mesh, and compiles the step."""
    loss, params, model_state = lc.from_nnx(model, next_byte_loss)
    mesh, key = layout.mesh, jax.random.key(seed)
    state = lc.init_state(
        tx, params, layout.voters,
        specs=meshes.specs(params, mesh), model_state=model_state, rng=key,
    )  # fmt: skip
    step = lc.make_train_step(loss, tx, layout.voters, batch_spec=layout.rows)
    rows = batch * layout.workers
    windows = validation_windows(text, model.context, rows)
    given = jax.ShapeDtypeStruct(windows.shape[1:], windows.dtype)
    # To read it; the first step finds it compiled.
    collectives = lc.audit.collectives(step.lower(state, given).compile(), mesh)
    return Run(
        model, text, layout, state, step, collectives,
        sent_by_each(collectives, state.params, layout),
        evaluation(model, windows, layout), batch, seed,
    )  # fmt: skip


def sent_by_each(collectives: list[Any], params: Any, layout: Layout) -> Traffic:
    between, inside = _by_reach(lc.audit.sent_bytes(collectives))
    sync, _ = _by_reach(lc.audit.sent_bytes(collectives, gated=True))
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(params))
    reduced = held / layout.size(meshes.GROUP)  # in two levels a device has a slice of the sum
    workers = layout.workers
    return Traffic(between, sync, inside, 2 * (workers - 1) / workers * 4 * reduced)


def _by_reach(sent: dict[Any, float]) -> tuple[float, float]:
    """Bytes to other workers, and bytes inside one: over inner axes only."""
    inner = {*meshes.INNER, meshes.GROUP}
    inside = sum(count for axes, count in sent.items() if axes and set(axes) <= inner)
    return sum(sent.values()) - inside, inside


def validation_windows(text: Corpus, context: int, rows: int) -> np.ndarray:
    """``uint8[parts, rows, context + 1]``, the same in every run."""
    parts = math.ceil(VALIDATION_BYTES / (rows * context))
    windows = corpus.spread(text.validation, parts * rows, context)
    return windows.reshape(parts, rows, context + 1)


def evaluation(model: GPT, windows: np.ndarray, layout: Layout) -> Callable[[Any], float]:
    """Validation loss as a function of the parameters, the windows shared out over the mesh."""
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    parts = layout.place(windows, leading=1)

    @jax.jit
    def loss(params: Any, parts: jax.Array) -> jax.Array:
        trained = nnx.merge(graph, params, rest)
        return jax.lax.map(
            lambda part: next_byte_loss(trained, part, deterministic=True), parts
        ).mean()

    return lambda params: bits(loss(params, parts))


def bits(nats: Any) -> float:
    return float(nats) / math.log(2)


def train(
    run: Run,
    steps: int,
    follow: Callable[[Row], None],
    stops: Callable[[lc.training.StepState, int, bool], bool],
    seconds: float,
) -> tuple[Run, Row | None, bool]:
    """The run after its last step or the one where `stops` says so, its last row, and whether it stopped.

    The host waits for the devices only when there is a row to follow. `seconds` were spent before.
    """
    state, losses, row, stopped, since = run.state, [], None, False, time.perf_counter()
    for step in range(int(state.step) + 1, steps + 1):
        state, metrics = run.step(state, next_batch(run, step))
        losses.append(metrics["loss"])
        # XLA for CPU can deadlock when more than about thirty steps are under way.
        jax.block_until_ready(losses[:-8][-1:])
        if is_logged(step, steps):
            loss, votes = jax.device_get((losses, lc.metrics(state)))
            elapsed = time.perf_counter() - since
            seconds += elapsed
            speed = len(losses) * run.rows * run.model.context / elapsed
            validation = run.evaluate(state.params) if is_evaluated(step, steps) else None
            stats = [votes[name].item() if name in votes else None for name in VOTES]
            row = Row(step, bits(np.mean(loss)), validation, speed, seconds, *stats)
            follow(row)
            losses, since = [], time.perf_counter()
        if stops(state, step, step == steps) and step < steps:
            stopped = True
            break
    return run._replace(state=state), row, stopped


def next_batch(run: Run, step: int) -> jax.Array:
    """The windows of a step depend on the seed and its number alone, whatever the mesh."""
    windows = corpus.draw(run.text.train, run.rows, run.model.context, (run.seed, step))
    return run.layout.place(windows)


def is_logged(step: int, steps: int) -> bool:
    return step % min(50, max(1, steps // 100)) == 0 or is_evaluated(step, steps)


def is_evaluated(step: int, steps: int) -> bool:
    return step % max(1, steps // 10) == 0 or step == steps


def sample(run: Run) -> tuple[str, str]:
    """The opening of the validation text, and how the model continues it; every process must ask for it."""
    everywhere = NamedSharding(run.layout.mesh, P())
    whole = jax.jit(lambda params: params, out_shardings=everywhere)(run.state.params)
    nnx.update(run.model, jax.tree.map(np.asarray, whole))
    opening = run.text.validation[: min(32, run.model.context)]
    tokens = continue_text(run.model, opening, jax.random.key(run.seed), length=600)
    return _text(opening), _text(np.asarray(tokens))


def _text(tokens: np.ndarray) -> str:
    """Without control characters: a model that has learned little would play with the terminal."""
    text = tokens.tobytes().decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
