"""Attention over gathered keys: each device holds all keys and values, and its own queries.

Simple, and what Llama 3 trained with (section 3.3.2): few large kernels, and memory for the whole
sequence's keys, which nothing overlaps with. Of a chunk's keys those before it are one unmasked
part whose length differs by device, its own are causal; both merge by logsumexp.

Bytes a device sends: 2 (P-1) t K H b to gather keys and values, as many to reduce their gradients.

Dims: B batch, t tokens of a device, c = t/2 of a chunk, T of the sequence, N query heads,
K key/value heads, H head width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfra.ops.partial_attention import PartialAttention, merge_partials
from jaxinfra.parallel.collectives import all_gather, num_devices, rank
from jaxinfra.parallel.context.zigzag import chunks_in_sequence


def gathered_attention(
    part: PartialAttention,
    axis: str,
    q_BtNH: Float[Array, "B t N H"],
    k_BtKH: Float[Array, "B t K H"],
    v_BtKH: Float[Array, "B t K Hv"],
    ids_Bt: Int32[Array, "B t"] | None,
    *,
    is_causal: bool,
) -> Float[Array, "B t N Hv"]:
    """This device's rows of attention over the whole sequence, [B, t, N, H] in q's dtype.

    Args:
        axis: the mesh axis of the sequence, manual here.
        q_BtNH, k_BtKH, v_BtKH: in zig-zag order if causal, else in any.
        ids_Bt: int32 documents, below 0 for padding; None where a row is one document.
        is_causal: by place in the sequence.
    """
    size = num_devices(axis)

    def whole(x_Bt: jax.Array) -> jax.Array:
        x_BT = all_gather(x_Bt, axis, dim=1)
        return chunks_in_sequence(x_BT, size) if is_causal else x_BT

    k_BTKH, v_BTKH = whole(k_BtKH), whole(v_BtKH)
    ids_BT = None if ids_Bt is None else whole(ids_Bt)
    if not is_causal:
        out, _ = part.forward(
            q_BtNH, k_BTKH, v_BTKH, is_causal=False, q_ids_BT=ids_Bt, kv_ids_BS=ids_BT
        )
        return out
    return causal_attention_to_all(
        part, axis, q_BtNH, (k_BtKH, v_BtKH), (k_BTKH, v_BTKH), ids_Bt, ids_BT
    )


def causal_attention_to_all(
    part: PartialAttention,
    axis: str,
    q_BtNH: jax.Array,
    own: tuple[jax.Array, jax.Array],
    every: tuple[jax.Array, jax.Array],
    ids_Bt: jax.Array | None,
    ids_BT: jax.Array | None,
) -> jax.Array:
    """This device's rows of causal attention, [B, t, N, Hv] in q's dtype.

    Args:
        q_BtNH, own, ids_Bt: of this device's tokens, in zig-zag order; keys and values.
        every, ids_BT: of all tokens, in the sequence's order.
    """
    size, me = num_devices(axis), rank(axis)
    chunk = q_BtNH.shape[1] // 2
    outs = []
    for half, number in enumerate((me, 2 * size - 1 - me)):
        mine = slice(half * chunk, (half + 1) * chunk)
        ids_Bc = None if ids_Bt is None else ids_Bt[:, mine]
        own_part = part.forward(
            q_BtNH[:, mine],
            *(x[:, mine] for x in own),
            is_causal=True,
            q_ids_BT=ids_Bc,
            kv_ids_BS=ids_Bc,
        )
        # No device's chunk has more keys before it than these.
        most = ((half + 1) * size - 1) * chunk
        before = part.forward(
            q_BtNH[:, mine],
            *(x[:, :most] for x in every),
            is_causal=False,
            q_ids_BT=ids_Bc,
            kv_ids_BS=None if ids_BT is None else ids_BT[:, :most],
            kv_lengths_B=jnp.full(q_BtNH.shape[0], number * chunk),
        )
        outs.append(merge_partials(*own_part, *before)[0])
    return jnp.concatenate(outs, axis=1).astype(q_BtNH.dtype)
