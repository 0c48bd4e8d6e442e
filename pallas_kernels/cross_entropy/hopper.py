"""One chunk of the loss on a Hopper GPU: stores bf16 exponentials in place of logits.

With the target's logit ``t`` as each row's reference, the kernel writes ``M = exp(l - t)`` and
``S = sum_v M``: nll is ``log S``, and the logits' gradient is ``M`` times one number per row,
except at the target. Both matmuls of the backward pass read ``M`` as it is; the row's number
multiplies their [R, D] operand or result. At the target, ``p - 1`` would cancel in bf16, and most
of the gradient is there. So this element is zeroed in ``M``, and its part of both gradients is
added in fp32. No pass over [R, V] is needed besides the three matmuls.

Label smoothing adds the same number to the gradients of all of a row's logits: products with the
sum of the table's rows (``ChunkLoss.uniform_ZbC``). If the vocabulary is sharded, all devices use
the target's logit from the shard that has the target.

A bf16 has the exponent range of fp32, so any reference within some 60 nats of a row's logsumexp
keeps every digit: no maximum is needed first. The kernel's blocks have 128 rows and tiles of 256
ids: one warpgroup loads and two compute, 64 rows each. Blocks are persistent and take tiles with
rows varying fastest, so that a tile of the table is read from HBM once.

On an H200 the loss of 16,384 tokens with its gradients takes 37.8 ms of kernels in 0.99 GiB (width
2048, 128,256 ids: ``experiments/results/linear-cross-entropy-h200.json``). Materialized logits take
41.5 ms in 11.7 GiB, XLA's chunks 43.7 in 1.97. bf16 logits instead of exponentials would
round a logit of 16 by 3% of its probability.

Dims: R row (a token), V vocabulary id, D model width.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import device
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E, mask_tile, row_layout, soft_cap, sum_strips, tiled

from .chunked import ChunkLoss, Static, logsumexp, over_shards

WARPGROUP_ROWS = 64
NUM_COMPUTE = 2
ROW_TILE = WARPGROUP_ROWS * NUM_COMPUTE  # a chunk of other lengths wastes part of a tile
BLOCK_V, BLOCK_D = 256, 64
NUM_STAGES = 4
NUM_OUT_SLOTS = 2  # stripes of 64 ids on their way out, per warpgroup
# TMA and WGMMA tile the last dim by 128 bytes and rows by 8.
ROW_MULTIPLE, WIDTH_MULTIPLE = 8, 64
TABLE_MULTIPLE = WIDTH_MULTIPLE
# A row whose nll passes this many nats gets a higher reference and the chunk a second matmul: its
# exponentials near the end of fp32's range. A trained model's rows stay under 40.
HIGHEST = 60.0
RAISE = 80.0
MOST_RAISES = 32


def unsupported(
    hidden: jax.Array,
    *,
    num_devices: int,
    label_smoothing: float = 0.0,
    logit_soft_cap: float | None = None,
) -> str | None:
    """Returns why the Hopper kernel cannot compute this call; None if it can."""
    if reason := device.why_not_one_hopper(num_devices):
        return reason
    if hidden.dtype != jnp.bfloat16:
        return f"hidden is {hidden.dtype}; exponentials need bfloat16's range"
    if hidden.shape[-1] % WIDTH_MULTIPLE:
        return f"width {hidden.shape[-1]} is not a multiple of {WIDTH_MULTIPLE}"
    if label_smoothing and logit_soft_cap is not None:
        return (
            f"label_smoothing={label_smoothing} with logit_soft_cap={logit_soft_cap} needs the sum "
            "of the capped logits"
        )
    return None


def chunk_loss(
    static: Static,
    table_VD: jax.Array,
    hidden_ZbCD: jax.Array,
    targets_ZbC: jax.Array,
    weights_ZbC: jax.Array,
    *,
    with_gradient: bool,
) -> ChunkLoss:
    """Computes a chunk's loss by the kernel; the result's ``slope`` is ``M`` of the module."""
    shape = targets_ZbC.shape
    num_rows = math.prod(shape)
    pad = -num_rows % ROW_MULTIPLE
    x_RD = jnp.pad(hidden_ZbCD.reshape(num_rows, -1), ((0, pad), (0, 0)))
    targets_R, weights_R = (
        jnp.pad(y.reshape(num_rows), (0, pad)) for y in (targets_ZbC, weights_ZbC)
    )
    counted_R = weights_R != 0.0
    here_R = (targets_R >= 0) & (targets_R < static.num_ids)
    target_R, slope_R = _target_logit(
        static, x_RD, table_VD, jnp.clip(targets_R, 0, static.num_ids - 1)
    )
    exists_R = here_R
    if static.vocabulary_axes:
        target_R, exists_R = _of_the_device_that_has_it(static, target_R, here_R)
    matrix, sums_R, reference_R = _in_range(
        static, x_RD, table_VD, jnp.where(counted_R, target_R, jnp.inf), with_gradient
    )

    lse_R, sums_R = _logsumexp_of_all(static, counted_R, sums_R, reference_R)
    nll_R = lse_R - jnp.where(exists_R, target_R, 0.0)
    # A row that does not count adds 0 whatever its nll is.
    nll_R = jnp.where(counted_R, weights_R * nll_R, 0.0)
    smoothing = static.label_smoothing
    smoothed_R = nll_R
    uniform_ZbC = None
    if smoothing:
        # (1 - s) nll + s (lse - mean of the logits); the mean is added where it is known.
        target_or_0_R = jnp.where(exists_R & counted_R, target_R, 0.0)
        smoothed_R = nll_R + smoothing * weights_R * target_or_0_R
        uniform_ZbC = -smoothing / static.num_ids_of_all * weights_ZbC
    penalty_R = static.z_loss * weights_R * lse_R**2

    def by_shard(y_R: jax.Array) -> jax.Array:
        return jnp.sum(y_R[:num_rows].reshape(shape), axis=(1, 2))

    losses = by_shard(smoothed_R + penalty_R), by_shard(nll_R)
    if not with_gradient:
        return ChunkLoss(*losses, uniform_ZbC=uniform_ZbC)

    # d total / d l = weight * (g * M / S - (1 - s) [v = target] - s / V) with g = 1 + 2 z lse.
    g_R = 1.0 + 2.0 * static.z_loss * lse_R
    scale_R = jnp.where(counted_R, weights_R * g_R / sums_R, 0.0)
    counts_R = here_R & counted_R
    probability_R = jnp.exp(jnp.where(counts_R, target_R - lse_R, 0.0))
    at_target_R = weights_R * slope_R * (g_R * probability_R - (1.0 - smoothing))
    coefficient_R = jnp.where(counts_R, at_target_R, 0.0)
    assert matrix is not None
    matrix = _without_targets(matrix, targets_R, counts_R)

    def unpad(y_R: jax.Array) -> jax.Array:
        return y_R[:num_rows].reshape(*shape, *y_R.shape[1:])

    return ChunkLoss(*losses, unpad(matrix), unpad(scale_R), unpad(coefficient_R), uniform_ZbC)


def _logsumexp_of_all(
    static: Static, counted_R: jax.Array, sums_R: jax.Array, reference_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logsumexp of each row over all devices of the vocabulary, and its sum by its reference."""
    sums_R = jnp.where(counted_R, sums_R, 1.0)
    reference_R = jnp.where(counted_R, reference_R, 0.0)
    lse_R = reference_R + jnp.log(sums_R)
    if static.vocabulary_axes:
        # References may have risen on some devices and not on others.
        lse_R = logsumexp(lse_R, static.vocabulary_axes)
        sums_R = jnp.exp(lse_R - reference_R)
    return lse_R, sums_R


