"""The graph of one repetition of a block pattern, and the choice of values that layers keep.

The graph has each operation's cost and the values that the backward pass reads. From it follow the
bytes and the recomputation time of keeping a set of values. Sets on the Pareto front of bytes and
time are options; dynamic programming over layers and bytes chooses an option for each layer.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxinfra.model.definition import ModelDefinition, merged
from jaxinfra.model.flops import attention_flops
from jaxinfra.model.passes import Pass
from jaxinfra.model.recomputation import ALWAYS, ATTENTION, SHARED_NAMES
from jaxinfra.ops.attention import ATTENTION_NAMES, is_attention_result
from jaxinfra.runtime.devices import DevicePeak

_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "shard_map")
_FREE = (
    "name",
    "reshape",
    "squeeze",
    "expand_dims",
    "sharding_constraint",
    "bitcast_convert_type",
)
"""Primitives that only reshape or rename their input."""
_INLINED_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockOperation:
    """An operation of a block's graph: its cost, its input values and its output values."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float = 0.0  # of matmuls
    is_kernel: bool = False  # a matmul, or a kernel: reads and writes whole arrays in memory
    is_free: bool = False  # no work: its output is its input, as in a reshape
    name: str | None = None  # name that ``checkpoint_name`` gave its one output


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockGraph:
    """Graph of the operations and values of one repetition of a block pattern. Values are numbered;
    those that no operation makes are inputs.
    """

    operations: tuple[BlockOperation, ...]  # in an order in which they can run
    sizes: tuple[int, ...]  # bytes of each value
    stored: frozenset[int]  # values that XLA would write to memory: read or made by kernels
    needed: frozenset[int]  # values that the backward pass reads
    makers: Mapping[int, int]  # from a value to the index of the operation that makes it

    @property
    def names(self) -> tuple[str, ...]:
        """Names of values that may be kept, in the order in which they are made."""
        found = [each.name for each in self.operations if each.name is not None]
        others = (*ALWAYS, *SHARED_NAMES)
        return tuple(name for name in dict.fromkeys(found) if name not in others)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A set of values that a repetition may keep, with its cost."""

    names: tuple[str, ...]  # names of the kept values, without any that the backward pass skips
    bytes: int  # of kept values, per device and repetition
    seconds: float  # predicted time of recomputation per repetition
    matmuls: int  # number of recomputed matmuls per repetition


def block_graph(jaxpr: Any, *, attention: float) -> BlockGraph:
    """Builds a repetition's graph from ``jax.make_jaxpr`` of its ``jax.vjp``.

    Args:
        jaxpr: (inputs) -> (result, residuals...). Inputs are always kept, so they count no bytes.
        attention: FLOPs of the attention kernel that makes the value named ``ATTENTION``, as a
            kernel's FLOPs cannot be counted in a jaxpr.
    """
    builder = _Builder()
    env = {variable: builder.value(variable.aval) for variable in jaxpr.jaxpr.invars}
    env |= {variable: builder.value(variable.aval) for variable in jaxpr.jaxpr.constvars}
    builder.inline(jaxpr.jaxpr, env)
    free = {env[each] for each in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.constvars)}
    found = [env[out] for out in jaxpr.jaxpr.outvars[1:] if isinstance(out, core.Var)]
    makers = {out: i for i, each in enumerate(builder.operations) for out in each.outputs}
    operations = _with_attention(builder.operations, makers, attention)

    def source(value: int) -> int:
        while value in makers and operations[makers[value]].is_free:
            value = operations[makers[value]].inputs[0]
        return value

    kernels = [each for each in operations if each.is_kernel]
    read = {source(value) for each in kernels for value in each.inputs}
    return BlockGraph(
        operations=tuple(operations),
        sizes=tuple(builder.sizes),
        stored=frozenset(read).union(*(each.outputs for each in kernels)),
        needed=frozenset(found) - free,
        makers=makers,
    )


def cost_of_keeping(
    graph: BlockGraph, names: Collection[str] | None, peak: DevicePeak, *, shards: int = 1
) -> Option:
    """Computes the bytes and recomputation time of keeping the values of these names. The backward
    pass recomputes all else that it reads, from kept values and inputs.

    Args:
        names: names of values to keep, such as those of a fixed policy (``kept_by``); None: all
            values that the backward pass reads.
        shards: number of devices that values and work are divided over.
    """
    pending = [value for value in graph.needed if value in graph.makers]
    if names is None:
        size = sum(graph.sizes[value] for value in pending)
        return Option(names=(), bytes=size // shards, seconds=0.0, matmuls=0)
    seen, again, kept = set(pending), set(), set()
    size = 0
    while pending:
        value = pending.pop()
        at = graph.makers[value]
        each = graph.operations[at]
        if each.name in names or each.name in ALWAYS:
            kept.add(each.name)
            size += graph.sizes[value]
            continue
        again.add(at)
        for before in each.inputs:
            if before not in seen and before in graph.makers:
                seen.add(before)
                pending.append(before)
    operations = [graph.operations[at] for at in again]
    moved = {
        value
        for each in operations
        for value in (*each.outputs, *(each.inputs if each.is_kernel else ()))
        if value in graph.stored
    }
    matmul_s = sum(each.flops for each in operations) / (MATMUL_SHARE * peak.bf16_flops)
    moved_bytes = sum(graph.sizes[value] for value in moved)
    return Option(
        names=tuple(name for name in graph.names if name in kept),
        bytes=size // shards,
        seconds=(matmul_s + moved_bytes / (MEMORY_SHARE * peak.hbm_bytes_per_s)) / shards,
        matmuls=sum(each.flops > 0 for each in operations),
    )


@dataclasses.dataclass(slots=True)
class _Builder:
    sizes: list[int] = dataclasses.field(default_factory=list)
    operations: list[BlockOperation] = dataclasses.field(default_factory=list)

    def value(self, aval: Any) -> int:
        itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
        self.sizes.append(math.prod(getattr(aval, "shape", ())) * itemsize)
        return len(self.sizes) - 1

    def inline(self, jaxpr: Any, env: dict[Any, int]) -> None:
        """Appends the jaxpr's operations; ``env`` has its inputs and gets all its variables."""
        for equation in jaxpr.eqns:
            inputs = [each for each in equation.invars if isinstance(each, core.Var)]
            inner = _inner(equation)
            if inner is not None:
                # Literals are values of no bytes.
                given = [
                    env[each] if isinstance(each, core.Var) else self.value(None)
                    for each in equation.invars
                ]
                within = dict(zip(inner.invars, given, strict=True))
                within |= {each: self.value(each.aval) for each in inner.constvars}
                self.inline(inner, within)
                for out, result in zip(equation.outvars, inner.outvars, strict=True):
                    is_value = isinstance(result, core.Var)
                    env[out] = within[result] if is_value else self.value(out.aval)
                continue
            for out in equation.outvars:
                env[out] = self.value(out.aval)
            flops = _flops(equation)
            name = equation.primitive.name
            self.operations.append(
                BlockOperation(
                    inputs=tuple(env[each] for each in inputs),
                    outputs=tuple(env[each] for each in equation.outvars),
                    flops=flops,
                    is_kernel=flops > 0 or _has_kernel(equation),
                    is_free=name in _FREE and len(inputs) == 1,
                    name=_named(equation) if name == "name" else None,
                )
            )
            if is_attention_result(equation.primitive):
                self._name_attention(equation, env)

    def _name_attention(self, equation: Any, env: dict[Any, int]) -> None:
        """cuDNN's results have no name: behind each comes an operation that names it."""
        for out in equation.outvars:
            named = self.value(out.aval)
            self.operations.append(
                BlockOperation(inputs=(env[out],), outputs=(named,), name=ATTENTION, is_free=True)
            )
            env[out] = named


