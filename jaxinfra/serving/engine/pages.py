"""KV-cache pages: the holders of each page, cached prefixes, and pages stored on the host."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import final

from jaxinfra.serving.engine.requests import HostCopy, RequestStream

NULL_PAGE = 0
"""The null page, which stays zero and is never allocated; absent page-table entries point to it."""


@final
class PageAllocator:
    """Allocates the KV cache's pages, and counts the holders of each.

    A page is free, held by sequences, cached by the prefix tree, or both of the latter. A page that
    only the tree holds is idle: it can be evicted at once.

    Values that a step writes may turn out not to be finite when its results are read. Until then
    the page is suspect. If a suspect page is freed, it is filled with zeros before its next holder
    reads it, since attention multiplies even masked values, by a weight of 0.

    Args:
        num_pages: number of pages in the pool, the null page included.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free = [*range(num_pages - 1, NULL_PAGE, -1)]  # the lowest is taken first
        self._cached: set[int] = set()
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._suspect: set[int] = set()
        self._unclean: list[int] = []

    @property
    def num_usable(self) -> int:
        """Number of pages that can be allocated: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of pages that only the prefix tree holds."""
        return len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Number of pages that at least one sequence holds."""
        return self.num_usable - self.num_free - self.num_idle

    def allocate(self) -> int:
        """Takes a free page, and returns it with one holder."""
        page = self._free.pop()
        assert not self._references[page]
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds a holder to a page that is held or cached."""
        assert self._references[page] > 0, page
        self._references[page] += 1
        self._idle.pop(page, None)

    def release(self, page: int) -> None:
        """Removes a holder of a page. Without holders the page is free, or idle if cached."""
        assert self._references[page] > 0, page
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
            if page in self._suspect:
                self._suspect.discard(page)
                self._unclean.append(page)
        elif self._references[page] == 1 and page in self._cached:
            self._idle[page] = None

    def release_all(self, pages: Iterable[int]) -> None:
        """Releases a sequence's pages, the last one first.

        Pages later in a sequence become idle first, so the page that has been idle longest is
        always a leaf of the prefix tree.
        """
        for page in reversed([*pages]):
            self.release(page)

    def cache(self, page: int) -> None:
        """Makes the prefix tree a holder of this page."""
        assert page not in self._cached, page
        self._references[page] += 1
        self._cached.add(page)

    def uncache(self, page: int) -> None:
        """Removes the prefix tree from this page's holders."""
        self._cached.remove(page)
        self._idle.pop(page, None)
        self.release(page)

    def least_recently_used(self) -> int:
        """Returns the idle page that has been idle for the longest time."""
        return next(iter(self._idle))

    def suspect(self, pages: Iterable[int]) -> None:
        """Marks pages that may hold numbers that are not finite."""
        self._suspect.update(page for page in pages if self._references[page])

    def trust(self, pages: Iterable[int]) -> None:
        """Marks pages as no longer suspect: all their numbers are finite."""
        self._suspect.difference_update(pages)

    def unclean(self) -> list[int]:
        """Returns freed suspect pages, to fill with zeros before the next step, and forgets them.
        Some may be allocated again already.
        """
        pages, self._unclean = self._unclean, []
        return pages


_LOOKED_AT = 64  # children, the newest, that may share a part of a page
_LEAST_SHARED = 0.25  # of a page's tokens, to copy it

