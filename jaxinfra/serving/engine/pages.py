"""Who holds which page of the cache's pool. Numbers only: what lies in pages is the runner's."""

import collections
from collections.abc import Iterable
from typing import final

NULL_PAGE = 0
"""A page that nobody is given and that stays zero: what an absent entry of a table reads."""


@final
class PageAllocator:
    """Pages with reference counts.

    A page is free, held by sequences, cached by the prefix tree, or both of these. One that only
    the tree holds is idle: it can be taken back at once.

    What a step writes may not be finite before its draws are read. Until then the page is suspect:
    one that is free meanwhile is filled with zeros before its next holder reads it, since a masked
    key still multiplies a weight of 0 with its value.

    Args:
        num_pages: of the pool, the null page among them.
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
        """Pages that can be handed out in all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix tree holds."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages that some sequence holds."""
        return self.num_usable - self.num_free - self.num_idle

    def references(self, page: int) -> int:
        """Holders of a page, the prefix tree among them."""
        return self._references[page]

    def allocate(self) -> int:
        """A free page, held once."""
        page = self._free.pop()
        assert not self._references[page]
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held or cached."""
        assert self._references[page] > 0, page
        self._references[page] += 1
        self._idle.pop(page, None)

    def release(self, page: int) -> None:
        """One holder less. The last one's page is free, a cached one then idle."""
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

        So a page of the tree becomes idle after those that continue it, and the page that has been
        idle for longest is always a leaf.
        """
        for page in reversed([*pages]):
            self.release(page)

    def cache(self, page: int) -> None:
        """The prefix tree holds this page from now on."""
        assert page not in self._cached, page
        self._references[page] += 1
        self._cached.add(page)

    def uncache(self, page: int) -> None:
        """The prefix tree holds this page no longer."""
        self._cached.remove(page)
        self._idle.pop(page, None)
        self.release(page)

    def longest_idle(self) -> int:
        """The idle page that was used last by nobody for the longest time."""
        return next(iter(self._idle))

    def suspect(self, pages: Iterable[int]) -> None:
        """These may hold numbers that are not finite."""
        self._suspect.update(page for page in pages if self._references[page])

    def trust(self, pages: Iterable[int]) -> None:
        """All numbers of these are finite."""
        self._suspect.difference_update(pages)

    def is_suspect(self, page: int) -> bool:
        """Whether a page may hold numbers that are not finite."""
        return page in self._suspect

    def unclean(self) -> list[int]:
        """Pages to be filled with zeros before the next step; whoever holds them by now too."""
        pages, self._unclean = self._unclean, []
        return pages
