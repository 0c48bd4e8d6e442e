"""Storage of weights and moments between steps: formats, scales and unbiased rounding."""

import jax
import jax.numpy as jnp

from jaxinfra.config.optimizer import MomentFormat

EXACT = jnp.dtype(jnp.float32)
"""Dtype that updates are computed in, whatever the dtype of storage."""

_FORMATS = {
    MomentFormat.FP32: EXACT,
    MomentFormat.BF16: jnp.dtype(jnp.bfloat16),
    MomentFormat.FP16: jnp.dtype(jnp.float16),
    MomentFormat.FP8: jnp.dtype(jnp.float8_e4m3fn),
}
_SCALED = (MomentFormat.FP16, MomentFormat.FP8)
_EXPONENT_BITS = 0x7F800000  # of float32


def exact(tree):
    """Casts a tree of arrays to float32; wider arrays stay unchanged."""

    def widened(leaf: jax.Array) -> jax.Array:
        return leaf if leaf.dtype.itemsize > EXACT.itemsize else leaf.astype(EXACT)

    return jax.tree.map(widened, tree)


def stochastically_rounded(x: jax.Array, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds float32 x to one of its two neighbours in ``dtype``, so that the mean is x.

    With rounding to nearest, a value whose update is less than half a unit in the last place never
    changes: bf16 weights stop learning, 8-bit moments stop decaying. Values above the largest of
    ``dtype`` saturate.
    """
    info = jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32) & _EXPONENT_BITS
    binade = jax.lax.bitcast_convert_type(bits, EXACT)  # the power of two below |x|
    least = jnp.asarray(info.smallest_normal, EXACT)
    fraction = jnp.asarray(2.0**-info.nmant, EXACT)
    # In two factors: of bf16 the product is below float32's normal numbers, which may be flushed.
    units = x / jnp.maximum(binade, least) / fraction
    units = jnp.floor(units + jax.random.uniform(key, x.shape, EXACT))
    rounded = units * fraction * jnp.maximum(binade, least)
    top = jnp.asarray(info.max, EXACT)
    return jnp.where(jnp.isfinite(x), jnp.clip(rounded, -top, top), x).astype(dtype)


def after_update(weight: jax.Array, step: jax.Array, key: jax.Array) -> jax.Array:
    """Returns ``weight + step``, computed in float32 and stored in the weight's dtype.

    If that dtype is narrower than float32, the result is rounded stochastically, since there is no
    master copy with the lost bits.
    """
    after = weight.astype(EXACT) + step.astype(EXACT)
    return after if weight.dtype == EXACT else stochastically_rounded(after, key, weight.dtype)


def empty_moment(weight: jax.Array, format_: MomentFormat) -> jax.Array:
    """Returns the initial moment of a weight: zeros in the format."""
    return jnp.zeros_like(weight, _FORMATS[format_])


def empty_scale(weight: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the initial scale of a weight's moment, float32 with size 1 on the axes it spans."""
    shape = [1 if axis in axes else size for axis, size in enumerate(weight.shape)]
    return jnp.zeros_like(weight, EXACT, shape=shape)


def is_scaled(format_: MomentFormat) -> bool:
    """Whether moments of a format have scales."""
    return format_ in _SCALED


def stored_moment(
    moment: jax.Array, format_: MomentFormat, key: jax.Array, *, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Quantizes a moment to its storage format; returns the values and their scale or None.

    The scale maps the largest element to the format's largest value (FP8-LM, Peng et al. 2023).
    Scaled 16-bit formats round to nearest, bf16 and 8-bit formats stochastically.

    Args:
        axes: axes that share a scale: those of one matrix in a stack of layers and experts.
    """
    dtype = _FORMATS[format_]
    if format_ is MomentFormat.FP32:
        return moment, None
    if format_ is MomentFormat.BF16:
        return stochastically_rounded(moment, key, dtype), None
    scale = jnp.max(jnp.abs(moment), axis=axes, keepdims=True) / jnp.asarray(
        jnp.finfo(dtype).max, EXACT
    )
    scale = jnp.where(scale > 0.0, scale, 1.0)
    if format_ is MomentFormat.FP16:
        return (moment / scale).astype(dtype), scale
    return stochastically_rounded(moment / scale, key, dtype), scale


def read_moment(values: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Dequantizes a stored moment to float32."""
    moment = values.astype(EXACT)
    return moment if scale is None else moment * scale
