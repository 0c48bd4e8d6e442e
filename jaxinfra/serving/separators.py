"""The tokens that a model's texts begin with and end at, as its own files say."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxinfra.core.errors import ConfigError
from jaxinfra.core.files import read_json, require_type
from jaxinfra.data.tokenizer import panics, read_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Separators:
    """The tokens that text begins with and ends at."""

    prefix_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]  # empty: not said


def read_separators(path: Path) -> Separators:
    """What the tokenizer puts before a text, and what the model's own files say ends one."""
    tokenizer = read_tokenizer(path / "tokenizer.json")
    with panics():
        prefix = tokenizer.encode("", add_special_tokens=True).ids
    found: Any = None
    for name in ("generation_config.json", "hf_config.json", "config.json"):
        file = path / name
        if found is None and file.is_file():
            values = read_json(file)
            found = (values.get("hf") or values).get("eos_token_id")
            where = f"{file}, eos_token_id"
            require_type(found, int | list[int] | None, where=where, error=ConfigError)
    eos_ids = [] if found is None else found if isinstance(found, list) else [found]
    return Separators(prefix_ids=tuple(prefix), eos_ids=tuple(eos_ids))
