"""Sizes of an H100 or H200 GPU (SMs, lanes, warps, shared memory) that kernels are written for."""

NUM_PROCESSORS = 132
"""Number of SMs with NVLink; the PCIe card has 114. Grids of one block per SM are correct for any
number, and fastest for this one.
"""

WARPS = 4  # a warpgroup
LANES = 32  # threads of a warp
WARPGROUP = WARPS * LANES

COPY_ALIGNMENT = 128
"""Required alignment in bytes of TMA's destinations in shared memory.
"""

SMEM_BYTES = 227 * 1024
"""Shared memory that a block may use, of an SM's 228 KiB."""
