"""The kernel of ``all_gather(x) @ weight``.

Some blocks first push this device's rows to all peers, through shared memory, then multiply like
the others. Own rows come first, then peers' rows as they arrive.

Dims: M position on a device, K contraction, N column.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.hopper.config import BLOCK_DEPTH, BLOCK_ROWS, WARPGROUP_ROWS
from pallas_kernels.grouped_matmul.hopper.ring import RingKernel
from pallas_kernels.hopper.mosaic import plgpu

from .config import COLUMNS, DONE, UNIT_ROWS, UNTOLD
from .kernel import CollectiveKernel, fetch, send, wait_for_peer

_SLOT = BLOCK_DEPTH * COLUMNS  # numbers in a tile of the weight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherKernel(CollectiveKernel):
    """The kernel of ``all_gather(x) @ weight``."""

    name: ClassVar[str] = "all_gather_matmul"

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Rows and columns of what a block pushes at a time: contiguous, at most a ring slot."""
        (depth,) = self.depths
        if depth > _SLOT:
            widths = range(COLUMNS, _SLOT + 1, COLUMNS)
            return 1, max(width for width in widths if depth % width == 0)
        return min(1 << ((_SLOT // depth).bit_length() - 1), UNIT_ROWS), depth

    @property
    def chunks_of_unit(self) -> int:
        """Number of chunks in 256 rows of x."""
        return UNIT_ROWS * self.depths[0] // math.prod(self.chunk_shape)

    def scratch(self) -> dict[str, Any]:
        """Returns buffers and barriers of the ring, and those of the chunks that are pushed.

        Chunks are in the slots of the weight before the block's first tile.
        """
        stages, ring = self.c.num_stages, CollectiveKernel.scratch(self)
        mine = {
            "b": plgpu.RefUnion(ring["b"], plgpu.SMEM((stages, *self.chunk_shape), self.dtype)),
            "loaded": plgpu.Barrier(num_barriers=stages),
            "free": plgpu.Barrier(num_barriers=stages),
        }
        return ring | mine

    def roles(self, gmem: Any, smem: Any) -> None:
        """Runs the roles, with a counter for each peer and unit of its rows."""
        smem.b, smem.chunks = smem.b
        units = self.num_rows // UNIT_ROWS
        smem.arrived = self.flags((self.num_devices - 1) * units)
        RingKernel.roles(self, gmem, smem)

    def find(self, gmem: Any, index: jax.Array, place: Any) -> Any:
        """Own rows come first, then those of peer 1, and so on."""
        peer = lax.div(index, self.num_tiles)
        is_over = peer >= self.num_devices
        m, column = self.place(lax.rem(index, self.num_tiles))
        steps = jnp.where(is_over, 0, self.num_products)
        return (steps, jnp.where(is_over, DONE, 0), peer, m, column), place

    def load(self, gmem: Any, smem: Any, facts: Any, done: Any) -> None:
        """Loads the operands of a tile, of a peer's rows once they are here."""
        steps, _, peer, m, column, *_ = facts
        row = m * BLOCK_ROWS

        @pl.when((steps > 0) & (peer == 0))
        def _():
            self.load_products(gmem, smem, gmem.a, row, column, done)

        @pl.when((steps > 0) & (peer > 0))
        def _():
            unit = lax.div(row, UNIT_ROWS)
            flag = smem.arrived.at[(peer - 1) * (self.num_rows // UNIT_ROWS) + unit]
            wait_for_peer(flag, self.chunks_of_unit)
            rows = self.row_of_all(peer, row)
            self.load_products(gmem, smem, [gmem.gathered], rows, column, done)

    def before_tiles(self, gmem: Any, smem: Any) -> None:
        """Pushes this block's share of x to all peers, and to this device's own result."""
        worker, pushers = lax.axis_index("worker"), self.options.num_pushers
        total = self.num_rows // UNIT_ROWS * self.chunks_of_unit

        @pl.when(worker < pushers)
        def _():
            stages, far = self.c.num_stages, self.distances(gmem.gathered)
            count = lax.div(total - worker + pushers - 1, pushers)

            def step(j, _):
                # Before this step's chunk is taken, into the slot that the send frees.
                sent = j - (stages - 1)

                @pl.when((sent >= 0) & (sent < count))
                def _():
                    self._send_chunk(gmem, smem, sent, far)

                # Empty groups behind the last chunk, so that each step has one to wait for.
                pl.when(sent >= count)(plgpu.commit_smem_to_gmem_group)
                pl.when(sent >= UNTOLD)(lambda: self._tell_chunk(smem, sent - UNTOLD))
                pl.when(j < count)(lambda: self._take_chunk(gmem, smem, j))

            for slot in range(stages):
                plgpu.barrier_arrive(smem.free.at[slot])
            lax.fori_loop(0, count + stages - 1 + UNTOLD, step, None)
            # The interpreter asks that no barrier is left with a phase that nobody saw.
            pl.when(count > 0)(lambda: plgpu.barrier_arrive(smem.free.at[self.slot(count - 1)]))
            for slot in range(stages):
                plgpu.barrier_wait(smem.free.at[slot])

    def _chunk(self, j: jax.Array) -> tuple[Any, Any, jax.Array]:
        """Returns the first row, the columns and the unit of this block's chunk j."""
        rows, columns = self.chunk_shape
        chunk = lax.axis_index("worker") + j * self.options.num_pushers
        unit, rest = lax.div(chunk, self.chunks_of_unit), lax.rem(chunk, self.chunks_of_unit)
        across = self.depths[0] // columns
        row = unit * UNIT_ROWS + lax.div(rest, across) * rows
        column = pl.multiple_of(lax.rem(rest, across) * columns, columns)
        return pl.multiple_of(row, rows), pl.ds(column, columns), unit

    def _take_chunk(self, gmem: Any, smem: Any, j: jax.Array) -> None:
        slot = self.slot(j)
        plgpu.barrier_wait(smem.free.at[slot])
        row, columns, _ = self._chunk(j)
        part = gmem.a[0].at[pl.ds(row, self.chunk_shape[0]), columns]
        fetch(part, smem.chunks.at[slot], smem.loaded.at[slot])

    def _send_chunk(self, gmem: Any, smem: Any, j: jax.Array, far: list[Any]) -> None:
        slot = self.slot(j)
        plgpu.barrier_wait(smem.loaded.at[slot])
        row, columns, _ = self._chunk(j)
        rows = self.chunk_shape[0]
        to = pl.ds(pl.multiple_of(self.row_of_all(0, row), rows), rows)
        chunk, target = smem.chunks.at[slot], gmem.gathered.at[to, columns]
        for each in far:
            send(chunk, target, each)
        plgpu.copy_smem_to_gmem(chunk, target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        # The chunk before this one is read.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when(j > 0)(lambda: plgpu.barrier_arrive(smem.free.at[self.slot(j - 1)]))

    def _tell_chunk(self, smem: Any, j: jax.Array) -> None:
        plgpu.wait_smem_to_gmem(UNTOLD)
        self.tell(smem, self._chunk(j)[2])

    def tell(self, smem: Any, unit: jax.Array) -> None:
        """Counts, at each peer, a chunk of a unit that has arrived there."""
        units = self.num_rows // UNIT_ROWS
        for peer in range(1, self.num_devices):
            # This device is D - peer places behind that one.
            at = (self.num_devices - peer - 1) * units + unit
            self.signal(smem.arrived.at[at], peer)

    def compute(self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, constants: Any) -> None:
        """Multiplies this warpgroup's rows of one tile and stores them."""
        steps, _, peer, m, column, *_ = facts

        @pl.when(steps > 0)
        def _():
            value = self.multiplied(smem, wg, done)
            row = self.row_of_all(peer, m * BLOCK_ROWS) + wg * WARPGROUP_ROWS
            rows = pl.ds(pl.multiple_of(row, WARPGROUP_ROWS), WARPGROUP_ROWS)
            for i, part in enumerate(self.parts(value)):
                self.store_part(smem, wg, i, part, gmem.out.at[rows, self.line_columns(column, i)])
