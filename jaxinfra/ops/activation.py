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
