"""A barrier of all blocks of a grid, which must all be resident: one block on each multiprocessor.

A counter in global memory goes up by one for each block that arrives. A block reads from what its
own arrival found which meeting it is, so the counter may begin at any multiple of the number of
blocks: launches one after another share it, and nothing is set back between them.
"""

import dataclasses

import jax

from .mosaic import arith, mgpu_utils, plgpu
from .threads import assembly, constant, global_place

_SOME, _ALL = 8, 9
"""Of the hardware's barriers, two that Mosaic does not use: it takes 0, and one per warpgroup."""


def meet_in_block(threads: int, *, everyone: bool = False) -> None:
    """Waits for these threads of the block; within ``plgpu.inline_mgpu``."""
    name = _ALL if everyone else _SOME
    assembly(None, [], f"bar.sync {name}, {threads};", "~{memory}", pure=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GridBarrier:
    """Of so many blocks, and in each of so many threads, the block's first ones."""

    blocks: int
    threads: int

    def meet(self, counter: jax.Array) -> None:
        """Waits for all blocks: what any of these threads wrote before, all may read after.

        Reads after it must be ``ld.relaxed.gpu`` or ``ld.global``, never ``ld.global.nc``, whose
        cache knows of no writer.
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def meet(ctx, counter):
            del ctx
            meet_in_block(self.threads)
            first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), constant(0))
            with mgpu_utils.when(first):
                text = f"""
{{
.reg .pred early;
.reg .b32 now, round, target;
atom.acq_rel.gpu.global.add.u32 now, [$0], 1;
rem.u32 round, now, {self.blocks};
sub.u32 target, now, round;
add.u32 target, target, {self.blocks};
WAIT:
ld.acquire.gpu.global.u32 now, [$0];
sub.u32 round, now, target;
setp.lt.s32 early, round, 0;
@early bra WAIT;
}}
"""
                place = global_place(counter, constant(0), 4)
                assembly(None, [place], text, "l,~{memory}", pure=False)
            meet_in_block(self.threads)

        meet(counter)
