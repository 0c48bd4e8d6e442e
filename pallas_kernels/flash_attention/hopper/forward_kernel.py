"""Flash attention forward for Hopper: one warpgroup loads, two or three compute.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value. The block and its loops are those of ``forward_block``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.odd_tiles import GROUP
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
from .tiles import TileRange, geometry_of, pad_rows, pad_width
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
    odd = [length for length in (q.shape[1], k.shape[1]) if length % GROUP]
    if config.persistent and odd and not interpretable:
        refuse(f"persistent=True needs lengths that {GROUP} divides, not {odd[0]}; leave it False")
    g = geometry_of(q, v)
    if interpretable:
        q, k, v = (pad_rows(x) for x in (q, k, v))
    ids = token_ids(masks, g, q_tile=config.block_q, kv_tile=config.block_kv)
    operands = {"q": q, "k": k, "v": v, **ids}
    if masks.sinks is not None:
        operands["sinks"] = masks.sinks.astype(jnp.float32) * LOG2E
    kernel = ForwardKernel(
        g=g, spec=spec, c=config, dtype=q.dtype, q_tile=config.block_q, kv_tile=config.block_kv,
        segmented=bool(ids), sinks=masks.sinks is not None, interpretable=interpretable,
        padded=interpretable,
    )  # fmt: skip
    out, lse = kernel.attend_all(operands, num_queries=q.shape[1])
    return out[..., :Hv], lse


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardKernel(ForwardBlock):
    """The kernel of one call."""

    name: ClassVar[str] = "attention_forward"

    OPERAND_BYTES = 2
    TRANSPOSED_VALUES = False

    c: ForwardConfig
    sinks: bool

    @property
    def tiling(self) -> Any:
        """Transforms of a tile of an operand in shared memory."""
        return tiled(swizzle_bytes(self.g.H, self.g.Hv, self.c.block_kv))

    def scratch(self) -> dict:
        """Shared memory and barriers of a block, by name."""
        g, c, tile = self.g, self.c, self.tiling
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
        buffers |= self.arrivals(2 * c.num_stages + c.num_warpgroups)
        if self.segmented:
            buffers["q_ids"] = plgpu.SMEM((c.num_warpgroups, 64), jnp.int32)
            buffers["kv_ids"] = plgpu.SMEM((c.num_stages, c.block_kv), jnp.int32)
        if self.interpretable:
            shape = (c.num_warpgroups, 64, c.block_kv)
            buffers["p"] = plgpu.SMEM(shape, self.dtype, transforms=tile)
        return buffers

    def copy_queries(self, gmem, smem, b, n, row0, w) -> None:
        """Starts the copies for 64 queries of warpgroup ``w``, which arrive at ``q_full``."""
        q_smem, full = smem.q_out[0].at[w, pl.ds(0, 64)], smem.q_full.at[w]
        self.load_tile(
            smem, self.odd_queries, gmem.q, (b, row0, n), q_smem, full, self.queries_arrival + w
        )
        if self.segmented:
            plgpu.copy_gmem_to_smem(gmem.q_ids.at[b, pl.ds(row0, 64)], smem.q_ids.at[w], full)

    def copy_keys(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copies of key tile ``tile``, the i-th visited, which arrive at ``k_full``."""
        slot, row0 = lax.rem(i, self.c.num_stages), tile * self.c.block_kv
        full = smem.k_full.at[slot]
        self.load_tile(smem, self.odd_keys, gmem.k, (b, row0, kv_head), smem.k.at[slot], full, slot)
        if self.segmented:
            rows = pl.ds(row0, self.c.block_kv)
            plgpu.copy_gmem_to_smem(gmem.kv_ids.at[b, rows], smem.kv_ids.at[slot], full)

    def copy_values(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copy of the values of a tile, which arrives at ``v_full``."""
        stages = self.c.num_stages
        slot, place = lax.rem(i, stages), (b, tile * self.c.block_kv, kv_head)
        full, which = smem.v_full.at[slot], stages + slot
        self.load_tile(smem, self.odd_keys, gmem.v, place, smem.v.at[slot], full, which)

    @property
    def queries_arrival(self) -> int:
        """The barrier of odd queries of the first warpgroup, after those of keys and values."""
        return 2 * self.c.num_stages

    def wait_queries(self, smem, wg) -> None:
        """Until a warpgroup's queries are there."""
        ForwardBlock.wait_queries(self, smem, wg)
        self.wait_tile(smem, self.odd_queries, self.queries_arrival + wg, 0)

    def wait_keys(self, smem, i) -> None:
        """Until the i-th visited tile's keys are there."""
        ForwardBlock.wait_keys(self, smem, i)
        stages = self.c.num_stages
        self.wait_tile(smem, self.odd_keys, lax.rem(i, stages), lax.div(i, stages))

    def cleaner(self, smem, slot, keys: TileRange, i, *, masked: bool) -> Callable[[], None] | None:
        """Waits for odd values."""
        del keys, masked
        stages = self.c.num_stages

        def wait() -> None:
            self.wait_tile(smem, self.odd_keys, stages + slot, lax.div(i, stages))

        return wait if self.odd_keys else None

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
