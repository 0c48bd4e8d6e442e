"""A model into a directory of weights in few bits, layer by layer.

A layer's weights are on the device at a time; on the host are the hidden states of the text, and
the weights in few bits until they are written.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.config.precision import PolicyName
from jaxinfra.core.errors import ConfigError
from jaxinfra.models.definition import ModelDefinition
from jaxinfra.models.hf import WeightMap, weight_map
from jaxinfra.models.hf.mapping import Part, Tensor
from jaxinfra.numerics.policy import POLICIES, held_as_computed
from jaxinfra.numerics.storage import EXACT
from jaxinfra.serving.quantize import matrices
from jaxinfra.serving.quantize.equivalence import divided_columns, divided_norm, scaled_inputs
from jaxinfra.serving.quantize.layers import CalibrationModel, LayerPlace, places_of, read_layer
from jaxinfra.serving.quantize.recipes import Method, QuantizationRecipe, config_of
from jaxinfra.serving.quantize.search import awq_scales, clipped_ranges, smooth_scales
from jaxinfra.serving.quantize.statistics import InputStatistics
from jaxinfra.weights.conversion import cast, filled_directory
from jaxinfra.weights.parameter_sources import ParameterSource, assemble
from jaxinfra.weights.tensor_writer import write_tensor_files

_ROWS = 4  # sequences that a layer is run on at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """What one layer became."""

    number: int
    error: float | None  # of its output against the original's, relative; None: no text was given
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationReport:
    """What was written."""

    recipe: QuantizationRecipe
    layers: tuple[LayerReport, ...]
    num_quantized: int  # elements
    num_kept: int
    quantized_bytes: int
    kept_bytes: int
    before_bytes: int  # of all, as the source holds them


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceModel:
    """A model to quantize, wherever it lies."""

    definition: ModelDefinition
    source: ParameterSource
    hf: Mapping[str, Any]  # a config that describes it
    tokenizer_directory: Path


def quantize_model(
    model: SourceModel,
    destination: Path,
    recipe: QuantizationRecipe,
    *,
    ids_BT: np.ndarray | None,
    max_shard_bytes: int = 5 * 10**9,
    report: Callable[[LayerReport], None] = lambda layer: None,
) -> QuantizationReport:
    """Writes a Hugging Face directory of the model with its layers' weights in few bits.

    Embeddings, norms, routers and the projection onto the vocabulary stay as they are.

    Args:
        ids_BT: tokens of the text by which scales are chosen and errors measured.
        report: told of each layer as it is done.

    Raises:
        ConfigError: no text for a recipe that needs one, or sizes that a format has no room for.
        UnsupportedError: layers whose inputs a recipe cannot scale.
    """
    if recipe.needs_text and ids_BT is None:
        raise ConfigError(
            f"recipe {recipe.name} chooses scales by what activations are; give a text with "
            "--calibrate"
        )
    values = dict(model.hf)
    weights = weight_map(values["model_type"], model.definition.config, model.definition.arrays)
    work = _Quantization(model=model, recipe=recipe, weights=weights)
    reports = []
    for each in work.run(ids_BT):
        reports.append(each)
        report(each)
    values["quantization_config"] = config_of(recipe, kept=work.kept_modules())
    key = "dtype" if "dtype" in values else "torch_dtype"
    values[key] = work.kept_dtype.name
    with filled_directory(destination, model.tokenizer_directory) as directory:
        (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        write_tensor_files(directory, work.arrays(), max_shard_bytes=max_shard_bytes)
    return work.summary(tuple(reports))


class _Quantization:
    def __init__(self, *, model: SourceModel, recipe: QuantizationRecipe, weights: WeightMap):
        self.model, self.recipe, self.weights = model, recipe, weights
        self.kept_dtype = jnp.dtype(model.source.dtype("embedding/table"))
        self.matmuls = {info.path: info.matmul for info in model.definition.table()}
        self.quantized: dict[str, dict[str, np.ndarray]] = {}  # arrays by name, by tensor
        self.changed: dict[tuple[str, int], np.ndarray] = {}  # norms and biases, by path and layer
        matrices.require_matrices(model.hf["model_type"], weights, self.matmuls)

    def run(self, ids_BT: np.ndarray | None) -> Iterator[LayerReport]:
        """Quantizes layer after layer."""
        config = self.model.definition.config
        names = {policy.compute.name: name for name, policy in POLICIES.items()}
        policy = held_as_computed(POLICIES[names.get(self.kept_dtype.name, PolicyName.FP32)])
        running = CalibrationModel(config, self.model.source, policy)
        x_BTD = None if ids_BT is None else running.embedded(ids_BT)
        for place in places_of(config):
            start = time.monotonic()
            read = read_layer(self.model.source, self.model.definition, place)
            parameters = {path: jnp.asarray(value).astype(EXACT) for path, value in read.items()}
            seen, outputs = {}, []
            used = {path: value.astype(policy.param) for path, value in parameters.items()}
            if x_BTD is not None:
                for part in _pieces(x_BTD):
                    out, more = running.run(place, used, part)
                    outputs.append(np.asarray(out))
                    seen = {
                        path: s.with_more(seen[path]) if seen else s for path, s in more.items()
                    }
            scaled, clip = self._prepared(place, parameters, seen, running.num_inputs(place))
            values = self._round(place, scaled, clip)
            error = None
            if x_BTD is not None:
                values = {path: value.astype(policy.param) for path, value in values.items()}
                again = functools.partial(
                    running.run,
                    place,
                    values,
                    activations=self.recipe.form.activations,
                    rounded=self._rounded_paths(place, running.num_inputs(place)),
                )
                error = _relative_error(outputs, (again(part)[0] for part in _pieces(x_BTD)))
                x_BTD = np.concatenate(outputs)
            yield LayerReport(number=place.number, error=error, seconds=time.monotonic() - start)

    def _prepared(
        self,
        place: LayerPlace,
        parameters: dict[str, jax.Array],
        seen: dict[str, InputStatistics],
        num_inputs: Mapping[str, int],
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Parameters with scaled inputs, and the ranges of groups that are cut, by path."""
        recipe, block = self.recipe, self.model.definition.config.blocks[place.block]
        parameters, clip = dict(parameters), {}
        for group in scaled_inputs(block, recipe.method):
            paths = [f"{reader}/weight" for reader in group.readers]
            of = {path: _matrix(parameters[path], num_inputs[path]) for path in paths}
            stats = seen[paths[0]]
            if recipe.method is Method.AWQ:
                scales, _, _ = awq_scales(list(of.values()), stats, form=recipe.form)
            else:
                scales = smooth_scales(list(of.values()), stats)
            for path, w_KN in of.items():
                parameters[path] = (w_KN * scales[:, None]).reshape(parameters[path].shape)
                seen[path] = seen[path].divided(scales)
            if group.norm is not None:
                offset = block.norm.scale_offset
                parameters |= divided_norm(parameters, group.norm, scales, offset=offset)
            elif group.columns is not None:
                parameters |= divided_columns(parameters, group.columns, scales)
        if recipe.method is Method.AWQ:
            # Of queries and keys, whose products with one another are what matters, AWQ cuts none.
            for path, stats in seen.items():
                if path.split("/")[-2] not in ("query", "key") and path in num_inputs:
                    w_KN = _matrix(parameters[path], num_inputs[path])
                    clip[path] = clipped_ranges(w_KN, stats, form=recipe.form)
        return parameters, clip

    def _round(
        self, place: LayerPlace, parameters: dict[str, jax.Array], clip: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Rounds a layer's weights; returns what all of its parameters stand for then, fp32."""
        prefix = f"blocks/{place.block}/"

        def read(part: Part) -> jax.Array:
            value = parameters[part.path.removeprefix(prefix)]
            return value[part.index[1:]] if part.index[1:] else value

        values = dict(parameters)
        for tensor in matrices.tensors_of(self.weights, place, self.matmuls):
            quantized = matrices.quantized_tensor(
                tensor,
                read,
                self.recipe,
                {prefix + path: ranges for path, ranges in clip.items()},
                self.kept_dtype,
            )
            self.quantized[tensor.name] = matrices.encoded(quantized, self.recipe)
            for (path, index), ours in quantized.ours().items():
                name = path.removeprefix(prefix)
                values[name] = values[name].at[index[1:]].set(ours) if index[1:] else ours
        for path, value in parameters.items():
            kept = np.asarray(value).astype(self.kept_dtype)
            self.changed[prefix + path, place.at] = kept
            if not self.matmuls.get(prefix + path, False):
                values[path] = jnp.asarray(kept).astype(EXACT)
        for tensor in matrices.tensors_of(self.weights, place, self.matmuls):
            for part in tensor.parts:
                self.changed.pop((part.path, place.at), None)
        return values

    def _rounded_paths(self, place: LayerPlace, known: Mapping[str, int]) -> tuple[str, ...]:
        """Weights of projections in few bits, by path in the block."""
        tensors = matrices.tensors_of(self.weights, place, self.matmuls)
        prefix = f"blocks/{place.block}/"
        paths = {part.path.removeprefix(prefix) for tensor in tensors for part in tensor.parts}
        return tuple(sorted(paths & known.keys()))

    # The source as it is written: layers' norms and biases from what scaling made of them.
    def dtype(self, path: str) -> np.dtype:
        """As a ``ParameterSource``."""
        del path
        return self.kept_dtype

    def read(self, path: str, index: tuple[slice, ...]) -> np.ndarray:
        """As a ``ParameterSource``."""
        first = index[0]
        if path.startswith("blocks/"):
            layers = [self.changed[path, at][index[1:]] for at in range(first.start, first.stop)]
            return np.stack(layers)
        return cast(self.model.source.read(path, index), self.kept_dtype, path)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype, Callable[[], Any]]]:
        """All tensors of the files, in the order of the architecture."""
        found: dict[str, tuple[tuple[int, ...], np.dtype, Callable[[], Any]]] = {}
        for name, tensor in self.weights.tensors.items():
            if name in self.quantized:
                for part, value in self.quantized[name].items():
                    found[part] = (value.shape, value.dtype, functools.partial(list, (value,)))
            else:
                pieces = functools.partial(self._assembled, tensor)
                found[name] = (tensor.shape, self.kept_dtype, pieces)
        return found

    def _assembled(self, tensor: Tensor) -> list[np.ndarray]:
        return [assemble(self, tensor)]

    def kept_modules(self) -> list[str]:
        """Names of matrices in and outside of layers that stay as they are, for the config."""
        names = [
            name.removesuffix(".weight")
            for name, tensor in self.weights.tensors.items()
            if name not in self.quantized and len(tensor.shape) == 2 and name.endswith(".weight")
        ]
        return sorted({name for name in names if "embed" not in name} | {"lm_head"})

    def summary(self, layers: tuple[LayerReport, ...]) -> QuantizationReport:
        """Sizes of what was written."""
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


def _matrix(weight: jax.Array, num_inputs: int) -> jax.Array:
    return weight.reshape(math.prod(weight.shape[:num_inputs]), -1)


def _pieces(x_BTD: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(x_BTD), _ROWS):
        yield x_BTD[start : start + _ROWS]


def _relative_error(want: list[np.ndarray], got: Iterator[jax.Array]) -> float:
    """Of all outputs: the norm of the difference over the norm."""
    off = whole = 0.0
    for a, b in zip(want, got, strict=True):
        wide = a.astype(np.float64)
        off += float(np.sum((np.asarray(b).astype(np.float64) - wide) ** 2))
        whole += float(np.sum(wide**2))
    return math.sqrt(off / whole) if whole else 0.0
