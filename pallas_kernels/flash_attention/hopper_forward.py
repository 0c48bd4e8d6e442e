"""Flash attention forward for Hopper: one warpgroup loads, two or three compute.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

A block owns ``64 * num_warpgroups`` queries of one head and walks the key tiles they see from the
last to the first, so that the masked diagonal comes before the long unmasked loop. Per tile a
compute warpgroup issues two matmuls back to back, the scores of this tile and the value product of
the tile before, and works on the softmax of the first while the second runs. Warpgroups take turns
at the tensor cores. Scores are in units of log2: an exponential is a multiply-add and an ex2.
"""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_config import ForwardConfig
from .hopper_forward_block import ForwardBlock
from .hopper_geometry import (
    TileRange,
    geometry_of,
    pad_rows,
    swizzle_bytes,
    tiled,
)
from .hopper_product import Product, StagedProduct
from .hopper_segments import tile_ranges, token_ids
from .hopper_tile import exp2_tile, soft_cap, sum_strips
from .spec import AttentionMasks, AttentionSpec

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)
# Finite, so that exp2(old maximum - new maximum) of a row that has seen no key is 1 and not NaN.
NO_MAXIMUM = -1e30
# A row's reference maximum may lag by 2**8: its probabilities stay far from overflow in fp16.
RESCALE_ABOVE = 8.0


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    *,
    spec: AttentionSpec,
    config: ForwardConfig,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, T, N, H] over k [B, S, K, H] and v [B, S, K, Hv].

    Args:
        q, k, v: fp16 or bf16.
        masks: the array part of the masks; no bias.
        spec: the static part.
        config: tiles.
        interpretable: avoids what the interpreter lacks: accumulators that outlive a tile, matmul
            operands in registers and inline code.

    Returns:
        out [B, T, N, Hv] in q's dtype and logsumexp float32 [B, T, N].
    """
    g = geometry_of(q, k, v)
    q, k, v = (pad_rows(x) for x in (q, k, v))
    ids = token_ids(masks, B=g.B, T=g.T, S=g.S, q_tile=config.block_q, kv_tile=config.block_kv)
    operands = {"q": q, "k": k, "v": v}
    if ids is not None:
        operands |= {"q_ids": ids[0], "kv_ids": ids[1]}
        operands["ranges"] = tile_ranges(*ids, config.block_q, config.block_kv)
    if masks.sinks is not None:
        operands["sinks"] = masks.sinks.astype(jnp.float32) * LOG2E
    kernel = _Forward(
        g=g, spec=spec, c=config, dtype=q.dtype, q_tile=config.block_q, kv_tile=config.block_kv,
        segmented=ids is not None, sinks=masks.sinks is not None, interpretable=interpretable,
    )  # fmt: skip
    names = tuple(operands)

    def body(*refs, **scratch):
        gmem = dict(zip((*names, "out", "lse"), refs, strict=True))
        q_smem, out_smem = scratch.pop("qo")
        smem = types.SimpleNamespace(**scratch, q=q_smem, out=out_smem)
        kernel.run(types.SimpleNamespace(**gmem), smem)

    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*q.shape[:3], g.Hv), q.dtype),
            jax.ShapeDtypeStruct((g.B, g.N, kernel.num_q_tiles * config.block_q), jnp.float32),
        ),
        scratch_types=kernel.scratch(),
        grid=(g.B * g.N * kernel.num_q_tiles,),
        grid_names=("tile",),
        num_threads=config.num_warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*operands.values())
    return out[:, : g.T], lse[:, :, : g.T].swapaxes(1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Forward(ForwardBlock):
    """The kernel of one call."""

    OPERAND_BYTES = 2

    c: ForwardConfig
    sinks: bool

    def scratch(self) -> dict:
        g, c = self.g, self.c
        tile = tiled(swizzle_bytes(g.H, g.Hv, c.block_kv))
        ring = functools.partial(plgpu.Barrier, num_barriers=c.num_stages)
        with_ids = 2 if self.segmented else 1
        buffers = {
            # The output takes the queries' space at the end, each warpgroup its own: rows are added
            # to the narrower of the two so that warpgroups are equally far apart in both.
            "qo": plgpu.RefUnion(
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
            "lse": plgpu.SMEM((c.num_warpgroups, 64), jnp.float32),
            "pin": plgpu.SMEM((c.num_warpgroups, 64, 8), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=c.num_warpgroups * with_ids),
            "k_full": ring(num_arrivals=with_ids),
            "v_full": ring(),
            "k_empty": ring(num_arrivals=c.num_warpgroups),
            "v_empty": ring(num_arrivals=c.num_warpgroups),
            "turn": plgpu.Barrier(num_barriers=c.num_warpgroups),
        }
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
        q_smem = smem.q.at[w, pl.ds(0, 64)]
        plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, n], q_smem, smem.q_full)
        if self.segmented:
            plgpu.copy_gmem_to_smem(gmem.q_ids.at[b, rows], smem.q_ids.at[w], smem.q_full)

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

    def compute(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """64 queries of a warpgroup: attention over all key tiles, then out and logsumexp."""
        g = self.g
        wg = lax.axis_index("wg")
        row0 = q0 + 64 * wg

        def attend():
            if self.interpretable:
                return self.attend(smem, row0, keys, StagedProduct(smem, g.Hv))
            return pl.run_scoped(
                lambda acc: self.attend(smem, row0, keys, Product(smem, acc)),
                plgpu.ACC((64, g.Hv), jnp.float32),
            )

        o, peak, total = self.with_turns(smem, attend)
        total = total.sum(axis=1)
        factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
        if self.sinks:
            sink = gmem.sinks[n]
            top = jnp.maximum(peak, sink)
            total, shrink = (
                total * jnp.exp2(peak - top) + jnp.exp2(sink - top),
                jnp.exp2(peak - top),
            )
            peak, factor = top, jnp.where(total == 0.0, 0.0, shrink / total)
        out_smem = smem.out.at[wg, pl.ds(0, 64)]
        out_smem[...] = (o * lax.broadcast_in_dim(factor, o.shape, [0])).astype(self.dtype)
        lse = (peak + jnp.log2(total)) * (1 / LOG2E)
        smem.lse[wg] = jnp.where(total == 0.0, -jnp.inf, lse)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, gmem.out.at[b, pl.ds(row0, 64), n])
        plgpu.copy_smem_to_gmem(smem.lse.at[wg], gmem.lse.at[b, n, pl.ds(row0, 64)])
        plgpu.wait_smem_to_gmem(0)

    def attend(self, smem, row0, keys: TileRange, product):
        """The loop over key tiles: unnormalized output, row maxima and row sums (of 8 columns)."""
        c = self.c
        wg = lax.axis_index("wg")
        peak = plgpu.layout_cast(jnp.full((64,), NO_MAXIMUM, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.full((64, 8), 0.0, jnp.float32), WGMMA)
        q_ids = plgpu.load(smem.q_ids.at[wg], layout=ROW) if self.segmented else None

        def scores(i, between, then, masked: bool, peak, total):
            """Issues QK and what ``between`` issues; the softmax; ``then`` must follow it."""
            slot = lax.rem(i, c.num_stages)
            # Waits come before the accumulator exists: its zeros then cost no instruction.
            plgpu.barrier_wait(smem.k_full.at[slot])
            if c.ping_pong:
                plgpu.barrier_wait(smem.turn.at[wg])

            def body(s_acc):
                q_smem = smem.q.at[wg, pl.ds(0, 64)]
                plgpu.wgmma(s_acc, q_smem, smem.k.at[slot].transpose((1, 0)))
                carried = between()
                if c.ping_pong:
                    plgpu.barrier_arrive(smem.turn.at[lax.rem(wg + 1, c.num_warpgroups)])
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0 if then is None else 1)
                if self.spec.logit_soft_cap is not None:
                    s = soft_cap(s, self.spec.scale, self.spec.logit_soft_cap)
                if masked:
                    s = self.mask(smem, slot, s, row0, (keys.hi - 1 - i) * c.block_kv, q_ids)
                plgpu.barrier_arrive(smem.k_empty.at[slot])
                p, *rest = self.softmax(s, peak, total, masked)
                if then is not None and c.overlap:
                    # A store is what keeps the softmax ahead of the wait for PV: the assembler
                    # moves plain arithmetic behind it, and then nothing runs under PV.
                    smem.pin[wg] = rest[1]
                return lax.optimization_barrier((p, *rest, carried))

            return pl.run_scoped(body, plgpu.ACC((64, c.block_kv), jnp.float32))

        def step(i, carry, masked: bool):
            p, peak, total, o = carry
            slot = lax.rem(i - 1, c.num_stages)
            issue = functools.partial(product.issue, o, p, slot)
            p, peak, total, alpha, o = scores(i, issue, product.rescale, masked, peak, total)
            o = product.rescale(o, slot, alpha, lazy=c.lazy_rescale)
            return p.astype(self.dtype), peak, total, o

        p, peak, total, _, o = scores(jnp.int32(0), product.start, None, self.masked, peak, total)
        carry = (p.astype(self.dtype), peak, total, o)
        p, peak, total, o = self.walk(keys, step, carry)
        slot = lax.rem(keys.hi - keys.lo - 1, c.num_stages)
        o = product.finish(product.issue(o, p, slot), slot)
        return o, peak, total

    def softmax(self, s, peak, total, masked: bool):
        """Probabilities relative to the running maximum, and what the maximum's growth costs."""
        capped = self.spec.logit_soft_cap is not None
        unit = LOG2E if capped else self.spec.scale * LOG2E
        top = jnp.maximum(peak, s.max(axis=1) * unit)
        if self.c.lazy_rescale:
            top = jnp.where(top - peak > RESCALE_ABOVE, top, peak)
        alpha = jnp.exp2(peak - top)
        x = s * unit - lax.broadcast_in_dim(top, s.shape, [0])
        p = exp2_tile(x, num_polynomial=0 if masked else self.c.num_polynomial)
        total = total * lax.broadcast_in_dim(alpha, total.shape, [0]) + sum_strips(p)
        return p, top, total, alpha

    def mask(self, smem, slot, s, row0, col0, q_ids):
        """-inf where the query of a row does not see the key of a column."""
        if self.segmented:
            kv_ids = plgpu.load(smem.kv_ids.at[slot], layout=COL)
            q_ids = lax.broadcast_in_dim(q_ids, s.shape, [0])
            s = jnp.where(q_ids == lax.broadcast_in_dim(kv_ids, s.shape, [1]), s, -jnp.inf)
        return self.mask_positions(s, row0, col0)
