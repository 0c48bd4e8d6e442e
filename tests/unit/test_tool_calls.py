"""Tool calls and reasoning in answers: read alike in any pieces, and without loss of text."""

import itertools
import json

import numpy as np
import pytest
from scripted_server import MARKS, spelled_calls, tokenizer_of_marks, words

from jaxinfra.serving.engine.grammar import GrammarCompiler, StructureKind
from jaxinfra.serving.tools.forms import TOOL_FORMS, answer_parser, calls_grammar, form_of
from jaxinfra.serving.tools.reader import PieceKind

SCHEMAS = {
    "look": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 4},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "stop": {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "how": {"enum": ["x", "y"]}},
        "additionalProperties": False,
    },
}
THINK = ("<think>", "</think>")
CALLS = [
    ("look", {"city": "Rome or {else}", "days": 2}),
    ("look", {"city": 'a "b" \\ c', "days": 0}),
]
# Words of the forms themselves, which are no text.
OF_FORMS = words(
    " ".join(f"{f.before} {f.after} {f.opened} {f.closed} {f.field}" for f in TOOL_FORMS.values())
)
OF_FORMS |= words(" ".join(MARKS)) | {
    "look",
    "parameters",
    "type",
    "analysis",
    "final",
    "assistant",
    "commentary",
}


def read(form, pieces, *, thinking=None, is_open=False):
    """Text, reasoning and calls of an answer that comes in pieces."""
    parser = answer_parser(TOOL_FORMS[form], SCHEMAS, thinking, is_open=is_open)
    told = [each for piece in pieces for each in parser.push(piece)] + parser.end()
    text = {kind: "".join(p.text for p in told if p.kind is kind) for kind in PieceKind}
    calls = []
    for piece in told:
        if piece.kind is PieceKind.CALL:
            calls.append([piece.text, ""])
        elif piece.kind is PieceKind.ARGUMENTS:
            calls[-1][1] += piece.text
    return text[PieceKind.TEXT], text[PieceKind.REASONING], calls


def cut(text, places):
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_calls_are_read_in_any_pieces(form):
    calls = CALLS[: 1 if TOOL_FORMS[form].writes_one else 2]
    answer = spelled_calls(form, calls)
    for size in (1, 3, 7, len(answer)):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        text, reasoning, found = read(form, pieces)
        assert (text, reasoning) == ("", "")
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_plain_text_comes_unchanged(form):
    answer = ' \n It says {"a": [1]} <b>, look(1), and <tool. \n'
    assert read(form, [*answer]) == (answer, "", [])


@pytest.mark.parametrize("form", [name for name in TOOL_FORMS if name != "openai"])
@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_is_told_apart_before_calls(form, is_open):
    call = spelled_calls(form, CALLS[:1])
    answer = f"{'' if is_open else THINK[0]}\nHm, {{x}}\n{THINK[1]}\n\n{call}"
    text, reasoning, found = read(form, [*answer], thinking=THINK, is_open=is_open)
    assert (text, reasoning, len(found)) == ("", "Hm, {x}", 1)


BEFORE = ("", "Well then.\n", 'brackets [and] {braces} "quotes" ')
VALUES = ("plain words", 'quo"ted', "new\nline", 17, None, {"deep": ["list"]}, "</tool_call>")
NOISE = ("", "noise", "}", '"', "]", "<", "<tool_call>", "[TOOL_CALLS]", "<|message|>")


@pytest.mark.parametrize("number", [40, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", TOOL_FORMS)
def test_partial_calls_lose_no_text(form, number):
    """Answers with calls, cut anywhere, with something wrong anywhere, in any pieces."""
    rng = np.random.default_rng(len(form))

    def one(of):
        return of[rng.integers(len(of))]

    for _ in range(number):
        arguments = {key: one(VALUES) for key in ("city", "days", "other") if rng.random() < 0.7}
        whole = one(BEFORE) + spelled_calls(form, [("look", arguments)])
        at, end = rng.integers(0, len(whole) + 1, 2)
        answer = (whole[:at] + one(NOISE) + whole[at:])[: end if rng.random() < 0.8 else None]
        found = read(form, cut(answer, rng.integers(0, len(answer) + 1, 6)))
        assert found == read(form, [answer])
        text, reasoning, calls = found
        kept = " ".join([text, reasoning, *(part for call in calls for part in call)])
        # Of a mark that is cut or broken, what is left of it may be read as part of the form.
        texts = [w for w in words(answer.replace("\\n", " ")) if not any(w in o for o in OF_FORMS)]
        lost = [word for word in texts if word not in kept]
        assert not lost, (answer, found)


@pytest.mark.parametrize("form", TOOL_FORMS)
@pytest.mark.parametrize("only_one", [True, False], ids=["one", "several"])
def test_the_grammar_admits_calls_of_tools_alone(form, only_one, compiler):
    """A random walk within the grammar is read back as calls that fit the tools' schemas."""
    tokenizer, compile_ = compiler
    grammar = calls_grammar(TOOL_FORMS[form], SCHEMAS, tokenizer.id_of, only_one=only_one)
    rng = np.random.default_rng(len(form))
    num_read = 0
    for _ in range(4):
        walk, tokens = compile_(StructureKind.GRAMMAR, grammar), []
        while not walk.is_complete and len(tokens) < 200:
            allowed = np.flatnonzero(np.unpackbits(walk.mask().view(np.uint8), bitorder="little"))
            if 256 in allowed:
                break
            likely = [each for each in allowed if each > 256 or 32 <= each < 127] or [*allowed]
            tokens.append(int(rng.choice(likely)))
            walk.advance(tokens[-1])
        else:
            if not walk.is_complete:
                continue  # a text that has not come to its end
        text, _, calls = read(form, [tokenizer.decode(tokens)])
        assert text == ""
        assert calls
        assert not only_one or len(calls) == 1
        num_read += 1
        for name, arguments in calls:
            values = json.loads(arguments)
            assert values.keys() <= SCHEMAS[name]["properties"].keys()
            assert name == "stop" or isinstance(values["city"], str)
    assert num_read


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    tokenizer = tokenizer_of_marks(tmp_path_factory.mktemp("tokenizer"))
    made = GrammarCompiler(tokenizer, num_ids=tokenizer.vocab_size, eos_ids=[256])
    return tokenizer, made.compile


def test_templates_show_their_form():
    for form in TOOL_FORMS.values():
        assert form_of(f"{{# {' '.join(form.marks)} #}}") is form
    assert form_of("{{ messages }}") is None
