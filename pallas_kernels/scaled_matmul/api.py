"""The public function: validates, chooses who computes.

Dims: M row of a and of the result, N row of b and column of the result, K contracted, J blocks of
128 of K, I blocks of 128 of N.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.varying import results_vary, vary_alike

from .reference import scaled_matmul_reference
from .spec import ScaledSpec, make_scaled_spec
from .xla import scaled_matmul_xla

NAMES = ("hopper", "xla", "reference")


def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    accumulate: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> jax.Array:
    """``sum_k (a scale_a)[m, k] (b scale_b)[n, k]``, of operands in 8 bits; it has no gradient.

    Scales are those of ``quantize``: of tensors or rows on each side, or of blocks on both: 1x128
    of a with 128x128 of b (activations and weights, DeepSeek-V3, arXiv 2412.19437, section 3.3),
    1x128 on both (gradients of weights). Scales of blocks multiply fp32 sums of 128 products.

    Args:
        a: [M, K], float8_e4m3fn or float8_e5m2.
        b: [N, K], either, in any pairing.
        a_scale: float32: [] of the tensor, [M] of rows, [J, M] of 1x128 blocks, [J, ceil(M / 128)]
            of 128x128 blocks.
        b_scale: likewise.
        out_dtype: bfloat16, float16 or float32, rounded to once, from fp32.
        accumulate: float32 [M, N], to which the product is added in fp32 (out_dtype float32).
        implementation: "xla" (cuBLASLt's FP8 matmul on a GPU for scales of tensors; blocks are
            dequantized, on a GPU to bf16), or "reference" (dequantized, fp32); "auto" takes xla.
        num_devices: that the compiler spreads the call over.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the named implementation cannot compute this call, or a gradient is taken.
    """
    del num_devices
    spec = make_scaled_spec(
        a, b, a_scale, b_scale, out_dtype=jnp.dtype(out_dtype), accumulate=accumulate
    )
    if implementation not in ("auto", *NAMES):
        raise InputError(
            f"implementation={implementation!r} is unknown; choose auto, {', '.join(NAMES)}"
        )
    chosen = "xla" if implementation == "auto" else implementation
    return _product(chosen, spec, *vary_alike((a, b, a_scale, b_scale, accumulate)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(
    chosen: str,
    spec: ScaledSpec,
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    accumulate: jax.Array | None,
) -> jax.Array:
    if chosen == "reference":
        return scaled_matmul_reference(a, b, a_scale, b_scale, accumulate=accumulate).astype(
            spec.out_dtype
        )
    compute = functools.partial(scaled_matmul_xla, spec=spec)
    return results_vary(compute)(a, b, a_scale, b_scale, accumulate)


@_product.defjvp
def _refuse(chosen: str, spec: ScaledSpec, primals, tangents):
    del chosen, spec, primals, tangents
    raise UnsupportedError(
        "scaled_matmul has no gradient: a recipe quantizes the cotangent and calls it again for "
        "each operand (wrap that in jax.custom_vjp), or train in bfloat16"
    )
