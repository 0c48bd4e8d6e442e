"""Anthropic's Messages API: requests as conversations, answers as content blocks."""

import json
import secrets
from collections.abc import Iterator
from typing import Any, Literal, final

import pydantic

from jaxinfra.errors import DataError
from jaxinfra.serving.http.bodies import ChatBody, ClientBody, Setting, chat_body
from jaxinfra.serving.http.chat import ChatTurn
from jaxinfra.serving.http.items import AnswerItem, ChangeKind, ItemChange, ItemsForm, named_event
from jaxinfra.serving.tools.reader import PieceKind, json_or_none


class ToolDeclaration(Setting):
    """A tool of the Messages API: a function's name, description and input schema."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: dict[str, Any] | None = None  # pages are shared by prefix in any case


class ChoiceOfTools(Setting):
    """Whether an answer must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingSettings(Setting):
    """Whether the model reasons first, where its chat template can say so."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class TextBlock(Setting):
    """A block of text of a system prompt."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class ConversationBody(ClientBody):
    """Conversation of the Messages API: what ``/v1/messages/count_tokens`` takes."""

    model: str | None = None
    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ToolDeclaration] = pydantic.Field(default_factory=list)
    tool_choice: ChoiceOfTools | None = None
    thinking: ThinkingSettings | None = None

    def chat(self, **settings: Any) -> ChatBody:
        """Returns the request as one of chat completions, with further settings of it."""
        system, messages = self.system, []
        if system:
            text = system if isinstance(system, str) else "\n\n".join(each.text for each in system)
            messages.append({"role": "system", "content": text})
        for number, message in enumerate(self.messages):
            messages += _messages(message, where=f"messages[{number}]")
        choice = self.tool_choice
        named: Any = None
        if choice is not None:
            named = {"any": "required", "tool": {"function": {"name": choice.name or ""}}}.get(
                choice.type, choice.type
            )
        given = {
            "model": self.model,
            "messages": messages,
            "tools": [_tool(each) for each in self.tools] or None,
            "tool_choice": named,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            # As that API has it: an answer goes on with the assistant's last words.
            "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
        }
        return chat_body(given | settings)

    @property
    def hints(self) -> dict[str, Any]:
        """Variables for a chat template that reads them."""
        thinking = self.thinking
        return {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}


class MessagesBody(ConversationBody):
    """Request body of ``/v1/messages``."""

    max_tokens: int = pydantic.Field(ge=1)
    stop_sequences: list[str] = pydantic.Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    # Official clients send these; nothing here depends on them.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def generation(self) -> ChatBody:
        """Returns the request as one of chat completions."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        given = {name: getattr(self, name) for name in names}
        return self.chat(stop=self.stop_sequences or None, **given)


def _tool(declared: ToolDeclaration) -> dict[str, Any]:
    function = {"name": declared.name, "parameters": declared.input_schema}
    told = {"description": declared.description} if declared.description else {}
    return {"type": "function", "function": function | told}


def _messages(message: dict[str, Any], *, where: str) -> list[dict[str, Any]]:
    """Returns a message's content blocks as messages of chat completions.

    Raises:
        DataError: a block is not known.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant") or not isinstance(content, str | list):
        raise DataError(f"{where} must have role user or assistant, and content; got role {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results, texts, thoughts, calls = [], [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else block
        try:
            match kind:
                case "text":
                    texts.append(block["text"])
                case "thinking":
                    thoughts.append(block["thinking"])
                case "tool_use":
                    arguments = json.dumps(block["input"], ensure_ascii=False)
                    function = {"name": block["name"], "arguments": arguments}
                    calls.append({"id": block["id"], "type": "function", "function": function})
                case "tool_result":
                    text = _result(block.get("content") or "", where=where)
                    called = block["tool_use_id"]
                    results.append({"role": "tool", "tool_call_id": called, "content": text})
                case _:
                    raise DataError(
                        f"{where} has a block of type {kind!r}; taken are text, thinking, "
                        "tool_use and tool_result"
                    )
        except KeyError as error:
            raise DataError(f"{where}: a block {kind!r} has no {error}") from error
    between = "\n" if role == "user" else ""  # as in chat completions; the model's own text is one
    said: dict[str, Any] = {"role": role, "content": between.join(texts) or None}
    said |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    said |= {"tool_calls": calls} if calls else {}
    is_empty = role == "user" and not texts
    return results if is_empty else [*results, said]


def _result(content: Any, *, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, dict) else {"type": part} for part in content]
    if any(part.get("type") != "text" for part in parts):
        kinds = [part.get("type") for part in parts]
        raise DataError(f"{where} has a tool result of parts {kinds}; text alone is read")
    return "\n".join(part["text"] for part in parts)


@final
class MessageForm(ItemsForm):
    """Formats answers of ``/v1/messages``."""

    def __init__(self, model: str, turn: ChatTurn):
        super().__init__(turn)
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    @property
    def _ended(self) -> dict[str, Any]:
        if self.is_cut:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self.items.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        reason = "end_turn" if self.stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": self.stop}

    @property
    def _usage(self) -> dict[str, int]:
        counts = self.usage.body()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the finished message."""
        content = [_block(each) for each in self.items.items]
        return self._head | {"content": content} | self._ended | {"usage": self._usage}

    def begin(self) -> Iterator[bytes]:
        """Yields the event that begins a stream."""
        message = self._head | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield named_event("message_start", message=message | {"usage": self._usage})

    def events_of(self, change: ItemChange) -> Iterator[bytes]:
        """Yields the event of an item's change."""
        item = change.item
        match change.kind:
            case ChangeKind.OPENED:
                block = _BLOCKS[item.kind] | (
                    {"id": item.id, "name": item.name} if item.kind is PieceKind.CALL else {}
                )
                yield named_event("content_block_start", index=item.index, content_block=block)
            case ChangeKind.GREW:
                kind, key = _DELTAS[item.kind]
                delta = {"type": kind, key: change.text}
                yield named_event("content_block_delta", index=item.index, delta=delta)
            case ChangeKind.CLOSED:
                yield named_event("content_block_stop", index=item.index)

    def finish(self) -> Iterator[bytes]:
        """Yields the events that end a stream."""
        yield named_event("message_delta", delta=self._ended, usage=self._usage)
        yield named_event("message_stop")

    def failed(self, message: str) -> Iterator[bytes]:
        """Yields the event of a stream that the engine could not finish."""
        yield named_event("error", error={"type": "api_error", "message": message})


_BLOCKS: dict[PieceKind, dict[str, Any]] = {
    PieceKind.TEXT: {"type": "text", "text": ""},
    PieceKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    PieceKind.CALL: {"type": "tool_use", "input": {}},
}
_DELTAS = {
    PieceKind.TEXT: ("text_delta", "text"),
    PieceKind.REASONING: ("thinking_delta", "thinking"),
    PieceKind.CALL: ("input_json_delta", "partial_json"),
}


def _block(item: AnswerItem) -> dict[str, Any]:
    """Returns the content block of a finished item."""
    block = _BLOCKS[item.kind]
    if item.kind is not PieceKind.CALL:
        return block | {_DELTAS[item.kind][1]: item.text}
    value = json_or_none(item.text)
    if not isinstance(value, dict):
        # An input is an object: a call that is cut off stays text, and nothing of it is lost.
        return _BLOCKS[PieceKind.TEXT] | {"text": f"{item.name} {item.text}"}
    return block | {"id": item.id, "name": item.name, "input": value}
