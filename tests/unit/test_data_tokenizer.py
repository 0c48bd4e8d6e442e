"""Tokenizers round-trip exactly, through files too, and stream whole characters."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from jaxinfra.data.tokenizer import (
    SEPARATOR,
    StreamDecoder,
    Tokenizer,
    bytes_tokenizer,
    split_at_lines,
    train_bpe,
)
from jaxinfra.errors import DataError

TEXTS = [
    "def f(x):\n    return x + 1\n\n\nclass Café:\n    '''naïve — ok'''\n" * 3,
    "for i in range(100):\n\tprint(i, '日本語', '🙂')\r\n" * 3,
]
BPE = train_bpe(TEXTS, vocab_size=400)
BYTES = bytes_tokenizer()
# No surrogates: half of a pair is not text.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab \n\t_.()é日🙂")


@pytest.fixture(params=[BPE, BYTES], ids=["bpe", "bytes"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
@hypothesis.given(text=ANY_TEXT)
@hypothesis.settings(deadline=None, derandomize=True)
def test_the_stream_is_the_text_in_whole_characters(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int32
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    hypothesis.assume("\ufffd" not in text)
    decoder = StreamDecoder(tokenizer)
    shown = [decoder.push(int(i)) for i in ids]
    assert not any("\ufffd" in piece for piece in shown)
    assert "".join(shown) == text
    assert decoder.flush() == ""


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
@hypothesis.given(st.lists(st.integers(0, 256), max_size=30))
@hypothesis.settings(deadline=None, derandomize=True)
def test_the_stream_of_arbitrary_tokens_is_their_decoding(tokenizer: Tokenizer, ids: list[int]):
    decoder = StreamDecoder(tokenizer)
    streamed = "".join(decoder.push(i) for i in ids) + decoder.flush()
    assert streamed == tokenizer.decode(ids)
    assert StreamDecoder(tokenizer).flush(ids) == streamed


def test_an_incomplete_character_is_held_back_and_flushed():
    decoder = StreamDecoder(BYTES)
    smile = "🙂".encode()
    assert [decoder.push(b) for b in b"a" + smile] == ["a", "", "", "", "🙂"]
    assert decoder.push(smile[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ord("b")) == "b"


def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (
        tokenizer.vocab_size,
        tokenizer.bos_id,
        tokenizer.eos_id,
    )
    for text in TEXTS:
        np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))
    assert tokenizers.Tokenizer.from_file(str(path)).get_vocab_size() == tokenizer.vocab_size


def test_special_tokens_in_a_document_stay_text(tokenizer: Tokenizer):
    text = f"a {SEPARATOR} b"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eos_id]) == SEPARATOR


def test_bytes_are_the_bytes_of_the_text():
    assert BYTES.vocab_size == 257
    assert BYTES.bos_id == BYTES.eos_id == 256
    assert BYTES.encode("é\n").tolist() == [0xC3, 0xA9, 0x0A]
    # The quick path above and the library agree.
    library = tokenizers.Tokenizer.from_str(BYTES._json)
    assert library.encode("naïve 🙂\n").ids == list("naïve 🙂\n".encode())


def test_a_batch_is_its_texts():
    for tokenizer in (BPE, BYTES):
        batch = tokenizer.encode_batch(["", *TEXTS])
        assert batch[0].size == 0
        for text, ids in zip(TEXTS, batch[1:], strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_long_texts_are_cut_at_lines_without_loss():
    text = "".join(f"line {i}\n" for i in range(1000)) + "x" * 500
    pieces = list(split_at_lines(text, limit=100))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 100
    assert all(piece.endswith("\n") for piece in pieces if "x" not in piece)
    long_text = "def f(x):\n    return x\n\n" * 30_000
    assert BPE.decode(BPE.encode(long_text)) == long_text


def test_training_is_deterministic_across_processes():
    program = (
        "from jaxinfra.data.tokenizer import train_bpe\n"
        "texts = [f'def function_{i}(argument):\\n    return {i}\\n' for i in range(300)]\n"
        "print(train_bpe(texts, vocab_size=600).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert len(prints) == 1
    assert len(prints.pop().strip()) == hashlib.sha256().digest_size * 2


def test_indentation_after_punctuation_is_one_token():
    tokenizer = train_bpe(["def f():\n        return 1\n" * 50], vocab_size=300)
    assert "():\n        " in [tokenizer.decode([i]) for i in tokenizer.encode("f():\n        x")]


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(DataError, match="vocab_size=256 is too small"):
        train_bpe(["a"], vocab_size=256)


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b"{}", b'{"model": 3}'])
def test_a_bad_tokenizer_file_is_named(tmp_path: Path, content: bytes | None):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(path))
    with pytest.raises(DataError, match="no file says"):
        Tokenizer.load(path)


def sentencepiece_like() -> Tokenizer:
    """As Llama-2's: words marked by a prefix, bytes as a fallback, bos and eos apart."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "b"]
    model = tokenizers.models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(tokenizer)


def test_a_tokenizer_that_marks_starts_sees_texts_whole_and_streams():
    tokenizer = sentencepiece_like()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    text = "a b a🙂a ba"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    decoder = StreamDecoder(tokenizer)
    shown = [decoder.push(int(i)) for i in ids]
    assert "".join(shown) + decoder.flush() == text
    assert not any("\ufffd" in piece for piece in shown)
    long_text = "a b\n" * 80_000
    assert tokenizer.decode(tokenizer.encode(long_text)) == long_text


def edited(path: Path, **changes: object) -> Path:
    """A tokenizer.json of bytes with other values at its top."""
    values = json.loads(bytes_tokenizer_text())
    path.write_text(json.dumps(values | changes))
    return path


def bytes_tokenizer_text() -> str:
    return bytes_tokenizer()._tokenizer.to_str()


@pytest.mark.parametrize("pattern", ["(a+)+$", "", "(?:a|aa)+$", "(.*)*x"])
def test_hostile_patterns_end_in_one_line(tmp_path, pattern):
    """Those that backtrack without end make the library panic, which is no Exception."""
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    path = edited(tmp_path / "tokenizer.json", pre_tokenizer=rule | {"invert": False})
    said = ""
    try:
        Tokenizer.load(path).encode("a" * 3000 + "!")
    except DataError as error:
        said = str(error)
    assert "\n" not in said


def test_two_tokens_of_one_id_are_refused(tmp_path):
    values = json.loads(bytes_tokenizer_text())
    vocab = values["model"]["vocab"]
    first, second, *_ = vocab
    vocab[second] = vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"two tokens of id|no readable|not a tokenizer"):
        Tokenizer.load(tmp_path / "tokenizer.json")
