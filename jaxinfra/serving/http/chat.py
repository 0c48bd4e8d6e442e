"""Renders conversations by the model's chat template, and says how answers are parsed."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from jaxinfra.data.chat_template import ChatTemplate, check_message
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.serving.engine.grammar import GrammarCompiler, StructureKind
from jaxinfra.serving.engine.requests import Constraint
from jaxinfra.serving.engine.token_rules import AfterReasoning
from jaxinfra.serving.http.bodies import ChatBody, ToolChoice
from jaxinfra.serving.load import load_template
from jaxinfra.serving.tools.families import Schemas
from jaxinfra.serving.tools.forms import (
    TOOL_FORMS,
    ToolForm,
    answer_parser,
    calls_grammar,
    form_of,
    marks_of,
    schemas_of,
    thinking_of,
)
from jaxinfra.serving.tools.reader import AnswerParser

_LAST_TOKENS = 16  # of a prompt, in which reasoning may be opened


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatTurn:
    """A rendered conversation, and how the model's answer to it is parsed and constrained."""

    prompt: tuple[int, ...]
    form: ToolForm | None = None  # of calls to look for
    schemas: Schemas = dataclasses.field(default_factory=dict)
    thinking: tuple[str, str] | None = None  # marks of reasoning to look for
    is_open: bool = False  # the prompt ends with the mark that begins reasoning
    only_one: bool = False  # the answer has one call at most
    must_call: bool = False  # ``structure`` is the grammar of tool calls
    structure: tuple[StructureKind, str] | None = None  # of the answer after its reasoning
    num_tokens: Callable[[str], int] = len  # of a text; characters without a tokenizer

    def parser(self) -> AnswerParser:
        """Makes the parser of one answer."""
        return answer_parser(self.form, self.schemas, self.thinking, is_open=self.is_open)


