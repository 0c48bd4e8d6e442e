"""Weights of the goldens' models, a function of their tensors' names and shapes; needs NumPy only.

The reference implementation and the tests call it, so that no weights are stored.
"""

import hashlib
import math
import zlib
from collections.abc import Mapping

import numpy as np

_TABLES = ("embed", "wte", "wpe", "lm_head")


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor: norms around 0.6, matrices so that attention is far from uniform."""
    if not shape:  # constants, such as Apertus' slope of its activation
        return np.asarray(0.5 if name.endswith("beta") else -1e-6, np.float32)
    noise = np.random.default_rng([7, zlib.crc32(name.encode())]).standard_normal(shape)
    is_norm = "norm" in name or ".ln" in name or "layer_norm" in name
    if len(shape) == 1 or is_norm:
        start = 0.6 if is_norm and name.endswith("weight") else 0.0
        start = 1.0 if name.endswith("layer_scalar") else start  # Gemma 4's multiplier of streams
        values = start + 0.3 * noise
    elif any(each in name for each in _TABLES):
        values = 0.3 * noise
    else:
        values = noise * 1.3 / math.sqrt(shape[-1])
    return values.astype(np.float32)


def digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns a hash of all tensors' names and shapes."""
    lines = sorted(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
