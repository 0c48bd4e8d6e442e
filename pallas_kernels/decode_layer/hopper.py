"""The kernel that computes all layers for one token, with a grid barrier between phases.

Dims: L layer, D width of the stream, A width of all query heads, F hidden width; as in
``attention``.
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
from pallas_kernels.hopper.each_thread import each_thread
from pallas_kernels.hopper.grid import GridBarrier, meet_in_block
from pallas_kernels.hopper.launch import launch, references
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.threads import assembly, constant, global_place
from pallas_kernels.quantized_weight import Arrangement, QuantizedWeight

from . import inputs
from .attention import Attention, KeyPlan
from .attention_threads import HeadSizes, most_parts, put_attended
from .config import GROUPS, SLICES, THREADS, TileForm, WorkSplit, num_stages
from .peers import SharedSums
from .reference import WEIGHTS, KeyAndValuePools, LayersCall, LayerWeights
from .stream import Product, QuantizedTile, TileStream

DTYPES = ("bfloat16", "float16")
_LARGE = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200"
"""Prefixes of the names of GPUs with as many SMs as a launch has blocks."""
_LEAST_STAGES = 4
_SHARED = "out", "down"  # products of rows that devices divide
_MEETINGS = range(5)  # of a layer
_AFTER_SHARED = 2, 4  # not needed where readers wait for each sum
_SCALES = "attention_scale", "mlp_scale"
_LINE = 128  # bytes that L2 is asked for
_ATTENTION, _MLP = 0, 1  # rows of the stream: what either's norm is of


def unsupported(call: LayersCall) -> str | None:
    """Returns why the decode-layer kernel cannot compute this call; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {facts.kind}"
    if not facts.kind.startswith(_LARGE):
        few = f"{facts.kind} may have fewer than {NUM_PROCESSORS} multiprocessors"
        return f"{few}, and blocks wait for each other"
    if call.x.shape[0] != 1:
        return f"{call.x.shape[0]} rows: it takes one"
    if call.x.dtype.name not in DTYPES:
        return f"{call.x.dtype} is neither bfloat16 nor float16"
    for norm in call.layers.norms:
        if norm.scale.dtype.name not in (*DTYPES, "float32"):
            return f"a norm's scales are {norm.scale.dtype}, neither 16 nor 32 bits"
    reason = _unlike(call.layers) or _unreachable(call)
    if reason is not None:
        return reason
    kernel = LayersKernel.of(call)
    reasons = [product.split.unsupported() for product in kernel.products]
    reasons.append(kernel.attention.unsupported())
    if any(reasons):
        return next(filter(None, reasons))
    if kernel.stream.num_stages < _LEAST_STAGES:
        return f"{kernel.stream.num_stages} tiles of weights fit in shared memory beside x"
    return None


def _unlike(layers: LayerWeights) -> str | None:
    """Explains why weights cannot share a launch; None if they can."""
    for name in WEIGHTS:
        weight = getattr(layers, name)
        if isinstance(weight, QuantizedWeight) != isinstance(layers.qkv, QuantizedWeight):
            return "some weights are quantized, and some in 16 bits"
        if not isinstance(weight, QuantizedWeight):
            continue
        form = weight.format
        if weight.arrangement is not Arrangement.FRAGMENTS or form.activations is not None:
            return f"{name} in {form.name} is not in the order of fragments: see arranged"
        if weight.zeros is not None:
            return f"{name} in {form.name} has zero points"
        if TileForm.of(weight) != TileForm.of(layers.qkv):
            return f"{name} is in {form.name}, and qkv in another format"
    return None


def _unreachable(call: LayersCall) -> str | None:
    """Explains why the devices of the call's axis cannot share a launch; None if they can."""
    if call.axis is None:
        return None
    if isinstance(call.layers.qkv, QuantizedWeight):
        return "quantized weights over several devices"
    if jax.process_count() > 1:
        return "devices of several processes, which cannot write to one another's memory"
    size = jax.sharding.get_abstract_mesh().size
    if size != call.devices:
        return f"a mesh of {size} devices, of which {call.axis} has {call.devices}: it needs all"
    return None


