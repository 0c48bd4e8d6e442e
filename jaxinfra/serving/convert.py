"""Converts model directories between this project's layout, Hugging Face's and PEFT's."""

import dataclasses
import enum
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import processors

from jaxinfra.checkpoint.initial import initial_source
from jaxinfra.checkpoint.model_directory import (
    describes,
    hf_config_for,
    is_model_directory,
    read_model_directory,
    write_hf,
    write_ours,
)
from jaxinfra.checkpoint.parameter_sources import LiveParameters, ParameterSource
from jaxinfra.checkpoint.peft_files import MergedParameters, host_adapters, read_peft, write_peft
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.finetune import BaseWeights, InitConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.tokenizer import Tokenizer, num_ids, read_tokenizer
from jaxinfra.errors import ConfigError
from jaxinfra.hf import to_hf_config, weight_map
from jaxinfra.model.definition import ModelDefinition, by_path, define_model, is_weight
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.load import LoadedModel, load_run


class Target(enum.StrEnum):
    """The layout of files that ``convert`` has written: ours, Hugging Face's or PEFT's."""

    OURS = "ours"
    HF = "Hugging Face"
    PEFT = "PEFT"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The result of ``convert``: which layout it wrote, and the model's definition.

    Examples:
        >>> written = jaxinfra.convert("runs/mine", "other")
        >>> print(written.target)
        Hugging Face
    """

    target: Target  # the layout
    definition: ModelDefinition  # the model, without its weights


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: np.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    adapters_only: bool = False,
    merge: str | Path | None = None,
) -> Conversion:
    """Writes a model in another layout: from Hugging Face's to ours, or from ours or a run to
    Hugging Face's.

    Model directories are streamed; a run's parameters are loaded onto the first device. Adapters
    that a run trained are merged with their base model, one piece at a time.

    Args:
        source: a Hugging Face directory, a directory that this function wrote, or a run.
        destination: a new directory outside the source.
        dtype: dtype of all elements; None: each tensor keeps its own.
        max_shard_bytes: most bytes of tensors per file of the destination.
        adapters_only: write only a run's adapters, in PEFT's layout.
        merge: directory of PEFT adapters to merge into a model directory; the result has Hugging
            Face's layout.

    Raises:
        ConfigError: the destination is within the source, no Hugging Face architecture can express
            the model, a model has no adapters to write, or adapters would be merged into a run.
        DataError, CheckpointError: the source is not a model, or a damaged one.

    Examples:
        >>> written = jaxinfra.convert("runs/mine", "as-hf", dtype=np.dtype("float16"))
        >>> jaxinfra.load_model("as-hf")(np.array([[1, 2, 3]], np.int32)).shape
        (1, 3, 300)
    """
    source, destination = Path(source), Path(destination)
    inside = destination.resolve()
    if inside == source.resolve() or source.resolve() in inside.parents:
        raise ConfigError(
            f"{destination} is in {source}, which is only read: name a directory elsewhere"
        )
    options = {
        "tokenizer_directory": source,
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
    }
    if not is_model_directory(source):
        if merge is not None:
            raise ConfigError(
                f"adapters of {merge} are merged into a model directory, and {source} is a run; "
                "convert it first, then merge"
            )
        return _convert_run(source, destination, options, adapters_only=adapters_only)
    if adapters_only:
        raise ConfigError(f"{source} is a whole model; a run that trained adapters has them alone")
    return _convert_directory(source, destination, options, merge=merge)


def _convert_directory(
    source: Path, destination: Path, options: dict[str, Any], *, merge: str | Path | None
) -> Conversion:
    directory = read_model_directory(source)
    if (source / "tokenizer.json").exists():
        num_ids(read_tokenizer(source / "tokenizer.json"))  # is copied: refuses a damaged one
    definition = define_model(directory.config, execution_on())
    parameters: ParameterSource = directory.open(definition)
    hf = directory.hf
    if merge is not None:
        hf = hf_config_for(directory.config, hf)
        weights = weight_map(hf["model_type"], directory.config, definition.arrays)
        adapters = read_peft(Path(merge), weights, definition, source=parameters)
        parameters = MergedParameters(base=parameters, adapters=adapters)
    elif directory.is_hf:
        write_ours(parameters, definition, destination, hf=hf, **options)
        return Conversion(target=Target.OURS, definition=definition)
    else:
        hf = hf_config_for(directory.config, hf)  # the model may have been changed since
    write_hf(parameters, definition, destination, hf=hf, **options)
    return Conversion(target=Target.HF, definition=definition)


def _convert_run(
    source: Path, destination: Path, options: dict[str, Any], *, adapters_only: bool
) -> Conversion:
    run = load_run(source, policy=PolicyName.FP32)
    assert run.config is not None, "load_run"
    config, lora, init = run.definition.config, run.config.lora, run.config.init
    definition = define_model(config, execution_on())
    hf = hf_config_of(run, RunDirectory(source).read_hf_config())
    parameters = by_path(run.parameters)
    values: ParameterSource = LiveParameters(arrays=parameters)
    if lora is not None:
        assert init is not None, "validate"
        adapters, base = host_adapters(lora, parameters), _base_source(run, init)
        if adapters_only:
            weights = weight_map(hf["model_type"], config, definition.arrays)
            write_peft(adapters, weights, destination, base=init.path, source=base)
            return Conversion(target=Target.PEFT, definition=run.definition)
        state = {path: parameters[path] for path in by_path(definition.state_shapes)}
        values = MergedParameters(
            base=base,
            adapters=adapters,
            state=LiveParameters(arrays=state),
        )
    elif adapters_only:
        raise ConfigError(f"{source} trained all parameters and has no adapters to write alone")
    with tempfile.TemporaryDirectory() as made:
        if init is None:
            write_tokenizer(run.tokenizer, Path(made))
            options = options | {"tokenizer_directory": Path(made)}
        write_hf(values, definition, destination, hf=hf, **options)
    return Conversion(target=Target.HF, definition=definition)


def _base_source(run: LoadedModel, init: InitConfig) -> ParameterSource:
    """Returns a reader of the base model's weights, dequantized where they are quantized."""
    assert run.config is not None
    assert run.config.lora is not None
    if run.config.lora.base is BaseWeights.COMPUTE:
        return initial_source(init, run.config.model)
    return LiveParameters(arrays=by_path(run.parameters, is_leaf=is_weight))


def hf_config_of(model: LoadedModel, start: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Returns the Hugging Face config to write beside a model's weights.

    Args:
        start: config of the model that training started from, returned if it describes this one.
    """
    config, tokenizer = model.definition.config, model.tokenizer
    if start is not None and describes(start, config):
        return start
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return to_hf_config(config) | ids


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer files with which other libraries encode a text as training did.

    Training puts the document separator before every text. Other libraries leave this to the
    tokenizer's post-processor, so one is added unless the tokenizer has its own.
    """
    file = directory / "tokenizer.json"
    tokenizer.save(file)
    theirs, names = tokenizers.Tokenizer.from_file(str(file)), tokenizer.separators()
    if theirs.post_processor is None:
        bos = names["bos_token"]
        theirs.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.bos_id)]
        )
        theirs.save(str(file))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
