"""Calls of bodies that are written for one thread, which Pallas cannot say."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.machine import LANES
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.threads import constant


def splat(x: Any) -> jax.Array:
    """A number as an argument of ``plgpu.inline_mgpu``."""
    return jnp.broadcast_to(x, ())


def each_thread(body: Callable[..., None], refs: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Every thread's ``body(*refs, *numbers)``, numbers as int32 registers."""
    kinds = [plgpu.RefType()] * len(refs) + [plgpu.Layout.WG_SPLAT(())] * len(numbers)

    @plgpu.inline_mgpu(arg_types=tuple(kinds))
    def run(ctx, *given):
        del ctx
        body(*given[: len(refs)], *(x.registers.flat[0] for x in given[len(refs) :]))

    run(*refs, *map(splat, numbers))


def warp_and_lane() -> tuple[Any, Any]:
    """Of this thread in its block."""
    thread = mgpu_utils.thread_idx()
    return arith.divui(thread, constant(LANES)), arith.remui(thread, constant(LANES))


def below(a: Any, b: Any) -> Any:
    """``a < b``, as numbers without a sign."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)
