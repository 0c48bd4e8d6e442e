"""Tokenized documents on disk, memory-mapped.

A directory of token arrays holds, little-endian:

- ``tokens.bin``: the tokens of all documents, one after another, without separators; uint16 where
  the vocabulary has at most 65,536 tokens, else uint32
- ``offsets.npy``: int64 ``[documents + 1]``; document ``i`` is
  ``tokens[offsets[i]:offsets[i + 1]]``
- ``document_bytes.npy``: int64 ``[documents]``: UTF-8 bytes of each document's text, by which bits
  per byte are counted
- optionally ``counted.bin``: uint8 per token, 0 where the loss does not count it as a target, else
  1, or 2 in a bad answer; without it all count, and so does the separator after each document
- optionally ``first.npy``: int64 ``[documents]``, the token before each document where it is not
  ``bos_id`` for all, as chat templates may begin with different ones
- ``meta.json``: format, version, dtype, counts, ``vocab_size``, ``bos_id``, ``eos_id``, and the
  SHA-256 of the contents, by which a resumed run recognizes its data
- optionally ``tokenizer.json``, the tokenizer that made them
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, SupportsIndex, final

import numpy as np
from jaxtyping import Integer

from jaxinfra.errors import DataError
from jaxinfra.runtime.files import read_json

FORMAT = "jaxinfra-token-arrays"
VERSION = 1
META = "meta.json"
COUNTED = "counted.bin"
FIRST = "first.npy"
_STRETCH = 1 << 24  # tokens of a memory-mapped file that are looked at together


@final
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenArrays:
    """Tokenized documents: document ``i`` is ``tokens[starts[i] : starts[i] + lengths[i]]``."""

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    document_bytes: np.ndarray  # UTF-8 bytes of the text that the loss counts
    vocab_size: int
    bos_id: int
    eos_id: int
    fingerprint: str
    counted: np.ndarray | None = None  # uint8 per token, 0: the loss leaves it out; None: all
    # float32 beside tokens: log probability of each under a reference model.
    reference: np.ndarray | None = None
    first: np.ndarray | None = None  # token before each document; None: bos_id

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty ones."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents, without separators."""
        return int(self.lengths.sum())

    @property
    def num_counted(self) -> int:
        """Number of tokens that the loss counts as targets, separators aside."""
        if self.counted is None:
            return self.num_tokens
        sums = np.concatenate(([0], np.cumsum(self.counted != 0, dtype=np.int64)))
        return int((sums[self.starts + self.lengths] - sums[self.starts]).sum())

    @property
    def num_bytes(self) -> int:
        """Number of UTF-8 bytes in the documents' texts, as far as the loss counts them."""
        return int(self.document_bytes.sum())

    def document(self, index: SupportsIndex) -> Integer[np.ndarray, "T"]:
        """Returns the tokens of one document, without separator."""
        start = self.starts[index]
        return self.tokens[start : start + self.lengths[index]]

    def first_id_beyond(self, vocab_size: int) -> int | None:
        """Returns the first id that is ``vocab_size`` or more, None if every id is below it."""
        if self.vocab_size <= vocab_size:
            return None
        stretches = (
            self.tokens[start : start + _STRETCH] for start in range(0, len(self.tokens), _STRETCH)
        )
        for ids in (*(() if self.first is None else (self.first,)), *stretches):
            if (beyond := ids >= vocab_size).any():
                return int(ids[beyond.argmax()])
        return None

    def select(self, documents: Integer[np.ndarray, "documents"]) -> "TokenArrays":
        """Returns a view of the documents of these indices; no token is copied."""
        identity = hashlib.sha256(self.fingerprint.encode())
        identity.update(np.ascontiguousarray(documents).astype("<i8").tobytes())
        return dataclasses.replace(
            self,
            starts=self.starts[documents],
            lengths=self.lengths[documents],
            document_bytes=self.document_bytes[documents],
            first=None if self.first is None else self.first[documents],
            fingerprint=identity.hexdigest(),
        )


