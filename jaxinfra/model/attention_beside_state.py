"""Attention and a state space side by side, as one mixer: Falcon-H1.

Dims: B batch, T position, D model width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra.config.model import AttentionBesideStateConfig
from jaxinfra.model.cache import JointCache
from jaxinfra.model.execution import Execution
from jaxinfra.model.grouped_attention import GroupedAttention
from jaxinfra.model.passes import Abilities, LayerOutput, Pass
from jaxinfra.model.state_space import StateSpace


class AttentionBesideState(nnx.Module):
    """Sum of an attention's and a state space's output for the same input, each scaled."""

    abilities = Abilities()

    def __init__(self, config: AttentionBesideStateConfig, *, execution: Execution, **sizes: Any):
        self.config = config
        self.attention = GroupedAttention(config.attention, execution=execution, **sizes)
        self.state_space = StateSpace(config.state_space, execution=execution, **sizes)

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Computes outputs [B, T, D] in the compute dtype, and the cache of both after them."""
        config, cache = self.config, given.cache
        assert cache is None or isinstance(cache, JointCache), "CacheSpec"
        entries, state = (None, None) if cache is None else (cache.entries, cache.state)
        with jax.named_scope("state_space"):
            scanned = self.state_space(
                _scaled(x_BTD, config.state_in_scale), dataclasses.replace(given, cache=state)
            )
        attended = self.attention(
            _scaled(x_BTD, config.attention_in_scale), dataclasses.replace(given, cache=entries)
        )
        out_BTD = _scaled(attended.x, config.attention_out_scale)
        out_BTD = out_BTD + _scaled(scanned.x, config.state_out_scale)
        if cache is not None:
            cache = JointCache(entries=attended.cache, state=scanned.cache)
        return LayerOutput(x=out_BTD, cache=cache)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)
