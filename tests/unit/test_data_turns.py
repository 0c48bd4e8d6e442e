"""Turns of the model under templates of many kinds, against renderings by Jinja itself."""

import copy
import json

import jinja2
import numpy as np
import pytest
from golden.text import template_cases, token_cases

from jaxinfra.config.data import DataConfig, DataFormat, TokenizerConfig, Turns
from jaxinfra.data.chat import ChatEncoder
from jaxinfra.data.chat_template import ChatTemplate
from jaxinfra.data.corpora import first_prompt
from jaxinfra.data.pairs import CompletionEncoder, PairEncoder
from jaxinfra.data.readers import Document
from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.errors import ConfigError, DataError

TOKENIZER = bytes_tokenizer()
# Drops thoughts of turns before the last question, and closes empty ones where none are wanted.
THINKS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% if loop.index0 > ns.last %}<think>"
    "{{ m.content.split('</think>')[0] if '</think>' in m.content else '' }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not "
    "enable_thinking %}<think></think>{% endif %}{% endif %}"
)
CHANGING = {
    "thoughts dropped": THINKS,
    "asks for thoughts that it drops": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>"
    "{{ (m.content or '').split('</think>')[-1] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}",
    "the system's text in the last question": "{% for m in messages %}{% if m.role == 'user' %}["
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}"
    "{{ m.content }}]{% elif m.role == 'assistant' %} {{ m.content }};{% endif %}{% endfor %}",
    "an end of the whole": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '</s>' }}",
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "so: 1</think>ONE"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "<div>TWO"},
    {"role": "assistant", "content": "aha</think>TOO"},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "hm</think>THREE"},
]


def by_jinja(program):
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)

    def refuse(message):
        raise jinja2.TemplateError(message)

    template = environment.from_string(program, globals={"raise_exception": refuse})

    def render(messages, *, asks, **more):
        messages = copy.deepcopy(messages)
        return template.render(
            messages=messages, add_generation_prompt=asks, **(template_cases.TOKENS | more)
        )

    return render


def documents(program, messages, *, turns=Turns.PREFIXES, settings=None, **more):
    template = ChatTemplate(program, variables=template_cases.TOKENS).with_settings(settings or {})
    encoder = ChatEncoder(template, TOKENIZER, turns=turns)
    text = json.dumps({"messages": messages, **more})
    (parts,) = encoder.encode_batch([Document(name="x:1", text=text)])
    found = []
    for part in parts:
        data = bytes([part.first, *part.tokens.tolist()])
        found.append((data, np.concatenate([[False], part.counted])))
    return found, encoder.notes()


def check_turns(program, messages, found, **variables):
    """Each turn counts once, after the text that asks for it; nothing else counts."""
    render, total = by_jinja(program), 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:number], asks=True, **variables)
        whole = render(messages[: number + 1], asks=False, **variables)
        if not whole.startswith(prompt):
            said = message["content"]
            prompt = whole[: whole.rindex(said if said in whole else said.split("</think>")[-1])]
        first, last = len(prompt.encode()), len(whole.encode())
        total += last - first
        where = [d for d, _ in found if d.startswith(whole.encode())]
        assert where, f"no text has message {number} as it was asked for"
        assert any(
            mask[first:last].all()
            for data, mask in found
            if data.startswith(whole.encode()) and (first == last or mask[first])
        )
    assert sum(int(mask.sum()) for _, mask in found) == total


@pytest.mark.parametrize("name", template_cases.TEMPLATES)
def test_turns_count_as_they_were_asked_for(name):
    """In the twenty templates: conversations of several turns, with systems, tools and nulls."""
    program, checked = template_cases.TEMPLATES[name], 0
    for talk in template_cases.conversations(30):
        messages = [m for m in talk["messages"] if m["role"] != "tool" and "tool_calls" not in m]
        messages = [
            m for m in messages if name != "mixtral, in turns" or m["role"] in ("user", "assistant")
        ]
        said = [m for m in messages if m["role"] == "assistant"]
        if len(said) < 2 or any(isinstance(m["content"], list) for m in messages):
            continue
        found, _ = documents(program, messages)
        check_turns(program, messages, found, tools=None)
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize("name", CHANGING)
def test_templates_that_change_earlier_text_train_every_turn(name):
    program = CHANGING[name]
    found, notes = documents(program, TALK)
    check_turns(program, TALK, found)
    assert len(found) > 1 or "begin otherwise" in notes[0]
    assert len(found) <= 4


def test_an_end_token_after_the_end_of_a_message_needs_no_text_of_its_own():
    """Phi's templates add the end token after the last message only."""
    program = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt else eos_token }}"
    )
    ((data, mask),), _ = documents(program, TALK)
    said = [m["content"] + "<end>" for m in TALK if m["role"] == "assistant"]
    assert bytes(np.frombuffer(data, np.uint8)[mask]).decode() == "".join(said) + "</s>"


def test_turns_that_one_text_asks_for_share_it_and_splits_are_counted():
    found, notes = documents(THINKS, TALK)
    # Both answers to the second question keep their thoughts until the third is asked.
    assert [mask.sum() for _, mask in found] == [
        len(b"<think>hm</think>THREE</>"),
        len(b"<think></think><div>TWO</><think>aha</think>TOO</>"),
        len(b"<think>so: 1</think>ONE</>"),
    ]
    assert "1 of 1 conversations are 3 documents" in notes[0]
    ((data, mask),), notes = documents(THINKS, TALK, turns=Turns.LAST)
    assert bytes(np.frombuffer(data, np.uint8)[mask]) == b"<think>hm</think>THREE</>"
    assert notes[0] == "3 turns of the model before the last do not count (data.turns=last)"


