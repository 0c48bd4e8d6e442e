"""Rows of tens of thousands of columns on a Hopper GPU: read once, kept in shared memory, written.

A block of four warpgroups holds a whole row of 32,768 columns, a cluster of blocks a longer one.
The copy engine fills a ring of chunks ahead; a warpgroup folds each chunk of its share into a few
numbers a row, all exchange these, and a second turn over the chunks writes the result straight from
registers, which frees each chunk for the next row. What limits wide rows is that exchange: the
fewer blocks share a row the better. Of 132 multiprocessors 120 can form clusters of four or eight;
a grid that asks for more runs a second wave (norm/NOTES.md).

Dims: R row, C column, A part of a row in a warpgroup, M column of a part, P part of a row.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_rows import cluster_fence, lane_layout, tile_layout
from .hopper_rows_config import WARPS

WARPGROUPS = 4
TILE = 512  # columns of a warp's part that are in registers at a time, 16 a thread
PIECE = WARPGROUPS * WARPS * TILE
"""Columns of a row that a block works on at a time."""
TURNS = 4  # exchanges that may overlap: one is still read while the second next is written

type Load = Callable[[int], jax.Array]
"""Input or vector i as fp32 [A, M]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """What is done to a row."""

    fold: Callable[[Load, Load, tuple[jax.Array, ...] | None], tuple[jax.Array, ...]]
    """(inputs, vectors, numbers so far) to numbers of each part, [A] each."""
    combine: Callable[..., tuple[jax.Array, ...]]  # numbers of all parts, [P] each, to scalars
    finish: Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]
    """(inputs, vectors, scalars, accumulators) to (result, accumulators)."""
    num_statistics: int
    num_accumulators: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How a row lies on blocks."""

    cluster: int = 1  # blocks that share a row
    tiles: int = 1  # of a chunk: what arrives and is freed at once
    chunks: int = 1  # of a block's share of a row
    slots: int = 4  # chunks in shared memory
    ahead: bool = False  # the next row is folded before a row is finished; needs two rows' slots

    @property
    def columns(self) -> int:
        """Of the rows that fit."""
        return self.cluster * self.chunks * self.tiles * PIECE

    @property
    def num_clusters(self) -> int:
        """That run at the same time."""
        return {1: 132, 2: 66, 4: 30, 8: 15}[self.cluster]


def wide_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Config,
    vectors_C: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:
    """Applies a formula to every row.

    Args:
        inputs_RC: of one 16-bit dtype; C is ``config.columns``.
        vectors_C: fp32, the same for all rows, kept in shared memory.

    Returns:
        The result, of the inputs' shape and dtype, and the accumulators' partial sums, fp32 [N, C].
    """
    (num_rows, columns), dtype = inputs_RC[0].shape, inputs_RC[0].dtype
    assert columns == config.columns, (columns, config)
    needed = config.chunks * (2 if config.ahead else 1)
    assert config.slots >= needed, f"{config} keeps {needed} chunks"
    kernel = _Wide(
        f=formula, c=config, num_rows=num_rows, dtype=dtype, num_inputs=len(inputs_RC),
        num_vectors=len(vectors_C),
    )  # fmt: skip
    scratch = kernel.scratch()
    shape = (num_rows, *kernel.row_shape)
    partial = jax.ShapeDtypeStruct((kernel.num_workers, *kernel.row_shape), jnp.float32)
    num_operands = len(inputs_RC) + len(vectors_C)

    def body(*refs):
        gmem = types.SimpleNamespace(
            inputs=refs[: len(inputs_RC)],
            vectors=refs[len(inputs_RC) : num_operands],
            out=refs[num_operands],
            partials=refs[num_operands + 1 : num_operands + 1 + formula.num_accumulators],
        )
        smem = dict(zip(scratch, refs[num_operands + 1 + formula.num_accumulators :], strict=True))
        kernel.run(gmem, types.SimpleNamespace(**smem))

    out, *partials = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(shape, dtype), *[partial] * formula.num_accumulators),
        scratch_types=tuple(scratch.values()),
        grid=(kernel.num_workers,),
        grid_names=("worker",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=256
        ),
    )(*(x.reshape(shape) for x in inputs_RC), *(v.reshape(kernel.row_shape) for v in vectors_C))
    return out.reshape(num_rows, columns), *(x.reshape(-1, columns) for x in partials)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Wide:
    """The kernel of one call; methods are its phases, written once per trace."""

    f: Formula
    c: Config
    num_rows: int
    dtype: jnp.dtype
    num_inputs: int
    num_vectors: int

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.c.cluster, WARPGROUPS, self.c.chunks, self.c.tiles, WARPS, TILE

    @property
    def num_workers(self) -> int:
        return min(self.c.num_clusters, self.num_rows)

    @property
    def num_parts(self) -> int:
        return self.c.cluster * WARPGROUPS * WARPS

    @property
    def layout(self):
        """16 bytes side by side of a 16-bit input; less where fp32 vectors would conflict."""
        return tile_layout(4 if self.num_vectors else 8)

    def scratch(self) -> dict[str, Any]:
        c = self.c
        chunk = (c.tiles, WARPS, TILE)
        buffers: dict[str, Any] = {
            f"input{j}": plgpu.SMEM((WARPGROUPS, c.slots, *chunk), self.dtype)
            for j in range(self.num_inputs)
        }
        for j in range(self.num_vectors):
            buffers[f"vector{j}"] = plgpu.SMEM((WARPGROUPS, c.chunks, *chunk), jnp.float32)
        buffers["parts"] = plgpu.SMEM((TURNS, self.f.num_statistics, self.num_parts), jnp.float32)
        buffers["full"] = plgpu.Barrier(
            num_arrivals=self.num_inputs, num_barriers=WARPGROUPS * c.slots
        )
        if self.num_vectors:
            buffers["vectors_full"] = plgpu.Barrier(num_arrivals=self.num_vectors)
        # Two in turns: the others may arrive for a row before this block has waited for the last.
        if c.cluster > 1:
            buffers["exchanged"] = plgpu.ClusterBarrier(
                collective_axes=("cluster",), num_barriers=2, num_arrivals=WARPGROUPS
            )
        else:
            buffers["exchanged"] = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2)
        return buffers

    def run(self, gmem, smem) -> None:
        """One warpgroup."""
        c, f = self.c, self.f
        worker = lax.axis_index("worker")
        me = types.SimpleNamespace(wg=lax.axis_index("wg"), rank=lax.axis_index("cluster"))
        count = lax.div(self.num_rows - worker + self.num_workers - 1, self.num_workers)

        def place(q):
            """Of this warpgroup's q-th chunk: its row, which chunk of it, its slot."""
            row = worker + lax.div(q, c.chunks) * self.num_workers
            return row, lax.rem(q, c.chunks), lax.rem(q, c.slots)

        def fetch(q):
            row, chunk, slot = place(q)
            for j, x in enumerate(gmem.inputs):
                plgpu.copy_gmem_to_smem(
                    x.at[row, me.rank, me.wg, chunk],
                    getattr(smem, f"input{j}").at[me.wg, slot],
                    smem.full.at[me.wg * c.slots + slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        def fetch_if_any(q):
            pl.when(q < count * c.chunks)(functools.partial(fetch, q))

        def input_of(slot, tile):
            def load(j):
                ref = getattr(smem, f"input{j}").at[me.wg, slot, tile]
                return plgpu.load(ref, layout=self.layout, optimized=False).astype(jnp.float32)

            return load

        def vector_of(chunk, tile):
            def load(j):
                ref = getattr(smem, f"vector{j}").at[me.wg, chunk, tile]
                return plgpu.load(ref, layout=self.layout, optimized=False)

            return load

        def fold(i):
            numbers = None
            for chunk in range(c.chunks):
                _, _, slot = place(i * c.chunks + chunk)
                plgpu.barrier_wait(smem.full.at[me.wg * c.slots + slot])
                for tile in range(c.tiles):
                    numbers = f.fold(input_of(slot, tile), vector_of(chunk, tile), numbers)
            assert numbers is not None
            self.send(smem, me, i, numbers)

        def finish(i, accumulators):
            scalars = f.combine(*self.receive(smem, i))
            kept = []
            for chunk in range(c.chunks):
                q = i * c.chunks + chunk
                row, _, slot = place(q)
                for tile in range(c.tiles):
                    sums = accumulators[len(kept) : len(kept) + f.num_accumulators]
                    result, sums = f.finish(
                        input_of(slot, tile), vector_of(chunk, tile), scalars, sums
                    )
                    kept += sums
                    gmem.out[row, me.rank, me.wg, chunk, tile] = result.astype(self.dtype)
                plgpu.commit_smem()  # all warps have read the slot
                fetch_if_any(q + c.slots)
            return tuple(kept)

        for q in range(c.slots):
            fetch_if_any(jnp.int32(q))
        if self.num_vectors:
            self.fetch_vectors(gmem, smem, me)
        zero = plgpu.layout_cast(jnp.zeros((WARPS, TILE), jnp.float32), self.layout)
        accumulators = (zero,) * (f.num_accumulators * c.chunks * c.tiles)
        if c.ahead:
            fold(jnp.int32(0))

            def step(i, accumulators):
                fold(i + 1)
                return finish(i, accumulators)

            accumulators = lax.fori_loop(0, count - 1, step, accumulators)
            accumulators = finish(count - 1, accumulators)
        else:

            def step(i, accumulators):
                fold(i)
                return finish(i, accumulators)

            accumulators = lax.fori_loop(0, count, step, accumulators)
        for k, value in enumerate(accumulators):
            tile, j = divmod(k, f.num_accumulators)
            place_of = (worker, me.rank, me.wg, *divmod(tile, c.tiles))
            gmem.partials[j][place_of] = value

    def fetch_vectors(self, gmem, smem, me) -> None:
        @pl.when(me.wg == 0)
        def _():
            for j, v in enumerate(gmem.vectors):
                plgpu.copy_gmem_to_smem(
                    v.at[me.rank],
                    getattr(smem, f"vector{j}"),
                    smem.vectors_full,
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        plgpu.barrier_wait(smem.vectors_full)

    def send(self, smem, me, i, numbers: tuple[jax.Array, ...]) -> None:
        """This warpgroup's numbers to all blocks of the row."""
        mine = pl.ds((me.rank * WARPGROUPS + me.wg) * WARPS, WARPS)
        turn = lax.rem(i, TURNS)
        for j, number_A in enumerate(numbers):
            smem.parts[turn, j, mine] = number_A
        plgpu.commit_smem()
        if self.c.cluster > 1:
            for j in range(self.f.num_statistics):
                _to_cluster(smem.parts.at[turn, j, mine], self.c.cluster)
            cluster_fence()
        plgpu.barrier_arrive(smem.exchanged.at[lax.rem(i, 2)])

    def receive(self, smem, i) -> list[jax.Array]:
        plgpu.barrier_wait(smem.exchanged.at[lax.rem(i, 2)])
        if self.c.cluster > 1:
            cluster_fence()
        return [
            plgpu.load(
                smem.parts.at[lax.rem(i, TURNS), j],
                layout=lane_layout(self.num_parts),
                optimized=False,
            )
            for j in range(self.f.num_statistics)
        ]


def _to_cluster(ref, num_blocks: int) -> None:
    """Copies four fp32 numbers of shared memory to the same place in all blocks of the cluster."""
    # A thread for each number and block; written before the warpgroup's last barrier.
    ptx = f"""{{
        .reg .pred active;
        .reg .u32 thread, offset, block, peer;
        .reg .f32 value;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.lt.u32 active, thread, {WARPS * num_blocks};
        and.b32 offset, thread, {WARPS - 1};
        shl.b32 offset, offset, 2;
        add.u32 offset, $0, offset;
        shr.u32 block, thread, 2;
        @active ld.shared.f32 value, [offset];
        @active mapa.shared::cluster.u32 peer, offset, block;
        @active st.shared::cluster.f32 [peer], value;
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def copy(_, ref):
        mgpu_utils.inline_ptx(ptx, mgpu_utils.memref_ptr(ref), has_side_effects=True)

    copy(ref)
