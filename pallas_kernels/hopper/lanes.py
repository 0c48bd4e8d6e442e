"""Sums over the lanes of a warp, several at a time, on a Hopper GPU.

A sum of one number over 32 lanes takes five shuffles; four numbers one after another take 20.
Summed together, four numbers take six: each of the first two steps halves the count of numbers that
a lane still sums. Four more shuffles broadcast the results to all lanes. An SM shuffles one
register of one warp per clock, and LayerNorm's gradient spent a sixth of its time on shuffles.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from .machine import LANES, WARPS
from .mosaic import arith, mgpu, mgpu_utils, nvvm, plgpu
from .mosaic import vector as vectors
from .threads import constant, i32, thread

_CHAINS = 8  # of additions that a thread makes at the same time, of all sums; more would spill


def sums_over_lanes(*xs: jax.Array, layout: Any, width: int, result: Any) -> tuple[jax.Array, ...]:
    """Sums several fp32 arrays over each warp's lanes at once: one number per warp and array, [4].

    Args:
        layout: register layout of the arrays.
        width: number of lanes that hold different elements.
        result: register layout of the sums.
    """
    kind = plgpu.ShapeDtypeStruct((WARPS,), jnp.float32, layout=result)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(xs), return_type=(kind,) * len(xs))
    def sums(_, *xs):
        found = _over_lanes([_of_thread(x, _CHAINS // len(xs)) for x in xs], width)
        return tuple(_fragment(x, kind) for x in found)

    return tuple(sums(*xs))


def _of_thread(x: Any, most: int) -> Any:
    """Returns the sum of a thread's own elements, added in at most ``most`` chains."""
    each = [e for register in x.registers.flat for e in _elements(register)]
    chains = [functools.reduce(_plus, each[i::most]) for i in range(min(most, len(each)))]
    while len(chains) > 1:
        chains = [functools.reduce(_plus, chains[i : i + 2]) for i in range(0, len(chains), 2)]
    return chains[0]


def _over_lanes(values: list[Any], width: int) -> list[Any]:
    """Sums each value over ``width`` lanes, in all lanes; there are no more values than lanes."""
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
    """Returns the value of x that one lane of the warp has."""
    mask, last, idx = constant(2**32 - 1), constant(LANES - 1), nvvm.ShflKind.idx
    found = nvvm.shfl_sync(mask, arith.bitcast(i32(), x), constant(lane), last, idx)
    return arith.bitcast(ir.F32Type.get(), found)


def _elements(register: Any) -> list[Any]:
    """Returns the elements of a vector register."""
    (count,) = register.type.shape
    return [
        vectors.extract(register, dynamic_position=[], static_position=[i]) for i in range(count)
    ]


def _fragment(x: Any, kind: Any) -> Any:
    """Returns an array that has this number wherever a thread has one."""
    x = vectors.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), x)
    layout = kind.layout.to_mgpu()
    registers = np.full(layout.registers_shape(kind.shape), x, dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
