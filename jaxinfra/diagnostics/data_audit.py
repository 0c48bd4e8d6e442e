"""Audit of a run's documents: duplicates, truncated ends, unreadable text, lengths."""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Iterable

from jaxinfra.data.readers import Document
from jaxinfra.diagnostics.machine.finding import Finding, Grade, graded

_SPACE = re.compile(r"\s+")
_ODD = re.compile(r"[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ODD_SHARE = 0.01
"""Share of a document's characters above which it counts as unreadable."""
_SHARE = 0.01
"""Share of documents above which an oddity is worth a warning."""
_CUT_AT_LEAST = 3
"""Documents of one greatest length that together look like a limit and not like chance."""
_NAMES = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataAudit:
    """Counts of a data source's documents, and the names of the unusual ones."""

    documents: int
    characters: int
    empty: list[str]
    duplicates: list[tuple[str, str]]  # a document, and the first that has its text
    duplicate_characters: int
    cut: list[str]  # end within a word at the length of the longest; empty if only few do
    longest: int  # characters
    unreadable: list[str]
    lengths: dict[int, int]  # power of two to documents with at most so many characters

    def findings(self) -> list[Finding]:
        """Returns one finding per kind of unusual document, for ``jaxinfra doctor data``."""
        documents = max(1, self.documents)
        again = self.duplicate_characters / max(1, self.characters)
        twice = [f"{name} is {first}" for name, first in self.duplicates]
        return [
            graded(
                "data: duplicates",
                f"{len(self.duplicates)} of {self.documents} documents, {again:.1%} of characters"
                + _some(twice),
                ok=again <= _SHARE,
                rule=f"at most {_SHARE:.0%} of the text stands twice (white space aside)",
                remedy="remove them: they are learned by heart, and held-out copies flatter",
            ),
            graded(
                "data: cut documents",
                f"{len(self.cut)} end at {self.longest} characters, within a line"
                + _some(self.cut),
                ok=not self.cut,
                rule="no limit of an earlier tool has cut documents",
                remedy="make them again without that limit",
            ),
            graded(
                "data: unreadable documents",
                f"{len(self.unreadable)}" + _some(self.unreadable),
                ok=len(self.unreadable) <= _SHARE * documents,
                rule=f"at most {_SHARE:.0%} of documents have over {_ODD_SHARE:.0%} control or "
                "replacement characters",
                remedy="decode them with their own encoding, or leave them out",
            ),
            graded(
                "data: empty documents",
                f"{len(self.empty)}" + _some(self.empty),
                ok=len(self.empty) <= _SHARE * documents,
                rule=f"at most {_SHARE:.0%} of documents are empty",
                remedy="leave them out",
            ),
            Finding(
                subject="data: lengths",
                grade=Grade.OK,
                value=", ".join(f"<= {size}: {count}" for size, count in self.lengths.items()),
                rule="characters per document, by powers of two",
            ),
        ]


def audit(documents: Iterable[Document]) -> DataAudit:
    """Finds duplicate, cut, unreadable and empty documents, without keeping texts in memory."""
    first: dict[bytes, str] = {}
    duplicates, empty, unreadable = [], [], []
    ends: dict[int, list[str]] = collections.defaultdict(list)
    lengths: collections.Counter[int] = collections.Counter()
    count = characters = again = longest = 0
    for document in documents:
        text, name = document.text, document.name
        count += 1
        characters += len(text)
        longest = max(longest, len(text))
        lengths[1 << max(0, len(text) - 1).bit_length()] += 1
        if not text.strip():
            empty.append(name)
            continue
        key = hashlib.sha256(_SPACE.sub(" ", text).strip().encode(errors="replace")).digest()
        if key in first:
            duplicates.append((name, first[key]))
            again += len(text)
        first.setdefault(key, name)
        if len(_ODD.findall(text)) > _ODD_SHARE * len(text):
            unreadable.append(name)
        if not text.endswith("\n") and text[-1].isalnum():
            ends[len(text)].append(name)
    cut = ends.get(longest, [])
    return DataAudit(
        documents=count,
        characters=characters,
        empty=empty,
        duplicates=duplicates,
        duplicate_characters=again,
        cut=cut if len(cut) >= _CUT_AT_LEAST else [],
        longest=longest,
        unreadable=unreadable,
        lengths=dict(sorted(lengths.items())),
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f": {shown}{more}" if names else ""
