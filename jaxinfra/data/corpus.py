"""Opening of a corpus as training and held-out documents, cached on disk."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, final

import numpy as np
import tokenizers

from jaxinfra.config.data import PAIRED, DataConfig, DataFormat, TokenizerKind, Turns
from jaxinfra.data.chat import ChatEncoder
from jaxinfra.data.chat_template import load_chat_template
from jaxinfra.data.packing import permute
from jaxinfra.data.pairs import CompletionEncoder, PairEncoder
from jaxinfra.data.readers import Document
from jaxinfra.data.sources import scan
from jaxinfra.data.split import Split, heldout_limit, name_hash, require_text
from jaxinfra.data.token_arrays import (
    VERSION,
    TokenArrays,
    TokenWriter,
    is_token_arrays,
    new_directory,
    open_token_arrays,
)
from jaxinfra.data.tokenizer import (
    BPE_PATTERN,
    Tokenizer,
    bytes_tokenizer,
    split_at_lines,
    train_bpe,
)
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import read_json

_LOG = logging.getLogger(__name__)

type RowEncoder = ChatEncoder | PairEncoder | CompletionEncoder

_NOTES = "notes.json"
_BPE_SAMPLE_BYTES = 10_000_000
_BPE_PIECE_CHARS = 1 << 16
_ENCODE_CHARS = 1 << 22  # text encoded at a time


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Tokenized documents of a corpus, divided into a training and a held-out side."""

    tokenizer: Tokenizer
    train: TokenArrays
    heldout: TokenArrays | None  # None: nothing is held out
    heldout_names: tuple[str, ...]
    heldout_text: Path | None  # the held-out documents' bytes, one after another, where kept
    notes: tuple[str, ...] = ()  # log lines about conversations that became no or several documents
    # Start and end in ``heldout_text`` of each held-out document, where some are left out.
    heldout_bounds: tuple[tuple[int, int], ...] | None = None

    def heldout_documents(self) -> list[bytes]:
        """Texts of the held-out documents in UTF-8; pre-tokenized arrays are decoded."""
        if self.heldout is None:
            return []
        if self.heldout_text is None:
            documents = (self.heldout.document(i) for i in range(self.heldout.num_documents))
            return [self.tokenizer.decode(tokens).encode() for tokens in documents]
        data = self.heldout_text.read_bytes()
        return [data[start:end] for start, end in self._bounds()]

    def _bounds(self) -> Sequence[tuple[int, int]]:
        if self.heldout_bounds is not None:
            return self.heldout_bounds
        assert self.heldout is not None
        ends = itertools.accumulate(self.heldout.document_bytes.tolist())
        return list(itertools.pairwise([0, *ends]))

    def with_heldout_tokens(self, most: int, *, together: int = 1) -> "Corpus":
        """Returns the corpus with at most ``most`` held-out tokens: whole documents of a fixed
        pseudo-random choice, at least one.

        Args:
            together: number of documents that follow one another and stay together.
        """
        heldout = self.heldout
        if heldout is None or heldout.num_tokens <= most:
            return self
        num_groups = heldout.num_documents // together
        order = permute(np.arange(num_groups), size=num_groups, key="evaluated documents")
        tokens = heldout.lengths.reshape(num_groups, together).sum(axis=1)[order]
        num_kept = max(int(np.searchsorted(np.cumsum(tokens), most, side="right")), 1)
        kept = np.sort(order[:num_kept])[:, None] * together + np.arange(together)
        chosen, bounds = kept.ravel(), self._bounds()
        some = heldout.select(chosen)
        note = (
            f"evaluated on {some.num_tokens:,} of {heldout.num_tokens:,} held-out tokens "
            "(training.evaluate_tokens; jaxinfra evaluate reads all)"
        )
        return dataclasses.replace(
            self,
            heldout=some,
            heldout_names=tuple(self.heldout_names[int(each)] for each in chosen),
            heldout_bounds=tuple(bounds[int(each)] for each in chosen),
            notes=(*self.notes, note),
        )


