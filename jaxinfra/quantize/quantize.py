"""Quantization of a model into a Hugging Face directory, layer by layer.

Device and host hold one layer's weights at a time, and the calibration text's hidden states.
Quantized weights are kept on disk until all are written.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import shlex
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.checkpoint.model_directory import (
    cast,
    filled_directory,
    hf_config_for,
    is_model_directory,
    read_model_directory,
)
from jaxinfra.checkpoint.parameter_sources import LiveParameters, ParameterSource, assemble
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.checkpoint.tensor_files import write_tensor_files
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.readers import is_one_document
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import ConfigError, DataError, UnsupportedError
from jaxinfra.hf import WeightMap, quantization_of, weight_map
from jaxinfra.hf.mapping import Part
from jaxinfra.model.definition import ModelDefinition, by_path, define_model
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.numerics.storage import EXACT
from jaxinfra.parallel.execution import execution_on
from jaxinfra.quantize import matrices
from jaxinfra.quantize.layers import (
    CalibrationModel,
    LayerPosition,
    positions_of_layers,
    read_layer,
)
from jaxinfra.quantize.prepare import cut_ranges, with_scaled_inputs
from jaxinfra.quantize.recipes import QuantizationRecipe, config_of
from jaxinfra.quantize.statistics import InputStatistics
from jaxinfra.serving.convert import hf_config_of, write_tokenizer
from jaxinfra.serving.load import load_run

_ALIGNMENT = 64


def shelved[Key: Hashable](file: Path, arrays: Mapping[Key, np.ndarray]) -> dict[Key, np.ndarray]:
    """Writes arrays to a new file, and returns a mapping that reads each array on access."""
    starts: dict[Key, int] = {}
    with file.open("xb") as out:
        for key, array in arrays.items():
            out.write(bytes(-out.tell() % _ALIGNMENT))
            starts[key] = out.tell()
            out.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    if not file.stat().st_size:
        return dict(arrays)
    held = np.memmap(file, np.uint8, mode="r")

    def one(key: Key, like: np.ndarray) -> np.ndarray:
        size = math.prod(like.shape) * like.dtype.itemsize
        return held[starts[key] : starts[key] + size].view(like.dtype).reshape(like.shape)

    return {key: one(key, array) for key, array in arrays.items()}


_ROWS = 4  # sequences that a layer is run on at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """Output error and duration of one quantized layer."""

    number: int
    error: float | None  # relative error of the layer's output; None: no calibration text
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationReport:
    """Sizes in bytes and per-layer errors of a quantized model."""

    recipe: QuantizationRecipe
    layers: tuple[LayerReport, ...]
    num_quantized: int  # number of quantized elements
    num_kept: int  # number of elements that stay unquantized
    quantized_bytes: int
    kept_bytes: int
    before_bytes: int  # size of all weights in the source


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceModel:
    """A model to be quantized: its weights, config and tokenizer, from any supported format."""

    definition: ModelDefinition
    source: ParameterSource
    hf: Mapping[str, Any]  # a config that describes it
    tokenizer_directory: Path


@contextlib.contextmanager
def source_model(path: Path) -> Iterator[SourceModel]:
    """Opens the model of a directory or a run to quantize it, without multi-token prediction.

    Raises:
        ConfigError: the weights are quantized already, or the run trained adapters.
    """
    if is_model_directory(path):
        directory = read_model_directory(path)
        if directory.is_hf and directory.hf is not None and quantization_of(directory.hf):
            raise ConfigError(
                f"{path} is quantized already; quantize the checkpoint that it was made from"
            )
        config = dataclasses.replace(directory.config, mtp=False)
        directory = dataclasses.replace(directory, config=config)
        definition = define_model(config, execution_on())
        yield SourceModel(
            definition=definition,
            source=directory.open(definition),
            hf=hf_config_for(config, directory.hf),
            tokenizer_directory=path,
        )
        return
    run = load_run(path, policy=PolicyName.FP32).without_mtp()
    config = run.definition.config
    if run.definition.lora is not None:
        raise ConfigError(
            f"{path} trained adapters; merge them first (jaxinfra convert {shlex.quote(str(path))} "
            "DST), and quantize that"
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
        DataError: no such text, rows in its place, or one shorter than a sequence.
    """
    if not is_one_document(file.name):
        raise DataError(
            f"{file} holds rows, whose names and marks are no text; write the text of some of them "
            "to a file that ends in .txt"
        )
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


