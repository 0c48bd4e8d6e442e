"""FP8 attention forward for Hopper: both products on e4m3, softmax and sums in fp32.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value, J blocks of ``Fp8Config.granule`` keys.

The block and its loops are those of ``forward_block``. What differs: 8-bit matmuls take both
operands with the summed dim contiguous, so values come transposed, [Hv, S]; and the probabilities
go from the accumulator's registers into the next matmul's without an exchange between threads,
because ``fp8_registers`` numbers the keys of the values as the registers happen to lie.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.e4m3 import E4M3
from pallas_kernels.flash_attention.fp8_operands import KEYS_PER_SCALE, Fp8Operands, natural
from pallas_kernels.flash_attention.spec import AttentionSpec
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import (
    LOG2E,
    STRIP,
    max_strips,
    row_layout,
    sum_strips,
    swizzle_bytes,
    tiled,
)

from .config import Fp8Config, exceeds_shared_memory, fp8_config, refuse, unsupported_sizes
from .forward_block import ForwardBlock
from .fp8_registers import as_operand
from .tiles import Geometry, pad_rows
from .value_sum import Fp8ValueSum

WIDTHS = ("64/64", "128/128")
LEAST_RATIO = 2.0**-60
"""Values of a block this much smaller than the head's largest vanish beside them in any case; a
smaller ratio would take their probabilities out of fp32's range."""
# P is stored as 2**P_SHIFT P: e4m3 keeps 3 bits down to 2**-6 and nothing below 2**-10. A row's
# reference maximum may lag by 2**RESCALE_ABOVE, so that no entry exceeds 2**8; e4m3 ends at 448.
P_SHIFT = 5.0
RESCALE_ABOVE = 3.0
# The copy engine writes at multiples of 128 bytes.
SCALES_PER_TILE = 32

_refuse = functools.partial(refuse, kernels="Hopper FP8 attention")


def unsupported_fp8(spec: AttentionSpec, operands: Fp8Operands) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    widths = f"{operands.q.shape[3]}/{operands.v_t.shape[2]}"
    if widths not in WIDTHS:
        return f"head widths {widths} of query and value are none of {', '.join(WIDTHS)}"
    if spec.logit_soft_cap is not None:
        return "a logit soft cap is not implemented in this kernel"
    return unsupported_sizes(spec, operands.q.shape[1], operands.k.shape[1])


