"""A model from one layout into the other, whatever it lies in."""

import dataclasses
import enum
from pathlib import Path

import numpy as np

from jaxinfra.checkpoint.conversion import describes, write_hf, write_ours
from jaxinfra.checkpoint.model_directory import is_model_directory, read_model_directory
from jaxinfra.checkpoint.sources import LiveParameters
from jaxinfra.config.precision import PolicyName
from jaxinfra.layers.execution import Execution
from jaxinfra.models.definition import ModelDefinition, define_model
from jaxinfra.models.hf import by_path
from jaxinfra.serving.load import load_run


class Target(enum.StrEnum):
    """The layout that was written."""

    OURS = "ours"
    HF = "Hugging Face"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What was written."""

    target: Target
    definition: ModelDefinition


def convert(
    source: Path, destination: Path, *, dtype: np.dtype | None, max_shard_bytes: int
) -> Conversion:
    """Hugging Face to ours, ours to Hugging Face, a run to Hugging Face.

    Model directories are streamed; a run's parameters are loaded onto the first device.

    Args:
        dtype: of all elements; None: as they are.
        max_shard_bytes: of elements in a file of the destination.
    """
    options = {
        "tokenizer_directory": source,
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
    }
    if not is_model_directory(source):
        run = load_run(source, policy=PolicyName.FP32)
        live = LiveParameters(arrays=by_path(run.parameters))
        write_hf(live, run.definition, destination, hf=None, **options)
        return Conversion(target=Target.HF, definition=run.definition)
    directory = read_model_directory(source)
    definition = define_model(directory.config, Execution())
    parameters = directory.open(definition)
    hf = directory.hf
    if directory.is_hf:
        write_ours(parameters, definition, destination, hf=hf, **options)
        return Conversion(target=Target.OURS, definition=definition)
    if hf is not None and not describes(hf, directory.config):
        hf = None  # the model was changed since
    write_hf(parameters, definition, destination, hf=hf, **options)
    return Conversion(target=Target.HF, definition=definition)
