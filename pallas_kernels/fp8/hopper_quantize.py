"""Quantization by blocks on a Hopper GPU, which reads the input once and writes the result once.

A thread block is one warpgroup. TMA loads its tiles of 128 columns, all at once. Half a warp
quantizes a row in registers, and each thread loads 16 bytes at a time. Without TMA, ptxas would
delay each load from global memory until its use, at half the rate. Blocks are short and several run
on an SM, so that one's writes overlap another's reads.

Dims: R row, C column, J blocks of 128 columns, I blocks of 128 rows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import device
from pallas_kernels.common.scales import BLOCK, Quantized, Scaling
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .formula import magnitude, scale_and_inverse

ROWS = {Scaling.BLOCK_OF_ROW: 64, Scaling.BLOCK: 128}
MOST_TILES = 2
"""Most tiles per block. Four of 64 rows are 5% slower, four of 32 rows 3%, eight of them 8%."""
VECTOR = 8  # elements of a load, 16 bytes of bf16


def unsupported(
    x: jax.Array,
    scaling: Scaling,
    *,
    power_of_two: bool,
    num_devices: int = 1,
    row_multiple: int | None = None,
) -> str | None:
    """Returns why the quantization kernel cannot compute this call; None if it can.

    Args:
        row_multiple: required divisor of R; None takes this kernel's tile height.
    """
    if reason := device.why_not_one_hopper(num_devices):
        return reason
    if scaling is Scaling.BLOCK and power_of_two:
        return "Mosaic GPU has no bits of a scalar: no powers of two for 128x128"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}; the kernel reads bfloat16"
    for name, size, multiple in (
        ("R", x.shape[0], row_multiple or ROWS[scaling]),
        ("C", x.shape[1], BLOCK),
    ):
        if size % multiple:
            return f"{name}={size} is not a multiple of {multiple}"
    return None


def quantize_hopper(
    x_RC: jax.Array,
    scaling: Scaling,
    *,
    dtype: jnp.dtype,
    power_of_two: bool,
) -> Quantized:
    """Quantizes a matrix by the kernel: values [R, C] and scales [J, R] or [J, I]."""
    R, C = x_RC.shape
    tiles = math.gcd(C // BLOCK, MOST_TILES)
    kernel = _QuantizeKernel(
        scaling=scaling,
        dtype=dtype,
        power_of_two=power_of_two,
        tiles=tiles,
    )
    found = launch(
        kernel.run,
        name="quantize",
        operands={"x": x_RC},
        results={
            "values": jax.ShapeDtypeStruct((R, C), dtype),
            "scale": jax.ShapeDtypeStruct(scaling.shape(R, C), jnp.float32),
        },
        scratch={
            "x": plgpu.SMEM((kernel.tiles, kernel.rows, BLOCK), x_RC.dtype),
            "full": plgpu.Barrier(num_barriers=kernel.tiles),
        },
        num_threads=1,
        grid=(R // kernel.rows, C // (BLOCK * kernel.tiles)),
        grid_names=("rows", "columns"),
        params=dict(unsafe_no_auto_barriers=True),
    )
    return Quantized(found["values"], found["scale"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _QuantizeKernel:
    """The kernel of one call."""

    scaling: Scaling
    dtype: jnp.dtype
    power_of_two: bool
    tiles: int  # of a block of the grid

    @property
    def rows(self) -> int:
        """Number of rows in one tile."""
        return ROWS[self.scaling]

    def layout(self):
        """Layout of a tile in registers: each row in half a warp."""
        by_warp, by_lane = self.rows // WARPS, 2
        return plgpu.Layout.TILED(
            plgpu.Tiling(((self.rows, BLOCK), (by_warp, BLOCK), (by_lane, BLOCK), (VECTOR,))),
            warp_dims=(-7,),
            lane_dims=(-3, -2),
            vector_dim=-1,
        )

    def run(self, gmem, smem) -> None:
        """Casts the tiles of one block of the grid."""
        i, first = lax.axis_index("rows"), lax.axis_index("columns") * self.tiles
        rows = pl.ds(i * self.rows, self.rows)
        for t in range(self.tiles):
            columns = pl.ds((first + t) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(gmem.x.at[rows, columns], smem.x.at[t], smem.full.at[t])

        def tile(t, _):
            plgpu.barrier_wait(smem.full.at[t])
            x = plgpu.load(smem.x.at[t], layout=self.layout(), optimized=False)
            self.write(gmem, x.astype(jnp.float32), i, first + t)

        lax.fori_loop(0, self.tiles, tile, None)

    def write(self, gmem, x, i, j) -> None:
        """Writes the scales and 8-bit values of a tile from registers."""
        rows, columns = pl.ds(i * self.rows, self.rows), pl.ds(j * BLOCK, BLOCK)
        largest = jnp.max(magnitude(x), axis=1)
        if self.scaling is Scaling.BLOCK:
            largest = jnp.max(largest)
        scale, inverse = scale_and_inverse(largest, self.dtype, power_of_two=self.power_of_two)
        if self.scaling is Scaling.BLOCK:
            gmem.scale[j, i] = scale
        else:
            write_registers(scale, gmem.scale.at[j, rows])
            inverse = lax.broadcast_in_dim(inverse, x.shape, [0])
        # The hardware's cast saturates.
        scaled = jnp.where(jnp.abs(x) < jnp.inf, x * inverse, jnp.nan)
        write_registers(scaled.astype(self.dtype), gmem.values.at[rows, columns])
