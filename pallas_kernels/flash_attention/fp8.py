"""FP8 attention for inference: e4m3 operands with block scales, softmax and sums in fp32.

Dims: B batch, T query, S key, N query heads, K kv heads, H query and key width, V value width.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import announce
from pallas_kernels.common.errors import InputError, UnsupportedError

from . import hopper, reference, xla
from .api import Window
from .dispatch import why_not_this_device
from .fp8_operands import Fp8Operands, dequantized
from .sharding import Operands, call_opaque
from .spec import AttentionMasks, AttentionSpec, MeshAxes
from .validate import DTYPES, make_spec

type Fp8Implementation = Literal["auto", "hopper", "xla", "reference"]
NAMES = ("hopper", "xla", "reference")


def flash_attention_fp8(
    operands: Fp8Operands,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    implementation: Fp8Implementation = "auto",
    return_residual: bool = False,
    dtype: Any = jnp.bfloat16,
    mesh_axes: MeshAxes | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``flash_attention`` of operands in e4m3, for inference: it has no gradient.

    On Hopper both products run on the tensor cores' 8-bit path, so that probabilities are rounded
    to e4m3 too (relative to a reference at most 2**3 below their row's maximum, times 2**5). The
    other implementations attend in float32 with the dequantized operands.

    Algorithm: FlashAttention-3, section 3.3 (Shah et al. 2024).

    Args:
        operands: from ``quantize_fp8``.
        scale: of the scores; default 1 / sqrt(H).
        is_causal: a query sees no key after its own position, aligned bottom-right.
        local_window_size: as in ``flash_attention``.
        implementation: "hopper" (d 64 and 128), "xla" (portable, linear memory) or "reference"
            (the formula, T x S memory). "auto" is "hopper" where it can compute the call, else
            "xla"; the choice and its reason are logged.
        return_residual: also return the logsumexp of each row's scores.
        dtype: of the result: bfloat16, float16 or float32 (bfloat16 or float16 on Hopper).
        mesh_axes: as in ``flash_attention``.

    Returns:
        out [B, T, N, V] in ``dtype``, or (out, logsumexp float32 [B, T, N]).

    Raises:
        InputError: operands or options that disagree.
        UnsupportedError: the named implementation cannot compute this call, or a gradient is taken.

    Examples:
        >>> q = k = v = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
        >>> operands = pallas_kernels.quantize_fp8(q, k, v)
        >>> pallas_kernels.flash_attention_fp8(operands, is_causal=True).shape
        (1, 8, 2, 64)
    """
    operands.check()
    spec = make_spec(
        operands.q.shape[1],
        operands.k.shape[1],
        head_width=operands.q.shape[3],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logit_soft_cap=None,
    )
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise InputError(f"dtype={dtype.name} of the result must be one of {', '.join(DTYPES)}")
    chosen = _choose(implementation, spec, operands, dtype)
    attend = _attend(chosen, spec, dtype, mesh_axes or MeshAxes())
    out, lse = attend(operands)
    return (out, lse) if return_residual else out


def why_not_hopper(spec: AttentionSpec, operands: Fp8Operands, dtype: jnp.dtype) -> str | None:
    """Why the Hopper kernel cannot compute a call; None if it can."""
    reason = why_not_this_device(causal=spec.right is not None)
    if reason is None and dtype == jnp.float32:
        reason = "its result is bfloat16 or float16, not float32"
    return reason or hopper.unsupported_fp8(spec, operands)


def _choose(name: str, spec: AttentionSpec, operands: Fp8Operands, dtype: jnp.dtype) -> str:
    if name not in ("auto", *NAMES):
        raise InputError(f"implementation={name!r} must be auto or {', '.join(NAMES)}")
    reason = why_not_hopper(spec, operands, dtype) if name in ("auto", "hopper") else None
    if name == "auto":
        B, T, N, H = operands.q.shape
        S, K = operands.k.shape[1:3]
        case = f"e4m3 b{B} t{T} s{S} heads {N}/{K} width {H}/{operands.v_t.shape[2]}"
        chosen = "hopper" if reason is None else "xla"
        because = None if reason is None else f"not hopper: {reason}"
        announce("flash_attention_fp8", chosen, case, because=because)
        return chosen
    if reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot compute this FP8 attention: {reason}. These can: xla, "
            "reference"
        )
    return name


def _attend(chosen: str, spec: AttentionSpec, dtype: jnp.dtype, axes: MeshAxes):
    """The call as a function of the operands that refuses to be differentiated."""

    @jax.custom_jvp
    def attend(operands: Fp8Operands) -> tuple[jax.Array, jax.Array]:
        if chosen == "hopper":

            def compute(block: Operands) -> tuple[jax.Array, ...]:
                return hopper.forward_fp8(Fp8Operands(**block), spec=spec, dtype=dtype)

            names = (field.name for field in dataclasses.fields(Fp8Operands))
            arrays = {name: getattr(operands, name) for name in names}
            out, lse = call_opaque(compute, arrays, ("out", "lse"), axes)
            return out, lse
        forward = xla.forward if chosen == "xla" else reference.forward
        out, lse = forward(*dequantized(operands), AttentionMasks(), spec=spec)
        return out.astype(dtype), lse

    @attend.defjvp
    def refuse(primals, tangents):
        del primals, tangents
        raise UnsupportedError(
            "flash_attention_fp8 is for inference and has no gradient: train with flash_attention"
        )

    return attend
