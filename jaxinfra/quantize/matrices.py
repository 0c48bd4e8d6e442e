"""Quantization of a layer's weights into tensors of other programs' file formats.

Dims: K input, N output, G group of inputs.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.errors import ConfigError
from jaxinfra.hf import WeightMap
from jaxinfra.hf.mapping import Part, Tensor
from jaxinfra.numerics.storage import EXACT
from jaxinfra.ops.quantized import QuantizedWeight, WeightCode, round_weight
from jaxinfra.quantize.recipes import Method, QuantizationRecipe, layout_of

_KEPT = {"router", "shared_scale", "indexer"}
"""Projections whose results choose or weigh experts, or choose keys: small, and a rounded score
sends a token elsewhere.
"""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """One quantized tensor [K, N] of the written files, and jaxinfra's parameters in it."""

    tensor: Tensor
    weight: QuantizedWeight

    def ours(self) -> dict[tuple[str, tuple[int, ...]], np.ndarray]:
        """Returns dequantized float32 values by the path and index of jaxinfra's parameters."""
        theirs = np.asarray(_dequantized(self.weight)).T
        found = {}
        for part in self.tensor.parts:
            rows = theirs[part.start : part.start + part.layout.their_shape[0]]
            whole = tuple(slice(0, size) for size in part.layout.our_shape)
            found[part.path, part.index] = part.layout.read(
                lambda index, rows=rows: rows[index], whole
            )
        return found


def is_quantizable(tensor: Tensor, matmuls: Mapping[str, bool]) -> bool:
    """Tells whether a tensor in the files is a matmul weight of a layer, so can be quantized."""
    return tensor.groups == 1 and all(
        part.path.startswith("blocks/")
        and matmuls.get(part.path, False)
        and not _KEPT & {*part.path.split("/")}
        and _is_matrix(part)
        for part in tensor.parts
    )


def _is_matrix(part: Part) -> bool:
    theirs, ours = part.layout.theirs, part.layout.ours
    return len(theirs) == 2 and ours == (*theirs[1], *theirs[0])


def tensors_by_layer(
    weights: WeightMap, matmuls: Mapping[str, bool]
) -> dict[tuple[int, int], list[Tensor]]:
    """Lists the tensors to quantize per layer, by the layer's path and repetition."""
    found: dict[tuple[int, int], list[Tensor]] = collections.defaultdict(list)
    for tensor in weights.tensors.values():
        if is_quantizable(tensor, matmuls):
            part = tensor.parts[0]
            found[int(part.path.split("/")[1]), part.index[0]].append(tensor)
    return found


def require_matrices(model_type: str, weights: WeightMap, matmuls: Mapping[str, bool]) -> None:
    """Raises ConfigError if no tensor of a model can be quantized."""
    if not any(is_quantizable(tensor, matmuls) for tensor in weights.tensors.values()):
        raise ConfigError(
            f"a {model_type} checkpoint keeps no weight of a layer as one matrix of outputs and "
            "inputs, which is what can be quantized"
        )


def require_sizes(tensor: Tensor, recipe: QuantizationRecipe) -> None:
    """Raises ConfigError if the recipe's format cannot store a tensor of these sizes."""
    columns, rows = tensor.shape
    group = recipe.form.group_rows if recipe.form.code is WeightCode.INT4 else 1
    if rows % group:
        raise ConfigError(
            f"{tensor.name} has {rows} inputs, which groups of {group} do not divide; choose "
            "another --group-size, or a recipe of 8 bits"
        )
    is_packed = recipe.has_zeros or layout_of(recipe.form) == "pack-quantized"
    words = 32 // recipe.form.code.bits if is_packed else 1
    sizes = {"inputs": rows} | ({"outputs": columns} if recipe.method is Method.AWQ else {})
    for what, size in sizes.items():
        if size % words:
            raise ConfigError(
                f"{tensor.name} has {size} {what}, and {words} elements share 32 bits in the files "
                f"of {recipe.name}; choose fp8, which packs nothing"
            )


