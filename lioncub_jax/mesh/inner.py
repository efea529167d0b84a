"""What a model may say of the mesh where it runs for one worker.

There the workers' axes are taken: a constraint, a rule or a ``shard_map`` of the model can name the inner
axes (fsdp, tensor, expert) only.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import subjaxprs
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh.specs import axes_of, flax_in_use, shortened


def inner(said: Any) -> Any:
    """What a model says of a mesh, as it stands here: for models that also run for one worker.

    Args:
      said: a ``PartitionSpec``, a ``NamedSharding``, or a ``Mesh`` for the model's own ``jax.shard_map``.

    Returns:
      Inside ``shard_map``, or what `worker_value_and_grad` and `make_train_step` call: the spec (of the
      sharding) without the axes that are taken, or the mesh of which the rest can be used. Elsewhere what
      was given.

    Raises:
      TypeError: for anything else.

    Example:
      >>> import jax, lioncub_jax as lc
      >>> def attend(x, mesh):
      ...     cut = lc.mesh.inner(jax.P("data", "tensor"))
      ...     own = jax.shard_map(lambda x: x * 2, mesh=lc.mesh.inner(mesh), in_specs=cut, out_specs=cut)
      ...     return own(jax.lax.with_sharding_constraint(x, cut))
      >>> lc.mesh.inner(jax.P("data", "tensor")) == jax.P("data", "tensor")  # no worker is here
      True

    Source: this library.
    """
    here = jax.sharding.get_abstract_mesh()
    if not isinstance(said, (P, NamedSharding, Mesh)):
        raise TypeError(
            f"inner({said!r}): give a PartitionSpec, a NamedSharding or a Mesh; of a tree "
            "jax.tree.map(lioncub_jax.mesh.inner, tree)"
        )
    if not here.manual_axes:
        return said
    if isinstance(said, Mesh):
        return here
    return _without(said.spec if isinstance(said, NamedSharding) else said, here.manual_axes)


def _without(spec: P, taken: tuple[str, ...]) -> P:
    return shortened(spec, tuple(sorted(_axes_in(spec) - set(taken))))


def _axes_in(spec: P) -> set[str]:
    return {axis for entry in spec for axis in axes_of(entry)}


def of_model(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose model may follow flax's logical rules, and whose errors about meshes say what to do."""

    @functools.wraps(loss_fn)
    def hinted(*args: Any, **kwargs: Any) -> Any:
        taken = jax.sharding.get_abstract_mesh().manual_axes
        with _rules_without(taken):
            try:
                return loss_fn(*args, **kwargs)
            except Exception as error:
                told = [x for words, x in _ADVICE.items() if any(w in str(error) for w in words)]
                for advice in told[:1]:
                    error.add_note(f"lioncub_jax: {advice.format(taken)}")
                raise

    return hinted


def constraints_checked(jitted: Any, taken: tuple[str, ...]) -> Callable[..., Any]:
    """A jitted function that raises ``ValueError`` when it is traced for what JAX refuses to compile."""

    def check(jaxpr: Any) -> None:
        for step in jaxpr.eqns:
            said = step.params["sharding"] if step.primitive is sharding_constraint_p else None
            if isinstance(said, NamedSharding) and _axes_in(said.spec) & set(taken):
                raise ValueError(
                    f"the model constrains an array by {said.spec}: {_MESH.format(taken)}"
                )
        for inside in subjaxprs(jaxpr):
            check(inside)

    def run(*args: Any) -> Any:
        check(jitted.trace(*args).jaxpr.jaxpr)  # the call does not trace it again
        return jitted(*args)

    return run


_MESH = (
    "the loss runs for one worker, where the axes {} of the mesh are taken. Put what the model says of "
    "the mesh into lioncub_jax.mesh.inner, which takes a NamedSharding too: "
    "jax.lax.with_sharding_constraint(x, inner(P(...))), jax.shard_map(f, mesh=inner(mesh), "
    "in_specs=inner(P(...)), out_specs=inner(P(...))); give logical rules around the step, not in it"
)
_ADVICE = {  # by words of an error: the first that has one
    ("Going from `Manual`",): (
        "nnx.Embed(out_sharding=...) makes all axes Auto, and {} are taken: leave it out, and the type of "
        "the table says the rest, or look up by table.at[tokens].get(out_sharding=inner(P(...)))"
    ),
    ("Unhandled OpSharding",): (
        "jax.ensure_compile_time_eval computes at once, and JAX cannot where {} are taken: compute with "
        "NumPy, or before the loss"
    ),
    ("different trace level",): (
        "what the loss closes over cannot be written in it: give nnx.Rngs as an argument of the loss, and "
        "a module in place of the parameters"
    ),
    ("anual", "ontext mesh", "Auto axes"): _MESH,
}


@contextlib.contextmanager
def _rules_without(taken: tuple[str, ...]) -> Iterator[None]:
    """The active logical rules of flax, without the axes that are taken."""
    if not flax_in_use():
        yield
        return
    from flax import linen

    def free(axes: Any) -> Any:
        return axes if axes is None else next(iter(_without(P(axes), taken)), None)

    rules = [(name, free(axes)) for name, axes in linen.get_logical_axis_rules()]
    with linen.logical_axis_rules(rules):
        yield
