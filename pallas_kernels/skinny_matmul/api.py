"""The public function: validates, chooses who computes. Dims: as in ``hopper``."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import announce
from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient

from .choice import measured_config
from .hopper import padded, skinny_matmul_hopper, unsupported
from .reference import skinny_matmul_reference

type SkinnyImplementation = Literal["auto", "hopper", "xla"]


def skinny_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    swiglu: bool = False,
    implementation: SkinnyImplementation = "auto",
) -> jax.Array:
    """``x w`` for few rows, where reading the weight is all that takes time; it has no gradient.

    Args:
        x: [M, K], bfloat16 or float16 for the kernel.
        w: [K, N], x's dtype.
        swiglu: the weight is of a gated layer, [K, 2F], its gates first: the result is
            ``silu(x gate) * (x up)``, computed of fp32 sums (arXiv 2002.05202).
        implementation: "hopper" (Mosaic GPU; M up to 256, K a multiple of 64, N of 32; on one
            device) or "xla"; "auto" takes hopper where it was measured to be 1.03 times as fast as
            XLA (``tuned``), else xla.

    Returns:
        [M, N] or [M, F] in x's dtype, rounded once from sums in fp32.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot compute this call, or a gradient is taken.

    Examples:
        >>> x, w = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
        >>> pallas_kernels.skinny_matmul(x, w)[0, 0].item()
        64.0
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or x.dtype != w.dtype:
        raise InputError(
            f"x {x.dtype}{list(x.shape)} and w {w.dtype}{list(w.shape)} must be [M, K] and [K, N] "
            "of one dtype"
        )
    if swiglu and w.shape[1] % 2:
        raise InputError(f"w has {w.shape[1]} columns; gate and up are half of them each")
    if implementation not in ("auto", "hopper", "xla"):
        raise InputError(f"implementation={implementation!r} must be auto, hopper or xla")
    reason = None if implementation == "xla" else unsupported(x, w, swiglu=swiglu)
    if implementation == "hopper" and reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot compute {list(x.shape)} times {list(w.shape)}: "
            f"{reason}; xla can"
        )
    config = None
    if implementation == "auto":
        if reason is None:
            config = measured_config(padded(x.shape[0]), w.shape[1], w.shape[0], swiglu=swiglu)
        announce(
            "skinny_matmul",
            "xla" if config is None else "hopper",
            f"{x.dtype}{list(x.shape)} times {list(w.shape)}{' with SwiGLU' if swiglu else ''}",
            because=None if reason is None else f"not hopper: {reason}",
        )
    if implementation == "hopper" or config is not None:
        product = skinny_matmul_hopper(x, w, swiglu=swiglu, config=config)
    else:
        product = skinny_matmul_reference(x, w, swiglu=swiglu)
    return without_gradient(
        product, "skinny_matmul has no gradient: it is for generating; multiply with jnp.matmul"
    )
