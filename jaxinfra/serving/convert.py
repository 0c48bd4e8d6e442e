"""A model from one layout into the other, whatever it lies in."""

import dataclasses
import enum
import json
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import processors

from jaxinfra.checkpoint.conversion import describes, write_hf, write_ours
from jaxinfra.checkpoint.model_directory import is_model_directory, read_model_directory
from jaxinfra.checkpoint.sources import LiveParameters
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.layers.execution import Execution
from jaxinfra.models.definition import ModelDefinition, define_model
from jaxinfra.models.hf import by_path, to_hf_config
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
        hf = to_hf_config(run.definition.config) | {
            "bos_token_id": run.tokenizer.bos_id,
            "eos_token_id": run.tokenizer.eos_id,
        }
        live = LiveParameters(arrays=by_path(run.parameters))
        with tempfile.TemporaryDirectory() as tokenizer_directory:
            write_tokenizer(run.tokenizer, Path(tokenizer_directory))
            options["tokenizer_directory"] = Path(tokenizer_directory)
            write_hf(live, run.definition, destination, hf=hf, **options)
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


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Files with which other libraries encode a text as it was encoded in training.

    There the document separator stands before every text; other libraries ask the tokenizer's own
    post-processor for it, which is added unless there is one.
    """
    file = directory / "tokenizer.json"
    tokenizer.save(file)
    theirs = tokenizers.Tokenizer.from_file(str(file))
    bos, eos = (theirs.id_to_token(token) for token in (tokenizer.bos_id, tokenizer.eos_id))
    if theirs.post_processor is None:
        theirs.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)]
        )
        theirs.save(str(file))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
