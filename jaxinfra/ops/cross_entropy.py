"""The training loss as the models call it, on top of ``pallas_kernels.linear_cross_entropy``."""

from pallas_kernels.linear_cross_entropy import CrossEntropySums as CrossEntropySums
from pallas_kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
