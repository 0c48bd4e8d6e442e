"""The gated delta rule on a Hopper GPU: what it supports, and its two kernels one after another.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.linear_attention.chunked import chunked

from .gates import CHUNK, gates
from .inverse import inverses
from .scan import COLUMNS, scan

_KEY_WIDTH = 128


def unsupported(
    q_BTNH: jax.Array, v_BTMV: jax.Array, log_decay: jax.Array, beta_BTM: jax.Array | None
) -> str | None:
    """Returns why the kernels cannot compute this call; None if they can."""
    if reason := device.why_not_one_hopper():
        return reason
    if beta_BTM is None:
        return "without a beta there is no delta rule"
    if log_decay.ndim == 4:
        return "log_decay has a number per channel; the kernels have one per head"
    if q_BTNH.dtype != jnp.bfloat16:
        return f"q is {q_BTNH.dtype}; the kernels multiply bfloat16"
    if q_BTNH.shape[3] != _KEY_WIDTH or v_BTMV.shape[3] % COLUMNS:
        return (
            f"heads of {q_BTNH.shape[3]} and {v_BTMV.shape[3]}; the kernels have keys of "
            f"{_KEY_WIDTH} and values of multiples of {COLUMNS}"
        )
    if v_BTMV.shape[2] % 2:
        return f"{v_BTMV.shape[2]} value heads; the kernels take two at a time"
    return None


@jax.custom_vjp
def gated_delta(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay_BTM: jax.Array,
    beta_BTM: jax.Array,
    state_BMHV: jax.Array,
    document_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes ``reference``: outputs [B, T, M, V] in v's dtype, and the last state in fp32.

    Operands of products are rounded to bf16, sums are fp32, and triangular systems are solved in
    fp32. The gradient is that of ``chunked``.
    """
    return _forward(q_BTNH, k_BTNH, v_BTMV, log_decay_BTM, beta_BTM, state_BMHV, document_BT)


def _kept(*operands: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    return _forward(*operands), operands


def _pulled(
    operands: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    *arrays, document_BT = operands

    def formula(q, k, v, log_decay, beta, state) -> tuple[jax.Array, jax.Array]:
        return chunked(q, k, v, log_decay, beta, state, document_BT)

    d_out, d_state = cotangents
    _, pull = jax.vjp(formula, *arrays)
    return *pull((d_out.astype(jnp.float32), d_state)), None


def _forward(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay_BTM: jax.Array,
    beta_BTM: jax.Array,
    state_BMHV: jax.Array,
    document_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    length = q_BTNH.shape[1]

    def padded(x: jax.Array, mode: str = "constant") -> jax.Array:
        """Appends tokens that neither decay nor write, up to whole chunks."""
        ends = ((0, 0), (0, -length % CHUNK), *[(0, 0)] * (x.ndim - 2))
        return jnp.pad(x, ends, mode=mode) if length % CHUNK else x

    q_BTNH, k_BTNH, v_BTMV = padded(q_BTNH), padded(k_BTNH), padded(v_BTMV)
    document_BT = padded(document_BT, mode="edge")
    numbers = gates(padded(log_decay_BTM), padded(beta_BTM), document_BT)
    state_BMVH = state_BMHV.astype(jnp.float32).swapaxes(2, 3)
    out, state_BMVH = scan(q_BTNH, k_BTNH, v_BTMV, numbers, inverses(k_BTNH, numbers), state_BMVH)
    return out[:, :length], state_BMVH.swapaxes(2, 3)


gated_delta.defvjp(_kept, _pulled)
