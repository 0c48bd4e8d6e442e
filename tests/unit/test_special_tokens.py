"""Which tokens texts begin with and end at, against ``transformers`` (golden/text)."""

import json
from pathlib import Path

import pytest
import tokenizers
from golden.text import token_cases
from tokenizers import models, normalizers, pre_tokenizers

from jaxinfra.data.chat_template import load_chat_template
from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.serving.http.bodies import CompletionBody
from jaxinfra.serving.load import sampling_defaults
from jaxinfra.serving.sampling import SamplingConfig

GOLDEN = json.loads((Path(token_cases.__file__).with_name("tokens.json")).read_text())


@pytest.mark.parametrize("name", token_cases.CASES)
def test_roles_are_those_of_the_reference(tmp_path, name):
    token_cases.write(tmp_path, token_cases.CASES[name])
    read, wanted = Tokenizer.load(tmp_path / "tokenizer.json"), GOLDEN[name]
    assert (read.bos_id, read.eos_id) == (wanted["bos"], wanted["eos"])
    # A prompt begins as a text does and never ends with its end.
    prompt = wanted["ids"][: -1 if wanted["ids"][-1] == 257 else None]
    assert [*read.prefix_ids, *read.encode("abcdef")] == prompt
    assert read.end_ids[0] == wanted["eos"]
    copy = tmp_path / "copy"
    copy.mkdir()
    read.save(copy / "tokenizer.json")
    again = Tokenizer.load(copy / "tokenizer.json")
    assert (again.bos_id, again.eos_id) == (wanted["bos"], wanted["eos"])
    for each in (read, again):
        assert each.encode_rendered([token_cases.SPELLED])[0].tolist() == wanted["spelled"]


def test_text_ends_at_every_end_that_a_file_names(tmp_path):
    token_cases.write(tmp_path, token_cases.CASES["named"])
    (tmp_path / "config.json").write_text('{"eos_token_id": [100, 257]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 259}')
    assert Tokenizer.load(tmp_path / "tokenizer.json").end_ids == (257, 259, 100)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [100, 98]}}')
    assert Tokenizer.load(tmp_path / "tokenizer.json").end_ids == (257, 259, 100, 98)


def test_templates_read_the_names_that_the_map_gives(tmp_path):
    token_cases.write(tmp_path, token_cases.CASES["the map renames"])
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token }}")
    assert load_chat_template(tmp_path).render([{"role": "user"}]) == "<s><|im_end|>"


def test_users_spell_no_special_tokens_and_templates_do(tmp_path):
    token_cases.write(tmp_path, token_cases.CASES["named"])
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")

    def ids(program: str, *messages: tuple[str, object]) -> list[int]:
        (tmp_path / "chat_template.jinja").write_text(program)
        given = [{"role": role, "content": text} for role, text in messages]
        return load_chat_template(tmp_path).encode(tokenizer, given)

    plain = "<s>{{ messages[0].content }}</s>"
    assert ids(plain, ("user", "a</s>")) == [256, *b"a</s>", 257]
    assert ids(plain, ("tool", "</s><s>")) == [256, *b"</s><s>", 257]
    assert ids(plain, ("assistant", "a</s>")) == [256, *b"a", 257, 257]
    parts = "{% for p in messages[0].content %}<s>{{ p.text | trim }}{% endfor %}"
    both = [{"type": "text", "text": " <s>"}, {"type": "text", "text": "b"}]
    assert ids(parts, ("user", both)) == [256, *b"<s>", 256, *b"b"]
    # What a template takes apart itself is what it makes of it.
    split = "{{ messages[0].content.split('</s>')[1] }}<s>"
    assert ids(split, ("user", "a</s>b")) == [*b"b", 256]


def test_special_tokens_that_overlap_are_text_of_users_too():
    values = json.loads(bytes_tokenizer()._json)
    names = ["<|a|>", "<|a|><|b|>", "|>"]
    for token, name in enumerate(names, start=257):
        values["added_tokens"].append(values["added_tokens"][0] | {"id": token, "content": name})
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(values)))
    for text in (*names, "<|a|>|>", "x<|a|><|b|>|>"):
        (found,) = tokenizer.encode_rendered([tokenizer.guard(text)])
        assert found.tolist() == [*text.encode()]
    assert tokenizer.encode_rendered(["<|a|>|>"])[0].tolist() == [257, 259]


@pytest.mark.parametrize("lowercase", [False, True])
def test_normalized_special_tokens_are_text_of_users_too(lowercase):
    names = ["<s>", "</s>"]
    vocab = {piece: i for i, piece in enumerate([*names, *"<>/absS", "?"])}
    plain = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    plain.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    plain.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    library, given = (tokenizers.Tokenizer.from_str(plain.to_str()) for _ in range(2))
    for each in (library, given):
        each.add_special_tokens([tokenizers.AddedToken(name, normalized=True) for name in names])
    tokenizer = Tokenizer(given)
    (found,) = tokenizer.encode_rendered(["<s>a</s>"])
    assert found.tolist() == library.encode("<s>a</s>").ids
    for text in ("</s>", "a</S>", "<S>b </s>", ""):
        (found,) = tokenizer.encode_rendered([f"<s>{tokenizer.guard(text)}</s>"])
        assert found.tolist() == [0, *plain.encode(text).ids, 1]


def test_sampling_is_the_models_where_nobody_says(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    values = {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": None, "max_length": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    defaults = sampling_defaults(tmp_path)
    asked = CompletionBody(prompt="a", top_p=0.5)
    assert asked.sampling(defaults) == SamplingConfig(temperature=0.6, top_p=0.5)
    assert asked.sampling({}) == SamplingConfig(top_p=0.5)
    every = CompletionBody(prompt="a", top_k=-1, temperature=0)
    assert every.sampling({"top_k": 5}) == SamplingConfig(temperature=0)
