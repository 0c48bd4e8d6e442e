"""Pure functions that the engine compiles: prompt chunks, decoding, drafts and their checks.

Dims: B row, T new token, D model width, V vocabulary, M page of a row, S slot of a request,
W word of a mask, N page, L layers, P page of a pool.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped, UInt32

from jaxinfra import axes
from jaxinfra.config.model import MixerConfig, ModelConfig
from jaxinfra.model.adapters import with_chosen
from jaxinfra.model.cache import Cache, JointCache, PagedCache, StateCache, placed_state
from jaxinfra.model.decoder import Decoder, KVCache
from jaxinfra.model.empty_cache import empty_state
from jaxinfra.model.execution import Execution
from jaxinfra.model.passes import LayerOutput
from jaxinfra.model.recurrence import settled
from jaxinfra.ops.exact_rows import ordered_logsumexp
from jaxinfra.serving.engine.inputs import RowInputs
from jaxinfra.serving.sampling import (
    MOST_LOGPROBS,
    NO_TOKEN,
    LogProbabilities,
    SamplingNeeds,
    TokenHistory,
    log_probabilities,
    sample,
    sampling_key,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Structure:
    """Structure of a state. Two are equal only if they are one object, so comparing is cheap."""

    treedef: jax.tree_util.PyTreeDef
    names: tuple[str, ...]  # of the leaves in their order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedArrays:
    """Arrays of an ``nnx.State`` in a flat dict by path; calls with the state itself are slow."""

    arrays: dict[str, jax.Array]
    structure: _Structure = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def of(cls, state: nnx.State) -> "NamedArrays":
        """Flattens a state into a dict of its arrays by path."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves
        }
        assert len(arrays) == len(leaves), "paths differ"
        return cls(arrays=arrays, structure=_Structure(treedef, tuple(arrays)))

    @property
    def state(self) -> nnx.State:
        """The ``nnx.State`` rebuilt from these arrays."""
        leaves = [self.arrays[name] for name in self.structure.names]
        return jax.tree.unflatten(self.structure.treedef, leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Parameters of the served model, and of the draft model if there is one."""

    model: NamedArrays
    draft: NamedArrays | None

    def drafting(self, graphdef: nnx.GraphDef[Decoder]) -> Decoder:
        """Returns the draft model with its parameters."""
        assert self.draft is not None, "there is none"
        return nnx.merge(graphdef, self.draft.state)


WORD_BITS = 32
_GREEDY, _PLAIN = SamplingNeeds(), SamplingNeeds(noise=True)
_SCORED = dataclasses.replace(_PLAIN, logprobs=0)
_FULL = SamplingNeeds(noise=True, cuts=True, bias=True, penalties=True, logprobs=MOST_LOGPROBS)
_DRAFTED = dataclasses.replace(_FULL, penalties=False)

type Pools = tuple[dict[str, Shaped[Array, "_ _ _ ..."]], ...]
"""The pages of each distinct block, by the names of its mixer's ``CacheSpec``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramConfig:
    """Static inputs of the compiled programs besides shapes: model definitions and vocabulary."""

    graphdef: nnx.GraphDef[Decoder]
    num_ids: int  # ids from here on are never sampled
    draft: nnx.GraphDef[Decoder] | None = None  # a smaller model of the same vocabulary
    drafts_itself: bool = False  # the model's multi-token prediction drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """Arrays that stay on the device between steps: KV pages, last tokens, masks and token history.
    Each step donates them and returns new ones.
    """

    pools: Pools
    draft_pools: Pools  # of the draft model, or of multi-token prediction; empty without drafts
    # What multi-token prediction has computed last in each slot; None: it does not draft.
    hidden_SD: Float[Array, "S D"] | None
    states: Pools  # of each block whose mixer keeps a state, by slot; empty dicts for the others
    last_S: Int[Array, "S"]  # the last token sampled in each slot
    masks_SW: UInt32[Array, "S W"]  # which ids a request's structure allows next
    history: TokenHistory  # of each slot, as far as its request has penalties


def empty_pools(
    config: ModelConfig, execution: Execution, *, num_pages: int, page_size: int
) -> Pools:
    """Makes KV-cache pools of zeros in the execution's format, with heads sharded like the model's.
    Call it under jit.
    """
    pools = []
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        cache = PagedCache.zeros(
            block.mixer.cache.repeated(execution.place.copies),
            num_layers=repeats,
            num_pages=num_pages,
            page_size=page_size,
            tables_BM=jnp.zeros((1, 1), jnp.int32),
            dtype=execution.policy.compute,
            form=execution.cache_format.of_entries,
        )
        pools.append(_placed(cache.arrays, block.mixer, execution))
    return tuple(pools)


def empty_states(config: ModelConfig, execution: Execution, *, num_slots: int) -> Pools:
    """Makes the states before the first token in ``num_slots`` slots. Call it under jit."""
    return tuple(
        empty_state(block.mixer.cache, execution, num_layers=repeats, num_slots=num_slots)
        for block, repeats in zip(config.blocks, config.repeats, strict=True)
    )


def page_bytes(config: ModelConfig, execution: Execution, page_size: int) -> int:
    """Returns the bytes of one KV-cache page, over all layers and devices."""
    empty = functools.partial(empty_pools, config, execution, num_pages=1, page_size=page_size)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(empty)))


def step(
    weights: Weights,
    state: DeviceState,
    rows: RowInputs,
    *,
    config: ProgramConfig,
    is_fresh: bool,
    is_full: bool,
    is_scored: bool = False,
    is_greedy: bool = False,
) -> tuple[tuple[Int[Array, "B"], LogProbabilities | None], DeviceState]:
    """Runs the model on the rows' new tokens; returns a sampled token per row, and the new state.
    A token is -1 if its row's numbers are not finite, else undefined if the row does not sample.

    Args:
        is_fresh: every row starts at position 0, so its tokens attend only to each other.
        is_full: apply all sampling settings and return log-probabilities; else temperature only.
        is_scored: return log-probabilities of the tokens; is_greedy: no row has a temperature.
    """
    out, state = _taken_in(weights, state, rows, config=config, is_fresh=is_fresh)
    needs = _FULL if is_full else _SCORED if is_scored else _GREEDY if is_greedy else _PLAIN
    drawn, state = _drawn(weights, state, rows, out.x, config=config, needs=needs)
    if config.drafts_itself:
        model = _model(weights, rows, config)
        state = _looked_ahead(model, state, rows, out, drawn[0], is_fresh=is_fresh)
    return drawn, state


def score(
    weights: Weights,
    state: DeviceState,
    rows: RowInputs,
    targets_BT: Int[Array, "B T"],
    *,
    config: ProgramConfig,
) -> tuple[tuple[Int[Array, "B"], LogProbabilities | None, LogProbabilities], DeviceState]:
    """Runs ``step``, and also computes log-probabilities of each row's target tokens."""
    out, state = _taken_in(weights, state, rows, config=config, is_fresh=False)
    logits_BTV, total_BT1 = _logits(_model(weights, rows, config), out.x, config)
    of_prompt = log_probabilities(
        logits_BTV.reshape(-1, logits_BTV.shape[-1]),
        targets_BT.reshape(-1),
        num_top=MOST_LOGPROBS,
        total_B1=None if total_BT1 is None else total_BT1.reshape(-1, 1),
    )
    drawn, state = _drawn(weights, state, rows, out.x, config=config, needs=_FULL)
    if config.drafts_itself:
        state = _looked_ahead(_model(weights, rows, config), state, rows, out, drawn[0])
    return (*drawn, of_prompt), state


def _taken_in(
    weights: Weights,
    state: DeviceState,
    rows: RowInputs,
    *,
    config: ProgramConfig,
    is_fresh: bool,
) -> tuple[LayerOutput, DeviceState]:
    """Computes hidden states of the rows' tokens, and the state with their keys and values."""
    ids_BT = _known_ids(state, rows)
    positions_BT = rows.positions_BT
    model = _model(weights, rows, config)
    cache = _cache(_part(model), state.pools, rows, states=state.states, is_fresh=is_fresh)
    out = _run(model, cache, ids_BT, positions_BT, rows)
    pools, states = _stored(_part(model), out.cache)
    state = dataclasses.replace(state, pools=pools, states=states)
    if config.draft is not None:
        draft = weights.drafting(config.draft)
        cache = _cache(_part(draft), state.draft_pools, rows, is_fresh=is_fresh)
        cache = _run(draft, cache, ids_BT, positions_BT, rows).cache
        state = dataclasses.replace(state, draft_pools=_stored(_part(draft), cache)[0])
    return out, state


def _drawn(
    weights: Weights,
    state: DeviceState,
    rows: RowInputs,
    x_BTD: jax.Array,
    *,
    config: ProgramConfig,
    needs: SamplingNeeds,
) -> tuple[tuple[jax.Array, LogProbabilities | None], DeviceState]:
    """Samples the token after each row's last one; returns it, its score and the new state."""
    model = _model(weights, rows, config)
    # Only the last token's logits are needed: all of them would be T times as large.
    last_B11 = jnp.maximum(rows.field("count") - 1, 0)[:, None, None]
    logits_B1V, total_B11 = _logits(model, jnp.take_along_axis(x_BTD, last_B11, axis=1), config)
    allowed_BW = history = None
    if needs is _FULL:
        allowed_BW = _allowed(state, rows)
        history, state = _history(state, rows)
    drawn = sample(
        logits_B1V[:, 0],
        _keys(rows, offset=0),
        rows=rows.sampling,
        needs=needs,
        history=history,
        allowed_BW=allowed_BW,
        total_B1=None if total_B11 is None else total_B11[:, 0],
    )
    is_finite_B = drawn.is_finite_B
    if rows.length > 1:
        # A layer with a window may hide from the last token what is wrong with another.
        is_there_BT1 = (rows.positions_BT >= 0)[:, :, None]
        is_finite_B &= jnp.all(jnp.isfinite(x_BTD) | ~is_there_BT1, axis=(1, 2))
    tokens_B = jnp.where(is_finite_B, drawn.ids_B, NO_TOKEN)
    slots_B = jnp.where(rows.field("is_sampled") != 0, rows.field("slot"), state.last_S.shape[0])
    last_S = state.last_S.at[slots_B].set(jnp.maximum(tokens_B, 0), mode="drop")
    return (tokens_B, drawn.logprobs), dataclasses.replace(state, last_S=last_S)


def _history(state: DeviceState, rows: RowInputs) -> tuple[TokenHistory, DeviceState]:
    """Returns the rows' token history for penalties, and the state; both count the input tokens."""
    kept, num_slots = state.history, state.last_S.shape[0]
    counted_B = jnp.where(rows.field("is_counted") != 0, rows.field("slot"), num_slots)
    sampled_SV = kept.sampled_BV.at[counted_B, _known_ids(state, rows)[:, 0]].add(1, mode="drop")
    slots_B = jnp.minimum(rows.field("slot"), num_slots - 1)
    history = TokenHistory(sampled_BV=sampled_SV[slots_B], in_prompt_BV=kept.in_prompt_BV[slots_B])
    kept = dataclasses.replace(kept, sampled_BV=sampled_SV)
    return history, dataclasses.replace(state, history=kept)


def verify(
    weights: Weights, state: DeviceState, rows: RowInputs, *, config: ProgramConfig, is_full: bool
) -> tuple[tuple[Int[Array, "B _"], LogProbabilities | None], DeviceState]:
    """Checks draft tokens: runs a token and its drafts per row, and samples after each of them.

    A sample depends on the tokens before it, its request and its position. So samples up to the
    first that differs from its draft equal those of decoding one token at a time, in all settings.
    A draft model samples with the same noise, so that both agree as often as coupled samples can
    without knowing each other (Daliri et al. 2024, "Coupling without communication and
    drafter-invariant speculative decoding"). So does the model's multi-token prediction.

    Returns the number of accepted drafts and the sample after each token, int32 [B, 1 + T], with
    -1 in front for a row whose logits are not finite; and the scores of the samples, [B, T].

    Args:
        is_full: apply cuts and biases, and score; else temperature only.
    """
    model, needs = _model(weights, rows, config), _DRAFTED if is_full else _PLAIN
    ids_BT = _known_ids(state, rows)
    length = ids_BT.shape[1]
    if config.draft is not None:
        draft = weights.drafting(config.draft)
        draw = functools.partial(_draft_of, draft, rows, needs, config)
        ids_BT, state = _drafted(draft, state, ids_BT[:, 0], rows, length, draw)
    elif config.drafts_itself:
        draw = functools.partial(_draft_of, model, rows, needs, config)
        ids_BT, state = _drafted_itself(model, state, ids_BT[:, 0], rows, length, draw)
    positions_BT = rows.positions_BT
    cache = _cache(_part(model), state.pools, rows, states=state.states, is_tentative=True)
    out = _run(model, cache, ids_BT, positions_BT, rows)
    logits_BTV, total_BT1 = _logits(model, out.x, config)
    is_there_BT = positions_BT >= 0
    is_bad_B = ~jnp.all(jnp.isfinite(logits_BTV) | ~is_there_BT[:, :, None], axis=(1, 2))
    logits_BTV = jnp.where(is_there_BT[:, :, None], logits_BTV, 0.0)
    keys_TB = jax.vmap(lambda offset: _keys(rows, offset=offset))(jnp.arange(length))
    one = functools.partial(sample, rows=rows.sampling, needs=needs)
    each = jax.vmap(lambda x, keys, total: one(x, keys, total_B1=total), (1, 0, 1), out_axes=1)
    drawn = each(logits_BTV, keys_TB, total_BT1)
    tokens_BT = drawn.ids_B
    holds_BT = (ids_BT[:, 1:] == tokens_BT[:, :-1]) & is_there_BT[:, 1:]
    num_held_B = jnp.sum(jnp.cumprod(holds_BT.astype(jnp.int32), axis=1), axis=1)
    last_B = jnp.take_along_axis(tokens_BT, num_held_B[:, None], axis=1)[:, 0]
    slots_B = jnp.where(rows.field("is_sampled") != 0, rows.field("slot"), state.last_S.shape[0])
    settle = functools.partial(settled, execution=model.execution)
    pools, states = _stored(_part(model), settle(out.cache, 1 + num_held_B))
    last_S = state.last_S.at[slots_B].set(last_B, mode="drop")
    state = dataclasses.replace(state, pools=pools, states=states, last_S=last_S)
    if config.drafts_itself:
        state = _predicted(model, state, rows, out, tokens_BT, 1 + num_held_B)
    held_B1 = jnp.where(is_bad_B, -1, num_held_B)[:, None]
    return (jnp.concatenate([held_B1, tokens_BT], axis=1), drawn.logprobs), state


def set_masks(
    state: DeviceState, slots_N: Int[Array, "N"], masks_NW: UInt32[Array, "N W"]
) -> DeviceState:
    """Returns the state with these slots' token masks set; slots beyond the last are ignored."""
    return dataclasses.replace(
        state, masks_SW=state.masks_SW.at[slots_N].set(masks_NW, mode="drop")
    )


def begin_history(
    state: DeviceState,
    slot: Int[Array, ""],
    ids_T: Int[Array, "T"],
    num_prompt: Int[Array, ""],
    num_tokens: Int[Array, ""],
) -> DeviceState:
    """Returns the state whose history of a slot counts one request's prompt and sampled tokens."""
    history = state.history.begin(slot, ids_T, num_prompt=num_prompt, num_tokens=num_tokens)
    return dataclasses.replace(state, history=history)


def _model(weights: Weights, rows: RowInputs, config: ProgramConfig) -> Decoder:
    chosen_B = rows.field("adapter")
    return nnx.merge(config.graphdef, with_chosen(weights.model.state, chosen_B))


def _known_ids(state: DeviceState, rows: RowInputs) -> jax.Array:
    slots_B = jnp.minimum(rows.field("slot"), state.last_S.shape[0] - 1)
    return jnp.where(rows.ids_BT < 0, state.last_S[slots_B][:, None], rows.ids_BT)


type _Part = tuple[ModelConfig, Execution]
"""Config of a model, or of the layer of its multi-token prediction, and how it is executed."""


def _part(model: Decoder) -> _Part:
    return model.config, model.execution


def _cache(
    part: _Part,
    pools: Pools,
    rows: RowInputs,
    *,
    states: Pools | None = None,
    is_fresh: bool = False,
    is_tentative: bool = False,
) -> KVCache:
    """Returns the rows' cache of each block: pages, or states in slots.

    Args:
        is_tentative: states stay as they are until the number of tokens that count is known.
    """
    config, execution = part
    tables_BM, form = jnp.asarray(rows.tables_BM), execution.cache_format.of_entries
    caches: list[Cache] = []
    for number, (block, pool) in enumerate(zip(config.blocks, pools, strict=True)):
        spec = block.mixer.cache
        entries = PagedCache(arrays=pool, tables_BM=tables_BM, is_empty=is_fresh, format=form)
        if not spec.state:
            caches.append(entries)
            continue
        assert states is not None, "a draft model has none"
        arrays = states[number]
        num_slots = next(iter(arrays.values())).shape[1]
        # Padding reads the empty state, and writes nowhere.
        to_B = jnp.where(rows.field("count") > 0, rows.field("slot"), num_slots)
        from_B = rows.field("state")
        state = StateCache(arrays=arrays, from_B=from_B, to_B=to_B, is_tentative=is_tentative)
        caches.append(JointCache(entries=entries, state=state) if spec.arrays else state)
    return tuple(caches)


def _run(
    model: Decoder, cache: KVCache, ids_BT: jax.Array, positions_BT: jax.Array, rows: RowInputs
) -> LayerOutput:
    contexts_B = rows.field("context")
    return model.run(ids_BT, positions=positions_BT, cache=cache, contexts=contexts_B)


def _stored(part: _Part, cache: KVCache) -> tuple[Pools, Pools]:
    """Returns the pages and the states of each block, sharded as they are kept."""
    (config, execution), pools, states = part, [], []
    for each, block in zip(cache, config.blocks, strict=True):
        spec = block.mixer.cache
        entries, state = (
            each.parts(each.arrays)
            if isinstance(each, JointCache)
            else (({}, each.arrays) if isinstance(each, StateCache) else (each.arrays, {}))
        )
        pools.append(_placed(entries, block.mixer, execution))
        states.append(placed_state(state, spec, execution.place))
    return tuple(pools), tuple(states)


def _draft_of(
    model: Decoder,
    rows: RowInputs,
    needs: SamplingNeeds,
    config: ProgramConfig,
    x_B1D: jax.Array,
    offset: jax.Array | int,
) -> jax.Array:
    """Samples a draft from a hidden state of each row, with the noise of the token's own sample."""
    mtp = model.mtp
    logits_B1V = model.logits(x_B1D) if mtp is None else mtp.draft_logits(x_B1D, model.logits)
    logits_BV = model.execution.place(logits_B1V[:, 0, : config.num_ids], (axes.BATCH, None))
    # Drafts that are not finite are judged as any others.
    logits_BV = jnp.where(jnp.isfinite(logits_BV), logits_BV, 0.0)
    return sample(logits_BV, _keys(rows, offset=offset), rows=rows.sampling, needs=needs).ids_B


def _drafted(
    draft: Decoder,
    state: DeviceState,
    first_B: jax.Array,
    rows: RowInputs,
    length: int,
    draw: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, DeviceState]:
    """Returns each row's first token and the draft model's samples after it, int32 [B, T].

    It takes in the last one too, for its own cache.
    """

    def drawn(carry: tuple[jax.Array, Pools], offset: jax.Array):
        ids_B, pools = carry
        is_there_B = offset < rows.field("count")
        positions_B1 = jnp.where(is_there_B, rows.field("start") + offset, -1)[:, None]
        cache = _cache(_part(draft), pools, rows)
        out = _run(draft, cache, ids_B[:, None], positions_B1, rows)
        return (draw(out.x, offset), _stored(_part(draft), out.cache)[0]), ids_B

    start = first_B, state.draft_pools
    (_, pools), ids_TB = jax.lax.scan(drawn, start, jnp.arange(length))
    return ids_TB.T, dataclasses.replace(state, draft_pools=pools)


def _drafted_itself(
    model: Decoder,
    state: DeviceState,
    first_B: jax.Array,
    rows: RowInputs,
    length: int,
    draw: Callable[[jax.Array, int], jax.Array],
) -> tuple[jax.Array, DeviceState]:
    """Returns each row's first token and drafts of multi-token prediction after it, int32 [B, T].

    The module has seen the first token already; each further draft is of its own hidden state and
    the draft before.
    """
    assert state.hidden_SD is not None, "drafts_itself"
    slots_B = jnp.minimum(rows.field("slot"), len(state.hidden_SD) - 1)
    x_B1D, pools, ids = state.hidden_SD[slots_B][:, None], state.draft_pools, [first_B]
    for offset in range(length - 1):
        if offset:
            is_there_B = offset < rows.field("count")
            positions_B1 = jnp.where(is_there_B, rows.field("start") + offset - 1, -1)[:, None]
            x_B1D, pools = _ahead(model, pools, rows, x_B1D, ids[-1][:, None], positions_B1)
        ids.append(draw(x_B1D, offset))
    return jnp.stack(ids, axis=1), dataclasses.replace(state, draft_pools=pools)


def _looked_ahead(
    model: Decoder,
    state: DeviceState,
    rows: RowInputs,
    out: LayerOutput,
    drawn_B: jax.Array,
    *,
    is_fresh: bool = False,
) -> DeviceState:
    """Runs multi-token prediction on a step's tokens, whose last is followed by the sampled one.

    That is a guess where a prompt goes on, and drafts may be the worse for it.
    """
    ids_BT, count_B = jnp.asarray(rows.ids_BT), rows.field("count")
    next_BT = jnp.concatenate([ids_BT[:, 1:], drawn_B[:, None]], axis=1)
    is_last_BT = jnp.arange(ids_BT.shape[1])[None] == count_B[:, None] - 1
    next_BT = jnp.maximum(jnp.where(is_last_BT, drawn_B[:, None], next_BT), 0)
    return _predicted(model, state, rows, out, next_BT, count_B, is_fresh=is_fresh)


def _predicted(
    model: Decoder,
    state: DeviceState,
    rows: RowInputs,
    out: LayerOutput,
    next_BT: jax.Array,
    num_B: jax.Array,
    *,
    is_fresh: bool = False,
) -> DeviceState:
    """Runs multi-token prediction on the model's hidden states, and keeps what drafts begin with.

    Args:
        next_BT: the token after each.
        num_B: how many of a row's tokens are the request's.
    """
    assert state.hidden_SD is not None, "drafts_itself"
    assert model.mtp is not None, "drafts_itself"
    x_BTD = model.mtp.begun(out)
    is_kept_BT = jnp.arange(rows.length)[None] < num_B[:, None]
    positions_BT = jnp.where(is_kept_BT, rows.positions_BT, -1)
    pools, given = state.draft_pools, (x_BTD, next_BT, positions_BT)
    x_BTD, pools = _ahead(model, pools, rows, *given, is_fresh=is_fresh)
    last_B11 = jnp.maximum(num_B - 1, 0)[:, None, None]
    last_BD = jnp.take_along_axis(x_BTD, last_B11, axis=1)[:, 0]
    # What is not finite would outlive the request in the module's pages.
    last_BD = jnp.where(jnp.isfinite(last_BD), last_BD, 0.0)
    hidden_SD = state.hidden_SD.at[rows.field("slot")].set(last_BD, mode="drop")
    hidden_SD = model.execution.place(hidden_SD, (None, None))
    return dataclasses.replace(state, draft_pools=pools, hidden_SD=hidden_SD)


def _ahead(
    model: Decoder,
    pools: Pools,
    rows: RowInputs,
    x_BTD: jax.Array,
    next_BT: jax.Array,
    positions_BT: jax.Array,
    *,
    is_fresh: bool = False,
) -> tuple[jax.Array, Pools]:
    """Computes hidden states of multi-token prediction, and its pages with these positions."""
    part = model.config.mtp_part, model.execution
    cache = _cache(part, pools, rows, is_fresh=is_fresh)
    out = model.predict(
        x_BTD, next_BT, positions=positions_BT, cache=cache, contexts=rows.field("context")
    )
    return out.x, _stored(part, out.cache)[0]


def _logits(
    model: Decoder, x_BTD: jax.Array, config: ProgramConfig
) -> tuple[jax.Array, jax.Array | None]:
    """Logits of the ids that may be sampled and, for exact numerics, the logsumexp of all."""
    logits_BTV, total_BT1 = model.logits(x_BTD), None
    if model.execution.policy.is_exact:
        total_BT1 = ordered_logsumexp(logits_BTV)
    logits_BTV = logits_BTV[..., : config.num_ids]
    # Where devices have parts of the vocabulary: a draw is over all of it.
    return model.execution.place(logits_BTV, (axes.BATCH, None, None)), total_BT1


def _allowed(state: DeviceState, rows: RowInputs) -> jax.Array:
    """Returns mask words of the ids that each row's structure allows, [B, W]; else all ones."""
    slots_B = jnp.minimum(rows.field("slot"), state.masks_SW.shape[0] - 1)
    every = jnp.uint32(0xFFFFFFFF)
    return jnp.where(rows.field("is_masked")[:, None] != 0, state.masks_SW[slots_B], every)


def _keys(rows: RowInputs, *, offset: jax.Array | int) -> jax.Array:
    """Returns a PRNG key for each request, choice and position."""
    seeds_B = jax.lax.bitcast_convert_type(rows.field("seed"), jnp.uint32)
    positions_B = rows.field("key_position") + offset
    return jax.vmap(sampling_key)(seeds_B, rows.field("choice"), positions_B)


def _placed(
    arrays: dict[str, jax.Array], mixer: MixerConfig, execution: Execution
) -> dict[str, jax.Array]:
    stored = mixer.cache.stored_as(execution.cache_format).arrays
    dims = {each.name: (None, None, None, *each.dims) for each in stored}
    return {name: execution.place(x, dims[name]) for name, x in arrays.items()}
