"""Drafts from the request's own tokens: what followed when they last ended so."""

from collections.abc import Sequence
from typing import final

from jaxinfra.serving.engine.requests import RequestStream

_LONGEST, _SHORTEST = 4, 2
_LOOKED_BACK = 4096  # tokens


@final
class NgramLookup:
    """Proposes what followed the last occurrence of a request's last tokens, in its own text.

    Prompt look-up decoding (Saxena 2023): the longest match of 4 to 2 tokens counts.
    """

    def __init__(self, *, num_drafts: int):
        self._num_drafts = num_drafts

    def __call__(self, stream: RequestStream) -> Sequence[int]:
        """Up to ``num_drafts`` tokens; none where the last ones have not come before."""
        tokens = stream.tokens[-_LOOKED_BACK:]
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            end = tokens[-length:]
            if len(end) < length:
                continue
            last = length - 1
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start + last] == end[last] and tokens[start : start + length] == end:
                    return tokens[start + length : start + length + self._num_drafts]
        return ()
