"""Sums over the lanes of a warp, several at a time, on a Hopper GPU.

One number is summed over 32 lanes in five steps, a shuffle each. Of four numbers, the first two
steps halve how many a lane still sums rather than how many lanes agree: six shuffles, where one
number after another takes 20, and four more tell all lanes. A multiprocessor shuffles a register of
one warp a clock, and LayerNorm's gradient spent a sixth of its time on that.

Dims: A row or part of a row in a warpgroup, M column of a part, P part of a row.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import arith, mgpu, mgpu_utils, nvvm, plgpu
from pallas_kernels.hopper.mosaic import vector as vectors
from pallas_kernels.hopper.threads import constant, i32, thread

from .config import lane_layout, tile_layout

_CHAINS = 8  # of additions that a thread makes at the same time, of all sums; more would spill


def sums_of_columns(*xs_AM: jax.Array, vector: int) -> tuple[jax.Array, ...]:
    """Each fp32 [A, M] summed to [A], where the columns lie as ``tile_layout`` says."""
    layout = tile_layout(vector)
    return _sums(xs_AM, layout, _of_warps(vector), width=LANES)


def sums_of_parts(*xs_P: jax.Array, vector: int) -> tuple[jax.Array, ...]:
    """Each fp32 [P] summed, where the parts lie as ``lane_layout`` says, for each warp: [A]."""
    (num_parts,) = xs_P[0].shape
    return _sums(xs_P, lane_layout(num_parts), _of_warps(vector), width=min(num_parts, LANES))


def first_columns(x_AM: jax.Array, *, vector: int) -> jax.Array:
    """The sum of the first ``vector`` columns of each part, [A]."""
    layout, kind = tile_layout(vector), _of_warps(vector)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=kind)
    def first(_, x):
        each = _elements(x.registers.flat[0])
        return _fragment(_shown(functools.reduce(_plus, each), 0), kind)

    return first(x_AM)


def first_part(x_P: jax.Array, *, vector: int) -> tuple[jax.Array, jax.Array]:
    """Its first element, for each warp [A] and each part [P]."""
    layout = lane_layout(x_P.shape[0])
    kinds = _of_warps(vector), plgpu.ShapeDtypeStruct(x_P.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=kinds)
    def first(_, x):
        found = _shown(_elements(x.registers.flat[0])[0], 0)
        return tuple(_fragment(found, kind) for kind in kinds)

    return tuple(first(x_P))


def _of_warps(vector: int) -> Any:
    """The type of numbers of each warp, [A], as those of columns that are reduced."""
    layout = tile_layout(vector).reduce(1)
    return plgpu.ShapeDtypeStruct((WARPS,), jnp.float32, layout=layout)


def _sums(xs: tuple[jax.Array, ...], layout: Any, kind: Any, *, width: int) -> tuple:
    """Over so many lanes that have different elements."""

    @plgpu.inline_mgpu(arg_types=(layout,) * len(xs), return_type=(kind,) * len(xs))
    def sums(_, *xs):
        found = _over_lanes([_of_thread(x, _CHAINS // len(xs)) for x in xs], width)
        return tuple(_fragment(x, kind) for x in found)

    return tuple(sums(*xs))


def _of_thread(x: Any, most: int) -> Any:
    """The sum of a thread's own elements, in so many chains at most."""
    each = [e for register in x.registers.flat for e in _elements(register)]
    chains = [functools.reduce(_plus, each[i::most]) for i in range(min(most, len(each)))]
    while len(chains) > 1:
        chains = [functools.reduce(_plus, chains[i : i + 2]) for i in range(0, len(chains), 2)]
    return chains[0]


def _over_lanes(values: list[Any], width: int) -> list[Any]:
    """The sum of each value over so many lanes, in all lanes; no more values than lanes."""
    lane = arith.remui(thread(), constant(LANES))
    held = [(value, {k: 0}) for k, value in enumerate(values)]  # a lane that will have the sum
    distance = width
    while distance > 1:
        distance //= 2
        pairs = []
        for a, b in itertools.zip_longest(held[::2], held[1::2]):
            if b is None:
                pairs.append((_plus(a[0], mgpu_utils.shfl_bfly(a[0], distance)), a[1]))
                continue
            bit = arith.andi(lane, constant(distance))
            upper = arith.cmpi(arith.CmpIPredicate.ne, bit, constant(0))
            given, kept = (arith.select(upper, *x) for x in ((a[0], b[0]), (b[0], a[0])))
            where = a[1] | {k: at + distance for k, at in b[1].items()}
            pairs.append((_plus(kept, mgpu_utils.shfl_bfly(given, distance)), where))
        held = pairs
    ((found, where),) = held
    if len(values) == 1:
        return [found]
    return [_shown(found, where[k]) for k in range(len(values))]


def _plus(x: Any, y: Any) -> Any:
    return arith.addf(x, y, fastmath=arith.FastMathFlags.contract)


def _shown(x: Any, lane: int) -> Any:
    """What one lane of the warp has."""
    mask, last, idx = constant(2**32 - 1), constant(LANES - 1), nvvm.ShflKind.idx
    found = nvvm.shfl_sync(mask, arith.bitcast(i32(), x), constant(lane), last, idx)
    return arith.bitcast(ir.F32Type.get(), found)


def _elements(register: Any) -> list[Any]:
    """Of a vector."""
    (count,) = register.type.shape
    return [
        vectors.extract(register, dynamic_position=[], static_position=[i]) for i in range(count)
    ]


def _fragment(x: Any, kind: Any) -> Any:
    """An array that has this number wherever a thread has one."""
    x = vectors.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), x)
    layout = kind.layout.to_mgpu()
    registers = np.full(layout.registers_shape(kind.shape), x, dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
