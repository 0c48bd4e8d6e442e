"""Assignment of each document to the training or the held-out side."""

import dataclasses
import functools
import hashlib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, final

from jaxinfra.config.data import STDLIB, DataConfig, DataFormat
from jaxinfra.data.readers import Document
from jaxinfra.data.sources import Source
from jaxinfra.errors import DataError

# Of four prefixes tried ("" among them) the one whose largest held-out file of the standard library
# is the smallest share: 17% of the bytes. Without one, a generated file (pydoc_data/topics.py)
# would be half of them, and every held-out figure mostly a figure of that file.
_SALT = "jaxinfra/"
_TOLD_EVERY_S = 10.0


def _told(documents: Iterator[Document], spec: str) -> Iterator[Document]:
    """Passes documents on, and prints now and then how many there were: large texts take long."""
    told_at, num_chars = time.monotonic(), 0
    for number, document in enumerate(documents, start=1):
        yield document
        num_chars += len(document.text)
        if time.monotonic() - told_at > _TOLD_EVERY_S:
            told_at = time.monotonic()
            so_far = f"{number:,} documents, {num_chars / 1e6:,.0f} million characters"
            print(f"reading {spec}: {so_far}", file=sys.stderr, flush=True)


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
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
        found = source.documents(text_field=self.config.text_field if is_text else None)
        return _told(found, source.spec)

    def _is_heldout(self, name: str) -> bool:
        return name_hash(name) < self._limit

    @functools.cached_property
    def _limit(self) -> float:
        if self.heldout_source is not None:
            return 0.0
        # One of white space alone is neither a text to learn nor one to evaluate on.
        found = (each for each in self._of(self.source) if not each.text.isspace())
        names = (document.name for document in found)
        return heldout_limit(names, fraction=self.config.heldout_fraction)


def name_hash(name: str) -> float:
    """Hashes a document's name to a number in [0, 1), which decides its side of the split.

    A document is held out if the number is below ``heldout_limit``: about ``heldout_fraction`` of
    all documents is, and none changes sides when others come or go, as long as both sides have one.
    """
    return int.from_bytes(hashlib.sha256(f"{_SALT}{name}".encode()).digest()[:6], "big") / (1 << 48)


def heldout_limit(names: Iterable[str], *, fraction: float) -> float:
    """Returns the split's limit: a document is held out if its name's hash is below it.

    It is ``fraction`` if that leaves a document on each side. If not, the documents with the
    nearest hashes change sides, so that at least one is held out and one is trained on. A
    single document is trained on, and with ``fraction=0`` all are.

    Args:
        names: of all documents with a text; read only until a document of each side is found.
    """
    if not fraction:
        return 0.0
    num, lowest, highest = 0, 1.0, 0.0
    for name in names:
        found = name_hash(name)
        num, lowest, highest = num + 1, min(lowest, found), max(highest, found)
        if lowest < fraction <= highest:
            return fraction
    if num < 2:
        return 0.0
    return highest if highest < fraction else math.nextafter(lowest, 1.0)


def require_text(config: DataConfig, *, num_train: int, num_heldout: int) -> None:
    """Raises DataError if a source that the config names has no text."""
    for source, num in ((config.source, num_train), (config.heldout_source, num_heldout)):
        if source is not None and not num:
            raise DataError(f"data source {source!r}: no text in it; every document is empty")
