"""Copies of states in slots of their own, on the device and on the host.

A layer with a state cannot start from any of a prefix's pages, only where its state was kept: in a
snapshot after a prefix, or in the copy of a preempted request's state.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import final


@dataclasses.dataclass(slots=True, eq=False)
class Snapshot:
    """The state after a sequence's first tokens, in a slot of its own."""

    slot: int
    num_tokens: int  # whole pages of them, unless it is a preempted request's
    page: int | None = None  # last of those pages, once the prefix tree holds it
    is_used: bool = False  # another request has gone on from it, or is expected to


@final
class Snapshots:
    """Slots of snapshots, each held by a page of the prefix tree or by a request.

    If no slot of the device is free, the snapshot in the tree that was not used for the longest
    time goes to a slot of the host. If none of these is free, the host's oldest is evicted.

    Args:
        slots: numbers of the device's slots of snapshots.
        host_slots: numbers of the host's slots, which are above all of the device's.
    """

    def __init__(self, slots: Iterable[int], host_slots: range = range(0)):
        self._free, self._free_host = [*slots][::-1], [*host_slots][::-1]
        self._first_host = host_slots.start if host_slots else None
        self._kept: collections.OrderedDict[int, Snapshot] = collections.OrderedDict()  # by page
        self._read: set[int] = set()  # slots that rows of this step read
        self.moves: list[tuple[int, int]] = []  # of this step: slots to copy in turn, from and to
        self.num_taken = self.num_used = 0  # since the beginning
        self.num_to_host = self.num_from_host = 0  # states, likewise

    def __len__(self) -> int:
        """Number of snapshots in the prefix tree."""
        return len(self._kept)

    def begin_step(self) -> None:
        """Starts the list of a step's moves."""
        self.moves, self._read = [], set()

    def take(self, num_tokens: int, source: int) -> Snapshot | None:
        """Copies a slot's state into a new snapshot; None if nothing gives up a slot for it."""
        slot = self._device_slot()
        if slot is None:
            return None
        self.num_taken += 1
        self.moves.append((source, slot))
        return Snapshot(slot=slot, num_tokens=num_tokens)

    def save(self, num_tokens: int, source: int) -> Snapshot | None:
        """Copies a preempted request's state to the host; None without a slot for it."""
        slot = self._host_slot()
        if slot is None:
            return None
        self._to_host(source, slot)
        return Snapshot(slot=slot, num_tokens=num_tokens)

    def begin(self, snapshot: Snapshot, own_slot: int) -> int:
        """Returns the slot that a request reads which goes on from a snapshot.

        What the host has is copied to the request's own slot before. A preempted request's copy is
        dropped then.
        """
        if snapshot.page is not None:
            self._kept.move_to_end(snapshot.page)
            snapshot.is_used = True
            self.num_used += 1
        if not self._is_on_host(snapshot):
            self._read.add(snapshot.slot)
            return snapshot.slot
        self.num_from_host += 1
        self.moves.append((snapshot.slot, own_slot))
        if snapshot.page is None:
            self.drop(snapshot)
        return own_slot

    def attach(self, snapshot: Snapshot, page: int) -> Snapshot:
        """Lets a page of the tree hold a snapshot; returns the page's earlier one if it has one."""
        kept = self._kept.get(page)
        if kept is not None:
            # Of two equal ones that on the device stays.
            if self._is_on_host(kept):
                kept.slot, snapshot.slot = snapshot.slot, kept.slot
            self._release(snapshot.slot)
            kept.is_used |= snapshot.is_used
            return kept
        snapshot.page = page
        self._kept[page] = snapshot
        return snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """Frees a snapshot's slot."""
        if snapshot.page is not None:
            del self._kept[snapshot.page]
        self._release(snapshot.slot)

    def forget(self, page: int) -> None:
        """Drops the snapshot of a page that the prefix tree has given up."""
        if page in self._kept:
            self.drop(self._kept[page])

    def is_kept(self, snapshot: Snapshot) -> bool:
        """Whether a page of the tree still holds this snapshot."""
        return snapshot.page is not None and self._kept.get(snapshot.page) is snapshot

    def latest(self, pages: Sequence[int]) -> Snapshot | None:
        """Returns the snapshot after most of a sequence's first pages; None without one."""
        return next((self._kept[page] for page in reversed(pages) if page in self._kept), None)

    def _is_on_host(self, snapshot: Snapshot) -> bool:
        return self._first_host is not None and snapshot.slot >= self._first_host

    def _release(self, slot: int) -> None:
        is_host = self._first_host is not None and slot >= self._first_host
        (self._free_host if is_host else self._free).append(slot)

    def _device_slot(self) -> int | None:
        """Takes a slot of the device from the oldest snapshot that no row of this step reads."""
        if self._free:
            return self._free.pop()
        oldest = self._oldest(on_host=False)
        if oldest is None:
            return None
        slot, host_slot = oldest.slot, self._host_slot()
        if host_slot is None:
            self.drop(oldest)
            return self._free.pop()
        self._to_host(slot, host_slot)
        oldest.slot = host_slot
        return slot

    def _host_slot(self) -> int | None:
        if not self._free_host and (oldest := self._oldest(on_host=True)) is not None:
            self.drop(oldest)
        return self._free_host.pop() if self._free_host else None

    def _oldest(self, *, on_host: bool) -> Snapshot | None:
        for each in self._kept.values():
            if self._is_on_host(each) == on_host and each.slot not in self._read:
                return each
        return None

    def _to_host(self, slot: int, host_slot: int) -> None:
        self.num_to_host += 1
        self.moves.append((slot, host_slot))
