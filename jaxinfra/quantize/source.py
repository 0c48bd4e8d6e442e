"""Models to quantize: a Hugging Face directory, a converted one, or a run."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxinfra.checkpoint.model_directory import describes, is_model_directory, read_model_directory
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.hf import quantization_of, to_hf_config
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.quantize.quantize import SourceModel
from jaxinfra.serving.convert import hf_config_of, write_tokenizer
from jaxinfra.serving.load import load_run


@contextlib.contextmanager
def source_model(path: Path) -> Iterator[SourceModel]:
    """Opens the model of a directory or a run to quantize it.

    Raises:
        ConfigError: the weights are quantized already, or the run trained adapters.
    """
    if is_model_directory(path):
        directory = read_model_directory(path)
        if directory.is_hf and directory.hf is not None and quantization_of(directory.hf):
            raise ConfigError(
                f"{path} is quantized already; quantize the checkpoint that it was made from"
            )
        definition = define_model(directory.config, execution_on())
        hf = directory.hf
        if hf is None or not describes(hf, directory.config):
            hf = to_hf_config(directory.config)
        yield SourceModel(
            definition=definition,
            source=directory.open(definition),
            hf=hf,
            tokenizer_directory=path,
        )
        return
    run = load_run(path, policy=PolicyName.FP32)
    config = run.definition.config
    if run.definition.lora is not None:
        raise ConfigError(
            f"{path} trained adapters; merge them first (jaxinfra convert {path} DST), and quantize"
            " that"
        )
    with tempfile.TemporaryDirectory() as made:
        write_tokenizer(run.tokenizer, Path(made))
        yield SourceModel(
            definition=define_model(config, execution_on()),
            source=LiveParameters(arrays=by_path(run.parameters)),
            hf=hf_config_of(run, RunDirectory(path).read_hf_config()),
            tokenizer_directory=Path(made),
        )


def calibration_ids(
    file: Path, tokenizer_directory: Path, *, sequence_length: int, num_sequences: int
) -> np.ndarray:
    """Returns token ids of a text's beginning, int32 [sequences, length].

    Raises:
        DataError: no such text, or one shorter than a sequence.
    """
    tokenizer = Tokenizer.load(tokenizer_directory / "tokenizer.json")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error
    # Of a token there are at most a few dozen characters; what is not needed is not encoded.
    ids = tokenizer.encode(text[: 64 * sequence_length * num_sequences])
    count = min(num_sequences, len(ids) // sequence_length)
    if count == 0:
        raise DataError(
            f"{file} has {len(ids)} tokens, and a sequence is {sequence_length}; give a longer text"
        )
    return np.asarray(ids[: count * sequence_length], np.int32).reshape(count, sequence_length)
