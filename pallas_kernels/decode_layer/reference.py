"""The formula, and what a call is.

Dims: M row, D width of the stream, A width of all query heads, F hidden width; N query heads, K kv
heads, H width of a head; P page of the pool, S slot of a page, R turned pair.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.paged_attention import append_and_attend


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TailCall:
    """A validated call: what follows attention in a layer."""

    x: jax.Array  # [M, D]: the stream before attention
    attended: jax.Array  # [M, A]
    out: jax.Array  # [A, D]
    norm: RmsNorm
    gate_up: jax.Array  # [D, 2 F], gates first
    down: jax.Array  # [F, D]

    @property
    def norms(self) -> dict[str, RmsNorm]:
        """By the names of what they come before."""
        return {"mlp": self.norm}

    def arrays(self) -> dict[str, jax.Array]:
        """Those that a kernel reads beside x."""
        return {
            "attended": self.attended, "out": self.out, "wide": self.gate_up, "down": self.down
        }  # fmt: skip

    def describe(self) -> str:
        """One line for logs and errors."""
        (M, D), A, F = self.x.shape, self.attended.shape[1], self.down.shape[0]
        return f"{M} rows {self.x.dtype} of {D}, heads {A}, hidden {F}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerCall:
    """A validated call: a layer's step of one token per row."""

    x: jax.Array  # [M, D]: the stream
    attention_norm: RmsNorm
    qkv: jax.Array  # [D, (N + 2 K) H]: heads of queries, keys, values
    out: jax.Array  # [N H, D]
    mlp_norm: RmsNorm
    gate_up: jax.Array  # [D, 2 F], gates first
    down: jax.Array  # [F, D]
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array
    tables: jax.Array  # int32 [M, pages of a row]
    positions: jax.Array  # int32 [M]
    rope: tuple[jax.Array, jax.Array]  # fp32 [M, R]: cosines, sines
    scale: float  # of scores

    @property
    def norms(self) -> dict[str, RmsNorm]:
        """By the names of what they come before."""
        return {"attention": self.attention_norm, "mlp": self.mlp_norm}

    def arrays(self) -> dict[str, jax.Array]:
        """Those that a kernel reads beside x."""
        cos, sin = self.rope
        return {
            "qkv": self.qkv, "out": self.out, "wide": self.gate_up, "down": self.down,
            "tables": self.tables, "positions": self.positions, "cos": cos, "sin": sin,
        }  # fmt: skip

    def per_token(self) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Positions [M, 1], and rope [M, 1, R], as calls of several tokens per row take them."""
        cos, sin = self.rope
        return self.positions[:, None], (cos[:, None], sin[:, None])

    def tail(self, x: jax.Array, attended: jax.Array) -> TailCall:
        """What follows attention."""
        return TailCall(
            x=x, attended=attended.reshape(len(x), -1), out=self.out, norm=self.mlp_norm,
            gate_up=self.gate_up, down=self.down,
        )  # fmt: skip

    @property
    def num_heads(self) -> int:
        """Of queries, keys and values."""
        return self.qkv.shape[1] // self.k_pages.shape[3]

    def describe(self) -> str:
        """One line for logs and errors."""
        (M, D), F, (P, S, K, H) = self.x.shape, self.down.shape[0], self.k_pages.shape
        return (
            f"{M} rows {self.x.dtype} of {D}, heads {self.num_heads - 2 * K}/{K} of {H}, hidden "
            f"{F}, {P} pages of {S}"
        )


def layer_tail_reference(call: TailCall) -> jax.Array:
    """``x1 + (silu(g) * u) down``, ``x1 = x + attended out``, g and u of ``norm(x1) gate_up``.

    All in fp32, rounded once: [M, D] in x's dtype.
    """
    x, attended, out, gate_up, down = (
        each.astype(jnp.float32)
        for each in (call.x, call.attended, call.out, call.gate_up, call.down)
    )
    x = x + _times(attended, out)
    gate, up = jnp.split(_times(call.norm(x), gate_up), 2, axis=1)
    return (x + _times(jax.nn.silu(gate) * up, down)).astype(call.x.dtype)


def decode_layer_reference(call: LayerCall) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The stream after the layer, in fp32 and rounded once, and the pages with the new token."""
    x, M = call.x.astype(jnp.float32), len(call.x)
    k_pages, v_pages = call.k_pages.astype(jnp.float32), call.v_pages.astype(jnp.float32)
    heads = _times(call.attention_norm(x), call.qkv.astype(jnp.float32))
    heads = heads.reshape(M, 1, call.num_heads, -1)
    attended, k_pages, v_pages = append_and_attend(
        heads, k_pages, v_pages, call.tables, *call.per_token(), implementation="xla",
        scale=call.scale,
    )  # fmt: skip
    y = layer_tail_reference(call.tail(x, attended)).astype(call.x.dtype)
    dtype = call.k_pages.dtype
    return y, k_pages.astype(dtype), v_pages.astype(dtype)


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
