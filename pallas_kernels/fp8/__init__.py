"""FP8: casts to 8-bit floats with fp32 scales, and matmuls of such operands.

Fewest bytes of a cast: 2 read and 1 written per element. The kernels reach 92 to 98% of a copy's
rate by 1x128 blocks; XLA 38 to 41%. A matmul by blocks leaves the tensor cores every 128 products
for a sum in fp32: it runs at 0.80 to 0.87 of the rate of one scale per tensor, which promotes
nothing, and at 1.03 of cuBLASLt's by the same blocks (geometric mean, an H200:
``experiments/results/scaled-matmul-h200.json``).

- XLA transposes fp32 numbers before it casts them, three times as slow; ``quantize_across_xla``
  pins the layout of the 8-bit result instead.
- The casts both ways read a matrix once and transpose it by ``ldmatrix.trans`` in 16 bits: Hopper
  transposes no 8-bit matrices on the way from shared memory.
- Values are rounded to bf16 before they are cast, as separate steps would round them: training
  with the kernels and without them has the same numbers wherever silu rounds alike.
"""

from .api import quantize as quantize
from .api import scaled_matmul as scaled_matmul
from .both_ways import quantize_both_ways as quantize_both_ways
from .both_ways import quantize_swiglu as quantize_swiglu
from .both_ways import quantize_swiglu_gradient as quantize_swiglu_gradient
