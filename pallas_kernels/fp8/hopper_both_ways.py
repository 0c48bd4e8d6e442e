"""Casts matrices and their transposes to 8 bits by blocks on a Hopper GPU, reading inputs once.

A matrix is cast as it is, or after SwiGLU or its gradient. A block of the grid has a tile of 128 x
128 and two warpgroups. Each loads 64 rows of the inputs to shared memory, computes, and overwrites
the inputs with the results, rounded to 16 bits as by separate steps. It casts its rows, half a warp
per row. Once the other warpgroup has written its rows, too, it loads 64 columns by
``ldmatrix.trans`` and casts them. TMA stores columns, which are contiguous only in the transpose.
Two blocks run on an SM, so that one's memory accesses overlap the other's arithmetic.

Dims: R row, C column, J blocks of 128 columns, I blocks of 128 rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.scales import BLOCK, Quantized, Scaling
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.tile import tile_layout, tiled

from . import hopper_quantize
from .formula import magnitude, scale_and_inverse

WARPGROUPS = 2
PART = BLOCK // WARPGROUPS
"""Rows, and later columns, of a tile that one warpgroup casts."""
STEP = 8
"""Rows of a part in registers at a time. With 16 the gradient takes 133 registers per thread, and
one block less runs per SM.
"""
PIECE = 32  # rows of a part's columns in registers at a time
VECTOR = 8  # elements of a load, 16 bytes of bf16

type WithTranspose = tuple[Quantized, Quantized]
"""A quantized matrix and its quantized transpose."""


def unsupported(
    inputs_RC: tuple[jax.Array, ...], scaling: Scaling, *, power_of_two: bool, num_devices: int
) -> str | None:
    """Returns why the kernel that casts both ways cannot compute this call; None if it can."""
    options = {"power_of_two": power_of_two, "num_devices": num_devices}
    return hopper_quantize.unsupported(inputs_RC[0], scaling, **options, row_multiple=BLOCK)


def both_ways_hopper(
    results_of: Callable[..., tuple[jax.Array, ...]],
    inputs_RC: tuple[jax.Array, ...],
    scaling: Scaling,
    *,
    num_results: int,
    dtype: jnp.dtype,
    power_of_two: bool,
) -> tuple[WithTranspose, ...]:
    """Casts each result [R, C] and its transpose [C, R] to 8 bits, by 1x128 or 128x128 blocks.

    Args:
        results_of: element-wise fp32 function of the inputs; at most as many results as inputs.
    """
    R, C = inputs_RC[0].shape
    kernel = _BothWaysKernel(
        results_of=results_of,
        num_results=num_results,
        scaling=scaling,
        dtype=dtype,
        power_of_two=power_of_two,
    )
    shape, of_results = jax.ShapeDtypeStruct, range(num_results)

    def tiles(count: int) -> Any:
        return plgpu.SMEM((count, BLOCK, BLOCK), inputs_RC[0].dtype, transforms=tiled(128))

    across = plgpu.SMEM((BLOCK, BLOCK), dtype, transforms=tiled(128, itemsize=1))
    num_read = len(inputs_RC) - num_results  # inputs that no result is written over
    found = launch(
        kernel.run,
        name="quantize_both_ways",
        operands={"x": list(inputs_RC)},
        results={
            "values": [shape((R, C), dtype) for _ in of_results],
            "scale": [shape(scaling.shape(R, C), jnp.float32) for _ in of_results],
            "values_across": [shape((C, R), dtype) for _ in of_results],
            "scale_across": [shape(scaling.shape(C, R), jnp.float32) for _ in of_results],
        },
        scratch={
            "x": tiles(num_results),
            "read": plgpu.RefUnion(tiles(max(num_read, 1)), across),
            "largest": plgpu.SMEM((num_results, BLOCK), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=len(inputs_RC), num_barriers=WARPGROUPS),
            "made": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        num_threads=WARPGROUPS,
        grid=(R // BLOCK, C // BLOCK),
        grid_names=("rows", "columns"),
    )
    each = zip(*found.values(), strict=True)
    return tuple((Quantized(v, s), Quantized(va, sa)) for v, s, va, sa in each)


class _Place(NamedTuple):
    """Place of a tile, and of a warpgroup's part in it."""

    i: Any
    j: Any
    wg: Any

    @property
    def part(self) -> Any:
        return pl.ds(self.wg * PART, PART)

    def rows(self, step: Any, *, of_matrix: bool) -> Any:
        first = self.i * BLOCK if of_matrix else 0
        return pl.ds(first + self.wg * PART + step * STEP, STEP)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _BothWaysKernel:
    """The kernel of one call; methods are its phases."""

    results_of: Callable[..., tuple[jax.Array, ...]]
    num_results: int
    scaling: Scaling
    dtype: jnp.dtype
    power_of_two: bool

    def run(self, gmem: Any, smem: Any) -> None:
        """Casts one tile of the results and of their transposes."""
        place = _Place(*(lax.axis_index(name) for name in ("rows", "columns", "wg")))
        rows = pl.ds(place.i * BLOCK + place.wg * PART, PART)
        columns = pl.ds(place.j * BLOCK, BLOCK)
        for k, x in enumerate(gmem.x):
            to = self.input(smem, k).at[place.part]
            plgpu.copy_gmem_to_smem(x.at[rows, columns], to, smem.full.at[place.wg])
        plgpu.barrier_wait(smem.full.at[place.wg])
        self.each_step(lambda step, _: self.make(gmem, smem, place, step))
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.made)
        plgpu.barrier_wait(smem.made)
        for k in range(self.num_results):
            inverse = None
            if self.scaling is Scaling.BLOCK:
                inverse = self.cast_block(gmem, smem, place, k)
            self.cast_across(gmem, smem, place, k, inverse)
        plgpu.wait_smem_to_gmem(0)

    def input(self, smem: Any, k: int) -> Any:
        """Returns the shared-memory buffer of input k."""
        return smem.x.at[k] if k < self.num_results else smem.read[0].at[k - self.num_results]

    def each_step(self, body: Callable[[Any, None], None]) -> None:
        """Calls ``body`` for a few rows of this warpgroup's 64 at a time."""
        lax.fori_loop(0, PART // STEP, body, None)

    def scales(self, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scale_and_inverse(largest, self.dtype, power_of_two=self.power_of_two)

    def make(self, gmem: Any, smem: Any, place: _Place, step: jax.Array) -> None:
        """Computes some rows of the results, and casts them if each row has its own scales."""
        rows = place.rows(step, of_matrix=False)
        inputs = [_loaded(self.input(smem, k).at[rows]) for k in range(len(gmem.x))]
        for k, result in enumerate(self.results_of(*inputs)):
            rounded = result.astype(gmem.x[k].dtype)
            write_registers(rounded, smem.x.at[k, rows])
            x = rounded.astype(jnp.float32)
            largest = jnp.max(magnitude(x), axis=1)
            if self.scaling is Scaling.BLOCK:
                write_registers(largest, smem.largest.at[k, rows])
                continue
            scale, inverse = self.scales(largest)
            write_registers(scale, gmem.scale[k].at[place.j, place.rows(step, of_matrix=True)])
            self.write(gmem, x, lax.broadcast_in_dim(inverse, x.shape, [0]), place, step, k)

    def cast_block(self, gmem: Any, smem: Any, place: _Place, k: int) -> jax.Array:
        """Casts a result's rows of a tile with one scale, and returns that scale's inverse."""
        largest = plgpu.load(smem.largest.at[k], layout=_in_every_warp(), optimized=False)
        scale, inverse = self.scales(jnp.max(largest))

        @pl.when(place.wg == 0)
        def _():
            gmem.scale[k][place.j, place.i] = scale
            gmem.scale_across[k][place.i, place.j] = scale

        def cast(step, _):
            x = _loaded(smem.x.at[k, place.rows(step, of_matrix=False)])
            self.write(gmem, x, inverse, place, step, k)

        self.each_step(cast)
        return inverse

    def write(
        self, gmem: Any, x: jax.Array, inverse: jax.Array, place: _Place, step: Any, k: int
    ) -> None:
        """Writes the 8-bit values of some rows to global memory."""
        to = place.rows(step, of_matrix=True), pl.ds(place.j * BLOCK, BLOCK)
        write_registers(_cast(x, inverse, self.dtype), gmem.values[k].at[to])

    def cast_across(
        self, gmem: Any, smem: Any, place: _Place, k: int, inverse: jax.Array | None
    ) -> None:
        """Casts this warpgroup's columns of a result, which become rows of the transpose.

        Args:
            inverse: inverse of the tile's scale; None if each column has a scale of its own.
        """
        columns = pl.ds(place.j * BLOCK + place.wg * PART, PART)
        across = smem.read[1].at[place.part]

        def piece(first: int) -> jax.Array:
            at = smem.x.at[k].transpose((1, 0)).at[place.part, pl.ds(first, PIECE)]
            x = plgpu.load(at, layout=tile_layout(), optimized=False)
            return x.astype(jnp.float32)

        pieces = range(0, BLOCK, PIECE)
        if inverse is None:
            sizes = functools.reduce(jnp.maximum, (magnitude(piece(first)) for first in pieces))
            scale, inverse = self.scales(jnp.max(sizes, axis=1))
            write_registers(scale, gmem.scale_across[k].at[place.i, columns])
            inverse = lax.broadcast_in_dim(inverse, sizes.shape, [0])
        values = [_cast(piece(first), inverse, self.dtype) for first in pieces]
        if k > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        write_registers(jnp.concatenate(values, axis=1), across)
        plgpu.commit_smem()
        to = columns, pl.ds(place.i * BLOCK, BLOCK)
        plgpu.copy_smem_to_gmem(across, gmem.values_across[k].at[to])


def _loaded(ref: Any) -> jax.Array:
    """Rows of a tile in fp32, a row in half a warp."""
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((STEP, BLOCK), (STEP // WARPS, BLOCK), (VECTOR,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _in_every_warp() -> Any:
    """Layout of a number for each row of a tile, all in every warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((BLOCK,), (BLOCK // LANES,))),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _cast(x: jax.Array, inverse: jax.Array, dtype: jnp.dtype) -> jax.Array:
    # The hardware's cast saturates.
    return jnp.where(jnp.abs(x) < jnp.inf, x * inverse, jnp.nan).astype(dtype)
