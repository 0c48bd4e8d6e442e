"""The kernels that norm, multiply and add in one, on a Hopper GPU, against the formula in fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fused_matmul
from pallas_kernels.fused_matmul import quantized
from pallas_kernels.fused_matmul.config import configs
from pallas_kernels.fused_matmul.hopper import fused_matmul_hopper
from pallas_kernels.fused_matmul.reference import FusedCall
from pallas_kernels.quantized_matmul import arranged
from pallas_kernels.quantized_matmul.config import QuantizedConfig
from pallas_kernels.quantized_matmul.sliced_config import SlicedConfig
from tests.kernels.fused_cases import OPTIONS, exact, operands
from tests.kernels.test_quantized_matmul_hopper import FORMATS, weight_of
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu

CASES = [
    (case, shape, jnp.bfloat16) for case in OPTIONS for shape in ((1, 1024, 512), (8, 2048, 256))
] + [
    ("norm of fp32, gated", (3, 512, 1024), jnp.float16),
    # Requests of two stages, as many as here, lost a tile (``hopper.ring``).
    ("residual", (1, 14_336, 256), jnp.bfloat16),
]
IN_FEW_BITS = [
    (case, rows, form)
    for rows, form in ((1, "int4"), (7, "e4m3"))
    for case in OPTIONS
    if "swiglu" not in OPTIONS[case]
] + [("norm", 4, "int8"), ("residual", 1, "e4m3"), ("hidden values, residual", 1, "int8")]
TILINGS = [
    QuantizedConfig(tiles=1, split=1, groups=4, stages=12),
    QuantizedConfig(tiles=1, split=8, groups=2, stages=2),
    QuantizedConfig(tiles=4, split=2, groups=1, stages=5),
    SlicedConfig(fragments=2, passes=1, groups=2, stages=2),
    SlicedConfig(fragments=1, passes=4, groups=4, stages=3),
    SlicedConfig(fragments=4, passes=2, groups=1, stages=5),
]


def checked(f, x, w, given) -> None:
    """Within rounding of the formula, twice the same, and not without a part of K or an option."""
    true = exact(x, w, given)
    got = f(x, w, given)
    assert_within_rounding(got, true)
    np.testing.assert_array_equal(np.asarray(f(x, w, given)), np.asarray(got))
    zeroed = x.copy()
    zeroed[:, -64:] = 0
    for wrong in ((zeroed, w, given), (np.roll(x, 8, axis=1), w, given)):
        with pytest.raises(AssertionError):
            assert_within_rounding(f(*wrong), true)


@pytest.mark.parametrize(("case", "shape", "dtype"), CASES, ids=str)
def test_kernel_computes_the_formula(case, shape, dtype):
    x, w, given = operands(*shape, OPTIONS[case], dtype)
    flags = {name: given[name] for name in given if name.startswith("swiglu")}
    arrays = {name: given[name] for name in given if name not in flags}
    every = configs(shape[2], shape[1], swiglu=given.get("swiglu", False))
    # Most and fewest parts of K, most and fewest columns.
    for config in dict.fromkeys((every[0], every[len(every) // 2], every[-1])):

        def multiply(x, w, arrays, config=config):
            call = FusedCall(x=x, weight=w, **arrays, **flags)
            return fused_matmul_hopper(call, config=config)

        run = jax.jit(multiply)
        checked(lambda x, w, _, run=run: run(x, w, arrays), x, w, given)


@pytest.mark.parametrize(("case", "rows", "form"), IN_FEW_BITS)
def test_weights_in_few_bits(case, rows, form):
    depth, columns = 2048, 512
    x, _, given = operands(rows, depth, columns, OPTIONS[case])
    weight = weight_of(FORMATS[form], shape=(depth, columns))
    found = jax.jit(arranged)(weight)
    flags = {name: given[name] for name in given if name.startswith("swiglu")}
    arrays = {name: given[name] for name in given if name not in flags}
    run = jax.jit(functools.partial(fused_matmul, implementation="hopper", **flags))
    checked(lambda x, w, _: run(x, found, **arrays), x, weight, given)
    for tiling in TILINGS:

        def multiply(x, weight, arrays, tiling=tiling):
            call = FusedCall(x=x, weight=weight, **arrays, **flags)
            return quantized.fused(call, config=tiling)

        named = jax.jit(multiply)
        checked(lambda x, w, _, named=named: named(x, found, arrays), x, weight, given)
