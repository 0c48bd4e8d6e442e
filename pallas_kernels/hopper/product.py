"""WGMMA products of 8-bit tiles that start without a zeroed accumulator.

Pallas adds a product to an accumulator that begins as zeros. ptxas removes the zeroing only if
nothing separates it from the product; otherwise it costs an instruction for every two numbers. With
a promotion after every product that is too slow. Here the first WGMMA instruction overwrites the
accumulator instead.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from .mosaic import llvm, mgpu, mma_utils, nvvm, plgpu
from .tile import tile_layout, tiled

ROWS = 64
SWIZZLE = 128
K_OF_INSTRUCTION = 32
_NAMES = {jnp.dtype("float8_e4m3fn"): "e4m3", jnp.dtype("float8_e5m2"): "e5m2"}


def product(
    a_ref: Any, b_ref: Any, *, wg: Any, order_barriers: Any, interpretable: bool
) -> jax.Array:
    """Computes ``a b^T`` [64, N] in fp32 of 8-bit tiles in shared memory (see ``start_product``).

    Args:
        wg: index of this warpgroup, 0 or 1.
        order_barriers: two barriers by which warpgroups issue their products alternately; or None.
        interpretable: multiplies by Pallas's own operations, which the interpreter can run.
    """
    if order_barriers is not None:
        plgpu.barrier_wait(order_barriers.at[wg])
    if interpretable:

        def multiply(acc):
            plgpu.wgmma(acc, a_ref, b_ref.transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(acc)

        found = pl.run_scoped(multiply, plgpu.ACC((ROWS, b_ref.shape[0]), jnp.float32))
        finish = functools.partial(jnp.asarray, found)
    else:
        finish = functools.partial(finished, start_product(a_ref, b_ref))
    if order_barriers is not None:
        plgpu.barrier_arrive(order_barriers.at[1 - wg])
    return finish()


def no_sum(columns: int) -> jax.Array:
    """Returns fp32 zeros [64, columns], to which products of parts of K are added."""
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), tile_layout())


def _in_flight() -> Any:
    """A number a register: of pairs ptxas makes copies while a product is under way."""
    return plgpu.Layout._WGMMA_ACC_32BIT


def start_product(a_ref: Any, b_ref: Any) -> jax.Array:
    """Issues the product ``a b^T`` of two 8-bit tiles in shared memory; ``finished`` awaits it.

    Args:
        a_ref: [64, 128], 8 bits, in ``tiled(128, itemsize=1)``.
        b_ref: [N, 128], N a multiple of 8 and at most 256.

    Returns:
        The product's registers, fp32 [64, N], which nothing may read before ``finished``.
    """
    columns = b_ref.shape[0]
    ref = plgpu.RefType(tiled(SWIZZLE, itemsize=1))
    types = f"{_NAMES[jnp.dtype(a_ref.dtype)]}.{_NAMES[jnp.dtype(b_ref.dtype)]}"

    @plgpu.inline_mgpu(
        arg_types=(ref, ref),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=_in_flight()),
    )
    def issue(ctx, a, b):
        del ctx
        b = mgpu.memref_transpose(b, (1, 0, 3, 2))
        a_parts = _descriptors(a, (ROWS, SWIZZLE), k_major=False)
        b_parts = _descriptors(b, (SWIZZLE, columns), k_major=True)
        nvvm.wgmma_fence_aligned()
        found = _multiply(a_parts, b_parts, columns, types)
        layout = _in_flight().to_mgpu()
        registers = np.array(found, dtype=object).reshape(layout.registers_shape((ROWS, columns)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return issue(a_ref, b_ref)


def finished(product: jax.Array) -> jax.Array:
    """Waits for all products that the warpgroup issued; returns the given one, fp32 [64, N]."""

    @plgpu.inline_mgpu(
        arg_types=(_in_flight(),),
        return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=tile_layout()),
    )
    def wait(ctx, x):
        del ctx
        nvvm.wgmma_wait_group_sync_aligned(0)
        return mgpu.optimization_barrier(x).to_layout(tile_layout().to_mgpu())

    return wait(product)


def _descriptors(ref: Any, group: tuple[int, int], *, k_major: bool) -> list[Any]:
    """Returns the WGMMA descriptors of a tile's parts of 32 columns."""
    tile = (SWIZZLE, SWIZZLE) if k_major else group
    described: Any = mma_utils.create_descriptor(
        ref, swizzle=SWIZZLE, large_tile=tile, group_size=group, logical_k_major=k_major
    )
    (base, strides), _, fastest = described
    assert fastest == mma_utils.Dim.K, "8-bit operands lie with the contracted dim contiguous"
    step = mma_utils.encode_addr(strides[1][0])
    i64 = ir.IntegerType.get_signless(64)
    flags = llvm.IntegerOverflowFlags.none
    return [
        llvm.add(base, mgpu.c(i * step, i64), overflow_flags=flags) if i else base
        for i in range(SWIZZLE // K_OF_INSTRUCTION)
    ]


def _multiply(a_parts: list[Any], b_parts: list[Any], columns: int, types: str) -> list[Any]:
    """Issues all instructions of one product as one WGMMA group; returns its registers."""
    count = columns // 2
    sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = ["{", ".reg .pred nothing, all;"]
    lines += ["setp.ne.b32 nothing, 0, 0;", "setp.eq.b32 all, 0, 0;"]
    for i in range(len(a_parts)):
        a, b = f"${count + i}", f"${count + len(a_parts) + i}"
        add = "all" if i else "nothing"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{K_OF_INSTRUCTION}.f32.{types} "
            f"{sums}, {a}, {b}, {add}, 1, 1;"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    constraints = ["=f"] * count + ["l"] * (len(a_parts) + len(b_parts))
    number = ir.VectorType.get((1,), ir.F32Type.get())
    found: Any = llvm.inline_asm(
        llvm.StructType.get_literal([number] * count),
        [*a_parts, *b_parts],
        "\n".join(lines),
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, found, [i]) for i in range(count)]
