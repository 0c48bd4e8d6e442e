"""Rendering of conversations as text by the chat template that comes with a model.

A template is a Jinja program in ``chat_template.jinja`` or ``tokenizer_config.json``. It comes with
the weights, so it runs in Jinja's sandbox, in a process of its own with bounded time and memory.
"""

import atexit
import copy
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, final

from jaxinfra.data import template_program
from jaxinfra.data.special_tokens import named_tokens, read_settings
from jaxinfra.data.template_program import BEGIN, END
from jaxinfra.data.tokenizer import GUARD, Tokenizer
from jaxinfra.errors import ConfigError, DataError, nearest
from jaxinfra.runtime.files import is_text, read_bytes, require_type

type Message = Mapping[str, Any]
"""Message of a conversation: ``{"role": ..., "content": ...}`` and further keys that templates
read."""

TOOL_USE_TEMPLATE = "additional_chat_templates/tool_use.jinja"
_NO_TOOLS = "{{ raise_exception('there is a template for conversations with tools only') }}"
_OF_CONVERSATIONS = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_RENDER_S = 10.0  # a conversation takes a millisecond


class _Process:
    """The process that runs all templates of this one; started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Returns the answer to a request; raises DataError where the template failed."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", template_program.__name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for us
                )
            answer = self._exchange(self._process, line)
            if answer is None:
                self.close()
                raise DataError(f"it did not end within {_RENDER_S:g} s, or took the memory it had")
        said = json.loads(answer)
        if "error" in said:
            raise DataError(said["error"])
        return said["value"]

    def close(self) -> None:
        """Ends it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes) -> bytes | None:
        """The line that comes back; None where none does in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(_RENDER_S, process.kill)
        late.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            late.cancel()
        return answer if answer.endswith(b"\n") else None


_ANSWER = "(the answer of the model, 40b9d1)"  # a text that no conversation has
_PROCESS = _Process()
atexit.register(_PROCESS.close)


@final
class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja program.
        variables: variables it may read besides messages, such as ``bos_token``.
        with_tools: Jinja program for conversations with tools; None: ``source``.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str], with_tools: str | None = None):
        sources = [source, source if with_tools is None else with_tools]
        self._variables: dict[str, Any] = dict(variables)
        try:
            found = [_PROCESS.ask({"source": each}) for each in sources]
        except DataError as error:
            raise ConfigError(f"the chat template is no Jinja program ({error})") from error
        # Each with whether it marks the model's turns.
        self._programs = [(each, said["marks"]) for each, said in zip(sources, found, strict=True)]
        self._names = frozenset(name for said in found for name in said["names"])

    @property
    def identity(self) -> str:
        """Returns a text that differs between templates whose renderings may differ."""
        return json.dumps([*dict.fromkeys(each for each, _ in self._programs), self._variables])

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable of this name."""
        return name in self._names

    @property
    def eos_token(self) -> str:
        """Text of the end token that the template may write; empty if the model names none."""
        return self._variables.get("eos_token", "")

    def with_settings(self, settings: Mapping[str, Any]) -> "ChatTemplate":
        """Returns the template with values for its variables, such as ``enable_thinking``.

        Raises:
            ConfigError: the template reads no such variable, or the conversation itself sets it.
        """
        if not settings:
            return self
        known = self._names - _OF_CONVERSATIONS
        for name in settings:
            if name not in known:
                hint = nearest(name, known) if known else "; it reads none"
                raise ConfigError(f"the chat template has no setting {name!r}{hint}")
        changed = copy.copy(self)
        changed._variables = self._variables | dict(settings)
        return changed

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Renders the conversation as text, in the form that the model was trained on.

        Args:
            add_generation_prompt: append the text that precedes the model's next message.

        Raises:
            DataError: the template refuses these messages.
        """
        text = self._render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return text.replace(BEGIN, "").replace(END, "") if self._program(tools)[1] else text

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """Returns the tokens of a conversation, up to where the model's next message begins.

        Special tokens that the template writes become tokens. Special tokens spelled out in a
        user's message stay text, unless the template changes the message.

        Args:
            add_generation_prompt: append the text that precedes the model's next message.
            continues: end within the last message, after its text, for the model to go on with it.

        Raises:
            DataError: the template refuses these messages.
        """
        asked = add_generation_prompt and not continues

        def rendered(messages: Sequence[Message]) -> str:
            text = self.render(messages, tools=tools, add_generation_prompt=asked)
            return _up_to_content(text, messages[-1]) if continues else text

        text = rendered(messages)
        guarded = [_guarded(tokenizer, message) for message in messages]
        if guarded != list(messages):
            marked = rendered(guarded)
            text = marked if marked.replace(GUARD, "") == text else text
        return tokenizer.encode_rendered([text])[0].tolist()

    def encode_replies(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        replies: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Returns the tokens between the text of the model's answer and that of its next one.

        They begin with the end of its message, as the template writes it.

        Args:
            messages: the conversation before the answer.
            replies: messages after it, such as results of tools.

        Raises:
            DataError: the template refuses these messages, or leaves the answer out.
        """
        answer = {"role": "assistant", "content": _ANSWER}
        guarded = [_guarded(tokenizer, each) for each in replies]
        _, found, after = self.render([*messages, answer, *guarded], tools=tools).partition(_ANSWER)
        if not found:
            raise DataError(
                "the chat template leaves out an answer that other messages follow; take prompts "
                "that are texts, or another template"
            )
        return tokenizer.encode_rendered([after])[0].tolist()

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Renders a whole conversation; also returns the ranges in ``{% generation %}`` tags, None
        if the template has no such tag.

        Raises:
            DataError: the template refuses these messages.
        """
        text = self._render(messages, add_generation_prompt=False, tools=tools)
        if not self._program(tools)[1]:
            return text, None
        pieces, spans, length = re.split(f"([{BEGIN}{END}])", text), [], 0
        for number, piece in enumerate(pieces):
            if piece == BEGIN:
                if pieces[number + 2 : number + 3] != [END]:
                    raise DataError("generation blocks of the chat template are nested")
                spans.append((length, length + len(pieces[number + 1])))
            elif piece != END:
                length += len(piece)
        return "".join(piece for piece in pieces if piece not in (BEGIN, END)), spans

    @property
    def source(self) -> str:
        """The Jinja programs: for conversations without tools, and with them."""
        return "\n".join(dict.fromkeys(source for source, _ in self._programs))

    def _program(self, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, bool]:
        return self._programs[tools is not None]

    def _render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        source, marks = self._program(tools)
        spelled = json.dumps(list(messages), ensure_ascii=False) if marks else ""
        if BEGIN in spelled or END in spelled:
            raise DataError("a message has U+FDD0 or U+FDD1, which are no characters")
        variables = {
            **self._variables,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _PROCESS.ask({"source": source, "variables": variables})
            if not is_text(text):
                raise DataError("what it makes has half of a character in it")
            return text
        except DataError as error:
            raise DataError(f"the chat template refuses the messages: {error}") from error


class _Named(TypedDict):
    name: str
    template: str


TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": TOOL_USE_TEMPLATE}
"""Files of a directory's templates, by the templates' names."""


def load_chat_template(path: Path) -> ChatTemplate:
    """Loads a model directory's chat template, and the template named ``tool_use``, for tools.

    Raises:
        ConfigError: the directory has no chat template.
    """
    found = read_templates(path)
    default = found.get("default", _NO_TOOLS)
    return ChatTemplate(default, variables=named_tokens(path), with_tools=found.get("tool_use"))


def read_templates(path: Path) -> dict[str, str]:
    """Reads a model directory's chat templates, by name.

    Separate template files take precedence over ``tokenizer_config.json``.

    Raises:
        ConfigError: the directory has none of those that are used.
    """
    files = {name: path / file for name, file in TEMPLATE_FILES.items()}
    found = {name: _text(file) for name, file in files.items() if file.exists()}
    if not found:
        given = read_settings(path).get("chat_template") or []
        kinds = str | list[_Named]
        require_type(given, kinds, where=f"{path}, chat_template", error=ConfigError)
        named = [{"name": "default", "template": given}] if isinstance(given, str) else given
        found = {each["name"]: each["template"] for each in named}
    if not found.keys() & TEMPLATE_FILES.keys():
        names = f" by the name of 'default' (but {', '.join(found)})" if found else ""
        raise ConfigError(
            f"{path} ships no chat template{names}; it may be a base model: continue plain text "
            "instead (jaxinfra chat --plain, or generate and train without --chat), or train it "
            "on another directory's template (--set data.chat_template=DIR)"
        )
    return found


def _up_to_content(text: str, message: Message) -> str:
    """Returns a rendered conversation up to the end of its last message's text."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise DataError(
            f"the last message (role {message.get('role')!r}) has no text of the model to go on "
            "with; end the conversation with an assistant's text"
        )
    found = text.rfind(content.strip())
    if found < 0:
        raise DataError("the chat template changes the last message's text, so it has no end")
    whole = text.startswith(content, found)
    return text[: found + len(content if whole else content.strip())]


