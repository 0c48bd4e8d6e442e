"""Rows in consecutive groups, each times its group's weight: the experts of a mixture.

``hopper/product_kernel.py`` multiplies rows with their group's weight or its transpose (forward,
gated forward, input gradient); ``hopper/weight_gradient_kernel.py`` contracts over each group's
rows; ``hopper/fp8_kernel.py`` multiplies 8-bit operands. On an H200 the 16-bit products reach 1.10
to 1.17 of ``torch._grouped_mm``'s rate and 0.87 to 0.94 of a dense cuBLAS product's (four models'
shapes, geometric means: ``experiments/results/grouped-matmul-h200.json``).

- A group may begin at any row. TMA moves 8 rows at a time, so a group's first tile begins at the
  multiple of 8 before it, and results that are no whole 64 rows leave by copies of 32 to 1 rows.
- Who computes a tile does not change its bits, so blocks take tiles in any order.
- ``combine`` is a gather and not an epilogue: rows of a token lie in tiles of different blocks, and
  adding there would be atomic, in an order that changes from run to run.
"""

from .api import GATE_NAME as GATE_NAME
from .api import UP_NAME as UP_NAME
from .api import grouped_matmul as grouped_matmul
from .api import grouped_swiglu as grouped_swiglu
from .api import grouped_weight_gradient as grouped_weight_gradient
from .api import scaled_grouped_matmul as scaled_grouped_matmul
from .combine import combine as combine
