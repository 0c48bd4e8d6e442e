"""Text of a request while its tokens come: what is final, and why it ends."""

from collections.abc import Collection, Sequence
from typing import final

from jaxinfra.data.tokenizer import StreamDecoder, Tokenizer
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest
from jaxinfra.serving.tools.reader import overlap


@final
class TextStream:
    """Decodes one request's tokens into text as they come, up to a stop string.

    Text that may be the beginning of a stop string is held back until that is decided.

    Args:
        prompt_ids: tokens of the prompt; some tokenizers drop a space after them.
        stop: strings at which the text ends; they are not part of it.
        keeps_stop: the string or token that ends the text is part of it.
        silent_ids: tokens that add no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        *,
        keeps_stop: bool = False,
        silent_ids: Collection[int] = (),
    ):
        self._decoder = StreamDecoder(tokenizer, prompt_ids)
        self._stop, self._keeps_stop = tuple(stop), keeps_stop
        self._silent = silent_ids
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.found is not None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Adds a token, and returns the text that is now final. A stop string sets ``is_stopped``,
        unless ``may_stop`` is False: then none that ends here counts.
        """
        text = "" if token in self._silent else self._decoder.push(token)
        return self._certain(text, may_stop=may_stop)

    def flush(self) -> str:
        """Returns the rest of the text, held back until its end; an incomplete character becomes
        U+FFFD.
        """
        text = self._certain(self._decoder.flush())
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _certain(self, new: str, *, may_stop: bool = True) -> str:
        if not self._stop:
            return new
        text = self._held + new
        found = [
            (text.find(stop, max(len(self._held) + 1 - len(stop), 0)), stop) for stop in self._stop
        ]
        ends = [each for each in found if each[0] >= 0]
        if ends and may_stop:
            at, stop = min(ends)
            self.found, self._held = stop, ""
            return text[: at + len(stop) * self._keeps_stop]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def text_of(tokenizer: Tokenizer, request: GenerationRequest) -> TextStream:
    """Returns a stream for a request's new text."""
    return TextStream(
        tokenizer,
        request.prompt_ids,
        request.stop,
        keeps_stop=request.keeps_stop,
        silent_ids=request.silent_ids,
    )


def end_of(
    request: GenerationRequest,
    stream: TextStream | None,
    token: int,
    *,
    num_tokens: int,
    limit: int,
) -> tuple[EndReason | None, str]:
    """Returns why a sampled token ends its request, or None, and the text that is final with it.

    Args:
        stream: of the request's text; None: it is not wanted.
        num_tokens: tokens of the prompt and new ones, this one included.
        limit: most tokens of both.
    """
    if token in request.eos_ids or token in request.stop_ids:
        end = EndReason.EOS if token in request.eos_ids else EndReason.STOP
        return end, stream.push(token) if stream is not None and request.keeps_stop else ""
    text = ""
    if stream is not None:
        drawn = num_tokens - len(request.prompt_ids)
        text = stream.push(token, may_stop=drawn >= request.min_tokens)
        if stream.is_stopped:
            return EndReason.STOP, text
    if request.constraint is not None:
        request.constraint.advance(token)
        if request.constraint.is_complete:
            return EndReason.STOP, text
    if num_tokens < limit:
        return None, text
    is_whole = limit == len(request.prompt_ids) + request.max_new_tokens
    return EndReason.LENGTH if is_whole else EndReason.CONTEXT, text


def last_text(stream: TextStream | None, end: EndReason) -> tuple[EndReason, str]:
    """Returns the reason of an end, which the rest of the text may change, and that rest."""
    if stream is None or stream.is_stopped:
        return end, ""
    text = stream.flush()
    return EndReason.STOP if stream.is_stopped and end is EndReason.LENGTH else end, text
