"""Short causal convolution: each channel's weighted sum of its newest inputs.

Dims: B batch, T position, C channel, W tap.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError


def short_convolution(
    x: jax.Array,
    weight: jax.Array,
    *,
    tail: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Computes y[t] = sum over w of weight[w] x[t - W + 1 + w], in fp32.

    Args:
        x: inputs, [B, T, ...channels] of any floating dtype.
        weight: taps of each channel, [...channels, W], the newest input's last.
        tail: the W - 1 inputs before the first, [B, W - 1, ...channels]; None: zeros.
        segment_ids: each token's document, int32 [B, T]; inputs of others count as zeros.

    Raises:
        InputError: shapes that do not fit together.

    Examples:
        >>> x = jnp.arange(4.0).reshape(1, 4, 1)
        >>> pallas_kernels.short_convolution(x, jnp.ones((1, 2)))[0, :, 0]
        Array([0., 1., 3., 5.], dtype=float32)
    """
    num_taps, (batch, length) = weight.shape[-1], x.shape[:2]
    if x.shape[2:] != weight.shape[:-1]:
        raise InputError(
            f"x {x.shape} and weight {weight.shape}: a channel has a row of taps; give weight "
            f"the shape {(*x.shape[2:], num_taps)}"
        )
    before = (batch, num_taps - 1, *x.shape[2:])
    if tail is None:
        tail = jnp.zeros(before, x.dtype)
    if tail.shape != before:
        raise InputError(f"tail {tail.shape}: it is the inputs before the first; give {before}")
    seen = jnp.concatenate([tail.astype(x.dtype), x], axis=1).astype(jnp.float32)
    weight = weight.astype(jnp.float32)
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(num_taps):
        age = num_taps - 1 - tap
        taken = seen[:, tap : tap + length]
        if segment_ids is not None and age:
            others = jnp.pad(segment_ids, ((0, 0), (age, 0)), mode="edge")[:, :length]
            is_same = (segment_ids == others).reshape(batch, length, *[1] * (x.ndim - 2))
            taken = jnp.where(is_same, taken, 0.0)
        out += taken * jnp.expand_dims(weight[..., tap], (0, 1))
    return out
