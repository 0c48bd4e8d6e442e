"""Special tokens of directories as ``transformers`` reads them; writes ``tokens.json`` beside.

Run in an environment of its own: ``pip install transformers``, then ``python make_tokens.py``.
"""

import json
import tempfile
from pathlib import Path

import transformers
from token_cases import CASES, SPELLED, write

found = {}
for name, case in CASES.items():
    with tempfile.TemporaryDirectory() as made:
        write(Path(made), case)
        read = transformers.AutoTokenizer.from_pretrained(made)
        ids = read("abcdef")["input_ids"]
        found[name] = {"ids": ids, "bos": read.bos_token_id, "eos": read.eos_token_id}
        found[name]["spelled"] = read(SPELLED, add_special_tokens=False)["input_ids"]
file = Path(__file__).with_name("tokens.json")
file.write_text(json.dumps(found) + "\n")
