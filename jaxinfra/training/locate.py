"""Which rank's part of a batch, and which tensor of which layer, made a step not finite."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxinfra.axes import BATCH, LAYERS
from jaxinfra.data.batch import Batch
from jaxinfra.data.train_iterator import TrainIterator
from jaxinfra.model.definition import Parameters
from jaxinfra.parallel.place import path_name
from jaxinfra.training.job import Job
from jaxinfra.training.state import State


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """What is not finite, in words and as data."""

    text: str
    details: dict[str, Any]


def locate_nonfinite(job: Job, state: State, batches: TrainIterator, *, step: int) -> NonFinite:
    """Computes the gradient of each rank's rows of a step's batch alone. A collective.

    The other ranks' rows are replaced by rows that count nothing, so what is not finite then comes
    from the rows left. It costs a compilation, once, and a gradient a part of the batch.

    Args:
        state: before the step, or after it: a step that is not finite changes no parameter.
    """
    parts = job.placement.batch_shards
    batch = job.put(batches.batch(step - 1))
    key = jax.random.key(0)
    alone = jax.jit(
        lambda state, batch, part: _gradient_of(job, state, batch, part, parts, key),
        out_shardings=job.placement.replicated,
    )
    found = []
    for part in range(parts):
        loss, flags = jax.device_get(alone(state, batch, part))
        tensors = _names(job, flags)
        if tensors or not np.isfinite(loss):
            found.append((part, float(loss), tensors))
    if not found:
        return NonFinite(
            text="computed again, the batch's loss and gradient are finite: a fault that passed",
            details={"cause": "transient", "ranks": [], "tensors": []},
        )
    ranks = sorted({rank for part, _, _ in found for rank in _ranks(job, part, parts)})
    first = next((tensors for _, _, tensors in found if tensors), [])
    where = f"first in {first[0]} ({len(first)} tensors in all)" if first else "in the loss only"
    return NonFinite(
        text=f"the rows of rank {', '.join(map(str, ranks))} make it so, {where}; the batch is "
        f"skipped; jaxinfra replay RUN --step {step} names the operation",
        details={"cause": "batch", "ranks": ranks, "tensors": first[:20]},
    )


def _gradient_of(
    job: Job, state: State, batch: Batch, part: Int[Array, ""], parts: int, key: Key[Array, ""]
) -> tuple[Float[Array, ""], Parameters]:
    num_rows = batch.tokens.shape[0]
    mine = jnp.arange(num_rows) // (num_rows // parts) == part
    kept = jax.tree.map(
        lambda x: jnp.where(mine.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x)), batch
    )
    scale = jnp.ones((), batch.weights.dtype)
    learned = job.gradient(state.parameters, state.model_state, kept, key=key, loss_scale=scale)

    def flags(gradient: jax.Array, leaf: Any) -> jax.Array:
        first = 1 if leaf.dims and leaf.dims[0] == LAYERS else 0
        return ~jnp.all(jnp.isfinite(gradient), axis=tuple(range(first, gradient.ndim)))

    return learned.loss, jax.tree.map(flags, learned.gradients, job.model.dims)


def _names(job: Job, flags: Parameters) -> list[str]:
    """Tensors that are not finite, deepest layer first: the backward pass starts there."""
    found = []
    numbers = {place: number for number, place in enumerate(job.config.model.layer_places)}
    for path, flag in jax.tree_util.tree_leaves_with_path(flags):
        name = path_name(path)
        if flag.ndim == 0:
            found += [(-1, name)] if flag else []
            continue
        position = name.split("/")[1] if name.startswith("blocks/") else "0"
        for repetition in np.nonzero(flag)[0]:
            layer = numbers[int(position), int(repetition)]
            found.append((layer, f"layer {layer}: {name}"))
    return [name for _, name in sorted(found, reverse=True)]


def _ranks(job: Job, part: int, parts: int) -> list[int]:
    """Processes that hold a part of the batch."""
    held = job.placement.sharding((BATCH,)).devices_indices_map((parts,))
    return sorted(
        {
            device.process_index
            for device, index in held.items()
            if index[0].indices(parts)[0] == part
        }
    )
