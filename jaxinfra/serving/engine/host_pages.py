"""Which slots of the host's memory hold the pages of preempted requests. Numbers only: what lies in
slots is the runner's.
"""

import collections
from collections.abc import Container
from typing import final

from jaxinfra.serving.engine.requests import HostCopy, RequestStream


@final
class HostPages:
    """Slots of a page each, and who uses them.

    A page that the prefix tree holds keeps its slot while anybody uses that: requests that share
    the page do not have it copied twice.
    """

    def __init__(self, num_slots: int, *, page_size: int):
        self.num_slots = num_slots
        self.num_saved = self.num_restored = 0  # pages, since the beginning
        self._size = page_size
        self._free = [*range(num_slots - 1, -1, -1)]
        self._users: collections.Counter[int] = collections.Counter()
        self._slots: dict[int, int] = {}  # by page, of those that the tree holds
        self._pages: dict[int, int] = {}  # by slot, the same

    @property
    def num_used(self) -> int:
        """Slots that some request uses."""
        return self.num_slots - len(self._free)

    def users(self, slot: int) -> int:
        """Requests that use a slot."""
        return self._users[slot]

    def save(self, stream: RequestStream, *, tree: Container[int]) -> list[tuple[int, int]]:
        """Gives a request's pages slots, from the first page on as many as there are, and returns
        what is to be copied: from pages to slots.

        Args:
            tree: the pages that the prefix tree holds.
        """
        num_tokens = min(stream.computed, len(stream.tokens))
        slots, copies = [], []
        for page in stream.pages[: -(-num_tokens // self._size)]:
            slot = self._slots.get(page)
            if slot is None:
                if not self._free:
                    break
                slot = self._free.pop()
                copies.append((page, slot))
                if page in tree:
                    self._slots[page], self._pages[slot] = slot, page
            self._users[slot] += 1
            slots.append(slot)
        if slots:
            num_tokens = min(num_tokens, len(slots) * self._size)
            stream.saved = HostCopy(slots=tuple(slots), num_tokens=num_tokens, kind=stream.kind)
        self.num_saved += len(copies)
        return copies

    def num_tokens(self, stream: RequestStream) -> int:
        """Tokens of a request that need not be computed again, as the host has them."""
        saved = stream.saved
        if saved is None or saved.kind != stream.kind:
            return 0
        return min(saved.num_tokens, stream.total - 1)

    def restore(self, stream: RequestStream, first: int, num_tokens: int) -> list[tuple[int, int]]:
        """Where a request's pages come from that it has again: from slots to pages. The host keeps
        nothing of it any more.

        Args:
            first: page that is not there already.
            num_tokens: that are restored, with those before ``first``.
        """
        if stream.saved is None:
            return []
        last = -(-num_tokens // self._size)
        filled = [*zip(stream.saved.slots[first:last], stream.pages[first:last], strict=True)]
        self.num_restored += len(filled)
        self.drop(stream)
        return filled

    def drop(self, stream: RequestStream) -> None:
        """The host keeps nothing of a request any more."""
        if stream.saved is None:
            return
        for slot in stream.saved.slots:
            self._users[slot] -= 1
            if not self._users[slot]:
                del self._users[slot]
                self._slots.pop(self._pages.pop(slot, -1), None)
                self._free.append(slot)
        stream.saved = None

    def forget(self, page: int) -> None:
        """The prefix tree no longer holds this page: something else may lie in it soon."""
        slot = self._slots.pop(page, None)
        if slot is not None:
            del self._pages[slot]
