"""A training step in pieces that run one after another: embedding, each layer, the loss.

The step itself is one program, whose loop over layers keeps nothing of one layer. These pieces
compute the same, each forward and backward on its own, so that what passes between them can be
looked at. For one device.

Dims: B sequence of a micro-batch, T position, D model width.

Why a step is not finite: the first layer, pass and operation that make it so.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxinfra.config.run import TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.first_nonfinite import Origin, first_nonfinite, is_finite
from jaxinfra.model.definition import ModelDefinition, Parameters, by_path, merged
from jaxinfra.model.passes import Pass
from jaxinfra.model.repetition import out_of_eight_bits
from jaxinfra.training.gradients import count_targets, hidden_loss, own_loss, split_batch
from jaxinfra.training.job import Job
from jaxinfra.training.state import State
from jaxinfra.training.step import step_key

type _Function = Callable[..., tuple[jax.Array, jax.Array]]
"""(arrays, x, *others) -> (x, what it adds to the objective)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPiece:
    """One piece, with what it reads.

    ``x`` is the residual stream [B, T, D]; the first piece takes and the last gives a zero instead.
    """

    name: str  # "embedding", "layer 0", ..., "loss"
    path: str  # of its arrays among the parameters, "" for those of no layer
    arrays: Parameters  # trained parameters and state
    others: tuple[Any, ...]  # further arguments
    function: _Function
    compiled: Callable[..., tuple[jax.Array, jax.Array]]
    compiled_backward: Callable[..., tuple[Parameters, jax.Array]]

    def forward(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x behind it, and what it adds to the objective."""
        return self.compiled(self.arrays, x, *self.others)

    def backward(self, x: jax.Array, dx: jax.Array) -> tuple[Parameters, jax.Array]:
        """Gradients by its arrays, and the cotangent before it.

        Args:
            x: before it.
            dx: the cotangent behind it.
        """
        return self.compiled_backward(self.arrays, x, dx, *self.others)

    def backward_function(self, *args: Any) -> tuple[Parameters, jax.Array]:
        """``backward`` of all its arguments, to be traced."""
        return _backward(self.function, *args)


def _backward(
    function: _Function, arrays: Parameters, x: jax.Array, dx: jax.Array, *others: Any
) -> tuple[Parameters, jax.Array]:
    (_, objective), pull = jax.vjp(lambda a, x: function(a, x, *others), arrays, x)
    return pull((dx, jnp.ones_like(objective)))


@final
class StepPieces:
    """The pieces of a model's step; each kind of layer is compiled once.

    Args:
        model: with the values of what is not trained.
    """

    def __init__(self, model: ModelDefinition, training: TrainingConfig):
        self._model, self._training = model, training
        self._whole = model.freeze({})
        self._zero = jnp.zeros((), model.execution.policy.accum)
        # Of a layer its block, and whether that multiplies in 8 bits there.
        config, policy = model.config, model.execution.policy
        self._layers = [
            (i, policy.in_eight_bits(number, config.num_layers))
            for number, (i, _) in enumerate(config.layer_places)
        ]
        self._functions: dict[Any, _Function] = {"embedding": self._embed, "loss": self._loss}
        self._functions |= {key: functools.partial(self._layer, *key) for key in set(self._layers)}
        self._compiled = {
            key: (jax.jit(each), jax.jit(functools.partial(_backward, each)))
            for key, each in self._functions.items()
        }

    def of(
        self,
        tree: Parameters,
        batch: Batch,
        *,
        key: Key[Array, ""],
        scale: Float[Array, ""],
    ) -> list[StepPiece]:
        """The pieces for one micro-batch, in the order that they run in.

        Args:
            tree: parameters and state of the model.
            key: of the micro-batch; used where the model drops out.
            scale: of the objective, which is a sum over tokens.
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
            self._piece(
                "embedding", "embedding", "", shared, still, batch.tokens, positions, embed_key
            )
        ]
        for number, (i, repetition) in enumerate(config.layer_places):
            given = Pass(
                positions_BT=positions,
                segment_ids_BT=batch.segment_ids,
                rope=ropes[i],
                dropout_key=layer_keys[number],
            )
            own, rest = (_repetition(each, i, repetition) for each in (tree, frozen))
            which, name, path = self._layers[number], f"layer {number}", f"blocks/{i}/"
            pieces.append(self._piece(which, name, path, own, rest, given, scale))
        pieces.append(self._piece("loss", "loss", "", shared, still, batch, scale))
        return pieces

    def _piece(
        self, which: Any, name: str, path: str, arrays: Parameters, *others: Any
    ) -> StepPiece:
        forward, backward = self._compiled[which]
        return StepPiece(
            name=name,
            path=path,
            arrays=arrays,
            others=others,
            function=self._functions[which],
            compiled=forward,
            compiled_backward=backward,
        )

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
        if training.loss is None:
            options = {"z_loss": training.z_loss, "label_smoothing": training.label_smoothing}
            sums = hidden_loss(self._whole, tree, hidden_BTD, batch, **options)
        else:
            sums = own_loss(self._whole, tree, hidden_BTD, batch, loss=training.loss)
        return self._zero, sums.total * scale


