"""The formulas in plain JAX: a collective, then a product, or a product, then a collective.

Dims: B row of the batch, M position on a device, K contraction, N column, D devices of the axis.
"""

import functools
import operator

import jax
from jax import lax

from pallas_kernels.common.dot import pinned_einsum


def einsum_spec(transposed: bool) -> str:
    """Returns the product of x and a weight, which is stored [N, K] if ``transposed``."""
    return "BMK,NK->BMN" if transposed else "BMK,KN->BMN"


def all_gather_product(
    x: jax.Array, weights: tuple[jax.Array, ...], *, axis: str, transposed: bool
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Computes ``all_gather(x) @ weight`` of each weight, [B, D M, N]; also returns the rows."""
    rows = lax.all_gather(x, axis, axis=1, tiled=True)
    spec = einsum_spec(transposed)
    return tuple(pinned_einsum(spec, rows, w, result=x.dtype) for w in weights), rows


def product_reduce_scatter(
    factors: tuple[tuple[jax.Array, jax.Array], ...], *, axis: str, transposed: bool
) -> jax.Array:
    """Computes ``reduce_scatter(sum(x @ weight))`` over the factors, [B, M, N]."""
    spec, dtype = einsum_spec(transposed), factors[0][0].dtype
    products = [pinned_einsum(spec, x, w, result=dtype) for x, w in factors]
    whole = functools.reduce(operator.add, products)
    return lax.psum_scatter(whole, axis, scatter_dimension=1, tiled=True)
