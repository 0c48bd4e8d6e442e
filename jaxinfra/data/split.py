"""Assignment of each document to the training or the held-out side."""

import dataclasses
import hashlib
import sys
from collections.abc import Iterator
from typing import Any, final

from jaxinfra.config.data import STDLIB, DataConfig, DataFormat
from jaxinfra.data.readers import Document, holds_one_document
from jaxinfra.data.sources import Source
from jaxinfra.errors import DataError

# Of four prefixes tried ("" among them) the one whose largest held-out file of the standard library
# is the smallest share: 17% of the bytes. Without one, a generated file (pydoc_data/topics.py)
# would be half of them, and every held-out figure mostly a figure of that file.
_SALT = "jaxinfra/"


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The documents of a corpus, each on one side by its source or by its name's hash."""

    source: Source
    heldout_source: Source | None
    config: DataConfig

    def identity(self) -> dict[str, Any]:
        """JSON values that differ whenever the documents or their sides may differ."""
        sources = [self.source, *([self.heldout_source] if self.heldout_source else [])]
        return {
            "sources": [[str(source.root), source.listing()] for source in sources],
            "python": sys.version if STDLIB in {source.spec for source in sources} else None,
            "text_field": self.config.text_field,
            "format": self.config.format,
            "fraction": None if self.heldout_source else self.config.heldout_fraction,
        }

    def check_names(self) -> None:
        """Raises DataError, before any file is read, if the names alone leave a side empty."""
        names = self.source.names
        if self.heldout_source is None and all(holds_one_document(name) for name in names):
            num_heldout = sum(self._is_heldout(name) for name in names)
            require_both_sides(
                self.config, num_train=len(names) - num_heldout, num_heldout=num_heldout
            )

    def documents(self) -> Iterator[tuple[Document, bool]]:
        """Reads every document of the corpus, with a flag whether it is held out."""
        for document in self._of(self.source):
            yield document, self._is_heldout(document.name)
        if self.heldout_source is not None:
            for document in self._of(self.heldout_source):
                yield document, True

    def train_texts(self) -> Iterator[str]:
        """Reads the texts of the training side only."""
        for document in self._of(self.source):
            if not self._is_heldout(document.name):
                yield document.text

    def _of(self, source: Source) -> Iterator[Document]:
        is_text = self.config.format is DataFormat.TEXT
        return source.documents(text_field=self.config.text_field if is_text else None)

    def _is_heldout(self, name: str) -> bool:
        return self.heldout_source is None and name_hash(name) < self.config.heldout_fraction


def name_hash(name: str) -> float:
    """Hashes a document's name to a number in [0, 1), which decides its side of the split.

    A document is held out if the number is below ``heldout_fraction``: about that part of all
    documents is, and no document changes sides when others come or go.
    """
    return int.from_bytes(hashlib.sha256(f"{_SALT}{name}".encode()).digest()[:6], "big") / (1 << 48)


def require_both_sides(config: DataConfig, *, num_train: int, num_heldout: int) -> None:
    """Raises DataError with a remedy if a side of the split has no document."""
    if num_train and num_heldout:
        return
    num_documents = num_train + num_heldout
    if not num_documents or config.heldout_source is not None:
        empty = config.heldout_source if num_train else config.source
        raise DataError(f"data source {empty!r}: no text in it; every document is empty")
    side = "held out" if num_train else "trained on"
    raise DataError(
        f"none of the {num_documents} documents in {config.source!r} is {side} at "
        f"heldout_fraction={config.heldout_fraction} (a document goes by the hash of its name): "
        "change the fraction, add documents, or name a heldout_source of its own"
    )
