"""Why a step is not finite: the first layer, pass and operation that make it so."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.first_nonfinite import Origin, first_nonfinite, is_finite
from jaxinfra.model.definition import by_path
from jaxinfra.training.gradients import count_targets, split_batch
from jaxinfra.training.job import Job
from jaxinfra.training.pieces import StepPiece, StepPieces
from jaxinfra.training.state import State
from jaxinfra.training.step import step_key

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
