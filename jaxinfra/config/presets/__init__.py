"""Presets by name, for the command line."""

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.presets import mixtures, models, runs
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError, nearest


def _presets_of(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Returns the public functions of a module that take no argument, in their order there."""
    return {
        name: make
        for name, make in vars(module).items()
        if isinstance(make, FunctionType)
        and make.__module__ == module.__name__
        and not (name.startswith("_") or inspect.signature(make).parameters)
    }


MODELS: dict[str, Callable[[], ModelConfig]] = {
    name: make for module in (models, mixtures) for name, make in _presets_of(module).items()
}
_RUNS: dict[str, Callable[[], RunConfig]] = _presets_of(runs)


def run_preset(name: str) -> RunConfig:
    """Returns the run preset of that name; a model's name gets the pretraining settings."""
    if name in _RUNS:
        return _RUNS[name]()
    if name in MODELS:
        return runs.pretraining(MODELS[name]())
    raise ConfigError(f"unknown preset {name!r}{nearest(name, MODELS)}")
