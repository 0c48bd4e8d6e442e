"""Chunks of the delta rule with a decay per channel: what the scan reads, for all side by side.

Between tokens j and i of a chunk a key's channel c decays by exp(s_i - s_j), with s the sum of its
logarithms. As factors exp(s_i) and exp(-s_j) of the two operands of a product, these would leave
the range of numbers. Pairs are therefore taken by levels, of blocks of 64, 32 and 16 tokens. Token
i is in the second half of a block, and j in its first. Their factors are at most 1, as s counts
from the block's middle. One product of each level, and one of pairs within blocks of 8 tokens,
compute all pairs. The last one's factors are at most 2^120, as a decay counts as at least 2^-30.

Sums of logarithms are products, too: of a triangle of ones with the logarithms, which are sums of
two bf16. A block computes one value head of a chunk.

Dims: B batch, T position, N key heads, M value heads, H key width, J chunk, i and j positions
within a chunk.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import LANES
from pallas_kernels.hopper.mosaic import arith, mgpu, plgpu, vector
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    exp2,
    global_place,
    loaded,
    thread,
    total,
)
from pallas_kernels.hopper.tile import LOG2E, row_layout, tile_layout, tiled

from .gates import CHUNK, Gate, load_gate, passed

_WIDTH = 128  # of keys: a thread of the block has a channel
_LEAST_LOG = -30.0  # of a token's decay, base 2
_PITCH = _WIDTH + 8  # sums per token in shared memory, so that banks do not conflict
_HALVES = (32, 16, 8, 4)  # half a block of each level; the last one takes pairs within halves, too


def prepared(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    log_decay_BTMH: jax.Array,
    numbers: jax.Array,
    *,
    has_gradient: bool = False,
) -> dict[str, jax.Array]:
    """Computes operands of ``scan.outputs`` and systems of ``inverse.inverses_of``.

    Args:
        log_decay_BTMH: natural logarithms, fp32; T a multiple of 64, H 128.
        numbers: ``gates.gates`` without logarithms.
        has_gradient: whether to return the operand of ``channel_gradients``, too.

    Returns:
        "q" and "k", decayed from the chunk's beginning, and "kept", keys times beta decayed to its
        end, all bf16 [B, T, M, H]; "weights", P transposed, bf16 [B, M, J, j, i]; "systems", fp32
        [B, M, J, j, i]; "decays" over whole chunks, fp32 [B, M, J, H]. For the gradient "sums" of
        logarithms, base 2, from the chunk's first token on, fp32 [B, T, M, H].
    """
    batch, length, num_values, width = log_decay_BTMH.shape
    chunks = (batch, num_values, length // CHUNK)
    kernel = _Channels(
        num_keys=k_BTNH.shape[2], num_values=num_values, num_chunks=chunks[2], dtype=k_BTNH.dtype
    )
    tokens = jax.ShapeDtypeStruct((batch, length, num_values, width), k_BTNH.dtype)
    square = (*chunks, CHUNK, CHUNK)
    sums = {"sums": jax.ShapeDtypeStruct(tokens.shape, jnp.float32)} if has_gradient else {}
    return launch(
        kernel.run,
        name="delta_channels",
        operands={"queries": q_BTNH, "keys": k_BTNH, "logs": log_decay_BTMH, "gates": numbers},
        results={
            **dict.fromkeys(("q", "k", "kept"), tokens),
            "weights": jax.ShapeDtypeStruct(square, k_BTNH.dtype),
            "systems": jax.ShapeDtypeStruct(square, jnp.float32),
            "decays": jax.ShapeDtypeStruct((*chunks, width), jnp.float32),
        }
        | sums,
        scratch=kernel.scratch(),
        grid=(batch * num_values * chunks[2],),
        grid_names=("block",),
        num_threads=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Channels:
    """The kernel of one call."""

    num_keys: int
    num_values: int
    num_chunks: int
    dtype: jnp.dtype

    def scratch(self) -> dict[str, Any]:
        """Returns a block's shared memory buffers and barrier, by name."""
        keys = plgpu.SMEM((CHUNK, _WIDTH), self.dtype, transforms=tiled(128))
        return {
            "queries": keys,
            "keys": keys,
            # The logarithms are read before two tiles of tokens take their space.
            "shared": plgpu.RefUnion(
                plgpu.SMEM((CHUNK, _WIDTH), jnp.float32, transforms=tiled(128, 4)),
                plgpu.SMEM((2 * CHUNK, _WIDTH), self.dtype, transforms=tiled(128)),
            ),
            "sums": plgpu.SMEM((CHUNK, _PITCH), jnp.float32),
            "square": plgpu.SMEM((CHUNK, CHUNK), self.dtype, transforms=tiled(128)),
            "gates": plgpu.SMEM((len(Gate), CHUNK), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=4),
        }

    def run(self, gmem, smem) -> None:
        """Runs one block: loads, sums, decayed tokens, products of pairs."""
        block, group = lax.axis_index("block"), self.num_values // self.num_keys
        m, rest = lax.rem(block, self.num_values), lax.div(block, self.num_values)
        chunk, b = lax.rem(rest, self.num_chunks), lax.div(rest, self.num_chunks)
        rows, (logs, pair) = pl.ds(chunk * CHUNK, CHUNK), smem.shared
        for name in ("queries", "keys"):
            source = getattr(gmem, name).at[b, rows, lax.div(m, group)]
            plgpu.copy_gmem_to_smem(source, getattr(smem, name), smem.full)
        plgpu.copy_gmem_to_smem(gmem.logs.at[b, rows, m], logs, smem.full)
        plgpu.copy_gmem_to_smem(gmem.gates.at[b, m, chunk], smem.gates, smem.full)
        plgpu.barrier_wait(smem.full)
        sums = self.summed(logs, pair, smem.square)
        _write_sums(sums, smem.sums)
        if hasattr(gmem, "sums"):
            write_registers(sums, gmem.sums.at[b, rows, m])
        plgpu.commit_smem()
        self.write_tokens(gmem, smem, pair, sums, (b, rows, m))
        _write_decays(smem.sums, smem.gates, gmem.decays.at[b, m, chunk])
        found = self.pairs(smem, pair)
        place = (b, m, chunk)
        beta = self.by_row(smem, Gate.BETA, (CHUNK, CHUNK))
        system, weights = (lax.slice(found, (0, x), (CHUNK, x + CHUNK)) for x in (0, CHUNK))
        system = -system * beta * passed(smem.gates, is_strict=True)
        write_registers(system, gmem.systems.at[place])
        weights = weights * beta * passed(smem.gates, is_strict=False)
        smem.square[...] = weights.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.square, gmem.weights.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def summed(self, logs, pair, square) -> jax.Array:
        """Sums of logarithms, base 2, from the chunk's first token on: [64, H]."""
        steps = jnp.maximum(plgpu.load(logs, layout=tile_layout()) * LOG2E, _LEAST_LOG)
        high = steps.astype(self.dtype)
        low = (steps - high.astype(jnp.float32)).astype(self.dtype)
        i, j = _places((CHUNK, CHUNK))
        ones = jnp.where(j <= i, 1.0, 0.0)
        plgpu.commit_smem()  # all warps have read what the pair replaces
        for at, part in enumerate((high, low)):
            self.half(pair, at)[...] = part
        square[...] = ones.astype(self.dtype)
        plgpu.commit_smem()

        def product(acc):
            for at in range(2):
                plgpu.wgmma(acc, square, self.half(pair, at))
            return lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc))

        return pl.run_scoped(product, plgpu.ACC((CHUNK, _WIDTH), jnp.float32))

    def write_tokens(self, gmem, smem, pair, sums, at) -> None:
        """Writes queries and keys, decayed from the chunk's beginning, and keys to its end."""
        b, rows, m = at
        entered = jnp.exp2(sums) * self.by_row(smem, Gate.ENTERED, sums.shape)
        plgpu.commit_smem()  # all warps have multiplied what these replace
        for which, source in enumerate((smem.keys, smem.queries)):
            self.half(pair, which)[...] = (self.load(source) * entered).astype(self.dtype)
        plgpu.commit_smem()
        for which, sink in enumerate((gmem.k, gmem.q)):
            plgpu.copy_smem_to_gmem(self.half(pair, which), sink.at[b, rows, m])
        kept = jnp.exp2(-jnp.abs(_from_middle(smem.sums, CHUNK)))
        kept = self.load(smem.keys) * kept * self.by_row(smem, Gate.WRITTEN, sums.shape)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()  # for all warps
        self.half(pair, 0)[...] = kept.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.half(pair, 0), gmem.kept.at[b, rows, m])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def pairs(self, smem, pair) -> jax.Array:
        """Decayed products of keys j (rows) with keys i, and with queries i: [64, 2 x 64]."""
        shape = (CHUNK, 2 * CHUNK)
        j, i = _places(shape)
        i = jnp.bitwise_and(i, CHUNK - 1)
        apart = jnp.bitwise_xor(j, i)
        found = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), tile_layout())
        for half in _HALVES:
            is_last = half == _HALVES[-1]
            away = _from_middle(smem.sums, half)
            reading = jnp.exp2(away if is_last else -jnp.abs(away))
            read = self.load(smem.keys), self.load(smem.queries)
            written = read[0] * jnp.exp2(-away) if is_last else read[0] * reading
            plgpu.commit_smem()  # all warps have multiplied what these replace
            for which, x in enumerate(read):
                self.half(pair, which)[...] = (x * reading).astype(self.dtype)
            plgpu.commit_smem()
            written = written.astype(self.dtype)

            def product(acc, written=written, is_last=is_last):
                left = written if is_last else self.half(pair, 0)
                plgpu.wgmma(acc, left, pair.transpose((1, 0)))
                return lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc))

            part = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
            # The highest bit in which two places differ is the level at which they part.
            is_here = apart < 2 * half
            # Behind the reader a factor may be infinite.
            is_here &= (j <= i) if is_last else (apart >= half)
            found = jnp.where(is_here, part, found)
        return found

    def half(self, pair, which: int) -> Any:
        """One of the two tiles of tokens."""
        return pair.at[pl.ds(which * CHUNK, CHUNK)]

    def load(self, tile) -> jax.Array:
        return plgpu.load(tile, layout=tile_layout()).astype(jnp.float32)

    def by_row(self, smem, gate: Gate, shape: tuple[int, int]) -> jax.Array:
        """A gate of each row, repeated over a tile's columns."""
        return lax.broadcast_in_dim(load_gate(smem.gates, gate, row_layout()), shape, [0])


