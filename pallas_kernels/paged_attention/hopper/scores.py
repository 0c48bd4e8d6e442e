"""Arithmetic on one tile of scores, and on the values they are multiplied with.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E, STRIP, soft_cap, strips, sum_strips, tile_layout
from pallas_kernels.paged_attention.spec import PagedSpec

from .config import ROWS, QueryLayout
from .segments import Segment

# Finite, so that exp2(old maximum - new maximum) of a row that has seen no key is 1 and not NaN.
NO_MAXIMUM = -1e30
COLUMNS = 64  # of values that are loaded at a time to be cleaned


def positions_less_columns(seg: Segment, layout: QueryLayout):
    """int32 [64, 8]: the position of each row's token less the column."""
    shape = (ROWS, STRIP)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=tile_layout())
    position = seg.extent.position
    if layout.tokens == 1:
        return position - column
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile_layout())
    token = lax.div(row, jnp.int32(layout.span))
    # A token that a row does not have is before all keys.
    return jnp.where(token < seg.extent.tokens, position + token, -1) - column


def softmax_step(spec: PagedSpec, s, peak, total, ahead):
    """Probabilities relative to the running maximum, and what the maximum's growth costs.

    Args:
        spec: scale, cap and window.
        s: products of queries and keys.
        peak, total: so far; maxima are in units of log2.
        ahead: how far the position of a row's token is ahead of the key of a column, of the first
            8 columns.
    """
    if spec.soft_cap is None:
        s = s * (spec.scale * LOG2E)
    else:
        s = soft_cap(s, spec.scale, spec.soft_cap) * LOG2E
    masked = []
    for i, strip in enumerate(strips(s)):
        seen = ahead >= i * STRIP
        if spec.window is not None:
            seen = seen & (ahead < i * STRIP + spec.window)
        masked.append(jnp.where(seen, strip, -jnp.inf))
    s = jnp.concatenate(masked, axis=1)
    top = jnp.maximum(peak, s.max(axis=1))
    alpha = jnp.exp2(peak - top)
    p = jnp.exp2(s - lax.broadcast_in_dim(top, s.shape, [0]))
    total = total * lax.broadcast_in_dim(alpha, total.shape, [0]) + sum_strips(p)
    return p, top, total, alpha


def clean(v_smem, first, stop) -> None:
    """Zeros for values that nobody put there, or no longer has: 0 times NaN is NaN."""
    rows, width = v_smem.shape
    for column in range(0, width, COLUMNS):
        part = v_smem.at[:, pl.ds(column, COLUMNS)]
        v = plgpu.load(part, layout=tile_layout(), optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, (rows, COLUMNS), 0, layout=tile_layout())
        part[...] = jnp.where((row >= first) & (row < stop), v, 0.0)
    plgpu.commit_smem()
