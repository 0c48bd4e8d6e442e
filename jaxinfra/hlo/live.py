"""When each buffer of a program is alive.

The compiler's own record of it is not part of what executables hand out, so uses are followed
through the scheduled program: through tuples, loops and branches to the last instruction that
reads a buffer. A loop's body is walked once; what all its turns read stays alive until it ends.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import final

from jaxinfra.hlo.buffers import CompiledProgram, HloOperation, LogicalBuffer

type _Value = dict[tuple[int, ...], frozenset[int]]
"""Buffers that may hold an instruction's result, by place in its tuple."""

_BATCH = ("batch", "rows", "targets_BT")  # arguments of training's and of serving's programs
_PASSED_ON = ("bitcast", "optimization-barrier", "add-dependency", "domain")


@dataclasses.dataclass(kw_only=True, slots=True)
class Life:
    """A buffer's time, in instructions run."""

    buffer: LogicalBuffer
    operation: HloOperation
    born: int
    dies: int
    uses: list[HloOperation]
    from_batch: bool  # whether its values depend on the batch

    @property
    def shape(self) -> str:
        """Element type and dims, such as "bf16[8,128]"."""
        shapes, place = self.operation.shapes, self.buffer.shape_index
        return shapes[place[0]] if place and place[0] < len(shapes) else shapes[0]

    @property
    def place(self) -> tuple[int, int, int]:
        """Allocation, offset and size, which arrays that are made in place share."""
        return self.buffer.allocation, self.buffer.offset, self.buffer.size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lives:
    """All buffers of a program, and its instructions in the order they run."""

    lives: dict[int, Life]  # by the buffer's id
    order: list[HloOperation]
    by_place: dict[tuple[int, int, int], list[Life]]
    made_by: dict[int, list[Life]]  # by the instruction's id


def follow(program: CompiledProgram) -> Lives:
    """The lives of a program's buffers."""
    walk = _Walk(program)
    walk.run()
    by_place: dict[tuple[int, int, int], list[Life]] = collections.defaultdict(list)
    made_by: dict[int, list[Life]] = collections.defaultdict(list)
    for life in walk.lives.values():
        by_place[life.place].append(life)
        made_by[life.operation.id].append(life)
    return Lives(lives=walk.lives, order=walk.order, by_place=by_place, made_by=made_by)


@final
class _Walk:
    def __init__(self, program: CompiledProgram):
        self._program = program
        self._own: dict[int, list[LogicalBuffer]] = collections.defaultdict(list)
        for buffer in program.buffers:
            self._own[buffer.instruction].append(buffer)
        self._values: dict[int, _Value] = {}
        self._from_batch: dict[int, bool] = {}
        self.lives: dict[int, Life] = {}
        self.order: list[HloOperation] = []

    def run(self) -> None:
        self._compute(self._program.entry, [])
        end = len(self.order)
        root = self._program.computations[self._program.entry].root
        for number in _all(self._values[root]):
            self.lives[number].dies = end

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
        """What an instruction passes on of its operands; its own buffers are not among it."""
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
