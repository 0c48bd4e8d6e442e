"""A validated call of ``decode_layers``, and its formula.

Dims: L layer, M row, D width of the stream, A width of all query heads, F hidden width; N query
heads, K kv heads, H width of a head; P page of a layer's pool, S slot of a page, R rotated pair.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.paged_attention import append_heads, paged_attention
from pallas_kernels.quantized_weight import QuantizedWeight

WEIGHTS = "qkv", "out", "gate_up", "down"
"""Names of the matrices in ``LayerWeights``."""

type KeyAndValuePools = tuple[jax.Array, jax.Array]
"""Keys and values of all layers, [L, P, S, K, H] each."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """The weights of all layers, stacked: all in x's dtype, or all in one quantized format."""

    attention_norm: RmsNorm  # scale [L, D], as ``mlp_norm``
    # [L, D, (N + 2 K) H]: heads of queries, then of keys, then of values
    qkv: jax.Array | QuantizedWeight
    out: jax.Array | QuantizedWeight  # [L, N H, D]
    mlp_norm: RmsNorm
    gate_up: jax.Array | QuantizedWeight  # [L, D, 2 F], gates first
    down: jax.Array | QuantizedWeight  # [L, F, D]

    def layer(self, i: int) -> "LayerWeights":
        """Returns the weights of layer ``i``, without the dim L."""
        return jax.tree.map(lambda leaf: leaf[i], self)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one layer's named weight as a matrix."""
        weight = getattr(self, name)
        is_quantized = isinstance(weight, QuantizedWeight)
        return weight.matrix_shape if is_quantized else weight.shape[-2:]

    @property
    def norms(self) -> tuple[RmsNorm, RmsNorm]:
        """The norms before attention and before the MLP."""
        return self.attention_norm, self.mlp_norm


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayersCall:
    """A validated ``decode_layers`` call: one new token per row through identical layers."""

    x: jax.Array  # [M, D]: the residual stream
    layers: LayerWeights
    pages: KeyAndValuePools
    tables: jax.Array  # int32 [M, pages of a row], the same for every layer
    positions: jax.Array  # int32 [M]
    rope: tuple[jax.Array, jax.Array]  # fp32 [M, R]: cosines, sines
    scale: float  # factor of the scores
    axis: str | None = None  # mesh axis over which heads and hidden columns are divided

    @property
    def devices(self) -> int:
        """Number of devices that compute each layer together."""
        return 1 if self.axis is None else jax.lax.axis_size(self.axis)

    def over_devices(self, product: jax.Array) -> jax.Array:
        """Sums a product of rows that devices divide."""
        return product if self.axis is None else jax.lax.psum(product, self.axis)

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays that the kernel reads, by name."""
        cos, sin = self.rope
        weights = {name: getattr(self.layers, name) for name in WEIGHTS}
        if isinstance(self.layers.qkv, QuantizedWeight):
            scales = {f"{name}_scales": weight.scales for name, weight in weights.items()}
            weights = {name: weight.data for name, weight in weights.items()} | scales
        return {
            "x": self.x, "tables": self.tables, "positions": self.positions, "cos": cos, "sin": sin,
            **weights,
            "attention_scale": self.layers.attention_norm.scale,
            "mlp_scale": self.layers.mlp_norm.scale,
        }  # fmt: skip

    def tables_of(self, i: int) -> jax.Array:
        """Returns layer ``i``'s page table, offset for pools [L P, S, K, H] of all layers."""
        P = self.pages[0].shape[1]
        # What is no page of this layer must not be one of its neighbor's.
        is_page = (self.tables >= 0) & (self.tables < P)
        return jnp.where(is_page, self.tables + i * P, -1)

    def per_token(self) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns positions [M, 1] and RoPE factors [M, 1, R], with a dim of one token per row."""
        cos, sin = self.rope
        return self.positions[:, None], (cos[:, None], sin[:, None])

    def describe(self) -> str:
        """Describes the call in one line for logs and errors."""
        (M, D), (L, P, S, K, H) = self.x.shape, self.pages[0].shape
        A, F = (self.layers.shape(name)[0] for name in ("out", "down"))
        return (
            f"{L} layers of {M} rows {self.x.dtype} of {D}, heads {A // H}/{K} of "
            f"{H}, hidden {F}, {P} pages of {S}, {self.devices} devices"
        )


def decode_layers_reference(call: LayersCall) -> tuple[jax.Array, KeyAndValuePools]:
    """Computes x after all layers (in fp32, rounded once) and the updated pages."""
    x, M, shape = call.x.astype(jnp.float32), len(call.x), call.pages[0].shape
    k, v = (pool.reshape(-1, *shape[2:]).astype(jnp.float32) for pool in call.pages)
    for i in range(shape[0]):
        layer = call.layers.layer(i)
        heads = _times(layer.attention_norm(x), layer.qkv)
        tables, (positions, rope) = call.tables_of(i), call.per_token()
        heads = heads.reshape(M, 1, -1, shape[-1])
        q, k, v = append_heads(heads, k, v, tables, positions, rope, implementation="xla")
        attended = paged_attention(
            q, k, v, tables, positions[:, -1] + 1, implementation="xla", scale=call.scale
        )
        x = x + call.over_devices(_times(attended.reshape(M, -1), layer.out))
        gate, up = jnp.split(_times(layer.mlp_norm(x), layer.gate_up), 2, axis=1)
        x = x + call.over_devices(_times(jax.nn.silu(gate) * up, layer.down))
    k, v = (pool.astype(call.pages[0].dtype).reshape(shape) for pool in (k, v))
    return x.astype(call.x.dtype), (k, v)


def _times(a: jax.Array, b: jax.Array | QuantizedWeight) -> jax.Array:
    is_quantized = isinstance(b, QuantizedWeight)
    b = b.dequantize(jnp.float32) if is_quantized else b.astype(jnp.float32)
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
