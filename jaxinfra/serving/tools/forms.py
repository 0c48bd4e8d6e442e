"""The forms of tool calls by name: which parser reads them, and the grammar that enforces them."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfra.errors import ConfigError
from jaxinfra.serving.tools import families
from jaxinfra.serving.tools.families import Schemas
from jaxinfra.serving.tools.reader import AnswerParser, Reading, TextReader

type TokenOf = Callable[[str], int | None]
"""Returns the id of a token that is spelled so, or None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """The form in which a family of models writes tool calls: parser, and text around arguments."""

    name: str  # as vLLM names the parser
    read: Callable[[TextReader, Schemas], Reading[None]]
    marks: tuple[str, ...]  # a chat template that has all of these is of this form
    before: str  # a call's arguments; NAME stands for the function's
    after: str = ""
    opened: str = ""  # before all calls
    separator: str = ""  # between calls
    closed: str = ""  # after all calls
    field: tuple[str, str, str] | None = None  # before a value (of KEY), after, between values
    quotes_text: bool = True  # whether values that are strings have quotes, with ``field``
    writes_one: bool = False  # an answer has one call
    reads_reasoning: bool = False  # the parser tells reasoning from text itself
    id_length: int = 24  # characters of a call's id
    also_read: tuple[str, ...] = ()  # further marks that the parser looks for


_XML = {"quotes_text": False}
_HARMONY_THOUGHT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
_FORMS = (
    ToolForm(
        name="openai",
        read=families.harmony,
        marks=("<|channel|>", "<|message|>"),
        before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        after="<|call|>",
        writes_one=True,
        reads_reasoning=True,
    ),
    ToolForm(
        name="deepseek_v3",
        read=families.deepseek,
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        opened="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        separator="\n",
        closed="<｜tool▁calls▁end｜>",
    ),
    ToolForm(
        name="deepseek_v31",
        read=families.deepseek,
        marks=("<｜tool▁calls▁begin｜>",),
        opened="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        closed="<｜tool▁calls▁end｜>",
    ),
    ToolForm(
        name="glm45",
        read=families.glm,
        marks=("<arg_key>",),
        before="<tool_call>NAME\n",
        after="</tool_call>",
        separator="\n",
        field=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", ""),
        **_XML,
    ),
    ToolForm(
        name="qwen3_coder",
        read=families.qwen_coder,
        marks=("<function=", "<parameter="),
        before="<tool_call>\n<function=NAME>\n",
        after="</function>\n</tool_call>",
        separator="\n",
        field=("<parameter=KEY>\n", "\n</parameter>\n", ""),
        **_XML,
    ),
    ToolForm(
        name="mistral",
        read=families.mistral,
        marks=("[TOOL_CALLS]", "[ARGS]"),
        before="[TOOL_CALLS]NAME[ARGS]",
        id_length=9,
        also_read=("[CALL_ID]",),
    ),
    ToolForm(
        name="mistral_list",
        read=families.mistral,
        marks=("[TOOL_CALLS]",),
        opened="[TOOL_CALLS][",
        before='{"name": "NAME", "arguments": ',
        after="}",
        separator=", ",
        closed="]",
        id_length=9,
    ),
    ToolForm(
        name="hermes",
        read=families.hermes,
        marks=("<tool_call>",),
        before='<tool_call>\n{"name": "NAME", "arguments": ',
        after="}\n</tool_call>",
        separator="\n",
    ),
    ToolForm(
        name="pythonic",
        read=families.pythonic,
        marks=("[func_name1(",),
        opened="[",
        before="NAME(",
        after=")",
        separator=", ",
        closed="]",
        field=("KEY=", "", ", "),
        also_read=("<|python_start|>", "<|python_tag|>", "<|python_end|>"),
    ),
    ToolForm(
        name="llama3_json",
        read=families.llama_json,
        marks=('{"name": function name, "parameters"',),
        before='{"name": "NAME", "parameters": ',
        after="}",
        separator="; ",
        also_read=("<|python_tag|>",),
    ),
)
TOOL_FORMS: Mapping[str, ToolForm] = {form.name: form for form in _FORMS}
"""Forms by name; a form whose marks include another form's comes before it."""

THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Texts that reasoning begins and ends with, outside of harmony."""


def marks_of(form: ToolForm) -> set[str]:
    """Returns the texts around a form's calls that may be special tokens."""
    thought = _HARMONY_THOUGHT if form.reads_reasoning else ()
    texts = (form.opened, form.before, form.after, form.closed, *(form.field or ()), *thought)
    return {*form.also_read, *(mark for text in texts for mark in _MARK.findall(text))}


def form_of(template: str) -> ToolForm | None:
    """Returns the form whose marks a chat template has; None if it has those of no form."""
    return next((form for form in _FORMS if all(mark in template for mark in form.marks)), None)


