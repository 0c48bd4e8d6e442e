"""Flash attention forward for Hopper: one warpgroup loads, two or three compute.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value. The block and its loops are those of ``forward_block``.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E, row_layout, sum_strips, swizzle_bytes, tiled

from .config import (
    FORWARD_WIDTH,
    ForwardConfig,
    exceeds_shared_memory,
    forward_config,
    refuse,
    short_endings,
    unsupported,
)
from .forward_block import ForwardBlock
from .tiles import geometry_of, pad_rows, pad_width
from .token_ids import token_ids
from .value_sum import ValueSum

# A row's reference maximum may lag by 2**8: its probabilities stay far from overflow in fp16.
RESCALE_ABOVE = 8.0


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    *,
    spec: AttentionSpec,
    config: ForwardConfig | None = None,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, T, N, H] over k [B, S, K, H] and v [B, S, K, Hv].

    Args:
        q, k, v: fp16 or bf16.
        masks: the array part of the masks; no bias.
        spec: the static part.
        config: tiles; the table's where None.
        interpretable: avoids what the interpreter lacks: accumulators that outlive a tile, matmul
            operands in registers and inline code.

    Returns:
        out [B, T, N, Hv] in q's dtype and logsumexp float32 [B, T, N].

    Raises:
        UnsupportedError: ``unsupported`` has a reason, or the tiles exceed shared memory.
    """
    refuse(unsupported(spec, masks, q, k, v))
    Hv = v.shape[3]
    q, k, v = (pad_width(x, FORWARD_WIDTH) for x in (q, k, v))
    config = config or forward_config(
        q.shape[3], v.shape[3], short_endings(spec, masks, q.shape[1], k.shape[1])
    )
    refuse(exceeds_shared_memory(config, q.shape[3], v.shape[3]))
    g = geometry_of(q, v)
    q, k, v = (pad_rows(x) for x in (q, k, v))
    ids = token_ids(masks, g, q_tile=config.block_q, kv_tile=config.block_kv)
    operands = {"q": q, "k": k, "v": v, **ids}
    if masks.sinks is not None:
        operands["sinks"] = masks.sinks.astype(jnp.float32) * LOG2E
    kernel = ForwardKernel(
        g=g, spec=spec, c=config, dtype=q.dtype, q_tile=config.block_q, kv_tile=config.block_kv,
        segmented=bool(ids), sinks=masks.sinks is not None, interpretable=interpretable,
    )  # fmt: skip
    out, lse = kernel.attend_all(operands, padded_queries=q.shape[1])
    return out[..., :Hv], lse


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardKernel(ForwardBlock):
    """The kernel of one call."""

    name: ClassVar[str] = "attention_forward"

    OPERAND_BYTES = 2
    TRANSPOSED_VALUES = False

    c: ForwardConfig
    sinks: bool

    def scratch(self) -> dict:
        """Shared memory and barriers of a block, by name."""
        g, c = self.g, self.c
        tile = tiled(swizzle_bytes(g.H, g.Hv, c.block_kv))
        buffers = {
            # The output takes the queries' space at the end, each warpgroup its own: rows are added
            # to the narrower of the two so that warpgroups are equally far apart in both.
            "q_out": plgpu.RefUnion(
                *(
                    plgpu.SMEM(
                        (c.num_warpgroups, 64 * max(g.H, g.Hv) // width, width),
                        self.dtype,
                        transforms=tile,
                    )
                    for width in (g.H, g.Hv)
                )
            ),
            "k": plgpu.SMEM((c.num_stages, c.block_kv, g.H), self.dtype, transforms=tile),
            "v": plgpu.SMEM((c.num_stages, c.block_kv, g.Hv), self.dtype, transforms=tile),
        } | self.rows_and_barriers(copies=2 if self.segmented else 1)
        if self.segmented:
            buffers["q_ids"] = plgpu.SMEM((c.num_warpgroups, 64), jnp.int32)
            buffers["kv_ids"] = plgpu.SMEM((c.num_stages, c.block_kv), jnp.int32)
        if self.interpretable:
            shape = (c.num_warpgroups, 64, c.block_kv)
            buffers["p"] = plgpu.SMEM(shape, self.dtype, transforms=tile)
        return buffers

    def copy_queries(self, gmem, smem, b, n, row0, w) -> None:
        """Starts the copies for 64 queries of warpgroup ``w``, which arrive at ``q_full``."""
        rows = pl.ds(row0, 64)
        q_smem = smem.q_out[0].at[w, pl.ds(0, 64)]
        plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, n], q_smem, smem.q_full.at[w])
        if self.segmented:
            plgpu.copy_gmem_to_smem(gmem.q_ids.at[b, rows], smem.q_ids.at[w], smem.q_full.at[w])

    def copy_keys(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copies of key tile ``tile``, the i-th visited, which arrive at ``k_full``."""
        slot, rows = lax.rem(i, self.c.num_stages), pl.ds(tile * self.c.block_kv, self.c.block_kv)
        full = smem.k_full.at[slot]
        plgpu.copy_gmem_to_smem(gmem.k.at[b, rows, kv_head], smem.k.at[slot], full)
        if self.segmented:
            plgpu.copy_gmem_to_smem(gmem.kv_ids.at[b, rows], smem.kv_ids.at[slot], full)

    def copy_values(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copy of the values of a tile, which arrives at ``v_full``."""
        slot, rows = lax.rem(i, self.c.num_stages), pl.ds(tile * self.c.block_kv, self.c.block_kv)
        plgpu.copy_gmem_to_smem(gmem.v.at[b, rows, kv_head], smem.v.at[slot], smem.v_full.at[slot])

    def queries(self, smem, wg):
        """A warpgroup's queries."""
        return smem.q_out[0].at[wg, pl.ds(0, 64)]

    def load_rows(self, smem, wg):
        """The queries' ids, where tokens have some."""
        return plgpu.load(smem.q_ids.at[wg], layout=row_layout()) if self.segmented else None

    def softmax(self, smem, i, s, peak, total, of_rows):
        """Probabilities relative to the running maximum, and what the maximum's growth costs."""
        del smem, i, of_rows
        capped = self.spec.logit_soft_cap is not None
        unit = LOG2E if capped else self.spec.scale * LOG2E
        top = jnp.maximum(peak, s.max(axis=1) * unit)
        top = jnp.where(top - peak > RESCALE_ABOVE, top, peak)
        alpha = jnp.exp2(peak - top)
        p = jnp.exp2(s * unit - lax.broadcast_in_dim(top, s.shape, [0]))
        total = total * lax.broadcast_in_dim(alpha, total.shape, [0]) + sum_strips(p)
        return p, top, total, alpha

    def as_operand(self, p):
        """Probabilities as the left operand of the value product."""
        return p.astype(self.dtype)

    def value_sum(self, smem, acc) -> ValueSum:
        """The running sum in an accumulator."""
        return ValueSum(smem, acc)

    def out_buffer(self, smem, wg):
        """The place of the warpgroup's queries."""
        return smem.q_out[1].at[wg, pl.ds(0, 64)]

    def normalized(self, gmem, b, n, row0, peak, total):
        """The factor of the output's rows, and their maxima and sums, a sink's with them."""
        del b, row0
        factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
        if not self.sinks:
            return factor, peak, total
        sink = gmem.sinks[n]
        top = jnp.maximum(peak, sink)
        total = total * jnp.exp2(peak - top) + jnp.exp2(sink - top)
        shrink = jnp.exp2(peak - top)
        return jnp.where(total == 0.0, 0.0, shrink / total), top, total
