"""Arrays of layers that are done, on disk until all are written: the host keeps one layer's."""

import math
from collections.abc import Hashable, Mapping
from pathlib import Path

import numpy as np

_ALIGNMENT = 64


def shelved[Key: Hashable](file: Path, arrays: Mapping[Key, np.ndarray]) -> dict[Key, np.ndarray]:
    """The arrays as a new file holds them, read from it when they are looked at."""
    starts: dict[Key, int] = {}
    with file.open("xb") as out:
        for key, array in arrays.items():
            out.write(bytes(-out.tell() % _ALIGNMENT))
            starts[key] = out.tell()
            out.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    if not file.stat().st_size:
        return dict(arrays)
    held = np.memmap(file, np.uint8, mode="r")

    def one(key: Key, like: np.ndarray) -> np.ndarray:
        size = math.prod(like.shape) * like.dtype.itemsize
        return held[starts[key] : starts[key] + size].view(like.dtype).reshape(like.shape)

    return {key: one(key, array) for key, array in arrays.items()}
