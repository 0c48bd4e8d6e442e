"""Runs any pipeline schedule: a loop over ticks, with branches for a stage's action and sends.

The executor runs inside a ``shard_map`` over the pipe axis, without ``check_vma``; other axes may
be left to the compiler. It computes and sums gradients itself, so the loop is never differentiated.
An idle stage computes nothing. The schedule is an input table, so the size of the compiled program
does not depend on the number of micro-batches.

The compiler may put collectives over other axes into the branches, since all devices of a stage
take the same branch. For sends between stages, all devices of the mesh take the same branch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from jaxinfra.model.gradients import nothing_emitted, nothing_summed
from jaxinfra.model.passes import combined
from jaxinfra.parallel.pipeline.schedule import Kind
from jaxinfra.parallel.pipeline.slices import LayerParts, LayerResult, Tree
from jaxinfra.parallel.pipeline.tick_program import Pairs, TickProgram


class HeadSums(NamedTuple):
    """The loss of one micro-batch, as fp32 scalars."""

    objective: jax.Array  # the value to differentiate
    reported: Tree  # the values to report, which are summed over micro-batches


class Arrays(NamedTuple):
    """Arrays with respect to which the loss is differentiated, or their cotangents."""

    weights: Tree  # cotangents are summed over micro-batches
    state: Tree  # cotangents carry statistics out of the backward pass; their maximum is kept


class StageFunctions(Protocol):
    """A model as the pure functions that pipeline stages run.

    ``shared`` are the arrays outside the stack of layers, ``micro`` is one micro-batch.
    """

    def embed(self, shared: Arrays, micro: Tree, /) -> jax.Array:
        """Computes the first layer's input from a micro-batch."""
        ...

    def context(self, micro: Tree, /) -> Tree:
        """Computes the inputs that all layers share in a micro-batch, such as positions."""
        ...

    def layer_context(self, context: Tree, index: jax.Array, /) -> Tree:
        """Selects the part of the context that the layer of this index reads."""
        ...

    def layer(self, arrays: Arrays, context: Tree, x: jax.Array, /) -> LayerResult:
        """Runs one layer; the context is the layer's own."""
        ...

    def head(self, shared: Arrays, x: jax.Array, micro: Tree, /) -> HeadSums:
        """Computes the loss of a micro-batch from the last layer's output."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelineResult:
    """Losses and gradients over all micro-batches of a step.

    ``d_layers`` and ``sums`` are sharded over stages like the layers; the others are replicated.
    """

    reported: Tree  # of the head, summed over micro-batches
    d_layers: Arrays  # gradients of the summed objectives
    d_shared: Arrays
    sums: Tree  # of every layer


class _Row(NamedTuple):
    """Action of one stage in one tick, as int32 scalars."""

    kind: jax.Array
    micro_batch: jax.Array
    chunk: jax.Array
    position: jax.Array
    read: jax.Array
    write: jax.Array
    saved: jax.Array
    pending: jax.Array
    receive: jax.Array  # [2]


class _State(NamedTuple):
    """State that actions change."""

    saved: list[jax.Array]  # [slots, layers, ...] each
    pending: list[jax.Array]
    d_layers: Arrays
    d_shared: Arrays
    sums: Tree
    reported: Tree


def run_pipeline(
    program: TickProgram,
    functions: StageFunctions,
    *,
    layers: Arrays,
    shared: Arrays,
    micro_batches: Tree,
    axis: str,
) -> PipelineResult:
    """Computes the losses and gradients of all micro-batches.

    Args:
        layers: this stage's layers, [chunks * layers per chunk, ...], chunk by chunk.
        shared: parameters outside the layers, equal on every stage.
        micro_batches: [micro-batches, ...], equal on every stage.
        axis: the mesh axis of the stages, inside ``shard_map``.
    """
    stage = jax.lax.axis_index(axis)
    run = _Run(program, functions, layers, shared, micro_batches)

    def tick(carry: tuple[jax.Array, _State], entry: tuple[_Row, jax.Array]):
        (inbox, state), (row, exchange) = carry, entry
        given = inbox[row.read]
        out, state = run.act(row, given, state)
        inbox = inbox.at[row.write].set(out)
        sends = [_sender(pairs, axis) for pairs in program.exchanges]
        with jax.named_scope("exchange"):
            for i, received in enumerate(jax.lax.switch(exchange, sends, out)):
                inbox = inbox.at[row.receive[i]].set(received)
        return (inbox, state), None

    rows = jax.tree.map(lambda table: jnp.take(table, stage, axis=-1), _rows(program))
    carry = run.empty_inbox(), run.empty_state()
    (_, end), _ = jax.lax.scan(tick, carry, (rows, jnp.asarray(program.exchange)))
    reported, d_weights = jax.lax.psum((end.reported, end.d_shared.weights), axis)
    d_shared = Arrays(d_weights, jax.lax.pmax(end.d_shared.state, axis))
    return PipelineResult(
        reported=reported, d_layers=end.d_layers, d_shared=d_shared, sums=end.sums
    )


def _rows(program: TickProgram) -> _Row:
    """Tables [ticks, ..., stages]."""
    schedule = program.schedule
    stages = np.arange(schedule.num_stages)[None, :]
    tables = {
        "kind": schedule.kind,
        "micro_batch": schedule.micro_batch,
        "chunk": schedule.chunk,
        "position": schedule.position[stages, schedule.chunk],
        "read": program.read,
        "write": program.write,
        "saved": program.saved,
        "pending": program.pending,
        "receive": program.receive,
    }
    return _Row(**{name: jnp.asarray(table, jnp.int32) for name, table in tables.items()})


def _sender(pairs: tuple[Pairs, Pairs], axis: str):
    """The exchange of one tick: what each stage receives from before and from after."""

    def send(out: jax.Array) -> tuple[jax.Array, jax.Array]:
        onward, back = (
            jax.lax.ppermute(out, axis, side) if side else jnp.zeros_like(out) for side in pairs
        )
        return onward, back

    return send


class _Run:
    """The actions of one pipeline, over its parameters and micro-batches."""

    def __init__(
        self,
        program: TickProgram,
        functions: StageFunctions,
        layers: Arrays,
        shared: Arrays,
        micro_batches: Tree,
    ):
        self._program = program
        self._functions = functions
        self._arrays = layers
        self._num_weights = len(jax.tree.leaves(layers.weights))
        self._shared = shared
        self._micro_batches = micro_batches
        self._num_layers = jax.tree.leaves(layers)[0].shape[0]
        self._layers = self._num_layers // program.schedule.num_chunks
        self._last = program.schedule.num_positions - 1
        micro = self._micro(jnp.int32(0))
        self._x = functions.embed(shared, micro)
        self._reported = jax.eval_shape(functions.head, shared, self._x, micro).reported
        context = functions.layer_context(functions.context(micro), jnp.int32(0))
        self._parts = LayerParts(functions.layer, _entry(layers, jnp.int32(0)), context, self._x)

    def act(self, row: _Row, given: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        """The stage's action of one tick; without one, its input and state as they are."""
        actions = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: functools.partial(self._backward, splits=False),
            Kind.INPUT: functools.partial(self._backward, splits=True),
            Kind.WEIGHT: self._weight_gradient,
        }
        carry = given, state
        for kind, action in actions.items():
            if kind not in self._program.schedule.kind:
                continue
            with jax.named_scope(kind.name.lower()):
                carry = _when(
                    row.kind == kind,
                    lambda carry, action=action: action(row, given, carry[1]),
                    carry,
                )
        return carry

    def empty_inbox(self) -> jax.Array:
        """Zeros in the shape of the inbox, [slots, ...]."""
        return jnp.zeros((self._program.num_inbox, *self._x.shape), self._x.dtype)

    def empty_state(self) -> _State:
        """Makes the state before the first tick."""

        def buffers(types: list[jax.ShapeDtypeStruct], slots: int) -> list[jax.Array]:
            return [jnp.zeros((slots, self._layers, *t.shape), t.dtype) for t in types]

        def nothing(arrays: Arrays) -> Arrays:
            weights = jax.tree.map(jnp.zeros_like, arrays.weights)
            return Arrays(weights, nothing_emitted(arrays.state))

        parts, program = self._parts, self._program
        return _State(
            saved=buffers(parts.saved, program.num_saved),
            pending=buffers(parts.pending, program.num_pending) if program.num_pending else [],
            d_layers=nothing(self._arrays),
            d_shared=nothing(self._shared),
            sums=nothing_summed(
                jax.tree.map(
                    lambda t: jax.ShapeDtypeStruct((self._num_layers, *t.shape), t.dtype),
                    parts.sums,
                )
            ),
            reported=jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), self._reported),
        )

    def _micro(self, index: jax.Array) -> Tree:
        return _entry(self._micro_batches, index)

    def _layer(self, row: _Row, context: Tree, i: jax.Array) -> tuple[jax.Array, Arrays, Tree]:
        """Index among the stage's layers, arrays and context of layer i of the row's chunk."""
        index = row.chunk * self._layers + i
        own = self._functions.layer_context(context, row.position * self._layers + i)
        return index, _entry(self._arrays, index), own

    def _forward(self, row: _Row, given: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        functions, micro = self._functions, self._micro(row.micro_batch)
        context = functions.context(micro)
        x = jax.lax.cond(
            row.position == 0,
            lambda: functions.embed(self._shared, micro),
            lambda: given,
        )

        def layer(i: jax.Array, carry: tuple[jax.Array, list[jax.Array], Tree]):
            x, buffers, sums = carry
            index, weights, own = self._layer(row, context, i)
            y, new, saved = self._parts.forward(weights, own, x)
            new = combined(_entry(sums, index), new)
            sums = jax.tree.map(lambda sums, new: sums.at[index].set(new), sums, new)
            return y, _put(buffers, (row.saved, i), saved), sums

        carry = x, state.saved, state.sums
        y, saved, sums = jax.lax.fori_loop(0, self._layers, layer, carry)
        state = state._replace(saved=saved, sums=sums)

        def head(carry: tuple[jax.Array, Arrays, Tree]):
            y, d_shared, reported = carry

            def objective(shared: Arrays, y: jax.Array) -> HeadSums:
                return functions.head(shared, y, micro)

            gradient = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
            (_, own), (d_own, dy) = gradient(self._shared, y)
            return dy, _both(d_shared, d_own), jax.tree.map(jnp.add, reported, own)

        out, d_shared, reported = _when(
            row.position == self._last, head, (y, state.d_shared, state.reported)
        )
        return out, state._replace(d_shared=d_shared, reported=reported)

    def _backward(
        self, row: _Row, given: jax.Array, state: _State, *, splits: bool
    ) -> tuple[jax.Array, _State]:
        """Gradients of the input and of the weights; if split, without what stays pending."""
        context = self._functions.context(self._micro(row.micro_batch))
        gradient = self._parts.input_gradient if splits else self._parts.backward

        def layer(step: jax.Array, carry: tuple[jax.Array, Arrays, list[jax.Array]]):
            dy, d_layers, buffers = carry
            i = self._layers - 1 - step
            index, weights, own = self._layer(row, context, i)
            saved = _get(state.saved, (row.saved, i))
            dx, d_own, pending = gradient(weights, own, saved, dy)
            return dx, self._add(d_layers, index, d_own), _put(buffers, (row.pending, i), pending)

        carry = given, state.d_layers, state.pending if splits else []
        dx, d_layers, pending = jax.lax.fori_loop(0, self._layers, layer, carry)
        state = state._replace(d_layers=d_layers)
        state = state._replace(pending=pending) if splits else state
        return self._embedding_gradient(row, dx, state)

    def _weight_gradient(
        self, row: _Row, given: jax.Array, state: _State
    ) -> tuple[jax.Array, _State]:
        context = self._functions.context(self._micro(row.micro_batch))

        def layer(i: jax.Array, d_layers: Arrays) -> Arrays:
            index, weights, own = self._layer(row, context, i)
            saved = _get(state.saved, (row.saved, i))
            pending = _get(state.pending, (row.pending, i))
            d_own = self._parts.weight_gradient(weights, own, saved, pending)
            return self._add(d_layers, index, d_own)

        d_layers = jax.lax.fori_loop(0, self._layers, layer, state.d_layers)
        return given, state._replace(d_layers=d_layers)

    def _add(self, d_layers: Arrays, index: jax.Array, values: Mapping[int, jax.Array]) -> Arrays:
        """The cotangents of one layer's leaves, by number, brought into all layers'."""
        leaves, structure = jax.tree.flatten(d_layers)
        for leaf, value in values.items():
            entry = leaves[leaf].at[index]
            leaves[leaf] = entry.add(value) if leaf < self._num_weights else entry.max(value)
        return jax.tree.unflatten(structure, leaves)

    def _embedding_gradient(
        self, row: _Row, dx: jax.Array, state: _State
    ) -> tuple[jax.Array, _State]:
        micro = self._micro(row.micro_batch)

        def add(d_shared: Arrays) -> Arrays:
            pull = jax.vjp(lambda shared: self._functions.embed(shared, micro), self._shared)[1]
            return _both(d_shared, pull(dx)[0])

        d_shared = _when(row.position == 0, add, state.d_shared)
        return dx, state._replace(d_shared=d_shared)


def _when[T](predicate: jax.Array, function: Callable[[T], T], carry: T) -> T:
    """``function(carry)`` if the predicate holds, else the carry: a loop of one turn or none.

    XLA changes a loop's carry in place. What goes through a conditional it may copy, and has: here
    all saved activations and gradients, in every tick.
    """
    turns = predicate.astype(jnp.int32)
    return jax.lax.fori_loop(0, turns, lambda _, carry: function(carry), carry)


def _both(first: Arrays, second: Arrays) -> Arrays:
    """Cotangents of two sets of micro-batches as those of both."""
    return Arrays(
        weights=jax.tree.map(jnp.add, first.weights, second.weights),
        state=jax.tree.map(jnp.maximum, first.state, second.state),
    )


def _entry(tree: Tree, index: jax.Array) -> Tree:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False), tree
    )


def _get(buffers: list[jax.Array], at: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
    """Reads a slice in row-major layout, as stored. Otherwise a reader's other layout would make
    XLA transpose the whole buffer in every tick.
    """

    def row_major(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    return [row_major(buffer[at]) for buffer in buffers]


def _put(
    buffers: list[jax.Array], at: tuple[jax.Array, jax.Array], values: list[jax.Array]
) -> list[jax.Array]:
    return [buffer.at[at].set(value) for buffer, value in zip(buffers, values, strict=True)]
