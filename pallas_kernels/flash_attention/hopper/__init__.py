"""Attention kernels for Hopper GPUs (Mosaic GPU): forward and gradients."""

from .config import unsupported as unsupported
from .forward_kernel import forward as forward
from .gradients import backward as backward
