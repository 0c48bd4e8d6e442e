"""Models with a published draft head beside them, an EAGLE-3 head of a directory of its own."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfra.checkpoint.onto_mesh import place_parameters
from jaxinfra.checkpoint.parameter_sources import mapped_parameters
from jaxinfra.checkpoint.quantized_files import plain_tensors
from jaxinfra.checkpoint.tensor_files import TensorFiles, open_tensor_files
from jaxinfra.config.drafted import DraftedConfig, EagleConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.validate import check_divides
from jaxinfra.errors import CheckpointError, ConfigError, UnsupportedError
from jaxinfra.hf.eagle import IDS, UNREAD, eagle_weights, is_draft_head, read_eagle
from jaxinfra.model.definition import define_model
from jaxinfra.runtime.files import read_json
from jaxinfra.serving.load import LoadedModel


def is_head_directory(path: Path) -> bool:
    """Whether a directory's config.json is that of a draft head."""
    file = path / "config.json"
    return file.is_file() and is_draft_head(read_json(file, holds=dict[str, Any]))


def with_head(model: LoadedModel, path: Path) -> LoadedModel:
    """Returns a model that drafts by the EAGLE-3 head of a directory, in place of its own module.

    Raises:
        UnsupportedError: a model with adapters, or another kind of head.
        ConfigError: the head is of another vocabulary, width or number of layers.
        CheckpointError: tensors of the head are missing or damaged.
    """
    old = model.without_mtp()
    if old.definition.lora is not None:
        raise UnsupportedError(
            f"--draft {path} beside a model with adapters, which the head's layer would have too; "
            "merge them first (jaxinfra convert)"
        )
    files, plain = open_tensor_files(path), old.definition.config
    try:
        values = read_json(path / "config.json", holds=dict[str, Any])
        eagle = read_eagle(values, stored=files.tensors)
        fields = {each.name: getattr(plain, each.name) for each in dataclasses.fields(plain)}
        config = DraftedConfig(**fields | {"mtp": True}, eagle=eagle)
        assert model.placement is not None, "load"
        tensor = model.placement.mesh.shape["tensor"]
        check_divides(eagle.part, MeshConfig(tensor=tensor))
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error
    definition = define_model(config, old.definition.execution)
    weights = plain_tensors(files.renamed(lambda name: None if name in UNREAD else name), None)
    source = mapped_parameters(weights, eagle_weights(definition.shapes, stored=files.tensors))
    places = {"mtp": model.placement.parameters(definition)["mtp"]}
    on_all = model.placement.replicated
    ids = jax.device_put(_ids(files, eagle), on_all)
    if model.is_described:
        ids = jax.ShapeDtypeStruct(ids.shape, ids.dtype, sharding=on_all)
        read: Any = jax.tree.map(
            lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
            {"mtp": definition.shapes["mtp"]},
            places,
        )
    else:
        read = place_parameters(source, definition, places)
    parameters = {**old.parameters, "mtp": {**read["mtp"], "ids": ids}}
    return dataclasses.replace(model, definition=definition, parameters=parameters)


def _ids(files: TensorFiles, eagle: EagleConfig) -> np.ndarray:
    """Reads the model's id of each id of the head's vocabulary, int32."""
    size = eagle.part.vocab_size
    ids = np.arange(size)
    if IDS in files.tensors:
        shape = files.tensors[IDS].shape
        if shape != ids.shape:
            raise CheckpointError(
                f"{files.directory}: tensor {IDS} has shape {list(shape)}, draft_vocab_size asks "
                f"for [{size}]; one of them is of another head"
            )
        ids = ids + files.read(IDS, (slice(0, size),))
    if ids.min() < 0 or ids.max() >= eagle.vocab_size or len(np.unique(ids)) < size:
        raise CheckpointError(
            f"{files.directory}: tensor {IDS} names ids twice or outside the vocabulary of "
            f"{eagle.vocab_size}; copy it again from its source"
        )
    return ids.astype(np.int32)
