"""Adapters of families whose files fuse projections: PEFT's product is what ours adds."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfra.checkpoint.model_directory import read_model_directory, write_hf
from jaxinfra.checkpoint.peft_files import Adapters, MergedParameters, read_peft, write_peft
from jaxinfra.config.finetune import PROJECTIONS, LoraConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.mapping import weight_map
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.parallel.execution import execution_on
from tests.golden_families import write_directory

# Of groups of heads side by side, one after another, and of layers with a state.
CASES = ("gpt_neox", "qwen3_5", "mamba", "falcon_odd", "bloom", "qwen3_next", "jamba", "lfm2")


def has(config, target):
    try:
        define_model(config, execution_on(), lora=LoraConfig(targets=(target,)))
    except ConfigError:
        return False
    return True


def drawn(config, lora):
    shapes = by_path(define_model(config, execution_on(), lora=lora).shapes)
    rng = np.random.default_rng(5)
    arrays = {
        path: rng.normal(size=leaf.shape).astype(np.float32)
        for path, leaf in shapes.items()
        if "/adapter/" in path
    }
    return Adapters(lora=lora, arrays=arrays)


def product(adapters, path):
    a, b = adapters.arrays[f"{path}/a"], adapters.arrays[f"{path}/b"]
    layers, rank = len(a), a.shape[-1]
    return adapters.lora.scale * (a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1))


@pytest.mark.quick_cases("gpt_neox", "qwen3_5")
@pytest.mark.parametrize("name", CASES)
def test_adapters_of_fused_projections(name, tmp_path):
    write_directory(name, tmp_path)
    directory = read_model_directory(tmp_path)
    config, definition = directory.config, define_model(directory.config, execution_on())
    targets = tuple(each for each in PROJECTIONS if has(config, each))
    adapters = drawn(config, LoraConfig(rank=2, targets=targets))
    weights = weight_map(directory.hf["model_type"], config, definition.arrays)
    source = directory.open(definition)
    write_peft(adapters, weights, tmp_path / "peft", base="x", source=source)
    merged = MergedParameters(base=source, adapters=adapters)
    options = {"tokenizer_directory": tmp_path, "dtype": None, "max_shard_bytes": 10**9}
    write_hf(merged, definition, tmp_path / "merged", hf=directory.hf, **options)

    values = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    pairs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    want = load_file(tmp_path / "merged" / "model.safetensors")
    for key, weight in load_file(tmp_path / "model.safetensors").items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in pairs:
            a, b = (pairs[f"{module}.lora_{each}.weight"] for each in "AB")
            short = ".".join(module.split(".")[-2:])
            alpha = values["alpha_pattern"].get(short, values["lora_alpha"])
            weight = weight + alpha / len(a) * (b @ a)
        np.testing.assert_allclose(want[key], weight, atol=1e-4, err_msg=key)
    back = read_peft(tmp_path / "peft", weights, definition, source=source)
    assert back.arrays.keys() == adapters.arrays.keys()
    for path in {each.rpartition("/")[0] for each in adapters.arrays}:
        np.testing.assert_allclose(product(back, path), product(adapters, path), atol=1e-4)
