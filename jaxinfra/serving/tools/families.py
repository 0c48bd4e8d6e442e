"""Parsers of the forms in which model families write tool calls; each takes the tools' schemas."""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from jaxinfra.serving.tools.reader import PieceKind, Reading, TextReader, json_or_none

type Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the function's name."""

TEXT, REASONING, ARGUMENTS = PieceKind.TEXT, PieceKind.REASONING, PieceKind.ARGUMENTS


def hermes(reader: TextReader, schemas: Schemas) -> Reading[None]:
    """Reads ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen)."""
    del schemas
    while mark := (yield from reader.until(("<tool_call>",), TEXT)):
        if not (yield from reader.json_call()):
            reader.emit(TEXT, mark)
        yield from reader.starts("</tool_call>")


def qwen_coder(reader: TextReader, schemas: Schemas) -> Reading[None]:
    """Reads ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` (Qwen3-Coder)."""
    while mark := (yield from reader.until(("<tool_call>", "<function="), TEXT)):
        if mark == "<tool_call>" and not (yield from reader.starts("<function=")):
            reader.emit(TEXT, mark)
            continue
        name, ended = yield from reader.collect((">",))
        if not ended:
            reader.emit(TEXT, f"<function={name}")
            return
        fields = _Fields(reader, schemas.get(name.strip(), {}))
        reader.call(name.strip(), "{")
        while mark := (yield from reader.starts("<parameter=", "</function>")):
            if mark == "</function>":
                reader.emit(ARGUMENTS, "}")
                break
            key, ended = yield from reader.collect((">",))
            value, closed = yield from reader.collect(("</parameter>",))
            if not closed:
                reader.emit(TEXT, f"<parameter={key}{ended}{value}")
                return
            fields.add(key, value.removeprefix("\n").removesuffix("\n"))
        yield from reader.starts("</tool_call>")


def glm(reader: TextReader, schemas: Schemas) -> Reading[None]:
    """Reads ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""
    ends = ("<arg_key>", "</tool_call>")
    while begun := (yield from reader.until(("<tool_call>",), TEXT)):
        name, mark = yield from reader.collect(ends)
        if not mark:
            reader.emit(TEXT, begun + name)
            return
        fields = _Fields(reader, schemas.get(name.strip(), {}))
        reader.call(name.strip(), "{")
        while mark == "<arg_key>":
            key, closed = yield from reader.collect(("</arg_key>",))
            opened = yield from reader.starts("<arg_value>")
            value, ended = yield from reader.collect(("</arg_value>",))
            if not ended:
                reader.emit(TEXT, mark + key + closed + opened + value)
                return
            fields.add(key.strip(), value)
            mark = yield from reader.starts(*ends)
        if mark:
            reader.emit(ARGUMENTS, "}")


class _Fields:
    """Tells a call's arguments one at a time, from values that are written without JSON's quotes.

    Args:
        schema: says which arguments are strings; other values are read as JSON if they are JSON.
    """

    def __init__(self, reader: TextReader, schema: Mapping[str, Any]):
        given = schema.get("properties")
        self._types = given if isinstance(given, Mapping) else {}
        self._reader = reader
        self._is_first = True

    def add(self, key: str, text: str) -> None:
        """Tells an argument."""
        declared = self._types.get(key)
        is_text = isinstance(declared, Mapping) and declared.get("type") == "string"
        value = None if is_text else json_or_none(text.strip())
        if value is None and (is_text or text.strip() != "null"):
            value = text
        said = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        self._reader.emit(ARGUMENTS, said if self._is_first else f", {said}")
        self._is_first = False


_MISTRAL = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")


def mistral(reader: TextReader, schemas: Schemas) -> Reading[None]:
    """Reads ``[TOOL_CALLS]`` before a JSON list of calls, or before ``NAME[ARGS]{...}`` each."""
    del schemas
    while mark := (yield from reader.until(("[TOOL_CALLS]",), TEXT)):
        if (yield from reader.starts("[")):
            is_call = yield from reader.json_call()
            if not is_call:
                reader.emit(TEXT, f"{mark}[")
            while is_call and (yield from reader.starts(",")):
                is_call = yield from reader.json_call()
            yield from reader.starts("]")
        elif not (yield from reader.json_call()):
            header = yield from reader.match(_MISTRAL)
            if header is None:
                reader.emit(TEXT, mark)
            else:
                reader.call(header[1])
                yield from reader.arguments()


def llama_json(reader: TextReader, schemas: Schemas) -> Reading[None]:
    """Reads an answer that is ``{"name": ..., "parameters": {...}}``, or several after ``;``."""
    del schemas
    mark = yield from reader.starts("<|python_tag|>")
    while (yield from reader.json_call()):
        mark = yield from reader.starts(";", ",")
        if not mark:
            return
    reader.emit(TEXT, mark)


_PYTHON_CALL = re.compile(r"\s*([A-Za-z_][\w.]*)\(")


def pythonic(reader: TextReader, schemas: Schemas) -> Reading[None]:
    """Reads an answer that is a Python list of calls: ``[look(city="Rome", days=2), ...]``."""
    yield from reader.starts("<|python_start|>", "<|python_tag|>")
    opened = yield from reader.starts("[")
    if not opened:
        return
    is_first = True
    while True:
        text = yield from _balanced(reader)
        called = _python_call(text, schemas)
        if called is None:
            reader.text = (opened if is_first else "") + text + reader.text
            return
        reader.call(*called)
        is_first = False
        if not (yield from reader.starts(",")):
            break
    yield from reader.starts("]")
    yield from reader.starts("<|python_end|>")


def _balanced(reader: TextReader) -> Reading[str]:
    """Returns the text of the call that comes next, up to its closing bracket."""
    seen, depth, quote = 0, 0, ""
    is_escaped = False
    while True:
        for at in range(seen, len(reader.text)):
            character = reader.text[at]
            if is_escaped:
                is_escaped = False
            elif quote:
                is_escaped = character == "\\"
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
                if depth <= 0:
                    return reader.take(at + 1 if depth == 0 else at)
            elif not depth and not re.match(r"[\s\w.]", character):
                return reader.take(at)
        seen = len(reader.text)
        if not (yield from reader.more()):
            return reader.take(seen)


_NAMES = {"true": True, "false": False, "null": None}


def _python_call(text: str, schemas: Schemas) -> tuple[str, str] | None:
    """Returns a Python call's name and arguments as JSON; None unless it calls a known tool."""
    named = _PYTHON_CALL.match(text)
    if named is None or named[1] not in schemas:
        return None
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            parsed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(parsed, ast.Call):
            return None
        names = [*(schemas[named[1]].get("properties") or {})]
        values = dict(zip(names, map(_literal, parsed.args), strict=False))
        values |= {str(each.arg): _literal(each.value) for each in parsed.keywords}
        return named[1], json.dumps(values, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Constants(ast.NodeTransformer):
    """Replaces JSON's names of constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Returns the constant that a name stands for, or the name."""
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_Constants().visit(node))


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
_DEEPSEEK_END, _DEEPSEEK_LAST = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_HEADER = re.compile(
    rf"\s*(?:function{_DEEPSEEK[2]}([^\n<]+)\n```json\s*|([^<]+?){_DEEPSEEK[2]}\s*)(?=\{{)"
)


