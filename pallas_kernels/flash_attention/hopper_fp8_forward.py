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

from .hopper_config import Fp8Config
from .hopper_fp8_layout import as_operand
from .hopper_fp8_product import StagedSum, Sum
from .hopper_geometry import (
    Geometry,
    TileRange,
    heads_per_wave,
    key_tiles,
    swizzle_bytes,
    tiled,
)
from .hopper_tile import exp2_tile, mask_tile, max_strips, sum_strips
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
        tile_scales: fp32 [B, K, J, 3]: of a key block, the factor of its scores, log2 of its
            values' scale over the head's largest one, and that ratio's inverse.
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
    kernel = _Forward(g=g, spec=spec, c=config, dtype=dtype, interpretable=interpretable)
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
class _Forward:
    """The kernel of one call; methods are its phases, written once per trace."""

    g: Geometry
    spec: AttentionSpec
    c: Fp8Config
    dtype: jnp.dtype
    interpretable: bool

    @property
    def num_q_tiles(self) -> int:
        return -(-self.g.T // self.c.block_q)

    @property
    def ragged(self) -> bool:
        """Whether the last key tile is partly empty."""
        return self.g.S % self.c.block_kv != 0

    @property
    def masked(self) -> bool:
        """Whether any tile can need a mask."""
        return self.spec.left is not None or self.spec.right is not None or self.ragged

    def scratch(self) -> dict:
        g, c = self.g, self.c
        ring = functools.partial(plgpu.Barrier, num_barriers=c.num_stages)
        by_head = tiled(swizzle_bytes(g.H, itemsize=1), itemsize=1)
        by_keys = tiled(swizzle_bytes(c.block_kv, itemsize=1), itemsize=1)
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
            "lse": plgpu.SMEM((wgs, 64), jnp.float32),
            "pin": plgpu.SMEM((wgs, 64, 8), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2 * wgs),
            "k_full": ring(),
            "v_full": ring(),
            "k_empty": ring(num_arrivals=wgs),
            "v_empty": ring(num_arrivals=wgs),
            "turn": plgpu.Barrier(num_barriers=wgs),
        }
        if self.interpretable:
            buffers["p"] = plgpu.SMEM((wgs, 64, c.block_kv), E4M3, transforms=by_keys)
        return buffers

    def run(self, gmem, smem) -> None:
        """One block: its tile's coordinates, then a role for each warpgroup."""
        g, c = self.g, self.c
        wg, tile = lax.axis_index("wg"), lax.axis_index("tile")
        # Longest first (the last queries, under a causal mask), inside a wave of heads.
        wave = heads_per_wave(g.B * g.N, g.group, g.S * (g.H + g.Hv))
        in_wave = lax.rem(tile, wave * self.num_q_tiles)
        head = lax.div(tile, wave * self.num_q_tiles) * wave + lax.rem(in_wave, wave)
        q_tile = self.num_q_tiles - 1 - lax.div(in_wave, wave)
        b, n = lax.div(head, g.N), lax.rem(head, g.N)
        q0 = q_tile * c.block_q
        keys = key_tiles(self.spec, g, q0, c.block_q, c.block_kv).ordered(at_least_one=True)

        @pl.when(wg < c.num_warpgroups)
        def _():
            plgpu.set_max_registers(240 if c.num_warpgroups == 2 else 160, action="increase")
            self.compute(gmem, smem, b, n, q0, keys)

        @pl.when(wg == c.num_warpgroups)
        def _():
            plgpu.set_max_registers(24 if c.num_warpgroups == 2 else 32, action="decrease")
            self.load(gmem, smem, b, n, q0, keys)

    def load(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """Queries once, then keys and values into the ring, as compute warpgroups empty it."""
        g, c = self.g, self.c
        kv_head = lax.div(n, g.group)
        for w in range(c.num_warpgroups):
            rows = pl.ds(q0 + 64 * w, 64)
            plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, n], smem.q.at[w], smem.q_full)
            plgpu.copy_gmem_to_smem(gmem.q_scale.at[b, n, rows], smem.q_scale.at[w], smem.q_full)

        def step(i, _):
            slot = lax.rem(i, c.num_stages)
            cols = pl.ds((keys.hi - 1 - i) * c.block_kv, c.block_kv)
            plgpu.barrier_wait(smem.k_empty.at[slot])
            plgpu.copy_gmem_to_smem(
                gmem.k.at[b, cols, kv_head], smem.k.at[slot], smem.k_full.at[slot]
            )
            plgpu.barrier_wait(smem.v_empty.at[slot])
            plgpu.copy_gmem_to_smem(
                gmem.v.at[b, kv_head, :, cols], smem.v.at[slot], smem.v_full.at[slot]
            )

        lax.fori_loop(0, keys.hi - keys.lo, step, None)
        for slot in range(c.num_stages):
            plgpu.barrier_wait(smem.k_empty.at[slot])
            plgpu.barrier_wait(smem.v_empty.at[slot])

    def compute(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """64 queries of a warpgroup: attention over all key tiles, then out and logsumexp."""
        g, c = self.g, self.c
        wg = lax.axis_index("wg")
        row0 = q0 + 64 * wg
        for slot in range(c.num_stages):
            plgpu.barrier_arrive(smem.k_empty.at[slot])
            plgpu.barrier_arrive(smem.v_empty.at[slot])
        if c.ping_pong:
            pl.when(wg == c.num_warpgroups - 1)(lambda: plgpu.barrier_arrive(smem.turn.at[0]))
        plgpu.barrier_wait(smem.q_full)
        scales = gmem.scales.at[b, lax.div(n, g.group)]
        attend = functools.partial(self.attend, smem, scales, row0, keys)
        if self.interpretable:
            o, peak, total = attend(StagedSum(smem, g.Hv))
        else:
            o, peak, total = pl.run_scoped(
                lambda acc: attend(Sum(smem, acc)),
                plgpu.ACC((64, g.Hv), jnp.float32),
            )
        if c.ping_pong:
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(smem.turn.at[0]))

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

    def attend(self, smem, scales, row0, keys: TileRange, product):
        """The loop over key tiles: unnormalized output, row maxima and row sums (of 8 columns)."""
        c = self.c
        wg = lax.axis_index("wg")
        peak = plgpu.layout_cast(jnp.full((64,), NO_MAXIMUM, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.full((64, 8), 0.0, jnp.float32), WGMMA)
        q_scale = plgpu.load(smem.q_scale.at[wg], layout=ROW)

        def scores(i, between, then, masked: bool, peak, total):
            """Issues QK and what ``between`` issues; the softmax; ``then`` must follow it."""
            slot = lax.rem(i, c.num_stages)
            tile = keys.hi - 1 - i
            factors = self.factors(scales, tile)
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
                    s = self.mask(s, row0, tile * c.block_kv)
                plgpu.barrier_arrive(smem.k_empty.at[slot])
                p, *rest = self.softmax(s, peak, total, q_scale, factors, masked)
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
        first, count = jnp.int32(1), keys.hi - keys.lo
        walk = functools.partial(self.walk, product)
        masked_step = functools.partial(step, masked=True)
        full_step = functools.partial(step, masked=False)
        if self.masked:
            after_right = jnp.maximum(keys.hi - keys.full_hi, 1)
            after_full = jnp.maximum(keys.hi - keys.full_lo, 1)
            carry = walk(first, after_right, masked_step, carry)
            carry = walk(after_right, after_full, full_step, carry)
            if self.spec.left is not None:
                carry = walk(after_full, count, masked_step, carry)
        else:
            carry = walk(first, count, full_step, carry)
        p, peak, total, o = carry
        slot = lax.rem(count - 1, c.num_stages)
        plgpu.barrier_wait(smem.v_full.at[slot])
        return product.last(o, p, slot), peak, total

    def walk(self, product, first, last, step, carry):
        """The steps first .. last, with the sum promoted after every few."""
        every = self.c.promote_every
        if self.interpretable or not every:
            return lax.fori_loop(first, last, step, carry)

        def some(j, carry):
            start = first + j * every
            *rest, o = lax.fori_loop(start, jnp.minimum(start + every, last), step, carry)
            return (*rest, product.promote(o))

        return lax.fori_loop(0, lax.div(last - first + (every - 1), every), some, carry)

    def factors(self, scales, tile) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """Of each key block of a tile: factor of the scores, log2 ratio of values, its inverse."""
        count = self.c.block_kv // self.c.granule
        return [tuple(scales[tile * count + j, i] for i in range(3)) for j in range(count)]

    def softmax(self, s, peak, total, q_scale, factors, masked: bool):
        """Probabilities relative to the running maximum, and what the maximum's growth costs."""
        blocks = [
            lax.slice(s, (0, j * self.c.granule), (64, (j + 1) * self.c.granule))
            for j in range(len(factors))
        ]
        units = [q_scale * key_factor for key_factor, *_ in factors]
        top = peak
        for block, unit in zip(blocks, units, strict=True):
            # By strips first: a row's maximum is otherwise one chain of dependent instructions.
            top = jnp.maximum(top, max_strips(block).max(axis=1) * unit)
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

    def mask(self, s, row0, col0):
        """-inf where the query of a row does not see the key of a column."""
        aligned = row0 + self.g.diagonal - col0
        left, right = self.spec.left, self.spec.right
        return mask_tile(
            s,
            fill=-jnp.inf,
            diag_max=None if right is None else aligned + right,
            diag_min=None if left is None else aligned - left,
            num_cols=self.g.S - col0 if self.ragged else None,
        )
