"""Scaled matmul on a Hopper GPU: 8-bit products, whose sums are promoted to fp32 after every 128.

The tensor cores add 8-bit products with a precision of about 14 bits. So after every 128 products,
the length of a block of scales, the accumulator is promoted: added to an fp32 sum in registers by
``total += part * scale``. While one warpgroup promotes, the other multiplies.

A block has a tile of the result and three warpgroups: one loads, two multiply. A warpgroup's half
tile takes 128 registers per thread. This leaves registers for one 64 x 128 accumulator (64 per
thread), not two. So a warpgroup promotes a part before it begins the next, which the other
warpgroup's product hides. Blocks are persistent; the loader fetches the next tile while results are
stored.

Dims: M row of a and of the result, N row of b and column of the result, K contracted, J blocks of
128 of K, S splits of K.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.common.scales import BLOCK, Scaling
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.product import no_sum, product
from pallas_kernels.hopper.tile import column_layout, row_layout, tiled

from .reference import ScaledSpec

DEPTH = 128  # of a step: one block of scales, and 128 bytes, one row of a swizzle
NUM_COMPUTE = 2  # warpgroups that multiply
WARPGROUP_ROWS = 64
STRIPE_BYTES = 128  # of a row of the result, what leaves at a time
LEAST_STEPS = 8  # of a split: fewer do not fill the ring
BAND = 8  # tiles of rows that are walked before the next: what L2 keeps
LOADER = NUM_COMPUTE  # the index of the warpgroup that copies
COLUMNS_AT_ONCE = 32  # whose scales are in registers at a time
ROW_MULTIPLE = 8  # of a tile that the TMA copies


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledConfig:
    """Tile sizes of a block of the scaled matmul, and how its warpgroups share a tile."""

    tile_m: int = 128  # 64 rows per warpgroup; 64: both have the same rows
    tile_n: int = 256
    part_n: int = 128  # columns of one product, promoted at a time
    num_stages: int = 4
    cluster: int = 1  # blocks of neighbouring rows, which load b together by multicast
    num_out_slots: int = 2  # stripes of 128 bytes per warpgroup that TMA is storing
    in_turns: bool = True  # warpgroups issue products alternately
    splits: int = 1  # of K, summed by a second kernel

    @property
    def by_columns(self) -> bool:
        """Whether warpgroups split a tile's columns, not its rows."""
        return self.tile_m == WARPGROUP_ROWS

    @property
    def group_n(self) -> int:
        """Number of columns that one warpgroup multiplies."""
        return self.tile_n // NUM_COMPUTE if self.by_columns else self.tile_n

    @property
    def num_parts(self) -> int:
        """Number of products that one warpgroup issues per step."""
        return self.group_n // self.part_n


def shared_memory_bytes(config: ScaledConfig, *, columns_scaled: bool) -> int:
    """Returns a block's shared memory in bytes: ring, results to store, barriers."""
    c = config
    stage = (c.tile_m + c.tile_n) * DEPTH + 4 * c.tile_n * columns_scaled
    out = NUM_COMPUTE * c.num_out_slots * WARPGROUP_ROWS * STRIPE_BYTES
    return c.num_stages * stage + out + 8 * (2 * c.num_stages + NUM_COMPUTE)


