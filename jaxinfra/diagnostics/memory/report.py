"""Report of a compiled program's memory by role and parameter, at its peak and over time."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.trace import scope_of
from jaxinfra.hlo.buffers import CompiledProgram, Life, Lives, LogicalBuffer, read_program
from jaxinfra.training.gradients import AccumulatedGradient, GradientFunction
from jaxinfra.training.job import Job

WEIGHTS = "weights"
COPIES = "weight copies"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
STATE = "model state"
ACTIVATIONS = "activations"
CACHES = "caches"
BATCH = "batch"
COLLECTIVES = "collective buffers"
TEMPORARIES = "temporaries"
RESULTS = "results"
FRAGMENTATION = "fragmentation"

ROLES = (
    WEIGHTS, COPIES, GRADIENTS, OPTIMIZER, STATE, ACTIVATIONS, CACHES, BATCH, COLLECTIVES,
    TEMPORARIES, RESULTS, FRAGMENTATION,
)  # fmt: skip
"""All roles, in the order shown."""

_ARGUMENTS = (
    (r"^(state\.)?optimizer", OPTIMIZER),
    (r"^state\.model_state", STATE),
    (r"cache|pages|pools", CACHES),
    (r"^(batch|rows|targets_BT)", BATCH),
    (r"parameters|frozen|weights|tree", WEIGHTS),
)
_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-\w+)"
    r"(-start|-done)?"
)


def argument_role(path: str) -> str:
    """Returns a program argument's role from its path, such as ``state.optimizer[0].mu['w']``."""
    return next((role for pattern, role in _ARGUMENTS if re.search(pattern, path)), STATE)


def argument_name(path: str) -> str:
    """Returns an argument's readable name: ``mlp/up`` for ``state.parameters['mlp']['up']``."""
    keys = re.findall(r"\['?([^'\]]+)'?\]", path)
    return "/".join(keys) if "[" in path else path


def buffer_role(life: Life, lives: Lives) -> str:
    """Returns the role of a temporary buffer that a compiled program allocates."""
    life = _of_loop(life, lives)
    operation = life.operation
    if _COLLECTIVE.fullmatch(operation.opcode):
        return COLLECTIVES
    in_optimizer = _in_optimizer(operation.op_name)
    feeds_optimizer = any(_in_optimizer(use.op_name) for use in life.uses)
    if in_optimizer or not life.from_batch:
        return OPTIMIZER if in_optimizer or feeds_optimizer else COPIES
    if feeds_optimizer:
        return GRADIENTS
    forward = "jvp(" in operation.op_name and "transpose(" not in operation.op_name
    if forward and any("transpose(" in use.op_name for use in life.uses):
        return ACTIVATIONS
    return TEMPORARIES


def _of_loop(life: Life, lives: Lives) -> Life:
    """The loop's result that a buffer becomes part of, in its place; else the buffer itself."""
    operation = life.operation
    loops = {use.id for use in life.uses if use.opcode == "while"}
    # A loop body's arguments are stored in the loop's place, and come out of the next loop to end.
    is_state = operation.opcode == "parameter"
    if loops or is_state:
        for other in lives.by_place[life.place]:
            result = other.operation
            next_loop = is_state and result.opcode == "while" and other.born > life.born
            if other is not life and (result.id in loops or next_loop):
                return _of_loop(other, lives)
    return life


def buffer_name(life: Life, lives: Lives, *, depth: int = 3) -> str:
    """Returns the named scope that makes a buffer, such as ``mlp``, or else one that reads it."""
    life = _of_loop(life, lives)
    name = _scope([life.operation.op_name])
    if name == "other":
        name = _scope(use.op_name for use in life.uses)
    if name == "other" and depth:
        for use in life.uses:
            for other in lives.made_by.get(use.id, ()):
                found = buffer_name(other, lives, depth=depth - 1)
                if other is not life and found != "other":
                    return found
    return name


def _in_optimizer(op_name: str) -> bool:
    return scope_of(op_name) == "optimizer"


def _scope(op_names: Iterable[str]) -> str:
    for op_name in op_names:
        scope = scope_of(op_name).removesuffix(" backward").removesuffix(" recomputed")
        if scope != "other":
            return scope
    return "other"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BytesPerParameter:
    """Bytes per parameter of a job's weights, gradients and optimizer state, before sharding.

    Temporary copies that each layer makes while it runs are not counted.
    """

    weights: float  # as kept between steps
    gradients: float  # of one micro-batch, in the dtype that the backward pass returns
    summed: float  # gradients summed over micro-batches; 0 with one micro-batch
    moments: float  # of the optimizer, with their quantization scales
    average: float  # running mean of the weights; 0 if none is kept

    @property
    def total(self) -> float:
        """Bytes per parameter, summed over all roles."""
        return sum(dataclasses.astuple(self))

    def describe(self) -> str:
        """Describes the bytes per parameter of each role in one line."""
        parts = [
            f"{name} {size:.4g}" for name, size in dataclasses.asdict(self).items() if size > 0
        ]
        return f"{self.total:.4g} bytes per parameter: {', '.join(parts)}"


