"""Directories of safetensors files, read by slices of tensors and written as a stream.

A file is eight bytes with the header's length, a JSON header with every tensor's dtype, shape and
offsets, and the elements (https://github.com/huggingface/safetensors#format). Shapes are known
before any element, so the header is written first.
"""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
import safetensors

from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.runtime.files import read_json
from jaxinfra.runtime.signals import unfinished

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NAME_BYTES = 255  # of a file, on all common file systems

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Element types of weights, as the files and as NumPy name them."""

STORED = DTYPES | {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}
"""Element types of all stored tensors: weights, quantized weights and their layout."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: its place there, its shape and its dtype."""

    file: Path
    start: int  # byte of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorFiles:
    """The tensors of ``model.safetensors``, or of the files that an index names."""

    directory: Path
    tensors: Mapping[str, StoredTensor]

    def renamed(self, rename: Callable[[str], str | None]) -> "TensorFiles":
        """Returns the same tensors under other names, without those that get none."""
        named = ((rename(name), tensor) for name, tensor in self.tensors.items())
        tensors = {name: tensor for name, tensor in named if name is not None}
        return TensorFiles(directory=self.directory, tensors=tensors)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a slice of a tensor as a view of the mapped file, for the caller to copy.

        The file stays mapped as long as the view; its pages count as memory until then.
        """
        tensor = self.tensors[name]
        if not tensor.num_bytes:
            return np.empty(tensor.shape, tensor.dtype)[index]
        try:
            raw = np.memmap(tensor.file, np.uint8, "r", offset=tensor.start, shape=tensor.num_bytes)
        except (OSError, ValueError) as error:  # ValueError: it is shorter than when it was opened
            raise CheckpointError(
                f"{tensor.file} is missing or truncated ({error}); copy it again from its source"
            ) from error
        return np.asarray(raw).view(tensor.dtype).reshape(tensor.shape)[index]


def open_tensor_files(directory: Path) -> TensorFiles:
    """Reads the headers of a directory's safetensors files and checks them against the index.

    Raises:
        ConfigError: the directory has no safetensors files.
        CheckpointError: a file is missing, truncated or damaged, or disagrees with the index.
    """
    index = directory / INDEX_FILE
    single = directory / SINGLE_FILE
    if index.is_file():
        indexed = read_json(index, holds=_Index, error=CheckpointError)["weight_map"]
        files = sorted({_listed(index, name) for name in indexed.values()})
    elif single.is_file():
        indexed = None
        files = [single]
    else:
        raise ConfigError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights in other formats "
            "are not read: save the model as safetensors"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{directory}: tensor {name} is in {tensors[name].file.name} and again in "
                    f"{file.name}"
                )
            tensors[name] = tensor
    if indexed is not None:
        _check_index(index, indexed, tensors)
    return TensorFiles(directory=directory, tensors=tensors)


def open_tensor_file(file: Path) -> TensorFiles:
    """Reads the header of one safetensors file; raises as ``open_tensor_files`` does."""
    return TensorFiles(directory=file.parent, tensors=_read_header(file))


def _listed(index: Path, name: str) -> Path:
    """A file that an index names; raises CheckpointError for one that is not beside it."""
    if name in ("", ".", "..") or name != Path(name).name or len(name.encode()) > _NAME_BYTES:
        raise CheckpointError(
            f"{index} names {name[:60]!r} for a file beside it; copy it again from its source"
        )
    return index.parent / name


def _open(file: Path):
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is no plain file; copy it again from its source")
    try:
        return safetensors.safe_open(file, framework="np")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing; the index names it: copy all files again"
        ) from error
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or damaged ({error}); copy it again from its source"
        ) from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    found = {}
    with _open(file) as opened:  # the library checks the header
        with file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            entries = json.loads(raw.read(length))
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            tensor = opened.get_slice(name)
            dtype = tensor.get_dtype()
            if dtype not in STORED:
                raise ConfigError(
                    f"{file}: tensor {name} has elements of type {dtype}; known: "
                    f"{', '.join(STORED)}"
                )
            found[name] = StoredTensor(
                file=file,
                start=8 + length + entries[name]["data_offsets"][0],
                shape=tuple(tensor.get_shape()),
                dtype=jnp.dtype(STORED[dtype]),
            )
    return found


class _Index(TypedDict):
    weight_map: dict[str, str]


def _check_index(
    index: Path, indexed: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> None:
    wrong = sorted(
        name
        for name in indexed.keys() | tensors.keys()
        if name not in tensors or tensors[name].file.name != indexed.get(name)
    )
    if wrong:
        name = wrong[0]
        found = tensors[name].file.name if name in tensors else "no file"
        raise CheckpointError(
            f"{index}: {len(wrong)} tensors are not where it says; {name} should be in "
            f"{indexed.get(name, 'no file')} and is in {found}: copy all files again"
        )


type Pieces = Callable[[], Iterable[np.ndarray]]
"""The elements of a tensor, cut along its leading dim or whole, when called."""

_CODES = {name: code for code, name in STORED.items()}
_ALIGNMENT = 8


def write_tensor_files(
    directory: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype, Pieces]],
    *,
    max_shard_bytes: int,
) -> None:
    """Writes tensors in order into one safetensors file, or into several and an index.

    Args:
        tensors: shape, dtype and elements by name.
        max_shard_bytes: most bytes of elements per file; a larger tensor has a file of its own.
    """
    shards = _shards(
        {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype, _) in tensors.items()},
        max_shard_bytes=max_shard_bytes,
    )
    total = len(shards)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        _write_file(directory / file, {name: tensors[name] for name in names})
        index |= dict.fromkeys(names, file)
    if total > 1:
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in tensors.values())
        contents = {"metadata": {"total_size": num_bytes}, "weight_map": index}
        (directory / INDEX_FILE).write_text(json.dumps(contents, indent=2) + "\n")


def _shards(sizes: Mapping[str, int], *, max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_file(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype, Pieces]]
) -> None:
    # The metadata says which library's tensors these are; readers of Hugging Face insist on it.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (shape, dtype, _) in tensors.items():
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype.name],
            "shape": shape,
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, (shape, dtype, pieces) in tensors.items():
            written = 0
            for piece in pieces():
                assert piece.dtype == dtype, f"{name}: {piece.dtype}, expected {dtype}"
                # NumPy does not export the buffers of bfloat16; as bytes it does.
                elements = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                written += file.write(elements.data)
            expected = math.prod(shape) * dtype.itemsize
            assert written == expected, f"{name}: {written} bytes, expected {expected}"


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Makes a directory for the ``with`` block to fill. It is renamed to ``path`` when the block
    ends, and removed on an error.

    Raises:
        ConfigError: ``path`` exists already.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{path} exists and is not an empty directory; nothing is overwritten: name another"
        )
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with unfinished(partial):
            yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(path)
