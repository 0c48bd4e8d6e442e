"""Rungs 1 to 5: matmul by the threads' own multiply-adds, no tensor cores.

A block of threads owns a tile of C. A layout says which elements a thread holds; loads of a column
of A or a row of B follow from it, so the rungs differ in little else than layouts and staging.

Dims: M row of A and C, N column of B and C, K contraction.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.registers import write_registers

from .shapes import check_operands

PARAMS = plgpu.CompilerParams(
    unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)
TILED, Tiling = plgpu.Layout.TILED, plgpu.Tiling
# One element a thread; the 32 lanes of a warp walk down a column, or along a row.
DOWN = TILED(Tiling(((32, 4), (1,))), warp_dims=(-2,), lane_dims=(-3,), vector_dim=-1)
ALONG = TILED(Tiling(((4, 32), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
# 8 x 8 elements a thread of a 64 x 128 tile: every fourth row, and columns that come from shared
# memory 16 bytes at a time.
PATCH = TILED(
    Tiling(((64, 128), (32, 64), (4, 32), (4,))),
    warp_dims=(-7, -6), lane_dims=(-3, -2), vector_dim=-1,
)  # fmt: skip


def naive(a_MK: jax.Array, b_KN: jax.Array) -> jax.Array:
    """One element of C a thread; a warp's threads are in one column: each reads its own row of A,
    32 cache lines for 32 numbers.
    """
    return _element_a_thread(a_MK, b_KN, layout=DOWN, tile=(32, 4))


def coalesced(a_MK: jax.Array, b_KN: jax.Array) -> jax.Array:
    """A warp's threads are in one row: they share an element of A and read B side by side."""
    return _element_a_thread(a_MK, b_KN, layout=ALONG, tile=(4, 32))


def _element_a_thread(a_MK, b_KN, *, layout, tile: tuple[int, int]) -> jax.Array:
    M, N, K = check_operands(a_MK, b_KN, tile_m=tile[0], tile_n=tile[1], tile_k=1)

    def body(a_gmem, b_gmem, c_gmem):
        rows = pl.ds(lax.axis_index("m") * tile[0], tile[0])
        columns = pl.ds(lax.axis_index("n") * tile[1], tile[1])

        def step(k, acc_MN):
            return multiply_add(acc_MN, a_gmem.at[rows, k], b_gmem.at[k, columns], layout)

        acc_MN = lax.fori_loop(0, K, step, zeros(tile, layout))
        write_registers(acc_MN.astype(a_MK.dtype), c_gmem.at[rows, columns])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, N), a_MK.dtype),
        grid=(M // tile[0], N // tile[1]),
        grid_names=("m", "n"),
        compiler_params=PARAMS,
    )(a_MK, b_KN)


def zeros(tile: tuple[int, int], layout) -> jax.Array:
    """fp32 accumulators of a tile, in registers."""
    return plgpu.layout_cast(jnp.zeros(tile, jnp.float32), layout)


def multiply_add(acc_MN: jax.Array, a_ref, b_ref, layout) -> jax.Array:
    """``acc + a * b`` of a column of A and a row of B: each thread loads what its elements need."""
    a_M = plgpu.load(a_ref, layout=layout.reduce(1), optimized=False).astype(jnp.float32)
    b_N = plgpu.load(b_ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
    a_MN = plgpu.layout_cast(lax.broadcast_in_dim(a_M, acc_MN.shape, [0]), layout)
    b_MN = plgpu.layout_cast(lax.broadcast_in_dim(b_N, acc_MN.shape, [1]), layout)
    return acc_MN + a_MN * b_MN


def shared(a_MK: jax.Array, b_KN: jax.Array) -> jax.Array:
    """1024 threads bring tiles of A and B to shared memory once, and read them 32 times there."""
    tile, depth, num_groups = 32, 32, 8
    share = tile // num_groups
    *_, K = check_operands(a_MK, b_KN, tile_m=tile, tile_n=tile, tile_k=depth)

    def body(a_gmem, b_gmem, c_gmem, a_smem, b_smem, filled, emptied):
        mine = pl.ds(lax.axis_index("group") * share, share)
        row, column = lax.axis_index("m") * tile, lax.axis_index("n") * tile
        my_rows = pl.ds(row + lax.axis_index("group") * share, share)

        def step(i, acc_MN):
            k = i * depth
            # A is stored by columns: that is how it is read.
            a = widened(a_gmem.at[my_rows, pl.ds(k, depth)], ALONG)
            write_registers(a, a_smem.T.at[mine])
            b_rows = pl.ds(k + lax.axis_index("group") * share, share)
            b = widened(b_gmem.at[b_rows, pl.ds(column, tile)], ALONG)
            write_registers(b, b_smem.at[mine])
            meet(filled)
            for k in range(depth):
                acc_MN = multiply_add(acc_MN, a_smem.at[k, mine], b_smem.at[k], ALONG)
            meet(emptied)
            return acc_MN

        acc_MN = lax.fori_loop(0, K // depth, step, zeros((share, tile), ALONG))
        write_registers(acc_MN.astype(a_MK.dtype), c_gmem.at[my_rows, pl.ds(column, tile)])

    staged = ((depth, tile), (depth, tile))
    return _staged(body, a_MK, b_KN, tile=(tile, tile), staged=staged, num_groups=num_groups)


def _staged(
    body: Callable[..., None],
    a_MK: jax.Array,
    b_KN: jax.Array,
    *,
    tile: tuple[int, int],
    staged: tuple[tuple[int, ...], tuple[int, ...]],
    num_groups: int,
) -> jax.Array:
    """A block of ``num_groups`` warpgroups a tile, shared memory of two shapes for A and B, and two
    barriers where the groups meet.
    """
    M, N = a_MK.shape[0], b_KN.shape[1]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, N), a_MK.dtype),
        scratch_types=(
            *(plgpu.SMEM(shape, jnp.float32) for shape in staged),
            *(plgpu.Barrier(num_arrivals=num_groups) for _ in range(2)),
        ),
        grid=(M // tile[0], N // tile[1]),
        grid_names=("m", "n"),
        num_threads=num_groups,
        thread_name="group",
        compiler_params=PARAMS,
    )(a_MK, b_KN)


