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
from jaxinfra.ops.quantized import QuantizedWeight
from pallas_kernels.common import device
from pallas_kernels.decode_layer import LayerWeights as LayerWeights
from pallas_kernels.decode_layer import refused_layers

MEASURED = ("NVIDIA H200",)
"""GPUs on which the launch was timed beside layers one after another, and was faster."""


def decode_layers(
    x_BTD: jax.Array,
    layers: Sequence[LayerWeights],
    pages: Sequence[Pages],
    *,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    scale: float | None,
    is_named: bool,
) -> tuple[jax.Array, list[dict[str, jax.Array]]] | None:
    """``Execution.decode_layers``: of one row's one token on a Hopper GPU; else None.

    Args:
        is_named: a step that the kernel cannot compute is an error. Otherwise it is None, and so is
            any step on a GPU where the launch was not measured.

    Raises:
        UnsupportedError: named, and a step that the kernel cannot compute.
    """
    facts = device.target()
    if positions_BT.size > 1 or facts.capability != (9, 0):
        return None
    reason = _refused(x_BTD, layers, pages)
    if not is_named and (reason is not None or facts.kind not in MEASURED):
        return None
    if reason is not None:
        raise UnsupportedError(f"whole layers with {reason}, or leave whole_layers=False")
    cos, sin = (jnp.broadcast_to(x, (1, 1, x.shape[-1]))[:, 0] for x in rope)
    given = (
        x_BTD.reshape(1, -1),
        layers,
        [(each.arrays["k"], each.arrays["v"]) for each in pages],
        jnp.asarray(pages[0].tables_BM),
        positions_BT[:, 0],
        (cos, sin),
    )
    if not is_named and refused_layers(*given) is not None:
        return None
    y_MD, after = pallas_kernels.decode_layers(*given, implementation="hopper", scale=scale)
    return y_MD.reshape(x_BTD.shape), [{"k": k, "v": v} for k, v in after]


def _refused(
    x_BTD: jax.Array, layers: Sequence[LayerWeights], pages: Sequence[Pages]
) -> str | None:
    """What the kernel is not given as it reads it, and the remedy."""
    held = {
        weight.dtype
        for layer in layers
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)
        if not isinstance(weight, QuantizedWeight)
    }
    if held - {x_BTD.dtype}:
        names = ", ".join(sorted(dtype.name for dtype in held))
        return f"weights in {names}: the kernel reads {x_BTD.dtype}; hold them as they are computed"
    if pages[0].tables_BM is None:
        return (
            "a cache that does not divide into pages: the kernel reads pages; give it a multiple "
            "of 16 slots"
        )
    formats = {each.format for each in pages}
    if formats != {CacheFormat.PLAIN}:
        return f"caches in {', '.join(sorted(formats))}: the kernel reads 16 bits; keep them plain"
    return None
