"""Token arrays: the documented format, its checks, and writing that never half-succeeds."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfra.data import token_arrays
from jaxinfra.data.token_arrays import (
    TokenWriter,
    is_token_arrays,
    new_directory,
    open_token_arrays,
    write_token_arrays,
)
from jaxinfra.errors import DataError

DOCUMENTS = [(np.array([1, 2, 3]), 5), (np.array([], np.int64), 0), (np.array([4, 0]), 9)]


def write(directory: Path, vocab_size: int = 8) -> Path:
    write_token_arrays(directory, DOCUMENTS, vocab_size=vocab_size, bos_id=6, eos_id=7)
    return directory


@pytest.mark.parametrize(("vocab_size", "dtype"), [(8, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_round_trip(tmp_path: Path, vocab_size: int, dtype: str):
    directory = write(tmp_path / "arrays", vocab_size)
    assert is_token_arrays(directory)
    arrays = open_token_arrays(directory)
    assert isinstance(arrays.tokens, np.memmap)
    assert arrays.tokens.dtype == np.dtype(dtype)
    assert (arrays.num_documents, arrays.num_tokens, arrays.num_bytes) == (3, 5, 14)
    assert (arrays.bos_id, arrays.eos_id, arrays.vocab_size) == (6, 7, vocab_size)
    for i, (tokens, _) in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(arrays.document(i), tokens)


def test_the_format_is_as_documented(tmp_path: Path):
    """A reader that knows only the module's description finds the documents."""
    directory = write(tmp_path / "arrays")
    meta = json.loads((directory / "meta.json").read_text())
    tokens = np.fromfile(directory / "tokens.bin", dtype=meta["dtype"])
    offsets = np.load(directory / "offsets.npy")
    assert tokens[offsets[2] : offsets[3]].tolist() == [4, 0]
    assert np.load(directory / "document_bytes.npy").tolist() == [5, 0, 9]
    assert meta["vocab_size"] == 8


def test_the_fingerprint_is_of_the_contents(tmp_path: Path):
    same = [open_token_arrays(write(tmp_path / name)).fingerprint for name in ("a", "b")]
    assert same[0] == same[1]
    write_token_arrays(tmp_path / "c", DOCUMENTS[::-1], vocab_size=8, bos_id=6, eos_id=7)
    write_token_arrays(tmp_path / "d", DOCUMENTS, vocab_size=8, bos_id=5, eos_id=7)
    others = [open_token_arrays(tmp_path / name).fingerprint for name in ("c", "d")]
    assert len({same[0], *others}) == 3


def test_a_selection_is_a_view(tmp_path: Path):
    arrays = open_token_arrays(write(tmp_path / "arrays"))
    chosen = arrays.select(np.array([2]))
    assert chosen.tokens is arrays.tokens
    assert (chosen.num_documents, chosen.num_tokens, chosen.num_bytes) == (1, 2, 9)
    np.testing.assert_array_equal(chosen.document(0), [4, 0])
    assert chosen.fingerprint != arrays.fingerprint
    assert chosen.fingerprint != arrays.select(np.array([0])).fingerprint


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path):
    for bad in (8, -1):
        with pytest.raises(DataError, match=r"document 1 has tokens .* ends at 7"):
            write_token_arrays(
                tmp_path / "arrays",
                [DOCUMENTS[0], (np.array([0, bad]), 1)],
                vocab_size=8,
                bos_id=0,
                eos_id=0,
            )
    for bad in (np.array([0.5]), np.array([[1]])):
        with pytest.raises(DataError, match="tokens must be a row of integers"):
            write_token_arrays(tmp_path / "arrays", [(bad, 1)], vocab_size=8, bos_id=0, eos_id=0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="eos_id=8 is outside"):
        write_token_arrays(tmp_path / "arrays", [], vocab_size=8, bos_id=0, eos_id=8)


def test_nothing_is_overwritten(tmp_path: Path):
    directory = write(tmp_path / "arrays")
    with pytest.raises(DataError, match="nothing is overwritten"):
        write(directory)


def test_the_first_id_beyond_a_smaller_vocabulary(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(token_arrays, "_STRETCH", 2)  # tokens that are looked at together
    arrays = open_token_arrays(write(tmp_path / "arrays", 300))
    largest = int(max(arrays.tokens))
    assert arrays.first_id_beyond(largest + 1) is None
    for size in range(largest + 1):
        assert arrays.first_id_beyond(size) == next(each for each in arrays.tokens if each >= size)
    assert arrays.first_id_beyond(300) is None


def damage_meta(directory: Path, **changes: object) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps(meta | changes))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda d: (d / "meta.json").unlink(), "meta.json cannot be read: No such file"),
        (lambda d: (d / "meta.json").write_text("{"), "meta.json: not JSON"),
        (lambda d: (d / "meta.json").write_text("[]"), r"meta.json: \[\] is no object"),
        (lambda d: damage_meta(d, version=0), "not jaxinfra-token-arrays version 1"),
        (lambda d: damage_meta(d, dtype="flat"), "unreadable token arrays"),
        (lambda d: damage_meta(d, num_documents=None), "unreadable token arrays"),
        (lambda d: (d / "offsets.npy").unlink(), "unreadable token arrays"),
        (lambda d: (d / "offsets.npy").write_bytes(b""), "unreadable token arrays"),
        (lambda d: (d / "tokens.bin").unlink(), "unreadable token arrays"),
        (lambda d: (d / "tokens.bin").write_bytes(b"1"), "the write was cut short"),
        (lambda d: np.save(d / "offsets.npy", [0, 4, 3, 5]), "the write was cut short"),
        (lambda d: np.save(d / "document_bytes.npy", [1]), "the write was cut short"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, what: str):
    directory = write(tmp_path / "arrays")
    damage(directory)
    with pytest.raises(DataError, match=what) as caught:
        open_token_arrays(directory)
    assert str(directory) in str(caught.value)


def test_arrays_without_a_token_are_refused(tmp_path: Path):
    write_token_arrays(tmp_path / "arrays", [], vocab_size=8, bos_id=0, eos_id=0)
    with pytest.raises(DataError, match="without a token"):
        open_token_arrays(tmp_path / "arrays")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(self: TokenWriter, tokens: np.ndarray, *, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenWriter, "append", no_space)
    with pytest.raises(DataError, match=r"cannot write .*arrays: No space left on device"):
        write(tmp_path / "arrays")
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_the_first_stands(tmp_path: Path):
    with new_directory(tmp_path / "d") as ours:
        (ours / "x").write_text("ours")
        with new_directory(tmp_path / "d") as theirs:
            (theirs / "x").write_text("theirs")
    assert (tmp_path / "d" / "x").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
