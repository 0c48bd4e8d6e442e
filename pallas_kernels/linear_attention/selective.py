"""Linear attention whose decays are products of a token's and a channel's numbers: Mamba 1.

Its states, [H, V] of each value head, are found by an associative scan within a chunk of positions,
since no matmul computes decays that differ in every element.

Dims: B batch, i position within a chunk, N key heads, M value heads, H key width, V value width.
"""

import jax
import jax.numpy as jnp

CHUNK = 32
"""Positions of a chunk, whose states take room at the same time."""


def selective(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay_BTM: jax.Array,
    rates_MH: jax.Array,
    state_BMHV: jax.Array,
    document_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes ``reference`` in chunks: fp32 outputs [B, T, M, V] and the state after the last.

    All is computed in fp32, and again in the backward pass, which keeps one state per chunk.
    """
    batch, length = document_BT.shape
    size = min(CHUNK, length)
    num_chunks = -(-length // size)
    begins_BT = jnp.diff(document_BT, axis=1, prepend=0) != 0
    groups = v_BTMV.shape[2] // q_BTNH.shape[2]

    def cut(x: jax.Array) -> jax.Array:
        """The chunks in front, [J, B, i, ...]; padding leaves a state as it is."""
        ends = ((0, 0), (0, num_chunks * size - length), *[(0, 0)] * (x.ndim - 2))
        x = jnp.pad(x, ends).reshape(batch, num_chunks, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    @jax.checkpoint
    def step(state_BMHV: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_BiMH, k_BiMH = (jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in chunk[:2])
        v_BiMV, log_BiM = (x.astype(jnp.float32) for x in chunk[2:4])
        goes_on_Bi11 = ~chunk[4][:, :, None, None]
        kept_BiMH = jnp.where(goes_on_Bi11, jnp.exp(log_BiM[..., None] * rates_11MH), 0.0)
        added_BiMHV = k_BiMH[..., None] * v_BiMV[..., None, :]
        kept_BiMH1, states_BiMHV = jax.lax.associative_scan(
            _after, (kept_BiMH[..., None], added_BiMHV), axis=1
        )
        states_BiMHV = states_BiMHV + kept_BiMH1 * state_BMHV[:, None]
        out_BiMV = jnp.sum(q_BiMH[..., None] * states_BiMHV, axis=-2)
        return states_BiMHV[:, -1], out_BiMV

    rates_11MH = jnp.expand_dims(rates_MH.astype(jnp.float32), (0, 1))
    chunks = tuple(map(cut, (q_BTNH, k_BTNH, v_BTMV, log_decay_BTM, begins_BT)))
    state_BMHV, out = jax.lax.scan(step, state_BMHV.astype(jnp.float32), chunks)
    out_BTMV = jnp.moveaxis(out, 0, 1).reshape(batch, num_chunks * size, *v_BTMV.shape[2:])
    return out_BTMV[:, :length], state_BMHV


def _after(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Joins two neighbouring spans: what they keep of a state, and what they add to it."""
    return first[0] * second[0], first[1] * second[0] + second[1]
