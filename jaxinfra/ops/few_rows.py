"""Products of a few rows with a weight, as a decode step has them: on a Hopper GPU by kernels.

Prompts, which have more rows, and other devices multiply as training does.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from jaxinfra.axes import Dims
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
    x: Float[Array, "..."] | Input,
    weight: Float[Array, "..."] | QuantizedWeight | GatheredWeight,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    record: jax.Array | None = None,
    dims: Dims | None = None,
) -> Float[Array, "..."]:
    """``ops.multiply.multiply``, without a gradient where the kernel computes it; on one device."""
    assert recipe.fp8 is None, "execution_on"
    del record, dims
    x = x.x if isinstance(x, Input) else x
    rank = contracted_dims(spec)
    if isinstance(weight, QuantizedWeight | GatheredWeight):
        return multiply(spec, x, weight, recipe=recipe, out=out)
    if rank is None or out not in (None, recipe.compute) or not _takes(x, rank, recipe):
        return multiply(spec, x, weight, recipe=recipe, out=out)
    product = pallas_kernels.few_rows_matmul(*_as_matrices(x, weight, rank, recipe))
    return product.reshape(*x.shape[:-rank], *weight.shape[rank:])


def fused_few_rows(
    spec: str,
    x: Float[Array, "..."] | Deferred,
    weight: Float[Array, "..."] | QuantizedWeight,
    *,
    recipe: Recipe,
    residual: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """``residual + einsum(spec, x, weight)`` in the compute dtype: of few rows in one kernel, where
    that was measured to be faster; without a gradient there.
    """
    rank = contracted_dims(spec)
    raw = x.x if isinstance(x, Deferred) else x
    if rank is not None and _takes(raw, rank, recipe) and raw.dtype == recipe.compute:
        product = _fused(x, weight, rank, recipe, residual=residual)
        outputs = weight.outputs if isinstance(weight, QuantizedWeight) else weight.shape[rank:]
        return product.reshape(*raw.shape[:-rank], *outputs)
    x = x.value() if isinstance(x, Deferred) else x
    product = multiply(spec, x, weight, recipe=recipe)
    return product if residual is None else residual + product


def swiglu_few_rows(
    x_BTD: Float[Array, "B T D"] | Deferred,
    weight_DF: Float[Array, "D F"] | QuantizedWeight,
    *,
    recipe: Recipe,
) -> Float[Array, "B T _"] | Deferred:
    """``silu(x gate) * (x up)`` in the compute dtype, by a weight of gates and then ups.

    Of a weight in few bits, whose gates and ups are far apart, what the next product makes of both.
    """
    raw = x_BTD.x if isinstance(x_BTD, Deferred) else x_BTD
    if isinstance(weight_DF, QuantizedWeight):
        return Deferred(x=fused_few_rows("BTD,DF->BTF", x_BTD, weight_DF, recipe=recipe))
    if _takes(raw, 1, recipe) and raw.dtype == recipe.compute:
        hidden = _fused(x_BTD, weight_DF, 1, recipe, swiglu=True)
        return hidden.reshape(*raw.shape[:-1], -1)
    x_BTD = x_BTD.value() if isinstance(x_BTD, Deferred) else x_BTD
    product_BTF = multiply("BTD,DF->BTF", x_BTD, weight_DF, recipe=recipe).astype(recipe.accum)
    gate, up = jnp.split(product_BTF, 2, axis=-1)
    return activated(MlpKind.SWIGLU, up, gate).astype(recipe.compute)


def _fused(
    x: jax.Array | Deferred,
    weight: jax.Array | QuantizedWeight,
    rank: int,
    recipe: Recipe,
    *,
    residual: jax.Array | None = None,
    swiglu: bool = False,
) -> jax.Array:
    """As a matrix."""
    norm = x.norm if isinstance(x, Deferred) else None
    is_hidden = isinstance(x, Deferred) and norm is None
    raw = x.x if isinstance(x, Deferred) else x
    if not isinstance(weight, QuantizedWeight):
        weight = weight.astype(recipe.compute).reshape(math.prod(weight.shape[:rank]), -1)
    return pallas_kernels.few_rows_matmul(
        raw.reshape(-1, math.prod(raw.shape[-rank:])),
        weight,
        norm=norm,
        swiglu_input=is_hidden,
        swiglu=swiglu,
        residual=None if residual is None else residual.reshape(-1, residual.shape[-1]),
    )


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
