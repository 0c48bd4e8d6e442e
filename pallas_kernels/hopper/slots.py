"""Slots of a ring that threads fill by asynchronous copies, and that warps leave.

Barriers are this module's own. Pallas has every thread arrive, which takes a large part of shared
memory's time where 256 threads leave a slot every thousand cycles. Its copies are TMA's, whose
descriptors are of one array each.
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
    """Slots of a ring: a warpgroup fills one, some warps read it. Methods are of one thread.

    The ring's tile number ``turn`` has slot ``turn % count``. Arguments ``barriers`` are int32
    [2 numbers] in shared memory: of slots that are full, then of free ones.
    """

    count: int
    warps: int  # that read a slot
    bytes: int  # of a slot

    @property
    def numbers(self) -> int:
        """Count of int32 of the barriers."""
        return 2 * self.count * _BYTES // 4

    def begin(self, barriers: Any) -> None:
        """Initializes all slots as free, in one thread, before any other uses a slot."""
        for which, arrivals in enumerate((WARPGROUP, self.warps)):
            for i in range(self.count):
                place = _BYTES * (which * self.count + i)
                text = f"mbarrier.init.shared::cta.b64 [$0+{place}], {arrivals};"
                assembly(None, [address(barriers)], text, "r", pure=False)

    def place(self, ring: Any, turn: Any) -> Any:
        """Address of a tile in shared memory."""
        return total(address(ring), (arith.remui(turn, constant(self.count)), self.bytes))

    def wait_full(self, barriers: Any, turn: Any) -> None:
        """Waits until a tile is there."""
        self._wait(barriers, turn, which=0, parity=0)

    def wait_free(self, barriers: Any, turn: Any) -> None:
        """Waits until a tile's slot may be written."""
        # Of a barrier that nobody has arrived at, the phase before is over.
        self._wait(barriers, turn, which=1, parity=1)

    def _wait(self, barriers: Any, turn: Any, *, which: int, parity: int) -> None:
        use = arith.divui(turn, constant(self.count))
        odd = arith.andi(total(use, constant(parity)), constant(1))
        wait_for(self._barrier(barriers, turn, which), odd)

    def _barrier(self, barriers: Any, turn: Any, which: int) -> Any:
        slot = arith.remui(turn, constant(self.count))
        return total(address(barriers), (slot, _BYTES), constant(which * self.count * _BYTES))

    def leave(self, barriers: Any, turn: Any) -> None:
        """Says that this thread's warp has read a tile."""
        assembly(None, [], "bar.warp.sync 0xffffffff;", "~{memory}", pure=False)
        lane = arith.remui(mgpu_utils.thread_idx(), constant(LANES))
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0))):
            text = "mbarrier.arrive.shared::cta.b64 _, [$0];"
            place = self._barrier(barriers, turn, 1)
            assembly(None, [place], text, "r,~{memory}", pure=False)

    def copy(self, source: Any, target: Any) -> None:
        """Starts a copy of 16 bytes; it belongs to the tile that this thread fills next."""
        text = f"cp.async.cg.shared.global.L2::128B [$0], [$1], {COPIED};"
        assembly(None, [target, source], text, "r,l,~{memory}", pure=False)

    def fill(self, barriers: Any, turn: Any, copies: Sequence[tuple[Any, Any]]) -> None:
        """Starts this thread's copies, from places in global to places in shared memory."""
        for source, target in copies:
            self.copy(source, target)
        text = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
        assembly(None, [self._barrier(barriers, turn, 0)], text, "r,~{memory}", pure=False)
