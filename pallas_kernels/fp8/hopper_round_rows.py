"""A Hopper kernel that quantizes rows to e4m3, after RMSNorm or SwiGLU, in one launch.

XLA takes three kernels for a norm, the largest element and the cast. Here a block of one warpgroup
keeps its row in registers. Numbers are rounded to x's dtype before they are quantized, as separate
operations would round them.

Dims: M row, K column of the quantized rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import LANES, WARPGROUP
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .formula import largest_of, swiglu_in_kernel

LEAST = 2.0**-60  # of a row's largest element: no scale is 0
MOST_COLUMNS = 16384  # of a row in the registers of a warpgroup
CODES = jnp.dtype(jnp.float8_e4m3fn)


def unsupported_rounding(columns: int) -> str | None:
    """Returns why the kernel cannot quantize rows of ``columns`` elements; None if it can."""
    if columns % (2 * WARPGROUP) or columns > MOST_COLUMNS:
        return f"{columns} columns: it takes multiples of {2 * WARPGROUP} up to {MOST_COLUMNS}"
    return None


def round_rows_hopper(
    x: jax.Array, *, norm: RmsNorm | None, swiglu_input: bool
) -> tuple[jax.Array, jax.Array]:
    """Quantizes rows of ``input(x)``; returns e4m3 codes [M, K] and float32 scales [M].

    ``input(x)`` is x, its RMSNorm, or ``silu(gate) * up`` of x's halves, rounded to x's dtype.

    Args:
        x: [M, K], bfloat16 or float16; [M, 2 K] with ``swiglu_input``.
    """
    rows, width = x.shape
    columns = width // 2 if swiglu_input else width
    kernel = _RoundingKernel(columns=columns, dtype=x.dtype, norm=norm, swiglu=swiglu_input)
    operands = {"x": x} if norm is None else {"x": x, "norm": norm.scale}
    found = launch(
        kernel.run,
        name="round_rows",
        operands=operands,
        results={
            "codes": jax.ShapeDtypeStruct((rows, columns), CODES),
            "scale": jax.ShapeDtypeStruct((rows,), jnp.float32),
        },
        scratch={},
        num_threads=1,
        params=dict(approx_math=True, unsafe_no_auto_barriers=True),
        grid=(rows,),
        grid_names=("row",),
    )
    return found["codes"], found["scale"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RoundingKernel:
    """The kernel of one call."""

    columns: int
    dtype: jnp.dtype
    norm: RmsNorm | None  # its epsilon and offset; its scale is an operand
    swiglu: bool

    def layout(self):
        """Layout of a row in a warpgroup's registers: up to 8 neighbors per thread."""
        each = next(n for n in (8, 4, 2) if self.columns % (n * WARPGROUP) == 0)
        tiles = ((WARPGROUP * each,), (LANES * each,), (each,))
        return plgpu.Layout.TILED(
            plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )

    def read(self, ref) -> jax.Array:
        """Loads a row in fp32."""
        return plgpu.load(ref, layout=self.layout(), optimized=False).astype(jnp.float32)

    def numbers(self, gmem, row) -> jax.Array:
        """Returns the numbers of a row that are quantized, fp32."""
        x = self.read(gmem.x.at[row, pl.ds(0, self.columns)])
        if self.swiglu:
            up = self.read(gmem.x.at[row, pl.ds(self.columns, self.columns)])
            (x,) = swiglu_in_kernel(x, up)
        elif self.norm is not None:
            mean = jnp.sum(x * x) * (1.0 / self.columns)
            x = x * lax.rsqrt(mean + self.norm.epsilon)
            x = x * (self.read(gmem.norm) + self.norm.offset)
        else:
            return x
        return x.astype(self.dtype).astype(jnp.float32)

    def run(self, gmem, smem) -> None:
        """Quantizes the row of one block of the grid."""
        del smem
        row, top = lax.axis_index("row"), largest_of(CODES)
        x = self.numbers(gmem, row)
        scale = jnp.maximum(jnp.max(jnp.abs(x)), LEAST) / top
        # No product exceeds the format's range by more than its rounding.
        write_registers((x * (1.0 / scale)).astype(CODES), gmem.codes.at[row])
        gmem.scale[row] = scale
