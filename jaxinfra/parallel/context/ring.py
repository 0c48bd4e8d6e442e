"""Ring attention: keys and values travel round the devices, queries stay (Liu et al. 2023).

P devices hold a sequence in zig-zag order (``zigzag``). In step s a device attends to the keys of
the device s places before it, while the keys of step s + 1 arrive. Its queries are two chunks, a
(early) and b (late); so are the keys, lo and hi. In every step but the first, exactly two blocks
are visible, both unmasked. b sees lo; and a sees lo if the keys are of an earlier device, else b
sees hi. So every device has equal work, and no masked block is computed. Partial results merge by
their fp32 logsumexp.

The backward pass sends keys and values round again, with the sums of their gradients in fp32. The
sums are sent one step later than the keys, so that both sends overlap with computation. A device
saves the merged (out, lse), but no other device's keys.

Bytes per device, with t tokens, K kv heads of width H, b bytes per element (GQA heads are never
expanded): forward 2 (P-1) t K H b; backward 2 (P-1) t K H (b + 4). Packed rows add 4 bytes of
segment ids per token, which are sent with its keys (``context_bytes``).

Dims: B batch, t tokens of a device, c = t/2 of a chunk, N query heads, K key/value heads, H head
width; 2B two blocks as one batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from jaxinfra.ops.attention import ATTENTION_NAMES, PartialAttention, merge_partials
from jaxinfra.parallel.collectives import shift_together

type Partial = tuple[jax.Array, jax.Array]
"""Result of attention to some of the keys: (out, lse)."""

type KeyBlock = tuple[jax.Array, jax.Array, jax.Array | None]
"""k and v [B, t, K, H] of one device, and their documents [B, t]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Static arguments of ring attention: attention to one device's keys, axis and its size."""

    part: PartialAttention
    axis: str
    num_shards: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(
    ring: Ring,
    q_BtNH: Float[Array, "B t N H"],
    k_BtKH: Float[Array, "B t K H"],
    v_BtKH: Float[Array, "B t K Hv"],
    ids_Bt: Int32[Array, "B t"] | None,
) -> Float[Array, "B t N Hv"]:
    """Computes causal attention of this device's queries to all keys, inside ``shard_map``.

    Args:
        q_BtNH, k_BtKH, v_BtKH: this device's tokens, in zig-zag order.
        ids_Bt: each token's document, int32, below 0 for padding; None: one document per row.

    Returns:
        [B, t, N, H] in q's dtype.
    """
    return _forward(ring, q_BtNH, k_BtKH, v_BtKH, ids_Bt)[0]


def _forward(ring: Ring, q_BtNH, k_BtKH, v_BtKH, ids_Bt) -> Partial:
    arriving = shift_together((k_BtKH, v_BtKH, ids_Bt), ring.axis)
    # Its own keys: its two chunks follow one another, so that their causal mask is the plain one.
    out, lse = ring.part.forward(
        q_BtNH, k_BtKH, v_BtKH, is_causal=True, q_ids_BT=ids_Bt, kv_ids_BS=ids_Bt
    )
    (out_a, out_b), (lse_a, lse_b) = (jnp.split(x, 2, axis=1) for x in (out.astype(lse.dtype), lse))
    halves = (out_a, lse_a), (out_b, lse_b)
    rows = (q_BtNH, ids_Bt)
    for step in range(1, ring.num_shards):
        # A step begins when the one before has ended: else all steps' keys would be fetched, and
        # their operands be laid out, at the beginning. Its keys leave as it begins.
        keys, rows, halves = jax.lax.optimization_barrier((arriving, rows, halves))
        if step < ring.num_shards - 1:
            arriving = shift_together(keys, ring.axis)
        halves = _merge_step(ring, halves, rows, keys, _is_earlier(ring, step))
    out, lse = (jnp.concatenate(pair, axis=1) for pair in zip(*halves, strict=True))
    return out.astype(q_BtNH.dtype), lse


# Jitted, so that P-1 steps are traced and lowered once.
@functools.partial(jax.jit, static_argnums=0)
def _merge_step(
    ring: Ring, halves: tuple[Partial, Partial], rows, keys: KeyBlock, is_earlier: jax.Array
) -> tuple[Partial, Partial]:
    q_BtNH, ids_Bt = rows
    k_BtKH, v_BtKH, kv_ids_Bt = keys
    early, late = halves
    out_2BcNH, lse_2BcN = ring.part.forward(
        _queries(is_earlier, q_BtNH),
        _keys(is_earlier, k_BtKH),
        _keys(is_earlier, v_BtKH),
        is_causal=False,
        q_ids_BT=None if ids_Bt is None else _queries(is_earlier, ids_Bt),
        kv_ids_BS=None if kv_ids_Bt is None else _keys(is_earlier, kv_ids_Bt),
    )
    (out_0, out_1), (lse_0, lse_1) = jnp.split(out_2BcNH, 2), jnp.split(lse_2BcN, 2)
    # The first block belongs to either half; to the other one it is no keys at all.
    early = merge_partials(*early, out_0, jnp.where(is_earlier, lse_0, -jnp.inf))
    late = merge_partials(*late, out_1, lse_1)
    return early, merge_partials(*late, out_0, jnp.where(is_earlier, -jnp.inf, lse_0))


