"""The public function: validates, chooses who computes. Dims: as in ``reference``."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.fused_matmul import fused_matmul

from .hopper import TailKernel, unsupported
from .reference import TailCall, layer_tail_reference

type LayerImplementation = Literal["hopper", "apart", "reference"]


def layer_tail(
    x: jax.Array,
    attended: jax.Array,
    out: jax.Array,
    norm: RmsNorm,
    gate_up: jax.Array,
    down: jax.Array,
    counter: jax.Array,
    *,
    implementation: LayerImplementation,
) -> tuple[jax.Array, jax.Array]:
    """What follows attention in a decoder layer: both sums of the stream, and all between them.

    It has no gradient.

    Args:
        x: [M, D], bfloat16 or float16: the stream before attention.
        attended: [M, A], what attention gave.
        out: [A, D], as are all weights in x's dtype.
        norm: of the stream before ``gate_up``.
        gate_up: [D, 2 F], gates first.
        down: [F, D].
        counter: int32 [1], 0 before the first layer of a step, and handed from layer to layer:
            blocks of the kernel meet by it. Donate it.
        implementation: "hopper" is one launch of a Mosaic GPU kernel, of one row, on one device
            with 132 multiprocessors that it has to itself; "apart" is a product after another,
            "reference" the formula in fp32.

    Returns:
        ``x1 + (silu(gate) * up) down``, [M, D] in x's dtype, where ``x1 = x + attended out`` and
        gate and up are halves of ``norm(x1) gate_up``; and the counter.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot compute this call, or a gradient is taken.

    Examples:
        >>> one = lambda *shape: jnp.ones(shape, jnp.bfloat16)
        >>> y, _ = pallas_kernels.layer_tail(
        ...     one(1, 8), one(1, 8), one(8, 8), RmsNorm(scale=one(8), epsilon=1e-6), one(8, 4),
        ...     one(2, 8), jnp.zeros(1, jnp.int32), implementation="apart",
        ... )
        >>> y[0, 0].item()
        137.0
    """
    call = _checked(
        TailCall(x=x, attended=attended, out=out, norm=norm, gate_up=gate_up, down=down)
    )
    if counter.shape != (1,) or counter.dtype != jnp.int32:
        raise InputError(f"counter is {counter.dtype}{list(counter.shape)}; it must be int32[1]")
    if implementation == "reference":
        y = layer_tail_reference(call)
    elif implementation == "apart":
        y = _apart(call)
    elif implementation == "hopper":
        reason = unsupported(call)
        if reason is not None:
            raise UnsupportedError(
                f"implementation='hopper' cannot compute {call.describe()}: {reason}; apart can"
            )
        counter_ref = jax.new_ref(counter)
        y = TailKernel.of(call).result(call, counter_ref)
        counter = jax.freeze(counter_ref)
    else:
        raise InputError(f"implementation={implementation!r} must be hopper, apart, reference")
    return without_gradient(
        y, "layer_tail has no gradient: it is for generating; norm, multiply and add apart"
    ), counter


def _checked(call: TailCall) -> TailCall:
    x, attended = call.x, call.attended
    if x.ndim != 2 or attended.ndim != 2 or len(x) != len(attended):
        raise InputError(
            f"x is {list(x.shape)} and attended {list(attended.shape)}; they must be [M, D], [M, A]"
        )
    D, A, F = x.shape[1], attended.shape[1], call.down.shape[0]
    wanted = {"out": (A, D), "gate_up": (D, 2 * F), "down": (F, D)}
    for name, shape in wanted.items():
        weight = getattr(call, name)
        if weight.shape != shape or weight.dtype != x.dtype:
            raise InputError(
                f"{name} is {weight.dtype}{list(weight.shape)}; it must be {x.dtype}{list(shape)}: "
                f"{call.describe()}"
            )
    if call.norm.scale.shape != (D,) or attended.dtype != x.dtype:
        raise InputError(
            f"attended is {attended.dtype} and the norm's scale {list(call.norm.scale.shape)}; "
            f"they must be {x.dtype} and [{D}]"
        )
    return call


def _apart(call: TailCall) -> jax.Array:
    """Product after product, each by whom its op chooses."""
    x = fused_matmul(call.attended, call.out, residual=call.x)
    hidden = fused_matmul(x, call.gate_up, norm=call.norm, swiglu=True)
    return fused_matmul(hidden, call.down, residual=x)
