"""The training loss as the models call it, on top of ``pallas_kernels.cross_entropy``."""

import jax

from pallas_kernels.cross_entropy import HOPPER_LEAST_IDS as HOPPER_LEAST_IDS
from pallas_kernels.cross_entropy import CrossEntropySums as CrossEntropySums
from pallas_kernels.cross_entropy import hopper_chunks as hopper_chunks
from pallas_kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from pallas_kernels.cross_entropy import xla_chunks as xla_chunks
from pallas_kernels.cross_entropy.hopper import unsupported


def kernel_on_one_device(hidden_BTD: jax.Array, *, num_ids: int) -> bool:
    """Tells whether "auto" would choose the Hopper loss kernel for one device's tokens."""
    return num_ids >= HOPPER_LEAST_IDS and unsupported(hidden_BTD, num_devices=1) is None
