"""Bytes for each parameter of the arrays that a step is about: counted from the arrays' shapes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfra.data.batch import Batch
from jaxinfra.errors import UnsupportedError
from jaxinfra.training.gradients import GradientFunction, make_gradient
from jaxinfra.training.job import Job


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BytesPerParameter:
    """Of whole arrays, before a mesh shares them out. Copies that layers make while they run, one
    layer at a time, are not among them.
    """

    weights: float  # as kept between steps
    gradients: float  # of a micro-batch, as the backward pass hands them on
    summed: float  # a second array, in which micro-batches are summed; 0 without
    moments: float  # of the optimizer, with their scales
    average: float  # a running mean of the weights; 0 without

    @property
    def total(self) -> float:
        """All of them."""
        return sum(dataclasses.astuple(self))

    def describe(self) -> str:
        """One line."""
        parts = [
            f"{name} {size:.4g}" for name, size in dataclasses.asdict(self).items() if size > 0
        ]
        return f"{self.total:.4g} bytes per parameter: {', '.join(parts)}"


def is_counted(job: Job) -> bool:
    """Whether all parameters are trained, on tokens and without stages."""
    config = job.config
    return not job.model.frozen and config.mesh.pipe == 1 and config.preferences is None


def bytes_per_parameter(job: Job) -> BytesPerParameter:
    """What a job's state and gradients hold, from their traced shapes.

    Raises:
        UnsupportedError: it is not ``is_counted``.
    """
    if not is_counted(job):
        raise UnsupportedError(
            "bytes per parameter are counted where all parameters are trained on tokens, without "
            "a pipeline; leave out lora, preferences and mesh.pipe"
        )
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
    one = make_gradient(job.model, training=of_one, placement=job.placement)
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
    """Shapes in the place of arrays."""
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.dtype("float32"))
    return Batch(tokens=ids, targets=ids, segment_ids=ids, positions=ids, weights=weights)
