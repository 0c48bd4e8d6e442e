"""Products of a few rows with a weight, as a decode step has them: on a Hopper GPU by kernels.

Prompts, which have more rows, and other devices multiply as training does.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from jaxinfra.config.kinds import MlpKind
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.activation import activated
from jaxinfra.ops.deferred import Deferred
from jaxinfra.ops.fp8_operands import Input
from jaxinfra.ops.gathered import GatheredWeight
from jaxinfra.ops.multiply import multiply
from jaxinfra.ops.quantized import QuantizedWeight, contracted_dims
from pallas_kernels.common import device

MOST_ROWS = 256


def multiply_few_rows(
    spec: str,
    x: Float[Array, "..."] | Input | Deferred,
    weight: Float[Array, "..."] | QuantizedWeight | GatheredWeight,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    residual: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Computes ``residual + einsum(spec, x, weight)`` on one device.

    A few rows are multiplied by kernels, in one with what is before and after the product where
    that was measured to be faster; there without a gradient.
    """
    assert recipe.fp8 is None, "execution_on"
    x = x.x if isinstance(x, Input) else x
    raw, rank = x.x if isinstance(x, Deferred) else x, contracted_dims(spec)
    if isinstance(x, Deferred) or residual is not None:
        fits = raw.dtype == recipe.compute
    else:
        fits = isinstance(weight, jax.Array) and out in (None, recipe.compute)
    if rank is None or not fits or not _takes(raw, rank, recipe):
        x = x.value() if isinstance(x, Deferred) else x
        product = multiply(spec, x, weight, recipe=recipe, out=out)
        return product if residual is None else residual + product
    assert not isinstance(weight, GatheredWeight), "products"
    product = _product(x, weight, rank, recipe, residual=residual)
    outputs = weight.outputs if isinstance(weight, QuantizedWeight) else weight.shape[rank:]
    return product.reshape(*raw.shape[:-rank], *outputs)


def swiglu_few_rows(
    x_BTD: Float[Array, "B T D"] | Deferred,
    weight_DF: Float[Array, "D F"] | QuantizedWeight,
    *,
    recipe: Recipe,
) -> Float[Array, "B T _"] | Deferred:
    """Computes ``silu(x gate) * (x up)`` in the compute dtype, by a weight of gates and then ups.

    Gates and ups of a quantized weight are far apart: the next product makes hidden values of both.
    """
    raw = x_BTD.x if isinstance(x_BTD, Deferred) else x_BTD
    if isinstance(weight_DF, QuantizedWeight):
        return Deferred(x=multiply_few_rows("BTD,DF->BTF", x_BTD, weight_DF, recipe=recipe))
    if _takes(raw, 1, recipe) and raw.dtype == recipe.compute:
        hidden = _product(x_BTD, weight_DF, 1, recipe, swiglu=True)
        return hidden.reshape(*raw.shape[:-1], -1)
    x_BTD = x_BTD.value() if isinstance(x_BTD, Deferred) else x_BTD
    product_BTF = multiply("BTD,DF->BTF", x_BTD, weight_DF, recipe=recipe).astype(recipe.accum)
    gate, up = jnp.split(product_BTF, 2, axis=-1)
    return activated(MlpKind.SWIGLU, up, gate).astype(recipe.compute)


def _product(
    x: jax.Array | Deferred,
    weight: jax.Array | QuantizedWeight,
    rank: int,
    recipe: Recipe,
    *,
    residual: jax.Array | None = None,
    swiglu: bool = False,
) -> jax.Array:
    """Returns the product as a matrix, computed by the kernels' op."""
    raw, norm = (x.x, x.norm) if isinstance(x, Deferred) else (x, None)
    if not isinstance(weight, QuantizedWeight):
        weight = weight.astype(recipe.compute).reshape(math.prod(weight.shape[:rank]), -1)
    return pallas_kernels.few_rows_matmul(
        raw.astype(recipe.compute).reshape(-1, math.prod(raw.shape[-rank:])),
        weight,
        norm=norm,
        swiglu_input=isinstance(x, Deferred) and norm is None,
        swiglu=swiglu,
        residual=None if residual is None else residual.reshape(-1, residual.shape[-1]),
    )


def _takes(x: jax.Array, rank: int, recipe: Recipe) -> bool:
    is_few = math.prod(x.shape[:-rank]) <= MOST_ROWS
    return is_few and recipe.compute.itemsize == 2 and device.target().capability == (9, 0)
