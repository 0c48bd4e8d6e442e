"""A matmul whose operand and accumulator dtypes are part of the program, forward and backward."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

# A preset pins the accumulator in the compiled program itself, where a plain bf16 dot leaves it to
# the backend. F32_F32_F32 also rules out TF32.
_ALGORITHMS = {
    ("float32", "float32"): lax.DotAlgorithmPreset.F32_F32_F32,
    ("bfloat16", "float32"): lax.DotAlgorithmPreset.BF16_BF16_F32,
    ("float16", "float32"): lax.DotAlgorithmPreset.F16_F16_F32,
}


def mixed_einsum(
    spec: str, x: jax.Array, weight: jax.Array, *, compute: jnp.dtype, accum: jnp.dtype
) -> jax.Array:
    """``einsum(spec, x, weight)`` with operands in ``compute`` and sums in ``accum``.

    Returns ``compute``. Gradients: the cotangent and both operands in ``compute``, sums in
    ``accum``; dx is returned in x's dtype, dweight in the weight's (fp32 masters get fp32 gradients
    straight from the accumulator).

    Args:
        spec: two operands, explicit output, every index of an operand present in the other operand
            or in the output.
    """
    return _einsum(spec, jnp.dtype(compute).name, jnp.dtype(accum).name, x, weight)


def _dot(spec: str, a: jax.Array, b: jax.Array, *, compute: str, accum: str, out: jnp.dtype):
    algorithm = _ALGORITHMS[compute, accum]
    a, b = a.astype(compute), b.astype(compute)
    return jnp.einsum(spec, a, b, precision=algorithm, preferred_element_type=out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _einsum(spec: str, compute: str, accum: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _dot(spec, x, weight, compute=compute, accum=accum, out=jnp.dtype(compute))


def _einsum_fwd(spec, compute, accum, x, weight):
    return _einsum(spec, compute, accum, x, weight), (x, weight)


def _einsum_bwd(spec, compute, accum, residuals, cotangent):
    x, weight = residuals
    operands, out_dims = spec.split("->")
    x_dims, weight_dims = operands.split(",")
    dot = functools.partial(_dot, compute=compute, accum=accum)
    dx = dot(f"{out_dims},{weight_dims}->{x_dims}", cotangent, weight, out=x.dtype)
    dweight = dot(f"{x_dims},{out_dims}->{weight_dims}", x, cotangent, out=weight.dtype)
    return dx, dweight


_einsum.defvjp(_einsum_fwd, _einsum_bwd)
