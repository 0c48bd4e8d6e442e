"""Conversations as text, by the template that a model ships.

A template is a Jinja program in ``chat_template.jinja`` or ``tokenizer_config.json``. It comes with
the weights, so it runs in Jinja's sandbox, in a process of its own with bounded time and memory.
"""

import atexit
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, final

from jaxinfra.data import template_program
from jaxinfra.data.template_program import BEGIN, END
from jaxinfra.data.tokenizer import panics, read_tokenizer
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.runtime.files import read_bytes, read_json, require_type
from jaxinfra.runtime.text import is_text

type Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``, and what else the template reads."""

_RENDER_S = 10.0  # a conversation takes a millisecond
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class _Process:
    """The process that runs all templates of this one; started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request; raises DataError with what the template raised, or did not
        bring to an end.
        """
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


_PROCESS = _Process()
atexit.register(_PROCESS.close)


@final
class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja program.
        variables: what it may read besides messages, such as ``bos_token``.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str]):
        self._source, self._variables = source, dict(variables)
        self.identity = json.dumps([source, self._variables])  # what a rendering depends on
        try:
            self._marks = _PROCESS.ask({"source": source})
        except DataError as error:
            raise ConfigError(f"the chat template is no Jinja program ({error})") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as the model was trained to see it.

        Args:
            add_generation_prompt: ends with what precedes the model's turn.

        Raises:
            DataError: the template refuses these messages.
        """
        text = self._render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return text.replace(BEGIN, "").replace(END, "") if self._marks else text

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """A whole conversation, and where ``{% generation %}`` encloses it; None: it never does.

        Raises:
            DataError: the template refuses these messages.
        """
        text = self._render(messages, add_generation_prompt=False, tools=tools)
        if not self._marks:
            return text, None
        pieces, spans, length = re.split(f"([{BEGIN}{END}])", text), [], 0
        for number, piece in enumerate(pieces):
            if piece == BEGIN:
                if pieces[number + 2 : number + 3] != [END]:
                    raise DataError("generation blocks of the chat template lie in one another")
                spans.append((length, length + len(pieces[number + 1])))
            elif piece != END:
                length += len(piece)
        return "".join(piece for piece in pieces if piece not in (BEGIN, END)), spans

    def _render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        spelled = json.dumps(list(messages), ensure_ascii=False) if self._marks else ""
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
            text = _PROCESS.ask({"source": self._source, "variables": variables})
            if not is_text(text):
                raise DataError("what it makes has half of a character in it")
            return text
        except DataError as error:
            raise DataError(f"the chat template refuses the messages: {error}") from error


def load_chat_template(path: Path) -> ChatTemplate:
    """The template of a model directory; raises ConfigError where it ships none."""
    settings = _read_json(path / "tokenizer_config.json")
    variables = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            require_type(token, str, where=f"{path}, {name}", error=ConfigError)
            variables[name] = token
    file = path / "chat_template.jinja"
    source = _text(file) if file.exists() else settings.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {each["name"]: each["template"] for each in source}.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"{path} ships no chat template; it may be a base model: continue plain text instead"
        )
    return ChatTemplate(source, variables=variables)


def _text(file: Path) -> str:
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text ({error}); copy it again") from error


def encode_chat(path: Path, text: str) -> list[int]:
    """Token ids of a rendered conversation: special tokens spelled out in it become tokens.

    That holds for those that a user spelled out too, as in the reference implementation.
    """
    tokenizer = read_tokenizer(path / "tokenizer.json")
    with panics():
        return tokenizer.encode(text, add_special_tokens=False).ids


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file, holds=_TokenizerConfig) if file.exists() else {}


class _Named(TypedDict):
    name: str
    template: str


type _Token = str | dict[str, Any] | None


class _TokenizerConfig(TypedDict, total=False):
    chat_template: str | list[_Named] | None
    bos_token: _Token
    eos_token: _Token
    unk_token: _Token
    pad_token: _Token
    sep_token: _Token
    cls_token: _Token
