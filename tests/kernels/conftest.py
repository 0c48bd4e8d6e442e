"""Where kernels run: on a Hopper GPU, or in Pallas's interpreter."""

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import device


@pytest.fixture(scope="session")
def hopper_gpu():
    if device.target().capability != (9, 0):
        pytest.skip("needs an NVIDIA Hopper GPU (compute capability 9.0)")


@pytest.fixture
def interpreter():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield
