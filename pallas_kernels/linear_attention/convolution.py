"""Short causal convolution: each channel's weighted sum of its newest inputs.

Dims: B batch, T position, C channel, N heads, H head width, W tap, S slot.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import choose
from pallas_kernels.common.errors import InputError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.linear_attention.hopper import convolutions


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


def short_convolutions_in_slots(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    lengths: Sequence[float | None],
    tails: Sequence[jax.Array],
    read: jax.Array,
    written: jax.Array,
    counted: jax.Array,
    epsilon: float = 1e-6,
    implementation: str = "auto",
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Computes SiLU of short convolutions of one token per row, whose inputs before are in slots.

    It has no gradient.

    Args:
        x: inputs of one convolution after the other, and more channels behind them, [B, C].
        weights: taps of each convolution's channels, [N, H, W], the newest input's last.
        lengths: of each convolution: its heads' vectors are scaled to this length; None: as they
            are.
        tails: the W - 1 inputs before, of all slots, [S, W - 1, N, H] for each convolution.
        read: slot that each row's inputs before are read from, int32 [B].
        written: slot that the inputs before the next token are written to, as of
            ``linear_attention_in_slots``.
        counted: whether a row's token counts, bool [B]. Otherwise the row's results are zeros, and
            the inputs before are written as they were read.
        epsilon: added to a vector's squared length.
        implementation: "hopper" (Mosaic GPU; bf16, multiples of four heads of 128 channels, four
            taps; in place if the caller donates the tails) or "xla". "auto" takes "hopper" for
            supported calls.

    Returns:
        For each convolution its results [B, N, H] in x's dtype, and the tails of all slots.

    Raises:
        InputError: shapes that do not fit together, or an unknown implementation.
        UnsupportedError: the Hopper kernel is named and cannot compute this call.

    Examples:
        >>> row = jnp.zeros(1, jnp.int32)
        >>> given = {"read": row, "written": row, "counted": jnp.ones(1, bool)}
        >>> tails, weights = [jnp.zeros((1, 1, 1, 2))], [jnp.ones((1, 2, 2))]
        >>> out, tails = pallas_kernels.short_convolutions_in_slots(
        ...     jnp.array([[3.0, 4.0]]), weights, lengths=[None], tails=tails, **given
        ... )
        >>> tails[0].ravel()
        Array([3., 4.], dtype=float32)
    """
    num_channels = sum(len(x) * x.shape[1] for x in weights)
    if num_channels > x.shape[1] or not len(lengths) == len(tails) == len(weights):
        raise InputError(
            f"x {x.shape} for {len(weights)} weights of {num_channels} channels, {len(lengths)} "
            f"lengths and {len(tails)} tails: give a length and a tail per weight, and all channels"
        )
    for tail, weight in zip(tails, weights, strict=True):
        shape = (weight.shape[2] - 1, *weight.shape[:2])
        if tail.shape[1:] != shape:
            raise InputError(f"tail {tail.shape}: inputs before a token per slot, [S, *{shape}]")
    chosen = choose(
        "short convolutions in slots", implementation, ("hopper", "xla"),
        lambda: convolutions.unsupported(x, weights, tails),
    )  # fmt: skip
    slots = {"read_B": read, "written_B": written, "counted_B": counted}
    if chosen == "hopper":
        found = convolutions.convolutions(
            x, weights, tails, lengths=lengths, epsilon=epsilon, **slots
        )
    else:
        found, first = ([], []), 0
        for weight, length, tail in zip(weights, lengths, tails, strict=True):
            own = x[:, first : first + weight[..., 0].size]
            first += own.shape[1]
            results = _one_token(own, weight, tail, length=length, epsilon=epsilon, **slots)
            for into, result in zip(found, results, strict=True):
                into.append(result)
    return without_gradient(found, "short_convolutions_in_slots has no gradient")


def _one_token(
    x_BC: jax.Array,
    weight_NHW: jax.Array,
    tail: jax.Array,
    *,
    length: float | None,
    epsilon: float,
    read_B: jax.Array,
    written_B: jax.Array,
    counted_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes one convolution of ``short_convolutions_in_slots`` by XLA."""
    new = x_BC.reshape(len(x_BC), 1, *weight_NHW.shape[:2])
    before, counted = tail[read_B], counted_B[:, None, None, None]
    y = jax.nn.silu(short_convolution(new, weight_NHW, tail=before.astype(new.dtype)))
    y = y.astype(x_BC.dtype)
    if length is not None:
        wide = y.astype(jnp.float32)
        squares = jnp.sum(wide**2, axis=-1, keepdims=True)
        y = (length * wide * jax.lax.rsqrt(squares + epsilon)).astype(y.dtype)
    seen = jnp.concatenate([before[:, 1:], new.astype(before.dtype)], axis=1)
    after = tail.at[written_B].set(jnp.where(counted, seen, before), mode="drop")
    return jnp.where(counted, y, jnp.zeros_like(y))[:, 0], after
