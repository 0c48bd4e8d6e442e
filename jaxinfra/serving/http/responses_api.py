"""OpenAI's Responses API: requests as conversations, answers as items, and a store of responses."""

import collections
import dataclasses
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, final

import pydantic

from jaxinfra.errors import ConfigError, DataError, JaxinfraError
from jaxinfra.serving.http.bodies import (
    ChatBody,
    ClientBody,
    FunctionName,
    Setting,
    StreamOptions,
    chat_body,
)
from jaxinfra.serving.http.chat import ChatTurn
from jaxinfra.serving.http.items import AnswerItem, ChangeKind, ItemChange, ItemsForm, named_event
from jaxinfra.serving.tools.reader import PieceKind


class UnknownResponseError(JaxinfraError):
    """A request names a response that is not stored."""


class FunctionDeclaration(Setting):
    """A tool of the Responses API: a function's name, description and parameters."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def tool(self) -> dict[str, Any]:
        """The tool as chat completions have it."""
        told = self.model_dump(exclude_unset=True, exclude={"type"})
        return {"type": "function", "function": {k: v for k, v in told.items() if v is not None}}


class ChosenFunction(FunctionName):
    """The function that an answer must call."""

    type: Literal["function"]


class TextFormat(Setting):
    """The structure that the answer's text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    given: dict[str, Any] | None = pydantic.Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Setting):
    """Settings of the answer's text: its structure."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningSettings(Setting):
    """Settings of the model's reasoning, of which its effort reaches the chat template."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(ClientBody):
    """Request body of ``/v1/responses``."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionDeclaration] = pydantic.Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = pydantic.Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Nothing here is encrypted.
    include: list[Literal["reasoning.encrypted_content"]] = pydantic.Field(default_factory=list)
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    # Official clients send these; nothing here depends on them.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    client_metadata: dict[str, Any] | None = None

    def chat(self, before: list[dict[str, Any]]) -> ChatBody:
        """Returns the request as one of chat completions.

        Args:
            before: messages of the responses that this one follows.
        """
        messages = _leading_system(
            ([{"role": "system", "content": self.instructions}] if self.instructions else [])
            + _with_names([*before, *messages_of(self.input)])
        )
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenFunction):
            choice = {"function": {"name": choice.name}}
        given = {
            "messages": messages,
            "tools": [each.tool for each in self.tools] or None,
            "tool_choice": choice,
            "max_tokens": self.max_output_tokens,
            "response_format": self._format,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        names = ("model", "parallel_tool_calls", "temperature", "top_p", "stream", "seed")
        names += ("chat_template_kwargs",)
        return chat_body(given | {name: getattr(self, name) for name in names})

    @property
    def _format(self) -> dict[str, Any] | None:
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type != "json_schema":
            return None if asked is None else {"type": asked.type}
        if asked.given is None:
            raise ConfigError("text.format json_schema has no schema")
        return {"type": "json_schema", "json_schema": {"schema": asked.given}}

    @pydantic.model_validator(mode="after")
    def _some_input(self) -> Self:
        if not self.input:
            raise ValueError("input is empty; send a text or items")
        return self


def _leading_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins the system messages that begin a conversation: chat templates take one."""
    texts = []
    while messages and messages[0]["role"] == "system":
        texts.append(messages[0]["content"])
        messages = messages[1:]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages] if texts else messages


def _with_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each tool's result the name of the called function, which some templates read."""
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    return [
        each | {"name": names[each["tool_call_id"]]} if each.get("tool_call_id") in names else each
        for each in messages
    ]


_PARTS = ("input_text", "output_text", "text")


