"""A server in this process whose engine says what a script has, through a real tokenizer."""

import json
import re
import types

import httpx2
import numpy as np

from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.serving.engine.requests import EndReason, RequestProgress
from jaxinfra.serving.engine.text import TextStream
from jaxinfra.serving.http.app import application
from jaxinfra.serving.http.service import Service, ServiceLimits
from jaxinfra.serving.tools.forms import TOOL_FORMS, marks_of

CONTEXT = 100_000
MORE_MARKS = ("<think>", "</think>", "<|start|>", "<|end|>", "<|message|>")
MARKS = sorted({mark for form in TOOL_FORMS.values() for mark in marks_of(form)} | {*MORE_MARKS})
TURNS = (
    "{% for m in messages %}[{{ m | tojson }}]{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}"
)


def tokenizer_of_marks(directory) -> Tokenizer:
    """Bytes, and a token of each mark: special ones where families have them so."""
    values = json.loads(bytes_tokenizer()._json)
    for token, mark in enumerate(MARKS, start=257):
        added = values["added_tokens"][0] | {"id": token, "content": mark}
        values["added_tokens"].append(added | {"special": "|" in mark or mark.startswith("[")})
    (directory / "tokenizer.json").write_text(json.dumps(values))
    return Tokenizer.load(directory / "tokenizer.json")


class ScriptedEngine:
    """In place of an ``EngineThread``: each request is answered by the next text of ``script``.

    A text must fit the request's structure; it may end with ``...``, which stands for a cut.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.script, self.requests = tokenizer, [], []
        limits = types.SimpleNamespace(context=CONTEXT)
        num_ids = tokenizer.vocab_size
        self.engine = types.SimpleNamespace(adapters=(), limits=limits, num_ids=num_ids)
        self.is_serving, self.stalled_s = True, 0.0

    def submit(self, requests, listen):
        for place, request in enumerate(requests):
            self.requests.append(request)
            self._answer(place, request, listen, self.script.pop(0))
        return [*requests]

    def cancel(self, tickets):
        raise AssertionError("all scripts come to their end")

    def _answer(self, place, request, listen, text):
        stream = TextStream(
            self.tokenizer,
            request.prompt_ids,
            request.stop,
            keeps_stop=request.keeps_stop,
            silent_ids=request.silent_ids,
        )
        whole = text.removesuffix("...")
        for token in self.tokenizer.encode_rendered([whole])[0].tolist():
            if request.constraint is not None:
                bits = np.unpackbits(request.constraint.mask().view(np.uint8), bitorder="little")
                said = self.tokenizer.spelled(token)
                assert bits[token], f"{said!r} of {whole!r} is outside of the structure"
                request.constraint.advance(token)
            piece = stream.push(token)
            if stream.is_stopped:
                end = EndReason.STOP
                progress = RequestProgress(0, tokens=(token,), text=piece, end=end)
                listen(place, progress._replace(stop=stream.found))
                return
            listen(place, RequestProgress(0, tokens=(token,), text=piece))
        end = EndReason.LENGTH if whole != text else EndReason.EOS
        listen(place, RequestProgress(0, tokens=(256,), text=stream.flush(), end=end))

    def prompt(self, number: int = -1) -> str:
        """The text of a request's prompt."""
        return self.tokenizer.decode(self.requests[number].prompt_ids)


class ScriptedServer:
    """The application over a scripted engine, and clients of it.

    Args:
        form: name of the tool form whose marks the chat template has; None: of none.
        ending: what the template ends with, for instance an opened ``<think>``.
    """

    def __init__(self, directory, *, form=None, ending="", **limits):
        marks = "" if form is None else " ".join(TOOL_FORMS[form].marks)
        template = f"{TURNS}{ending}{{# {marks} #}}"
        (directory / "chat_template.jinja").write_text(template)
        self.tokenizer = tokenizer_of_marks(directory)
        self.engine = ScriptedEngine(self.tokenizer)
        model = types.SimpleNamespace(
            tokenizer=self.tokenizer,
            defaults={},
            prompt=lambda text, spelled_out: self.tokenizer.encode(text).tolist(),
        )
        service = Service(
            model, self.engine, path=directory, name="m", limits=ServiceLimits(**limits)
        )
        self.app = application(service, api_key="key")

    def http(self) -> httpx2.AsyncClient:
        """A client of the application in this process."""
        transport = httpx2.ASGITransport(self.app)
        headers = {"Authorization": "Bearer key"}
        return httpx2.AsyncClient(transport=transport, base_url="http://m", headers=headers)


def spelled_call(form: str, name: str, arguments: dict) -> str:
    """A call as a family writes it."""
    made = TOOL_FORMS[form]
    text = made.before.replace("NAME", name)
    if made.field is None:
        return text + json.dumps(arguments, ensure_ascii=False) + made.after
    before, after, between = made.field
    values = [
        before.replace("KEY", key)
        + (value if isinstance(value, str) and not made.quotes_text else json.dumps(value))
        + after
        for key, value in arguments.items()
    ]
    return text + between.join(values) + made.after


def spelled_calls(form: str, calls: list[tuple[str, dict]]) -> str:
    """An answer that makes calls."""
    made = TOOL_FORMS[form]
    texts = [spelled_call(form, *call) for call in calls]
    return made.opened + made.separator.join(texts) + made.closed


def words(text: str) -> set[str]:
    """Words that tests look for, of at least four characters."""
    return set(re.findall(r"[a-zA-Z]{4,}", text))