def forward_fp8(
    operands: Fp8Operands,
    *,
    spec: AttentionSpec,
    dtype: jnp.dtype,
    config: Fp8Config | None = None,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, V] in ``dtype`` and logsumexp float32 [B, T, N].

    Raises:
        UnsupportedError: ``unsupported_fp8`` has a reason, or the tiles exceed shared memory.
    """
    (B, T, N, H), (S, K), V = operands.q.shape, operands.k.shape[1:3], operands.v_t.shape[2]
    _refuse(unsupported_fp8(spec, operands))
    config = config or fp8_config(H, V)
    if config.block_kv % config.granule:
        _refuse(f"block_kv={config.block_kv} is no multiple of {config.granule}")
    _refuse(exceeds_shared_memory(config, H, V))
    # What a row's scores are multiplied with.
    q_scale = jnp.pad(
        operands.q_scale.swapaxes(1, 2) * (spec.scale * LOG2E),
        ((0, 0), (0, 0), (0, -T % config.block_q)),
        constant_values=1.0,  # 0 times a masked score would be NaN
    )
    tile_scales, v_scale = _value_scales(operands, config)
    unused = SCALES_PER_TILE - tile_scales.shape[3]
    kernel = _Fp8Forward(
        g=Geometry(B=B, T=T, S=S, N=N, K=K, H=H, Hv=V), spec=spec, c=config, dtype=dtype,
        q_tile=config.block_q, kv_tile=config.block_kv, segmented=False,
        interpretable=interpretable,
    )  # fmt: skip
    arrays = {
        "q": pad_rows(operands.q),
        "k": pad_rows(operands.k),
        "v": natural(operands.v_t) if interpretable else operands.v_t,
        "q_scale": q_scale,
        "scales": jnp.pad(tile_scales, ((0, 0),) * 3 + ((0, unused),)),
        "v_scale": v_scale[:, 0],
    }
    return kernel.attend_all(arrays, num_queries=arrays["q"].shape[1])


def _value_scales(operands: Fp8Operands, config: Fp8Config) -> tuple[jax.Array, jax.Array]:
    """Scales of keys and values as the kernel reads them.

    Returns:
        fp32 [B, K, key tiles, 4 numbers for each of a tile's key blocks]: the factor of its scores,
        log2 of its values' scale over the head's largest one, that ratio's inverse, and nothing;
        and that largest scale, fp32 [B, 1, K].
    """
    largest = operands.v_scale.max(axis=1, keepdims=True)
    ratio = jnp.maximum(operands.v_scale / largest, LEAST_RATIO)
    scales = [operands.k_scale, jnp.log2(ratio), 1.0 / ratio, jnp.zeros_like(ratio)]
    scales = jnp.stack(scales, axis=-1).swapaxes(1, 2)
    scales = jnp.repeat(scales, KEYS_PER_SCALE // config.granule, axis=2)
    blocks = config.block_kv // config.granule
    last = ((0, 0), (0, 0), (0, -scales.shape[2] % blocks), (0, 0))
    scales = jnp.pad(scales, last, mode="edge")
    return scales.reshape(*scales.shape[:2], -1, 4 * blocks), largest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Fp8Forward(ForwardBlock):
    """The kernel of one call."""

    name: ClassVar[str] = "attention_forward_fp8"

    OPERAND_BYTES = 1
    TRANSPOSED_VALUES = True

    c: Fp8Config

    def scratch(self) -> dict:
        g, c = self.g, self.c
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
        } | self.rows_and_barriers(copies=2)
        if self.interpretable:
            buffers["p"] = plgpu.SMEM((wgs, 64, c.block_kv), E4M3, transforms=by_keys)
        return buffers

    def copy_queries(self, gmem, smem, b, n, row0, w) -> None:
        """Starts the copies for 64 queries of warpgroup ``w``, which arrive at ``q_full``."""
        rows = pl.ds(row0, 64)
        plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, n], smem.q.at[w], smem.q_full.at[w])
        plgpu.copy_gmem_to_smem(gmem.q_scale.at[b, n, rows], smem.q_scale.at[w], smem.q_full.at[w])

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

    def queries(self, smem, wg):
        """A warpgroup's queries."""
        return smem.q.at[wg]

    def load_rows(self, smem, wg):
        """The queries' scales."""
        return plgpu.load(smem.q_scale.at[wg], layout=row_layout())

    def as_operand(self, p):
        """Probabilities as the left operand of the value product."""
        return as_operand(p, natural=self.interpretable)

    def value_sum(self, smem, acc) -> Fp8ValueSum:
        """The running sum in an accumulator and in shared memory."""
        smem.sum = smem.sum_out[0]
        return Fp8ValueSum(smem, acc, self.c.promote_every)

    def out_buffer(self, smem, wg):
        """The place of the warpgroup's sum."""
        return smem.sum_out[1].at[wg, 0]

    def normalized(self, gmem, b, n, row0, peak, total):
        """The factor of the output's rows, and their maxima and sums."""
        del row0
        factor = jnp.where(total == 0.0, 0.0, gmem.v_scale[b, lax.div(n, self.g.group)] / total)
        return factor, peak, total

    def log2_total(self, peak, total):
        """As in bf16, of probabilities that are stored 2**P_SHIFT times as large."""
        return ForwardBlock.log2_total(self, peak - P_SHIFT, total)

    def softmax(self, smem, i, s, peak, total, of_rows):
        """Probabilities relative to the running maximum, and what the maximum's growth costs."""
        scales = smem.scales.at[lax.rem(i, 2 * self.c.num_stages)]
        count, width = self.c.block_kv // self.c.granule, self.c.granule
        blocks = [lax.slice(s, (0, j * width), (64, (j + 1) * width)) for j in range(count)]
        factors = [tuple(scales[4 * j + i] for i in range(3)) for j in range(count)]
        units = [of_rows * key_factor for key_factor, *_ in factors]
        # By strips, then blocks: one exchange between threads and no long chain of maxima.
        reach = [
            max_strips(block) * lax.broadcast_in_dim(unit, (64, STRIP), [0])
            for block, unit in zip(blocks, units, strict=True)
        ]
        top = jnp.maximum(peak, functools.reduce(jnp.maximum, reach).max(axis=1))
        top = jnp.where(top - peak > RESCALE_ABOVE, top, peak)
        alpha = jnp.exp2(peak - top)
        total = total * lax.broadcast_in_dim(alpha, total.shape, [0])
        parts = []
        for block, unit, (_, log2_ratio, inverse) in zip(blocks, units, factors, strict=True):
            x = block * lax.broadcast_in_dim(unit, block.shape, [0])
            shift = top - (log2_ratio + P_SHIFT)
            x -= lax.broadcast_in_dim(shift, block.shape, [0])
            part = jnp.exp2(x)
            total += sum_strips(part) * inverse
            parts.append(part)
        return jnp.concatenate(parts, axis=1), top, total, alpha
