"""Cached tokens in 8 and 4 bits, each token of each head by its own largest element.

Dims: any in front, H width of a head or a latent.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxinfra.config.cache import CacheFormat
from pallas_kernels.paged_attention import codes_of, numbers_of
from pallas_kernels.quantized_weight import WeightCode

_CODES = {
    CacheFormat.FP8: WeightCode.E4M3,
    CacheFormat.INT8: WeightCode.INT8,
    CacheFormat.INT4: WeightCode.INT4,
}


def storage(form: CacheFormat, compute: jnp.dtype) -> jnp.dtype:
    """Dtype of a cache's elements; scales are in ``compute``."""
    return compute if form is CacheFormat.PLAIN else _CODES[form].storage


def stored_tokens(
    x: Float[Array, "*rows H"], form: CacheFormat, scale_dtype: jnp.dtype
) -> tuple[Shaped[Array, "*rows _"], Float[Array, "*rows"]]:
    """Elements as a cache keeps them, and their scales: x is about their product.

    Of 4 bits the first half of a head lies in the low bits, the second in the high ones.
    """
    return codes_of(x, _CODES[form], scale_dtype)


def read_tokens(
    codes: Shaped[Array, "*rows _"],
    scales: Float[Array, "*rows"],
    form: CacheFormat,
    dtype: jnp.dtype,
) -> Float[Array, "*rows H"]:
    """The tokens that a cache keeps, rounded once to ``dtype``."""
    return numbers_of(codes, scales, _CODES[form], dtype)


def as_cached(x: Float[Array, "*rows H"], form: CacheFormat) -> Float[Array, "*rows H"]:
    """x as it will be read from the cache."""
    if form is CacheFormat.PLAIN:
        return x
    return read_tokens(*stored_tokens(x, form, x.dtype), form, x.dtype)
