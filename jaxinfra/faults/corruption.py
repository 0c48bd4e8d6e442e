"""Functions that inject a fault's wrong values, called by ``jaxinfra.runtime.injected_faults``.

Each takes the result of the wrapped function and the fault's plan, and returns the changed result.
"""

import dataclasses
import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.training.job import Job, make_job


def poison_targets(batch: Any, plan: Mapping[str, Any]) -> Any:
    """Sets all of a batch's targets to one rare token, so that its loss is unusually high."""
    token = plan["token"]
    return dataclasses.replace(
        batch, targets=_like(batch.targets, lambda x: np.full_like(x, token))
    )


def poison_weights(batch: Any, plan: Mapping[str, Any]) -> Any:
    """Sets a batch's loss weights to NaN, so that the loss and all gradients become NaN."""
    return dataclasses.replace(
        batch, weights=_like(batch.weights, lambda x: np.full_like(x, np.nan))
    )


def flipping_step(step: Callable[..., Any], plan: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a training step that flips one weight bit on this process after its ``at``-th call.

    Without ``at`` it flips the bit after each call, as a broken device would. The plan's
    ``devices`` lists which of the process's devices to change, by position (all if
    absent).
    """
    calls = itertools.count(1)

    def flipping(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        call = next(calls)
        return (_flip_weight(state, plan) if plan.get("at", call) == call else state), metrics

    return flipping


def poisoning_step(step: Callable[..., Any], plan: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a training step that corrupts the batch of its ``at``-th call in memory only."""
    calls = itertools.count(1)

    def poisoning(state: Any, batch: Any) -> Any:
        return step(state, poison_targets(batch, plan) if next(calls) == plan["at"] else batch)

    return poisoning


def _flip_weight(state: Any, plan: Mapping[str, Any]) -> Any:
    leaves, tree = jax.tree.flatten(state.parameters)
    number = max(range(len(leaves)), key=lambda number: leaves[number].size)

    def flip(x: np.ndarray) -> np.ndarray:
        flipped = x.copy()
        flipped.reshape(-1).view(np.uint32)[x.size // 2] ^= np.uint32(1 << plan.get("bit", 20))
        return flipped

    leaves[number] = _like(leaves[number], flip, devices=plan.get("devices"))
    return dataclasses.replace(state, parameters=jax.tree.unflatten(tree, leaves))


def other_program(job: Job, plan: Mapping[str, Any]) -> Job:
    """Returns the job with a training step of another program, though the config is equal."""
    training = dataclasses.replace(job.config.training, z_loss=1e-3)
    other = make_job(dataclasses.replace(job.config, training=training))
    return dataclasses.replace(job, train_step=other.train_step)


def _like(
    x: Any, change: Callable[[np.ndarray], np.ndarray], *, devices: Sequence[int] | None = None
) -> Any:
    """Returns x with this process's shards changed, or only those on some of its devices."""
    if isinstance(x, np.ndarray):
        return change(x)
    parts = [
        jax.device_put(change(np.asarray(shard.data)), shard.device)
        if devices is None or position in devices
        else shard.data
        for position, shard in enumerate(x.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def shorten(batch: Any, plan: Mapping[str, Any]) -> Any:
    """Cuts a batch to half its tokens (applied to ``jaxinfra.training.job:Job.put``)."""
    del plan
    return jax.tree.map(lambda leaf: leaf[:, : leaf.shape[1] // 2], batch)


def exceed_memory(step: Any, plan: Mapping[str, Any]) -> Callable[..., Any]:
    """Raises an out-of-memory error if a step needs more than ``limit`` bytes per device.

    The fault applies to ``jaxinfra.training.loop:same_program``, in a job of one process.
    """

    def limited(*args: Any) -> Any:
        needs, limit = step_bytes(step.lower(*args).compile()), plan["limit"]
        if needs > limit:
            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {needs} bytes, of a "
                f"limit of {limit} bytes"
            )
        return step(*args)

    return limited


def jump_clock(now: float, plan: Mapping[str, Any]) -> float:
    """Returns the wall time moved alternately a day forward and a week back."""
    del plan
    return now + (86_400 if int(now * 10) % 2 else -7 * 86_400)


def compute_long(batch: Any, plan: Mapping[str, Any]) -> Any:
    """Delays a batch by ``seconds`` of computation, as a slow tokenizer would."""
    data, until = bytes(range(256)) * 1024, time.thread_time() + plan["seconds"]
    while time.thread_time() < until:
        zlib.compress(data)
    return batch
