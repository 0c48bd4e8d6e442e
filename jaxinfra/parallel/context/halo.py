"""Windowed attention over a sequence in zig-zag order: each chunk fetches the tokens before it.

A query sees ``left`` keys before its own. So a chunk needs only the keys of the last ``left``
tokens before it. The devices that have these keys send them to the chunk's device in one hop. In a
pipeline, whose stages may not permute, all keys are gathered and the needed ones sliced out. Then
one attention over [fetched | own] keys follows, with the usual mask of a causal window.

Bytes per device forward: at most 2 chunks x ``left`` tokens x 2 K H b by permutes, or
(P-1) t x 2 K H b by the all-gather, with P devices. The backward pass sends as many.

Dims: B batch, t tokens of a device, c = t/2 of a chunk, N query heads, K key/value heads, H head
width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfra.ops.attention import PartialAttention
from jaxinfra.parallel.collectives import all_gather, num_devices, rank
from jaxinfra.parallel.zigzag import chunks_in_sequence


def windowed_attention(
    part: PartialAttention,
    axis: str,
    q_BtNH: Float[Array, "B t N H"],
    k_BtKH: Float[Array, "B t K H"],
    v_BtKH: Float[Array, "B t K H"],
    ids_Bt: Int32[Array, "B t"] | None,
    *,
    left: int,
    permutes: bool,
) -> Float[Array, "B t N H"]:
    """Computes windowed causal attention: a query sees its own key and ``left`` keys before it.

    Args:
        axis: the mesh axis that shards the sequence, inside ``shard_map``.
        ids_Bt: each token's document, int32, below 0 for padding; None: one document per row.
        permutes: whether devices send keys by permutes; otherwise all keys are gathered.

    Returns:
        [B, t, N, H] in q's dtype.
    """
    if ids_Bt is None:
        # Keys before the sequence's beginning must be hidden, and documents are how.
        ids_Bt = jnp.zeros_like(k_BtKH[:, :, 0, 0], dtype="int32")
    # Keys and values side by side travel in one send.
    kv_BtKH = jnp.concatenate([k_BtKH, v_BtKH], axis=2)
    fetch = _sent if permutes else _gathered
    kv_before, ids_before = fetch(kv_BtKH, ids_Bt, axis, left)
    ids_2Bc = _as_batch(ids_Bt)
    kv_2BSKH = jnp.concatenate([kv_before, _as_batch(kv_BtKH)], axis=1)
    k_2BSKH, v_2BSKH = jnp.split(kv_2BSKH, 2, axis=2)
    out_2BcNH, _ = part.forward(
        _as_batch(q_BtNH),
        k_2BSKH,
        v_2BSKH,
        is_causal=True,
        left=left,
        q_ids_BT=ids_2Bc,
        kv_ids_BS=jnp.concatenate([ids_before, ids_2Bc], axis=1),
    )
    return jnp.concatenate(jnp.split(out_2BcNH, 2), axis=1)


def _sent(kv_Bt: jax.Array, ids_Bt: jax.Array, axis: str, left: int) -> tuple[jax.Array, jax.Array]:
    """The ``left`` tokens before each of this device's chunks and their documents, -1 where there
    is no token, [2B, left, ...] each.
    """
    chunk = ids_Bt.shape[1] // 2
    keys, key_ids = [], []
    for distance in range(1, -(-left // chunk) + 1):
        tokens = min(chunk, left - (distance - 1) * chunk)
        kv, ids = (
            _chunks_before(x, axis, distance=distance, tokens=tokens) for x in (kv_Bt, ids_Bt)
        )
        exists = [
            jnp.broadcast_to(number >= distance, (ids_Bt.shape[0], tokens))
            for number in _chunk_numbers(axis)
        ]
        keys.insert(0, kv)
        key_ids.insert(0, jnp.where(jnp.concatenate(exists), ids, -1))
    return jnp.concatenate(keys, axis=1), jnp.concatenate(key_ids, axis=1)


def _gathered(
    kv_Bt: jax.Array, ids_Bt: jax.Array, axis: str, left: int
) -> tuple[jax.Array, jax.Array]:
    """Same result as ``_sent``, cut out of the gathered sequence."""
    chunk = ids_Bt.shape[1] // 2

    def before(x_Bt: jax.Array, absent: int) -> jax.Array:
        x_BT = chunks_in_sequence(all_gather(x_Bt, axis, dim=1), num_devices(axis))
        padding = [(0, 0), (left, 0)] + [(0, 0)] * (x_BT.ndim - 2)
        padded = jnp.pad(x_BT, padding, constant_values=absent)
        cut = [
            jax.lax.dynamic_slice_in_dim(padded, number * chunk, left, axis=1)
            for number in _chunk_numbers(axis)
        ]
        return jnp.concatenate(cut)

    return before(kv_Bt, 0), before(ids_Bt, -1)


def _chunk_numbers(axis: str) -> tuple[jax.Array, jax.Array]:
    """The places in the sequence of this device's two chunks."""
    return rank(axis), 2 * num_devices(axis) - 1 - rank(axis)


def _chunks_before(x_Bt: jax.Array, axis: str, *, distance: int, tokens: int) -> jax.Array:
    """The last tokens of the chunks ``distance`` before this device's two, [2B, tokens, ...]; zeros
    where there is none.
    """
    size = num_devices(axis)
    chunk = x_Bt.shape[1] // 2
    lo, hi = x_Bt[:, chunk - tokens : chunk], x_Bt[:, 2 * chunk - tokens :]
    # Chunk j < P is the lo of device j, the others are the hi of device 2P-1-j. (source, target):
    to_lo = [(i, i + distance) for i in range(size - distance)]
    to_hi = [(i, i - distance) for i in range(distance, size)]
    # Chunks of the second half that look back into the first.
    over = [(2 * size - 1 - i - distance, i) for i in range(size)]
    over = [pair for pair in over if 0 <= pair[0] < size]
    before_lo = jax.lax.ppermute(lo, axis, to_lo) if to_lo else jnp.zeros_like(lo)
    before_hi = jax.lax.ppermute(hi, axis, to_hi) if to_hi else jnp.zeros_like(hi)
    # A device receives from one of these two, and zeros for the other.
    if distance == 1:  # its own chunk
        before_hi += jnp.where(rank(axis) == size - 1, lo, jnp.zeros_like(lo))
    elif over:
        before_hi += jax.lax.ppermute(lo, axis, over)
    return jnp.concatenate([before_lo, before_hi])


def _as_batch(x_Bt: jax.Array) -> jax.Array:
    """A device's two chunks as two batches, [2B, c, ...]."""
    return jnp.concatenate(jnp.split(x_Bt, 2, axis=1))
