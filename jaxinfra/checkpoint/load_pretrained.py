"""Loads a model from safetensors, as Hugging Face or ``jaxinfra convert`` writes them.

Quantized projections stay packed if all layers store them in one format, as a matrix [outputs,
inputs]. All other quantized weights are dequantized, and a log line says so.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.checkpoint.finite import require_finite
from jaxinfra.checkpoint.model_directory import read_model_directory
from jaxinfra.checkpoint.onto_mesh import place_parameters, read_shards
from jaxinfra.checkpoint.parameter_sources import MappedParameters, ParameterSource
from jaxinfra.checkpoint.stored_weights import DequantizedFiles, StoredWeight
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.hf.mapping import Part, Tensor
from jaxinfra.hf.tensor_layout import Index
from jaxinfra.model.definition import (
    ModelDefinition,
    Parameters,
    define_model,
    merged,
    nest,
    without,
)
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.ops.quantized import QuantizedWeight, WeightFormat
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.place_quantized import quantized_shardings

_LOG = logging.getLogger(__name__)
type _Read = Callable[[StoredWeight, Index], np.ndarray]
"""A slice [outputs, inputs] of something that each element of a weight has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedParameter:
    """One of our parameters, stacked over all layers, with the quantized tensors of the files that
    hold it.
    """

    source: MappedParameters
    weights: Mapping[str, StoredWeight]  # by the files' names
    path: str
    shapes: QuantizedWeight  # of the packed parameter's parts, such as elements and scales

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a slice of the packed parameter's part ``name``."""
        num_leading = self.shapes.data.ndim - 2
        leading, inner = index[:num_leading], index[num_leading:]
        ranges = [range(part.start, part.stop) for part in leading]
        shape = tuple(part.stop - part.start for part in index)
        dtype = np.dtype(self.shapes.parts[name].dtype)
        found = np.empty((math.prod(map(len, ranges)), *shape[num_leading:]), dtype)

        def read(place: int, at: tuple[int, ...]) -> None:
            _copy(found[place], self._read_one(name, inner, at))

        # Most of it is transposing matrices, which threads do side by side.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            places, layers = zip(*enumerate(itertools.product(*ranges)), strict=True)
            collections.deque(pool.map(read, places, layers), maxlen=0)
        return found.reshape(shape)

    def _read_one(self, name: str, index: Index, at: tuple[int, ...]) -> np.ndarray:
        """Reads part ``name`` of one layer, or of one of its experts."""
        form = self.shapes.format
        whole = math.prod(self.shapes.inputs), math.prod(self.shapes.outputs)
        rows_of, columns_of = form.group_rows or whole[0], form.group_columns or whole[1]
        match name:
            case "order":
                return self._order(at)[index[0]].astype(np.int32)
            case "data":
                (rows, columns), pairs = index, 8 // form.code.bits
                rows = slice(rows.start * pairs, rows.stop * pairs)
                codes = self._matrix(at, rows, columns, lambda weight, i: weight.codes(i))
                return codes if pairs == 1 else _packed_pairs(codes, rows_of)
            case "scales":
                groups, blocks = index
                read = _each_scale
            case _:
                (groups, blocks), columns_of = index, 1
                read = _each_zero
        rows = slice(groups.start * rows_of, min(groups.stop * rows_of, whole[0]))
        if rows_of == whole[0] and self.shapes.order is None:
            rows = slice(0, math.prod(self.shapes.inputs[1:]))  # the first tells all
        columns = slice(blocks.start * columns_of, min(blocks.stop * columns_of, whole[1]))
        return self._matrix(at, rows, columns, read)[::rows_of, ::columns_of]

    def _matrix(self, at: tuple[int, ...], rows: slice, columns: slice, read: _Read) -> np.ndarray:
        """A slice [rows, columns], rows in the order of their groups."""
        order = None if self.shapes.order is None else self._order(at)
        wanted = rows if order is None else slice(0, math.prod(self.shapes.inputs))
        index = (
            *(slice(i, i + 1) for i in at),
            *_of_dims(wanted, self.shapes.inputs),
            *_of_dims(columns, self.shapes.outputs),
        )
        found = self.source.gather(
            self.path, index, lambda name, theirs: read(self.weights[name], theirs)
        )
        found = found.reshape(wanted.stop - wanted.start, columns.stop - columns.start)
        return found if order is None else found[order[rows]]

    def _order(self, at: tuple[int, ...]) -> np.ndarray:
        """Rows of the weight by group."""
        index = (
            *(slice(i, i + 1) for i in at),
            *(slice(0, size) for size in self.shapes.inputs),
            *(slice(0, 1) for _ in self.shapes.outputs),
        )

        def numbers(weight: StoredWeight, theirs: Index) -> np.ndarray:
            each = np.arange(weight.shape[1] // weight.form.group_rows)
            return weight.spread(each[None].repeat(weight.shape[0], 0), theirs)

        found = self.source.gather(
            self.path, index, lambda name, theirs: numbers(self.weights[name], theirs)
        )
        return np.argsort(found.reshape(-1), kind="stable")


def shapes_in_few_bits(
    shape: tuple[int, ...],
    form: WeightFormat,
    *,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    scale_dtype: Any,
    has_zeros: bool,
    has_order: bool = False,
) -> QuantizedWeight:
    """Returns shapes and dtypes of a quantized weight's parts, as loading stores them."""
    leading = shape[: len(shape) - len(inputs) - len(outputs)]
    rows, columns = math.prod(inputs), math.prod(outputs)
    grid = form.scales_shape(rows, columns)
    stored = rows * form.code.bits // 8
    zeros = jnp.dtype("int8" if form.code.bits == 4 else "int16")

    def part(*sizes: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((*leading, *sizes), jnp.dtype(dtype))

    return QuantizedWeight(
        data=part(stored, columns, dtype=form.code.storage),
        scales=part(*grid, dtype=scale_dtype),
        zeros=part(grid[0], columns, dtype=zeros) if has_zeros else None,
        order=part(rows, dtype="int32") if has_order else None,
        format=form,
        inputs=inputs,
        outputs=outputs,
    )


def place_packed(
    source: ParameterSource, definition: ModelDefinition, placement: Placement
) -> Parameters:
    """Reads the files' quantized parameters, each device its shard only; empty without any.

    Raises:
        ConfigError: a group of elements that share a scale would be split over devices.
        CheckpointError: scales are not finite.
    """
    result: dict[tuple[Any, ...], QuantizedWeight] = {}
    for keys, (packed, shapes) in _packed_parameters(source, definition, placement).items():
        parts: dict[str, Any] = {
            name: read_shards(
                part.shape,
                part.sharding,
                functools.partial(packed.read, name),
            )
            for name, part in shapes.parts.items()
        }
        require_finite({packed.path: parts["scales"]}, where="the model's files")
        result[keys] = dataclasses.replace(shapes, **parts).check()
    return nest(result)


def _packed_parameters(
    source: ParameterSource, definition: ModelDefinition, placement: Placement
) -> dict[tuple[Any, ...], tuple[PackedParameter, QuantizedWeight]]:
    """Each quantized parameter, by its keys, and shapes, dtypes and shardings of its parts."""
    result = {}
    for info in definition.table():
        packed = _packed(source, info.path, info.shape) if info.matmul else None
        if packed is not None:
            keys = tuple(int(key) if key.isdigit() else key for key in info.path.split("/"))
            shapes = packed.shapes
            shardings = quantized_shardings(placement, shapes, info.dims, path=info.path)
            placed: dict[str, Any] = {
                name: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=shardings.parts[name])
                for name, part in shapes.parts.items()
            }
            result[keys] = packed, dataclasses.replace(shapes, **placed)
    return result


def _packed(source: ParameterSource, path: str, shape: tuple[int, ...]) -> PackedParameter | None:
    """A parameter that can stay as the files hold it; None: they hold it plainly."""
    if not isinstance(source, MappedParameters) or not isinstance(source.files, DequantizedFiles):
        return None
    weights = source.files.weights
    places = source.weights.parts_of(path)
    found = [weights.get(source.names[tensor.name]) for tensor, _ in places]
    stored = [weight for weight in found if weight is not None]
    if not stored:
        return None
    forms = {
        form_of_part(weight.form, *place) for weight, place in zip(stored, places, strict=False)
    }
    has_zeros = {weight.zeros is not None for weight in stored}
    layouts = {(part.layout.theirs, part.layout.ours) for _, part in places}
    (theirs, ours), *_ = layouts
    is_matrix = len(theirs) == 2 and ours == (*theirs[-1], *theirs[0])
    alike = len(forms) == len(has_zeros) == len(layouts) == 1 and len(stored) == len(found)
    if not alike or not is_matrix:
        why = "as one matrix of outputs and inputs" if alike else "alike in all layers"
        _LOG.warning("%s is dequantized: the files do not hold it %s", path, why)
        return None
    sizes = places[0][1].layout.sizes
    scale = source.files.files.tensors[_scales_name(stored[0])].dtype
    shapes = shapes_in_few_bits(
        shape,
        forms.pop(),
        inputs=tuple(sizes[letter] for letter in theirs[1]),
        outputs=tuple(sizes[letter] for letter in theirs[0]),
        scale_dtype=scale if scale.itemsize > 1 else np.dtype(np.float32),  # powers of two
        has_zeros=has_zeros.pop(),
        has_order=any(weight.groups() is not None for weight in stored),
    )
    return PackedParameter(source=source, weights=weights, path=path, shapes=shapes)


def form_of_part(form: WeightFormat, tensor: Tensor, part: Part) -> WeightFormat:
    """Returns the weight format of our part of a fused tensor that is stored in ``form``. If the
    part begins or ends inside a block of outputs, its blocks are smaller.
    """
    if form.group_columns > 1 and (tensor.groups > 1 or part.start % form.group_columns):
        return dataclasses.replace(form, group_columns=1)
    return form


def _scales_name(weight: StoredWeight) -> str:
    (name,) = (part for part in weight.parts if part.endswith(("scales", "_scale", "_scale_inv")))
    return name


def _each_scale(weight: StoredWeight, index: Index) -> np.ndarray:
    return weight.spread(weight.scales(), index)


def _each_zero(weight: StoredWeight, index: Index) -> np.ndarray:
    assert weight.zeros is not None
    return weight.spread(weight.zeros(), index)


def _of_dims(part: slice, sizes: tuple[int, ...]) -> Index:
    """A slice of dims taken together, cut along the first of them."""
    inner = math.prod(sizes[1:])
    if len(sizes) > 1 and (part.start % inner or part.stop % inner):
        raise AssertionError(f"{part} of {sizes}: quantized_shardings cuts the first dim only")
    first = slice(part.start // inner, part.stop // inner)
    return (first, *(slice(0, size) for size in sizes[1:]))


_SQUARE = 256  # rows and columns of which the caches of a core hold both copies


def _copy(to: np.ndarray, given: np.ndarray) -> None:
    """Copies an array by squares: three times as fast where it is a transposed matrix of bytes."""
    if given.ndim != 2:
        to[...] = given
        return
    for row in range(0, given.shape[0], _SQUARE):
        for column in range(0, given.shape[1], _SQUARE):
            at = slice(row, row + _SQUARE), slice(column, column + _SQUARE)
            to[at] = given[at]


def _packed_pairs(codes: np.ndarray, group: int) -> np.ndarray:
    """Packs 4-bit codes as ``quantized_weight`` of kernels does: halves of a group share bytes."""
    rows, columns = codes.shape
    halves = codes.astype(np.uint8).reshape(rows // group, 2, group // 2, columns)
    return (halves[:, 0] | (halves[:, 1] << 4)).reshape(rows // 2, columns)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedModel:
    """A loaded model with its parameters and its state on a mesh."""

    definition: ModelDefinition
    parameters: Parameters  # with the state, as ``ModelDefinition.bind`` takes them
    placement: Placement


def load_pretrained(
    path: Path,
    *,
    policy: PolicyName | None = None,
    placement: Placement | None = None,
    keep_packed: bool = False,
) -> PretrainedModel:
    """Reads a model directory, tensor by tensor, each device its shard only.

    Parameters are stored in the compute dtype, because they are not trained: bf16 takes half the
    memory of fp32. Nothing is rounded if the files have no higher precision.

    Args:
        policy: precision policy; None: that of the dtype in which the embedding is stored.
        placement: mesh and shardings; the first device by default.
        keep_packed: keep 4-bit and 8-bit weights of the files as ``QuantizedWeight``; else they
            become plain arrays.
    """
    source, definition, placement = _opened(path, policy, placement)
    shardings = merged(placement.parameters(definition), placement.model_state(definition))
    packed = place_packed(source, definition, placement) if keep_packed else {}
    plain = place_parameters(source, definition, without(shardings, packed))
    return PretrainedModel(
        definition=definition, parameters=merged(plain, packed), placement=placement
    )


def pretrained_shapes(
    path: Path, *, policy: PolicyName | None = None, placement: Placement | None = None
) -> PretrainedModel:
    """Returns the model with shapes instead of arrays, packed weights included.

    Only the files' headers are read. Arguments are those of ``load_pretrained``.
    """
    source, definition, placement = _opened(path, policy, placement)
    shardings = merged(placement.parameters(definition), placement.model_state(definition))
    found = _packed_parameters(source, definition, placement)
    packed = nest({keys: shapes for keys, (_, shapes) in found.items()})
    plain = jax.tree.map(
        lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
        without(merged(definition.shapes, definition.state_shapes), packed),
        without(shardings, packed),
    )
    return PretrainedModel(
        definition=definition, parameters=merged(plain, packed), placement=placement
    )


def _opened(
    path: Path, policy: PolicyName | None, placement: Placement | None
) -> tuple[ParameterSource, ModelDefinition, Placement]:
    """Opens a model directory and checks it; returns its parameters, model and placement."""
    directory = read_model_directory(path)
    if placement is None:
        placement = Placement(mesh=make_mesh(MeshConfig(), devices=jax.local_devices()))

    def defined(policy: PolicyName) -> ModelDefinition:
        numbers = stored_as_computed(POLICIES[policy])
        return define_model(directory.config, execution_on(placement, policy=numbers))

    # Names and shapes do not depend on the policy, and the files say which one fits them.
    assumed = policy or PolicyName.FP32
    definition = defined(assumed)
    source = directory.open(definition)
    fitting = policy or _policy_of(source.dtype("embedding/table"))
    if fitting is not assumed:
        definition = defined(fitting)
    return source, definition, placement


def _policy_of(dtype: np.dtype) -> PolicyName:
    names = {policy.compute.name: name for name, policy in POLICIES.items()}
    return names.get(dtype.name, PolicyName.FP32)
