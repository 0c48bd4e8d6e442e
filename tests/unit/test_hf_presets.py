"""Presets have the published sizes, and are what published configs translate into."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
from published_figures import PARAMETERS

from jaxinfra.config.presets import MODELS
from jaxinfra.errors import ConfigError
from jaxinfra.hf import computed, from_hf_config, to_hf_config, weight_map
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on

COUNTED = sorted(name for name, preset in MODELS.items() if "parameters" in preset.__doc__)

# As others publish them; what every preset says of its own is held below too.
SIZES = {
    **PARAMETERS,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}
# The config.json of models as published, less keys without effect.
PUBLISHED = json.loads((Path(__file__).parents[1] / "golden/hf/published.json").read_text())


# A preset of each kind of model; others differ in their numbers.
QUICK = {
    "deepseek_v2_lite", "gemma2_2b", "gpt2", "gpt_oss_20b", "llama32_1b", "mixtral_8x7b", "moe_1t",
    "phi3_mini_4k", "qwen25_05b", "qwen3_06b", "qwen3_30b_a3b", "small", "tiny_moe",
}  # fmt: skip


def presets(names):
    return [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in names]


@functools.cache
def defined(name: str):
    return define_model(MODELS[name](), execution_on())


@pytest.mark.parametrize("name", presets(COUNTED))
def test_number_of_parameters(name):
    stated = re.search(r"([\d,]+) parameters", MODELS[name].__doc__)
    assert defined(name).num_parameters == int(stated.group(1).replace(",", ""))


@pytest.mark.parametrize("name", presets(SIZES))
def test_number_of_parameters_is_the_published_one(name):
    assert defined(name).num_parameters == SIZES[name]


@pytest.mark.parametrize("name", presets(sorted(MODELS)))
def test_dims_name_every_dim_of_every_parameter(name):
    """But for what a router and a shared expert's gate say of a token: never sharded."""
    for each in defined(name).table():
        assert len(each.shape) == len(each.dims)
        assert None not in each.dims or "router" in each.path or "shared_scale" in each.path


def test_every_published_size_is_counted():
    assert set(MODELS) - set(COUNTED) == {"tiny", "small"}


@pytest.mark.parametrize("name", sorted(MODELS.keys() & PUBLISHED.keys()))
def test_a_published_config_is_the_preset(name):
    """But for multi-token prediction, which presets leave out."""
    read = dataclasses.replace(from_hf_config(PUBLISHED[name]), mtp=False)
    assert read == MODELS[name]()


@pytest.mark.parametrize("name", presets(sorted(MODELS)))
def test_every_preset_has_an_architecture(name):
    """But for the worked case of the docs; what balances loads is no part of theirs."""
    config = computed(MODELS[name]())
    if name == "moe_1t":
        with pytest.raises(ConfigError, match="no Hugging Face architecture"):
            to_hf_config(config)
        return
    written = to_hf_config(config)
    assert from_hf_config(written) == config
    weight_map(written["model_type"], config, defined(name).arrays)
