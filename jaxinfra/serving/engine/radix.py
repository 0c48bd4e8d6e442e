"""Which pages hold the keys and values of which tokens: a radix tree over blocks of tokens.

A node is a page full of tokens, after those of the nodes above it. A sequence that begins alike
shares the pages; what nobody uses is given up by last use, leaves first.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import final

from jaxinfra.serving.engine.pages import PageAllocator

_LOOKED_AT = 64  # children, the newest, that may share a part of a page

type TokenBlock = tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    block: TokenBlock
    page: int
    parent: "_Node | None"
    children: dict[TokenBlock, "_Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMatch:
    """Pages that hold the first tokens of a sequence."""

    pages: tuple[int, ...]
    num_tokens: int  # the last page may hold more of them than these


@final
class PrefixTree:
    """Full pages of past and present sequences, by their tokens.

    Who holds a node's page holds the pages of all nodes above it: so an idle node has idle nodes
    below it only, and giving up idle pages, leaves first, gives up all of them.

    Args:
        removed: told of each page that the tree holds no longer.
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
        """The longest beginning of these tokens that pages hold; the caller holds them then.

        Args:
            kind: sequences of different kinds share nothing.
            limit: of the tokens, only so many.
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
        """Adds a sequence's full blocks; ``pages`` are its own, and changed in place.

        Where another sequence has computed the same block, its page takes the place of this one's.

        Args:
            tokens: those that are computed.
            start: blocks that are in the tree already, as this sequence's pages.
        """
        node = self._roots.get(kind)
        if node is None:
            node = self._roots[kind] = _Node(block=(), page=-1, parent=None)
        if start:
            found = self._nodes.get(pages[start - 1])
            if found is None:
                return  # forgotten meanwhile
            node = found
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
        """Gives up the idle page that was used longest ago."""
        node = self._nodes[self._allocator.longest_idle()]
        assert not node.children
        self._remove(node)

    def forget(self, tokens: Sequence[int], *, kind: Hashable) -> None:
        """Drops what begins as these tokens do, whose pages may not be finite."""
        root = self._roots.get(kind)
        first = None if root is None else root.children.get(tuple(tokens[: self._size]))
        if first is None:
            return
        order, found = [first], []
        while order:
            node = order.pop()
            found.append(node)
            order.extend(node.children.values())
        self._allocator.suspect(node.page for node in found)
        for node in reversed(found):
            self._remove(node)

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.block], self._nodes[node.page]
        self._removed(node.page)
        self._allocator.uncache(node.page)

    def _nearest(self, node: _Node, rest: TokenBlock) -> tuple[_Node | None, int]:
        """The child whose block begins most like ``rest``, and by how many tokens; None at 0.

        What comes after these tokens is copied with them, so it must be finite.
        """
        best, most = None, 0
        for block, child in itertools.islice(reversed(node.children.items()), _LOOKED_AT):
            if self._allocator.is_suspect(child.page):
                continue
            common = 0
            for one, other in zip(block, rest, strict=False):
                if one != other:
                    break
                common += 1
            if common > most:
                best, most = child, common
        return best, most
