"""The pure steps of generation: prefill a batch of prompts, then decode a token a row at a time.

Dims: B batch, T prompt position, S cache slot, D model width, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfra.config.model import ModelConfig
from jaxinfra.models.decoder import Decoder, KVCache
from jaxinfra.serving.sampling import SamplingRows, sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """What a step is compiled for, besides shapes."""

    graphdef: nnx.GraphDef[Decoder]
    num_ids: int  # ids from here on are never drawn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeState:
    """What a decode step consumes; donate it."""

    cache: KVCache
    positions_B: jax.Array  # int32, where each row's next token goes
    keys_B: jax.Array  # typed PRNG keys, one per row
    sampling: SamplingRows


@functools.partial(jax.jit, static_argnames=("config", "num_slots"))
def prefill(
    parameters: nnx.State,
    ids_BT: jax.Array,
    lengths_B: jax.Array,
    keys_B: jax.Array,
    sampling: SamplingRows,
    *,
    config: StepConfig,
    num_slots: int,
) -> tuple[jax.Array, DecodeState]:
    """Runs all prompts at once; returns the token after each, int32 [B], and the filled cache.

    Args:
        ids_BT: prompts, padded on the right with any id: causality hides the padding from every
            token before it, and decoding overwrites its slots before it sees them.
        lengths_B: of the prompts without padding.
        keys_B, sampling: one per row.
        num_slots: of the cache; at least T.
    """
    model = nnx.merge(config.graphdef, parameters)
    batch, length = ids_BT.shape
    hidden_BTD, cache = model.cached(
        ids_BT,
        positions=jnp.broadcast_to(jnp.arange(length)[None], (batch, length)),
        cache=model.empty_cache(batch=batch, num_slots=num_slots),
        prefill=True,
    )
    # Only the last token's logits are needed: all of them would be T times as large.
    last_B1D = jnp.take_along_axis(hidden_BTD, (lengths_B - 1)[:, None, None], axis=1)
    state = DecodeState(cache=cache, positions_B=lengths_B, keys_B=keys_B, sampling=sampling)
    return _next_tokens(model, last_B1D, state, config), state


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def decode(
    parameters: nnx.State, state: DecodeState, tokens_B: jax.Array, *, config: StepConfig
) -> tuple[jax.Array, DecodeState]:
    """Appends one token to every row; returns the next one, int32 [B], and the new state.

    Rows that are through go on, at no extra cost and to no effect: the position of a full row
    stays at the last slot.
    """
    model = nnx.merge(config.graphdef, parameters)
    num_slots = state.cache[0].k_BSKH.shape[2]
    hidden_B1D, cache = model.cached(
        tokens_B[:, None],
        positions=jnp.minimum(state.positions_B, num_slots - 1)[:, None],
        cache=state.cache,
        prefill=False,
    )
    state = dataclasses.replace(state, cache=cache, positions_B=state.positions_B + 1)
    return _next_tokens(model, hidden_B1D, state, config), state


def _next_tokens(
    model: Decoder, hidden_B1D: jax.Array, state: DecodeState, config: StepConfig
) -> jax.Array:
    logits_BV = model.logits(hidden_B1D)[:, 0, : config.num_ids]
    # A key for every row and position: what a row draws does not depend on the rest of the batch.
    keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, state.positions_B)
    return sample(logits_BV, keys_B, rows=state.sampling)


def kv_cache_bytes(config: ModelConfig, *, batch: int, num_slots: int, itemsize: int) -> int:
    """Size of the key/value cache: 2 * batch * slots * layers * kv_heads * head_dim * itemsize.

    Args:
        itemsize: bytes of the compute dtype.
    """
    elements = sum(block.mixer.cache.elements for block in config.layers)
    return batch * num_slots * elements * itemsize
