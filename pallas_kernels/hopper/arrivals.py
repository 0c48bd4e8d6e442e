"""Words in a GPU's memory that other GPUs write, and waits for them without a barrier."""

from typing import Any

from .mosaic import llvm
from .threads import assembly, i32

NOT_YET = -1
"""Bits of a word that has not arrived: a NaN of 32 bits, or two of 16, that no addition returns."""
_MOST_LOADS = 25_000_000  # of 0.7 us each: without a GPU's words the launch fails after 20 s


def await_words(words: list[Any], place: Any) -> list[Any]:
    """Loads one or four words again until none is ``NOT_YET``, and returns them.

    The launch fails if one does not arrive within about 20 s.

    Args:
        words: what was loaded from ``place``, an address (i64) in global memory.
    """
    count = len(words)
    copied = [f"mov.b32 ${i}, ${count + 1 + i};" for i in range(count)]
    seen = [f"setp.eq.or.u32 late, ${i}, {NOT_YET}, late;" for i in range(1, count)]
    single = count == 1
    size, loaded = ("b32", "$0") if single else ("v4.b32", "{$0,$1,$2,$3}")
    lines = [
        "{", ".reg .pred late;", ".reg .pred over;", ".reg .b32 left;", *copied,
        f"mov.u32 left, {_MOST_LOADS};", "AGAIN:", f"setp.eq.u32 late, $0, {NOT_YET};", *seen,
        "@!late bra DONE;", "sub.u32 left, left, 1;", "setp.eq.u32 over, left, 0;", "@over trap;",
        f"ld.relaxed.sys.global.{size} {loaded}, [${count}];", "bra AGAIN;", "DONE:", "}",
    ]  # fmt: skip
    kinds = ",".join(["=r"] * count + ["l"] + ["r"] * count + ["~{memory}"])
    kind = i32() if single else llvm.StructType.get_literal([i32()] * count)
    found = assembly(kind, [place, *words], "\n".join(lines), kinds, pure=False)
    return [found] if single else [llvm.extractvalue(i32(), found, [i]) for i in range(count)]
