"""Search of the layer, pass and operation that first make a step not finite.

A traced program (a jaxpr) is run operation by operation. A result that is not finite is marked with
the operation that made it, and results computed from it inherit the mark. So a NaN is traced to
the overflow that caused it, not to the last operation. An infinity that the program itself writes,
such as an attention mask's, counts as a fault only once a NaN is computed from it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jaxtyping import Array, Float, Key

from jaxinfra.config.run import TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import ModelDefinition, Parameters, by_path, merged
from jaxinfra.model.passes import Pass
from jaxinfra.model.repetition import out_of_eight_bits
from jaxinfra.training.gradients import count_targets, count_tokens, hidden_loss, split_batch
from jaxinfra.training.job import Job
from jaxinfra.training.state import State
from jaxinfra.training.step import step_key


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The operation that produced the first value that is NaN or infinite."""

    operation: str  # JAX's name, such as "dot_general"
    scope: str  # named scopes around the operation, such as "attention/qk_norm"
    source: str  # file, line and function
    inputs: tuple[str, ...]  # shapes and dtypes, with the largest absolute value
    made: str  # its number of NaN and infinite elements

    def describe(self) -> str:
        """Describes the operation, its source line and its values in one line."""
        scope = f"{self.scope}: " if self.scope else ""
        reads = ", ".join(self.inputs)
        return f"{scope}{self.operation} of {reads} gives {self.made} ({self.source})"


_WRITTEN = "an infinity that the program itself writes down"

type _Mark = Origin | str | None
"""Mark of a value: None if it is finite; else its origin, or ``_WRITTEN``."""

# Operations that only call a program, and where in their parameters that is.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def first_nonfinite(function: Callable[..., Any], *args: Any) -> Origin | None:
    """Returns the operation that first makes a NaN or infinity; None if all results are finite.

    Inner programs, such as loop bodies, first run as a whole. They are searched operation by
    operation only if their results are not finite.

    >>> import jax.numpy as jnp
    >>> first_nonfinite(lambda x: jnp.sum(jnp.log(x - x)), jnp.ones(2)).operation
    'log'
    """
    traced = jax.make_jaxpr(function)(*args)
    leaves = jax.tree.leaves(args)
    _, marks = _run(traced, leaves, [None] * len(leaves), scope="")
    return next((mark for mark in marks if isinstance(mark, Origin)), None)


def is_finite(tree: Any) -> bool:
    """Tells whether every float of all arrays in a tree is finite."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return all(bool(jnp.isfinite(leaf).all()) for leaf in floats)


def _run(
    program: Any, args: Sequence[Any], marks: Sequence[_Mark], *, scope: str
) -> tuple[list[Any], list[_Mark]]:
    """Runs a jaxpr; returns its results, each with the mark of its origin."""
    jaxpr, consts = program.jaxpr, program.consts
    values: dict[Any, tuple[Any, _Mark]] = {}
    for variable, value in zip(jaxpr.constvars, consts, strict=True):
        values[variable] = value, None if is_finite(value) else _WRITTEN
    for variable, value, mark in zip(jaxpr.invars, args, marks, strict=True):
        values[variable] = value, mark

    def read(atom: Any) -> tuple[Any, _Mark]:
        if isinstance(atom, jex.Literal):
            finite = np.isfinite(np.asarray(atom.val, np.float64)).all()
            return atom.val, None if finite else _WRITTEN
        return values[atom]

    for eqn in jaxpr.eqns:
        ins, in_marks = zip(*map(read, eqn.invars), strict=True) if eqn.invars else ((), ())
        outs, out_marks = _apply(eqn, ins, in_marks, scope)
        for variable, value, mark in zip(eqn.outvars, outs, out_marks, strict=True):
            values[variable] = value, mark
    found = [read(atom) for atom in jaxpr.outvars]
    return [value for value, _ in found], [mark for _, mark in found]


def _apply(
    eqn: Any, ins: Sequence[Any], marks: Sequence[_Mark], scope: str
) -> tuple[list[Any], list[_Mark]]:
    outs = _bound(eqn, ins)
    bad = [not is_finite(out) for out in outs]
    if not any(bad):
        return outs, [None] * len(outs)
    where = "/".join(part for part in (scope, str(eqn.source_info.name_stack)) if part)
    inner = _inside(eqn, ins, marks, where)
    if inner is None:
        inner = [_mark(eqn, ins, marks, out, where) for out in outs]
    known = next((mark for mark in inner if isinstance(mark, Origin)), None)
    # A value that is not finite in the whole and was so by rounding alone in the parts.
    spare = known or next((m for m in marks if isinstance(m, Origin)), _WRITTEN)
    return outs, [(mark or spare) if b else None for b, mark in zip(bad, inner, strict=True)]


def _inside(eqn: Any, ins: Sequence[Any], marks: Sequence[_Mark], scope: str) -> list[_Mark] | None:
    """Returns the marks of a nested program's results; None if the operation has no program."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return _run(params[_CALLS[name]], ins, marks, scope=scope)[1]
    if name == "cond":
        branch = params["branches"][int(ins[0])]
        return _run(branch, ins[1:], marks[1:], scope=scope)[1]
    if name == "scan":
        return _loop(eqn, ins, marks, scope)
    return None


