"""Caches before the first token, in an execution's formats and sharded like the model's heads."""

import dataclasses

import jax

from jaxinfra import axes
from jaxinfra.config.cache import CacheFormat, CacheSpec
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.own import OwnMixer
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.cache import (
    Cache,
    ContiguousCache,
    JointCache,
    StateCache,
    cache_spec,
    placed_state,
)
from jaxinfra.model.execution import Execution


def check_states(config: ModelConfig, form: CacheFormat) -> None:
    """Raises UnsupportedError if a format of states is named and a model has none of ours."""
    mixers = [block.mixer for block in config.blocks]
    is_own = any(isinstance(mixer, OwnMixer) for mixer in mixers)
    has_states = any(mixer.cache.state for mixer in mixers)
    if form is CacheFormat.BF16_STATES and (is_own or not has_states):
        whose = "whose own layers say their states' dtype" if is_own else "none of whose layers has"
        raise UnsupportedError(
            f"a cache in {form.value} for a model {whose} a state; leave that format out"
        )


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
    spec, form = spec.repeated(execution.place.copies), execution.cache_format.of_entries
    cache = ContiguousCache.zeros(spec, **sizes, dtype=execution.policy.compute, form=form)
    stored = spec.stored_as(form).arrays
    dims = {each.name: (None, axes.BATCH, None, *each.dims) for each in stored}
    placed = {name: execution.place(x, dims[name]) for name, x in cache.arrays.items()}
    return dataclasses.replace(cache, arrays=placed)


def empty_state(
    spec: CacheSpec, execution: Execution, *, num_layers: int, num_slots: int
) -> dict[str, jax.Array]:
    """Makes a stack's states before the first token, zeros; empty for a mixer without a state."""
    cache = StateCache.zeros(
        spec.state,
        num_layers=num_layers,
        num_slots=num_slots,
        accum=execution.state_dtype,
        compute=execution.policy.compute,
    )
    return placed_state(cache.arrays, spec, execution.place)
