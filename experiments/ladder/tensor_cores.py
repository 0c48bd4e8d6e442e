"""Rungs 6 and 7: one warpgroup, tiles copied by TMA, tensor cores (WGMMA).

Dims: M row of A and C, N column of B and C, K contraction.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shapes import check_operands

TILE_M, TILE_N, TILE_K = 128, 128, 64
STORE_N = 64  # columns of C that leave at a time


def swizzled(swizzle: int = 128) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """A bf16 buffer of 8-row tiles whose 16-byte pieces are permuted within ``swizzle`` bytes, so
    that a column of pieces spans different banks.
    """
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def tensor_core(a_MK: jax.Array, b_KN: jax.Array, *, swizzle: int = 128) -> jax.Array:
    """Copy a tile, wait, multiply, wait: the tensor cores idle during copies, and inversely.

    Args:
        a_MK, b_KN: bf16.
        swizzle: bytes within which pieces of a row are permuted: 32, 64 or 128.
    """
    M, N, K = check_operands(a_MK, b_KN, tile_m=TILE_M, tile_n=TILE_N, tile_k=TILE_K)

    def body(a_gmem, b_gmem, c_gmem, a_smem, b_smem, c_smem, filled):
        rows, columns = tile_of_block()

        def multiply(acc):
            def step(i, _):
                depth = pl.ds(i * TILE_K, TILE_K)
                plgpu.copy_gmem_to_smem(a_gmem.at[rows, depth], a_smem, filled)
                plgpu.copy_gmem_to_smem(b_gmem.at[depth, columns], b_smem, filled)
                plgpu.barrier_wait(filled)
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(0)

            lax.fori_loop(0, K // TILE_K, step, None)
            return acc[...]

        acc_MN = pl.run_scoped(multiply, plgpu.ACC((TILE_M, TILE_N), jnp.float32))
        store(acc_MN, c_smem, c_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    transforms = swizzled(swizzle)
    scratch = (
        plgpu.SMEM((TILE_M, TILE_K), a_MK.dtype, transforms=transforms),
        plgpu.SMEM((TILE_K, TILE_N), a_MK.dtype, transforms=transforms),
        plgpu.SMEM((2, TILE_M, STORE_N), a_MK.dtype, transforms=swizzled()),
        plgpu.Barrier(num_arrivals=2),
    )
    return _launch(body, scratch, M, N)(a_MK, b_KN)


def pipelined(a_MK: jax.Array, b_KN: jax.Array, *, num_stages: int = 4) -> jax.Array:
    """Several tiles on their way while one is multiplied, and the next multiply issued before this
    one is waited for.
    """
    M, N, K = check_operands(a_MK, b_KN, tile_m=TILE_M, tile_n=TILE_N, tile_k=TILE_K)
    num_steps = K // TILE_K

    def body(a_gmem, b_gmem, c_gmem, a_smem, b_smem, c_smem, filled):
        rows, columns = tile_of_block()

        def fetch(i, slot):
            depth, full = pl.ds(i * TILE_K, TILE_K), filled.at[slot]
            plgpu.copy_gmem_to_smem(a_gmem.at[rows, depth], a_smem.at[slot], full)
            plgpu.copy_gmem_to_smem(b_gmem.at[depth, columns], b_smem.at[slot], full)

        def multiply(acc):
            for i in range(min(num_stages, num_steps)):
                fetch(i, i)

            def step(i, _):
                slot = lax.rem(i, num_stages)
                plgpu.barrier_wait(filled.at[slot])
                plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                # The multiply before this one is done, so its tile's place is free.
                plgpu.wgmma_wait(1)
                ahead = i - 1 + num_stages

                @pl.when(jnp.logical_and(i > 0, ahead < num_steps))
                def _():
                    fetch(ahead, lax.rem(ahead, num_stages))

            lax.fori_loop(0, num_steps, step, None)
            return acc[...]

        acc_MN = pl.run_scoped(multiply, plgpu.ACC((TILE_M, TILE_N), jnp.float32))
        store(acc_MN, c_smem, c_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    scratch = (
        plgpu.SMEM((num_stages, TILE_M, TILE_K), a_MK.dtype, transforms=swizzled()),
        plgpu.SMEM((num_stages, TILE_K, TILE_N), a_MK.dtype, transforms=swizzled()),
        plgpu.SMEM((2, TILE_M, STORE_N), a_MK.dtype, transforms=swizzled()),
        plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
    )
    return _launch(body, scratch, M, N)(a_MK, b_KN)


def tile_of_block() -> tuple[Any, Any]:
    """Rows and columns of C that this block computes."""
    rows = pl.ds(lax.axis_index("m") * TILE_M, TILE_M)
    return rows, pl.ds(lax.axis_index("n") * TILE_N, TILE_N)


def store(acc_MN: jax.Array, c_smem, c_gmem) -> None:
    """Sends accumulators away by way of shared memory; the copies end on their own.

    Args:
        acc_MN: fp32 in registers.
        c_smem: [2, M, STORE_N]: one part is filled while the other leaves.
        c_gmem: the part of C that they are.
    """
    for j in range(acc_MN.shape[1] // STORE_N):
        part = slice(j * STORE_N, (j + 1) * STORE_N)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        c_smem[j % 2] = acc_MN[:, part].astype(c_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(c_smem.at[j % 2], c_gmem.at[:, part])


def _launch(body, scratch: tuple, M: int, N: int):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
        scratch_types=scratch,
        grid=(M // TILE_M, N // TILE_N),
        grid_names=("m", "n"),
    )
