"""The pure functions that the engine compiles: chunks of prompts, a token each, drafts to judge.

Dims: B row, T new token, D model width, V vocabulary, M page of a row, S slot of a request,
W word of a mask, N page.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jaxinfra.config.model import MixerConfig, ModelConfig
from jaxinfra.core import axes
from jaxinfra.layers.cache import PagedCache
from jaxinfra.layers.execution import Execution
from jaxinfra.models.decoder import Decoder
from jaxinfra.serving.sampling import SamplingRows, sample

WORD_BITS = 32
MOST_SCORES = 20
"""Most likely tokens that can be told at each place, as OpenAI's API bounds them."""

type Pools = tuple[dict[str, Shaped[Array, "_ _ _ ..."]], ...]
"""The pages of each distinct block, by the names of its mixer's ``CacheSpec``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramConfig:
    """What programs are compiled for, besides shapes."""

    graphdef: nnx.GraphDef[Decoder]
    num_ids: int  # ids from here on are never drawn
    draft: nnx.GraphDef[Decoder] | None = None  # a smaller model of the same vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Parameters of the model, and of the one that drafts."""

    model: nnx.State
    draft: nnx.State | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """What stays on the device between steps; a step consumes it."""

    pools: Pools
    draft_pools: Pools  # empty without a draft model
    last_S: Int[Array, "S"]  # the token that each request drew last
    masks_SW: UInt32[Array, "S W"]  # which ids a request's structure allows next


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """What the host says of the rows of a call. A row without tokens is padding."""

    ids_BT: np.ndarray  # int32; below 0: what the device drew last for the row's slot
    slots_B: np.ndarray  # int32; beyond the last slot: padding
    starts_B: np.ndarray  # int32, position of the first token
    counts_B: np.ndarray  # int32
    contexts_B: np.ndarray  # int32, tokens that the row has come to
    tables_BM: np.ndarray  # int32, its pages; 0 where it has none
    seeds_B: np.ndarray  # uint32
    choices_B: np.ndarray  # int32
    key_positions_B: np.ndarray  # int32, tokens before the first draw: tells a request's apart
    draws_B: np.ndarray  # bool: the draw counts
    is_masked_B: np.ndarray  # bool: the slot's mask holds
    sampling: SamplingRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Log-probabilities, fp32, by the model alone: before temperature, cuts and masks."""

    given_N: jax.Array  # of the tokens at hand
    top_NK: jax.Array  # of the most likely ones
    ids_NK: jax.Array  # which these are, int32


def empty_pools(
    config: ModelConfig, execution: Execution, *, num_pages: int, page_size: int
) -> Pools:
    """Pools of zeros in the compute dtype, heads placed as the model's; under jit."""
    pools = []
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        cache = PagedCache.zeros(
            block.mixer.cache.repeated(execution.place.copies),
            num_layers=repeats,
            num_pages=num_pages,
            page_size=page_size,
            tables_BM=jnp.zeros((1, 1), jnp.int32),
            dtype=execution.policy.compute,
        )
        pools.append(_placed(cache.arrays, block.mixer, execution))
    return tuple(pools)


def step(
    weights: Weights,
    state: DeviceState,
    rows: RowInputs,
    *,
    config: ProgramConfig,
    is_fresh: bool,
    is_scored: bool,
) -> tuple[tuple[Int[Array, "B"], Scores | None], DeviceState]:
    """Rows take in their tokens; the token after each row's last one, int32 [B], and its score.

    It is -1 where the row's logits are not finite, and means nothing where the row does not draw.

    Args:
        is_fresh: every row begins at position 0, so that its tokens see each other only.
        is_scored: whether scores are told.
    """
    x_BTD, state = _taken_in(weights, state, rows, config=config, is_fresh=is_fresh)
    return _drawn(weights, state, rows, x_BTD, config=config, is_scored=is_scored)