def _without_targets(matrix: jax.Array, targets_R: jax.Array, counts_R: jax.Array) -> jax.Array:
    """The matrix of exponentials with 0 at each counted row's target."""
    columns_R = jnp.where(counts_R, targets_R, matrix.shape[1])
    rows_R = jnp.arange(matrix.shape[0])
    return matrix.at[rows_R, columns_R].set(0, mode="drop", unique_indices=True)


def _target_logit(
    static: Static, x_RD: jax.Array, table_VD: jax.Array, ids_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the capped logit of one id per row, and the cap's slope there, in fp32."""
    rows_RD = jnp.take(table_VD, ids_R, axis=0).astype(jnp.float32)
    logit_R = jnp.sum(x_RD.astype(jnp.float32) * rows_RD, axis=-1)
    if static.logit_soft_cap is None:
        return logit_R, jnp.ones_like(logit_R)
    ratio_R = jnp.tanh(logit_R / static.logit_soft_cap)
    return static.logit_soft_cap * ratio_R, 1.0 - ratio_R**2


def _of_the_device_that_has_it(
    static: Static, logit_R: jax.Array, here_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The target's logit, and whether any device has it.

    Where none has, the mean of a logit of each: no higher than the logsumexp, so not all sums
    vanish.
    """
    at_target_R, found_R, any_R = over_shards(
        static,
        jnp.stack([jnp.where(here_R, logit_R, 0.0), here_R.astype(jnp.float32), logit_R]),
        lax.psum,
    )
    exists_R = found_R > 0.0
    mean_R = any_R / static.num_vocabulary_shards
    return jnp.where(exists_R, at_target_R, mean_R), exists_R


def _in_range(
    static: Static, x_RD: jax.Array, table_VD: jax.Array, reference_R: jax.Array, with_matrix: bool
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Exponentials, sums and the references with which no row's sum is too large.

    References rise as often as it takes, in practice never. A sum that stays infinite is one of
    infinite logits.
    """

    def compute(reference_R):
        return exponentials(
            x_RD, table_VD, reference_R, num_ids=static.num_ids,
            logit_soft_cap=static.logit_soft_cap, with_matrix=with_matrix,
        )  # fmt: skip

    def too_large(sums_R):
        return sums_R > math.exp(HIGHEST)

    def go_on(state):
        _, sums_R, _, raises = state
        return jnp.any(too_large(sums_R)) & (raises < MOST_RAISES)

    def again(state):
        _, sums_R, reference_R, raises = state
        reference_R = jnp.where(too_large(sums_R), reference_R + RAISE, reference_R)
        return *compute(reference_R), reference_R, raises + 1

    state = (*compute(reference_R), reference_R, jnp.int32(0))
    return lax.while_loop(go_on, again, state)[:3]


def exponentials(
    x_RD: jax.Array,
    table_VD: jax.Array,
    reference_R: jax.Array,
    *,
    num_ids: int,
    logit_soft_cap: float | None = None,
    with_matrix: bool = True,
) -> tuple[jax.Array | None, jax.Array]:
    """Computes exponentials of capped logits, times the cap's derivative, and unscaled row sums.

    With ``l = cap * tanh(x w / cap)``: ``matrix = exp(l - reference) * (1 - (l / cap)**2)`` and
    ``sums = sum_v exp(l - reference)``.

    Args:
        x_RD: bf16; R a multiple of 8, D of 64.
        table_VD: bf16; V a multiple of 64.
        reference_R: fp32, nats; +inf makes a row of zeros.
        num_ids: ids from ``num_ids`` on are padding: zeros in the matrix, left out of the sums.
        logit_soft_cap: the cap; None computes ``exp(l - reference)`` of plain logits.
        with_matrix: False computes the sums alone.

    Returns:
        bf16 [R, V] (None without the matrix) and fp32 [R].
    """
    (num_rows, width), num_columns = x_RD.shape, table_VD.shape[0]
    assert num_rows % ROW_MULTIPLE == 0, num_rows
    assert width % WIDTH_MULTIPLE == 0, width
    assert num_columns % WIDTH_MULTIPLE == 0, num_columns
    kernel = _Exponentials(
        num_rows=num_rows, num_columns=num_columns, width=width, num_ids=num_ids,
        cap=logit_soft_cap, with_matrix=with_matrix, dtype=x_RD.dtype,
    )  # fmt: skip
    padded_rows = kernel.num_r_tiles * ROW_TILE
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
        grid=(kernel.num_blocks,),
        grid_names=("worker",),
        num_threads=NUM_COMPUTE + 1,
    )
    sums_R = jnp.sum(found["sums"], axis=0)[:num_rows]
    return found.get("matrix"), sums_R


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Exponentials:
    """The kernel of one call; methods are its phases, written once per trace."""

    num_rows: int
    num_columns: int
    width: int
    num_ids: int
    cap: float | None
    with_matrix: bool
    dtype: jnp.dtype

    @property
    def num_r_tiles(self) -> int:
        return -(-self.num_rows // ROW_TILE)

    @property
    def num_v_tiles(self) -> int:
        return -(-self.num_columns // BLOCK_V)

    @property
    def num_d_tiles(self) -> int:
        return self.width // BLOCK_D

    @property
    def num_blocks(self) -> int:
        return min(NUM_PROCESSORS, self.num_r_tiles * self.num_v_tiles)

    @property
    def in_turns(self) -> bool:
        """Whether the second warpgroup's epilogue waits for the first's.

        A warpgroup is then never a whole tile ahead of the other, so one barrier counts tiles.
        """
        return self.num_d_tiles > NUM_STAGES

    def scratch(self) -> dict:
        tile = tiled(128)
        # In this order: the matrices start at multiples of 1 KiB, the rest packs behind them.
        buffers: dict[str, Any] = {
            "x": plgpu.SMEM((NUM_STAGES, ROW_TILE, BLOCK_D), self.dtype, transforms=tile),
            "table": plgpu.SMEM((NUM_STAGES, BLOCK_V, BLOCK_D), self.dtype, transforms=tile),
        }
        if self.with_matrix:
            shape = (NUM_COMPUTE, NUM_OUT_SLOTS, WARPGROUP_ROWS, 64)
            buffers["out"] = plgpu.SMEM(shape, self.dtype, transforms=tile)
        buffers["sums"] = plgpu.SMEM((NUM_COMPUTE, WARPGROUP_ROWS), jnp.float32)
        buffers["full"] = plgpu.Barrier(num_arrivals=2, num_barriers=NUM_STAGES)
        buffers["empty"] = plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=NUM_STAGES)
        buffers["turn"] = plgpu.Barrier()
        return buffers

    def run(self, gmem, smem) -> None:
        """Runs one block: a role for each warpgroup."""
        wg = lax.axis_index("wg")

        @pl.when(wg < NUM_COMPUTE)
        def _():
            plgpu.set_max_registers(240, action="increase")
            for slot in range(NUM_STAGES):
                plgpu.barrier_arrive(smem.empty.at[slot])
            self.each_tile(functools.partial(self.compute, gmem, smem, wg))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == NUM_COMPUTE)
        def _():
            # 2 * 240 + 24 registers per thread is all that an SM has.
            plgpu.set_max_registers(24, action="decrease")
            self.each_tile(functools.partial(self.load, gmem, smem))
            for slot in range(NUM_STAGES):
                plgpu.barrier_wait(smem.empty.at[slot])

    def each_tile(self, body) -> None:
        """Calls ``body(first row, first id, steps before)`` for this block's tiles in order."""
        worker = lax.axis_index("worker")
        num_tiles = self.num_r_tiles * self.num_v_tiles

        def step(i, _):
            tile = worker + i * self.num_blocks
            r_tile = lax.rem(tile, self.num_r_tiles)
            v_tile = lax.div(tile, self.num_r_tiles)
            body(r_tile * ROW_TILE, v_tile, i * self.num_d_tiles)

        lax.fori_loop(0, lax.div(num_tiles - 1 - worker, self.num_blocks) + 1, step, None)

    def load(self, gmem, smem, row0, v_tile, done) -> None:
        """Fills the ring with the tiles of one product."""

        def step(k, _):
            slot = lax.rem(done + k, NUM_STAGES)
            columns = pl.ds(k * BLOCK_D, BLOCK_D)
            plgpu.barrier_wait(smem.empty.at[slot])
            full = smem.full.at[slot]
            x_gmem = gmem.x.at[pl.ds(row0, ROW_TILE), columns]
            table_gmem = gmem.table.at[pl.ds(v_tile * BLOCK_V, BLOCK_V), columns]
            plgpu.copy_gmem_to_smem(x_gmem, smem.x.at[slot], full)
            plgpu.copy_gmem_to_smem(table_gmem, smem.table.at[slot], full)

        lax.fori_loop(0, self.num_d_tiles, step, None)

    def compute(self, gmem, smem, wg, row0, v_tile, done) -> None:
        """Computes the product of 64 rows and one tile of ids, then its epilogue."""
        rows = pl.ds(row0 + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        reference = plgpu.load(gmem.reference.at[rows], layout=row_layout(), optimized=False)
        # The first wait comes before the accumulator exists: its zeros then cost no instruction.
        plgpu.barrier_wait(smem.full.at[lax.rem(done, NUM_STAGES)])

        def product(acc):
            def multiply(k):
                slot = lax.rem(done + k, NUM_STAGES)
                x_smem = smem.x.at[slot, pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)]
                plgpu.wgmma(acc, x_smem, smem.table.at[slot].transpose((1, 0)))

            def step(k, _):
                plgpu.barrier_wait(smem.full.at[lax.rem(done + k, NUM_STAGES)])
                multiply(k)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(smem.empty.at[lax.rem(done + k - 1, NUM_STAGES)])

            multiply(0)
            lax.fori_loop(1, self.num_d_tiles, step, None)
            logits = plgpu.wgmma_accumulator_load(acc)
            last = lax.rem(done + self.num_d_tiles - 1, NUM_STAGES)
            plgpu.barrier_arrive(smem.empty.at[last])
            return logits

        logits = pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, BLOCK_V), jnp.float32))
        if self.in_turns:
            pl.when(wg == 1)(lambda: plgpu.barrier_wait(smem.turn))
        matrix, sums = self.epilogue(logits, reference, v_tile * BLOCK_V)
        # Copies leave in order and at most as many wait as there are slots, so a slot or the sums
        # written here were read out before.
        if self.with_matrix:
            for i in range(BLOCK_V // 64):
                slot = i % NUM_OUT_SLOTS
                plgpu.wait_smem_to_gmem(NUM_OUT_SLOTS - 1, wait_read_only=True)
                stripe = lax.slice(matrix, (0, 64 * i), (WARPGROUP_ROWS, 64 * (i + 1)))
                smem.out[wg, slot] = stripe.astype(self.dtype)
                plgpu.commit_smem()
                columns = pl.ds(v_tile * BLOCK_V + 64 * i, 64)
                plgpu.copy_smem_to_gmem(smem.out.at[wg, slot], gmem.matrix.at[rows, columns])
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.sums[wg] = sums
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.sums.at[wg], gmem.sums.at[v_tile, rows])
        if self.in_turns:
            pl.when(wg == 0)(lambda: plgpu.barrier_arrive(smem.turn))

    def epilogue(self, logits, reference, column0):
        """Computes exponentials with the cap's slope, and row sums without it."""
        shift = lax.broadcast_in_dim(reference, logits.shape, [0])
        if self.cap is None:
            slope, power = None, logits * LOG2E - shift
        else:
            capped = soft_cap(logits, 1.0, self.cap)
            ratio = capped * (1.0 / self.cap)
            slope, power = 1.0 - ratio * ratio, capped * LOG2E - shift
        if self.num_ids % BLOCK_V:
            power = mask_tile(power, num_cols=self.num_ids - column0, fill=-jnp.inf)
        matrix = jnp.exp2(power)
        sums = sum_strips(matrix).sum(axis=1)
        return (matrix if slope is None else matrix * slope), sums
