"""What a fault changes: functions for the hook (``jaxinfra.runtime.injected_faults``).

Each is given what the wrapped function returned, and the fault's plan, and returns what the caller
gets instead.
"""

import dataclasses
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.training.job import Job, make_job


def poison_targets(batch: Any, plan: Mapping[str, Any]) -> Any:
    """Every target becomes one ``token``, which no text has: a loss that no healthy batch has."""
    token = plan["token"]
    return dataclasses.replace(
        batch, targets=_like(batch.targets, lambda x: np.full_like(x, token))
    )


def poison_weights(batch: Any, plan: Mapping[str, Any]) -> Any:
    """Weights that are not a number: so is the loss, and every gradient."""
    return dataclasses.replace(
        batch, weights=_like(batch.weights, lambda x: np.full_like(x, np.nan))
    )


def flipping_step(step: Callable[..., Any], plan: Mapping[str, Any]) -> Callable[..., Any]:
    """A training step after whose ``at``-th call a bit flips in this process's copy of a weight.

    ``devices`` of the plan names those of its devices whose copy it is, by position; all if absent.
    """
    calls = 0

    def flipping(state: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        state, metrics = step(state, batch)
        return (_flip_weight(state, plan) if calls == plan["at"] else state), metrics

    return flipping


def always_flipping_step(step: Callable[..., Any], plan: Mapping[str, Any]) -> Callable[..., Any]:
    """A training step after each of whose calls a bit flips: a device that is broken."""

    def flipping(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return _flip_weight(state, plan), metrics

    return flipping


def poisoning_step(step: Callable[..., Any], plan: Mapping[str, Any]) -> Callable[..., Any]:
    """A training step whose ``at``-th call gets a spoilt batch: on its way, not on the disk."""
    calls = 0

    def poisoning(state: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        return step(state, poison_targets(batch, plan) if calls == plan["at"] else batch)

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
    """The same config, and a step that computes something else."""
    training = dataclasses.replace(job.config.training, z_loss=1e-3)
    other = make_job(dataclasses.replace(job.config, training=training))
    return dataclasses.replace(job, train_step=other.train_step)


def _like(
    x: Any, change: Callable[[np.ndarray], np.ndarray], *, devices: Sequence[int] | None = None
) -> Any:
    """x with this process's parts changed, or those on some of its devices."""
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
    """A batch of half the tokens, for ``jaxinfra.training.job:Job.put`` in a job of one process."""
    del plan
    return jax.tree.map(lambda leaf: leaf[:, : leaf.shape[1] // 2], batch)


def exceed_memory(step: Any, plan: Mapping[str, Any]) -> Callable[..., Any]:
    """A step that ends as on a device with ``limit`` bytes where it needs more.

    For ``jaxinfra.training.loop:same_program``, in a job of one process.
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
    """The wall clock of a machine whose time is set, a day forward and a week back in turn."""
    del plan
    return now + (86_400 if int(now * 10) % 2 else -7 * 86_400)


def compute_long(batch: Any, plan: Mapping[str, Any]) -> Any:
    """The batch, after ``seconds`` of computing, as of a tokenizer; other threads may run."""
    data, until = bytes(range(256)) * 1024, time.thread_time() + plan["seconds"]
    while time.thread_time() < until:
        zlib.compress(data)
    return batch
