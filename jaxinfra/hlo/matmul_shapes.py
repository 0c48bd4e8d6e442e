"""Shapes of a compiled program's matmuls, by the instruction names that traces use."""

import math
import re
from collections.abc import Mapping
from typing import TypedDict

import jax

from jaxinfra.hlo.program import CompiledInstruction, compiled_instructions, element_bytes

_LIBRARY = re.compile(r'custom_call_target="__cublas\$')
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"calls=%?([\w.-]+)")


class MatmulShape(TypedDict):
    """One matmul: ``batch`` products of [rows, depth] by [depth, columns]."""

    instruction: str
    dtype: str  # of its first operand, as HLO writes it: bf16, f32, f8e4m3fn
    batch: int
    rows: int
    depth: int
    columns: int
    flops: float
    bytes: float  # of operands and result


def matmul_shapes(compiled: jax.stages.Compiled) -> list[MatmulShape]:
    """Lists every matmul: a dot, a fusion (by its largest dot), or a call of cuBLAS."""
    instructions, _ = compiled_instructions(compiled)
    arrays = {(each.computation, each.name): _ARRAY.findall(each.result) for each in instructions}
    callers = {
        called[1]: each.name
        for each in instructions
        if each.opcode == "fusion" and (called := _CALLED.search(each.rest))
    }
    found: dict[str, MatmulShape] = {}
    for each in instructions:
        if each.opcode == "dot" or (each.opcode == "custom-call" and _LIBRARY.search(each.rest)):
            name = callers.get(each.computation, each.name)
            shape = _shape(each, name, arrays)
            if shape and (name not in found or shape["flops"] > found[name]["flops"]):
                found[name] = shape
    return list(found.values())


def _shape(
    each: CompiledInstruction,
    name: str,
    arrays: Mapping[tuple[str, str], list[tuple[str, str]]],
) -> MatmulShape | None:
    names = [(each.computation, operand) for operand in _NAME.findall(each.rest)[:2]]
    operands = [arrays[operand][0] for operand in names if arrays.get(operand)]
    if len(operands) < 2:
        return None  # written otherwise than known here: its trace is still of use
    dtype, lhs = operands[0][0], _sizes(operands[0][1])
    result = arrays[each.computation, each.name][0]
    depth = math.prod(lhs[dim] for dim in _dims(each.rest, "contracting"))
    batch = math.prod(lhs[dim] for dim in _dims(each.rest, "batch"))
    rows = math.prod(lhs) // max(1, depth * batch)
    whole = math.prod(_sizes(result[1]))
    return MatmulShape(
        instruction=name,
        dtype=dtype,
        batch=batch,
        rows=rows,
        depth=depth,
        columns=whole // max(1, rows * batch),
        flops=2.0 * whole * depth,
        bytes=float(
            sum(
                element_bytes(kind) * math.prod(_sizes(sizes))
                for kind, sizes in [*operands, result]
            )
        ),
    )


def _dims(rest: str, kind: str) -> list[int]:
    """Returns the dims of the first operand, from the text of a dot or a call of cuBLAS."""
    match = re.search(rf"lhs_{kind}_dim\w*\W*[{{\[]([^}}\]]*)", rest)
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)
