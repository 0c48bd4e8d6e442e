"""Conversion of configs to and from JSON, and of single fields by dotted path; strict both ways."""

import dataclasses
import enum
import functools
import json
import math
import operator
import typing
from typing import Any

import cattrs
from cattrs.strategies import configure_tagged_union

from jaxinfra.config.mixture import Weight
from jaxinfra.config.model import FeedForwardConfig, MixerConfig
from jaxinfra.config.own import OwnFeedForward, OwnMixer
from jaxinfra.config.parts import find_part, part_name
from jaxinfra.config.rope import RopeScaling
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.runtime.files import whole_number


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    configure_tagged_union(RopeScaling.__value__, converter, tag_name="kind")
    # Members of these have a field ``kind``.
    _configure_layers(converter, MixerConfig, OwnMixer)
    _configure_layers(converter, FeedForwardConfig, OwnFeedForward)
    # cattrs would turn "3" into 3 and 1 into True; a config means what it says.
    for scalar in (int, float, bool, str):
        converter.register_structure_hook(scalar, _exactly)
    converter.register_structure_hook(enum.StrEnum, _member)
    converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _texts)
    # A number, or points.
    number, points = typing.get_args(Weight.__value__)
    converter.register_structure_hook_func(
        lambda kind: kind == Weight or kind == Weight.__value__,
        lambda value, _: converter.structure(value, points if _is_list(value) else number),
    )
    return converter


