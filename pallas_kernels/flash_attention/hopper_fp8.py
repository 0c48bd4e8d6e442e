"""FP8 attention on Hopper GPUs: what the kernel takes, and what it is given.

Dims: B batch, T query, S key, N query heads, K kv heads, H query and key width, V value width, J
blocks of 64 keys.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import UnsupportedError

from . import hopper_fp8_forward
from .fp8_operands import KEYS_PER_SCALE, Fp8Operands, natural
from .hopper_config import SMEM_LIMIT_BYTES, Fp8Config, fp8_config
from .hopper_geometry import pad_rows
from .spec import AttentionSpec

LOG2E = math.log2(math.e)
WIDTHS = ("64/64", "128/128")
LEAST_RATIO = 2.0**-60
"""Values of a block this much smaller than the head's largest vanish beside them in any case; a
smaller ratio would take their probabilities out of fp32's range."""


def unsupported(spec: AttentionSpec, operands: Fp8Operands) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    widths = f"{operands.q.shape[3]}/{operands.v_t.shape[2]}"
    if widths not in WIDTHS:
        return f"head widths {widths} of query and value are none of {', '.join(WIDTHS)}"
    if spec.scale <= 0:
        return f"scale={spec.scale} is not positive, so the largest score is not the largest logit"
    if spec.logit_soft_cap is not None:
        return "a logit soft cap is not implemented in this kernel"
    if min(operands.q.shape[1], operands.k.shape[1]) == 0:
        return f"lengths T={operands.q.shape[1]} S={operands.k.shape[1]} leave nothing to load"
    return None


def forward(
    operands: Fp8Operands,
    *,
    spec: AttentionSpec,
    dtype: jnp.dtype,
    config: Fp8Config | None = None,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, V] in ``dtype`` and logsumexp float32 [B, T, N].

    Raises:
        UnsupportedError: ``unsupported`` has a reason, or the tiles exceed shared memory.
    """
    reason = unsupported(spec, operands)
    if reason is not None:
        raise UnsupportedError(f"Hopper FP8 attention: {reason}")
    (T, _, H), S, V = operands.q.shape[1:], operands.k.shape[1], operands.v_t.shape[2]
    config = config or fp8_config(H, V)
    if config.block_kv % config.granule:
        raise UnsupportedError(
            f"Hopper FP8 attention: block_kv={config.block_kv} is no multiple of {config.granule}"
        )
    used = config.smem_bytes(H, V)
    if used > SMEM_LIMIT_BYTES:
        raise UnsupportedError(
            f"Hopper FP8 attention: {config} takes {used} bytes of shared memory, and a block has "
            f"{SMEM_LIMIT_BYTES}"
        )
    q_scale = jnp.pad(
        operands.q_scale.swapaxes(1, 2) * (spec.scale * LOG2E),
        ((0, 0), (0, 0), (0, -T % config.block_q)),
        constant_values=1.0,  # 0 times a masked score would be NaN
    )
    largest = operands.v_scale.max(axis=1, keepdims=True)
    ratio = jnp.maximum(operands.v_scale / largest, LEAST_RATIO)
    scales = [operands.k_scale, jnp.log2(ratio), 1.0 / ratio, jnp.zeros_like(ratio)]
    scales = jnp.stack(scales, axis=-1).swapaxes(1, 2)
    scales = jnp.repeat(scales, KEYS_PER_SCALE // config.granule, axis=2)
    blocks = config.block_kv // config.granule
    last = ((0, 0), (0, 0), (0, -scales.shape[2] % blocks), (0, 0))
    scales = jnp.pad(scales, last, mode="edge")
    tile_scales = scales.reshape(*scales.shape[:2], -1, 4 * blocks)
    unused = hopper_fp8_forward.SCALES_PER_TILE - 4 * blocks
    return hopper_fp8_forward.forward(
        pad_rows(operands.q),
        pad_rows(operands.k),
        natural(operands.v_t) if interpretable else operands.v_t,
        q_scale,
        jnp.pad(tile_scales, ((0, 0),) * 3 + ((0, unused),)),
        largest[:, 0],
        T=T,
        S=S,
        spec=spec,
        config=config,
        dtype=dtype,
        interpretable=interpretable,
    )
