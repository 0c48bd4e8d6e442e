"""Reading of documents from one file: text, JSON, CSV (plain, gzip, zstd), Parquet and Arrow.

Arrow files are those that Hugging Face's ``datasets`` saves.
"""

import codecs
import collections
import contextlib
import csv
import dataclasses
import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from jaxinfra.errors import DataError
from jaxinfra.runtime.files import parse_json, require_plain

_CHUNK_BYTES = 1 << 20
_ZSTD_BYTES = 4096  # at a time: each may stand for 32,768
_LINE_BYTES = 256 << 20
_JSON = (".jsonl", ".ndjson", ".json")
_CSV = {".csv": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
_ARROW = ".arrow"
_TABLES = (_PARQUET, _ARROW)
_ROWS = 1024  # read at a time
_OF_ANSWERS = {"messages", "conversations", "completion", "output", "chosen"}
EACH_LINE = "each line must be one JSON object"
_NAME_FIELD = (
    "name the one that holds the text: --set data.text_field=NAME of train, --text-field NAME of "
    "evaluate and doctor"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text with a name; the name decides its side of the train/held-out split."""

    name: str
    text: str


def read_documents(
    path: Path, *, name: str, text_field: str | None, refused: list[str] | None = None
) -> Iterator[Document]:
    """Reads a file's documents in the format of its suffix; rows are named ``name:number``.

    Args:
        text_field: field of a row that holds its text; None: each document is a row as JSON.
        refused: takes the messages of files and rows that cannot be read, which are then left
            out; None: the first raises DataError.
    """
    with _kept(refused):
        require_plain(path, error=DataError)
        yield from _documents(path, name=name, text_field=text_field, refused=refused)


@contextlib.contextmanager
def _kept(refused: list[str] | None) -> Iterator[None]:
    """Appends the message of a DataError within to ``refused``, unless that is None."""
    try:
        yield
    except DataError as error:
        if refused is None:
            raise
        refused.append(str(error))


def _documents(
    path: Path, *, name: str, text_field: str | None, refused: list[str] | None
) -> Iterator[Document]:
    try:
        if is_one_document(name):
            if text_field is None:
                raise DataError(
                    f"{path}: conversations are read from {', '.join((*_JSON, *_CSV, *_TABLES))}; "
                    "convert it, or name the files by a glob"
                )
            yield Document(name=name, text=_text(path))
        elif text_field is not None and _kind(name) in _TABLES:
            for number, row in enumerate(_table_rows(path, columns=[text_field]), start=1):
                with _kept(refused):
                    text = _field(row, f"{path}: row {number}", text_field)
                    yield Document(name=f"{name}:{number}", text=text)
        else:
            for number, where, line in _json_rows(path, name):
                with _kept(refused):
                    text = decode(line) if isinstance(line, bytes) else line
                    if text is None:
                        raise DataError(f"{where}: not UTF-8 text; {EACH_LINE}")
                    if text_field is not None:
                        row = parse_json(text, where=where, error=DataError, remedy=EACH_LINE)
                        text = _field(row, where, text_field)
                    yield Document(name=f"{name}:{number}", text=text)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def is_one_document(name: str) -> bool:
    """Whether a file of this name is one text, rather than rows of texts."""
    return _kind(name) not in (*_JSON, *_CSV, *_TABLES)


def _kind(name: str) -> str:
    """The suffix of a file without that of its compression, in small letters."""
    return Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def decode(data: bytes) -> str | None:
    """Decodes UTF-8; returns None for a binary file, which has invalid UTF-8 or a NUL byte.

    A byte order mark is removed; line ends stay unchanged.
    """
    try:
        return None if b"\0" in data else data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _text(path: Path) -> str:
    data = path.read_bytes()
    text = decode(data)
    if text is None:
        what = f"a NUL byte at offset {data.index(0)}" if b"\0" in data else "invalid UTF-8"
        raise DataError(
            f"{path}: not a text file ({what}); every file must be UTF-8 text: "
            "remove it, convert it, or name the text files by a glob such as 'DIR/**/*.txt'; "
            "jaxinfra doctor data SOURCE lists all of them"
        )
    return text


def _json_rows(path: Path, name: str) -> Iterator[tuple[int, str, bytes | str]]:
    """The rows of a file: number, place in messages, and the row as a JSON object.

    JSON is a line for each row or one array of them, whatever the file is called.
    """
    if (kind := _kind(name)) in _TABLES:
        for number, row in enumerate(_table_rows(path, columns=None), start=1):
            yield number, f"{path}: row {number}", _dumped(row, f"{path}: row {number}")
        return
    lines = enumerate(_lines(path), start=1)
    whole = ((number, line) for number, line in lines if line.strip())
    number, first = next(whole, (0, b""))
    first = first.removeprefix(codecs.BOM_UTF8)
    if kind in _CSV:
        rows = _csv_rows(path, itertools.chain([first], (line for _, line in lines)), _CSV[kind])
    elif first.lstrip().startswith(b"["):
        data = b"\n".join([first, *(line for _, line in lines)])
        holds = list[dict[str, Any]]
        rows = parse_json(data, where=str(path), holds=holds, error=DataError, remedy=EACH_LINE)
    else:
        for at, line in itertools.chain([(number, first)] if first else [], whole):
            yield at, f"{path}:{at}", line
        return
    for number, row in enumerate(rows, start=1):
        yield number, f"{path}: row {number}", json.dumps(row, ensure_ascii=False)


def _csv_rows(path: Path, lines: Iterable[bytes], delimiter: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(_LINE_BYTES)

    def texts() -> Iterator[str]:
        for line in lines:
            if decode(line) is None:
                raise DataError(f"{path}: not UTF-8 text; convert it")
            yield f"{line.decode()}\n"

    try:
        reader = csv.DictReader(texts(), delimiter=delimiter, strict=True)
        _require_columns(path, reader.fieldnames or (), None)
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():
                raise DataError(
                    f"{path}: row {number} has another number of cells than the first line, which "
                    f"names {len(reader.fieldnames or ())} columns; quote cells that hold "
                    f"{delimiter!r}"
                )
            yield row
    except csv.Error as error:
        raise DataError(f"{path}: not a table of cells between {delimiter!r} ({error})") from error


def _dumped(row: Mapping[str, object], where: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has a value that is no JSON ({error}); leave its column out"
        ) from error


def _without_nulls(value: Any, kind: pyarrow.DataType) -> Any:
    """A table's value as JSON has it: without keys of other rows, JSON columns parsed."""
    if value is None:
        return None
    if isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json":
        return json.loads(value)
    if isinstance(kind, pyarrow.StructType):
        found = {each.name: _without_nulls(value[each.name], each.type) for each in kind}
        return {name: each for name, each in found.items() if each is not None}
    if isinstance(kind, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType):
        return [_without_nulls(each, kind.value_type) for each in value]
    return value


def _table_rows(path: Path, *, columns: list[str] | None) -> Iterator[dict[str, object]]:
    """The rows of a Parquet or Arrow file; of these columns, or of all."""
    try:
        if path.suffix.lower() == _PARQUET:
            with pyarrow.parquet.ParquetFile(path) as file:
                _require_columns(path, file.schema_arrow.names, columns)
                for rows in file.iter_batches(batch_size=_ROWS, columns=columns):
                    yield from _row_values(rows) if columns is None else rows.to_pylist()
            return
        with pyarrow.memory_map(str(path)) as source, _arrow(source) as file:
            _require_columns(path, file.schema.names, columns)
            batches = file
            if isinstance(file, pyarrow.ipc.RecordBatchFileReader):
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            for batch in batches:
                chosen = batch if columns is None else batch.select(columns)
                for first in range(0, chosen.num_rows, _ROWS):
                    rows = chosen.slice(first, _ROWS)
                    yield from _row_values(rows) if columns is None else rows.to_pylist()
    except pyarrow.ArrowException as error:
        kind = "Parquet" if path.suffix.lower() == _PARQUET else "Arrow"
        raise DataError(
            f"{path}: not a readable {kind} file ({_first_line(error)}); write or copy it anew"
        ) from error


def _row_values(rows: pyarrow.RecordBatch) -> Iterator[dict[str, Any]]:
    kind = pyarrow.struct(rows.schema)
    return (_without_nulls(row, kind) for row in rows.to_pylist())


def _arrow(source: pyarrow.NativeFile) -> pyarrow.ipc.RecordBatchStreamReader:
    """A reader of either form: ``datasets`` writes streams, other programs files."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)


def _require_columns(path: Path, found: Sequence[str], columns: list[str] | None) -> None:
    if twice := [name for name, count in collections.Counter(found).items() if count > 1]:
        raise DataError(f"{path}: two columns are called {twice[0]!r}; rename or drop one of them")
    for name in columns or ():
        if name not in found:
            raise DataError(f"{path}: no column {name!r} among {sorted(found)}; {_NAME_FIELD}")


def _field(row: Mapping[str, object], where: str, text_field: str) -> str:
    if text_field not in row:
        hint = _NAME_FIELD
        if _OF_ANSWERS & row.keys():
            hint += (
                "; train reads rows of messages with --chat, of a prompt and its completion with "
            )
            hint += "--set data.format=completions, of good and bad answers with --preferences"
        raise DataError(f"{where}: no field {text_field!r} among {sorted(row)}; {hint}")
    value = row[text_field]
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
        if path.suffix.lower() == ".zst":
            yield from _zstd_chunks(path)
            return
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
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