def bytes_per_parameter(job: Job) -> BytesPerParameter | None:
    """Counts the bytes of a job's state and gradients per parameter, from their traced shapes.

    Returns None unless the job trains all parameters on given tokens without pipeline stages.
    """
    config = job.config
    has_own_loss = config.preferences is not None or config.rl is not None
    if job.model.frozen or config.mesh.num_stages > 1 or has_own_loss:
        return None
    state, training = job.abstract_state(), job.config.training
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.parameters))

    def gradient_bytes(gradient: GradientFunction, rows: int) -> int:
        found = jax.eval_shape(
            gradient,
            state.parameters,
            state.model_state,
            _batch((rows, training.sequence_length)),
            key=jax.eval_shape(lambda: jax.random.key(0)),
            loss_scale=state.loss_scale.value,
        )
        return _bytes(found.gradients)

    rows, parts = training.batch_size, training.accumulation
    of_one = dataclasses.replace(training, accumulation=1, batch_size=rows // parts)
    one = AccumulatedGradient(job.model, training=of_one, placement=job.placement)
    return BytesPerParameter(
        weights=_bytes(state.parameters) / count,
        gradients=gradient_bytes(one, rows // parts) / count,
        summed=gradient_bytes(job.gradient, rows) / count if parts > 1 else 0.0,
        moments=_bytes(state.optimizer) / count,
        average=_bytes(state.average) / count,
    )


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _batch(shape: tuple[int, int]) -> Any:
    """Replaces a batch's arrays by their shapes."""
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.dtype("float32"))
    return Batch(tokens=ids, targets=ids, segment_ids=ids, positions=ids, weights=weights)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """Bytes of the buffers of one role and name."""

    role: str
    name: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LiveBuffer:
    """One array that is alive when a program's memory is fullest, or one of its arguments."""

    role: str
    name: str
    shape: str
    bytes: int
    made_by: str  # the operation in the source program; for an argument, its path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """A compiled program's memory on one device, by role, by name and over time."""

    total_bytes: int  # as the compiler reports: arguments, results, temporaries
    parts: tuple[MemoryPart, ...]  # sum exactly to the total; largest first
    largest: tuple[LiveBuffer, ...]  # largest first
    peak_operation: str  # the operation that runs when memory is fullest
    peak_scope: str  # its named scope, such as "mlp backward"
    moments: tuple[int, ...]  # instructions of the program at which memory changes
    timeline: dict[str, tuple[int, ...]]  # role to bytes at each of ``moments``
    peak_moment: int  # an index into ``moments``

    def by_role(self) -> dict[str, int]:
        """Bytes per device of each role in the program, in the order of ``ROLES``."""
        sums: dict[str, int] = collections.Counter()
        for part in self.parts:
            sums[part.role] += part.bytes
        return {role: sums[role] for role in ROLES if role in sums}

    def as_json(self) -> dict[str, Any]:
        """Returns the report as JSON values, without the timeline."""
        return {
            "total_bytes": self.total_bytes,
            "by_role": self.by_role(),
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "largest": [dataclasses.asdict(each) for each in self.largest],
            "peak": {"operation": self.peak_operation, "scope": self.peak_scope},
        }

    def explained(self) -> str:
        """Explains in two sentences when memory peaks and which arrays fill it."""
        roles = sorted(self.by_role().items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{role} {size / self.total_bytes:.0%}" for role, size in roles)
        held = self.largest[0]
        return (
            f"{gib(self.total_bytes)} per device, fullest in {self.peak_scope} "
            f"({self.peak_operation}): {shares}. The largest array is {held.shape} of {held.name} "
            f"({held.role}, {gib(held.bytes)})."
        )


def gib(size: float) -> str:
    """Formats a number of bytes as GiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"


def report_memory(lowered: jax.stages.Lowered) -> MemoryReport:
    """Compiles a lowered program and reports its memory by role.

    Raises UnsupportedError where the compiler reports no memory.
    """
    program = read_program(lowered)
    return report_program(program, Lives(program))


def report_program(program: CompiledProgram, lives: Lives) -> MemoryReport:
    """Reports an already compiled program's memory by role."""
    arguments = _arguments(program)
    results = sum(
        each.size
        for each in program.allocations.values()
        if each.is_live_out and not each.is_parameter and not each.is_local
    )
    heap = _Heap(program, lives)
    held, now = heap.at_peak()
    fixed = sum(each.bytes for each in arguments) + results
    parts: collections.Counter[tuple[str, str]] = collections.Counter()
    for each, size in [*((a, a.bytes) for a in arguments), *held]:
        parts[each.role, each.name] += size
    parts[RESULTS, "loss and metrics"] += results
    # The rest of the total holds no live array.
    parts[FRAGMENTATION, "between arrays"] += program.total_bytes - sum(parts.values())
    assert fixed <= program.total_bytes
    everything = [*arguments, *(each for each, _ in held)]
    operation = lives.order[now]
    timeline = heap.timeline()
    for each in arguments:
        timeline[each.role] = timeline.get(each.role, np.zeros(len(heap.moments))) + each.bytes
    return MemoryReport(
        total_bytes=program.total_bytes,
        parts=tuple(
            MemoryPart(role=role, name=name, bytes=size)
            for (role, name), size in parts.most_common()
            if size
        ),
        largest=tuple(sorted(everything, key=lambda each: -each.bytes)[:10]),
        peak_operation=operation.op_name.rpartition("/")[2] or operation.name,
        peak_scope=_peak_scope(lives, now),
        moments=tuple(heap.moments),
        timeline={role: tuple(map(int, timeline[role])) for role in ROLES if role in timeline},
        peak_moment=heap.moments.index(now),
    )


def _peak_scope(lives: Lives, now: int) -> str:
    """The named scope that runs at a moment, or the next one before it."""
    from_here = lives.order[now::-1]
    scopes = (scope_of(each.op_name) for each in from_here)
    return next((scope for scope in scopes if not scope.startswith("other")), "the program's start")


def _arguments(program: CompiledProgram) -> list[LiveBuffer]:
    paths = {
        operation.parameter: operation
        for operation in program.computations[program.entry].operations
        if operation.opcode == "parameter"
    }
    found = []
    for each in program.allocations.values():
        if each.is_parameter:
            operation = paths[each.parameter]
            found.append(
                LiveBuffer(
                    role=argument_role(operation.op_name),
                    name=argument_name(operation.op_name),
                    shape=operation.shapes[0],
                    bytes=each.size,
                    made_by=operation.op_name,
                )
            )
    return found


@final
class _Heap:
    """A program's temporary memory: the buffer that owns each byte range at each moment.

    Arrays that share a place, as a loop's state does with what its body makes of it, count once:
    for the one made last.
    """

    def __init__(self, program: CompiledProgram, lives: Lives):
        temporary = {
            index
            for index, each in program.allocations.items()
            if not (each.is_parameter or each.is_live_out or each.is_local)
        }
        self._lives = lives
        self._all = [
            life
            for life in lives.lives.values()
            if life.buffer.allocation in temporary and life.buffer.size
        ]
        self._roles = np.array([ROLES.index(buffer_role(life, lives)) for life in self._all] + [-1])
        bounds = sorted({end for life in self._all for end in _ends(life.buffer)})
        self._places = {bound: place for place, bound in enumerate(bounds)}
        self._sizes = np.array(
            [b[1] - a[1] if a[0] == b[0] else 0 for a, b in itertools.pairwise(bounds)],
            dtype=np.int64,
        )
        self.moments = sorted({t for life in self._all for t in (life.born, life.dies)}) or [0]
        self._by_role, self._owners = self._run()

    def _run(self) -> tuple[np.ndarray, np.ndarray]:
        """Computes bytes by moment and role, and the owners of memory at its peak."""
        owners = np.full(len(self._sizes), -1)
        born, dying = collections.defaultdict(list), collections.defaultdict(list)
        for number, life in enumerate(self._all):
            born[life.born].append(number)
            dying[life.dies].append(number)
        alive: dict[int, None] = {}
        rows, best, fullest = [], -1, owners
        for moment in self.moments:
            for number in born[moment]:
                alive[number] = None
                owners[self._stretch(number)] = number
            used = owners >= 0
            sums = np.bincount(
                self._roles[owners[used]], weights=self._sizes[used], minlength=len(ROLES)
            )
            rows.append(sums)
            if sums.sum() > best:
                best, fullest = sums.sum(), owners.copy()
            for number in dying[moment]:
                del alive[number]
                stretch = self._stretch(number)
                owners[stretch] = np.where(owners[stretch] == number, -1, owners[stretch])
                for other in alive:  # those that share its place, the last made on top
                    shared = self._stretch(other)
                    empty = owners[shared] == -1
                    if empty.any():
                        owners[shared] = np.where(empty, other, owners[shared])
        return np.array(rows), fullest

    def _stretch(self, number: int) -> slice:
        begin, end = _ends(self._all[number].buffer)
        return slice(self._places[begin], self._places[end])

    def at_peak(self) -> tuple[list[tuple[LiveBuffer, int]], int]:
        """Returns the arrays alive at peak memory, their unshared bytes, and the peak's moment."""
        totals = self._by_role.sum(axis=1) if len(self._by_role) else np.zeros(1)
        found = []
        for number in np.unique(self._owners[self._owners >= 0]):
            life = self._all[number]
            held = LiveBuffer(
                role=buffer_role(life, self._lives),
                name=buffer_name(life, self._lives),
                shape=life.shape,
                bytes=life.buffer.size,
                made_by=life.operation.op_name or life.operation.name,
            )
            found.append((held, int(self._sizes[self._owners == number].sum())))
        return found, self.moments[int(totals.argmax())]

    def timeline(self) -> dict[str, np.ndarray]:
        """Returns the heap's bytes by role at each of ``moments``."""
        return {
            role: self._by_role[:, place]
            for place, role in enumerate(ROLES)
            if self._by_role[:, place].any()
        }


def _ends(buffer: LogicalBuffer) -> tuple[tuple[int, int], tuple[int, int]]:
    begin = buffer.allocation, buffer.offset
    return begin, (buffer.allocation, buffer.offset + buffer.size)
