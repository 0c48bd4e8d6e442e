"""Matrix products whose accumulator is fp32 by request, not by the backend's default."""

import functools
import math
from collections.abc import Callable

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

ACCUMULATOR = jnp.dtype("float32")
"""Dtype that every product here is summed in."""


def pinned_einsum(spec: str, a: jax.Array, b: jax.Array, *, result: jnp.dtype) -> jax.Array:
    """Computes ``einsum(spec, a, b)`` of operands of one dtype, summed in float32, then rounded.

    The caller must define the gradient: JAX's own would multiply a cotangent of dtype ``result``
    with operands of another dtype.

    Args:
        spec: two operands and an explicit output.
        a: bfloat16, float16 or float32.
        b: the dtype of ``a``.
        result: dtype of the result.
    """
    assert a.dtype == b.dtype, f"{spec}: operands differ in dtype: {a.dtype} and {b.dtype}"
    product = functools.partial(jnp.einsum, spec, preferred_element_type=result)
    native = functools.partial(product, precision=_ALGORITHMS[a.dtype.name])
    if a.dtype == jnp.float32:
        return native(a, b)
    # A preset makes XLA's CUDA compiler (jaxlib 0.11.2) copy both bf16 operands before it calls
    # cuBLAS: 3% of a 1.2B step, and a second chunk of logits in memory. Without one it computes the
    # same: the product is CUBLAS_COMPUTE_32F (test_einsum_gpu.py holds it to that).
    cuda = functools.partial(_two_rows, spec, product if a.dtype == jnp.bfloat16 else native)

    # The CPU backend has no F16_F16_F32, and its BF16_BF16_F32 was seen to run ten times slower
    # than an fp32 product. Products of two 16-bit floats are exact in fp32: same result.
    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return _widened(spec, a, b).astype(result)

    return lax.platform_dependent(a, b, cpu=widened, cuda=cuda, default=native)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_f32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes ``einsum(spec, a, b)`` of two operands of one dtype, summed and returned in float32.

    Its gradient multiplies the fp32 cotangent with operands widened to fp32: exact, and slow on a
    GPU. Kernels write their own backward pass.

    Args:
        spec: two operands and an explicit output.
        a: bfloat16, float16 or float32.
        b: the dtype of ``a``.
    """
    return pinned_einsum(spec, a, b, result=ACCUMULATOR)


def _two_rows(spec: str, product: Callable[..., jax.Array], a: jax.Array, b: jax.Array):
    """The product, of one row as the first of two: where Triton multiplies nothing, XLA makes an
    fp32 copy of all of ``b`` for one.
    """
    (a_dims, b_dims), out_dims = spec.split("->")[0].split(","), spec.split("->")[1]
    rows = [size for dim, size in zip(a_dims, a.shape, strict=True) if dim not in b_dims]
    is_row = bool(rows) and math.prod(rows) == 1 and b.ndim > 1
    if not is_row or a_dims[0] in b_dims or a_dims[0] != out_dims[0]:
        return product(a, b)
    return product(jnp.concatenate([a, jnp.zeros_like(a)]), b)[:1]


def _widened(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(spec, a, b, precision=_ALGORITHMS["float32"])


def _forward(spec: str, a: jax.Array, b: jax.Array):
    return einsum_f32(spec, a, b), (a, b)


def _backward(spec: str, operands: tuple[jax.Array, jax.Array], d_out: jax.Array):
    _, pull = jax.vjp(functools.partial(_widened, spec), *operands)
    return pull(d_out)


einsum_f32.defvjp(_forward, _backward)