def decode_layers_hopper(call: LayersCall) -> tuple[jax.Array, KeyAndValuePools]:
    """Computes all layers of a supported call by one launch of the Hopper kernel."""
    kernel = LayersKernel.of(call)
    shared = {} if kernel.peers is None else kernel.peers.sums(kernel.num_layers + 1)
    arrays = dict(zip(("k", "v"), call.pages, strict=True), counter=jnp.zeros(1, jnp.int32))
    arrays |= shared
    refs = dict(zip(arrays, references([*arrays.values()]), strict=True))
    y = kernel.result(call, refs)
    return y, (jax.freeze(refs["k"]), jax.freeze(refs["v"]))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayersKernel:
    """The decode-layer kernel of one launch; its methods emit the kernel's phases."""

    products: tuple[Product, ...]
    attention: Attention
    norms: tuple[RmsNorm, RmsNorm]  # with scales [L, D]
    num_layers: int
    dtype: jnp.dtype
    codes: QuantizedTile | None
    axis: str | None
    devices: int

    @classmethod
    def of(cls, call: LayersCall) -> "LayersKernel":
        """Returns the kernel for a call, with its products and attention."""
        layers = call.layers
        shapes = {name: layers.shape(name) for name in WEIGHTS}
        form, (A, _) = TileForm.of(layers.qkv), shapes["out"]
        num_layers, num_pages, page, K, H = call.pages[0].shape
        qkv, out, gate_up, down = (
            Product(
                weight=name, parts=f"{name}_parts", scales=f"{name}_scales",
                split=WorkSplit(
                    K=k, N=n, depth=form.depth, devices=call.devices if name in _SHARED else 1
                ),
                is_whole=name in ("qkv", "gate_up"), ahead=name == "down",
            )
            for name, (k, n) in shapes.items()
        )  # fmt: skip
        codes = None
        if isinstance(layers.qkv, QuantizedWeight):
            codes = QuantizedTile(
                form=form, dtype=call.x.dtype, scale_dtype=layers.qkv.scales.dtype
            )
        heads = HeadSizes(N=A // H, K=K, H=H, scale=call.scale, dtype=call.x.dtype, split=qkv.split)
        attention = Attention(
            sizes=heads, num_pages=num_pages, page=page, table=call.tables.shape[1],
            blocks=qkv.split.blocks,
        )  # fmt: skip
        return cls(
            products=(qkv, out, gate_up, down), attention=attention, norms=layers.norms,
            num_layers=num_layers, dtype=call.x.dtype, codes=codes, axis=call.axis,
            devices=call.devices,
        )  # fmt: skip

    @property
    def peers(self) -> SharedSums | None:
        """Sums that devices write to one another; None if one device computes the layers."""
        if self.axis is None or self.devices == 1:
            return None
        splits = {p.parts: p.split for p in self.products if p.weight in _SHARED}
        return SharedSums(axis=self.axis, devices=self.devices, splits=splits)

    @property
    def x_bytes(self) -> int:
        """Most bytes of shared memory that the input of any phase takes, beside the ring."""
        counts = [p.split.K if p.is_whole else p.split.most_rows for p in self.products]
        rows, sizes = self.products[1].split.most_rows, self.attention.sizes
        factors = rows // sizes.H * most_parts(sizes.K, self.blocks)
        own = max(counts) * (4 if self.codes is None else 2)
        return max(own, 4 * sizes.x_numbers, 4 * (rows + factors))

    @property
    def blocks(self) -> int:
        """Number of blocks in the grid."""
        return self.attention.blocks

    @property
    def form(self) -> TileForm:
        """Layout of the weights' tiles."""
        return TileForm() if self.codes is None else self.codes.form

    def rows(self, x_smem: Any) -> inputs.Rows:
        """Returns the products' input rows as they are stored in shared memory."""
        return inputs.Rows(smem=x_smem, packed=None if self.codes is None else self.dtype)

    @property
    def stream(self) -> TileStream:
        """The ring buffer that receives all weights, keys and values in the order of their use."""
        return TileStream(
            products=self.products, attention=self.attention, num_layers=self.num_layers,
            num_stages=num_stages(self.x_bytes, self.form.stage_bytes), dtype=self.dtype,
            codes=self.codes, peers=self.peers,
        )  # fmt: skip

    def result(self, call: LayersCall, refs: dict[str, Any]) -> jax.Array:
        """Launches the kernel and returns y, [1, D].

        Args:
            refs: references to arrays written in place: "counter", int32 [1], pools "k" and "v",
                and the sums of ``peers``.
        """
        sizes, width = self.attention.sizes, call.x.shape[1]
        parts = most_parts(sizes.K, self.blocks)
        results = {
            "y": jax.ShapeDtypeStruct(call.x.shape, self.dtype),
            "stream": jax.ShapeDtypeStruct((2, width), jnp.float32),
            "attended": jax.ShapeDtypeStruct((parts, sizes.N, sizes.H), jnp.float32),
            "stats": jax.ShapeDtypeStruct((parts, sizes.N, 2), jnp.float32),
        }
        for product in self.products:
            shape = (product.split.parts, product.split.N)
            if product.parts not in refs:
                results[product.parts] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return launch(
            self.run,
            name="decode_layers",
            operands={**call.arrays(), **refs},
            results=results,
            scratch={
                **self.stream.scratch(),
                **({} if self.peers is None else self.peers.scratch()),
                "x": plgpu.SMEM((self.x_bytes // 4,), jnp.float32),
                "squares": plgpu.SMEM((SLICES,), jnp.float32),
            },
            num_threads=GROUPS + 1,
            grid=(self.blocks,),
            grid_names=("block",),
        )["y"]

    def run(self, gmem, smem) -> None:
        """Runs one block: two warpgroups compute, the last loads tiles."""
        wg = lax.axis_index("wg")
        plan = self.attention.plan(gmem)
        if self.peers is not None:
            self.peers.begin(gmem, smem)
        self.stream.begin(smem)

        # Of a multiprocessor's registers as many as all that warpgroups began with, less a few.
        @pl.when(wg < GROUPS)
        def _():
            plgpu.set_max_registers(208, action="increase")
            self.compute(gmem, smem, plan)

        @pl.when(wg == GROUPS)
        def _():
            plgpu.set_max_registers(80, action="decrease")
            self.stream.load(gmem, smem, plan)

    def compute(self, gmem, smem, plan: KeyPlan) -> None:
        """Computes all layers in order; a grid barrier precedes reads of other blocks' results."""
        stream, (_, out, wide, down) = self.stream, self.products
        put_normed = functools.partial(self.put_normed, gmem, smem)

        def layer(i, _):
            meet = functools.partial(self.meet, gmem, i)
            multiply = functools.partial(stream.multiply, gmem, smem, i, plan=plan)
            pl.when(i == 0)(lambda: put_normed(i, _ATTENTION, None))
            pl.when(i > 0)(lambda: put_normed(i, _ATTENTION, down))
            multiply(0)
            self.ask_for_scale(gmem, i, _MLP)
            meet(0)
            stream.attend(gmem, smem, plan, i)
            meet(1)
            self.put_attended(gmem, smem, plan)
            multiply(1)
            meet(2)
            put_normed(i, _MLP, out)
            multiply(2)
            meet(3)
            self.put_hidden(gmem, smem, wide, down)
            after = jnp.minimum(i + 1, self.num_layers - 1)
            self.ask_for_scale(gmem, after, _ATTENTION)
            multiply(3)
            meet(4)

        lax.fori_loop(0, self.num_layers, layer, None)
        self.write(gmem, down)

    def meet(self, gmem, layer: jax.Array, which: int) -> None:
        """Barrier of all blocks, if it is needed."""
        needed = [each for each in _MEETINGS if self.peers is None or each not in _AFTER_SHARED]
        if which in needed:
            grid = GridBarrier(blocks=self.blocks, threads=THREADS)
            grid.meet(gmem.counter, layer * len(needed) + needed.index(which))

    def put_hidden(self, gmem, smem, wide: Product, down: Product) -> None:
        """Computes the MLP's hidden values from all blocks' gates and ups, into shared memory."""

        def body(parts, x, block):
            inputs.put_hidden(parts, self.rows(x), block, down.split, wide.split)
            meet_in_block(THREADS)

        refs = [getattr(gmem, wide.parts), smem.x]
        each_thread(body, refs, [lax.axis_index("block")])

    def put_attended(self, gmem, smem, plan: KeyPlan) -> None:
        """Merges attention's results of all blocks, and stores them in shared memory."""
        split = self.products[1].split

        def body(attended, stats, x, block, *plan):
            rows = self.rows(x)
            put_attended(attended, stats, rows, block, plan, self.attention.sizes, split)
            meet_in_block(THREADS)

        numbers = [lax.axis_index("block"), plan.tiles, plan.line, plan.blocks]
        each_thread(body, [gmem.attended, gmem.stats, smem.x], numbers)

    def ask_for_scale(self, gmem, layer: jax.Array, row: int) -> None:
        """Prefetches a norm's scale to L2, since reads are slow while the ring is being filled."""
        scales = getattr(gmem, _SCALES[row])
        lines = -(-scales.shape[1] * scales.dtype.itemsize // _LINE)

        def body(scale):
            mine = arith.minui(mgpu_utils.thread_idx(), constant(lines - 1))
            line = global_place(scale, mine, _LINE)
            assembly(None, [line], "prefetch.global.L2 [$0];", "l", pure=False)

        each_thread(body, [], [], layer=layer, stacks=[scales])

    def put_normed(self, gmem, smem, layer: jax.Array, row: int, product: Product | None) -> None:
        """Adds a product to the residual stream, and stores the stream's norm in shared memory."""
        split, parts = None, []
        if product is not None:
            split, parts = product.split, [getattr(gmem, product.parts)]
        stacks = [*(parts if self.is_shared(product) else []), getattr(gmem, _SCALES[row])]

        def body(x, stream, squares, x_smem, *rest):
            *parts, scale, block = rest
            inputs.put_normed(
                x, parts[0] if parts else None, stream, scale, squares, self.rows(x_smem), block,
                row=row, split=split, norm=self.norms[row], blocks=self.blocks, dtype=self.dtype,
            )  # fmt: skip
            meet_in_block(THREADS)

        refs = [gmem.x, gmem.stream, smem.squares, smem.x]
        refs += [] if self.is_shared(product) else parts
        each_thread(body, refs, [lax.axis_index("block")], layer=layer, stacks=stacks)

    def write(self, gmem, down: Product) -> None:
        """Writes the block's part of the result to global memory."""

        def body(stream, y, parts, block):
            inputs.write_result(
                parts, stream, y, block, row=_MLP, split=down.split, dtype=self.dtype
            )

        refs, parts, last = [gmem.stream, gmem.y], [getattr(gmem, down.parts)], self.num_layers
        block = [lax.axis_index("block")]
        if self.is_shared(down):
            each_thread(body, refs, block, layer=last, stacks=parts)
        else:
            each_thread(body, refs + parts, block)

    def is_shared(self, product: Product | None) -> bool:
        """Whether all devices add to a product; its sums are then stacked by layers."""
        return product is not None and product.split.devices > 1
