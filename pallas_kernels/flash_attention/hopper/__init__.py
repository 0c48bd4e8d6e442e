"""Attention kernels for Hopper GPUs (Mosaic GPU): forward, gradients, and the forward in FP8."""

from .config import unsupported as unsupported
from .forward_kernel import forward as forward
from .fp8_kernel import forward_fp8 as forward_fp8
from .fp8_kernel import unsupported_fp8 as unsupported_fp8
from .gradients import backward as backward
