"""Operands as the kernels want them: rows padded to whole copies, gathered, marked for a mesh.

Dims: M row, G group, K width in, N width out.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.common.varying import results_vary
from pallas_kernels.grouped_matmul.formulas import SwigluResults

from .config import BLOCK_ROWS, ROW_MULTIPLE, WIDTH_MULTIPLE, GroupedConfig
from .product_kernel import grouped_product
from .weight_gradient_kernel import grouped_weight_gradient

LEAST_WIDTH = BLOCK_ROWS
DEFAULT = GroupedConfig()


def unsupported(x: jax.Array, w_GKN: jax.Array) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"{facts.kind} is not a Hopper GPU (compute capability 9.0)"
    if x.dtype.name not in ("bfloat16", "float16"):
        return f"x is {x.dtype}; tensor cores multiply bfloat16 or float16 here"
    for name, width in zip(("K", "N"), w_GKN.shape[1:], strict=True):
        if width % WIDTH_MULTIPLE or width < LEAST_WIDTH:
            return (
                f"{name}={width} is not a multiple of {WIDTH_MULTIPLE} and at least {LEAST_WIDTH}"
            )
    return None


def product(
    x: jax.Array,
    w_GKN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None,
    *,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """As ``xla.product``."""

    def kernel(x_MK, w_GKN, group_sizes_G):
        return grouped_product(
            [(x_MK, [w_GKN])], group_sizes_G,
            transposed=False, out_dtype=out_dtype, config=DEFAULT,
        )[0]  # fmt: skip

    x_MK = _gathered(x, rows_M)
    return _call(kernel, _padded(x_MK), w_GKN, group_sizes_G)[: x_MK.shape[0]]


def swiglu(
    x: jax.Array,
    gate_GKN: jax.Array,
    up_GKN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None,
    *,
    keep: bool,
) -> SwigluResults:
    """As ``xla.swiglu``."""

    def kernel(x_MK, gate_GKN, up_GKN, group_sizes_G):
        return grouped_product(
            [(x_MK, [gate_GKN, up_GKN])], group_sizes_G, transposed=False,
            gated=True, keep=keep, out_dtype=x_MK.dtype, config=DEFAULT,
        )  # fmt: skip

    x_MK = _gathered(x, rows_M)
    results = _call(kernel, _padded(x_MK), gate_GKN, up_GKN, group_sizes_G)
    return SwigluResults(*(result[: x_MK.shape[0]] for result in results))


def input_gradient(
    pairs: tuple[tuple[jax.Array, jax.Array], ...], group_sizes_G: jax.Array
) -> jax.Array:
    """As ``xla.input_gradient``."""

    def kernel(group_sizes_G, *operands):
        d, w = operands[: len(pairs)], operands[len(pairs) :]
        return grouped_product(
            [(d_MN, [w_GKN]) for d_MN, w_GKN in zip(d, w, strict=True)], group_sizes_G,
            transposed=True, out_dtype=d[0].dtype, config=DEFAULT,
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
) -> jax.Array:
    """As ``xla.weight_gradient``; in bf16, fp16 or fp32, and rounded from fp32 to any other."""
    direct = out_dtype in (jnp.float32, x.dtype)
    kernel = functools.partial(
        grouped_weight_gradient,
        out_dtype=out_dtype if direct else jnp.float32,
        config=DEFAULT,
    )
    x_MK = _padded(_gathered(x, rows_M))
    return _call(kernel, x_MK, _padded(d_MN), group_sizes_G).astype(out_dtype)


def _call(kernel, *operands):
    # vmap over a kernel is a loop.
    return jax.custom_batching.sequential_vmap(results_vary(kernel))(*operands)


def _gathered(x: jax.Array, rows_M: jax.Array | None) -> jax.Array:
    return x if rows_M is None else x[rows_M]


def _padded(x_MK: jax.Array) -> jax.Array:
    """Rows in whole copies of 8, and at least a tile of them."""
    rows = max(x_MK.shape[0] + -x_MK.shape[0] % ROW_MULTIPLE, BLOCK_ROWS)
    return x_MK if rows == x_MK.shape[0] else jnp.pad(x_MK, ((0, rows - x_MK.shape[0]), (0, 0)))
