"""FP8: casts to 8-bit floats with fp32 scales, and matmuls of operands in this format.

A cast from 16 bits must read 2 bytes and write 1 per element. With 1x128 blocks the kernels reach
92 to 98% of a copy's rate, XLA 38 to 41%. A matmul with block scales adds every 128 products to an
fp32 sum in registers. With one scale per tensor it needs no such sums; block scales reach 0.80 to
0.87 of that rate, and 1.03 of cuBLASLt's with the same blocks. These are geometric means on an H200
(``experiments/results/scaled-matmul-h200.json``).

- XLA would transpose fp32 numbers before it casts them, which takes three times as long;
  ``quantize_across_xla`` pins the layout of the 8-bit result instead.
- The kernel that casts a matrix and its transpose reads the matrix once. It transposes by
  ``ldmatrix.trans`` in 16 bits, since on Hopper this instruction cannot transpose 8-bit matrices.
- Results of SwiGLU are rounded to bf16 before they are cast, as separate operations would round
  them. So training with and without the kernels gives the same numbers wherever silu does.
"""

from .api import quantize as quantize
from .api import scaled_matmul as scaled_matmul
from .both_ways import quantize_both_ways as quantize_both_ways
from .both_ways import quantize_swiglu as quantize_swiglu
from .both_ways import quantize_swiglu_gradient as quantize_swiglu_gradient
