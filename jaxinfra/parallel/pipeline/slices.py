"""A layer cut into programs that run at different times: forward, gradient of the input, gradient
of the weights.

Differentiation gives one list of equations. Equations that depend on the cotangent, or were added
by recomputation, are the backward pass. Its matmuls that dx does not need are the weight
gradient, which may run at any later time (Qi et al. 2024 do this by hand, module by module).
Gradients without matmuls, of biases and norms, are computed with the input gradient. Values that
one program computes and a later one reads are saved, unless they are cheaper to recompute.

Layers are also moved between the order of checkpoints and the order of a schedule's stages. The
executor's runs of layers have equal length. If the number of layers is no multiple, later runs get
a padding layer with zero weights. It adds nothing to the residual stream, and its gradients are
ignored. It costs no time, since its stage would else wait for the longest run.

Parameters are stored in natural order, with the s-th part of the stack on stage s, so that a
checkpoint does not depend on the schedule. A schedule with several chunks per stage needs other
layers on a stage. So layers are exchanged before and after a step, each run of layers sent once:
bytes per device = parameters of a stage * (1 - 1/stages), in both directions.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.parallel.pipeline.schedule import Schedule

type Tree = Any


class LayerResult(NamedTuple):
    """Result of a layer: its output, its own term of the objective, and its sums."""

    x: jax.Array  # of the shape and dtype of its input
    objective: jax.Array | None  # fp32 scalar that the layer adds to the objective, if any
    sums: Tree  # statistics of the forward pass, without gradient


type Layer = Callable[[Tree, Tree, jax.Array], LayerResult]
"""(weights, context, x) -> result. The context carries no gradient."""

# Equations that hold another program are inlined if they are one of these. What recomputes its
# contents in a backward pass is part of that pass.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Equation:
    source: core.JaxprEqn
    inputs: tuple[int | core.Literal, ...]
    outputs: tuple[int, ...]
    recomputed: bool  # stands in a part that is recomputed for the backward pass

    @property
    def reads(self) -> list[int]:
        return [value for value in self.inputs if isinstance(value, int)]

    @property
    def is_cheap(self) -> bool:
        return self.source.primitive.name not in _PRODUCTS and not any(
            isinstance(leaf, core.Jaxpr | core.ClosedJaxpr)
            for leaf in jax.tree.leaves(self.source.params, is_leaf=_is_program)
        )


def _is_program(node: Any) -> bool:
    return isinstance(node, core.Jaxpr | core.ClosedJaxpr)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Equations:
    """Equations of a jaxpr in order; each value is identified by a number."""

    equations: tuple[_Equation, ...]
    constants: Mapping[int, Any]

    def run(self, values: Mapping[int, jax.Array]) -> dict[int, Any]:
        """Runs the equations on ``values``; returns these and all computed values by number."""
        env: dict[int, Any] = {**self.constants, **values}
        for equation in self.equations:
            source = equation.source
            operands = [
                env[value] if isinstance(value, int) else value.val for value in equation.inputs
            ]
            with source.ctx.manager, _scope(str(source.source_info.name_stack)):
                params = source.primitive.get_bind_params(source.params)
                results = source.primitive.bind(*operands, **params)
            if not source.primitive.multiple_results:
                results = [results]
            env.update(zip(equation.outputs, results, strict=True))
        return env


def _scope(name: str) -> contextlib.AbstractContextManager[Any]:
    return jax.named_scope(name) if name else contextlib.nullcontext()


class LayerParts:
    """One layer as separate programs: forward, input gradient and weight gradient.

    ``saved`` is the list of arrays that forward passes to backward, ``pending`` that the input
    gradient passes to the weight gradient. Weight gradients are keyed by the number of their leaf.

    Args:
        layer: function of the layer, traced once with its gradient.
        weights, context, x: arrays or shapes of its arguments.
    """

    def __init__(self, layer: Layer, weights: Tree, context: Tree, x: jax.Array):
        closed, (_, _, _, self.sums) = _traced(layer, weights, context, x)  # ShapeDtypeStructs
        flat = _Flattener()
        inputs = [flat.name(var) for var in closed.jaxpr.invars]
        self._given_ids, (self._x, self._dy, self._d_objective) = inputs[:-3], inputs[-3:]
        results = flat.add(closed, dict(zip(closed.jaxpr.invars, inputs, strict=True)))
        self._y, self._dx, *rest = results
        num_weights = len(jax.tree.leaves(weights))
        self._dw, self._sums = rest[:num_weights], rest[num_weights:]

        late_ids = {self._dy, self._d_objective}
        from_x = _dependents(flat.equations, {self._x, *late_ids})
        from_dy = _dependents(flat.equations, late_ids)
        early, late = [], list[_Equation]()
        for equation in flat.equations:
            is_late = equation.recomputed or not from_dy.isdisjoint(equation.outputs)
            (late if is_late else early).append(equation)

        gradients = _variables([self._dx, *self._dw])
        backward = _needed(late, gradients)
        read = _reads(backward, gradients) - late_ids
        self._saved = sorted(read & from_x)
        # What does not depend on the input is computed again: casts of weights, rotary tables.
        again = _needed(early, read - from_x)
        rest = _without(backward, _needed(backward, _variables([self._dx])))
        # Leaves whose gradient goes with the input's.
        self._with_input = frozenset(
            leaf
            for leaf, value in enumerate(self._dw)
            if all(equation.is_cheap for equation in _needed(rest, _variables([value])))
        )
        with_input = [self._dx, *(self._dw[leaf] for leaf in self._with_input)]
        of_input = _needed(backward, _variables(with_input))
        late_dw = _variables(
            value for leaf, value in enumerate(self._dw) if leaf not in self._with_input
        )
        of_weights = _needed(_without(backward, of_input), late_dw)
        pending, cheap = _kept_for_weights(
            _reads(of_weights, late_dw),
            of_input,
            from_dy,
            dy=self._dy,
            d_objective=self._d_objective,
        )
        self._pending = sorted(pending)
        self.saved = [flat.type_of(value) for value in self._saved]  # forward to backward
        # Gradient of the input to gradient of the weights.
        self.pending = [flat.type_of(value) for value in self._pending]
        self._forward = flat.part(
            _needed(early, _variables([self._y, *self._sums]) | {*self._saved})
        )
        self._backward = flat.part(again, backward)
        self._input = flat.part(again, of_input)
        self._weight = flat.part(again, cheap, of_weights)

    def forward(self, weights: Tree, context: Tree, x: jax.Array):
        """Computes (y, sums, saved)."""
        env = self._forward.run({**self._given(weights, context), self._x: x})
        sums = jax.tree.unflatten(
            jax.tree.structure(self.sums), [_read(env, value) for value in self._sums]
        )
        return _read(env, self._y), sums, [env[value] for value in self._saved]

    def backward(self, weights: Tree, context: Tree, saved: Sequence[jax.Array], dy: jax.Array):
        """Computes (dx, dweights, [])."""
        given = self._given(weights, context) | dict(zip(self._saved, saved, strict=True))
        env = self._backward.run({**given, self._dy: dy})
        return _read(env, self._dx), self._weight_gradients(env, range(len(self._dw))), []

    def input_gradient(
        self, weights: Tree, context: Tree, saved: Sequence[jax.Array], dy: jax.Array
    ):
        """Computes (dx, the weight gradients without a matmul, pending)."""
        given = self._given(weights, context) | dict(zip(self._saved, saved, strict=True))
        env = self._input.run({**given, self._dy: dy})
        d_some = self._weight_gradients(env, self._with_input)
        return _read(env, self._dx), d_some, [env[value] for value in self._pending]

    def weight_gradient(
        self,
        weights: Tree,
        context: Tree,
        saved: Sequence[jax.Array],
        pending: Sequence[jax.Array],
    ) -> dict[int, jax.Array]:
        """Computes the weight gradients that ``input_gradient`` left pending."""
        given = self._given(weights, context) | dict(zip(self._saved, saved, strict=True))
        env = self._weight.run(given | dict(zip(self._pending, pending, strict=True)))
        return self._weight_gradients(env, {*range(len(self._dw))} - self._with_input)

    def _given(self, weights: Tree, context: Tree) -> dict[int, Any]:
        given = dict(zip(self._given_ids, jax.tree.leaves((weights, context)), strict=True))
        return given | {self._d_objective: jnp.ones(())}

    def _weight_gradients(
        self, env: Mapping[int, Any], leaves: Iterable[int]
    ) -> dict[int, jax.Array]:
        return {leaf: _read(env, self._dw[leaf]) for leaf in sorted(leaves)}


def _read(env: Mapping[int, Any], value: Any) -> Any:
    return env[value] if isinstance(value, int) else value.val


def _traced(
    layer: Layer, weights: Tree, context: Tree, x: jax.Array
) -> tuple[core.ClosedJaxpr, Any]:
    """The program of a layer and its gradient, and types of its results (y, dx, dw, sums)."""

    def whole(weights: Tree, context: Tree, x: jax.Array, dy: jax.Array, d_objective: jax.Array):
        def differentiated(weights: Tree, x: jax.Array):
            result = layer(weights, context, x)
            return (result.x, result.objective), result.sums

        (y, objective), pull, sums = jax.vjp(differentiated, weights, x, has_aux=True)
        # Part of the backward pass as dy is, though its value is known: what depends on it alone
        # would else be computed with the forward pass, and kept.
        dw, dx = pull((dy, None if objective is None else d_objective))
        return y, dx, dw, sums

    return jax.make_jaxpr(whole, return_shape=True)(weights, context, x, x, jnp.ones(()))


def _variables(values: Iterable[Any]) -> set[int]:
    return {value for value in values if isinstance(value, int)}


def _kept_for_weights(
    read: set[int],
    of_input: Sequence["_Equation"],
    from_dy: set[int],
    *,
    dy: int,
    d_objective: int,
) -> tuple[set[int], list["_Equation"]]:
    """Values of the input's gradient that the weights' gradients read: those to keep, and equations
    cheap enough to run again.
    """
    made = {value: equation for equation in of_input for value in equation.outputs}
    pending: set[int] = set()
    cheap: list[_Equation] = []

    def provide(value: int) -> None:
        if value == d_objective:
            return
        if value == dy or (value in made and not _is_cheap(made, from_dy, value)):
            pending.add(value)
        elif value in made and made[value] not in cheap:
            cheap.append(made[value])
            for operand in made[value].reads:
                provide(operand)

    for value in sorted(read):
        provide(value)
    return pending, cheap


class _Flattener:
    """Equations of a program and of those inside it, values numbered."""

    def __init__(self) -> None:
        self.equations: list[_Equation] = []
        self.constants: dict[int, Any] = {}
        self._types: list[Any] = []

    def name(self, var: core.Var) -> int:
        """A new number for a value of this variable's type."""
        self._types.append(var.aval)
        return len(self._types) - 1

    def type_of(self, value: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype."""
        aval = self._types[value]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def part(self, *groups: Iterable["_Equation"]) -> Equations:
        """Puts these equations in the program's order."""
        chosen = {id(equation) for group in groups for equation in group}
        ordered = tuple(each for each in self.equations if id(each) in chosen)
        return Equations(equations=ordered, constants=self.constants)

    def add(
        self, closed: core.ClosedJaxpr, names: dict[core.Var, Any], *, recomputed: bool = False
    ) -> list[Any]:
        """Appends a program whose inputs are named; returns its outputs."""
        for var, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            names[var] = self.name(var)
            self.constants[names[var]] = constant
        for equation in closed.jaxpr.eqns:
            inputs = [
                value if isinstance(value, core.Literal) else names[value]
                for value in equation.invars
            ]
            key = _INLINED.get(equation.primitive.name)
            if key is None:
                outputs = tuple(self.name(var) for var in equation.outvars)
                self.equations.append(
                    _Equation(
                        source=equation,
                        inputs=tuple(inputs),
                        outputs=outputs,
                        recomputed=recomputed,
                    )
                )
            else:
                inner = equation.params[key]
                if isinstance(inner, core.Jaxpr):
                    inner = core.ClosedJaxpr(inner, ())
                outputs = self.add(
                    inner,
                    dict(zip(inner.jaxpr.invars, inputs, strict=True)),
                    # Differentiated, it is the recomputation; as written, the forward pass is.
                    recomputed=recomputed or equation.params.get("differentiated", False),
                )
            names.update(zip(equation.outvars, outputs, strict=True))
        return [
            value if isinstance(value, core.Literal) else names[value]
            for value in closed.jaxpr.outvars
        ]


def _dependents(equations: Iterable[_Equation], sources: set[int]) -> set[int]:
    found = set(sources)
    for equation in equations:
        if not found.isdisjoint(equation.reads):
            found.update(equation.outputs)
    return found


def _needed(equations: Sequence[_Equation], values: set[int]) -> list[_Equation]:
    """Equations that the values depend on, in order."""
    wanted, kept = set(values), []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outputs):
            kept.append(equation)
            wanted.update(equation.reads)
    return kept[::-1]


