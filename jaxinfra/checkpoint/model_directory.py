"""A directory that holds one model: config.json, safetensors, tokenizer files; and its conversion.

There are two layouts. Hugging Face's config.json has a ``model_type``. Ours has ``{"format":
"jaxinfra", "model": ..., "hf": ...}``: the model's config, and the Hugging Face config that it was
converted from, if any. Our tensors are named by parameter paths and stacked over layers. Conversion
streams: it holds one piece of a tensor at a time.
"""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, Unpack

import jax.numpy as jnp
import numpy as np

from jaxinfra.checkpoint.finite import require_finite_piece
from jaxinfra.checkpoint.parameter_sources import (
    ParameterSource,
    assemble_rows,
    mapped_parameters,
)
from jaxinfra.checkpoint.quantized_files import plain_tensors
from jaxinfra.checkpoint.tensor_files import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    new_directory,
    open_tensor_files,
    write_tensor_files,
)
from jaxinfra.config import codec
from jaxinfra.config.kinds import Head
from jaxinfra.config.model import ModelConfig
from jaxinfra.errors import CheckpointError, ConfigError, nearest
from jaxinfra.hf import (
    WeightMap,
    computed,
    from_hf_config,
    own_weight_map,
    plain_hf_config,
    prediction_prefix,
    quantization_of,
    text_name,
    text_part,
    to_hf_config,
    weight_map,
)
from jaxinfra.hf.mapping import Tensor
from jaxinfra.model.definition import ModelDefinition
from jaxinfra.runtime.files import INFINITY, read_json, require_type

FORMAT = "jaxinfra"


class _Ours(TypedDict):
    format: str
    model: dict[str, Any]
    hf: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelDirectory:
    """The contents of a model directory's config.json."""

    path: Path
    config: ModelConfig
    is_hf: bool  # the layout is that of Hugging Face
    hf: Mapping[str, Any] | None  # its config as found there, or where it came from
    is_part: bool = False  # the text part of a model of images and text

    def open(self, definition: ModelDefinition) -> ParameterSource:
        """Opens the weights and checks every tensor's name and shape, without reading elements."""
        files = open_tensor_files(self.path)
        if self.is_part:
            files = files.renamed(text_name)
        if self.is_hf:
            assert self.hf is not None
            files = plain_tensors(files, quantization_of(self.hf))
            weights = weight_map(
                self.hf["model_type"], self.config, definition.arrays, stored=files.tensors
            )
            return mapped_parameters(files, weights)
        return mapped_parameters(plain_tensors(files, None), own_weight_map(definition.arrays))


def is_model_directory(path: Path) -> bool:
    """Whether ``path`` has a config.json of either layout, and is not a run directory."""
    values = _values(path)
    return isinstance(values, dict) and ("model_type" in values or values.get("format") == FORMAT)


def read_model_directory(path: Path) -> ModelDirectory:
    """Reads a model directory's config.json; raises ConfigError if it cannot be used."""
    values = _values(path)
    if not is_model_directory(path):
        raise ConfigError(
            f"{path} is no model directory: a config.json with model_type, or one that "
            "`jaxinfra convert` has written, is needed"
        )
    try:
        if "model_type" in values:
            hf = text_part(values)
            config = _with_stored_prediction(from_hf_config(hf), hf, path)
            return ModelDirectory(
                path=path, config=config, is_hf=True, hf=hf, is_part=hf is not values
            )
        require_type(values, _Ours, where="", error=ConfigError)
        config = codec.from_dict(ModelConfig, values["model"])
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error
    return ModelDirectory(path=path, config=config, is_hf=False, hf=values["hf"])


def _with_stored_prediction(config: ModelConfig, hf: Mapping[str, Any], path: Path) -> ModelConfig:
    """Returns the model with multi-token prediction if files have it: not all configs say so, and
    some say so of files without.
    """
    prefix, file = prediction_prefix(hf, config), path / INDEX_FILE
    is_stored = file.is_file() or (path / SINGLE_FILE).is_file()
    if prefix is None or not is_stored or config.head is Head.SCORE:
        return config
    if file.is_file():
        names = read_json(file, holds=dict[str, Any], error=CheckpointError).get("weight_map", {})
    else:
        names = open_tensor_files(path).tensors
    return dataclasses.replace(config, mtp=any(name.startswith(prefix) for name in names))


def _values(path: Path) -> Any:
    file = path / "config.json"
    if not file.is_file():
        return None
    return read_json(file, holds=Any, constants=INFINITY)


