"""The public function: validates, chooses who computes.

Dims: M row of a and of the result, N row of b and column of the result, K contracted, J blocks of
128 of K, I blocks of 128 of N.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.varying import results_vary, vary_alike

from .hopper import scaled_matmul_hopper, unsupported
from .reference import scaled_matmul_reference
from .spec import make_scaled_spec
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
        implementation: "hopper" (Mosaic GPU; K a multiple of 128, N of 128 bytes of the result, M
            of 8), "xla" (cuBLASLt's FP8 matmul on a GPU for scales of tensors; blocks are
            dequantized, on a GPU to bf16), or "reference" (dequantized, fp32). "auto" takes hopper
            for blocks where it can, else xla.
        num_devices: that the compiler spreads the call over; "hopper" runs on one.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the named implementation cannot compute this call, or a gradient is taken.

    Examples:
        >>> a, a_scale = pallas_kernels.quantize(jnp.ones((2, 128)), "tensor")
        >>> b, b_scale = pallas_kernels.quantize(jnp.ones((3, 128)), "tensor")
        >>> pallas_kernels.scaled_matmul(a, b, a_scale, b_scale)[0].tolist()
        [128.0, 128.0, 128.0]
    """
    spec = make_scaled_spec(
        a, b, a_scale, b_scale, out_dtype=jnp.dtype(out_dtype), accumulate=accumulate
    )
    if implementation not in ("auto", *NAMES):
        raise InputError(
            f"implementation={implementation!r} is unknown; choose auto, {', '.join(NAMES)}"
        )
    chosen = implementation
    if implementation in ("auto", "hopper"):
        reason = unsupported(a, b, spec=spec, num_devices=num_devices)
        if implementation == "hopper" and reason is not None:
            raise UnsupportedError(
                f"implementation='hopper' cannot compute this scaled matmul: {reason}. "
                "implementation='xla' can"
            )
        wins = reason is None and (spec.by_blocks or spec.accumulates)
        chosen = "hopper" if implementation == "hopper" or wins else "xla"
    arrays = without_gradient(
        (a, b, a_scale, b_scale, accumulate),
        "scaled_matmul has no gradient: a recipe quantizes the cotangent and calls it again for "
        "each operand, inside its own jax.custom_vjp; or train in bfloat16",
    )
    arrays = vary_alike(arrays)
    match chosen:
        case "reference":
            product = scaled_matmul_reference(*arrays[:4], accumulate=accumulate)
            return product.astype(spec.out_dtype)
        case "hopper":
            return results_vary(functools.partial(scaled_matmul_hopper, spec=spec))(*arrays)
        case _:
            return scaled_matmul_xla(*arrays, spec=spec)