def _loop(eqn: Any, ins: Sequence[Any], marks: Sequence[_Mark], scope: str) -> list[_Mark]:
    """Runs a loop, iteration by iteration, up to the first that makes a value not finite."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    turn = jax.jit(jex.jaxpr_as_fun(body))
    # Constants, then what is carried, then columns: these alone have a dim more outside.
    columns = sum(map(_is_column, eqn.invars, body.jaxpr.invars))
    carried = len(eqn.outvars) - sum(map(_is_column, eqn.outvars, body.jaxpr.outvars))
    first = len(ins) - columns - carried
    args, arg_marks = list(ins), list(marks)
    found: list[_Mark] = [None] * len(eqn.outvars)
    for n in range(length):
        at = length - 1 - n if eqn.params["reverse"] else n
        for i in range(first + carried, len(ins)):
            args[i] = ins[i][at]
            arg_marks[i] = None if is_finite(args[i]) else marks[i]
        outs = turn(*args)
        out_marks: list[_Mark] = [None] * len(outs)
        if not is_finite(outs):
            outs, out_marks = _run(body, args, arg_marks, scope=scope)
        found = [new or old for new, old in zip(out_marks, found, strict=True)]
        found[:carried] = out_marks[:carried]
        if any(isinstance(mark, Origin) for mark in out_marks):
            break
        args[first : first + carried] = outs[:carried]
        arg_marks[first : first + carried] = out_marks[:carried]
    return found


def _mark(eqn: Any, ins: Sequence[Any], marks: Sequence[_Mark], out: Any, scope: str) -> _Mark:
    """Marks the results of an operation that has no program inside."""
    if is_finite(out):
        return None
    if known := [mark for mark in marks if isinstance(mark, Origin)]:
        return known[0]
    if any(marks) and not bool(jnp.isnan(out).any()):
        return _WRITTEN  # the mask's infinity, moved or chosen
    return Origin(
        operation=eqn.primitive.name,
        scope=scope,
        source=_source(eqn),
        inputs=tuple(_described(value) for value in ins),
        made=_made(out),
    )


def _bound(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Returns the results of running one jaxpr operation."""
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _is_column(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) > len(inside.aval.shape)


def _source(eqn: Any) -> str:
    text = source_info_util.summarize(eqn.source_info)
    path, _, rest = text.partition(":")
    return f"{Path(path).name}:{rest}"


def _described(value: Any) -> str:
    array = np.asarray(value)
    dims = ",".join(map(str, array.shape))
    text = f"{array.dtype}[{dims}]"
    if not jnp.issubdtype(array.dtype, jnp.inexact) or not array.size:
        return text
    return f"{text} up to {np.nanmax(np.abs(array.astype(np.float64))):.3g}"