def _without(equations: Iterable[_Equation], others: Iterable[_Equation]) -> list[_Equation]:
    left_out = {id(equation) for equation in others}
    return [equation for equation in equations if id(equation) not in left_out]


def _reads(equations: Iterable[_Equation], outputs: set[int]) -> set[int]:
    """Values that the equations take from outside, and outputs that they do not make."""
    equations = list(equations)
    made = {value for equation in equations for value in equation.outputs}
    return ({value for e in equations for value in e.reads} | outputs) - made


def _is_cheap(made: Mapping[int, _Equation], from_dy: set[int], value: int) -> bool:
    """Whether a value can be computed from what is kept anyway, without a product."""
    if value in from_dy:
        return False
    if value not in made:
        return True
    equation = made[value]
    return equation.is_cheap and all(
        _is_cheap(made, from_dy, operand) for operand in equation.reads
    )


def padded_layer_indices(num_layers: int, runs: int) -> np.ndarray:
    """Splits layers into runs; returns layer indices, int [runs * longest run], -1 for padding."""
    longest, first_short = -(-num_layers // runs), num_layers % runs or runs
    layer_indices = np.full((runs, longest), -1)
    start = 0
    for run in range(runs):
        size = longest - (run >= first_short)
        layer_indices[run, :size] = np.arange(start, start + size)
        start += size
    return layer_indices.reshape(-1)


def pad_layers(tree: Tree, layer_indices: np.ndarray) -> Tree:
    """Pads stacked layers [layers, ...] with zeros to [len(layer_indices), ...].

    Args:
        layer_indices: index of the layer in each slot, from ``padded_layer_indices``.
    """
    if np.all(layer_indices >= 0):
        return tree

    def pad(x: jax.Array) -> jax.Array:
        is_layer = (layer_indices >= 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(
            is_layer, jnp.take(x, np.maximum(layer_indices, 0), axis=0), jnp.zeros_like(x[:1])
        )

    return jax.tree.map(pad, tree)


def unpad_layers(tree: Tree, layer_indices: np.ndarray) -> Tree:
    """Removes the padding that ``pad_layers`` added."""
    if np.all(layer_indices >= 0):
        return tree
    return jax.tree.map(lambda x: jnp.take(x, np.flatnonzero(layer_indices >= 0), axis=0), tree)


def to_stage_order(tree: Tree, schedule: Schedule, *, axis: str) -> Tree:
    """Exchanges layers [layers per stage, ...] between stages, from natural to schedule order."""
    return _move(tree, schedule, axis=axis, back=False)


def to_natural_order(tree: Tree, schedule: Schedule, *, axis: str) -> Tree:
    """Exchanges layers [layers per stage, ...] between stages, from schedule to natural order."""
    return _move(tree, schedule, axis=axis, back=True)


def _move(tree: Tree, schedule: Schedule, *, axis: str, back: bool) -> Tree:
    chunks = schedule.num_chunks
    if chunks == 1:
        return tree
    rounds = exchange_rounds(schedule)
    if back:
        rounds = [[(target, source) for source, target in pairs] for pairs in rounds]
    stage = jax.lax.axis_index(axis)

    def move(x: jax.Array) -> jax.Array:
        runs = x.reshape(chunks, -1, *x.shape[1:])
        result = jnp.zeros_like(runs)
        for pairs in rounds:
            take, put = (np.zeros(schedule.num_stages, np.int32) for _ in range(2))
            for (source, slot), (target, place) in pairs:
                take[source], put[target] = slot, place
            run = jax.lax.dynamic_index_in_dim(runs, jnp.asarray(take)[stage], keepdims=False)
            run = jax.lax.ppermute(run, axis, [(s[0], t[0]) for s, t in pairs])
            result = jax.lax.dynamic_update_index_in_dim(
                result, run, jnp.asarray(put)[stage], axis=0
            )
        return result.reshape(x.shape)

    return jax.tree.map(move, tree)


type _Place = tuple[int, int]
"""Stage, and run of layers within it."""


def exchange_rounds(schedule: Schedule) -> list[list[tuple[_Place, _Place]]]:
    """Plans the exchange of layers in rounds, in which each stage sends and receives one run.

    Returns (from, to) of each run, by round. Stage j // chunks sends run j in round
    (j + j // lcm(stages, chunks)) % chunks, so that a stage's runs are sent in different rounds.
    The runs that a stage receives, which are ``stages`` apart, also arrive in different rounds. In
    ZB-V a stage receives runs j and 2 stages - 1 - j, one even and one odd, so the round is j % 2.
    """
    stages, chunks = schedule.num_stages, schedule.num_chunks
    is_v = schedule.name == PipelineSchedule.ZB_V.value
    period = schedule.num_positions if is_v else math.lcm(stages, chunks)
    rounds: list[list[tuple[_Place, _Place]]] = [[] for _ in range(chunks)]
    for j in range(schedule.num_positions):
        target = int(schedule.stage_of[j]), int(schedule.chunk_of[j])
        rounds[(j + j // period) % chunks].append(((j // chunks, j % chunks), target))
    return rounds
