"""Work that a compiled program's schedule runs beside a collective."""

import re
from collections.abc import Sequence

from jaxinfra.hlo.program import CompiledInstruction


def covered_by(instructions: Sequence[CompiledInstruction], name: str) -> int:
    """Matmuls, kernels and loops that run beside a collective on a GPU; 0 if it is synchronous."""
    start = next(place for place, each in enumerate(instructions) if each.name == name)
    started = instructions[start]
    if not started.opcode.endswith("-start"):
        return 0
    end = started.opcode.removesuffix("-start") + "-done"
    covered = 0
    for each in instructions[start + 1 :]:
        if each.opcode == end and re.match(rf"%?{re.escape(started.name)}\b", each.rest):
            return covered
        covered += each.opcode in ("custom-call", "while", "dot", "conditional") or (
            each.opcode == "fusion" and "gemm" in each.rest
        )
    raise ValueError(f"{started.name} starts and does not end")
