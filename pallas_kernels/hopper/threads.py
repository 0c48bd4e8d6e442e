"""Instructions of a single thread that Pallas cannot express, for use in ``plgpu.inline_mgpu``.

Values are MLIR values: i32 registers (also of two 16-bit numbers), f32, and addresses.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir

from .machine import WARPGROUP
from .mosaic import arith, llvm, mgpu, mgpu_utils
from .tile import LOG2E


def i32() -> Any:
    """Returns MLIR's type of a 32-bit integer register."""
    return ir.IntegerType.get_signless(32)


def constant(x: int) -> Any:
    """Returns an i32 constant whose register has the bits of the Python integer x."""
    return mgpu.c(x - 2**32 if x >= 2**31 else x, i32())


def assembly(result: Any, operands: list[Any], text: str, constraints: str, *, pure: bool) -> Any:
    """Inlines PTX text with its operands, and returns the result's register."""
    return llvm.inline_asm(
        result, operands, text, constraints, asm_dialect=0, has_side_effects=not pure
    )


def address(ref: Any) -> Any:
    """Returns the byte address (i32) of a buffer in shared memory."""
    return llvm.ptrtoint(i32(), mgpu_utils.memref_ptr(ref))


def thread() -> Any:
    """Returns this thread's index in its warpgroup, i32 from 0 to 127."""
    return arith.remui(mgpu_utils.thread_idx(), constant(WARPGROUP))


def one_thread() -> Any:
    """Returns whether this is the one thread of its warpgroup that issues copies."""
    return mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP)


def barrier_at(ref: Any, which: Any) -> Any:
    """Returns barrier number ``which`` in shared memory; waits on it must pass the parity."""
    phases: Any = None
    return mgpu_utils.BarrierRef(mgpu_utils.memref_ptr(ref), which, phases, 1)


def total(*terms: Any) -> Any:
    """Returns the sum of i32 values; a pair (value, int) stands for their product."""
    values = [arith.muli(x[0], constant(x[1])) if isinstance(x, tuple) else x for x in terms]
    return functools.reduce(arith.addi, values)


def wait_for(place: Any, odd: Any, *, order: str = "") -> None:
    """Waits until a barrier in shared memory has completed its phase of parity ``odd``.

    Args:
        order: PTX's memory ordering of the wait; by default the block's writes are then visible.
    """
    text = f"""
{{
.reg .pred over;
WAIT:
mbarrier.try_wait.parity{order}.shared::cta.b64 over, [$0], $1;
@!over bra WAIT;
}}
"""
    assembly(None, [place, odd], text, "r,r,~{memory}", pure=False)


def loaded(instruction: str, place: Any, count: int, *, kind: str, offset: int = 0) -> list[Any]:
    """Loads ``count`` words; ``kind`` is that of the address: r (32 bits) or l (64 bits)."""
    names = ",".join(f"${i}" for i in range(count))
    where = f"${count}+{offset}" if kind == "r" else f"${count}"
    found = assembly(
        llvm.StructType.get_literal([i32()] * count),
        [place],
        f"{instruction} {{{names}}}, [{where}];",
        ",".join(["=r"] * count + [kind]),
        pure=False,
    )
    return [llvm.extractvalue(i32(), found, [i]) for i in range(count)]


def widened(half: Any, dtype: jnp.dtype) -> Any:
    """Converts a bfloat16 or float16, in an i16 register, to f32."""
    f32 = ir.F32Type.get()
    if dtype == jnp.bfloat16:
        return arith.bitcast(f32, arith.shli(arith.extui(i32(), half), constant(16)))
    return assembly(f32, [half], "cvt.f32.f16 $0, $1;", "=f,h", pure=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """An address in global memory (i64), accepted in place of a reference to an array."""

    value: Any


def address_of(ref: Any) -> Address:
    """Returns the address (i64) of an array in global memory, as an ``Address``."""
    i64 = ir.IntegerType.get_signless(64)
    return Address(llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref)))


def global_place(ref: Any, at: Any, size: int) -> Any:
    """Returns the address (i64) of element ``at`` (i32) of an array; elements have ``size`` bytes.

    Args:
        ref: the array, or its ``Address``.
    """
    i64 = ir.IntegerType.get_signless(64)
    base = ref if isinstance(ref, Address) else address_of(ref)
    byte = arith.muli(arith.extui(i64, at), mgpu.c(size, i64))
    return arith.addi(base.value, byte)


def global_number(ref: Any, at: Any, offset: int, dtype: jnp.dtype) -> Any:
    """Loads element ``at + offset`` of an array in global memory as f32."""
    f32, size = ir.F32Type.get(), dtype.itemsize
    place = global_place(ref, at, size)
    where = f"[$1+{size * offset}]"
    if size == 4:
        return assembly(f32, [place], f"ld.global.nc.f32 $0, {where};", "=f,l", pure=False)
    i16 = ir.IntegerType.get_signless(16)
    half = assembly(i16, [place], f"ld.global.nc.b16 $0, {where};", "=h,l", pure=False)
    return widened(half, dtype)


def global_words(ref: Any, at: Any, count: int) -> list[Any]:
    """Loads two or four 32-bit words from global memory, from word ``at`` on."""
    return loaded(f"ld.global.nc.v{count}.b32", global_place(ref, at, 4), count, kind="l")


def widened_pair(pair: Any, dtype: jnp.dtype) -> list[Any]:
    """Splits a register of two bfloat16 or float16 into two f32."""
    i16 = ir.IntegerType.get_signless(16)
    high = arith.shrui(pair, constant(16))
    return [widened(arith.trunci(i16, x), dtype) for x in (pair, high)]


def packed_pair(pair: list[Any], dtype: jnp.dtype) -> Any:
    """Rounds two f32 to bfloat16 or float16 and packs them into one register."""
    name = "bf16" if dtype == jnp.bfloat16 else "f16"
    return assembly(i32(), pair, f"cvt.rn.{name}x2.f32 $0, $2, $1;", "=r,f,f", pure=True)


def number(x: float) -> Any:
    """Returns a Python float as an f32 constant."""
    return mgpu.c(x, ir.F32Type.get())


def fused(a: Any, b: Any, c: Any) -> Any:
    """Computes ``a b + c`` in fp32, rounded once (fused multiply-add)."""
    f32 = ir.F32Type.get()
    return assembly(f32, [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", pure=True)


def from_lane_xor(x: Any, distance: int) -> Any:
    """Returns x of the lane whose number is this lane's xor ``distance`` (a warp shuffle)."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
    return assembly(ir.F32Type.get(), [x], text, "=f,f", pure=False)


def exp2(x: Any) -> Any:
    """Computes 2 to the power of an f32 with the hardware's exponential."""
    return assembly(ir.F32Type.get(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", pure=True)


def swiglu(gate: Any, up: Any) -> Any:
    """Computes ``silu(gate) * up`` in f32 with the hardware's exponential."""
    f32 = ir.F32Type.get()
    below = arith.addf(exp2(arith.mulf(gate, number(-LOG2E))), number(1.0))
    silu = assembly(f32, [gate, below], "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", pure=True)
    return arith.mulf(silu, up)
