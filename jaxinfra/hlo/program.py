"""A compiled program as data: its collectives with their mesh axes, its matmuls, its launches.

Collectives exist only after partitioning, so they are read from compiled HLO. XLA writes their
groups of devices in three ways: listed (``{{0,1},{2,3}}``), as a reshaped and transposed iota
(``[2,2]<=[2,2]T(1,0)``), and as axes of a mesh with names of its own (``mesh['a'=2,'b'=2]
{'b'}``). Its device numbers are positions in the JAX mesh's device order.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypedDict

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
    """Returns the mesh axes in whose coordinate the devices of a group differ.

    Args:
        group: positions of devices in the mesh's order.
        mesh: axes and their sizes, the slowest-varying axis first.
    """
    places = np.array(np.unravel_index(group, tuple(mesh.values())))
    return tuple(axis for axis, each in zip(mesh, places, strict=True) if len(np.unique(each)) > 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of a compiled program; a combined one is listed once per array."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    dtype: str
    shape: tuple[int, ...]  # of one device's result
    times: int  # executions: the product of trip counts of the loops around it
    group: tuple[int, ...]  # devices of one group; for a permute, a sender and its receiver
    scope: str
    instruction: str  # its name in the program, which traces show too
    in_kernel: bool = False  # part of a matmul kernel, which sends while it multiplies

    @property
    def num_devices(self) -> int:
        """Number of devices that take part in each group; 2 for a permute."""
        return len(self.group)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes over which the collective communicates."""
        return axes_between(self.group, mesh)

    @property
    def array_bytes(self) -> float:
        """Bytes of the whole array, summed over all executions, as ``sent_bytes`` expects."""
        result = math.prod(self.shape) * element_bytes(self.dtype) * self.times
        return result * (self.num_devices if self.kind == "reduce-scatter" else 1)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends, summed over all executions."""
        return sent_bytes(self.kind, self.array_bytes, self.num_devices)


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_CALLEES = re.compile(
    r"(?:condition|body|calls|to_apply|true_computation|false_computation|branch_computations)="
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

    @property
    def op_name(self) -> str:
        """Place in the source program that the instruction comes from; may be empty."""
        return _first(_OP_NAME, self.rest)


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """Lists every collective of a compiled program, with its number of executions per call.

    Raises ValueError if a collective is in a loop of unknown length.
    """
    instructions, entry = compiled_instructions(compiled)
    times = _executions(instructions, entry)
    found = []
    for each in instructions:
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
                scope=each.op_name,
                instruction=each.name,
            )
            for dtype, shape in results
        ]
    return found


_KERNELS = {"all_gather_matmul": ("all-gather", 1), "matmul_reduce_scatter": ("reduce-scatter", 0)}
"""Collectives in matmul kernels, with the index of the result that is gathered or scattered."""


def collectives_in_kernels(compiled: jax.stages.Compiled) -> list[Collective]:
    """Lists the collectives within ``pallas_kernels.collective_matmul``'s kernels.

    They are apart from ``collectives``, because a trace has no time of theirs.
    """
    instructions, entry = compiled_instructions(compiled)
    times = _executions(instructions, entry)
    found = []
    for each in instructions:
        name = next((name for name in _KERNELS if f"/{name}/" in each.op_name), None)
        if name is None or each.opcode != "custom-call" or _MOSAIC not in each.rest:
            continue
        kind, index = _KERNELS[name]
        dtype, shape = _shapes(each.result)[index]
        count = times[each.computation]
        assert count is not None, "a loop over layers says its length"
        found.append(
            Collective(
                kind=kind,
                dtype=dtype,
                shape=shape,
                times=count,
                group=(0, 1),  # the kernels run on meshes of two devices
                scope=each.op_name,
                instruction=each.name,
                in_kernel=True,
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
    shapes = _shapes(each.result)
    # An asynchronous start returns its operands before its results, a permute's in one tuple.
    if each.result.startswith("((") or (each.opcode.endswith("-start") and "permute" in kind):
        shapes = shapes[math.ceil(len(shapes) / 2) :] if len(shapes) > 1 else shapes
    return shapes


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the element type and sizes of each array that a text names."""
    return [(dtype, tuple(_numbers(sizes))) for dtype, sizes in _SHAPE.findall(text)]


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def element_bytes(dtype: str) -> int:
    """Returns the bytes of an HLO element type, such as 2 for bf16 and 1 for pred and f8e4m3fn."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


_LIBRARY = re.compile(r'custom_call_target="__cublas\$')
_MOSAIC = 'custom_call_target="mosaic_gpu'
_NAME = re.compile(r"%([\w.-]+)")


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
    """Lists a program's matmuls: dots, fusions (their largest dot only) and cuBLAS calls."""
    instructions, _ = compiled_instructions(compiled)
    arrays = {(each.computation, each.name): _shapes(each.result) for each in instructions}
    callers = {
        called: each.name
        for each in instructions
        if each.opcode == "fusion"
        for called in _callees(each)
    }
    found: dict[str, MatmulShape] = {}
    for each in instructions:
        if each.opcode == "dot" or (each.opcode == "custom-call" and _LIBRARY.search(each.rest)):
            name = callers.get(each.computation, each.name)
            shape = _matmul_shape(each, name, arrays)
            if shape and (name not in found or shape["flops"] > found[name]["flops"]):
                found[name] = shape
    return list(found.values())


