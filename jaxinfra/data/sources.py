"""The files of a corpus's text: the standard library, a directory, a glob or one file."""

import dataclasses
import glob
import logging
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import final

from jaxinfra.config.data import STDLIB
from jaxinfra.data.readers import Document, decode, is_one_document, read_documents
from jaxinfra.errors import DataError

_LOG = logging.getLogger(__name__)
_GLOB_MARKS = frozenset("*?[")
# Installed packages live beneath the standard library, and differ between machines.
_NOT_STDLIB = frozenset(("site-packages", "dist-packages", "__pycache__"))


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The files of a corpus, named relative to ``root`` and sorted by name."""

    spec: str
    root: Path
    names: tuple[str, ...]

    def listing(self) -> list[tuple[str, int, int]]:
        """Name, size and modification time (ns) of each file, which are part of the cache's key."""
        found = []
        for name in self.names:
            try:
                stat = (self.root / name).stat()
            except OSError as error:
                raise DataError(
                    f"{self.root / name}: cannot be read ({error.strerror}); remove it or fix it"
                ) from error
            found.append((name, stat.st_size, stat.st_mtime_ns))
        return found

    def documents(
        self, *, text_field: str | None, refused: list[str] | None = None
    ) -> Iterator[Document]:
        """Reads the documents of all files in a fixed order; empty ones are left out.

        Args:
            text_field: field of a row that holds its text; None: each document is a row as JSON.
            refused: takes the messages of what cannot be read, as in ``read_documents``.
        """
        if self.spec == STDLIB and text_field is not None:
            found = self._stdlib_documents()
        else:
            found = (
                document
                for name in self.names
                for document in read_documents(
                    self.root / name, name=name, text_field=text_field, refused=refused
                )
            )
        return (document for document in found if document.text)

    def _stdlib_documents(self) -> Iterator[Document]:
        skipped = []
        for name in self.names:
            text = decode((self.root / name).read_bytes())
            if text is None:
                skipped.append(name)
            else:
                yield Document(name=name, text=text)
        if skipped:
            # Tests of source encodings: written to be undecodable.
            _LOG.info("standard library: %d files not in UTF-8 skipped: %s", len(skipped), skipped)


def scan(spec: str) -> Source:
    """Finds the files that ``DataConfig.source`` names; raises DataError if there are none.

    A directory means all files at any depth, a glob all files it matches (``**`` spans
    directories); names that begin with a dot are skipped in both.
    """
    if spec == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        names = [
            name
            for name in _walk(root)
            if name.endswith(".py")
            and not _NOT_STDLIB.intersection(name.split("/"))
            and (root / name).is_file()
        ]
        return _source(spec, root, names, "no .py files of the standard library there")
    if not spec:
        raise DataError("data source '' is empty; name a file, a directory, or a glob in quotes")
    path = Path(spec).expanduser()
    if path.is_dir():
        return _source(spec, path, _tables_of(_walk(path)), "the directory holds no files")
    if path.exists():
        return _source(spec, path.parent, [path.name], "")
    if _GLOB_MARKS.intersection(spec):
        parts = path.parts
        fixed = next(i for i, part in enumerate(parts) if _GLOB_MARKS.intersection(part))
        root = Path(*parts[:fixed])
        pattern = str(Path(*parts[fixed:]))
        matches = glob.glob(pattern, root_dir=root, recursive=True)
        names = {Path(match).as_posix() for match in matches if (root / match).is_file()}
        return _source(spec, root, sorted(names), "the glob matches no file")
    raise DataError(
        f"data source {spec!r}: no such file or directory; name a file, a directory, a glob in "
        f"quotes, or {STDLIB!r}"
    )


def _source(spec: str, root: Path, names: list[str], if_none: str) -> Source:
    if not names:
        raise DataError(f"data source {spec!r} ({root}): {if_none}; name one that holds text")
    return Source(spec=spec, root=root.absolute(), names=tuple(names))


_ABOUT_TABLES = ("state.json", "dataset_info.json", "dataset_dict.json")
_ABOUT_ROWS = ("README.md", "dataset_infos.json")


def _tables_of(names: list[str]) -> list[str]:
    """Drops the metadata and cache of a directory that ``datasets`` saved, and a dataset's card."""
    if not all(is_one_document(name) for name in names if name not in _ABOUT_ROWS):
        names = [name for name in names if name not in _ABOUT_ROWS]
    if not any(name.endswith("/state.json") or name == "state.json" for name in names):
        return names
    if not any(name.endswith(".arrow") for name in names):
        return names

    def is_text(name: str) -> bool:
        file = name.rpartition("/")[2]
        return file not in _ABOUT_TABLES and not file.startswith("cache-")

    return [name for name in names if is_text(name)]


def _walk(root: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: {error.strerror}; its text would be missing: make it readable, or "
            "name a source without it"
        )

    names = []
    for directory, children, files in os.walk(root, onerror=refuse):
        children[:] = [child for child in children if not child.startswith(".")]
        relative = Path(directory).relative_to(root)
        names += [(relative / file).as_posix() for file in files if not file.startswith(".")]
    # By code point: the same on every machine, unlike the order of the file system.
    return sorted(names)
