"""From a data config to tokenized, split, cached documents."""

import dataclasses
import json
import os
import sysconfig
from pathlib import Path

import pytest
import tokenizers

from jaxinfra.config.data import DataConfig, TokenizerConfig, TokenizerKind
from jaxinfra.data import corpus as corpus_module
from jaxinfra.data import split as split_module
from jaxinfra.data.corpus import Corpus, open_corpus
from jaxinfra.data.split import name_hash
from jaxinfra.data.token_arrays import write_token_arrays
from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer, train_bpe
from jaxinfra.errors import DataError

BYTES = TokenizerConfig(kind=TokenizerKind.BYTES)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    for i in range(40):
        path = root / ("sub" if i % 3 else ".") / f"file_{i}.py"
        path.write_text(f"def function_{i}(x):\n    return x * {i}  # é\n" * (i + 1))
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def open_it(source: Path, cache: Path, vocab_size: int = 300, **changes) -> Corpus:
    saved = changes.pop("saved", None)
    config = DataConfig(source=str(source), **({"heldout_fraction": 0.2} | changes))
    return open_corpus(config, vocab_size=vocab_size, cache_dir=cache, tokenizer=saved)


def error(*args, **kwargs) -> str:
    with pytest.raises(DataError) as caught:
        open_it(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", [TokenizerKind.BPE, TokenizerKind.BYTES])
def test_every_document_is_on_one_side_exactly(texts: Path, cache: Path, kind: TokenizerKind):
    corpus = open_it(texts, cache, tokenizer=TokenizerConfig(kind=kind))
    files = {path.relative_to(texts).as_posix(): path.read_bytes() for path in texts.rglob("*.py")}
    heldout = dict(zip(corpus.heldout_names, corpus.heldout_documents(), strict=True))
    assert 0 < len(heldout) < 40
    assert all(files[name] == data for name, data in heldout.items())
    train = {
        corpus.tokenizer.decode(corpus.train.document(i)).encode()
        for i in range(corpus.train.num_documents)
    }
    assert train == {data for name, data in files.items() if name not in heldout}
    for i, data in enumerate(heldout.values()):
        assert corpus.tokenizer.decode(corpus.heldout.document(i)).encode() == data
    assert corpus.heldout.num_bytes == sum(map(len, heldout.values()))
    assert corpus.train.num_bytes == sum(map(len, train))


def test_large_texts_are_told_of_while_they_are_read(texts: Path, cache: Path, monkeypatch, capsys):
    monkeypatch.setattr(split_module, "_TOLD_EVERY_S", -1.0)  # after every document
    open_it(texts, cache)
    told = capsys.readouterr().err.splitlines()
    assert f"reading {texts}: 40 documents, 0 million characters" in told


def test_a_document_stays_on_its_side_when_others_come(texts: Path, cache: Path):
    before = set(open_it(texts, cache).heldout_names)
    for i in range(60):
        (texts / f"new_{i}.py").write_text("new = 1\n")
    after = set(open_it(texts, cache).heldout_names)
    assert {name for name in after if not name.startswith("new")} == before
    assert len(after) > len(before)
    more = set(open_it(texts, cache, heldout_fraction=0.4).heldout_names)
    assert after < more


def test_the_split_is_frozen():
    """A run resumed or evaluated by a later version must not meet its training text held out."""
    hashes = [round(name_hash(name), 6) for name in ("json/decoder.py", "é:1")]
    assert hashes == [0.422047, 0.327732]


def test_a_heldout_source_of_its_own(texts: Path, cache: Path, tmp_path: Path):
    (tmp_path / "out.txt").write_text("held out\n")
    corpus = open_it(texts, cache, heldout_source=str(tmp_path / "out.txt"))
    assert corpus.heldout_names == ("out.txt",)
    assert corpus.heldout_documents() == [b"held out\n"]
    assert corpus.train.num_documents == 40


def test_the_cache_is_reused_and_follows_the_files(
    texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    first = open_it(texts, cache)

    def never(*args, **kwargs):
        raise AssertionError("the cache should have been used")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "train_bpe", never)
        patch.setattr(corpus_module, "_tokenize", never)
        again = open_it(texts, cache)
        assert again.train.fingerprint == first.train.fingerprint
        assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
        # A resumed run brings the tokenizer along and finds the same arrays.
        resumed = open_it(texts, cache, saved=first.tokenizer)
        assert resumed.train.fingerprint == first.train.fingerprint
        with pytest.raises(AssertionError):
            open_it(texts, cache, heldout_fraction=0.3)
        path = texts / "file_0.py"
        os.utime(path, (1, 1))
        with pytest.raises(AssertionError):
            open_it(texts, cache)
    touched = open_it(texts, cache)
    assert touched.train.fingerprint == first.train.fingerprint  # of the contents, not the dates
    path.write_text("changed = True\n")
    assert open_it(texts, cache).train.fingerprint != first.train.fingerprint


@pytest.mark.parametrize(
    "victim", ["train/tokens.bin", "heldout.txt", "heldout_names.json", "heldout/meta.json"]
)
def test_a_damaged_cache_is_made_anew(
    texts: Path, cache: Path, victim: str, caplog: pytest.LogCaptureFixture
):
    first = open_it(texts, cache)
    (path,) = cache.glob(f"corpora/*/{victim}")
    path.write_bytes(path.read_bytes()[:-9])
    for _ in range(2):
        again = open_it(texts, cache)
        assert caplog.text.count("made anew") == 1
        assert again.train.fingerprint == first.train.fingerprint
        assert again.heldout_documents() == first.heldout_documents()
        caplog.clear()
        path.unlink()


def test_an_interrupted_write_is_not_taken_for_a_cache(
    texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            open_it(texts, cache)
    assert list(cache.glob("*/*")) == []
    assert open_it(texts, cache).train.num_documents


def test_a_cache_that_cannot_be_written(texts: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in error(texts, tmp_path / "file" / "cache")


def test_the_tokenizer_given_is_used(texts: Path, cache: Path, tmp_path: Path):
    mine = train_bpe(["something else entirely " * 9], vocab_size=270)
    mine.save(tmp_path / "tokenizer.json")
    assert open_it(texts, cache, saved=mine).tokenizer is mine
    file = TokenizerConfig(kind=TokenizerKind.FILE, path=str(tmp_path / "tokenizer.json"))
    assert open_it(texts, cache, tokenizer=file).tokenizer.fingerprint == mine.fingerprint


def test_a_vocabulary_larger_than_the_model_s(texts: Path, cache: Path):
    what = "documents begin or end with token 256 ('<|endoftext|>'), and vocab_size=256"
    assert what in error(texts, cache, 256, tokenizer=BYTES)
    assert what in error(texts, cache, 256, saved=bytes_tokenizer())
    assert "too small for byte-level BPE" in error(texts, cache, 256)
    assert not list(cache.rglob("tokens.bin"))


def test_ids_beyond_the_model_s_table_are_refused_only_where_data_has_them(
    texts: Path, cache: Path
):
    """Tokens are added after the model's: some are never in data, as of images and tools."""
    larger = tokenizers.Tokenizer.from_str(bytes_tokenizer()._json)
    larger.add_tokens(["unseen", "function_7"])
    saved = Tokenizer(larger)
    assert saved.vocab_size == 259
    assert open_it(texts, cache, 259, saved=saved).train.num_documents
    found = error(texts, cache, 258, saved=saved)
    assert "its documents have token 258 ('function_7'), and vocab_size=258" in found
    (texts / "sub" / "file_7.py").unlink()
    for file in texts.rglob("*.py"):
        file.write_text(file.read_text().replace("function_7", "f"))
    corpus = open_it(texts, cache, 257, saved=saved)
    assert corpus.train.num_documents == 39 - corpus.heldout.num_documents


def test_training_samples_of_a_large_corpus(
    texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []

    def spy(pieces, *, vocab_size):
        seen.extend(pieces)
        return train_bpe(seen, vocab_size=vocab_size)

    monkeypatch.setattr(corpus_module, "train_bpe", spy)
    monkeypatch.setattr(corpus_module, "_BPE_SAMPLE_BYTES", 5000)
    monkeypatch.setattr(corpus_module, "_BPE_PIECE_CHARS", 100)
    corpus = open_it(texts, cache)
    assert 2000 < sum(map(len, seen)) < 7000
    assert max(map(len, seen)) <= 100
    train = "".join(
        corpus.tokenizer.decode(corpus.train.document(i)) for i in range(corpus.train.num_documents)
    )
    assert all(piece in train for piece in seen)  # held-out text is not learnt from


def test_json_lines_split_by_row(tmp_path: Path, cache: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": f"row {i}\n"}) + "\n" for i in range(1, 101)))
    corpus = open_it(path, cache, tokenizer=BYTES, text_field="body")
    assert corpus.train.num_documents + corpus.heldout.num_documents == 100
    for name, data in zip(corpus.heldout_names, corpus.heldout_documents(), strict=True):
        assert data == f"row {name.removeprefix('rows.jsonl:')}\n".encode()


def test_a_side_without_text(tmp_path: Path, cache: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": "b"}\n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "every document is empty" in error(empty, cache)
    assert "every document is empty" in error(rows, cache, heldout_source=str(empty))
    assert "every document is empty" in error(empty, cache, heldout_source=str(rows))
    assert not list(cache.rglob("tokens.bin"))


def test_a_text_without_a_token_is_refused_by_its_name(tmp_path: Path, cache: Path):
    known, unknown, file = (tmp_path / name for name in ("a.txt", "b.txt", "tokenizer.json"))
    known.write_text("aaa")
    unknown.write_text("bbb")
    vocabulary = tokenizers.models.BPE(vocab={"a": 0, "</s>": 1}, merges=[])
    tokenizers.Tokenizer(vocabulary).save(str(file))
    settings = TokenizerConfig(kind=TokenizerKind.FILE, path=str(file))
    found = error(unknown, cache, tokenizer=settings)
    assert f"data source {str(unknown)!r}: the tokenizer makes no token" in found
    assert "trained on, such as b.txt" in found
    found = error(known, cache, tokenizer=settings, heldout_source=str(unknown))
    assert f"data source {str(unknown)!r}" in found
    assert "held out, such as b.txt" in found
    assert not list(cache.rglob("tokens.bin"))


@pytest.mark.parametrize("num", [1, 2, 5, 20, 60])
def test_each_side_has_a_document_whatever_the_file_is_called(tmp_path: Path, num: int):
    """One document is trained on; of more, at least one is on each side, at any fraction."""
    for name in range(10):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(num)))
        for fraction in (0.0, 1e-9, 0.03, 0.9999999):
            corpus = open_it(
                path, tmp_path / f"cache{name}", tokenizer=BYTES, heldout_fraction=fraction
            )
            out = len(corpus.heldout_names)
            assert corpus.train.num_documents == num - out
            assert (corpus.heldout is None) == (out == 0) == (num == 1 or fraction == 0.0)
            assert out == len(corpus.heldout_documents())
            hashed = sum(name_hash(f"{path.name}:{i + 1}") < fraction for i in range(num))
            if 0 < hashed < num:
                assert out == hashed
            elif out:
                assert out == (1 if fraction < 0.5 else num - 1)


@pytest.mark.parametrize("place", [0, 1])
def test_a_document_of_white_space_is_no_side_of_its_own(tmp_path: Path, cache: Path, place: int):
    """Both sides get one of the two texts, wherever a blank file is by its hash."""
    names = sorted(("a.txt", "b.txt", "c.txt"), key=name_hash)
    blank = names[0 if place == 0 else -1]
    for name in names:
        (tmp_path / name).write_text(" \n" if name == blank else f"text of {name}")
    corpus = open_it(tmp_path, cache, heldout_fraction=0.9 if place else 1e-9)
    heldout = {text.decode().strip() for text in corpus.heldout_documents()}
    assert len(heldout - {""}) == 1


def test_bad_text_reaches_the_caller_and_leaves_no_cache(texts: Path, cache: Path):
    (texts / "image.png").write_bytes(b"\x89PNG\0")
    assert "image.png: not a text file" in error(texts, cache)
    assert list(cache.rglob("*.bin")) == []
    assert "no such file or directory" in error(texts / "nowhere", cache)


def test_a_standard_library(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(texts))
    config = dataclasses.replace(DataConfig(), heldout_fraction=0.2)
    corpus = open_corpus(config, vocab_size=280, cache_dir=cache)
    assert corpus.train.num_documents + corpus.heldout.num_documents == 40
    assert corpus.tokenizer.vocab_size == 280


def pretokenized(directory: Path, num_documents: int = 50) -> Path:
    tokenizer = bytes_tokenizer()
    texts = [f"text {i}\n" for i in range(num_documents)]
    write_token_arrays(
        directory,
        [(tokenizer.encode(text), len(text)) for text in texts],
        vocab_size=257,
        bos_id=256,
        eos_id=256,
    )
    return directory


def test_pretokenized_arrays(tmp_path: Path, cache: Path):
    source = pretokenized(tmp_path / "arrays")
    corpus = open_it(source, cache, tokenizer=BYTES)
    assert corpus.train.num_documents + corpus.heldout.num_documents == 50
    want = [f"text {name}\n".encode() for name in corpus.heldout_names]
    assert corpus.heldout_documents() == want
    assert not cache.exists()
    other = pretokenized(tmp_path / "heldout", 3)
    apart = open_it(source, cache, tokenizer=BYTES, heldout_source=str(other))
    assert (apart.train.num_documents, apart.heldout.num_documents) == (50, 3)
    assert apart.heldout_names == ("0", "1", "2")


def test_pretokenized_arrays_bring_or_name_their_tokenizer(tmp_path: Path, cache: Path):
    source = pretokenized(tmp_path / "arrays")
    assert "token arrays without tokenizer.json" in error(source, cache)
    bytes_tokenizer().save(source / "tokenizer.json")
    assert open_it(source, cache).tokenizer.vocab_size == 257
    file = TokenizerConfig(kind=TokenizerKind.FILE, path=str(source / "tokenizer.json"))
    assert open_it(source, cache, tokenizer=file).tokenizer.vocab_size == 257


def test_pretokenized_arrays_of_another_vocabulary(tmp_path: Path, cache: Path, texts: Path):
    source = pretokenized(tmp_path / "arrays")
    assert "token 256 ('<|endoftext|>')" in error(source, cache, 256, tokenizer=BYTES)
    other = Tokenizer(train_bpe(["a"], vocab_size=300)._tokenizer)
    assert "have (vocab_size, bos_id, eos_id)=(257, 256, 256)" in error(source, cache, saved=other)
    assert "both must be text, or both" in error(
        source, cache, tokenizer=BYTES, heldout_source=str(texts)
    )
    assert "both must be text, or both" in error(texts, cache, heldout_source=str(source))
    few = open_it(source, cache, tokenizer=BYTES, heldout_fraction=1e-9)
    assert (few.train.num_documents, few.heldout.num_documents) == (49, 1)
    none = open_it(source, cache, tokenizer=BYTES, heldout_fraction=0.0)
    assert (none.train.num_documents, none.heldout) == (50, None)
