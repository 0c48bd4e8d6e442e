"""A compiled program's instructions in execution order, its buffers, and when each is alive.

Instructions and sizes are read from XLA's own records: the module (``hlo.proto``: HloModuleProto)
and its buffer assignment (BufferAssignmentProto). These do not contain lifetimes. So each buffer is
followed through the scheduled program, with its tuples, loops and branches, to the last instruction
that reads it. A loop's body is walked once; a buffer that every iteration reads stays alive until
the loop ends.
"""

import collections
import contextlib
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

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
    """One instruction of a compiled HLO program."""

    id: int
    name: str
    opcode: str
    op_name: str  # its place in the source program; for an argument, its path
    shapes: tuple[str, ...]  # such as "bf16[8,128]"; for a tuple, those of its parts
    operands: tuple[int, ...]
    calls: tuple[int, ...]  # ids of computations
    tuple_index: int
    parameter: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """An HLO computation: instructions in the order they run."""

    operations: tuple[HloOperation, ...]
    root: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogicalBuffer:
    """An array that an instruction produces, and its place in an allocation."""

    id: int
    instruction: int
    shape_index: tuple[int, ...]
    allocation: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One contiguous piece of memory that a program uses."""

    index: int
    size: int
    is_parameter: bool
    parameter: int
    is_live_out: bool
    is_local: bool  # on a thread's stack, or a constant of the program


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """A compiled program: its computations, logical buffers and allocations."""

    entry: int
    computations: dict[int, Computation]
    allocations: dict[int, Allocation]
    buffers: tuple[LogicalBuffer, ...]
    total_bytes: int  # arguments, results that reuse none, temporaries: what XLA reports


def read_program(lowered: jax.stages.Lowered) -> CompiledProgram:
    """Compiles a program, and reads its instructions and buffers.

    The compiler dumps its records to a temporary directory, since on GPUs a compiled program does
    not give access to its buffers.

    Raises UnsupportedError if the compiler writes no records.
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
    """Compiles without the cache in the block; cached programs write no records."""
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
    """Returns a compiled step's bytes per device: arguments, temporaries, new results."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "CPU and CUDA compilers report their memory"
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


type _Value = dict[tuple[int, ...], frozenset[int]]
"""Buffers that may hold an instruction's result, by place in its tuple."""

_BATCH = ("batch", "rows", "targets_BT")  # arguments of training's and of serving's programs
_PASSED_ON = ("bitcast", "optimization-barrier", "add-dependency", "domain")


@dataclasses.dataclass(kw_only=True, slots=True)
class Life:
    """The time in which a buffer is alive, counted in instructions."""

    buffer: LogicalBuffer
    operation: HloOperation  # that produces it
    born: int
    dies: int
    uses: list[HloOperation]
    from_batch: bool  # whether its values depend on the batch

    @property
    def shape(self) -> str:
        """Element type and dims of the buffer, such as "bf16[8,128]"."""
        shapes, place = self.operation.shapes, self.buffer.shape_index
        return shapes[place[0]] if place and place[0] < len(shapes) else shapes[0]

    @property
    def place(self) -> tuple[int, int, int]:
        """Memory of the buffer (allocation, offset, size); equal for arrays updated in place."""
        return self.buffer.allocation, self.buffer.offset, self.buffer.size


