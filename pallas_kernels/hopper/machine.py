"""Sizes of an H100 or H200 GPU (SMs, lanes, warps, shared memory) that kernels are written for."""

NUM_PROCESSORS = 132
"""Multiprocessors with NVLink; the PCIe card has 114. Grids of one block on each are right on any
number of them, and fastest on this."""

WARPS = 4  # a warpgroup
LANES = 32  # threads of a warp
WARPGROUP = WARPS * LANES

COPY_ALIGNMENT = 128
"""Bytes of which the place in shared memory that the copy engine writes to must be a multiple; else
the kernel ends in a misaligned address."""

SMEM_BYTES = 227 * 1024
"""Shared memory that a block may use, of the 228 KiB of a multiprocessor."""
