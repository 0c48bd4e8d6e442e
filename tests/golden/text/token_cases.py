"""Directories that say in many ways which tokens texts begin with and end at."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_end|>"]
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TYPED = FLAGS | {"__type": "AddedToken"}
BOTH = "<s> $A </s>"
NAMED = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
LISTED = {"added_tokens_decoder": {"257": {"content": "</s>", "special": True} | FLAGS}}
USER = {"__type": "AddedToken", "content": "<|user|>", "special": True} | FLAGS


def listed(token: int, name: str, **flags: bool) -> dict:
    """Settings that list a token beside those of the tokenizer."""
    names = {str(256 + i): {"content": each, "special": True} for i, each in enumerate(SPECIAL)}
    names[str(token)] = {"content": name, "special": True} | flags
    return {"added_tokens_decoder": {key: FLAGS | each for key, each in names.items()}}


CASES = {
    "named": {"settings": NAMED},
    "add_bos_token is of no account": {"settings": NAMED | {"add_bos_token": True}},
    "a template adds both": {"settings": NAMED, "template": BOTH},
    "settings against the template": {
        "settings": NAMED | {"add_bos_token": False, "add_eos_token": False},
        "template": BOTH,
    },
    "a template adds the end alone": {"settings": NAMED, "template": "$A </s>"},
    "the map renames": {"settings": NAMED, "map": {"eos_token": {"content": "<|im_end|>"} | FLAGS}},
    "the map is of no account": {"settings": NAMED | LISTED, "map": {"eos_token": "<|im_end|>"}},
    "a dict names": {"settings": NAMED | {"eos_token": {"content": "<|im_end|>"} | TYPED}},
    "the map names what settings leave out": {
        "settings": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": None},
        "map": {"eos_token": "</s>", "bos_token": "<s>"},
    },
    "truncated and padded": {"settings": NAMED, "max_length": 4},
    "a listed token is new": {"settings": NAMED | listed(260, "<|user|>")},
    "a listed word is new": {"settings": NAMED | listed(300, "<word>", special=False)},
    "a listed token takes white space": {
        "settings": NAMED | listed(259, "<|im_end|>", rstrip=True)
    },
    "further tokens": {"settings": NAMED | {"additional_special_tokens": ["<|user|>", "</s>"]}},
    "further tokens as dicts": {"settings": NAMED | {"extra_special_tokens": [USER]}},
    "further tokens by name": {"settings": NAMED | {"extra_special_tokens": {"u": "<|user|>"}}},
    "further tokens of the map": {"settings": NAMED, "map": {"extra_special_tokens": ["<|user|>"]}},
    "an end that is new": {"settings": NAMED | {"eos_token": "<|user|>"}},
    "a file of added tokens": {"settings": NAMED, "added": {"<word>": 260, "<|user|>": 261}},
}
SPELLED = "a<|user|>b <|im_end|> <word>c</s>"


def byte_tokenizer() -> tokenizers.Tokenizer:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in plain]
    vocab = {chr(b) if b in plain else chr(256 + other.index(b)): b for b in range(256)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.add_special_tokens(SPECIAL)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def write(directory: Path, case: dict) -> None:
    """The files of a case."""
    made = byte_tokenizer()
    if "template" in case:
        ids = [(name, 256 + SPECIAL.index(name)) for name in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(
            single=case["template"], special_tokens=ids
        )
    if "max_length" in case:
        made.enable_truncation(case["max_length"])
        made.enable_padding(length=case["max_length"], pad_id=258, pad_token="<pad>")
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(case["settings"]))
    if "added" in case:
        (directory / "added_tokens.json").write_text(json.dumps(case["added"]))
    if "map" in case:
        (directory / "special_tokens_map.json").write_text(json.dumps(case["map"]))
