"""Kernel launches of a compiled program, in the order of execution.

Their names identify a trace's kernels where a CUDA graph replays them without instruction names.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TypedDict

import jax

from jaxinfra.hlo.program import CompiledInstruction, compiled_instructions

_NO_KERNEL = {
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "partition-id",
    "replica-id", "iota", "add-dependency", "optimization-barrier", "domain",
}  # fmt: skip
_CALLED = {
    "while": r"(?:condition|body)=%?([\w.-]+)",
    "call": r"to_apply=%?([\w.-]+)",
    "conditional": r"(?:true_computation|false_computation)=%?([\w.-]+)",
}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_NAME = re.compile(r"%([\w.-]+)")


class Launch(TypedDict):
    """One instruction that runs on the device."""

    instruction: str
    kernel: str  # what its kernel would be called, if it is XLA's own; "" for a library's
    alike: str  # equal for instructions that compute alike: they may share the kernel of one
    target: str  # of a custom call
    op_name: str
    loops: list[int]  # numbers of the loops around it, outermost first


def launches(compiled: jax.stages.Compiled) -> list[Launch]:
    """Lists instructions of a compiled program that launch kernels, in the order scheduled.

    Those of a loop are listed once.
    """
    instructions, entry = compiled_instructions(compiled)
    by_computation: dict[str, list[CompiledInstruction]] = {}
    for each in instructions:
        by_computation.setdefault(each.computation, []).append(each)
    found: list[Launch] = []
    num_loops = 0

    def walk(computation: str, loops: list[int]) -> None:
        nonlocal num_loops
        for each in by_computation.get(computation, ()):
            if each.opcode in _CALLED:
                inner = loops
                if each.opcode == "while":
                    num_loops += 1
                    inner = [*loops, num_loops]
                for called in re.findall(_CALLED[each.opcode], each.rest):
                    walk(called, inner)
            elif each.opcode not in _NO_KERNEL and not each.opcode.endswith("-done"):
                found.append(_launch(each, loops, by_computation))

    walk(entry, [])
    return found


def _launch(
    each: CompiledInstruction,
    loops: list[int],
    by_computation: Mapping[str, list[CompiledInstruction]],
) -> Launch:
    is_library = each.opcode in ("custom-call", "copy") or each.opcode.endswith("-start")
    kernel = "" if is_library else each.name.replace(".", "_").replace("-", "_")
    alike = kernel
    if called := _first(_CALLS, each.rest):
        text = _canonical(by_computation.get(called, ()))
        alike = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Launch(
        instruction=each.name,
        kernel=kernel,
        alike="" if is_library else alike,
        target=_first(_TARGET, each.rest) or each.opcode,
        op_name=_first(_OP_NAME, each.rest),
        loops=loops,
    )


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _canonical(body: Iterable[CompiledInstruction]) -> str:
    """A fused computation without the names that tell it from its likes."""
    numbers: dict[str, str] = {}
    lines = []
    for place, each in enumerate(body):
        numbers[each.name] = f"%{place}"
        rest = _NAME.sub(
            lambda match: numbers.get(match[1], "%other"), _METADATA.sub("", each.rest)
        )
        lines.append(f"{each.result} {each.opcode} {rest}")
    return "\n".join(lines)
