"""The run: workers on a mesh, the compiled step, the loop and what it measures."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from gpt import corpus
from gpt.corpus import Baselines, Corpus
from gpt.model import GPT, continue_text, next_byte_loss

AXIS = "data"
VALIDATION_BYTES = 32_768


def worker_mesh(workers: int | None) -> Mesh:
    """A mesh of that many devices, or of up to eight; a CPU stands in for any number."""
    jax.config.update("jax_num_cpu_devices", workers or 8)
    devices = jax.devices()
    if workers is not None and workers > len(devices):
        raise ValueError(
            f"--workers {workers}: there are {len(devices)} {devices[0].platform} devices; give fewer, "
            "or set JAX_PLATFORMS=cpu to let the CPU stand in"
        )
    chosen = devices[: workers or 8]
    return jax.make_mesh((len(chosen),), (AXIS,), devices=chosen, axis_types=(AxisType.Auto,))


class Traffic(NamedTuple):
    """Bytes that each worker sends in a step."""

    every_step: float  # in the compiled program
    sync: float  # more in a step that averages momenta
    float32: float  # what an all-reduce of float32 gradients would send


class Run(NamedTuple):
    """A compiled step and all it needs."""

    model: GPT
    text: Corpus
    mesh: Mesh
    state: lc.TrainState
    step: jax.stages.Compiled
    collectives: list[Any]
    sent: Traffic
    evaluate: Callable[[Any], float]  # parameters -> bits per byte on validation windows
    counted: Baselines  # of the same windows
    batch: int  # windows per worker
    seed: int


class Row(NamedTuple):
    """What is logged after a step; a mean over the steps since the last row where it can be."""

    step: int
    loss: float  # bits per byte
    validation: float | None
    tokens_per_second: float
    seconds: float
    tie_rate: float | None
    abstained: int | None
    abstentions: int | None


def prepare(model: GPT, text: Corpus, tx: Any, mesh: Mesh, *, batch: int, seed: int) -> Run:
    """Places the state on the mesh, and compiles the step."""
    loss, params, model_state = lc.from_nnx(model, next_byte_loss)
    key = jax.random.key(seed)
    state = lc.init_state(tx, params, mesh, axis_name=AXIS, model_state=model_state, rng=key)
    step = lc.make_train_step(loss, tx, mesh, axis_name=AXIS)
    windows = validation_windows(text, model.context, batch * mesh.size)
    compiled = step.lower(state, windows[0]).compile()
    found = lc.compiled.collectives(compiled, mesh)
    size = sum(x.size for x in jax.tree.leaves(params))
    return Run(
        model, text, mesh, state, compiled, found, sent_by_each(found, size, mesh.size),
        evaluation(model, windows, mesh), corpus.baselines(text.train, windows), batch, seed,
    )  # fmt: skip


def sent_by_each(found: list[Any], parameters: int, workers: int) -> Traffic:
    every_step = sum(lc.compiled.sent_bytes(found).values())
    sync = sum(lc.compiled.sent_bytes(found, gated=True).values())
    return Traffic(every_step, sync, 2 * (workers - 1) / workers * 4 * parameters)


def validation_windows(text: Corpus, context: int, rows: int) -> np.ndarray:
    """``uint8[parts, rows, context + 1]``, the same in every run."""
    parts = math.ceil(VALIDATION_BYTES / (rows * context))
    windows = corpus.spread(text.validation, parts * rows, context)
    return windows.reshape(parts, rows, context + 1)


def evaluation(model: GPT, windows: np.ndarray, mesh: Mesh) -> Callable[[Any], float]:
    """Validation loss as a function of the parameters, the windows shared out over the mesh."""
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    parts = jax.device_put(windows, NamedSharding(mesh, P(None, AXIS)))

    @jax.jit
    def loss(params: Any) -> jax.Array:
        trained = nnx.merge(graph, params, rest)
        return jax.lax.map(
            lambda part: next_byte_loss(trained, part, deterministic=True), parts
        ).mean()

    return lambda params: bits(loss(params))


def bits(nats: Any) -> float:
    return float(nats) / math.log(2)


def train(run: Run, steps: int, follow: Callable[[Row], None]) -> Any:
    """The trained parameters. The host waits for the devices only when there is a row to follow."""
    state, losses, seconds, since = run.state, [], 0.0, time.perf_counter()
    for step in range(1, steps + 1):
        state, metrics = run.step(state, next_batch(run, step))
        losses.append(metrics["loss"])
        # XLA for CPU can deadlock when more than about thirty steps are under way.
        jax.block_until_ready(losses[:-8][-1:])
        if is_logged(step, steps):
            loss, votes = jax.device_get((losses, lc.vote_stats(state.opt_state)))
            elapsed = time.perf_counter() - since
            seconds += elapsed
            speed = len(losses) * run.batch * run.mesh.size * run.model.context / elapsed
            validation = run.evaluate(state.params) if is_evaluated(step, steps) else None
            stats = (None,) * 3 if votes is None else (x.item() for x in votes)
            follow(Row(step, bits(np.mean(loss)), validation, speed, seconds, *stats))
            losses, since = [], time.perf_counter()
    return state.params


def next_batch(run: Run, step: int) -> jax.Array:
    count = run.batch * run.mesh.size
    windows = corpus.draw(run.text.train, count, run.model.context, (run.seed, step))
    return jax.device_put(windows, NamedSharding(run.mesh, P(AXIS)))


def is_logged(step: int, steps: int) -> bool:
    return step % min(50, max(1, steps // 100)) == 0 or is_evaluated(step, steps)


def is_evaluated(step: int, steps: int) -> bool:
    return step % max(1, steps // 10) == 0 or step == steps


def sample(run: Run, params: Any, length: int = 600) -> tuple[str, str]:
    """The opening of the validation text, and how the model continues it."""
    nnx.update(run.model, jax.device_get(params))
    opening = run.text.validation[: min(32, run.model.context)]
    tokens = continue_text(run.model, opening, jax.random.key(run.seed), length=length)
    return _text(opening), _text(np.asarray(tokens))


def _text(tokens: np.ndarray) -> str:
    """Without control characters: a model that has learned little would play with the terminal."""
    text = tokens.tobytes().decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
