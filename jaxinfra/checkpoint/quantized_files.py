"""Formats of quantized checkpoints: which tensors make up a weight, and how they are dequantized.

The files hold quantized elements, with scales in separate tensors. A reader shows tensors of the
names and shapes that the model expects, in a plain dtype, and hides the scales. It reads only the
elements and scales that a slice needs.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxinfra.checkpoint import stored_weights as stored
from jaxinfra.checkpoint.stored_weights import (
    DequantizedFiles,
    FindWeight,
    StoredWeight,
    require_tensor,
)
from jaxinfra.checkpoint.tensor_files import DTYPES, StoredTensor, TensorFiles
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf.quantization import (
    Awq,
    CompressedTensors,
    Gptq,
    Mxfp4,
    Quantization,
    ScaledFp8,
)
from jaxinfra.hf.tensor_layout import Index
from jaxinfra.ops.quantized import Activations, WeightCode, WeightFormat

_FLOATS = ("float16", "bfloat16", "float32")
_POWERS = "float8_e8m0fnu"  # of two alone, where scale_fmt is ue8m0
_WORDS = ("int32",)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each 4 bits of 32 hold, the lowest first
_Found = tuple[str, StoredWeight] | None


def find_scaled_fp8(files: TensorFiles, name: str, *, config: ScaledFp8) -> _Found:
    """Finds an e4m3 weight and its scales."""
    if files.tensors[name].dtype.name != "float8_e4m3fn":
        return None
    scale, other = f"{name}_scale_inv", f"{name}_scale"
    if config.block is None and scale not in files.tensors:
        scale = other
    form = CompressedTensors(
        code=WeightCode.E4M3,
        packed=False,
        group=-1,
        block=config.block,
        per_tensor=config.block is None,
    )
    return name, _plain(files, name, scale, form)


def find_awq(files: TensorFiles, name: str, *, config: Awq) -> _Found:
    """Finds the tensors of an AWQ weight: ``qweight``, ``qzeros`` and ``scales``."""
    if not name.endswith(".qweight"):
        return None
    module = name.removesuffix("qweight")
    inputs, words = _matrix(files, name)
    return f"{module}weight", _integers(
        files,
        name,
        stored.BitPacking(dim=0, transposed=True, order=_AWQ_ORDER),
        shape=(words * 8, inputs),
        code=WeightCode.INT4,
        group=config.group,
        scales=f"{module}scales",
        zeros=f"{module}qzeros",
        order="",  # its groups are in sequence
    )


def find_gptq(files: TensorFiles, name: str, *, config: Gptq) -> _Found:
    """Finds a GPTQ weight: ``qweight``, ``qzeros``, ``scales`` and ``g_idx``, if there."""
    if not name.endswith(".qweight"):
        return None
    module = name.removesuffix("qweight")
    words, outputs = _matrix(files, name)
    inputs, order = words * 32 // config.bits, f"{module}g_idx"
    if order not in files.tensors and config.act_order and 0 < config.group < inputs:
        raise CheckpointError(
            f"{files.directory}: {order} is missing, which says the group of each input where "
            "desc_act is true; copy all files again, or correct desc_act"
        )
    return f"{module}weight", _integers(
        files,
        name,
        stored.BitPacking(transposed=True),
        shape=(outputs, inputs),
        code=WeightCode.INT4 if config.bits == 4 else WeightCode.INT8,
        group=config.group,
        scales=f"{module}scales",
        zeros=f"{module}qzeros",
        zeros_less_one=config.adds_one,
        order=order,
    )


def _integers(
    files: TensorFiles,
    name: str,
    packing: stored.BitPacking,
    *,
    shape: tuple[int, int],
    code: WeightCode,
    group: int,
    scales: str,
    zeros: str | None,
    order: str,
    zeros_less_one: bool = False,
    activations: Activations | None = None,
    by_channel: bool = False,
) -> StoredWeight:
    """Makes the weight whose elements, several in each word, are the tensor ``name``.

    Args:
        shape: outputs and inputs.
        group: number of inputs that share a scale; -1: all.
        order: name of the tensor of each input's group, if the files have it.
        zeros_less_one: zero points are stored as one less than they are.
        by_channel: one group has all inputs of an output, however many.
    """
    outputs, inputs = shape
    bits, middle = code.bits, 0 if code.bits == 4 else 128
    group = _group_of(files, name, group, inputs)
    turn = -1 if packing.transposed else 1
    found = functools.partial(stored.require_tensor, files, of=name, kinds=_WORDS)
    found(name, files.tensors[name].shape)
    found(scales, (outputs, inputs // group)[::turn], kinds=_FLOATS)
    if zeros is not None:
        found(zeros, (-(-outputs * bits // 32), inputs // group)[::turn])
    has_order = order in files.tensors
    if has_order:
        found(order, (inputs,))

    def read_codes(index: Index) -> np.ndarray:
        read = packing.codes(files, name, index, bits=bits)
        return read if not middle else (read.astype(np.int16) - middle).astype(np.int8)

    def read_zeros() -> np.ndarray:
        read = packing.zeros(files, zeros or "", bits=bits)[:outputs]
        if zeros_less_one:
            read = _one_more(read, bits, where=f"{files.directory}: {zeros}")
        return read - middle

    rows = 0 if by_channel else group
    return StoredWeight(
        shape=shape,
        form=WeightFormat(code=code, group_rows=rows, activations=activations),
        parts=(name, scales, *filter(None, (zeros, order if has_order else None))),
        first=files.tensors[name],
        codes=read_codes,
        scales=lambda: stored.read_whole(files, scales).transpose((0, 1)[::turn]),
        zeros=None if zeros is None else read_zeros,
        groups=lambda: stored.group_numbers(files, order, group=group) if has_order else None,
    )


def _one_more(zeros: np.ndarray, bits: int, *, where: str) -> np.ndarray:
    most = (1 << bits) - 1
    if (zeros == most).any():
        raise CheckpointError(
            f"{where} has zero points stored as {most}, one less than what some programs read as "
            "0 and others do not; save the checkpoint with checkpoint_format gptq_v2"
        )
    return zeros + 1


def find_compressed(files: TensorFiles, name: str, *, config: CompressedTensors) -> _Found:
    """Finds the tensors of a compressed-tensors weight: ``weight_packed`` or ``weight``,
    ``weight_scale`` and optional others such as zero points.
    """
    tensor = files.tensors[name]
    if config.packed:
        return _packed(files, name, config) if name.endswith(".weight_packed") else None
    if not name.endswith(".weight") or tensor.dtype.name != config.code.storage.name:
        return None
    return name, _plain(files, name, f"{name}_scale", config)


def _packed(files: TensorFiles, name: str, config: CompressedTensors) -> _Found:
    weight = name.removesuffix("_packed")
    count = 32 // config.code.bits
    outputs, words = _matrix(files, name)
    shape_name = f"{weight}_shape"
    stored.require_tensor(files, shape_name, (2,), of=name, kinds=("int64", "int32"))
    shape = tuple(int(n) for n in stored.read_whole(files, shape_name))
    if shape[0] != outputs or not (words - 1) * count < shape[1] <= words * count:
        raise CheckpointError(
            f"{files.directory}: {shape_name} says {list(shape)}, and {name} has room for "
            f"[{outputs}, {words * count}]; one of them is of another model"
        )
    found = _integers(
        files,
        name,
        stored.BitPacking(),
        shape=(outputs, shape[1]),
        code=config.code,
        group=config.group,
        scales=f"{weight}_scale",
        zeros=None if config.symmetric else f"{weight}_zero_point",
        order=f"{weight}_g_idx",
        activations=config.activations,
        by_channel=config.code is WeightCode.INT8 and config.group < 0,
    )
    return weight, dataclasses.replace(found, parts=(*found.parts, shape_name))


def _plain(files: TensorFiles, name: str, scale: str, config: CompressedTensors) -> StoredWeight:
    """Elements of 8 bits as they are, with scales of the tensor, its outputs, groups or blocks."""
    outputs, inputs = shape = _matrix(files, name)
    per_tensor = config.per_tensor
    if config.block is not None:
        columns, rows = config.block
    elif config.group > 0:
        rows, columns = _group_of(files, name, config.group, inputs), 1
    else:
        rows, columns = 0, 0 if per_tensor else 1
    form = WeightFormat(
        code=config.code,
        group_rows=rows,
        group_columns=columns,
        activations=config.activations,
    )
    grid = form.scales_shape(inputs, outputs)[::-1]
    found = files.tensors.get(scale)
    # One number may be stored without dims, or with one.
    flat = found is not None and np.prod(found.shape) == 1 == np.prod(grid)
    of_scales = found.shape if flat and found is not None else grid
    kinds = _FLOATS if config.block is None else (*_FLOATS, _POWERS)
    stored.require_tensor(files, scale, of_scales, of=name, kinds=kinds)
    parts, zeros = [name, scale], None
    if not config.symmetric:
        zero = f"{name}_zero_point"
        shape_of_zeros = (1,) if per_tensor else (outputs, grid[1])
        stored.require_tensor(files, zero, shape_of_zeros, of=name, kinds=("int8",))
        parts.append(zero)

        def zeros() -> np.ndarray:
            read = stored.read_whole(files, zero)
            return np.broadcast_to(read, (outputs, 1)) if per_tensor else read

    return StoredWeight(
        shape=shape,
        form=form,
        parts=tuple(parts),
        first=files.tensors[name],
        codes=functools.partial(files.read, name),
        scales=lambda: stored.read_whole(files, scale).reshape(grid),
        zeros=zeros,
    )


def _matrix(files: TensorFiles, name: str) -> tuple[int, int]:
    tensor = files.tensors[name]
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise CheckpointError(
            f"{files.directory}: {name} has shape {list(tensor.shape)}; quantized weights are "
            "matrices: copy all files again"
        )
    return tensor.shape[0], tensor.shape[1]


def _group_of(files: TensorFiles, name: str, group: int, inputs: int) -> int:
    group = inputs if group < 0 else group
    if inputs % group or group % 2:
        raise CheckpointError(
            f"{files.directory}: {name} has {inputs} inputs, which are no whole number of groups "
            f"of {group}, an even number; correct group_size in quantization_config"
        )
    return group


_FP32, _BF16 = map(jnp.dtype, ("float32", "bfloat16"))
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # elements that share an exponent
_BIAS = 127
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], _FP32)
_NUMBERS = np.concatenate([_E2M1, -_E2M1])  # the highest of four bits is the sign


def _mxfp4_numbers() -> np.ndarray:
    """Returns both numbers of a byte with each exponent, in bits of bf16: uint16 [2, 65536]."""
    byte = np.arange(256)
    numbers = _NUMBERS[np.stack([byte & 15, byte >> 4])]
    with np.errstate(over="ignore"):  # such weights are refused as not finite
        numbers = np.ldexp(numbers[:, None, :], byte.astype(np.int32)[:, None] - _BIAS)
    return numbers.astype(_BF16).view(np.uint16).reshape(2, -1)


_LOW, _HIGH = _mxfp4_numbers()

type TensorReader = TensorFiles | DequantizedFiles | _Mxfp4Files
"""A reader of a directory's tensors by name, one slice at a time."""


def plain_tensors(files: TensorFiles, quantization: Quantization | None) -> TensorReader:
    """Returns a reader that shows the files' quantized weights dequantized.

    Raises:
        CheckpointError: scales are missing, or shapes are wrong.
        ConfigError: elements are not in the format that the config states.
    """
    reader = _reader(files, quantization)
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
        case ScaledFp8():
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

    Files pack them as [experts, outputs, inputs / 32, 16 bytes], the first of two in the low bits;
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
                require_tensor(
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
        places = exponents[..., None].astype(np.uint16) << 8 | packed
        places = places.reshape(*exponents.shape[:2], math.prod(packed.shape[2:]))
        places = np.ascontiguousarray(places.transpose(0, 2, 1))
        found = np.empty((*places.shape[:2], 2, places.shape[2]), np.uint16)
        found[:, :, 0], found[:, :, 1] = _LOW[places], _HIGH[places]
        start = inputs.start % _GROUP
        rows = found.reshape(len(found), -1, found.shape[-1]).view(_BF16)
        return rows[:, start : start + inputs.stop - inputs.start]
