"""Calls of the kernels on one device's arrays.

Dims: B row of the batch, M position on a device, K contraction, N column, D devices of the axis.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul.reference import einsum_spec
from pallas_kernels.common.dot import pinned_einsum
from pallas_kernels.common.varying import vary_alike
from pallas_kernels.grouped_matmul.hopper.config import GroupedConfig

from .all_gather_kernel import AllGatherKernel
from .config import COLUMNS, CollectiveConfig
from .reduce_scatter_kernel import ReduceScatterKernel

_DEFAULT = CollectiveConfig()


def all_gather_product(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    axis: str,
    transposed: bool,
    config: CollectiveConfig = _DEFAULT,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Computes ``all_gather(x) @ weight`` of each weight, and returns the gathered rows.

    The kernel multiplies by the widest weight; then a library multiplies the rows by the others.

    Args:
        x: [B, M, K]; devices' rows follow one another in the second dim of results.
        weights: [K, N], or [N, K] if ``transposed``.
    """
    B, M, K = x.shape
    widths = [w.shape[0 if transposed else 1] for w in weights]
    widest = widths.index(max(widths))
    D, N = lax.axis_size(axis), widths[widest]
    kernel = AllGatherKernel(
        **_shared(x.dtype, B, M, axis, config), depths=(K,), num_columns=N, transposed=transposed
    )
    results = {
        "out": jax.ShapeDtypeStruct((B * D * M, N), x.dtype),
        "gathered": jax.ShapeDtypeStruct((B * D * M, K), x.dtype),
    }
    found = kernel.launch({"a": [x.reshape(B * M, K)], "b": [weights[widest]]}, results)
    found, _ = vary_alike((found, (x, weights)))
    rows, spec = found["gathered"].reshape(B, D * M, K), einsum_spec(transposed)
    products = [
        found["out"].reshape(B, D * M, N)
        if i == widest
        else pinned_einsum(spec, rows, w, result=x.dtype)
        for i, w in enumerate(weights)
    ]
    return tuple(products), rows


def product_reduce_scatter(
    factors: tuple[tuple[jax.Array, jax.Array], ...],
    *,
    axis: str,
    transposed: bool,
    config: CollectiveConfig = _DEFAULT,
) -> jax.Array:
    """Computes ``sum(x @ weight)`` over factors and devices, of which each keeps its rows.

    Args:
        factors: (x [B, D M, K], weight [K, N], or [N, K] if ``transposed``).
    """
    x, weight = factors[0]
    D, N = lax.axis_size(axis), weight.shape[0 if transposed else 1]
    B, M = x.shape[0], x.shape[1] // D
    kernel = ReduceScatterKernel(
        **_shared(x.dtype, B, M, axis, config),
        depths=tuple(x.shape[-1] for x, _ in factors), num_columns=N, transposed=transposed,
    )  # fmt: skip
    results = {
        "out": jax.ShapeDtypeStruct((B * M, N), x.dtype),
        "inbox": jax.ShapeDtypeStruct(kernel.inbox, x.dtype),
    }
    rows = [x.reshape(B * D * M, -1) for x, _ in factors]
    found = kernel.launch({"a": rows, "b": [w for _, w in factors]}, results)
    found, _ = vary_alike((found, factors))
    return found["out"].reshape(B, M, N)


def _shared(dtype: jnp.dtype, B: int, M: int, axis: str, config: CollectiveConfig) -> Any:
    return dict(
        c=GroupedConfig(columns=COLUMNS), options=config, dtype=dtype, out_dtype=dtype,
        num_rows=B * M, num_groups=0, axis=axis, num_devices=lax.axis_size(axis), length=M,
    )  # fmt: skip
