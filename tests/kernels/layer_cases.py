"""Layers of a decode step, and what they mean in float64 with the rounding of programs."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.row_inputs import RmsNorm
from tests.rounding import Rounded, stored

EPSILON = 1e-3


def operands(M: int, D: int, A: int, F: int, *, scale_dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """What ``layer_tail`` takes before its counter."""
    rng = np.random.default_rng(7)

    def drawn(*shape: int, size: float = 1.0, dtype: Any = jnp.bfloat16) -> np.ndarray:
        return (size * rng.normal(size=shape)).astype(dtype)

    norm = RmsNorm(scale=jnp.asarray(drawn(D, dtype=scale_dtype)), epsilon=EPSILON)
    return (
        drawn(M, D), drawn(M, A), drawn(A, D, size=A**-0.5), norm,
        drawn(D, 2 * F, size=D**-0.5), drawn(F, D, size=F**-0.5),
    )  # fmt: skip


def exact_tail(given: tuple[Any, ...], *, is_apart: bool = False) -> Rounded:
    """The formula.

    Args:
        is_apart: what goes from product to product is rounded to x's dtype.
    """
    *arrays, gate_up, down = given
    norm: RmsNorm = arrays.pop()
    dtype = arrays[0].dtype
    x, attended, out, gate_up, down = (
        Rounded(np.asarray(each, np.float64)) for each in (*arrays, gate_up, down)
    )

    def between(rows: Rounded) -> Rounded:
        return stored(rows, dtype) if is_apart else rows

    x = between(between(attended @ out) + x)
    normed = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + norm.epsilon)
    normed = between(normed * Rounded(np.asarray(norm.scale, np.float64)))
    both = between(normed @ gate_up)
    half = both.shape[1] // 2
    gate, up = both[:, :half], both[:, half:]
    hidden = between(gate / (1 + np.exp(-gate)) * up)
    return between(hidden @ down) + x
