"""Cached tokens in 8 and 4 bits, each token of each head by its own largest element.

Dims: any in front, H width of a head or a latent.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxinfra.config.cache import CacheFormat
from jaxinfra.numerics.recipe import FP8_FORMATS, Fp8Format
from jaxinfra.numerics.storage import EXACT

_LARGEST = {CacheFormat.FP8: 448.0, CacheFormat.INT8: 127.0, CacheFormat.INT4: 7.0}
_LEAST = 2.0**-20  # of a head's largest element: in float16 too no scale is 0


def storage(form: CacheFormat, compute: jnp.dtype) -> jnp.dtype:
    """Dtype of a cache's elements; scales are in ``compute``."""
    match form:
        case CacheFormat.PLAIN:
            return compute
        case CacheFormat.FP8:
            return FP8_FORMATS[Fp8Format.E4M3]
        case CacheFormat.INT8:
            return jnp.dtype(jnp.int8)
        case CacheFormat.INT4:
            return jnp.dtype(jnp.uint8)


def stored_tokens(
    x: Float[Array, "*rows H"], form: CacheFormat, scale_dtype: jnp.dtype
) -> tuple[Shaped[Array, "*rows _"], Float[Array, "*rows"]]:
    """Elements as a cache keeps them, and their scales: x is about their product.

    Of 4 bits the first half of a head lies in the low bits, the second in the high ones.
    """
    wide = x.astype(EXACT)
    top = _LARGEST[form]
    size = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), _LEAST * top)
    scales = (size / top).astype(scale_dtype)
    scaled = jnp.clip(wide / scales.astype(EXACT)[..., None], -top, top)
    if form is CacheFormat.FP8:
        return scaled.astype(storage(form, x.dtype)), scales
    if form is CacheFormat.INT8:
        return jnp.round(scaled).astype(jnp.int8), scales
    low, high = jnp.split((jnp.round(scaled) + 8.0).astype(jnp.uint8), 2, axis=-1)
    return low | (high << 4), scales


def read_tokens(
    codes: Shaped[Array, "*rows _"],
    scales: Float[Array, "*rows"],
    form: CacheFormat,
    dtype: jnp.dtype,
) -> Float[Array, "*rows H"]:
    """The tokens that a cache keeps, rounded once to ``dtype``."""
    if form is CacheFormat.INT4:
        halves = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
        values = halves.astype(EXACT) - 8.0
    else:
        values = codes.astype(EXACT)
    return (values * scales.astype(EXACT)[..., None]).astype(dtype)


def as_cached(x: Float[Array, "*rows H"], form: CacheFormat) -> Float[Array, "*rows H"]:
    """x as it will be read from the cache."""
    if form is CacheFormat.PLAIN:
        return x
    return read_tokens(*stored_tokens(x, form, x.dtype), form, x.dtype)
