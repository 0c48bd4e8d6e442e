"""Conversations as text, by the template that a model ships.

A template is a Jinja program in ``chat_template.jinja`` or ``tokenizer_config.json``. It comes with
the weights, so it runs in Jinja's sandbox.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, final, override

import jinja2
import tokenizers
from jinja2 import ext, nodes, parser, sandbox

from jaxinfra.core.errors import ConfigError, DataError

type Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``, and what else the template reads."""

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
        try:
            self._template = environment.from_string(source, globals=functions)
        except jinja2.TemplateError as error:
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
            variables[name] = token
    file = path / "chat_template.jinja"
    source = file.read_text() if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {each["name"]: each["template"] for each in source}.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"{path} ships no chat template; it may be a base model: continue plain text instead"
        )
    return ChatTemplate(source, variables=variables)


def encode_chat(path: Path, text: str) -> list[int]:
    """Token ids of a rendered conversation: special tokens spelled out in it become tokens.

    That holds for those that a user spelled out too, as in the reference implementation.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


class _Generation(ext.Extension):
    """``{% generation %}`` marks the model's turns for training; it renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    @override
    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error})") from error
