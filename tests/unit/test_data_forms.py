"""Data as people have it: directories of ``datasets``, and conversations in three forms."""

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from golden.text import file_cases

from jaxinfra.data.chat import parse_conversation
from jaxinfra.data.readers import Document, read_documents
from jaxinfra.data.sources import scan
from jaxinfra.errors import DataError

READ = json.loads(Path(file_cases.__file__).with_name("files.json").read_text())
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


def test_a_datasets_card_is_no_text_of_its_rows(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---")
    (tmp_path / "notes.txt").write_text("text")
    assert scan(str(tmp_path)).names == ("README.md", "notes.txt")
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}')
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert scan(str(tmp_path)).names == ("data/train.jsonl",)


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
    (line,) = read_documents(path, name=path.name, text_field=None)
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


def test_what_a_row_says_beside_its_messages():
    begun = {"role": "system", "content": "be brief"}
    for form in ROWS.values():
        assert parsed(form | {"system": "be brief"}) == [begun, *ROWS["messages"]["messages"]]
        assert parsed(form | {"system": ""}) == ROWS["messages"]["messages"]
    told = {"messages": [begun, *ROWS["messages"]["messages"]]}
    assert parsed(told | {"system": "be brief"}) == told["messages"]
    found = parsed(ROWS["alpaca"] | {"history": [["hi", "hello"], ["x", "y"]]})
    assert [each["content"] for each in found] == ["hi", "hello", "x", "y", "a", "b"]
    assert [each["role"] for each in found] == ["user", "assistant"] * 3


def test_rows_that_spell_lists_as_json():
    row = {name: json.dumps(value) for name, value in ROWS["messages"].items()}
    found = parse_conversation(Document(name="x", text=json.dumps(row | {"tools": '[{"a": 1}]'})))
    assert found.messages == ROWS["messages"]["messages"]
    assert found.tools == [{"a": 1}]


CALLS = [
    {"messages": [{"role": "user", "content": "do"}, {"role": "assistant", "tool_calls": [call]}]}
    for call in (
        {"function": {"name": "f", "arguments": {"city": "Oslo"}}},
        {"function": {"name": "g", "arguments": {"b": [1, 2]}}},
    )
]


