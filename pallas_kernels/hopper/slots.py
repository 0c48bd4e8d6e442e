"""Ring buffer of shared memory slots that threads fill by ``cp.async`` and warps read.

This module has its own barriers, at which one thread per warp arrives. At Pallas's barriers every
thread arrives, which loads shared memory heavily if 256 threads free a slot every thousand cycles.
Pallas copies by TMA only, with a descriptor per array.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .machine import LANES, WARPGROUP
from .mosaic import arith, mgpu_utils
from .threads import address, assembly, constant, total, wait_for

_BYTES = 8  # of a barrier
COPIED = 16  # bytes of a copy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Ring buffer of shared memory slots, filled by one warpgroup; methods emit one thread's code.

    Tile ``tile_index`` is stored in slot ``tile_index % count``. Argument ``barriers`` is an int32
    buffer in shared memory with the barriers of full slots, then those of free slots.
    """

    count: int
    warps: int  # number of warps that read each slot
    bytes: int  # size of a slot

    @property
    def numbers(self) -> int:
        """Size of the buffer of barriers, in int32."""
        return 2 * self.count * _BYTES // 4

    def begin(self, barriers: Any) -> None:
        """Initializes all slots as free; one thread calls it before any thread uses a slot."""
        for which, arrivals in enumerate((WARPGROUP, self.warps)):
            for i in range(self.count):
                place = _BYTES * (which * self.count + i)
                text = f"mbarrier.init.shared::cta.b64 [$0+{place}], {arrivals};"
                assembly(None, [address(barriers)], text, "r", pure=False)

    def place(self, ring: Any, tile_index: Any) -> Any:
        """Returns the shared memory address of the slot of tile ``tile_index``."""
        return total(address(ring), (arith.remui(tile_index, constant(self.count)), self.bytes))

    def wait_full(self, barriers: Any, tile_index: Any) -> None:
        """Waits until the copies of tile ``tile_index`` have arrived in its slot."""
        self._wait(barriers, tile_index, which=0, parity=0)

    def wait_free(self, barriers: Any, tile_index: Any) -> None:
        """Waits until all warps have read the previous tile in the slot of tile ``tile_index``."""
        # Of a barrier that nobody has arrived at, the phase before is over.
        self._wait(barriers, tile_index, which=1, parity=1)

    def _wait(self, barriers: Any, tile_index: Any, *, which: int, parity: int) -> None:
        use = arith.divui(tile_index, constant(self.count))
        odd = arith.andi(total(use, constant(parity)), constant(1))
        wait_for(self._barrier(barriers, tile_index, which), odd)

    def _barrier(self, barriers: Any, tile_index: Any, which: int) -> Any:
        slot = arith.remui(tile_index, constant(self.count))
        return total(address(barriers), (slot, _BYTES), constant(which * self.count * _BYTES))

    def release(self, barriers: Any, tile_index: Any) -> None:
        """Signals that this thread's warp has read tile ``tile_index``: its slot may be reused."""
        assembly(None, [], "bar.warp.sync 0xffffffff;", "~{memory}", pure=False)
        lane = arith.remui(mgpu_utils.thread_idx(), constant(LANES))
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0))):
            text = "mbarrier.arrive.shared::cta.b64 _, [$0];"
            place = self._barrier(barriers, tile_index, 1)
            assembly(None, [place], text, "r,~{memory}", pure=False)

    def copy(self, source: Any, target: Any) -> None:
        """Starts a copy of 16 bytes, which the next ``fill`` of this thread counts for its tile."""
        text = f"cp.async.cg.shared.global.L2::128B [$0], [$1], {COPIED};"
        assembly(None, [target, source], text, "r,l,~{memory}", pure=False)

    def fill(self, barriers: Any, tile_index: Any, copies: Sequence[tuple[Any, Any]]) -> None:
        """Starts this thread's copies of tile ``tile_index`` from global to shared memory."""
        for source, target in copies:
            self.copy(source, target)
        text = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
        assembly(None, [self._barrier(barriers, tile_index, 0)], text, "r,~{memory}", pure=False)
