"""Barriers of all threads of a cluster, and of all blocks of a grid, on a Hopper GPU.

All blocks of a grid must be resident: one block on each SM. Each block that arrives increments a
counter in global memory, which is 0 when the launch begins.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .mosaic import arith, mgpu_utils, plgpu
from .threads import assembly, constant, global_place, total

_SOME, _ALL = 8, 9
"""Numbers of hardware barriers that Mosaic does not use; it uses 0 and one per warpgroup."""


def meet_in_cluster(*, ordered: bool) -> None:
    """Waits for every thread of the cluster; if ordered, their earlier writes are then visible."""
    order = "release" if ordered else "relaxed"

    @plgpu.inline_mgpu()
    def meet(ctx):
        del ctx
        assembly(None, [], f"barrier.cluster.arrive.{order}.aligned;", "", pure=False)
        assembly(None, [], "barrier.cluster.wait.acquire.aligned;", "", pure=False)

    meet()


def meet_in_block(threads: int, *, everyone: bool = False) -> None:
    """Barrier of the block's first ``threads`` threads, for use in ``plgpu.inline_mgpu``."""
    name = _ALL if everyone else _SOME
    assembly(None, [], f"bar.sync {name}, {threads};", "~{memory}", pure=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GridBarrier:
    """Barrier of all blocks of a grid, at which each block's first ``threads`` threads wait."""

    blocks: int
    threads: int

    def meet(self, counter: jax.Array, before: jax.Array | int) -> None:
        """Waits until all blocks arrive; earlier writes of these threads are then visible to all.

        Later reads must be ``ld.relaxed.gpu`` or ``ld.global``, never ``ld.global.nc``, whose cache
        is not coherent.

        Args:
            before: number of earlier calls of this barrier in the launch.
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
        def meet(ctx, counter, before):
            del ctx
            meet_in_block(self.threads)
            first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), constant(0))
            with mgpu_utils.when(first):
                text = """
{
.reg .pred early;
.reg .b32 now;
red.release.gpu.global.add.u32 [$0], 1;
WAIT:
ld.acquire.gpu.global.u32 now, [$0];
setp.lt.u32 early, now, $1;
@early bra WAIT;
}
"""
                place = global_place(counter, constant(0), 4)
                all_of_them = total((before.registers.flat[0], self.blocks), constant(self.blocks))
                assembly(None, [place, all_of_them], text, "l,r,~{memory}", pure=False)
            meet_in_block(self.threads)

        meet(counter, jnp.broadcast_to(jnp.asarray(before, jnp.int32), ()))