def _made(value: Any) -> str:
    array = np.asarray(value).astype(np.float64)
    nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    parts = [f"{nans} NaN"] * bool(nans) + [f"{infinities} infinite"] * bool(infinities)
    return f"{' and '.join(parts)} of {math.prod(array.shape)} elements"


type _Function = Callable[..., tuple[jax.Array, jax.Array]]
"""(arrays, x, *others) -> (x, what it adds to the objective)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPiece:
    """One piece of a training step (embedding, layer or loss), with the arrays that it reads.

    A piece maps the residual stream ``x`` [B, T, D] to the next one. The embedding ignores its
    input, and the loss returns a zero in place of the stream.
    """

    name: str  # "embedding", "layer 0", ..., "loss"
    path: str  # prefix of the layer's parameter paths, such as "blocks/0/"; else ""
    arrays: Parameters  # trained parameters and state
    others: tuple[Any, ...]  # further arguments of ``function``: frozen parameters, batch, keys
    function: _Function

    def forward(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the residual stream after the piece, and the piece's term of the objective."""
        return _called(self.function, self.arrays, x, *self.others)

    def backward(self, x: jax.Array, dx: jax.Array) -> tuple[Parameters, jax.Array]:
        """Returns the gradients of the piece's arrays, and the cotangent of its input.

        Args:
            x: the piece's input.
            dx: the cotangent of its output.
        """
        return _compiled_backward(self.function, self.arrays, x, dx, *self.others)


def _backward(
    function: _Function, arrays: Parameters, x: jax.Array, dx: jax.Array, *others: Any
) -> tuple[Parameters, jax.Array]:
    (_, objective), pull = jax.vjp(lambda a, x: function(a, x, *others), arrays, x)
    return pull((dx, jnp.ones_like(objective)))


# Compiled once for each function.
_compiled_backward = jax.jit(_backward, static_argnums=0)
_called = jax.jit(lambda function, *args: function(*args), static_argnums=0)


