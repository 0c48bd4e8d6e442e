"""Data as people have it: directories of ``datasets``, and conversations in three forms."""

import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from jaxinfra.data.chat import parse_conversation
from jaxinfra.data.readers import Document, read_documents, read_lines
from jaxinfra.data.sources import scan
from jaxinfra.errors import DataError

TEXTS = ["first text", "second, längerer text", "third"]


def write_stream(path, table):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)


@pytest.fixture
def saved(tmp_path):
    """As ``Dataset.save_to_disk`` leaves a directory."""
    write_stream(tmp_path / "data-00000-of-00001.arrow", pa.table({"text": TEXTS, "id": [1, 2, 3]}))
    for name in ("state.json", "dataset_info.json", "cache-1f.arrow"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_saved_dataset_is_its_rows(saved):
    found = list(scan(str(saved)).documents(text_field="text"))
    assert [each.text for each in found] == TEXTS
    assert found[2].name == "data-00000-of-00001.arrow:3"


def test_another_directory_keeps_its_json(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    assert scan(str(tmp_path)).names == ("a.txt", "state.json")


def test_files_of_the_other_arrow_form(tmp_path):
    table = pa.table({"text": TEXTS})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    found = read_documents(path, name="a.arrow", text_field="text")
    assert [each.text for each in found] == TEXTS


def test_a_damaged_or_other_table_is_refused(saved):
    path = saved / "data-00000-of-00001.arrow"
    with pytest.raises(DataError, match="no column 'body' among"):
        list(read_documents(path, name=path.name, text_field="body"))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match="not a readable Arrow file"):
        list(read_documents(path, name=path.name, text_field="text"))


ROWS = {
    "messages": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a", "input": "", "output": "b"},
}


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_conversations_in_three_forms_and_files_are_the_same(form, kind, tmp_path):
    path, row = tmp_path / f"a.{kind}", ROWS[form]
    if kind == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist([row]), path)
    else:
        write_stream(path, pa.Table.from_pylist([row]))
    (line,) = read_lines(path, name=path.name)
    found = parse_conversation(line)
    messages, tools = found.messages, found.tools
    assert messages == ROWS["messages"]["messages"]
    assert tools is None


def parsed(row):
    return parse_conversation(Document(name="x", text=json.dumps(row))).messages


def test_what_alpaca_adds():
    found = parsed({"instruction": "add", "input": "1 2", "output": "3", "system": "be brief"})
    assert [each["content"] for each in found] == ["be brief", "add\n\n1 2", "3"]
    assert [each["role"] for each in found] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "as Alpaca has it"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "nothing to learn from"),
        ({"conversations": [{"value": "a"}]}, "no role"),
        ({"conversations": ["a"]}, "no role"),
        ({"instruction": 3, "output": "b"}, "must be text"),
    ],
    ids=["unknown", "no answer", "no speaker", "no turn", "number"],
)
def test_refusals(row, words):
    with pytest.raises(DataError, match=words):
        parsed(row)