def spelled(rows):
    """Calls' arguments as ``datasets`` has them in columns of JSON."""
    kind = pa.struct([("name", pa.string()), ("arguments", pa.json_(pa.string()))])
    call = pa.struct([("function", kind)])
    fields = [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    schema = pa.schema([("messages", pa.list_(pa.struct(fields)))])
    rows = json.loads(json.dumps(rows))
    for row in rows:
        held = row["messages"][1]["tool_calls"][0]["function"]
        held["arguments"] = json.dumps(held["arguments"])
    storage = pa.schema([("messages", plain(schema.field(0).type))])
    return pa.Table.from_pylist(rows, storage).cast(schema)


def plain(kind):
    if isinstance(kind, pa.ListType):
        return pa.list_(plain(kind.value_type))
    if isinstance(kind, pa.StructType):
        return pa.struct([(each.name, plain(each.type)) for each in kind])
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


@pytest.mark.parametrize("table", [pa.Table.from_pylist, spelled], ids=["structs", "json"])
def test_tables_have_the_keys_of_their_rows_alone(tmp_path, table):
    pa.parquet.write_table(table(CALLS), tmp_path / "a.parquet")
    found = [
        json.loads(line.text)
        for line in read_documents(tmp_path / "a.parquet", name="a.parquet", text_field=None)
    ]
    assert found == CALLS


FILES = {
    "a.jsonl": "".join(json.dumps(row) + "\r\n" for row in ROWS.values()),
    "a.ndjson": "\ufeff\n" + "\n\n".join(json.dumps(row) for row in ROWS.values()),
    "a.json": json.dumps(list(ROWS.values()), indent=1),
    "array.jsonl": "\ufeff" + json.dumps(list(ROWS.values())),
}


@pytest.mark.parametrize("name", FILES)
def test_json_is_rows_whatever_it_is_called(tmp_path, name):
    (tmp_path / name).write_text(FILES[name], newline="")
    found = [
        json.loads(line.text)
        for line in read_documents(tmp_path / name, name=name, text_field=None)
    ]
    assert found == list(ROWS.values())


def test_cells_are_rows_too(tmp_path):
    (tmp_path / "a.csv").write_text('\ufefftext,n\r\n"one, ""x""\ny",1\r\n,2\r\n')
    found = list(scan(str(tmp_path / "a.csv")).documents(text_field="text"))
    assert [each.text for each in found] == ['one, "x"\ny']
    talk = json.dumps(ROWS["messages"]["messages"]).replace('"', '""')
    (tmp_path / "b.csv").write_text(f'messages,system\n"{talk}",be brief\n')
    (line,) = read_documents(tmp_path / "b.csv", name="b.csv", text_field=None)
    assert [each["content"] for each in parse_conversation(line).messages] == ["be brief", "a", "b"]
    (tmp_path / "c.tsv").write_text("text\tn\na\n")
    with pytest.raises(DataError, match="row 1 has another number of cells"):
        list(scan(str(tmp_path / "c.tsv")).documents(text_field="text"))


@pytest.mark.parametrize("name", file_cases.CASES)
def test_files_are_rows_as_datasets_reads_them(tmp_path, name):
    (tmp_path / name).write_bytes(file_cases.CASES[name])
    documents = scan(str(tmp_path / name)).documents(text_field="text")
    if READ[name] is None:
        with pytest.raises(DataError, match=re.escape(name)):
            list(documents)
    else:
        assert [each.text for each in documents] == READ[name]


@pytest.mark.parametrize("name", ["a.Json", "a.CSV", "a.Jsonl.GZ", "a.PARQUET"])
def test_a_suffix_means_the_same_in_large_letters(tmp_path, name):
    table = pa.table({"text": ["b"]})
    data = b"text\nb\n" if name == "a.CSV" else b'{"text": "b"}\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("GZ") else data)
    if name == "a.PARQUET":
        pyarrow.parquet.write_table(table, tmp_path / name)
    assert [each.text for each in scan(str(tmp_path)).documents(text_field="text")] == ["b"]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_columns_of_one_name_are_refused(tmp_path, name):
    (tmp_path / "a.csv").write_text("text,n,text\na,1,b\n")
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for field in ("text", None):
        with pytest.raises(DataError, match="two columns are called 'text'"):
            list(read_documents(tmp_path / name, name=name, text_field=field))


@pytest.mark.parametrize("text", ['{\n "name": "x"\n}', "[1, 2]", '{"a": 1}', '["text"]'])
def test_json_that_is_no_rows_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json"):
        list(scan(str(tmp_path)).documents(text_field="text"))


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf")
    found = list(scan(str(tmp_path)).documents(text_field="text"))
    assert [each.text for each in found] == ["one\r\n"]


def test_turns_of_sharegpt_that_call_tools():
    user, found = {"from": "human", "value": "x"}, {"from": "observation", "value": "4"}
    call = {"name": "f", "arguments": {"a": 1}}
    for value in (call, [call, call]):
        asked = {"from": "function_call", "value": json.dumps(value)}
        row = {"conversations": [user, asked, found, {"from": "gpt", "value": "y"}]}
        _, called, told, _ = parsed(row)
        each = {"type": "function", "function": call}
        calls = [each] * (2 if isinstance(value, list) else 1)
        assert called == {"role": "assistant", "content": None, "tool_calls": calls}
        assert told == {"role": "tool", "content": "4"}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert parsed({"conversations": messages}) == messages
    assert parsed({"instruction": "", "input": "x", "output": "y"}) == messages


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "has no name"),
        (
            {"conversations": [{"from": "function_call", "value": "f(1)"}]},
            "function_call: not JSON",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": "[]"}]}, "tool_calls: .* is no list"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "tool_calls: .* is no list"),
        ({"prompt": "a"}, "as Alpaca has it"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "nothing to learn from"),
        ({"conversations": [{"value": "a"}]}, "no role"),
        ({"conversations": ["a"]}, "no role"),
        ({"instruction": 3, "output": "b"}, "must be text"),
        (ROWS["alpaca"] | {"history": [["a"], "b"]}, "history"),
        ({"messages": [{"role": "system", "content": "x"}], "system": "y"}, "leave one out"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "has weight=1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text alone is read"),
    ],
)
def test_refusals(row, words):
    with pytest.raises(DataError, match=words):
        parsed(row)