def thinking_of(template: str) -> tuple[str, str] | None:
    """Returns the marks of reasoning that a chat template has; None if it has none."""
    return next((marks for marks in THINKING_MARKS if marks[1] in template), None)


def answer_parser(
    form: ToolForm | None, schemas: Schemas, thinking: tuple[str, str] | None, *, is_open: bool
) -> AnswerParser:
    """Makes the parser of one answer.

    Args:
        form: of its tool calls; None: there are none to find.
        schemas: the tools that may be called.
        thinking: marks of its reasoning; None: none is looked for.
        is_open: the prompt ends with the first of these marks.
    """

    def parse(reader: TextReader) -> Reading[None]:
        if thinking is not None:
            yield from families.thinking(reader, thinking, is_open=is_open)
        if form is not None and (schemas or form.reads_reasoning):
            yield from form.read(reader, schemas)

    return AnswerParser(parse)


def calls_grammar(form: ToolForm, schemas: Schemas, token_of: TokenOf, *, only_one: bool) -> str:
    """Returns the Lark grammar of an answer that calls at least one of the tools.

    Args:
        token_of: tells which marks are tokens, which a grammar names by their ids.
        only_one: the answer has exactly one call.
    """

    def spelled(text: str) -> str:
        return _spelled(text, token_of)

    many = "" if only_one or form.writes_one else f" ({spelled(form.separator)} call)*"
    thought = ""
    if form.reads_reasoning:
        first, last = map(spelled, _HARMONY_THOUGHT)
        thought = f"({first} /(?s:.*)/ {last})?"
    rules = [f"start: {thought} {spelled(form.opened)} call{many} {spelled(form.closed)}"]
    rules.append("call: " + " | ".join(f"f{number}" for number in range(len(schemas))))
    for number, (name, schema) in enumerate(schemas.items()):
        before = spelled(form.before.replace("NAME", name))
        rules.append(f"f{number}: {before} a{number} {spelled(form.after)}")
        if form.field is None:
            rules.append(f"a{number}: {_json(schema)}")
        else:
            rules += _fields(f"a{number}", form, schema, spelled)
    return "\n".join(rules)


def _fields(
    rule: str, form: ToolForm, schema: Mapping[str, Any], spelled: Callable[[str], str]
) -> list[str]:
    """Rules of arguments that are written one by one: the required ones, then the others."""
    assert form.field is not None
    before, after, between = form.field
    given: Mapping[str, Any] = schema.get("properties") or {}
    required = [key for key in given if key in (schema.get("required") or ())]
    optional = [key for key in given if key not in required]
    rules, names = [], {}
    for number, key in enumerate(given):
        names[key] = f"{rule}_{number}"
        value = _json(given[key], schema)
        ending = spelled(after)
        if not form.quotes_text and given[key].get("type") == "string":
            value = "/(?s:.*)/"
            if "<[" in ending:  # no text has this token, so it ends the value
                ending = ending[ending.index("<[") :]
            else:
                rules.append(f"{names[key]}_t[suffix={ending}]: {value}")
                value, ending = f"{names[key]}_t", ""
        rules.append(f"{names[key]}: {spelled(before.replace('KEY', key))} {value} {ending}")
    joined = spelled(between)
    rest = [f"({joined} {names[key]})?" for key in optional]
    if required:
        options = [" ".join([f" {joined} ".join(names[key] for key in required), *rest])]
    else:
        options = [" ".join([names[key], *rest[at + 1 :]]) for at, key in enumerate(optional)]
        options.append('""')
    return [*rules, f"{rule}: " + " | ".join(options)]


# As chat templates spell the calls that models learn; free space could go on without end.
_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _json(schema: Any, whole: Mapping[str, Any] | None = None) -> str:
    """Returns a JSON schema within a grammar, with the definitions of the schema around it."""
    own: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {}
    own |= {key: whole[key] for key in ("$defs", "definitions") if whole and key in whole}
    return f"%json {json.dumps(own | {'x-guidance': _AS_WRITTEN})}"


_MARK = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]+\])")


def _spelled(text: str, token_of: TokenOf) -> str:
    """Returns a text as a grammar's literals; marks that are tokens are named by their ids."""
    parts: list[str] = []
    plain = ""
    for piece in _MARK.split(text):
        token = token_of(piece) if _MARK.fullmatch(piece) else None
        if token is None:
            plain += piece
            continue
        parts += [json.dumps(plain, ensure_ascii=False)] * bool(plain) + [f"<[{token}]>"]
        plain = ""
    if plain or not parts:
        parts.append(json.dumps(plain, ensure_ascii=False))
    return " ".join(parts)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the parameters' schema of each tool by name.

    Raises:
        ConfigError: two tools have one name.
    """
    functions = [tool["function"] for tool in tools]
    names = [each["name"] for each in functions]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"tools {sorted(twice)} are given twice; calls could not tell them apart")
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    return {each["name"]: each.get("parameters") or none for each in functions}
