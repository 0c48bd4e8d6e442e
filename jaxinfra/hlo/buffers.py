"""A compiled program's instructions in the order they run, and the memory they were given.

Read from XLA's own records: the module (``hlo.proto``: HloModuleProto) and its buffer assignment
(BufferAssignmentProto).
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxinfra.errors import UnsupportedError
from jaxinfra.hlo import wire

_TYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64",
    10: "f16", 11: "f32", 12: "f64", 16: "bf16", 19: "f8e5m2", 20: "f8e4m3fn",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HloOperation:
    """One instruction."""

    id: int
    name: str
    opcode: str
    op_name: str  # where in the source program it comes from; of an argument its path
    shapes: tuple[str, ...]  # such as "bf16[8,128]"; of a tuple those of its parts
    operands: tuple[int, ...]
    calls: tuple[int, ...]  # ids of computations
    tuple_index: int
    parameter: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """Instructions in the order they run."""

    operations: tuple[HloOperation, ...]
    root: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogicalBuffer:
    """An array that an instruction makes, in a part of an allocation."""

    id: int
    instruction: int
    shape_index: tuple[int, ...]
    allocation: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Memory that a program is given as one piece."""

    index: int
    size: int
    is_parameter: bool
    parameter: int
    is_live_out: bool
    is_local: bool  # on a thread's stack, or a constant of the program


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """A program with its buffers."""

    entry: int
    computations: dict[int, Computation]
    allocations: dict[int, Allocation]
    buffers: tuple[LogicalBuffer, ...]
    total_bytes: int  # arguments, results that reuse none, temporaries: what XLA reports


def read_program(lowered: jax.stages.Lowered) -> CompiledProgram:
    """Compiles a program and reads what it was compiled to.

    The compiler writes its records to a directory that is removed afterwards: compiled programs
    themselves hand out their buffers on the CPU, and not through CUDA's plugin.

    Raises UnsupportedError where the compiler writes none.
    """
    with tempfile.TemporaryDirectory(prefix="jaxinfra-memory-") as directory, _no_cache():
        options = {"xla_dump_to": directory, "xla_dump_hlo_as_proto": True}
        compiled = lowered.compile(compiler_options=options)
        module, assignment = _records(Path(directory))
    analysis = compiled.memory_analysis()
    if analysis is None or not assignment:
        raise UnsupportedError(
            "this backend's compiler writes no buffer assignment; CPU and CUDA compilers do"
        )
    entry, computations = _module(module)
    allocations, buffers = _assignment(assignment)
    return CompiledProgram(
        entry=entry,
        computations=computations,
        allocations=allocations,
        buffers=buffers,
        total_bytes=step_bytes(compiled),
    )


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Within, programs are compiled: of what is read from the cache nothing is written."""
    used = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", used)
        compilation_cache.reset_cache()


def _records(directory: Path) -> tuple[bytes, bytes]:
    """Module and buffer assignment (HloProto) of the one program that has one."""
    for file in sorted(directory.glob("*after_optimizations.hlo.pb")):
        record = wire.message(file.read_bytes())
        if assignment := wire.blob(record, 3):
            return wire.blob(record, 1), assignment
    return b"", b""


def _module(data: bytes) -> tuple[int, dict[int, Computation]]:
    module = wire.message(data)
    schedule = {}
    for entry in wire.blobs(wire.message(wire.blob(module, 7)), 1):
        pair = wire.message(entry)
        schedule[wire.number(pair, 1)] = wire.numbers(wire.message(wire.blob(pair, 2)), 1)
    computations = {}
    for raw in wire.blobs(module, 3):
        each = wire.message(raw)
        by_id = {o.id: o for o in map(_operation, wire.blobs(each, 2))}
        number = wire.number(each, 5)
        order = schedule.get(number, list(by_id))
        computations[number] = Computation(
            operations=tuple(by_id[place] for place in order), root=wire.number(each, 6)
        )
    return wire.number(module, 6), computations


def _operation(data: bytes) -> HloOperation:
    each = wire.message(data)
    return HloOperation(
        id=wire.number(each, 35),
        name=wire.text(each, 1),
        opcode=wire.text(each, 2),
        op_name=wire.text(wire.message(wire.blob(each, 7)), 2),
        shapes=_shapes(wire.blob(each, 3)),
        operands=tuple(wire.numbers(each, 36)),
        calls=tuple(wire.numbers(each, 38)),
        tuple_index=wire.number(each, 13),
        parameter=wire.number(each, 9),
    )


def _shapes(data: bytes) -> tuple[str, ...]:
    each = wire.message(data)
    if parts := wire.blobs(each, 4):
        return tuple(" ".join(_shapes(part)) for part in parts)
    kind = _TYPES.get(wire.number(each, 2), "?")
    return (f"{kind}[{','.join(map(str, wire.numbers(each, 3)))}]",)


def _assignment(data: bytes) -> tuple[dict[int, Allocation], tuple[LogicalBuffer, ...]]:
    assignment = wire.message(data)
    defined = {}
    for raw in wire.blobs(assignment, 1):
        each = wire.message(raw)
        location = wire.message(wire.blob(each, 3))
        place = wire.number(location, 4), tuple(wire.numbers(location, 3))
        defined[wire.number(each, 1)] = place
    allocations, buffers = {}, []
    for raw in wire.blobs(assignment, 3):
        each = wire.message(raw)
        index = wire.number(each, 1)
        allocations[index] = Allocation(
            index=index,
            size=wire.number(each, 2),
            is_parameter=bool(wire.number(each, 5)),
            parameter=wire.number(each, 6),
            is_live_out=bool(wire.number(each, 7)),
            is_local=bool(wire.number(each, 3) or wire.number(each, 12)),
        )
        for part in map(wire.message, wire.blobs(each, 9)):
            number = wire.number(part, 1)
            instruction, shape_index = defined[number]
            buffers.append(
                LogicalBuffer(
                    id=number,
                    instruction=instruction,
                    shape_index=shape_index,
                    allocation=index,
                    offset=wire.number(part, 2),
                    size=wire.number(part, 3),
                )
            )
    return allocations, tuple(buffers)


def step_bytes(compiled: jax.stages.Compiled) -> int:
    """A compiled step's bytes per device: arguments, results that reuse none, temporaries."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "CPU and CUDA compilers report their memory"
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