_PIECE_BYTES = 64 * 2**20  # of a tensor in memory at a time

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Copied as they are, where they are."""


def parse_dtype(name: str) -> np.dtype:
    """Parses an element type that weight files may have; raises ConfigError for others."""
    if name not in DTYPES.values():
        raise ConfigError(f"unknown dtype {name!r}{nearest(name, DTYPES.values())}")
    return jnp.dtype(name)


class WriteOptions(TypedDict):
    """Options of writing a model directory."""

    tokenizer_directory: Path
    dtype: np.dtype | None  # of all elements; None: as they are stored
    max_shard_bytes: int
    piece_bytes: NotRequired[int]


def write_ours(
    source: ParameterSource,
    definition: ModelDefinition,
    path: Path,
    *,
    hf: Mapping[str, Any] | None,
    **options: Unpack[WriteOptions],
) -> None:
    """Writes a model directory in our layout.

    Args:
        hf: Hugging Face config that the model was converted from, stored for converting back.
    """
    values = {"format": FORMAT, "model": codec.to_dict(definition.config), "hf": hf}
    weights = own_weight_map(definition.arrays)
    kinds = _kinds(source, weights, options["dtype"])
    _write(source, weights, path, values=values, kinds=kinds, options=options)


def write_hf(
    source: ParameterSource,
    definition: ModelDefinition,
    path: Path,
    *,
    hf: Mapping[str, Any] | None,
    **options: Unpack[WriteOptions],
) -> None:
    """Writes a model directory in the layout of Hugging Face.

    Args:
        hf: Hugging Face config that describes this model; None: one is made.
    """
    config = definition.config
    values = to_hf_config(config) if hf is None else plain_hf_config(hf, mtp=config.mtp)
    weights = weight_map(values["model_type"], definition.config, definition.arrays)
    kinds = _kinds(source, weights, options["dtype"])
    # The older name of the key is the one that all releases read.
    key = "dtype" if "dtype" in values else "torch_dtype"
    (vocabulary, _) = weights.places["embedding/table", ()]
    values[key] = kinds[vocabulary.name].name
    _write(source, weights, path, values=values, kinds=kinds, options=options)


def _write(
    source: ParameterSource,
    weights: WeightMap,
    path: Path,
    *,
    values: Mapping[str, Any],
    kinds: Mapping[str, np.dtype],
    options: WriteOptions,
) -> None:
    def pieces(tensor: Tensor) -> Iterator[np.ndarray]:
        kind = kinds[tensor.name]
        most = options.get("piece_bytes", _PIECE_BYTES) // kind.itemsize
        for rows in assemble_rows(source, tensor, piece_elements=most):
            yield cast(rows, kind, tensor.name)

    with filled_directory(path, options["tokenizer_directory"]) as directory:
        (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        write_tensor_files(
            directory,
            {
                name: (tensor.shape, kinds[name], functools.partial(pieces, tensor))
                for name, tensor in weights.tensors.items()
            },
            max_shard_bytes=options["max_shard_bytes"],
        )


def _kinds(
    source: ParameterSource, weights: WeightMap, dtype: np.dtype | None
) -> dict[str, np.dtype]:
    return {
        tensor.name: dtype or _common_dtype(source, tensor) for tensor in weights.tensors.values()
    }


def describes(hf: Mapping[str, Any], config: ModelConfig) -> bool:
    """Whether a Hugging Face config describes this model config.

    Files say whether they have multi-token prediction, if the architecture has any.
    """
    read = from_hf_config(hf)
    if prediction_prefix(hf, read) is not None:
        read = dataclasses.replace(read, mtp=config.mtp)
    return read == computed(config)


def hf_config_for(config: ModelConfig, hf: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns a Hugging Face config that describes the model: ``hf`` if it does, else a new one."""
    return hf if hf is not None and describes(hf, config) else to_hf_config(config)


def cast(x: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Casts elements to a dtype, rounding to nearest. Raises CheckpointError for a NaN, or if a
    finite number overflows.
    """
    require_finite_piece(x, name=name)
    if x.dtype == dtype:
        return x
    with np.errstate(over="ignore"):
        result = x.astype(dtype)
    if jnp.finfo(dtype).max < jnp.finfo(x.dtype).max:
        overflowed = np.isinf(result.astype(np.float32)) & np.isfinite(x.astype(np.float64))
        if overflowed.any():
            raise CheckpointError(
                f"tensor {name}: {np.count_nonzero(overflowed)} elements are too large for "
                f"{dtype.name}, the largest is {np.max(np.abs(x))}; choose bfloat16 or float32"
            )
    return result


def _common_dtype(source: ParameterSource, tensor: Tensor) -> np.dtype:
    found = {source.dtype(part.path) for part in tensor.parts}
    if len(found) > 1:
        raise CheckpointError(
            f"the parts of {tensor.name} are stored as "
            f"{' and '.join(sorted(each.name for each in found))}; name one dtype for all"
        )
    return found.pop()


@contextlib.contextmanager
def filled_directory(path: Path, tokenizer_directory: Path) -> Iterator[Path]:
    """Makes a model directory with a tokenizer's files, for the ``with`` block to fill. It is
    renamed to ``path`` when the block ends.
    """
    with new_directory(path) as directory:
        for name in TOKENIZER_FILES:
            if (tokenizer_directory / name).is_file():
                (directory / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(tokenizer_directory / name, directory / name)
        yield directory
