"""The kernel of ``reduce_scatter(x @ weight)``.

Tiles of peers' rows are stored to the peers. Own tiles come behind them. They load what peers sent
as further steps of the ring, and add it in fp32 in the order of devices.

Dims: M position on a device, K contraction, N column.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.hopper.config import BLOCK_ROWS, WARPGROUP_ROWS
from pallas_kernels.grouped_matmul.hopper.ring import RingKernel
from pallas_kernels.hopper.mosaic import plgpu

from .config import COLUMNS, DONE
from .kernel import CollectiveKernel, wait_for_peer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatterKernel(CollectiveKernel):
    """The kernel of ``reduce_scatter(x @ weight)``."""

    name: ClassVar[str] = "matmul_reduce_scatter"

    def scratch(self) -> dict[str, Any]:
        """Returns the ring's buffers, and the tile that each warpgroup sent last."""
        return CollectiveKernel.scratch(self) | {"unsaid": plgpu.SMEM((2, 2), jnp.int32)}

    @property
    def num_sent(self) -> int:
        """Number of tiles for all peers."""
        return (self.num_devices - 1) * self.num_tiles

    @property
    def lead(self) -> int:
        """Number of peers' tiles that are sent before an own one: a tile for each of them."""
        most = min(max(self.options.lead, self.num_devices), self.num_sent)
        return most - most % (self.num_devices - 1)

    @property
    def num_received(self) -> int:
        """Number of steps that bring peers' sums of a tile."""
        return (self.num_devices - 1) * (COLUMNS // self.line)

    def roles(self, gmem: Any, smem: Any) -> None:
        """Runs the roles, with a counter for each own tile."""
        smem.arrived = self.flags(self.num_tiles)
        RingKernel.roles(self, gmem, smem)

    def tile_at(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tile ``index`` in the order of work, and whose it is: (tile, peer).

        Peers' tiles lead; then an own one comes before each set of peers'; the last ones are own.
        """
        devices, others = self.num_devices, self.num_devices - 1
        mixed = (self.num_sent - self.lead) // others  # own tiles among peers'
        behind = index - self.lead
        group, at = lax.div(behind, devices), lax.rem(behind, devices)
        is_mixed = (behind >= 0) & (group < mixed)
        is_own = (behind >= 0) & (jnp.logical_not(is_mixed) | (at == 0))
        sent = jnp.where(is_mixed, self.lead + group * others + at - 1, index)
        own = jnp.where(is_mixed, group, index - self.num_sent)
        tile = jnp.where(is_own, own, lax.div(sent, others))
        return tile, jnp.where(is_own, 0, lax.rem(sent, others) + 1)

    def find(self, gmem: Any, index: jax.Array, place: Any) -> Any:
        """Returns the facts of a tile of ``tile_at``."""
        tile, peer = self.tile_at(index)
        # Beyond the last tile, the order of tiles would divide by 0, and LLVM take that for never.
        m, column = self.place(jnp.minimum(tile, self.num_tiles - 1))
        is_over = tile >= self.num_tiles
        steps = self.num_products + jnp.where(peer == 0, self.num_received, 0)
        facts = jnp.where(is_over, 0, steps), jnp.where(is_over, DONE, 0), peer, m, column, tile
        return facts, place

    def load(self, gmem: Any, smem: Any, facts: Any, done: Any) -> None:
        """Loads the operands of a tile and, of an own one, then what peers sent."""
        steps, _, peer, m, column, tile, *_ = facts

        @pl.when(steps > 0)
        def _():
            rows = self.row_of_all(peer, m * BLOCK_ROWS)
            self.load_products(gmem, smem, gmem.a, rows, column, done)

        @pl.when((steps > 0) & (peer == 0))
        def _():
            wait_for_peer(smem.arrived.at[tile], 2 * (self.num_devices - 1))
            rows = pl.ds(pl.multiple_of(m * BLOCK_ROWS, BLOCK_ROWS), BLOCK_ROWS)
            before = done + self.num_products
            for i in range(COLUMNS // self.line):
                columns = self.line_columns(column, i)
                for peer in range(1, self.num_devices):
                    slot = self.slot(before)
                    plgpu.barrier_wait(smem.empty.at[slot])
                    plgpu.copy_gmem_to_smem(
                        gmem.inbox.at[peer - 1, rows, columns], smem.a.at[slot], smem.full.at[slot]
                    )
                    plgpu.barrier_arrive(smem.full.at[slot])  # in place of the weight's copy
                    before = before + 1

    def begin(self, gmem: Any, smem: Any, wg: Any) -> None:
        """Notes that nothing was sent."""
        smem.unsaid[wg, 0] = jnp.int32(0)

    def compute(self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, constants: Any) -> None:
        """Multiplies this warpgroup's rows of one tile; sends them, or adds what peers sent."""
        steps, _, peer, m, column, tile, *_ = facts

        @pl.when(steps > 0)
        def _():
            value = self.multiplied(smem, wg, done)
            self.tell(smem, wg)
            row = m * BLOCK_ROWS + wg * WARPGROUP_ROWS
            rows = pl.ds(pl.multiple_of(row, WARPGROUP_ROWS), WARPGROUP_ROWS)
            for to in range(1, self.num_devices):

                @pl.when(peer == to)
                def _(to=to):
                    target = self.there(gmem.inbox, to)
                    for i, part in enumerate(self.parts(value)):
                        columns = self.line_columns(column, i)
                        self.store_part(smem, wg, i, part, target.at[to - 1, rows, columns])

            @pl.when(peer == 0)
            def _():
                before = done + self.num_products
                for i, part in enumerate(self.parts(value)):
                    for _ in range(1, self.num_devices):
                        slot = self.slot(before)
                        plgpu.barrier_wait(smem.full.at[slot])
                        part = part + self.received(smem, wg, slot)
                        plgpu.barrier_arrive(smem.empty.at[slot])
                        before = before + 1
                    columns = self.line_columns(column, i)
                    self.store_part(smem, wg, i, part, gmem.out.at[rows, columns])

            smem.unsaid[wg, 0] = peer
            smem.unsaid[wg, 1] = tile

    def received(self, smem: Any, wg: Any, slot: jax.Array) -> jax.Array:
        """Returns this warpgroup's rows of a part that a peer sent, fp32 [64, line]."""
        ref = smem.a.at[slot, self.mine(wg)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)

    def tell(self, smem: Any, wg: Any) -> None:
        """Counts, at its peer, the last tile that was sent, if it was not told of."""
        peer, tile = smem.unsaid[wg, 0], smem.unsaid[wg, 1]

        @pl.when(peer > 0)
        def _():
            plgpu.wait_smem_to_gmem(0)
            self.signal(smem.arrived.at[tile], peer)

    def finish(self, smem: Any, wg: Any) -> None:
        """Tells of the last tile that was sent."""
        self.tell(smem, wg)
