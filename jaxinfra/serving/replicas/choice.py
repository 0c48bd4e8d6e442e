"""Which replica gets a request: one that has seen its beginning, unless it is far busier."""

import collections
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, final

_CHARACTERS = 64  # of a block of text; a page of tokens, roughly
_IDS = 16  # of a block of token ids
_MOST_BLOCKS = 1 << 16  # that are remembered of a replica: what its pages may hold
_SLACK = 4  # requests that a replica may have more than the least busy one, or twice as many

type PromptBlocks = tuple[int, ...]
"""Hashes of a prompt's blocks, each with all before it."""


@final
class ReplicaChoice:
    """Remembers beginnings of prompts by replica.

    A replica whose pages hold a prompt's beginning need not compute that part again.
    """

    def __init__(self) -> None:
        self._seen: dict[int, collections.OrderedDict[int, None]] = {}

    def choose(self, blocks: PromptBlocks, open_requests: Mapping[int, int]) -> int:
        """The number of the replica to ask, among those that are ready.

        Args:
            open_requests: of each of them.
        """
        least = min(open_requests.values())
        most = max(least + _SLACK, 2 * least)
        return max(
            (number for number, load in open_requests.items() if load <= most),
            key=lambda number: (self.matched(number, blocks), -open_requests[number], -number),
        )

    def matched(self, number: int, blocks: PromptBlocks) -> int:
        """Blocks at the front of a prompt that a replica has seen."""
        seen = self._seen.get(number, {})
        return sum(1 for _ in itertools.takewhile(seen.__contains__, blocks))

    def note(self, number: int, blocks: PromptBlocks) -> None:
        """A replica is given this prompt."""
        seen = self._seen.setdefault(number, collections.OrderedDict())
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > _MOST_BLOCKS:
            seen.popitem(last=False)

    def forget(self, number: int) -> None:
        """A replica has begun anew, and holds nothing."""
        self._seen.pop(number, None)


def blocks_of(body: bytes) -> PromptBlocks:
    """The blocks of a request's prompt, of the first if it has several; none of what is no request.

    >>> a, b = (blocks_of(b'{"prompt": "%s"}' % (b"x" * 100 + end)) for end in (b"y" * 90, b"z"))
    >>> len(a), len(b), a[0] == b[0]
    (2, 1, True)
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(asked, dict):
        return ()
    prompt: Any = asked.get("prompt", asked.get("messages"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and not all(type(each) is int for each in prompt):
        prompt = json.dumps(prompt)
    if isinstance(prompt, str):
        return _hashed(prompt, _CHARACTERS)
    return _hashed(prompt, _IDS) if isinstance(prompt, list) else ()


def _hashed(prompt: str | Sequence[int], size: int) -> PromptBlocks:
    result, before = [], 0
    for start in range(0, len(prompt) - size + 1, size):
        part = prompt[start : start + size]
        before = hash((before, part if isinstance(part, str) else tuple(part)))
        result.append(before)
    return tuple(result)
