"""Texts of files as Hugging Face's ``datasets`` reads them; writes ``files.json`` beside.

A file that it refuses, or whose rows have no field ``text``, is null. Run in an environment of its
own: ``pip install datasets``, then ``python make_files.py``.
"""

import json
import tempfile
from pathlib import Path

import datasets
from file_cases import CASES

found = {}
for name, data in CASES.items():
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / name).write_bytes(data)
        kind = "json" if "json" in name.lower() else "csv"
        options = {"sep": "\t"} if name.endswith(".tsv") else {}
        try:
            rows = datasets.load_dataset(
                kind, data_files=f"{made}/{name}", split="train", cache_dir=made, **options
            )
            found[name] = [row["text"] for row in rows]
        except (ValueError, KeyError, datasets.exceptions.DatasetGenerationError) as error:
            # No rows are an error there.
            found[name] = [] if "corresponds to no data" in str(error) else None
file = Path(__file__).with_name("files.json")
file.write_text(json.dumps(found) + "\n")
