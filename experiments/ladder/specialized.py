"""Rungs 8 to 10: a warpgroup that only copies, two that only multiply.

Dims: M row of A and C, N column of B and C, K contraction.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.machine import NUM_PROCESSORS

from .shapes import check_operands
from .tensor_cores import STORE_N, store, swizzled

NUM_GROUPS = 2  # warpgroups that multiply
LOADER = NUM_GROUPS  # the index of the one that copies
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tile sizes of C, and the number of stages in shared memory."""

    m: int = 128  # rows of a block's tile of C
    n: int = 256
    k: int = 64  # columns of A per step
    num_stages: int = 4
    band: int = 8  # tiles of C in a band that is walked before the next: what L2 keeps

    @property
    def rows(self) -> int:
        """Rows of C that one warpgroup accumulates."""
        return self.m // NUM_GROUPS

    def scratch(self, *, cluster: bool) -> dict[str, Any]:
        """The ring of tiles, its barriers, and C on its way out."""
        dtype = jnp.bfloat16
        empty = plgpu.Barrier
        if cluster:
            empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
        return {
            "a_smem": plgpu.SMEM((self.num_stages, self.m, self.k), dtype, transforms=swizzled()),
            "b_smem": plgpu.SMEM((self.num_stages, self.k, self.n), dtype, transforms=swizzled()),
            "c_smem": plgpu.SMEM((NUM_GROUPS, 2, self.rows, STORE_N), dtype, transforms=swizzled()),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=self.num_stages),
            "empty": empty(num_arrivals=NUM_GROUPS, num_barriers=self.num_stages),
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Tiles of A and B in shared memory: filled by one warpgroup, read by the others.

    Steps are counted over all tiles of C that the block computes; both sides count alike.
    """

    tiles: Tiles
    num_steps: int  # steps per tile of C
    a_smem: Any
    b_smem: Any
    c_smem: Any
    full: Any
    empty: Any
    cluster: tuple[str, ...] = ()  # blocks that share B

    def fill(self, a_gmem, b_gmem, rows, columns, turn) -> None:
        """The copying warpgroup's part of the block's tile of C number ``turn``."""

        def step(i, _):
            slot = self.slot(turn, i)
            full = self.full.at[slot]
            depth = pl.ds(i * self.tiles.k, self.tiles.k)
            plgpu.barrier_wait(self.empty.at[slot])
            plgpu.copy_gmem_to_smem(a_gmem.at[rows, depth], self.a_smem.at[slot], full)
            plgpu.copy_gmem_to_smem(
                b_gmem.at[depth, columns], self.b_smem.at[slot], full,
                collective_axes=self.cluster or None,
            )  # fmt: skip

        lax.fori_loop(0, self.num_steps, step, None)

    def open(self) -> None:
        """Says that all slots are empty, by the warpgroups that will say so later."""
        for slot in range(self.tiles.num_stages):
            plgpu.barrier_arrive(self.empty.at[slot])

    def close(self) -> None:
        """Waits until all slots are read: no block may end while another signals to it."""
        for slot in range(self.tiles.num_stages):
            plgpu.barrier_wait(self.empty.at[slot])

    def multiply(self, turn) -> jax.Array:
        """A multiplying warpgroup's rows of one tile of C: fp32 [rows, n]."""
        mine = pl.ds(self.first_row(), self.tiles.rows)

        def accumulate(acc):
            def step(i, _):
                slot = self.slot(turn, i)
                plgpu.barrier_wait(self.full.at[slot])
                plgpu.wgmma(acc, self.a_smem.at[slot, mine], self.b_smem.at[slot])
                plgpu.wgmma_wait(1)
                # The multiply before this one is done.
                pl.when(i > 0)(lambda: self.release(turn, i - 1))

            lax.fori_loop(0, self.num_steps, step, None)
            acc_MN = acc[...]
            self.release(turn, self.num_steps - 1)
            return acc_MN

        return pl.run_scoped(accumulate, plgpu.ACC((self.tiles.rows, self.tiles.n), jnp.float32))

    def store(self, acc_MN, c_gmem, row, columns) -> None:
        """A multiplying warpgroup's rows to C, not waited for."""
        rows = pl.ds(row + self.first_row(), self.tiles.rows)
        store(acc_MN, self.c_smem.at[lax.axis_index("group")], c_gmem.at[rows, columns])

    def slot(self, turn, i) -> Any:
        """The slot of step i of a tile of C."""
        return lax.rem(turn * self.num_steps + i, self.tiles.num_stages)

    def release(self, turn, i) -> None:
        """This warpgroup has read what step i needed."""
        plgpu.barrier_arrive(self.empty.at[self.slot(turn, i)])

    def first_row(self):
        """The first of this warpgroup's rows within the tile."""
        return lax.axis_index("group") * self.tiles.rows


