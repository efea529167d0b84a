"""Notes on errors that JAX and flax raise inside a loss, which do not know that it runs for one worker.

This is the one place that reads the text of errors of others. A note is added to the error, and nothing
else depends on it: where a text changes, the note is missing. tests/test_gradients.py asks for each of
them of the JAX and flax that are installed.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

from lioncub_jax.mesh.specs import product

_MESH = (
    "the loss runs for one worker, where the axes {} of the mesh are taken. Put what the model says of "
    "the mesh into lioncub_jax.mesh.inner, which takes a NamedSharding too: "
    "jax.lax.with_sharding_constraint(x, inner(P(...))), jax.shard_map(f, mesh=inner(mesh), "
    "in_specs=inner(P(...)), out_specs=inner(P(...))); give logical rules around the step, not in it. An "
    "array on the mesh that the loss closes over is to be an argument, lioncub_jax.Kind.SHARED"
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
    ("is only valid for values of rank",): (
        "a spec has more names than the array dimensions. flax makes the kernel of nn.DenseGeneral flat, "
        "and constrains it then by the names of nn.with_partitioning, under any mesh: leave these names "
        "out of its kernel_init, and give them as specs to init_state, on_mesh and worker_value_and_grad"
    ),
    ("anual", "ontext mesh", "Auto axes"): _MESH,
}


_STACKED = (
    "every parameter has {} entries in its first dimension, as many as there are workers. If you did "
    "not make them so, the optimizer is not in lioncub_jax.on_mesh(tx, workers), and has added the "
    "gradients of all workers, [workers, ...], to the parameters"
)


def add_notes(error: Exception, mesh: AbstractMesh, params: optax.Params) -> None:
    """Adds notes to an error of a loss, inside of a worker: about axes that are taken, or parameters."""
    for words, advice in _ADVICE.items():
        if any(word in str(error) for word in words):
            error.add_note(f"lioncub_jax: {advice.format(mesh.manual_axes)}")
            break
    num_workers = product(mesh.shape, mesh.manual_axes)
    if num_workers > 1 and {jnp.shape(x)[:1] for x in jax.tree.leaves(params)} == {(num_workers,)}:
        error.add_note(f"lioncub_jax: {_STACKED.format(num_workers)}")
