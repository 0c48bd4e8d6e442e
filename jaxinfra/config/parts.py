"""Functions and classes of a user's own that a config names as ``"module:name"``.

Reading the config in another process imports that module. A config can only name functions and
classes marked with ``part``, so a config from elsewhere cannot call arbitrary importable code.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from jaxinfra.errors import ConfigError

_PARTS: dict[str, Any] = {}


def part[Part](thing: Part) -> Part:
    """Marks a function or class as a part that configs may name; use it as a decorator.

    Args:
        thing: a function or class that another process can find by its module and name.

    Raises:
        ConfigError: ``thing`` is not at the top of a module, so other processes cannot find it.

    Examples:
        >>> @jaxinfra.part
        ... def plain_loss(logits, targets, *, weights):
        ...     nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        ...     return nll[..., 0]
        >>> config = jaxinfra.customize(jaxinfra.preset("tiny"), loss=plain_loss)
    """
    _PARTS[_name_of(thing)] = thing
    return thing


def part_name(thing: Any) -> str:
    """Returns the name by which a config refers to a part, and marks the part if needed."""
    name = _name_of(thing)
    _PARTS.setdefault(name, thing)
    return name


def find_part(name: str) -> Any:
    """Returns the part of that name, and imports its module if needed.

    Raises:
        ConfigError: the module does not exist, or marks no part of that name.
    """
    if name in _PARTS:
        return _PARTS[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"{name!r} names no part; write module:name, as in my_layers:Average")
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{name!r}: module {module!r} cannot be imported ({error}); put its directory on "
            "PYTHONPATH"
        ) from error
    if name not in _PARTS:
        raise ConfigError(
            f"{name!r}: module {module!r} marks no part of that name; decorate it with "
            "@jaxinfra.part"
        )
    return _PARTS[name]


def _name_of(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None)
    if name is None or "<" in name or not callable(thing):
        raise ConfigError(
            f"{thing!r} cannot be named in a config: define it with def or class at the top of a "
            "module"
        )
    return f"{_module_of(thing)}:{name}"


def _module_of(thing: Any) -> str:
    if thing.__module__ != "__main__":
        return thing.__module__
    # A script is known as other processes can import it.
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name
    file = getattr(main, "__file__", None)
    return "__main__" if file is None else Path(file).stem
