"""RMSNorm and SwiGLU of rows, applied before a product. Dims: M row, K column."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RmsNorm:
    """RMSNorm of rows: each is divided by its root mean square, then scaled (arXiv 1910.07467)."""

    scale: jax.Array  # [K], bfloat16, float16 or float32
    epsilon: float = dataclasses.field(metadata=dict(static=True))
    offset: float = dataclasses.field(default=0.0, metadata=dict(static=True))  # plus scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the RMSNorm of x's rows, computed in fp32 and rounded to x's dtype.

        The formula is ``x / sqrt(mean(x^2) + epsilon) * (scale + offset)``.
        """
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale.astype(jnp.float32) + self.offset
        return (y * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def swiglu_of_halves(x: jax.Array) -> jax.Array:
    """Computes ``silu(gate) * up`` of the last dim's halves (gates first) in fp32, in x's dtype."""
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)