def widened(ref, layout) -> jax.Array:
    """Loaded and converted to fp32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def meet(barrier) -> None:
    """All threads of the block wait for each other."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


# Threads' elements of device memory, for a group's 64 x 16 of A and 8 x 128 of B: 2 or 16 bytes
# at a time.
A_NARROW = TILED(
    Tiling(((8, 16), (2, 16), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
B_NARROW = ALONG
B_WIDE = TILED(
    Tiling(((8, 128), (2, 128), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def registers(a_MK: jax.Array, b_KN: jax.Array) -> jax.Array:
    """8 x 8 elements of C a thread: 16 numbers from shared memory feed 64 multiply-adds."""
    layouts = (A_NARROW, B_NARROW, PATCH)
    return _patch_a_thread(a_MK, b_KN, layouts=layouts, num_stages=1)


def prefetched(a_MK: jax.Array, b_KN: jax.Array) -> jax.Array:
    """Tiles are loaded a step ahead: they travel while this one is multiplied."""
    return _patch_a_thread(a_MK, b_KN, layouts=(A_NARROW, B_WIDE, PATCH), num_stages=2)


def _patch_a_thread(a_MK, b_KN, *, layouts, num_stages: int) -> jax.Array:
    num_groups, rows, columns, depth = 2, 64, 128, 16
    tile_m, share = num_groups * rows, depth // num_groups
    *_, K = check_operands(a_MK, b_KN, tile_m=tile_m, tile_n=columns, tile_k=depth)
    num_steps = K // depth

    def body(a_gmem, b_gmem, c_gmem, a_smem, b_smem, filled, emptied):
        group = lax.axis_index("group")
        mine = pl.ds(group * rows, rows)
        my_rows = pl.ds(lax.axis_index("m") * tile_m + group * rows, rows)
        my_columns = pl.ds(lax.axis_index("n") * columns, columns)

        def fetch(i):
            b_rows = pl.ds(i * depth + group * share, share)
            return (
                widened(a_gmem.at[my_rows, pl.ds(i * depth, depth)], layouts[0]),
                widened(b_gmem.at[b_rows, my_columns], layouts[1]),
            )

        def stage(slot, a, b):
            write_registers(a, a_smem.at[slot].T.at[mine])
            write_registers(b, b_smem.at[slot, pl.ds(group * share, share)])
            meet(filled)

        def multiply(slot, acc_MN):
            for k in range(depth):
                a_ref, b_ref = a_smem.at[slot, k, mine], b_smem.at[slot, k]
                acc_MN = multiply_add(acc_MN, a_ref, b_ref, layouts[2])
            return acc_MN

        def step(i, acc_MN):
            stage(0, *fetch(i))
            acc_MN = multiply(0, acc_MN)
            meet(emptied)
            return acc_MN

        def step_ahead(i, carry):
            acc_MN, a, b = carry
            slot = lax.rem(i, 2)
            stage(slot, a, b)
            a, b = fetch(jnp.minimum(i + 1, num_steps - 1))
            # Without a barrier the compiler delays the loads until their use in the next round.
            return lax.optimization_barrier((multiply(slot, acc_MN), a, b))

        acc_MN = zeros((rows, columns), layouts[2])
        if num_stages == 1:
            acc_MN = lax.fori_loop(0, num_steps, step, acc_MN)
        else:
            acc_MN, *_ = lax.fori_loop(0, num_steps, step_ahead, (acc_MN, *fetch(0)))
        write_registers(acc_MN.astype(a_MK.dtype), c_gmem.at[my_rows, my_columns])

    staged = ((num_stages, depth, tile_m), (num_stages, depth, columns))
    return _staged(body, a_MK, b_KN, tile=(tile_m, columns), staged=staged, num_groups=num_groups)


RUNGS: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...] = (
    naive, coalesced, shared, registers, prefetched,
)  # fmt: skip