def _inner(equation: Any) -> Any:
    """The jaxpr of an equation that is a call, None for another."""
    if equation.primitive.name in (*_INLINED, *_INLINED_RULES):
        inner = next(
            equation.params[key]
            for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")
            if key in equation.params
        )
        return getattr(inner, "jaxpr", inner)
    return None


def _named(equation: Any) -> str:
    name = equation.params["name"]
    return ATTENTION if name in ATTENTION_NAMES else name


def _flops(equation: Any) -> float:
    """FLOPs of matmuls, in loops and branches too. Kernels count by the shapes they are called
    with.
    """
    name, outs = equation.primitive.name, equation.outvars
    if name == "dot_general":
        ((contracted, _), _) = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * math.prod(outs[0].aval.shape) * math.prod(shape[i] for i in contracted)
    if name in ("ragged_dot", "ragged_dot_general"):
        return 2.0 * math.prod(outs[0].aval.shape) * equation.invars[0].aval.shape[-1]
    if _is_opaque(equation):
        return _kernel_flops(equation)
    inner = [sum(map(_flops, each.eqns)) for each in core.jaxprs_in_params(equation.params)]
    if not inner:
        return 0.0
    if name == "cond":
        return max(inner)
    return sum(inner) * equation.params.get("length", 1)


def _kernel_flops(equation: Any) -> float:
    """FLOPs of a kernel that multiplies rows [..., K] with [N, K], [K, N] or groups of them; else
    0.
    """
    shapes = [each.aval.shape for each in equation.invars if len(each.aval.shape) >= 2]
    best = 0.0
    for out in equation.outvars:
        rows, columns = out.aval.shape[:-1], out.aval.shape[-1:]
        for a in shapes:
            if len(a) != len(out.aval.shape) or a[:-1] != rows or not columns:
                continue
            if any(b is not a and set(b[-2:]) == {a[-1], *columns} for b in shapes):
                best = max(best, 2.0 * math.prod(out.aval.shape) * a[-1])
    return best


