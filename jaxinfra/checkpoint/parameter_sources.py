"""Sources of parameters: files in the layout of Hugging Face or in ours, or a live model.

A source reads any slice of one of our parameters (stacked over layers) without reading the rest.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

import jax
import numpy as np

from jaxinfra.checkpoint.quantized_files import TensorReader
from jaxinfra.errors import CheckpointError
from jaxinfra.hf.mapping import Part, Tensor, WeightMap
from jaxinfra.hf.tensor_layout import Index
from jaxinfra.ops.quantized import QuantizedWeight

_LOG = logging.getLogger(__name__)
_DEQUANTIZED = np.dtype(np.float32)
_COMPARED_ROWS = 4096  # of two tied tables at a time


class ParameterSource(Protocol):
    """A source of a model's parameters: it gives their dtypes, and reads slices of them."""

    def dtype(self, path: str) -> np.dtype:
        """Returns the element type in which a parameter is stored."""
        ...

    def read(self, path: str, index: Index) -> np.ndarray:
        """Reads a slice of a parameter; the first dim of a stacked one is the layer."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MappedParameters:
    """Parameters from files in the layout of Hugging Face or in ours, mapped to the model's."""

    files: TensorReader
    weights: WeightMap
    names: Mapping[str, str]  # of the map's tensors, as these files spell them

    def dtype(self, path: str) -> np.dtype:
        """Returns a parameter's stored element type; raises CheckpointError if layers differ."""
        found = {
            self.files.tensors[self.names[tensor.name]].dtype
            for tensor, part in self.weights.parts_of(path)
        }
        if len(found) > 1:
            raise CheckpointError(
                f"{self.files.directory}: layers of {path} are stored as "
                f"{' and '.join(sorted(str(each) for each in found))}; name one dtype for all"
            )
        return found.pop()

    def read(self, path: str, index: Index) -> np.ndarray:
        """Reads a slice by layers, and by experts where they have separate tensors."""
        return self.gather(path, index, self.files.read)

    def gather(
        self,
        path: str,
        index: Index,
        read: Callable[[str, Index], np.ndarray],
        leading: tuple[int, ...] = (),
    ) -> np.ndarray:
        """Assembles a slice of a parameter from slices of tensors that ``read`` returns.

        Args:
            leading: indices of the layer and expert that ``index`` is within; by default ``index``
                has these dims itself.
        """
        if (path, leading) not in self.weights.places:
            first, *rest = index
            numbers = range(first.start, first.stop)
            return np.stack([self.gather(path, tuple(rest), read, (*leading, i)) for i in numbers])
        tensor, part = self.weights.places[path, leading]
        name = self.names[tensor.name]
        return tensor.read(part, lambda theirs: read(name, theirs), index)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LiveParameters:
    """Parameters of a model in memory, on any devices."""

    arrays: Mapping[str, jax.Array | QuantizedWeight]  # by path

    def dtype(self, path: str) -> np.dtype:
        """Returns a parameter's element type; fp32 for quantized weights, read dequantized."""
        leaf = self.arrays[path]
        return _DEQUANTIZED if isinstance(leaf, QuantizedWeight) else np.dtype(leaf.dtype)

    def read(self, path: str, index: Index) -> np.ndarray:
        """Copies a slice of a parameter from the devices to the host."""
        leaf = self.arrays[path]
        if not isinstance(leaf, QuantizedWeight):
            return np.asarray(leaf[index])
        layers = jax.tree.map(lambda part: part[index[0]], leaf)
        return np.asarray(layers.dequantize(_DEQUANTIZED))[(slice(None), *index[1:])]


