"""Presets by name, for the command line."""

from collections.abc import Callable

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.presets import deepseek, gemma, mixtures, models, runs
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError, nearest

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
        models.llama31_8b,
        models.llama31_70b,
        models.llama3_405b,
        models.llama32_1b,
        models.llama32_3b,
        models.gpt2,
        models.gpt2_medium,
        models.gpt2_large,
        models.gpt2_xl,
        models.mistral_7b,
        models.mistral_7b_v03,
        models.phi3_mini_4k,
        models.phi3_medium_4k,
        models.phi4,
        models.qwen25_05b,
        models.qwen25_15b,
        models.qwen25_3b,
        models.qwen25_7b,
        models.qwen25_14b,
        models.qwen25_32b,
        models.qwen25_72b,
        models.qwen3_06b,
        models.qwen3_17b,
        models.qwen3_4b,
        models.qwen3_8b,
        models.qwen3_14b,
        models.qwen3_32b,
        gemma.gemma2_2b,
        gemma.gemma2_9b,
        gemma.gemma2_27b,
        mixtures.tiny_moe,
        mixtures.small_moe,
        mixtures.mixtral_8x7b,
        mixtures.mixtral_8x22b,
        mixtures.qwen3_30b_a3b,
        mixtures.qwen3_235b_a22b,
        mixtures.gpt_oss_20b,
        deepseek.deepseek_v2_lite,
        deepseek.deepseek_v3,
        mixtures.moe_1t,
        models.gpt3_175b,
        models.megatron_22b,
        models.megatron_530b,
        models.megatron_1t,
    )
}
_RUNS: dict[str, Callable[[], RunConfig]] = {
    preset.__name__: preset for preset in (runs.tiny, runs.small, runs.tiny_moe, runs.small_moe)
}


def run_preset(name: str) -> RunConfig:
    """Returns the run preset of that name; a model's name gets the pretraining settings."""
    if name in _RUNS:
        return _RUNS[name]()
    if name in MODELS:
        return runs.pretraining(MODELS[name]())
    raise ConfigError(f"unknown preset {name!r}{nearest(name, MODELS)}")
