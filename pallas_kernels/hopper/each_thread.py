"""Wrappers that call per-thread code, which Pallas cannot express."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .machine import LANES
from .mosaic import arith, mgpu_utils, plgpu
from .threads import Address, constant, global_place


def splat(x: Any) -> jax.Array:
    """Converts a number to an int32 scalar argument of ``plgpu.inline_mgpu``."""
    return jnp.broadcast_to(x, ())


def each_thread(
    body: Callable[..., None],
    refs: Sequence[Any],
    numbers: Sequence[Any],
    *,
    layer: Any = 0,
    stacks: Sequence[Any] = (),
) -> None:
    """Runs ``body(*refs, *arrays, *numbers)`` in every thread, numbers as int32 registers.

    Args:
        layer, stacks: a layer's index, and arrays with a leading dim of layers; ``arrays`` are the
            addresses of that layer's entries.
    """
    first = len(refs) + len(stacks)
    kinds = [plgpu.RefType()] * first + [plgpu.Layout.WG_SPLAT(())] * (1 + len(numbers))
    sizes = [math.prod(stack.shape[1:]) * stack.dtype.itemsize for stack in stacks]

    @plgpu.inline_mgpu(arg_types=tuple(kinds))
    def run(ctx, *given):
        del ctx
        layer, *registers = (x.registers.flat[0] for x in given[first:])
        stacked = zip(given[len(refs) : first], sizes, strict=True)
        arrays = [layer_array(stack, layer, size) for stack, size in stacked]
        body(*given[: len(refs)], *arrays, *registers)

    run(*refs, *stacks, *map(splat, [layer, *numbers]))


def layer_array(stack: Any, layer: Any, size: int) -> Address:
    """Returns the address of a layer's ``size`` bytes in a stack, which may exceed 2**32 bytes."""
    return Address(global_place(stack, layer, size))


def warp_and_lane() -> tuple[Any, Any]:
    """Returns the index of this thread's warp in its block, and of its lane in the warp."""
    thread = mgpu_utils.thread_idx()
    return arith.divui(thread, constant(LANES)), arith.remui(thread, constant(LANES))
