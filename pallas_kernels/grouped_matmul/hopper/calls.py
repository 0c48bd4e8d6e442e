"""Calls of the Hopper kernels, which first pad operands, gather rows, or mark mesh axes.

Dims: M row, G group, K width in, N width out.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.common.varying import results_vary
from pallas_kernels.grouped_matmul.formulas import SwigluResults

from .config import (
    BLOCK_ROWS,
    FP8_DEPTH,
    ROW_MULTIPLE,
    WIDTH_MULTIPLE,
    GroupedConfig,
    ScaledGroupedConfig,
)
from .fp8_kernel import scaled_grouped_product
from .product_kernel import grouped_product
from .weight_gradient_kernel import grouped_weight_gradient

LEAST_WIDTH = BLOCK_ROWS
DEFAULT = GroupedConfig()
LEAST_FREE_ROWS = 1024
"""Mean rows per group from which warpgroups issue 8-bit products without alternating. This is 5 and
8% faster with 1,024 rows (an H200, an H100), 1% with 4,096, and 1 and 5% slower with 512."""


def unsupported(x: jax.Array, w_GKN: jax.Array) -> str | None:
    """Returns why the 16-bit kernels cannot compute this call; None if they can."""
    if reason := device.why_not_one_hopper():
        return reason
    if x.dtype.name not in ("bfloat16", "float16"):
        return f"x is {x.dtype}; tensor cores multiply bfloat16 or float16 here"
    for name, width in zip(("K", "N"), w_GKN.shape[1:], strict=True):
        if width % WIDTH_MULTIPLE or width < LEAST_WIDTH:
            return (
                f"{name}={width} is not a multiple of {WIDTH_MULTIPLE} and at least {LEAST_WIDTH}"
            )
    return None


def scaled_unsupported(b_GNK: jax.Array) -> str | None:
    """Returns why the kernel of 8-bit operands cannot compute this call; None if it can."""
    if reason := device.why_not_one_hopper():
        return reason
    multiples = ("N", WIDTH_MULTIPLE), ("K", FP8_DEPTH)
    for (name, multiple), width in zip(multiples, b_GNK.shape[1:], strict=True):
        if width % multiple or width < LEAST_WIDTH:
            return f"{name}={width} is not a multiple of {multiple} and at least {LEAST_WIDTH}"
    return None


def scaled_config(num_rows: int, num_groups: int) -> ScaledGroupedConfig:
    """Returns the tile sizes of an 8-bit product; results do not depend on them."""
    return ScaledGroupedConfig(in_turns=num_rows < LEAST_FREE_ROWS * num_groups)


def product(
    x: jax.Array,
    w_GKN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None,
    *,
    out_dtype: jnp.dtype,
    config: GroupedConfig | None = None,
) -> jax.Array:
    """Multiplies each row by its group's weight, as ``xla.product``, by a Hopper kernel."""
    config = config or DEFAULT

    def kernel(x, w_GKN, group_sizes_G, rows_M):
        return grouped_product(
            [(x, [w_GKN])], group_sizes_G, rows_M=rows_M,
            transposed=False, out_dtype=out_dtype, config=config,
        )[0]  # fmt: skip

    num_rows = x.shape[0] if rows_M is None else rows_M.shape[0]
    x, rows_M = _rows(x, rows_M, gather=config.gather)
    return _call(kernel, x, w_GKN, group_sizes_G, rows_M)[:num_rows]


def ordered_product(
    x: jax.Array, weight: jax.Array, *, transposed: bool, out_dtype: jnp.dtype
) -> jax.Array:
    """Multiplies all rows by one weight, [K, N] or, if ``transposed``, [N, K]."""

    def kernel(x, weight):
        sizes_G = jnp.full(1, x.shape[0], jnp.int32)
        return grouped_product(
            [(x, [weight[None]])], sizes_G, transposed=transposed, out_dtype=out_dtype,
            config=DEFAULT,
        )[0]  # fmt: skip

    return _call(kernel, _padded(x), weight)[: x.shape[0]]


