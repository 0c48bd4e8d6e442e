"""Matmuls that gather their rows, or scatter their sums, over the devices of a mesh axis.

Hopper kernels send over NVLink while they multiply. They are refused on meshes of more than two
devices, on which none was run.
"""

from .api import CollectiveImplementation as CollectiveImplementation
from .api import all_gather_matmul as all_gather_matmul
from .api import gathered_product as gathered_product
from .api import matmul_reduce_scatter as matmul_reduce_scatter
from .dispatch import is_measured as is_measured