def _is_opaque(equation: Any) -> bool:
    """Whether it is a kernel of ours or of a library, whose work is not in the jaxpr."""
    name = equation.primitive.name
    kernels = ("pallas_call", "core_map", "mpmd_map", "custom_call", "ffi_call")
    return name in kernels or is_attention_result(equation.primitive)


def _has_kernel(equation: Any) -> bool:
    """Whether it is such a kernel, or a call or a branch with one."""
    return _is_opaque(equation) or any(
        _has_kernel(each) for inner in core.jaxprs_in_params(equation.params) for each in inner.eqns
    )


def _with_attention(
    operations: list[BlockOperation], makers: Mapping[int, int], flops: float
) -> list[BlockOperation]:
    """The operations, of which the kernel that makes attention's result has its FLOPs."""
    found = list(operations)
    for each in operations:
        if each.name != ATTENTION:
            continue
        # Between a kernel and the name of its result stand casts, reshapes and barriers.
        pending, seen = list(each.inputs), set(each.inputs)
        while pending:
            value = pending.pop(0)
            if value not in makers:
                continue
            at = makers[value]
            if operations[at].is_kernel:
                if operations[at].flops == 0:
                    found[at] = dataclasses.replace(operations[at], flops=flops)
                break
            new = [before for before in operations[at].inputs if before not in seen]
            seen.update(new)
            pending += new
    return found


def trace_repetition(
    model: ModelDefinition, stack: int, *, rows: int, length: int, number: int = 0
) -> BlockGraph:
    """Traces the graph of a repetition of a stack's pattern from shapes alone.

    Args:
        rows, length: rows and tokens per row of a micro-batch.
        number: index of the repetition; some repetitions may not use 8-bit matmuls.
    """
    config = model.config
    first = sum(len(each.pattern) for each in config.stacks[:stack])
    places = slice(first, first + len(config.stacks[stack].pattern))
    decoder = model.bind(merged(model.shapes, model.state_shapes))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    shape = (rows, length, config.model_dim)
    x_BTD = jax.ShapeDtypeStruct(shape, model.execution.policy.compute)

    def repetition(x_BTD, parameters, positions, segment_ids):
        given = Pass(positions_BT=positions, segment_ids_BT=segment_ids)
        ropes = decoder.rope_tables(positions)[places]
        run, _ = decoder.repetition(places, given, ropes=ropes, number=number)

        def result(x_BTD, parameters):
            (x_BTD, _), sums = run((x_BTD, None), (None, parameters, None))
            return x_BTD, sums

        return jax.vjp(result, x_BTD, parameters)

    shapes: Any = ids  # in the place of arrays
    _, stacked = decoder.repetition(places, Pass(positions_BT=shapes), ropes=())
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    jaxpr = jax.make_jaxpr(repetition)(x_BTD, one, ids, ids)
    flops = sum(attention_flops(each.mixer, length) for each in config.stacks[stack].pattern)
    return block_graph(jaxpr, attention=rows * flops / len(config.stacks[stack].pattern))


MOST_NAMES = 14
"""Most names of which all sets are tried. Beyond it, the names whose keeping saves the least are
dropped."""
BINS = 4096
"""Number of steps that the budget is divided into; bytes are rounded up to a step."""
MATMUL_SHARE = 0.62
"""Fraction of the tensor cores' peak that matmuls and attention reach at the power limit.
Measured on an H200: recomputed operations of a step of 8B shapes.
"""
MEMORY_SHARE = 0.85
"""Fraction of the memory bandwidth that elementwise operations reach."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Consecutive repetitions that keep the same values."""

    options: tuple[Option, ...]  # fewest bytes first
    count: int = 1
    # Per repetition, kept whatever the option: its input, and its weights if they are cast early.
    fixed_bytes: int = 0
    gradient_bytes: int = 0  # per repetition, from its backward pass to the step's end
    policies: tuple[Option, ...] = ()  # the sets that fixed policies keep, for comparison


