"""Matmuls and reductions of a program, as data for tests of its precision.

They are read from StableHLO, what JAX hands the compiler: a step lowered for CUDA
(``jit(step).trace(...).lower(lowering_platforms=("cuda",))``) is read on a machine without a GPU.
"""

import dataclasses
import re

import jax

from jaxinfra.hlo.program import compiled_instructions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """One matmul (dot_general) of a program: element types and named scope."""

    lhs: str  # element types as MLIR and HLO write them: f32, bf16, f16
    rhs: str
    accumulator: str | None  # None: left to the backend
    result: str
    scope: str  # named scopes and primitive, outermost first


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """One reduction of a program, or the combining part of one scatter."""

    operation: str  # add, maximum, ...
    dtype: str
    scope: str


_TYPE = r"tensor<(?:[\d?]+x)*([a-z]\w*)>"
_DOT = re.compile(rf"stablehlo\.dot_general .*: \({_TYPE}, {_TYPE}\) -> {_TYPE}")
_ALGORITHM = re.compile(r"accumulation_type = (\w+)")
_REDUCE = re.compile(rf"stablehlo\.reduce\(.* applies stablehlo\.(\w+) .*: \({_TYPE}")
_REGION_OPERATION = re.compile(r"= stablehlo\.(\w+) %\w+, %\w+ : (?:\(.*-> )?" + _TYPE)
_LOCATION = re.compile(r"loc\((#loc\d*)\)$")
_NAMED_LOCATION = re.compile(r'^(#loc\d*) = loc\("([^"]*)"\(', re.MULTILINE)
# Products that a reader of dot_general would miss.
_HIDDEN = re.compile(r"stablehlo\.(custom_call @\w+|convolution|dot )")


def matmuls(lowered: jax.stages.Lowered) -> list[Matmul]:
    """Lists every matmul of a lowered program, forward and backward."""
    text, scopes = _lowered_text(lowered)
    found = []
    for line in text.splitlines():
        if match := _DOT.search(line):
            lhs, rhs, result = match.groups()
            algorithm = _ALGORITHM.search(line)
            found.append(
                Matmul(
                    lhs=lhs,
                    rhs=rhs,
                    accumulator=algorithm[1] if algorithm else None,
                    result=result,
                    scope=_scope(line, scopes),
                )
            )
    assert len(found) == text.count("stablehlo.dot_general"), "a dot_general was not understood"
    return found


def reductions(lowered: jax.stages.Lowered) -> list[Reduction]:
    """Lists every reduction and combining scatter of a lowered program; dtypes are of the sums."""
    text, scopes = _lowered_text(lowered)
    found = []
    lines = iter(text.splitlines())
    for line in lines:
        if match := _REDUCE.search(line):
            operation, dtype = match.groups()
            found.append(Reduction(operation=operation, dtype=dtype, scope=_scope(line, scopes)))
        elif re.search(r"stablehlo\.(scatter|reduce)\"?\(", line):
            # The region form: the operation is in the lines before the one that closes it.
            operation, end = None, ""
            for end in lines:
                if end.lstrip().startswith("})"):
                    break
                operation = operation or _REGION_OPERATION.search(end)
            if operation is not None:
                found.append(
                    Reduction(operation=operation[1], dtype=operation[2], scope=_scope(end, scopes))
                )
    return found


def opaque_operations(lowered: jax.stages.Lowered) -> list[str]:
    """Lists operations that may hide matmuls from ``matmuls``, such as library calls."""
    return sorted(set(_HIDDEN.findall(lowered.as_text())))


def _lowered_text(lowered: jax.stages.Lowered) -> tuple[str, dict[str, str]]:
    text = lowered.as_text(debug_info=True)
    return text, dict(_NAMED_LOCATION.findall(text))


def _scope(line: str, scopes: dict[str, str]) -> str:
    location = _LOCATION.search(line)
    return scopes.get(location[1], "") if location else ""


def compiled_matmuls(compiled: jax.stages.Compiled) -> list[Matmul]:
    """Lists the matmuls that are still HLO dots after compilation (on CPU, all of them)."""
    instructions, _ = compiled_instructions(compiled)
    dtypes = {each.name: each.result.partition("[")[0] for each in instructions}
    found = []
    for each in instructions:
        if each.opcode == "dot":
            operands = re.findall(r"%?([\w.-]+)[,)]", each.rest)[:2]
            algorithm = re.search(r"algorithm=dot_\w+_(\w+?)\b", each.rest)
            found.append(
                Matmul(
                    lhs=dtypes[operands[0]],
                    rhs=dtypes[operands[1]],
                    accumulator=algorithm[1] if algorithm else None,
                    result=dtypes[each.name],
                    scope=each.op_name,
                )
            )
    return found
