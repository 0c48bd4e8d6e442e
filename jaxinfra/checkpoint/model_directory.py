"""A directory that holds one model: config.json, safetensors, tokenizer files.

Two layouts. That of Hugging Face is told by ``model_type`` in its config.json. Ours has
``{"format": "jaxinfra", "model": ..., "hf": ...}``: the model's config, and the Hugging Face config
it came from, if it did; its tensors have the paths of our parameters, stacked over layers.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from jaxinfra.checkpoint.parameter_sources import (
    ParameterSource,
    mapped_parameters,
    stored_parameters,
)
from jaxinfra.checkpoint.quantized_files import plain_tensors
from jaxinfra.checkpoint.tensor_files import open_tensor_files
from jaxinfra.config import codec
from jaxinfra.config.model import ModelConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf import by_path, from_hf_config, quantization_of, weight_map
from jaxinfra.model.definition import ModelDefinition
from jaxinfra.runtime.files import read_json, require_type

FORMAT = "jaxinfra"


class _Ours(TypedDict):
    format: str
    model: dict[str, Any]
    hf: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelDirectory:
    """What a model directory's config.json says."""

    path: Path
    config: ModelConfig
    is_hf: bool  # the layout is that of Hugging Face
    hf: Mapping[str, Any] | None  # its config as found there, or where it came from

    def open(self, definition: ModelDefinition) -> ParameterSource:
        """Checks every tensor's name and shape; reads none of them yet."""
        files = open_tensor_files(self.path)
        if self.is_hf:
            assert self.hf is not None
            files = plain_tensors(files, quantization_of(self.hf))
            weights = weight_map(self.hf["model_type"], self.config, definition.arrays)
            return mapped_parameters(files, weights)
        shapes = {path: leaf.shape for path, leaf in by_path(definition.arrays).items()}
        return stored_parameters(plain_tensors(files, None), shapes)


def is_model_directory(path: Path) -> bool:
    """Whether ``path`` has a config.json of either layout, and is not a run, say."""
    values = _values(path)
    return isinstance(values, dict) and ("model_type" in values or values.get("format") == FORMAT)


def read_model_directory(path: Path) -> ModelDirectory:
    """Reads config.json; raises ConfigError where it cannot be used."""
    values = _values(path)
    if not is_model_directory(path):
        raise ConfigError(
            f"{path} is no model directory: a config.json with model_type, or one that "
            "`jaxinfra convert` has written, is needed"
        )
    try:
        if "model_type" in values:
            return ModelDirectory(path=path, config=from_hf_config(values), is_hf=True, hf=values)
        require_type(values, _Ours, where="", error=ConfigError)
        config = codec.from_dict(ModelConfig, values["model"])
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error
    return ModelDirectory(path=path, config=config, is_hf=False, hf=values["hf"])


def config_json(config: ModelConfig, hf: Mapping[str, Any] | None) -> str:
    """The config.json of our layout."""
    values = {"format": FORMAT, "model": codec.to_dict(config), "hf": hf}
    return json.dumps(values, indent=2) + "\n"


def _values(path: Path) -> Any:
    file = path / "config.json"
    if not file.is_file():
        return None
    return read_json(file, holds=Any)