def quantized_tensor(
    tensor: Tensor,
    read: Callable[[Part], Any],
    recipe: QuantizationRecipe,
    clip: Callable[[Part], jax.Array | None] | None,
    kept: jnp.dtype,
) -> QuantizedTensor:
    """Returns one tensor of the files, quantized by a recipe.

    Args:
        kept: dtype of the model's unquantized weights.
        read: reads a part of jaxinfra's parameters, of one layer and one expert.
        clip: returns factors on the ranges of a part's groups, [G, N]; None for 1.

    Raises:
        ConfigError: the format cannot store a tensor of these sizes.
    """
    matrices = [
        jnp.asarray(read(part)).reshape(part.layout.their_shape[::-1]) for part in tensor.parts
    ]
    w_KN = jnp.concatenate(matrices, axis=1)
    require_sizes(tensor, recipe)
    found = [] if clip is None else [clip(part) for part in tensor.parts]
    ranges = [each for each in found if each is not None]
    clip_GN = jnp.concatenate(ranges, axis=1) if len(ranges) == len(matrices) else None
    rounded = _rounded(w_KN, clip_GN, recipe=recipe, kept=kept)
    return QuantizedTensor(tensor=tensor, weight=rounded)


def scale_dtype(recipe: QuantizationRecipe, kept: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of scales in the files: float16, fp32, or that of unquantized weights."""
    if recipe.form.activations is None and recipe.form.code is not WeightCode.E4M3:
        return jnp.dtype("float16") if recipe.has_zeros else kept
    return EXACT


@functools.partial(jax.jit, static_argnames=("recipe", "kept"))
def _rounded(
    w_KN: jax.Array, clip: jax.Array | None, *, recipe: QuantizationRecipe, kept: jnp.dtype
) -> QuantizedWeight:
    return round_weight(
        w_KN,
        recipe.form,
        has_zeros=recipe.has_zeros,
        scale_dtype=scale_dtype(recipe, kept),
        clip=clip,
    )


_dequantized = jax.jit(lambda weight: weight.dequantize(EXACT))


def encoded(quantized: QuantizedTensor, recipe: QuantizationRecipe) -> dict[str, np.ndarray]:
    """Returns the arrays that the recipe's file format stores for a quantized tensor, by name."""
    weight, form = quantized.weight, recipe.form
    module = quantized.tensor.name.removesuffix("weight")
    codes = np.asarray(weight.data)
    if form.code is WeightCode.INT4:
        codes = _unpaired(codes, form.group_rows)
    scales = np.asarray(weight.scales)
    if recipe.method is Method.AWQ:
        assert weight.zeros is not None
        return {
            f"{module}qweight": _words(codes, 4, _AWQ_ORDER),
            f"{module}qzeros": _words(np.asarray(weight.zeros), 4, _AWQ_ORDER),
            f"{module}scales": scales,
        }
    name = f"{module}weight"
    if form.group_columns > 1:
        return {name: codes.T, f"{name}_scale_inv": scales.T}
    if form.code is WeightCode.E4M3 or form.activations is not None:
        return {name: codes.T, f"{name}_scale": scales.T}
    bits = form.code.bits
    unsigned = codes if bits == 4 else (codes.astype(np.int16) + 128).astype(np.uint8)
    return {
        f"{name}_packed": _words(unsigned.T, bits),
        f"{name}_scale": scales.T,
        f"{name}_shape": np.array(codes.T.shape, np.int64),
    }


def _unpaired(data: np.ndarray, group: int) -> np.ndarray:
    """Unpacks bytes that hold 4-bit codes of two half groups into codes [K, N]."""
    pairs, columns = data.shape
    grouped = data.reshape(2 * pairs // group, group // 2, columns)
    return np.stack([grouped & 15, grouped >> 4], axis=1).reshape(2 * pairs, columns)


def _words(values: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Packs elements of the last dim into int32; position i holds element ``order[i]``."""
    count = 32 // bits
    rows, columns = values.shape
    grouped = values.astype(np.uint32).reshape(rows, columns // count, count)
    packed = np.zeros(grouped.shape[:2], np.uint32)
    for place, element in enumerate(order or range(count)):
        packed |= grouped[..., element] << np.uint32(bits * place)
    return packed.view(np.int32)
