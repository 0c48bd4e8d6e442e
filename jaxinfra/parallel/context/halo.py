"""Windowed attention over a sequence in zig-zag order: each chunk fetches the tokens before it.

A query sees ``left`` keys before its own, so that a chunk needs the last ``left`` tokens of the
chunks before it and no others: whole chunks and the end of one. They are fetched from the devices
that own them, to each chunk's own device in one hop; every other step of the ring is left out. One
attention over [fetched | own] keys follows, whose mask is the plain causal window.

Bytes a device sends forward, at most: 2 chunks x ``left`` tokens x 2 K H b (chunks that do not
exist are not sent), and as many backward.

Dims: B batch, t tokens of a device, c = t/2 of a chunk, N query heads, K key/value heads, H head
width.
"""

import jax
import jax.numpy as jnp

from jaxinfra.ops.partial_attention import PartialAttention
from jaxinfra.parallel.collectives import num_devices, rank


def windowed_attention(
    part: PartialAttention,
    axis: str,
    q_BtNH: jax.Array,
    k_BtKH: jax.Array,
    v_BtKH: jax.Array,
    ids_Bt: jax.Array | None,
    *,
    left: int,
) -> jax.Array:
    """This device's rows of causal attention over ``left`` keys before each query's own.

    Args:
        axis: the mesh axis of the sequence, manual here.
        ids_Bt: int32 documents, below 0 for padding; None where a row is one document.

    Returns:
        [B, t, N, H] in q's dtype.
    """
    if ids_Bt is None:
        # Keys before the sequence's beginning must be hidden, and documents are how.
        ids_Bt = jnp.zeros_like(k_BtKH[:, :, 0, 0], dtype="int32")
    q_2BcNH, ids_2Bc = _as_batch(q_BtNH), _as_batch(ids_Bt)
    keys, values, key_ids = [_as_batch(k_BtKH)], [_as_batch(v_BtKH)], [ids_2Bc]
    chunk = ids_2Bc.shape[1]
    for distance in range(1, -(-left // chunk) + 1):
        tokens = min(chunk, left - (distance - 1) * chunk)
        k, v, ids = (
            jnp.concatenate(_chunks_before(x, axis, distance=distance, tokens=tokens))
            for x in (k_BtKH, v_BtKH, ids_Bt)
        )
        exists = jnp.concatenate(
            tuple(
                jnp.broadcast_to(number >= distance, (ids_Bt.shape[0], tokens))
                for number in _chunk_numbers(axis)
            )
        )
        keys.insert(0, k)
        values.insert(0, v)
        key_ids.insert(0, jnp.where(exists, ids, -1))
    out_2BcNH, _ = part.forward(
        q_2BcNH,
        jnp.concatenate(keys, axis=1),
        jnp.concatenate(values, axis=1),
        is_causal=True,
        left=left,
        q_ids_BT=ids_2Bc,
        kv_ids_BS=jnp.concatenate(key_ids, axis=1),
    )
    return jnp.concatenate(jnp.split(out_2BcNH, 2), axis=1)


def _chunk_numbers(axis: str) -> tuple[jax.Array, jax.Array]:
    """The places in the sequence of this device's two chunks."""
    return rank(axis), 2 * num_devices(axis) - 1 - rank(axis)


def _chunks_before(
    x_Bt: jax.Array, axis: str, *, distance: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The last tokens of the chunks ``distance`` before this device's two; zeros where none is."""
    size = num_devices(axis)
    chunk = x_Bt.shape[1] // 2
    lo, hi = x_Bt[:, chunk - tokens : chunk], x_Bt[:, 2 * chunk - tokens :]
    # Chunk j < P is the lo of device j, the others are the hi of device 2P-1-j.
    to_lo = [(i, i + distance) for i in range(size - distance)]
    from_hi = [(i, i - distance) for i in range(distance, size)]
    # Where a chunk of the second half looks back into the first.
    from_lo = [
        (2 * size - 1 - i - distance, i)
        for i in range(size)
        if 0 <= 2 * size - 1 - i - distance < size
    ]
    none = jnp.zeros_like(lo)
    for_lo = jax.lax.ppermute(lo, axis, to_lo) if to_lo else none
    for_hi = jax.lax.ppermute(hi, axis, from_hi) if from_hi else none
    if from_lo:
        # Each device receives one of the two and zeros for the other.
        for_hi = for_hi + jax.lax.ppermute(lo, axis, from_lo)
    return for_lo, for_hi


def _as_batch(x_Bt: jax.Array) -> jax.Array:
    """A device's two chunks as two batches, [2B, c, ...]."""
    return jnp.concatenate(jnp.split(x_Bt, 2, axis=1))
