"""The pure steps of generation: rows take in a chunk of a prompt, or a token each.

Dims: B batch, T new token, D model width, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

from jaxinfra import axes
from jaxinfra.model.decoder import Decoder, KVCache
from jaxinfra.model.serving_form import COMPILER_OPTIONS
from jaxinfra.serving.sampling import SamplingNeeds, SamplingRows, sample
from jaxinfra.serving.token_history import TokenHistory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """What a step is compiled for, besides shapes."""

    graphdef: nnx.GraphDef[Decoder]
    num_ids: int  # ids from here on are never drawn
    needs: SamplingNeeds  # of all rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeState:
    """What a step consumes; donate it."""

    cache: KVCache
    positions_B: Int[Array, "B"]  # where each row's next token goes
    keys_B: Key[Array, "B"]  # one per row
    sampling: SamplingRows
    history: TokenHistory | None = None  # where penalties are needed


def empty_state(
    model: Decoder,
    *,
    num_slots: int,
    keys_B: Key[Array, "B"],
    sampling: SamplingRows,
    config: StepConfig,
) -> DecodeState:
    """Rows without a token yet.

    Args:
        num_slots: tokens that each row has room for.
    """
    batch, history = len(keys_B), None
    if config.needs.penalties:
        history = TokenHistory.empty(batch=batch, num_ids=config.num_ids)
    return DecodeState(
        cache=model.empty_cache(batch=batch, num_slots=num_slots),
        positions_B=jnp.zeros(batch, jnp.int32),
        keys_B=keys_B,
        sampling=sampling,
        history=history,
    )


@functools.partial(
    jax.jit, static_argnames=("config", "num_slots"), compiler_options=COMPILER_OPTIONS
)
def prefill(
    parameters: nnx.State,
    ids_BT: Int[Array, "B T"],
    lengths_B: Int[Array, "B"],
    keys_B: Key[Array, "B"],
    sampling: SamplingRows,
    *,
    config: StepConfig,
    num_slots: int,
) -> tuple[Int[Array, "B"], DecodeState]:
    """``extend`` of empty rows by whole prompts; no cache is read, or copied into the program.

    Args:
        num_slots: of the cache; at least T.
    """
    model = nnx.merge(config.graphdef, parameters)
    state = empty_state(model, num_slots=num_slots, keys_B=keys_B, sampling=sampling, config=config)
    state = _prompted(state, ids_BT, lengths_B)
    return _extend(model, state, ids_BT, lengths_B, lengths_B, config)


@functools.partial(
    jax.jit,
    static_argnames=("config",),
    donate_argnames=("state",),
    compiler_options=COMPILER_OPTIONS,
)
def extend(
    parameters: nnx.State,
    state: DecodeState,
    ids_BT: Int[Array, "B T"],
    counts_B: Int[Array, "B"],
    contexts_B: Int[Array, "B"],
    *,
    config: StepConfig,
) -> tuple[Int[Array, "B"], DecodeState]:
    """Appends a chunk of tokens to every row; returns the token after each, int32 [B]; ``NO_TOKEN``
    where its logits are not finite.

    What is drawn after a chunk that does not end its prompt means nothing.

    Args:
        ids_BT: new tokens, padded on the right with any id: padding is not cached, and nobody
            sees it.
        counts_B: of the new tokens without padding; a row of 0 stays as it is.
        contexts_B: tokens that each row's prompt has in all, by which LongRoPE chooses its angles.
    """
    model = nnx.merge(config.graphdef, parameters)
    return _extend(model, _prompted(state, ids_BT, counts_B), ids_BT, counts_B, contexts_B, config)


def decode_rows(
    parameters: nnx.State, state: DecodeState, tokens_B: Int[Array, "B"], *, config: StepConfig
) -> tuple[Int[Array, "B"], DecodeState]:
    """Appends one token to every row; returns the next one, int32 [B], and the new state;
    ``NO_TOKEN`` where a row's logits are not finite. ``decode`` is it compiled.

    Rows that are through go on, at no extra cost and to no effect: one that is full stays so.
    """
    model = nnx.merge(config.graphdef, parameters)
    counts_B = (state.positions_B < state.cache[0].num_slots).astype(jnp.int32)
    contexts_B = state.positions_B + counts_B
    if state.history is not None:
        state = dataclasses.replace(state, history=state.history.after(tokens_B, counts_B > 0))
    return _extend(model, state, tokens_B[:, None], counts_B, contexts_B, config)


decode = jax.jit(
    decode_rows,
    static_argnames=("config",),
    donate_argnames=("state",),
    compiler_options=COMPILER_OPTIONS,
)


def _prompted(state: DecodeState, ids_BT: jax.Array, counts_B: jax.Array) -> DecodeState:
    if state.history is None:
        return state
    return dataclasses.replace(state, history=state.history.prompted(ids_BT, counts_B))


def _extend(
    model: Decoder,
    state: DecodeState,
    ids_BT: Int[Array, "B T"],
    counts_B: Int[Array, "B"],
    contexts_B: Int[Array, "B"],
    config: StepConfig,
) -> tuple[Int[Array, "B"], DecodeState]:
    offsets_T = jnp.arange(ids_BT.shape[1])
    positions_BT = state.positions_B[:, None] + offsets_T[None]
    positions_BT = jnp.where(offsets_T[None] < counts_B[:, None], positions_BT, -1)
    out = model.run(ids_BT, positions=positions_BT, cache=state.cache, contexts=contexts_B)
    state = dataclasses.replace(state, cache=out.cache, positions_B=state.positions_B + counts_B)
    # Only the last token's logits are needed: all of them would be T times as large.
    last_B1D = jnp.take_along_axis(out.x, jnp.maximum(counts_B - 1, 0)[:, None, None], axis=1)
    logits_BV = model.logits(last_B1D)[:, 0, : config.num_ids]
    # Where devices have parts of the vocabulary: a draw is over all of it.
    logits_BV = model.execution.place(logits_BV, (axes.BATCH, None))
    # A key for every row and position: what a row draws does not depend on the rest of the batch.
    keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, state.positions_B)
    drawn = sample(
        logits_BV, keys_B, rows=state.sampling, needs=config.needs, history=state.history
    )
    return drawn.ids_B, state
