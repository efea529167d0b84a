"""Local steps: a worker trains on its own for a while, and hands over how far it came."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lioncub_jax import checks, wires
from lioncub_jax.exchange import Sending
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.optimizer import GlobalState
from lioncub_jax.training.gradients import cut_in_parts, over_parts

_PLAIN = "give a plain optax transform, such as optax.adamw(1e-3)"


def check_local(local: Any, local_steps: Any, workers: Workers) -> None:
    """Raises for local steps without an optimizer for them, or with one that cannot be a worker's own."""
    checks.check_count(f"local_steps={local_steps!r}", local_steps)
    if local is None:
        if local_steps > 1:
            raise ValueError(
                f"local_steps={local_steps} without local, the optimizer of a worker's own steps: give "
                "local=optax.adamw(...), and the same to init_state; or leave local_steps out"
            )
        return
    if isinstance(local, Sending):
        raise ValueError(_talks(local.scheme))
    if not isinstance(local, optax.GradientTransformation):
        raise TypeError(f"local={local!r} is no optimizer: {_PLAIN}, called")
    if workers.group_axis is not None:
        raise ValueError(
            f"local steps with workers of {workers}: the devices of a group would each train on their own, "
            "and part. Give Workers without a group_axis; devices that share a worker are those of an "
            "inner mesh axis, over which parameters or the batch are cut (specs, batch_spec)"
        )


def _talks(what: str) -> str:
    return (
        f"local is a transform in which workers talk ({what}), and local steps are each worker's own: "
        f"{_PLAIN}, as local, and the transform in which they talk as tx"
    )


def of_each(
    local: optax.GradientTransformation, workers: Workers
) -> optax.GradientTransformationExtraArgs:
    """A transform whose state is that of the local one, each worker's own to the last counter."""

    def init(params: optax.Params) -> Any:
        state = local.init(params)
        if found := [
            type(x).__name__ for x in jax.tree.leaves(state, is_leaf=_of_talk) if _of_talk(x)
        ]:
            raise ValueError(_talks(found[0]))
        return wires.varying(state, workers.axes)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)


def _of_talk(state: Any) -> bool:
    return isinstance(state, GlobalState) or hasattr(state, "holders")


def check_made(local_state: Any, local: Any) -> None:
    """Raises ``ValueError`` for a state that was made without what the step has, or the reverse."""
    given: Any = jax.tree.structure(local_state)
    made = given != jax.tree.structure(())
    if local is None and made:
        raise ValueError(
            "the state has a local_state, and the step takes no local steps: give make_train_step(..., "
            "local_steps=H, local=...) the optimizer that init_state was given, or make the state by "
            "init_state without local"
        )
    if local is not None and not made:
        raise ValueError(
            "the step takes local steps, and the state has no local_state: make it by init_state(..., "
            "local=...), with the optimizer that make_train_step has; of an older state take "
            "state._replace(local_state=init_state(...).local_state)"
        )


def local_differences(
    of_worker: Callable[..., Any],
    local: optax.GradientTransformation | None,
    axis: wires.AxisName,
    local_steps: int,
) -> Callable[..., Any]:
    """As `gradients.local_gradients`, with local states beside the model's, and differences as gradients.

    ``(params, (model_state, local_state), batch, rng) -> ((loss, (aux, states)), differences)``, parameters
    before minus those after. Without ``local`` gradients stay what they are.
    """

    def gradients(params: Any, states: Any, batch: Any, rng: jax.Array) -> Any:
        (loss, (aux, model_state)), grads = of_worker(params, states[0], batch, rng)
        return (loss, (aux, (model_state, ()))), grads

    if local is None:
        return gradients
    local = optax.with_extra_args_support(local)

    def alone(params: Any, states: Any, batch: Any, rng: jax.Array) -> Any:
        parts = jax.tree.map(partial(cut_in_parts, count=local_steps), batch)

        def one(carry: Any, part: Any) -> Any:
            (params, (model_state, state)), (index, batch) = carry, part
            own = jax.random.fold_in(rng, index)
            (loss, (aux, model_state)), grads = of_worker(params, model_state, batch, own)
            updates, state = local.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return wires.varying((params, (model_state, state)), axis), (loss, aux)

        start, steps = wires.varying((params, states), axis), (jnp.arange(local_steps), parts)
        # XLA copies what a loop carries at each turn: parameters and states, so two steps make one turn.
        (after, states), (losses, auxes) = lax.scan(one, start, steps, unroll=2)
        aux = jax.tree.map(over_parts, auxes)
        differences = jax.tree.map(jnp.subtract, params, after)
        return (jnp.mean(losses), (aux, states)), differences

    return alone


def finite(tree: Any) -> jax.Array:
    """``bool[]``: whether all values are."""
    each = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(each)) if each else jnp.bool_(True)
