"""A program as data: its matmuls, its reductions and its collectives with their mesh axes.

Matmuls and reductions are read from StableHLO, what JAX hands the compiler: a step lowered for CUDA
(``jit(step).trace(...).lower(lowering_platforms=("cuda",))``) is read on a machine without a GPU.
Collectives exist only after partitioning, so they are read from compiled HLO. XLA writes their
groups of devices in three ways: listed (``{{0,1},{2,3}}``), as a reshaped and transposed iota
(``[2,2]<=[2,2]T(1,0)``), and as axes of a mesh whose names it made up (``mesh['a'=2,'b'=2]
{'b'}``). Its device numbers are positions in the mesh's order.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jaxinfra.hlo.collective_bytes import sent_bytes

_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*)\))? \{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


def first_group(rest: str) -> tuple[int, ...]:
    """Returns the device numbers of one group of a collective, from its instruction's text.

    A permute's group is a sender and its receiver. Raises ValueError for an unknown notation.
    """
    if match := _MESH.search(rest):
        return _of_mesh(*match.groups())
    if match := _IOTA.search(rest):
        groups, size, shape, order = match.groups()
        ids = np.arange(int(groups) * int(size)).reshape(_numbers(shape))
        if order:
            ids = ids.transpose(_numbers(order))
        return tuple(ids.reshape(int(groups), int(size))[0].tolist())
    if match := _LISTED.search(rest):
        return tuple(_numbers(match[1]))
    if match := _PAIRS.search(rest):
        return int(match[1]), int(match[2])
    raise ValueError(f"groups of a collective were not understood: {rest[:200]}")


def _of_mesh(mesh: str, device_ids: str | None, axes: str) -> tuple[int, ...]:
    sizes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)]
    if device_ids:
        raise ValueError(f"groups over a mesh with its own device order: {device_ids[:80]}")
    ids = np.arange(np.prod([size for _, size in sizes], dtype=int)).reshape([n for _, n in sizes])
    # A part of an axis, 'x':(2)4, is the second of its factors 2, 4, rest.
    chosen: dict[str, tuple[int, int]] = {}
    for name, before, part in _AXIS.findall(axes):
        chosen[name] = (int(before or 1), int(part or dict(sizes)[name]))
    index: list[slice | int] = []
    for name, size in sizes:
        before, part = chosen.get(name, (size, 1))
        step = size // (before * part)
        index.append(slice(0, part * step, step) if part > 1 else 0)
    return tuple(np.atleast_1d(ids[tuple(index)]).ravel().tolist())


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def axes_between(group: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes over which these devices differ.

    Args:
        mesh: axes and sizes in the mesh's order, in which the devices are numbered.
    """
    places = np.array(np.unravel_index(group, tuple(mesh.values())))
    return tuple(axis for axis, each in zip(mesh, places, strict=True) if len(np.unique(each)) > 1)


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of a compiled program; a combined one is listed once per array."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    dtype: str
    shape: tuple[int, ...]  # of one device's result
    times: int  # executions: the product of trip counts of the loops around it
    group: tuple[int, ...]  # devices of one group; of a permute a sender and its receiver
    covered_by: int  # matmuls, kernels and loops that the schedule runs between start and end
    scope: str
    instruction: str  # its name in the program, by which a trace knows it

    @property
    def num_devices(self) -> int:
        """Number of devices that take part in each group; 2 for a permute."""
        return len(self.group)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes that the collective goes over."""
        return axes_between(self.group, mesh)

    @property
    def array_bytes(self) -> float:
        """Bytes of the whole array in all executions, as ``sent_bytes`` takes it."""
        result = math.prod(self.shape) * element_bytes(self.dtype) * self.times
        return result * (self.num_devices if self.kind == "reduce-scatter" else 1)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all executions."""
        return sent_bytes(self.kind, self.array_bytes, self.num_devices)


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


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_CALLEES = re.compile(
    r"(?:body|calls|to_apply|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_TRIP_COUNT = re.compile(r'known_trip_count[^\d]*"?(\d+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_COLLECTIVES = {
    f"{kind}{start}": kind
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    for start in ("", "-start")
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledInstruction:
    """One instruction of compiled HLO, from its text."""

    computation: str
    name: str
    result: str
    opcode: str
    rest: str


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """Lists every collective of a compiled program, with its number of executions per call.

    Raises ValueError for a loop of unknown length around one.
    """
    instructions, entry = compiled_instructions(compiled)
    times = _executions(instructions, entry)
    found = []
    for position, each in enumerate(instructions):
        kind = _COLLECTIVES.get(each.opcode)
        if kind is None or each.computation not in times:
            continue
        count = times[each.computation]
        if count is None:
            raise ValueError(f"{each.name} is in a loop whose trip count the program does not say")
        group = first_group(each.rest)
        if len(group) == 1:
            continue  # over mesh axes of one device: a copy
        results = _results(each, kind)
        covered = _covered_by(instructions, position)
        # Each device sends an array to each other: one logical array, cut along a dim.
        if kind == "all-to-all":
            results = [(results[0][0], (len(results), *results[0][1]))]
        found += [
            Collective(
                kind=kind,
                dtype=dtype,
                shape=shape,
                times=count,
                group=group,
                covered_by=covered,
                scope=_op_name(each),
                instruction=each.name,
            )
            for dtype, shape in results
        ]
    return found


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
                    scope=_op_name(each),
                )
            )
    return found


def compiled_instructions(compiled: jax.stages.Compiled) -> tuple[list[CompiledInstruction], str]:
    """Returns all instructions, and the name of the computation where execution starts."""
    found, entry, computation = [], "", ""
    for line in (compiled.as_text() or "").splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[2]
            entry = computation if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            name, result, opcode, rest = match.groups()
            found.append(
                CompiledInstruction(
                    computation=computation, name=name, result=result, opcode=opcode, rest=rest
                )
            )
    return found, entry


def _executions(instructions: list[CompiledInstruction], entry: str) -> dict[str, int | None]:
    """Executions of each computation per call; None where a loop's length is unknown."""
    calls: dict[str, list[tuple[str, int | None]]] = {}
    for each in instructions:
        for callee in _callees(each):
            factor: int | None = 1
            if each.opcode == "while":
                trips = _TRIP_COUNT.search(each.rest)
                factor = int(trips[1]) if trips else None
            calls.setdefault(each.computation, []).append((callee, factor))
    times: dict[str, int | None] = {entry: 1}
    pending = [entry]
    while pending:
        caller = pending.pop()
        for callee, factor in calls.get(caller, ()):
            outer = times[caller]
            times[callee] = None if factor is None or outer is None else factor * outer
            pending.append(callee)
    return times


def _callees(each: CompiledInstruction) -> Iterator[str]:
    for names in _CALLEES.findall(each.rest):
        yield from re.findall(r"[\w.-]+", names)


def _results(each: CompiledInstruction, kind: str) -> list[tuple[str, tuple[int, ...]]]:
    shapes = [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _SHAPE.findall(each.result)
    ]
    # An asynchronous start returns its operands before its results, a permute's in one tuple.
    if each.result.startswith("((") or (each.opcode.endswith("-start") and "permute" in kind):
        shapes = shapes[math.ceil(len(shapes) / 2) :] if len(shapes) > 1 else shapes
    return shapes


def _covered_by(instructions: list[CompiledInstruction], start: int) -> int:
    """Matmuls and kernels that run beside a collective on a GPU; 0 where it is synchronous."""
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


def element_bytes(dtype: str) -> int:
    """Returns the bytes of an HLO element type, such as 2 for bf16 and 1 for pred and f8e4m3fn."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _op_name(each: CompiledInstruction) -> str:
    match = _OP_NAME.search(each.rest)
    return match[1] if match else ""
