"""A matmul whose operand and accumulator dtypes are part of the program, forward and backward."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfra.numerics.recipe import Recipe

# A preset pins the accumulator in the compiled program itself, where a plain bf16 dot leaves it to
# the backend. F32_F32_F32 also rules out TF32.
_ALGORITHMS = {
    ("float32", "float32"): lax.DotAlgorithmPreset.F32_F32_F32,
    ("bfloat16", "float32"): lax.DotAlgorithmPreset.BF16_BF16_F32,
    ("float16", "float32"): lax.DotAlgorithmPreset.F16_F16_F32,
}
# Presets that XLA's CUDA compiler (jaxlib 0.11.2) cannot hand to cuBLAS as they are: it copies both
# operands of every matmul first, 3% of a 1.2B step. Without one it computes the same: a product of
# two bf16 matrices is CUBLAS_COMPUTE_32F (test_einsum_gpu.py holds it to that).
_LEFT_OPEN_ON_CUDA = ("bfloat16",)


def multiply(
    spec: str,
    x: jax.Array,
    weight: jax.Array,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
) -> jax.Array:
    """``einsum(spec, x, weight)`` as the recipe says: what ``Execution.multiply`` is by default.

    Gradients: the cotangent and both operands in ``recipe.compute``, sums in ``recipe.accum``; dx
    is returned in x's dtype, dweight in the weight's (fp32 masters get fp32 gradients straight from
    the accumulator, unless ``recipe.gradient`` rounds them between the two).

    Args:
        spec: two operands, explicit output, every index of an operand present in the other operand
            or in the output.
        out: dtype of the result; ``recipe.compute`` by default.
    """
    compute, accum, gradient = recipe.compute, recipe.accum, recipe.gradient

    def dot(dot_spec: str, a: jax.Array, b: jax.Array, result: jnp.dtype) -> jax.Array:
        a, b = a.astype(compute), b.astype(compute)
        algorithm = _ALGORITHMS[jnp.dtype(compute).name, jnp.dtype(accum).name]
        product = functools.partial(jnp.einsum, dot_spec)
        if jnp.dtype(compute) == jnp.dtype(accum):
            return product(a, b, precision=algorithm, preferred_element_type=result)

        def native(a: jax.Array, b: jax.Array) -> jax.Array:
            return product(a, b, precision=algorithm, preferred_element_type=result)

        def for_cuda(a: jax.Array, b: jax.Array) -> jax.Array:
            precision = None if jnp.dtype(compute).name in _LEFT_OPEN_ON_CUDA else algorithm
            return product(a, b, precision=precision, preferred_element_type=result)

        # The CPU backend has no F16_F16_F32 and a very slow BF16_BF16_F32. Products of two 16-bit
        # floats are exact in fp32, so widening the operands gives the same sums.
        def widened(a: jax.Array, b: jax.Array) -> jax.Array:
            precision = lax.DotAlgorithmPreset.F32_F32_F32
            return product(a.astype(accum), b.astype(accum), precision=precision).astype(result)

        return lax.platform_dependent(a, b, cpu=widened, cuda=for_cuda, default=native)

    @jax.custom_vjp
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(spec, x, weight, out or compute)

    def forward(x: jax.Array, weight: jax.Array):
        return product(x, weight), (x, weight)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array):
        x, weight = residuals
        operands, out_dims = spec.split("->")
        x_dims, weight_dims = operands.split(",")
        dx = dot(f"{out_dims},{weight_dims}->{x_dims}", cotangent, weight, x.dtype)
        handed_on = weight.dtype if gradient is None else gradient
        dweight = dot(f"{x_dims},{out_dims}->{weight_dims}", x, cotangent, handed_on)
        return dx, dweight.astype(weight.dtype)

    product.defvjp(forward, backward)
    return product(x, weight)
