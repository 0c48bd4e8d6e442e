"""A layer's step of one token, in one launch on a Hopper GPU.

Dims: B batch, T position, D model width.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfra.config.cache import CacheFormat
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.ops.deferred import Deferred, RmsNorm
from jaxinfra.ops.quantized import QuantizedWeight
from pallas_kernels.common import device
from pallas_kernels.decode_layer import LayerWeights


def decode_layer(
    x_BTD: jax.Array,
    norms: Sequence[Deferred | None],
    weights: Mapping[str, jax.Array | QuantizedWeight],
    pages: Pages,
    *,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    scale: float | None,
    meetings: jax.Array | None,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array] | None:
    """``Execution.decode_layer``: of one row's one token on a Hopper GPU; else None.

    Args:
        norms: of the stream before attention, and after it.
        weights: "qkv", "out", "gate_up", "down".
        meetings: int32 [1], handed from layer to layer of a step; 0 before the first.

    Raises:
        UnsupportedError: a step that the kernel cannot compute.
    """
    if positions_BT.size > 1 or pages.tables_BM is None or device.target().capability != (9, 0):
        return None
    if pages.format is not CacheFormat.PLAIN:
        raise UnsupportedError(
            f"whole layers with a cache in {pages.format}: the kernel reads 16 bits; leave "
            "whole_layers=False"
        )
    assert rope is not None, "check_whole"
    assert meetings is not None, "Decoder"
    dtype, width = x_BTD.dtype, x_BTD.shape[-1]
    cos, sin = (jnp.broadcast_to(x, (1, 1, x.shape[-1]))[:, 0] for x in rope)

    def matrix(name: str, rows: int) -> jax.Array:
        weight = weights[name]
        if isinstance(weight, QuantizedWeight):
            raise UnsupportedError(
                f"whole layers of weights in {weight.format.name}: the kernel reads 16 bits; "
                "leave whole_layers=False"
            )
        return weight.astype(dtype).reshape(rows, -1)

    def norm(deferred: Deferred | None) -> RmsNorm:
        assert deferred is not None, "check_whole"
        assert deferred.norm is not None, "check_whole"
        return deferred.norm

    out = weights["out"]
    y_MD, k, v, meetings = pallas_kernels.decode_layer(
        x_BTD.reshape(1, width),
        LayerWeights(
            attention_norm=norm(norms[0]),
            qkv=matrix("qkv", width),
            out=matrix("out", out.shape[0] * out.shape[1]),
            mlp_norm=norm(norms[1]),
            gate_up=matrix("gate_up", width),
            down=matrix("down", weights["down"].shape[0]),
        ),
        pages.arrays["k"],
        pages.arrays["v"],
        jnp.asarray(pages.tables_BM),
        positions_BT[:, 0],
        (cos, sin),
        meetings,
        implementation="hopper",
        scale=scale,
    )
    return y_MD.reshape(x_BTD.shape), {"k": k, "v": v}, meetings
