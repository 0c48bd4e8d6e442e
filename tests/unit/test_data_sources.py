"""Every kind of source, and every way in which one can be bad."""

import errno
import gzip
import json
import logging
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jaxinfra.cli.main import main
from jaxinfra.data.sources import scan
from jaxinfra.errors import DataError

ROWS = ["first text\n", "zweiter Text é", "日本語"]
JSON_LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(ROWS))


def read(spec: Path | str, field: str = "text") -> dict[str, str]:
    documents = list(scan(str(spec)).documents(text_field=field))
    found = {document.name: document.text for document in documents}
    assert len(found) == len(documents), "names repeat"
    return found


def error(spec: Path | str, field: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        read(spec, field)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_parquet(path: Path, **columns: list) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_a_directory_is_read_at_any_depth_in_order(tmp_path: Path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "c" / "deep.md").write_text("deep")
    (tmp_path / "b" / "x.txt").write_bytes(b"line\r\n\tend")
    (tmp_path / "a.py").write_text("a = 'é'")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_bytes(b"\0")
    (tmp_path / ".git" / "index").write_bytes(b"\0")
    found = read(tmp_path)
    assert found == {"a.py": "a = 'é'", "b/c/deep.md": "deep", "b/x.txt": "line\r\n\tend"}
    assert list(found) == sorted(found)


def test_a_glob_names_files_relative_to_its_fixed_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("p/one.py", "p/q/two.py", "p/q/three.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(read(tmp_path / "p" / "**" / "*.py")) == ["one.py", "q/two.py"]
    assert list(read(tmp_path / "*" / "q" / "t*")) == ["p/q/three.txt", "p/q/two.py"]
    monkeypatch.chdir(tmp_path)
    assert list(read("p/*.py")) == ["one.py"]
    assert list(read("*/*.py")) == ["p/one.py"]


def test_one_text_file(tmp_path: Path):
    (tmp_path / "book [1].txt").write_text("once")
    assert read(tmp_path / "book [1].txt") == {"book [1].txt": "once"}


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".jsonl", lambda data: data),
        (".jsonl.gz", gzip.compress),
        (".jsonl.zst", zstandard.ZstdCompressor().compress),
        # Frames and members may follow one another, as `cat` and parallel compressors leave them.
        (".jsonl.gz", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
        (".jsonl.zst", lambda data: b"".join(map(zstandard.compress, (data[:9], data[9:])))),
    ],
)
def test_json_lines(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(compress((JSON_LINES + "\n  \n" + '{"text": ""}').encode()))
    assert read(path) == {f"rows{suffix}:{i}": text for i, text in enumerate(ROWS, start=1)}
    assert read(tmp_path) == read(path)


def test_json_lines_longer_than_a_read(tmp_path: Path):
    texts = ["x" * 3_000_000, "y" * 1_500_000, "z"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    assert list(read(path, "body").values()) == texts


def test_parquet(tmp_path: Path):
    path = write_parquet(tmp_path / "rows.parquet", id=[1, 2, 3], body=ROWS)
    assert read(path, "body") == {f"rows.parquet:{i}": t for i, t in enumerate(ROWS, start=1)}


def test_undecodable_files_of_the_standard_library_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    (tmp_path / "ok.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    for directory in ("site-packages/p", "dist-packages", "__pycache__"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "third.py").write_text("x = 2\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert read("stdlib") == {"ok.py": "x = 1\n"}
    assert "1 files not in UTF-8 skipped: ['latin.py']" in caplog.text


def test_a_python_without_library_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "no .py files of the standard library" in error("stdlib")


def test_missing_and_empty_sources(tmp_path: Path):
    assert "no such file or directory" in error(tmp_path / "nowhere")
    assert "the glob matches no file" in error(tmp_path / "*.txt")
    assert "the directory holds no files" in error(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    assert "link.txt cannot be read" in error(tmp_path)


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"a\0b", "a NUL byte at offset 1"), (b"ok \xff", "invalid UTF-8"), (b"\x80", "invalid")],
)
def test_the_first_binary_file_is_named(tmp_path: Path, data: bytes, what: str):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.bin").write_bytes(data)
    (tmp_path / "c.bin").write_bytes(data)
    for spec in (tmp_path, tmp_path / "*", tmp_path / "b.bin"):
        message = error(spec)
        assert "b.bin: not a text file" in message
        assert what in message
        assert "glob" in message


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "rows.jsonl:2: not JSON"),
        ("[1]", "rows.jsonl:2: [1] is no object; each line"),
        ('{"body": "x", "a": 1}', "rows.jsonl:2: no field 'text' among ['a', 'body']"),
        ('{"text": 3}', "rows.jsonl:2: field 'text' holds int"),
        ('{"text": null}', "rows.jsonl:2: field 'text' holds NoneType"),
        ('{"text": "\\ud800"}', "half of a character"),
    ],
)
def test_a_bad_json_line_is_named_by_its_number(tmp_path: Path, line: str, what: str):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    assert what in error(path)


def test_json_lines_in_another_encoding(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    assert "rows.jsonl:1: not UTF-8 text" in error(tmp_path)


@pytest.mark.parametrize("keep", [0.5, 0.99, -1])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_corrupt_compressed_files(tmp_path: Path, suffix: str, keep: float):
    compress = gzip.compress if suffix == ".gz" else zstandard.compress
    data = compress((JSON_LINES * 50).encode())
    path = tmp_path / f"rows.jsonl{suffix}"
    # Cut short, or not compressed at all.
    path.write_bytes(JSON_LINES.encode() if keep < 0 else data[: int(keep * len(data))])
    assert f"rows.jsonl{suffix}: corrupt or truncated compressed data" in error(path)


def test_bad_parquet(tmp_path: Path):
    path = write_parquet(tmp_path / "rows.parquet", body=ROWS, id=[1, 2, 3])
    assert "no column 'text' among ['body', 'id']" in error(path)
    assert "rows.parquet: row 1: field 'id' holds int" in error(path, "id")
    gaps = write_parquet(tmp_path / "gaps.parquet", text=["a", "b", None])
    assert "gaps.parquet: row 3: field 'text' holds NoneType" in error(gaps)
    path.write_bytes(path.read_bytes()[:40])
    assert "rows.parquet: not a readable Parquet file" in error(path, "body")
    path.write_bytes(b"")
    assert "rows.parquet: not a readable Parquet file" in error(path, "body")


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    # Permissions do not stop root, whom containers run tests as.
    def forbid(path):
        if str(path).endswith("inner"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", forbid)
    with pytest.raises(DataError, match=r"inner: Permission denied; its text would be missing"):
        scan(str(tmp_path))


def test_an_empty_source_is_not_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert "is empty" in error("")
    assert read(".") == {"a.txt": "text"}


def test_doctor_names_everything_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "good.txt").write_text("a text\n")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    rows = ['{"body": "a row"}', '{"body": "cut', '{"text": "no body"}', '{"body": "more"}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    write_parquet(tmp_path / "table.parquet", body=["x", None])
    assert main(["doctor", "data", str(tmp_path), "--text-field", "body"]) == 1
    printed = capsys.readouterr()
    first, cut, without, null = printed.err.splitlines()
    assert "latin.txt: not a text file" in first
    assert "rows.jsonl:2: not JSON" in cut
    assert "rows.jsonl:3: no field 'body'" in without
    assert "table.parquet: row 2" in null
    assert "refused files and rows: 4" in printed.out
    assert "of 4 documents" in printed.out
