"""Calls of ``few_rows_matmul``, and what they mean in float64 with the rounding of programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.quantized_weight import (
    Activations,
    QuantizedWeight,
    WeightCode,
    WeightFormat,
    round_weight,
)
from tests.rounding import Rounded, stored

EPSILON, OFFSET = 1e-3, 1.0
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated": {"swiglu": True},
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


FORMATS = {
    "int4": WeightFormat(code=WeightCode.INT4, group_rows=128),
    "int4 of 64": WeightFormat(code=WeightCode.INT4, group_rows=64),
    "int8": WeightFormat(code=WeightCode.INT8),
    "e4m3": WeightFormat(code=WeightCode.E4M3, group_columns=0),
    "blocks": WeightFormat(code=WeightCode.E4M3, group_rows=128, group_columns=128),
    "int8, rounding": WeightFormat(code=WeightCode.INT8, activations=Activations.INT8),
    "e4m3, rounding": WeightFormat(code=WeightCode.E4M3, activations=Activations.E4M3),
}
SHAPE = 256, 128
rounded = jax.jit(round_weight, static_argnames=("form", "has_zeros", "scale_dtype"))


def weight_of(form, *, has_zeros=False, shape=SHAPE, scale_dtype=jnp.float32):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return rounded(x, form, has_zeros=has_zeros, scale_dtype=jnp.dtype(scale_dtype))


def exact_and_bound(x: jax.Array, w: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far sums in fp32 may be from it.

    Products of 16-bit numbers are exact in fp32, others are rounded there. Of K of them, as many
    additions and as many truncations of a tensor core each may be off by half a unit in the last
    place, or a whole one, of a sum that is at most that of all terms' sizes.
    """
    x64, w64 = (np.asarray(each, np.float64) for each in (x, w))
    return x64 @ w64, len(w64) * 2.0**-23 * (np.abs(x64) @ np.abs(w64))
