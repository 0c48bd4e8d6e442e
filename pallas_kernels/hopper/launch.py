"""Launch of a Mosaic GPU kernel whose arrays have names and may be updated in place."""

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from .mosaic import plgpu

type Named = Mapping[str, Any]

PARAMS: Named = dict(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)
"""Compiler parameters for kernels that synchronize by their own barriers."""


def launch(
    run: Callable[[types.SimpleNamespace, types.SimpleNamespace], None],
    *,
    name: str,
    operands: Named,
    results: Named,
    scratch: Named,
    num_threads: int,
    params: Named = PARAMS,
    **grid: Any,
) -> dict[str, Any]:
    """Runs a kernel on arrays in global memory and shared memory buffers; returns results by name.

    Args:
        run: the kernel's body, run by each warpgroup; its thread axis is "wg".
        name: the kernel's name in profiler traces, where "_mosaic_gpu_kernel" follows it.
        operands: arrays by name, or lists of arrays.
        results: shapes and dtypes of the results, by name, or lists of them.
        scratch: buffers and barriers, in the order in which they are allocated.
        num_threads: number of warpgroups per block.
        params: parameters of ``plgpu.CompilerParams``.
        grid: sizes and names of the block and cluster grid, as ``plgpu.kernel`` takes them.
    """
    arrays = {**operands, **results}

    def body(*refs):
        gmem, rest = _grouped(arrays, refs)
        smem = dict(zip(scratch, rest, strict=True))
        run(types.SimpleNamespace(**gmem), types.SimpleNamespace(**smem))

    outs = plgpu.kernel(
        body,
        out_type=tuple(_flat(results)),
        scratch_types=tuple(scratch.values()),
        num_threads=num_threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(**params),
        kernel_name=name,
        **grid,
    )(*_flat(operands))
    # XLA fuses a kernel with the store of its result to a slice of a loop's stacked residuals. If
    # the result has another use, the kernel would then run twice.
    return _grouped(results, lax.optimization_barrier(outs))[0]


def references(arrays: Sequence[jax.Array]) -> list[Any]:
    """Makes a mutable reference to each array, without a copy where the caller donates the array.

    Make all references of a call at once, so that arrays of equal value, such as two pools of
    zeros, keep separate buffers. Otherwise, if another operand is a slice, XLA fuses it with the
    kernel's call and passes equal values once: two references would share a buffer.
    """
    return [jax.new_ref(array) for array in lax.optimization_barrier(tuple(arrays))]


def _flat(arrays: Named) -> list[Any]:
    groups = (group if isinstance(group, list) else [group] for group in arrays.values())
    return list(itertools.chain(*groups))


def _grouped(arrays: Named, flat: Sequence[Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Splits ``flat`` into arrays by name, and the rest."""
    left = iter(flat)
    named = {
        name: tuple(itertools.islice(left, len(group))) if isinstance(group, list) else next(left)
        for name, group in arrays.items()
    }
    return named, tuple(left)
