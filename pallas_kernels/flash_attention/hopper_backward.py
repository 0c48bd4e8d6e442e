"""Fused flash attention backward for Hopper: per key tile one loop over queries, five matmuls.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

A block owns 128 keys of one key/value head, 64 a warpgroup, whose dK and dV stay in registers over
all query heads of the group. Scores are computed transposed, keys by queries, so that P and dS
leave the softmax as left operands of dV += P dO and dK += dS Q. dQ sums over key tiles and so over
blocks, and the copy engine adds it to a float32 array in global memory. Two forms of that:

- late: both warpgroups put dS in shared memory, and one tile later, when neither need wait for the
  other, each computes half the columns of that tile's dQ. While it leaves, the next scores are
  computed.
- ``dq_warpgroup``: a third warpgroup computes dQ, and the next scores run beside dO V'. Only heads
  of 64 leave it registers.
"""

import jax

from .hopper_backward_block import BackwardBlock
from .hopper_backward_launch import gradients
from .hopper_backward_operands import backward_operands
from .hopper_config import BACKWARD_KEYS as KEYS
from .hopper_config import BACKWARD_QUERIES as QUERIES
from .hopper_config import BackwardConfig
from .hopper_geometry import geometry_of
from .spec import AttentionMasks, AttentionSpec


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    *,
    spec: AttentionSpec,
    config: BackwardConfig,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, those of k and v summed over the query heads that share them.

    Args:
        q, k, v, masks, spec: as in the forward.
        out, lse: what the forward returned.
        d_out, d_lse: cotangents of both.
        config: tiles.
        interpretable: avoids what the interpreter lacks: matmul operands in registers and copies
            that add. dQ is then summed over key tiles afterwards.
    """
    operands = backward_operands(
        q, k, v, masks, out, lse, d_out, d_lse, q_tile=QUERIES, kv_tile=KEYS, by_keys=True
    )
    kernel = BackwardBlock(
        g=geometry_of(q, k, v), spec=spec, c=config, dtype=q.dtype, q_tile=QUERIES, kv_tile=KEYS,
        segmented="ranges" in operands, interpretable=interpretable,
    )  # fmt: skip
    return gradients(kernel, operands)
