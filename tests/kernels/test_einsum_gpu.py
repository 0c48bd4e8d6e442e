"""What no program says: XLA's matmuls of bf16 on a GPU sum in fp32.

``pytest -m gpu tests/kernels/test_einsum_gpu.py`` on a machine with an NVIDIA GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.multiply import multiply

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("shape", [(256, 8192, 128), (8, 65536, 8)], ids=str)
def test_bf16_products_sum_in_fp32(shape):
    """Equal signs: a bf16 sum stops growing at 2**8 times an addend, split into 8 at 2**11."""
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    x = jnp.asarray(1 + rng.random((1, rows, depth)), jnp.bfloat16)
    w = jnp.asarray(1 + rng.random((depth, columns)), jnp.bfloat16)
    exact = np.asarray(x, np.float64)[0] @ np.asarray(w, np.float64)

    def product(x, w):
        recipe = Recipe(compute=jnp.dtype("bfloat16"), accum=jnp.dtype("float32"))
        return multiply("BTD,DF->BTF", x, w, recipe=recipe)

    got = np.asarray(jax.jit(product)(x, w)[0], np.float64)
    # One rounding to bf16 at the end, and fp32 sums far below it.
    assert np.max(np.abs(got / exact - 1)) <= 2.0**-8
