"""Grouped matmuls for mixtures of experts: consecutive rows, each group times its own weight.

``hopper/product_kernel.py`` multiplies rows with their group's weight or its transpose (forward,
gated forward, input gradient); ``hopper/weight_gradient_kernel.py`` contracts over each group's
rows; ``hopper/fp8_kernel.py`` multiplies 8-bit operands. On an H200 the 16-bit products reach 1.10
to 1.17 of ``torch._grouped_mm``'s rate and 0.87 to 0.94 of a dense cuBLAS product's (four models'
shapes, geometric means: ``experiments/results/grouped-matmul-h200.json``).

- A group may begin at any row. TMA copies start at multiples of 8 rows, so a group's first tile
  begins at the multiple of 8 before the group. Fewer than 64 rows of results are stored in pieces
  of 32 to 1 rows.
- Blocks take tiles in any order: the order does not change a tile's bits.
- ``combine`` is a gather, not an epilogue of the product. An epilogue would add the rows of a token
  atomically, in an order that changes from run to run.
"""

from .api import GATE_NAME as GATE_NAME
from .api import UP_NAME as UP_NAME
from .api import grouped_matmul as grouped_matmul
from .api import grouped_swiglu as grouped_swiglu
from .api import grouped_weight_gradient as grouped_weight_gradient
from .api import scaled_grouped_matmul as scaled_grouped_matmul
from .combine import combine as combine
