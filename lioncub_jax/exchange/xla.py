"""Workarounds for XLA optimizations that cost time or memory here. None changes a value.

Each has its reason, seen with jax 0.10.2. ``benchmarks/compile_time.py`` and ``benchmarks/local_step.py``
measure all of them together, on CPU or GPU; one that only TPUs need names the program that shows it.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax.mesh import axes

MOST_TERMS = 64  # of a sum without a loop; more compile slowly
PER_REDUCTION = 16  # numbers in one reduction; hundreds in one reduction compile slowly


def reduced(
    each: Sequence[Callable[..., jax.Array]], arrays: Sequence[jax.Array], axis: int
) -> list[jax.Array]:
    """Reduces arrays of one shape along an axis, each by its own operation with neutral element 0.

    In one pass: what several of them need is computed once. XLA stores the results of a reduction; cheaper
    operations it repeats for each use.
    """
    zeros = [x.dtype.type(0) for x in arrays]

    def all_of(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [op(y, z) for op, y, z in zip(each, a, b, strict=True)]

    return list(lax.reduce(list(arrays), zeros, all_of, (axis,)))


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
        constants += reduced([jnp.maximum] * few, [both[:, k] for k in range(few)], 0)
    return constants[: len(numbers)]


def materialized(x: jax.Array) -> jax.Array:
    """The same values, computed once and stored, not computed again for each use of some of them."""
    words = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    # XLA stores the results of reductions, and does not see that the second half is empty.
    first = jnp.arange(2).reshape(2, *[1] * x.ndim) == 0
    made = lax.reduce_or(jnp.where(first, words, 0), (0,))
    return lax.bitcast_convert_type(made, x.dtype)


def for_cpu() -> bool:
    """True where a program of CPUs is traced."""
    known = axes.platform(jax.sharding.get_abstract_mesh())
    return (known or jax.default_backend()) == "cpu"


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


def chosen(
    flag: jax.Array, new: Callable[..., jax.Array], old: Callable[..., jax.Array], *arrays: Any
) -> jax.Array:
    """``new(*arrays)`` where a flag ``bool[]`` is set, else ``old(*arrays)``, stored.

    On a CPU by a branch, whose result XLA fuses with nothing behind it. It would fuse a reshape of rows to
    a leaf, and then loop over the leaf's shape, element by element. If ``old`` gives back an array of
    its own, the new one takes its place.
    """
    if not for_cpu():
        arrays = tuple(
            jax.tree.unflatten(jax.tree.structure(arrays), recomputed(jax.tree.leaves(arrays)))
        )
        return jnp.where(flag, new(*arrays), old(*arrays))
    over = frozenset().union(*[axes.varying_axes(x) for x in jax.tree.leaves((flag, arrays))])

    def typed(make: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
        return axes.varying(make(*arrays), tuple(over))

    return lax.cond(flag, functools.partial(typed, new), functools.partial(typed, old), *arrays)


def sum_of(terms: Callable[[Any], jax.Array], number: int) -> jax.Array:
    """``terms(0) + terms(1) + ...``; ``terms(...)`` has all of them, ``[number, ...]``.

    On a CPU few are added one by one, and stored, since XLA reduces a leading axis in no loop over vectors.
    """
    if for_cpu() and number <= MOST_TERMS:
        return materialized(functools.reduce(operator.add, map(terms, range(number))))
    return jnp.sum(terms(...), 0)


def recomputed(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays (or None) behind an optimization barrier.

    XLA computes values from them again instead of storing a copy as large as the gradient. On a TPU it also
    keeps their layout, in which the kernel that packs reads them.
    """
    return lax.optimization_barrier(list(arrays))


def behind(x: jax.Array, made: jax.Array) -> jax.Array:
    """``bool[...]``, the same values, but they depend on ``made``, ``float32[...]``.

    What follows is ordered after the kernel that made it, so it can overwrite what that kernel read.
    """
    if not (made.size and for_cpu()):
        return x
    return x & ~_never(lax.bitcast_convert_type(made.reshape(-1)[0], jnp.uint32))


def delayed_by(x: jax.Array, number: jax.Array) -> jax.Array:
    """``uint32[]``, the same value, but it depends on ``number``, ``float32[]``."""
    return x ^ _never(lax.bitcast_convert_type(number, jnp.uint32)).astype(jnp.uint32)


