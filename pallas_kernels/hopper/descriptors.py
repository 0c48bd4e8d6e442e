"""Descriptors of buffers for WGMMAs in a loop, whose place does not change."""

from typing import Any

import jax
import jax.numpy as jnp

from .mosaic import mgpu, plgpu
from .threads import assembly, i32


def fresh_zero(it: Any) -> jax.Array:
    """Returns int32 0 that a compiler takes for an unknown number, another in every step.

    Where a buffer begins, and so each descriptor of it that a WGMMA takes, is constant in a loop.
    The compiler computes all of them before it, has no registers for them, and loads them from
    local memory in every step. Of ``buffer.at[fresh_zero(it)]`` it computes them in the step.

    Args:
        it: int32 below 2**30, a loop's step.
    """
    splat = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)

    @plgpu.inline_mgpu(arg_types=(splat,), return_type=result)
    def zero(_, it):
        step = it.registers.flat[0]
        high = assembly(i32(), [step], "shr.u32 $0, $1, 30;", "=r,r", pure=False)
        return mgpu.FragmentedArray.splat(high, (), is_signed=True)

    return zero(it)
