"""Safetensors written by hand: of types too that the library does not take from NumPy."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np

CODES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "float16": "F16",
    "float32": "F32",
    "bfloat16": "BF16",
}


def save(directory: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes ``model.safetensors``."""
    header, start = {}, 0
    for name, x in tensors.items():
        offsets = [start, start + x.nbytes]
        header[name] = {"dtype": CODES[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
        start += x.nbytes
    text = json.dumps(header).encode()
    elements = (np.ascontiguousarray(x).tobytes() for x in tensors.values())
    content = len(text).to_bytes(8, "little") + text + b"".join(elements)
    (directory / "model.safetensors").write_bytes(content)
