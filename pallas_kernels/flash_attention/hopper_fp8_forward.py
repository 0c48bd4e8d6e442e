"""FP8 attention forward for Hopper: both products on e4m3, softmax and sums in fp32.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value, J blocks of ``Fp8Config.granule`` keys.

The walk over tiles, the warpgroups' roles and the order of matmuls and softmax are those of
``hopper_forward``. What differs: 8-bit matmuls take both operands with the summed dim contiguous,
so values come transposed, [Hv, S]; and the probabilities go from the accumulator's registers into
the next matmul's without an exchange between threads, because ``hopper_fp8_layout`` numbers the
keys of the values as the registers happen to lie.
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

from .fp8_operands import KEYS_PER_SCALE
from .hopper_config import Fp8Config
from .hopper_forward_block import ForwardBlock
from .hopper_fp8_layout import as_operand
from .hopper_fp8_product import StagedSum, Sum
from .hopper_geometry import (
    Geometry,
    TileRange,
    swizzle_bytes,
    tiled,
)
from .hopper_tile import STRIP, exp2_tile, max_strips, sum_strips
from .spec import AttentionSpec

LOG2E = math.log2(math.e)
E4M3 = jnp.float8_e4m3fn
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
NO_MAXIMUM = -1e30
# P is stored as 2**P_SHIFT P: e4m3 keeps 3 bits down to 2**-6 and nothing below 2**-10. A row's
# reference maximum may lag by 2**RESCALE_ABOVE, so that no entry exceeds 2**8; e4m3 ends at 448.
P_SHIFT = 5.0
RESCALE_ABOVE = 3.0
# The copy engine writes at multiples of 128 bytes.
SCALES_PER_TILE = 32


def forward(
    q: jax.Array,
    k: jax.Array,
    v_t: jax.Array,
    q_scale: jax.Array,
    tile_scales: jax.Array,
    v_scale: jax.Array,
    *,
    T: int,
    S: int,
    spec: AttentionSpec,
    config: Fp8Config,
    dtype: jnp.dtype,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of e4m3 operands.

    Args:
        q: [B, T', N, H] with T' >= T a multiple of 8.
        k: [B, S', K, H] with S' >= S a multiple of 8.
        v_t: [B, K, Hv, S''] with S'' >= S a multiple of 64, its keys in the order of
            ``hopper_fp8_layout`` (as they are, for the interpreter).
        q_scale: fp32 [B, N, whole query tiles]: what a row's scores are multiplied with.
        tile_scales: fp32 [B, K, key tiles, 32]: four numbers for each of a tile's key blocks: the
            factor of its scores, log2 of its values' scale over the head's largest one, that
            ratio's inverse, and nothing.
        v_scale: fp32 [B, K]: the largest scale of a head's values.
        T, S: lengths.
        spec: positional masks.
        config: tiles.
        dtype: of the result.
        interpretable: avoids what the interpreter lacks.

    Returns:
        out [B, T, N, Hv] and fp32 logsumexp [B, T, N].
    """
    (B, _, N, H), K, Hv = q.shape, k.shape[2], v_t.shape[2]
    g = Geometry(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv)
    kernel = _Forward(
        g=g, spec=spec, c=config, dtype=dtype, q_tile=config.block_q, kv_tile=config.block_kv,
        segmented=False, interpretable=interpretable,
    )  # fmt: skip
    operands = {"q": q, "k": k, "v": v_t, "q_scale": q_scale, "scales": tile_scales}
    operands["v_scale"] = v_scale
    names = tuple(operands)

    def body(*refs, **scratch):
        gmem = dict(zip((*names, "out", "lse"), refs, strict=True))
        total, out = scratch.pop("sum_out")
        smem = types.SimpleNamespace(**scratch, sum=total, out=out)
        kernel.run(types.SimpleNamespace(**gmem), smem)

    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, q.shape[1], N, Hv), dtype),
            jax.ShapeDtypeStruct((B, N, kernel.num_q_tiles * config.block_q), jnp.float32),
        ),
        scratch_types=kernel.scratch(),
        grid=(B * N * kernel.num_q_tiles,),
        grid_names=("tile",),
        num_threads=config.num_warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*operands.values())
    return out[:, :T], lse[:, :, :T].swapaxes(1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Forward(ForwardBlock):
    """The kernel of one call."""

    OPERAND_BYTES = 1

    c: Fp8Config

    def scratch(self) -> dict:
        g, c = self.g, self.c
        ring = functools.partial(plgpu.Barrier, num_barriers=c.num_stages)
        by_head = tiled(swizzle_bytes(g.H, itemsize=1), itemsize=1)
        # The copy engine's tiles must divide the values' keys, which come in blocks of 64.
        values = -(-g.S // KEYS_PER_SCALE) * KEYS_PER_SCALE
        by_keys = tiled(swizzle_bytes(c.block_kv, values, itemsize=1), itemsize=1)
        wgs = c.num_warpgroups
        buffers = {
            "q": plgpu.SMEM((wgs, 64, g.H), E4M3, transforms=by_head),
            "k": plgpu.SMEM((c.num_stages, c.block_kv, g.H), E4M3, transforms=by_head),
            "v": plgpu.SMEM((c.num_stages, g.Hv, c.block_kv), E4M3, transforms=by_keys),
            # The output takes the sum's place at the end, each warpgroup its own.
            "sum_out": plgpu.RefUnion(
                plgpu.SMEM((wgs, 64, g.Hv), jnp.float32, transforms=tiled(128, itemsize=4)),
                plgpu.SMEM((wgs, 2, 64, g.Hv), self.dtype, transforms=tiled(swizzle_bytes(g.Hv))),
            ),
            "q_scale": plgpu.SMEM((wgs, 64), jnp.float32),
            # Read after their key tile's slot is free: so each lives for two turns of the ring.
            "scales": plgpu.SMEM((2 * c.num_stages, SCALES_PER_TILE), jnp.float32),
            "lse": plgpu.SMEM((wgs, 64), jnp.float32),
            "pin": plgpu.SMEM((wgs, 64, 8), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2 * wgs),
            "k_full": ring(num_arrivals=2),
            "v_full": ring(),
            "k_empty": ring(num_arrivals=wgs),
            "v_empty": ring(num_arrivals=wgs),
            "turn": plgpu.Barrier(num_barriers=wgs),
        }
        if self.interpretable:
            buffers["p"] = plgpu.SMEM((wgs, 64, c.block_kv), E4M3, transforms=by_keys)
        return buffers

    def copy_queries(self, gmem, smem, b, n, row0, w) -> None:
        """Starts the copies for 64 queries of warpgroup ``w``, which arrive at ``q_full``."""
        rows = pl.ds(row0, 64)
        plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, n], smem.q.at[w], smem.q_full)
        plgpu.copy_gmem_to_smem(gmem.q_scale.at[b, n, rows], smem.q_scale.at[w], smem.q_full)

    def copy_keys(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copies of key tile ``tile``, the i-th visited, which arrive at ``k_full``."""
        c = self.c
        slot, rows = lax.rem(i, c.num_stages), pl.ds(tile * c.block_kv, c.block_kv)
        full = smem.k_full.at[slot]
        plgpu.copy_gmem_to_smem(gmem.k.at[b, rows, kv_head], smem.k.at[slot], full)
        scales = smem.scales.at[lax.rem(i, 2 * c.num_stages)]
        plgpu.copy_gmem_to_smem(gmem.scales.at[b, kv_head, tile], scales, full)

    def copy_values(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copy of the values of a tile, which arrives at ``v_full``."""
        slot, cols = lax.rem(i, self.c.num_stages), pl.ds(tile * self.c.block_kv, self.c.block_kv)
        plgpu.copy_gmem_to_smem(
            gmem.v.at[b, kv_head, :, cols], smem.v.at[slot], smem.v_full.at[slot]
        )

    def compute(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """64 queries of a warpgroup: attention over all key tiles, then out and logsumexp."""
        g = self.g
        wg = lax.axis_index("wg")
        row0 = q0 + 64 * wg

        def attend():
            if self.interpretable:
                return self.attend(smem, row0, keys, StagedSum(smem, g.Hv))
            return pl.run_scoped(
                lambda acc: self.attend(smem, row0, keys, Sum(smem, acc)),
                plgpu.ACC((64, g.Hv), jnp.float32),
            )

        o, peak, total = self.with_turns(smem, attend)
        total = total.sum(axis=1)
        factor = jnp.where(total == 0.0, 0.0, gmem.v_scale[b, lax.div(n, g.group)] / total)
        out_smem = smem.out.at[wg, 0]
        out_smem[...] = (o * lax.broadcast_in_dim(factor, o.shape, [0])).astype(self.dtype)
        lse = (peak - P_SHIFT + jnp.log2(total)) * (1 / LOG2E)
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
        q_scale = plgpu.load(smem.q_scale.at[wg], layout=ROW)

        def scores(i, between, then, masked: bool, peak, total):
            """Issues QK and what ``between`` issues; the softmax; ``then`` must follow it."""
            slot = lax.rem(i, c.num_stages)
            # Waits come before the accumulator exists: its zeros then cost no instruction.
            plgpu.barrier_wait(smem.k_full.at[slot])
            if c.ping_pong:
                plgpu.barrier_wait(smem.turn.at[wg])

            def body(s_acc, *more):
                plgpu.wgmma(s_acc, smem.q.at[wg], smem.k.at[slot].transpose((1, 0)))
                between(*more)
                if c.ping_pong:
                    plgpu.barrier_arrive(smem.turn.at[lax.rem(wg + 1, c.num_warpgroups)])
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0 if then is None else 1)
                if masked:
                    s = self.mask_positions(s, row0, (keys.hi - 1 - i) * c.block_kv)
                plgpu.barrier_arrive(smem.k_empty.at[slot])
                scales = smem.scales.at[lax.rem(i, 2 * c.num_stages)]
                p, *rest = self.softmax(s, peak, total, q_scale, scales, masked)
                if then is not None and c.overlap:
                    # A store keeps the softmax ahead of the wait for PV; the assembler moves
                    # plain arithmetic behind it.
                    smem.pin[wg] = rest[1]
                p, *rest = lax.optimization_barrier((p, *rest))
                part = () if then is None else product.collect(*more)
                return p, *rest, part

            more = () if then is None else product.accumulators
            return pl.run_scoped(body, plgpu.ACC((64, c.block_kv), jnp.float32), *more)

        def step(i, carry, masked: bool):
            p, peak, total, o = carry
            slot = lax.rem(i - 1, c.num_stages)
            plgpu.barrier_wait(smem.v_full.at[slot])
            issue = functools.partial(product.issue, p, slot)
            p, peak, total, alpha, part = scores(i, issue, product, masked, peak, total)
            o = product.rescale(o, part, slot, alpha)
            return as_operand(p, natural=self.interpretable), peak, total, o

        p, peak, total, *_ = scores(jnp.int32(0), lambda: None, None, self.masked, peak, total)
        carry = (as_operand(p, natural=self.interpretable), peak, total, product.start())
        promoted = functools.partial(self.promoted, product)
        p, peak, total, o = self.walk(keys, step, carry, promoted)
        slot = lax.rem(keys.hi - keys.lo - 1, c.num_stages)
        plgpu.barrier_wait(smem.v_full.at[slot])
        return product.last(o, p, slot), peak, total

    def promoted(self, product, first, last, step, carry):
        """The steps first .. last, with the sum promoted after every few."""
        every = self.c.promote_every
        if self.interpretable or not every:
            return lax.fori_loop(first, last, step, carry)

        def some(j, carry):
            start = first + j * every
            *rest, o = lax.fori_loop(start, jnp.minimum(start + every, last), step, carry)
            return (*rest, product.promote(o))

        return lax.fori_loop(0, lax.div(last - first + (every - 1), every), some, carry)

    def softmax(self, s, peak, total, q_scale, scales, masked: bool):
        """Probabilities relative to the running maximum, and what the maximum's growth costs."""
        count, width = self.c.block_kv // self.c.granule, self.c.granule
        blocks = [lax.slice(s, (0, j * width), (64, (j + 1) * width)) for j in range(count)]
        factors = [tuple(scales[4 * j + i] for i in range(3)) for j in range(count)]
        units = [q_scale * key_factor for key_factor, *_ in factors]
        # By strips, then blocks: one exchange between threads and no long chain of maxima.
        reach = [
            max_strips(block) * lax.broadcast_in_dim(unit, (64, STRIP), [0])
            for block, unit in zip(blocks, units, strict=True)
        ]
        top = jnp.maximum(peak, functools.reduce(jnp.maximum, reach).max(axis=1))
        top = jnp.where(top - peak > RESCALE_ABOVE, top, peak)
        alpha = jnp.exp2(peak - top)
        total = total * lax.broadcast_in_dim(alpha, total.shape, [0])
        num_polynomial = 0 if masked else self.c.num_polynomial // len(factors)
        parts = []
        for block, unit, (_, log2_ratio, inverse) in zip(blocks, units, factors, strict=True):
            x = block * lax.broadcast_in_dim(unit, block.shape, [0])
            shift = top - (log2_ratio + P_SHIFT)
            x -= lax.broadcast_in_dim(shift, block.shape, [0])
            part = exp2_tile(x, num_polynomial=num_polynomial)
            total += sum_strips(part) * inverse
            parts.append(part)
        return jnp.concatenate(parts, axis=1), top, total, alpha
