"""The public function: validates, chooses who computes. Dims: as in ``reference``."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import announce
from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.row_inputs import RmsNorm, swiglu_of_halves
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.skinny_matmul import skinny_matmul

from . import quantized
from .choice import measured_config, measured_in_few_bits
from .hopper import fused_matmul_hopper, unsupported
from .reference import FusedCall, fused_matmul_reference, multiplied

type FusedImplementation = Literal["auto", "hopper", "apart", "reference"]


def fused_matmul(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    *,
    norm: RmsNorm | None = None,
    swiglu_input: bool = False,
    swiglu: bool = False,
    residual: jax.Array | None = None,
    implementation: FusedImplementation = "auto",
) -> jax.Array:
    """``residual + act(input(x) w)`` of few rows: a decoding step's norm, product and sum in one.

    Of one row, what comes before and after a product takes as long to launch as the product. It has
    no gradient.

    Args:
        x: [M, K], bfloat16 or float16 for the kernels; [M, 2 K] with ``swiglu_input``.
        weight: [K, N] of x's dtype, or in few bits.
        norm: of x's rows: ``input`` is the norm.
        swiglu_input: ``input(x)`` is ``silu(gate) * up`` of x's halves, gates first.
        swiglu: ``act`` is that of the product's halves: the result has half its columns.
        residual: what is added, of the result's shape, in x's dtype.
        implementation: "hopper" (Mosaic GPU; 1 to 8 rows, on one device), "apart" (one after
            another, the product by whom ``skinny_matmul`` or ``quantized_matmul`` chooses),
            "reference"; "auto" takes hopper where it was measured to be 1.03 times as fast
            (``tuned``: a table for 16-bit weights, and one for few bits by format).

    Returns:
        [M, N] or [M, N / 2] in x's dtype; ``input(x)`` is rounded to it, too.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot compute this call, or a gradient is taken.

    Examples:
        >>> x, w = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
        >>> pallas_kernels.fused_matmul(x, w, residual=jnp.ones((1, 32), jnp.bfloat16))[0, 0].item()
        65.0
    """
    call = _checked(
        FusedCall(
            x=jnp.asarray(x), weight=weight, norm=norm, swiglu_input=swiglu_input, swiglu=swiglu,
            residual=residual,
        )
    )  # fmt: skip
    if implementation not in ("auto", "hopper", "apart", "reference"):
        raise InputError(
            f"implementation={implementation!r} must be auto, hopper, apart, reference"
        )
    is_quantized = isinstance(weight, QuantizedWeight)
    reason = None
    if implementation in ("auto", "hopper"):
        reason = quantized.unsupported(call) if is_quantized else unsupported(call)
    if implementation == "hopper" and reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot compute {call.describe()}: {reason}; apart can"
        )
    if implementation == "auto":
        is_faster = reason is None and _is_measured_faster(call)
        implementation = "hopper" if is_faster else "apart"
        because = None if reason is None else f"not hopper: {reason}"
        announce("fused_matmul", implementation, call.describe(), because=because)
    if implementation == "reference":
        product = fused_matmul_reference(call)
    elif implementation == "apart":
        product = _apart(call)
    elif is_quantized:
        product = quantized.fused(call, config=measured_in_few_bits(call))
    else:
        product = fused_matmul_hopper(call, config=measured_config(call))
    return without_gradient(
        product, "fused_matmul has no gradient: it is for generating; norm, multiply and add apart"
    )


def _checked(call: FusedCall) -> FusedCall:
    x, weight = call.x, call.weight
    if isinstance(weight, QuantizedWeight):
        weight.check()
    elif weight.ndim != 2 or weight.dtype != x.dtype:
        raise InputError(f"w {weight.dtype}{list(weight.shape)} must be [K, N] of x's {x.dtype}")
    width = 2 * call.K if call.swiglu_input else call.K
    if x.ndim != 2 or x.shape[1] != width:
        raise InputError(f"x is {list(x.shape)}; it must be [M, {width}]: {call.describe()}")
    if call.swiglu_input and call.norm is not None:
        raise InputError("swiglu_input and norm: x is gates and ups, or it is normalized")
    if call.norm is not None and call.norm.scale.shape != (call.K,):
        raise InputError(f"the norm's scale is {list(call.norm.scale.shape)}, not [{call.K}]")
    if call.swiglu and call.N % 2:
        raise InputError(f"w has {call.N} columns; gate and up are half of them each")
    shape = (call.M, call.num_outputs)
    if call.residual is not None and (call.residual.shape, call.residual.dtype) != (shape, x.dtype):
        raise InputError(
            f"residual is {call.residual.dtype}{list(call.residual.shape)}; the result is "
            f"{x.dtype}{list(shape)}"
        )
    return call


def _is_measured_faster(call: FusedCall) -> bool:
    is_in_few_bits = isinstance(call.weight, QuantizedWeight)
    measured = measured_in_few_bits if is_in_few_bits else measured_config
    return measured(call) is not None


def _apart(call: FusedCall) -> jax.Array:
    """One after another."""
    x = multiplied(call)
    if not isinstance(call.weight, QuantizedWeight):
        product = skinny_matmul(x, call.weight, swiglu=call.swiglu)
    else:
        product = quantized_matmul(x, call.weight)
        product = swiglu_of_halves(product) if call.swiglu else product
    return product if call.residual is None else call.residual + product
