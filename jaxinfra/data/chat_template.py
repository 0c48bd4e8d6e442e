"""Conversations as text, by the template that a model ships.

A template is a Jinja program in ``chat_template.jinja`` or ``tokenizer_config.json``. It comes with
the weights, so it runs in Jinja's sandbox.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypedDict, final, override

import jinja2
import tokenizers
from jinja2 import ext, nodes, parser, sandbox

from jaxinfra.core.errors import ConfigError, DataError
from jaxinfra.core.files import read_bytes, read_json, require_type

type Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``, and what else the template reads."""

# Around what generation blocks enclose. Unicode reserves them for such uses: no text has them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@final
class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja program.
        variables: what it may read besides messages, such as ``bos_token``.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str]):
        # As the reference implementation sets it up: templates depend on every one of these.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _refuse, "strftime_now": _now}
        self._variables = dict(variables)
        self.identity = json.dumps([source, self._variables])  # what a rendering depends on
        try:
            self._template = environment.from_string(source, globals=functions)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is no Jinja program ({error})") from error
        generation = environment.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation)
        self._marks = generation.is_used

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
        return text.replace(_BEGIN, "").replace(_END, "") if self._marks else text

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
        pieces, spans, length = re.split(f"([{_BEGIN}{_END}])", text), [], 0
        for number, piece in enumerate(pieces):
            if piece == _BEGIN:
                if pieces[number + 2 : number + 3] != [_END]:
                    raise DataError("generation blocks of the chat template lie in one another")
                spans.append((length, length + len(pieces[number + 1])))
            elif piece != _END:
                length += len(piece)
        return "".join(piece for piece in pieces if piece not in (_BEGIN, _END)), spans

    def _render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        spelled = json.dumps(list(messages), ensure_ascii=False) if self._marks else ""
        if _BEGIN in spelled or _END in spelled:
            raise DataError("a message has U+FDD0 or U+FDD1, which are no characters")
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
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
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


class _Generation(ext.Extension):
    """``{% generation %}`` encloses the model's turns: it is rendered between two marks."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.is_used = False  # until a template has such a block

    @override
    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        self.is_used = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
        return [begin, *body, end]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


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