def specialized(a_MK: jax.Array, b_KN: jax.Array, *, tiles: Tiles = Tiles()) -> jax.Array:
    """A warpgroup copies ahead and needs few registers; two multiply and get what it gives up."""
    M, N, K = check_operands(a_MK, b_KN, tile_m=tiles.m, tile_n=tiles.n, tile_k=tiles.k)

    def body(a_gmem, b_gmem, c_gmem, **scratch):
        ring = Ring(tiles=tiles, num_steps=K // tiles.k, **scratch)
        row = lax.axis_index("m") * tiles.m
        columns = pl.ds(lax.axis_index("n") * tiles.n, tiles.n)
        group, turn = lax.axis_index("group"), jnp.int32(0)

        @pl.when(group == LOADER)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            ring.fill(a_gmem, b_gmem, pl.ds(row, tiles.m), columns, turn)
            ring.close()

        @pl.when(group < LOADER)
        def _():
            plgpu.set_max_registers(232, action="increase")
            ring.open()
            ring.store(ring.multiply(turn), c_gmem, row, columns)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, N), a_MK.dtype),
        scratch_types=tiles.scratch(cluster=False),
        grid=(M // tiles.m, N // tiles.n),
        grid_names=("m", "n"),
        num_threads=NUM_GROUPS + 1,
        thread_name="group",
        compiler_params=PARAMS,
    )(a_MK, b_KN)


def persistent(a_MK: jax.Array, b_KN: jax.Array, *, tiles: Tiles = Tiles()) -> jax.Array:
    """One block per SM walks tiles of C in an order that suits L2: copies for the next tile begin,
    and this one's result leaves, while others multiply.
    """
    return _walk(a_MK, b_KN, tiles=tiles, cluster_size=1)


def clustered(a_MK: jax.Array, b_KN: jax.Array, *, tiles: Tiles = Tiles()) -> jax.Array:
    """Two neighbours compute tiles of the same columns; each fetches half of B for both."""
    return _walk(a_MK, b_KN, tiles=tiles, cluster_size=2)


def _walk(a_MK, b_KN, *, tiles: Tiles, cluster_size: int) -> jax.Array:
    cluster_m = tiles.m * cluster_size
    M, N, K = check_operands(a_MK, b_KN, tile_m=cluster_m, tile_n=tiles.n, tile_k=tiles.k)
    grid, num_steps = (M // cluster_m, N // tiles.n), K // tiles.k

    def body(a_gmem, b_gmem, c_gmem, **scratch):
        cluster = ("cluster",) if cluster_size > 1 else ()
        ring = Ring(tiles=tiles, num_steps=num_steps, cluster=cluster, **scratch)
        group = lax.axis_index("group")

        def each_tile(do):
            @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="worker")
            def _(loop: plgpu.NDLoopInfo):
                m, n = plgpu.planar_snake(loop.index[0], grid, 0, tiles.band)
                row = (m * cluster_size + lax.axis_index("cluster")) * tiles.m
                do(row, pl.ds(n * tiles.n, tiles.n), loop.local_index)

        def load(row, columns, turn):
            ring.fill(a_gmem, b_gmem, pl.ds(row, tiles.m), columns, turn)

        def compute(row, columns, turn):
            ring.store(ring.multiply(turn), c_gmem, row, columns)

        @pl.when(group == LOADER)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            each_tile(load)
            ring.close()

        @pl.when(group < LOADER)
        def _():
            plgpu.set_max_registers(232, action="increase")
            ring.open()
            each_tile(compute)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, N), a_MK.dtype),
        scratch_types=tiles.scratch(cluster=cluster_size > 1),
        grid=(min(NUM_PROCESSORS // cluster_size, grid[0] * grid[1]),),
        grid_names=("worker",),
        cluster=(cluster_size,),
        cluster_names=("cluster",),
        num_threads=NUM_GROUPS + 1,
        thread_name="group",
        compiler_params=PARAMS,
    )(a_MK, b_KN)
