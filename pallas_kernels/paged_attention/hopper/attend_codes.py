"""The kernel that reads quantized pages and dequantizes codes in registers.

As in ``attend``, a block's workers read tiles. But here each warp has its own keys of a tile, and
dequantized numbers are never written to shared memory, whose bandwidth would not suffice. Codes
already cross it twice, written by TMA and read; numbers, two or four times as large, would cross it
twice more.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import llvm, mgpu_utils, plgpu
from pallas_kernels.hopper.thread_registers import ThreadRegisters
from pallas_kernels.hopper.threads import address, number, thread
from pallas_kernels.hopper.tile import tiled
from pallas_kernels.paged_attention.spec import PagedCall
from pallas_kernels.quantized_weight.fragments import Dequantizer

from .attend import NO_MAXIMUM
from .code_tile import F32, WARPS, CodeResult, CodeTile
from .config import RESULT_PADDING, PagedConfig, QueryLayout
from .plan import PagePlan
from .reader import PageKernel, Partials, Segment

I32 = jnp.dtype("int32")
LINE = 64  # scales of a row in shared memory, where a slot has few


def attend_codes(
    call: PagedCall,
    plan: PagePlan,
    *,
    layout: QueryLayout,
    config: PagedConfig,
) -> Partials:
    """Computes partial results as ``attend_pages`` does, for a call whose pages are quantized."""
    assert call.code is not None
    tile = CodeTile(
        H=layout.H, V=layout.V, keys=config.block_kv, rows=layout.tile, tokens=layout.tokens,
        span=layout.span, scale_heads=layout.scale_heads, spec=call.spec,
        dequantizer=Dequantizer(code=call.code, dtype=call.q_BTNH.dtype),
    )  # fmt: skip
    kernel = _AttendCodes(
        g=layout, c=config, spec=call.spec, tile=tile, dtype=call.q_BTNH.dtype,
        codes=call.k_PSKH.dtype, capacity=call.capacity,
        ragged_queries=call.query_lengths_B is not None,
    )  # fmt: skip
    return kernel.partials(
        call, plan, rows=layout.tile,
        k_scale=kernel.lines(call.k_scale_PSK), v_scale=kernel.lines(call.v_scale_PSK),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _AttendCodes(PageKernel):
    """Kernel of one call over quantized pages."""

    tile: CodeTile
    codes: jnp.dtype

    @property
    def line(self) -> int:
        """Number of scales per row of a tile in shared memory: some slots' or a slot's heads'."""
        heads = self.g.scale_heads
        return heads if heads < self.g.K else math.gcd(LINE, self.g.size * heads)

    def lines(self, scale_PSK: jax.Array | None) -> jax.Array:
        """Reshapes scales to the rows in which they are copied to shared memory."""
        assert scale_PSK is not None
        if self.g.scale_heads < self.g.K:
            return scale_PSK
        return scale_PSK.reshape(scale_PSK.shape[0], -1, self.line)

    def scratch(self) -> dict[str, Any]:
        g, c, tile = self.g, self.c, self.tile
        slots, workers = c.num_workers * c.num_stages, c.num_workers
        scales = plgpu.SMEM((slots, c.block_kv * g.scale_heads // self.line, self.line), self.dtype)

        def codes(row_bytes: int):
            shape = (slots, c.block_kv, row_bytes)
            return plgpu.SMEM(shape, self.codes, transforms=tiled(row_bytes, itemsize=1))

        width = g.V + RESULT_PADDING
        return {
            "q": plgpu.SMEM((workers, g.tile, g.H), self.dtype, transforms=tiled(128)),
            "k": codes(tile.key_bytes),
            "v": codes(tile.value_bytes),
            "k_scale": scales,
            "v_scale": scales,
            "numbers": plgpu.SMEM((workers, 2, WARPS, g.tile), F32),
            "parts": plgpu.SMEM((workers, WARPS, g.tile, width), F32),
            **self.barriers(key_copies=3),
        }

    def copy_keys(self, gmem, smem, slot, page_slots: list[tuple[Any, Any]], head) -> None:
        """Starts the copies of a tile's keys, and of the scales of its keys and values."""
        PageKernel.copy_keys(self, gmem, smem, slot, page_slots, head)
        for scale, to in ((gmem.k_scale, smem.k_scale), (gmem.v_scale, smem.v_scale)):
            self.copy_scales(scale, to.at[slot], smem.k_full.at[slot], page_slots, head)

    def copy_scales(self, scale_gmem, tile_smem, full, page_slots: list, head) -> None:
        """Starts the copies of a tile's scales, of heads side by side."""
        g, heads = self.g, self.g.scale_heads
        lines = self.pieces.slots * heads // self.line
        for j, (page, slot) in enumerate(page_slots):
            if heads < g.K:
                at = page, pl.ds(slot, lines), pl.ds(lax.div(head, heads) * heads, heads)
            else:
                at = page, pl.ds(lax.div(slot * heads, self.line), lines)
            plgpu.copy_gmem_to_smem(scale_gmem.at[*at], tile_smem.at[pl.ds(j * lines, lines)], full)

    def compute(self, gmem, smem, worker) -> None:
        def segment(seg: Segment, done):
            plgpu.barrier_wait(smem.q_full.at[worker])
            queries = self.queries(smem.q.at[worker])
            plgpu.barrier_arrive(smem.q_empty.at[worker])
            softmax, sums = self.nothing()

            def step(i, carry):
                softmax, sums = carry
                slot = worker * self.c.num_stages + lax.rem(done + i, self.c.num_stages)
                plgpu.barrier_wait(smem.k_full.at[slot])
                numbers = (
                    (seg.first + i) * self.c.block_kv,
                    lax.rem(seg.head, self.g.scale_heads),
                    seg.extent.position,
                    seg.extent.tokens,
                )
                refs = (smem.k.at[slot], smem.k_scale.at[slot], smem.v_scale.at[slot])
                softmax, alphas, right = self.probabilities(numbers, queries, softmax, refs)
                plgpu.barrier_arrive(smem.k_empty.at[slot])
                plgpu.barrier_wait(smem.v_full.at[slot])
                sums = self.add_values(right, alphas, sums, smem.v.at[slot])
                plgpu.barrier_arrive(smem.v_empty.at[slot])
                return softmax, sums

            softmax, sums = lax.fori_loop(0, seg.count, step, (softmax, sums))
            self.write_segment(gmem, smem, worker, seg.partial, softmax, sums)

        self.each_segment(gmem, worker, segment)

    @property
    def held(self) -> dict[str, ThreadRegisters]:
        """Per-thread registers, by name, that are kept between the instructions of a tile."""
        tile = self.tile
        return {
            "queries": ThreadRegisters(count=tile.num_queries, dtype=I32),
            "softmax": ThreadRegisters(count=2 * tile.num_softmax, dtype=F32),
            "alphas": ThreadRegisters(count=tile.num_softmax, dtype=F32),
            "right": ThreadRegisters(count=tile.num_weights, dtype=I32),
            "sums": ThreadRegisters(count=tile.num_sums, dtype=F32),
        }

    def inlined(self, given: str, found: str, refs: list[Any], body, *, numbers: int = 0):
        """A function that inlines ``body(numbers, *arrays' numbers, *refs)``."""
        held = self.held
        given_held, found_held = ([held[n] for n in names.split()] for names in (given, found))
        kinds = [plgpu.Layout.WG_SPLAT(())] * numbers
        kinds += [each.layout for each in given_held]
        kinds += refs
        returned = tuple(each.array for each in found_held)

        @plgpu.inline_mgpu(arg_types=tuple(kinds), return_type=returned)
        def inlined(ctx, *args):
            del ctx
            lone = tuple(x.registers.flat[0] for x in args[:numbers])
            arrays = args[numbers : len(args) - len(refs)]
            apart = [h.registers(x) for h, x in zip(given_held, arrays, strict=True)]
            lists = body(lone, *apart, *args[len(args) - len(refs) :])
            return tuple(h.wrap(x) for h, x in zip(found_held, lists, strict=True))

        return inlined

    def queries(self, q_smem) -> jax.Array:
        """Loads the tile's queries as right operands."""

        def body(numbers, q):
            del numbers
            return (self.tile.queries(thread(), address(q)),)

        return self.inlined("", "queries", [plgpu.RefType(tiled(128))], body)(q_smem)[0]

    def nothing(self) -> tuple[jax.Array, jax.Array]:
        """Returns the softmax's maxima and sums before any key."""

        def body(numbers):
            del numbers
            count = self.tile.num_softmax
            zero, no_maximum = number(0.0), number(NO_MAXIMUM)
            return [no_maximum] * count + [zero] * count, [zero] * self.tile.num_sums

        return self.inlined("", "softmax sums", [], body)()

    def probabilities(self, numbers, queries, softmax, refs):
        """Calls ``CodeTile.probabilities`` inline."""

        def body(numbers, queries, softmax, *refs):
            buffers = tuple(address(ref) for ref in refs)
            return self.tile.probabilities(thread(), buffers, numbers, queries, softmax)

        kinds = [_codes_kind(self.tile.key_bytes), plgpu.RefType(), plgpu.RefType()]
        inlined = self.inlined(
            "queries softmax", "softmax alphas right", kinds, body, numbers=len(numbers)
        )
        return inlined(*(jnp.broadcast_to(x, ()) for x in numbers), queries, softmax, *refs)

    def add_values(self, right, alphas, sums, v_smem) -> jax.Array:
        """Calls ``CodeTile.add_values`` inline."""

        def body(numbers, right, alphas, sums, v):
            del numbers
            return (self.tile.add_values(thread(), address(v), right, alphas, sums),)

        inlined = self.inlined(
            "right alphas sums", "sums", [_codes_kind(self.tile.value_bytes)], body
        )
        return inlined(right, alphas, sums, v_smem)[0]

    def write_segment(self, gmem, smem, worker, partial, softmax, sums) -> None:
        """Calls ``CodeResult.write`` inline."""

        def body(numbers, softmax, sums, counts, parts, out, lse):
            buffers = address(counts), address(parts)
            i64 = ir.IntegerType.get_signless(64)
            out, lse = (llvm.ptrtoint(i64, mgpu_utils.memref_ptr(x)) for x in (out, lse))
            results = out, lse, numbers[0]
            CodeResult(tile=self.tile).write(
                thread(), buffers, results, softmax, sums, mgpu_utils.warpgroup_barrier
            )
            return ()

        refs = smem.numbers.at[worker], smem.parts.at[worker], gmem.out, gmem.lse
        inlined = self.inlined("softmax sums", "", [plgpu.RefType()] * 4, body, numbers=1)
        inlined(jnp.broadcast_to(partial, ()), softmax, sums, *refs)


def _codes_kind(row_bytes: int) -> Any:
    """Returns the argument type of a tile of codes in shared memory."""
    return plgpu.RefType(tiled(row_bytes, itemsize=1))
