"""Inverses of the chunks' triangular systems, for all chunks side by side.

Within a chunk the delta rule is a system of 64 equations: the values V' that the tokens write obey
``(I + A) V' = beta (V - entered K S)``, with ``A[i, j] = beta_i decay(i, j) k_i . k_j`` for j < i.
A block computes ``(I + A)^-1 diag(beta)`` of two value heads. K K^T is one WGMMA product. The
inverse is found by forward substitution in fp32: each of 128 threads owns a column of one of the
two inverses in registers, and reads A from shared memory, where a warp's threads want the same
number. Products of powers of A would be fewer operations, but cancel: with 64 equal keys they reach
1e18, and the inverse has entries of 1.

Dims: B batch, T position, N key heads, M value heads, H key width, J chunk.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import LANES, NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import arith, llvm, mgpu_utils, plgpu, vector
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    fused,
    number,
    packed_pair,
    thread,
    total,
)
from pallas_kernels.hopper.tile import column_layout, tile_layout, tiled

from .gates import CHUNK, Gate, load_gate, passed

_PITCH = CHUNK + 8  # numbers per row of a system in shared memory, so that banks do not conflict
_FOUR = 4  # numbers per load from shared memory
_PIECE = 16  # bytes of a store to shared memory
_LINE = 128  # bytes within which pieces are permuted


def inverses(k_BTNH: jax.Array, gates: jax.Array) -> jax.Array:
    """Computes bf16 [B, M, J, 64, 64]: element [j, i] is ``((I + A)^-1)[i, j] beta_j``.

    Args:
        k_BTNH: bf16, T a multiple of 64, H of 64.
        gates: of ``gates.gates``, of an even number of value heads.
    """
    batch, num_values, num_chunks = gates.shape[:3]
    kernel = _Inverses(
        num_keys=k_BTNH.shape[2], num_values=num_values, num_chunks=num_chunks,
        width=k_BTNH.shape[3], dtype=k_BTNH.dtype,
    )  # fmt: skip
    shape = (batch, num_values, num_chunks, CHUNK, CHUNK)
    found = launch(
        kernel.run,
        name="delta_inverses",
        operands={"k": k_BTNH, "gates": gates},
        results={"inverses": jax.ShapeDtypeStruct(shape, k_BTNH.dtype)},
        scratch=kernel.scratch(),
        grid=(batch * num_chunks * num_values // 2,),
        grid_names=("block",),
        num_threads=1,
    )
    return found["inverses"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Inverses:
    """The kernel of one call."""

    num_keys: int
    num_values: int
    num_chunks: int
    width: int
    dtype: jnp.dtype

    @property
    def num_products(self) -> int:
        """Number of products K K^T of a block: 1 if its two value heads share a key head."""
        return 1 if self.num_values // self.num_keys % 2 == 0 else 2

    def scratch(self) -> dict[str, Any]:
        tile = tiled(_LINE)
        keys = (self.num_products, CHUNK, self.width)
        return {
            # The results take the space of the keys, which are read before.
            "k_out": plgpu.RefUnion(
                plgpu.SMEM(keys, self.dtype, transforms=tile),
                plgpu.SMEM((2, CHUNK, CHUNK), self.dtype, transforms=tile),
            ),
            "systems": plgpu.SMEM((2, CHUNK, _PITCH), jnp.float32),
            "gates": plgpu.SMEM((2, len(Gate), CHUNK), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=1 + self.num_products),
        }

    def run(self, gmem, smem) -> None:
        """Runs one block: loads, products, substitution, stores."""
        block, pairs = lax.axis_index("block"), self.num_values // 2
        keys, out = smem.k_out
        pair, rest = lax.rem(block, pairs), lax.div(block, pairs)
        chunk, b = lax.rem(rest, self.num_chunks), lax.div(rest, self.num_chunks)
        rows, group = pl.ds(chunk * CHUNK, CHUNK), self.num_values // self.num_keys
        for i in range(self.num_products):
            head = lax.div(2 * pair + i, group)
            plgpu.copy_gmem_to_smem(gmem.k.at[b, rows, head], keys.at[i], smem.full)
        heads = pl.ds(2 * pair, 2)
        plgpu.copy_gmem_to_smem(gmem.gates.at[b, heads, chunk], smem.gates, smem.full)
        plgpu.barrier_wait(smem.full)
        for i in range(self.num_products):
            k_smem = keys.at[i]

            def product(acc, k_smem=k_smem):
                plgpu.wgmma(acc, k_smem, k_smem.transpose((1, 0)))
                return plgpu.wgmma_accumulator_load(acc)

            products = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
            for h in range(2) if self.num_products == 1 else (i,):
                _write_system(self._system(smem.gates.at[h], products), smem.systems, h)
        plgpu.commit_smem()
        # Warps of a block differ in work, and their SM's schedulers take warps by number.
        odd = lax.rem(lax.div(block, NUM_PROCESSORS), 2)
        _substitute(odd, smem.systems, smem.gates, out)
        plgpu.commit_smem()
        for h in range(2):
            plgpu.copy_smem_to_gmem(out.at[h], gmem.inverses.at[b, 2 * pair + h, chunk])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _system(self, gates, products: jax.Array) -> jax.Array:
        """Computes ``-A`` transposed of a value head: rows j, columns i."""
        # K K^T is symmetric, so its element [j, i] is that of [i, j].
        beta = load_gate(gates, Gate.BETA, column_layout())
        return (
            products
            * passed(gates, is_strict=True)
            * -lax.broadcast_in_dim(beta, products.shape, [1])
        )


def _write_system(system: jax.Array, systems, head: int) -> None:
    """Writes a tile [64, 64] to the head's system in shared memory."""

    @plgpu.inline_mgpu(arg_types=(tile_layout(), plgpu.RefType()))
    def write(_, tile, systems):
        lane, warp = (f(thread(), constant(LANES)) for f in (arith.remui, arith.divui))
        row = total((warp, 16), arith.divui(lane, constant(4)))
        column = arith.muli(arith.remui(lane, constant(4)), constant(2))
        numbers = total((row, _PITCH), column, constant(head * CHUNK * _PITCH))
        place = total(address(systems), (numbers, 4))
        # A thread has two neighboring numbers in a strip of 8 columns, and two 8 rows below.
        for index, pair in enumerate(tile.registers.flat):
            strip, half = divmod(index, 2)
            offset = 4 * (8 * half * _PITCH + 8 * strip)
            text = f"st.shared.v2.f32 [$0+{offset}], {{$1,$2}};"
            values = [_element(pair, i) for i in range(2)]
            assembly(None, [place, *values], text, "r,f,f,~{memory}", pure=False)

    write(system, systems)


