"""Matmuls of few rows by a weight of 16, 8 or 4 bits, bound by reading the weight.

**The op.** ``few_rows_matmul`` computes ``residual + act(input(x) w)``. A decode step reads every
weight once: the least time of a call is the weight's bytes over the rate of a copy (4.29 TB/s on an
H200), plus the launch. ``choice`` picks one of four implementations from a table of measurements:

- a **fused** kernel of 1 to 8 rows, with the norm, SwiGLU and residual in it: ``hopper_fused`` for
  a 16-bit weight, ``hopper_quantized`` for a quantized one. One row of Llama-3-8B on an H200 in us,
  with separate and fused operations: QKV product 16.2 and 14.4, in int4 13.6 and 7.9;
- ``hopper_skinny``, the product alone of 1 to 256 rows and a 16-bit weight: QKV takes 14.1 us (XLA
  18.8), with 128 rows 16.2 (XLA 24.4);
- ``hopper_quantized``, 1 to 64 rows and a quantized weight: int4 of 4096 x 14,336 with 16 rows
  takes 13.2 us (XLA with a bf16 weight 32.0). For more rows a kernel dequantizes the weight (42 us,
  XLA 172) and a library multiplies;
- **XLA**.
"""

from .api import few_rows_matmul as few_rows_matmul
from .choice import takes_kernel as takes_kernel
from .quantized import quantized_matmul as quantized_matmul
