"""Sums that every block of a cluster sends to the block that adds them.

A copy that ends at a barrier of the receiver (``st.async``) needs no fence for the whole GPU, no
barrier of the cluster after it, and no way back for what is fetched. Of each sum the receiver has a
place for every rank and warpgroup, so that the order in which it adds is its own.

Dims: M row of x, N column of the weight.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from .machine import WARPGROUP
from .mosaic import arith, mgpu_utils, plgpu
from .threads import address, assembly, constant, i32, thread, total

WIDTH = 64  # columns of a tile


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PushedSums:
    """Where a block gets everyone's sums of its share of the columns: [rank, group, M, N]."""

    rows: int  # at most 8
    tiles: int  # of the weight, in a block
    split: int  # blocks of a cluster
    groups: int  # warpgroups that have sums of their own
    gated: bool  # the first half of the tiles are gates; a block has those of its ups

    @property
    def share(self) -> int:
        """Columns of the weight that a block adds."""
        return WIDTH * self.tiles // self.split

    @property
    def slot_bytes(self) -> int:
        """Of a rank's and a warpgroup's sums."""
        return 4 * self.rows * self.share

    @property
    def num_slots(self) -> int:
        """Ranks times warpgroups."""
        return self.split * self.groups

    @property
    def num_bytes(self) -> int:
        """What a block gets."""
        return self.num_slots * self.slot_bytes

    def scratch(self) -> dict[str, Any]:
        """Everyone's sums, and the barrier that counts their bytes."""
        return {
            "sums": plgpu.SMEM((self.num_slots, self.rows * self.share), jnp.float32),
            "arrived": plgpu.SMEM((4,), jnp.int32),
        }

    def begin(self, smem, group) -> None:
        """Makes the barrier known to the cluster; of every warpgroup that has sums."""

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), plgpu.RefType()))
        def make(ctx, group, arrived):
            del ctx
            number = total(thread(), (group.registers.flat[0], WARPGROUP))
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, number, constant(0))):
                place = address(arrived)
                for text in (
                    "mbarrier.init.shared::cta.b64 [$0], 1;",
                    f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {self.num_bytes};",
                ):
                    assembly(None, [place], text, "r", pure=False)
                assembly(None, [], "fence.mbarrier_init.release.cluster;", "", pure=False)

        make(group, smem.arrived)
        arrive()

    def push(self, numbers: list[Any], group, sums, arrived) -> None:
        """A thread's numbers, four of each tile, to the blocks that add them."""
        rank = arith.index_cast(i32(), mgpu_utils.cluster_idx())
        lane, warp = (f(thread(), constant(32)) for f in (arith.remui, arith.divui))
        g, t = (f(lane, constant(4)) for f in (arith.divui, arith.remui))
        width = WIDTH * self.tiles // (2 if self.gated else 1)
        own = width // self.split
        slot = total((rank, self.groups), group)
        for i, number in enumerate(numbers):
            tile, half, e = i // 4, i // 2 % 2, i % 2
            if e >= self.rows:
                continue
            is_up = self.gated and 2 * tile >= self.tiles
            column = WIDTH * tile - (width if is_up else 0) + 8 * half
            n = total((warp, 16), g, constant(column))
            to, n = (f(n, constant(own)) for f in (arith.divui, arith.remui))
            m = total((t, 2), constant(e))
            at = total((m, 4 * self.share), (n, 4), constant(4 * own * is_up))
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, m, constant(self.rows))):
                place = self.remote(total(address(sums), (slot, self.slot_bytes), at), to)
                barrier = self.remote(address(arrived), to)
                text = (
                    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];"
                )
                assembly(None, [place, number, barrier], text, "r,f,r", pure=False)

    def remote(self, place, rank) -> Any:
        """A place of this block's shared memory in that of another block of the cluster."""
        text = "mapa.shared::cluster.u32 $0, $1, $2;"
        return assembly(i32(), [place, rank], text, "=r,r,r", pure=True)

    def wait(self, arrived) -> None:
        """Until everyone's sums are there."""
        text = (
            "{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
            "P1, [$0], 0; @P1 bra.uni DONE; bra.uni LAB_WAIT; DONE: }"
        )
        assembly(None, [address(arrived)], text, "r", pure=False)

    def offset(self, m, n, *, is_up: bool) -> Any:
        """Bytes to the sum of row m and column n of the block's share of the result."""
        up = self.share // 2 if is_up else 0
        return total((m, 4 * self.share), (n, 4), constant(4 * up))


def arrive() -> None:
    """Says that this warpgroup's block has begun."""

    @plgpu.inline_mgpu()
    def say(ctx):
        del ctx
        assembly(None, [], "barrier.cluster.arrive.relaxed.aligned;", "", pure=False)

    say()


def wait_for_cluster() -> None:
    """Until every warpgroup of the cluster has arrived."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        assembly(None, [], "barrier.cluster.wait.acquire.aligned;", "", pure=False)

    wait()
