"""A decode step's new tokens within the kernel that reads pages, instead of a kernel before it.

Their heads, and the angles that turn them, are copied along with the queries. A worker turns its
queries where they lie, and puts a row's new key and value into the tile that they belong to; what
it read there, memory's old contents, does not count. Warpgroups that load write them into pages.

Dims: B row, N query heads, K kv heads, H width, R turned pair.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import column_layout, tile_layout

from .append_heads import HeadAppender
from .config import ROWS, PagedConfig, QueryLayout
from .segments import Segment

WIDTHS = (64, 128)
COLUMNS = 64  # of a tile that are changed at a time
NUM_COPIES = 4  # a key, a value, cosines, sines


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepHeads:
    """What a step appends and attends with."""

    k_pages: Any  # which are written
    v_pages: Any
    heads_BNH: jax.Array  # of queries, then of keys, then of values
    positions_B: jax.Array
    cos_BR: jax.Array
    sin_BR: jax.Array

    def operands(self) -> dict[str, Any]:
        """By the names that the kernel has for them."""
        return {
            "k": self.k_pages, "v": self.v_pages,
            "q": self.heads_BNH[:, None], "heads": self.heads_BNH, "positions": self.positions_B,
            "cos": self.cos_BR, "sin": self.sin_BR,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """What the kernel of one call does with them."""

    g: QueryLayout
    c: PagedConfig
    dtype: jnp.dtype

    def scratch(self) -> dict:
        """Shared memory of what is copied for a segment."""
        places = self.c.num_workers * self.c.num_queries
        return {
            "new": plgpu.SMEM((places, 2, self.g.H), self.dtype),
            "angles": plgpu.SMEM((places, 2, self.g.H // 2), jnp.float32),
        }

    def copy(self, gmem, smem, full, mine, seg: Segment) -> None:
        """Starts the copies for a segment, which arrive with its queries."""
        g = self.g
        for i, head in enumerate((g.N + seg.head, g.N + g.K + seg.head)):
            plgpu.copy_gmem_to_smem(gmem.heads.at[seg.row, head], smem.new.at[mine, i], full)
        for i, angles in enumerate((gmem.cos, gmem.sin)):
            plgpu.copy_gmem_to_smem(angles.at[seg.row], smem.angles.at[mine, i], full)

    def turn_queries(self, smem, mine) -> None:
        """Turns a tile of queries where it lies."""
        q_smem = smem.q.at[mine]
        parts = [q_smem.at[:, pl.ds(i, COLUMNS)] for i in range(0, self.g.H, COLUMNS)]
        loaded = [plgpu.load(x, layout=tile_layout(), optimized=False) for x in parts]
        if len(loaded) == 1:
            half = self.g.H // 2
            loaded = [lax.slice(loaded[0], (0, i), (ROWS, i + half)) for i in (0, half)]
        self.write(parts, self.turned(smem, mine, loaded))
        plgpu.commit_smem()

    def put_key(self, smem, k_smem, mine, row) -> None:
        """Puts the new key into a tile of keys, where the tile has its row."""
        self.put(k_smem, row, lambda: self.turned(smem, mine, self.halves(smem, mine, 0)))

    def put_value(self, smem, v_smem, mine, row) -> None:
        """Puts the new value into a tile of values, where the tile has its row."""
        self.put(v_smem, row, lambda: self.halves(smem, mine, 1))

    def put(self, tile_smem, row, make) -> None:
        """Replaces a row by two halves, made for all rows of a tile."""
        rows = tile_smem.shape[0]
        parts = [tile_smem.at[:, pl.ds(i, COLUMNS)] for i in range(0, self.g.H, COLUMNS)]

        @pl.when((row >= 0) & (row < rows))
        def _():
            found = self.whole(make())
            for part, new in zip(parts, found, strict=True):
                old = plgpu.load(part, layout=tile_layout(), optimized=False)
                at = plgpu.broadcasted_iota(jnp.int32, old.shape, 0, layout=tile_layout())
                part[...] = jnp.where(at == row, new, old)
            plgpu.commit_smem()

    def halves(self, smem, mine, which: int) -> list:
        """A key's (0) or a value's (1) halves, alike in all rows of a tile."""
        half = self.g.H // 2
        return [
            self.in_all_rows(
                plgpu.load(
                    smem.new.at[mine, which, pl.ds(i, half)], layout=column_layout(),
                    optimized=False,
                )
            )
            for i in (0, half)
        ]  # fmt: skip

    def in_all_rows(self, row):
        """A row as a tile."""
        return lax.broadcast_in_dim(row, (ROWS, row.shape[0]), [1])

    def turned(self, smem, mine, halves: list) -> list:
        """Both halves, turned in fp32."""
        cos, sin = (
            self.in_all_rows(
                plgpu.load(smem.angles.at[mine, i], layout=column_layout(), optimized=False)
            )
            for i in (0, 1)
        )
        first, second = (half.astype(jnp.float32) for half in halves)
        pair = first * cos - second * sin, second * cos + first * sin
        return [half.astype(self.dtype) for half in pair]

    def whole(self, halves: list) -> list:
        """Two halves as parts of 64 columns."""
        return halves if self.g.H > COLUMNS else [jnp.concatenate(halves, axis=1)]

    def write(self, parts: list, halves: list) -> None:
        """Both halves into the parts of a tile."""
        for part, new in zip(parts, self.whole(halves), strict=True):
            part[...] = new

    def append(self, gmem, worker) -> None:
        """A worker's share of what goes into pages: four heads of a row at a time."""
        g, c = self.g, self.c
        per_row = 2 * g.K // WARPS
        appender = HeadAppender(N=g.N, K=g.K, H=g.H, T=1, dtype=self.dtype, code=None)
        units, step = g.B * per_row, c.num_blocks * c.num_workers
        first = lax.axis_index("block") * c.num_workers + worker

        def put(i, _):
            unit = first + i * step
            part = lax.rem(unit, per_row)
            appender.put(gmem, lax.div(unit, per_row), g.N + part * WARPS)

        lax.fori_loop(0, lax.div(units - first + (step - 1), step), put, None)
