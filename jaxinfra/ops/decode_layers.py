"""Layers' step of one token, all in one launch on a Hopper GPU.

Dims: B batch, T position, D model width.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfra.config.cache import CacheFormat
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.ops.cached_attention import Pages
from pallas_kernels.common import device
from pallas_kernels.decode_layer import LayerWeights as LayerWeights


def decode_layers(
    x_BTD: jax.Array,
    layers: Sequence[LayerWeights],
    pages: Sequence[Pages],
    *,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    scale: float | None,
) -> tuple[jax.Array, list[dict[str, jax.Array]]] | None:
    """``Execution.decode_layers``: of one row's one token on a Hopper GPU; else None.

    Raises:
        UnsupportedError: a step that the kernel cannot compute.
    """
    tables_BM = pages[0].tables_BM
    if positions_BT.size > 1 or device.target().capability != (9, 0):
        return None
    if tables_BM is None:
        raise UnsupportedError(
            "whole layers with a cache that does not divide into pages: the kernel reads pages; "
            "give it a multiple of 16 slots, or leave whole_layers=False"
        )
    formats = {each.format for each in pages}
    if formats != {CacheFormat.PLAIN}:
        raise UnsupportedError(
            f"whole layers with caches in {', '.join(formats)}: the kernel reads 16 bits; leave "
            "whole_layers=False"
        )
    cos, sin = (jnp.broadcast_to(x, (1, 1, x.shape[-1]))[:, 0] for x in rope)
    y_MD, after = pallas_kernels.decode_layers(
        x_BTD.reshape(1, -1),
        layers,
        [(each.arrays["k"], each.arrays["v"]) for each in pages],
        jnp.asarray(tables_BM),
        positions_BT[:, 0],
        (cos, sin),
        implementation="hopper",
        scale=scale,
    )
    return y_MD.reshape(x_BTD.shape), [{"k": k, "v": v} for k, v in after]
