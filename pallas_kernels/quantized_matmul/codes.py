"""How codes lie in memory: 4 bits in halves of groups, or fragments in the order of threads.

Fragments: blocks of 32 rows by 16 columns follow one another along the columns. Of a block lane
``4 g + t`` of a warp has its words together, those of rows 0 to 15 first. Of 16 rows it holds what
it contributes to the left operand of ``mma.m16n8k16``, which is the weight transposed: rows
``2 t + e + 8 h`` of columns ``g + 8 r``, where e, h and r are 0 or 1.

Dims: K row, N column, B block of 32 rows, C block of 16 columns, W word.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .weight import Arrangement, QuantizedWeight, WeightCode, WeightFormat

ROWS, COLUMNS = 32, 16
"""Of a block."""


def packed_pairs(codes: jax.Array, group: int) -> jax.Array:
    """Codes of 4 bits [*, K, N] two in a byte, uint8 [*, K / 2, N]: halves of groups together."""
    *lead, rows, columns = codes.shape
    grouped = codes.astype(jnp.uint8).reshape(*lead, rows // group, 2, group // 2, columns)
    low, high = grouped[..., 0, :, :], grouped[..., 1, :, :]
    return (low | (high << 4)).reshape(*lead, rows // 2, columns)


def unpacked_pairs(packed: jax.Array, group: int) -> jax.Array:
    """What ``packed_pairs`` packed, uint8 [*, K, N]."""
    *lead, pairs, columns = packed.shape
    grouped = packed.reshape(*lead, 2 * pairs // group, group // 2, columns)
    halves = jnp.stack([grouped & 15, grouped >> 4], axis=-3)
    return halves.reshape(*lead, 2 * pairs, columns)


def weight_codes(weight: QuantizedWeight) -> jax.Array:
    """Codes [*, K, N]: uint8 of 4 bits, or 8 bits as they are stored."""
    form = weight.format
    if weight.arrangement is Arrangement.FRAGMENTS:
        codes = functools.partial(fragment_codes, form=form)
        for _ in weight.leading:
            codes = jax.vmap(codes)
        return codes(weight.data)
    return unpacked_pairs(weight.data, form.group_rows) if form.code.bits == 4 else weight.data


def in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with its codes in rows."""
    if weight.arrangement is Arrangement.ROWS:
        return weight
    data = weight_codes(weight)
    if weight.format.code.bits == 4:
        data = packed_pairs(data, weight.format.group_rows)
    return dataclasses.replace(weight, data=data, arrangement=Arrangement.ROWS)


def fragment_words(data: jax.Array, *, form: WeightFormat) -> jax.Array:
    """Codes in rows as words [B, C, W]."""
    is_4_bit = form.code.bits == 4
    codes = unpacked_pairs(data, form.group_rows) if is_4_bit else data
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    rows, columns = codes.shape
    # Rows: block, step of 16, h, t, e. Columns: block, r, g.
    x = codes.reshape(rows // ROWS, 2, 2, 4, 2, columns // COLUMNS, 2, 8)
    if is_4_bit:
        x = x.transpose(0, 5, 7, 3, 1, 4, 2, 6)  # block block g t step, e h r of a word's nibbles
        x = x.reshape(*x.shape[:2], 64, 4, 2)
        x = x[..., 0] | (x[..., 1] << 4)
    elif form.code is WeightCode.INT8:
        x = x.transpose(0, 5, 7, 3, 1, 2, 6, 4)  # block block g t step h, r e of a word's bytes
    else:
        # The high bytes of a word's halves are of column g, the low ones of g + 8.
        x = x[..., ::-1, :].transpose(0, 5, 7, 3, 1, 2, 4, 6)  # block block g t step h, e r
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:2], -1, 4), jnp.int32)


def fragment_codes(words: jax.Array, *, form: WeightFormat) -> jax.Array:
    """The inverse."""
    blocks, across, _ = words.shape
    bits = form.code.bits
    places = jnp.arange(32 // bits, dtype=jnp.uint32) * bits
    x = jax.lax.bitcast_convert_type(words, jnp.uint32)[..., None]
    x = jnp.right_shift(*jnp.broadcast_arrays(x, places))
    x = (x & (2**bits - 1)).astype(jnp.uint8).reshape(blocks, across, 8, 4, 2, 2, 2, 2)
    if bits == 4:
        x = x.transpose(0, 4, 6, 3, 5, 1, 7, 2)
    elif form.code is WeightCode.INT8:
        x = x.transpose(0, 4, 5, 3, 7, 1, 6, 2)
    else:
        x = x[..., ::-1].transpose(0, 4, 5, 3, 6, 1, 7, 2)
    x = x.reshape(blocks * ROWS, across * COLUMNS)
    return x if bits == 4 else jax.lax.bitcast_convert_type(x, form.code.storage)