def _text(content: Any, *, where: str, between: str = "\n") -> str:
    """Returns the text of an item's content, its parts joined as chat completions' are.

    Raises:
        DataError: a part is no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where} has content {type(content).__name__}; it must be text or parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in _PARTS or not isinstance(part.get("text"), str):
            raise DataError(f"{where} has content of a part {kind!r}; text alone is read")
        texts.append(part["text"])
    return between.join(texts)


def _call_id(item: dict[str, Any]) -> str:
    if not isinstance(item["call_id"], str):
        raise TypeError("call_id that is a text")
    return item["call_id"]


def messages_of(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns input items as messages of chat completions.

    Raises:
        DataError: an item is not known.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []

    def said() -> dict[str, Any]:
        """The assistant's message that goes on."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for number, item in enumerate(items):
        where = f"input[{number}]"
        try:
            match item.get("type", "message"):
                case "message" if item["role"] == "assistant":
                    message, text = said(), _text(item["content"], where=where, between="")
                    message["content"] = (message["content"] or "") + text
                case "message":
                    role = "system" if item["role"] == "developer" else item["role"]
                    text = _text(item["content"], where=where)
                    messages.append({"role": role, "content": text})
                case "reasoning":
                    texts = [each["text"] for each in item.get("content") or ()]
                    message = said()
                    message["reasoning_content"] = message.get("reasoning_content", "") + "".join(
                        texts
                    )
                case "function_call":
                    function = {"name": item["name"], "arguments": item["arguments"]}
                    call = {"id": _call_id(item), "type": "function", "function": function}
                    said().setdefault("tool_calls", []).append(call)
                case "function_call_output":
                    text, called = _text(item["output"], where=where), _call_id(item)
                    messages.append({"role": "tool", "tool_call_id": called, "content": text})
                case other:
                    raise DataError(
                        f"{where} is of type {other!r}; taken are message, reasoning, "
                        "function_call and function_call_output"
                    )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where} ({item.get('type', 'message')}) has no {error}") from error
    return messages


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeptResponse:
    """A stored response: its body, input, and the conversation with it, without instructions."""

    body: Mapping[str, Any]
    items: list[dict[str, Any]]  # its input
    messages: list[dict[str, Any]]


@final
class KeptResponses:
    """Store of the last responses, which later requests may continue; thread-safe.

    Args:
        most: number of responses that are kept; 0: none.
    """

    def __init__(self, most: int):
        self.most = most
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[str, KeptResponse] = collections.OrderedDict()

    def keep(self, response: KeptResponse) -> None:
        """Stores a response, and drops the oldest if there are more than ``most``."""
        with self._lock:
            self._kept[response.body["id"]] = response
            while len(self._kept) > self.most:
                self._kept.popitem(last=False)

    def get(self, name: str) -> KeptResponse:
        """Returns a kept response; raises UnknownResponseError if there is none of this id."""
        with self._lock:
            if name not in self._kept:
                why = (
                    f"the last {self.most} are kept" if self.most else "replicas keep no responses"
                )
                raise UnknownResponseError(
                    f"response {name!r} is not kept here ({why}); send the whole conversation"
                )
            return self._kept[name]

    def drop(self, name: str) -> None:
        """Forgets a response; raises UnknownResponseError if there is none of this id."""
        self.get(name)
        with self._lock:
            self._kept.pop(name, None)


