"""A decode step's new heads into its cache, in one kernel on a Hopper GPU.

Dims: B batch, T position, N heads of queries, keys and values, H head width.
"""

import jax

import pallas_kernels
from jaxinfra.config.cache import SCALE
from jaxinfra.config.model import GroupedAttentionConfig, MixerConfig
from jaxinfra.config.rope import RopePairs
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.ops.few_rows import MOST_ROWS
from pallas_kernels.common import device


def append_packed_heads(
    heads_BTNH: jax.Array,
    pages: Pages,
    *,
    config: MixerConfig,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, dict[str, jax.Array]] | None:
    """``Execution.append``: of few tokens on a Hopper GPU, of heads that turn whole; else None."""
    if (
        not isinstance(config, GroupedAttentionConfig)
        or config.qk_norm is not None
        or config.rope is None
        or rope is None
        or config.rope.pairs is not RopePairs.HALVES
        or 2 * rope[0].shape[-1] != heads_BTNH.shape[-1]
        or pages.tables_BM is None
        or positions_BT.size > MOST_ROWS
        or device.target().capability != (9, 0)
    ):
        return None
    q_BTNH, *pools = pallas_kernels.append_heads(
        heads_BTNH,
        pages.arrays["k"],
        pages.arrays["v"],
        pages.tables_BM,
        positions_BT,
        rope,
        k_scale=pages.arrays.get("k" + SCALE),
        v_scale=pages.arrays.get("v" + SCALE),
    )
    names = [name for name in ("k", "v", "k" + SCALE, "v" + SCALE) if name in pages.arrays]
    return q_BTNH, dict(zip(names, pools, strict=True))