@final
class Chat:
    """The chat template of a model, and the forms of its tool calls and its reasoning.

    ``refusal`` says why the model cannot chat; it is empty if it can.

    Args:
        path: the model's directory.
        template: variables of the template, where a request gives no other value.
        tool_parser: name of the form of tool calls; auto: what the template shows; none: calls
            stay text.
        reads_reasoning: tell reasoning from the answer's text.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        *,
        template: Mapping[str, Any] | None,
        tool_parser: str,
        reads_reasoning: bool,
    ):
        self._tokenizer, self._template = tokenizer, None
        self.refusal, source = "", ""
        try:
            self._template: ChatTemplate | None = load_template(path, template)
            source = self._template.source
        except ConfigError as error:
            if template:
                raise
            self.refusal = f"{error}; a server's clients send /v1/completions"
        if tool_parser not in ("auto", "none", *TOOL_FORMS):
            known = ", ".join(("auto", "none", *TOOL_FORMS))
            raise ConfigError(f"tool parser {tool_parser!r} is not known; known are {known}")
        shown = form_of(source)
        self.form = shown if tool_parser == "auto" else TOOL_FORMS.get(tool_parser)
        forms = [each for each in (shown, self.form) if each is not None]
        # Texts around calls and reasoning, which stay in an answer's text where none parses them.
        self.marks = {*(thinking_of(source) or ()), *(mark for f in forms for mark in marks_of(f))}
        is_told = reads_reasoning and not (self.form and self.form.reads_reasoning)
        self.thinking = thinking_of(source) if is_told else None

    @property
    def parsing_summary(self) -> str:
        """Suffix of a log line that says how answers are parsed; empty without a template."""
        if self.refusal:
            return ""
        calls = "stay text" if self.form is None else f"are read as {self.form.name}"
        has_own = self.form is not None and self.form.reads_reasoning
        reasoning = "is told apart" if self.thinking or has_own else "stays text"
        return f"; tool calls {calls}, reasoning {reasoning}"

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        settings: Mapping[str, Any] | None = None,
        hints: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> tuple[int, ...]:
        """Renders a conversation, and returns its tokens.

        Args:
            settings: variables of the template, which must read them.
            hints: variables of the template; those that it does not read are ignored.
            given: further arguments of ``ChatTemplate.encode``.
        """
        if self._template is None:
            raise ConfigError(self.refusal)
        known = {k: v for k, v in (hints or {}).items() if self._template.reads(k)}
        template = self._template.with_settings(known | dict(settings or {}))
        for number, message in enumerate(messages):
            check_message(message, where=f"messages[{number}]")
        messages = [self._with_reasoning(message) for message in messages]
        return tuple(template.encode(self._tokenizer, messages, tools=tools, **given))

    def turn(self, body: ChatBody, hints: Mapping[str, Any]) -> ChatTurn:
        """Renders a request's conversation, and says how its answer is parsed and constrained.

        Args:
            hints: variables of the chat template; those that it does not read are ignored.

        Raises:
            ConfigError: the request's tools or structure cannot be enforced.
        """
        tools = body.offered_tools
        prompt = self.render(
            body.messages,
            tools,
            settings=body.chat_template_kwargs,
            hints={"reasoning_effort": body.reasoning_effort} | dict(hints)
            if body.reasoning_effort is not None
            else hints,
            continues=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        schemas = schemas_of(tools or ())
        structure, only_one = body.structure, body.parallel_tool_calls is False
        choice = body.tool_choice
        must_call = isinstance(choice, ToolChoice) or choice == "required"
        if must_call:
            if structure is not None:
                raise ConfigError(
                    f"tool_choice and {structure[0]}: an answer is calls or has a structure; "
                    "send one of them"
                )
            if isinstance(choice, ToolChoice):
                only_one = True
                schemas = {choice.function.name: schemas[choice.function.name]}
            structure = self._calls(schemas, only_one=only_one)
        last = self._tokenizer.decode(prompt[-_LAST_TOKENS:]).rstrip()
        return ChatTurn(
            prompt=prompt,
            form=self.form if schemas or (self.form and self.form.reads_reasoning) else None,
            schemas=schemas,
            thinking=self.thinking,
            is_open=self.thinking is not None and last.endswith(self.thinking[0]),
            only_one=only_one,
            must_call=must_call,
            structure=structure,
            num_tokens=lambda text: len(self._tokenizer.encode(text)),
        )

    def _calls(self, schemas: Schemas, *, only_one: bool) -> tuple[StructureKind, str]:
        if self.form is None:
            raise ConfigError(
                "a tool choice is enforced in the form that the model writes calls in, which its "
                "chat template does not show; start the server with --tool-parser NAME "
                f"({', '.join(TOOL_FORMS)}), or send tool_choice auto"
            )
        grammar = calls_grammar(self.form, schemas, self._tokenizer.id_of, only_one=only_one)
        return StructureKind.GRAMMAR, grammar

    def constraint(self, turn: ChatTurn, compiler: GrammarCompiler) -> Constraint | None:
        """Makes the constraint of an answer's structure, which applies after any reasoning.

        Raises:
            DataError: the structure, or the schema of a tool that must be called, is not one.
        """
        if turn.structure is None:
            return None
        try:
            inner = compiler.compile(*turn.structure)
        except DataError:
            # The grammar of calls is not the client's own: the schema within it is.
            for name, schema in turn.schemas.items() if turn.must_call else ():
                _require_schema(compiler, name, schema)
            raise
        tokenizer = self._tokenizer
        given = {"num_ids": compiler.num_ids, "eos_ids": tokenizer.end_ids}
        if turn.form is not None and turn.form.reads_reasoning:
            if turn.must_call:
                return inner  # its grammar has the reasoning in it
            ends = tokenizer.encode_rendered(["<|channel|>final<|message|>"])[0].tolist()
            return AfterReasoning(inner, begin_id=None, end_ids=ends, is_open=True, **given)
        if turn.thinking is None:
            return inner
        ends = tokenizer.encode_rendered([turn.thinking[1]])[0].tolist()
        begin = tokenizer.id_of(turn.thinking[0])
        return AfterReasoning(inner, begin_id=begin, end_ids=ends, is_open=turn.is_open, **given)

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message whose reasoning has the name that harmony's template reads."""
        said = message.get("reasoning_content")
        is_harmony = self.form is not None and self.form.reads_reasoning
        if not is_harmony or not said or "thinking" in message or message.get("content"):
            return message
        return message | {"thinking": said}


def _require_schema(compiler: GrammarCompiler, name: str, schema: Mapping[str, Any]) -> None:
    try:
        compiler.compile(StructureKind.JSON_SCHEMA, json.dumps(schema))
    except DataError as error:
        raise DataError(f"tool {name!r}: its parameters: {error}") from error
