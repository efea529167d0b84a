"""Differences of TPUs: a Pallas kernel that packs codes, and arrays as they lie in a TPU's tiles.

A TPU computes on tiles of 8 x 128 numbers, 8 *sublanes* of 128 *lanes*. XLA for TPU computes codes and
packs them in two kernels, and between the two each code lies in memory as a word: eight bytes a parameter
are moved for one bit. A Pallas kernel that XLA may fuse its input into takes the codes as they are made.
It computes what `bits.pack` computes without it, bit for bit.

Compiled for 8 TPU v5e, a vote on one matrix accesses 114 bytes a parameter: 125 without the kernel, 133
if leaves lie in the order of their elements, 120 with planes unpacked one by one, 139 without all three.
"""

from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lioncub_jax.mesh import axes

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
      >>> from lioncub_jax.exchange import kernels
      >>> codes = (jnp.arange(32 * 128, dtype=jnp.uint32) % 5).reshape(32, 128)
      >>> packed = kernels.pack_tiles(codes, 3, interpret=True)
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
        partial(_pack, p),
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
            joined = reduce(or_, tiles)
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
      >>> from lioncub_jax.exchange import kernels
      >>> planes = [jnp.arange(256, dtype=jnp.uint32), jnp.full(256, 7, jnp.uint32)]
      >>> bool((kernels.unpack_tiles(planes) == bits.unpack(planes, 64)).all())
      True
    """
    lead, row, codes = planes[0].shape[:-1], jnp.arange(SUBLANES, dtype=jnp.uint32)[:, None], []
    for first in range(0, len(planes), _NIBBLE):
        few = [x.reshape(*lead, -1, LANES) for x in planes[first:][:_NIBBLE]]
        tiles = []
        for t in range(TILES):
            tiles.append(reduce(or_, [_apart(x, t) << k for k, x in enumerate(few)]))
        joined = jnp.stack(tiles, -2)[..., None, :]  # [..., blocks, tiles, 1, lanes]
        codes.append(((joined >> (_NIBBLE * row)) & 0xF) << first)
    return reduce(or_, codes).reshape(*lead, -1, LANES)


def _apart(words: jax.Array, tile: int) -> jax.Array:
    """The bits of one tile of a block, one in each nibble."""
    x = (words >> (_FIELD * tile)) & 0xFF
    x = (x | (x << 12)) & 0x000F000F
    x = (x | (x << 6)) & 0x03030303
    return (x | (x << 3)) & 0x11111111
