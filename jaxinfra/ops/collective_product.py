"""Products, on each device, of a stream whose positions the devices of an axis share.

Dims: B batch, T position, D model width; other letters as a product's spec names them.
"""

import math

import jax

import pallas_kernels
from jaxinfra.ops.quantized import contracted_dims
from pallas_kernels.collective_matmul import (
    CollectiveImplementation,
    gathered_product,
    is_measured,
)

__all__ = ["CollectiveImplementation", "gathered_products", "is_measured", "scattered_product"]


def gathered_products(
    specs: tuple[str, ...],
    x_BTD: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    axis: str,
    implementation: CollectiveImplementation,
    backward: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Computes ``einsum(spec, all_gather(x), weight)`` for each weight; also returns the rows.

    Args:
        specs: as "BTD,DF->BTF".
        x_BTD: this device's positions.
        backward: multiplies by the transposed weights of ``scattered_product``'s specs.
    """
    matrices = tuple(map(_matrix, specs, weights))
    products, rows = gathered_product(
        x_BTD, matrices, axis=axis, transposed=backward, implementation=implementation
    )
    ranks = (contracted_dims(spec) or 0 for spec in specs)
    shapes = (
        w.shape[:rank] if backward else w.shape[rank:]
        for w, rank in zip(weights, ranks, strict=True)
    )
    shaped = (y.reshape(*y.shape[:2], *shape) for y, shape in zip(products, shapes, strict=True))
    return tuple(shaped), rows


def scattered_product(
    specs: tuple[str, ...],
    xs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    *,
    axis: str,
    implementation: CollectiveImplementation,
    backward: bool = False,
) -> jax.Array:
    """Computes this device's positions of ``sum(einsum(spec, x, weight))``, [B, T, D].

    Args:
        specs: as "BTF,FD->BTD".
        xs: [B, T, ...] with this device's part of the contracted dims.
        backward: multiplies by the transposed weights of ``gathered_products``'s specs.
    """
    rows = (x.reshape(*x.shape[:2], -1) for x in xs)
    factors = tuple(zip(rows, map(_matrix, specs, weights), strict=True))
    return pallas_kernels.matmul_reduce_scatter(
        factors, axis=axis, transposed=backward, implementation=implementation
    )


def _matrix(spec: str, weight: jax.Array) -> jax.Array:
    """A weight as [contracted, result]."""
    return weight.reshape(math.prod(weight.shape[: contracted_dims(spec) or 0]), -1)
