"""Quantization of keys and values to codes with scales, and back. Dims: as in ``spec``."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.rounding import keep_rounded
from pallas_kernels.quantized_weight import WeightCode

from .spec import PagedCall

LEAST_SCALE = 2.0**-20  # in float16 too it is not 0


def codes_of(x: jax.Array, code: WeightCode, scale_dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Quantizes x [..., W] to codes [..., W] and scales [...], whose product approximates x.

    An infinity or NaN makes the scale of its head not finite, so that it is not hidden.
    """
    wide = x.astype(jnp.float32)
    top = code.largest
    size = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), LEAST_SCALE * top)
    scale = keep_rounded((size / top).astype(scale_dtype))
    scaled = jnp.clip(wide / scale.astype(jnp.float32)[..., None], -top, top)
    if code is WeightCode.E4M3:
        return keep_rounded(scaled.astype(code.storage)), scale
    if code is WeightCode.INT8:
        return jnp.round(scaled).astype(jnp.int8), scale
    low, high = jnp.split((jnp.round(scaled) + 8.0).astype(jnp.uint8), 2, axis=-1)
    return low | (high << 4), scale


def numbers_of(codes: jax.Array, scale: jax.Array, code: WeightCode, dtype: jnp.dtype) -> jax.Array:
    """Dequantizes codes [..., W] by scales [...], in fp32, rounded once to ``dtype``."""
    if code is WeightCode.INT4:
        halves = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
        wide = halves.astype(jnp.float32) - 8.0
    else:
        wide = codes.astype(jnp.float32)
    return (wide * scale.astype(jnp.float32)[..., None]).astype(dtype)


def rows_as_pages(call: PagedCall) -> PagedCall:
    """Returns the call with pages dequantized into new pools, row by row, for many queries."""
    tables_BM = jnp.clip(call.tables_BM, 0, call.k_PSKH.shape[0] - 1)

    def widened(codes_PSKW: jax.Array, scale_PSK: jax.Array | None) -> jax.Array:
        assert call.code is not None
        assert scale_PSK is not None
        codes, scale = (x[tables_BM].reshape(-1, *x.shape[1:]) for x in (codes_PSKW, scale_PSK))
        return numbers_of(codes, scale, call.code, call.q_BTNH.dtype)

    in_order = jnp.arange(tables_BM.size, dtype=jnp.int32)
    return dataclasses.replace(
        call,
        k_PSKH=widened(call.k_PSKH, call.k_scale_PSK),
        v_PSKV=widened(call.v_PSKV, call.v_scale_PSK),
        k_scale_PSK=None,
        v_scale_PSK=None,
        tables_BM=in_order.reshape(tables_BM.shape),
    )
