"""Activations of feed-forward layers, dense ones and experts."""

import functools

import jax
import jax.numpy as jnp

from jaxinfra.config.kinds import MlpKind

_gelu = functools.partial(jax.nn.gelu, approximate=False)
_gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
_ACTIVATIONS = {
    MlpKind.SWIGLU: jax.nn.silu,
    MlpKind.GEGLU: _gelu,
    MlpKind.GEGLU_TANH: _gelu_tanh,
    MlpKind.GELU: _gelu,
    MlpKind.GELU_TANH: _gelu_tanh,
    MlpKind.RELU: jax.nn.relu,
    MlpKind.RELU_SQUARED: lambda x: jnp.square(jax.nn.relu(x)),
}
_SLOPE, _LIMIT = 1.702, 7.0  # of SWIGLU_CLAMPED, as gpt-oss has them


def activated(kind: MlpKind, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Computes the hidden values activation(up), or gated: activation(gate) * up.

    Args:
        up, gate: products in the accum dtype; gate only for gated kinds.
    """
    if gate is None:
        return _ACTIVATIONS[kind](up)
    if kind is MlpKind.SWIGLU_CLAMPED:
        gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
        return (up + 1.0) * gate * jax.nn.sigmoid(_SLOPE * gate)
    return _ACTIVATIONS[kind](gate) * up


def xielu(
    x: jax.Array, rise: jax.Array, fall: jax.Array, slope: jax.Array, edge: jax.Array
) -> jax.Array:
    """Computes xIELU (arXiv 2411.13010): softplus(rise) x^2 + slope x for positive x, else
    (softplus(fall) + slope) (exp(x) - 1 - x) + slope x.

    Args:
        x: products in the accum dtype.
        rise, fall: learned numbers [1], which say how fast either side grows.
        slope, edge: numbers []; x near 0 is taken for the edge in the exponential.
    """
    rise, fall, slope, edge = (
        jnp.reshape(each, (1,) * x.ndim) for each in (rise, fall, slope, edge)
    )
    above = jax.nn.softplus(rise) * x * x
    below = (jax.nn.softplus(fall) + slope) * (jnp.expm1(jnp.minimum(x, edge)) - x)
    return jnp.where(x > 0, above, below) + slope * x
