"""Cached decoding computes what the uncached decoder does, at every position.

Dims: B batch, T position, S key position, D model width, N query heads, K kv heads, H head width,
F mlp width, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    MlpKind,
    ModelConfig,
    NormConfig,
    NormKind,
    NormPlacement,
    stacked,
)
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.rope import RopeConfig
from jaxinfra.layers.cache import PagedCache, kv_elements
from jaxinfra.layers.rope import rope_frequencies
from jaxinfra.models.decoder import Decoder
from jaxinfra.models.definition import define_model
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.sampling import GREEDY, SamplingRows
from jaxinfra.serving.steps import DecodeState, StepConfig, decode
from tests.tolerance import assert_no_worse

LENGTH = 24
PROMPTS = (1, 7, 13)  # tokens of each row before decoding starts
LAYER_NORM = NormConfig(kind=NormKind.LAYER, bias=True)


def attention(num_kv_heads: int = 2, **options) -> GroupedAttentionConfig:
    options = {"rope": RopeConfig(theta=100.0)} | options
    return GroupedAttentionConfig(num_q_heads=4, num_kv_heads=num_kv_heads, head_dim=8, **options)


def block(mixer: GroupedAttentionConfig, **options) -> BlockConfig:
    return BlockConfig(**({"mixer": mixer, "feed_forward": MlpConfig(hidden_dim=24)} | options))


def model(*attentions: GroupedAttentionConfig, blocks=None, **options) -> ModelConfig:
    pattern = [block(each, **(blocks or {})) for each in attentions]
    return ModelConfig(
        **{
            "vocab_size": 31,
            "model_dim": 16,
            "max_positions": 64,
            "stacks": stacked(*pattern, num_layers=2 * len(attentions)),
            "tie_embeddings": True,
        }
        | options,
    )


MODELS = {
    "mha": model(attention(num_kv_heads=4)),
    "gqa": model(attention(), tie_embeddings=False),
    "mqa": model(attention(num_kv_heads=1)),
    "window": model(attention(window=5)),
    "gemma": model(
        attention(window=6, logit_soft_cap=2.0, scale=0.2, qk_norm=NormConfig(scale_offset=1.0)),
        attention(num_kv_heads=1, logit_soft_cap=2.0),
        blocks={"norm_placement": NormPlacement.SANDWICH},
        logit_soft_cap=3.0,
        embedding_scale=4.0,
    ),
    "two_stacks": dataclasses.replace(
        model(attention(window=5)),
        stacks=(
            *stacked(block(attention()), num_layers=1),
            *stacked(block(attention(window=5)), block(attention(num_kv_heads=1)), num_layers=4),
        ),
    ),
    "learned_positions": model(
        attention(num_kv_heads=4, rope=None, qkv_bias=True, out_bias=True),
        blocks={
            "norm": LAYER_NORM,
            "feed_forward": MlpConfig(hidden_dim=24, kind=MlpKind.GELU_TANH, bias=True),
        },
        learned_positions=True,
        final_norm=LAYER_NORM,
    ),
}
CASES = [
    *((name, PolicyName.FP32) for name in MODELS),
    ("gqa", PolicyName.BF16),
    ("gemma", PolicyName.BF16),
]


def oracle(parameters, config: ModelConfig, ids_BT: np.ndarray) -> np.ndarray:
    """The decoder in float64 NumPy: logits [B, T, V]."""
    parameters = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
    table_VD = parameters["embedding"]["table"]
    x_BTD = table_VD[ids_BT] * config.embedding_scale
    if config.learned_positions:
        x_BTD = x_BTD + parameters["positions"]["table"][: ids_BT.shape[1]]
    for i, repetition in _layers(config):
        block = config.blocks[i]
        weights = jax.tree.map(lambda x, n=repetition: x[n], parameters["blocks"][i])
        branches = {"attention": (_attention, block.mixer), "mlp": (_mlp, block.feed_forward)}
        for name, (function, branch) in branches.items():
            y = _norm(x_BTD, weights[f"{name}_norm"], block.norm)
            y = function(y, weights[name], branch)
            if block.norm_placement is NormPlacement.SANDWICH:
                y = _norm(y, weights[f"{name}_post_norm"], block.norm)
            x_BTD = x_BTD + y
    x_BTD = _norm(x_BTD, parameters["final_norm"], config.final_norm)
    if not config.tie_embeddings:
        table_VD = parameters["unembedding"]["table"]
    return _cap(x_BTD @ table_VD.T, config.logit_soft_cap)


def _layers(config: ModelConfig):
    """The distinct block of each layer, and which of its repetitions it is."""
    first = 0
    for stack in config.stacks:
        for repetition in range(stack.repeats):
            for i in range(len(stack.pattern)):
                yield first + i, repetition
        first += len(stack.pattern)


def _norm(x, weights, config: NormConfig):
    if config.kind is NormKind.LAYER:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.epsilon)
    return x * (weights["scale"] + config.scale_offset) + weights.get("bias", 0.0)


def _cap(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def _project(spec, x, weights):
    return np.einsum(spec, x, weights["weight"]) + weights.get("bias", 0.0)


def _mlp(x, weights, config: MlpConfig):
    up = _project("BTD,DF->BTF", x, weights["up"])
    if config.kind is MlpKind.SWIGLU:
        gate = _project("BTD,DF->BTF", x, weights["gate"])
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return _project("BTF,FD->BTD", hidden, weights["down"])


def _attention(x, weights, config: GroupedAttentionConfig):
    q = _project("BTD,DNH->BTNH", x, weights["query"])
    k = _project("BTD,DKH->BTKH", x, weights["key"])
    v = _project("BTD,DKH->BTKH", x, weights["value"])
    if config.qk_norm is not None:
        q = _norm(q, weights["query_norm"], config.qk_norm)
        k = _norm(k, weights["key_norm"], config.qk_norm)
    position = np.arange(x.shape[1])
    if config.rope is not None:
        frequencies, factor = rope_frequencies(config.rope, head_dim=config.head_dim)
        turn = factor * np.exp(1j * position[:, None] * frequencies)[None, :, None, :]
        q, k = (_rotated(part, turn) for part in (q, k))
    k, v = (np.repeat(part, config.num_q_heads // config.num_kv_heads, axis=2) for part in (k, v))
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    scores = _cap(scale * np.einsum("BTNH,BSNH->BNTS", q, k), config.logit_soft_cap)
    age = position[:, None] - position[None, :]
    visible = (age >= 0) & (age < (config.window or len(position)))
    scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    return _project("BTNH,NHD->BTD", np.einsum("BNTS,BSNH->BTNH", scores, v), weights["out"])


def _rotated(x, turn):
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


@jax.jit
def uncached_logits(decoder: Decoder, ids_BT):
    return decoder(ids_BT)


@jax.jit
def prefill_logits(decoder: Decoder, ids_BT):
    batch, length = ids_BT.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    cache = decoder.empty_cache(batch=batch, num_slots=LENGTH)
    out = decoder.run(ids_BT, positions=positions, cache=cache)
    return decoder.logits(out.x), out.cache


@jax.jit
def chunk_logits(decoder: Decoder, ids_BT, positions_BT, cache):
    out = decoder.run(ids_BT, positions=positions_BT, cache=cache)
    return decoder.logits(out.x), out.cache


@jax.jit
def decode_logits(decoder: Decoder, ids_B1, positions_B1, cache):
    out = decoder.run(ids_B1, positions=positions_B1, cache=cache)
    return decoder.logits(out.x)[:, 0], out.cache


def make(name: str, policy: PolicyName = PolicyName.FP32):
    definition = define_model(MODELS[name], execution_on(policy=POLICIES[policy]))
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        # Large, so that attention is far from uniform, and biases and scales are noticed.
        mean = float(path[-1].key == "scale")
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape), leaf.dtype)

    parameters = jax.tree_util.tree_map_with_path(draw, definition.shapes)
    return parameters, definition.bind(parameters)


def continued(decoder, ids, logits, cache, starts):
    """Feeds row b its tokens from ``starts[b]`` on, one a step, filling in ``logits``."""
    rows = np.arange(len(ids))
    for step in range(LENGTH - min(starts)):
        # A row that is through repeats its last token, as in generation.
        positions = np.minimum(np.array(starts) + step, LENGTH - 1).astype(np.int32)
        new, cache = decode_logits(
            decoder, ids[rows, positions][:, None], positions[:, None], cache
        )
        logits[rows, positions] = np.asarray(new)
    return logits


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_cached_logits_agree_at_every_position(name, policy):
    parameters, decoder = make(name, policy)
    ids = np.random.default_rng(0).integers(0, 31, (len(PROMPTS), LENGTH)).astype(np.int32)
    plain = uncached_logits(decoder, ids)
    true = oracle(parameters, MODELS[name], ids)

    padded = np.full((len(PROMPTS), max(PROMPTS)), 30, np.int32)
    for row, length in enumerate(PROMPTS):
        padded[row, :length] = ids[row, :length]
    at_prefill, cache = prefill_logits(decoder, padded)
    logits = np.full(true.shape, np.nan, np.float32)
    for row, length in enumerate(PROMPTS):
        logits[row, :length] = np.asarray(at_prefill)[row, :length]
    logits = continued(decoder, ids, logits, cache, starts=PROMPTS)
    assert_no_worse(logits, plain=plain, oracle=true, what="prefill, then decoding")

    logits = np.full(true.shape, np.nan, np.float32)
    empty = decoder.empty_cache(batch=len(PROMPTS), num_slots=LENGTH)
    logits = continued(decoder, ids, logits, empty, starts=[0] * len(PROMPTS))
    assert_no_worse(logits, plain=plain, oracle=true, what="decoding alone")


def in_pages(decoder, rng, *, batch: int, page_size: int = 4):
    """An empty cache of the decoder whose rows have their pages in random order."""
    num_pages = LENGTH // page_size
    pool = 2 * batch * num_pages
    tables = rng.permutation(pool)[: batch * num_pages].reshape(batch, num_pages)
    config = decoder.config
    return tuple(
        PagedCache.zeros(
            block.mixer.cache,
            num_layers=repeats,
            num_pages=pool,
            page_size=page_size,
            tables_BM=jnp.asarray(tables, jnp.int32),
            dtype=decoder.execution.policy.compute,
        )
        for block, repeats in zip(config.blocks, config.repeats, strict=True)
    )


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_a_prompt_in_chunks_is_the_prompt_at_once(name, policy):
    parameters, decoder = make(name, policy)
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 31, (len(PROMPTS), LENGTH)).astype(np.int32)
    plain = uncached_logits(decoder, ids)
    true = oracle(parameters, MODELS[name], ids)
    contiguous = decoder.empty_cache(batch=len(PROMPTS), num_slots=LENGTH)
    results = []
    for cache in (contiguous, in_pages(decoder, rng, batch=len(PROMPTS))):
        logits = np.full(true.shape, np.nan, np.float32)
        done = np.zeros(len(PROMPTS), int)
        draws = np.random.default_rng(8)
        while (done < LENGTH).any():
            # Every row takes a chunk of its own size, some none, in a shape that all have.
            counts = np.minimum(draws.integers(0, 9, len(PROMPTS)), LENGTH - done)
            there = np.arange(8) < counts[:, None]
            positions = np.where(there, done[:, None] + np.arange(8), -1).astype(np.int32)
            chunk = np.where(there, np.take_along_axis(ids, positions, axis=1), 30)
            new, cache = chunk_logits(decoder, chunk, positions, cache)
            for row, count in enumerate(counts):
                logits[row, done[row] : done[row] + count] = np.asarray(new)[row, :count]
            done += counts
        assert_no_worse(logits, plain=plain, oracle=true, what="in chunks")
        results.append(logits)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["window", "gemma"])
def test_the_tolerance_notices_a_window_off_by_one(name):
    parameters, decoder = make(name)
    wider = dataclasses.replace(
        MODELS[name],
        stacks=stacked(
            *(
                dataclasses.replace(
                    block,
                    mixer=dataclasses.replace(
                        block.mixer, window=block.mixer.window and block.mixer.window + 1
                    ),
                )
                for block in MODELS[name].blocks
            ),
            num_layers=MODELS[name].num_layers,
        ),
    )
    ids = np.random.default_rng(0).integers(0, 31, (len(PROMPTS), LENGTH)).astype(np.int32)
    plain, true = uncached_logits(decoder, ids), oracle(parameters, wider, ids)
    with pytest.raises(AssertionError, match="error"):
        assert_no_worse(plain, plain=true.astype(np.float32), oracle=true)


@pytest.mark.parametrize(("name", "policy"), [("gqa", PolicyName.FP32), ("gemma", PolicyName.BF16)])
def test_cache_bytes(name, policy):
    _, decoder = make(name, policy)
    cache = decoder.empty_cache(batch=3, num_slots=40)
    itemsize = POLICIES[policy].compute.itemsize
    expected = 3 * kv_elements(MODELS[name], context=40) * itemsize
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == expected


def test_windows_bound_what_has_to_be_kept():
    config = MODELS["gemma"]  # two layers of each kind, one with a window of 6
    assert kv_elements(config, context=40) == 2 * (2 * 2 * 8 + 2 * 1 * 8) * 40
    kept = 2 * (2 * 2 * 8 * 6 + 2 * 1 * 8 * 40)
    assert kv_elements(config, context=40, keeps_windows_only=True) == kept


def test_decoding_keeps_one_cache():
    _, decoder = make("gqa")
    batch, num_slots = 2, 8192
    state = DecodeState(
        cache=decoder.empty_cache(batch=batch, num_slots=num_slots),
        positions_B=jnp.zeros(batch, jnp.int32),
        keys_B=jax.random.split(jax.random.key(0), batch),
        sampling=SamplingRows.of([GREEDY] * batch),
    )
    graphdef, weights = nnx.split(decoder)
    config = StepConfig(graphdef=graphdef, num_ids=31)
    compiled = decode.lower(weights, state, jnp.zeros(batch, jnp.int32), config=config).compile()
    cache_bytes = batch * kv_elements(MODELS["gqa"], context=num_slots) * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    # One layer's slice of two, and scores: a second cache would show.
    assert memory.temp_size_in_bytes < cache_bytes