@final
class StepPieces:
    """The pieces of a model's training step; each kind of layer is compiled once.

    Args:
        model: the model, with the values of its frozen parameters.
    """

    def __init__(self, model: ModelDefinition, training: TrainingConfig):
        self._model, self._training = model, training
        self._whole = model.freeze({})
        self._zero = jnp.zeros((), model.execution.policy.accum)
        # Of a layer its block, and whether that multiplies in 8 bits there.
        config, policy = model.config, model.execution.policy
        self._layers = [
            (i, policy.in_eight_bits(number, config.num_layers))
            for number, (i, _) in enumerate(config.layer_positions)
        ]
        self._functions = {key: functools.partial(self._layer, *key) for key in set(self._layers)}

    def of(
        self,
        tree: Parameters,
        batch: Batch,
        *,
        key: Key[Array, ""],
        scale: Float[Array, ""],
        layer_scale: Float[Array, ""],
    ) -> list[StepPiece]:
        """Returns the step's pieces for one micro-batch, in the order in which they run.

        Args:
            tree: parameters and state of the model.
            key: random key of the micro-batch, for dropout.
            scale: factor on the loss of targets, which is a sum.
            layer_scale: factor on the losses that layers add, which are sums over tokens.
        """
        config = self._model.config
        positions = batch.positions
        if positions is None:
            length = jnp.arange(batch.tokens.shape[1])[None]
            positions = jnp.broadcast_to(length, batch.tokens.shape)
        embed_key, layer_keys = None, [None] * config.num_layers
        if config.dropout_rate > 0.0:  # as Decoder.run derives them
            embed_key, blocks_key = jax.random.split(key)
            layer_keys = list(jax.random.split(blocks_key, config.num_layers))
        ropes = self._model.bind(tree).rope_tables(positions)
        frozen = self._model.frozen
        shared, still = _without_blocks(tree), _without_blocks(frozen)
        pieces = [
            StepPiece(
                name="embedding",
                path="",
                arrays=shared,
                others=(still, batch.tokens, positions, embed_key),
                function=self._embed,
            )
        ]
        for number, (i, repetition) in enumerate(config.layer_positions):
            given = Pass(
                positions_BT=positions,
                segment_ids_BT=batch.segment_ids,
                rope=ropes[i],
                dropout_key=layer_keys[number],
            )
            own, rest = (_repetition(each, i, repetition) for each in (tree, frozen))
            pieces.append(
                StepPiece(
                    name=f"layer {number}",
                    path=f"blocks/{i}/",
                    arrays=own,
                    others=(rest, given, layer_scale),
                    function=self._functions[self._layers[number]],
                )
            )
        others = (still, batch, scale)
        last = StepPiece(name="loss", path="", arrays=shared, others=others, function=self._loss)
        return [*pieces, last]

    def _embed(self, arrays, x, frozen, tokens_BT, positions_BT, key):
        del x
        decoder = self._whole.bind(merged(frozen, arrays))
        return decoder.embed(tokens_BT, positions_BT, key), self._zero

    def _layer(self, i, in_eight_bits, arrays, x_BTD, frozen, given, scale):
        block = self._whole.bind({"blocks": {i: merged(frozen, arrays)}}).blocks[i]
        out = (block if in_eight_bits else out_of_eight_bits(block))(x_BTD, given)
        losses = jax.tree.leaves(out.sums.losses)
        return out.x, sum(map(jnp.sum, losses), self._zero) * scale

    def _loss(self, arrays, x_BTD, frozen, batch, scale):
        training, tree = self._training, merged(frozen, arrays)
        hidden_BTD = self._whole.bind(tree).normalized(x_BTD)
        sums = hidden_loss(
            self._whole,
            tree,
            hidden_BTD,
            batch,
            z_loss=training.z_loss,
            label_smoothing=training.label_smoothing,
            loss=training.loss,
        )
        return self._zero, sums.total * scale


def _without_blocks(tree: Parameters) -> Parameters:
    return {name: value for name, value in tree.items() if name != "blocks"}


def _repetition(tree: Parameters, block: int, repetition: int) -> Parameters:
    """Returns one layer's arrays out of the stacked arrays of all layers."""
    stacked = tree.get("blocks", {}).get(block, {})
    return jax.tree.map(lambda leaf: leaf[repetition], stacked)


