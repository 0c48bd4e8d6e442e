"""Writing sharded safetensors files as a stream: no more than a piece of a tensor is in memory.

The format is eight bytes with the header's length, a JSON header with every tensor's type, shape
and place, and the elements (https://github.com/huggingface/safetensors#format). Shapes are known
before the first element is, so the header is written first.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxinfra.checkpoint.tensor_files import INDEX_FILE, SINGLE_FILE, STORED
from jaxinfra.runtime.signals import unfinished

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
    """Writes tensors in order, as one file, or as shards and an index.

    Args:
        tensors: shape, dtype and elements by name.
        max_shard_bytes: of elements in a file; a tensor larger than that has a file of its own.
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
                written += _write_elements(file, piece)
            expected = math.prod(shape) * dtype.itemsize
            assert written == expected, f"{name}: {written} bytes, expected {expected}"


def _write_elements(file: BinaryIO, piece: np.ndarray) -> int:
    # NumPy does not export the buffers of bfloat16; as bytes it does.
    elements = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    return file.write(elements.data)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which gets its name when it is complete, and is removed on an error."""
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
