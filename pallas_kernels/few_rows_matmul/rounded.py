"""Products that round their input to e4m3, with a weight in the order of 8-bit tensor cores.

Each row of the input is quantized after its norm or SwiGLU, then both operands are multiplied in
8 bits, for any number of rows.

Dims: M row of x, K contracted, N column.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import announce
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.common.rounding import keep_rounded
from pallas_kernels.fp8.by_rows import matmul_by_rows, unsupported_by_rows
from pallas_kernels.fp8.hopper_round_rows import round_rows_hopper, unsupported_rounding
from pallas_kernels.quantized_weight import Activations, QuantizedWeight
from pallas_kernels.quantized_weight.weight import weight_scales

from .reference import FewRowsCall, multiplied

_LARGEST = {Activations.INT8: 127.0, Activations.E4M3: 448.0}
_LEAST = 2.0**-60  # of a row's largest element: no scale is 0


def rounded_rows(x_MK: jax.Array, activations: Activations) -> tuple[jax.Array, jax.Array]:
    """Quantizes each row of x to 8 bits; returns codes [M, K] and scales, float32 [M, 1]."""
    x = x_MK.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.maximum(largest, _LEAST) / _LARGEST[activations]
    if activations is Activations.INT8:
        return jnp.clip(jnp.round(x / scale), -127.0, 127.0).astype(jnp.int8), scale
    values = jnp.clip(x / scale, -448.0, 448.0)
    return keep_rounded(values.astype(jnp.float8_e4m3fn)), scale


def rounded_product(
    call: FewRowsCall, *, out_dtype: jnp.dtype, implementation: str = "auto"
) -> jax.Array:
    """Computes ``input(x) w`` of a call whose weight is transposed: [M, N], without the residual.

    Args:
        implementation: "hopper", "xla", or "auto", which takes the kernels if they support the
            call. Where only rows are too long for the rounding kernel, XLA rounds them.

    Raises:
        UnsupportedError: "hopper" is named and no kernel can compute this call.
    """
    weight = call.weight
    assert isinstance(weight, QuantizedWeight), "the weight is transposed"
    weight, (K, N) = weight.plain, weight.matrix_shape
    reason = unsupported_by_rows(N, K)
    if implementation == "hopper" and reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot compute {call.describe()}: {reason}; xla can"
        )
    uses_kernel = reason is None and implementation != "xla"
    if implementation == "auto":
        announce(
            "rounded_matmul",
            "hopper" if uses_kernel else "xla",
            call.describe(),
            because=None if reason is None else f"not hopper: {reason}",
        )
    codes_MK, scale_M = _rounded_input(call, uses_kernel=uses_kernel)
    scale_N = jnp.broadcast_to(weight_scales(weight), (1, N)).reshape(N)
    return matmul_by_rows(
        codes_MK, weight.data, scale_M, scale_N, out_dtype=out_dtype, uses_kernel=uses_kernel
    )


def _rounded_input(call: FewRowsCall, *, uses_kernel: bool) -> tuple[jax.Array, jax.Array]:
    """Codes [M, K] and scales [M] of the call's input."""
    is_short = unsupported_rounding(call.shape.K) is None
    if uses_kernel and is_short and call.x.dtype.itemsize == 2:
        return round_rows_hopper(call.x, norm=call.norm, swiglu_input=call.swiglu_input)
    codes, scale = rounded_rows(multiplied(call), Activations.E4M3)
    return codes, scale[:, 0]
