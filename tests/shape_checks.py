"""Shape annotations of the product are checked in tests, by beartype, at every call.

jaxtyping's own import hook wraps every function, nested ones at each definition; planning and
schedules, pure Python in long loops, would pay for it. Here functions and methods that name a shape
are wrapped, and no others.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import beartype
import jaxtyping

PACKAGES = ("jaxinfra", "pallas_kernels")


def names_shape(annotation: object, aliases: frozenset[object] = frozenset()) -> bool:
    """Whether an annotation is, or holds, one of jaxtyping's; ``aliases`` are those it is within,
    since an alias may name itself.
    """
    if isinstance(annotation, typing.TypeAliasType):
        if annotation in aliases:
            return False
        return names_shape(annotation.__value__, aliases | {annotation})
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(names_shape(part, aliases) for part in typing.get_args(annotation))


def _functions(owner: types.ModuleType | type, module: str) -> Iterator[tuple[object, str]]:
    for name, value in list(vars(owner).items()):
        if inspect.isclass(value) and value.__module__ == module and value is not owner:
            yield from _functions(value, module)
        if inspect.isfunction(value) and value.__module__ == module:
            yield owner, name


def _check_arrays(function: types.FunctionType) -> Callable[..., Any]:
    """Checks by beartype, of arrays alone: of a protocol's instances it could not tell."""
    kept = {name: value for name, value in function.__annotations__.items() if names_shape(value)}
    function.__annotations__ = kept
    return beartype.beartype(function)


def check_shapes(module: types.ModuleType) -> None:
    """Wraps what a module defines; what its decorators have already taken stays as it is."""
    for owner, name in _functions(module, module.__name__):
        if name == "__init__" and dataclasses.is_dataclass(owner):
            continue  # trees are also built of what stands for their arrays
        function = vars(owner)[name]
        if any(map(names_shape, function.__annotations__.values())):
            setattr(owner, name, jaxtyping.jaxtyped(function, typechecker=_check_arrays))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_check(module: types.ModuleType) -> None:
                execute(module)
                check_shapes(module)

            spec.loader.exec_module = execute_and_check
        return spec


def install() -> None:
    """Call it before anything imports the packages."""
    loaded = [name for name in PACKAGES if name in sys.modules]
    assert not loaded, f"{loaded} came before the checks"
    sys.meta_path.insert(0, _Finder())
