"""A matmul whose operand and accumulator dtypes are part of the program, forward and backward."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfra.axes import Dims
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.fp8 import multiply_fp8, quantized_input
from jaxinfra.ops.fp8_devices import STREAM_TOKENS, FindDevices, one_device
from jaxinfra.ops.fp8_operands import Input
from jaxinfra.ops.gathered import GatheredWeight
from jaxinfra.ops.quantized import QuantizedWeight, multiply_quantized
from pallas_kernels.common.dot import ACCUMULATOR, pinned_einsum


def multiply(
    spec: str,
    x: Float[Array, "..."] | Input,
    weight: Float[Array, "..."] | QuantizedWeight | GatheredWeight,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    record: jax.Array | None = None,
    dims: Dims | None = None,
    devices: FindDevices = one_device,
) -> Float[Array, "..."]:
    """``einsum(spec, x, weight)`` as the recipe says: what ``Execution.multiply`` is by default.

    Gradients: the cotangent and both operands in ``recipe.compute``, sums in ``recipe.accum``; dx
    is returned in x's dtype, dweight in the weight's (fp32 masters get fp32 gradients straight from
    the accumulator, unless ``recipe.gradient`` rounds them between the two).

    Args:
        spec: two operands, explicit output, every index of an operand present in the other operand
            or in the output. In 8 bits a matmul.
        out: dtype of the result; ``recipe.compute`` by default.
        weight: one in few bits is a constant, multiplied as ``multiply_quantized`` says; of one
            that was gathered the share has the gradient.
        record, dims, devices: as in ``multiply_fp8``, where the recipe has fp8.
    """
    if isinstance(weight, QuantizedWeight):
        x = x.x if isinstance(x, Input) else x
        return multiply_quantized(
            spec, x, weight, recipe=recipe, out=out, is_whole=devices().num == 1
        )
    if recipe.fp8 is not None:
        assert not isinstance(weight, GatheredWeight), "validate"
        return multiply_fp8(
            spec, x, weight, recipe=recipe, out=out, record=record, dims=dims, devices=devices
        )
    if isinstance(x, Input):
        x = x.x
    compute, gradient = recipe.compute, recipe.gradient
    assert recipe.accum == ACCUMULATOR, f"sums in {recipe.accum}; products are in {ACCUMULATOR}"

    def dot(dot_spec: str, a: jax.Array, b: jax.Array, result: jnp.dtype) -> jax.Array:
        return pinned_einsum(dot_spec, a.astype(compute), b.astype(compute), result=result)

    @jax.custom_vjp
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(spec, x, weight, out or compute)

    def forward(x: jax.Array, weight: jax.Array):
        return product(x, weight), (x, weight)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array):
        return gradients(*residuals, cotangent, residuals[1].dtype)

    def gradients(x: jax.Array, weight: jax.Array, cotangent: jax.Array, dtype: jnp.dtype):
        operands, out_dims = spec.split("->")
        x_dims, weight_dims = operands.split(",")
        dx = dot(f"{out_dims},{weight_dims}->{x_dims}", cotangent, weight, x.dtype)
        handed_on = dtype if gradient is None else gradient
        dweight = dot(f"{x_dims},{out_dims}->{weight_dims}", x, cotangent, handed_on)
        return dx, dweight.astype(dtype)

    product.defvjp(forward, backward)
    if not isinstance(weight, GatheredWeight):
        return product(x, weight)

    @jax.custom_vjp
    def product_with(x: jax.Array, share: jax.Array, value: jax.Array) -> jax.Array:
        return dot(spec, x, value, out or compute)

    def forward_with(x: jax.Array, share: jax.Array, value: jax.Array):
        return product_with(x, share, value), (x, value)

    dtype = weight.share.dtype

    def backward_with(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array):
        return (*gradients(*residuals, cotangent, dtype), jnp.zeros_like(residuals[1]))

    product_with.defvjp(forward_with, backward_with)
    return product_with(x, weight.share, weight.value)


def prepared(
    x: Float[Array, "..."],
    *,
    recipe: Recipe,
    dims: Dims = (None,),
    devices: FindDevices = one_device,
) -> Float[Array, "..."] | Input:
    """x for several matmuls of one recipe: quantized once, or as it is.

    Args:
        x: of the residual stream.
        dims: logical dims of their weights that they contract, x's last ones.
    """
    if recipe.fp8 is None:
        return x
    return quantized_input(x, recipe=recipe, dims=dims, tokens=STREAM_TOKENS, devices=devices)
