"""Snapshots of states: copies of the state after a prefix, from which other requests go on.

A layer with a state cannot start from any of a prefix's pages, only where its state was kept.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import final


@dataclasses.dataclass(slots=True, eq=False)
class Snapshot:
    """The state after a sequence's first tokens, in a slot of its own."""

    slot: int
    num_tokens: int  # whole pages of them
    page: int | None = None  # last of those pages, once the prefix tree holds it
    is_used: bool = False  # another request has gone on from it, or is expected to


@final
class Snapshots:
    """Slots of snapshots, each held by a page of the prefix tree or by a running request.

    If no slot is free, the snapshot in the tree that was not used for the longest time is evicted.
    """

    def __init__(self, slots: Iterable[int]):
        self._free = [*slots][::-1]
        self._kept: collections.OrderedDict[int, Snapshot] = collections.OrderedDict()  # by page
        self.num_taken = self.num_used = 0  # since the beginning

    def __len__(self) -> int:
        """Number of snapshots in the prefix tree."""
        return len(self._kept)

    def take(self, num_tokens: int) -> Snapshot | None:
        """Returns a new snapshot; None if running requests hold all slots."""
        if not self._free:
            if not self._kept:
                return None
            self.drop(next(iter(self._kept.values())))
        self.num_taken += 1
        return Snapshot(slot=self._free.pop(), num_tokens=num_tokens)

    def attach(self, snapshot: Snapshot, page: int) -> Snapshot:
        """Lets a page of the tree hold a snapshot; returns the page's earlier one if it has one."""
        kept = self._kept.get(page)
        if kept is not None:
            self._free.append(snapshot.slot)
            kept.is_used |= snapshot.is_used
            return kept
        snapshot.page = page
        self._kept[page] = snapshot
        return snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """Frees a snapshot's slot."""
        if snapshot.page is not None:
            del self._kept[snapshot.page]
        self._free.append(snapshot.slot)

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

    def use(self, snapshot: Snapshot) -> None:
        """Notes that a request goes on from a snapshot of the tree."""
        assert snapshot.page is not None
        self._kept.move_to_end(snapshot.page)
        snapshot.is_used = True
        self.num_used += 1
