"""What both kernels share: a block's roles, its ring of operand tiles, how results leave."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tile import tiled

from .config import LINE_BYTES, LOADER, NUM_COMPUTE, WARPGROUP_ROWS, GroupedConfig

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0,lowering_semantics=plgpu.LoweringSemantics.Lane
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RingKernel:
    """One warpgroup copies operands ahead; two multiply and send results away."""

    c: GroupedConfig
    dtype: jnp.dtype  # of operands
    out_dtype: jnp.dtype

    @property
    def line(self) -> int:
        """Columns of a result that leave at a time."""
        return LINE_BYTES // self.out_dtype.itemsize

    def shared(self, **operands: tuple[int, int]) -> dict[str, Any]:
        """Buffers and barriers: a ring of tiles of each operand's shape, results on their way."""
        c = self.c
        ring = {
            name: plgpu.SMEM((c.num_stages, *shape), self.dtype, transforms=tiled(128))
            for name, shape in operands.items()
        }
        return {
            **ring,
            "full": plgpu.Barrier(num_arrivals=len(operands), num_barriers=c.num_stages),
            "empty": plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=c.num_stages),
        }

    def run(self, gmem: Any, smem: Any) -> None:
        """One block, with room for results on their way: whole tiles swizzled, parts plain."""
        shape = (NUM_COMPUTE, 2, WARPGROUP_ROWS, self.line)
        transforms = tiled(128, self.out_dtype.itemsize)
        swizzled = plgpu.SMEM(shape, self.out_dtype, transforms=transforms)

        def roles(out: Any) -> None:
            smem.out = out
            self.roles(gmem, smem)

        out = plgpu.RefUnion(swizzled, plgpu.SMEM(shape, self.out_dtype))
        pl.run_scoped(roles, out, collective_axes="wg")

    def roles(self, gmem: Any, smem: Any) -> None:
        """Each warpgroup's part."""
        wg = lax.axis_index("wg")

        @pl.when(wg < NUM_COMPUTE)
        def _():
            plgpu.set_max_registers(232, action="increase")
            for slot in range(self.c.num_stages):
                plgpu.barrier_arrive(smem.empty.at[slot])
            self.each_tile(gmem, lambda *tile: self.compute(gmem, smem, wg, *tile))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == LOADER)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            self.each_tile(gmem, lambda *tile: self.load(gmem, smem, *tile))
            # The interpreter asks that no barrier is left with a phase that nobody saw.
            for slot in range(self.c.num_stages):
                plgpu.barrier_wait(smem.empty.at[slot])

    def slot(self, step: jax.Array) -> jax.Array:
        """The place in the ring of a step, counted over all tiles of the block."""
        return lax.rem(step, self.c.num_stages)

    def store(self, smem: Any, wg: jax.Array, parts: list, rows: Any) -> None:
        """A warpgroup's 64 rows of results to memory, not waited for.

        Args:
            parts: (fp32 [64, line], where its rows lie) of each line.
            rows: (first, end) of those that are written.
        """
        plain = smem.out[1]
        first, end = rows
        is_whole = (first == 0) & (end == WARPGROUP_ROWS)

        pl.when(is_whole)(lambda: self.store_whole(smem, wg, parts))

        @pl.when(jnp.logical_not(is_whole))
        def _():
            for i, (part, gmem) in enumerate(parts):
                self._stage(part, plain.at[wg, i % 2])
                # Rows of any number and place: copies of 32, 16, ... 1 of them, each or not.
                at = first
                for size in (32, 16, 8, 4, 2, 1):
                    taken = (end - first) & size

                    @pl.when(taken != 0)
                    def _(at=at, size=size, gmem=gmem, i=i):
                        plgpu.copy_smem_to_gmem(
                            plain.at[wg, i % 2, pl.ds(at, size)],
                            gmem(at, size),
                            commit_group=False,
                        )

                    at = at + taken
                plgpu.commit_smem_to_gmem_group()

    def store_whole(self, smem: Any, wg: jax.Array, parts: list) -> None:
        """All 64 rows, likewise."""
        swizzled = smem.out[0]
        for i, (part, gmem) in enumerate(parts):
            self._stage(part, swizzled.at[wg, i % 2])
            plgpu.copy_smem_to_gmem(swizzled.at[wg, i % 2], gmem(0, WARPGROUP_ROWS))

    def _stage(self, part: jax.Array, ref: Any) -> None:
        # At most the copies before the last are still reading.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        ref[...] = part.astype(self.out_dtype)
        plgpu.commit_smem()
