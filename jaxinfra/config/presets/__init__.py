"""Presets by name, for the command line."""

from collections.abc import Callable

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.presets import models, runs
from jaxinfra.config.run import RunConfig
from jaxinfra.core.errors import ConfigError, nearest

MODELS: dict[str, Callable[[], ModelConfig]] = {
    preset.__name__: preset
    for preset in (
        models.tiny,
        models.small,
        models.llama2_7b,
        models.llama2_13b,
        models.llama2_70b,
        models.llama3_8b,
        models.llama3_70b,
        models.llama3_405b,
        models.llama32_1b,
        models.llama32_3b,
        models.gpt2,
        models.gpt2_medium,
        models.gpt2_large,
        models.gpt2_xl,
    )
}
_RUNS: dict[str, Callable[[], RunConfig]] = {"tiny": runs.tiny, "small": runs.small}


def run_preset(name: str) -> RunConfig:
    """The run of that name; a model's name alone gets the pretraining settings."""
    if name in _RUNS:
        return _RUNS[name]()
    if name in MODELS:
        return runs.pretraining(MODELS[name]())
    raise ConfigError(f"unknown preset {name!r}{nearest(name, MODELS)}")