def _without_blocks(tree: Parameters) -> Parameters:
    return {name: value for name, value in tree.items() if name != "blocks"}


def _repetition(tree: Parameters, block: int, repetition: int) -> Parameters:
    """One layer's arrays of those that a stack holds."""
    stacked = tree.get("blocks", {}).get(block, {})
    return jax.tree.map(lambda leaf: leaf[repetition], stacked)


_TRANSFORMED = re.compile(r"\b(transpose|jvp|vmap|rematted_computation)\b|[()]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NonFiniteCause:
    """Where a step's values first cease to be finite.

    ``phase`` is "weights" (they were not finite before the step), "forward", "backward", or "sum"
    (each gradient is finite, and their sum or its norm is not).
    """

    where: str  # "embedding", "layer 3", "loss"; of weights their path
    phase: str
    micro_batch: int | None = None
    arrays: tuple[str, ...] = ()  # the piece's gradients that are not finite
    origin: Origin | None = None  # None: only the compiled piece is not finite, no operation alone

    def describe(self) -> str:
        """In a line."""
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
        """For files and programs."""
        return {**dataclasses.asdict(self), "text": self.describe()}


def find_nonfinite(job: Job, state: State, batch: Batch) -> NonFiniteCause | None:
    """Runs a step on one device piece by piece, and the first bad piece operation by operation.

    Args:
        job: on one device, with the values of what is not trained.
        state: before the step.
        batch: of the step, on the device.

    Returns None where all is finite when it is computed in this way.
    """
    trained = {**by_path(state.parameters), **by_path(state.model_state)}
    for path, leaf in trained.items():
        if not is_finite(leaf):
            return NonFiniteCause(where=_array_name(job, path, leaf), phase="weights")
    training = job.config.training
    pieces = StepPieces(job.model, training)
    key, scale = step_key(state), state.loss_scale.value / count_targets(batch)
    count = training.accumulation
    keys = jax.random.split(key, count) if count > 1 else key[None]
    batches = split_batch(batch, count)
    for m in range(count):
        micro = jax.tree.map(lambda leaf, m=m: leaf[m], batches)
        found = _of_pieces(pieces.of(state.tree, micro, key=keys[m], scale=scale))
        if found is not None:
            return dataclasses.replace(found, micro_batch=m)
    return _of_sum(job, state, batch, key)


def _of_pieces(pieces: list[StepPiece]) -> NonFiniteCause | None:
    """The first of one micro-batch."""
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
            found = _cause(piece, "backward", piece.backward_function, args)
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
    """What is finite piece by piece and not in the sum."""
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
    """An array with the layer in which it is not finite."""
    parts = path.split("/")
    if parts[0] != "blocks":
        return path
    numbers = {place: n for n, place in enumerate(job.config.model.layer_places)}
    bad = next(i for i in range(leaf.shape[0]) if not is_finite(leaf[i]))
    return f"{path} of layer {numbers[int(parts[1]), bad]}"
