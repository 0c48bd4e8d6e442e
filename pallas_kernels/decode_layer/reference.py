"""The formula, and what a call is.

Dims: M row, D width of the stream, A width of all query heads, F hidden width; N query heads, K kv
heads, H width of a head; P page of the pool, S slot of a page, R turned pair.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.paged_attention import append_and_attend
from pallas_kernels.quantized_matmul import QuantizedWeight

WEIGHTS = "qkv", "out", "gate_up", "down"
"""Those of ``LayerWeights`` that are multiplied with."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """A layer's, in x's dtype or all in one format of few bits."""

    attention_norm: RmsNorm
    # [D, (N + 2 K) H]: heads of queries, then of keys, then of values
    qkv: jax.Array | QuantizedWeight
    out: jax.Array | QuantizedWeight  # [N H, D]
    mlp_norm: RmsNorm
    gate_up: jax.Array | QuantizedWeight  # [D, 2 F], gates first
    down: jax.Array | QuantizedWeight  # [F, D]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight as a matrix."""
        weight = getattr(self, name)
        return weight.matrix_shape if isinstance(weight, QuantizedWeight) else weight.shape

    @property
    def norms(self) -> tuple[RmsNorm, RmsNorm]:
        """Both."""
        return self.attention_norm, self.mlp_norm


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayersCall:
    """A validated call: a step of one token per row, through layers that are alike."""

    x: jax.Array  # [M, D]: the stream
    layers: Sequence[LayerWeights]
    pages: Sequence[tuple[jax.Array, jax.Array]]  # of each layer, keys and values [P, S, K, H]
    tables: jax.Array  # int32 [M, pages of a row]
    positions: jax.Array  # int32 [M]
    rope: tuple[jax.Array, jax.Array]  # fp32 [M, R]: cosines, sines
    scale: float  # of scores

    def arrays(self) -> dict[str, Any]:
        """What a kernel reads, by name; weights as lists."""
        cos, sin = self.rope
        weights = {name: [getattr(layer, name) for layer in self.layers] for name in WEIGHTS}
        if isinstance(self.layers[0].qkv, QuantizedWeight):
            scales = {f"{n}_scales": [each.scales for each in of] for n, of in weights.items()}
            weights = {n: [each.data for each in of] for n, of in weights.items()} | scales
        return {
            "x": self.x, "tables": self.tables, "positions": self.positions, "cos": cos, "sin": sin,
            **weights,
            "attention_scale": [layer.attention_norm.scale for layer in self.layers],
            "mlp_scale": [layer.mlp_norm.scale for layer in self.layers],
        }  # fmt: skip

    def per_token(self) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Positions [M, 1], and rope [M, 1, R], as calls of several tokens per row take them."""
        cos, sin = self.rope
        return self.positions[:, None], (cos[:, None], sin[:, None])

    def describe(self) -> str:
        """One line for logs and errors."""
        (M, D), (P, S, K, H) = self.x.shape, self.pages[0][0].shape
        A, F = self.layers[0].shape("out")[0], self.layers[0].shape("down")[0]
        return (
            f"{len(self.layers)} layers of {M} rows {self.x.dtype} of {D}, heads {A // H}/{K} of "
            f"{H}, hidden {F}, {P} pages of {S}"
        )


def decode_layers_reference(
    call: LayersCall,
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """The stream after all layers, in fp32 and rounded once, and the pages with the new token."""
    x, M, after = call.x.astype(jnp.float32), len(call.x), []
    for layer, pools in zip(call.layers, call.pages, strict=True):
        dtype, (k, v) = pools[0].dtype, (pool.astype(jnp.float32) for pool in pools)
        heads = _times(layer.attention_norm(x), layer.qkv)
        attended, k, v = append_and_attend(
            heads.reshape(M, 1, -1, k.shape[3]), k, v, call.tables, *call.per_token(),
            implementation="xla", scale=call.scale,
        )  # fmt: skip
        after.append((k.astype(dtype), v.astype(dtype)))
        x = x + _times(attended.reshape(M, -1), layer.out)
        gate, up = jnp.split(_times(layer.mlp_norm(x), layer.gate_up), 2, axis=1)
        x = x + _times(jax.nn.silu(gate) * up, layer.down)
    return x.astype(call.x.dtype), after


def _times(a: jax.Array, b: jax.Array | QuantizedWeight) -> jax.Array:
    is_quantized = isinstance(b, QuantizedWeight)
    b = b.dequantize(jnp.float32) if is_quantized else b.astype(jnp.float32)
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
