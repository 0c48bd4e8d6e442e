"""Exponentials of logits relative to a reference a row, for Hopper: one matmul, no second pass.

``exp(x w^T - reference)`` leaves the matmul's epilogue in bf16 and its row sums in fp32. A bf16 has
the exponent range of fp32, so any reference within some 60 nats of the row's logsumexp keeps every
digit: no maximum is needed first, and the caller's reference is the target's own logit.

Dims: R row (a token), V vocabulary id, D model width.

A block has 128 rows and tiles of 256 ids. Two blocks may form a cluster that shares a tile, each
loading half of it for both: measured 1% slower, and its tile of rows is twice as tall. In a block
one warpgroup loads and two compute, 64 rows each. Blocks stay for many tiles, rows fastest, so that
a tile of the table is read from memory once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E, mask_tile, row_layout, soft_cap, sum_strips, tiled

WARPGROUP_ROWS = 64
NUM_COMPUTE = 2
# The copy engine and WGMMA tile the last dim by 128 bytes and rows by 8.
ROW_MULTIPLE, WIDTH_MULTIPLE = 8, 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExponentialsConfig:
    """Tiles of one block and how its warpgroups share the tensor cores."""

    block_v: int = 256
    block_d: int = 64
    num_stages: int = 4
    cluster: int = 1  # blocks that share the loads of a table tile
    num_out_slots: int = 2  # stripes of 64 ids on their way out, a warpgroup
    in_turns: bool = True  # the second warpgroup's epilogue follows the first's
    num_blocks: int = NUM_PROCESSORS  # one a multiprocessor

    @property
    def block_r(self) -> int:
        """Rows of one block."""
        return WARPGROUP_ROWS * NUM_COMPUTE


DEFAULT = ExponentialsConfig()


def exponentials(
    x_RD: jax.Array,
    table_VD: jax.Array,
    reference_R: jax.Array,
    *,
    num_ids: int,
    logit_soft_cap: float | None = None,
    with_matrix: bool = True,
    config: ExponentialsConfig | None = None,
) -> tuple[jax.Array | None, jax.Array]:
    """Exponentials of capped logits, each times its cap's slope, and their plain row sums.

    With ``l = cap * tanh(x w / cap)``: ``matrix = exp(l - reference) * (1 - (l / cap)**2)`` and
    ``sums = sum_v exp(l - reference)``.

    Args:
        x_RD: bf16; R a multiple of 8, D of 64.
        table_VD: bf16; V a multiple of 64.
        reference_R: fp32, nats; +inf makes a row of zeros.
        num_ids: ids from here on are padding: zeros in the matrix, not in the sums.
        logit_soft_cap: cap; None leaves logits alone and the slope 1.
        with_matrix: False computes the sums alone.
        config: tiles; ``DEFAULT`` where None.

    Returns:
        bf16 [R, V] (None without the matrix) and fp32 [R].
    """
    config = config or DEFAULT
    (num_rows, width), num_columns = x_RD.shape, table_VD.shape[0]
    assert num_rows % ROW_MULTIPLE == 0, num_rows
    assert width % WIDTH_MULTIPLE == 0, width
    assert num_columns % WIDTH_MULTIPLE == 0, num_columns
    kernel = _Kernel(
        c=config, num_rows=num_rows, num_columns=num_columns, width=width, num_ids=num_ids,
        cap=logit_soft_cap, with_matrix=with_matrix, dtype=x_RD.dtype,
    )  # fmt: skip
    padded_rows = kernel.num_r_tiles * config.cluster * config.block_r
    reference_R = jnp.pad(reference_R * LOG2E, (0, padded_rows - num_rows), constant_values=jnp.inf)
    results = {"sums": jax.ShapeDtypeStruct((kernel.num_v_tiles, padded_rows), jnp.float32)}
    if with_matrix:
        results["matrix"] = jax.ShapeDtypeStruct((num_rows, num_columns), x_RD.dtype)
    found = launch(
        kernel.run,
        name="cross_entropy_exponentials",
        operands={"x": x_RD, "table": table_VD, "reference": reference_R},
        results=results,
        scratch=kernel.scratch(),
        grid=(kernel.num_clusters,),
        grid_names=("worker",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=NUM_COMPUTE + 1,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    sums_R = jnp.sum(found["sums"], axis=0)[:num_rows]
    return found.get("matrix"), sums_R


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """The kernel of one call; methods are its phases, written once per trace."""

    c: ExponentialsConfig
    num_rows: int
    num_columns: int
    width: int
    num_ids: int
    cap: float | None
    with_matrix: bool
    dtype: jnp.dtype

    @property
    def num_r_tiles(self) -> int:
        """Row tiles of a whole cluster."""
        return -(-self.num_rows // (self.c.cluster * self.c.block_r))

    @property
    def num_v_tiles(self) -> int:
        return -(-self.num_columns // self.c.block_v)

    @property
    def num_d_tiles(self) -> int:
        return self.width // self.c.block_d

    @property
    def num_clusters(self) -> int:
        return min(self.c.num_blocks // self.c.cluster, self.num_r_tiles * self.num_v_tiles)

    @property
    def in_turns(self) -> bool:
        """A warpgroup is never a whole tile ahead of the other, so one barrier counts the turns."""
        return self.c.in_turns and self.num_d_tiles > self.c.num_stages

    def scratch(self) -> dict:
        c = self.c
        tile = tiled(128)
        empty = (
            plgpu.Barrier if c.cluster == 1
            else functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
        )  # fmt: skip
        # In this order: the matrices start at multiples of 1 KiB, the rest packs behind them.
        buffers: dict[str, Any] = {
            "x": plgpu.SMEM((c.num_stages, c.block_r, c.block_d), self.dtype, transforms=tile),
            "table": plgpu.SMEM((c.num_stages, c.block_v, c.block_d), self.dtype, transforms=tile),
        }
        if self.with_matrix:
            shape = (NUM_COMPUTE, c.num_out_slots, WARPGROUP_ROWS, 64)
            buffers["out"] = plgpu.SMEM(shape, self.dtype, transforms=tile)
        buffers["sums"] = plgpu.SMEM((NUM_COMPUTE, WARPGROUP_ROWS), jnp.float32)
        buffers["full"] = plgpu.Barrier(num_arrivals=2, num_barriers=c.num_stages)
        buffers["empty"] = empty(num_arrivals=NUM_COMPUTE, num_barriers=c.num_stages)
        buffers["turn"] = plgpu.Barrier()
        return buffers

    def run(self, gmem, smem) -> None:
        """One block: a role for each warpgroup."""
        wg = lax.axis_index("wg")

        @pl.when(wg < NUM_COMPUTE)
        def _():
            plgpu.set_max_registers(240, action="increase")
            for slot in range(self.c.num_stages):
                plgpu.barrier_arrive(smem.empty.at[slot])
            self.each_tile(functools.partial(self.compute, gmem, smem, wg))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == NUM_COMPUTE)
        def _():
            # 2 * 240 + 24 registers a thread is all that a multiprocessor has.
            plgpu.set_max_registers(24, action="decrease")
            self.each_tile(functools.partial(self.load, gmem, smem))
            # Nobody leaves while the other block of the cluster still copies into it.
            for slot in range(self.c.num_stages):
                plgpu.barrier_wait(smem.empty.at[slot])

    def each_tile(self, body) -> None:
        """Calls ``body(first row, first id, steps before)`` for this block's tiles in order."""
        worker = lax.axis_index("worker")
        rank = lax.axis_index("cluster")
        num_tiles = self.num_r_tiles * self.num_v_tiles

        def step(i, _):
            tile = worker + i * self.num_clusters
            r_tile = lax.rem(tile, self.num_r_tiles) * self.c.cluster + rank
            v_tile = lax.div(tile, self.num_r_tiles)
            body(r_tile * self.c.block_r, v_tile, i * self.num_d_tiles)

        lax.fori_loop(0, lax.div(num_tiles - 1 - worker, self.num_clusters) + 1, step, None)

    def load(self, gmem, smem, row0, v_tile, done) -> None:
        """Fills the ring with the tiles of one product."""
        c = self.c
        sharing = "cluster" if c.cluster > 1 else None

        def step(k, _):
            slot = lax.rem(done + k, c.num_stages)
            columns = pl.ds(k * c.block_d, c.block_d)
            plgpu.barrier_wait(smem.empty.at[slot])
            full = smem.full.at[slot]
            x_gmem = gmem.x.at[pl.ds(row0, c.block_r), columns]
            table_gmem = gmem.table.at[pl.ds(v_tile * c.block_v, c.block_v), columns]
            plgpu.copy_gmem_to_smem(x_gmem, smem.x.at[slot], full)
            plgpu.copy_gmem_to_smem(table_gmem, smem.table.at[slot], full, collective_axes=sharing)

        lax.fori_loop(0, self.num_d_tiles, step, None)

    def compute(self, gmem, smem, wg, row0, v_tile, done) -> None:
        """The product of 64 rows and one tile of ids, then its epilogue."""
        c = self.c
        rows = pl.ds(row0 + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        reference = plgpu.load(gmem.reference.at[rows], layout=row_layout(), optimized=False)
        # The first wait comes before the accumulator exists: its zeros then cost no instruction.
        plgpu.barrier_wait(smem.full.at[lax.rem(done, c.num_stages)])

        def product(acc):
            def multiply(k):
                slot = lax.rem(done + k, c.num_stages)
                x_smem = smem.x.at[slot, pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)]
                plgpu.wgmma(acc, x_smem, smem.table.at[slot].transpose((1, 0)))

            def step(k, _):
                plgpu.barrier_wait(smem.full.at[lax.rem(done + k, c.num_stages)])
                multiply(k)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(smem.empty.at[lax.rem(done + k - 1, c.num_stages)])

            multiply(0)
            lax.fori_loop(1, self.num_d_tiles, step, None)
            logits = plgpu.wgmma_accumulator_load(acc)
            last = lax.rem(done + self.num_d_tiles - 1, c.num_stages)
            plgpu.barrier_arrive(smem.empty.at[last])
            return logits

        logits = pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, c.block_v), jnp.float32))
        if self.in_turns:
            pl.when(wg == 1)(lambda: plgpu.barrier_wait(smem.turn))
        matrix, sums = self.epilogue(logits, reference, v_tile * c.block_v)
        # Copies leave in order and at most as many wait as there are slots, so a slot or the sums
        # written here were read out before.
        if self.with_matrix:
            for i in range(c.block_v // 64):
                slot = i % c.num_out_slots
                plgpu.wait_smem_to_gmem(c.num_out_slots - 1, wait_read_only=True)
                stripe = lax.slice(matrix, (0, 64 * i), (WARPGROUP_ROWS, 64 * (i + 1)))
                smem.out[wg, slot] = stripe.astype(self.dtype)
                plgpu.commit_smem()
                columns = pl.ds(v_tile * c.block_v + 64 * i, 64)
                plgpu.copy_smem_to_gmem(smem.out.at[wg, slot], gmem.matrix.at[rows, columns])
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.sums[wg] = sums
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.sums.at[wg], gmem.sums.at[v_tile, rows])
        if self.in_turns:
            pl.when(wg == 0)(lambda: plgpu.barrier_arrive(smem.turn))

    def epilogue(self, logits, reference, column0):
        """Exponentials with the cap's slope, and the row sums without it."""
        shift = lax.broadcast_in_dim(reference, logits.shape, [0])
        if self.cap is None:
            slope, power = None, logits * LOG2E - shift
        else:
            capped = soft_cap(logits, 1.0, self.cap)
            ratio = capped * (1.0 / self.cap)
            slope, power = 1.0 - ratio * ratio, capped * LOG2E - shift
        if self.num_ids % self.c.block_v:
            power = mask_tile(power, num_cols=self.num_ids - column0, fill=-jnp.inf)
        matrix = jnp.exp2(power)
        sums = sum_strips(matrix).sum(axis=1)
        return (matrix if slope is None else matrix * slope), sums
