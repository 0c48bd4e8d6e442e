"""Products of a few rows with a weight, as a decode step has them: on a Hopper GPU by kernels.

Prompts, which have more rows, and other devices multiply as training does.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from jaxinfra.config.kinds import MlpKind
from jaxinfra.core.axes import Dims
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.activation import activated
from jaxinfra.ops.fp8_operands import Input
from jaxinfra.ops.gathered import GatheredWeight
from jaxinfra.ops.multiply import multiply
from jaxinfra.ops.quantized import QuantizedWeight, contracted_dims
from pallas_kernels.common import device

MOST_ROWS = 256


def multiply_few_rows(
    spec: str,
    x: Float[Array, "..."] | Input,
    weight: Float[Array, "..."] | QuantizedWeight | GatheredWeight,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    history: jax.Array | None = None,
    dims: Dims | None = None,
) -> Float[Array, "..."]:
    """``ops.multiply.multiply``, without a gradient where the kernel computes it; on one device."""
    assert recipe.fp8 is None, "execution_on"
    del history, dims
    x = x.x if isinstance(x, Input) else x
    rank = contracted_dims(spec)
    if isinstance(weight, QuantizedWeight | GatheredWeight):
        return multiply(spec, x, weight, recipe=recipe, out=out)
    if rank is None or out not in (None, recipe.compute) or not _takes(x, rank, recipe):
        return multiply(spec, x, weight, recipe=recipe, out=out)
    product = pallas_kernels.skinny_matmul(*_as_matrices(x, weight, rank, recipe))
    return product.reshape(*x.shape[:-rank], *weight.shape[rank:])


def swiglu_few_rows(
    x_BTD: Float[Array, "B T D"],
    weight_DF: Float[Array, "D F"] | QuantizedWeight,
    *,
    recipe: Recipe,
) -> Float[Array, "B T _"]:
    """``silu(x gate) * (x up)`` in the compute dtype, by a weight of gates and then ups."""
    if not isinstance(weight_DF, QuantizedWeight) and _takes(x_BTD, 1, recipe):
        operands = _as_matrices(x_BTD, weight_DF, 1, recipe)
        hidden = pallas_kernels.skinny_matmul(*operands, swiglu=True)
        return hidden.reshape(*x_BTD.shape[:-1], -1)
    product_BTF = multiply("BTD,DF->BTF", x_BTD, weight_DF, recipe=recipe).astype(recipe.accum)
    gate, up = jnp.split(product_BTF, 2, axis=-1)
    return activated(MlpKind.SWIGLU, up, gate).astype(recipe.compute)


def _takes(x: jax.Array, rank: int, recipe: Recipe) -> bool:
    is_few = math.prod(x.shape[:-rank]) <= MOST_ROWS
    return is_few and recipe.compute.itemsize == 2 and device.target().capability == (9, 0)


def _as_matrices(
    x: jax.Array, weight: jax.Array, rank: int, recipe: Recipe
) -> tuple[jax.Array, jax.Array]:
    depth = math.prod(weight.shape[:rank])
    return (
        x.astype(recipe.compute).reshape(-1, depth),
        weight.astype(recipe.compute).reshape(depth, -1),
    )
