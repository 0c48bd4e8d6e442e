"""Instructions of one thread that Pallas cannot say, for bodies of ``plgpu.inline_mgpu``.

Values are MLIR's: i32 registers, which may have two 16-bit numbers, f32, addresses.
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
    """The type of a register."""
    return ir.IntegerType.get_signless(32)


def constant(x: int) -> Any:
    """Makes a register that has these bits."""
    return mgpu.c(x - 2**32 if x >= 2**31 else x, i32())


def assembly(result: Any, operands: list[Any], text: str, constraints: str, *, pure: bool) -> Any:
    """Inlines PTX with its operands."""
    return llvm.inline_asm(
        result, operands, text, constraints, asm_dialect=0, has_side_effects=not pure
    )


def address(ref: Any) -> Any:
    """Address of a buffer in shared memory, in bytes, i32."""
    return llvm.ptrtoint(i32(), mgpu_utils.memref_ptr(ref))


def thread() -> Any:
    """This thread's number in its warpgroup."""
    return arith.remui(mgpu_utils.thread_idx(), constant(WARPGROUP))


def total(*terms: Any) -> Any:
    """A sum of i32 values, or of such values times constants."""
    values = [arith.muli(x[0], constant(x[1])) if isinstance(x, tuple) else x for x in terms]
    return functools.reduce(arith.addi, values)


def wait_for(place: Any, odd: Any, *, order: str = "") -> None:
    """Waits until the phase of a barrier in shared memory that has this parity is over.

    Args:
        order: what may be read after, as PTX says it; by default what this block has written.
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
    """Loads words by an instruction from a place; ``kind`` of its register is r or l."""
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
    """Widens bfloat16 or float16, i16, to f32."""
    f32 = ir.F32Type.get()
    if dtype == jnp.bfloat16:
        return arith.bitcast(f32, arith.shli(arith.extui(i32(), half), constant(16)))
    return assembly(f32, [half], "cvt.f32.f16 $0, $1;", "=f,h", pure=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Address of an array in global memory, i64."""

    value: Any


def address_of(ref: Any) -> Address:
    """Returns the address of an array."""
    i64 = ir.IntegerType.get_signless(64)
    return Address(llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref)))


def global_place(ref: Any, at: Any, size: int) -> Any:
    """Address of element ``at`` (i32) of ``size`` bytes in global memory, i64.

    Args:
        ref: the array, or its ``Address``.
    """
    i64 = ir.IntegerType.get_signless(64)
    base = ref if isinstance(ref, Address) else address_of(ref)
    byte = arith.muli(arith.extui(i64, at), mgpu.c(size, i64))
    return arith.addi(base.value, byte)


def global_number(ref: Any, at: Any, offset: int, dtype: jnp.dtype) -> Any:
    """Element ``at + offset`` of scales in global memory, f32."""
    f32, size = ir.F32Type.get(), dtype.itemsize
    place = global_place(ref, at, size)
    where = f"[$1+{size * offset}]"
    if size == 4:
        return assembly(f32, [place], f"ld.global.nc.f32 $0, {where};", "=f,l", pure=False)
    i16 = ir.IntegerType.get_signless(16)
    half = assembly(i16, [place], f"ld.global.nc.b16 $0, {where};", "=h,l", pure=False)
    return widened(half, dtype)


def global_words(ref: Any, at: Any, count: int) -> list[Any]:
    """Two or four words of global memory, from word ``at`` on."""
    return loaded(f"ld.global.nc.v{count}.b32", global_place(ref, at, 4), count, kind="l")


def widened_pair(pair: Any, dtype: jnp.dtype) -> list[Any]:
    """Two bfloat16 or float16 in a register as f32."""
    i16 = ir.IntegerType.get_signless(16)
    high = arith.shrui(pair, constant(16))
    return [widened(arith.trunci(i16, x), dtype) for x in (pair, high)]


def packed_pair(pair: list[Any], dtype: jnp.dtype) -> Any:
    """Two f32, rounded, in a register as bfloat16 or float16."""
    name = "bf16" if dtype == jnp.bfloat16 else "f16"
    return assembly(i32(), pair, f"cvt.rn.{name}x2.f32 $0, $2, $1;", "=r,f,f", pure=True)


def number(x: float) -> Any:
    """Makes an f32."""
    return mgpu.c(x, ir.F32Type.get())


def fused(a: Any, b: Any, c: Any) -> Any:
    """``a b + c`` in fp32, rounded once."""
    f32 = ir.F32Type.get()
    return assembly(f32, [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", pure=True)


def from_lane_xor(x: Any, distance: int) -> Any:
    """x of the lane whose number differs in this bit."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
    return assembly(ir.F32Type.get(), [x], text, "=f,f", pure=False)


def swiglu(gate: Any, up: Any) -> Any:
    """``silu(gate) * up``, f32, by the hardware's exponential."""
    f32 = ir.F32Type.get()
    power = arith.mulf(gate, number(-LOG2E))
    shrunk = assembly(f32, [power], "ex2.approx.ftz.f32 $0, $1;", "=f,f", pure=True)
    below = arith.addf(shrunk, number(1.0))
    silu = assembly(f32, [gate, below], "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", pure=True)
    return arith.mulf(silu, up)