@final
class ResponseForm(ItemsForm):
    """Formats answers of ``/v1/responses``.

    Args:
        before: messages of the responses that this one follows.
        kept: takes the response once it is finished; None: it is not kept.
    """

    def __init__(
        self,
        model: str,
        turn: ChatTurn,
        body: ResponsesBody,
        *,
        before: list[dict[str, Any]],
        kept: KeptResponses | None,
    ):
        super().__init__(turn)
        self._body, self._before, self._kept = body, before, kept
        self._ids: dict[int, str] = {}
        self._number = -1
        self._error: dict[str, Any] | None = None
        choice = body.tool_choice
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": kept is not None,
            "temperature": body.temperature,
            "text": {
                "format": body.text.format.model_dump(by_alias=True, exclude_none=True)
                if body.text and body.text.format
                else {"type": "text"}
            },
            "tool_choice": choice.model_dump()
            if isinstance(choice, ChosenFunction)
            else (choice or "auto"),
            "tools": [each.model_dump() for each in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the finished response, which is then kept if it is to be."""
        response = self._now("incomplete" if self.is_cut else "completed")
        if self._kept is not None:
            given = self._body.input
            items = (
                [{"type": "message", "role": "user", "content": given}]
                if isinstance(given, str)
                else given
            )
            messages = [*self._before, *messages_of(given), *messages_of(response["output"])]
            self._kept.keep(KeptResponse(body=response, items=items, messages=messages))
        return response

    def _now(self, status: str) -> dict[str, Any]:
        counts = self.usage.body()
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.items.reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }
        is_cut = status == "incomplete"
        return self._head | {
            "status": status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(each) for each in self.items.items],
            "usage": None if status == "in_progress" else usage,
        }

    def _item(self, item: AnswerItem, *, is_begun: bool = False) -> dict[str, Any]:
        """Returns an item's JSON object: as it ended, or as it began, without its text."""
        text = "" if is_begun else item.text
        ended = "incomplete" if item.is_cut else "completed"
        head = {"id": self._id(item), "status": "in_progress" if is_begun else ended}
        match item.kind:
            case PieceKind.CALL:
                fields = {"call_id": item.id, "name": item.name, "arguments": text}
                return head | {"type": "function_call"} | fields
            case PieceKind.REASONING:
                content = [{"type": "reasoning_text", "text": text}] if text else []
                return head | {"type": "reasoning", "summary": [], "content": content}
            case _:
                content = [_part(text)] if text else []
                return head | {"type": "message", "role": "assistant", "content": content}

    def _id(self, item: AnswerItem) -> str:
        prefix = {PieceKind.CALL: "fc", PieceKind.REASONING: "rs"}.get(item.kind, "msg")
        return self._ids.setdefault(item.index, f"{prefix}_{secrets.token_hex(16)}")

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(f"response.{kind}", sequence_number=self._number, **fields)

    def begin(self) -> Iterator[bytes]:
        """Yields the events that begin a stream."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._now("in_progress"))

    def finish(self) -> Iterator[bytes]:
        """Yields the event that ends a stream."""
        body = self.body()
        yield self._event(body["status"], response=body)

    def failed(self, message: str) -> Iterator[bytes]:
        """Yields the event of a stream that the engine could not finish."""
        self._error = {"code": "server_error", "message": message}
        yield self._event("failed", response=self._now("failed"))

    def events_of(self, change: ItemChange) -> Iterator[bytes]:
        """Yields the events of an item's change."""
        item = change.item
        at = {"output_index": item.index}
        within = at | {"item_id": self._id(item)}
        is_text = item.kind is PieceKind.TEXT
        if item.kind is not PieceKind.CALL:
            within["content_index"] = 0
        name = {
            PieceKind.CALL: "function_call_arguments",
            PieceKind.REASONING: "reasoning_text",
        }.get(item.kind, "output_text")
        logprobs = {"logprobs": []} if is_text else {}
        match change.kind:
            case ChangeKind.OPENED:
                added = self._item(item, is_begun=True)
                yield self._event("output_item.added", **at, item=added)
                if is_text:
                    yield self._event("content_part.added", **within, part=_part(""))
            case ChangeKind.GREW:
                yield self._event(f"{name}.delta", **within, delta=change.text, **logprobs)
            case ChangeKind.CLOSED:
                key = "arguments" if item.kind is PieceKind.CALL else "text"
                named = {"name": item.name} if item.kind is PieceKind.CALL else {}
                whole = {key: item.text} | named | logprobs
                yield self._event(f"{name}.done", **within, **whole)
                if is_text:
                    yield self._event("content_part.done", **within, part=_part(item.text))
                yield self._event("output_item.done", **at, item=self._item(item))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
