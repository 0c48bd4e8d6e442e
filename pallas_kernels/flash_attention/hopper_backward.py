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

import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_backward_block import BackwardBlock
from .hopper_backward_plan import NUM_WARPGROUPS
from .hopper_config import BACKWARD_KEYS as KEYS
from .hopper_config import BACKWARD_QUERIES as QUERIES
from .hopper_config import BackwardConfig
from .hopper_geometry import (
    geometry_of,
    pad_rows,
)
from .hopper_segments import tile_ranges, token_ids
from .hopper_statistics import row_statistics
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
    g = geometry_of(q, k, v)
    dtype, num_q_tiles = q.dtype, -(-g.T // QUERIES)
    kernel = BackwardBlock(
        g=g, spec=spec, c=config, dtype=dtype, interpretable=interpretable,
        segmented=(ids := token_ids(
            masks, B=g.B, T=g.T, S=g.S, q_tile=QUERIES, kv_tile=KEYS
        )) is not None,
    )  # fmt: skip
    lse2, delta = row_statistics(out, lse, d_out, d_lse, num_q_tiles * QUERIES)
    q, k, v, d_out = (pad_rows(x) for x in (q, k, v, d_out))
    operands: dict[str, Any] = {"q": q, "k": k, "v": v, "do": d_out, "lse": lse2, "delta": delta}
    if ids is not None:
        operands |= {"q_ids": ids[0], "kv_ids": ids[1]}
        operands["ranges"] = tile_ranges(ids[1], ids[0], KEYS, QUERIES)
    copies = (kernel.num_k_tiles,) if interpretable else ()
    operands["dq"] = jax.new_ref(jnp.zeros((*copies, *q.shape), jnp.float32))
    names = tuple(operands)

    def body(*refs):
        gmem = dict(zip((*names, "dk", "dv"), refs, strict=True))
        pl.run_scoped(
            lambda **scratch: kernel.run(
                types.SimpleNamespace(**gmem), types.SimpleNamespace(**scratch)
            ),
            **kernel.scratch(),
            collective_axes="wg",
        )

    call: Any = pl.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        mesh=plgpu.Mesh(
            grid=(kernel.num_k_tiles * g.B * g.K,),
            grid_names=("tile",),
            num_threads=NUM_WARPGROUPS + (2 if config.dq_warpgroup else 1),
            thread_name="wg",
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    dk, dv = call(*operands.values())
    dq = operands["dq"][...]
    dq = dq.sum(axis=0) if interpretable else dq
    return (dq[:, : g.T] * spec.scale).astype(dtype), dk[:, : g.S], dv[:, : g.S]
