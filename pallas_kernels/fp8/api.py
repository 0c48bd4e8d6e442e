"""The public ``quantize`` and ``scaled_matmul``, which validate calls and choose an implementation.

Dims: R row, C column of a matrix (the dim that a matmul contracts); M row of a and of the result, N
row of b and column of the result, K contracted; J and I blocks of 128.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import choose
from pallas_kernels.common.errors import InputError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.scales import FORMATS, Quantized, Scaling
from pallas_kernels.common.varying import results_vary, vary_alike

from . import hopper_matmul, hopper_quantize
from .reference import make_scaled_spec, scaled_matmul_reference
from .xla import quantize_xla, scaled_matmul_xla

NAMES = ("hopper", "xla")
PRODUCTS = ("hopper", "xla", "reference")
WHY_NO_GRADIENT = (
    "quantize has no gradient: a recipe rounds inside its own jax.custom_vjp and passes the "
    "cotangent through"
)
INPUTS = (jnp.bfloat16, jnp.float16, jnp.float32)


def quantize(
    x: jax.Array,
    scaling: Scaling | str,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    power_of_two: bool = False,
    implementation: str = "auto",
    num_devices: int = 1,
) -> Quantized:
    """Rounds a matrix to 8 bits; each block's scale comes from its own largest element.

    Module ``formula`` defines the rounding of large, small and non-finite elements. ``quantize``
    has no gradient: training code passes the cotangent through unchanged.

    Args:
        x: [R, C], bfloat16, float16 or float32; computed in fp32.
        scaling: blocks that share a scale: "1x128" or "128x128".
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: scales are powers of two, by which division is exact.
        implementation: "hopper" (Mosaic GPU; bf16, R a multiple of 64, or of 128 for
            128x128, C of 128) or "xla"; "auto" takes hopper if it supports the call.
        num_devices: number of devices that the call is partitioned over; "hopper" needs 1.

    Returns:
        ``values`` in 8 bits [R, C] and the float32 ``scale`` that multiplies them, whose shape
        ``scaled_matmul`` lists.

    Raises:
        InputError: arguments that disagree, or an unknown implementation.
        UnsupportedError: the named implementation cannot compute this call, or a gradient is taken.

    Examples:
        >>> values, scale = pallas_kernels.quantize(jnp.full((2, 128), 7.0), "1x128")
        >>> values[0, 0].item(), scale.tolist()
        (448.0, [[0.015625, 0.015625]])
    """
    form, dtype = checked(x, scaling, jnp.dtype(dtype))
    (x,) = vary_alike(without_gradient((x,), WHY_NO_GRADIENT))
    options = {"dtype": dtype, "power_of_two": power_of_two}
    chosen = choose(
        "quantization", implementation, NAMES,
        lambda: hopper_quantize.unsupported(
            x, form, power_of_two=power_of_two, num_devices=num_devices
        ),
    )  # fmt: skip
    if chosen == "hopper":
        call = functools.partial(hopper_quantize.quantize_hopper, scaling=form, **options)
        return results_vary(call)(x)
    return quantize_xla(x, form, **options)


def checked(x: jax.Array, scaling: Scaling | str, dtype: jnp.dtype) -> tuple[Scaling, jnp.dtype]:
    """Validates the arguments of ``quantize``, and returns the scaling and the 8-bit dtype.

    Raises:
        InputError: an argument is invalid.
    """
    if x.ndim != 2 or x.dtype not in INPUTS or 0 in x.shape:
        raise InputError(
            f"x is {x.dtype}{list(x.shape)}; a matrix of bfloat16, float16 or float32 is "
            "quantized: reshape it to [rows, contracted dim]"
        )
    if scaling not in tuple(Scaling):
        raise InputError(f"scaling={scaling!r} must be one of {', '.join(Scaling)}")
    if dtype not in FORMATS:
        raise InputError(f"dtype={dtype.name} must be float8_e4m3fn or float8_e5m2")
    return Scaling(scaling), dtype


def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    implementation: str = "auto",
    num_devices: int = 1,
) -> jax.Array:
    """Multiplies 8-bit matrices with block scales: ``sum_k (a scale_a)[m, k] (b scale_b)[n, k]``.

    There is no gradient. Scales are those that ``quantize`` returns: 1x128 of a with 128x128 of b
    (activations and weights, DeepSeek-V3, arXiv 2412.19437, section 3.3), or 1x128 on both
    (gradients of weights). They multiply each sum of 128 products in fp32.

    Args:
        a: [M, K], float8_e4m3fn or float8_e5m2.
        b: [N, K], either 8-bit dtype, in any pairing with that of a.
        a_scale: float32: [J, M] of 1x128 blocks, [J, ceil(M / 128)] of 128x128 blocks.
        b_scale: float32: [J, N] of 1x128 blocks, [J, ceil(N / 128)] of 128x128 blocks.
        out_dtype: bfloat16, float16 or float32; fp32 sums are rounded to it once.
        implementation: "hopper" (Mosaic GPU; K a multiple of 128, N of 128 bytes of the result, M
            of 8), "xla" (dequantized, on a GPU to bf16), or "reference" (dequantized, fp32). "auto"
            takes hopper if it supports the call, else xla.
        num_devices: number of devices that the call is partitioned over; "hopper" needs 1.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the named implementation cannot compute this call, or a gradient is taken.

    Examples:
        >>> a, a_scale = pallas_kernels.quantize(jnp.ones((2, 128)), "1x128")
        >>> b, b_scale = pallas_kernels.quantize(jnp.ones((3, 128)), "128x128")
        >>> pallas_kernels.scaled_matmul(a, b, a_scale, b_scale)[0].tolist()
        [128.0, 128.0, 128.0]
    """
    spec = make_scaled_spec(a, b, a_scale, b_scale, out_dtype=jnp.dtype(out_dtype))
    chosen = choose(
        "scaled matmul", implementation, PRODUCTS,
        lambda: hopper_matmul.unsupported(a, b, spec=spec, num_devices=num_devices),
    )  # fmt: skip
    arrays = without_gradient(
        (a, b, a_scale, b_scale),
        "scaled_matmul has no gradient: a recipe quantizes the cotangent and calls it again for "
        "each operand, inside its own jax.custom_vjp; or train in bfloat16",
    )
    arrays = vary_alike(arrays)
    match chosen:
        case "reference":
            return scaled_matmul_reference(*arrays).astype(spec.out_dtype)
        case "hopper":
            call = functools.partial(hopper_matmul.scaled_matmul_hopper, spec=spec)
            return results_vary(call)(*arrays)
        case _:
            return scaled_matmul_xla(*arrays, spec=spec)
