"""What follows attention in a layer, in one launch: a block on every multiprocessor, which all meet
between products while weights of the next ones arrive.

Dims: D width of the stream, A width of all heads, F hidden width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import device
from pallas_kernels.hopper.grid import GridBarrier, meet_in_block
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu

from . import inputs
from .config import DEPTH, GROUPS, SLICES, THREADS, Share, num_stages
from .reference import TailCall
from .stream import Product, WeightStream, piece

DTYPES = ("bfloat16", "float16")
_LEAST_STAGES = 4


def unsupported(call: TailCall) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {facts.kind}"
    if "PCIe" in facts.kind:
        return f"{facts.kind} has fewer than {NUM_PROCESSORS} multiprocessors: blocks would wait"
    if call.x.shape[0] != 1:
        return f"{call.x.shape[0]} rows: it takes one"
    if call.x.dtype.name not in DTYPES:
        return f"{call.x.dtype} is neither bfloat16 nor float16"
    if call.norm.scale.dtype.name not in (*DTYPES, "float32"):
        return f"the norm's scale is {call.norm.scale.dtype}"
    kernel = TailKernel.of(call)
    reasons = [product.share.unsupported() for product in kernel.products]
    if any(reasons):
        return next(filter(None, reasons))
    if kernel.num_stages < _LEAST_STAGES:
        return f"{kernel.num_stages} tiles of weights fit in shared memory beside x"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TailKernel:
    """The kernel of one call; methods are its phases, written once per trace."""

    products: tuple[Product, ...]
    dtype: jnp.dtype
    norm: Any  # RmsNorm

    @classmethod
    def of(cls, call: TailCall) -> "TailKernel":
        """The products of a call."""
        D, A, F = call.x.shape[1], call.attended.shape[1], call.down.shape[0]
        return cls(
            products=(
                Product(weight="out", parts="outs", share=Share(K=A, N=D), is_whole=False),
                Product(weight="wide", parts="wides", share=Share(K=D, N=2 * F), is_whole=True),
                Product(weight="down", parts="downs", share=Share(K=F, N=D), is_whole=False),
            ),
            dtype=call.x.dtype,
            norm=call.norm,
        )

    @property
    def x_numbers(self) -> int:
        """What weights are multiplied with at a time, at most."""
        return max(p.share.K if p.is_whole else p.share.most * DEPTH for p in self.products)

    @property
    def num_stages(self) -> int:
        """Tiles in the ring."""
        return num_stages(self.x_numbers)

    @property
    def stream(self) -> WeightStream:
        """All weights, in the order in which they are needed."""
        return WeightStream(products=self.products, num_stages=self.num_stages, dtype=self.dtype)

    def result(self, call: TailCall, counter: Any) -> jax.Array:
        """[1, D]; ``counter`` is a reference to int32 [1]."""
        shares = [product.share for product in self.products]
        operands = {
            "x": call.x,
            "attended": call.attended,
            "scale": call.norm.scale,
            "out": call.out,
            "wide": call.gate_up,
            "down": call.down,
            "counter": counter,
        }
        results = {"y": jax.ShapeDtypeStruct(call.x.shape, self.dtype)}
        for product, share in zip(self.products, shares, strict=True):
            shape = (share.parts, share.N)
            results[product.parts] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return launch(
            self.run,
            operands=operands,
            results=results,
            scratch=self.scratch(),
            num_threads=GROUPS + 1,
            grid=(shares[0].blocks,),
            grid_names=("block",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )["y"]

    def scratch(self) -> dict[str, Any]:
        """The ring, x, barriers."""
        return {
            **self.stream.scratch(),
            "x": plgpu.SMEM((self.x_numbers,), jnp.float32),
            "squares": plgpu.SMEM((SLICES,), jnp.float32),
        }

    def run(self, gmem, smem) -> None:
        """One block: a role for each warpgroup."""
        wg = lax.axis_index("wg")
        pl.when(wg < GROUPS)(functools.partial(self.compute, gmem, smem))
        pl.when(wg == GROUPS)(functools.partial(self.stream.load, gmem, smem))

    def compute(self, gmem, smem) -> None:
        """Products, one after another; blocks meet where one reads what others wrote."""
        stream, (out, wide, down) = self.stream, self.products
        grid = GridBarrier(blocks=out.share.blocks, threads=THREADS)
        stream.offer(smem)
        self.put(inputs.put_rows, smem, gmem.attended, piece_of=out, dtype=self.dtype)
        stream.multiply(gmem, smem, 0)
        grid.meet(gmem.counter)
        self.put_normed(gmem, smem)
        stream.multiply(gmem, smem, 1)
        grid.meet(gmem.counter)
        self.put(inputs.put_hidden, smem, gmem.wides, piece_of=down, gates_and_ups=wide.share)
        stream.multiply(gmem, smem, 2)
        grid.meet(gmem.counter)
        self.write(gmem)

    def put(self, put: Any, smem, source: Any, *, piece_of: Product, **options: Any) -> None:
        """What the block's tiles of a product are multiplied with, into shared memory."""
        splat, ref, share = plgpu.Layout.WG_SPLAT(()), plgpu.RefType(), piece_of.share

        @plgpu.inline_mgpu(arg_types=(ref, ref, splat, splat))
        def run(ctx, source, x, start, stop):
            del ctx
            start, stop = (each.registers.flat[0] for each in (start, stop))
            put(source, x, start, stop, share, **options)
            meet_in_block(THREADS)

        run(source, smem.x, *(jnp.broadcast_to(each, ()) for each in piece(share)))

    def put_normed(self, gmem, smem) -> None:
        """The normalized stream, into shared memory."""
        share = self.products[0].share

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 5)
        def run(ctx, x, parts, scale, squares, x_smem):
            del ctx
            inputs.put_normed(x, parts, scale, squares, x_smem, share, self.norm, dtype=self.dtype)
            meet_in_block(THREADS)

        run(gmem.x, gmem.outs, gmem.scale, smem.squares, smem.x)

    def write(self, gmem) -> None:
        """The block's part of the result."""
        out, _, down = self.products
        refs = (plgpu.RefType(),) * 4

        @plgpu.inline_mgpu(arg_types=(*refs, plgpu.Layout.WG_SPLAT(())))
        def run(ctx, x, outs, downs, y, block):
            del ctx
            sources = [(outs, out.share), (downs, down.share)]
            inputs.write_sums(x, sources, y, block.registers.flat[0], dtype=self.dtype)

        block = jnp.broadcast_to(lax.axis_index("block"), ())
        run(gmem.x, gmem.outs, gmem.downs, gmem.y, block)
