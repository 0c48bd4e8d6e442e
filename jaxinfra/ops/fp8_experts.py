"""Products of tokens with their experts' weights, of operands in 8 bits, forward and backward.

With x [N, D], rows of it for each expert, weights w [E, D, F] and cotangents g [M, F]:

    y = x w        x by 1x128 along D, w by 128x128
    dx = g w^T     g by 1x128 along F, the same w
    dw = x^T g     in the compute dtype: both would be quantized along tokens, whose groups begin
                   anywhere

Tokens are quantized before they are copied for their experts, weights once for both directions.

Dims: N token, K choice of a token, M copy of a token, E expert, D width in, F width out, J blocks
of 128 columns, I blocks of 128 rows.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from jaxinfra.numerics.recipe import Fp8Recipe, Recipe
from jaxinfra.ops.fp8 import named
from pallas_kernels import (
    combine,
    grouped_weight_gradient,
    quantize,
    scaled_grouped_matmul,
)
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.scales import BLOCK, Quantized, Scaling
from pallas_kernels.common.varying import vary_alike
from pallas_kernels.fp8.xla import quantize_xla


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Which token each row is a copy of."""

    rows_M: jax.Array  # int32: the token
    choice_M: jax.Array  # int32: which choice, n K + k; N K for none
    place_NK: jax.Array  # int32, the inverse; beyond the last row for a choice without one


def multiply_groups_fp8(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    sizes_E: jax.Array,
    *,
    recipe: Recipe,
    gathered: Gathered | None = None,
) -> jax.Array:
    """Rows of x, or copies of them, times their expert's weights: [M, F of all weights] in the
    compute dtype.

    Args:
        x: [M, D], or [N, D] where rows are gathered.
        weights: [E, D, F] each, multiplied as one; their gradients are in their dtypes.
        sizes_E: int32, rows of each expert.
    """
    fp8 = recipe.fp8
    assert fp8 is not None
    ends = list(itertools.accumulate(w.shape[-1] for w in weights))
    dtypes = x.dtype, [w.dtype for w in weights]

    @jax.custom_vjp
    def product(x, weights, sizes_E, gathered):
        return forward(x, weights, sizes_E, gathered)[0]

    def forward(x, weights, sizes_E, gathered):
        x = x.astype(recipe.compute)
        rows = _quantized_rows(x, fp8, fp8.forward)
        if gathered is not None:
            rows = Quantized(rows.values[gathered.rows_M], rows.scale[:, gathered.rows_M])
        w = named(quantized_weights(weights, recipe))
        across = Quantized(*(jnp.swapaxes(each, 1, 2) for each in w))
        return _multiply(rows, across, sizes_E, recipe), (x, w, sizes_E, gathered)

    def backward(kept, g_MF):
        x, w, sizes_E, gathered = kept
        g_MF = g_MF.astype(recipe.compute)
        g = _quantized_rows(g_MF, fp8, fp8.gradient)
        dx = _multiply(g, w, sizes_E, recipe)
        rows_M = None
        if gathered is not None:
            rows_M, ones = gathered.rows_M, jnp.ones(gathered.place_NK.shape, ACCUMULATOR)
            dx = combine(dx, gathered.place_NK, ones, inverse=gathered.choice_M)
        dws = tuple(
            grouped_weight_gradient(x, part_MF, sizes_E, rows=rows_M, out_dtype=dtype)
            for part_MF, dtype in zip(jnp.split(g_MF, ends[:-1], axis=1), dtypes[1], strict=True)
        )
        return dx.astype(dtypes[0]), dws, None, None

    product.defvjp(forward, backward)
    return product(*vary_alike((x, weights, sizes_E, gathered)))


def _quantized_rows(x_MK: jax.Array, fp8: Fp8Recipe, dtype: jnp.dtype) -> Quantized:
    return quantize(x_MK, Scaling.BLOCK_OF_ROW, dtype=dtype, power_of_two=fp8.power_of_two)


def quantized_weights(weights: tuple[jax.Array, ...], recipe: Recipe) -> Quantized:
    """Weights side by side by 128x128: values [E, D, F of all], scales [E, J, I]."""
    fp8 = recipe.fp8
    assert fp8 is not None
    w_EDF = jnp.concatenate([w.astype(recipe.compute) for w in weights], axis=-1)
    num_experts, depth, width = w_EDF.shape
    options = {"dtype": fp8.forward, "power_of_two": fp8.power_of_two}
    if depth % BLOCK:
        return quantize_xla(w_EDF, Scaling.BLOCK, **options)
    # No block has rows of two experts.
    flat = quantize(w_EDF.reshape(-1, width), Scaling.BLOCK, **options)
    scale = flat.scale.reshape(-1, num_experts, depth // BLOCK)
    return Quantized(flat.values.reshape(w_EDF.shape), jnp.moveaxis(scale, 1, 0))


def _multiply(a: Quantized, b: Quantized, sizes_E: jax.Array, recipe: Recipe) -> jax.Array:
    return scaled_grouped_matmul(
        a.values, b.values, a.scale, b.scale, sizes_E, out_dtype=recipe.compute
    )