@final
class TokenWriter:
    """Writes token arrays into an existing directory, document by document.

    Args:
        marks: whether the writer stores for each token if the loss counts it.
    """

    def __init__(
        self, directory: Path, *, vocab_size: int, bos_id: int, eos_id: int, marks: bool = False
    ):
        for name, token in (("bos_id", bos_id), ("eos_id", eos_id)):
            if not 0 <= token < vocab_size:
                raise DataError(f"{name}={token} is outside the vocabulary of {vocab_size}")
        self._directory = directory
        self._settings = {"vocab_size": vocab_size, "bos_id": bos_id, "eos_id": eos_id}
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._lengths: list[int] = []
        self._document_bytes: list[int] = []
        self._first: list[int] = []
        self._hash = hashlib.sha256()
        self._file = (directory / "tokens.bin").open("wb")
        self._marks = (directory / COUNTED).open("wb") if marks else None

    def append(
        self,
        tokens: np.ndarray,
        *,
        num_bytes: int,
        counted: np.ndarray | None = None,
        first: int | None = None,
    ) -> None:
        """Appends a document.

        Args:
            num_bytes: UTF-8 bytes of its text.
            counted: marks on the tokens that the loss counts.
            first: token before the document; None: ``bos_id``.
        """
        vocab_size = self._settings["vocab_size"]
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise DataError(
                f"document {len(self._lengths)} is {tokens.dtype}{list(tokens.shape)}; "
                "tokens must be a row of integers"
            )
        if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
            raise DataError(
                f"document {len(self._lengths)} has tokens from {tokens.min()} to {tokens.max()}; "
                f"a vocabulary of {vocab_size} ends at {vocab_size - 1}"
            )
        data = tokens.astype(self._dtype).tobytes()
        self._hash.update(data)
        self._file.write(data)
        assert (counted is None) == (self._marks is None), "marks"
        if self._marks is not None and counted is not None:
            assert counted.shape == tokens.shape, f"{counted.shape} marks, {tokens.shape} tokens"
            marks = counted.astype(np.uint8).tobytes()
            self._hash.update(marks)
            self._marks.write(marks)
        self._lengths.append(tokens.size)
        self._document_bytes.append(num_bytes)
        self._first.append(self._settings["bos_id"] if first is None else first)

    def finish(self) -> None:
        """Writes the metadata and offsets; without them the directory is not valid."""
        self.close()
        offsets = np.concatenate(([0], np.cumsum(self._lengths, dtype="<i8"))).astype("<i8")
        document_bytes = np.array(self._document_bytes, dtype="<i8")
        np.save(self._directory / "offsets.npy", offsets)
        np.save(self._directory / "document_bytes.npy", document_bytes)
        has_first = set(self._first) - {self._settings["bos_id"]}
        if has_first:
            first = np.array(self._first, dtype="<i8")
            np.save(self._directory / FIRST, first)
            self._hash.update(first)
        for part in (offsets, document_bytes, json.dumps(self._settings).encode()):
            self._hash.update(part)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self._dtype.name,
            "num_documents": len(self._lengths),
            "num_tokens": int(offsets[-1]),
            "num_bytes": int(document_bytes.sum()),
            "marks": self._marks is not None,
            "first": bool(has_first),
            **self._settings,
            "sha256": self._hash.hexdigest(),
        }
        (self._directory / META).write_text(json.dumps(meta, indent=1) + "\n")

    def close(self) -> None:
        """Closes the token file; further calls have no effect."""
        self._file.close()
        if self._marks is not None:
            self._marks.close()


