"""Calls of ``fused_matmul``, and what they mean in float64 with the rounding of programs."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.quantized_matmul import QuantizedWeight
from tests.rounding import Rounded, stored

EPSILON, OFFSET = 1e-3, 1.0
OPTIONS: dict[str, dict[str, Any]] = {
    "norm": {"norm": jnp.bfloat16},
    "norm of fp32, gated": {"norm": jnp.float32, "swiglu": True},
    "hidden values, residual": {"swiglu_input": True, "residual": True},
    "residual": {"residual": True},
}


def operands(M: int, K: int, N: int, options: dict[str, Any], dtype: Any = jnp.bfloat16):
    """x, w, and the named arguments of a call."""
    rng = np.random.default_rng(5)

    def drawn(*shape: int, dtype: Any = dtype) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    x = drawn(M, 2 * K if options.get("swiglu_input") else K)
    w = (rng.normal(size=(K, N)) / np.sqrt(K)).astype(dtype)
    given: dict[str, Any] = {name: options[name] for name in options if name.startswith("swiglu")}
    if "norm" in options:
        scale = drawn(K, dtype=options["norm"])
        given["norm"] = RmsNorm(scale=jnp.asarray(scale), epsilon=EPSILON, offset=OFFSET)
    if "residual" in options:
        given["residual"] = drawn(M, N // 2 if options.get("swiglu") else N)
    return x, w, given


def exact(x: np.ndarray, w: Any, given: dict[str, Any], *, is_apart: bool = False) -> Rounded:
    """The formula; what is multiplied is rounded to x's dtype.

    Args:
        is_apart: the product, too, before the residual is added.
    """

    def wide(a: Any) -> Rounded:
        return Rounded(np.asarray(a, np.float64))

    def hidden(both: Rounded) -> Rounded:
        half = both.shape[1] // 2
        gate, up = both[:, :half], both[:, half:]
        return gate / (1 + np.exp(-gate)) * up

    rows, norm = wide(x), given.get("norm")
    if norm is not None:
        rows = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + norm.epsilon)
        rows = stored(rows * (wide(norm.scale) + norm.offset), x.dtype)
    if given.get("swiglu_input"):
        rows = stored(hidden(rows), x.dtype)
    if isinstance(w, QuantizedWeight):
        w = w.dequantize(jnp.float32)
    product = rows @ wide(w)
    if given.get("swiglu"):
        product = hidden(product)
    if "residual" not in given:
        return product
    return (stored(product, x.dtype) if is_apart else product) + wide(given["residual"])