@pytest.mark.parametrize("by_row", [False, True])
def test_settings_of_a_template_reach_it(by_row):
    talk, settings = [*TALK[:2], {"role": "assistant", "content": "1"}], {"enable_thinking": False}
    given = {"chat_template_kwargs": settings} if by_row else {"settings": settings}
    ((data, mask),), _ = documents(THINKS, talk, **given)
    check_turns(THINKS, talk, [(data, mask)], **settings)
    assert bytes(np.frombuffer(data, np.uint8)[mask]) == b"1</>"
    with pytest.raises((ConfigError, DataError), match="'enable_thinkin'; did you mean 'enable_t"):
        documents(THINKS, talk, settings={"enable_thinkin": True})
    with pytest.raises(ConfigError, match="no setting 'messages'"):
        documents(THINKS, talk, settings={"messages": []})


def test_conversations_may_begin_with_different_tokens():
    program = template_cases.TEMPLATES["chatml"].replace("<|im_start|>", "")
    ((data, mask),), _ = documents(program, TALK)
    assert data.startswith(b"system\nBe brief.")
    check_turns(program, TALK, [(data, mask)])


def rows(encoder, *given):
    documents = [Document(name="x", text=json.dumps(row)) for row in given]
    return encoder.encode_batch(documents)


CHAT = ChatEncoder(
    ChatTemplate(template_cases.TEMPLATES["chatml"], variables=template_cases.TOKENS), TOKENIZER
)


def test_prompts_with_completions_of_messages_or_of_text():
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    asked = [user, said, user]
    pairs = rows(
        CHAT,
        {"prompt": asked, "completion": [said]},
        {"prompt": "a", "completion": "b", "system": "s"},
        {"prompt": "a", "completion": said, "messages": None},
    )
    assert [each.text for (each,) in pairs] == ["b<|im_end|>\n"] * 3
    assert bytes(pairs[1][0].tokens.tolist()).startswith(b"|im_start|>system\ns")
    ((each,),) = rows(CompletionEncoder(TOKENIZER), {"prompt": "ab", "completion": " cd"})
    assert each.tokens.tolist() == [*b"ab cd", TOKENIZER.eos_id]
    assert each.counted.tolist() == [False] * 2 + [True] * 4
    with pytest.raises(DataError, match=r"x: completion is list; .*give --chat"):
        rows(CompletionEncoder(TOKENIZER), {"prompt": "ab", "completion": [said]})


def test_a_sample_begins_with_the_first_prompt(tmp_path):
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    kinds = {
        "chat": {"messages": [user, said, user, said]},
        "completions": {"prompt": "ab", "completion": "c"},
        "preferences": {"chosen": "ab c", "rejected": "ab d"},
    }
    found = {}
    for kind, row in kinds.items():
        file = tmp_path / f"{kind}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        config = DataConfig(
            source=str(file),
            format=DataFormat(kind),
            chat_template="m" if kind == "chat" else None,
            tokenizer=TokenizerConfig(kind="bytes"),
        )
        found[kind] = first_prompt(config)
    assert found.pop("chat").messages == [user]
    assert found == {"completions": "ab", "preferences": "ab"}
    assert first_prompt(DataConfig()) == "def "
    assert first_prompt(DataConfig(source="texts")) == ""


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Q: sky? A: It is blue.", "Q: sky? A: It is green.", "Q: sky? A: It is"),
        ("Hi: like", "Hi: love it", "Hi:"),
        ("Hi: yes", "Hi: yes!", "Hi:"),
        ("Hi\n\nA", "Hi\n\nB", "Hi\n\n"),
        ("one", "two", ""),
    ],
)
def test_a_prompt_that_pairs_begin_with(chosen, rejected, prompt):
    (pair,) = rows(PairEncoder(TOKENIZER, None), {"chosen": chosen, "rejected": rejected})
    for each, text in zip(pair, (chosen, rejected), strict=True):
        assert bytes(each.tokens[:-1].tolist()).decode() == text
        assert each.text == text.removeprefix(prompt)
        assert not each.counted[: len(prompt)].any()
        assert each.counted[len(prompt) :].all()


GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_a_turn_that_the_next_one_ends_learns_to_stop_there(tmp_path):
    token_cases.write(
        tmp_path, {"settings": token_cases.NAMED | token_cases.listed(260, "<|user|>")}
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 260]}')
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    talk = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]

    def counted(program):
        encoder = ChatEncoder(ChatTemplate(program, variables=template_cases.TOKENS), tokenizer)
        text = json.dumps({"messages": talk})
        ((part,),) = encoder.encode_batch([Document(name="x:1", text=text)])
        return part.tokens[part.counted].tolist(), encoder.notes()

    assert counted(GLM) == ([97, 260, 97, 260], [])
    closed = GLM.replace("{{ m.content }}", "{{ m.content }}{{ eos_token if m.role != 'user' }}")
    assert counted(closed) == ([97, 257, 97, 257], [])
    marked = GLM.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    marked = marked.replace("{% gen", "{% if m.role == 'user' %}u{% else %}{% gen")
    tokens, (note,) = counted(
        marked.replace("{% endgeneration %}", "{% endgeneration %}{% endif %}")
    )
    assert tokens == [97, 97]
    assert "2 turns of the model have no end token that counts" in note
