"""The special tokens of a model, such as those that texts begin with and end at.

Files take precedence as in ``transformers``: ``tokenizer_config.json`` names the tokens, and
``special_tokens_map.json`` names them anew unless the former lists its added tokens;
``tokenizer.json`` alone says what is put before a text. A model stops at every end token that any
file names, as in vLLM.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import INFINITY, read_json, require_type

SETTINGS = "tokenizer_config.json"

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# Where no file says: the names that tokenizers trained here and old formats have.
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>")
_EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")
_PROBES = ("a", "0", " ", "\u4e00")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """The special tokens of one tokenizer; a role that no file names is an empty tuple or None."""

    bos_id: int | None  # precedes a document
    eos_id: int | None  # ends a document
    prefix_ids: tuple[int, ...]  # the tokenizer puts them before a text
    end_ids: tuple[int, ...]  # each ends what a model writes


def read_special_tokens(tokenizer: tokenizers.Tokenizer, directory: Path | None) -> SpecialTokens:
    """Reads the special tokens from a directory's files, if any, and a tokenizer.

    Raises:
        ConfigError: a file is not a valid file of its kind.
    """
    named = {} if directory is None else named_tokens(directory)

    def own(role: str) -> list[int]:
        found = tokenizer.token_to_id(named[role]) if role in named else None
        return [] if found is None else [found]

    begins = [*own("bos_token"), *_config_ids(directory, "bos_token_id")]
    ends = [*own("eos_token"), *_config_ids(directory, "eos_token_id")]
    bos, eos = begins or _known(tokenizer, _BOS_NAMES), ends or _known(tokenizer, _EOS_NAMES)
    return SpecialTokens(
        bos_id=next(iter(bos), None),
        eos_id=next(iter(eos), None),
        prefix_ids=_prefix(tokenizer),
        end_ids=tuple(dict.fromkeys(ends or eos)),
    )


def add_listed_tokens(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Adds the tokens that a directory's other files list and a tokenizer lacks, as transformers.

    These are ``added_tokens_decoder`` (or ``added_tokens.json``), the named roles, and
    ``extra_special_tokens``; each takes the next id.

    Raises:
        ConfigError: a file is not a valid file of its kind.
    """
    settings, where = _settings_with_map(directory), f"{directory}, listed tokens"
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = [*extra.values()] if isinstance(extra, dict) else extra
    require_type(extra, list[Any], where=f"{where}: extra", error=ConfigError)
    roles = [settings.get(role) for role in (*_NAMED, "mask_token")]
    special = [_added(each, where) for each in (*roles, *extra) if each is not None]
    have = {_flags(each) for each in tokenizer.get_added_tokens_decoder().values()}
    names = {each.content for each in special}
    if "added_tokens_decoder" in settings:
        decoder = settings["added_tokens_decoder"]
        require_type(decoder, dict[str, dict[str, Any]], where=where, error=ConfigError)
        if beyond := [key for key in decoder if not key.isdecimal()]:
            raise ConfigError(f"{where}: {beyond[0]!r} is no token id; correct it")
        listed = [_added(decoder[key], where) for key in sorted(decoder, key=int)]
    else:
        file = directory / "added_tokens.json"
        ids = read_json(file) if file.is_file() else {}
        require_type(ids, dict[str, int], where=str(file), error=ConfigError)
        ordered = sorted(ids.items(), key=lambda pair: pair[1])
        known = {name for name, *_ in have}
        listed = [_plain(name, names) for name, _ in ordered if name not in known]
    known = {name for name, *_ in have} | {each.content for each in listed}
    missing = [each for each in listed if _flags(each) not in have]
    tokenizer.add_tokens([*missing, *(each for each in special if each.content not in known)])


def _added(value: Any, where: str) -> tokenizers.AddedToken:
    """A token as a file has it: its text, or a dict with flags too."""
    fields = value if isinstance(value, dict) else {"content": value, "special": True}
    require_type(fields.get("content"), str, where=where, error=ConfigError)
    flags = {name: fields[name] for name in _FLAGS if name in fields}
    require_type(flags, dict[str, bool], where=where, error=ConfigError)
    return tokenizers.AddedToken(fields["content"], **flags)


def _plain(name: str, special: Collection[str]) -> tokenizers.AddedToken:
    is_special = name in special
    return tokenizers.AddedToken(name, normalized=not is_special, special=is_special)


def _flags(token: tokenizers.AddedToken) -> tuple[Any, ...]:
    return token.content, *(getattr(token, name) for name in _FLAGS)


def _settings_with_map(directory: Path) -> dict[str, Any]:
    """Settings of a tokenizer; ``special_tokens_map.json`` counts unless they list added tokens."""
    settings = read_settings(directory)
    if "added_tokens_decoder" not in settings:
        file = directory / "special_tokens_map.json"
        settings |= read_json(file) if file.is_file() else {}
    return settings


def named_tokens(directory: Path) -> dict[str, str]:
    """Returns the special tokens that a directory's files name, by role, for chat templates."""
    settings, named = _settings_with_map(directory), {}
    for role in _NAMED:
        token = settings.get(role)
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            require_type(token, str, where=f"{directory}, {role}", error=ConfigError)
            named[role] = token
    return named


def read_settings(directory: Path) -> dict[str, Any]:
    """Reads ``tokenizer_config.json``; an empty dict where there is none."""
    file = directory / SETTINGS
    return read_json(file) if file.is_file() else {}


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Reads ``generation_config.json``; an empty dict where there is none."""
    file = directory / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def _config_ids(directory: Path | None, name: str) -> list[int]:
    """Ids of a role in the configs of a model, those for generation first."""
    found: list[int] = []
    for file in ("generation_config.json", "hf_config.json", "config.json"):
        if directory is None or not (directory / file).is_file():
            continue
        values = read_json(directory / file, constants=INFINITY)
        values = values.get("hf") or values
        if values.get(name) is None and isinstance(text := values.get("text_config"), dict):
            values = text  # of a model of text and images
        ids = values.get(name)
        where = f"{directory / file}, {name}"
        require_type(ids, int | list[int] | None, where=where, error=ConfigError)
        found += [] if ids is None else ids if isinstance(ids, list) else [ids]
    return found


def _known(tokenizer: tokenizers.Tokenizer, names: tuple[str, ...]) -> list[int]:
    ids = (tokenizer.token_to_id(name) for name in names)
    return [each for each in ids if each is not None][:1]


def _prefix(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The tokens that a post-processor puts before a text; those after it end no prompt."""
    for probe in _PROBES:
        encoded = tokenizer.encode(probe, add_special_tokens=True)
        if 0 in encoded.sequence_ids:
            return tuple(encoded.ids[: encoded.sequence_ids.index(0)])
    return tuple(tokenizer.encode("", add_special_tokens=True).ids)
