"""The GPUs that share each layer's heads and hidden columns: their sums, and a barrier of all.

Each GPU multiplies its own rows of the output and down weights. Every partial sum is written over
NVLink to the same place on every GPU, so that all add the same numbers in the same order. Addresses
on peers are read once per launch and kept in shared memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.grid import meet_in_block
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.threads import Address, address, assembly, constant, global_place, total

from .config import THREADS, WorkSplit
from .per_thread import each_thread

_COUNTER = "counter"
ARRIVALS = 32  # index of the barrier's counter, on another line than the blocks' own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """Arrays in global memory that the GPUs of one mesh axis write on each other."""

    axis: str
    devices: int
    splits: dict[str, WorkSplit]  # of products whose sums all GPUs need, by the sums' names
    blocks: int
    # Most reads of the counter, of 0.7 us each: without a GPU the launch fails after 20 s.
    polls: int = 25_000_000

    def scratch(self) -> dict[str, Any]:
        """Returns the shared-memory buffer of addresses: 8 bytes per array and GPU."""
        return {"peers": plgpu.SMEM((2 * self.devices * len(self.names),), jnp.int32)}

    def begin(self, gmem, smem) -> None:
        """Stores the addresses at which this GPU writes on all; a block barrier must follow.

        Args:
            gmem: arrays, among them the partial sums fp32 [devices parts, N], and the counter
                int32 [> ARRIVALS], which is 0 on every GPU before any of the launches begins.
        """
        everywhere = [
            plgpu.remote_ref(getattr(gmem, name), jnp.int32(device), pl.DeviceIdType.LOGICAL)
            for name in self.names
            for device in range(self.devices)
        ]
        offsets = [at for name in self.names for at in self.offsets(name)]

        def store(table, *rest):
            *refs, rank = rest
            first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), constant(0))
            with mgpu_utils.when(first):
                starts = [total((rank, s.parts * s.N)) for s in self.splits.values()]
                starts = [s for s in [*starts, constant(ARRIVALS)] for _ in range(self.devices)]
                for ref, start, at in zip(refs, starts, offsets, strict=True):
                    both = [address(table), global_place(ref, start, 4)]
                    assembly(None, both, f"st.shared.b64 [$0+{at}], $1;", "r,l", pure=False)

        each_thread(store, [smem.peers, *everywhere], [lax.axis_index(self.axis)])

    @property
    def names(self) -> list[str]:
        """Names of the arrays that GPUs write on each other."""
        return [*self.splits, _COUNTER]

    def offsets(self, name: str) -> list[int]:
        """Returns the offsets in bytes, in the buffer of addresses, of an array's on all GPUs."""
        first = self.names.index(name) * self.devices
        return [8 * (first + device) for device in range(self.devices)]

    def places(self, table: Any, name: str) -> list[Address]:
        """Loads the addresses, on all GPUs, of this GPU's rows of sums, or of the counter."""
        i64 = ir.IntegerType.get_signless(64)
        found = []
        for at in self.offsets(name):
            text = f"ld.shared.b64 $0, [$1+{at}];"
            found.append(assembly(i64, [address(table)], text, "=l,r", pure=False))
        return list(map(Address, found))

    def meet(self, counter: Any, smem, before: jax.Array) -> None:
        """Waits until all blocks of all GPUs arrive; their earlier writes are then visible.

        The launch fails with an error if a GPU does not arrive within about 20 s.

        Args:
            before: number of earlier calls in the launch.
        """

        def body(counter, table, before):
            meet_in_block(THREADS)
            first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), constant(0))
            with mgpu_utils.when(first):
                assembly(None, [], "fence.acq_rel.sys;", "~{memory}", pure=False)
                for place in self.places(table, _COUNTER):
                    text = "red.relaxed.sys.global.add.u32 [$0], 1;"
                    assembly(None, [place.value], text, "l,~{memory}", pure=False)
                arrivals = self.blocks * self.devices
                wanted = total((before, arrivals), constant(arrivals))
                self.wait(global_place(counter, constant(ARRIVALS), 4), wanted)
            meet_in_block(THREADS)

        each_thread(body, [counter, smem.peers], [before])

    def wait(self, counter: Any, wanted: Any) -> None:
        """Polls a counter until it is ``wanted`` or more; fails after ``polls`` reads."""
        text = f"""
{{
.reg .pred there;
.reg .pred over;
.reg .b32 now;
.reg .b32 polls;
mov.u32 polls, {self.polls};
WAIT:
ld.acquire.sys.global.u32 now, [$0];
setp.ge.u32 there, now, $1;
@there bra DONE;
sub.u32 polls, polls, 1;
setp.eq.u32 over, polls, 0;
@!over bra WAIT;
trap;
DONE:
}}
"""
        assembly(None, [counter, wanted], text, "l,r,~{memory}", pure=False)
