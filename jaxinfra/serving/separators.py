"""The tokens that a model's texts begin with and end at, as its own files say."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxinfra.data.tokenizer import panics, read_tokenizer
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import read_json, require_type


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Separators:
    """The tokens that text begins with and ends at."""

    prefix_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]  # empty: not said


def read_separators(path: Path, *, vocab_size: int) -> Separators:
    """What the tokenizer puts before a text, and what the model's own files say ends one.

    Raises ConfigError for ids that the model, with so many of them, does not have.
    """
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
    beyond = [each for each in (*prefix, *eos_ids) if not 0 <= each < vocab_size]
    if beyond:
        raise ConfigError(
            f"{path}: text begins or ends with token {beyond[0]}, the model's vocabulary is "
            f"0..{vocab_size - 1}; restore tokenizer.json and the config's eos_token_id"
        )
    return Separators(prefix_ids=tuple(prefix), eos_ids=tuple(eos_ids))
