"""Per-thread instructions that Pallas lacks: dequantizing codes and multiplying MMA fragments.

Values are MLIR values: i32 registers of two 16-bit numbers or of codes, and f32 sums.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import arith, llvm
from pallas_kernels.hopper.threads import assembly, constant, i32, loaded, widened

from .weight import WeightCode


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dequantizer:
    """Converter of weight codes to numbers of x's dtype, in one thread's registers.

    An integer code is put in the low mantissa bits of a number whose last bit is worth 1
    (``unit``), and that number is subtracted. This is exact, as codes and zero points are integers.
    FP8's bits are moved to the wider format's exponent and mantissa, then multiplied to correct the
    exponent bias.
    """

    code: WeightCode
    dtype: jnp.dtype

    @property
    def name(self) -> str:
        """Name of the dtype in PTX instructions."""
        return "bf16" if self.dtype == jnp.bfloat16 else "f16"

    @property
    def unit(self) -> int:
        """The number whose last mantissa bit is worth 1 (128 or 1024), twice in a register."""
        return 0x43004300 if self.dtype == jnp.bfloat16 else 0x64006400

    def zero_pair(self, zero: Any | None) -> Any:
        """Returns a register with ``unit`` plus a zero point (i32; None: 8), twice."""
        if zero is None:
            return constant(self.unit | 0x00080008)
        return arith.ori(arith.muli(zero, constant(0x00010001)), constant(self.unit))

    def pair(self, operation: str, a: Any, b: Any) -> Any:
        """Applies ``sub`` or ``mul`` to two registers of two 16-bit numbers each."""
        return assembly(
            i32(), [a, b], f"{operation}.{self.name}x2 $0, $1, $2;", "=r,r,r", pure=True
        )

    def numbers(self, words: list[Any], zeros: tuple[Any, Any]) -> list[Any]:
        """Dequantizes codes to the MMA's left operand for 16 rows of the weight: four registers.

        Args:
            words: one word of 4-bit codes, or two words of 8-bit codes.
            zeros: zero points of columns g and g + 8, from ``zero_pair``.
        """
        if self.code is WeightCode.INT4:
            return [self.two(words[0], r, zeros[r & 1]) for r in range(4)]
        return [self.two(words[r >> 1], r & 1) for r in range(4)]

    def two(self, word: Any, place: int, zero: Any | None = None) -> Any:
        """Dequantizes two codes of a word to a register of two numbers, the first in the low bits.

        The codes are nibbles ``place`` and ``place + 4`` of int4, less ``zero``; bytes ``2 place``
        and ``2 place + 1`` of int8; bytes ``1 - place`` and ``3 - place`` of e4m3.
        """
        if self.code is WeightCode.INT4:
            return self._int4(word, place, self.zero_pair(None) if zero is None else zero)
        return (self._int8 if self.code is WeightCode.INT8 else self._e4m3)(word, place)

    def _int4(self, word: Any, place: int, zero: Any) -> Any:
        shifted = arith.shrui(word, constant(4 * place)) if place else word
        code = assembly(
            i32(), [shifted], f"lop3.b32 $0, $1, 0x000F000F, {self.unit:#x}, 0xEA;", "=r,r",
            pure=True,
        )  # fmt: skip
        return self.pair("sub", code, zero)

    def _int8(self, word: Any, place: int) -> Any:
        select = 0x4342 if place else 0x4140
        if self.dtype == jnp.bfloat16:
            text = f"prmt.b32 $0, $1, 0x43, {select:#x};"
            both = assembly(i32(), [word], text, "=r,r", pure=True)
            # The sign, in the lowest bit of the exponent, doubles the number that is taken away.
            number = arith.andi(both, constant(0xFF7FFF7F))
            return self.pair("sub", number, arith.andi(both, constant(0xFF80FF80)))
        word = arith.xori(word, constant(0x80808080))
        number = assembly(i32(), [word], f"prmt.b32 $0, $1, 0x64, {select:#x};", "=r,r", pure=True)
        return self.pair("sub", number, constant(0x64806480))

    def _e4m3(self, word: Any, place: int) -> Any:
        shift, mask, ratio = 4, 0x07F007F0, 0x7B807B80
        if self.dtype != jnp.bfloat16:
            shift, mask, ratio = 1, 0x3F803F80, 0x5C005C00
        if place:
            word = arith.shli(word, constant(8))
        size = arith.andi(arith.shrui(word, constant(shift)), constant(mask))
        sign = arith.andi(word, constant(0x80008000))
        return self.pair("mul", arith.ori(sign, size), constant(ratio))

    def product(self, a: list[Any], b: list[Any], sums: list[Any]) -> list[Any]:
        """Computes ``a b + sums`` by one MMA: a is 16 columns by 16 rows, b has 8 rows of x."""
        f32 = ir.F32Type.get()
        found = assembly(
            llvm.StructType.get_literal([f32] * 4),
            [*a, *b, *sums],
            f"mma.sync.aligned.m16n8k16.row.col.f32.{self.name}.{self.name}.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            pure=True,
        )
        return [llvm.extractvalue(f32, found, [i]) for i in range(4)]


def load_matrices(place: Any, offset: int) -> list[Any]:
    """Loads four right MMA fragments, each 8 rows of x by 8 of K, from shared memory."""
    return loaded("ldmatrix.sync.aligned.m8n8.x4.shared.b16", place, 4, kind="r", offset=offset)


def load_words(place: Any, offset: int, count: int) -> list[Any]:
    """Loads one, two or four 32-bit words from shared memory."""
    if count == 1:
        return [assembly(i32(), [place], f"ld.shared.b32 $0, [$1+{offset}];", "=r,r", pure=False)]
    return loaded(f"ld.shared.v{count}.b32", place, count, kind="r", offset=offset)


def load_number(place: Any, offset: int, dtype: jnp.dtype) -> Any:
    """Loads a scale (as f32) or a zero point (as i32) from shared memory."""
    f32 = ir.F32Type.get()
    if dtype == jnp.float32:
        return assembly(f32, [place], f"ld.shared.f32 $0, [$1+{offset}];", "=f,r", pure=False)
    i16 = ir.IntegerType.get_signless(16)
    half = assembly(i16, [place], f"ld.shared.b16 $0, [$1+{offset}];", "=h,r", pure=False)
    if dtype == jnp.uint16:
        return arith.extui(i32(), half)
    return widened(half, dtype)