def score(
    weights: Weights,
    state: DeviceState,
    rows: RowInputs,
    targets_BT: Int[Array, "B T"],
    *,
    config: ProgramConfig,
) -> tuple[tuple[Int[Array, "B"], Scores | None, Scores], DeviceState]:
    """``step`` with scores, and those of the tokens that follow each of the rows' tokens."""
    x_BTD, state = _taken_in(weights, state, rows, config=config, is_fresh=False)
    logits_BTV = _logits(nnx.merge(config.graphdef, weights.model), x_BTD, config)
    of_prompt = scored(logits_BTV.reshape(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1))
    drawn, state = _drawn(weights, state, rows, x_BTD, config=config, is_scored=True)
    return (*drawn, of_prompt), state


def scored(logits_NV: Float[Array, "N V"], ids_N: Int[Array, "N"]) -> Scores:
    """How likely the model alone says these tokens are, and which are the most likely."""
    total_N1 = jax.nn.logsumexp(logits_NV, axis=-1, keepdims=True)
    top_NK, ids_NK = jax.lax.top_k(logits_NV, min(MOST_SCORES, logits_NV.shape[1]))
    given_N1 = jnp.take_along_axis(logits_NV, ids_N[:, None], axis=1)
    return Scores(given_N=(given_N1 - total_N1)[:, 0], top_NK=top_NK - total_N1, ids_NK=ids_NK)


def _taken_in(
    weights: Weights,
    state: DeviceState,
    rows: RowInputs,
    *,
    config: ProgramConfig,
    is_fresh: bool,
) -> tuple[jax.Array, DeviceState]:
    """Hidden states of the rows' tokens, [B, T, D], and the state with their keys and values."""
    ids_BT = _known_ids(state, rows)
    positions_BT = _positions(rows, ids_BT.shape[1])
    model = nnx.merge(config.graphdef, weights.model)
    x_BTD, pools = _run(model, state.pools, ids_BT, positions_BT, rows, is_fresh=is_fresh)
    state = dataclasses.replace(state, pools=pools)
    if config.draft is not None:
        draft = nnx.merge(config.draft, weights.draft)
        drafts = state.draft_pools
        _, drafts = _run(draft, drafts, ids_BT, positions_BT, rows, is_fresh=is_fresh)
        state = dataclasses.replace(state, draft_pools=drafts)
    return x_BTD, state


def _drawn(
    weights: Weights,
    state: DeviceState,
    rows: RowInputs,
    x_BTD: jax.Array,
    *,
    config: ProgramConfig,
    is_scored: bool,
) -> tuple[tuple[jax.Array, Scores | None], DeviceState]:
    """The token after each row's last one, its score, and the state that knows it."""
    model = nnx.merge(config.graphdef, weights.model)
    # Only the last token's logits are needed: all of them would be T times as large.
    last_B11 = jnp.maximum(rows.counts_B - 1, 0)[:, None, None]
    logits_BV = _logits(model, jnp.take_along_axis(x_BTD, last_B11, axis=1), config)[:, 0]
    keys_B = _keys(rows, offset=0)
    is_bad_B = ~jnp.all(jnp.isfinite(logits_BV), axis=-1)
    allowed_BV = _allowed(logits_BV, state, rows)
    tokens_B = sample(allowed_BV, keys_B, rows=rows.sampling).ids_B
    tokens_B = jnp.where(is_bad_B, -1, tokens_B)
    slots_B = jnp.where(rows.draws_B, rows.slots_B, state.last_S.shape[0])
    last_S = state.last_S.at[slots_B].set(jnp.maximum(tokens_B, 0), mode="drop")
    scores = scored(logits_BV, jnp.maximum(tokens_B, 0)) if is_scored else None
    return (tokens_B, scores), dataclasses.replace(state, last_S=last_S)


