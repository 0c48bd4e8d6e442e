"""Caches before the first token, in an execution's formats and sharded like the model's heads."""

import dataclasses

import jax

from jaxinfra import axes
from jaxinfra.config.cache import CacheSpec
from jaxinfra.config.model import ModelConfig
from jaxinfra.model.cache import (
    Cache,
    ContiguousCache,
    JointCache,
    StateCache,
    cache_spec,
    placed_state,
)
from jaxinfra.model.execution import Execution


def empty_cache(
    config: ModelConfig, execution: Execution, *, batch: int, num_slots: int
) -> tuple[Cache, ...]:
    """Makes the contiguous cache of each distinct block; of mixers with a state, their state.

    Args:
        num_slots: positions per row.
    """
    caches = []
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        spec = cache_spec(block.mixer, config.model_dim)
        state = StateCache(
            arrays=empty_state(spec, execution, num_layers=repeats, num_slots=batch), is_empty=True
        )
        sizes = {"num_layers": repeats, "batch": batch, "num_slots": num_slots}
        if not spec.state:
            cache = _entries(spec, execution, sizes)
        elif not spec.arrays:
            cache = state
        else:
            cache = JointCache(entries=_entries(spec, execution, sizes), state=state)
        caches.append(cache)
    return tuple(caches)


def _entries(spec: CacheSpec, execution: Execution, sizes: dict[str, int]) -> ContiguousCache:
    spec, form = spec.repeated(execution.place.copies), execution.cache_format
    cache = ContiguousCache.zeros(spec, **sizes, dtype=execution.policy.compute, form=form)
    stored = spec.stored_as(form).arrays
    dims = {each.name: (None, axes.BATCH, None, *each.dims) for each in stored}
    placed = {name: execution.place(x, dims[name]) for name, x in cache.arrays.items()}
    return dataclasses.replace(cache, arrays=placed)


def empty_state(
    spec: CacheSpec, execution: Execution, *, num_layers: int, num_slots: int
) -> dict[str, jax.Array]:
    """Makes a stack's states before the first token, zeros; empty for a mixer without a state."""
    policy = execution.policy
    cache = StateCache.zeros(
        spec.state,
        num_layers=num_layers,
        num_slots=num_slots,
        accum=policy.accum,
        compute=policy.compute,
    )
    return placed_state(cache.arrays, spec, execution.place)
