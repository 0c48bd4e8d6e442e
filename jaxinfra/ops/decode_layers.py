"""Layers' step of one token, all in one launch on a Hopper GPU.

Dims: B batch, T position, D model width.
"""

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfra.config.cache import CacheFormat
from jaxinfra.errors import UnsupportedError
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.ops.quantized import QuantizedWeight
from pallas_kernels.common import device
from pallas_kernels.decode_layer import LayerWeights as LayerWeights
from pallas_kernels.decode_layer import refused_layers

MEASURED = ("NVIDIA H200",)
"""GPUs on which the launch was timed beside layers one after another, and was faster."""


def decode_layers(
    x_BTD: jax.Array,
    layers: LayerWeights,
    pages: Pages,
    *,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    scale: float | None,
    is_named: bool,
) -> tuple[jax.Array, dict[str, jax.Array]] | None:
    """``Execution.decode_layers``: of one row's one token on a Hopper GPU; else None.

    Args:
        layers: stacks, of all layers [L, ...] each.
        pages: the first layer's, in pools of all of them.
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
    if not is_named and refused_layers(*given) is not None:
        return None
    y_MD, (k, v) = pallas_kernels.decode_layers(*given, implementation="hopper", scale=scale)
    return y_MD.reshape(x_BTD.shape), {"k": k, "v": v}


def _refused(x_BTD: jax.Array, layers: LayerWeights, pages: Pages) -> str | None:
    """What the kernel is not given as it reads it, and the remedy."""
    held = {
        weight.dtype
        for weight in (layers.qkv, layers.out, layers.gate_up, layers.down)
        if not isinstance(weight, QuantizedWeight)
    }
    if held - {x_BTD.dtype}:
        names = ", ".join(sorted(dtype.name for dtype in held))
        return f"weights in {names}: the kernel reads {x_BTD.dtype}; hold them as they are computed"
    if pages.tables_BM is None:
        return (
            "a cache that does not divide into pages: the kernel reads pages; give it a multiple "
            "of 16 slots"
        )
    if pages.format is not CacheFormat.PLAIN:
        return f"a cache in {pages.format}: the kernel reads 16 bits; keep it plain"
    return None