def swiglu(
    x: jax.Array,
    gate_GKN: jax.Array,
    up_GKN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None,
    *,
    keep: bool,
) -> SwigluResults:
    """Computes silu(x gate) * (x up) by groups, as ``xla.swiglu``, by a Hopper kernel."""
    config = DEFAULT

    def kernel(x, gate_GKN, up_GKN, group_sizes_G, rows_M):
        return grouped_product(
            [(x, [gate_GKN, up_GKN])], group_sizes_G, rows_M=rows_M, transposed=False,
            gated=True, keep=keep, out_dtype=x.dtype, config=config,
        )  # fmt: skip

    num_rows = x.shape[0] if rows_M is None else rows_M.shape[0]
    x, rows_M = _rows(x, rows_M, gather=config.gather)
    results = _call(kernel, x, gate_GKN, up_GKN, group_sizes_G, rows_M)
    return SwigluResults(*(result[:num_rows] for result in results))


def input_gradient(
    pairs: tuple[tuple[jax.Array, jax.Array], ...],
    group_sizes_G: jax.Array,
    config: GroupedConfig | None = None,
) -> jax.Array:
    """Computes the gradient of the rows x, as ``xla.input_gradient``, by a Hopper kernel."""
    config = config or DEFAULT

    def kernel(group_sizes_G, *operands):
        d, w = operands[: len(pairs)], operands[len(pairs) :]
        return grouped_product(
            [(d_MN, [w_GKN]) for d_MN, w_GKN in zip(d, w, strict=True)], group_sizes_G,
            transposed=True, out_dtype=d[0].dtype, config=config,
        )[0]  # fmt: skip

    d, w = zip(*pairs, strict=True)
    return _call(kernel, group_sizes_G, *map(_padded, d), *w)[: d[0].shape[0]]


def weight_gradient(
    x: jax.Array,
    d_MN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None,
    *,
    out_dtype: jnp.dtype,
    config: GroupedConfig | None = None,
) -> jax.Array:
    """Computes x^T d of each group, as ``xla.weight_gradient``, by a Hopper kernel.

    The kernel writes 16 bits or fp32; for another ``out_dtype``, fp32 results are rounded.
    """
    config = config or DEFAULT
    is_direct = out_dtype in (jnp.float32, x.dtype)

    def kernel(x, d_MN, group_sizes_G, rows_M):
        return grouped_weight_gradient(
            x, d_MN, group_sizes_G, rows_M=rows_M,
            out_dtype=out_dtype if is_direct else jnp.float32, config=config,
        )  # fmt: skip

    x, rows_M = _rows(x, rows_M, gather=config.gather and x.shape[1] % BLOCK_ROWS == 0)
    return _call(kernel, x, _padded(d_MN), group_sizes_G, rows_M).astype(out_dtype)


def scaled_product(
    a_MK: jax.Array,
    b_GNK: jax.Array,
    a_scale_JM: jax.Array,
    b_scale_GJI: jax.Array,
    group_sizes_G: jax.Array,
    *,
    out_dtype: jnp.dtype,
    config: ScaledGroupedConfig | None = None,
    interpretable: bool = False,
) -> jax.Array:
    """Multiplies 8-bit rows by their group's weight, with block scales, by a Hopper kernel."""
    kernel = functools.partial(
        scaled_grouped_product,
        out_dtype=out_dtype,
        config=config or scaled_config(a_MK.shape[0], b_GNK.shape[0]),
        interpretable=interpretable,
    )
    operands = _padded(a_MK), b_GNK, _padded(a_scale_JM.T).T, b_scale_GJI, group_sizes_G
    return _call(kernel, *operands)[: a_MK.shape[0]]


def _call(kernel, *operands):
    # vmap over a kernel is a loop.
    return jax.custom_batching.sequential_vmap(results_vary(kernel))(*operands)


def _rows(
    x: jax.Array, rows_M: jax.Array | None, *, gather: bool
) -> tuple[jax.Array, jax.Array | None]:
    """x and the rows of it that a kernel is to gather, of a number that it can take."""
    if rows_M is None:
        return _padded(x), None
    if not gather:
        return _padded(x[rows_M]), None
    return x, _padded(rows_M[:, None])[:, 0]


def _padded(x_MK: jax.Array) -> jax.Array:
    """Rows in whole copies of 8, and at least a tile of them."""
    rows = max(x_MK.shape[0] + -x_MK.shape[0] % ROW_MULTIPLE, BLOCK_ROWS)
    return x_MK if rows == x_MK.shape[0] else jnp.pad(x_MK, ((0, rows - x_MK.shape[0]), (0, 0)))