def quantize_model(
    model: SourceModel,
    destination: Path,
    recipe: QuantizationRecipe,
    *,
    ids_BT: np.ndarray | None,
    max_shard_bytes: int = 5 * 10**9,
    report: Callable[[LayerReport], None] = lambda layer: None,
) -> QuantizationReport:
    """Quantizes a model's layer weights and writes them as a Hugging Face directory.

    Embeddings, norms, routers, indexers and the projection onto the vocabulary stay as they are.

    Args:
        ids_BT: token ids of the calibration text, which sets scales and measures errors.
        report: called with each layer's report when the layer is quantized.

    Raises:
        ConfigError: no text for a recipe that needs one, or sizes that a format cannot hold.
        DataError: the text has ids outside the vocabulary.
        UnsupportedError: layers whose inputs a recipe cannot scale, or a text for layers that
            cannot run alone.
    """
    vocab_size = model.definition.config.vocab_size
    if ids_BT is not None and not 0 <= ids_BT.min() <= ids_BT.max() < vocab_size:
        raise DataError(
            f"the text has token ids {ids_BT.min()}..{ids_BT.max()}, the model's vocabulary is "
            f"0..{vocab_size - 1}; calibrate with another text"
        )
    if recipe.needs_text or ids_BT is not None:
        _require_layers_alone(model.definition.config)
    if recipe.needs_text and ids_BT is None:
        raise ConfigError(
            f"recipe {recipe.name} chooses scales by what activations are; give a text with "
            "--calibrate"
        )
    values = dict(model.hf)
    weights = weight_map(values["model_type"], model.definition.config, model.definition.arrays)
    reports = []
    with (
        filled_directory(destination, model.tokenizer_directory) as directory,
        tempfile.TemporaryDirectory(dir=directory.parent, prefix=".quantize-") as shelf,
    ):
        work = _Quantization(model=model, recipe=recipe, weights=weights, shelf=Path(shelf))
        for each in work.run(ids_BT):
            reports.append(each)
            report(each)
        values["quantization_config"] = config_of(recipe, kept=work.kept_modules())
        key = "dtype" if "dtype" in values else "torch_dtype"
        values[key] = work.kept_dtype.name
        (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        write_tensor_files(directory, work.arrays(), max_shard_bytes=max_shard_bytes)
        return work.summary(tuple(reports))


def _require_layers_alone(config: ModelConfig) -> None:
    """Raises UnsupportedError for layers that read more than the layer before gives."""
    read = {
        "takes_keys": any(getattr(block.mixer, "takes_keys", None) for block in config.blocks),
        "layer_input_dim": config.layer_input_rows > 0,
        "streams": any(block.streams is not None for block in config.blocks),
    }
    if found := ", ".join(name for name in read if read[name]):
        raise UnsupportedError(
            f"a calibration text with {found}: it runs one layer at a time, and these layers read "
            "more than the layer before gives; choose rtn-int4, int8, fp8, fp8-blocks or w8a8-fp8, "
            "without --calibrate"
        )


class _Quantization:
    """The state of quantizing one model, layer by layer.

    Args:
        shelf: a directory for the arrays of layers that are done.
    """

    def __init__(
        self,
        *,
        model: SourceModel,
        recipe: QuantizationRecipe,
        weights: WeightMap,
        shelf: Path,
    ):
        self.model, self.recipe, self.weights, self.shelf = model, recipe, weights, shelf
        self.kept_dtype = jnp.dtype(model.source.dtype("embedding/table"))
        table = model.definition.table()
        matmuls = {info.path: info.matmul for info in table}
        self.states = frozenset(info.path for info in table if not info.is_parameter)
        matrices.require_matrices(model.hf["model_type"], weights, matmuls)
        self.tensors = matrices.tensors_by_layer(weights, matmuls)
        for tensor in itertools.chain.from_iterable(self.tensors.values()):
            matrices.require_sizes(tensor, recipe)
        self.quantized: dict[str, dict[str, np.ndarray]] = {}  # arrays by name, by tensor
        self.changed: dict[tuple[str, int], np.ndarray] = {}  # what is kept, by path and layer

    def run(self, ids_BT: np.ndarray | None) -> Iterator[LayerReport]:
        """Quantizes all layers in order."""
        config = self.model.definition.config
        names = {policy.compute.name: name for name, policy in POLICIES.items()}
        policy = stored_as_computed(POLICIES[names.get(self.kept_dtype.name, PolicyName.FP32)])
        running = CalibrationModel(config, self.model.source, policy)
        x_BTD = None if ids_BT is None else running.embedded(ids_BT)
        for place in positions_of_layers(config):
            start = time.monotonic()
            read = read_layer(self.model.source, self.model.definition, place)
            outputs, seen = [], {}
            if x_BTD is not None:
                outputs, seen = self._calibrated(running, place, read, x_BTD)
            values = self._rounded(running, place, read, seen)
            error = None
            if x_BTD is not None:
                error = self._error(running, place, values, x_BTD, outputs)
                x_BTD = np.concatenate(outputs)
            yield LayerReport(number=place.number, error=error, seconds=time.monotonic() - start)

    def _calibrated(
        self,
        running: CalibrationModel,
        place: LayerPosition,
        read: dict[str, np.ndarray],
        x_BTD: np.ndarray,
    ) -> tuple[list[np.ndarray], dict[str, InputStatistics]]:
        """Runs a layer; returns outputs on the host and its weights' input statistics."""
        # Without groups, no error of outputs is looked at.
        block = (self.recipe.form.group_rows or 1) if self.recipe.needs_text else None
        used, outputs, seen = running.on_device(place, read), [], {}
        for part in _pieces(x_BTD):
            out, more = running.run(place, used, part, statistics=block)
            outputs.append(np.asarray(out))
            seen = {path: s.with_more(seen[path]) if seen else s for path, s in more.items()}
        return outputs, seen

    def _rounded(
        self,
        running: CalibrationModel,
        place: LayerPosition,
        read: dict[str, np.ndarray],
        seen: dict[str, InputStatistics],
    ) -> dict[str, np.ndarray]:
        """Quantizes a layer's weights; returns dequantized fp32 values of its parameters."""
        exact = {path: jnp.asarray(value).astype(EXACT) for path, value in read.items()}
        block = self.model.definition.config.blocks[place.block]
        dims, paths = running.matrices(place), self._quantized_paths(place)
        scaled, seen = with_scaled_inputs(exact, seen, block, self.recipe, dims, quantized=paths)
        clip = cut_ranges(scaled, seen, self.recipe, dims, quantized=paths)
        del exact
        prefix = f"blocks/{place.block}/"
        quantized: dict[tuple[str, str], np.ndarray] = {}
        values = {path: np.array(value) for path, value in scaled.items()}
        for tensor in self.tensors[place.block, place.at]:
            rounded = matrices.quantized_tensor(
                tensor,
                functools.partial(_of_part, scaled, prefix),
                self.recipe,
                functools.partial(_of_part, clip, prefix) if clip else None,
                self.kept_dtype,
            )
            for name, array in matrices.encoded(rounded, self.recipe).items():
                quantized[tensor.name, name] = array
            for (path, index), ours in rounded.ours().items():
                values[path.removeprefix(prefix)][index[1:]] = ours
        kept: dict[tuple[str, int], np.ndarray] = {}
        for path in values.keys() - paths:
            kept[prefix + path, place.at] = values[path].astype(self.dtype(prefix + path))
            values[path] = kept[prefix + path, place.at].astype(EXACT)
        for (tensor, name), array in shelved(
            self.shelf / f"{place.number}.quantized", quantized
        ).items():
            self.quantized.setdefault(tensor, {})[name] = array
        self.changed |= shelved(self.shelf / f"{place.number}.kept", kept)
        return values

    def _error(
        self,
        running: CalibrationModel,
        place: LayerPosition,
        values: dict[str, np.ndarray],
        x_BTD: np.ndarray,
        outputs: list[np.ndarray],
    ) -> float:
        """Returns the error of a layer's output against the original's, given the same input."""
        used = running.on_device(place, values)
        again = functools.partial(
            running.run,
            place,
            used,
            activations=self.recipe.form.activations,
            rounded=tuple(
                path
                for path in sorted(self._quantized_paths(place))
                if not running.matrices(place)[path].has_experts
            ),
        )
        return _relative_error(outputs, (again(part)[0] for part in _pieces(x_BTD)))

    def _quantized_paths(self, place: LayerPosition) -> frozenset[str]:
        """Paths of the quantized weights in the block."""
        prefix = f"blocks/{place.block}/"
        tensors = self.tensors[place.block, place.at]
        return frozenset(part.path.removeprefix(prefix) for t in tensors for part in t.parts)

    # The source as it is written: layers' norms and biases from what scaling made of them.
    def dtype(self, path: str) -> np.dtype:
        """Returns a parameter's dtype in the files; state, as router biases, keeps its own."""
        return self.model.source.dtype(path) if path in self.states else self.kept_dtype

    def read(self, path: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads part of a parameter, as ``ParameterSource`` does."""
        first = index[0]
        if path.startswith("blocks/"):
            layers = [self.changed[path, at][index[1:]] for at in range(first.start, first.stop)]
            return np.stack(layers)
        return cast(self.model.source.read(path, index), self.dtype(path), path)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype, Callable[[], Any]]]:
        """Yields all tensors of the files by name, in the architecture's order."""
        found: dict[str, tuple[tuple[int, ...], np.dtype, Callable[[], Any]]] = {}
        for name, tensor in self.weights.tensors.items():
            if name in self.quantized:
                for part, value in self.quantized[name].items():
                    found[part] = (value.shape, value.dtype, functools.partial(list, (value,)))
            else:
                dtype = self.dtype(tensor.parts[0].path)
                found[name] = (tensor.shape, dtype, lambda tensor=tensor: [assemble(self, tensor)])
        return found

    def kept_modules(self) -> list[str]:
        """Returns names of the matrices that stay unquantized, for the config."""
        names = [
            name.removesuffix(".weight")
            for name, tensor in self.weights.tensors.items()
            if name not in self.quantized and len(tensor.shape) == 2 and name.endswith(".weight")
        ]
        return sorted({name for name in names if "embed" not in name} | {"lm_head"})

    def summary(self, layers: tuple[LayerReport, ...]) -> QuantizationReport:
        """Returns the sizes of all written weights and the layers' reports."""
        sizes = {name: math.prod(t.shape) for name, t in self.weights.tensors.items()}
        quantized = sum(sizes[name] for name in self.quantized)
        kept = sum(size for name, size in sizes.items() if name not in self.quantized)
        written = sum(x.nbytes for parts in self.quantized.values() for x in parts.values())
        return QuantizationReport(
            recipe=self.recipe,
            layers=layers,
            num_quantized=quantized,
            num_kept=kept,
            quantized_bytes=written,
            kept_bytes=kept * self.kept_dtype.itemsize,
            before_bytes=(kept + quantized) * self.kept_dtype.itemsize,
        )


def _of_part(arrays: Mapping[str, jax.Array], prefix: str, part: Part) -> jax.Array | None:
    """Returns a part's slice of a layer's array; None if the layer has no array of this path."""
    array = arrays.get(part.path.removeprefix(prefix))
    return array if array is None or not part.index[1:] else array[part.index[1:]]


def _pieces(x_BTD: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(x_BTD), _ROWS):
        yield x_BTD[start : start + _ROWS]


def _relative_error(want: list[np.ndarray], got: Iterator[jax.Array]) -> float:
    """Returns the norm of the difference of all outputs over their norm."""
    off = whole = 0.0
    for a, b in zip(want, got, strict=True):
        wide = a.astype(np.float64)
        off += float(np.sum((np.asarray(b).astype(np.float64) - wide) ** 2))
        whole += float(np.sum(wide**2))
    return math.sqrt(off / whole) if whole else 0.0