_TRANSFORMED = re.compile(r"\b(transpose|jvp|vmap|rematted_computation)\b|[()]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NonFiniteCause:
    """The place where a training step's values first become NaN or infinite.

    ``phase`` is "weights" (they were not finite before the step), "forward", "backward", or "sum"
    (each gradient is finite, and their sum or its norm is not).
    """

    where: str  # "embedding", "layer 3", "loss"; for phase "weights" the parameter's path
    phase: str
    micro_batch: int | None = None
    arrays: tuple[str, ...] = ()  # the piece's gradients that are not finite
    origin: Origin | None = None  # None: run one by one, all operations of the piece are finite

    def describe(self) -> str:
        """Describes in one line the phase, layer and operation that are not finite."""
        if self.phase == "weights":
            return f"{self.where} is not finite before the step: the fault is an earlier one"
        if self.phase == "sum":
            return f"each layer's gradient is finite, {self.where} is not: it overflows"
        operation = (
            "its operations, run one by one, are all finite: they overflow only where the "
            "compiler has fused them"
            if self.origin is None
            else self.origin.describe()
        )
        return f"first in {self.where}, {self.phase} pass: {operation}"

    def as_json(self) -> dict[str, Any]:
        """Returns the phase, layer and operation as JSON values."""
        return {**dataclasses.asdict(self), "text": self.describe()}


def find_nonfinite(job: Job, state: State, batch: Batch) -> NonFiniteCause | None:
    """Finds a step's first piece with a NaN or infinity, then the operation that made it.

    Args:
        job: a job on one device, with values of its frozen parameters.
        state: the state before the step.
        batch: the step's batch, on the device.

    Returns None if all values of the step are finite on this device.
    """
    trained = {**by_path(state.parameters), **by_path(state.model_state)}
    for path, leaf in trained.items():
        if not is_finite(leaf):
            return NonFiniteCause(where=_array_name(job, path, leaf), phase="weights")
    training = job.config.training
    pieces = StepPieces(job.model, training)
    key, scale = step_key(state), state.loss_scale.value / count_targets(batch)
    layer_scale = state.loss_scale.value / count_tokens(batch)
    count = training.accumulation
    keys = jax.random.split(key, count) if count > 1 else key[None]
    batches = split_batch(batch, count)
    for m in range(count):
        micro = jax.tree.map(lambda leaf, m=m: leaf[m], batches)
        scales = {"scale": scale, "layer_scale": layer_scale}
        found = _of_pieces(pieces.of(state.tree, micro, key=keys[m], **scales))
        if found is not None:
            return dataclasses.replace(found, micro_batch=m)
    return _of_sum(job, state, batch, key)


def _of_pieces(pieces: list[StepPiece]) -> NonFiniteCause | None:
    """Finds the first piece of a micro-batch that is not finite."""
    inputs = [jnp.zeros(())]
    for piece in pieces:
        x, objective = piece.forward(inputs[-1])
        if not is_finite((x, objective)):
            args = (piece.arrays, inputs[-1], *piece.others)
            return _cause(piece, "forward", piece.function, args)
        inputs.append(x)
    dx = jnp.zeros_like(inputs.pop())
    for piece in reversed(pieces):
        x = inputs.pop()
        gradients, before = piece.backward(x, dx)
        if not is_finite((gradients, before)):
            args = (piece.arrays, x, dx, *piece.others)
            bad = tuple(path for path, g in by_path(gradients).items() if not is_finite(g))
            found = _cause(piece, "backward", functools.partial(_backward, piece.function), args)
            return dataclasses.replace(found, arrays=tuple(piece.path + path for path in bad))
        dx = before
    return None


def _cause(
    piece: StepPiece, phase: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> NonFiniteCause:
    origin = first_nonfinite(function, *args)
    if origin is not None:
        parts = _TRANSFORMED.sub("", origin.scope).split("/")
        origin = dataclasses.replace(origin, scope="/".join(filter(None, parts)))
    return NonFiniteCause(where=piece.name, phase=phase, origin=origin)


def _of_sum(job: Job, state: State, batch: Batch, key: jax.Array) -> NonFiniteCause | None:
    """Finds values that are finite in each micro-batch and not in their sum."""
    learned = jax.jit(job.gradient)(
        state.parameters, state.model_state, batch, key=key, loss_scale=state.loss_scale.value
    )
    for path, leaf in by_path(learned.gradients).items():
        if not is_finite(leaf):
            where = f"their sum over micro-batches, of {_array_name(job, path, leaf)},"
            return NonFiniteCause(where=where, phase="sum")
    if not is_finite(learned.loss):
        return NonFiniteCause(where="the loss over micro-batches", phase="sum")
    squares = jax.tree.map(lambda g: jnp.sum(jnp.square(g)), learned.gradients)
    if not is_finite(sum(jax.tree.leaves(squares))):
        return NonFiniteCause(where="the sum of their squares", phase="sum")
    return None


def _array_name(job: Job, path: str, leaf: jax.Array) -> str:
    """Names an array, with the layer in which it is not finite."""
    parts = path.split("/")
    if parts[0] != "blocks":
        return path
    numbers = {place: n for n, place in enumerate(job.config.model.layer_positions)}
    bad = next(i for i in range(leaf.shape[0]) if not is_finite(leaf[i]))
    return f"{path} of layer {numbers[int(parts[1]), bad]}"
