"""Documents out of one file: text, JSON lines (plain, gzip, zstd), Parquet and Arrow.

Arrow files are those that Hugging Face's ``datasets`` saves.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from jaxinfra.errors import DataError
from jaxinfra.runtime.files import parse_json, require_plain

_CHUNK_BYTES = 1 << 20
_ZSTD_BYTES = 4096  # at a time: each may stand for 32,768
_LINE_BYTES = 256 << 20
_JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_PARQUET = ".parquet"
_ARROW = ".arrow"
_ROWS = 1024  # read at a time
EACH_LINE = "each line must be one JSON object"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A named text; the name decides on which side of the split it falls."""

    name: str
    text: str


def read_documents(path: Path, *, name: str, text_field: str) -> Iterator[Document]:
    """The documents of a file, by its suffix; a row of many is named ``name:number``."""
    require_plain(path, error=DataError)
    try:
        if name.endswith(_JSON_LINES):
            yield from _json_lines(path, name, text_field)
        elif name.endswith((_PARQUET, _ARROW)):
            yield from _table(path, name, text_field)
        else:
            yield Document(name=name, text=_text(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_lines(path: Path, *, name: str) -> Iterator[Document]:
    """The lines of a file of JSON lines as they are, empty ones left out; rows of a table as such
    lines.
    """
    if name.endswith((_PARQUET, _ARROW)):
        require_plain(path, error=DataError)
        yield from _table_lines(path, name)
        return
    if not name.endswith(_JSON_LINES):
        raise DataError(
            f"{path}: conversations are read from {', '.join((*_JSON_LINES, _PARQUET, _ARROW))}; "
            "convert it, or name the files by a glob"
        )
    require_plain(path, error=DataError)
    try:
        for number, line in enumerate(_lines(path), start=1):
            text = decode(line)
            if text is None:
                raise DataError(f"{path}:{number}: not UTF-8 text; each line must be a JSON object")
            if text.strip():
                yield Document(name=f"{name}:{number}", text=text)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def holds_one_document(name: str) -> bool:
    """Whether the file is one text, rather than rows of texts."""
    return not name.endswith((*_JSON_LINES, _PARQUET, _ARROW))


def decode(data: bytes) -> str | None:
    """Text, or None for what is not: invalid UTF-8, or a NUL byte, the mark of a binary file."""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def _text(path: Path) -> str:
    data = path.read_bytes()
    text = decode(data)
    if text is None:
        what = f"a NUL byte at offset {data.index(0)}" if b"\0" in data else "invalid UTF-8"
        raise DataError(
            f"{path}: not a text file ({what}); every file must be UTF-8 text: "
            "remove it, convert it, or name the text files by a glob such as 'DIR/**/*.txt'"
        )
    return text


def _json_lines(path: Path, name: str, text_field: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = parse_json(line, where=where, error=DataError, remedy=EACH_LINE)
        if text_field not in row:
            raise DataError(
                f"{where}: no field {text_field!r} among {sorted(row)}; "
                "set text_field to the one that holds the text"
            )
        yield Document(name=f"{name}:{number}", text=_checked(row[text_field], where, text_field))


def _table(path: Path, name: str, text_field: str) -> Iterator[Document]:
    for number, row in enumerate(_rows(path, columns=[text_field]), start=1):
        text = _checked(row[text_field], f"{path}: row {number}", text_field)
        yield Document(name=f"{name}:{number}", text=text)


def _table_lines(path: Path, name: str) -> Iterator[Document]:
    for number, row in enumerate(_rows(path, columns=None), start=1):
        present = {key: value for key, value in row.items() if value is not None}
        try:
            line = json.dumps(present, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{path}: row {number} has a value that is no JSON ({error}); leave its column out"
            ) from error
        yield Document(name=f"{name}:{number}", text=line)


def _rows(path: Path, *, columns: list[str] | None) -> Iterator[dict[str, object]]:
    """The rows of a Parquet or Arrow file; of these columns, or of all."""
    try:
        if path.suffix == _PARQUET:
            with pyarrow.parquet.ParquetFile(path) as file:
                _require_columns(path, file.schema_arrow.names, columns)
                for rows in file.iter_batches(batch_size=_ROWS, columns=columns):
                    yield from rows.to_pylist()
            return
        with pyarrow.memory_map(str(path)) as source, _arrow(source) as file:
            _require_columns(path, file.schema.names, columns)
            batches = file
            if isinstance(file, pyarrow.ipc.RecordBatchFileReader):
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            for batch in batches:
                chosen = batch if columns is None else batch.select(columns)
                for first in range(0, chosen.num_rows, _ROWS):
                    yield from chosen.slice(first, _ROWS).to_pylist()
    except pyarrow.ArrowException as error:
        kind = "Parquet" if path.suffix == _PARQUET else "Arrow"
        raise DataError(
            f"{path}: not a readable {kind} file ({_first_line(error)}); write or copy it anew"
        ) from error


def _arrow(source: pyarrow.NativeFile) -> pyarrow.ipc.RecordBatchStreamReader:
    """A reader of either form: ``datasets`` writes streams, other programs files."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)


def _require_columns(path: Path, found: list[str], columns: list[str] | None) -> None:
    for name in columns or ():
        if name not in found:
            raise DataError(
                f"{path}: no column {name!r} among {sorted(found)}; set text_field to the one "
                "that holds the text"
            )


def _checked(value: object, where: str, text_field: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: field {text_field!r} holds {type(value).__name__}; it must hold text"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {text_field!r} holds half of a surrogate pair at character "
            f"{error.start}; text must be valid Unicode"
        ) from error
    return value


def _lines(path: Path) -> Iterator[bytes]:
    pending: list[bytes] = []  # of a line that goes on: joined once, not with every chunk
    size = 0
    for number, chunk in enumerate(_chunks(path)):
        first, *rest = chunk.split(b"\n")
        pending.append(first)
        size += len(first)
        if size > _LINE_BYTES:
            raise DataError(
                f"{path}: a line of more than {_LINE_BYTES:,} bytes, around byte "
                f"{number * _CHUNK_BYTES:,}; cut its document into several"
            )
        if rest:
            yield b"".join(pending)
            yield from rest[:-1]
            pending = [rest[-1]]
            size = len(rest[-1])
    yield b"".join(pending)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        if path.suffix == ".zst":
            yield from _zstd_chunks(path)
            return
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
        raise DataError(
            f"{path}: corrupt or truncated compressed data ({_first_line(error)}); "
            "write or copy it anew"
        ) from error


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    # Not zstandard's stream_reader: at a truncated frame it ends without an error.
    decompressor = zstandard.ZstdDecompressor()
    with path.open("rb") as file:
        frame = decompressor.decompressobj()
        while data := file.read(_ZSTD_BYTES):
            while data:
                if frame.eof:
                    frame = decompressor.decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data
        if not frame.eof:
            raise EOFError("it ends within a frame")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
