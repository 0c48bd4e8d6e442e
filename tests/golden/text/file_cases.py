"""Files whose rows have a field ``text``, by name: what tools write, and what spoils it."""

import json

ROWS = [{"text": "a"}, {"text": "b"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)

CASES: dict[str, bytes] = {
    name: data if isinstance(data, bytes) else data.encode()
    for name, data in {
        "mark.csv": '\ufefftext,n\r\nhello,1\r\n"a, ""b""",2\r\n',
        "mark_in_a_cell.csv": 'text\n"a\n\ufeffb"\n',
        "empty_lines.csv": "text,n\n\na,1\n\n\nb,2\n",
        "lines_in_a_cell.csv": 'text,n\n"a\r\n\r\nb",1\n',
        "quotes_in_a_cell.csv": 'text,n\nhe said "no",1\n',
        "number_column.csv": ",text\n0,hello\n1,bye\n",
        "space_in_a_name.csv": "text, n\na, 1\n",
        "no_rows.csv": "text\n",
        "open_quote.csv": 'text,n\n"never closed,1\nb,2\n',
        "latin_1.csv": "text\ncafé\n".encode("latin-1"),
        "utf_16.csv": "text\nhi\n".encode("utf-16"),
        "semicolons.csv": "text;n\na;1\n",
        "tabs.tsv": 'text\tn\na "q" b\t1\n',
        "mark.jsonl": "\ufeff" + LINES.replace("\n", "\r\n"),
        "empty_lines.jsonl": LINES.replace("\n", "\n\n  \n"),
        "name_twice.jsonl": '{"text": "a", "text": "b"}\n',
        "half_a_pair.jsonl": '{"text": "a\\ud83d"}\n',
        "whole_pair.jsonl": '{"text": "a\\ud83d\\ude00"}\n',
        "zero.jsonl": '{"text": "a\\u0000b"}\n',
        "line_separators.jsonl": '{"text": "a\u2028b\u0085c"}\n{"text": "d"}\n',
        "one_id_twice.jsonl": '{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}\n',
        "kinds_of_rows.jsonl": '{"text": "a"}\n["b"]\n',
        "texts.jsonl": '"a"\n"b"\n',
        "utf_16.jsonl": LINES.encode("utf-16"),
        "large_letters.JSONL": LINES,
        "lines.json": LINES,
        "array.json": json.dumps(ROWS, indent=2),
        "two_arrays.json": '[{"text": "a"}]\n[{"text": "b"}]',
        "comma.json": '[{"text": "a"},]',
        "kinds_of_rows.json": '[{"text": "a"}, "b"]',
        "no_rows.json": "[]",
    }.items()
}
