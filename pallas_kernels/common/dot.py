"""Matrix products whose accumulator is fp32 by construction, not by the backend's habit."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

# A preset pins operand and accumulator formats in the program itself; F32_F32_F32 also rules out
# TF32.
_ALGORITHMS = {
    "bfloat16": lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": lax.DotAlgorithmPreset.F16_F16_F32,
    "float32": lax.DotAlgorithmPreset.F32_F32_F32,
}


def einsum_f32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """``einsum(spec, a, b)`` of two operands of one dtype, summed and returned in float32.

    Args:
        spec: two operands and an explicit output.
        a: bfloat16, float16 or float32.
        b: the dtype of ``a``.
    """
    assert a.dtype == b.dtype, f"einsum_f32 operands differ in dtype: {a.dtype} and {b.dtype}"
    product = functools.partial(jnp.einsum, spec, preferred_element_type=jnp.float32)
    native = functools.partial(product, precision=_ALGORITHMS[a.dtype.name])
    if a.dtype == jnp.float32:
        return native(a, b)

    # The CPU backend has no F16_F16_F32, and its BF16_BF16_F32 was seen to run ten times slower
    # than an fp32 product. Products of two 16-bit floats are exact in fp32: same result.
    def widened(a, b):
        return product(
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            precision=lax.DotAlgorithmPreset.F32_F32_F32,
        )

    return lax.platform_dependent(a, b, cpu=widened, default=native)