def _places(shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Row and column of each element of a tile."""
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=tile_layout()) for dim in range(2)
    )
    return row, column


def _first_place(pitch: int) -> tuple[Any, Any]:
    """The row of a thread's first element of a tile, and its column."""
    lane, warp = (f(thread(), constant(LANES)) for f in (arith.remui, arith.divui))
    row = total((warp, 16), arith.divui(lane, constant(4)))
    return row, arith.muli(arith.remui(lane, constant(4)), constant(2))


def _write_sums(sums: jax.Array, buffer) -> None:
    """Writes a tile to rows of ``_PITCH`` numbers in shared memory."""

    @plgpu.inline_mgpu(arg_types=(tile_layout(), plgpu.RefType()))
    def write(_, tile, buffer):
        row, column = _first_place(_PITCH)
        place = total(address(buffer), (row, 4 * _PITCH), (column, 4))
        for index, pair in enumerate(tile.registers.flat):
            strip, below = divmod(index, 2)
            values = [_element(pair, i) for i in range(2)]
            text = f"st.shared.v2.f32 [$0+{4 * 8 * (below * _PITCH + strip)}], {{$1,$2}};"
            assembly(None, [place, *values], text, "r,f,f,~{memory}", pure=False)

    write(sums, buffer)


def _from_middle(buffer, half: int) -> jax.Array:
    """Sums, less that of the last token in the first half of their block of ``2 half`` tokens."""
    shape, tile = (CHUNK, _WIDTH), tile_layout()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=tile),
    )
    def read(_, buffer):
        f32, start = ir.F32Type.get(), address(buffer)
        first, column = _first_place(_PITCH)
        found = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, tile.to_mgpu())
        registers = np.empty(found.registers.size, object)
        for below in range(2):
            row = arith.addi(first, constant(8 * below))
            middle = arith.addi(arith.andi(row, constant(-2 * half)), constant(half - 1))
            own, other = (total(start, (x, 4 * _PITCH), (column, 4)) for x in (row, middle))
            for strip in range(_WIDTH // 8):
                ends = (
                    loaded("ld.shared.v2.b32", at, 2, kind="r", offset=32 * strip)
                    for at in (own, other)
                )
                numbers = [
                    arith.subf(arith.bitcast(f32, x), arith.bitcast(f32, y))
                    for x, y in zip(*ends, strict=True)
                ]
                pair = vector.from_elements(ir.VectorType.get((2,), f32), numbers)
                registers[2 * strip + below] = pair
        return mgpu.FragmentedArray(
            _registers=registers.reshape(found.registers.shape),
            _layout=found.layout,
            _is_signed=None,
        )

    return read(buffer)


def _element(pair: Any, which: int) -> Any:
    position = ir.DenseI64ArrayAttr.get([which])
    return vector.extract(pair, dynamic_position=[], static_position=position)


def _write_decays(buffer, gates, sink) -> None:
    """Writes the decay of each channel over the whole chunk; 0 if a document begins in it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
    def write(_, buffer, gates, sink):
        f32 = ir.F32Type.get()
        channel = total(address(buffer), (thread(), 4), constant(4 * _PITCH * (CHUNK - 1)))
        last = total(address(gates), constant(4 * (int(Gate.ENTERED) * CHUNK + CHUNK - 1)))
        words = [
            assembly(f32, [x], "ld.shared.f32 $0, [$1];", "=f,r,~{memory}", pure=False)
            for x in (channel, last)
        ]
        place = global_place(sink, thread(), 4)
        decay = arith.mulf(exp2(words[0]), words[1])
        assembly(None, [place, decay], "st.global.f32 [$0], $1;", "l,f,~{memory}", pure=False)

    write(buffer, gates, sink)