def mapped_parameters(files: TensorReader, weights: WeightMap) -> MappedParameters:
    """Maps files' tensors to parameters; raises CheckpointError for wrong names and shapes.

    Names may lack their common prefix, as in files of a model without its head. A tied tensor may
    be present if it equals the tensor that it is tied to. A bias that the model does not have may
    be present if it is 0: AutoGPTQ wrote one for every layer. So may tensors without elements: of
    no shared experts, transformers writes one as wide as none.
    """
    bare = not any(name.startswith(weights.root) for name in files.tensors)
    names = {
        name: name.removeprefix(weights.root) if bare else name
        for name in (*weights.tensors, *weights.tied)
    }
    where = files.directory
    absent = [name for name in weights.tensors if names[name] not in files.tensors]
    missing = [names[name] for name in absent if name not in weights.tied]
    if missing:
        raise CheckpointError(
            f"{where}: {_listed(missing)} missing; the config asks for them: "
            "copy all files again, or correct the config"
        )
    root = weights.root if bare else ""
    if extra := _unknown(files, weights, known=set(names.values()), root=root):
        raise CheckpointError(
            f"{where}: {_listed(sorted(extra))} not part of the model that the config describes; "
            "correct the config, or remove them"
        )
    for name, tensor in weights.tensors.items():
        if name in absent:
            continue
        shape = files.tensors[names[name]].shape
        if shape != tensor.shape:
            raise CheckpointError(
                f"{where}: tensor {names[name]} has shape {list(shape)}, the config asks for "
                f"{list(tensor.shape)}; one of them is of another model"
            )
    for tied, original in weights.tied.items():
        if names[tied] in files.tensors and not _equal(files, names[tied], names[original]):
            key = "multi-token prediction" if tied in weights.tensors else "tie_word_embeddings"
            raise CheckpointError(
                f"{where}: {names[tied]} differs from {names[original]}, and {key} says that they "
                "are one; set it to false, or remove the tensors of the module"
            )
    layers = (weights.extra_layer(root + name) for name in files.tensors)
    left_out = sorted({layer for layer in layers if layer is not None})
    if left_out:
        _LOG.warning(
            "%s: left out is multi-token prediction that is not read: layers %s",
            where,
            ", ".join(map(str, left_out)),
        )
    return MappedParameters(files=files, weights=weights, names=names)


def _unknown(
    files: TensorReader, weights: WeightMap, *, known: Collection[str], root: str
) -> list[str]:
    """Returns names of tensors that no parameter is read from, and that mean something."""
    ignored = weights.ignored
    return [
        name
        for name in files.tensors
        if name not in known
        and 0 not in files.tensors[name].shape
        and not (ignored is not None and ignored.fullmatch(root + name))
        and weights.extra_layer(root + name) is None
        and not _is_zero_bias(files, name, known)
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown})"


def _is_zero_bias(files: TensorReader, name: str, known: Collection[str]) -> bool:
    """Whether this is a bias that adds nothing to the product with a weight of the model."""
    shape = files.tensors[name].shape
    if f"{name.removesuffix('.bias')}.weight" not in known or len(shape) != 1:
        return False
    return not np.any(files.read(name, (slice(0, shape[0]),)))


def _equal(files: TensorReader, first: str, second: str) -> bool:
    shape = files.tensors[first].shape
    if shape != files.tensors[second].shape:
        return False
    for start in range(0, shape[0], _COMPARED_ROWS):
        index = (slice(start, min(start + _COMPARED_ROWS, shape[0])), slice(0, shape[1]))
        if not np.array_equal(files.read(first, index), files.read(second, index)):
            return False
    return True


def assemble(source: ParameterSource, tensor: Tensor) -> np.ndarray:
    """Assembles one Hugging Face tensor from our parameters."""
    return tensor.fused([_read_part(source, part) for part in tensor.parts])


def _read_part(
    source: ParameterSource, part: Part, cut: str | None = None, rows: slice | None = None
) -> np.ndarray:
    """A part in their layout, or of its dim ``cut`` these rows."""
    layout = part.layout
    if cut is not None and rows is not None:
        layout = dataclasses.replace(layout, sizes={**layout.sizes, cut: rows.stop - rows.start})
    index = tuple(
        rows if letter == cut and rows is not None else slice(0, layout.sizes[letter])
        for letter in layout.ours
    )
    leading = tuple(slice(i, i + 1) for i in part.index)
    ours = source.read(part.path, (*leading, *index))
    return layout.to_theirs(ours.reshape(layout.our_shape))


def assemble_rows(
    source: ParameterSource, tensor: Tensor, *, piece_elements: int
) -> Iterator[np.ndarray]:
    """Assembles one tensor of files in pieces of whole rows, about ``piece_elements`` each."""
    is_cut_by_rows = all(part.layout.theirs and part.layout.theirs[0] for part in tensor.parts)
    if not is_cut_by_rows or (tensor.groups > 1 and tensor.fused_dim == 0):
        yield assemble(source, tensor)
        return
    # Fused along another dim, every row has elements of all parts.
    groups = [tensor.parts] if tensor.fused_dim > 0 else [(part,) for part in tensor.parts]
    for parts in groups:
        (cut,) = {part.layout.theirs[0][0] for part in parts}
        size = parts[0].layout.sizes[cut]
        step = max(1, piece_elements * size // sum(math.prod(p.layout.our_shape) for p in parts))
        for start in range(0, size, step):
            rows = slice(start, min(start + step, size))
            read = [_read_part(source, part, cut, rows) for part in parts]
            yield tensor.fused(read) if len(parts) > 1 else read[0]