type TokenBlock = tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    block: TokenBlock
    page: int
    parent: "_Node | None"
    children: dict[TokenBlock, "_Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMatch:
    """The cached pages that hold a sequence's first tokens, and how many tokens match."""

    pages: tuple[int, ...]
    num_tokens: int  # of the last page, maybe only the first tokens match


@final
class PrefixTree:
    """Prefix cache: a tree of full pages of past and present sequences, keyed by their tokens.

    A sequence that holds a node's page holds the pages of all its ancestors. So descendants of an
    idle node are idle, and evicting leaves first can free every idle page.

    Args:
        removed: called with each page that leaves the tree.
    """

    def __init__(self, allocator: PageAllocator, *, page_size: int, removed: Callable[[int], None]):
        self._allocator, self._removed = allocator, removed
        self._size = page_size
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by page

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, page: object) -> bool:
        return page in self._nodes

    def match(self, tokens: Sequence[int], *, kind: Hashable, limit: int) -> PrefixMatch:
        """Finds the longest cached prefix of these tokens; the caller then holds its pages.

        Args:
            kind: only sequences of equal kind share pages.
            limit: most tokens to match.
        """
        node, pages, done = self._roots.get(kind), [], 0
        while node is not None and done < limit:
            rest = tuple(tokens[done : min(done + self._size, limit)])
            following = node.children.get(rest)
            if following is None:
                # A page that begins alike: its holder copies it before writing on.
                following, common = self._nearest(node, rest)
                if following is not None:
                    pages.append(following.page)
                    done += common
                break
            pages.append(following.page)
            done += len(rest)
            node = following
        for page in pages:
            self._allocator.share(page)
        return PrefixMatch(pages=tuple(pages), num_tokens=done)

    def insert(
        self, tokens: Sequence[int], pages: list[int], *, kind: Hashable, start: int
    ) -> None:
        """Adds a sequence's full pages to the tree, and updates the list ``pages`` in place.

        If the tree already has a page of the same tokens, that page replaces the sequence's own.

        Args:
            tokens: the sequence's tokens whose keys and values are computed.
            start: number of the sequence's first pages that are in the tree already.
        """
        node = self._roots.get(kind)
        if node is None:
            node = self._roots[kind] = _Node(block=(), page=-1, parent=None)
        if start:
            node = self._nodes[pages[start - 1]]
        for place in range(start, len(tokens) // self._size):
            block = tuple(tokens[place * self._size : (place + 1) * self._size])
            following = node.children.get(block)
            if following is None:
                following = _Node(block=block, page=pages[place], parent=node)
                node.children[block] = following
                self._nodes[following.page] = following
                self._allocator.cache(following.page)
            elif following.page != pages[place]:
                self._allocator.share(following.page)
                self._allocator.release(pages[place])
                pages[place] = following.page
            node = following

    def evict(self) -> None:
        """Removes the page from the tree that has been idle for the longest time."""
        node = self._nodes.pop(self._allocator.least_recently_used())
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.block]
        self._removed(node.page)
        self._allocator.uncache(node.page)

    def _nearest(self, node: _Node, rest: TokenBlock) -> tuple[_Node | None, int]:
        """Returns the child whose block shares most leading tokens with ``rest``, and how many;
        None if they are few.
        """
        # Copying a page costs more than computing a few tokens, unless they are all of ``rest``.
        best, most = None, min(len(rest), int(self._size * _LEAST_SHARED)) - 1
        for block, child in itertools.islice(reversed(node.children.items()), _LOOKED_AT):
            common = 0
            for one, other in zip(block, rest, strict=False):
                if one != other:
                    break
                common += 1
            if common > most:
                best, most = child, common
        return best, most


@final
class HostPages:
    """Host memory for saved KV-cache pages: slots of one page each, and how many requests use each.

    A page in the prefix tree keeps its slot as long as any request uses the slot. So requests that
    share the page do not have it copied twice.
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
        """Number of host slots that at least one request uses."""
        return self.num_slots - len(self._free)

    def save(
        self, stream: RequestStream, *, tree: Container[int], needs_all: bool = False
    ) -> list[tuple[int, int]]:
        """Assigns host slots to a request's pages, and returns the copies to make: (page, slot).

        Pages get slots in order from the first, until no slot is free.

        Args:
            tree: the pages that the prefix tree holds.
            needs_all: save nothing if there are too few slots, as pages without the state after
                them are of no use.
        """
        num_tokens = stream.computed if needs_all else min(stream.computed, len(stream.tokens))
        pages = stream.pages[: -(-num_tokens // self._size)]
        if needs_all and sum(page not in self._slots for page in pages) > len(self._free):
            return []
        slots, copies = [], []
        for page in pages:
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
        """Returns how many of a request's tokens can be restored from the host's saved pages."""
        saved = stream.saved
        if saved is None or saved.kind != stream.kind:
            return 0
        return min(saved.num_tokens, stream.total - 1)

    def restore(self, stream: RequestStream, first: int, num_tokens: int) -> list[tuple[int, int]]:
        """Returns the copies that restore a request's pages, (slot, page), and frees its slots.

        Args:
            first: index of the first page to restore; those before it are on the device already.
            num_tokens: tokens that the request then has, with those before ``first``.
        """
        if stream.saved is None:
            return []
        last = -(-num_tokens // self._size)
        filled = [*zip(stream.saved.slots[first:last], stream.pages[first:last], strict=True)]
        self.num_restored += len(filled)
        self.drop(stream)
        return filled

    def drop(self, stream: RequestStream) -> None:
        """Frees those host slots of a request that no other request uses."""
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
        """Unlinks a page, which left the prefix tree, from its host slot: it may be overwritten."""
        slot = self._slots.pop(page, None)
        if slot is not None:
            del self._pages[slot]