def _element(pair: Any, which: int) -> Any:
    position = ir.DenseI64ArrayAttr.get([which])
    return vector.extract(pair, dynamic_position=[], static_position=position)


def _substitute(odd: jax.Array, systems, gates, out) -> None:
    """Solves both systems for the columns of a unit matrix, and writes the scaled inverses.

    Two warps own a head's 64 columns. The one with the last 32 starts at row 32, for its columns
    are zero above.

    Args:
        odd: 1 exchanges the two warps' columns.
    """
    splat = plgpu.Layout.WG_SPLAT(())
    kinds = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(tiled(_LINE)))

    @plgpu.inline_mgpu(arg_types=(splat, *kinds))
    def solve(_, odd, systems, gates, out):
        warp = arith.divui(thread(), constant(LANES))
        head = arith.divui(warp, constant(2))
        half = arith.xori(arith.remui(warp, constant(2)), odd.registers.flat[0])
        column = total((half, LANES), arith.remui(thread(), constant(LANES)))
        system = total(address(systems), (head, 4 * CHUNK * _PITCH))
        place = total((head, len(Gate) * CHUNK), column, constant(Gate.BETA * CHUNK))
        beta = _floats(total(address(gates), (place, 4)), 1, 0)[0]
        line = total(address(out), (head, CHUNK * _LINE), (column, _LINE))
        for first in (0, LANES):
            at = constant(first // LANES)
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, half, at)):
                solution = _solved(system, column, first)
                scaled = [arith.mulf(x, beta) for x in solution]
                _write_line([number(0.0)] * first + scaled, line, column)

    solve(odd, systems, gates, out)


def _solved(system: Any, column: Any, first: int) -> list[Any]:
    """Elements from ``first`` on of a thread's column of the inverse."""
    is_one = arith.CmpIPredicate.eq
    x = {
        i: arith.select(arith.cmpi(is_one, column, constant(i)), number(1.0), number(0.0))
        for i in range(first, CHUNK)
    }
    for j in range(first, CHUNK - 1):
        for at in range((j + 1) // _FOUR * _FOUR, CHUNK, _FOUR):
            factors = _floats(system, _FOUR, 4 * (j * _PITCH + at))
            for i, factor in enumerate(factors, start=at):
                if i > j:
                    x[i] = fused(factor, x[j], x[i])
    return [x[i] for i in range(first, CHUNK)]


def _floats(place: Any, count: int, offset: int) -> list[Any]:
    """Loads fp32 numbers from shared memory."""
    f32 = ir.F32Type.get()
    if count == 1:
        text = f"ld.shared.f32 $0, [$1+{offset}];"
        return [assembly(f32, [place], text, "=f,r,~{memory}", pure=False)]
    names = ",".join(f"${i}" for i in range(count))
    found = assembly(
        llvm.StructType.get_literal([f32] * count),
        [place],
        f"ld.shared.v{count}.f32 {{{names}}}, [${count}+{offset}];",
        ",".join(["=f"] * count + ["r"]),
        pure=False,
    )
    return [llvm.extractvalue(f32, found, [i]) for i in range(count)]


def _write_line(values: list[Any], line: Any, row: Any) -> None:
    """Writes a row of 64 numbers, rounded, to a swizzled tile."""
    low = arith.remui(row, constant(8))
    for piece in range(_LINE // _PIECE):
        part = values[8 * piece : 8 * piece + 8]
        words = [packed_pair(part[i : i + 2], jnp.dtype(jnp.bfloat16)) for i in range(0, 8, 2)]
        place = total(line, (arith.xori(low, constant(piece)), _PIECE))
        text = "st.shared.v4.b32 [$0], {$1,$2,$3,$4};"
        assembly(None, [place, *words], text, "r,r,r,r,r,~{memory}", pure=False)
