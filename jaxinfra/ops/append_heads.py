"""A layer's new heads into its cache, in one kernel on a Hopper GPU.

Dims: B batch, T position, N heads of queries, keys and values, H head width.
"""

import jax

import pallas_kernels
from jaxinfra.config.cache import SCALE, CacheFormat
from jaxinfra.config.model import GroupedAttentionConfig, MixerConfig
from jaxinfra.config.rope import RopePairs
from jaxinfra.ops.cached_attention import Pages
from pallas_kernels.common import device
from pallas_kernels.paged_attention import attends_chunk


def append_packed_heads(
    heads_BTNH: jax.Array,
    pages: Pages,
    *,
    config: MixerConfig,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    is_empty: bool,
) -> tuple[jax.Array, dict[str, jax.Array]] | None:
    """``Execution.append``: on a Hopper GPU, of heads that turn whole; else None."""
    if not _is_taken(heads_BTNH, pages, config=config, rope=rope):
        return None
    assert rope is not None
    assert pages.tables_BM is not None
    if is_empty and not _reads_back(heads_BTNH, pages):
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


def _is_taken(
    heads_BTNH: jax.Array,
    pages: Pages,
    *,
    config: MixerConfig,
    rope: tuple[jax.Array, jax.Array] | None,
) -> bool:
    """Whether this is a Hopper GPU, and heads turn whole."""
    return (
        isinstance(config, GroupedAttentionConfig)
        and config.qk_norm is None
        and config.rope is not None
        and rope is not None
        and config.rope.pairs is RopePairs.HALVES
        and 2 * rope[0].shape[-1] == heads_BTNH.shape[-1]
        and pages.tables_BM is not None
        and device.target().capability == (9, 0)
    )


def _reads_back(heads_BTNH: jax.Array, pages: Pages) -> bool:
    """Whether tokens that see each other only find keys in pages as fast as side by side."""
    assert pages.tables_BM is not None
    if pages.format is not CacheFormat.PLAIN:
        return False
    k, v = pages.arrays["k"], pages.arrays["v"]
    num_q_heads = heads_BTNH.shape[2] - 2 * k.shape[2]
    return attends_chunk(heads_BTNH[:, :, :num_q_heads], k, v, pages.tables_BM)
