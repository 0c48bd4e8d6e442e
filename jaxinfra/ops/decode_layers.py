"""Decode step of one token that computes all layers in one launch on a Hopper GPU, or on several.

Dims: B batch, T position, D model width.
"""

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.ops.quantized import QuantizedWeight
from pallas_kernels.common import device
from pallas_kernels.decode_layer import LayerWeights as LayerWeights
from pallas_kernels.decode_layer import refused_layers

MEASURED = {"NVIDIA H200": (1, 2)}
"""GPUs, and numbers of them that share the layers, on which the launch was timed beside layers one
after another, and was faster."""

type DecodedLayers = tuple[jax.Array, dict[str, jax.Array]]
"""The residual stream and the cache's pools."""


def decode_layers(
    x_BTD: jax.Array,
    layers: LayerWeights,
    pages: Pages,
    *,
    config: GroupedAttentionConfig,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    axis: str | None = None,
) -> DecodedLayers | None:
    """Computes all layers for one token of one row in one launch.

    Args:
        layers: stacked weights of all layers, [L, ...] each.
        pages: view of the first layer's pages; its pools have the pages of all layers.
        axis: mesh axis over which heads and hidden columns are sharded, inside ``shard_map``.

    Returns:
        The residual stream and the pools with the new token. None if the step is not of this kind,
        or if this kernel was not measured on this GPU to be faster than separate layers.
    """
    num_devices = 1 if axis is None else jax.lax.axis_size(axis)
    is_measured = num_devices in MEASURED.get(device.target().kind, ())
    if positions_BT.size > 1 or not is_measured or not _as_read(x_BTD, layers, pages):
        return None
    num_layers = len(layers.attention_norm.scale)

    def pools(pages: jax.Array) -> jax.Array:
        return pages.reshape(num_layers, -1, *pages.shape[1:])

    cos, sin = (jnp.broadcast_to(x, (1, 1, x.shape[-1]))[:, 0] for x in rope)
    given = (
        x_BTD.reshape(1, -1),
        layers,
        (pools(pages.arrays["k"]), pools(pages.arrays["v"])),
        jnp.asarray(pages.tables_BM),
        positions_BT[:, 0],
        (cos, sin),
    )
    if refused_layers(*given, axis=axis) is not None:
        return None
    y_MD, (k, v) = pallas_kernels.decode_layers(
        *given, implementation="hopper", scale=config.scale, axis=axis
    )
    arrays = {name: pool.reshape(pages.arrays[name].shape) for name, pool in (("k", k), ("v", v))}
    return y_MD.reshape(x_BTD.shape), arrays


def _as_read(x_BTD: jax.Array, layers: LayerWeights, pages: Pages) -> bool:
    """Whether weights and pages are held as the kernel reads them."""
    held = {
        weight.dtype
        for weight in (layers.qkv, layers.out, layers.gate_up, layers.down)
        if not isinstance(weight, QuantizedWeight)
    }
    is_paged = pages.tables_BM is not None and pages.format is CacheFormat.PLAIN
    return is_paged and held <= {x_BTD.dtype}
