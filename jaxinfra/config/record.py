"""Decorator of config records, whose constructors refuse what is no value of theirs."""

import dataclasses
import enum
import functools
import inspect
import types
import typing
from typing import Any

from jaxinfra.errors import ConfigError, nearest


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def record[C: type](cls: C) -> C:
    """Makes a frozen dataclass of keywords, with slots, whose constructor raises ConfigError where
    Python would raise TypeError: an unknown or missing name, or a value of another type.

    A value of another type that its checks let through is refused when a run begins.
    """
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)
    plain = made.__init__

    @functools.wraps(plain)
    def checked(self: Any, *positional: Any, **given: Any) -> None:
        try:
            plain(self, *positional, **given)
        except (TypeError, AttributeError) as error:
            if positional:
                raise ConfigError(f"{made.__name__} takes settings by their names alone") from error
            if said := _wrong(made, given):
                raise ConfigError(f"{made.__name__}: {said}") from error
            raise

    made.__init__ = checked
    return made


def _wrong(kind: Any, given: dict[str, Any]) -> str | None:
    """The first of these settings that the record's class does not take; None: it takes all."""
    signature, hints = inspect.signature(kind).parameters, typing.get_type_hints(kind)
    for name, value in given.items():
        if name not in signature:
            return f"unknown setting {name!r}{nearest(name, signature)}"
        if not _fits(value, hints[name]):
            wanted = getattr(hints[name], "__name__", None) or str(hints[name])
            return f"{name}={value!r} is a {type(value).__name__}, expected {wanted}"
    missing = [
        name
        for name, each in signature.items()
        if each.default is inspect.Parameter.empty and name not in given
    ]
    return f"required setting {missing[0]!r} is missing" if missing else None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type by its outermost part; a choice may be its word."""
    if isinstance(hint, typing.TypeAliasType):
        hint = hint.__value__
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(hint))
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(
            value, bool
        )
    if kind is tuple:
        return isinstance(value, tuple | list)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        kind = str
    return kind is Any or isinstance(value, kind)
