"""Matmuls of a few rows on a Hopper GPU: the weight is read once, at the memory's rate.

A block has some columns of the weight and all rows of x: one warpgroup fills a ring with tiles of
both, others multiply 64 rows each. Where columns are too few for all multiprocessors, K is split:
parts leave in fp32, and XLA adds them in the operation that reads the product. Results are rounded
once either way. Tiles of x come out of L2 once for each cluster, whose blocks share the copies.

Dims: M row, K contracted, N column of the weight, F column of the result of a gated product, P part
of K.
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
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import swizzle_bytes, tiled

from .config import MOST_ROWS, ROW_MULTIPLE, ROWS, SkinnyConfig, config_for, num_groups

DTYPES = ("bfloat16", "float16")


def unsupported(x_MK: jax.Array, w_KN: jax.Array, *, swiglu: bool) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {facts.kind}"
    (M, K), N = x_MK.shape, w_KN.shape[1]
    if x_MK.dtype.name not in DTYPES:
        return f"{x_MK.dtype} is neither bfloat16 nor float16"
    if not 1 <= M <= MOST_ROWS:
        return f"{M} rows: it takes 1 to {MOST_ROWS}"
    if config_for(padded(M), N, K, swiglu=swiglu) is None:
        return f"no tile divides K={K} and N={N}, and fits"
    return None


def padded(M: int) -> int:
    """Rows with those that the copy engine's tiles ask for."""
    return -(-M // ROW_MULTIPLE) * ROW_MULTIPLE


def skinny_matmul_hopper(
    x_MK: jax.Array, w_KN: jax.Array, *, swiglu: bool, config: SkinnyConfig | None = None
) -> jax.Array:
    """As the reference, of a call of which ``unsupported`` says nothing.

    Raises:
        UnsupportedError: tiles that do not fit the call.
    """
    (M, K), N = x_MK.shape, w_KN.shape[1]
    config = config or config_for(padded(M), N, K, swiglu=swiglu)
    assert config is not None, "unsupported"
    reason = config.unsupported(padded(M), N, K, swiglu=swiglu)
    if reason is not None:
        raise UnsupportedError(f"{config} for {M} rows, K={K}, N={N}: {reason}")
    rows = M
    if M > ROW_MULTIPLE:  # copies may go beyond the last row of a single tile of rows only
        rows = padded(M)
        x_MK = jnp.pad(x_MK, ((0, rows - M), (0, 0)))
    kernel = _SkinnyKernel(
        c=config, M=padded(M), rows=rows, K=K, N=N, dtype=x_MK.dtype, swiglu=swiglu
    )
    result = kernel.result(x_MK, w_KN)
    if config.splits > 1:
        result = jnp.sum(result, axis=0).astype(x_MK.dtype)
    return result[:M]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _SkinnyKernel:
    """The kernel of one call; methods are its phases, written once per trace."""

    c: SkinnyConfig
    M: int  # with those that tiles ask for: they are read as zeros, and not written
    rows: int
    K: int
    N: int
    dtype: jnp.dtype
    swiglu: bool

    @property
    def parts(self) -> int:
        """Pieces of a tile of the weight: of a gated product, columns of gate and of up."""
        return 2 if self.swiglu else 1

    @property
    def part_n(self) -> int:
        """Columns of a piece, and of a block's result."""
        return self.c.tile_n // self.parts

    @property
    def num_stages(self) -> int:
        """Tiles in the ring."""
        return self.c.num_stages(self.M, swiglu=self.swiglu)

    @property
    def num_steps(self) -> int:
        """Tiles of a part of K."""
        return self.K // self.c.depth // self.c.splits

    def result(self, x_MK: jax.Array, w_KN: jax.Array) -> jax.Array:
        """[M, N], or [M, F]; fp32 [P, M, N] where K is split."""
        c = self.c
        shape, dtype = (self.rows, self.N // self.parts), self.dtype
        if c.splits > 1:
            shape, dtype = (c.splits, *shape), jnp.dtype("float32")
        return launch(
            self.run,
            name="skinny_matmul",
            operands={"x": x_MK, "w": w_KN},
            results={"out": jax.ShapeDtypeStruct(shape, dtype)},
            scratch=self.scratch(),
            num_threads=num_groups(self.M) + 1,
            grid=(self.N // c.tile_n // c.cluster, c.splits),
            grid_names=("block", "part"),
            cluster=(c.cluster,),
            cluster_names=("cluster",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )["out"]

    def scratch(self) -> dict[str, Any]:
        """The ring of tiles, results on their way out, barriers."""
        c, groups = self.c, num_groups(self.M)
        wide = tiled(swizzle_bytes(self.part_n))
        empty: Any = plgpu.Barrier
        if c.cluster > 1:
            empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
        return {
            "x": plgpu.SMEM((self.num_stages, groups * ROWS, c.depth), self.dtype, transforms=wide),
            "w": plgpu.SMEM(
                (self.num_stages, self.parts, c.depth, self.part_n), self.dtype, transforms=wide
            ),
            "out": plgpu.SMEM(
                (groups * ROWS, self.part_n),
                self.dtype if c.splits == 1 else jnp.float32,
                transforms=tiled(
                    swizzle_bytes(self.part_n, itemsize=c.out_bytes), itemsize=c.out_bytes
                ),
            ),
            "full": plgpu.Barrier(num_arrivals=1 + self.parts, num_barriers=self.num_stages),
            "empty": empty(num_arrivals=groups, num_barriers=self.num_stages),
        }

    def run(self, gmem, smem) -> None:
        """One block: a role for each warpgroup."""
        wg = lax.axis_index("wg")
        groups = num_groups(self.M)
        block = lax.axis_index("block") * self.c.cluster + lax.axis_index("cluster")
        for group in range(groups):
            pl.when(wg == group)(functools.partial(self.compute, gmem, smem, block, group))
        pl.when(wg == groups)(functools.partial(self.load, gmem, smem, block))

    def all_rows(self, first: int, count: int) -> Any:
        """A slice beyond the last row, of which the copy engine reads zeros and writes nothing."""
        return pl.ds(first + 0 * lax.axis_index("block"), count)

    def load(self, gmem, smem, block) -> None:
        """Fills the ring."""
        c = self.c
        sharing = "cluster" if c.cluster > 1 else None

        def step(i, _):
            slot = lax.rem(i, self.num_stages)
            depth = pl.ds((lax.axis_index("part") * self.num_steps + i) * c.depth, c.depth)
            plgpu.barrier_wait(smem.empty.at[slot])
            full = smem.full.at[slot]
            for part in range(self.parts):
                columns = pl.ds(part * (self.N // self.parts) + block * self.part_n, self.part_n)
                plgpu.copy_gmem_to_smem(gmem.w.at[depth, columns], smem.w.at[slot, part], full)
            plgpu.copy_gmem_to_smem(
                gmem.x.at[self.all_rows(0, self.M), depth],
                smem.x.at[slot, pl.ds(0, self.M)],
                full,
                collective_axes=sharing,
            )  # fmt: skip

        lax.fori_loop(0, self.num_steps, step, None)
        # Nobody leaves while another block of the cluster still copies into it.
        for slot in range(self.num_stages):
            plgpu.barrier_wait(smem.empty.at[slot])

    def compute(self, gmem, smem, block, group: int) -> None:
        """64 rows of the block's columns."""
        for slot in range(self.num_stages):
            plgpu.barrier_arrive(smem.empty.at[slot])
        first = group * ROWS
        rows = pl.ds(first, ROWS)

        def multiply(*accs):
            def step(i, _):
                slot = lax.rem(i, self.num_stages)
                plgpu.barrier_wait(smem.full.at[slot])
                for part, acc in enumerate(accs):
                    plgpu.wgmma(acc, smem.x.at[slot, rows], smem.w.at[slot, part])
                plgpu.wgmma_wait(len(accs))
                # The products of the step before are over.
                before = lax.rem(i + self.num_stages - 1, self.num_stages)
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[before]))

            lax.fori_loop(0, self.num_steps, step, None)
            last = (self.num_steps - 1) % self.num_stages
            sums = [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accs]
            plgpu.barrier_arrive(smem.empty.at[last])
            return sums

        acc = plgpu.ACC((ROWS, self.part_n), jnp.float32)
        sums = pl.run_scoped(multiply, *[acc] * self.parts)
        total = sums[0]
        if self.swiglu:
            gate, up = sums
            total = gate / (1.0 + jnp.exp(-gate)) * up
        smem.out[rows] = total.astype(smem.out.dtype)
        plgpu.commit_smem()
        count = min(ROWS, self.M - first)
        columns = pl.ds(block * self.part_n, self.part_n)
        out = gmem.out if self.c.splits == 1 else gmem.out.at[lax.axis_index("part")]
        plgpu.copy_smem_to_gmem(
            smem.out.at[pl.ds(first, count)], out.at[self.all_rows(first, count), columns]
        )
        plgpu.wait_smem_to_gmem(0)
