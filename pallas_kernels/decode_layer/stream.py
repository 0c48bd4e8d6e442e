"""The ring buffer of weight tiles for all layers of a launch, and the products with them.

One warpgroup copies tiles of one product after another and waits only for free slots. Weights
depend on no result, so it loads the next product or layer while other warpgroups wait at a grid
barrier. Two warpgroups multiply: a warp has 16 rows of every tile, a lane 8 columns. The sums of a
unit (``WorkSplit``) are added in a fixed order and written in fp32.

Dims: L layer, K contracted, N column of the weight.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from pallas_kernels.hopper.each_thread import each_thread, splat, warp_and_lane
from pallas_kernels.hopper.grid import meet_in_block
from pallas_kernels.hopper.machine import LANES, WARPGROUP
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.slots import COPIED, Slots
from pallas_kernels.hopper.thread_registers import ThreadRegisters
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    from_lane_xor,
    fused,
    global_place,
    i32,
    loaded,
    number,
    total,
    widened_pair,
)
from pallas_kernels.quantized_weight.fragments import Dequantizer, load_number, load_words
from pallas_kernels.quantized_weight.weight import COLUMNS

from .attention import Attention, KeyPlan
from .config import (
    BLOCK_ROWS,
    DEPTH,
    GROUPS,
    SLICES,
    THREADS,
    TILE_BYTES,
    WIDTH,
    TileForm,
    WorkSplit,
)
from .peers import SharedSums
from .per_thread import below, beyond

_COLUMNS = 8  # of a lane: 16 bytes
_ACROSS = WIDTH // _COLUMNS  # lanes side by side
_ROWS = DEPTH // SLICES // (LANES // _ACROSS)  # of a lane, one after another
_HELD = ThreadRegisters(count=_COLUMNS, dtype=jnp.dtype(jnp.float32))
FRAGMENTS = WIDTH // COLUMNS
_STEPS = 2  # of 16 rows, in a block
_LANES = 4  # that have the same columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTile:
    """Multiplication by a quantized weight tile with MMA fragments, as in few_rows_matmul.

    A warp has one or two blocks of 32 rows of every tile, and all 64 columns. The right operand
    repeats the one row of x eight times. So every lane ``4 g + t`` has the sums of columns ``g``
    and ``g + 8`` of each 16.
    """

    form: TileForm
    dtype: jnp.dtype  # dtype of x
    scale_dtype: jnp.dtype

    @property
    def dequantizer(self) -> Dequantizer:
        """Converter of the weight's codes to numbers."""
        assert self.form.code is not None, "16 bits"
        return Dequantizer(code=self.form.code, dtype=self.dtype)

    @property
    def blocks(self) -> int:
        """Number of 32-row blocks that a warp has in a tile."""
        return self.form.depth // BLOCK_ROWS // SLICES

    def tile(self, sums: list[Any], place, x, row) -> list[Any]:
        """Adds the product of x, from index ``row`` on, and the tile at ``place`` to sums."""
        warp, lane = warp_and_lane()
        g, t = (f(lane, constant(_LANES)) for f in (arith.divui, arith.remui))
        first = total((warp, self.blocks * BLOCK_ROWS))
        x_place = total(address(x), (total(row, first), 2), (t, 4))
        per_lane = self.form.line_bytes // FRAGMENTS // 32 // 4  # words
        words_place = total(place, (warp, self.blocks * self.form.line_bytes), (lane, 4 * per_lane))
        group = arith.divui(first, constant(self.form.depth // self.form.groups))
        scale_place = total(
            place, constant(TILE_BYTES),
            (group, WIDTH * self.form.scale_bytes), (g, self.form.scale_bytes),
        )  # fmt: skip
        rows = [
            assembly(i32(), [x_place], f"ld.shared.b32 $0, [$1+{16 * i}];", "=r,r", pure=False)
            for i in range(self.blocks * BLOCK_ROWS // 8)
        ]
        zeros = (self.dequantizer.zero_pair(None),) * 2
        found = []
        for fragment in range(FRAGMENTS):
            products = [number(0.0)] * 4
            for block in range(self.blocks):
                offset = block * self.form.line_bytes + fragment * 4 * per_lane * 32
                words = load_words(words_place, offset, per_lane)
                for step in range(_STEPS):
                    mine = words[step * per_lane // 2 : (step + 1) * per_lane // 2]
                    left = self.dequantizer.numbers(mine, zeros)
                    at = 2 * (_STEPS * block + step)
                    products = self.dequantizer.product(left, rows[at : at + 2], products)
            for r in range(2):
                offset = self.form.scale_bytes * (COLUMNS * fragment + 8 * r)
                scale = load_number(scale_place, offset, self.scale_dtype)
                found.append(fused(products[2 * r], scale, sums[2 * fragment + r]))
        return found

    def keep(self, sums: list[Any], place) -> None:
        """Stores a warp's sums to shared memory in column order, by one lane in four."""
        _, lane = warp_and_lane()
        g, t = (f(lane, constant(_LANES)) for f in (arith.divui, arith.remui))
        with mgpu_utils.when(below(t, constant(1))):
            for i, each in enumerate(sums):
                fragment, r = divmod(i, 2)
                text = f"st.shared.f32 [$0+{4 * (COLUMNS * fragment + 8 * r)}], $1;"
                assembly(None, [total(place, (g, 4)), each], text, "r,f", pure=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product of a layer, with its weight and results in global memory."""

    weight: str  # name in global memory of all layers' weights [L, K, N]
    parts: str  # name in global memory of the partial sums, fp32 [parts, N]
    split: WorkSplit
    scales: str  # name of all layers' scales, if the weights are quantized
    is_whole: bool  # all of x is in shared memory, not only the block's rows of K
    ahead: bool = False  # the next layer reads the result

    def stack_index(self, layer: jax.Array) -> jax.Array:
        """Returns the layer that reads this product of ``layer``."""
        return layer + 1 if self.ahead else layer

    def count(self) -> jax.Array:
        """Returns the number of weight tiles that this block multiplies."""
        s, block = self.split, lax.axis_index("block")
        return lax.div(s.units - block + (s.blocks - 1), jnp.int32(s.blocks)) * s.down

    def place(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the part of K, tile row and tile column of the block's ``i``-th tile."""
        s = self.split
        unit = lax.axis_index("block") + lax.div(i, jnp.int32(s.down)) * s.blocks
        part, column = lax.div(unit, jnp.int32(s.across)), lax.rem(unit, jnp.int32(s.across))
        return part, part * s.down + lax.rem(i, jnp.int32(s.down)), column


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileStream:
    """The ring buffer of tiles that each block of a launch fills and multiplies by."""

    products: tuple[Product, ...]  # the QKV product, then the others
    attention: Attention  # its tiles come after those of the QKV product
    num_layers: int
    num_stages: int
    dtype: jnp.dtype
    codes: QuantizedTile | None = None  # None: weights in 16 bits
    peers: SharedSums | None = None  # None: one device has all of each product

    @property
    def form(self) -> TileForm:
        """Layout of the weights' tiles."""
        return TileForm() if self.codes is None else self.codes.form

    @property
    def slots(self) -> Slots:
        """Slots of the ring, and their barriers."""
        return Slots(count=self.num_stages, warps=SLICES, bytes=self.form.stage_bytes)

    def scratch(self) -> dict[str, Any]:
        """Returns shared-memory buffers: the ring, sums and barriers."""
        return {
            "w": plgpu.SMEM((self.num_stages * self.form.stage_bytes // 4,), jnp.int32),
            "sums": plgpu.SMEM((2, SLICES, WIDTH), jnp.float32),
            "barriers": plgpu.SMEM((self.slots.numbers,), jnp.int32),
        }

    def begin(self, smem) -> None:
        """Initializes the ring; all threads of a block call it before they take their roles."""
        threads = (GROUPS + 1) * WARPGROUP

        def body(barriers):
            first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), constant(0))
            with mgpu_utils.when(first):
                self.slots.begin(barriers)
            meet_in_block(threads, everyone=True)

        each_thread(body, [smem.barriers], [])

    def before(self, layer: jax.Array, which: int, plan: KeyPlan) -> jax.Array:
        """Returns the number of the block's tiles in the ring before those of a product."""
        counts = [self.products[0].count(), 2 * (plan.stop - plan.start)]
        counts += [product.count() for product in self.products[1:]]
        before = functools.reduce(jnp.add, counts[: which and which + 1], jnp.int32(0))
        return layer * functools.reduce(jnp.add, counts) + before

    def load(self, gmem, smem, plan: KeyPlan) -> None:
        """Loads all weight, key and value tiles that the block needs into the ring."""

        def copy_product(layer, which: int, product: Product) -> None:
            before, split = self.before(layer, which, plan), product.split
            names = [product.weight] + ([] if self.codes is None else [product.scales])
            stacks = [getattr(gmem, name) for name in names]

            def body(barriers, ring, *rest):
                *arrays, tile_index, row, column = rest
                self.fetch(barriers, ring, arrays, tile_index, row, column, split)

            def step(i, _):
                _, row, column = product.place(i)
                numbers = [before + i, row, column]
                refs = [smem.barriers, smem.w]
                each_thread(body, refs, numbers, layer=layer, stacks=stacks)

            lax.fori_loop(0, product.count(), step, None)

        def each_layer(layer, _):
            for which, product in enumerate(self.products):
                copy_product(layer, which, product)
                if which == 0:
                    before = self.before(layer, 0, plan) + product.count()
                    self.attention.load(gmem, smem, plan, layer, before, self.slots)

        lax.fori_loop(0, self.num_layers, each_layer, None)

    def fetch(
        self, barriers, ring, arrays: list[Any], tile_index, row, column, split: WorkSplit
    ) -> None:
        """Starts one thread's part of the copies of a weight tile and its scales."""
        form, line = self.form, self.form.line_bytes
        across, mine = line // COPIED, arith.remui(mgpu_utils.thread_idx(), constant(WARPGROUP))
        down, at = (f(mine, constant(across)) for f in (arith.divui, arith.remui))
        # In units of 16 bytes, of which a large weight has fewer than 2**31.
        stride = split.N * form.row_bits // 8 // COPIED
        lines = form.depth // form.line_rows
        first = total((total((row, lines), down), stride), (column, across), at)
        source, place = global_place(arrays[0], first, COPIED), self.slots.place(ring, tile_index)
        step = WARPGROUP // across  # lines
        copies = [
            (
                beyond(source, i * stride * COPIED),
                total(place, (mine, COPIED), constant(i * line)),
            )
            for i in range(0, lines, step)
        ]
        self.slots.wait_free(barriers, tile_index)
        if self.codes is not None:
            self.fetch_scales(place, arrays[1], row, column, split)
        self.slots.fill(barriers, tile_index, copies)

    def fetch_scales(self, place, scales, row, column, split: WorkSplit) -> None:
        """Starts one thread's part of the copy of a tile's scales."""
        form, mine = self.form, arith.remui(mgpu_utils.thread_idx(), constant(WARPGROUP))
        across = WIDTH * form.scale_bytes // COPIED
        assert form.groups * across <= WARPGROUP, "a thread has a copy"
        down, at = (f(mine, constant(across)) for f in (arith.divui, arith.remui))
        group = total(row if form.group_rows == 0 else (row, form.groups), down)
        if form.group_rows == 0:
            group = constant(0)
        with mgpu_utils.when(below(mine, constant(form.groups * across))):
            stride = split.N * form.scale_bytes // COPIED
            source = global_place(scales, total((group, stride), (column, across), at), COPIED)
            target = total(place, constant(TILE_BYTES), (mine, COPIED))
            self.slots.copy(source, target)

    def attend(self, gmem, smem, plan: KeyPlan, layer: jax.Array) -> None:
        """Computes the block's part of attention."""
        before = self.before(layer, 0, plan) + self.products[0].count()
        self.attention.attend(gmem, smem, plan, layer, before, self.slots)

    def multiply(self, gmem, smem, layer: jax.Array, which: int, plan: KeyPlan) -> None:
        """Multiplies the input in ``smem.x`` by the block's tiles, and writes partial sums."""
        product = self.products[which]
        down, before = product.split.down, self.before(layer, which, plan)

        def unit(j, _):
            part, first, column = product.place(j * down)
            base = first if product.is_whole else j * down

            def step(i, sums):
                return self.add_tile(
                    sums, smem, before + j * down + i, (base + i) * self.form.depth
                )

            zeros = _HELD.initial(lambda: [number(0.0)] * _COLUMNS)
            sums = lax.fori_loop(0, down, step, zeros)
            if product.split.devices == 1:
                parts, row = getattr(gmem, product.parts), part
            else:
                parts, row = smem.peers, part + product.stack_index(layer) * product.split.sums
            self.write_sums(sums, smem.sums, parts, j, row, column, product)

        lax.fori_loop(0, lax.div(product.count(), jnp.int32(down)), unit, None)

    def add_tile(self, sums: jax.Array, smem, tile_index: jax.Array, row: jax.Array) -> jax.Array:
        """Adds the product of x, from index ``row`` on, and tile ``tile_index`` to sums."""
        kinds = (_HELD.layout, *[plgpu.RefType()] * 3, *[plgpu.Layout.WG_SPLAT(())] * 2)

        @plgpu.inline_mgpu(arg_types=kinds, return_type=_HELD.array)
        def add(ctx, sums, ring, x, barriers, tile_index, row):
            del ctx
            tile_index, row = (each.registers.flat[0] for each in (tile_index, row))
            self.slots.wait_full(barriers, tile_index)
            tile = self.tile if self.codes is None else self.codes.tile
            found = tile(_HELD.registers(sums), self.slots.place(ring, tile_index), x, row)
            self.slots.release(barriers, tile_index)
            return _HELD.wrap(found)

        return add(sums, smem.w, smem.x, smem.barriers, splat(tile_index), splat(row))

    def tile(self, sums: list[Any], place, x, row) -> list[Any]:
        """Does one thread's part of ``add_tile``; ``place`` is the tile's shared-memory address."""
        warp, lane = warp_and_lane()
        mine = total((warp, DEPTH // SLICES), (arith.divui(lane, constant(_ACROSS)), _ROWS))
        x_place = total(address(x), (total(mine, row), 4))
        factors = [
            arith.bitcast(ir.F32Type.get(), word)
            for word in loaded("ld.shared.v4.b32", x_place, _ROWS, kind="r")
        ]
        across = arith.remui(lane, constant(_ACROSS))
        w_place = total(place, (mine, 2 * WIDTH), (across, 2 * _COLUMNS))
        for i, factor in enumerate(factors):
            words = loaded("ld.shared.v4.b32", w_place, 4, kind="r", offset=2 * WIDTH * i)
            weights = [x for word in words for x in widened_pair(word, self.dtype)]
            sums = [fused(w, factor, x) for w, x in zip(weights, sums, strict=True)]
        return sums

    def write_sums(
        self, sums, sums_smem: Any, parts: Any, j, part, column, product: Product
    ) -> None:
        """Adds a unit's sums over all warps and writes them to ``parts[part]`` at its columns.

        Args:
            parts: the product's partial sums, or addresses of them on all devices (``SharedSums``).
        """
        numbers = (j, part, column)
        kinds = (_HELD.layout, *[plgpu.RefType()] * 2, *[plgpu.Layout.WG_SPLAT(())] * 3)

        @plgpu.inline_mgpu(arg_types=kinds)
        def put(ctx, sums, sums_smem, parts, *numbers):
            del ctx
            j, part, column = (x.registers.flat[0] for x in numbers)
            places = [parts]
            if self.peers is not None and product.split.devices > 1:
                places = self.peers.places(parts, product.parts)
            self.put(_HELD.registers(sums), sums_smem, places, j, part, column, product.split)

        put(sums, sums_smem, parts, *map(splat, numbers))

    def put(
        self, sums: list[Any], sums_smem, places: list[Any], j, part, column, split: WorkSplit
    ) -> None:
        """Does one thread's part of ``write_sums``.

        Units alternate between two buffers, so one barrier per unit separates reads of a buffer
        from the next writes to it.
        """
        warp, lane = warp_and_lane()
        tile_index = total(address(sums_smem), (arith.remui(j, constant(2)), 4 * SLICES * WIDTH))
        place = total(tile_index, (warp, 4 * WIDTH))
        if self.codes is None:
            for distance in (_ACROSS, 2 * _ACROSS):
                sums = [arith.addf(x, from_lane_xor(x, distance)) for x in sums]
            with mgpu_utils.when(below(lane, constant(_ACROSS))):
                for i in range(0, _COLUMNS, 4):
                    text = f"st.shared.v4.f32 [$0+{4 * i}], {{$1,$2,$3,$4}};"
                    both = [total(place, (lane, 4 * _COLUMNS)), *sums[i : i + 4]]
                    assembly(None, both, text, "r,f,f,f,f", pure=False)
        else:
            self.codes.keep(sums, place)
        meet_in_block(THREADS)
        mine = mgpu_utils.thread_idx()
        with mgpu_utils.when(below(mine, constant(WIDTH))):
            place = total(tile_index, (mine, 4))
            found = []
            for i in range(SLICES):
                text = f"ld.shared.f32 $0, [$1+{4 * WIDTH * i}];"
                found.append(assembly(ir.F32Type.get(), [place], text, "=f,r", pure=False))
            at = total((part, split.N), (column, WIDTH), mine)
            whole = functools.reduce(arith.addf, found)
            text = "st.relaxed.sys.global.f32 [$0], $1;"
            if split.devices == 1:
                text = "st.global.f32 [$0], $1;"
            for each in places:
                assembly(None, [global_place(each, at, 4), whole], text, "l,f", pure=False)
