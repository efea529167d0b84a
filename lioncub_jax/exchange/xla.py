"""Workarounds for XLA optimizations that cost time or memory here.

None changes a value but `sum_of`, which may change the order of a sum.

| take | where |
|---|---|
| `materialized` | XLA would compute an array again for each use of some of it |
| `stored` | a reshape behind it would be fused with what makes a tree of words (CPU) |
| `chosen` | likewise, and a flag chooses between two trees |
| `recomputed` | XLA would store what is cheap to compute again |
| `in_order` | errors must be there before a message is sent (GPU) |
| `behind` | an array may be overwritten once a kernel has read it (CPU) |
| `all_delayed_by` | likewise momentum, once all messages are made |
| `delayed_by` | buckets would wait for each other, because their kernels share an operand |

Each has its reason, seen with jax 0.10.2. ``benchmarks/compile_time.py`` and ``benchmarks/local_step.py``
measure all of them together, on CPU or GPU.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax.mesh import axes

MOST_TERMS = 64  # of a sum without a loop; more compile slowly
PER_REDUCTION = 16  # numbers in one reduction; hundreds in one reduction compile slowly


def for_cpu() -> bool:
    """True where a program of CPUs is traced."""
    known = axes.platform(jax.sharding.get_abstract_mesh())
    return (known or jax.default_backend()) == "cpu"


def for_tpu() -> bool:
    """True where a program of TPUs is traced."""
    return axes.platform(jax.sharding.get_abstract_mesh()) == "tpu"


def reduced(
    each: Sequence[Callable[..., jax.Array]], arrays: Sequence[jax.Array], *along: int
) -> list[jax.Array]:
    """Reduces arrays of one shape along some axes, each by its own operation with neutral element 0.

    In one pass: what several of them need is computed once. XLA stores the results of a reduction; cheaper
    operations it repeats for each use.
    """
    zeros = [x.dtype.type(0) for x in arrays]

    def all_of(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [op(y, z) for op, y, z in zip(each, a, b, strict=True)]

    return list(lax.reduce(list(arrays), zeros, all_of, along))


def runtime_constants(numbers: Sequence[int], num_steps: jax.Array) -> list[jax.Array]:
    """``uint32[]`` each: the numbers, as values that XLA cannot fold into a kernel.

    XLA compiles one kernel for each different computation. Kernels of two leaves of one shape differ only
    in the row where the leaf begins. If that row is an operand and not a constant, both use one kernel.

    Args:
      numbers: at least 0. A single number stays a constant.
      num_steps: ``int32[]``, never negative, but XLA does not know this.
    """
    if len(numbers) < 2:
        return [jnp.uint32(x) for x in numbers]
    # Reduced, because XLA puts no reduction of several results into the kernels that use them.
    nothing = jnp.stack([num_steps.astype(jnp.uint32) >> 31, jnp.uint32(0)])[:, None]
    few = min(len(numbers), PER_REDUCTION)
    padded = np.pad(np.array(numbers, np.uint32), (0, -len(numbers) % few))
    constants: list[jax.Array] = []
    for own in padded.reshape(-1, 1, few):
        both = nothing + own
        columns = [lax.slice_in_dim(both, k, k + 1, axis=1) for k in range(few)]
        constants += reduced([lax.max] * few, columns, 0, 1)
    return constants[: len(numbers)]


def materialized(x: jax.Array) -> jax.Array:
    """The same values, computed once and stored, not computed again for each use of some of them."""
    words = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    # XLA stores the results of reductions, and does not see that the second half is empty.
    first = jnp.arange(2).reshape(2, *[1] * x.ndim) == 0
    made = lax.reduce_or(jnp.where(first, words, 0), (0,))
    return lax.bitcast_convert_type(made, x.dtype)


def by_words(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``move(x)``, which gives elements another place or shape only; of floats of 16 bits their words.

    XLA for CPU reshapes bfloat16 by way of float32, in a copy, and copies the error of a step once more
    where it leaves. 100 arrays of width 768 with `owner_adamw` held 516 MB in place of 391
    (``benchmarks/compile_time.py``).
    """
    is_short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    if not (is_short and for_cpu()):
        return move(x)
    moved = move(lax.bitcast_convert_type(x, jnp.uint16))
    return lax.bitcast_convert_type(moved, x.dtype)


def chosen(flag: jax.Array, new: Callable[..., Any], old: Callable[..., Any], *arrays: Any) -> Any:
    """``new(*arrays)`` where a flag ``bool[]`` is set, else ``old(*arrays)``: trees of arrays, stored.

    On a CPU by a branch, whose results XLA fuses with nothing behind it. It would fuse a reshape of rows to
    a leaf, and then loop over the leaf's shape, element by element. If ``old`` gives back arrays of its
    own, the new ones take their place.
    """
    if not for_cpu():
        arrays = jax.tree.unflatten(jax.tree.structure(arrays), recomputed(jax.tree.leaves(arrays)))
        return jax.tree.map(partial(jnp.where, flag), new(*arrays), old(*arrays))
    over = frozenset().union(*[axes.varying_axes(x) for x in jax.tree.leaves((flag, arrays))])

    def typed(make: Callable[..., Any], *arrays: Any) -> Any:
        return axes.varying(make(*arrays), tuple(over))

    return lax.cond(flag, partial(typed, new), partial(typed, old), *arrays)