@final
class Lives:
    """Lifetimes of a program's buffers, from a walk of its instructions in the order they run."""

    def __init__(self, program: CompiledProgram):
        self._program = program
        self._own: dict[int, list[LogicalBuffer]] = collections.defaultdict(list)
        for buffer in program.buffers:
            self._own[buffer.instruction].append(buffer)
        self._values: dict[int, _Value] = {}
        self._from_batch: dict[int, bool] = {}
        self.lives: dict[int, Life] = {}  # by the buffer's id
        self.order: list[HloOperation] = []
        self._compute(program.entry, [])
        for number in _all(self._values[program.computations[program.entry].root]):
            self.lives[number].dies = len(self.order)
        self.by_place: dict[tuple[int, int, int], list[Life]] = collections.defaultdict(list)
        self.made_by: dict[int, list[Life]] = collections.defaultdict(list)  # by instruction's id
        for life in self.lives.values():
            self.by_place[life.place].append(life)
            self.made_by[life.operation.id].append(life)

    def _compute(self, computation: int, arguments: list[int]) -> None:
        """Runs a computation on the values of these instructions; none for the entry."""
        for operation in self._program.computations[computation].operations:
            self.order.append(operation)
            if operation.opcode == "parameter" and arguments:
                source = arguments[operation.parameter]
                self._from_batch[operation.id] = self._from_batch[source]
                value = self._values[source]
            else:
                batch = operation.opcode == "parameter" and operation.op_name.startswith(_BATCH)
                self._from_batch[operation.id] = batch or any(
                    self._from_batch[place] for place in operation.operands
                )
                value = self._result(operation)
            self._values[operation.id] = value | self._born(operation)

    def _born(self, operation: HloOperation) -> _Value:
        now = len(self.order) - 1
        for buffer in self._own[operation.id]:
            self.lives[buffer.id] = Life(
                buffer=buffer,
                operation=operation,
                born=now,
                dies=now,
                uses=[],
                from_batch=self._from_batch[operation.id],
            )
        return {buffer.shape_index: frozenset({buffer.id}) for buffer in self._own[operation.id]}

    def _result(self, operation: HloOperation) -> _Value:
        """Returns the operands' buffers that an instruction passes on, without its own."""
        given = [self._values[place] for place in operation.operands]
        if operation.opcode == "tuple":
            parts = enumerate(given)
            return {(i, *rest): ids for i, value in parts for rest, ids in value.items()}
        if operation.opcode == "get-tuple-element":
            chosen = operation.tuple_index
            return {
                place[1:]: ids for place, ids in given[0].items() if place and place[0] == chosen
            }
        if operation.opcode in _PASSED_ON:
            return given[0]
        result: _Value = {}
        if operation.opcode == "while":
            return self._loop(operation)
        if operation.opcode in ("call", "conditional"):
            result = self._branches(operation)
        elif operation.opcode.endswith("-start"):
            result = {(0,): frozenset().union(*map(_all, given))} if given else {}
        elif operation.opcode.endswith("-done"):
            result = {(): _all(given[0])}
        self._use(operation, given)
        return result

    def _loop(self, operation: HloOperation) -> _Value:
        state = operation.operands[0]
        self._use(operation, [self._values[state]])
        for computation in operation.calls:
            self._compute(computation, [state])
            # What has no buffer of its own in the body is the same in every turn.
            first = self._program.computations[computation].operations
            given = next(each.id for each in first if each.opcode == "parameter")
            own = {buffer.shape_index for buffer in self._own[given]}
            kept = {place: ids for place, ids in self._values[state].items() if place not in own}
            self._use(operation, [kept])
        results = [
            self._values[self._program.computations[computation].root]
            for computation in operation.calls
        ]
        for value in results:
            self._use(operation, [value])
        # Of condition and body, what has the state's places is the body's.
        body = max(results, key=len)
        self._note_batch(operation, operation.calls)
        return _merged([self._values[state], body])

    def _branches(self, operation: HloOperation) -> _Value:
        is_call = operation.opcode == "call"
        results = []
        for place, computation in enumerate(operation.calls):
            # A conditional's first operand chooses; each branch is given one of the others.
            arguments = [*operation.operands] if is_call else [operation.operands[1 + place]]
            self._compute(computation, arguments)
            results.append(self._values[self._program.computations[computation].root])
        self._note_batch(operation, operation.calls)
        return _merged(results)

    def _note_batch(self, operation: HloOperation, computations: Iterable[int]) -> None:
        roots = [self._program.computations[each].root for each in computations]
        self._from_batch[operation.id] |= any(self._from_batch[root] for root in roots)

    def _use(self, operation: HloOperation, values: list[_Value]) -> None:
        now = len(self.order) - 1
        for number in frozenset().union(*map(_all, values)):
            life = self.lives[number]
            life.dies = max(life.dies, now)
            life.uses.append(operation)


def _all(value: _Value) -> frozenset[int]:
    return frozenset().union(*value.values())


def _merged(values: list[_Value]) -> _Value:
    places = {place for value in values for place in value}
    return {
        place: frozenset().union(*(value.get(place, frozenset()) for value in values))
        for place in places
    }
