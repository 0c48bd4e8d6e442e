"""The grouped-matmul kernel for Hopper: rows times their group's weight, or SwiGLU of two products.

Blocks are persistent and take tiles of 128 rows of one group. One warpgroup copies tiles of
operands ahead; two multiply 64 rows each, or skip a tile that has no rows for them. Results are
stored while the next tile is multiplied.

Dims: M row, G group, K contraction, N column.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E

from .config import (
    BLOCK_DEPTH,
    BLOCK_ROWS,
    ROW_MULTIPLE,
    WARPGROUP_ROWS,
    WIDTH_MULTIPLE,
    GroupedConfig,
)
from .ring import copy_rows
from .row_tiles import RowTilesKernel


def grouped_product(
    factors: list[tuple[jax.Array, list[jax.Array]]],
    group_sizes_G: jax.Array,
    *,
    transposed: bool,
    gated: bool = False,
    keep: bool = False,
    rows_M: jax.Array | None = None,
    out_dtype: jnp.dtype,
    config: GroupedConfig,
) -> list[jax.Array]:
    """Multiplies rows by their group's weights, summed over factors: [M, N] per weight.

    Args:
        factors: (a [M, K], weights [G, K, N]); each has equally many weights. M is a multiple of 8
            and at least 128, K and N are multiples of 64.
        group_sizes_G: int32, in sum at most M; result rows beyond the groups are 0.
        transposed: weights are [G, N, K].
        gated: returns silu(first) * second of the products with two weights.
        keep: also returns both products, after the gated one.
        rows_M: int32; row m is row ``rows_M[m]`` of a, of any number of rows; for one factor.
        out_dtype: dtype of all results.
        config: tile sizes.
    """
    a_MK, weights = factors[0]
    num_groups, num_columns = weights[0].shape[0], weights[0].shape[1 if transposed else 2]
    num_rows = a_MK.shape[0] if rows_M is None else rows_M.shape[0]
    kernel = _Product(
        c=config,
        dtype=a_MK.dtype,
        out_dtype=jnp.dtype(out_dtype),
        num_rows=num_rows,
        num_groups=num_groups,
        depths=tuple(a.shape[1] for a, _ in factors),
        num_weights=len(weights),
        num_columns=num_columns,
        transposed=transposed,
        gated=gated,
        keep=keep,
        gathered=rows_M is not None,
    )
    operands = {
        "sizes": group_sizes_G,
        "a": [a for a, _ in factors],
        "b": [w for _, weights in factors for w in weights],
    }
    if rows_M is not None:
        # The last tile names rows beyond the last.
        operands["rows"] = jnp.pad(rows_M, (0, BLOCK_ROWS))
    result = jax.ShapeDtypeStruct((num_rows, num_columns), out_dtype)
    return list(kernel.launch(operands, {"out": [result] * kernel.num_results})["out"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Product(RowTilesKernel):
    """The kernel of one call; methods are its phases, written once per trace."""

    name: ClassVar[str] = "grouped_matmul"

    depths: tuple[int, ...]
    num_weights: int
    transposed: bool
    gated: bool
    keep: bool
    gathered: bool

    @property
    def block_columns(self) -> int:
        """Number of columns that a tile takes of one weight."""
        return self.c.columns // self.num_weights

    @property
    def num_results(self) -> int:
        if self.gated:
            return 1 + self.keep * self.num_weights
        return self.num_weights

    @property
    def num_steps(self) -> int:
        """Number of steps along K, over all factors, in a tile."""
        return sum(-(-depth // BLOCK_DEPTH) for depth in self.depths)

    def scratch(self) -> dict[str, Any]:
        b = (BLOCK_DEPTH, self.block_columns)
        b = b[::-1] if self.transposed else b
        return self.shared(
            a=(BLOCK_ROWS, BLOCK_DEPTH), **{f"b{i}": b for i in range(self.num_weights)}
        )

    def load(self, gmem: Any, smem: Any, facts: Any, done: Any) -> None:
        """Loads the operands of one tile into the ring."""
        steps, group, row, _, _, column = facts
        tile_rows = pl.ds(pl.multiple_of(row, ROW_MULTIPLE), BLOCK_ROWS)
        columns = pl.ds(pl.multiple_of(column, WIDTH_MULTIPLE), self.block_columns)

        @pl.when(steps > 0)
        def _():
            before = done
            for f, depth in enumerate(self.depths):
                weights = gmem.b[f * self.num_weights : (f + 1) * self.num_weights]

                def copy(k, slot, full, f=f, weights=weights, depth=depth):
                    depths = pl.ds(pl.multiple_of(k * BLOCK_DEPTH, BLOCK_DEPTH), BLOCK_DEPTH)
                    for i, w in enumerate(weights):
                        part = (columns, depths) if self.transposed else (depths, columns)
                        plgpu.copy_gmem_to_smem(
                            w.at[(group, *part)], self.b_smem(smem, i).at[slot], full
                        )
                    if self.gathered:
                        copy_rows(
                            gmem.a[f].at[:, depths], gmem.rows.at[tile_rows], smem.a.at[slot],
                            row_bytes=depth * self.dtype.itemsize,
                        )  # fmt: skip
                    else:
                        a_gmem = gmem.a[f].at[tile_rows, depths]
                        plgpu.copy_gmem_to_smem(a_gmem, smem.a.at[slot], full)

                num_steps = -(-depth // BLOCK_DEPTH)
                self.fill(smem, num_steps, before, copy, gathered=self.gathered)
                before = before + num_steps

    def b_smem(self, smem: Any, i: int) -> Any:
        """Returns the ring of weight i in shared memory."""
        return getattr(smem, f"b{i}")

    def multiplied(self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any) -> list[jax.Array]:
        """Multiplies this warpgroup's rows of one tile: fp32 [64, columns] of each result."""
        del gmem, facts
        mine = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)

        def product(*accs):
            def step(k, _):
                slot = self.slot(done + k)
                plgpu.barrier_wait(smem.full.at[slot])
                for i, acc in enumerate(accs):
                    b = self.b_smem(smem, i).at[slot]
                    b = b.transpose((1, 0)) if self.transposed else b
                    plgpu.wgmma(acc, smem.a.at[slot, mine], b)
                plgpu.wgmma_wait(len(accs))
                # The step before this one is multiplied.
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[self.slot(done + k - 1)]))

            lax.fori_loop(0, self.num_steps, step, None)
            values = tuple(acc[...] for acc in accs)
            plgpu.barrier_arrive(smem.empty.at[self.slot(done + self.num_steps - 1)])
            return values

        acc = plgpu.ACC((WARPGROUP_ROWS, self.block_columns), jnp.float32)
        return self.results(pl.run_scoped(product, *[acc] * self.num_weights))

    def results(self, products: Any) -> list[jax.Array]:
        """Returns the fp32 results to store: the products, or silu(first) * second of them."""
        if not self.gated:
            return list(products)
        gate, up = products
        out = gate * up / (1.0 + jnp.exp2(gate * -LOG2E))
        return [out, gate, up] if self.keep else [out]
