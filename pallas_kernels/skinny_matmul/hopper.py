"""Matmuls of a few rows on a Hopper GPU: what can be computed, by which kernel.

Dims: M row, K contracted, N column of the weight.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError

from .config import MOST_ROWS, ROW_MULTIPLE, SkinnyConfig, config_for
from .hopper_kernel import SkinnyKernel
from .hopper_transposed import TransposedKernel

DTYPES = ("bfloat16", "float16")


def unsupported(x_MK: jax.Array, w_KN: jax.Array, *, swiglu: bool) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {facts.kind}"
    (M, K), N = x_MK.shape, w_KN.shape[1]
    if x_MK.dtype.name not in DTYPES:
        return f"{x_MK.dtype} is neither bfloat16 nor float16"
    if not 1 <= M <= MOST_ROWS:
        return f"{M} rows: it takes 1 to {MOST_ROWS}"
    if config_for(padded(M), N, K, swiglu=swiglu) is None:
        return f"no tile divides K={K} and N={N}, and fits"
    return None


def padded(M: int) -> int:
    """Rows with those that the copy engine's tiles ask for."""
    return -(-M // ROW_MULTIPLE) * ROW_MULTIPLE


def skinny_matmul_hopper(
    x_MK: jax.Array, w_KN: jax.Array, *, swiglu: bool, config: SkinnyConfig | None = None
) -> jax.Array:
    """As the reference, of a call of which ``unsupported`` says nothing.

    Raises:
        UnsupportedError: tiles that do not fit the call.
    """
    (M, K), N = x_MK.shape, w_KN.shape[1]
    config = config or config_for(padded(M), N, K, swiglu=swiglu)
    assert config is not None, "unsupported"
    reason = config.unsupported(padded(M), N, K, swiglu=swiglu)
    if reason is not None:
        raise UnsupportedError(f"{config} for {M} rows, K={K}, N={N}: {reason}")
    rows = M
    if M > ROW_MULTIPLE:  # copies may go beyond the last row of a single tile of rows only
        rows = padded(M)
        x_MK = jnp.pad(x_MK, ((0, rows - M), (0, 0)))
    kind = TransposedKernel if config.transposed else SkinnyKernel
    kernel = kind(c=config, M=padded(M), rows=rows, K=K, N=N, dtype=x_MK.dtype, swiglu=swiglu)
    result = kernel.result(x_MK, w_KN)
    if config.splits > 1:
        result = jnp.sum(result, axis=0).astype(x_MK.dtype)
    return result[:M]
