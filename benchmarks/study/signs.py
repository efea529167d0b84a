"""What a vote keeps of full-precision Lion's signs, and how far momenta drift, during real training.

Beside the run a momentum of the mean gradient is kept in full precision, at the same parameters. Where
one of the two signs is 0, half of it counts as kept.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lioncub_jax import reference
from lioncub_jax.reference import simulate
from study.methods import DECAY, Method
from study.runs import Runner, Spec, drawn, numbers, schedule
from study.tasks import Data, Task

POINTS = 10


def program(task: Task, method: Method, spec: Spec) -> Any:
    """``(data, table, lengths, rate, seed) -> (kept, drift)``: of each leaf ``float32[POINTS]``."""
    if method.votes is None:
        raise ValueError(f"{spec.method} does not end in a sign: there is nothing to compare")
    b1, b2 = task.betas
    votes = method.votes(task.betas)
    times = jnp.arange(spec.steps // POINTS * POINTS).reshape(POINTS, -1)

    def train(data: Data, table: Any, lengths: Any, rate: Any, seed: Any) -> Any:
        key = jax.random.key(seed)
        draws, rates = jax.random.fold_in(key, 1), schedule(rate, spec.steps)

        def step(carry: Any, t: jax.Array) -> Any:
            run, mu = carry
            own = drawn(jax.random.fold_in(draws, t), table, lengths, spec.batch)
            _, grads = simulate.local_gradients(task.loss, run, task.batch(data.train, own))
            mean = jax.tree.map(lambda g: g.mean(axis=0), grads)
            exact = jax.tree.map(lambda g, m: jnp.sign((1 - b1) * g + b1 * m), mean, mu)
            said, state = votes.update(grads, run.opt_state, run.params)
            kept = jax.tree.map(agreement, said, exact)
            params = jax.tree.map(
                lambda p, u: p - rates(t) * (jnp.sign(u) + DECAY * p), run.params, said
            )
            mu = jax.tree.map(lambda g, m: (1 - b2) * g + b2 * m, mean, mu)
            return (simulate.Simulated(run.step + 1, params, state, run.rng), mu), kept

        def segment(carry: Any, times: jax.Array) -> Any:
            carry, kept = jax.lax.scan(step, carry, times)
            drift = reference.drift(carry[0].opt_state.mu) if method.drifts else None
            return carry, (jax.tree.map(jnp.mean, kept), drift)

        run = simulate.start(votes, task.init(key), spec.workers, key)
        beside = jax.tree.map(jnp.zeros_like, run.params)
        return jax.lax.scan(segment, (run, beside), times)[1]

    return train


def agreement(said: jax.Array, exact: jax.Array) -> jax.Array:
    """The share of equal signs."""
    return 0.5 + 0.5 * jnp.mean(jnp.sign(said) * exact)


class SignsRunner(Runner):
    """Runs specs for their signs; rows hold no losses."""

    make_program = staticmethod(program)

    def described(self, spec: Spec, outcome: Any) -> dict[str, Any]:
        kept, drift = outcome
        sizes = jax.tree.map(lambda x: x.size, self.task.parameters)
        overall = sum(
            x * n for x, n in zip(jax.tree.leaves(kept), jax.tree.leaves(sizes), strict=True)
        )
        return {
            "kept_overall": numbers(overall / self.task.size),
            "kept": by_name(kept),
            "drift": by_name(drift) if drift is not None else None,
        }


def by_name(tree: Any) -> dict[str, list[float]]:
    """Leaves by their path, ``blocks.0.mlp.up.kernel``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): numbers(x) for path, x in leaves
    }