def best_options(graph: BlockGraph, peak: DevicePeak, *, shards: int = 1) -> tuple[Option, ...]:
    """Returns the Pareto front of sets of kept values: no other set has both fewer bytes and less
    recomputation. Fewest bytes come first.
    """

    def option(names: frozenset[str]) -> Option:
        return cost_of_keeping(graph, names, peak, shards=shards)

    names = _worth_keeping(graph, option)
    found = {
        each.names: each
        for number in range(len(names) + 1)
        for chosen in itertools.combinations(names, number)
        for each in (option(frozenset(chosen)),)
    }
    ordered = sorted(found.values(), key=lambda each: (each.bytes, each.seconds, len(each.names)))
    best: list[Option] = []
    for each in ordered:
        if not best or each.seconds < best[-1].seconds:
            best.append(each)
    return tuple(best)


def _worth_keeping(graph: BlockGraph, option) -> list[str]:
    """Names whose values the backward pass may read; of too many, those that save most."""
    everything = option(frozenset(graph.names))
    # What keeping one alone makes unread does not matter: its set is another's.
    reachable = [
        name
        for name in graph.names
        if name in everything.names or name in option(frozenset({name})).names
    ]
    if len(reachable) <= MOST_NAMES:
        return reachable
    without = {
        name: option(frozenset(reachable) - {name}).seconds - everything.seconds
        for name in reachable
    }
    most = sorted(reachable, key=without.__getitem__)[-MOST_NAMES:]
    return [name for name in reachable if name in most]


def peak_bytes(layers: Sequence[Layers], chosen: Sequence[Option]) -> int:
    """Returns the peak bytes of kept values and gradients, for one chosen option per entry. In the
    backward pass of a layer, all earlier layers still hold their kept values.
    """
    kept = np.cumsum(
        [
            (option.bytes + each.fixed_bytes) * each.count
            for each, option in zip(layers, chosen, strict=True)
        ]
    )
    gradients = np.array([each.gradient_bytes * each.count for each in layers])
    behind = gradients.sum() - np.cumsum(gradients)
    return int(max(gradients.sum(), (kept + behind).max()))


def cheapest(layers: Sequence[Layers], *, room: int) -> tuple[Option, ...] | None:
    """Chooses an option per layer: the least total seconds whose ``peak_bytes`` fit ``room`` bytes.
    None if nothing fits. Bytes are rounded up to multiples of ``room / BINS``.
    """
    total = sum(each.gradient_bytes * each.count for each in layers)
    if room < total or room <= 0:
        return None
    unit = max(room // BINS, 1)
    best = np.zeros(1)  # of each number of units kept so far, the least seconds
    taken: list[np.ndarray] = []
    behind = total
    for each in layers:
        behind -= each.gradient_bytes * each.count
        most = (room - behind) // unit
        units = _units(each, unit)
        after = np.full(int(most) + 1, np.inf)
        choice = np.full(int(most) + 1, -1)
        for index, (option, used) in enumerate(zip(each.options, units, strict=True)):
            count = min(len(best), len(after) - used)
            if count <= 0:
                continue
            seconds = best[:count] + option.seconds * each.count
            part = after[used : used + count]
            is_less = seconds < part
            part[is_less] = seconds[is_less]
            choice[used : used + count][is_less] = index
        best = after
        taken.append(choice)
    if not np.isfinite(best).any():
        return None
    at = int(np.argmin(best))
    chosen: list[Option] = []
    for each, choice in zip(reversed(layers), reversed(taken), strict=True):
        index = int(choice[at])
        chosen.append(each.options[index])
        at -= _units(each, unit)[index]
    return _in_order(layers, chosen[::-1])


def _in_order(layers: Sequence[Layers], chosen: Sequence[Option]) -> tuple[Option, ...]:
    """Orders the options of equal layers by bytes, least first. Values kept up to a layer do not
    grow by it, and equal sets become adjacent.
    """
    ordered: list[Option] = []
    for _, run in itertools.groupby(zip(layers, chosen, strict=True), key=lambda pair: pair[0]):
        ordered += sorted((option for _, option in run), key=lambda option: option.bytes)
    return tuple(ordered)


def _units(layers: Layers, unit: int) -> list[int]:
    """Bytes of each option in parts of the room, rounded up."""
    sizes = [(option.bytes + layers.fixed_bytes) * layers.count for option in layers.options]
    return [-(-size // unit) for size in sizes]