def _guarded(tokenizer: Tokenizer, message: Message) -> Message:
    """A message whose text, unless the model says it, spells out no special token."""
    content = message.get("content")
    if message.get("role") == "assistant":
        return message
    if isinstance(content, str):
        return {**message, "content": tokenizer.guard(content)}
    if isinstance(content, list):
        parts = [
            {**part, "text": tokenizer.guard(part["text"])} if is_text_part(part) else part
            for part in content
        ]
        return {**message, "content": parts}
    return message


def check_message(message: Any, *, where: str) -> None:
    """Raises DataError unless ``message`` has content that is text, text parts, or null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} has no role; it must be an object with one")
    calls, holds = message.get("tool_calls"), list[dict[str, Any]] | None
    require_type(calls, holds, where=f"{where}: tool_calls", error=DataError)
    content = message.get("content")
    if isinstance(content, list) and not all(is_text_part(part) for part in content):
        kinds = [part.get("type") if isinstance(part, dict) else part for part in content]
        raise DataError(
            f"{where} ({message['role']}) has content of parts {kinds}; text alone is read"
        )
    if content is not None and not isinstance(content, str | list):
        raise DataError(
            f"{where} ({message['role']}) has content {type(content).__name__}; it must be text"
        )


def is_text_part(part: Any) -> bool:
    """Whether ``part`` is a text part of a message's content in the format of OpenAI's API."""
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _text(file: Path) -> str:
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text ({error}); copy it again") from error