def stored(make: Callable[[Any], Any], arrays: Any) -> Any:
    """``make(arrays)``, a tree made of words ``uint32``, stored in memory: no reshape is fused with it.

    On a CPU by a branch that is always taken, see `chosen`: XLA fuses a reduction that is used once, and a
    barrier is gone by then.
    """
    words = jax.tree.leaves(arrays)[0]
    if not (for_cpu() and words.size):
        return make(arrays)
    like = jax.eval_shape(make, arrays)

    def nothing(arrays: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    return chosen(~_never(words.reshape(-1)[0]), make, nothing, arrays)


def sum_of(terms: Callable[[Any], jax.Array], number: int) -> jax.Array:
    """``terms(0) + terms(1) + ...``; ``terms(...)`` has all of them, ``[number, ...]``.

    On a CPU few are added one by one, and stored, since XLA reduces a leading axis in no loop over vectors.
    """
    if for_cpu() and number <= MOST_TERMS:
        return materialized(reduce(operator.add, map(terms, range(number))))
    return jnp.sum(terms(...), 0)


def recomputed(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays (or None) behind an optimization barrier.

    XLA computes values from them again instead of storing a copy as large as the gradient. On a TPU it also
    keeps their layout, in which the kernel that packs reads them: 485 bytes accessed for each parameter in
    place of 500, in a step of a GPT of two layers with `owner_lion`, compiled for v5e.
    """
    return barrier(list(arrays))


def in_order(message: Any, errors: list[Any]) -> tuple[Any, list[Any]]:
    """The same arrays; on a GPU the errors are there before the message is sent.

    Else XLA holds codes, and gradients, until replies have come: of one matrix with `owner_adamw`, compiled
    for 8 H100, 1.46 bytes a parameter in place of 0.93 (``benchmarks/ahead_of_time.py``).
    """
    if for_cpu() or for_tpu():
        return message, errors
    return barrier((message, errors))


def barrier(tree: Any) -> Any:
    """The same arrays behind an optimization barrier: behind one those that vary over the same mesh axes.

    JAX 0.10 gives all results of a barrier one type, which varies over the axes of any of its operands.
    """
    leaves, structure = jax.tree.flatten(tree)
    alike = defaultdict(list)
    for i, x in enumerate(leaves):
        alike[axes.varying_axes(x)].append(i)
    for places in alike.values():
        held = lax.optimization_barrier([leaves[i] for i in places])
        for i, x in zip(places, held, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def behind(x: jax.Array, made: jax.Array) -> jax.Array:
    """``bool[...]``, the same values, but they depend on ``made``, ``float32[...]``.

    What follows is ordered after the kernel that made it, so it can overwrite what that kernel read.
    """
    if not (made.size and for_cpu()):
        return x
    return x & ~_never(lax.bitcast_convert_type(made.reshape(-1)[0], jnp.uint32))


def delayed_by(x: jax.Array, number: jax.Array) -> jax.Array:
    """``uint32[]``, the same value, but it depends on ``number``, ``float32[]``.

    XLA fuses kernels with a common operand, so without it buckets wait for each other: of the five first of
    a GPT of 124M parameters on H100 all would travel under 0.64 ms of matrix work, and with it under 0.94,
    0.87, 0.71, 0.64, 0.64 (``benchmarks/ahead_of_time.py``, "vote, 1 bit, 8 buckets").
    """
    return x ^ _never(lax.bitcast_convert_type(number, jnp.uint32)).astype(jnp.uint32)


def all_delayed_by(flags: Sequence[jax.Array], words: Sequence[jax.Array]) -> jax.Array:
    """``bool[]``: whether all flags are set, for any words ``uint32[]``.

    It depends on ``words``, so XLA orders it after their readers, and momentum can be overwritten in place
    without a copy. On a CPU a vote of 2 bits of one array of 16M holds 19 MB in place of 72
    (``benchmarks/local_step.py``), but without momentum 20 arrays with `owner_adamw` hold 6 % more, so
    there are no words then. On TPUs, a step of a GPT of 124M parameters with `owner_lion` accesses 2 % more
    bytes without them.
    """
    unset = ~jnp.stack(flags)
    if not words:
        return ~jnp.any(unset)
    # One reduction of both, so that the flags are computed once. XLA would drop a reduction of one flag.
    never = _never(jnp.stack(words))
    size = max(len(flags), len(words), 2)
    both = [jnp.pad(x, (0, size - len(x))) for x in (never, unset)]
    made, wrong = reduced([operator.or_] * 2, both, 0)
    return ~(made | wrong)


def _never(word: jax.Array) -> jax.Array:
    """False, but XLA does not know this."""
    return lax.population_count(word) > 32
