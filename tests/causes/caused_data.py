"""Causes in data: texts that are written for it and audited."""

import random
from collections.abc import Iterable
from pathlib import Path

from causes.causes import (
    DATA,
    CauseVerdict,
    alarm_of,
    cause,
    healthy,
    verdict_of_findings,
)
from jaxinfra.data.sources import scan
from jaxinfra.diagnostics.data_audit import audit
from jaxinfra.diagnostics.machine.finding import Finding
from jaxinfra.faults.arena import WORDS, Arena


def _texts(place: Path, texts: Iterable[str]) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (place / f"{number:03d}.txt").write_text(text)
    return place


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + ".\n"


def _documents(place: Path) -> list[Finding]:
    return audit(scan(str(place)).documents(text_field="text")).findings()


def _good_texts(count: int) -> list[str]:
    rng = random.Random(0)
    return [_text(rng, rng.randrange(20, 300)) for _ in range(count)]


@cause("duplicates", DATA, made="60 texts, 20 of them twice")
def duplicates(arena: Arena) -> CauseVerdict:
    """Learned by heart."""
    texts = _good_texts(60)
    place = _texts(arena.directory / "duplicates", [*texts, *texts[:20]])
    return verdict_of_findings(_documents(place), words="data: duplicates: 20 of 80 documents")


@cause("cut-documents", DATA, made="60 texts cut at 500 characters")
def cut_documents(arena: Arena) -> CauseVerdict:
    """An earlier tool had a limit."""
    texts = [
        text[:500].rstrip(". \n").ljust(500, "x") if len(text) > 500 else text
        for text in _good_texts(60)
    ]
    place = _texts(arena.directory / "cut-documents", texts)
    return verdict_of_findings(_documents(place), words="data: cut documents: .*500 characters")


@cause("unreadable-documents", DATA, made="60 texts, 10 of them decoded with a wrong encoding")
def unreadable_documents(arena: Arena) -> CauseVerdict:
    """Replacement characters."""
    texts = _good_texts(60)
    texts[:10] = [text.replace("e", "\ufffd") for text in texts[:10]]
    place = _texts(arena.directory / "unreadable-documents", texts)
    return verdict_of_findings(_documents(place), words="data: unreadable documents: 10")


@healthy("different-texts", DATA, what="200 texts of different lengths")
def different_texts(arena: Arena) -> str:
    """No text stands twice."""
    return alarm_of(_documents(_texts(arena.directory / "different-texts", _good_texts(200))))


@healthy("source-files", DATA, what="files with one header, two of them without a last line's end")
def source_files(arena: Arena) -> str:
    """As repositories have them."""
    texts = [f"# License: as the others.\n{text}" for text in _good_texts(80)]
    texts[3:5] = [text.rstrip("\n.") for text in texts[3:5]]
    return alarm_of(_documents(_texts(arena.directory / "source-files", texts)))