def _texts(value: Any, _: Any) -> tuple[str, ...]:
    """Reads a list of texts; of a single text the characters would be taken as its entries."""
    if not _is_list(value):
        raise ConfigError(f"{value!r} is no list; write one as [\"...\"], in a shell within '...'")
    return tuple(_exactly(each, str) for each in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _configure_layers(converter: cattrs.Converter, alias: Any, own: type) -> None:
    """Reads and writes a union of layers' records, those of users by the names of their parts."""
    union = alias.__value__
    ours = functools.reduce(
        operator.or_, (each for each in typing.get_args(union) if each is not own)
    )
    configure_tagged_union(ours, converter, tag_name="type")

    def structure(value: Any, _: Any) -> Any:
        name = value.get("type") if isinstance(value, dict) else None
        if not isinstance(name, str) or ":" not in name:
            return converter.structure(value, ours)
        kind = find_part(name)
        if not (isinstance(kind, type) and issubclass(kind, own)):
            raise ConfigError(f"{name!r} is no {own.__name__}, which belongs there")
        settings = {key: each for key, each in value.items() if key != "type"}
        return converter.structure(settings, kind)

    def unstructure(value: Any) -> dict[str, Any]:
        if isinstance(value, own):
            return {**converter.unstructure(value), "type": part_name(type(value))}
        return converter.unstructure(value, ours)

    converter.register_structure_hook_func(lambda kind: kind == union, structure)
    converter.register_unstructure_hook_func(lambda kind: kind == union, unstructure)


def _exactly(value: Any, scalar: type) -> Any:
    if scalar is float and type(value) in (int, float):
        # NaN passes every comparison that a range check makes.
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(f"{str(value)[:40]} is not a finite number")
        return number
    if type(value) is not scalar:
        raise ConfigError(f"{value!r} is a {type(value).__name__}, expected {scalar.__name__}")
    return value


def _member(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    names = [member.value for member in kind]
    if value is None and "none" in names:  # the word, as settings are read
        value = "none"
    if value not in names:
        raise ConfigError(f"{value!r} is no {kind.__name__}{nearest(str(value), names)}")
    return kind(value)


_CONVERTER = _converter()


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a config dataclass to plain JSON values."""
    return _CONVERTER.unstructure(config)


def from_dict[C](kind: type[C], values: dict[str, Any]) -> C:
    """Reads a config back from JSON values; a ConfigError names each unknown key or wrong value."""
    try:
        return _CONVERTER.structure(values, kind)
    except cattrs.BaseValidationError as error:
        lines = cattrs.transform_error(error, path=kind.__name__, format_exception=_explain)
        raise ConfigError("; ".join(lines)) from error


def normalized[C](config: C, kind: type[C]) -> C:
    """Returns the config with strings replaced by the enum members that they name.

    A script may write ``policy="bf16"``. Dataclasses do not convert it, and later the comparison
    ``"bf16" is PolicyName.BF16`` would be false.

    Args:
        kind: class that the config must be an instance of.

    Raises ConfigError for a string that names no member, and for a value of the wrong type.
    """
    _require_records(config, kind, path="")
    return from_dict(kind, to_dict(config))


def _require_records(value: Any, kind: Any, *, path: str) -> None:
    """Raises ConfigError where something else is in the place of a record."""
    kind = kind.__value__ if isinstance(kind, typing.TypeAliasType) else kind
    if typing.get_origin(kind) is tuple:
        if not _is_list(value):
            raise ConfigError(f"{path}={value!r} is no tuple; give one")
        for number, each in enumerate(value):
            _require_records(each, typing.get_args(kind)[0], path=f"{path}.{number}")
        return
    kinds = typing.get_args(kind) or (kind,)
    records = tuple(each for each in kinds if dataclasses.is_dataclass(each))
    if not records or (value is None and type(None) in kinds):
        return
    if not isinstance(value, records):
        names = " or ".join(each.__name__ for each in records)
        where = f"{path}={value!r}" if path else repr(value)
        raise ConfigError(f"{where} is no {names}; give one, such as a preset has")
    for name, hint in typing.get_type_hints(type(value)).items():
        if typing.get_origin(hint) is not typing.ClassVar:
            _require_records(getattr(value, name), hint, path=f"{path}.{name}".strip("."))


def _explain(error: BaseException, expected: type | None) -> str:
    if isinstance(error, KeyError):
        return f"required field {error.args[0]!r} is missing"
    if isinstance(error, ConfigError | ValueError):
        return str(error)
    return cattrs.v.format_exception(error, expected)


def to_json(config: Any) -> str:
    """Returns a config as indented JSON with a final newline."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of JSON values by dotted path, such as ``model.stacks.0.repeats``."""
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list | tuple) and value:
        items = ((str(index), child) for index, child in enumerate(value))
    else:
        return {prefix.removesuffix("."): value}
    flat: dict[str, Any] = {}
    for key, child in items:
        flat |= flattened(child, f"{prefix}{key}.")
    return flat


def override[C](config: C, settings: typing.Sequence[str]) -> C:
    """Returns a copy of a config with settings changed, each written as ``"training.steps=100"``.

    Args:
        config: any config record, such as a ``RunConfig``.
        settings: ``path=value``; a value is JSON, or a bare word.

    Raises:
        ConfigError: a path that does not exist (with the nearest name), or a wrong value.

    Examples:
        >>> settings = ["training.steps=20", "mesh.fsdp=2"]
        >>> config = jaxinfra.override(jaxinfra.preset("tiny"), settings)
        >>> config.training.steps, config.mesh.fsdp
        (20, 2)
    """
    if not dataclasses.is_dataclass(config) or isinstance(settings, str):
        raise ConfigError(
            f"override({config!r:.60}, {settings!r:.60}): give a config, such as jaxinfra.preset "
            'returns, and a list of settings, as in ["training.steps=20"]'
        )
    values = to_dict(config)
    for setting in settings:
        path, separator, text = str(setting).partition("=")
        if not separator:
            raise ConfigError(f"setting {setting!r} has no value; write path=value")
        *parents, leaf = path.strip().split(".")
        node: Any = values
        for name in parents:
            node = _child(node, name, path)
        _child(node, leaf, path)
        node[int(leaf) if isinstance(node, list | tuple) else leaf] = _value(text.strip())
    return from_dict(type(config), values)


def parse_record[C](kind: type[C], text: str, *, what: str, first: str | None = None) -> C:
    """Parses a config record written as ``"rank=8,targets=query+value"``; fields left out have
    their defaults.

    Args:
        kind: the record's class.
        what: the record's name in errors.
        first: field whose name may be left out at the beginning.
    """
    fields = {field.name: field.default for field in dataclasses.fields(kind)}  # pyrefly: ignore
    values: dict[str, Any] = {}
    for number, item in enumerate(text.split(",")):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            if number or first is None:
                raise ConfigError(f"{what} {item!r} has no value; write name=value")
            name, value = first, name
        if name not in fields:
            raise ConfigError(f"unknown {what} setting {name!r}{nearest(name, fields)}")
        is_list = isinstance(fields[name], tuple)
        values[name] = value.split("+") if is_list else _value(value)
    return from_dict(kind, values)


def parse_values(settings: typing.Sequence[str], *, what: str) -> dict[str, Any]:
    """Parses values of free names, each written as ``"name=value"``: JSON, or a bare word.

    Args:
        what: what is set, in errors.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = (part.strip() for part in setting.partition("="))
        if not separator or not name:
            raise ConfigError(f"{what} {setting!r} has no value; write name=value")
        values[name] = _value(text)
    return values


def _child(node: Any, name: str, path: str) -> Any:
    if isinstance(node, dict) and name in node:
        return node[name]
    if isinstance(node, list | tuple):
        number = whole_number(name)
        if number is not None and number < len(node):
            return node[number]
    known = list(node) if isinstance(node, dict) else [str(i) for i in range(len(node or ()))]
    raise ConfigError(f"no setting {path!r}: unknown name {name!r}{nearest(name, known)}")


def _value(text: str) -> Any:
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