def verify(
    weights: Weights, state: DeviceState, rows: RowInputs, *, config: ProgramConfig
) -> tuple[Int[Array, "B _"], DeviceState]:
    """Rows take in a token and drafts after it, and draw after each of them.

    A draw depends on the tokens before it, on its request and on its position: so the draws up to
    and with the first that is not the draft at its place are those that would have come one at a
    time, whatever the settings. Drafts of a model are drawn with the same noise, which makes them
    agree as often as coupled draws can without knowing each other (Daliri et al. 2024, "Coupling
    without communication and drafter-invariant speculative decoding").

    Returns how many drafts hold, and what was drawn after each token, int32 [B, 1 + T]; a row
    whose logits are not finite has -1 in front.
    """
    model = nnx.merge(config.graphdef, weights.model)
    ids_BT = _known_ids(state, rows)
    length = ids_BT.shape[1]
    draft_pools = state.draft_pools
    if config.draft is not None:
        draft = nnx.merge(config.draft, weights.draft)
        ids_BT, draft_pools = _drafted(draft, draft_pools, ids_BT[:, 0], rows, length, config)
    positions_BT = _positions(rows, length)
    x_BTD, pools = _run(model, state.pools, ids_BT, positions_BT, rows, is_fresh=False)
    logits_BTV = _logits(model, x_BTD, config)
    is_there_BT = positions_BT >= 0
    is_bad_B = ~jnp.all(jnp.isfinite(logits_BTV) | ~is_there_BT[:, :, None], axis=(1, 2))
    logits_BTV = jnp.where(is_there_BT[:, :, None], logits_BTV, 0.0)
    keys_TB = jax.vmap(lambda offset: _keys(rows, offset=offset))(jnp.arange(length))
    tokens_TB = jax.vmap(lambda logits, keys: sample(logits, keys, rows=rows.sampling).ids_B)(
        jnp.moveaxis(logits_BTV, 1, 0), keys_TB
    )
    tokens_BT = tokens_TB.T
    holds_BT = (ids_BT[:, 1:] == tokens_BT[:, :-1]) & is_there_BT[:, 1:]
    num_held_B = jnp.sum(jnp.cumprod(holds_BT.astype(jnp.int32), axis=1), axis=1)
    last_B = jnp.take_along_axis(tokens_BT, num_held_B[:, None], axis=1)[:, 0]
    slots_B = jnp.where(rows.draws_B, rows.slots_B, state.last_S.shape[0])
    state = dataclasses.replace(
        state,
        pools=pools,
        draft_pools=draft_pools,
        last_S=state.last_S.at[slots_B].set(last_B, mode="drop"),
    )
    held_B1 = jnp.where(is_bad_B, -1, num_held_B)[:, None]
    return jnp.concatenate([held_B1, tokens_BT], axis=1), state


def copy_pages(state: DeviceState, from_N: Int[Array, "N"], to_N: Int[Array, "N"]) -> DeviceState:
    """The state with pages copied, all of them read first; one beyond the last is nobody's."""

    def copied(stored: jax.Array) -> jax.Array:
        read = jnp.minimum(from_N, stored.shape[1] - 1)
        return stored.at[:, to_N].set(stored[:, read], mode="drop")

    return dataclasses.replace(
        state,
        pools=jax.tree.map(copied, state.pools),
        draft_pools=jax.tree.map(copied, state.draft_pools),
    )


def set_masks(
    state: DeviceState, slots_N: Int[Array, "N"], masks_NW: UInt32[Array, "N W"]
) -> DeviceState:
    """The state with masks of these slots; one beyond the last is nobody's."""
    return dataclasses.replace(
        state, masks_SW=state.masks_SW.at[slots_N].set(masks_NW, mode="drop")
    )


def _known_ids(state: DeviceState, rows: RowInputs) -> jax.Array:
    slots_B = jnp.minimum(rows.slots_B, state.last_S.shape[0] - 1)
    return jnp.where(rows.ids_BT < 0, state.last_S[slots_B][:, None], rows.ids_BT)


def _positions(rows: RowInputs, length: int) -> jax.Array:
    offsets_1T = jnp.arange(length)[None]
    positions_BT = rows.starts_B[:, None] + offsets_1T
    return jnp.where(offsets_1T < rows.counts_B[:, None], positions_BT, -1)


