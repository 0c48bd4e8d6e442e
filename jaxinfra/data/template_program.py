"""The process that runs chat templates: Jinja programs that come with a model's weights.

``python -m jaxinfra.data.template_program`` reads requests and writes answers, one line of JSON
each. It is a separate process because no sandbox within a process bounds time or memory: a template
of a few characters may loop for ever or fill the memory. Its parent (``chat_template``) then kills
it.
"""

import datetime
import functools
import json
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, override

import jinja2
from jinja2 import defaults, ext, meta, nodes, parser, sandbox

MEMORY_BYTES = 1 << 30
TEXT_CHARACTERS = 1 << 26
# Around what generation blocks enclose. Unicode reserves them for such uses: no text has them.
_ASKED = "what a template may do with a text"
_FUNCTIONS = defaults.DEFAULT_NAMESPACE  # range, namespace and others of Jinja
BEGIN, END = "\ufdd0", "\ufdd1"


class Generation(ext.Extension):
    """The Jinja tag ``{% generation %}``, which renders the model's messages between two marks."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.is_used = False  # until a template has such a block

    @override
    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        self.is_used = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
        return [begin, *body, end]


def compiled(source: str) -> tuple[jinja2.Template, dict[str, Any]]:
    """Compiles a chat template; also returns whether it has ``{% generation %}`` and the names of
    the variables that it reads.
    """
    # As the reference implementation sets it up: templates depend on every one of these.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = _dumped
    environment.tests["none"] = lambda value: value is None or isinstance(value, NullContent)
    environment.tests["string"] = lambda value: type(value) is str
    for name in ("iterable", "sequence"):
        environment.tests[name] = functools.partial(_of_content, environment.tests[name])
    functions = {"raise_exception": _refuse, "strftime_now": _now}
    template = environment.from_string(source, globals=functions)
    generation = environment.extensions[Generation.identifier]
    assert isinstance(generation, Generation)
    names = meta.find_undeclared_variables(environment.parse(source)) - {*functions, *_FUNCTIONS}
    return template, {"marks": generation.is_used, "names": sorted(names)}


class NullContent(str):
    """The null content of a message: it prints as an empty text, and templates test it as None."""

    __slots__ = ()

    @override
    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NullContent)

    @override
    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    @override
    def __repr__(self) -> str:
        return "None"


def _dumped(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Formats a value as JSON, null content as null."""
    return json.dumps(_without_marks(value), ensure_ascii=ensure_ascii, **options)


def _of_content(test: Callable[..., Any], value: Any) -> bool:
    return not isinstance(value, NullContent) and test(value)


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_marks(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_marks(each) for each in value]
    return None if isinstance(value, NullContent) else value


class Arguments(dict[str, Any]):
    """A tool call's arguments from JSON text: templates read their values or print the text."""

    def __init__(self, text: str):
        try:
            super().__init__(json.loads(text or "{}"))
        except (TypeError, ValueError) as error:
            raise jinja2.TemplateError(
                f"the arguments {text[:80]!r} of a tool call are no JSON object"
            ) from error
        self.text = text

    @override
    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


def as_values(message: Any, *, join_parts: bool) -> Any:
    """Returns a message with values as templates read them: null content as ``NullContent``, tool
    arguments as ``Arguments``.

    Args:
        join_parts: join content in several parts into one text, a line for each.
    """
    if not isinstance(message, dict):
        return message
    content = message.get("content", "")
    if content is None:
        message["content"] = NullContent()
    elif isinstance(content, list) and join_parts:
        # As vLLM joins them: of words that end one part and begin the next, none become one.
        message["content"] = "\n".join(part["text"] for part in content)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        holder = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(holder, dict) and isinstance(holder.get("arguments"), str):
            holder["arguments"] = Arguments(holder["arguments"])
    return message


def reads_parts(template: jinja2.Template, variables: Mapping[str, Any]) -> bool:
    """Whether a template accepts content as text parts; some templates accept nothing else."""
    talk = [{"role": "user", "content": [{"type": "text", "text": _ASKED}]}]
    try:
        text = template.render({**variables, "messages": talk, "tools": None})
    except Exception:
        return False
    # Others write the parts as Python or JSON spells them.
    return _ASKED in text and "'type'" not in text and '"type"' not in text


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _answer(
    request: dict[str, Any], known: dict[str, tuple[jinja2.Template, dict[str, Any]]]
) -> Any:
    source = request["source"]
    if source not in known:
        known[source] = compiled(source)
    template, about = known[source]
    if "variables" not in request:
        return about
    variables = request["variables"]
    messages = variables["messages"]
    has_parts = any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in messages)
    join_parts = has_parts and not reads_parts(template, variables)
    variables["messages"] = [as_values(message, join_parts=join_parts) for message in messages]
    text = template.render(**variables)
    if len(text) > TEXT_CHARACTERS:
        raise jinja2.TemplateError(f"it makes {len(text):,} characters of one conversation")
    return text


def main() -> None:
    """Answers requests from the standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    known: dict[str, tuple[jinja2.Template, dict[str, Any]]] = {}
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            said = json.dumps({"value": _answer(json.loads(line), known)})
        except MemoryError:
            said = json.dumps({"error": f"it takes more than {MEMORY_BYTES:,} bytes"})
        except RecursionError:
            said = json.dumps({"error": "it calls itself without end"})
        except Exception as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            said = json.dumps({"error": f"{kind}{error}"})
        answers.write(said + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
