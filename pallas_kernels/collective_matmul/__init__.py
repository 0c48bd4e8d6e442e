"""Matmuls that gather their rows, or scatter their sums, over the devices of a mesh axis.

Over NVLink the kernels were neither run nor timed: "auto" has no table and takes XLA. One H200 that
is its own peer computed the formula's values. There the reduce-scatter took 0.98 to 1.07 times as
long as cuBLAS's product alone, at shapes of Llama-3-8B and 70B with 8,192 rows.
"""

from .api import CollectiveImplementation as CollectiveImplementation
from .api import all_gather_matmul as all_gather_matmul
from .api import gathered_product as gathered_product
from .api import matmul_reduce_scatter as matmul_reduce_scatter
from .dispatch import is_measured as is_measured