def _matmul_shape(
    each: CompiledInstruction,
    name: str,
    arrays: Mapping[tuple[str, str], list[tuple[str, tuple[int, ...]]]],
) -> MatmulShape | None:
    names = [(each.computation, operand) for operand in _NAME.findall(each.rest)[:2]]
    operands = [arrays[operand][0] for operand in names if arrays.get(operand)]
    if len(operands) < 2:
        return None  # written otherwise than known here: its trace is still of use
    dtype, lhs = operands[0]
    result = arrays[each.computation, each.name][0]
    depth = math.prod(lhs[dim] for dim in _dims(each.rest, "contracting"))
    batch = math.prod(lhs[dim] for dim in _dims(each.rest, "batch"))
    rows = math.prod(lhs) // max(1, depth * batch)
    whole = math.prod(result[1])
    return MatmulShape(
        instruction=name,
        dtype=dtype,
        batch=batch,
        rows=rows,
        depth=depth,
        columns=whole // max(1, rows * batch),
        flops=2.0 * whole * depth,
        bytes=float(
            sum(element_bytes(kind) * math.prod(sizes) for kind, sizes in [*operands, result])
        ),
    )


def _dims(rest: str, kind: str) -> list[int]:
    """Returns the dims of the first operand, from the text of a dot or a call of cuBLAS."""
    match = re.search(rf"lhs_{kind}_dim\w*\W*[{{\[]([^}}\]]*)", rest)
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []


_NO_KERNEL = {
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "partition-id",
    "replica-id", "iota", "add-dependency", "optimization-barrier", "domain",
}  # fmt: skip
_CALLING = ("while", "call", "conditional")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_METADATA = re.compile(r", metadata=\{[^}]*\}")


class Launch(TypedDict):
    """One instruction that runs on the device."""

    instruction: str
    kernel: str  # name of its kernel if XLA generates it; "" for a library's kernel
    alike: str  # equal for instructions of the same computation, which may share one kernel
    target: str  # of a custom call
    op_name: str
    loops: list[int]  # numbers of the loops around it, outermost first


def launches(compiled: jax.stages.Compiled) -> list[Launch]:
    """Lists instructions of a compiled program that launch kernels, in the order scheduled.

    Instructions in a loop's body are listed once.
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
            if each.opcode in _CALLING:
                inner = loops
                if each.opcode == "while":
                    num_loops += 1
                    inner = [*loops, num_loops]
                for called in _callees(each):
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
    if each.opcode == "fusion":
        text = _canonical(by_computation.get(next(_callees(each)), ()))
        alike = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Launch(
        instruction=each.name,
        kernel=kernel,
        alike="" if is_library else alike,
        target=_first(_TARGET, each.rest) or each.opcode,
        op_name=each.op_name,
        loops=loops,
    )


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
