"""Text from tokens as they come, up to a stop string; never half a character."""

from collections.abc import Sequence
from typing import final

from jaxinfra.data.tokenizer import Tokenizer


@final
class TextStream:
    """The text of one request.

    What may be the beginning of a stop string is held back until it is certain not to be.

    Args:
        prompt_ids: tokens before the text; some tokenizers drop a space after them.
        stop: strings that end the text, and are no part of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]):
        self._decoder = tokenizer.stream_decoder(prompt_ids)
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """The text that is certain with this token; ``is_stopped`` says whether it is the last."""
        return self._certain(self._decoder.push(token))

    def flush(self) -> str:
        """What is held back at the end; an incomplete character becomes U+FFFD."""
        text = self._certain(self._decoder.flush())
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _certain(self, new: str) -> str:
        text = self._held + new
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
