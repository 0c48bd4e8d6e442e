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

from jaxinfra.checkpoint.stored_formats import (
    find_awq,
    find_compressed,
    find_gptq,
    find_scaled_fp8,
)
from jaxinfra.checkpoint.stored_weights import DequantizedFiles, FindWeight, found_tensor
from jaxinfra.checkpoint.tensor_files import DTYPES, StoredTensor, TensorFiles
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf.quantization import (
    Awq,
    BlockScaledFp8,
    CompressedTensors,
    Gptq,
    Mxfp4,
    Quantization,
    TensorScaledFp8,
)
from jaxinfra.hf.tensor_layout import Index

_FP32, _BF16 = map(jnp.dtype, ("float32", "bfloat16"))
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
    reader: TensorReader = _reader(files, quantization)
    for name, tensor in reader.tensors.items():
        if tensor.dtype.name not in DTYPES.values():
            raise ConfigError(
                f"{tensor.file}: tensor {name} has elements of type {tensor.dtype.name}, which the "
                "config's quantization_config does not explain; known without one: "
                f"{', '.join(DTYPES)}"
            )
    return reader


def _reader(files: TensorFiles, quantization: Quantization | None) -> TensorReader:
    match quantization:
        case BlockScaledFp8() | TensorScaledFp8():
            find: FindWeight = functools.partial(find_scaled_fp8, config=quantization)
        case Awq():
            find = functools.partial(find_awq, config=quantization)
        case Gptq():
            find = functools.partial(find_gptq, config=quantization)
        case CompressedTensors():
            find = functools.partial(find_compressed, config=quantization)
        case Mxfp4():
            return _Mxfp4Files(files=files)
        case None:
            return files
    return DequantizedFiles(files=files, find=find)


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
                shape = tensor.shape
                if len(shape) != 4 or shape[-1] != _GROUP // 2 or tensor.dtype != np.uint8:
                    raise CheckpointError(
                        f"{self.directory}: {name} is {tensor.dtype.name}{list(shape)}; blocks are "
                        "uint8 [experts, outputs, inputs / 32, 16]: copy all files again"
                    )
                experts, outputs, groups, _ = shape
                found_tensor(
                    self.files,
                    weight + _SCALES,
                    tensor.shape[:3],
                    of=weight,
                    kinds=(np.dtype(np.uint8).name,),
                )
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