def scaled_config(M: int, N: int, K: int, *, columns_scaled: bool) -> ScaledConfig:
    """Returns the tiles that the scaled matmul takes for an [M, K] by [K, N] product."""
    config = ScaledConfig(num_out_slots=1 if columns_scaled else 2)
    if M <= WARPGROUP_ROWS:
        config = dataclasses.replace(config, tile_m=64, tile_n=128, part_n=64, num_stages=8)
    tiles = -(-M // config.tile_m) * -(-N // config.tile_n)
    steps = K // DEPTH
    even = (splits for splits in range(1, steps // LEAST_STEPS + 1) if steps % splits == 0)
    splits = max((s for s in even if tiles * s <= NUM_PROCESSORS), default=1)
    if splits > 1 or config.by_columns:  # these wait for memory, not for each other
        return dataclasses.replace(config, splits=splits, in_turns=False)
    return dataclasses.replace(config, cluster=2 if config.tile_m < M else 1)


def unsupported(
    a: jax.Array, b: jax.Array, *, spec: ScaledSpec, num_devices: int = 1
) -> str | None:
    """Returns why the scaled-matmul kernel cannot compute this call; None if it can."""
    if reason := device.why_not_one_hopper(num_devices):
        return reason
    for dim, size, multiple in (
        ("M", a.shape[0], ROW_MULTIPLE),
        ("N", b.shape[0], STRIPE_BYTES // spec.out_dtype.itemsize),
        ("K", a.shape[1], DEPTH),
    ):
        if size % multiple:
            return f"{dim}={size} is not a multiple of {multiple}: pad the operands"
    return None


def scaled_matmul_hopper(
    a_MK: jax.Array,
    b_NK: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    spec: ScaledSpec,
    config: ScaledConfig | None = None,
    interpretable: bool = False,
) -> jax.Array:
    """Multiplies 8-bit matrices by the Hopper kernel: [M, N] in the spec's dtype.

    If ``interpretable``, products are Pallas's own, which the interpreter can run.
    """
    (M, K), N = a_MK.shape, b_NK.shape[0]
    columns_scaled = spec.b is Scaling.BLOCK_OF_ROW
    config = config or scaled_config(M, N, K, columns_scaled=columns_scaled)
    taken = shared_memory_bytes(config, columns_scaled=columns_scaled)
    if taken > SMEM_BYTES:
        raise UnsupportedError(
            f"Hopper scaled matmul: {config} takes {taken} bytes of shared memory and a block has "
            f"{SMEM_BYTES}; use fewer stages or slots"
        )
    kernel = ScaledKernel(
        c=config, spec=spec, M=M, N=N, K=K, dtypes=(a_MK.dtype, b_NK.dtype),
        interpretable=interpretable,
    )  # fmt: skip
    if spec.a is Scaling.BLOCK_OF_ROW:
        a_scale = jnp.pad(a_scale, ((0, 0), (0, -M % (config.tile_m * config.cluster))))
    operands = {"a": a_MK, "b": b_NK, "a_scale": a_scale, "b_scale": b_scale}
    if config.splits > 1:
        shape = jax.ShapeDtypeStruct((config.splits, M, N), jnp.float32)
        return jnp.sum(kernel.result(operands, shape), axis=0).astype(spec.out_dtype)
    return kernel.result(operands, jax.ShapeDtypeStruct((M, N), spec.out_dtype))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledKernel:
    """The scaled-matmul kernel of one call; its methods emit the kernel's phases."""

    c: ScaledConfig
    spec: ScaledSpec
    M: int
    N: int
    K: int
    dtypes: tuple[jnp.dtype, jnp.dtype]  # of a and b
    interpretable: bool

    def result(self, operands: dict[str, Any], out: jax.ShapeDtypeStruct) -> jax.Array:
        """Launches the kernel; returns the product, or one product per split of K."""
        found = launch(
            self.run,
            name="scaled_matmul",
            operands=operands,
            results={"out": out},
            scratch=self.scratch(),
            params=dict(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
            grid=(self.num_workers,),
            grid_names=("worker",),
            cluster=(self.c.cluster,),
            cluster_names=("cluster",),
            num_threads=NUM_COMPUTE + 1,
        )
        return found["out"]

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of tiles along rows and columns; a cluster computes one tile at a time."""
        c = self.c
        return -(-self.M // (c.tile_m * c.cluster)), -(-self.N // c.tile_n)

    @property
    def num_tiles(self) -> int:
        """Number of tiles of all clusters, counting each split of K."""
        return self.grid[0] * self.grid[1] * self.c.splits

    @property
    def num_steps(self) -> int:
        """Number of steps along K in one tile."""
        return self.K // DEPTH // self.c.splits

    @property
    def num_workers(self) -> int:
        """Number of clusters that are launched."""
        return min(NUM_PROCESSORS // self.c.cluster, self.num_tiles)

    @property
    def columns_scaled(self) -> bool:
        """Whether every column of a step has its own scale, copied with the tiles of b."""
        return self.spec.b is Scaling.BLOCK_OF_ROW

    @property
    def num_pieces(self) -> int:
        """Number of copies per tile of b, each with a barrier: one per part of a warpgroup.

        So each part begins with a wait, across which ptxas moves no product. Otherwise two
        accumulators would be live at a time, for which there are too few registers.
        """
        return self.c.num_parts

    def scratch(self) -> dict[str, Any]:
        """Returns shared-memory buffers: the ring of tiles, results to store, barriers."""
        out_dtype = self.spec.out_dtype if self.c.splits == 1 else jnp.dtype("float32")
        c, tile = self.c, tiled(128, itemsize=1)
        stripe = STRIPE_BYTES // out_dtype.itemsize
        empty: Any = plgpu.Barrier
        if c.cluster > 1:
            empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
        buffers: dict[str, Any] = {
            "a": plgpu.SMEM((c.num_stages, c.tile_m, DEPTH), self.dtypes[0], transforms=tile),
            "b": plgpu.SMEM((c.num_stages, c.tile_n, DEPTH), self.dtypes[1], transforms=tile),
            "out": plgpu.SMEM(
                (NUM_COMPUTE, c.num_out_slots, WARPGROUP_ROWS, stripe), out_dtype,
                transforms=tiled(128, itemsize=out_dtype.itemsize),
            ),
        }  # fmt: skip
        if self.columns_scaled:
            buffers["b_scale"] = plgpu.SMEM((c.num_stages, c.tile_n), jnp.float32)
        ring = functools.partial(plgpu.Barrier, num_barriers=c.num_stages)
        buffers["full"] = ring(num_arrivals=3 if self.columns_scaled else 2)
        for piece in range(1, self.num_pieces):
            buffers[f"full_{piece}"] = ring()
        return buffers | {
            "empty": empty(num_arrivals=NUM_COMPUTE, num_barriers=c.num_stages),
            "turn": plgpu.Barrier(num_barriers=NUM_COMPUTE),
        }

    def run(self, gmem, smem) -> None:
        """Runs one block: each warpgroup loads or multiplies."""
        wg = lax.axis_index("wg")
        smem.filled = [smem.full, *(getattr(smem, f"full_{i}") for i in range(1, self.num_pieces))]

        @pl.when(wg < NUM_COMPUTE)
        def _():
            plgpu.set_max_registers(240, action="increase")
            for slot in range(self.c.num_stages):
                plgpu.barrier_arrive(smem.empty.at[slot])
            if self.c.in_turns:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(smem.turn.at[0]))
            self.each_tile(functools.partial(self.compute, gmem, smem, wg))
            plgpu.wait_smem_to_gmem(0)
            if self.c.in_turns:  # the turn that nobody took
                pl.when(wg == 0)(lambda: plgpu.barrier_wait(smem.turn.at[0]))

        @pl.when(wg == LOADER)
        def _():
            # 2 * 240 + 24 registers per thread is all that an SM has.
            plgpu.set_max_registers(24, action="decrease")
            self.each_tile(functools.partial(self.load, gmem, smem))
            # Nobody leaves while the other block of the cluster still copies into it.
            for slot in range(self.c.num_stages):
                plgpu.barrier_wait(smem.empty.at[slot])

    def each_tile(self, body) -> None:
        """Calls ``body(first row, first column, split, steps of earlier tiles)`` for each tile."""
        c, worker = self.c, lax.axis_index("worker")

        def step(i, _):
            tile = worker + i * self.num_workers
            split, tile = lax.rem(tile, c.splits), lax.div(tile, c.splits)
            m, n = plgpu.planar_snake(tile, self.grid, 0, BAND)
            m = m * c.cluster + lax.axis_index("cluster")
            body(m * c.tile_m, n * c.tile_n, split, i * self.num_steps)

        count = lax.div(self.num_tiles - 1 - worker, self.num_workers) + 1
        lax.fori_loop(0, count, step, None)

    def load(self, gmem, smem, row0, column0, split, done) -> None:
        """Loads the operands of one tile into the ring, after ``done`` steps of earlier tiles."""
        c = self.c
        width = c.tile_n // self.num_pieces
        sharing = "cluster" if c.cluster > 1 else None

        def step(i, _):
            slot, j = lax.rem(done + i, c.num_stages), split * self.num_steps + i
            depth = pl.ds(j * DEPTH, DEPTH)
            plgpu.barrier_wait(smem.empty.at[slot])
            full = smem.full.at[slot]
            plgpu.copy_gmem_to_smem(gmem.a.at[pl.ds(row0, c.tile_m), depth], smem.a.at[slot], full)
            if self.columns_scaled:
                columns = pl.ds(column0, c.tile_n)
                plgpu.copy_gmem_to_smem(gmem.b_scale.at[j, columns], smem.b_scale.at[slot], full)
            for piece, filled in enumerate(smem.filled):
                plgpu.copy_gmem_to_smem(
                    gmem.b.at[pl.ds(column0 + piece * width, width), depth],
                    smem.b.at[slot, pl.ds(piece * width, width)],
                    filled.at[slot],
                    collective_axes=sharing,
                )

        lax.fori_loop(0, self.num_steps, step, None)

    def compute(self, gmem, smem, wg, row0, column0, split, done) -> None:
        """Computes and stores one warpgroup's half of a tile."""
        c, first = self.c, split * self.num_steps
        first_row, first_column = (0, wg * c.group_n) if c.by_columns else (wg * WARPGROUP_ROWS, 0)
        row, column = row0 + first_row, column0 + first_column
        rows = pl.ds(first_row, WARPGROUP_ROWS)
        columns = [pl.ds(first_column + n, c.part_n) for n in range(0, c.group_n, c.part_n)]
        scales_at = functools.partial(self.step_scales, gmem, row, column)

        def step(i, carry):
            totals, scales = carry
            slot = lax.rem(done + i, c.num_stages)
            # A step ahead: a number from global memory takes as long as a step.
            ahead = scales_at(first + jnp.minimum(i + 1, self.num_steps - 1))
            sums = []
            for p, total in enumerate(totals):
                plgpu.barrier_wait(smem.filled[p].at[slot])
                part = product(
                    smem.a.at[slot, rows], smem.b.at[slot, columns[p]],
                    wg=wg, order_barriers=smem.turn if c.in_turns else None,
                    interpretable=self.interpretable,
                )  # fmt: skip
                total = self.promoted(smem, total, part, scales, slot, columns[p], p)
                if p == c.num_parts - 1:
                    plgpu.barrier_arrive(smem.empty.at[slot])
                sums.append(total)
            return sums, ahead

        zeros = [no_sum(c.part_n) for _ in columns]
        totals, _ = lax.fori_loop(0, self.num_steps, step, (zeros, scales_at(first)))
        for p, total in enumerate(totals):
            self.store(gmem, smem, wg, total, row, column0, first_column, split, p)

    def step_scales(self, gmem, row, column, j) -> tuple[Any, list]:
        """Returns step j's scales: of 64 rows of a, and one per part if b has 128x128 blocks."""
        c, spec = self.c, self.spec
        if spec.a is Scaling.BLOCK:
            i = jnp.minimum(lax.div(row, BLOCK), gmem.a_scale.shape[1] - 1)
            of_rows = gmem.a_scale[j, i]
        else:
            rows = gmem.a_scale.at[j, pl.ds(row, WARPGROUP_ROWS)]
            of_rows = plgpu.load(rows, layout=row_layout(), optimized=False)
        of_columns = []
        if spec.b is Scaling.BLOCK:
            for n in range(0, c.group_n, c.part_n):
                i = jnp.minimum(lax.div(column + n, BLOCK), gmem.b_scale.shape[1] - 1)
                of_columns.append(gmem.b_scale[j, i])
        return of_rows, of_columns

    def promoted(self, smem, total, part, scales, slot, columns, p: int) -> jax.Array:
        """Adds a part, multiplied by its scales, to its fp32 total: ``total + part * scale``."""
        factor, of_columns = scales
        if of_columns:
            factor = factor * of_columns[p]
        if factor.ndim:
            factor = lax.broadcast_in_dim(factor, part.shape, [0])
        if not self.columns_scaled:
            return total + part * factor
        sums = []
        for i in range(0, self.c.part_n, COLUMNS_AT_ONCE):
            some = pl.ds(columns.start + i, COLUMNS_AT_ONCE)
            of_each = plgpu.load(smem.b_scale.at[slot, some], layout=column_layout())
            shape = (WARPGROUP_ROWS, COLUMNS_AT_ONCE)
            piece, before, by_row = (_columns(x, i) for x in (part, total, factor))
            sums.append(before + piece * (by_row * lax.broadcast_in_dim(of_each, shape, [1])))
        return jnp.concatenate(sums, axis=1)

    def store(self, gmem, smem, wg, total, row, column0, first_column, split, p: int) -> None:
        """Stores part p of a warpgroup's results."""
        c = self.c
        out = gmem.out.at[split] if c.splits > 1 else gmem.out
        width = smem.out.shape[-1]
        stripes = c.part_n // width
        for i in range(stripes):
            # Copies leave in order, so that a slot written here was read out before.
            slot = (p * stripes + i) % c.num_out_slots
            plgpu.wait_smem_to_gmem(c.num_out_slots - 1, wait_read_only=True)
            stripe = lax.slice(total, (0, i * width), (WARPGROUP_ROWS, (i + 1) * width))
            column = column0 + first_column + p * c.part_n + i * width
            smem.out[wg, slot] = self.finished(gmem, stripe, column).astype(smem.out.dtype)
            plgpu.commit_smem()
            place = out.at[pl.ds(row, WARPGROUP_ROWS), pl.ds(column, width)]
            plgpu.copy_smem_to_gmem(smem.out.at[wg, slot], place)

    def finished(self, gmem, stripe: jax.Array, column: Any) -> jax.Array:
        """Returns a stripe of results as it is stored; block scales are in the sums already."""
        del gmem, column
        return stripe


def _columns(x: jax.Array, first: int) -> jax.Array:
    if x.ndim == 0:
        return x
    return lax.slice(x, (0, first), (x.shape[0], first + COLUMNS_AT_ONCE))
