"""Paged attention on a Hopper GPU: checks, the plan and the two kernels of a call.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.hopper.machine import COPY_ALIGNMENT, SMEM_BYTES
from pallas_kernels.paged_attention.codes import rows_as_pages
from pallas_kernels.paged_attention.spec import PagedCall

from .attend import attend_pages
from .attend_codes import attend_codes
from .chunk import attend_chunk, is_chunk
from .config import (
    DTYPES,
    GROUP_ROWS,
    ROWS,
    SCALE_HEADS,
    WIDEST_VALUES,
    PagedConfig,
    QueryLayout,
    config_for,
)
from .merge import merge_pages
from .plan import PagePlan, plan_pages

SIZES = (16, 32, 64, 128, 256)
WIDTH_MULTIPLE = 64
CODE_WIDTHS = (64, 128)
MOST_CODE_TILES = 8  # query tiles of a row, each of which makes numbers of all its codes


def unsupported(call: PagedCall) -> str | None:
    """Returns why the Hopper kernels cannot compute this call; None if they can."""
    reason = device.why_not_one_hopper() or device.miscompiled(device.CAUSAL_ATTENTION)
    if reason is not None:
        return reason
    layout = QueryLayout.of(call)
    if call.code is not None:
        if reads_codes(call):
            reason = _unsupported_codes(call, layout)
            if reason is not None:
                return reason
        else:  # their rows become numbers first
            layout = dataclasses.replace(layout, tile=ROWS, bits=16)
    if call.q_BTNH.dtype.name not in DTYPES:
        return f"{call.q_BTNH.dtype} is neither bfloat16 nor float16"
    if layout.size not in SIZES:
        return f"pages of {layout.size} slots are none of {', '.join(map(str, SIZES))}"
    if layout.H % WIDTH_MULTIPLE or layout.V % WIDTH_MULTIPLE:
        return f"widths {layout.H}/{layout.V} are not multiples of {WIDTH_MULTIPLE}"
    if layout.V > WIDEST_VALUES:
        return f"values of {layout.V} columns are wider than {WIDEST_VALUES}"
    if layout.group > layout.tile and layout.group % GROUP_ROWS:
        most = layout.tile
        return f"{layout.group} query heads to a kv head are above {most} and no multiple of 8"
    used = config_for(layout).smem_bytes(layout)
    if used > SMEM_BYTES:
        return f"tiles take {used} bytes of shared memory, and a block has {SMEM_BYTES}"
    return None


def reads_codes(call: PagedCall) -> bool:
    """Tells whether the call takes the kernel for quantized pages, which is for few queries."""
    return call.code is not None and QueryLayout.of(call).num_q_tiles <= MOST_CODE_TILES


def numbers_first(call: PagedCall) -> str | None:
    """Returns why quantized pages must be dequantized in memory first; None if they need not be."""
    if call.code is None or reads_codes(call):
        return None
    tiles = QueryLayout.of(call).num_q_tiles
    return f"rows are dequantized first: {tiles} query tiles are above {MOST_CODE_TILES}"


def _unsupported_codes(call: PagedCall, layout: QueryLayout) -> str | None:
    if call.q_BTNH.dtype.name != "bfloat16":
        # A probability times a scale may be smaller than any number of float16.
        return f"queries of a quantized cache must be bfloat16, not {call.q_BTNH.dtype}"
    if layout.H not in CODE_WIDTHS or layout.V not in CODE_WIDTHS:
        widths = " or ".join(map(str, CODE_WIDTHS))
        return f"widths {layout.H}/{layout.V} of a quantized cache are not {widths}"
    if layout.K % SCALE_HEADS and SCALE_HEADS % layout.K:
        return (
            f"scales of {layout.K} kv heads: they are no multiple and no divisor of {SCALE_HEADS}"
        )
    if layout.size < config_for(layout).block_kv:  # a tile is of several pages
        page_bytes = layout.size * layout.scale_heads * call.q_BTNH.dtype.itemsize
        if page_bytes % COPY_ALIGNMENT:
            least = layout.size * COPY_ALIGNMENT // math.gcd(COPY_ALIGNMENT, page_bytes)
            return (
                f"scales of {layout.K} kv heads in pages of {layout.size} are copied {page_bytes} "
                f"bytes at a time, no multiple of {COPY_ALIGNMENT}: make pages of {least} slots"
            )
    return None


def paged_attention_hopper(
    call: PagedCall,
    *,
    plan: PagePlan | None = None,
    config: PagedConfig | None = None,
    interpretable: bool = False,
) -> jax.Array:
    """Computes paged attention by the kernels: [B, T, N, V] in the queries' dtype.

    Args:
        call: a call for which ``unsupported`` returns None.
        plan: result of ``plan_pages``; None computes it.
        config: tile sizes; None takes the default.
        interpretable: see ``attend_pages``.

    Raises:
        UnsupportedError: tiles that exceed shared memory.
    """
    num_heads = call.q_BTNH.shape[2]
    if call.code is not None and not reads_codes(call):
        call = rows_as_pages(call)
    if plan is None and config is None and is_chunk(call):
        return attend_chunk(call, interpretable=interpretable)
    layout = QueryLayout.of(call)
    config = config or config_for(layout)
    if config.smem_bytes(layout) > SMEM_BYTES:
        raise UnsupportedError(
            f"{config} takes {config.smem_bytes(layout)} bytes of shared memory, and a block has "
            f"{SMEM_BYTES}"
        )
    plan = plan or plan_pages(call, layout, config)
    # Copies begin at multiples of 8 heads, of which the last may be no heads at all.
    pad = -num_heads % GROUP_ROWS
    padded = call
    if pad:
        q_BTNH = jnp.pad(call.q_BTNH, ((0, 0), (0, 0), (0, pad), (0, 0)))
        padded = dataclasses.replace(call, q_BTNH=q_BTNH)
    if call.code is not None:
        partials = attend_codes(padded, plan, layout=layout, config=config)
    else:
        partials = attend_pages(
            padded, plan, layout=layout, config=config, interpretable=interpretable
        )
    return merge_pages(call, plan, partials, layout=layout, config=config)