def _open_pretokenized(config: DataConfig, *, tokenizer: Tokenizer | None) -> Corpus:
    """Opens pre-tokenized arrays.

    A document's name is its number. The tokenizer is the one given, the configured one, or the
    ``tokenizer.json`` beside the arrays.
    """
    directory = Path(config.source).expanduser()
    arrays = open_token_arrays(directory)
    tokenizer = tokenizer or tokenizer_of_arrays(config, directory)
    if config.heldout_source is not None:
        heldout_directory = Path(config.heldout_source).expanduser()
        train = arrays
        heldout = open_token_arrays(heldout_directory)
        names = [str(i) for i in range(heldout.num_documents)]
    else:
        numbers = np.arange(arrays.num_documents)
        limit = heldout_limit(map(str, numbers), fraction=config.heldout_fraction)
        out = np.array([name_hash(str(i)) for i in numbers]) < limit
        train, heldout = arrays.select(numbers[~out]), arrays.select(numbers[out])
        names = [str(i) for i in numbers[out]]
    for side in (train, heldout):
        if side is train or names:
            _require_same_vocabulary(tokenizer, side, config)
    return Corpus(
        tokenizer=tokenizer,
        train=train,
        heldout=heldout if names else None,
        heldout_names=tuple(names),
        heldout_text=None,
    )


def tokenizer_of_arrays(config: DataConfig, directory: Path) -> Tokenizer:
    """Returns the configured tokenizer, or else the ``tokenizer.json`` in the arrays' directory."""
    if config.tokenizer.kind is TokenizerKind.BYTES:
        return bytes_tokenizer()
    if config.tokenizer.path is not None:
        return Tokenizer.load(Path(config.tokenizer.path).expanduser())
    if (directory / "tokenizer.json").is_file():
        return Tokenizer.load(directory / "tokenizer.json")
    raise DataError(
        f"{directory}: token arrays without tokenizer.json; put the tokenizer that made them "
        "there, or name it with tokenizer kind=file and its path"
    )


