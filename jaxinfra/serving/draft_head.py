"""Models with a published draft head beside them, an EAGLE-3 head of a directory of its own."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfra.checkpoint.onto_mesh import place_parameters
from jaxinfra.checkpoint.parameter_sources import mapped_parameters
from jaxinfra.checkpoint.tensor_files import open_tensor_files
from jaxinfra.config.drafted import DraftedConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.validate import check_divides
from jaxinfra.errors import CheckpointError, ConfigError, UnsupportedError
from jaxinfra.hf.eagle import eagle_weights, is_draft_head, read_eagle
from jaxinfra.model.definition import define_model, merged
from jaxinfra.runtime.files import INFINITY, read_json
from jaxinfra.serving.load import LoadedModel


def is_head_directory(path: Path) -> bool:
    """Whether a directory's config.json is that of a draft head."""
    file = path / "config.json"
    return file.is_file() and is_draft_head(read_json(file, constants=INFINITY))


def with_head(model: LoadedModel, path: Path) -> LoadedModel:
    """Returns a model that drafts by the EAGLE-3 head of a directory, in place of its own module.

    Raises:
        UnsupportedError: a model with adapters, or another kind of head.
        ConfigError: the head is of another vocabulary, width or number of layers.
        CheckpointError: tensors of the head are missing or damaged.
    """
    old, place, files = model.without_mtp(), model.placement, open_tensor_files(path)
    if old.definition.lora is not None:
        raise UnsupportedError(
            f"--draft {path} beside a model with adapters, which the head's layer would have too; "
            "merge them first (jaxinfra convert)"
        )
    assert place is not None, "load"
    try:
        values = read_json(path / "config.json")
        eagle, plain = read_eagle(values, stored=files.tensors), old.definition.config
        fields = {each.name: getattr(plain, each.name) for each in dataclasses.fields(plain)}
        config = DraftedConfig(**fields | {"mtp": True}, eagle=eagle)
        check_divides(eagle.part, MeshConfig(tensor=place.mesh.shape["tensor"]))
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error
    definition = define_model(config, old.definition.execution)
    shapes = {"mtp": definition.arrays["mtp"]}
    source = mapped_parameters(files, eagle_weights(eagle, shapes, stored=files.tensors))
    places = merged(place.parameters(definition), place.model_state(definition))["mtp"]
    if model.is_described:
        found: Any = jax.tree.map(
            lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
            shapes["mtp"],
            places,
        )
    else:
        found = place_parameters(source, definition, {"mtp": places})["mtp"]
        ids = np.arange(eagle.part.vocab_size) + np.asarray(found.get("offsets", 0))
        if not set(ids.tolist()) <= set(range(eagle.vocab_size)) or len(set(ids)) < len(ids):
            raise CheckpointError(
                f"{path}: tensor d2t names ids twice or outside the vocabulary of "
                f"{eagle.vocab_size}; copy it again from its source"
            )
    return dataclasses.replace(
        model, definition=definition, parameters={**old.parameters, "mtp": found}
    )
