"""Renderings of a conversation that show each assistant message after the prompt it answers.

If the template encloses assistant messages in ``{% generation %}``, the loss counts the enclosed
text of one rendering. Otherwise the text of a message is found by comparing two renderings: up to
the message, and before it with the generation prompt. Templates that change earlier text as a
conversation goes on, such as by dropping the reasoning of earlier messages, need several
renderings: each ends with one of the messages.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxinfra.data.chat_template import ChatTemplate, Message
from jaxinfra.errors import DataError

ASSISTANT = "assistant"

type Span = tuple[int, int]
"""A range of characters: start, and end (exclusive)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """Text of a conversation, and the character ranges that the loss counts."""

    text: str
    spans: list[Span]
    num_unprompted: int = 0  # spans that do not follow the template's generation prompt
    is_marked: bool = False  # the template itself says what counts


def turn_renderings(
    template: ChatTemplate,
    messages: Sequence[Message],
    counted: Sequence[int],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[Rendering]:
    """Renders a conversation as few texts, so that each counted message occurs in one of them after
    its prompt. One text is enough if the template leaves earlier messages unchanged.

    Args:
        counted: indices of the assistant messages that the loss counts, in order.

    Raises:
        DataError: the template refuses the messages, or its ``{% generation %}`` tags do not match
            them.
    """
    whole, marks = template.render_marked(messages, tools=tools)
    if marks is not None:
        spans = _of_marks(marks, messages, counted)
        return [Rendering(text=whole, spans=spans, is_marked=True)]
    turns, left, result = _Turns(template, messages, tools), list(counted), []
    for end in (len(messages), *(number + 1 for number in reversed(counted))):
        if end < len(messages) and end - 1 not in left:
            continue
        text = whole if end == len(messages) else turns.up_to(end)
        ends = {number: turns.end(number, text) for number in left if number < end}
        found = [number for number, last in ends.items() if last is not None]
        if found or not counted:
            starts = [turns.start(number) for number in found]
            lasts = [last for last in ends.values() if last is not None]
            spans = [(first, last) for (first, _), last in zip(starts, lasts, strict=True)]
            num_unprompted = sum(not asked for _, asked in starts)
            result.append(Rendering(text=text, spans=spans, num_unprompted=num_unprompted))
            left = [number for number in left if number not in found]
    return result


def _of_marks(marks: list[Span], messages: Sequence[Message], counted: Sequence[int]) -> list[Span]:
    if not any(last > first for first, last in marks):
        raise DataError("the template's generation blocks are empty: nothing to learn")
    said = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if len(counted) == len(said):
        return marks
    if len(marks) != len(said):
        raise DataError(
            f"the chat template marks {len(marks)} messages of the model where there are "
            f"{len(said)}, so those that do not count cannot be told from the others; mark every "
            "one in it"
        )
    return [span for span, number in zip(marks, said, strict=True) if number in counted]


@final
class _Turns:
    """Texts of one conversation around messages of the model, each rendered once."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ):
        self._messages = list(messages)
        self._render = functools.partial(template.render, tools=tools)
        self._eos = template.eos_token
        self.up_to = functools.cache(self._up_to)

    def _up_to(self, end: int) -> str:
        return self._render(self._messages[:end], add_generation_prompt=False)

    def after(self, number: int) -> str:
        """Text of the conversation that ends with this turn."""
        return self.up_to(number + 1)

    def end(self, number: int, text: str) -> int | None:
        """Returns where a message ends in a text that begins as ``after(number)``; None for other
        texts.

        Some templates end each text with the end token, after the end that each message has: it
        need not be in a text that goes on.
        """
        after, content = self.after(number), self._messages[number].get("content")
        if text.startswith(after):
            return len(after)
        shorter = after.removesuffix(self._eos)
        has_end = isinstance(content, str) and not shorter.endswith(content.strip())
        return len(shorter) if has_end and text.startswith(shorter) else None

    def start(self, number: int) -> tuple[int, bool]:
        """Returns where a turn begins in ``after(number)``, and whether it begins there as the
        generation prompt asks for it.

        Some templates ask for another beginning than they write later, or write a prompt otherwise
        once it is answered. Then a turn begins where the texts of two other answers differ.
        """
        before, after = self._render(self._messages[:number]), self.after(number)
        if after.startswith(before):
            return len(before), True
        others = [
            self._render(
                [*self._messages[:number], {"role": ASSISTANT, "content": content}],
                add_generation_prompt=False,
            )
            for content in ("x", "y")
        ]
        return min(common_prefix_length(others[0], each) for each in (others[1], after)), False


def common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Counts the characters, or other elements, that two sequences share at their beginning."""
    num = 0
    while num < min(len(first), len(second)) and first[num] == second[num]:
        num += 1
    return num
