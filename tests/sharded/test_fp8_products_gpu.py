"""Matmuls in 8 bits by Hopper's kernels on two GPUs: one GPU's."""

import jax
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.precision import PolicyName
from pallas_kernels.common import device
from tests.sharded.test_fp8_products import INWARD, OUTWARD, D, F, arrays, computed, placement_of
from tests.unit.test_fp8 import CONFIGS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["blocks", "squares"])
@pytest.mark.parametrize("axis", ["fsdp", "tensor", "context"])
def test_two_gpus_multiply_as_one(axis, name):
    """Both add the same products of 128 in 8 bits. In fp32 and in another order: at most a unit
    roundoff of all that is added for each of ten sums (1024 tokens are eight blocks). Results are
    rounded to bf16, and over tensor so are the two parts of each.
    """
    if device.target().capability != (9, 0) or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA Hopper GPUs (compute capability 9.0)")
    mesh = MeshConfig(**{axis: 2})
    both = [
        computed(CONFIGS[name], placement_of(each), INWARD, OUTWARD, policy=PolicyName.BF16)
        for each in (mesh, MeshConfig())
    ]
    x, weight, cotangent = (np.abs(each, dtype=np.float64) for each in arrays())
    flat = x.reshape(-1, D), cotangent.reshape(-1, F)
    added = x @ weight, cotangent @ weight.T, flat[0].T @ flat[1]
    roundoff = 10 * 2.0**-24
    for two, one in zip(*both, strict=True):
        for at, (a, b, total) in enumerate(zip(two, one, added, strict=False)):
            a, b = a.astype(np.float64), b.astype(np.float64)
            is_bf16 = at < 2
            bound = roundoff * total + is_bf16 * 2.0**-7 * np.abs(b)
            bound += is_bf16 * (axis == "tensor") * 2.0**-7 * total
            np.testing.assert_array_less(np.abs(a - b), bound + 1e-30)
        np.testing.assert_allclose(two[3][:, 0], one[3][:, 0], rtol=1e-6)
