"""Linear attention's formula, one token after another; in fp32, or in float64 for float64 arrays.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width.
"""

import functools

import jax
import jax.numpy as jnp

_einsum = functools.partial(jnp.einsum, precision="highest")


def one_token(
    state_BMHV: jax.Array,
    q_BNH: jax.Array,
    k_BNH: jax.Array,
    v_BMV: jax.Array,
    log_decay: jax.Array,
    beta_BM: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes a row's next output [B, M, V] and the state after it, in the state's dtype.

    The state decays to S' = exp(log_decay) S. With a ``beta`` it then moves from what it holds at
    the key towards the value, S = S' + k (beta (v - k^T S'))^T; else S = S' + k v^T. The output is
    q^T S.

    Args:
        log_decay: [B, M], or [B, M, H] for a decay per channel of the keys.
    """
    groups, dtype = v_BMV.shape[1] // k_BNH.shape[1], state_BMHV.dtype
    q_BMH, k_BMH, v_BMV = (
        x.astype(dtype)
        for x in (jnp.repeat(q_BNH, groups, axis=1), jnp.repeat(k_BNH, groups, axis=1), v_BMV)
    )
    decay = jnp.exp(log_decay.astype(dtype))
    decay_BMX1 = decay[..., None, None] if decay.ndim == 2 else decay[..., None]
    state_BMHV = state_BMHV * decay_BMX1
    if beta_BM is not None:
        held_BMV = _einsum("BMH,BMHV->BMV", k_BMH, state_BMHV)
        v_BMV = beta_BM.astype(dtype)[..., None] * (v_BMV - held_BMV)
    state_BMHV = state_BMHV + k_BMH[..., None] * v_BMV[..., None, :]
    return _einsum("BMH,BMHV->BMV", q_BMH, state_BMHV), state_BMHV


def reference(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay: jax.Array,
    beta_BTM: jax.Array | None,
    state_BMHV: jax.Array,
    document_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes ``one_token`` of every position in turn: outputs [B, T, M, V] and the last state.

    Args:
        document_BT: numbers that change where a document begins; 0 goes on from the given state.
    """

    def step(carry, token):
        state_BMHV, before_B = carry
        q, k, v, decay, beta, document_B = token
        goes_on_B111 = (document_B == before_B)[:, None, None, None]
        state_BMHV = jnp.where(goes_on_B111, state_BMHV, 0.0)
        out_BMV, state_BMHV = one_token(state_BMHV, q, k, v, decay, beta)
        return (state_BMHV, document_B), out_BMV

    tokens = (q_BTNH, k_BTNH, v_BTMV, log_decay, beta_BTM, document_BT)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    start = (state_BMHV, jnp.zeros_like(document_BT[:, 0]))
    (state_BMHV, _), out_TBMV = jax.lax.scan(step, start, tokens)
    return jnp.moveaxis(out_TBMV, 0, 1), state_BMHV
