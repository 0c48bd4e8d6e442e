"""Rules on a request's next token beside a grammar: allowed ids, forbidden words, a least length.

Each is a ``Constraint`` of the engine around another one or none. Masks: uint32 [words], id 0 the
lowest bit.
"""

from collections.abc import Collection, Sequence
from typing import final

import numpy as np

from jaxinfra.serving.engine.requests import Constraint

_BITS = 32


def _bits(ids: Collection[int], num_ids: int) -> np.ndarray:
    """Returns the mask that has these ids alone."""
    chosen = np.zeros(-(-num_ids // _BITS) * _BITS, bool)
    chosen[[each for each in ids if 0 <= each < num_ids]] = True
    return np.packbits(chosen, bitorder="little").view(np.uint32)


@final
class TokenRules:
    """Limits a request's next token to allowed ids, without forbidden words or an early end.

    Args:
        inner: the request's structure; None: all ids are allowed.
        allowed_ids: ids that may be sampled; None: all.
        words: forbidden sequences of ids: the last is not sampled after the others.
        min_tokens: number of tokens before which ``end_ids`` are not sampled.
    """

    def __init__(
        self,
        inner: Constraint | None,
        *,
        num_ids: int,
        allowed_ids: Collection[int] | None = None,
        words: Sequence[Sequence[int]] = (),
        min_tokens: int = 0,
        end_ids: Collection[int] = (),
    ):
        self._inner, self._num_ids = inner, num_ids
        ids = range(num_ids) if allowed_ids is None else allowed_ids
        self._allowed = _bits(ids, num_ids)
        self._words = tuple(map(tuple, words))
        self._longest = max(map(len, self._words), default=1)
        self._remaining, self._ends = min_tokens, _bits(end_ids, num_ids)
        self._last: tuple[int, ...] = ()

    def mask(self) -> np.ndarray:
        """Returns the mask of the ids that may come next.

        Where no id would be left but an end, as after a complete structure, the end is allowed.
        """
        allowed = self._allowed
        if self._inner is not None:
            allowed = allowed & self._inner.mask()[: allowed.size]
        banned = [
            word[-1]
            for word in self._words
            if self._last[len(self._last) - len(word) + 1 :] == word[:-1]
        ]
        if banned:
            allowed = allowed & ~_bits(banned, self._num_ids)
        if self._remaining > 0 and (longer := allowed & ~self._ends).any():
            return longer
        return allowed

    def advance(self, token: int) -> None:
        """Advances the rules by a sampled token."""
        self._remaining -= 1
        self._last = (*self._last, token)[-self._longest :]
        if self._inner is not None:
            self._inner.advance(token)

    @property
    def is_complete(self) -> bool:
        """Whether the structure is complete, so that no token can follow."""
        return self._inner is not None and self._inner.is_complete


@final
class AfterReasoning:
    """Constraint that applies a structure only after an answer's reasoning has ended.

    Args:
        begin_id: token that begins reasoning, allowed as the first one; None: no reasoning.
        end_ids: tokens that end the reasoning.
        eos_ids: end tokens, not sampled while reasoning goes on.
        is_open: the prompt has begun the reasoning already.
    """

    def __init__(
        self,
        inner: Constraint,
        *,
        num_ids: int,
        begin_id: int | None,
        end_ids: Sequence[int],
        eos_ids: Collection[int],
        is_open: bool,
    ):
        self._inner, self._end = inner, tuple(end_ids)
        self._begin = begin_id
        self._free = _bits(range(num_ids), num_ids) & ~_bits(eos_ids, num_ids)
        self._begins = _bits([] if begin_id is None else [begin_id], num_ids)
        self._last: tuple[int, ...] = ()
        self._is_first, self._is_open = not is_open, is_open

    def mask(self) -> np.ndarray:
        """Returns the mask of the ids that may come next."""
        if self._is_open:
            return self._free
        mask = self._inner.mask()[: self._free.size]
        return mask | self._begins if self._is_first else mask

    def advance(self, token: int) -> None:
        """Advances by a sampled token: within the reasoning, or in the structure."""
        if self._is_open:
            self._last = (*self._last, token)[-len(self._end) :]
            self._is_open = self._last != self._end
        elif self._is_first and token == self._begin:
            self._is_open = True
        else:
            self._inner.advance(token)
        self._is_first = False

    @property
    def is_complete(self) -> bool:
        """Whether the structure is complete, so that no token can follow."""
        return not self._is_open and self._inner.is_complete