def write_token_arrays(
    directory: Path,
    documents: Iterable[tuple[np.ndarray, int]],
    *,
    vocab_size: int,
    bos_id: int,
    eos_id: int,
) -> None:
    """Writes documents, each given as (tokens, UTF-8 bytes of its text).

    ``bos_id`` is put before each document when it is read, ``eos_id`` is the target of its last
    token; both may be one separator. The directory appears only when complete, and an existing
    one is never overwritten.
    """
    if directory.exists():
        raise DataError(f"{directory} exists; nothing is overwritten: choose another directory")
    with new_directory(directory) as unfinished:
        writer = TokenWriter(unfinished, vocab_size=vocab_size, bos_id=bos_id, eos_id=eos_id)
        with contextlib.closing(writer):
            for tokens, num_bytes in documents:
                writer.append(tokens, num_bytes=num_bytes)
            writer.finish()


def open_token_arrays(directory: Path) -> TokenArrays:
    """Opens token arrays, memory-mapped."""
    meta = _read_meta(directory)
    tokens_path = directory / "tokens.bin"
    try:
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        offsets = np.load(directory / "offsets.npy")
        document_bytes = np.load(directory / "document_bytes.npy")
        num_tokens, num_documents = int(meta["num_tokens"]), int(meta["num_documents"])
        own_vocab_size = int(meta["vocab_size"])
        actual_bytes = tokens_path.stat().st_size
        marks = (directory / COUNTED) if meta.get("marks", False) else None
        num_marks = num_tokens if marks is None else marks.stat().st_size
        first = np.load(directory / FIRST) if meta.get("first", False) else None
        separators = {"bos_id": int(meta["bos_id"]), "eos_id": int(meta["eos_id"])}
        fingerprint = str(meta["sha256"])
    except (OSError, ValueError, TypeError, KeyError, EOFError) as error:
        raise DataError(
            f"{directory}: unreadable token arrays ({type(error).__name__}: {error}); "
            "write them anew with write_token_arrays"
        ) from error
    if (
        actual_bytes != num_tokens * dtype.itemsize
        or num_marks != num_tokens
        or offsets.shape != (num_documents + 1,)
        or document_bytes.shape != (num_documents,)
        or (first is not None and first.shape != (num_documents,))
        or offsets[0] != 0
        or offsets[-1] != num_tokens
        or (np.diff(offsets) < 0).any()
    ):
        raise DataError(
            f"{directory}: token arrays disagree with {META} (tokens.bin has {actual_bytes} bytes "
            f"for {num_tokens} tokens, offsets {offsets.shape} for {num_documents} documents); "
            "the write was cut short: write them anew"
        )
    if not num_tokens:
        raise DataError(f"{directory}: token arrays without a token; nothing to learn or evaluate")
    return TokenArrays(
        tokens=np.memmap(tokens_path, dtype=dtype, mode="r"),
        starts=offsets[:-1],
        lengths=np.diff(offsets),
        document_bytes=document_bytes,
        vocab_size=own_vocab_size,
        fingerprint=fingerprint,
        counted=None if marks is None else np.memmap(marks, dtype=np.uint8, mode="r"),
        first=first,
        **separators,
    )


def is_token_arrays(directory: Path) -> bool:
    """Whether a directory has the metadata file of token arrays."""
    path = directory / META
    return path.is_file() and FORMAT.encode() in path.read_bytes()


@contextlib.contextmanager
def new_directory(final_path: Path) -> Iterator[Path]:
    """Makes a directory to fill in a ``with`` block; renames it to its name on success.

    If another process finished the same directory first, its result is kept.
    """
    unfinished = final_path.with_name(f".{final_path.name}.{uuid.uuid4().hex[:12]}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in unfinished.rglob("*"):
            if path.is_file():
                # Without it a power cut could leave a complete name on incomplete contents.
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        try:
            unfinished.rename(final_path)
        except OSError:
            if not final_path.is_dir():
                raise
    except OSError as error:
        raise DataError(
            f"cannot write {final_path}: {error.strerror or error}; free space or name another "
            "directory"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / META
    try:
        meta = read_json(path, error=DataError)
    except DataError as error:
        raise DataError(
            f"{error}; a directory of token arrays is written by write_token_arrays"
        ) from error
    if (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
        raise DataError(
            f"{path}: not {FORMAT} version {VERSION}; write the arrays with this version's "
            "write_token_arrays"
        )
    return meta
