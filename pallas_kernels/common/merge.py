"""Merging partial attention results over disjoint sets of keys: one rule for tiles, ring steps and
split-KV decoding.

With lse the logsumexp of each part's scores (Milakov and Gimelshein 2018, section 3.1):

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The operation is associative and commutative; its identity is (0, -inf).
"""

import jax
import jax.numpy as jnp

from .errors import InputError


def merge_partials(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over two disjoint sets of keys into attention over their union.

    Differentiable in all four arguments. A row that sees no key in a part has logsumexp -inf there;
    its gradients are zero instead of NaN. Merge in float32 and cast once at the end, since every
    cast rounds.

    Args:
        out_a: floats [..., V], normalized by its own softmax.
        lse_a: float32 [...], logsumexp of each row's scores; -inf for a row without keys.
        out_b: like ``out_a``.
        lse_b: like ``lse_a``.

    Returns:
        out float32 [..., V] and logsumexp float32 [...].

    Raises:
        InputError: shapes that do not match.

    Examples:
        A row that sees keys in part a alone keeps its result of part a:

        >>> a, b = jnp.ones((1, 4)), jnp.zeros((1, 4))
        >>> out, lse = pallas_kernels.merge_partials(a, jnp.zeros(1), b, jnp.full(1, -jnp.inf))
        >>> out.tolist(), lse.tolist()
        ([[1.0, 1.0, 1.0, 1.0]], [0.0])
    """
    if not (out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]):
        raise InputError(
            f"out {out_a.shape} and {out_b.shape} must be equal, and lse {lse_a.shape} and "
            f"{lse_b.shape} must be that shape without the last dim"
        )
    lse_a, lse_b = lse_a.astype(jnp.float32), lse_b.astype(jnp.float32)
    # A row that neither part saw is computed as if both had logsumexp 0 and set to the identity in
    # the end: infinities must not enter the arithmetic, or 0 * inf enters its gradient.
    seen_a, seen_b = ~jnp.isneginf(lse_a), ~jnp.isneginf(lse_b)
    seen = seen_a | seen_b
    a = jnp.where(seen_a, lse_a, jnp.where(seen_b, lse_b, 0.0))
    b = jnp.where(seen_b, lse_b, jnp.where(seen_a, lse_a, 0.0))
    m = jax.lax.stop_gradient(jnp.maximum(a, b))
    weight_a = jnp.where(seen_a, jnp.exp(a - m), 0.0)
    weight_b = jnp.where(seen_b, jnp.exp(b - m), 0.0)
    total = jnp.where(seen, weight_a + weight_b, 1.0)
    out = (weight_a / total)[..., None] * out_a.astype(jnp.float32)
    out += (weight_b / total)[..., None] * out_b.astype(jnp.float32)
    return out, jnp.where(seen, m + jnp.log(total), -jnp.inf)
