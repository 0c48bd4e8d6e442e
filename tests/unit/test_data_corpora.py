"""All texts of a run by name: one tokenizer, its sets to evaluate on, and who judges."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.data import DataConfig, TokenizerConfig, TokenizerKind
from jaxinfra.config.mixture import MixtureSource, ValidationSet
from jaxinfra.config.presets import run_preset
from jaxinfra.data.corpora import open_corpora
from jaxinfra.data.corpus import open_corpus
from jaxinfra.data.mixture import MixedWindows
from jaxinfra.data.token_arrays import write_token_arrays
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.diagnostics.run_view import read_view
from jaxinfra.errors import DataError
from jaxinfra.training.evaluation import (
    Between,
    Evaluation,
    Interrupted,
    SetEvaluations,
    pooled_evaluation,
)
from jaxinfra.training.progress import Progress

BYTES = TokenizerConfig(kind=TokenizerKind.BYTES)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name, word in (("a", "alpha"), ("b", "beta"), ("v", "omega")):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(f"{word} {number} " * 12)
    return tmp_path


def opened(texts: Path, *, tokenizer: TokenizerConfig = BYTES, vocab_size: int = 300, **changes):
    mixture = tuple(MixtureSource(name=n, source=str(texts / n)) for n in "ab")
    validation = (ValidationSet(name="v", source=str(texts / "v")),)
    settings = {"mixture": mixture, "validation": validation, "heldout_fraction": 0.3} | changes
    config = DataConfig(tokenizer=tokenizer, **settings)
    return open_corpora(config, vocab_size=vocab_size, cache_dir=texts / "cache")


def test_every_source_and_set_has_its_name(texts: Path):
    corpora = opened(texts)
    assert list(corpora.sources) == ["a", "b"]
    assert list(corpora.heldout) == ["a", "b", "v"]
    assert corpora.heldout["v"].num_documents == 20
    assert corpora.ranking == ("a", "b")
    alone = open_corpus(
        DataConfig(source=str(texts / "a"), heldout_fraction=0.3, tokenizer=BYTES),
        vocab_size=300,
        cache_dir=texts / "cache",
    )
    assert corpora.sources["a"].train.fingerprint == alone.train.fingerprint
    assert corpora.ranking_documents()[: alone.heldout.num_documents] == alone.heldout_documents()
    assert isinstance(corpora.train_source(run_preset("tiny").training), MixedWindows)


@pytest.mark.parametrize("judge", ["own", "b", "v"])
def test_the_judge_is_the_set_that_is_named(texts: Path, judge: str):
    corpora = opened(texts, best_by=judge)
    assert corpora.ranking == (("a", "b") if judge == "own" else (judge,))


def test_one_source_with_a_validation_set(texts: Path):
    corpora = opened(texts, mixture=(), source=str(texts / "a"))
    assert list(corpora.heldout) == ["own", "v"]
    assert corpora.ranking == ("own",)
    train = corpora.train_source(run_preset("tiny").training)
    assert train.fingerprint == corpora.sources["own"].train.fingerprint


def test_a_tokenizer_is_trained_on_all_sources(texts: Path):
    corpora = opened(texts, tokenizer=TokenizerConfig(), vocab_size=280)
    for word in (" alpha", " beta"):
        assert len(corpora.tokenizer.encode(word)) < len(word)
    assert all(each.tokenizer is not None for each in corpora.sources.values())
    fingerprints = {each.tokenizer.fingerprint for each in corpora.sources.values()}
    assert fingerprints == {corpora.tokenizer.fingerprint}


def test_token_arrays_bring_their_tokenizer(texts: Path):
    tokenizer = bytes_tokenizer()
    ids = dict(vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
    documents = [(np.full(9, number, np.int32), 9) for number in range(40)]
    write_token_arrays(texts / "arrays", documents, **ids)
    tokenizer.save(texts / "arrays" / "tokenizer.json")
    mixture = (
        MixtureSource(name="text", source=str(texts / "a")),
        MixtureSource(name="arrays", source=str(texts / "arrays")),
    )
    corpora = opened(texts, tokenizer=TokenizerConfig(), mixture=mixture)
    assert corpora.tokenizer.fingerprint == tokenizer.fingerprint


def test_a_source_that_is_not_there_is_named(texts: Path):
    with pytest.raises(DataError, match="nowhere"):
        opened(texts, mixture=(MixtureSource(name="x", source=str(texts / "nowhere")),))


def test_losses_of_several_texts_as_of_one():
    parts = [
        Evaluation(loss=2.0, num_tokens=30, num_bytes=60),
        Evaluation(loss=1.0, num_tokens=10, num_bytes=10),
    ]
    together = pooled_evaluation(parts)
    assert (together.loss, together.num_tokens, together.num_bytes) == (1.75, 40, 70)
    assert pooled_evaluation(parts[:1]) is parts[0]
    one = SetEvaluations(sets={"own": parts[0]}, ranking=parts[0])
    assert set(one.record()) == {"heldout_loss", "heldout_bits_per_byte"}  # as it always was
    both = SetEvaluations(sets=dict(zip("ab", parts, strict=True)), ranking=together)
    assert both.record() == {
        "heldout_loss": 1.75,
        "heldout_bits_per_byte": together.bits_per_byte,
        "heldout/a/loss": 2.0,
        "heldout/a/bits_per_byte": parts[0].bits_per_byte,
        "heldout/b/loss": 1.0,
        "heldout/b/bits_per_byte": parts[1].bits_per_byte,
    }
    assert both.describe().endswith("b 1.0000, 1.4427 bits per byte")


def test_a_view_shows_every_set(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.create(run_preset("tiny"))
    lines = [{"step": 4, "heldout_loss": 2.0, "heldout/a/loss": 1.5, "heldout/b/loss": None}]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    head = read_view(run.path).headline()
    assert (head["held-out a"], head["held-out b"]) == ("1.5000", "-")


def test_an_evaluation_reads_a_fixed_choice_of_whole_documents(texts: Path):
    corpora = opened(texts)
    capped = corpora.with_heldout_tokens(600)
    whole, some = corpora.heldout["v"], capped.heldout["v"]
    assert 0 < some.num_tokens <= 600 < whole.num_tokens
    assert some.num_bytes == some.num_tokens  # a byte is a token
    (note,) = capped.validation["v"].notes
    assert note.startswith(f"evaluated on {some.num_tokens:,} of {whole.num_tokens:,} held-out")
    again = corpora.with_heldout_tokens(600).heldout["v"]
    assert again.fingerprint == some.fingerprint
    held = capped.validation["v"].heldout_documents()
    assert held == [bytes(some.document(n).tolist()) for n in range(some.num_documents)]
    assert set(held) < set(corpora.validation["v"].heldout_documents())
    assert corpora.with_heldout_tokens(10**6).heldout["v"] is whole
    assert corpora.with_heldout_tokens(1).heldout["v"].num_documents == 1
    together = corpora.validation["v"].with_heldout_tokens(600, together=2)
    names = [int(name.split(".")[0].rsplit("/")[-1]) for name in together.heldout_names]
    listed = [int(n.split(".")[0].rsplit("/")[-1]) for n in corpora.validation["v"].heldout_names]
    places = [listed.index(each) for each in names]
    assert all(second == first + 1 for first, second in zip(places[::2], places[1::2], strict=True))


def test_an_evaluation_says_how_far_it_is(capsys, monkeypatch):
    told = [0.0]
    monkeypatch.setattr("jaxinfra.training.progress.time.perf_counter", lambda: told[-1])
    between = Between(told=Progress(every=1).evaluating)
    batches = between.batches(["x"] * 4, "code")
    for now in (0.0, 5.0, 12.0, 15.0):
        told.append(now)
        next(batches)
    assert capsys.readouterr().out == "evaluating code: 2 batches of 4, 50%\n"
    with pytest.raises(Interrupted):
        next(Between(stop=lambda: True).batches(["x"], "code"))
