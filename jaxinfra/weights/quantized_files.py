"""Quantized weights read as the numbers that they stand for.

The files hold elements in few bits and scales beside them. A reader shows what the model asks for:
tensors of the weights' names and shapes in a plain dtype, scales hidden. Of a slice it reads the
elements and scales that the slice needs.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from jaxinfra.core.errors import CheckpointError, ConfigError
from jaxinfra.models.hf.quantization import BlockScaledFp8, Mxfp4, Quantization
from jaxinfra.models.hf.tensor_layout import Index
from jaxinfra.weights.tensor_files import DTYPES, StoredTensor, TensorFiles

_FP32, _BF16, _E4M3 = map(jnp.dtype, ("float32", "bfloat16", "float8_e4m3fn"))
_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # elements that share an exponent
_BIAS = 127
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], _FP32)
_NUMBERS = np.concatenate([_E2M1, -_E2M1])  # the highest of four bits is the sign


class TensorReader(Protocol):
    """Tensors by name, read a slice at a time."""

    @property
    def directory(self) -> Path:
        """Where the files are."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Shapes and dtypes, as ``read`` gives them."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor."""
        ...


def plain_tensors(files: TensorFiles, quantization: Quantization | None) -> TensorReader:
    """The files' weights as plain numbers.

    Raises:
        CheckpointError: elements without their scales, or of other shapes.
        ConfigError: elements that are not what the config says.
    """
    match quantization:
        case BlockScaledFp8(block=block):
            reader: TensorReader = _Fp8Files(files=files, block=block)
        case Mxfp4():
            reader = _Mxfp4Files(files=files)
        case None:
            reader = files
    for name, tensor in reader.tensors.items():
        if tensor.dtype.name not in DTYPES.values():
            raise ConfigError(
                f"{tensor.file}: tensor {name} has elements of type {tensor.dtype.name}, which the "
                "config's quantization_config does not explain; known without one: "
                f"{', '.join(DTYPES)} (quantized weights are not read)"
            )
    return reader


def _scales_of(files: TensorFiles, name: str, scales: str, shape: tuple[int, ...]) -> StoredTensor:
    found = files.tensors.get(scales)
    if found is None:
        raise CheckpointError(
            f"{files.directory}: {name} is quantized and its scales {scales} are missing; copy all "
            "files again"
        )
    if found.shape != shape:
        raise CheckpointError(
            f"{files.directory}: {scales} has shape {list(found.shape)}, {name} asks for "
            f"{list(shape)}; one of them, or the config's block size, is of another model"
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fp8Files:
    """Elements times their block's scale, in fp32. Blocks at the edges may be partial."""

    files: TensorFiles
    block: tuple[int, int]

    @property
    def directory(self) -> Path:
        return self.files.directory

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        found = {}
        for name, tensor in self.files.tensors.items():
            if self._is_quantized(name):
                grid = tuple(-(-n // m) for n, m in zip(tensor.shape, self.block, strict=True))
                _scales_of(self.files, name, name + _SCALE, grid)
                found[name] = dataclasses.replace(tensor, dtype=_FP32)
            elif not self._is_quantized(name.removesuffix(_SCALE)):
                found[name] = tensor
        return found

    def _is_quantized(self, name: str) -> bool:
        tensor = self.files.tensors.get(name)
        return tensor is not None and tensor.dtype == _E4M3

    def read(self, name: str, index: Index) -> np.ndarray:
        elements = self.files.read(name, index)
        if not self._is_quantized(name):
            return elements
        covered = tuple(
            slice(part.start // m, -(-part.stop // m))
            for part, m in zip(index, self.block, strict=True)
        )
        scales = self.files.read(name + _SCALE, covered).astype(_FP32)
        for dim, (part, m) in enumerate(zip(index, self.block, strict=True)):
            start = part.start % m
            wanted = slice(start, start + part.stop - part.start)
            scales = np.repeat(scales, m, axis=dim)[(slice(None),) * dim + (wanted,)]
        return elements.astype(_FP32) * scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mxfp4Files:
    """Elements times a power of two, in bf16, which holds them exactly.

    Packed they lie as [experts, outputs, inputs / 32, 16 bytes], the first of two in the low bits;
    the weights are [experts, inputs, outputs].
    """

    files: TensorFiles

    @property
    def directory(self) -> Path:
        return self.files.directory

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        found = {}
        for name, tensor in self.files.tensors.items():
            weight = name.removesuffix(_BLOCKS)
            if name != weight:
                experts, outputs, groups, _ = tensor.shape
                _scales_of(self.files, weight, weight + _SCALES, tensor.shape[:3])
                shape = (experts, groups * _GROUP, outputs)
                dtype = _BF16
                found[weight] = dataclasses.replace(tensor, shape=shape, dtype=dtype)
            elif name.removesuffix(_SCALES) + _BLOCKS not in self.files.tensors:
                found[name] = tensor
        return found

    def read(self, name: str, index: Index) -> np.ndarray:
        if name + _BLOCKS not in self.files.tensors:
            return self.files.read(name, index)
        experts, inputs, outputs = index
        groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
        packed = self.files.read(name + _BLOCKS, (experts, outputs, groups, slice(0, _GROUP // 2)))
        exponents = self.files.read(name + _SCALES, (experts, outputs, groups))
        numbers = _NUMBERS[np.stack([packed & 15, packed >> 4], axis=-1)]
        numbers = numbers.reshape(*exponents.shape, _GROUP)
        numbers = np.ldexp(numbers, exponents.astype(np.int32)[..., None] - _BIAS)
        numbers = numbers.reshape(*exponents.shape[:2], math.prod(numbers.shape[2:]))
        start = inputs.start % _GROUP
        numbers = numbers[..., start : start + inputs.stop - inputs.start]
        return numbers.transpose(0, 2, 1).astype(_BF16)
