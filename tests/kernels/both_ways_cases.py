"""Matrices to cast both ways, of what SwiGLU makes too: inputs, a float64 oracle, and the calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantize_both_ways, quantize_swiglu, quantize_swiglu_gradient
from pallas_kernels.common.scales import Quantized, Scaling, spread
from pallas_kernels.fp8.formula import LEAST, largest_of
from tests.rounding import Rounded, stored
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

CALLS = {"x": quantize_both_ways, "swiglu": quantize_swiglu, "gradient": quantize_swiglu_gradient}
NUM_INPUTS = {"x": 1, "swiglu": 2, "gradient": 3}
FORMS = ("1x128", "128x128")
MOST_APART = 0.03
"""Share of values that may have other bits than XLA's: one in some thousands is rounded to bf16's
neighbour, and where that is a block's largest its other values move with the scale."""
SPECIALS = ((0, 3, 5, np.inf), (1, 70, 20, np.nan), (2, 9, 9, -np.inf), (1, 5, slice(None), 0.0))
"""Input, row, column, value: other elements keep their digits."""


def matrices(rows: int, columns: int, *, specials: bool = False) -> list[np.ndarray]:
    """Gates, ups and cotangents in bf16: rows of very different sizes, a block of zeros."""
    rng = np.random.default_rng(seeded(3))
    made = []
    for _ in range(3):
        size = 10.0 ** rng.uniform(-3, 1.5, (rows, 1))
        made.append((rng.normal(size=(rows, columns)) * size).astype(jnp.bfloat16))
    made[0][:64, : columns // 2] = 0.0
    for k, row, column, value in SPECIALS if specials else ():
        made[k][row, column] = value
    return made


def cast(name: str, form: str, inputs: list, **options) -> list[tuple[Quantized, Quantized]]:
    """Of each result the matrix and its transpose, on the host."""
    f = functools.partial(CALLS[name], scaling=form, **options)
    found = jax.device_get(jax.jit(f)(*inputs[: NUM_INPUTS[name]]))
    return list(found) if name == "gradient" else [found]


def exact(name: str, inputs: list) -> list[Rounded]:
    """The results before they are rounded to 8 bits."""
    gate, up, cotangent = (Rounded(x.astype(np.float64)) for x in inputs)
    if name == "x":
        return [gate]
    one = Rounded(np.ones(gate.shape))
    sigmoid = one / (np.exp(-gate) + one)
    silu = gate * sigmoid
    made = [silu * up]
    if name == "gradient":
        made = [cotangent * up * (sigmoid + silu * (one - sigmoid)), cotangent * silu]
    return [stored(x, jnp.bfloat16) for x in made]


def largest_in_blocks(x: np.ndarray, form: str) -> np.ndarray:
    """Of each element the largest magnitude of its block."""
    rows = 128 if form == "128x128" else 1
    R, C = x.shape
    blocks = np.abs(x).reshape(R // rows, rows, C // 128, 128)
    each = blocks.max(axis=(1, 3), keepdims=True)
    return np.broadcast_to(each, blocks.shape).reshape(R, C)


def check_beside_float64(name: str, form: str, got: list, inputs: list) -> None:
    """What the values stand for is the exact result within what rounding may do."""
    for both, want in zip(got, exact(name, inputs), strict=True):
        for found, oracle in zip(both, (want, want.T), strict=True):
            largest = np.maximum(largest_in_blocks(oracle.value, form), LEAST)
            scale = largest / largest_of(found.values.dtype)
            held = stored(oracle / Rounded(scale), found.values.dtype) * Rounded(scale)
            each = spread(Scaling(form), found.scale, *found.values.shape)
            back = found.values.astype(np.float32) * np.asarray(each)
            assert_within_rounding(back, held)


def check_beside_xla(name: str, got: list, want: list) -> None:
    """Bits, all of them where nothing is computed; NaN in the same places."""
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        mine, theirs = mine.astype(np.float32), theirs.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        differs = np.mean((mine != theirs) & ~np.isnan(mine))
        assert differs == 0 if name == "x" else differs <= MOST_APART
