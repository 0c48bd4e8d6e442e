"""The public functions: they validate and choose who computes.

Dims: R row, C column, the dim that a matmul contracts; J blocks of 128 columns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.scales import FORMATS, Quantized, Scaling
from pallas_kernels.common.varying import results_vary, vary_alike

from .hopper import quantize_hopper, unsupported
from .xla import quantize_xla

NAMES = ("hopper", "xla")
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
    scale: jax.Array | None = None,
    implementation: str = "auto",
    num_devices: int = 1,
) -> Quantized:
    """Rounds a matrix to 8 bits, each tensor, row or block by its own largest element.

    The module ``formula`` says what becomes of large, small and non-finite elements. It has no
    gradient: a recipe passes the cotangent through.

    Args:
        x: [R, C], bfloat16, float16 or float32; computed in fp32.
        scaling: what shares a scale: "tensor", "row", "1x128" or "128x128".
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: scales are powers of two: dividing by them is exact.
        scale: float32 [], in place of the tensor's own (delayed scaling); elements that exceed the
            format saturate.
        implementation: "hopper" (Mosaic GPU; bf16 by blocks, R a multiple of 64, or of 128 for
            128x128, C of 128) or "xla"; "auto" takes hopper where it can.
        num_devices: that the compiler spreads the call over; "hopper" runs on one.

    Returns:
        ``values`` in 8 bits [R, C] and the float32 ``scale`` that multiplies them, whose shape
        ``scaled_matmul`` lists.

    Raises:
        InputError: arguments that disagree, or an unknown implementation.
        UnsupportedError: the named implementation cannot compute this call, or a gradient is taken.

    Examples:
        >>> values, scale = pallas_kernels.quantize(jnp.full((2, 128), 7.0), "row")
        >>> values[0, 0].item(), scale.tolist()
        (448.0, [0.015625, 0.015625])
    """
    form, dtype = checked(x, scaling, jnp.dtype(dtype), implementation)
    if scale is not None and (form is not Scaling.TENSOR or scale.shape or power_of_two):
        raise InputError(
            f"scale is {list(scale.shape)} with scaling={form} and power_of_two={power_of_two}; a "
            "given scale is one float32 of the whole tensor, taken as it is"
        )
    x, scale = vary_alike(without_gradient((x, scale), WHY_NO_GRADIENT))
    options = {"dtype": dtype, "power_of_two": power_of_two}
    if _takes_hopper(implementation, x, form, scale is not None, power_of_two, num_devices):
        return results_vary(functools.partial(quantize_hopper, scaling=form, **options))(x)
    return quantize_xla(x, form, scale=scale, **options)


def _takes_hopper(
    implementation: str,
    x: jax.Array,
    form: Scaling,
    has_scale: bool,
    power_of_two: bool,
    num_devices: int,
) -> bool:
    if implementation == "xla":
        return False
    reason = unsupported(
        x, form, power_of_two=power_of_two, has_scale=has_scale, num_devices=num_devices
    )
    if implementation == "hopper" and reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot quantize this: {reason}. implementation='xla' can"
        )
    return reason is None


def checked(
    x: jax.Array, scaling: Scaling | str, dtype: jnp.dtype, implementation: str
) -> tuple[Scaling, jnp.dtype]:
    """The form and format of a call, found right.

    Raises:
        InputError: they are not.
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
    if implementation not in ("auto", *NAMES):
        raise InputError(
            f"implementation={implementation!r} is unknown; choose auto, {', '.join(NAMES)}"
        )
    return Scaling(scaling), dtype
