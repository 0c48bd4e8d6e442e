"""Decode steps of all layers at once on Hopper GPUs: of one row in one launch, also over several
GPUs, and of several rows by kernels that add the GPUs' rows.

Dims: B batch, T position, D model width, R row of a step, H head width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.ops.cached_attention import Pages, append_packed_heads, cached_attention
from jaxinfra.ops.multiply import RmsNorm
from jaxinfra.ops.quantized import QuantizedWeight
from pallas_kernels import few_rows_matmul
from pallas_kernels.common import device
from pallas_kernels.decode_layer import LayerWeights as LayerWeights
from pallas_kernels.decode_layer import refused_layers
from pallas_kernels.row_sums import SummedRows, open_mailbox, refused_rows, sum_rows

MEASURED = {"NVIDIA H200": (1, 2)}
"""GPUs, and numbers of them that share the layers, on which the launch was timed beside layers one
after another, and was faster."""

MEASURED_ROWS = {"NVIDIA H200": (2,)}
"""GPUs, and numbers of them, on which steps of several rows were timed with ``sum_rows`` beside
XLA's all-reduces, and were faster."""

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


def decode_rows(
    x_BTD: jax.Array,
    layers: LayerWeights,
    pages: Pages,
    *,
    config: GroupedAttentionConfig,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    axis: str,
) -> DecodedLayers | None:
    """Computes all layers for one token of each of several rows; devices of an axis share layers.

    Kernels are those of one device. Behind the output and down projections, GPUs write their
    partial rows to one another: twice per layer, each sends 2 R D bytes to each other GPU.

    Args:
        layers, pages, axis: as in ``decode_layers``.

    Returns:
        The residual stream and the pools with the new tokens. None if the step is not of this kind,
        or if this was not measured on these GPUs to be faster than XLA's all-reduces.
    """
    batch, length, width = x_BTD.shape
    is_measured = jax.lax.axis_size(axis) in MEASURED_ROWS.get(device.target().kind, ())
    if length > 1 or not is_measured or not _as_read(x_BTD, layers, pages):
        return None
    weights = (layers.qkv, layers.out, layers.gate_up, layers.down)
    plain = tuple(weight for weight in weights if not isinstance(weight, QuantizedWeight))
    if len(plain) < len(weights):
        return None
    if refused_rows(batch, width, x_BTD.dtype, axis=axis) is not None:
        return None
    num_layers = len(layers.attention_norm.scale)

    def norm(which: RmsNorm, i: int) -> RmsNorm:
        return dataclasses.replace(which, scale=which.scale[i])

    # Traced once for all layers.
    layer = jax.jit(
        functools.partial(_layer_of_rows, config=config, positions_BT=positions_BT, rope=rope)
    )
    x_RD = x_BTD.reshape(batch, width)
    mailbox = open_mailbox(batch, width, x_RD.dtype, axis=axis, implementation="hopper")
    first_RD = norm(layers.attention_norm, 0)(x_RD)
    rows, arrays = SummedRows(x=x_RD, normed=first_RD, mailbox=mailbox), pages.arrays
    for i in range(num_layers):
        # What follows the last layer has a norm of its own; this one's result is not read.
        norms = norm(layers.mlp_norm, i), norm(layers.attention_norm, (i + 1) % num_layers)
        seen = _pages_of(i, num_layers, dataclasses.replace(pages, arrays=arrays))
        done = layer(rows, seen, tuple(weight[i] for weight in plain), norms)
        if done is None:
            return None
        rows, arrays = done
    return rows.x.reshape(x_BTD.shape), arrays


def _layer_of_rows(
    rows: SummedRows,
    pages: Pages,
    weights: tuple[jax.Array, ...],
    norms: tuple[RmsNorm, RmsNorm],
    *,
    config: GroupedAttentionConfig,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[SummedRows, dict[str, jax.Array]] | None:
    """Computes a layer of this device's heads and columns; None if no kernel appends its heads.

    Args:
        norms: the norms behind attention and behind the MLP.
    """
    qkv, out, gate_up, down = weights
    batch = len(positions_BT)
    heads_BTNH = few_rows_matmul(rows.normed, qkv).reshape(batch, 1, -1, config.head_dim)
    appended = append_packed_heads(
        heads_BTNH, pages, config=config, positions_BT=positions_BT, rope=rope, is_empty=False
    )
    if appended is None:
        return None
    q_BTNH, arrays = appended
    tables_BM = jnp.maximum(jnp.asarray(pages.tables_BM), 0)
    seen = dataclasses.replace(pages, arrays=arrays, tables_BM=tables_BM)
    out_BTNH = cached_attention(q_BTNH, seen, config=config, positions_BT=positions_BT)
    part_RD = few_rows_matmul(out_BTNH.reshape(batch, -1), out)
    rows = sum_rows(part_RD, rows.x, rows.mailbox, norm=norms[0])
    hidden_RF = few_rows_matmul(rows.normed, gate_up, swiglu=True)
    part_RD = few_rows_matmul(hidden_RF, down)
    return sum_rows(part_RD, rows.x, rows.mailbox, norm=norms[1]), arrays


def _pages_of(layer: int, num_layers: int, pages: Pages) -> Pages:
    """Returns a view of a layer's pages; a page number below 0 means none."""
    assert pages.tables_BM is not None, "_as_read"
    first = layer * (len(pages.arrays["k"]) // num_layers)
    tables_BM = jnp.where(pages.tables_BM < 0, -1, pages.tables_BM + first)
    return dataclasses.replace(pages, tables_BM=tables_BM)
