"""Chat templates against the reference implementation's renderings (tests/golden/hf/chat.json)."""

import copy
import hashlib
import json
import pathlib

import pytest
import tokenizers
from golden.text import template_cases
from tokenizers import models, pre_tokenizers

from jaxinfra.data import chat_template
from jaxinfra.data.chat_template import ChatTemplate, load_chat_template
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import ConfigError, DataError, JaxinfraError

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/hf/chat.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("name", sorted(CASES))
def test_render(name):
    case = CASES[name]
    template = ChatTemplate(case["template"], variables=GOLDEN["tokens"])

    def rendered():
        return template.render(
            case["messages"], add_generation_prompt=case["add_generation_prompt"]
        )

    if case["text"] is None:
        with pytest.raises(DataError, match="roles must alternate"):
            rendered()
    else:
        assert rendered() == case["text"]


def write(path, **settings):
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


HOSTILE = {
    "{% for i in range(9999) %}{% for j in range(9999) %}"
    "{% endfor %}{% endfor %}": "not end within",
    "{% set x = 'a' * 2000000000 %}{{ x | length }}": "it takes more than 1,073,741,824 bytes",
    "{{ messages[0].role * 25000000 }}": "it makes 100,000,000 characters",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "it calls itself without end",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages[0].content.nothing.more }}": "has no attribute",
    "{{ 10.0 ** 400 }}": "OverflowError",
    "{{ '\\ud800' }}": "half of a character",
    "{{ messages | map(attribute=5) | list | sum }}": "the chat template refuses",
    "{{ ().__class__.__base__.__subclasses__() }}": "unsafe",
    "{{ ''.__class__.__mro__ }}": "refuses the messages",
    "{{ messages.append(1) }}": "refuses the messages",
    "{{ messages[0].update(role='x') }}": "refuses the messages",
    "{{ cycler.__init__.__globals__ }}": "refuses the messages",
}


@pytest.mark.parametrize("program", HOSTILE)
def test_hostile_templates_end_in_one_line(program, monkeypatch):
    template = ChatTemplate(program, variables={})
    if "not end within" in HOSTILE[program]:
        monkeypatch.setattr(chat_template, "_RENDER_S", 0.2)
    with pytest.raises(DataError) as caught:
        template.render(HELLO)
    assert HOSTILE[program] in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    # The next one is served as if nothing had been.
    assert ChatTemplate("{{ messages[0].role }}", variables={}).render(HELLO) == HELLO[0]["role"]


def test_where_templates_are_found(tmp_path):
    with pytest.raises(ConfigError, match="ships no chat template"):
        load_chat_template(tmp_path)
    write(tmp_path, chat_template="{{ bos_token }}one", bos_token={"content": "<b>"})
    assert load_chat_template(tmp_path).render(HELLO) == "<b>one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]
    write(tmp_path, chat_template=named)
    assert load_chat_template(tmp_path).render(HELLO) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert load_chat_template(tmp_path).render(HELLO) == "three"


def test_broken_templates_are_refused():
    with pytest.raises(ConfigError, match="no Jinja program"):
        ChatTemplate("{% for %}", variables={})


def test_special_tokens_of_a_template_become_tokens(tmp_path):
    vocab = {"<|user|>": 0, "hello": 1, "[UNK]": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|user|>"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|user|>"}')
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = ChatTemplate("{{ '<|user|> ' + messages[0].content }}", variables={})
    read = Tokenizer.load(tmp_path / "tokenizer.json")
    assert template.encode(read, HELLO) == [0, 1]
    # A user who spells one out gets text: the words of this tokenizer know none.
    assert template.encode(read, [{"role": "user", "content": "<|user|> hello"}]) == [0, 2, 2, 2, 1]


TALKS = template_cases.conversations(200)
RENDERED = json.loads(pathlib.Path(template_cases.__file__).with_name("templates.json").read_text())


@pytest.mark.parametrize("name", template_cases.TEMPLATES)
def test_conversations_are_rendered_as_by_the_reference(name):
    template = ChatTemplate(template_cases.TEMPLATES[name], variables=template_cases.TOKENS)

    def hashed(talk):
        try:
            text = template.render(talk["messages"], tools=talk["tools"])
        except DataError:
            return "-"
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    assert [hashed(talk) for talk in TALKS] == RENDERED[name].split()


FEATURES = json.loads(pathlib.Path(template_cases.__file__).with_name("features.json").read_text())


@pytest.mark.parametrize(("source", "wanted"), FEATURES["cases"])
def test_features_of_templates_are_those_of_the_reference(source, wanted):
    try:
        template = ChatTemplate(source, variables=FEATURES["variables"])
        text = template.render(copy.deepcopy(FEATURES["messages"]), tools=FEATURES["tools"])
    except JaxinfraError:
        text = None
    assert text == wanted


def rendered(program, message):
    return ChatTemplate(program, variables={}).render([message])


def test_no_content_is_nothing_and_arguments_are_values():
    said = {"role": "assistant", "content": None}
    assert rendered("{{ 'a' + messages[0].content + 'b' }}", said) == "ab"
    assert rendered("{{ messages[0].content is none }}{{ messages[0].content }}", said) == "True"
    assert rendered("{{ messages[0].content is string }}", said) == "False"
    call = {"function": {"name": "f", "arguments": '{"a": "é"}'}}
    said["tool_calls"] = [call]
    arguments = "messages[0].tool_calls[0].function.arguments"
    assert rendered(f"{{{{ {arguments}.a }}}} {{{{ {arguments} | tojson }}}}", said) == (
        'é {"a": "é"}'
    )
    # To templates that write them as they came, they are the text.
    assert rendered(f"{{{{ 'x' + {arguments} + 'y' }}}}{{{{ {arguments} }}}}", said) == (
        'x{"a": "é"}y{"a": "é"}'
    )
    call["function"]["arguments"] = "[1"
    with pytest.raises(DataError, match="are no JSON object"):
        rendered(f"{{{{ {arguments} }}}}", said)


def test_a_template_for_tools(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    write(tmp_path, chat_template=[{"name": n, "template": t} for n, t in named.items()])
    template = load_chat_template(tmp_path)
    assert (template.render(HELLO), template.render(HELLO, tools=tools)) == ("plain", "f")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    with pytest.raises(DataError, match="with tools only"):
        load_chat_template(tmp_path).render(HELLO)
    (tmp_path / "chat_template.jinja").write_text("one")
    template = load_chat_template(tmp_path)
    assert (template.render(HELLO), template.render(HELLO, tools=tools)) == ("one", "file")
