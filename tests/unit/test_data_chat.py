"""Conversations: what counts is what the model says, exactly, in every way of telling it."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from chat_model import CHATML, write_tokenizer

from jaxinfra.config.data import DataConfig, DataFormat, TokenizerConfig, TokenizerKind
from jaxinfra.data.chat import ChatEncoder
from jaxinfra.data.chat_template import ChatTemplate
from jaxinfra.data.corpus import open_corpus
from jaxinfra.data.heldout import HeldoutBatches
from jaxinfra.data.packing import PackedWindows
from jaxinfra.data.readers import Document
from jaxinfra.data.turns import turn_renderings
from jaxinfra.errors import ConfigError, DataError

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Leaves out what the model said before, as templates of models that think aloud do.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}<|im_start|>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi? <|im_end|>"},
    {"role": "assistant", "content": "Hello, näive one!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye bye"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def line(messages, **more):
    return Document(name="chats.jsonl:7", text=json.dumps({"messages": messages, **more}))


def encoded(tokenizer, program, messages):
    encoder = ChatEncoder(ChatTemplate(program, variables={}), tokenizer)
    ((result,),) = encoder.encode_batch([line(messages)])
    return encoder, result


def decoded(tokenizer, ids):
    return tokenizers.Tokenizer.from_str(tokenizer._json).decode(
        [int(i) for i in ids], skip_special_tokens=False
    )


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (CHATML, "Hello, näive one!<|im_end|>\nBye bye<|im_end|>\n"),
        (MARKED, "Hello, näive one!<|im_end|>Bye bye<|im_end|>"),
    ],
)
def test_exactly_the_models_turns_count(tokenizer, program, said):
    encoder, chat = encoded(tokenizer, program, TALK)
    assert encoder.bos_id == tokenizer.vocab_size - 2
    text = ChatTemplate(CHATML, variables={}).render(TALK, add_generation_prompt=False)
    assert decoded(tokenizer, [encoder.bos_id, *chat.tokens]) == text
    assert decoded(tokenizer, chat.tokens[chat.counted]) == said == chat.text


def test_both_ways_of_telling_agree(tokenizer):
    unmarked = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    ((marks,), (found,)) = (
        turn_renderings(ChatTemplate(program, variables={}), TALK, [2, 4])
        for program in (MARKED, unmarked)
    )
    (text, marked), (same, told) = (marks.text, marks.spans), (found.text, found.spans)
    assert text == same
    assert [first for first, _ in marked] == [first for first, _ in told]
    assert [text[last] for _, last in marked] == ["\n", "\n"], "told ones have it"
    assert [last + 1 for _, last in marked] == [last for _, last in told]


def test_the_prompt_is_tokenized_as_it_will_be_asked(tokenizer):
    """The tokens before a turn are those of the prompt alone, at every turn."""
    _, chat = encoded(tokenizer, CHATML, TALK)
    template = ChatTemplate(CHATML, variables={})
    for turn in (2, 4):
        (prompt,) = tokenizer.encode_rendered([template.render(TALK[:turn])])
        np.testing.assert_array_equal(chat.tokens[: len(prompt) - 1], prompt[1:])
        assert chat.counted[len(prompt) - 1]
        assert not chat.counted[len(prompt) - 2]


BAD = {
    "not JSON": "{",
    "no messages": '{"text": "x"}',
    "message 1 has no role": '{"messages": [{"content": "x"}]}',
    "message 2 (assistant) has content NoneType": json.dumps(
        {"messages": [TALK[1], {"role": "assistant", "content": None}]}
    ),
    "no message of role 'assistant'": json.dumps({"messages": TALK[:2]}),
    'tools: "x" is no list': json.dumps({"messages": TALK, "tools": "x"}),
    "each line must be one JSON object": "[1",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_lines_are_named(tokenizer, message):
    encoder = ChatEncoder(ChatTemplate(CHATML, variables={}), tokenizer)
    with pytest.raises(DataError) as caught:
        encoder.encode_batch([line(TALK), Document(name="chats.jsonl:8", text=BAD[message])])
    assert str(caught.value).startswith("chats.jsonl:8: ")
    assert message in str(caught.value)


def test_what_cannot_be_told_is_refused(tokenizer):
    cases = {
        "a token reaches across the start of the model's turn": (
            CHATML,
            [TALK[1], {"role": "assistant", "content": "\nHello"}],
        ),
        "refuses the messages": ("<|im_start|>{{ messages[7].role }}", TALK),
        "U+FDD0": (MARKED, [TALK[1], {"role": "assistant", "content": "\ufdd0"}]),
    }
    for message, (program, messages) in cases.items():
        if message == "refuses the messages":
            with pytest.raises(DataError, match=message):
                turn_renderings(ChatTemplate(program, variables={}), messages, [])
            continue
        with pytest.raises(DataError) as caught:
            encoded(tokenizer, program, messages)
        assert message in str(caught.value), str(caught.value)


def chat_config(tmp_path, *, num_chats=40, **changes):
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    write_tokenizer(directory / "tokenizer.json")
    (directory / "chat_template.jinja").write_text(CHATML)
    talks = [
        [TALK[1] | {"content": f"{i}?"}, TALK[2] | {"content": f"{i}!"}] for i in range(num_chats)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    settings = dict(
        source=str(file),
        heldout_fraction=0.3,
        format=DataFormat.CHAT,
        chat_template=str(directory),
        tokenizer=TokenizerConfig(kind=TokenizerKind.FILE, path=str(directory / "tokenizer.json")),
    )
    return DataConfig(**settings | changes)


def test_packed_and_held_out(tmp_path):
    corpus = open_corpus(chat_config(tmp_path), vocab_size=300, cache_dir=tmp_path / "cache")
    again = open_corpus(chat_config(tmp_path), vocab_size=300, cache_dir=tmp_path / "cache")
    assert corpus.train.fingerprint == again.train.fingerprint
    assert corpus.train.num_documents + corpus.heldout.num_documents == 40
    windows = PackedWindows(corpus.train, sequence_length=48, seed=0)
    batch = windows.batch(np.arange(windows.num_windows))
    assert set(np.unique(batch.weights)) == {0.0, 1.0}
    assert batch.weights.sum() == corpus.train.num_counted
    # What is asked for begins each segment; what counts is an answer to the question before it.
    starts = (
        (batch.positions == 0) & (batch.segment_ids >= 0) & (batch.tokens == corpus.train.bos_id)
    )
    assert starts.sum() >= corpus.train.num_documents - windows.num_windows
    said = decoded(corpus.tokenizer, batch.targets[batch.weights > 0])
    numbers = [int(text.split("!")[0]) for text in said.split("\n") if text.endswith("<|im_end|>")]
    assert len(numbers) >= corpus.train.num_documents - windows.num_windows
    assert corpus.tokenizer.eos_id not in batch.targets[batch.weights > 0]
    # Bits per byte are of what counts.
    texts = [text.decode() for text in corpus.heldout_documents()]
    assert all(text.endswith("!<|im_end|>\n") for text in texts)
    assert corpus.heldout.num_bytes == sum(len(text.encode()) for text in texts)
    batches = HeldoutBatches(corpus.heldout, sequence_length=16, batch_size=4)
    assert sum(each.weights.sum() for each in batches) == corpus.heldout.num_counted
    plain = dataclasses.replace(corpus.heldout, counted=None)
    assert 0 < corpus.heldout.num_counted < plain.num_counted == corpus.heldout.num_tokens


def test_settings_that_do_not_go_together(tmp_path):
    config = chat_config(tmp_path)
    with pytest.raises(ConfigError, match="goes with conversations and only with them"):
        dataclasses.replace(config, format=DataFormat.TEXT)
    with pytest.raises(ConfigError, match="kind=bpe"):
        dataclasses.replace(config, tokenizer=TokenizerConfig())
    (tmp_path / "chats.txt").write_text("x")
    other = dataclasses.replace(
        config, source=str(tmp_path / "chats.txt"), heldout_source=config.source
    )
    with pytest.raises(DataError, match=r"conversations are read from \.jsonl"):
        open_corpus(other, vocab_size=300, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("key", ["weight", "train", "training"])
def test_turns_of_weight_0_do_not_count(tokenizer, key):
    encoder = ChatEncoder(ChatTemplate(CHATML, variables={}), tokenizer)
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one", key: 0 if key == "weight" else False},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two", key: 1},
    ]
    ((found,),) = encoder.encode_batch([line(talk)])
    assert found.text == "two<|im_end|>\n"
    with pytest.raises(DataError, match=f"message 1 .user. has {key}=True"):
        encoder.encode_batch([line([{**talk[0], key: True}, *talk[1:]])])