def all_delayed_by(flags: Sequence[jax.Array], words: Sequence[jax.Array]) -> jax.Array:
    """``bool[]``: whether all flags are set, for any words ``uint32[]``.

    It depends on ``words``, so XLA orders it after their readers, and momentum can be overwritten in place
    without a copy. Of a GPT of 124M parameters with `owner_lion`, compiled for TPU v5e, all kernels access
    137 bytes a parameter in place of 146 (``benchmarks/ahead_of_time.py --models "gpt-124m, update"``).
    On a CPU a vote of 2 bits of one array of 16M holds 17 MB in place of 72 (``benchmarks/local_step.py``),
    but without momentum 20 arrays with `owner_adamw` hold 6 % more, so there are no words then.
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


# --- TPUs: a Pallas kernel that packs codes, and arrays as they lie in a TPU's tiles
#
# A TPU computes on tiles of 8 x 128 numbers, 8 *sublanes* of 128 *lanes*. XLA for TPU computes codes and
# packs them in two kernels, and between the two each code lies in memory as a word: eight bytes a parameter
# are moved for one bit. A Pallas kernel that XLA may fuse its input into takes the codes as they are made.
# It computes what `bits.pack` computes without it, bit for bit.
#
# Compiled for 8 TPU v5e, a vote on one matrix accesses 114 bytes a parameter: 125 without the kernel, 133
# if leaves lie in the order of their elements, 120 with planes unpacked one by one, 139 without all three.

LANES = 128
SUBLANES = 8
BLOCK = 32  # rows, one bit of a word each
TILES = BLOCK // SUBLANES  # of a block
_FIELD = BLOCK // TILES  # bits of a code that fit in a word beside those of the block's other tiles
_EVERY_FIELD = 0x01010101
_NIBBLE = BLOCK // SUBLANES  # bits of a code that fit in a word beside those of a tile's other rows
_BLOCKS = (
    32  # that a kernel holds at a time: half a megabyte of each array that its input is made of
)


def for_tpu() -> bool:
    """True where a program of TPUs is traced."""
    return axes.platform(jax.sharding.get_abstract_mesh()) == "tpu"


def pack_tiles(codes: jax.Array, p: int, *, interpret: bool = False) -> list[jax.Array]:
    """`bits.pack` by a kernel, in one pass over what the codes are computed of.

    Args:
      codes: ``uint32[rows, 128]`` below ``2**p``; rows in whole blocks.
      p: number of bits.
      interpret: runs the kernel as plain JAX, slowly, on any platform.

    Returns:
      ``p`` planes, ``uint32[4 rows]`` each, the least significant first.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> from lioncub_jax.exchange import xla
      >>> codes = (jnp.arange(32 * 128, dtype=jnp.uint32) % 5).reshape(32, 128)
      >>> packed = xla.pack_tiles(codes, 3, interpret=True)
      >>> [bool((a == b).all()) for a, b in zip(packed, bits.pack(codes, 3))]
      [True, True, True]
    """
    from jax.experimental import pallas as pl  # a quarter of a second that others save
    from jax.experimental.pallas import tpu as pltpu

    blocks = codes.shape[0] // BLOCK
    at_once = min(blocks, _BLOCKS)
    plane = jax.ShapeDtypeStruct(
        (blocks, LANES), jnp.uint32, manual_axis_type=jax.typeof(codes).manual_axis_type
    )
    planes = pl.pallas_call(
        functools.partial(_pack, p),
        grid=(pl.cdiv(blocks, at_once),),
        in_specs=[pl.BlockSpec((at_once * BLOCK, LANES), lambda i: (i, 0))],
        out_specs=[pl.BlockSpec((at_once, LANES), lambda i: (i, 0))] * p,
        out_shape=[plane] * p,
        compiler_params=pltpu.CompilerParams(allow_input_fusion=[True]),
        interpret=interpret,
        name="lioncub_pack",
    )(codes)
    return [x.reshape(-1) for x in planes]


def _pack(p: int, codes: Any, *planes: Any) -> None:
    x = codes[...].reshape(-1, TILES, SUBLANES, LANES)
    for k, plane in enumerate(planes):
        if k % _FIELD == 0:
            fields = (x >> k) & 0xFF if p > _FIELD else x
            tiles = [fields[:, t] << (_FIELD * t) for t in range(TILES)]
            joined = functools.reduce(operator.or_, tiles)
            row = lax.broadcasted_iota(jnp.uint32, joined.shape, 1)
        mine = ((joined >> (k % _FIELD)) & _EVERY_FIELD) << row
        # Each bit is set in one row at most, so a sum is an or; sums of int32 are what the hardware has.
        total = jnp.sum(lax.bitcast_convert_type(mine, jnp.int32), axis=1)
        plane[...] = lax.bitcast_convert_type(total, jnp.uint32)


def unpack_tiles(planes: Sequence[jax.Array]) -> jax.Array:
    """`bits.unpack` in two steps, because a TPU's XLA writes out the first of them.

    What it keeps is a word for 8 elements with up to four bits of each, and not one for each bit of them.

    Args:
      planes: ``uint32[..., 4 rows]`` each; rows in whole blocks.

    Returns:
      ``uint32[..., rows, 128]``, codes in ``[0, 2**p)``.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> from lioncub_jax.exchange import xla
      >>> planes = [jnp.arange(256, dtype=jnp.uint32), jnp.full(256, 7, jnp.uint32)]
      >>> bool((xla.unpack_tiles(planes) == bits.unpack(planes, 64)).all())
      True
    """
    lead, row, codes = planes[0].shape[:-1], jnp.arange(SUBLANES, dtype=jnp.uint32)[:, None], []
    for first in range(0, len(planes), _NIBBLE):
        few = [x.reshape(*lead, -1, LANES) for x in planes[first:][:_NIBBLE]]
        tiles = []
        for t in range(TILES):
            tiles.append(
                functools.reduce(operator.or_, [_apart(x, t) << k for k, x in enumerate(few)])
            )
        joined = jnp.stack(tiles, -2)[..., None, :]  # [..., blocks, tiles, 1, lanes]
        codes.append(((joined >> (_NIBBLE * row)) & 0xF) << first)
    return functools.reduce(operator.or_, codes).reshape(*lead, -1, LANES)


def _apart(words: jax.Array, tile: int) -> jax.Array:
    """The bits of one tile of a block, one in each nibble."""
    x = (words >> (_FIELD * tile)) & 0xFF
    x = (x | (x << 12)) & 0x000F000F
    x = (x | (x << 6)) & 0x03030303
    return (x | (x << 3)) & 0x11111111
