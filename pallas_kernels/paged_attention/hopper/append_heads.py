"""The kernel that rotates (RoPE) queries and keys and writes keys and values to pages, in place.

One pass over a layer's packed QKV product replaces XLA's four small kernels: queries rotated, keys
rotated, and a scatter for each pool. A block has four heads of a token, one per warp.

Dims: A token of all rows, N query heads, K kv heads, H width, R rotated pair, P page, S slot.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import device
from pallas_kernels.hopper.launch import launch, references
from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.paged_attention.codes import LEAST_SCALE
from pallas_kernels.quantized_weight import WeightCode
from pallas_kernels.rows.config import tile_layout

from .config import DTYPES


def unsupported_append(
    heads: jax.Array, k_pages: jax.Array, rope: tuple[jax.Array, ...], code: WeightCode | None
) -> str | None:
    """Returns why the kernel cannot take this call of ``append_heads``; None if it can."""
    if reason := device.why_not_one_hopper():
        return reason
    is_plain = code is None
    if heads.dtype.name not in DTYPES or (is_plain and k_pages.dtype != heads.dtype):
        return f"heads {heads.dtype} and pages {k_pages.dtype} are not one of {', '.join(DTYPES)}"
    num_heads, width = heads.shape[-2:]
    num_kv_heads = k_pages.shape[2]
    if num_heads % WARPS or num_kv_heads % WARPS:
        return f"{num_heads} heads, {num_kv_heads} of them keys', are not multiples of {WARPS}"
    if 2 * rope[0].shape[-1] != width or width % (2 * LANES):
        return f"{2 * rope[0].shape[-1]} of {width} columns rotate; all must, in multiples of 64"
    if width // 2 // LANES not in (1, 2, 4):
        return f"heads of {width} columns are none of 64, 128, 256"
    return None


def append_heads_hopper(
    heads_BTNH: jax.Array,
    pools: dict[str, jax.Array],
    tables_BM: jax.Array,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    code: WeightCode | None = None,
    is_ordered: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes ``append_heads`` by the kernel, for a call that ``unsupported_append`` accepts.

    Args:
        pools: page pools by name: "k", "v", and for codes "k_scale" and "v_scale".
    """
    batch, length, num_heads, width = heads_BTNH.shape
    num_kv_heads = pools["k"].shape[2]
    tokens = batch * length
    cos_AR, sin_AR = (
        jnp.broadcast_to(x, (batch, length, width // 2)).reshape(tokens, -1) for x in rope
    )
    kernel = _AppendHeads(
        N=num_heads - 2 * num_kv_heads,
        K=num_kv_heads,
        H=width,
        T=length,
        dtype=heads_BTNH.dtype,
        code=code,
        is_ordered=is_ordered,
    )
    refs = dict(zip(pools, references(list(pools.values())), strict=True))
    found = launch(
        kernel.run,
        name="append_heads",
        operands={
            "heads": heads_BTNH.reshape(tokens, num_heads, width), "cos": cos_AR, "sin": sin_AR,
            "tables": tables_BM, "positions": positions_BT.reshape(tokens), **refs,
        },
        results={"q": jax.ShapeDtypeStruct((tokens, kernel.N, width), heads_BTNH.dtype)},
        scratch={},
        grid=(tokens, num_heads // WARPS),
        grid_names=("token", "part"),
        num_threads=1,
        params=dict(approx_math=True, reduction_scratch_bytes=0),
    )  # fmt: skip
    q_BTNH = found["q"].reshape(batch, length, kernel.N, width)
    return q_BTNH, *(jax.freeze(ref) for ref in refs.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _AppendHeads:
    """Kernel of one call of ``append_heads``; each block has four heads of a token."""

    N: int
    K: int
    H: int
    T: int
    dtype: jnp.dtype
    code: WeightCode | None
    is_ordered: bool

    def run(self, gmem, smem) -> None:
        """Runs one block: four heads of a token."""
        del smem
        token = lax.axis_index("token")
        first = lax.axis_index("part") * WARPS
        halves = self.halves(gmem, token, first)

        def to_queries() -> None:
            for each, half in zip(self.columns, self.rotated(gmem, token, halves), strict=True):
                write_registers(half, gmem.q.at[token, pl.ds(first, WARPS), each])

        pl.when(first < self.N)(to_queries)
        self.put(gmem, token, first, halves)

    def put(self, gmem, token, first, halves: list) -> None:
        """Writes four heads into their page, if they are keys or values and the row has one."""
        size, width = gmem.k.shape[1], gmem.tables.shape[1]
        position = gmem.positions[token]
        place = lax.div(jnp.maximum(position, 0), size)
        page = gmem.tables[lax.div(token, self.T), jnp.minimum(place, width - 1)]
        slot = lax.rem(jnp.maximum(position, 0), size)
        is_kept = (position >= 0) & (place < width) & (page >= 0) & (page < gmem.k.shape[0])
        page = jnp.maximum(page, 0)
        for name, before in (("k", self.N), ("v", self.N + self.K)):
            at = page, slot, pl.ds(first - before, WARPS)

            @pl.when(is_kept & (first >= before) & (first < before + self.K))
            def _(name=name, at=at):
                found = self.rotated(gmem, token, halves) if name == "k" else halves
                pages = getattr(gmem, name)
                if self.code is not None:
                    self.write_codes(found, pages, getattr(gmem, f"{name}_scale"), at)
                    return
                for each, half in zip(self.columns, found, strict=True):
                    write_registers(half, pages.at[*at, each])

    def write_codes(self, halves: list, pages, scales, at: tuple) -> None:
        """Writes the codes and scales of ``codes_of``; a warp has a head."""
        assert self.code is not None
        top = self.code.largest
        wide = [half.astype(jnp.float32) for half in halves]
        sizes = functools.reduce(jnp.maximum, [jnp.abs(x) for x in wide])
        # A maximum in hardware passes over NaN.
        infinite = [jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0) for x in wide]
        worst = jnp.max(functools.reduce(jnp.maximum, infinite), axis=1)
        size = jnp.maximum(jnp.max(sizes, axis=1), LEAST_SCALE * top)
        scale = (jnp.where(worst > 0.0, jnp.nan, size) / top).astype(scales.dtype)
        write_registers(scale, scales.at[*at])
        step = lax.broadcast_in_dim(scale.astype(jnp.float32), wide[0].shape, [0])
        scaled = [jnp.clip(x / step, -top, top) for x in wide]
        if self.code is WeightCode.INT4:
            low, high = (jnp.round(x).astype(jnp.int32) + 8 for x in scaled)
            write_registers((low | (high << 4)).astype(pages.dtype), pages.at[*at])
            return
        for i, x in enumerate(scaled):
            if self.code is WeightCode.INT8:
                x = jnp.round(x)
            columns = pl.ds(i * self.H // 2, self.H // 2)
            write_registers(x.astype(pages.dtype), pages.at[*at, columns])

    @property
    def columns(self) -> list:
        """Column slices of both halves of a head."""
        return [pl.ds(0, self.H // 2), pl.ds(self.H // 2, self.H // 2)]

    def halves(self, gmem, token, first) -> list:
        """Loads both halves of four heads."""
        return [
            plgpu.load(
                gmem.heads.at[token, pl.ds(first, WARPS), each],
                layout=self.layout, optimized=False,
            )
            for each in self.columns
        ]  # fmt: skip

    @property
    def layout(self):
        """Layout of four heads, one per warp."""
        return tile_layout(self.H // 2 // LANES)

    def rotated(self, gmem, token, halves: list) -> list:
        """Both halves of the heads, rotated in fp32."""
        first, second = (half.astype(jnp.float32) for half in halves)
        cos, sin = (
            lax.broadcast_in_dim(
                plgpu.load(x.at[token], layout=self.layout.reduce(0), optimized=False),
                first.shape,
                [1],
            )
            for x in (gmem.cos, gmem.sin)
        )
        products = first * cos, second * sin, second * cos, first * sin
        if self.is_ordered:  # or a compiler may fuse a product into the sum behind it
            products = tuple(jnp.where(x == x, x, jnp.nan) for x in products)
        pair = products[0] - products[1], products[2] + products[3]
        return [half.astype(self.dtype) for half in pair]
