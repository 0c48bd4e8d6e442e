"""Strict JSON and plain files: what is read, and what each refusal says."""

import os
from typing import Any, NotRequired, TypedDict

import pytest

from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.runtime.files import JSON_DEPTH, parse_json, read_bytes, read_json

WRONG = {
    "": "not JSON",
    "{": "not JSON",
    "[" * 100_000: "nested deeper than 200",
    '{"a":' * 100_000: "nested deeper than 200",
    "[]": "[] is no object",
    "null": "null is no object",
    '{"a": NaN}': "NaN is no number of JSON",
    '{"a": -Infinity}': "-Infinity is no number of JSON",
    '{"a": 1, "a": 2}': "the name 'a' stands twice in one object",
    b'{"a": "\xff"}': "not JSON ('utf-8' codec",
    '{"a": 1} {"b": 2}': "not JSON (Extra data",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: str(text)[:20])
def test_what_is_refused_says_why(text):
    with pytest.raises(ConfigError) as caught:
        parse_json(text, where="config.json")
    assert str(caught.value).startswith("config.json: ")
    assert WRONG[text] in str(caught.value)
    assert len(str(caught.value)) < 300


def test_brackets_in_text_are_no_depth():
    text = '{"a": "' + '[{\\"' * 1000 + '"}'
    assert parse_json(text, where="x") == {"a": '[{"' * 1000}
    deep = "[" * JSON_DEPTH + "]" * JSON_DEPTH
    assert parse_json(deep, where="x", holds=list)


class Shape(TypedDict):
    """What a test's file must hold."""

    name: str
    sizes: list[int]
    rates: NotRequired[dict[str, float]]
    rest: Any


GOOD = '{"name": "x", "sizes": [1], "rates": {"a": 1}, "rest": [null]}'
MISMATCHES = {
    '{"name": 5, "sizes": [], "rest": 1}': "name: 5 is no text",
    '{"name": "x", "sizes": [1, true], "rest": 1}': "sizes.1: true is no whole number",
    '{"name": "x", "sizes": [1.5], "rest": 1}': "sizes.0: 1.5 is no whole number",
    '{"name": "x", "rest": 1}': "sizes: null is no list",
    '{"name": "x", "sizes": [], "rates": [], "rest": 1}': "rates: [] is no object",
    '{"name": "x", "sizes": [], "rates": {"a": "1"}, "rest": 1}': 'rates.a: "1" is no number',
    '{"name": "x", "sizes": []}': "rest",
}


def test_types_are_checked_all_through():
    assert parse_json(GOOD, where="x", holds=Shape)["sizes"] == [1]
    for text, message in MISMATCHES.items():
        with pytest.raises(CheckpointError) as caught:
            parse_json(text, where="x.json", holds=Shape, error=CheckpointError)
        assert f"x.json: {message}" in str(caught.value)


def test_what_is_no_plain_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "large.json").write_text("[" + "1," * 10 + "1]")
    for path, message in (
        (tmp_path / "pipe.json", "is a named pipe; a plain file is needed"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "none.json", "cannot be read: No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_json(path)
    with pytest.raises(ConfigError, match=r"has 23 bytes; at most 10 are read"):
        read_bytes(tmp_path / "large.json", limit=10)