def _require_same_vocabulary(tokenizer: Tokenizer, side: TokenArrays, config: DataConfig) -> None:
    theirs = (side.vocab_size, side.bos_id, side.eos_id)
    ours = (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    if theirs != ours:
        raise DataError(
            f"token arrays of {config.source!r} have (vocab_size, bos_id, eos_id)={theirs}, the "
            f"tokenizer has {ours}; use the tokenizer they were made with"
        )
    if not side.num_tokens:
        raise DataError(
            f"token arrays of {config.source!r}: a side of the split has no token; name a "
            "separate heldout_source"
        )


def open_corpus(
    config: DataConfig,
    *,
    vocab_size: int,
    cache_dir: Path,
    tokenizer: Tokenizer | None = None,
    template_directory: Path | None = None,
) -> Corpus:
    """Opens the corpus that ``config`` describes, from the cache if it has been tokenized before.

    ``vocab_size`` is the model's. Byte-level BPE is trained to that size, on every k-th stretch of
    65,536 characters of the training documents, with k such that about 10 MB are used. A given
    ``tokenizer`` (a checkpoint's) is used instead of a new one, and a given ``template_directory``
    instead of the config's. The cache's key is the files' names, sizes and modification times, the
    split, the tokenizer and the template.
    """
    if _holds_arrays(config):
        corpus = _open_pretokenized(config, tokenizer=tokenizer)
        _require_ids_within(corpus, vocab_size, config)
        return corpus
    split = _split_of(config)
    if tokenizer is None:
        tokenizer = _make_tokenizer([split], vocab_size=vocab_size, cache_dir=cache_dir)
    _require_separators_within(tokenizer, vocab_size)
    chat: ChatEncoder | None = None
    identity = [split.identity(), tokenizer.fingerprint]
    if config.chat_template is not None:
        where = template_directory or Path(config.chat_template).expanduser()
        template = load_chat_template(where).with_settings(config.template_settings)
        chat = ChatEncoder(template, tokenizer, turns=config.turns)
        identity.append(template.identity)
        identity += [] if config.turns is Turns.PREFIXES else [config.turns]
    encoder: RowEncoder | None = chat
    if config.format in PAIRED:
        encoder = PairEncoder(tokenizer, chat, form=config.format)
    elif config.format is DataFormat.COMPLETIONS:
        encoder = CompletionEncoder(tokenizer)
    corpus = _cached_corpus(cache_dir / "corpora" / _key(*identity), split, tokenizer, encoder)
    _require_ids_within(corpus, vocab_size, config)
    return corpus


def _require_separators_within(tokenizer: Tokenizer, vocab_size: int) -> None:
    for token in (tokenizer.bos_id, tokenizer.eos_id):
        if token >= vocab_size:
            raise DataError(
                f"documents begin or end with token {token} ({tokenizer.spelled(token)!r}), and "
                f"vocab_size={vocab_size}, so the model's ids are 0..{vocab_size - 1}; raise the "
                f"model's to {tokenizer.vocab_size}, the tokenizer's, or use a smaller tokenizer"
            )


def _require_ids_within(corpus: Corpus, vocab_size: int, config: DataConfig) -> None:
    """Refuses data with a token that the model's table lacks; a tokenizer may have more of them."""
    _require_separators_within(corpus.tokenizer, vocab_size)
    for side in (corpus.train, corpus.heldout):
        token = None if side is None else side.first_id_beyond(vocab_size)
        if token is not None:
            raise DataError(
                f"{config.source}: its documents have token {token} "
                f"({corpus.tokenizer.spelled(token)!r}), and vocab_size={vocab_size}, so the "
                f"model's ids are 0..{vocab_size - 1}; raise the model's to "
                f"{corpus.tokenizer.vocab_size}, the tokenizer's, or leave such documents out"
            )


def shared_tokenizer(
    configs: Sequence[DataConfig], *, vocab_size: int, cache_dir: Path
) -> Tokenizer:
    """Returns a tokenizer for several corpora: the configured one, that of the first token arrays,
    or byte-level BPE trained on equal parts of all.
    """
    for config in configs:
        if _holds_arrays(config):
            return tokenizer_of_arrays(config, Path(config.source).expanduser())
    splits = [_split_of(config) for config in configs]
    return _make_tokenizer(splits, vocab_size=vocab_size, cache_dir=cache_dir)


def _split_of(config: DataConfig) -> Split:
    return Split(
        source=scan(config.source),
        heldout_source=None if config.heldout_source is None else scan(config.heldout_source),
        config=config,
    )


def _holds_arrays(config: DataConfig) -> bool:
    """Whether a source is token arrays; raises DataError if only one side of it is."""
    places = [place for place in (config.source, config.heldout_source) if place is not None]
    found = [is_token_arrays(Path(place).expanduser()) for place in places]
    if len(set(found)) > 1:
        raise DataError(
            f"source {config.source!r} and heldout_source {config.heldout_source!r}: one holds "
            "token arrays, the other does not; both must be text, or both token arrays"
        )
    return found[0]


def _make_tokenizer(splits: Sequence[Split], *, vocab_size: int, cache_dir: Path) -> Tokenizer:
    config = splits[0].config.tokenizer
    if config.kind is TokenizerKind.BYTES:
        return bytes_tokenizer()
    if config.path is not None:
        return Tokenizer.load(Path(config.path).expanduser())
    identities = [split.identity() for split in splits]
    of = identities[0] if len(splits) == 1 else identities
    key = _key(of, vocab_size, BPE_PATTERN, tokenizers.__version__)
    directory = cache_dir / "tokenizers" / key
    if not (directory / "tokenizer.json").is_file():
        num_bytes = _BPE_SAMPLE_BYTES // len(splits)
        samples = (_bpe_sample(split, num_bytes=num_bytes) for split in splits)
        trained = train_bpe(itertools.chain.from_iterable(samples), vocab_size=vocab_size)
        with new_directory(directory) as unfinished:
            trained.save(unfinished / "tokenizer.json")
    return Tokenizer.load(directory / "tokenizer.json")


def _bpe_sample(split: Split, *, num_bytes: int) -> Iterator[str]:
    total_bytes = sum(size for _, size, _ in split.source.listing())
    pieces = (
        piece
        for text in split.train_texts()
        for piece in split_at_lines(text, limit=_BPE_PIECE_CHARS)
    )
    every = max(1, -(-total_bytes // num_bytes))
    num_chars = 0
    for piece in itertools.islice(pieces, 0, None, every):
        yield piece
        num_chars += len(piece)
        if num_chars > 2 * num_bytes:
            return  # Compressed files hold more than their size told.


def _cached_corpus(
    directory: Path, split: Split, tokenizer: Tokenizer, encoder: RowEncoder | None
) -> Corpus:
    if directory.is_dir():
        try:
            return _open_cached(directory, tokenizer)
        except DataError as error:
            _LOG.warning("cached corpus is made anew: %s", error)
            shutil.rmtree(directory)
    with new_directory(directory) as unfinished:
        _tokenize(split, tokenizer, encoder, unfinished)
    return _open_cached(directory, tokenizer)


def _open_cached(directory: Path, tokenizer: Tokenizer) -> Corpus:
    heldout = None
    if (directory / "heldout").is_dir():
        heldout = open_token_arrays(directory / "heldout")
    text_path = directory / "heldout.txt"
    try:
        names = tuple(read_json(directory / "heldout_names.json", holds=list[str], error=DataError))
        notes: list[str] = []
        if (directory / _NOTES).is_file():
            notes = read_json(directory / _NOTES, holds=list[str], error=DataError)
        num_bytes = text_path.stat().st_size
    except (OSError, ValueError) as error:
        raise DataError(f"{directory}: cannot be read ({error}); remove it") from error
    wanted = (0, 0) if heldout is None else (heldout.num_bytes, heldout.num_documents)
    if (num_bytes, len(names)) != wanted:
        raise DataError(
            f"{directory}: heldout.txt has {num_bytes} of {wanted[0]} bytes, and there are "
            f"{len(names)} names for {wanted[1]} documents; remove it"
        )
    return Corpus(
        tokenizer=tokenizer,
        train=open_token_arrays(directory / "train"),
        heldout=heldout,
        heldout_names=names,
        heldout_text=text_path,
        notes=tuple(notes),
    )


def _tokenize(
    split: Split, tokenizer: Tokenizer, encoder: RowEncoder | None, directory: Path
) -> None:
    with contextlib.ExitStack() as stack:
        text_file = stack.enter_context((directory / "heldout.txt").open("wb"))
        train = stack.enter_context(_Side(directory / "train", tokenizer, encoder))
        heldout = stack.enter_context(_Side(directory / "heldout", tokenizer, encoder, text_file))
        for document, is_heldout in split.documents():
            (heldout if is_heldout else train).add(document)
        train.finish()
        heldout.finish()
        require_text(split.config, num_train=len(train.names), num_heldout=len(heldout.names))
        for side, source in ((train, None), (heldout, split.config.heldout_source)):
            if side.names and not side.num_tokens:
                what = "trained on" if side is train else "held out"
                raise DataError(
                    f"data source {source or split.config.source!r}: the tokenizer makes no token "
                    f"of what is {what}, such as {side.names[0]}; use a tokenizer that knows its "
                    "characters, or another text"
                )
    if not heldout.names:
        shutil.rmtree(directory / "heldout")
    (directory / "heldout_names.json").write_text(json.dumps(heldout.names))
    if encoder is not None and (notes := encoder.notes()):
        (directory / _NOTES).write_text(json.dumps(notes))


@final
class _Side:
    """Encodes documents in batches into token arrays.

    Args:
        encoder: encodes them as rows of messages, or of pairs of answers.
        text_file: gets the texts, as far as they count.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        encoder: RowEncoder | None,
        text_file: BinaryIO | None = None,
    ):
        directory.mkdir()
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._text_file = text_file
        self._writer = TokenWriter(
            directory,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id if encoder is None else encoder.bos_id,
            eos_id=tokenizer.eos_id,
            marks=encoder is not None,
        )
        self.names: list[str] = []  # of the document that each became of
        self.num_tokens = 0
        self._pending: list[Document] = []
        self._num_chars = 0

    def __enter__(self) -> "_Side":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def add(self, document: Document) -> None:
        self._pending.append(document)
        self._num_chars += len(document.text)
        if self._num_chars >= _ENCODE_CHARS:
            self._encode()

    def finish(self) -> None:
        self._encode()
        self._writer.finish()

    def _encode(self) -> None:
        if not self._pending:
            return
        if self._encoder is None:
            texts = [document.text for document in self._pending]
            for document, ids in zip(
                self._pending, self._tokenizer.encode_batch(texts), strict=True
            ):
                self._append(document.name, ids, document.text)
        else:
            encoded = self._encoder.encode_batch(self._pending)
            for document, parts in zip(self._pending, encoded, strict=True):
                for each in parts:
                    marks = {"counted": each.counted, "first": each.first}
                    self._append(document.name, each.tokens, each.text, **marks)
        self._pending, self._num_chars = [], 0

    def _append(
        self,
        name: str,
        ids: np.ndarray,
        text: str,
        counted: np.ndarray | None = None,
        first: int | None = None,
    ) -> None:
        data = text.encode()
        self.names.append(name)
        self.num_tokens += len(ids)
        self._writer.append(ids, num_bytes=len(data), counted=counted, first=first)
        if self._text_file is not None:
            self._text_file.write(data)


def _key(*parts: object) -> str:
    identity = json.dumps(["jaxinfra-corpus", VERSION, *parts])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]