def _run(
    model: Decoder,
    pools: Pools,
    ids_BT: jax.Array,
    positions_BT: jax.Array,
    rows: RowInputs,
    *,
    is_fresh: bool,
) -> tuple[jax.Array, Pools]:
    tables_BM = jnp.asarray(rows.tables_BM)
    cache = tuple(PagedCache(arrays=pool, tables_BM=tables_BM, is_empty=is_fresh) for pool in pools)
    contexts_B = jnp.asarray(rows.contexts_B)
    out = model.run(ids_BT, positions=positions_BT, cache=cache, contexts=contexts_B)
    stored = tuple(
        _placed(each.arrays, block.mixer, model.execution)
        for each, block in zip(out.cache, model.config.blocks, strict=True)
    )
    return out.x, stored


def _drafted(
    draft: Decoder,
    pools: Pools,
    first_B: jax.Array,
    rows: RowInputs,
    length: int,
    config: ProgramConfig,
) -> tuple[jax.Array, Pools]:
    """The first token and what the draft model draws after it, int32 [B, T].

    It takes in the last one too, for its own cache.
    """

    def draw(carry: tuple[jax.Array, Pools], offset: jax.Array):
        ids_B, pools = carry
        is_there_B = offset < rows.counts_B
        positions_B1 = jnp.where(is_there_B, rows.starts_B + offset, -1)[:, None]
        x_B1D, pools = _run(draft, pools, ids_B[:, None], positions_B1, rows, is_fresh=False)
        logits_BV = _logits(draft, x_B1D, config)[:, 0]
        # Drafts that are not finite are judged as any others.
        logits_BV = jnp.where(jnp.isfinite(logits_BV), logits_BV, 0.0)
        keys_B = _keys(rows, offset=offset)
        return (sample(logits_BV, keys_B, rows=rows.sampling).ids_B, pools), ids_B

    (_, pools), ids_TB = jax.lax.scan(draw, (first_B, pools), jnp.arange(length))
    return ids_TB.T, pools


def _logits(model: Decoder, x_BTD: jax.Array, config: ProgramConfig) -> jax.Array:
    logits_BTV = model.logits(x_BTD)[..., : config.num_ids]
    # Where devices have parts of the vocabulary: a draw is over all of it.
    return model.execution.place(logits_BTV, (axes.BATCH, None, None))


def _allowed(logits_BV: jax.Array, state: DeviceState, rows: RowInputs) -> jax.Array:
    """The logits where a row's structure allows the id, -inf elsewhere."""

    def masked() -> jax.Array:
        slots_B = jnp.minimum(rows.slots_B, state.masks_SW.shape[0] - 1)
        words_BW = state.masks_SW[slots_B]
        bits_W = jnp.arange(WORD_BITS, dtype=jnp.uint32)[None, None]
        bits_BWb: Bool[Array, "B W b"] = (words_BW[:, :, None] >> bits_W) & jnp.uint32(1) > 0
        allowed_BV = bits_BWb.reshape(len(slots_B), -1)[:, : logits_BV.shape[1]]
        is_free_B1 = ~rows.is_masked_B[:, None]
        return jnp.where(allowed_BV | is_free_B1, logits_BV, -jnp.inf)

    return jax.lax.cond(jnp.any(rows.is_masked_B), masked, lambda: logits_BV)


def _keys(rows: RowInputs, *, offset: jax.Array | int) -> jax.Array:
    """A key for every request, choice and position."""

    def key(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)

    positions_B = jnp.asarray(rows.key_positions_B) + offset
    return jax.vmap(key)(jnp.asarray(rows.seeds_B), jnp.asarray(rows.choices_B), positions_B)


def _placed(
    arrays: dict[str, jax.Array], mixer: MixerConfig, execution: Execution
) -> dict[str, jax.Array]:
    dims = {each.name: (None, None, None, *each.dims) for each in mixer.cache.arrays}
    return {name: execution.place(x, dims[name]) for name, x in arrays.items()}
