"""Models of Hugging Face families whose results the reference implementation computed.

Their weights are made from their tensors' names and shapes on both sides.
"""

import functools
import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

from jaxinfra.hf import from_hf_config, weight_map
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from tests.golden.families.seeded_weights import values

GOLDEN = pathlib.Path(__file__).parent / "golden" / "families"


@functools.cache
def described(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


@functools.cache
def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def weights_of(config, model_type):
    definition = define_model(config, execution_on())
    return weight_map(model_type, config, definition.arrays)


def write_directory(name, path):
    """The model directory that the reference implementation read."""
    values_of = described(name)["config"]
    tensors = weights_of(from_hf_config(values_of), values_of["model_type"]).tensors
    shapes = {each.name: each.shape for each in tensors.values()}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values_of))
    save_file({n: values(n, s) for n, s in shapes.items()}, path / "model.safetensors")
    return shapes
