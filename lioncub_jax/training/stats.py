"""Numbers of a training state for logs, and its model for evaluation."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lioncub_jax.exchange.bits import merge_over_workers
from lioncub_jax.exchange.sync import SyncState
from lioncub_jax.exchange.transform import CommunicateState, VoteCounts
from lioncub_jax.mesh.boxes import find_nodes
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Static, check_alive


def metrics(state: optax.OptState) -> dict[str, jax.Array]:
    """Statistics of the last votes and syncs in a state, as a flat dict for any logger.

    Args:
      state: a `StepState`, or the state of any transforms. Of state that ``jax.pmap`` has stacked take one
        worker's copy first.

    Returns:
      Arrays of shape ``[]`` that are the same on every worker and stay on the devices:

      * ``votes/ties``: the share of parameters whose votes cancelled in the last step;
      * ``votes/agreement``: the probability that two workers, drawn at random, cast the same vote on a
        parameter in the last step: 0.5 where votes are coins, 1 where all are the same, for any number of
        workers. Of votes of one bit only; NaN where no two workers voted;
      * ``votes/abstained``: workers that abstained from it;
      * ``votes/abstentions``: their sum over all steps;
      * ``sync/drift``: the distance of momenta at the last sync in full precision, the mean over the
        leaves that were measured;
      * ``sync/drift/<leaf>``: of a leaf, the share of its mean square that is variance between workers:
        0 where all are the same, (W-1)/W where they are independent, and 0 if it was not measured;
      * ``sync/syncs``: syncs done.

      Those of votes over all `communicate` together. None of those of which there is nothing in the state.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, workers="data", sync=lc.sync.every(100))
      >>> {name: float(x) for name, x in lc.metrics(tx.init({"w": jnp.ones(3)})).items()}["votes/ties"]
      0.0

    Source: Lion Cub (arXiv 2411.16462), cross-worker variance of the momentum.
    """
    check_alive("state", state)
    votes = [s.votes for s in find_nodes(state, CommunicateState)]
    syncs = [(s.syncs, s.drift) for s in find_nodes(state, SyncState)]
    with jax.debug_nans(False):  # the agreement of no votes is no number
        names, numbers = _numbers(votes, syncs)
    return dict(zip(names.value, numbers, strict=True))


@jax.jit  # eager, each constant would go to the devices, which jax.transfer_guard can forbid
def _numbers(voting: Sequence[VoteCounts], syncs: Sequence[Any]) -> tuple[Static, list[jax.Array]]:
    """Names and numbers, in that order, which a dict loses here."""
    numbers: dict[str, jax.Array] = {}
    if voting:
        ties = jnp.stack([x.ties for x in voting])
        parameters = jnp.stack([x.parameters for x in voting])
        numbers["votes/ties"] = ties.sum() / jnp.maximum(parameters.sum(), 1)
        if unlike := jax.tree.leaves([x.unlike for x in voting]):  # of votes of one bit only
            pairs = jnp.stack(jax.tree.leaves([x.pairs for x in voting])).sum()
            share = jnp.stack(unlike).sum() / jnp.where(pairs > 0, pairs, jnp.nan)
            numbers["votes/agreement"] = 1 - share
        numbers["votes/abstained"] = jnp.stack([x.abstained for x in voting]).max()
        numbers["votes/abstentions"] = jnp.stack([x.abstentions for x in voting]).max()
    if syncs:
        numbers["sync/syncs"] = jnp.max(jnp.stack([count for count, _ in syncs]))
        leaves = jax.tree_util.tree_leaves_with_path([drift for _, drift in syncs])
        for (_, *path), x in leaves:
            name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
            numbers[f"sync/drift/{name}"] = jnp.maximum(x, 0)
        each = jnp.stack([jnp.float32(-1), *[x for _, x in leaves]])
        measured = each >= 0
        count = jnp.maximum(jnp.sum(measured, dtype=jnp.float32), 1)
        numbers["sync/drift"] = jnp.sum(each, where=measured) / count
    return Static(tuple(numbers)), list(numbers.values())


class Meter:
    """Numbers of a run as a flat dict of floats, for any writer.

    A call waits for the step whose state it is given, and reads all its numbers at once. Between calls
    nothing is read, so devices do not wait: call it each 50 steps, say. In several processes all call it.

    Args:
      tokens: that all workers take in one step; None leaves ``tokens_per_second`` out.
      sent_bytes: that a device sends to other workers in one step, such as
        ``lioncub_jax.audit.of(tx, params, workers).sent_bytes``; None leaves ``sent_bytes`` out.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, workers="data")
      >>> meter = lc.training.Meter(tokens=4096, sent_bytes=1e6)
      >>> meter(50, tx.init({"w": jnp.ones(3)}), {"loss": jnp.float32(2.5)})["loss"]
      2.5

    Source: this library.
    """

    def __init__(self, *, tokens: float | None = None, sent_bytes: float | None = None):
        self._tokens, self._sent = tokens, sent_bytes
        self._last: tuple[int, float] | None = None

    def __call__(
        self, step: int, state: optax.OptState, step_metrics: Any = ()
    ) -> dict[str, float]:
        """The numbers of one step.

        Args:
          step: its number, by which ``tokens_per_second`` knows how many were done since the last call.
          state: what the step returned: a `StepState`, or the state of any transforms.
          step_metrics: the metrics that the step returned, a tree; names of what lies deeper are joined
            by ``/``.

        Returns:
          Of ``step_metrics`` what is one number (``name/real`` and ``name/imag`` of a complex one), and not
          arrays such as those of each worker; all of
          `lioncub_jax.metrics`, ``votes/ties`` and so on; ``sent_bytes``; and from the second call on
          ``tokens_per_second``, the mean since the call before.
        """
        leaves = jax.tree.leaves_with_path(step_metrics) + jax.tree.leaves_with_path(metrics(state))
        numbers = {
            jax.tree_util.keystr(path, simple=True, separator="/"): x
            for path, x in leaves
            if jnp.size(x) == 1
        }
        row: dict[str, float] = {}
        for name, x in jax.device_get(numbers).items():
            x = np.ravel(x)[0]
            if np.iscomplexobj(x):
                row |= {f"{name}/real": float(x.real), f"{name}/imag": float(x.imag)}
            else:
                row[name] = float(x)
        now = time.monotonic()
        if self._sent is not None:
            row["sent_bytes"] = float(self._sent)
        if self._tokens is not None and self._last is not None:
            steps, seconds = step - self._last[0], now - self._last[1]
            row["tokens_per_second"] = self._tokens * steps / seconds
        self._last = step, now
        return row


def mean_model_state(state: Any) -> Any:
    """The model state of all workers as one, for evaluation: batch statistics averaged.

    Args:
      state: a `StepState`, or only its ``model_state``, leaves ``[workers, ...]``.

    Returns:
      The model state without the leading axis, the same on all devices: floating and complex leaves
      averaged over the workers (in float32 at least), of whole numbers and bools the largest, of random
      keys the first worker's.

    Raises:
      ValueError: for leaves without a leading axis.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> lc.training.mean_model_state({"mean": jnp.array([1.0, 3.0]), "calls": jnp.array([4, 4])})
      {'calls': Array(4, dtype=int32), 'mean': Array(2., dtype=float32)}

    Source: this library.
    """
    tree = getattr(state, "model_state", state)
    check_alive("model_state", tree)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.ndim(x):
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)} is a number, without the leading [workers] axis: "
                "give a StepState, or the model_state that is in one"
            )
    return jax.tree.map(_mean, tree)


@jax.jit
def _mean(x: jax.Array) -> jax.Array:
    if is_key(x):  # by a sum, as no slice can be taken along an Explicit axis
        words = jax.random.key_data(x)
        first = jax.lax.broadcasted_iota(jnp.int32, words.shape, 0) == 0
        words = jnp.sum(jnp.where(first, words, 0), axis=0, dtype=words.dtype)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return merge_over_workers(x).astype(x.dtype)
