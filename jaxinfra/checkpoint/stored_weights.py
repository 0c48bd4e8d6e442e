"""Quantized weights as checkpoints store them, behind one interface for all formats.

A weight is a matrix [outputs, inputs]. Formats differ in how files store the elements; scales and
zero points are small, and are read whole.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from jaxinfra.checkpoint.tensor_files import StoredTensor, TensorFiles
from jaxinfra.errors import CheckpointError
from jaxinfra.hf.tensor_layout import Index
from jaxinfra.ops.quantized import WeightFormat

_WORD = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A quantized weight in files: its shape, and functions that read elements and scales.

    Codes are 0 to 15 for 4 bits (minus a zero point, 8 by default), -128 to 127 for 8 bits, or
    e4m3.
    """

    shape: tuple[int, int]  # outputs, inputs
    form: WeightFormat  # rows are inputs, columns outputs
    parts: tuple[str, ...]  # names of the files' tensors that make up the weight
    first: StoredTensor  # the first of these tensors
    codes: Callable[[Index], np.ndarray]
    scales: Callable[[], np.ndarray]  # [blocks of outputs, groups of inputs], floating
    zeros: Callable[[], np.ndarray] | None = None  # integers [outputs, groups]
    groups: Callable[[], np.ndarray | None] = lambda: None  # group of each input; None: consecutive

    def spread(self, of_groups: np.ndarray, index: Index) -> np.ndarray:
        """Repeats each group's value for all elements of the group in a slice."""
        rows, columns = (np.arange(part.start, part.stop) for part in index)
        block = self.form.group_columns or self.shape[0]
        group = self.form.group_rows or self.shape[1]
        numbers = self.groups()
        of_columns = columns // group if numbers is None else numbers[columns]
        of_rows = rows if of_groups.shape[0] == self.shape[0] else rows // block
        return of_groups[of_rows].take(of_columns, axis=1)

    def values(self, index: Index) -> np.ndarray:
        """Dequantizes a slice of the weight to float32: ``(code - zero) * scale``."""
        values = self.codes(index).astype(np.float32)
        if self.zeros is not None:
            values = values - self.spread(self.zeros(), index).astype(np.float32)
        elif self.form.code.bits == 4:
            values = values - np.float32(8)
        return values * self.spread(self.scales(), index).astype(np.float32)


type FindWeight = Callable[[TensorFiles, str], tuple[str, StoredWeight] | None]
"""Returns a quantized weight's name and form if the named tensor is its first one; else None."""


def require_tensor(
    files: TensorFiles, name: str, shape: tuple[int, ...], *, of: str, kinds: tuple[str, ...]
) -> None:
    """Raises CheckpointError if a weight's tensor is missing, or of another shape or dtype."""
    found = files.tensors.get(name)
    if found is None:
        raise CheckpointError(
            f"{files.directory}: {of} is quantized and its scales {name} are missing; copy all "
            "files again"
        )
    if found.shape != shape:
        raise CheckpointError(
            f"{files.directory}: {name} has shape {list(found.shape)}, {of} asks for "
            f"{list(shape)}; one of them, or the config's block size, is of another model"
        )
    if found.dtype.name not in kinds:
        raise CheckpointError(
            f"{files.directory}: {name} has elements of type {found.dtype.name}, {of} asks for "
            f"{' or '.join(kinds)}; copy all files again"
        )


def read_whole(files: TensorFiles, name: str) -> np.ndarray:
    """Reads all of a small tensor."""
    return files.read(name, tuple(slice(0, size) for size in files.tensors[name].shape))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BitPacking:
    """The packing of a weight [outputs, inputs] and its zero points in 32-bit words."""

    dim: int = 1  # dim of the weight along which elements share a word; for zero points it is 0
    transposed: bool = False  # whether the files' first dim is inputs (or groups), not outputs
    order: tuple[int, ...] = ()  # element index at each bit position, lowest first; () in sequence

    def codes(self, files: TensorFiles, name: str, index: Index, *, bits: int) -> np.ndarray:
        """Reads a slice of unsigned elements, as uint8 [outputs, inputs]."""
        part, count = index[self.dim], _WORD // bits
        words = slice(part.start // count, -(-part.stop // count))
        found = self._read(files, name, (*index[: self.dim], words, *index[self.dim + 1 :]))
        start = part.start - words.start * count
        wanted = slice(start, start + part.stop - part.start)
        return self._unpacked(found, bits, self.dim)[(slice(None),) * self.dim + (wanted,)]

    def zeros(self, files: TensorFiles, name: str, *, bits: int) -> np.ndarray:
        """Reads all zero points, as int16 [outputs, groups], without the last word's padding."""
        shape = files.tensors[name].shape[:: -1 if self.transposed else 1]
        words = self._read(files, name, tuple(slice(0, size) for size in shape))
        return self._unpacked(words, bits, 0).astype(np.int16)

    def _read(self, files: TensorFiles, name: str, index: Index) -> np.ndarray:
        return files.read(name, index[::-1]).T if self.transposed else files.read(name, index)

    def _unpacked(self, words: np.ndarray, bits: int, dim: int) -> np.ndarray:
        count = _WORD // bits
        words = np.moveaxis(words.astype(np.uint32), dim, -1)
        found = np.empty((*words.shape, count), np.uint8)
        for i in range(count):
            place = self.order[i] if self.order else i
            found[..., place] = (words >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)
        return np.moveaxis(found.reshape(*words.shape[:-1], -1), -1, dim)


def group_numbers(files: TensorFiles, name: str, *, group: int) -> np.ndarray | None:
    """Returns the number of each input's group; None if groups are consecutive inputs.

    Raises:
        CheckpointError: groups are of unequal size, or a number is out of range.
    """
    numbers = read_whole(files, name).astype(np.int64)
    if np.array_equal(numbers, np.arange(len(numbers)) // group):
        return None
    count = -(-len(numbers) // group)
    if numbers.min() < 0 or numbers.max() >= count:
        raise CheckpointError(
            f"{files.directory}: {name} names groups {numbers.min()} to {numbers.max()} of {count};"
            " it is damaged: copy it again from its source"
        )
    if (np.bincount(numbers, minlength=count) != group).any():
        raise CheckpointError(
            f"{files.directory}: {name} has groups of other sizes than group_size={group}; it is "
            "damaged: copy it again from its source"
        )
    return numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizedFiles:
    """A reader of a directory's tensors that shows quantized weights as float32 matrices."""

    files: TensorFiles
    find: FindWeight

    @property
    def directory(self):
        """Directory of the weight files."""
        return self.files.directory

    @functools.cached_property
    def weights(self) -> Mapping[str, StoredWeight]:
        """The directory's quantized weights, by name."""
        found = (self.find(self.files, name) for name in self.files.tensors)
        return dict(each for each in found if each is not None)

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Shapes and dtypes of all tensors by name, as ``read`` returns them."""
        hidden = {part for weight in self.weights.values() for part in weight.parts}
        plain = {n: tensor for n, tensor in self.files.tensors.items() if n not in hidden}
        single = np.dtype(np.float32)
        return plain | {
            name: dataclasses.replace(weight.first, shape=weight.shape, dtype=single)
            for name, weight in self.weights.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a slice of a tensor, dequantized if it is a quantized weight."""
        weight = self.weights.get(name)
        return self.files.read(name, index) if weight is None else weight.values(index)
