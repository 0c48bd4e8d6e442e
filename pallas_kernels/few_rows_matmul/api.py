"""The public ``few_rows_matmul``, which validates a call and chooses an implementation.

Dims: as in ``reference``.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import announce
from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.row_inputs import RmsNorm, swiglu_of_halves
from pallas_kernels.quantized_weight import Arrangement, QuantizedWeight

from .choice import fused_config, product_config
from .hopper import fused_hopper, product_hopper, unsupported_fused, unsupported_product
from .quantized import quantized_matmul
from .reference import FewRowsCall, multiplied, product_reference
from .rounded import rounded_product

type FewRowsImplementation = Literal["auto", "fused", "hopper", "xla"]


def few_rows_matmul(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    *,
    norm: RmsNorm | None = None,
    swiglu_input: bool = False,
    swiglu: bool = False,
    residual: jax.Array | None = None,
    implementation: FewRowsImplementation = "auto",
) -> jax.Array:
    """Computes ``residual + act(input(x) w)`` for few rows, where reading the weight dominates.

    With one row, launching the operations before and after the product takes as long as the
    product. The op has no gradient.

    Args:
        x: [M, K], bfloat16 or float16 for the kernels; [M, 2 K] with ``swiglu_input``.
        weight: [K, N] of x's dtype, or a quantized weight of that shape.
        norm: ``input(x)`` is this RMSNorm of x's rows.
        swiglu_input: ``input(x)`` is ``silu(gate) * up`` of x's halves, gates first.
        swiglu: ``act`` is ``silu(gate) * up`` of the product's halves (arXiv 2002.05202); the
            result has half the product's columns.
        residual: array added to the result, of its shape and x's dtype.
        implementation: "fused": one Mosaic GPU kernel for the whole op, 1 to 8 rows. "hopper": a
            kernel for the product alone, up to 256 rows; XLA does the rest. With a transposed
            weight it takes any number of rows, which a kernel rounds after their norm or SwiGLU.
            All run on one device. "xla": XLA alone. "auto": "fused", else "hopper", if measured
            1.03 times as fast as the alternative (``choice``), else "xla".

    Returns:
        [M, N] or [M, N / 2] in x's dtype, rounded from fp32 sums. ``input(x)`` is rounded to x's
        dtype before the product. All but "fused" also round the product before they add the
        residual.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: a kernel is named and cannot compute this call, or a gradient is taken.

    Examples:
        >>> x, w = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
        >>> y = pallas_kernels.few_rows_matmul(x, w, residual=jnp.ones((1, 32), jnp.bfloat16))
        >>> y[0, 0].item()
        65.0
    """
    call = _checked(
        FewRowsCall(
            x=jnp.asarray(x),
            weight=weight if isinstance(weight, QuantizedWeight) else jnp.asarray(weight),
            norm=norm,
            swiglu_input=swiglu_input,
            swiglu=swiglu,
            residual=residual,
        )
    )
    if implementation not in ("auto", "fused", "hopper", "xla"):
        raise InputError(f"implementation={implementation!r} must be auto, fused, hopper or xla")
    result = _fused(call, implementation)
    if result is None:
        product = _product(call, implementation)
        result = product if residual is None else residual + product
    return without_gradient(
        result,
        "few_rows_matmul has no gradient: it is for generating; norm, multiply and add apart",
    )


def _checked(call: FewRowsCall) -> FewRowsCall:
    x, weight = call.x, call.weight
    if isinstance(weight, QuantizedWeight):
        weight.check()
    elif weight.ndim != 2 or weight.dtype != x.dtype:
        raise InputError(
            f"the weight is {weight.dtype}{list(weight.shape)}; it must be [K, N] of x's {x.dtype}"
        )
    s = call.shape
    width = 2 * s.K if call.swiglu_input else s.K
    if x.ndim != 2 or x.shape[1] != width:
        raise InputError(f"x is {list(x.shape)}; it must be [M, {width}]: {call.describe()}")
    if call.swiglu_input and call.norm is not None:
        raise InputError("swiglu_input and norm: x is gates and ups, or it is normalized")
    if call.norm is not None and call.norm.scale.shape != (s.K,):
        raise InputError(f"the norm's scale is {list(call.norm.scale.shape)}, not [{s.K}]")
    if call.swiglu and s.N % 2:
        raise InputError(f"the weight has {s.N} columns; gate and up are half of them each")
    shape = (s.M, call.num_outputs)
    if call.residual is not None and (call.residual.shape, call.residual.dtype) != (shape, x.dtype):
        raise InputError(
            f"residual is {call.residual.dtype}{list(call.residual.shape)}; the result is "
            f"{x.dtype}{list(shape)}"
        )
    return call


def _fused(call: FewRowsCall, implementation: FewRowsImplementation) -> jax.Array | None:
    """The result of a fused kernel; None where it is computed otherwise."""
    if implementation not in ("auto", "fused"):
        return None
    reason = unsupported_fused(call)
    if implementation == "fused" and reason is not None:
        raise UnsupportedError(
            f"implementation='fused' cannot compute {call.describe()}: {reason}; xla can"
        )
    config = fused_config(call) if reason is None else None
    if implementation == "auto":
        if config is None:
            return None
        announce("few_rows_matmul", "fused", call.describe())
    return fused_hopper(call, config)


def _product(call: FewRowsCall, implementation: FewRowsImplementation) -> jax.Array:
    """``act(input(x) w)``, with what comes before the product, or after it, by XLA."""
    assert implementation != "fused", "_fused"
    weight = call.weight
    if isinstance(weight, QuantizedWeight) and weight.arrangement is Arrangement.TRANSPOSED:
        product = rounded_product(call, out_dtype=call.x.dtype, implementation=implementation)
        return swiglu_of_halves(product) if call.swiglu else product
    x_MK = multiplied(call)
    if isinstance(weight, QuantizedWeight):
        product = quantized_matmul(x_MK, weight, implementation=implementation)
        return swiglu_of_halves(product) if call.swiglu else product
    reason = None if implementation == "xla" else unsupported_product(call, call.x.dtype)
    if implementation == "hopper" and reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot compute {call.describe()}: {reason}; xla can"
        )
    config = None
    if implementation == "auto":
        config = product_config(call.shape) if reason is None else None
        announce(
            "few_rows_matmul",
            "xla" if config is None else "hopper",
            call.describe(),
            because=None if reason is None else f"not hopper: {reason}",
        )
    if implementation == "hopper" or config is not None:
        return product_hopper(x_MK, weight, config, out_dtype=call.x.dtype, swiglu=call.swiglu)
    return product_reference(x_MK, weight, swiglu=call.swiglu)