def _ring_fwd(ring: Ring, q_BtNH, k_BtKH, v_BtKH, ids_Bt):
    out, lse = _forward(ring, q_BtNH, k_BtKH, v_BtKH, ids_Bt)
    out, lse = (
        checkpoint_name(x, name) for x, name in zip((out, lse), ATTENTION_NAMES, strict=True)
    )
    return out, (q_BtNH, k_BtKH, v_BtKH, ids_Bt, out, lse)


def _ring_bwd(ring: Ring, residuals, d_out_BtNH):
    q_BtNH, k_BtKH, v_BtKH, ids_Bt, out, lse = residuals
    rows = (q_BtNH, ids_Bt, out, lse, d_out_BtNH)
    arriving = shift_together((k_BtKH, v_BtKH, ids_Bt), ring.axis)
    dq, d_kv = None, None
    for step in range(1, ring.num_shards):
        keys, rows, dq, d_kv = jax.lax.optimization_barrier((arriving, rows, dq, d_kv))
        # Keys for the next step, and for the keys of this one the sums of the steps before.
        leaving = keys if step < ring.num_shards - 1 else None
        arriving, d_kv = shift_together((leaving, d_kv), ring.axis)
        step_dq, *step_d_kv = _gradient_step(ring, rows, keys, _is_earlier(ring, step))
        dq, d_kv = _sum(lse.dtype, dq, step_dq), _sum(lse.dtype, d_kv, tuple(step_d_kv))
    # Home, to the device one further on, while that one differentiates its own keys.
    rows, dq, d_kv = jax.lax.optimization_barrier((rows, dq, d_kv))
    q_BtNH, ids_Bt, out, lse, d_out_BtNH = rows
    d_kv = shift_together(d_kv, ring.axis)
    own_dq, *own_d_kv = ring.part.gradient(
        q_BtNH,
        k_BtKH,
        v_BtKH,
        out_BTNH=out,
        lse_BTN=lse,
        d_out_BTNH=d_out_BtNH,
        is_causal=True,
        q_ids_BT=ids_Bt,
        kv_ids_BS=ids_Bt,
    )
    dq, (dk, dv) = _sum(lse.dtype, dq, own_dq), _sum(lse.dtype, d_kv, tuple(own_d_kv))
    return dq.astype(q_BtNH.dtype), dk.astype(k_BtKH.dtype), dv.astype(v_BtKH.dtype), None


ring_attention.defvjp(_ring_fwd, _ring_bwd)


@functools.partial(jax.jit, static_argnums=0)
def _gradient_step(ring: Ring, rows, keys: KeyBlock, is_earlier: jax.Array):
    """dq, dk, dv [B, t, ...] of one step, fp32 where blocks were added."""
    q_BtNH, ids_Bt, out, lse, d_out_BtNH = rows
    k_BtKH, v_BtKH, kv_ids_Bt = keys
    of_queries = functools.partial(_queries, is_earlier)
    of_keys = functools.partial(_keys, is_earlier)
    dq_2BcNH, dk_2BcKH, dv_2BcKH = ring.part.gradient(
        of_queries(q_BtNH),
        of_keys(k_BtKH),
        of_keys(v_BtKH),
        out_BTNH=of_queries(out),
        lse_BTN=of_queries(lse),
        d_out_BTNH=of_queries(d_out_BtNH),
        is_causal=False,
        q_ids_BT=None if ids_Bt is None else of_queries(ids_Bt),
        kv_ids_BS=None if kv_ids_Bt is None else of_keys(kv_ids_Bt),
    )
    dq_0, dq_1 = jnp.split(dq_2BcNH.astype(lse.dtype), 2)
    early = jnp.where(is_earlier, dq_0, 0.0)
    dq_BtNH = jnp.concatenate([early, dq_1 + (dq_0 - early)], axis=1)
    d_kv = []
    for d_2BcKH in (dk_2BcKH, dv_2BcKH):
        d_0, d_1 = jnp.split(d_2BcKH.astype(lse.dtype), 2)
        lo = jnp.where(is_earlier, d_0, 0.0)
        d_kv.append(jnp.concatenate([d_1 + lo, d_0 - lo], axis=1))
    return dq_BtNH, *d_kv


def _is_earlier(ring: Ring, step: int) -> jax.Array:
    """Whether the keys of a step come from a device before this one, not from round the corner."""
    return jax.lax.axis_index(ring.axis) >= step


def _queries(is_earlier: jax.Array, x_Bt: jax.Array) -> jax.Array:
    """The query chunks of a step's two blocks, [2B, c, ...]: a or b, then b."""
    early, late = jnp.split(x_Bt, 2, axis=1)
    return jnp.concatenate([jnp.where(is_earlier, early, late), late])


def _keys(is_earlier: jax.Array, x_Bt: jax.Array) -> jax.Array:
    """The key chunks of a step's two blocks, [2B, c, ...]: lo or hi, then lo."""
    lo, hi = jnp.split(x_Bt, 2, axis=1)
    return jnp.concatenate([jnp.where(is_earlier, lo, hi), lo])


def _sum(dtype, total, part):
    """``total + part`` in the dtype, None counting as nothing."""
    part = jax.tree.map(lambda x: x.astype(dtype), part)
    return part if total is None else jax.tree.map(jnp.add, total, part)
