"""Lowering for a GPU on a machine without one."""

from pallas_kernels.common.device import H200 as H200
from pallas_kernels.common.device import Facts as Facts
from pallas_kernels.common.device import compiling_for as compiling_for