def deepseek(reader: TextReader, schemas: Schemas) -> Reading[None]:
    """Reads the calls of DeepSeek-V3, R1 and V3.1 between their own special tokens."""
    del schemas
    while mark := (yield from reader.until(_DEEPSEEK[:1], TEXT)):
        while begun := (yield from reader.starts(_DEEPSEEK[1], _DEEPSEEK_LAST)):
            if begun == _DEEPSEEK_LAST:
                break
            header = yield from reader.match(_DEEPSEEK_HEADER)
            if header is None:
                reader.emit(TEXT, mark + begun)
                break
            mark = ""
            reader.call((header[1] or header[2]).strip())
            yield from reader.arguments()
            yield from reader.starts("```")
            yield from reader.starts(_DEEPSEEK_END)
        else:
            reader.emit(TEXT, mark)


_TO = r"(?:\s*to=(?:functions\.)?([\w.\-]+))?"
_HARMONY_HEADER = re.compile(
    rf"(?:<\|start\|>assistant{_TO})?\s*<\|channel\|>\s*(analysis|commentary|final){_TO}"
    r"\s*(?:<\|constrain\|>)?\s*(?:json|code|text)?\s*"
)
_BEGINS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


def harmony(reader: TextReader, schemas: Schemas) -> Reading[None]:
    """Reads the channels of gpt-oss: analysis is reasoning, messages to functions are calls."""
    del schemas
    mark = ""
    while mark or (mark := (yield from reader.until(_BEGINS, TEXT))):
        text, ended = yield from reader.collect(("<|message|>",))
        header = _HARMONY_HEADER.fullmatch(mark + text)
        if not ended or header is None:
            reader.emit(TEXT, mark + text + ended)
            mark = ""
            continue
        recipient = header[1] or header[3]
        if recipient:
            reader.call(recipient)
            kind = ARGUMENTS
        else:
            kind = REASONING if header[2] == "analysis" else TEXT
        mark = yield from reader.until(_ENDS, kind)
        mark = mark if mark == "<|start|>" else ""


def thinking(reader: TextReader, marks: tuple[str, str], *, is_open: bool) -> Reading[None]:
    """Reads the reasoning before an answer, between two marks.

    Args:
        is_open: the prompt ends with the first mark.
    """
    if is_open or (yield from reader.starts(marks[0])):
        reader.follows_marker = True
        yield from reader.until(marks[1:], REASONING)
