"""The kernel of ``reduce_scatter(x @ weight)``.

Tiles of peers' rows are sent to the peers. Own tiles come behind them. They load what peers sent as
further steps of the ring, and add it in fp32 in the order of devices. What is sent is stored by
strips of 8 columns, so that it is contiguous and threads meet no bank conflicts.

Dims: M position on a device, K contraction, N column.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.hopper.config import BLOCK_ROWS, NUM_COMPUTE, WARPGROUP_ROWS
from pallas_kernels.grouped_matmul.hopper.ring import RingKernel
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import STRIP

from .config import COLUMNS, DONE
from .kernel import CollectiveKernel, fetch, send, wait_for_peer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatterKernel(CollectiveKernel):
    """The kernel of ``reduce_scatter(x @ weight)``."""

    name: ClassVar[str] = "matmul_reduce_scatter"

    @property
    def unswizzled(self) -> tuple[int, ...]:
        """Shape of a part of a warpgroup's result as it is sent: strips of its columns."""
        return self.line // STRIP, WARPGROUP_ROWS, STRIP

    @property
    def inbox(self) -> tuple[int, ...]:
        """Shape of what the device receives: parts of tiles of each peer."""
        parts = self.num_tiles * (COLUMNS // self.line)
        return self.num_devices - 1, parts, NUM_COMPUTE, *self.unswizzled

    def scratch(self) -> dict[str, Any]:
        """Returns the ring's buffers, and the tile that each warpgroup sent last.

        Received parts are in slots of the left operand.
        """
        ring = CollectiveKernel.scratch(self)
        received = plgpu.SMEM((self.c.num_stages, *self.inbox[2:]), self.dtype)
        return ring | {
            "a": plgpu.RefUnion(ring["a"], received),
            "unsaid": plgpu.SMEM((2, 2), jnp.int32),
        }

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
        smem.a, smem.received = smem.a
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
            before = done + self.num_products
            for i in range(COLUMNS // self.line):
                for peer in range(1, self.num_devices):
                    slot = self.slot(before)
                    plgpu.barrier_wait(smem.empty.at[slot])
                    part = gmem.inbox.at[peer - 1, self.part(tile, i)]
                    fetch(part, smem.received.at[slot], smem.full.at[slot])
                    plgpu.barrier_arrive(smem.full.at[slot])  # in place of the weight's copy
                    before = before + 1

    def part(self, tile: jax.Array, i: int) -> jax.Array:
        """Returns the place in an inbox of part i of a tile."""
        return tile * (COLUMNS // self.line) + i

    def begin(self, gmem: Any, smem: Any, wg: Any) -> list[Any]:
        """Notes that nothing was sent; returns the distances of peers' inboxes."""
        smem.unsaid[wg, 0] = jnp.int32(0)
        return self.distances(gmem.inbox)

    def compute(self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, constants: Any) -> None:
        """Multiplies this warpgroup's rows of one tile; sends them, or adds what peers sent."""
        steps, _, peer, m, column, tile, *_ = facts

        @pl.when(steps > 0)
        def _():
            value = self.multiplied(smem, wg, done)
            self.tell(smem, wg)
            row = m * BLOCK_ROWS + wg * WARPGROUP_ROWS
            rows = pl.ds(pl.multiple_of(row, WARPGROUP_ROWS), WARPGROUP_ROWS)
            for to, far in enumerate(constants, start=1):

                @pl.when(peer == to)
                def _(to=to, far=far):
                    for i, part in enumerate(self.parts(value)):
                        target = gmem.inbox.at[to - 1, self.part(tile, i), wg]
                        self.send_part(smem, wg, i, part, target, far)

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

    def send_part(self, smem: Any, wg: Any, i: int, part: jax.Array, target: Any, far: Any) -> None:
        """Starts to send columns ``i * line`` and on of a warpgroup's rows."""
        # At most the copies before the last are still reading.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        strips = smem.out[1].at[wg, i % 2]
        for j in range(self.line // STRIP):
            strip = lax.slice(part, (0, j * STRIP), (WARPGROUP_ROWS, (j + 1) * STRIP))
            strips[j] = strip.astype(self.out_dtype)
        plgpu.commit_smem()
        send(strips, target, far)
        plgpu.commit_smem_to_gmem_group()

    def received(self, smem: Any, wg: Any, slot: jax.Array) -> jax.Array:
        """Returns this warpgroup's rows of a part that a peer sent, fp32 [64, line]."""
        strips = smem.received.at[slot, wg]
        loaded = [
            plgpu.load(strips.at[j], layout=plgpu.Layout.WGMMA) for j in range(self.line // STRIP)
        ]
        return jnp.concatenate(loaded, axis=1).astype(jnp.float32)

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
