"""A layer, or what follows attention in it, in one launch: a block on every multiprocessor, which
all meet between phases while weights of the next ones arrive.

Dims: D width of the stream, A width of all query heads, F hidden width; as in ``attention``.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import device
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.hopper.grid import GridBarrier, meet_in_block
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu

from . import inputs
from .attention import Attention, AttentionPlan
from .attention_threads import HeadSizes, most_parts, put_attended
from .config import DEPTH, GROUPS, SLICES, THREADS, Share, num_stages
from .per_thread import each_thread
from .reference import LayerCall, TailCall
from .stream import Product, WeightStream, piece

DTYPES = ("bfloat16", "float16")
_LEAST_STAGES = 4


def unsupported(call: TailCall | LayerCall) -> str | None:
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
    for norm in call.norms.values():
        if norm.scale.dtype.name not in (*DTYPES, "float32"):
            return f"a norm's scale is {norm.scale.dtype}"
    kernel = LayerKernel.of(call)
    reasons = [product.share.unsupported() for product in kernel.products]
    reasons.append(None if kernel.attention is None else kernel.attention.unsupported())
    if any(reasons):
        return next(filter(None, reasons))
    if kernel.stream.num_stages < _LEAST_STAGES:
        return f"{kernel.stream.num_stages} tiles of weights fit in shared memory beside x"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerKernel:
    """The kernel of one call; methods are its phases, written once per trace."""

    products: tuple[Product, ...]  # of heads, where there is attention; out, wide, down
    attention: Attention | None
    norms: dict[str, RmsNorm]
    dtype: jnp.dtype

    @classmethod
    def of(cls, call: TailCall | LayerCall) -> "LayerKernel":
        """The phases of a call."""
        D, F = call.x.shape[1], call.down.shape[0]
        heads, attention, dtype = (), None, call.x.dtype
        if isinstance(call, LayerCall):
            share = Share(K=D, N=call.qkv.shape[1])
            heads = (Product(weight="qkv", parts="heads", share=share, is_whole=True),)
            num_pages, page, K, H = call.k_pages.shape
            sizes = HeadSizes(
                N=call.out.shape[0] // H, K=K, H=H, scale=call.scale, dtype=dtype, share=share
            )
            attention = Attention(
                sizes=sizes, num_pages=num_pages, page=page, table=call.tables.shape[1],
                blocks=share.blocks,
            )  # fmt: skip
        tail = (
            Product(
                weight="out", parts="outs", share=Share(K=call.out.shape[0], N=D), is_whole=False
            ),
            Product(weight="wide", parts="wides", share=Share(K=D, N=2 * F), is_whole=True),
            Product(weight="down", parts="downs", share=Share(K=F, N=D), is_whole=False),
        )
        return cls(products=heads + tail, attention=attention, norms=call.norms, dtype=dtype)

    @property
    def x_numbers(self) -> int:
        """fp32 numbers in shared memory beside weights, at most."""
        counts = [p.share.K if p.is_whole else p.share.most * DEPTH for p in self.products]
        return max(*counts, 0 if self.attention is None else self.attention.sizes.x_numbers)

    @property
    def stream(self) -> WeightStream:
        """All weights, in the order in which they are needed."""
        return WeightStream(
            products=self.products, num_stages=num_stages(self.x_numbers), dtype=self.dtype,
            attention=self.attention,
        )  # fmt: skip

    def result(self, call: TailCall | LayerCall, refs: dict[str, Any]) -> jax.Array:
        """[1, D].

        Args:
            refs: references to what is written in place: "counter", int32 [1], and "k" and "v".
        """
        blocks = self.products[0].share.blocks
        results = {"y": jax.ShapeDtypeStruct(call.x.shape, self.dtype)}
        for product in self.products:
            shape = (product.share.parts, product.share.N)
            results[product.parts] = jax.ShapeDtypeStruct(shape, jnp.float32)
        if self.attention is not None:
            sizes = self.attention.sizes
            shape = (most_parts(sizes.K, blocks), sizes.N)
            results["attended"] = jax.ShapeDtypeStruct((*shape, sizes.H), jnp.float32)
            results["stats"] = jax.ShapeDtypeStruct((*shape, 2), jnp.float32)
        scales = {f"{name}_scale": norm.scale for name, norm in self.norms.items()}
        return launch(
            self.run,
            operands={"x": call.x, **call.arrays(), **scales, **refs},
            results=results,
            scratch={
                **self.stream.scratch(),
                "x": plgpu.SMEM((self.x_numbers,), jnp.float32),
                "squares": plgpu.SMEM((SLICES,), jnp.float32),
            },
            num_threads=GROUPS + 1,
            grid=(blocks,),
            grid_names=("block",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )["y"]

    def run(self, gmem, smem) -> None:
        """One block: a role for each warpgroup."""
        wg = lax.axis_index("wg")
        plan = None if self.attention is None else self.attention.plan(gmem)
        pl.when(wg < GROUPS)(functools.partial(self.compute, gmem, smem, plan))
        pl.when(wg == GROUPS)(functools.partial(self.stream.load, gmem, smem, plan))

    def compute(self, gmem, smem, plan: AttentionPlan | None) -> None:
        """Products, one after another; blocks meet where one reads what others wrote."""
        stream, first = self.stream, len(self.products) - 3
        out, wide, down = self.products[first:]
        grid = GridBarrier(blocks=out.share.blocks, threads=THREADS)
        stream.offer(smem)
        if plan is None:
            self.put(inputs.put_rows, [gmem.attended], smem, out, dtype=self.dtype)
        else:
            self.put_normed(gmem, smem, "attention", None)
            stream.multiply(gmem, smem, 0)
            grid.meet(gmem.counter)
            stream.attend(gmem, smem, plan)
            grid.meet(gmem.counter)
            self.put_attended(gmem, smem, plan, out)
        stream.multiply(gmem, smem, first, plan)
        grid.meet(gmem.counter)
        self.put_normed(gmem, smem, "mlp", out.share)
        stream.multiply(gmem, smem, first + 1, plan)
        grid.meet(gmem.counter)
        self.put(inputs.put_hidden, [gmem.wides], smem, down, gates_and_ups=wide.share)
        stream.multiply(gmem, smem, first + 2, plan)
        grid.meet(gmem.counter)
        self.write(gmem, out, down)

    def put(self, put: Any, sources: list[Any], smem, product: Product, **options: Any) -> None:
        """What the block's tiles of a product are multiplied with, into shared memory."""

        def body(*given):
            put(*given, share=product.share, **options)
            meet_in_block(THREADS)

        each_thread(body, [*sources, smem.x], piece(product.share))

    def put_attended(self, gmem, smem, plan: AttentionPlan, product: Product) -> None:
        """What attention gave, of all blocks."""
        assert self.attention is not None
        sizes = self.attention.sizes

        def body(*given):
            put_attended(*given, sizes=sizes, share=product.share)
            meet_in_block(THREADS)

        numbers = [*piece(product.share), plan.tiles, plan.line, plan.blocks]
        each_thread(body, [gmem.attended, gmem.stats, smem.x], numbers)

    def put_normed(self, gmem, smem, name: str, share: Share | None) -> None:
        """The normalized stream, with a product of this share added, into shared memory."""
        norm, sources = self.norms[name], [gmem.x, getattr(gmem, f"{name}_scale")]

        def body(x, scale, squares, x_smem, parts=None):
            inputs.put_normed(x, parts, scale, squares, x_smem, share, norm, dtype=self.dtype)
            meet_in_block(THREADS)

        parts = [] if share is None else [gmem.outs]
        each_thread(body, [*sources, smem.squares, smem.x, *parts], [])

    def write(self, gmem, out: Product, down: Product) -> None:
        """The block's part of the result."""

        def body(x, outs, downs, y, block):
            sources = [(outs, out.share), (downs, down.share)]
            inputs.write_sums(x, sources, y, block, dtype=self.dtype)

        each_thread(body, [gmem.x, gmem.outs, gmem.downs, gmem.y], [lax.axis_index("block")])
